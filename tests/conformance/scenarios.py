# SPDX-License-Identifier: Apache-2.0
"""Inputs for simple_switch: entries and packets, the same for the same seed."""

import itertools
import random
import struct
from collections.abc import Callable, Iterator

from tests.conformance import frames
from tests.conformance.recording import AgeSlot, Burst, Change, Packet, SetEntries, SetGroup, Sleep, Step, WriteRegister
from tests.conformance.sites import GREEN, RED, ROUTED, YELLOW, Entry, meter, plain_site, random_site
from tests.conformance.traffic import Message, Traffic, colliding

MIXED, PASSING = 6, 3
"""Sets of random entries."""


def depth_index(port: int, queue: int) -> int:
    """Return where the depth of a queue stands in the register, as p4/README.md tells."""
    return (port & 63) << 3 | queue


def depth(port: int, queue: int, packets: int) -> WriteRegister:
    """Make the switch believe that a queue is so deep."""
    return WriteRegister("queue_depth", depth_index(port, queue), packets)


def mixed(rng: random.Random) -> Iterator[Step]:
    """Random packets over random entries, with depths that change."""
    site = random_site(rng, thresholds=True)
    yield SetEntries(site.entries)
    for packet in Traffic(rng, site).packets(250):
        if rng.random() < 0.4:
            yield depth(rng.choice(site.out_ports), rng.randrange(8), rng.choice([0, 1, 2, 9, 41, 2**19 - 1]))
        yield packet


def passing(rng: random.Random) -> Iterator[Step]:
    """Random packets over random entries without the drop rule: no packet depends on how the one before it left."""
    site = random_site(rng, thresholds=False)
    yield SetEntries(site.entries)
    yield from Traffic(rng, site).packets(250)


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
    # IPv4: the identification makes the header checksum, as sent or as it leaves, be at an end of its range.
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


def trimming(rng: random.Random) -> Iterator[Step]:
    """A job whose packets are trimmed, and one that loses them, with the whole budget and a part of it."""
    more: list[Entry] = [{"table": "trimming", "match": {"job": 0x1234}, "action": "trim"}]
    for priority, match, halvings in ((2, {"job": 1}, 2), (1, {}, 0)):
        part = {"action": "part_of_budget", "params": {"halvings": halvings}}
        more.append({"table": "budget_part", "match": match, "priority": priority, **part})
    yield SetEntries(plain_site(thresholds={(5, 6): 8}, more=tuple(more)).entries)
    for job, size in itertools.product((0x1234, 1), (0, 4, 1000)):
        for _ in range(10):
            yield depth(3, 5, 60)
            yield Message(job, size).packet("trimmed, or of a part", payload=rng.randbytes(size), budget=8)


def drops(rng: random.Random) -> Iterator[Step]:
    """The drop rule: thresholds, budgets, slots that are another's, and slots that age."""
    thresholds = {(queue, drop_class): 4 * (8 - drop_class) for queue in range(2, 7) for drop_class in range(1, 8)}
    excess = {
        "table": "job_share",
        "match": {"job": 2, "control": 0, "eg_port": 3},
        "action": "metered",
        "meter": RED,
    }
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
    for budget, packets in itertools.product((0, 1, 9), (10, 11, 60)):
        for _ in range(3):
            yield depth(3, 0, packets)
            yield Message(2, 150 + packets, budget).packet("over the share", budget=budget)
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
            yield Message(job=fields.get("job", 7), message=200).packet(
                name, **{k: v for k, v in fields.items() if k != "job"}
            )
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
        entry: Entry = {
            "table": "job_share",
            "match": {"job": job, "control": control, "eg_port": 3},
            "action": "metered",
        }
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
            yield Message(job, number).packet(
                kind, type=5 if number % 2 else 1, payload=payload, to=rng.choice([2, 3, 3])
            )
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

    share: Entry = {
        "table": "job_share",
        "match": {"job": 7, "control": 0, "eg_port": 3},
        "action": "metered",
    }
    other: Entry = {
        "table": "job_share",
        "match": {"job": 1, "control": 0, "eg_port": 3},
        "action": "metered",
    }

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
    """Queues that really fill: tail drops, marks by depth, and a drop rule that counts what waits."""
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
    **{f"passing{number}": passing for number in range(1, PASSING + 1)},
    "malformed": malformed,
    "checksums": checksums,
    "trimming": trimming,
    "drops": drops,
    "shares": shares,
    "changes": changes,
    "queues": queues,
}


def steps(name: str, seed: int = 1) -> list[Step]:
    """Return the steps of a scenario, without answers."""
    return list(SCENARIOS[name](random.Random(f"{name} {seed}")))
