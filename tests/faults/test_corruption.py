# SPDX-License-Identifier: Apache-2.0
"""The effect of a damaged packet. On a wire, none: the kernel drops what fails UDP's checksum; it is lost like others.

DLCP adds no checksum of its own. UDP's covers header and payload and catches every flipped bit that comes alone;
Ethernet's catches more on each hop before. Somebody on the path who writes valid checksums is outside what DLCP guards
against: with the session token, which he reads there, he could write gradients just as well. Packets without the token,
of other jobs, versions or ranks, or cut short are refused and counted (see test_faults.py, "forgeries").
"""

import socket
import struct

import pytest

from dlcp.switch import internet_checksum
from dlcp.wire import Header, PacketType

WAIT_S = 0.5


def raw_socket():
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
    except PermissionError:
        pytest.skip("needs CAP_NET_RAW to write packets with a wrong checksum")


def datagram(target_port, payload, *, flip_bit=None):
    """A UDP datagram from 127.0.0.1 with its checksum; then one bit of the payload flips."""
    address, port = socket.inet_aton("127.0.0.1"), 40_000
    length = 8 + len(payload)
    pseudo = address + address + struct.pack("!BBH", 0, socket.IPPROTO_UDP, length)
    bare = struct.pack("!HHHH", port, target_port, length, 0) + payload
    padded = pseudo + bare + bytes(length % 2)
    checksum = internet_checksum(padded) or 0xFFFF
    body = bytearray(payload)
    if flip_bit is not None:
        body[flip_bit // 8] ^= 1 << flip_bit % 8
    return struct.pack("!HHHH", port, target_port, length, checksum) + body


def test_a_flipped_bit_never_reaches_an_endpoint():
    payload = Header(PacketType.DATA, 0, 3, 1, 0, 1, 9, 4, 0, 1, 7, 100, 77).encode() + bytes(range(256)) * 4
    with raw_socket() as wire, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        port = endpoint.getsockname()[1]
        endpoint.settimeout(WAIT_S)
        for bit in (0, 3, 100, 257, 8 * len(payload) - 1):
            wire.sendto(datagram(port, payload, flip_bit=bit), ("127.0.0.1", 0))
        with pytest.raises(TimeoutError):
            endpoint.recv(4096)
        wire.sendto(datagram(port, payload), ("127.0.0.1", 0))
        assert endpoint.recv(4096) == payload
