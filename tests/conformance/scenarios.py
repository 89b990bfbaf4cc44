# SPDX-License-Identifier: Apache-2.0
"""What simple_switch is asked: entries and packets, the same for the same seed."""

import itertools
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import frames
from recording import AgeSlot, Burst, Change, Markers, Packet, SetEntries, SetGroup, Sleep, Step, WriteRegister

Entry = dict[str, Any]
JOBS = (1, 2, 7, 0x1234, 0xFFFF)
ROUTED = 0x0A000000
"""10.0.0.0/8: where routes lead."""
MIXED = 8
"""Sets of random entries."""
GREEN = {"cir": 10**12, "cburst": 2**31 - 1, "pir": 10**12, "pburst": 2**31 - 1}
RED = {"cir": 0, "cburst": 0, "pir": 0, "pburst": 0}
YELLOW = GREEN | {"cir": 0, "cburst": 0}


def meter(cburst: int, pburst: int, rate: int = 0) -> dict[str, int]:
    """Return a meter whose buckets hold so many bytes; without a rate nothing ever comes back."""
    return {"cir": rate, "cburst": cburst, "pir": rate, "pburst": pburst}


def address(number: int) -> str:
    return ".".join(str(byte) for byte in number.to_bytes(4, "big"))


def mac_text(number: int) -> str:
    return frames.mac(number).hex(":")


def depth_index(port: int, queue: int) -> int:
    """Return where the depth of a queue stands in the register, as p4/README.md tells."""
    return (port & 63) << 3 | queue


def depth(port: int, queue: int, packets: int) -> WriteRegister:
    """Make the switch believe that a queue is so deep."""
    return WriteRegister("queue_depth", depth_index(port, queue), packets)


@dataclass
class Site:
    """A set of entries, and what packets need to know to meet them."""

    entries: dict[str, Any]
    trusted: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)
    stations: list[int] = field(default_factory=list)
    out_ports: list[int] = field(default_factory=list)


def plain_site(
    *,
    trusted: tuple[int, ...] = (1, 2),
    thresholds: dict[tuple[int, int], int] | None = None,
    marks: dict[int, int] | None = None,
    more: tuple[Entry, ...] = (),
) -> Site:
    """Return entries for hosts 10.0.0.1-4 at ports 1-4."""
    hosts = range(1, 5)
    members = [
        {"id": k, "action": "to_next_hop", "params": {"port": k, "mac": mac_text(k)}} for k in hosts
    ]
    entries: list[Entry] = [*Markers.ENTRIES]
    entries += [{"table": "port_trust", "match": {"ig_port": port}, "action": "trust"} for port in trusted]
    entries += [{"table": "ipv4_route", "match": {"ipv4_dst": f"10.0.0.{k}/32"}, "member": k} for k in hosts]
    entries += [
        {
            "table": "drop_threshold",
            "match": {"queue": queue, "drop_class": drop_class},
            "action": "drop_above",
            "params": {"depth": packets},
        }
        for (queue, drop_class), packets in (thresholds or {}).items()
    ]
    entries += [
        {"table": "ecn_threshold", "match": {"queue": queue}, "action": "mark_above", "params": {"depth": packets}}
        for queue, packets in (marks or {}).items()
    ]
    document = {"profiles": [{"profile": "route_selector", "members": members}], "entries": [*entries, *more]}
    return Site(document, list(trusted), [ROUTED + k for k in hosts], [], list(hosts))


def random_site(rng: random.Random) -> Site:
    """Return entries of every table, with overlaps, in random order."""
    ports = rng.sample([*range(13), 59, 64, 100, 300, 510], 12)
    if rng.random() < 0.3:
        ports[0] = 511  # a route to the drop port
    members = [
        {"id": k + 1, "action": "to_next_hop", "params": {"port": port, "mac": mac_text(0x100 + k)}}
        for k, port in enumerate(ports)
    ]
    if rng.random() < 0.3:
        members.append({"id": 13, "action": "NoAction"})
    ids = [member["id"] for member in members]
    sizes = [1, 2, 3, 4, 5, 7, 8, 11]
    groups = [{"id": k + 1, "members": rng.sample(ids, size)} for k, size in enumerate(sizes)]
    trusted = rng.sample(range(9), 5)
    entries: list[Entry] = [{"table": "port_trust", "match": {"ig_port": port}, "action": "trust"} for port in trusted]
    spare = next(port for port in range(9) if port not in trusted)
    entries.append({"table": "port_trust", "match": {"ig_port": spare}, "action": "clear_tags"})
    destinations, routes = [], {}
    for length in [0] * (rng.random() < 0.3) + [8, 9, 16, 16, 20, 24, 24, 24, 30, 31, 32, 32, 32]:
        base = rng.choice([ROUTED, *destinations[-3:]]) ^ rng.getrandbits(32 - length) if length else 0
        value = base >> (32 - length) << (32 - length) if length else 0
        routes[f"{address(value)}/{length}"] = None
        destinations += [value, value | rng.getrandbits(32 - length)] if length else []
        destinations.append(rng.choice(destinations or [ROUTED]) ^ 1 << rng.randrange(24))
    for prefix in routes:
        target = {"member": rng.choice(ids)} if rng.random() < 0.3 else {"group": rng.choice(groups)["id"]}
        entries.append({"table": "ipv4_route", "match": {"ipv4_dst": prefix}, **target})
    stations = rng.sample(range(0x200, 0x240), 6)
    for station in stations[:4]:
        entry = {"table": "ethernet_route", "match": {"ethernet_dst": mac_text(station)}}
        entries.append(entry | {"action": "to_port", "params": {"port": rng.choice(ports)}})
    entries.append({"table": "ethernet_route", "match": {"ethernet_dst": mac_text(stations[4])}, "action": "no_route"})
    entries += _classes(rng)
    for queue, drop_class in rng.sample(list(itertools.product(range(8), range(8))), 30):
        match = {"queue": queue, "drop_class": drop_class}
        action: Entry = {"action": "drop_above", "params": {"depth": rng.choice([0, 1, 8, 40, 2**19 - 1])}}
        entries.append({"table": "drop_threshold", "match": match, **(action if queue else {"action": "NoAction"})})
    for queue in rng.sample(range(8), 5):
        action = {"action": "mark_above", "params": {"depth": rng.choice([0, 5, 2**19 - 1])}}
        entries.append({"table": "ecn_threshold", "match": {"queue": queue}, **action})
    for job, control, port in rng.sample(list(itertools.product(JOBS, (0, 1), ports)), 24):
        entry = {"table": "job_share", "match": {"job": job, "control": control, "eg_port": port}}
        shares: list[Entry] = [
            {"action": "unlimited"},
            {"action": "metered"},
            *({"action": "metered", "meter": rates} for rates in (GREEN, YELLOW, RED, meter(700, 1500))),
        ]
        entries.append(entry | rng.choice(shares))
    rng.shuffle(entries)
    document = {
        "profiles": [{"profile": "route_selector", "members": members, "groups": groups}],
        "entries": [*Markers.ENTRIES, *entries],
    }
    return Site(document, trusted, destinations, stations, ports)


def _classes(rng: random.Random) -> Iterator[Entry]:
    """Return entries of ``classify``: they overlap, and some have the same priority."""
    seen = set()
    for _ in range(rng.choice([0, 4, 16])):
        match, identity = {}, []
        for name, width in (("job", 16), ("type", 4), ("queue", 3), ("drop_class", 3)):
            mask = rng.choice([0, (1 << width) - 1, rng.getrandbits(width)])
            value = (rng.choice(JOBS) if name == "job" else rng.getrandbits(width)) & mask
            identity.append((value, mask))
            if mask:
                match[name] = f"{value:#x}&&&{mask:#x}"
        priority = rng.choice([1, 2, 3, 10, 1000])
        if (key := (tuple(identity), priority)) in seen:
            continue
        seen.add(key)
        action: Entry = {"action": "as_tagged"}
        if rng.random() < 0.75:
            action = {"action": "set_class", "params": {"queue": rng.randrange(8), "drop_class": rng.randrange(8)}}
        yield {"table": "classify", "match": match, "priority": priority, **action}


# --------------------------------------------------------------------------------------------------------------- packets


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
            yield Packet(make.__name__, self.port(), make())

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


# ------------------------------------------------------------------------------------------------------------- scenarios


def mixed(rng: random.Random) -> Iterator[Step]:
    """Random packets over random entries, with depths that change."""
    site = random_site(rng)
    yield SetEntries(site.entries)
    for packet in Traffic(rng, site).packets(250):
        if rng.random() < 0.4:
            yield depth(rng.choice(site.out_ports), rng.randrange(8), rng.choice([0, 1, 2, 9, 41, 2**19 - 1]))
        yield packet


def malformed(rng: random.Random) -> Iterator[Step]:
    """Packets cut off at every byte, and every value of the fields that decide how a packet is read."""
    site = plain_site(thresholds={(5, 6): 0})
    yield SetEntries(site.entries)
    fields = {"queue": 5, "drop_class": 6, "job": 7, "budget": 3}
    to = {"src": ROUTED + 9, "dst": ROUTED + 3}
    header = frames.dlcp(**fields)
    whole = frames.gradients(header, b"payload", **to)
    tcp = frames.ethernet(frames.ipv4(frames.tcp(b"x", src_port=5, dst_port=80), protocol=6, **to))
    for frame, ports in ((whole, (1, 9)), (tcp, (1,))):
        for port in ports:
            for length in range(len(frame) + 1):
                yield depth(3, 5, 1)
                yield Packet("cut off", port, frame[:length])
    for port in (1, 9):
        for length in [*range(50), 0x100, 0x8000, 0xFFFF]:
            yield Packet("UDP length", port, frames.gradients(header, b"", udp_length=length, **to))
        for version in range(16):
            yield Packet("DLCP version", port, frames.gradients(frames.dlcp(version=version, **fields), **to))
            yield Packet("DLCP type", port, frames.gradients(frames.dlcp(type=version, **fields), **to))
            yield Packet("IPv4 version", port, frames.gradients(header, version=version, **to))
        for ihl in range(16):
            yield Packet("IPv4 header length", port, frames.gradients(header, ihl=ihl, **to))
        for flag in range(8):
            yield Packet("flags", port, frames.gradients(frames.dlcp(flags=1 << flag, **fields), **to))
        for ttl in range(4):
            yield Packet("TTL", port, frames.gradients(header, ttl=ttl, **to))
        for fragment in (1 << bit for bit in range(16)):
            yield Packet("fragment", port, frames.gradients(header, fragment=fragment, **to))
        for dst_port in range(53692, 53708):
            yield Packet("UDP port", port, frames.gradients(header, dst_port=dst_port, **to))
    right = int.from_bytes(whole[24:26], "big")
    for wrong in [0, 0xFFFF, *(right ^ 1 << bit for bit in range(16))]:
        yield Packet("IPv4 checksum", 1, frames.gradients(header, header_checksum=wrong, **to))
    for protocol in (0, 1, 2, 5, 6, 7, 16, 17, 18, 41, 255):
        yield Packet("protocol", 1, frames.ethernet(frames.ipv4(whole[34:], protocol=protocol, **to)))
    traffic = Traffic(rng, site)
    for _ in range(150):
        yield Packet("mutated", rng.choice([1, 9]), traffic.mutated())


def checksums(rng: random.Random) -> Iterator[Step]:
    """Checksums that a switch changes, at the ends of their range: 0x0000 and 0xffff mean the same, or not."""
    site = plain_site()
    yield SetEntries(site.entries)
    to = {"src": ROUTED + 9, "dst": ROUTED + 2}
    for tags in range(0, 256, 5):
        for sum_sent in (0, 1, 2, 0x7FFF, 0xFFFE, 0xFFFF):
            fields = {"queue": tags >> 5, "drop_class": tags >> 2 & 7, "spare": tags & 3, "layer": rng.getrandbits(8)}
            yield Packet("UDP checksum", 9, frames.gradients(frames.dlcp(**fields), udp_checksum=sum_sent, **to))
    for sum_wanted in (0, 1, 0xFFFE, 0xFFFF):
        for _ in range(12):
            fields = {"queue": rng.randrange(8), "drop_class": rng.randrange(8), "layer": rng.getrandbits(8)}
            before = fields["queue"] << 13 | fields["drop_class"] << 10 | fields["layer"]
            after = 1 << 13 | fields["layer"]
            # What the sender would have written so that this comes out: RFC 1624 the other way round.
            sum_sent = (~_add(_add(sum_wanted ^ 0xFFFF, before), after ^ 0xFFFF)) & 0xFFFF
            frame = frames.gradients(frames.dlcp(**fields), udp_checksum=sum_sent, **to)
            yield Packet("UDP checksum comes out", 9, frame)
    for payload_size in range(40):
        frame = frames.gradients(frames.dlcp(queue=6, drop_class=3), rng.randbytes(payload_size), **to)
        yield Packet("UDP checksum of a payload", 9, frame)
    # IPv4: the identification is chosen so that the header checksum, as sent and as it leaves, is at an end of its range.
    for port, ttl in itertools.product((1, 9), (2, 64)):
        for wanted in (0x0000, 0x0001, 0x00FF, 0x0100, 0xFEFF, 0xFF00, 0xFFFE, 0xFFFF):
            probe = frames.gradients(frames.dlcp(), ttl=ttl, identification=0, **to)
            start = int.from_bytes(probe[24:26], "big")
            identification = _add(start, wanted ^ 0xFFFF)
            for near in (-1, 0, 1):
                frame = frames.gradients(frames.dlcp(), ttl=ttl, identification=(identification + near) & 0xFFFF, **to)
                yield Packet("IPv4 checksum", port, frame)
                other_zero = bytearray(frame)
                if frame[24:26] in (b"\0\0", b"\xff\xff"):
                    other_zero[24:26] = bytes(255 - byte for byte in frame[24:26])
                    yield Packet("IPv4 checksum, the other zero", port, bytes(other_zero))


def _add(left: int, right: int) -> int:
    """Add in one's complement."""
    total = left + right
    return (total & 0xFFFF) + (total >> 16)


@dataclass
class Message:
    """A message whose packets may be dropped."""

    job: int = 7
    step: int = 0
    message: int = 0
    sender: int = 0

    def owner(self) -> int:
        return zlib.crc32(struct.pack(">HIHH", self.job, self.step, self.message, self.sender))

    def packet(self, kind: str, *, port: int = 1, to: int = 3, payload: bytes = b"", tos: int = 0, **fields: int) -> Packet:
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


def drops(rng: random.Random) -> Iterator[Step]:
    """The drop rule: thresholds, budgets, slots that are another's, and slots that age."""
    thresholds = {(queue, drop_class): 4 * (8 - drop_class) for queue in range(2, 7) for drop_class in range(1, 8)}
    excess = {"table": "job_share", "match": {"job": 2, "control": 0, "eg_port": 3}, "action": "metered", "meter": RED}
    site = plain_site(thresholds=thresholds | {(0, 6): 10, (1, 3): 0}, more=(excess,))
    yield SetEntries(site.entries)
    for drop_class in range(8):  # the threshold itself is not above the threshold
        limit = thresholds.get((5, drop_class), 0)
        for packets in (0, limit, limit + 1, 2**19 - 1):
            message = Message(message=drop_class, step=packets)
            yield depth(3, 5, packets)
            yield message.packet("threshold", drop_class=drop_class)
            yield message.packet("depth overwritten by egress", drop_class=drop_class)
    for budget in (0, 1, 2, 3, 65535):
        message = Message(message=100, step=budget)
        for _ in range(5):
            yield depth(3, 5, 60)
            yield message.packet("budget", budget=budget)
        yield message.packet("budget raised", budget=budget + 2 & 0xFFFF)
    full = Message(message=101)
    yield WriteRegister("slot_owner", full.owner() & 0xFFFF, full.owner())
    yield WriteRegister("slot_spent", full.owner() & 0xFFFF, 0xFFFE)
    for budget in (65535, 65535, 65535):
        yield depth(3, 5, 60)
        yield full.packet("count at its end", budget=budget)
    for _ in range(8):
        first, second = colliding(rng)
        slot = first.owner() & 0xFFFF
        for message in (first, second, second, first, first):
            yield depth(3, 5, 60)
            yield message.packet("slot taken", budget=2)
        for age_us in (500_000, 2_000_000, 1 << 31, (1 << 32) - 200_000):
            yield AgeSlot("slot_used_us", slot, age_us)
            for message in (second, first):
                yield depth(3, 5, 60)
                yield message.packet(f"slot aged {age_us} us", budget=2)
    first, second = colliding(rng)
    for pause_s, message in ((0, first), (0, second), (0.5, second), (0.8, second), (0.2, first), (1.3, first)):
        yield Sleep(pause_s)
        yield depth(3, 5, 60)
        yield message.packet("slot aged by waiting")
    for name, fields in {
        "protected": {"flags": 0x80},
        "sent again": {"flags": 0x40},
        "trimmed": {"flags": 0x20},
        "congestion": {"flags": 0x10},
        "control": {"type": 5},
        "class 0": {"drop_class": 0},
        "over the share": {"job": 2},
        "ordinary queue": {"queue": 1, "drop_class": 3},
    }.items():
        for queue in (0, 1, 5):
            yield depth(3, queue, 100)
        for _ in range(2):
            yield Message(job=fields.get("job", 7), message=200).packet(name, **{k: v for k, v in fields.items() if k != "job"})
    for _ in range(300):
        message = Message(rng.choice([2, 7]), 1, rng.randrange(20), rng.randrange(2))
        if rng.random() < 0.8:
            yield depth(rng.choice([2, 3]), rng.randrange(8), rng.randrange(40))
        yield message.packet(
            "random drops",
            port=rng.choice([1, 1, 1, 9]),
            to=rng.choice([2, 3]),
            queue=rng.randrange(8),
            drop_class=rng.randrange(8),
            budget=rng.randrange(6),
            flags=rng.choice([0, 0, 0, 0, 0x80, 0x40]),
            index=rng.getrandbits(16),
        )


def shares(rng: random.Random) -> Iterator[Step]:
    """Meters: buckets of so many bytes that never fill again, of every colour, and one that fills."""
    buckets = {
        (1, 0): meter(1000, 3000),
        (1, 1): meter(3000, 3000),
        (2, 0): meter(0, 500),
        (2, 1): meter(81, 82),
        (7, 0): GREEN,
        (7, 1): RED,
        (0x1234, 0): YELLOW,
        (0x1234, 1): None,
        (0xFFFF, 0): meter(1000, 1000, rate=10_000),
    }
    entries: list[Entry] = []
    for (job, control), rates in buckets.items():
        entry: Entry = {"table": "job_share", "match": {"job": job, "control": control, "eg_port": 3}, "action": "metered"}
        entries.append(entry | ({"meter": rates} if rates else {}))
    entries.append({"table": "job_share", "match": {"job": 7, "control": 0, "eg_port": 2}, "action": "unlimited"})
    site = plain_site(thresholds={(0, 6): 3, (5, 6): 3}, more=tuple(entries))
    yield SetEntries(site.entries)
    for job, size in itertools.product((1, 2, 7, 0x1234, 3), (0, 1, 2, 200, 900)):
        for number in range(6):
            for queue in (0, 5):
                yield depth(3, queue, 5)
            payload = rng.randbytes(size)
            kind = "share of control" if number % 2 else "share of data"
            yield Message(job, number).packet(kind, type=5 if number % 2 else 1, payload=payload, to=rng.choice([2, 3, 3]))
    payload = bytes(800)
    for pause_s in (0, 0, 0.25, 0, 0.25):
        yield Sleep(pause_s)
        yield Message(0xFFFF).packet("bucket that fills", payload=payload, drop_class=0)


def changes(rng: random.Random) -> Iterator[Step]:
    """Entries that come, change and go between packets; handles are used again, and with them the order of ties."""
    site = plain_site(thresholds={(queue, 6): 2 for queue in range(8)}, marks={5: 0})
    profile = site.entries["profiles"][0]
    profile["groups"] = [{"id": 1, "members": [4, 2]}, {"id": 2, "members": [1]}]
    yield SetEntries(site.entries)
    traffic = Traffic(rng, site)

    def some(kind: str, count: int = 6) -> Iterator[Step]:
        for _ in range(count):
            yield depth(rng.choice(site.out_ports), rng.randrange(8), rng.randrange(5))
            yield Packet(kind, rng.choice([1, 2, 9]), traffic.data())

    route: Entry = {"table": "ipv4_route", "match": {"ipv4_dst": "10.0.0.0/30"}}
    yield from some("before changes")
    yield Change("insert", route | {"group": 1})
    for members in ([4, 2], [1, 2, 3], [3], [4, 3, 2, 1], [2, 3]):
        yield SetGroup("route_selector", 1, members)
        for host in (1, 2, 3):
            wide = {"table": "ipv4_route", "match": {"ipv4_dst": f"10.0.0.{host}/32"}}
            yield Change("modify", wide | ({"group": 1} if len(members) > 1 else {"member": host}))
        yield from some("group changed", 14)
    yield Change("modify", route | {"group": 2})
    for host in (1, 2, 3):
        yield Change("delete", {"table": "ipv4_route", "match": {"ipv4_dst": f"10.0.0.{host}/32"}, "member": host})
        yield from some("route deleted")
    yield Change("modify", route | {"member": 3})
    yield from some("route changed")

    def same_priority(number: int, queue: int) -> Entry:
        match = {"drop_class": f"{number:#x}&&&{number:#x}"}
        action = {"action": "set_class", "params": {"queue": queue, "drop_class": 6}}
        return {"table": "classify", "match": match, "priority": 5, **action}

    for number, queue in ((1, 2), (2, 3), (4, 4)):
        yield Change("insert", same_priority(number, queue))
        yield from some("tie", 10)
    for number in (1, 2, 1, 4):
        yield Change("delete", same_priority(number, number))
        yield from some("tie, one gone", 6)
        yield Change("insert", same_priority(number, number + 2))
        yield from some("tie, one back", 10)
    yield Change("modify", same_priority(2, 6))
    yield from some("tie, one changed", 10)

    share: Entry = {"table": "job_share", "match": {"job": 7, "control": 0, "eg_port": 3}, "action": "metered"}
    other: Entry = {"table": "job_share", "match": {"job": 1, "control": 0, "eg_port": 3}, "action": "metered"}

    def jobs(kind: str) -> Iterator[Step]:
        for job in (7, 1, 7):
            yield Message(job, rng.getrandbits(32)).packet(kind, payload=rng.randbytes(4), drop_class=0)

    yield Change("insert", share | {"meter": RED})
    yield from jobs("meter")
    yield Change("modify", share | {"action": "unlimited"})
    yield from jobs("meter not used")
    yield Change("modify", share)
    yield from jobs("meter used again")
    yield Change("delete", share)
    yield from jobs("meter gone")
    # The meter is given anew: BMv2 leaves what it was to the next entry of that handle, which P4Runtime forbids.
    yield Change("insert", other | {"meter": GREEN})
    yield from jobs("meter of a handle that was used before")
    yield Change("insert", share | {"meter": meter(200, 400)})
    for _ in range(3):
        yield from jobs("bucket")
    yield Change("modify", share | {"action": "unlimited", "meter": meter(500, 900)})
    yield from jobs("bucket of an action that does not look at it")
    yield Change("modify", share)
    for _ in range(4):
        yield from jobs("bucket used again")
    yield Change("modify", share | {"meter": meter(200, 400)})
    for _ in range(3):
        yield from jobs("bucket filled by writing it again")


def queues(rng: random.Random) -> Iterator[Step]:
    """Queues that really fill: tail drops, marks by depth, and a drop rule that reads what egress wrote."""
    numbers = itertools.count(1)

    def packet(kind: str, to: int, queue: int, **fields: int) -> Packet:
        number = next(numbers)
        payload = struct.pack(">I", number)
        tos = rng.choice([0, 1, 2, 3])
        return Message(7, number).packet(kind, to=to, queue=queue, index=number, payload=payload, tos=tos, **fields)

    for round_number in range(6):
        marks = {queue: rng.choice([0, 2, 5]) for queue in rng.sample(range(8), 6)}
        thresholds = {(queue, drop_class): 9 - drop_class for queue in range(8) for drop_class in range(4, 8)}
        yield SetEntries(plain_site(marks=marks, thresholds=thresholds).entries)
        for port in (2, 3):
            yield WriteRegister("queue_depth", depth_index(port, 5), 0)
        used = [(to, queue) for to in (2, 3) for queue in rng.sample(range(8), 3)]
        depths = {2: 6, 3: rng.choice([3, 9])}
        leads = [packet("lead of a burst", to, queue, drop_class=0) for to, queue in used]
        burst = [
            packet("burst", *rng.choice(used), drop_class=0 if round_number < 3 else rng.randrange(8), budget=1)
            for _ in range(48)
        ]
        yield Burst(leads, burst, depths)
        # The depth register now holds what the last packet of the burst left behind, which is zero.
        for to, queue in used:
            yield packet("after a burst", to, queue, drop_class=7, budget=1)
        depths_seen = [(to, queue, rng.randrange(12)) for to, queue in used]
        for to, queue, packets in depths_seen:
            yield depth(to, queue, packets)
        leads = []
        for to, queue in used:
            leads.append(packet("lead of a burst", to, queue, drop_class=0))
        yield Burst(leads, [packet("burst", *rng.choice(used), drop_class=7, budget=1) for _ in range(24)], depths)


SCENARIOS: dict[str, Callable[[random.Random], Iterator[Step]]] = {
    **{f"mixed{number}": mixed for number in range(1, MIXED + 1)},
    "malformed": malformed,
    "checksums": checksums,
    "drops": drops,
    "shares": shares,
    "changes": changes,
    "queues": queues,
}


def steps(name: str, seed: int = 1) -> list[Step]:
    """Return the steps of a scenario, without answers."""
    return list(SCENARIOS[name](random.Random(f"{name} {seed}")))
