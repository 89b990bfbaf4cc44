# SPDX-License-Identifier: Apache-2.0
"""The built-in switch's server beyond the protocol: who may connect, and its effect on packets."""

import gc
import json
import shutil
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from finsy.proto import p4r, rpc_code

from dlcp import cli
from dlcp.commands import switch as switch_command
from dlcp.inputs.addresses import parse_address
from dlcp.switch import LoopbackHost
from dlcp.switch.p4runtime import device as device_module
from dlcp.switch.p4runtime.device import P4RuntimeDevice, SetAction
from dlcp.switch.p4runtime.entities import Refused
from dlcp.switch.p4runtime.service import P4RuntimeServer
from dlcp.wire import UDP_PORT_BASE
from tests.p4runtime.control import DELETE, INSERT, Code, Control, config
from tests.p4runtime.loops import DeadLoop, Loop
from tests.p4runtime.targets import DEVICE_ID, BuiltIn
from tests.waiting import until


def test_packets_wait_for_slices_only():
    loop = Loop()
    device = P4RuntimeDevice(loop)
    device.set_pipeline(SetAction.VERIFY_AND_COMMIT, config())
    assert loop.programs == [device.program]
    before = loop.calls
    errors = device.write([p4r.Update(type=INSERT, entity=p4r.Entity(table_entry=p4r.TableEntry()))] * 5_000)
    assert len(errors) == 5_000
    assert all(error.canonical_code == Code.INVALID_ARGUMENT.value[0] for error in errors)
    assert loop.calls - before > 3


def test_a_packet_loop_that_does_not_run(monkeypatch):
    monkeypatch.setattr(device_module, "LOOP_DEADLINE_S", 0.05)
    device = P4RuntimeDevice(DeadLoop())
    with pytest.raises(Refused, match="is the switch running") as caught:
        device.set_pipeline(SetAction.VERIFY_AND_COMMIT, config())
    assert caught.value.code == rpc_code.DEADLINE_EXCEEDED
    assert device.program is None
    with pytest.raises(Refused):
        device.get_pipeline(0)


def test_closing_ends_the_wait():
    loop = DeadLoop()
    device = P4RuntimeDevice(loop)
    caught = []

    def wait():
        try:
            device.set_pipeline(SetAction.VERIFY_AND_COMMIT, config())
        except Refused as refusal:
            caught.append(refusal.code)

    thread = threading.Thread(target=wait)
    thread.start()
    while not loop.calls:
        thread.join(0.01)
    device.close()
    thread.join(2)
    assert caught == [rpc_code.UNAVAILABLE]


def test_a_call_that_nobody_waits_for_ends_without_a_word(caplog):
    """The controller has gone away, and the switch is stopped before it got to the call."""
    loop = DeadLoop()
    with (
        P4RuntimeServer(P4RuntimeDevice(loop), ("127.0.0.1", 0), DEVICE_ID) as server,
        Control(server.address) as control,
    ):
        control.arbitrate(1)
        request = control.signed(SetAction(action=SetAction.VERIFY_AND_COMMIT, config=config()))
        call = control.stub.SetForwardingPipelineConfig.future(request, timeout=20)
        until(lambda: loop.calls)
        call.cancel()
        gone = p4r.GetForwardingPipelineConfigRequest(device_id=DEVICE_ID + 1)
        with pytest.raises(grpc.RpcError):  # an answer says that the server has heard of the cancellation before
            control.stub.GetForwardingPipelineConfig(gone, timeout=20)
    gc.collect()
    assert caplog.records == []


def test_an_address_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot listen on"):
            P4RuntimeServer(P4RuntimeDevice(Loop()), taken.getsockname())


def test_a_server_is_closed_while_its_thread_ends():
    with P4RuntimeServer(P4RuntimeDevice(Loop()), ("127.0.0.1", 0)) as server:
        loop = server._loop

        def linger(close=loop.close):
            close()
            time.sleep(0.3)  # holds the moment open that is tested

        loop.close = linger  # the thread is alive, and its loop is closed
        threading.Timer(0.1, loop.call_soon_threadsafe, [server._stop.set]).start()
        until(loop.is_closed)
        assert server._thread.is_alive()
    assert not server._thread.is_alive()


def test_a_server_takes_a_free_port_and_gives_it_back():
    with P4RuntimeServer(P4RuntimeDevice(Loop()), ("127.0.0.1", 0)) as server, Control(server.address) as control:
        assert not server.address.endswith(":0")
        version = control.stub.Capabilities(p4r.CapabilitiesRequest(), timeout=5)
        assert version.p4runtime_api_version == "1.4.1"
    host, port = parse_address(server.address)
    with P4RuntimeServer(P4RuntimeDevice(Loop()), (host, port)) as again:
        assert again.address == server.address


def parsed(*arguments):
    return cli.parse(["switch", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--p4runtime", "1"], "or --insecure for plain text"),
        (["--p4runtime", "1", "--tls-cert", "a", "--tls-key", "b"], "or --insecure for plain text"),
        (["--p4runtime", "1", "--insecure", "--tls-ca", "a"], "exclude each other"),
        (["--insecure"], "require --p4runtime"),
    ],
)
def test_options_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        switch_command.build(parsed(*arguments))


def test_nothing_of_p4runtime_is_loaded_unless_asked_for():
    code = "import sys, dlcp.commands.switch; sys.exit(any(name in sys.modules for name in ('grpc', 'finsy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_switch_with_entries_serves_them(tmp_path):
    """A switch that was started with entries has them, and their p4info, when a controller comes."""
    file = tmp_path / "entries.json"
    profile = {
        "profile": "route_selector",
        "members": [{"id": 1, "action": "to_next_hop", "params": {"port": 1, "mac": 2}}],
        "groups": [{"id": 4, "members": [1]}],
    }
    trusted = {"table": "port_trust", "match": {"ig_port": 3}, "action": "trust"}
    route = {"table": "ipv4_route", "match": {"ipv4_dst": "10.0.0.0/8"}, "group": 4}
    file.write_text(json.dumps({"profiles": [profile], "entries": [trusted, route]}))
    switch = BuiltIn("--entries", str(file))
    switch.start()
    try:
        with Control(switch.address) as control:
            found = control.get_pipeline()
            assert found == config()
            control.arbitrate(1)
            control.words = type(control.words)(found.p4info)
            words = control.words
            assert control.read(p4r.Entity(table_entry=p4r.TableEntry())) == [
                words.entry("port_trust", {"ig_port": 3}, words.action("trust")),
                words.entry("ipv4_route", {"ipv4_dst": (10 << 24, 8)}, ("group", 4)),
            ]
            control.write(2, words.group("route_selector", 4, {1: 2}))
            assert control.read(words.group("route_selector", 4, {})) == [words.group("route_selector", 4, {1: 2})]
    finally:
        switch.stop()


def test_a_switch_drops_everything_until_it_has_a_program(tmp_path):
    counters = tmp_path / "counters.json"
    switch = BuiltIn("--counters", str(counters), "--counters-every", "0.05")
    switch.start()

    def dropped():
        (port,) = json.loads(counters.read_text())["ports"]
        return port["ingress_drops"]

    try:
        host = LoopbackHost.numbered(switch.host - 1)
        with Control(switch.address) as control, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((host.real, UDP_PORT_BASE))
            sock.settimeout(10)
            sock.sendto(b"lost", (host.alias, UDP_PORT_BASE))
            until(lambda: counters.exists() and dropped() == 1)
            control.arbitrate(1)
            control.set_pipeline(config())
            words = control.words
            hop = words.action("to_next_hop", port=switch.host, mac=int(host.mac.replace(":", ""), 16))
            control.write(INSERT, words.member("route_selector", 1, hop))
            address = int.from_bytes(socket.inet_aton(host.address), "big")
            control.write(INSERT, words.entry("ipv4_route", {"ipv4_dst": (address, 32)}, ("member", 1)))
            sock.sendto(b"found", (host.alias, UDP_PORT_BASE))
            assert sock.recv(100) == b"found"
            forwarded = control.read(words.cell("counter", "egress_events", None))
            assert sum(item.counter_entry.data.packet_count for item in forwarded) == 1
            control.write(DELETE, words.entry("ipv4_route", {"ipv4_dst": (address, 32)}))
            sock.sendto(b"lost", (host.alias, UDP_PORT_BASE))
            until(lambda: dropped() == 2)
    finally:
        switch.stop()


# ------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Return a folder with two authorities and, of each, a certificate for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ours", "other"):
        openssl("req", "-x509", *key, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem", "-subj", f"/CN={name} CA")
        openssl("req", *key[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=localhost")
        (folder / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        signed = ("-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-extfile", "extensions")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-days", "2", "-out", f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def secured(certificates):
    """A running switch that takes controllers of one authority."""
    files = {"cert": "ours.pem", "key": "ours.key", "ca": "ours-ca.pem"}
    arguments = [word for name, file in files.items() for word in (f"--tls-{name}", str(certificates / file))]
    switch = BuiltIn(*arguments, insecure=False)
    switch.start()
    yield switch
    switch.stop()


def credentials(folder, name):
    authority = (folder / "ours-ca.pem").read_bytes()
    if name is None:
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(
        authority, (folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes()
    )


def test_a_controller_with_the_right_certificate_is_served(certificates, secured):
    with Control(secured.address, credentials(certificates, "ours")) as control:
        control.arbitrate(1)
        control.set_pipeline(config())
        assert control.get_pipeline() == config()


@pytest.mark.parametrize("who", ["plain", None, "other"])
def test_all_others_are_refused(certificates, secured, who):
    allowed = None if who == "plain" else credentials(certificates, who)
    with Control(secured.address, allowed) as control, pytest.raises(grpc.RpcError) as caught:
        control.get_pipeline()
    assert caught.value.code() is Code.UNAVAILABLE
