# SPDX-License-Identifier: Apache-2.0
"""From a fabric and its policy to what a switch's tables hold: shortest paths first, then the entries."""

import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from dlcp.controller.fabric import PORT_MAX, Fabric, Job, Port, distances
from dlcp.controller.policy import Remap
from dlcp.switch import QUEUES, Entries, MeterConfig, Profile, ProfileGroup, ProfileMember, TableEntry, Value
from dlcp.wire import DROP_CLASSES, PacketType, Queue

_GROUP_BITS: Final = 0x3FFFFFFF


class SprayGroup(NamedTuple):
    """A set of ports that lead to some host at equal cost, and the number it has in the action profile."""

    id: int
    ports: tuple[int, ...]


def next_hops(fabric: Fabric, switch: str) -> dict[str, tuple[int, ...]]:
    """Return for each host the ports of a switch that are the first step of a shortest path to it, lowest first.

    A path is as long as the switches on it are many. The hosts at one switch share their ports.
    """
    to_edge: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for host in fabric.hosts:
        at = fabric.attachments[host.name]
        if at.switch == switch:
            found[host.name] = (at.number,)
            continue
        if at.switch not in to_edge:
            to_edge[at.switch] = _ports_toward(fabric, switch, distances(fabric, at.switch))
        found[host.name] = to_edge[at.switch]
    return found


def most_switches(fabric: Fabric) -> int:
    """Return how many switches the packets of one message cross at most: all on any shortest path between two hosts.

    They are sprayed over all of these paths, and each switch drops by a count of its own. So hosts divide a message's
    drop budget by this number (their option ``switch_hops``), else the switches together could exceed its bound.
    """
    edges = {at.switch for at in fabric.attachments.values()}
    found = {edge: distances(fabric, edge) for edge in edges}
    return max(
        sum(found[one][switch.name] + found[other][switch.name] == found[one][other] for switch in fabric.switches)
        for one, other in product(edges, edges)
    )


def spray_groups(hops: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], SprayGroup]:
    """Return one group for each set of ports in ``hops``.

    The number of a group follows from its ports. So a set that changes gets a group of its own, which is there before
    the first route leads to it, and an unchanged one is never touched.
    """
    found: dict[tuple[int, ...], SprayGroup] = {}
    taken: set[int] = set()
    for ports in sorted(set(hops.values())):
        number = ports[0] if len(ports) == 1 else PORT_MAX + 1 + (zlib.crc32(bytes(ports)) & _GROUP_BITS)
        while number in taken:
            number += 1
        taken.add(number)
        found[ports] = SprayGroup(number, ports)
    return found


def next_hop_mac(fabric: Fabric, port: Port) -> str:
    """Return the Ethernet address at the other end of a port: the host's, or the one that a switch's port goes by."""
    neighbour = fabric.neighbours[port.switch][port.number]
    if neighbour.host is not None:
        return neighbour.host.mac.lower()
    assert neighbour.port is not None  # a link has two ends
    return port_mac(fabric, neighbour.port)


def port_mac(fabric: Fabric, port: Port) -> str:
    """Return the Ethernet address that a switch's port goes by: locally administered, 02:00:01, switch, port."""
    index = [switch.name for switch in fabric.switches].index(port.switch)
    return f"02:00:01:{index >> 8:02x}:{index & 0xFF:02x}:{port.number:02x}"


def _ports_toward(fabric: Fabric, switch: str, distance: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        number
        for number, neighbour in fabric.neighbours[switch].items()
        if neighbour.port is not None and distance[neighbour.port.switch] == distance[switch] - 1
    )


_OTHER_JOBS: Final = 1
_NAMED_JOB: Final = 2
"""Priorities in `classify`; what the policy remaps lies above both."""
_BURST_PACKETS_MIN: Final = 8
"""A meter's burst is at least this many packets of the largest size, else a job could not send back to back."""


def entries(fabric: Fabric, switch: str) -> Entries:
    """Return everything that a switch of a fabric has to be told: tables, routes, meters and ports."""
    ports = [Port(switch, number) for number in fabric.neighbours[switch]]
    hops = next_hops(fabric, switch)
    groups = spray_groups(hops)
    members = sorted({port for group in groups for port in group})
    profile = Profile(
        "route_selector",
        tuple(_member(fabric, Port(switch, number)) for number in members),
        tuple(ProfileGroup(group.id, group.ports) for group in groups.values()),
    )
    tables = (
        *_routes(fabric, hops, {ports: group.id for ports, group in groups.items()}),
        *_trust(fabric, ports),
        *_named_jobs(fabric.jobs),
        *_remaps(fabric.policy.remap, fabric.jobs),
        *_drop_thresholds(fabric, ports),
        *_ecn_thresholds(fabric, ports),
        *_shares(fabric, ports),
    )
    return Entries(profiles=(profile,), entries=tables, ports={port.number: fabric.queueing_at(port) for port in ports})


def _member(fabric: Fabric, port: Port) -> ProfileMember:
    """Return the member that leads out of a port; it has the port's number."""
    return ProfileMember(port.number, "to_next_hop", {"port": port.number, "mac": next_hop_mac(fabric, port)})


def _routes(fabric: Fabric, hops: dict[str, tuple[int, ...]], groups: dict[tuple[int, ...], int]) -> list[TableEntry]:
    """Return the routes to all hosts. What is not IPv4 cannot be sprayed: it takes one of the ports, by the host."""
    routes = [
        TableEntry("ipv4_route", {"ipv4_dst": f"{host.address}/32"}, group=groups[hops[host.name]])
        for host in fabric.hosts
    ]
    for index, host in enumerate(fabric.hosts):
        ports = hops[host.name]
        to_port: dict[str, Value] = {"port": ports[index % len(ports)]}
        routes.append(TableEntry("ethernet_route", {"ethernet_dst": host.mac.lower()}, "to_port", to_port))
    return routes


def _trust(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    """Trust the ports that lead to trusted hosts, and to switches: those have cleared what was not to be believed."""
    trusted = []
    for port in ports:
        host = fabric.neighbours[port.switch][port.number].host
        if host is None or host.trusted:
            trusted.append(TableEntry("port_trust", {"ig_port": port.number}, "trust"))
    return trusted


def _named_jobs(jobs: Sequence[Job]) -> list[TableEntry]:
    """Put the packets of jobs that a fabric does not name below all other traffic, where it names any.

    Else a host could have a job number that has no share, and so no limit.
    """
    if not jobs:
        return []
    lowest: dict[str, Value] = {"queue": int(Queue.EXCESS), "drop_class": 0}
    named = [TableEntry("classify", {"job": job.id}, "as_tagged", priority=_NAMED_JOB) for job in jobs]
    return [TableEntry("classify", {}, "set_class", lowest, priority=_OTHER_JOBS), *named]


def _remaps(remaps: Sequence[Remap], jobs: Sequence[Job]) -> list[TableEntry]:
    """Return the remaps as entries.

    There is one for each tag where a part of the tag is kept, and for each job where a fabric names its jobs and the
    remap none: what is said of any job must not lift others out of the lowest queue.
    """
    found = []
    for index, remap in enumerate(remaps):
        job_ids = [job.id for job in jobs] if jobs and remap.job is None else [remap.job]
        queues = [remap.queue] if remap.queue is not None or remap.to_queue is not None else range(QUEUES)
        kept = remap.drop_class is not None or remap.to_drop_class is not None
        classes = [remap.drop_class] if kept else range(DROP_CLASSES)
        for job_id, queue, drop_class in product(job_ids, queues, classes):
            match: dict[str, Value] = {"type": int(PacketType.DATA)}
            given = {"job": job_id, "queue": queue, "drop_class": drop_class}
            match.update({name: value for name, value in given.items() if value is not None})
            to_queue = queue if remap.to_queue is None else remap.to_queue
            to_class = drop_class if remap.to_drop_class is None else remap.to_drop_class
            assert to_queue is not None  # whichever is not changed is spelt out above
            assert to_class is not None
            params: dict[str, Value] = {"queue": to_queue, "drop_class": to_class}
            priority = _NAMED_JOB + len(remaps) - index
            found.append(TableEntry("classify", match, "set_class", params, priority=priority))
    return found


def _drop_thresholds(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    depths = _depths(fabric, ports)
    return [
        TableEntry(
            "drop_threshold",
            {"queue": queue, "drop_class": drop_class},
            "drop_above",
            {"depth": fabric.policy.of_queue(queue).drop_above(drop_class, depths[queue])},
        )
        for queue in range(QUEUES)
        for drop_class in range(1, DROP_CLASSES)
    ]


def _ecn_thresholds(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    depths = _depths(fabric, ports)
    return [
        TableEntry(
            "ecn_threshold",
            {"queue": queue},
            "mark_above",
            {"depth": fabric.policy.of_queue(queue).mark_above(depths[queue])},
        )
        for queue in range(QUEUES)
        if queue != Queue.CONTROL
    ]


def _depths(fabric: Fabric, ports: Sequence[Port]) -> list[int]:
    """Return the depth of each queue in packets where it is shallowest: thresholds are the same at all ports."""
    depths = []
    for port in ports:
        queueing = fabric.queueing_at(port)
        limit = queueing.limit_packets
        depths.append([depth if limit is None else min(depth, limit) for depth in queueing.depths()])
    return [min(depth[queue] for depth in depths) for queue in range(QUEUES)]


def _shares(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    return [
        TableEntry(
            "job_share",
            {"job": job.id, "control": control, "eg_port": port.number},
            "metered",
            meter=_meter(fabric, port, job, job.control_share if control else fabric.share_at(job, port)),
        )
        for job in fabric.jobs
        for port in ports
        for control in (0, 1)
    ]


def _meter(fabric: Fabric, port: Port, job: Job, share: float) -> MeterConfig:
    """Return the meter of a share. Both rates are the same: a job is within its share or it is not."""
    port_bytes_per_s = fabric.queueing_at(port).rate_bps / 8
    rate = max(1, int(share * port_bytes_per_s))
    burst = max(int(job.burst_s * port_bytes_per_s), _BURST_PACKETS_MIN * fabric.mtu_bytes)
    return MeterConfig(rate, burst, rate, burst)
