# SPDX-License-Identifier: Apache-2.0
"""Sets of entries: a small one to build on, and random ones that use every table."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.conformance import frames
from tests.conformance.recording import Markers

Entry = dict[str, Any]
JOBS = (1, 2, 7, 0x1234, 0xFFFF)
ROUTED = 0x0A000000
"""10.0.0.0/8: where routes lead."""
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
    members = [{"id": k, "action": "to_next_hop", "params": {"port": k, "mac": mac_text(k)}} for k in hosts]
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


def random_site(rng: random.Random, *, thresholds: bool) -> Site:
    """Return entries of every table (but ``drop_threshold`` if not asked for), with overlaps, in random order."""
    ports = rng.sample([*range(13), 59, 64, 100, 300, 510], 12)
    if rng.random() < 0.3:
        ports[0] = 511  # a route to the drop port
    members = [
        {"id": k + 1, "action": "to_next_hop", "params": {"port": port, "mac": mac_text(0x100 + k)}}
        for k, port in enumerate(ports)
    ]
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
        if rng.random() < 0.8:
            base, _, length = prefix.partition("/")
            match = {"ipv6_dst": f"fd00::{base}/{96 + int(length)}"}
            entries.append({"table": "ipv6_route", "match": match, **target})
    stations = rng.sample(range(0x200, 0x240), 6)
    for station in stations[:4]:
        entry = {"table": "ethernet_route", "match": {"ethernet_dst": mac_text(station)}}
        entries.append(entry | {"action": "to_port", "params": {"port": rng.choice(ports)}})
    entries.append({"table": "ethernet_route", "match": {"ethernet_dst": mac_text(stations[4])}, "action": "no_route"})
    entries += _classes(rng)
    for queue, drop_class in rng.sample(list(itertools.product(range(8), range(8))), 30 * thresholds):
        match = {"queue": queue, "drop_class": drop_class}
        action: Entry = {"action": "drop_above", "params": {"depth": rng.choice([0, 1, 8, 40, 2**19 - 1])}}
        entries.append({"table": "drop_threshold", "match": match, **action})
    for queue in rng.sample(range(8), 5):
        action = {"action": "mark_above", "params": {"depth": rng.choice([0, 5, 2**19 - 1])}}
        entries.append({"table": "ecn_threshold", "match": {"queue": queue}, **action})
    for job in rng.sample(JOBS, 3):
        entries.append({"table": "trimming", "match": {"job": job}, "action": "trim"})
    for priority, job in enumerate([*rng.sample(JOBS, 2), None], 1):
        match = {} if job is None else {"job": job}
        part = {"action": "part_of_budget", "params": {"halvings": rng.choice([0, 0, 1, 2, 15])}}
        entries.append({"table": "budget_part", "match": match, "priority": 9 - priority, **part})
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
