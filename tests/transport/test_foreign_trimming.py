# SPDX-License-Identifier: Apache-2.0
"""Packets that other vendors' switches have trimmed: IP's length is right, UDP's is not, so the kernel refuses them."""

import socket
import struct
import time

import numpy as np
import pytest

from dlcp import wire
from dlcp.host.ip import IPV4, UDP_BYTES
from dlcp.transport import (
    Endpoint,
    LossBound,
    Membership,
    MessageKey,
    ReceiveRequest,
    TransportOptions,
    bind_socket,
)
from dlcp.transport.foreign_trimming import TrimmedPackets
from dlcp.wire import HEADER_BYTES, Header, PacketType
from tests.families import both_families
from tests.transport.network import TOKEN
from tests.waiting import until

TOS = 0b001010 << 2
LEFT_BYTES = 64


@pytest.fixture
def raw(family):
    """A socket for UDP packets with any header; those of IPv4 with IP's header, too."""
    try:
        protocol = socket.IPPROTO_RAW if family is IPV4 else socket.IPPROTO_UDP
        sock = socket.socket(family.number, socket.SOCK_RAW, protocol)
    except PermissionError:
        pytest.skip("needs CAP_NET_RAW to write packets with a wrong length")
    with sock:
        if family is not IPV4:
            sock.setsockopt(family.level, family.tos, TOS)
        yield sock


def send_raw(raw, family, source_port, port, payload, length):
    """Send a UDP packet whose header has that length, without a checksum."""
    packet = struct.pack(">HHHH", source_port, port, length, 0) + payload
    address = socket.inet_pton(family.number, family.loopback)
    if family is IPV4:
        size = family.header_bytes + len(packet)
        packet = struct.pack(">BBHHHBBH4s4s", 0x45, TOS, size, 0, 0, 64, 17, 0, address, address) + packet
    raw.sendto(packet, (family.loopback, 0))


@both_families
def test_a_message_is_complete_without_what_was_trimmed(family, raw):
    sock, peer = bind_socket(family.loopback, [0]), bind_socket(family.loopback, [0])
    size = TransportOptions().payload_bytes
    place = {1: peer.getsockname()[:2]}
    endpoint = Endpoint(Membership(0, place, job=1, token=TOKEN), sock, options=TransportOptions(foreign_trimming=True))
    port, own = sock.getsockname()[1], peer.getsockname()[1]
    try:
        buffer = np.zeros(10 * size, np.uint8)
        bound = LossBound(0.2)
        arrival = endpoint.receive(ReceiveRequest(1, MessageKey(0, 0), buffer.nbytes, bound, "layer", buffer))
        for index in range(10):
            data = (
                Header(PacketType.DATA, 0, 4, 7, 0, 1, 0, 0, 0, 1, index, 10, TOKEN).encode()
                + bytes([index + 1]) * size
            )
            if index < 8:
                peer.sendto(data, (family.loopback, port))
            else:
                send_raw(raw, family, own, port, data[: HEADER_BYTES + LEFT_BYTES], UDP_BYTES + len(data))
        delivered = arrival.result(20).delivered
        assert delivered.tolist() == 8 * [True] + 2 * [False]
        assert endpoint.connection.counters()["trimmed"] == 2
    finally:
        endpoint.close("the test is over")
        peer.close()


@both_families
def test_only_packets_to_this_port_that_are_too_short_are_passed_on(family, raw):
    sock, taken = bind_socket(family.loopback, [0]), []
    port = sock.getsockname()[1]
    with sock, TrimmedPackets(sock, lambda *each: taken.append((bytes(each[0]), *each[1:]))):
        for to, length in ((port, UDP_BYTES + 8), (port + 1, 100), (port, 2), (port, UDP_BYTES + 9)):
            send_raw(raw, family, 7, to, b"contents", length)
        until(lambda: taken)
        time.sleep(0.1)
    assert taken == [(b"contents", TOS, (family.loopback, 7))]
    send_raw(raw, family, 7, port, b"contents", 100)
    time.sleep(0.05)
    assert len(taken) == 1


def test_without_the_privilege_it_is_refused(monkeypatch):
    real = socket.socket

    def refusing(family=-1, kind=-1, *others, **more):
        if kind == socket.SOCK_RAW:
            raise PermissionError
        return real(family, kind, *others, **more)

    with bind_socket("127.0.0.1", [0]) as sock:
        monkeypatch.setattr(socket, "socket", refusing)
        with pytest.raises(OSError, match="foreign_trimming opens a raw socket, which takes CAP_NET_RAW: run as root"):
            TrimmedPackets(sock, print)


def test_a_trimmed_packet_has_a_dscp_of_its_own():
    assert TOS not in {wire.dscp(queue, droppable) << 2 for queue in range(8) for droppable in (False, True)}
