# SPDX-License-Identifier: Apache-2.0
"""The switch as a process, with the real program: DLCP packets in, policy, counters out."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlcp.cli import main, parse
from dlcp.commands import switch as command
from dlcp.commands.switch import render
from dlcp.switch import (
    PROGRAM_PATH,
    PortQueueing,
    SwitchProcess,
    SwitchProcessError,
    load_definition,
    read_entries,
    write_ports,
)
from dlcp.wire import Flag, Header, PacketType, dscp
from tests import waiting

REPOSITORY = Path(__file__).parents[2]
UDP_PORT = 53703  # the last of DLCP's block; users take the first
HOSTS = {
    "hosts": 2,
    "udp_ports": [UDP_PORT],
    "queueing": {"rate_bps": 20_000_000, "depth_packets": 100},
}


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def fabric(tmp_path, **changes):
    path = tmp_path / "star.json"
    path.write_text(json.dumps({**HOSTS, **changes}))
    return str(path)


def host_socket(index):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
    sock.bind((f"127.77.1.{index + 1}", UDP_PORT))
    sock.settimeout(10)
    return sock


def packet(index, queue, drop_class, *, kind=PacketType.DATA, flags=0, budget=10_000, job=1, count=1000):
    header = Header(kind, flags, queue, drop_class, 0, job, budget, 1, 1, 0, index, count, 0)
    return header.encode() + bytes(1000)


def until(switch, condition):
    """Return the first snapshot that meets a condition."""

    def found():
        nonlocal snapshot
        snapshot = switch.snapshot()
        return condition(snapshot)

    snapshot = None
    waiting.until(found, lambda: snapshot)
    return snapshot


def test_incast_costs_the_least_valuable_class_only(tmp_path):
    with (
        SwitchProcess(["--fabric", fabric(tmp_path), "--rate-bps", "2e6"], counters_every_s=0.05) as switch,
        host_socket(0) as sender,
        host_socket(1) as receiver,
    ):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp(3, True) << 2 | 2)
        # A slot of the budget table is free once the switch is older than a second (SLOT_IDLE_US).
        until(switch, lambda snapshot: snapshot["uptime_s"] > 1.1)
        # Four times the port's rate, valuable and worthless packets in turn, for a second and a half.
        started, total = time.monotonic(), 1500
        for index in range(total):
            while time.monotonic() < started + index * 0.001:
                time.sleep(0.0005)  # a pace, not a wait
            sender.sendto(packet(index, 3, 7 if index % 2 else 0), ("127.77.0.2", UDP_PORT))
        snapshot = until(switch, lambda snapshot: ended(snapshot) == total)
        classes, marks = [0, 0], 0
        for _ in range(delivered(snapshot)):
            data, ancillary, _, _ = receiver.recvmsg(2000, 64)
            classes[data[2] >> 2 & 7 == 7] += 1
            marks += ancillary[0][2][0] & 3 == 3
        last = switch.stop()
    ingress = {(event["event"], event["drop_class"]): event["packets"] for event in events(last, "ingress_events")}
    egress = {(event["event"], event["drop_class"]): event["packets"] for event in events(last, "egress_events")}
    queue = last["ports"][1]["queues"][3]
    assert set(ingress) == {("POLICY_DROP", 7)}
    assert ingress["POLICY_DROP", 7] > 100
    assert egress["FORWARDED", 0] == classes[0]
    assert egress["FORWARDED", 7] == classes[1]
    assert classes[0] + queue["tail_drops"] + classes[1] + ingress["POLICY_DROP", 7] == total
    assert classes[0] > 2 * classes[1]
    assert sum(count for (event, _), count in egress.items() if event == "MARKED") == marks > 0
    assert all(event["port"] == 2 and event["queue"] == 3 for event in events(last, "egress_events"))


def events(snapshot, which):
    return snapshot["program"][which]["by_queue"]


def delivered(snapshot):
    return sum(queue["transmitted"] for queue in snapshot["ports"][1]["queues"])


def ended(snapshot):
    return (
        delivered(snapshot)
        + snapshot["ports"][0]["ingress_drops"]
        + sum(queue["tail_drops"] for queue in snapshot["ports"][1]["queues"])
    )


def test_untrusted_host_loses_its_tags_and_control_its_queue(tmp_path):
    hosts = [
        {"name": "a", "address": "10.0.0.1", "mac": "02:00:00:00:00:01", "trusted": False},
        {"name": "b", "address": "10.0.0.2", "mac": "02:00:00:00:00:02"},
    ]
    links = [{"a": "s:1", "b": "a"}, {"a": "s:2", "b": "b"}]
    described = fabric(tmp_path, hosts=hosts, links=links, switches=[{"name": "s", "ports": "loopback"}])
    with (
        SwitchProcess(["--fabric", described]) as switch,
        host_socket(0) as one,
        host_socket(1) as two,
    ):
        one.sendto(packet(0, 5, 2, flags=Flag.PROTECTED), ("127.77.0.2", UDP_PORT))
        assert two.recv(2000)[2] == 1 << 5
        two.sendto(packet(0, 7, 0, kind=PacketType.STOP), ("127.77.0.1", UDP_PORT))
        assert one.recv(2000)[2] == 7 << 5
        snapshot = switch.stop()
    assert [(event["event"], event["port"]) for event in events(snapshot, "ingress_events")] == [("UNTRUSTED", 1)]
    assert snapshot["ports"][1]["queues"][1]["transmitted"] == 1
    assert snapshot["ports"][0]["queues"][7]["transmitted"] == 1


def test_signal_stops_it_cleanly_with_its_last_counters(tmp_path):
    counters = tmp_path / "counters.json"
    argv = [sys.executable, "-m", "dlcp.cli", "switch", "--fabric", fabric(tmp_path), "--counters", str(counters)]
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([*argv, "--counters-every", "60"], stdout=subprocess.PIPE, text=True) as switch:
            assert switch.stdout.readline() == "switch ready: ports 1, 2\n"
            with host_socket(0) as sender, host_socket(1) as receiver:
                sender.sendto(packet(0, 2, 0), ("127.77.0.2", UDP_PORT))
                receiver.recv(2000)  # the switch has had the packet
            os.kill(switch.pid, number)
            assert switch.wait(10) == 0
        assert json.loads(counters.read_text())["ports"][0]["received"] == 1


def test_packet_ports_carry_a_ping_between_namespaces(namespaces, tmp_path):
    with (
        namespaces.StarNetwork(2) as network,
        SwitchProcess(["--fabric", fabric(tmp_path, switches=[{"name": "s"}])], namespace=network.switch) as switch,
    ):
        sockets = [
            host.namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in network.hosts
        ]
        for host, sock in zip(network.hosts, sockets, strict=True):
            sock.bind((host.address, UDP_PORT))
            sock.settimeout(10)
        sockets[0].sendto(packet(0, 6, 0), ("10.0.0.2", UDP_PORT))
        data, sender = sockets[1].recvfrom(2000)
        assert (data, sender) == (packet(0, 6, 0), ("10.0.0.1", UDP_PORT))
        for sock in sockets:
            sock.close()
        assert switch.stop()["ports"][1]["queues"][6]["transmitted"] == 1


def test_the_queueing_of_ports_is_read_again_on_a_signal(tmp_path):
    path = tmp_path / "ports.json"
    write_ports(path, {1: PortQueueing(rate_bps=1_000_000)})
    with SwitchProcess(["--fabric", fabric(tmp_path), "--queueing", str(path)], counters_every_s=0.05) as switch:

        def rates():
            return [port["rate_bps"] for port in switch.snapshot()["ports"]]

        assert rates() == [1_000_000, 20_000_000]
        write_ports(path, {2: PortQueueing(rate_bps=2_000_000)})
        os.kill(switch.pid, signal.SIGHUP)
        waiting.until(lambda: rates() == [1_000_000, 2_000_000], "the rate has not changed")
        write_ports(path, {3: PortQueueing()})
        os.kill(switch.pid, signal.SIGHUP)
        waiting.until(lambda: "nothing has changed" in switch._printed(), "an unknown port is accepted")
        assert rates() == [1_000_000, 2_000_000]


def test_errors_are_one_line_and_a_status(tmp_path, capsys):
    assert main(["switch"]) == 2
    assert main(["switch", "--fabric", str(tmp_path / "none.json")]) == 2
    assert main(["switch", "--hosts", "0"]) == 2
    assert main(["switch", "--port", "1=wire", "--entries", str(entries_file(tmp_path))]) == 2
    assert main(["switch", "--hosts", "1", "--program", str(tmp_path / "none.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["dlcp switch"] * 5, lines


def entries_file(tmp_path):
    path = tmp_path / "entries.json"
    assert main(["switch", "--hosts", "2", "--write-entries", str(path)]) == 0
    return path


def test_entries_of_a_fabric_can_be_written_and_read(tmp_path):
    entries, _ = read_entries(entries_file(tmp_path), load_definition(PROGRAM_PATH))
    assert len([entry for entry in entries.entries if entry.table == "ipv4_route"]) == 2


def test_switch_that_does_not_start_says_why(tmp_path):
    with pytest.raises(SwitchProcessError, match=r"star.json:1: host: there is no field 'host'; did you mean hosts"):
        SwitchProcess(["--fabric", fabric(tmp_path, host=1)])


def test_counters_can_be_watched(tmp_path):
    from rich.console import Console

    with SwitchProcess(["--fabric", fabric(tmp_path)]) as switch, host_socket(0) as one, host_socket(1) as two:
        one.sendto(packet(0, 4, 0), ("127.77.0.2", UDP_PORT))
        two.recv(2000)
        two.sendto(b"not DLCP", ("127.77.0.1", UDP_PORT))
        one.recv(2000)
        snapshot = switch.stop()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(snapshot, None))
    shown = capture.get()
    assert "loopback 127.77.1.2 as 127.77.0.2" in shown
    assert "FORWARDED 2" in shown


def test_a_rate_and_a_depth_for_each_port():
    ports = ["--port", "181=loopback", "--port", "182=loopback", "--entries", "p4/stf/none.json"]
    arguments = _parse(*ports, "--rate-bps", "4e6", "--rate-bps", "182=1e6", "--depth-packets", "181=7")
    plain = PortQueueing(rate_bps=1, depth_packets=5)
    first, second = (command._override(plain, arguments, port) for port in (181, 182))
    assert (first.rate_bps, first.depth_packets) == (4_000_000, 7)
    assert (second.rate_bps, second.depth_packets) == (1_000_000, 5)
    command._check_settings(arguments, [181, 182])
    with pytest.raises(ValueError, match="unknown port 182"):
        command._check_settings(arguments, [181])


def test_with_a_fabric_its_file_says_what_single_ports_have(tmp_path, capsys):
    assert main(["switch", "--fabric", fabric(tmp_path), "--rate-bps", "1=2e6"]) == 2
    assert "set it in its file, at the port's link" in capsys.readouterr().err


def _parse(*words):
    return parse(["switch", *words])
