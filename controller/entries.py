# SPDX-License-Identifier: Apache-2.0
"""Derive a switch's table entries from a fabric and its policy: shortest paths first, then the entries."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from itertools import chain, product
from typing import Final

from dlcp.controller.fabric import PORT_MAX, Fabric, Host, Job, Port, Remap, distances
from dlcp.switch import QUEUES, Action, Entries, GroupRef, MeterConfig, Profile, TableEntry
from dlcp.wire import DROP_CLASSES, FIELD_BITS, PacketType, Queue

_GROUP_BITS: Final = 0x3FFFFFFF


_TRIAL_SHARE: Final = 31
"""How many packets take each good path while one takes a path on trial."""


def next_hops(
    fabric: Fabric, switch: str, without: Collection[str | Port] = (), on_trial: Collection[Port] = ()
) -> dict[str, tuple[int, ...]]:
    """Return for each host the ports of a switch that begin a shortest path to it, lowest first.

    The length of a path is the number of switches on it, so all hosts at one switch are reached over the same ports.

    Parameters
    ----------
    without
        Switches and links, the latter by both ports, that no path leads over, if there is another from this switch.
    on_trial
        Links, by both ports, that few packets should take: where there is as short a path without them, the port that
        begins it is repeated.
    """
    to_edge: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for host in fabric.hosts:
        at = fabric.attachments[host.name]
        if at.switch == switch:
            found[host.name] = (at.number,)
            continue
        if at.switch not in to_edge:
            to_edge[at.switch] = _ports_toward(fabric, switch, at.switch, without)
            good = _ports_toward(fabric, switch, at.switch, {*without, *on_trial}) if on_trial else ()
            if good and set(good) < set(to_edge[at.switch]):
                repeated = ((port,) * (_TRIAL_SHARE if port in good else 1) for port in to_edge[at.switch])
                to_edge[at.switch] = tuple(chain.from_iterable(repeated))
        found[host.name] = to_edge[at.switch]
    return found


def spray_groups(hops: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Return an action profile group's id for each set of equal-cost ports in ``hops``.

    A group's id is derived from its ports. So a changed set gets a new group, written before the first route that
    refers to it, and an unchanged group is never touched.
    """
    found: dict[tuple[int, ...], int] = {}
    for ports in sorted(set(hops.values())):
        number = ports[0] if len(ports) == 1 else PORT_MAX + 1 + (zlib.crc32(bytes(ports)) & _GROUP_BITS)
        while number in found.values():
            number += 1
        found[ports] = number
    return found


def next_hop_mac(fabric: Fabric, port: Port) -> int:
    """Return the Ethernet address at the other end of a port: the host's, or that of the other switch's port."""
    neighbour = fabric.neighbours[port.switch][port.number]
    if neighbour.host is not None:
        return _mac(neighbour.host)
    assert neighbour.port is not None  # a link has two ends
    return port_mac(fabric, neighbour.port)


def port_mac(fabric: Fabric, port: Port) -> int:
    """Return the Ethernet address of a switch's port: locally administered, 02:00:01, switch index, port."""
    index = [switch.name for switch in fabric.switches].index(port.switch)
    return 0x020001 << 24 | index << 8 | port.number


def _mac(host: Host) -> int:
    return int(host.mac.replace(":", ""), 16)


def _ports_toward(fabric: Fabric, switch: str, edge: str, without: Collection[str | Port]) -> tuple[int, ...]:
    distance = distances(fabric, edge, without)
    if switch not in distance:  # no packets come here
        return _ports_toward(fabric, switch, edge, ())
    return tuple(
        number
        for number, neighbour in fabric.neighbours[switch].items()
        if neighbour.port is not None
        and neighbour.port not in without
        and distance.get(neighbour.port.switch) == distance[switch] - 1
    )


_OTHER_JOBS: Final = 1
_NAMED_JOB: Final = 2
"""Priorities in `classify`; remaps of the policy have higher ones."""
_CLASSIFIED: Final = {name: (1 << FIELD_BITS[name]) - 1 for name in ("type", "job", "queue", "drop_class")}
"""Masks of the fields of `classify` that match a single value."""
_BURST_PACKETS_MIN: Final = 8
"""Smallest burst of a meter, in packets of the largest size, so that a job can send back to back."""


def entries(
    fabric: Fabric, switch: str, without: Collection[str | Port] = (), on_trial: Collection[Port] = ()
) -> Entries:
    """Return the complete configuration of a switch of a fabric: tables, routes, meters and ports.

    ``without`` and ``on_trial`` are as for :func:`next_hops`. Parts of budgets stay, since what is avoided comes back.
    """
    ports = [Port(switch, number) for number in fabric.neighbours[switch]]
    hops = next_hops(fabric, switch, without, on_trial)
    groups = spray_groups(hops)
    members = sorted({port for group in groups for port in group})
    profile = Profile(
        "route_selector",
        tuple((number, _to_next_hop(fabric, Port(switch, number))) for number in members),
        tuple((number, group) for group, number in groups.items()),
    )
    tables = (
        *_routes(fabric, hops, groups),
        *_trust(fabric, ports),
        *_named_jobs(fabric.jobs),
        *_remaps(fabric.policy.remap, fabric.jobs),
        *_budget_part(fabric, switch),
        *(TableEntry("trimming", {"job": job}, Action("trim")) for job in fabric.policy.trim),
        *_drop_thresholds(fabric, ports),
        *_ecn_thresholds(fabric, ports),
        *_shares(fabric, ports),
    )
    return Entries(profiles=(profile,), entries=tables, ports={port.number: fabric.queueing_at(port) for port in ports})


def _to_next_hop(fabric: Fabric, port: Port) -> Action:
    """Return the action that forwards to a port; the id of its action profile member is the port's number."""
    return Action("to_next_hop", {"port": port.number, "mac": next_hop_mac(fabric, port)})


def _routes(fabric: Fabric, hops: dict[str, tuple[int, ...]], groups: dict[tuple[int, ...], int]) -> list[TableEntry]:
    """Return the routes to all hosts. Frames without IP cannot be sprayed: each host gets one of the ports."""
    routes = []
    for host in fabric.hosts:
        address, group = ip_address(host.address), GroupRef(groups[hops[host.name]])
        family = f"ipv{address.version}"
        destination = int(address), address.max_prefixlen
        routes.append(TableEntry(f"{family}_route", {f"{family}_dst": destination}, group))
    for index, host in enumerate(fabric.hosts):
        ports = hops[host.name]
        to_port = Action("to_port", {"port": ports[index % len(ports)]})
        routes.append(TableEntry("ethernet_route", {"ethernet_dst": _mac(host)}, to_port))
    return routes


def _trust(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    """Trust ports to trusted hosts and to switches: a switch has already cleared the tags of untrusted hosts."""
    trusted = []
    for port in ports:
        host = fabric.neighbours[port.switch][port.number].host
        if host is None or host.trusted:
            trusted.append(TableEntry("port_trust", {"ig_port": port.number}, Action("trust")))
    return trusted


def _named_jobs(jobs: Sequence[Job]) -> list[TableEntry]:
    """If a fabric names jobs, give the packets of all other jobs the lowest priority.

    Otherwise a host could use a job id without a share, and so without a limit.
    """
    if not jobs:
        return []
    lowest = Action("set_class", {"queue": int(Queue.EXCESS), "drop_class": 0})
    named = [
        TableEntry("classify", {"job": (job.id, _CLASSIFIED["job"])}, Action("as_tagged"), _NAMED_JOB) for job in jobs
    ]
    return [TableEntry("classify", {}, lowest, _OTHER_JOBS), *named]


def _remaps(remaps: Sequence[Remap], jobs: Sequence[Job]) -> list[TableEntry]:
    """Return the remaps as entries.

    A remap that keeps the queue or the drop class becomes one entry for each value of it. A remap without a job becomes
    one entry for each job that the fabric names, so that it does not lift other jobs out of the lowest queue.
    """
    found = []
    for index, remap in enumerate(remaps):
        job_ids = [job.id for job in jobs] if jobs and remap.job is None else [remap.job]
        queues = [remap.queue] if remap.queue is not None or remap.to_queue is not None else range(QUEUES)
        kept = remap.drop_class is not None or remap.to_drop_class is not None
        classes = [remap.drop_class] if kept else range(DROP_CLASSES)
        for job_id, queue, drop_class in product(job_ids, queues, classes):
            given = {"type": int(PacketType.DATA), "job": job_id, "queue": queue, "drop_class": drop_class}
            match = {name: (value, _CLASSIFIED[name]) for name, value in given.items() if value is not None}
            to_queue = queue if remap.to_queue is None else remap.to_queue
            to_class = drop_class if remap.to_drop_class is None else remap.to_drop_class
            assert to_queue is not None  # the loop enumerates what the remap keeps
            assert to_class is not None
            action = Action("set_class", {"queue": to_queue, "drop_class": to_class})
            found.append(TableEntry("classify", match, action, _NAMED_JOB + len(remaps) - index))
    return found


def _budget_part(fabric: Fabric, switch: str) -> list[TableEntry]:
    part = Action("part_of_budget", {"halvings": fabric.budget_parts[switch]})
    return [TableEntry("budget_part", {}, part, 1)]


def _drop_thresholds(fabric: Fabric, ports: Sequence[Port]) -> list[TableEntry]:
    depths = _depths(fabric, ports)
    return [
        TableEntry(
            "drop_threshold",
            {"queue": queue, "drop_class": drop_class},
            Action("drop_above", {"depth": fabric.policy.of_queue(queue).drop_above(drop_class, depths[queue])}),
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
            Action("mark_above", {"depth": fabric.policy.of_queue(queue).mark_above(depths[queue])}),
        )
        for queue in range(QUEUES)
        if queue != Queue.CONTROL
    ]


def _depths(fabric: Fabric, ports: Sequence[Port]) -> list[int]:
    """Return each queue's smallest depth over all ports, in packets: thresholds are the same at all ports."""
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
            Action("metered"),
            meter=_meter(fabric, port, job, job.control_share if control else fabric.share_at(job, port)),
        )
        for job in fabric.jobs
        for port in ports
        for control in (0, 1)
    ]


def _meter(fabric: Fabric, port: Port, job: Job, share: float) -> MeterConfig:
    """Return the meter of a share. Both rates are equal: a job is either within its share or above it."""
    port_bytes_per_s = fabric.queueing_at(port).rate_bps / 8
    rate = max(1, int(share * port_bytes_per_s))
    burst = max(int(job.burst_s * port_bytes_per_s), _BURST_PACKETS_MIN * fabric.mtu_bytes)
    return MeterConfig(rate, burst, rate, burst)
