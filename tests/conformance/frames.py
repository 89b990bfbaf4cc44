# SPDX-License-Identifier: Apache-2.0
"""Frames, right and wrong ones, byte by byte."""

import struct

from dlcp.wire import Header

BROADCAST = bytes([255] * 6)
HEADERS_BYTES = 14 + 20 + 8
"""Ethernet, IPv4 and UDP."""


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def mac(number: int) -> bytes:
    return bytes([2, 0, 0, 0]) + struct.pack(">H", number)


def ethernet(payload: bytes, *, dst: bytes = mac(255), src: bytes = mac(1), ether_type: int = 0x0800) -> bytes:
    return dst + src + struct.pack(">H", ether_type) + payload


def ipv4(
    payload: bytes,
    *,
    src: int,
    dst: int,
    protocol: int,
    ttl: int = 64,
    tos: int = 0,
    identification: int = 0,
    fragment: int = 0,
    version: int = 4,
    options: bytes = b"",
    ihl: int | None = None,
    header_checksum: int | None = None,
) -> bytes:
    length = 20 + len(options)
    words = length // 4 if ihl is None else ihl
    head = struct.pack(
        ">BBHHHBBHII",
        version << 4 | words,
        tos,
        length + len(payload),
        identification,
        fragment,
        ttl,
        protocol,
        0,
        src,
        dst,
    )
    right = checksum(head + options) if header_checksum is None else header_checksum
    return head[:10] + struct.pack(">H", right) + head[12:] + options + payload


def udp(
    payload: bytes,
    *,
    src: int,
    dst: int,
    src_port: int,
    dst_port: int,
    length: int | None = None,
    udp_checksum: int | None = None,
) -> bytes:
    size = 8 + len(payload)
    head = struct.pack(">HHH", src_port, dst_port, size if length is None else length)
    right = udp_checksum
    if right is None:
        pseudo = struct.pack(">IIBBH", src, dst, 0, 17, size)
        right = checksum(pseudo + head + b"\0\0" + payload) or 0xFFFF
    return head + struct.pack(">H", right) + payload


IPV6_NETWORK = 0xFD00 << 112
"""fd00::/96: every IPv4 address has a counterpart in it."""


def as_ipv6(frame: bytes, next_header: int | None = None) -> bytes:
    """Return an IPv4 frame as IPv6, with the same type of service, TTL, version and payload."""
    version, tos, protocol, ttl = frame[14] >> 4, frame[15], frame[23], frame[22]
    payload = frame[34:]
    version = {4: 6}.get(version, version)
    head = struct.pack(">IHBB", version << 28 | tos << 20, len(payload), next_header or protocol, ttl)
    addresses = (IPV6_NETWORK | int.from_bytes(frame[at : at + 4], "big") for at in (26, 30))
    return frame[:12] + b"\x86\xdd" + head + b"".join(item.to_bytes(16, "big") for item in addresses) + payload


def tagged(frame: bytes, tag: int) -> bytes:
    """Return a frame with a VLAN tag."""
    return frame[:12] + struct.pack(">HH", 0x8100, tag) + frame[12:]


def tcp(payload: bytes, *, src_port: int, dst_port: int, sequence: int = 0) -> bytes:
    return struct.pack(">HHIIHHHH", src_port, dst_port, sequence, 0, 5 << 12 | 0x10, 65535, 0, 0) + payload


def dlcp(**fields: int) -> bytes:
    """Return a DLCP header; type, version and spare bits may be anything."""
    version, spare = fields.pop("version", 1), fields.pop("spare", 0)
    values = dict.fromkeys(Header._fields, 0) | {"type": 1, "token": 0x1234_5678_9ABC_DEF0} | fields
    encoded = bytearray(Header(**values).encode())  # type: ignore[arg-type]  # types of packets that nobody defined
    encoded[0] = version << 4 | encoded[0] & 15
    encoded[2] |= spare
    return bytes(encoded)


def gradients(
    header: bytes,
    payload: bytes = b"",
    *,
    src: int,
    dst: int,
    src_port: int = 53696,
    dst_port: int = 53696,
    udp_checksum: int | None = None,
    udp_length: int | None = None,
    **ip: int,
) -> bytes:
    """Return a whole frame around a DLCP header."""
    segment = udp(
        header + payload,
        src=src,
        dst=dst,
        src_port=src_port,
        dst_port=dst_port,
        udp_checksum=udp_checksum,
        length=udp_length,
    )
    return ethernet(ipv4(segment, src=src, dst=dst, protocol=17, **ip))  # type: ignore[arg-type]  # ip holds integers
