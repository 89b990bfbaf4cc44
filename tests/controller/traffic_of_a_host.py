# SPDX-License-Identifier: Apache-2.0
"""Frames as hosts of a star send them, with the port they come in at."""

import ipaddress
import struct

from dlcp.wire import UDP_PORT_BASE, Header, PacketType


def frames():
    """Gradients of every queue and drop class from two hosts, and packets to nowhere."""
    for index in range(64):
        for sender in (1, 2):
            yield sender, frame(sender, 3 if sender == 2 else 2, queue=index >> 3, drop_class=index & 7, index=index)
    yield 3, frame(3, 77)


def frame(
    sender, receiver, *, kind=PacketType.DATA, flags=0, queue=3, drop_class=0, index=0, job=1, payload=bytes(100)
):
    header = Header(kind, flags, queue, drop_class, 0, job, 100, 1, 1, sender, index, 1000, 0)
    body = header.encode() + payload
    udp = struct.pack("!HHHH", 5000, UDP_PORT_BASE, 8 + len(body), 0) + body
    addresses = [ipaddress.IPv4Address(f"10.0.0.{host}").packed for host in (sender, receiver)]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0) + b"".join(addresses)
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + ip[12:]
    ethernet = bytes([2, 0, 0, 0, 0, receiver, 2, 0, 0, 0, 0, sender]) + struct.pack("!H", 0x0800)
    return ethernet + ip + udp
