# SPDX-License-Identifier: Apache-2.0
"""The fuzzer's inputs: random entries that change, packets good and bad, depths, budget slots and full queues."""

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

from tests.conformance.recording import (
    AgeSlot,
    Burst,
    Change,
    Markers,
    Packet,
    SetEntries,
    SetGroup,
    Step,
    WriteRegister,
)
from tests.conformance.scenarios import depth, depth_index
from tests.conformance.sites import GREEN, JOBS, Site, meter, plain_site, random_site
from tests.conformance.traffic import Message, Traffic, colliding

SITES = 4
"""Sets of entries in a sequence."""
BOUNDARIES = [end + near for end in (0, 14, 34, 38, 42, 74) for near in (-1, 0, 1) if end + near >= 0]
"""Lengths at which a header ends, and a byte more or less."""
DEPTHS = [0, 1, 2, 7, 8, 9, 39, 40, 41, 2**19 - 1]
AGES_US = [500_000, 2_000_000, 1 << 31, (1 << 32) - 60_000_000]
SLOT_BITS, OWNED = 16, 1 << 31
BURST_PACKETS = 40


def sequence(seed: str, packets: int) -> list[Step]:
    """Return the steps of one sequence; the same for the same seed."""
    rng = random.Random(seed)
    made: list[Step] = []
    for number in range(SITES):
        # Without the drop rule packets do not depend on each other, so batches can be large.
        site = random_site(rng, thresholds=number % 2 == 0)
        _refilled(rng, site, used_before=number > 0)
        made.append(SetEntries(site.entries))
        made += _mixed(rng, site, (packets - BURST_PACKETS) // SITES, state=number % 2 == 0)
    made += _burst(rng)
    return made


def _refilled(rng: random.Random, site: Site, *, used_before: bool) -> None:
    """Give some meters a rate at which every packet finds full buckets, so that its size alone makes the colour.

    BMv2 leaves the meter of an entry that is gone to the next one of its handle, which P4Runtime forbids: entries that
    come after others say what their meter is.
    """
    for entry in site.entries["entries"]:
        if entry.get("action") != "metered":
            continue
        if rng.random() < 0.3:
            entry["meter"] = meter(rng.randrange(60, 110), rng.randrange(90, 140), rate=10**12)
        elif used_before:
            entry.setdefault("meter", GREEN)


def _mixed(rng: random.Random, site: Site, count: int, *, state: bool) -> Iterator[Step]:
    traffic = Traffic(rng, site)
    pair = colliding(rng)
    changing = [entry for entry in site.entries["entries"] if entry not in Markers.ENTRIES]
    gone: list[dict[str, Any]] = []
    for packet in traffic.packets(count):
        if rng.random() < 0.1:
            packet.kind, packet.data = f"{packet.kind}, cut at a boundary", packet.data[: rng.choice(BOUNDARIES)]
        elif state and rng.random() < 0.2:
            packet = _of_message(rng, site, rng.choice(pair))
        if state and rng.random() < 0.5:
            yield depth(rng.choice(site.out_ports), rng.randrange(8), rng.choice(DEPTHS))
        if state and rng.random() < 0.08:
            yield _slot(rng, rng.choice(pair))
        if rng.random() < 0.04:
            yield _change(rng, site, changing, gone)
        yield packet


def _of_message(rng: random.Random, site: Site, message: Message) -> Packet:
    """Return a packet of one of two messages that want the same budget slot."""
    return message.packet(
        "message",
        port=rng.choice(site.trusted),
        to=rng.choice(site.destinations) & 0xFFFFFF,
        queue=rng.randrange(8),
        drop_class=rng.randrange(8),
        budget=rng.choice([0, 1, 2, 3, 65535]),
        flags=rng.choice([0, 0, 0, 0, 0x80, 0x40]),
        index=rng.getrandbits(32),
        tos=rng.randrange(4),
    )


def _slot(rng: random.Random, message: Message) -> Step:
    slot = message.owner() & ((1 << SLOT_BITS) - 1)
    return rng.choice(
        [
            AgeSlot("slot_used_us", slot, rng.choice(AGES_US)),
            WriteRegister("slot_owner", slot, rng.choice([0, OWNED, message.owner() | OWNED, rng.getrandbits(32)])),
            WriteRegister("slot_spent", slot, rng.choice([0, 1, 2, 0xFFFE, 0xFFFF])),
        ]
    )


def _change(rng: random.Random, site: Site, there: list[dict[str, Any]], gone: list[dict[str, Any]]) -> Step:
    """Take an entry away, bring one back, give one another action, or change a group."""
    profile = site.entries["profiles"][0]
    what = rng.randrange(4)
    if what == 0 and there:
        gone.append(there.pop(rng.randrange(len(there))))
        return Change("delete", gone[-1])
    if what == 1 and gone:
        entry = gone.pop(rng.randrange(len(gone)))
        # What BMv2 leaves in the meter of a handle is not ours to compare, so the meter is always written.
        if entry.get("action") == "metered" and "meter" not in entry:
            entry = entry | {"meter": meter(700, 1500)}
        there.append(entry)
        return Change("insert", entry)
    if what == 2:
        members = [member["id"] for member in profile["members"]]
        group = rng.choice(profile["groups"])
        return SetGroup("route_selector", group["id"], rng.sample(members, rng.randrange(1, len(members) + 1)))
    routes = [entry for entry in there if entry["table"] == "ipv4_route"]
    if not routes:
        return depth(0, 0, 0)
    entry = rng.choice(routes)
    there.remove(entry)
    target = {"group": rng.choice(profile["groups"])["id"]}
    there.append({"table": "ipv4_route", "match": entry["match"], **target})
    return Change("modify", there[-1])


def _burst(rng: random.Random) -> Iterator[Step]:
    """Queues of random depths that really fill."""
    numbers = itertools.count(1)

    def packet(kind: str, to: int, queue: int, **fields: int) -> Packet:
        number = next(numbers)
        tags = {"queue": queue, "index": number, "payload": struct.pack(">I", number), "tos": rng.getrandbits(2)}
        return Message(rng.choice(JOBS), number).packet(kind, to=to, **tags, **fields)

    limits = [0, 1, 2, 3, 5, 8, 13]
    marks = {queue: rng.choice(limits) for queue in rng.sample(range(8), 6)}
    classes = itertools.product(range(8), range(1, 8))
    yield SetEntries(plain_site(marks=marks, thresholds={pair: rng.choice(limits) for pair in classes}).entries)
    used = [(to, queue) for to in (2, 3) for queue in rng.sample(range(8), rng.randrange(1, 5))]
    for to, queue in used:
        yield WriteRegister("queue_depth", depth_index(to, queue), rng.choice([0, 0, 3, 9]))
    leads = [packet("lead of a burst", to, queue, drop_class=0) for to, queue in used]
    rest = [
        packet("burst", *rng.choice(used), drop_class=rng.randrange(8), budget=rng.randrange(3))
        for _ in range(BURST_PACKETS - len(leads))
    ]
    yield Burst(leads, rest, {2: rng.randrange(1, 10), 3: rng.randrange(1, 10)})
