# SPDX-License-Identifier: Apache-2.0
"""The ports that flows take, and the share of a flow that takes each.

If all packets are sprayed, links that every flow uses alike are one port: a bundle. A flow through a fat tree of 8,192
hosts then takes six ports instead of 546 links. Such links are found by colour refinement: hosts have a colour each,
and switches share one as long as they have the same links to the same colours. Links between two colours are a bundle.
Switches of one colour have the same distance to each host and the same number of next hops of each colour, so equal
shares stay equal.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.engines.flows.rates import UNLIMITED
from dlcp.sim.engines.kernel.arrays import mix
from dlcp.sim.engines.network_tables import Discipline, NetworkTables
from dlcp.sim.jit import call, entry
from dlcp.sim.network.nodes import Routes, cell_of

DELIVERY_MIN: Final = 0.01
"""A flow that loses more than 99 % of its packets makes no progress."""


@dataclass(frozen=True, slots=True)
class PortMap:
    """Ports, and what `trace` needs to find paths through them.

    Attributes
    ----------
    port
        int32 (links,): the port of each link.
    agent
        int32 (nodes,): the node whose routes stand for those of all nodes of the same colour.
    size
        int64 (ports,): links of each port.
    """

    port: NDArray[np.int32]
    agent: NDArray[np.int32]
    size: NDArray[np.int64]

    @classmethod
    def of(cls, plan: NetworkTables, routes: Routes) -> "PortMap":
        """Return the ports of a network: bundles if all packets are sprayed, otherwise links."""
        links, nodes = plan.links, len(plan.topology.names)
        if not all(rules.sprayed for rules in plan.transports):
            numbers = np.arange(len(links), dtype=np.int32)
            return cls(numbers, np.arange(nodes, dtype=np.int32), np.ones(len(links), np.int64))
        used = {*routes.choices.tolist(), *(-1 - routes.row[routes.row < 0]).tolist()}
        label = [(link.kibibyte_ps, link.delay_ps, number in used) for number, link in enumerate(links)]
        colour = _colours(plan, label)
        bundles: dict[Any, int] = {}
        port = [
            bundles.setdefault((colour[link.source], colour[link.target], label[number]), len(bundles))
            for number, link in enumerate(links)
        ]
        first: dict[int, int] = {}
        agent = [first.setdefault(own, node) for node, own in enumerate(colour)]
        return cls(np.array(port, np.int32), np.array(agent, np.int32), np.bincount(port))


def _colours(plan: NetworkTables, label: list[Any]) -> list[int]:
    """Refine the nodes' colours until nodes of one colour have the same links to each colour."""
    nodes, hosts = len(plan.topology.names), plan.hosts
    colour, known = [min(node, hosts) for node in range(nodes)], 0
    while known < len(set(colour)):
        known = len(set(colour))
        around: list[list[Any]] = [[] for _ in range(nodes)]
        for own, link in zip(label, plan.links, strict=True):
            around[link.source].append((own, colour[link.target]))
        numbers: dict[Any, int] = {}
        colour = [
            numbers.setdefault((colour[node], tuple(sorted(around[node]))), len(numbers)) for node in range(nodes)
        ]
    return colour


@call
def add_port(entries: NDArray[Any], first: int, used: int, port: int, share: float) -> int:
    """Add a share of a flow to a port; return the number of ports so far."""
    for at in range(first, first + used):
        if entries[at].port == port:
            entries[at].share += share
            return used
    entries[first + used].port = port
    entries[first + used].share = share
    return used + 1


@call
def walk(
    entries: NDArray[Any],
    first: int,
    network: tuple[Any, ...],
    around: tuple[NDArray[np.int32], NDArray[np.float64]],
    source: int,
    target: int,
    path_hash: int,
    spread: int,
) -> int:
    """Write the ports of a path to ``entries``; return their number: 0 if there is no path, -1 if there is no room.

    ``spread``: follow all shortest paths evenly, not the one that the hash chooses.
    """
    row, cells, first_cell, targets, choices, target_of, port_of, agent, salts, divisors, by_quotient, hosts = network
    nodes, shares = around
    nodes[0] = source
    shares[0] = 1.0
    start, end, used = 0, 1, 0
    while start < end:
        # Nodes are in order of distance, so each has its whole share before it passes that on.
        node = nodes[start]
        share = shares[start]
        start += 1
        if node == target:
            continue
        only = row[node]
        offset, count = -1, 1
        if only >= 0:
            cell = cell_of(only, node, target, hosts, first_cell, targets)
            offset, count = cells[cell, 0], cells[cell, 1]
        if count == 0:
            return 0
        pick = 0
        taken = 1
        if spread != 0:
            taken = count
        elif count > 1:
            if by_quotient:
                pick = (path_hash // divisors[node]) % count
            else:
                pick = mix(path_hash, salts[node]) % count
        for step in range(taken):
            link = -1 - only if only < 0 else choices[offset + pick + step]
            if first + used >= len(entries):
                return -1
            used = add_port(entries, first, used, port_of[link], share / taken)
            other = agent[target_of[link]]
            found = end
            for at in range(start, end):
                if nodes[at] == other:
                    found = at
            if found == end:
                nodes[end] = other
                shares[end] = 0.0
                end += 1
            shares[found] += share / taken
    return used


@entry
def trace(
    entries: NDArray[Any], flows: NDArray[Any], sprayed: NDArray[Any], network: tuple[Any, ...], even_acks: int
) -> int:
    """Write the paths of flows to ``entries``; return the number of entries, or -1 if there is no room."""
    nodes = len(network[0])
    around = (np.empty(nodes, np.int32), np.empty(nodes, np.float64))
    used = 0
    for number in range(len(flows)):
        f = flows[number]
        f.entries = used
        forward = walk(entries, used, network, around, f.source, f.target, f.path_hash, sprayed[f.transport])
        if forward < 0:
            return -1
        back = walk(entries, used + forward, network, around, f.target, f.source, f.reverse_path_hash, even_acks)
        if back < 0:
            return -1
        f.forward = forward
        f.backward = back if forward > 0 else 0
        used += f.forward + f.backward
    return used


@entry
def measure_paths(
    entries: NDArray[Any],
    flows: NDArray[Any],
    ports: NDArray[Any],
    loss: NDArray[np.float64],
    whole_bytes: NDArray[np.float64],
    ack_bytes: NDArray[np.float64],
    keep: NDArray[np.float64],
) -> None:
    """Derive what follows from the flows' paths: round trip, delivery, and the rate that losses allow.

    With a share p of packets lost, a window that grows by a packet in a round trip and keeps a share b when it shrinks
    has sqrt((1 + b) / (2 (1 - b) p)) packets on average (Floyd, Handley and Padhye, 2000; with b = 1/2, Mathis et al.,
    1997). ``keep`` has b by transport, 1 for a transport whose window does not follow losses.
    """
    for number in range(len(flows)):
        f = flows[number]
        f.delivery, f.loss_limit = 1.0, UNLIMITED
        if f.forward == 0:
            f.loss_limit = 0.0
            continue
        whole = whole_bytes[f.transport]
        round_trip = 0.0
        for at in range(f.entries, f.entries + f.forward + f.backward):
            e = entries[at]
            p = ports[e.port]
            size = ack_bytes[f.transport]
            if at < f.entries + f.forward:
                size = whole
                f.delivery *= 1.0 - e.share * loss[e.port]
            round_trip += e.share * (p.delay + size * p.ps_per_byte)
        f.round_trip = int(round_trip)
        f.path_packets = round_trip / (whole * ports[entries[f.entries].port].ps_per_byte)
        f.ack_ratio = ack_bytes[f.transport] / whole
        b = keep[f.transport]
        if f.delivery < DELIVERY_MIN:
            f.loss_limit = 0.0
            f.delivery = 1.0  # it waits for new routes, where nothing is lost
        elif f.delivery < 1.0 and b < 1.0:
            window = math.sqrt((1.0 + b) / (2.0 * (1.0 - b) * (1.0 - f.delivery)))
            f.loss_limit = max(1.0, window) * whole / f.round_trip


def network_of(plan: NetworkTables, routes: Routes, ports: PortMap) -> tuple[Any, ...]:
    """Return the arrays from which `trace` finds paths."""
    return (
        *(routes.row, routes.cells, routes.first, routes.targets, routes.choices),
        np.array([link.target for link in plan.links], np.int32),
        *(ports.port, ports.agent),
        *(plan.node_salt, np.array(plan.topology.divisors, np.int64)),
        plan.switches.discipline == Discipline.DLCP,
        plan.hosts,
    )
