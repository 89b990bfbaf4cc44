# SPDX-License-Identifier: Apache-2.0
"""From a fabric and its policy to what a switch's tables hold."""

from collections.abc import Sequence
from itertools import product
from typing import Final

from dlcp.controller.fabric import Fabric, Job, Port
from dlcp.controller.paths import next_hop_mac, next_hops, spray_groups
from dlcp.controller.policy import Remap

from dlcp.switch import QUEUES, Entries, MeterConfig, Profile, ProfileGroup, ProfileMember, TableEntry, Value
from dlcp.wire import DROP_CLASSES, PacketType, Queue

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
