# SPDX-License-Identifier: Apache-2.0
"""Nodes, links and shortest paths, however the topology came about."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from dlcp.sim.topology.specs import LinkSpec
from numpy.typing import NDArray

from dlcp.suggestion import closest


class TopologyError(ValueError):
    """A network that cannot be, or in which somebody cannot be reached."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link, between nodes by number."""

    source: int
    target: int
    spec: LinkSpec


@dataclass(slots=True)
class Network:
    """Hosts, numbered from 0, then switches; link 2i + 1 is the way back of link 2i.

    Attributes
    ----------
    names
        Of all nodes: ``host0`` and so on, then the switches.
    divisors
        Of all nodes: by what the hash of a packet is divided before it chooses among equal paths. All switches take the
        same hash, so where one has chosen by its remainder, the next one has to choose by the quotient.
    hosts
        How many of the nodes are hosts. Hosts do not forward.
    """

    hosts: int
    names: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    divisors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Name the hosts."""
        self.names = [f"host{i}" for i in range(self.hosts)]
        self.divisors = [1] * self.hosts

    def add_switch(self, name: str, divisor: int = 1) -> int:
        """Add a switch, return its number; see ``divisors``."""
        self.names.append(name)
        self.divisors.append(divisor)
        return len(self.names) - 1

    def connect(self, one: int, other: int, spec: LinkSpec) -> None:
        """Link two nodes in both directions."""
        self.links.append(Link(one, other, spec))
        self.links.append(Link(other, one, spec))

    def between(self, one: str, other: str) -> list[int]:
        """Return the links, in both directions, between two nodes by name.

        Raises
        ------
        TopologyError
            There is no such node or no link between them.
        """
        for name in (one, other):
            if name not in self.names:
                like = closest(name, self.names)
                known = like or f"; there are {', '.join(self.names[:3])} … {self.names[-1]}"
                raise TopologyError(f"there is no node {name!r}{known}")
        ends = {self.names.index(one), self.names.index(other)}
        found = [number for number, link in enumerate(self.links) if {link.source, link.target} == ends]
        if not found:
            raise TopologyError(f"there is no link between {one} and {other}")
        return found

    def routes(self, failed: Collection[int] = ()) -> "Routes":
        """Return the shortest paths without the links in ``failed``."""
        return _find_routes(self, frozenset(failed))


@dataclass(frozen=True, slots=True)
class Routes:
    """Where packets may go next: all first links of shortest paths.

    Attributes
    ----------
    row
        int32 (nodes,): the row of a node in ``table``, or -1 - l for a host that has only link l.
    table
        int32 (rows, hosts, 2): where in ``choices`` the links to a host begin, and how many there are; 0 if it cannot
        be reached.
    choices
        int32: links.
    """

    row: NDArray[np.int32]
    table: NDArray[np.int32]
    choices: NDArray[np.int32]

    def links(self, node: int, host: int) -> list[int]:
        """Return the links that lead from a node to a host."""
        row = int(self.row[node])
        if row < 0:
            return [-1 - row]
        start, count = (int(cell) for cell in self.table[row, host])
        return [int(link) for link in self.choices[start : start + count]]


def _find_routes(network: Network, failed: frozenset[int]) -> Routes:
    nodes, hosts = len(network.names), network.hosts
    out: list[list[int]] = [[] for _ in range(nodes)]
    for number, link in enumerate(network.links):
        if number not in failed:
            out[link.source].append(number)
    every: list[list[int]] = [[] for _ in range(hosts)]
    for number, link in enumerate(network.links):
        if link.source < hosts:
            every[link.source].append(number)
    row = np.full(nodes, -1, np.int32)
    routed = [node for node in range(nodes) if node >= hosts or len(every[node]) != 1]
    for node in range(hosts):
        if len(every[node]) == 1:
            row[node] = -1 - every[node][0]
    row[routed] = np.arange(len(routed), dtype=np.int32)
    table = np.zeros((len(routed), hosts, 2), np.int32)
    choices: list[int] = []
    # Hosts at the same switches are reached the same way but for the last link.
    groups: dict[tuple[int, ...], list[int]] = {}
    last: dict[tuple[int, int], list[int]] = {}
    for node in range(hosts, nodes):
        for number in out[node]:
            if network.links[number].target < hosts:
                last.setdefault((node, network.links[number].target), []).append(number)
    attached: list[list[int]] = [[] for _ in range(hosts)]
    for node, host in last:
        attached[host].append(node)
    for host in range(hosts):
        groups.setdefault(tuple(attached[host]), []).append(host)
    for switches, members in groups.items():
        distance = _distances(network, out, switches)
        for node in routed:
            step = distance[node]
            if node >= hosts and step == 0:
                for host in members:
                    links = last.get((node, host), [])
                    table[row[node], host] = (len(choices), len(links))
                    choices += links
                continue
            links = [
                number
                for number in out[node]
                if (target := network.links[number].target) >= hosts and 0 <= distance[target] == step - 1
            ]
            if node < hosts and not links:
                links = every[node][:1]  # a host sends, even where nobody can be reached
            table[row[node], members] = (len(choices), len(links))
            choices += links
    return Routes(row, table, np.array(choices or [0], np.int32))


def _distances(network: Network, out: list[list[int]], targets: Collection[int]) -> list[int]:
    """Return how many links each node is away from the nearest of ``targets``; -2 if it cannot get there."""
    into: list[list[int]] = [[] for _ in network.names]
    for numbers in out:
        for number in numbers:
            into[network.links[number].target].append(network.links[number].source)
    distance = [-2] * len(network.names)
    waiting = deque(targets)
    for node in targets:
        distance[node] = 0
    while waiting:
        node = waiting.popleft()
        for other in into[node]:
            if distance[other] == -2:
                distance[other] = distance[node] + 1
                if other >= network.hosts:
                    waiting.append(other)
    return distance
