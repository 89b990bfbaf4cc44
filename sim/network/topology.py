# SPDX-License-Identifier: Apache-2.0
"""Topologies: their descriptions, the nodes and links built from these, and the shortest paths."""

from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dlcp.inputs.document import Document, PlaceError, converted
from dlcp.inputs.error_text import nearest
from dlcp.sim.limits import HOSTS_MAX, LINKS_MAX, NODES_MAX, Hosts
from dlcp.sim.network.infragraph import infrastructure_of, network_of
from dlcp.sim.network.nodes import LinkSpec, NetworkTopology, Routes, TopologyError

_Name = Annotated[str, Meta(pattern=r"^\S+$")]


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    host_link: LinkSpec = msgspec.field(default_factory=LinkSpec)
    host_links: dict[str, LinkSpec] = {}
    """Links that differ from ``host_link``, by host name: ``host3``."""

    def link_of(self, host: int) -> LinkSpec:
        """Return a host's link."""
        return self.host_links.get(f"host{host}", self.host_link)


class Star(_Spec, frozen=True, tag="star"):
    """Hosts around one switch."""

    hosts: Annotated[int, Meta(ge=2, le=HOSTS_MAX)] = 16

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        topology = NetworkTopology(self.hosts)
        switch = topology.add_switch("switch0")
        for host in range(self.hosts):
            topology.connect(host, switch, self.link_of(host))
        return topology


class LeafSpine(_Spec, frozen=True, tag="leaf_spine"):
    """Racks of hosts under leaves; each leaf is linked to each spine.

    With equal link rates, the oversubscription is ``hosts_per_leaf / spines``.
    """

    leaves: Hosts = 9
    spines: Hosts = 4
    hosts_per_leaf: Hosts = 16
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        topology = NetworkTopology(self.leaves * self.hosts_per_leaf)
        leaves = [topology.add_switch(f"leaf{i}") for i in range(self.leaves)]
        spines = [topology.add_switch(f"spine{i}") for i in range(self.spines)]
        for host in range(topology.hosts):
            topology.connect(host, leaves[host // self.hosts_per_leaf], self.link_of(host))
        topology.connect_all(leaves, spines, self.fabric_link)
        return topology


class FatTree(_Spec, frozen=True, tag="fat_tree"):
    """A three-level fat tree of switches with ``ports`` ports: ports^3 / 4 hosts (Al-Fares, SIGCOMM 2008).

    Each edge switch has ``oversubscription`` times as many hosts as uplinks.
    """

    ports: Annotated[int, Meta(ge=2, le=64)] = 4
    oversubscription: Hosts = 1
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def __post_init__(self) -> None:
        """Reject an odd number of ports."""
        if self.ports % 2:
            raise ValueError(f"a fat tree needs an even number of ports, got {self.ports}")

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        half = self.ports // 2
        hosts_per_edge = half * self.oversubscription
        topology = NetworkTopology(self.ports * half * hosts_per_edge)
        edges = [[topology.add_switch(f"edge{pod}_{i}") for i in range(half)] for pod in range(self.ports)]
        aggregations = [
            [topology.add_switch(f"aggregation{pod}_{i}", half) for i in range(half)] for pod in range(self.ports)
        ]
        cores = [[topology.add_switch(f"core{i}_{j}") for j in range(half)] for i in range(half)]
        for host in range(topology.hosts):
            edge = host // hosts_per_edge
            topology.connect(host, edges[edge // half][edge % half], self.link_of(host))
        for pod in range(self.ports):
            topology.connect_all(edges[pod], aggregations[pod], self.fabric_link)
            for aggregation, above in zip(aggregations[pod], cores, strict=True):
                topology.connect_all([aggregation], above, self.fabric_link)
        return topology


class Dragonfly(_Spec, frozen=True, tag="dragonfly"):
    """Groups of fully meshed routers, and one link between every two groups (Kim, ISCA 2008); minimal routing."""

    groups: Annotated[int, Meta(ge=2, le=HOSTS_MAX)] = 9
    routers_per_group: Hosts = 4
    hosts_per_router: Hosts = 2
    local_link: LinkSpec = msgspec.field(default_factory=LinkSpec)
    global_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        groups, routers = self.groups, self.routers_per_group
        topology = NetworkTopology(groups * routers * self.hosts_per_router)
        nodes = [[topology.add_switch(f"router{group}_{i}") for i in range(routers)] for group in range(groups)]
        for host in range(topology.hosts):
            router = host // self.hosts_per_router
            topology.connect(host, nodes[router // routers][router % routers], self.link_of(host))
        for group in nodes:
            for one, other in combinations(group, 2):
                topology.connect(one, other, self.local_link)
        # In each of the two groups, a global link goes to the router with the fewest global links so far.
        used = [[0] * routers for _ in range(groups)]
        for one, other in combinations(range(groups), 2):
            ends = []
            for number in (one, other):
                router = used[number].index(min(used[number]))
                used[number][router] += 1
                ends.append(nodes[number][router])
            topology.connect(ends[0], ends[1], self.global_link)
        return topology


class RailOptimised(_Spec, frozen=True, tag="rail_optimised"):
    """GPU servers: GPU i of each server in a pod is linked to the pod's leaf i, and each leaf to each spine.

    Hosts are GPUs, numbered server by server. The GPUs of a server reach each other over ``server_link``.
    """

    servers: Hosts = 8
    gpus_per_server: Hosts = 8
    servers_per_pod: Hosts = 8
    spines: Hosts = 4
    server_link: LinkSpec = msgspec.field(default_factory=lambda: LinkSpec(rate_gbps=3600.0, delay_us=0.5))
    fabric_link: LinkSpec = msgspec.field(default_factory=LinkSpec)

    def __post_init__(self) -> None:
        """Reject pods that are not full."""
        if self.servers % self.servers_per_pod:
            raise ValueError(f"{self.servers} servers do not fill pods of {self.servers_per_pod}; use a multiple of it")

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        rails = self.gpus_per_server
        topology = NetworkTopology(self.servers * rails)
        servers = [topology.add_switch(f"server{i}") for i in range(self.servers)]
        pods = self.servers // self.servers_per_pod
        leaves = [[topology.add_switch(f"leaf{pod}_{rail}") for rail in range(rails)] for pod in range(pods)]
        spines = [topology.add_switch(f"spine{i}") for i in range(self.spines)]
        for host in range(topology.hosts):
            server, rail = divmod(host, rails)
            topology.connect(host, leaves[server // self.servers_per_pod][rail], self.link_of(host))
            if rails > 1:  # a server with one GPU needs no switch inside
                topology.connect(host, servers[server], self.server_link)
        for pod in leaves:
            topology.connect_all(pod, spines, self.fabric_link)
        return topology


class NetworkLink(LinkSpec, frozen=True, kw_only=True):
    """A link between two nodes; several between the same two are parallel.

    Parameters
    ----------
    between
        Names of the two nodes: a host and a switch, or two switches.
    """

    between: tuple[_Name, _Name]


class NetworkFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of a network's file.

    Parameters
    ----------
    hosts, switches
        Names of the nodes. Hosts are numbered in this order; jobs are placed by number.
    links
        What connects them. All hosts have to reach each other; hosts do not forward.
    """

    hosts: Annotated[tuple[_Name, ...], Meta(min_length=2, max_length=HOSTS_MAX)]
    switches: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=NODES_MAX - HOSTS_MAX)]
    links: Annotated[tuple[NetworkLink, ...], Meta(min_length=1, max_length=LINKS_MAX)]

    def __post_init__(self) -> None:
        """Reject names that are repeated or unknown, links without a switch, and hosts that others cannot reach."""
        seen: set[str] = set()
        for kind in ("hosts", "switches"):
            for number, name in enumerate(getattr(self, kind)):
                if name in seen:
                    raise PlaceError(f"two nodes are called {name!r}; rename one of them", kind, number)
                seen.add(name)
        hosts = set(self.hosts)
        for number, link in enumerate(self.links):
            for name in link.between:
                if name not in seen:
                    problem = f"there is no node {name!r}{nearest(name, seen)}"
                    raise PlaceError(problem, "links", number, "between")
            one, other = link.between
            if one == other:
                raise PlaceError(f"the link connects {one!r} with itself", "links", number, "between")
            if hosts >= {one, other}:
                problem = f"{one!r} and {other!r} are both hosts, which do not forward: put a switch between them"
                raise PlaceError(problem, "links", number, "between")
        self._check_reachable()

    def _check_reachable(self) -> None:
        hosts, next_to = set(self.hosts), self.neighbours()
        reached, waiting = {self.hosts[0]}, [self.hosts[0]]
        while waiting:
            node = waiting.pop()
            # Beyond the first host, only switches forward.
            following = next_to[node] - reached if node == self.hosts[0] or node not in hosts else set()
            reached |= following
            waiting += following
        for number, host in enumerate(self.hosts):
            if host not in reached:
                raise PlaceError(f"no path of links and switches leads from {self.hosts[0]} to {host}", "hosts", number)

    def neighbours(self) -> dict[str, set[str]]:
        """Return the nodes that each node has a link with."""
        found: dict[str, set[str]] = {name: set() for name in (*self.hosts, *self.switches)}
        for link in self.links:
            one, other = link.between
            found[one].add(other)
            found[other].add(one)
        return found

    def build(self) -> NetworkTopology:
        """Return the nodes and links."""
        topology = NetworkTopology(len(self.hosts))
        topology.names[:] = self.hosts
        for name in self.switches:
            topology.add_switch(name)
        number = {name: index for index, name in enumerate(topology.names)}
        for link in self.links:
            one, other = link.between
            topology.connect(number[one], number[other], link)
        _set_divisors(topology, self._levels())
        return topology

    def _levels(self) -> dict[str, int]:
        """Return each switch's distance to the nearest host, in links."""
        next_to, levels, level = self.neighbours(), dict.fromkeys(self.hosts, 0), 0
        while True:
            nodes = {name for known, at in levels.items() if at == level for name in next_to[known]} - levels.keys()
            if not nodes:
                return levels
            level += 1
            levels |= dict.fromkeys(sorted(nodes), level)


def _set_divisors(topology: NetworkTopology, levels: dict[str, int]) -> None:
    """Let each level of switches choose by the part of a packet's hash that the levels below left unused.

    A fat tree gets the divisors that `FatTree` has.
    """
    routes = Routes.of(topology)
    most = routes.cells[: routes.first[0], 1].reshape(-1, topology.hosts).max(axis=1)
    choices = {
        node: int(most[routes.row[node]])
        for node in range(topology.hosts, len(topology.names))
        if topology.names[node] in levels
    }
    divisor = 1
    for level in range(1, max(levels.values()) + 1):
        nodes = [node for node in choices if levels[topology.names[node]] == level]
        for node in nodes:
            topology.divisors[node] = divisor if choices[node] > 1 else 1
        divisor *= max(choices[node] for node in nodes)


class FileTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="file"):
    """A network from a file with its hosts, switches and links.

    Parameters
    ----------
    file
        The file, relative to the working directory: a `NetworkFile` or an InfraGraph infrastructure.
    """

    file: str

    def build(self) -> NetworkTopology:
        """Return the nodes and links.

        Raises
        ------
        dlcp.inputs.document.DocumentError
            The file is missing or wrong; the message names the line.
        """
        document = Document(Path(self.file))
        infrastructure = infrastructure_of(document.content)
        if infrastructure is None:
            return document.convert(NetworkFile).build()
        try:
            return converted(network_of(document, infrastructure), NetworkFile).build()
        except PlaceError as error:
            place = ".".join(map(str, error.steps))
            raise document.error(f"its network has a wrong value, {place}: {error}", ()) from None


TopologySpec = Star | LeafSpine | FatTree | Dragonfly | RailOptimised | FileTopology


def build_topology(spec: TopologySpec) -> NetworkTopology:
    """Return the nodes and links that ``spec`` describes.

    Raises
    ------
    TopologyError
        There are too few hosts, or too many hosts, switches or links, or ``host_links`` names an unknown host.
    dlcp.inputs.document.DocumentError
        The file of a `FileTopology` is wrong.
    """
    topology = spec.build()
    host_links = {} if isinstance(spec, FileTopology) else spec.host_links
    for name in sorted(host_links.keys() - topology.names[: topology.hosts]):
        raise TopologyError(f"host_links: there is no host {name!r}; there are host0 to host{topology.hosts - 1}")
    return topology
