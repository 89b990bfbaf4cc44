# SPDX-License-Identifier: Apache-2.0
"""The payload that passes is found with real packets, also where the network silently drops large ones."""

import random
import threading
import time
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest

from dlcp.host import netlab
from dlcp.host.ip import IPV4, IPV6, IpFamily
from dlcp.transport import RELIABLE, Endpoint, Membership, MessageKey, ReceiveRequest, SendRequest, bind_socket
from dlcp.transport.path_mtu import (
    PAYLOAD_LEAST,
    TRIES,
    PathProbe,
    candidate_payloads,
    first_hop_mtu,
    payload_for_mtu,
)
from dlcp.wire import Header, PacketType, Queue
from tests.families import both_families, needs_ipv6
from tests.transport.network import plain_tags

LIMIT_S = 10
TOKEN = 77


def udp_socket(family=IPV4):
    sock = family.udp_socket()
    sock.bind((family.loopback, 0))
    sock.setblocking(False)
    return sock


class Path:
    """Stands between two ranks: each reaches the other through a socket of its own; ``passes(size)`` decides."""

    def __init__(self, stack, ends, passes):
        self.ends, self.passes = ends, passes
        self.doors = [stack.enter_context(udp_socket(IpFamily.of(end))) for end in ends]
        self.stopped = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopped:
            for door, target, back in ((0, 0, 1), (1, 1, 0)):
                try:
                    datagram = self.doors[door].recv(65536)
                except BlockingIOError:
                    time.sleep(0.0005)  # a pace: nothing is waited for
                    continue
                if self.passes(len(datagram)):
                    self.doors[back].sendto(datagram, self.ends[target].getsockname())


def found(passes, candidates=None, limit_s=LIMIT_S, family=IPV4):
    """The payload that each of two ranks finds on a path."""
    candidates = candidates or candidate_payloads(65536, family=family)
    with ExitStack() as stack:
        ends = [stack.enter_context(udp_socket(family)) for _ in range(2)]
        path = Path(stack, ends, passes)
        probes = [
            PathProbe(rank, ends[rank], {1 - rank: path.doors[1 - rank].getsockname()}, 5, TOKEN, candidates)
            for rank in range(2)
        ]
        end_s = time.monotonic() + limit_s
        while not all(probe.done for probe in probes) and time.monotonic() < end_s:
            for probe in probes:
                probe.turn(0.002)
        path.stopped = True
        path.thread.join(5)
        return [(probe.payload_bytes, probe.done, probe.unreachable) for probe in probes]


def test_payloads_fill_the_packets_of_common_networks():
    assert payload_for_mtu(1500) == 1440
    assert payload_for_mtu(9000) == 8936
    assert candidate_payloads(1500) == [1440, 1400, 1384, 1336, 1216, 512, PAYLOAD_LEAST]
    assert candidate_payloads(65536)[:2] == [8936, 1440]
    assert candidate_payloads(9000, configured=1000) == [1000, 512, PAYLOAD_LEAST]
    assert candidate_payloads(1500, configured=64) == [64]
    assert (payload_for_mtu(1500, IPV6), candidate_payloads(9000, family=IPV6)[:2]) == (1416, [8920, 1416])


@both_families
def test_the_first_hop_of_loopback_is_large(family):
    assert first_hop_mtu((family.loopback, 9)) >= 1500


def test_a_clean_path_takes_the_largest_at_once():
    sizes = []
    assert found(lambda size: sizes.append(size) or True) == [(8936, True, [])] * 2
    assert sizes.count(max(sizes)) < TRIES, "nobody has tried for as long as where something is lost"


@pytest.mark.parametrize(("largest", "payload"), [(1472, 1440), (1472 - 50, 1384), (1000, 512), (100, PAYLOAD_LEAST)])
def test_a_black_hole_is_measured(largest, payload):
    assert found(lambda size: size <= largest) == [(payload, True, [])] * 2


@needs_ipv6
def test_a_black_hole_is_measured_over_ipv6():
    assert found(lambda size: size <= 1452, family=IPV6) == [(1416, True, [])] * 2


def test_loss_does_not_look_like_a_black_hole():
    rng = random.Random(3)
    assert found(lambda size: rng.random() > 0.3) == [(8936, True, [])] * 2


def test_a_blocked_path_is_never_done():
    assert found(lambda size: False, limit_s=0.5) == [(0, False, [1]), (0, False, [0])]


def test_strangers_get_no_answer_and_are_not_believed():
    with udp_socket() as mine, udp_socket() as other, udp_socket() as stranger:
        probe = PathProbe(0, mine, {1: other.getsockname()}, 5, TOKEN, [1440, 64])

        def say(sock, kind, *, sender=1, job=5, token=TOKEN, size=1440, padding=b""):
            header = Header(kind, 0, Queue.CONTROL, 0, 0, job, 0, 0, 0, sender, size, 0, token)
            sock.sendto(header.encode() + padding, mine.getsockname())

        for wrong in ({"token": 1}, {"job": 6}, {"sender": 2}, {"size": 999}):
            say(other, PacketType.HELLO_ACK, **wrong)
        say(stranger, PacketType.HELLO_ACK)
        say(stranger, PacketType.HELLO, padding=bytes(1440))
        say(other, PacketType.HELLO, padding=bytes(1000))
        other.sendto(b"noise", mine.getsockname())
        probe.turn(0.1)
        assert (probe.payload_bytes, probe.unreachable) == (0, [1])
        with pytest.raises(BlockingIOError):
            stranger.recv(65536)
        say(other, PacketType.HELLO_ACK)
        probe.turn(1)
        assert (probe.payload_bytes, probe.done) == (1440, True)


@both_families
def test_bursts_larger_than_the_kernels_path_mtu_arrive(family):
    """After a router's ICMP message, the kernel refuses bursts of such packets, and fragments single ones."""
    works, reason = netlab.available()
    if not works:
        pytest.skip(reason)
    near, far = hosts = [netlab.Namespace(name, family) for name in ("near", "far")]
    addresses, bits = (("10.9.0.1", "10.9.0.2"), 24) if family is IPV4 else (("fd00:9::1", "fd00:9::2"), 64)
    with closing(near), closing(far):
        near.ip(f"link add eth0 type veth peer name eth0 netns {far.path}")
        for host, address in zip(hosts, addresses, strict=True):
            host.ip("link set eth0 up", f"addr add {address}/{bits} dev eth0{' nodad' * (family is IPV6)}")
        near.ip(f"route add {addresses[1]} dev eth0 mtu 1300")
        sockets = [
            host.call(partial(bind_socket, address, [0])) for host, address in zip(hosts, addresses, strict=True)
        ]
        names = [sock.getsockname() for sock in sockets]
        ends = [Endpoint(Membership(rank, {1 - rank: names[1 - rank]}, token=TOKEN), sockets[rank]) for rank in (0, 1)]
        with closing(ends[0]), closing(ends[1]):
            payload = np.arange(500_000, dtype=np.uint32).view(np.uint8)
            arrival = ends[1].receive(ReceiveRequest(0, MessageKey(0, 0), len(payload), RELIABLE, "layer"))
            tags = plain_tags(-(-len(payload) // 1440))
            ends[0].send(SendRequest(1, MessageKey(0, 0), memoryview(payload), tags, RELIABLE, "layer"))
            np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
            assert not ends[0].connection.counters()["send_errors"]


@both_families
def test_the_socket_is_left_as_it_was(family):
    with udp_socket(family) as mine, udp_socket(family) as other:
        before = mine.getsockopt(family.level, family.mtu_discover)
        PathProbe(0, mine, {1: other.getsockname()}, 5, TOKEN, [64]).turn(0)
        assert mine.getsockopt(family.level, family.mtu_discover) == before
