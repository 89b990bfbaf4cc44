# SPDX-License-Identifier: Apache-2.0
"""The engine over real sockets of this machine: types of service, bursts out and in, and kernels that refuse them."""

import errno
import select
import socket
import struct
import time
from contextlib import closing

import numpy as np
import pytest

from dlcp import wire
from dlcp.doctor.path import tos_of
from dlcp.host.ip import IPV4, IPV6, IpFamily
from dlcp.transport import (
    RELIABLE,
    Endpoint,
    LossBound,
    Membership,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportOptions,
    bind_socket,
)
from dlcp.transport.engine import Engine
from dlcp.wire import ACK_ENTRY, Header, PacketType
from tests.families import FAMILIES, needs_ipv6
from tests.native.rules import RULES
from tests.transport.network import plain_tags
from tests.waiting import until

LIMIT_S = 20
TOKEN = 77
SO_NO_CHECK = 11
UDP_SEGMENT = 103
CONGESTED = 3
KEY = MessageKey(0, 0)


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture(params=FAMILIES)
def pair(request):
    """Rank 0 is an endpoint, rank 1 a bare socket; the last one is the endpoint's own."""
    bare, sock = (bind_socket(request.param.loopback, [0]) for _ in range(2))
    with closing(bare), closing(Endpoint(Membership(0, {1: bare.getsockname()}, token=TOKEN), sock)) as endpoint:
        yield endpoint, bare, sock
        endpoint.close("the test is over")  # with a reason, for nobody would confirm anything


def packets(bare, kind, count=1):
    """Wait for packets of a kind; return each with its type of service."""
    found = []
    end_s = time.monotonic() + LIMIT_S
    while len(found) < count and time.monotonic() < end_s:
        if select.select([bare], [], [], 0.1)[0]:
            datagram, ancillary, _, _ = bare.recvmsg(1 << 16, 128)
            if datagram[0] & 15 == kind:
                found.append((datagram, tos_of(ancillary)))
    assert len(found) == count
    return found


def data(index, payload, *, count, message=0, token=TOKEN, step=0):
    header = Header(PacketType.DATA, 0, 4, 0, 7, 0, 0, step, message, 1, index, count, token)
    return header.encode() + payload


def test_packets_leave_with_their_type_of_service(pair):
    endpoint, bare, _ = pair
    endpoint.send(SendRequest(1, KEY, memoryview(bytes(5000)), plain_tags(4), LossBound(0.5), "layer"))
    # Queue 4, droppable, ECN-capable: DSCP 100 1 11, ECN 10.
    assert {tos for _, tos in packets(bare, PacketType.DATA, 4)} == {0b10011110}
    # A probe is behind what it asks about, and must not be dropped.
    assert {tos for _, tos in packets(bare, PacketType.PROBE)} == {wire.dscp(4, False) << 2 | 2}
    endpoint.call(endpoint.connection.liveness.greet_all)
    assert {tos for _, tos in packets(bare, PacketType.HELLO)} == {wire.dscp(7, False) << 2}


def test_marks_on_the_way_are_counted_and_echoed(pair):
    endpoint, bare, own = pair
    arrival = endpoint.receive(ReceiveRequest(1, KEY, 100 * 1440, RELIABLE, "layer"))
    target = own.getsockname()
    for index in range(10):
        tos = CONGESTED if index < 4 else 2
        family = IpFamily.of(bare)
        ancillary = [(family.level, family.tos, struct.pack("i", tos))]
        bare.sendmsg([data(index, bytes(1440), count=100)], ancillary, 0, target)
    marked = seen = 0
    while seen < 10:
        ((datagram, tos),) = packets(bare, PacketType.ACK)
        entries = ACK_ENTRY.iter_unpack(datagram[wire.HEADER_BYTES :])
        seen = max(bits.bit_count() for *_, block, bits in entries if block == 0)
        marked = wire.decode(datagram).count
        assert tos == wire.dscp(7, False) << 2
        assert marked == min(seen, 4)
    assert marked == 4
    assert not arrival.done()


def start(sender, receiver, payload):
    tags = plain_tags(-(-len(payload) // 1440))
    return (
        receiver.receive(ReceiveRequest(sender.connection.rank, KEY, len(payload), RELIABLE, "layer")),
        sender.send(SendRequest(receiver.connection.rank, KEY, memoryview(payload), tags, RELIABLE, "layer")),
    )


@pytest.mark.parametrize(
    ("refused", "family"),
    [(False, IPV4), (True, IPV4), pytest.param(False, IPV6, marks=needs_ipv6)],
    ids=["IPv4", "refused", "IPv6"],
)
def test_a_kernel_that_refuses_bursts_gets_packets_one_by_one(refused, family):
    sockets = [bind_socket(family.loopback, [0]) for _ in range(2)]
    if refused:  # a socket that sends no checksums may not send segments
        sockets[0].setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        if segments_go(sockets[0], sockets[1]):
            pytest.skip("this kernel sends segments even without checksums")
    elif not segments_go(*sockets):
        pytest.skip("this kernel does not know UDP_SEGMENT")
    names = [sock.getsockname() for sock in sockets]
    ends = [Endpoint(Membership(rank, {1 - rank: names[1 - rank]}, token=TOKEN), sockets[rank]) for rank in (0, 1)]
    with closing(ends[0]), closing(ends[1]):
        payload = bytes_of(3_000_001)
        arrival, delivery = start(*ends, payload)
        np.testing.assert_array_equal(arrival.result(LIMIT_S).payload, payload)
        sent = delivery.result(LIMIT_S).sent
        engine = ends[0].connection.engine
        assert engine.view.offload == (not refused)
        assert not ends[0].connection.counters()["send_errors"]
        if not refused:
            assert engine.counters()["sent_bursts"] < sent / 2
            assert ends[1].connection.counters()["received_bursts"] < sent


def segments_go(sender, receiver):
    try:
        sender.sendmsg(
            [bytes(100)], [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", 50))], 0, receiver.getsockname()
        )
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT):
            raise
        return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_bursts_that_the_kernel_joined_are_taken_apart(pair, seed):
    """A burst of several messages, duplicates, strangers' packets and a short one at its end."""
    endpoint, bare, own = pair
    if not segments_go(bare, own):
        pytest.skip("this kernel does not know UDP_SEGMENT")
    rng = np.random.default_rng(seed)
    payloads = [bytes_of(30 * 1440 + 17, seed), bytes_of(40 * 1440, seed + 10), bytes_of(8 * 1440 + 1, seed + 20)]
    into = np.zeros(len(payloads[0]), np.uint8)
    arrivals = [endpoint.receive(ReceiveRequest(1, MessageKey(0, 0), len(into), RELIABLE, "layer", into=into))]
    arrivals.append(endpoint.receive(ReceiveRequest(1, MessageKey(0, 1), len(payloads[1]), RELIABLE, "layer")))
    pieces = [(number, index) for number, payload in enumerate(payloads) for index in range(-(-len(payload) // 1440))]
    if seed:
        rng.shuffle(pieces)
    pieces += [pieces[place] for place in rng.integers(0, len(pieces), 25)]
    datagrams = [
        data(index, payloads[number][index * 1440 : (index + 1) * 1440].tobytes(),
             count=-(-len(payloads[number]) // 1440), message=number)
        for number, index in pieces
    ]  # fmt: skip
    for place in rng.integers(0, len(datagrams), 12).tolist():
        datagrams.insert(place, data(0, bytes(1440), count=40, message=1, token=TOKEN + 1))
    while datagrams:
        burst = []
        while datagrams and len(burst) < 40 and (not burst or len(burst[-1]) == 1472):
            burst.append(datagrams.pop(0))
        segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", 1472))] if len(burst[0]) == 1472 else []
        bare.sendmsg([b"".join(burst)], segment, 0, own.getsockname())
        time.sleep(0.002)  # a pace: the socket's buffer is small
    until(lambda: endpoint.connection.counters()["data"] == 80)
    arrivals.append(endpoint.receive(ReceiveRequest(1, MessageKey(0, 2), len(payloads[2]), RELIABLE, "layer")))
    for arrival, payload in zip(arrivals, payloads, strict=True):
        got = arrival.result(LIMIT_S)
        assert got.payload.tobytes() == payload.tobytes()
        assert (got.layer == 7).all()
    counted = endpoint.connection.counters()
    assert counted["data"] == 80
    assert counted["duplicate"] + counted["late"] == 25
    assert dict(endpoint.connection.refused) == {"malformed": 2, "token": 12}, "two are of the trial with segments"


def test_an_empty_datagram_is_only_malformed(pair):
    endpoint, bare, own = pair
    bare.sendto(b"", own.getsockname())
    until(lambda: endpoint.connection.refused["malformed"] == 1)


@pytest.mark.parametrize(
    ("flow", "sends"),
    [({"window": 0.5, "mute": True}, False), ({"window": 60.0, "pace": 200.0}, True)],
    ids=["silent", "paced"],
)
def test_whoever_may_not_send_yet_sleeps(flow, sends):
    with closing(bind_socket("127.0.0.1", [0])) as sock, closing(bind_socket("127.0.0.1", [0])) as other:
        common = {"options": TransportOptions(), "sock": sock}
        members = Membership(0, {1: other.getsockname()}, token=TOKEN)
        engine = Engine(members, {1: True}, now_s=time.monotonic(), **common)
        engine.flows[1].largest_window = 64
        for name, value in flow.items():
            setattr(engine.flows[1], name, value)
        request = SendRequest(1, KEY, memoryview(bytes(60 * 1440)), plain_tags(60), RELIABLE, "layer")
        engine.send(request, RELIABLE, time.monotonic())
        began_s = time.thread_time()
        engine.turn(time.monotonic() + 0.1)
        assert time.thread_time() - began_s < 0.02, "processor time of this thread, and no other's: it does not spin"
        assert (engine.flows[1].flying > RULES["path_burst"]) == sends
        engine.release()
