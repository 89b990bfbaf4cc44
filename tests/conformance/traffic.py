# SPDX-License-Identifier: Apache-2.0
"""Packets: random ones of every kind, and those of a message that may be dropped."""

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.conformance import frames
from tests.conformance.recording import Packet
from tests.conformance.sites import JOBS, ROUTED, Site


class Traffic:
    """Random packets for a site."""

    def __init__(self, rng: random.Random, site: Site) -> None:
        self.rng, self.site = rng, site
        kinds: list[tuple[int, Callable[[], bytes]]] = [
            (34, self.data),
            (12, self.control),
            (6, self.tcp),
            (6, self.udp),
            (3, self.fragment),
            (3, self.options),
            (3, self.bad_checksum),
            (3, self.ttl),
            (4, self.truncated),
            (3, self.version),
            (3, self.udp_length),
            (3, self.no_checksum),
            (5, self.ethernet),
            (8, self.mutated),
            (2, self.noise),
        ]
        self._weights, self._makers = [weight for weight, _ in kinds], [make for _, make in kinds]

    def packets(self, count: int) -> Iterator[Packet]:
        for _ in range(count):
            make = self.rng.choices(self._makers, self._weights)[0]
            yield Packet(make.__name__, self.port(), self._dressed(make()))

    def _dressed(self, frame: bytes) -> bytes:
        """Return a frame as it is, or as IPv6, or with a VLAN tag, or both."""
        rng = self.rng
        if rng.random() < 0.35 and len(frame) >= 34 and frame[12:14] == b"\x08\x00":
            frame = frames.as_ipv6(frame, rng.choice([None, None, None, None, None, 0, 44, 58]))
            if rng.random() < 0.03:
                frame = frame[: rng.randrange(len(frame))]
        if rng.random() < 0.2:
            frame = frames.tagged(frame, rng.getrandbits(16))
        return frame

    def port(self) -> int:
        if self.rng.random() < 0.7:
            return self.rng.choice(self.site.trusted)
        return self.rng.choice([*range(9), 62, 64, 65, 255, 256, 510])

    def _payload(self) -> bytes:
        return self.rng.randbytes(self.rng.choice([0, 1, 2, 7, 16, 17, 33]) if self.rng.random() < 0.97 else 1400)

    def _ip(self) -> dict[str, int]:
        rng = self.rng
        dst = rng.choice(self.site.destinations) if rng.random() < 0.95 else rng.getrandbits(32)
        return {"src": ROUTED | rng.getrandbits(24), "dst": dst}

    def _head(self) -> dict[str, int]:
        rng = self.rng
        return {"ttl": rng.choice([2, 3, 64, 255]), "tos": rng.getrandbits(8), "identification": rng.getrandbits(16)}

    def _fields(self) -> dict[str, int]:
        rng = self.rng
        return {
            "flags": rng.choice([0, 0, 0, 0, 0x80, 0x40, 0x20, 0x10, rng.getrandbits(8)]),
            "queue": rng.randrange(8),
            "drop_class": rng.randrange(8),
            "spare": rng.choice([0, 0, 0, 3]),
            "layer": rng.getrandbits(8),
            "job": rng.choice(JOBS),
            "budget": rng.choice([0, 1, 2, 5, 65535]),
            "step": rng.randrange(3) if rng.random() < 0.7 else rng.getrandbits(32),
            "message": rng.randrange(4),
            "sender": rng.randrange(4),
            "index": rng.getrandbits(32) if rng.random() < 0.3 else rng.randrange(100),
            "count": rng.getrandbits(32),
            "token": rng.getrandbits(64),
        }

    def _gradients(self, **more: Any) -> bytes:
        rng = self.rng
        fields = {name: more.pop(name) for name in ("type", "version", "index") if name in more}
        header = frames.dlcp(**(self._fields() | fields))
        options = {"src_port": rng.randrange(1024, 65536), "dst_port": rng.randrange(53696, 53704)}
        payload = more.pop("payload", None)
        return frames.gradients(
            header, self._payload() if payload is None else payload, **(self._ip() | self._head() | options | more)
        )

    def data(self) -> bytes:
        return self._gradients()

    def control(self) -> bytes:
        return self._gradients(type=self.rng.choice([0, *range(2, 16)]))

    def version(self) -> bytes:
        return self._gradients(version=self.rng.choice([0, *range(2, 16)]))

    def udp_length(self) -> bytes:
        return self._gradients(udp_length=self.rng.choice([0, 8, 39, 40, 41, self.rng.getrandbits(16)]))

    def no_checksum(self) -> bytes:
        return self._gradients(udp_checksum=self.rng.choice([0, 0, 0xFFFF, self.rng.getrandbits(16)]))

    def ttl(self) -> bytes:
        return self._gradients(ttl=self.rng.choice([0, 1]))

    def bad_checksum(self) -> bytes:
        return self._gradients(header_checksum=self.rng.getrandbits(16))

    def fragment(self) -> bytes:
        return self._gradients(fragment=self.rng.choice([0x2000, 0x4000, 1, 0x2001, 0x1FFF, self.rng.getrandbits(16)]))

    def options(self) -> bytes:
        words = self.rng.randrange(1, 11)
        return self._gradients(options=self.rng.randbytes(4 * words))

    def truncated(self) -> bytes:
        whole = self._gradients(payload=b"")
        return whole[: self.rng.randrange(len(whole))]

    def udp(self) -> bytes:
        rng, ip = self.rng, self._ip()
        ports = {"src_port": rng.getrandbits(16), "dst_port": rng.choice([53, 4791, 53695, 53704, rng.getrandbits(16)])}
        segment = frames.udp(self._payload(), **ip, **ports)
        return frames.ethernet(frames.ipv4(segment, protocol=17, **ip, **self._head()))

    def tcp(self) -> bytes:
        rng = self.rng
        ports = {"src_port": rng.getrandbits(16), "dst_port": rng.choice([80, 53696, rng.getrandbits(16)])}
        segment = frames.tcp(self._payload(), sequence=rng.getrandbits(32), **ports)
        return frames.ethernet(frames.ipv4(segment, protocol=6, **self._ip(), **self._head()))

    def ethernet(self) -> bytes:
        rng = self.rng
        stations = [frames.mac(station) for station in self.site.stations] or [frames.mac(1)]
        ether_type = rng.choice([0x0806, 0x86DD, 0x8100, 0x88B5, 0, rng.getrandbits(16)])
        return frames.ethernet(self._payload(), dst=rng.choice([*stations, frames.BROADCAST]), ether_type=ether_type)

    def mutated(self) -> bytes:
        """Some bytes of a good packet are changed, then often the IPv4 checksum is made good again."""
        rng = self.rng
        frame = bytearray(rng.choice([self.data, self.control, self.tcp, self.udp])())
        for _ in range(rng.randrange(1, 5)):
            frame[rng.randrange(min(len(frame), 74))] = rng.getrandbits(8)
        if rng.random() < 0.6:
            frame[24:26] = b"\0\0"
            frame[24:26] = struct.pack(">H", frames.checksum(bytes(frame[14:34])))
        return bytes(frame)

    def noise(self) -> bytes:
        return self.rng.randbytes(self.rng.randrange(120))


@dataclass
class Message:
    """A message whose packets may be dropped."""

    job: int = 7
    step: int = 0
    message: int = 0
    sender: int = 0

    def owner(self) -> int:
        return zlib.crc32(struct.pack(">HIHH", self.job, self.step, self.message, self.sender))

    def packet(
        self, kind: str, *, port: int = 1, to: int = 3, payload: bytes = b"", tos: int = 0, **fields: int
    ) -> Packet:
        tags = {"queue": 5, "drop_class": 6, "budget": 3} | fields
        header = frames.dlcp(job=self.job, step=self.step, message=self.message, sender=self.sender, **tags)
        return Packet(kind, port, frames.gradients(header, payload, src=ROUTED + 9, dst=ROUTED + to, tos=tos))


def colliding(rng: random.Random) -> tuple[Message, Message]:
    """Return two messages of one slot."""
    found: dict[int, Message] = {}
    while True:
        message = Message(rng.choice(JOBS), rng.getrandbits(32), rng.getrandbits(16), rng.getrandbits(4))
        other = found.setdefault(message.owner() & 0xFFFF, message)
        if other.owner() != message.owner():
            return other, message
