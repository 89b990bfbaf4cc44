# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/data/golden.pcap``: ``python tests/wire/golden.py``. The same seed gives the same bytes everywhere.

It holds valid packets of every type with every field drawn at random, on every DLCP port; then those that a reader must
not take for valid ones: too short, of another version, of no known type, on another port.
"""

import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from dlcp.host.ip import IPV4, IPV6, IpFamily
from dlcp.wire import FIELD_BITS, UDP_PORT_BASE, UDP_PORT_COUNT, VERSION, PacketType
from tests.wire.wirebits import join, random_fields

GOLDEN_PATH = Path(__file__).parents[1] / "data" / "golden.pcap"
SEED = 84453
RANDOM_PACKETS = 64


VLAN = bytes.fromhex("8100 6005")
OTHER_FRAMES = {"IPv6": (IPV6, b""), "802.1Q": (IPV4, VLAN), "IPv6-802.1Q": (IPV6, VLAN)}
"""Families and 802.1Q tags of frames that the golden capture does not have."""


class Golden(NamedTuple):
    """One packet of the capture: where it goes, what it carries and whether it is a valid DLCP packet."""

    port: int
    datagram: bytes
    valid: bool


def packets() -> Iterator[Golden]:
    """Yield the packets of the capture in order."""
    rng = Random(SEED)
    for kind in PacketType:
        yield Golden(UDP_PORT_BASE, join({"version": VERSION, "type": int(kind)}), True)
    for number in range(RANDOM_PACKETS):
        header = join(random_fields(rng))
        yield Golden(UDP_PORT_BASE + number % UDP_PORT_COUNT, header + rng.randbytes(rng.randrange(65)), True)
    ones = {name: (1 << bits) - 1 for name, bits in FIELD_BITS.items()}
    yield Golden(UDP_PORT_BASE, join(ones | {"version": VERSION, "type": 1}), True)

    header = join(random_fields(rng))
    for length in (0, 1, 8, 31):
        yield Golden(UDP_PORT_BASE, header[:length], False)
    for version in (0, 2, 15):
        yield Golden(UDP_PORT_BASE, join(random_fields(rng) | {"version": version}), False)
    for kind in (0, 10, 15):
        yield Golden(UDP_PORT_BASE, join(random_fields(rng) | {"type": kind}), False)
    for port in (UDP_PORT_BASE - 1, UDP_PORT_BASE + UDP_PORT_COUNT):
        yield Golden(port, header, False)


def _checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of ``data``."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(packet: Golden, family: IpFamily = IPV4, tags: bytes = b"") -> bytes:
    """Return the Ethernet frame of a packet, with all checksums right: from host 0 to host 1 of a fabric.

    ``tags`` of 802.1Q follow the Ethernet addresses.
    """
    hosts = {IPV4: ("10.0.0.1", "10.0.0.2"), IPV6: ("fd00::1", "fd00::2")}[family]
    addresses, length = b"".join(socket.inet_pton(family.number, host) for host in hosts), 8 + len(packet.datagram)
    udp = struct.pack(">HHHH", 49152, packet.port, length, 0)
    pseudo = addresses + struct.pack(">IHBB", 0, length, 0, 17)  # the same sum in both families
    udp = udp[:6] + struct.pack(">H", _checksum(pseudo + udp + packet.datagram) or 0xFFFF)
    if family is IPV6:
        kind, ip = b"\x86\xdd", struct.pack(">IHBB", 6 << 28, length, 17, 64)
    else:
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 64, 17, 0)
        kind, ip = b"\x08\x00", ip[:10] + struct.pack(">H", _checksum(ip + addresses))
    return bytes.fromhex("020000000002 020000000001") + tags + kind + ip + addresses + udp + packet.datagram


def capture(made: "Iterable[Golden] | None" = None, family: IpFamily = IPV4, tags: bytes = b"") -> bytes:
    """Return a capture file, of the golden packets or others: classic pcap, one packet every 10 us from time 0 on."""
    blocks = [struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)]
    for number, packet in enumerate(packets() if made is None else made):
        data = frame(packet, family, tags)
        blocks += [struct.pack("<IIII", 0, 10 * number, len(data), len(data)), data]
    return b"".join(blocks)


if __name__ == "__main__":
    GOLDEN_PATH.write_bytes(capture())
