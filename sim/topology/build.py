# SPDX-License-Identifier: Apache-2.0
"""From what a topology is called to its nodes and links."""

from itertools import combinations

from dlcp.sim.topology.network import Network, TopologyError
from dlcp.sim.topology.specs import Dragonfly, FatTree, LeafSpine, RailOptimised, Star, TopologySpec

HOSTS_MAX = 1 << 16


def build(spec: TopologySpec) -> Network:
    """Return the network that ``spec`` describes.

    Raises
    ------
    TopologyError
        It cannot be built.
    """
    if isinstance(spec, Star):
        network = _star(spec)
    elif isinstance(spec, LeafSpine):
        network = _leaf_spine(spec)
    elif isinstance(spec, FatTree):
        network = _fat_tree(spec)
    elif isinstance(spec, Dragonfly):
        network = _dragonfly(spec)
    else:
        network = _rail_optimised(spec)
    if not 2 <= network.hosts <= HOSTS_MAX:
        raise TopologyError(f"{network.hosts} hosts; a network has 2 to {HOSTS_MAX}")
    return network


def _star(spec: Star) -> Network:
    network = Network(spec.hosts)
    switch = network.add_switch("switch0")
    for host in range(spec.hosts):
        network.connect(host, switch, spec.host_link)
    return network


def _leaf_spine(spec: LeafSpine) -> Network:
    network = Network(spec.leaves * spec.hosts_per_leaf)
    leaves = [network.add_switch(f"leaf{i}") for i in range(spec.leaves)]
    spines = [network.add_switch(f"spine{i}") for i in range(spec.spines)]
    for host in range(network.hosts):
        network.connect(host, leaves[host // spec.hosts_per_leaf], spec.host_link)
    for leaf in leaves:
        for spine in spines:
            network.connect(leaf, spine, spec.fabric_link)
    return network


def _fat_tree(spec: FatTree) -> Network:
    half = spec.ports // 2
    hosts_per_edge = half * spec.oversubscription
    network = Network(spec.ports * half * hosts_per_edge)
    edges = [[network.add_switch(f"edge{pod}_{i}") for i in range(half)] for pod in range(spec.ports)]
    aggregations = [
        [network.add_switch(f"aggregation{pod}_{i}", half) for i in range(half)] for pod in range(spec.ports)
    ]
    cores = [[network.add_switch(f"core{i}_{j}") for j in range(half)] for i in range(half)]
    for host in range(network.hosts):
        edge = host // hosts_per_edge
        network.connect(host, edges[edge // half][edge % half], spec.host_link)
    for pod in range(spec.ports):
        for edge in edges[pod]:
            for aggregation in aggregations[pod]:
                network.connect(edge, aggregation, spec.fabric_link)
        for i, aggregation in enumerate(aggregations[pod]):
            for core in cores[i]:
                network.connect(aggregation, core, spec.fabric_link)
    return network


def _dragonfly(spec: Dragonfly) -> Network:
    groups, routers = spec.groups, spec.routers_per_group
    network = Network(groups * routers * spec.hosts_per_router)
    nodes = [[network.add_switch(f"router{group}_{i}") for i in range(routers)] for group in range(groups)]
    for host in range(network.hosts):
        router = host // spec.hosts_per_router
        network.connect(host, nodes[router // routers][router % routers], spec.host_link)
    for group in nodes:
        for one, other in combinations(group, 2):
            network.connect(one, other, spec.local_link)
    # The link between two groups hangs at the router that has the fewest links to other groups so far.
    used = [[0] * routers for _ in range(groups)]
    for one, other in combinations(range(groups), 2):
        ends = []
        for number in (one, other):
            router = used[number].index(min(used[number]))
            used[number][router] += 1
            ends.append(nodes[number][router])
        network.connect(ends[0], ends[1], spec.global_link)
    return network


def _rail_optimised(spec: RailOptimised) -> Network:
    rails = spec.gpus_per_server
    network = Network(spec.servers * rails)
    servers = [network.add_switch(f"server{i}") for i in range(spec.servers)]
    pods = spec.servers // spec.servers_per_pod
    leaves = [[network.add_switch(f"leaf{pod}_{rail}") for rail in range(rails)] for pod in range(pods)]
    spines = [network.add_switch(f"spine{i}") for i in range(spec.spines)]
    for host in range(network.hosts):
        server, rail = divmod(host, rails)
        network.connect(host, leaves[server // spec.servers_per_pod][rail], spec.host_link)
        if rails > 1:  # a GPU alone in its server has nobody to reach there
            network.connect(host, servers[server], spec.server_link)
    for pod in leaves:
        for leaf in pod:
            for spine in spines:
                network.connect(leaf, spine, spec.fabric_link)
    return network
