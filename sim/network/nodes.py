# SPDX-License-Identifier: Apache-2.0
"""Nodes of a network, the links between them, and the shortest paths: where each node may send to each host."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.inputs.error_text import closest
from dlcp.sim.jit import shared
from dlcp.sim.limits import HOSTS_MAX, LINKS_MAX, NODES_MAX, RATE_MAX_GBPS, RATE_MIN_GBPS, SimulatorError

_Name = Annotated[str, Meta(pattern=r"^\S+$")]


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A full-duplex link.

    Parameters
    ----------
    rate_gbps
        Rate in each direction, in 10^9 bits a second.
    delay_us
        Propagation delay, and any other delay of a hop except serialization and queueing.
    """

    rate_gbps: Annotated[float, Meta(ge=RATE_MIN_GBPS, le=RATE_MAX_GBPS)] = 100.0
    delay_us: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    loss_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class TopologyError(SimulatorError):
    """A topology cannot be built, or a node or link does not exist."""


@dataclass(frozen=True, slots=True)
class TopologyLink:
    """One direction of a link, between two nodes."""

    source: int
    target: int
    spec: LinkSpec


@dataclass(slots=True)
class NetworkTopology:
    """Hosts, numbered from 0, then switches; link 2i + 1 is the reverse direction of link 2i.

    Attributes
    ----------
    names
        Names by node: ``host0`` and so on, then the switches.
    divisors
        By node: the divisor of a packet's hash before the hash chooses among equal paths. All switches compute the same
        hash. If one switch chooses by its remainder, the next has to choose by the quotient; otherwise all packets that
        reach it would take the same path.
    hosts
        Number of hosts. Hosts do not forward.
    """

    hosts: int
    names: list[str] = field(default_factory=list)
    links: list[TopologyLink] = field(default_factory=list)
    divisors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Name the hosts."""
        if not 2 <= self.hosts <= HOSTS_MAX:
            raise TopologyError(f"the topology has {self.hosts} hosts; it needs 2 to {HOSTS_MAX}")
        self.names = [f"host{i}" for i in range(self.hosts)]
        self.divisors = [1] * self.hosts

    def add_switch(self, name: str, divisor: int = 1) -> int:
        """Add a switch and return its number; see ``divisors``."""
        if len(self.names) == NODES_MAX:
            raise TopologyError(f"the topology has more than {NODES_MAX:,} hosts and switches; use fewer")
        self.names.append(name)
        self.divisors.append(divisor)
        return len(self.names) - 1

    def connect(self, one: int, other: int, spec: LinkSpec) -> None:
        """Link two nodes, in both directions."""
        if len(self.links) == 2 * LINKS_MAX:
            raise TopologyError(f"the topology has more than {LINKS_MAX:,} links; use fewer hosts or switches")
        self.links.append(TopologyLink(one, other, spec))
        self.links.append(TopologyLink(other, one, spec))

    def connect_all(self, ones: Sequence[int], others: Sequence[int], spec: LinkSpec) -> None:
        """Link each of some nodes with each of others."""
        for one, other in product(ones, others):
            self.connect(one, other, spec)

    def between(self, one: str, other: str) -> list[int]:
        """Return the links between two nodes, in both directions.

        Raises
        ------
        TopologyError
            There is no such node, or no link between the two.
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


# ------------------------------------------------------------------------------------------------------- shortest paths


@shared
def cell_of(row: int, node: int, target: int, hosts: int, first: Any, targets: Any) -> Any:
    """Return the cell of a node's links to a host; see `Routes`. ``row``: the node's, which is not negative."""
    if node >= hosts:
        return row * hosts + target
    usual = first[row]
    low, high = usual + 1, first[row + 1]
    while low < high:
        middle = (low + high) // 2
        if targets[middle - first[0]] < target:
            low = middle + 1
        else:
            high = middle
    if low < first[row + 1] and targets[low - first[0]] == target:
        return low
    return usual


@dataclass(frozen=True, slots=True)
class Routes:
    """The next hops of every node: the first links of all shortest paths.

    A host reaches nearly all others over the same links, so its row has one cell for these, and then one for each other
    host, in order. 16,384 GPUs, each with a link to its server and one to a switch, would need 2 GB otherwise.

    Attributes
    ----------
    hosts
        Number of hosts.
    row
        int32 (nodes,): a switch's number among the switches; -1 - l for a host whose only link is l; the number of any
        other host among the hosts of several links.
    cells
        int32 (cells, 2): the offset in ``choices`` of the links to a host, and their number; 0 if it is unreachable.
        The switches' rows come first and have a cell for each host.
    first
        int32 (hosts of several links + 1,): the first cell of each such host's row, and the end of the last row.
    targets
        int32: the host that each cell of these rows is for; -1 in the first of each row.
    choices
        int32: link numbers.
    """

    hosts: int
    row: NDArray[np.int32]
    cells: NDArray[np.int32]
    first: NDArray[np.int32]
    targets: NDArray[np.int32]
    choices: NDArray[np.int32]

    @classmethod
    def of(cls, topology: NetworkTopology, failed: Collection[int] = ()) -> "Routes":
        """Find the paths that avoid the links in ``failed``."""
        wiring = _Wiring(topology, failed)
        switches = len(topology.names) - topology.hosts
        row = np.arange(-topology.hosts, switches, dtype=np.int32)
        choices = _Choices()
        distance, cells = _switch_rows(wiring, choices)
        first, targets, others = [cells.size // 2], [], []
        for host in range(topology.hosts):
            if len(wiring.links_of[host]) == 1:
                row[host] = -1 - wiring.links_of[host][0]
                continue
            row[host] = len(first) - 1
            for target, links in _host_row(wiring, host, distance):
                targets.append(target)
                others.append(choices.add(links))
            first.append(first[0] + len(others))
        cells = np.concatenate([cells.reshape(-1, 2), np.array(others, np.int32).reshape(-1, 2)])
        return cls(
            topology.hosts, row, cells, np.array(first, np.int32), np.array(targets or [-1], np.int32), choices.joined()
        )

    def links(self, node: int, host: int) -> list[int]:
        """Return the links on which a node may send to a host."""
        row = int(self.row[node])
        if row < 0:
            return [-1 - row]
        start, count = self.cells[cell_of(row, node, host, self.hosts, self.first, self.targets)].tolist()
        return [int(link) for link in self.choices[start : start + count]]

    def path(self, links: Sequence[TopologyLink], source: int, target: int) -> list[int]:
        """Return the links of a shortest path between two hosts: the first choice of every node."""
        at, taken = source, []
        while at != target:
            taken.append(self.links(at, target)[0])
            at = links[taken[-1]].target
        return taken


class _Wiring:
    """What paths are found from.

    Attributes
    ----------
    links_of, working
        By node, the links from it, and those of them that have not failed.
    last
        By switch and host, the links from the one to the other.
    around
        By host, the switches that lead to it; by switch, the hosts it leads to.
    inner, source, target
        Links between switches, by source, so that a node's next hops stand together; and their ends.
    groups, sizes
        Hosts with the same switches that lead to them from other switches: these switches, and the hosts; and numbers
        of hosts. Paths to hosts of a group differ only in the last link. A switch that no other leads to, as inside a
        GPU server, is on no path from elsewhere.
    """

    def __init__(self, topology: NetworkTopology, failed: Collection[int]) -> None:
        links, self.hosts, self.nodes = topology.links, topology.hosts, len(topology.names)
        self.links = links
        self.links_of: list[list[int]] = [[] for _ in range(self.nodes)]
        for number, link in enumerate(links):
            self.links_of[link.source].append(number)
        self.working = [[number for number in numbers if number not in failed] for numbers in self.links_of]
        self.last: dict[tuple[int, int], list[int]] = {}
        between: list[int] = []
        for switch in range(self.hosts, self.nodes):
            for number in self.working[switch]:
                if links[number].target < self.hosts:
                    self.last.setdefault((switch, links[number].target), []).append(number)
                else:
                    between.append(number)
        self.around: list[list[int]] = [[] for _ in range(self.nodes)]
        for switch, host in self.last:
            self.around[host].append(switch)
            self.around[switch].append(host)
        self.inner = np.array(between, np.int64)
        self.source = np.array([links[number].source for number in between], np.int64)
        self.target = np.array([links[number].target for number in between], np.int64)
        reached = set(self.target.tolist())
        groups: dict[tuple[int, ...], list[int]] = {}
        for host in range(self.hosts):
            at = tuple(switch for switch in self.around[host] if switch in reached)
            groups.setdefault(at, []).append(host)
        self.groups = list(groups.items())
        self.sizes = np.array([len(members) for members in groups.values()])

    def distances(self, targets: Collection[int]) -> NDArray[np.int32]:
        """Return each node's distance in links to the nearest of some switches, int32 (nodes,); -2 if there is none."""
        distance = np.full(self.nodes, -2, np.int32)
        distance[list(targets)] = 0
        for level in range(self.nodes):
            following = self.source[(distance[self.target] == level) & (distance[self.source] == -2)]
            if not len(following):
                break
            distance[following] = level + 1
        return distance


class _Choices:
    """Lists of links, one after the other."""

    def __init__(self) -> None:
        self._lists: list[NDArray[np.int64]] = []
        self._length = 0

    def add(self, links: Sequence[int] | NDArray[np.int64]) -> tuple[int, int]:
        """Append a list; return its offset and length."""
        start = self._length
        self._lists.append(np.asarray(links, np.int64))
        self._length += len(links)
        return start, len(links)

    def joined(self) -> NDArray[np.int32]:
        """Return all lists; an array of compiled code is never empty."""
        return np.concatenate([*self._lists, [0]]).astype(np.int32)


def _switch_rows(wiring: _Wiring, choices: _Choices) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the distances by group of hosts, (groups, nodes), and the switches' cells, (switches, hosts, 2)."""
    cells = np.zeros((wiring.nodes - wiring.hosts, wiring.hosts, 2), np.int32)
    distance = np.empty((len(wiring.groups), wiring.nodes), np.int32)
    for number, (at, members) in enumerate(wiring.groups):
        left = distance[number] = wiring.distances(at)
        step = (left[wiring.source] > 0) & (left[wiring.target] == left[wiring.source] - 1)
        count = np.bincount(wiring.source[step], minlength=wiring.nodes)
        start = choices.add(wiring.inner[step])[0] + np.cumsum(count) - count
        cells[:, members] = np.stack([start, count], axis=1)[wiring.hosts :, None]
    for (switch, host), links in wiring.last.items():
        cells[switch - wiring.hosts, host] = choices.add(links)
    return distance, cells


def _host_row(wiring: _Wiring, host: int, distance: NDArray[np.int32]) -> list[tuple[int, list[int]]]:
    """Return the cells of a host: targets and links. The first target, -1, is any without a cell of its own."""
    working = wiring.working[host]
    via = [wiring.links[number].target for number in working]
    left = np.where(distance[:, via] < 0, wiring.nodes, distance[:, via])
    nearest = left.min(axis=1, keepdims=True, initial=wiring.nodes)
    patterns, pattern = np.unique((left == nearest) & (left < wiring.nodes), axis=0, return_inverse=True)
    usual = int(np.bincount(pattern.ravel(), wiring.sizes).argmax())
    chosen = {
        target: tuple(patterns[pattern[group]].tolist())
        for group in np.flatnonzero(pattern != usual)
        for target in wiring.groups[group][1]
    }
    for target in {target for switch in via for target in wiring.around[switch]} - {host}:
        chosen[target] = tuple(switch in wiring.around[target] for switch in via)
    chosen = {target: each for target, each in chosen.items() if each != tuple(patterns[usual].tolist())}
    chosen[-1] = tuple(patterns[usual].tolist())
    lists = {
        each: [number for number, is_next in zip(working, each, strict=True) if is_next] for each in chosen.values()
    }
    # A host without a path still sends, and its packets are lost.
    return [(target, lists[chosen[target]] or wiring.links_of[host][:1]) for target in sorted(chosen)]
