# SPDX-License-Identifier: Apache-2.0
"""The path to a peer: the doctor reports the faults that were injected."""

import socket

import pytest

from dlcp import wire
from dlcp.doctor import Status
from dlcp.doctor.path import PROBES, SMALLEST_BYTES, PeerError, Probe, decode, describe, open_socket, try_path
from dlcp.host.ip import IPV4, IPV6
from dlcp.session import addresses
from tests.doctor.pathway import Pathway, listening
from tests.families import both_families, needs_ipv6

pytestmark = pytest.mark.timeout(60)


def findings(report):
    return {finding.subject: finding for finding in describe(report).findings}


@both_families
def test_a_clean_path_is_told_clean(family):
    with Pathway(family=family) as path:
        report = try_path(path.address, 100)
    assert (report.sent, report.arrived_there, report.arrived_back, len(report.rtts_s)) == (100, 100, 100, 100)
    assert 0 < max(report.rtts_s) < 1
    assert report.mtu_bytes == report.mtu_there_bytes == report.interface_mtu_bytes
    assert report.dscp_there == report.dscp_back == {code: code for code in report.dscp_there}
    assert set(report.dscp_there) == {wire.dscp(queue, drop) for queue in (0, 2, 6, 7) for drop in (False, True)}
    assert report.ecn_there == report.ecn_back == {1: 1, 2: 2, 3: 3}
    assert {finding.status for finding in findings(report).values()} == {Status.OK}


def test_loss_is_told_by_direction():
    # The first packets greet; of those counted every tenth is lost there, and every fourth of the rest back.
    def drop(way, number, size):
        return number > 5 and size <= 1300 and number % (10 if way == "there" else 4) == 0

    with Pathway(drop) as path:
        report = try_path(path.address, 200)
    assert report.sent == 200
    assert 18 <= 200 - report.arrived_there <= 22
    assert 43 <= report.arrived_there - report.arrived_back <= 47
    loss = findings(report)["loss"]
    assert loss.status is Status.MISSING, "a quarter lost is no congestion"
    assert loss.data["lost_there"] == 200 - report.arrived_there


def test_a_little_loss_is_a_note():
    with Pathway(lambda way, number, size: way == "there" and number in (20, 40)) as path:
        report = try_path(path.address, 100)
    assert findings(report)["loss"].status is Status.NOTE
    assert report.arrived_there == 98


@pytest.mark.parametrize(
    ("mtu_there", "mtu_back", "family"),
    [(1500, 1500, IPV4), pytest.param(9000, 1477, IPV6, marks=needs_ipv6)],
    ids=["IPv4", "IPv6"],
)
def test_the_largest_packet_is_found_to_the_byte(mtu_there, mtu_back, family):
    limits = {"there": mtu_there, "back": mtu_back}
    with Pathway(lambda way, number, size: size > limits[way], family=family) as path:
        report = try_path(path.address, 20)
    assert report.mtu_bytes == min(mtu_there, mtu_back)
    assert report.mtu_there_bytes == mtu_there
    finding = findings(report)["largest packet"]
    assert finding.status is Status.NOTE
    assert ("the way back is the narrower" in finding.text) == (mtu_there != mtu_back)


def test_bleached_tags_are_told_by_direction():
    with Pathway(tag=lambda way, tos: tos & 3 if way == "there" else tos & ~3) as path:
        report = try_path(path.address, 20)
    assert set(report.dscp_there.values()) == {0}
    assert report.dscp_back == {code: code for code in report.dscp_back}
    assert report.ecn_there == {1: 1, 2: 2, 3: 3}
    assert set(report.ecn_back.values()) == {0}
    found = findings(report)
    assert found["DSCP"].status is found["ECN"].status is Status.NOTE
    assert "on the way there" in found["DSCP"].text
    assert "on the way back" in found["ECN"].text


def test_tags_that_are_refused_are_missing():
    with Pathway(tag=lambda way, tos: None if tos >> 2 else tos) as path:
        report = try_path(path.address, 20)
    assert report.dscp_there == {}
    assert report.ecn_there == {1: 1, 2: 2, 3: 3}
    assert findings(report)["DSCP"].status is Status.MISSING


def test_a_path_that_marks_congestion_is_no_fault():
    with Pathway(tag=lambda way, tos: tos | 3 if tos & 3 else tos) as path:
        report = try_path(path.address, 20)
    assert findings(report)["ECN"].status is Status.OK


def test_of_a_peers_addresses_the_first_with_a_route_is_probed(monkeypatch):
    monkeypatch.setattr(addresses, "resolve", lambda host: ["255.255.255.255", IPV4.loopback])
    with Pathway() as path:
        assert try_path(("both", path.address[1]), 20).arrived_back == 20


def test_nobody_listens():
    with open_socket("127.0.0.1") as sock:
        address = sock.getsockname()
    with pytest.raises(PeerError, match="nothing listens at its UDP port") as refused:
        try_path(address)
    assert f"dlcp doctor --listen 127.0.0.1:{address[1]}" in refused.value.fix


def test_a_peer_that_swallows_everything_is_given_up(monkeypatch):
    monkeypatch.setattr("dlcp.doctor.path.GREET_S", 1.0)
    with Pathway(lambda way, number, size: True) as path, pytest.raises(PeerError, match="within 1 s") as silent:
        try_path(path.address)
    assert "open UDP port" in silent.value.fix


def test_a_listener_answers_probes_only_and_never_with_more_than_it_was_sent():
    question = Probe(7, 1, size_bytes=60_000)
    whole = question.encode(answer=False, payload_bytes=472)
    foreign = [b"", b"hello", whole[:40], b"\x00" + whole[1:], question.encode(answer=True, payload_bytes=472)]
    with (
        listening(open_socket("127.0.0.1")) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        sock.settimeout(0.3)
        sock.connect(listener.address)
        for datagram in foreign:
            sock.send(datagram)
        with pytest.raises(TimeoutError):
            sock.recv(65536)
        sock.settimeout(10)
        sock.send(whole)
        answer = sock.recv(65536)
    assert len(answer) == len(whole) == 472
    assert decode(answer, answer=True) == Probe(7, 1, size_bytes=500, arrived=1)


def test_a_probe_is_a_well_formed_packet_of_the_wire_format():
    datagram = Probe(123, 4).encode(answer=False)
    assert len(datagram) == SMALLEST_BYTES
    header = wire.decode(datagram)
    assert (header.type, header.token, header.queue) == (wire.PacketType.HELLO, 123, wire.Queue.CONTROL)


def test_a_hop_with_a_smaller_mtu_is_found_with_real_fragments_forbidden(namespaces):
    """Two hosts with MTU 1500 and a router that sends on with 1400."""
    near, router, far = (namespaces.Namespace(name) for name in ("near", "router", "far"))

    def ip(where, *commands):
        for command in commands:
            assert where.run(["ip", *command.split()], capture_output=True).returncode == 0, command

    try:
        ip(
            router,
            f"link add near0 type veth peer name eth0 netns {near.path}",
            f"link add far0 type veth peer name eth0 netns {far.path}",
            "addr add 10.8.1.1/24 dev near0",
            "addr add 10.8.2.1/24 dev far0",
            "link set near0 up",
            "link set far0 mtu 1400 up",
        )
        for host, subnet in ((near, 1), (far, 2)):
            ip(
                host,
                f"addr add 10.8.{subnet}.2/24 dev eth0",
                "link set eth0 up",
                f"route add default via 10.8.{subnet}.1",
            )
        assert router.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]).returncode == 0
        with listening(far.call(lambda: open_socket("0.0.0.0", [53703]))):
            report = near.call(lambda: try_path(("10.8.2.2", 53703), PROBES))
        assert (report.mtu_bytes, report.interface_mtu_bytes) == (1400, 1500)
        assert report.arrived_back == PROBES
    finally:
        for host in (near, router, far):
            host.close()
