# SPDX-License-Identifier: Apache-2.0
"""Networks have the shape, the paths and the failures that they should."""

import numpy as np
import pytest

from dlcp.sim.topology import Dragonfly, FatTree, LeafSpine, RailOptimised, Star, TopologyError, build_topology

SPECS = {
    "star": (Star(hosts=5), 5, 1, 5),
    "leaf_spine": (LeafSpine(leaves=3, spines=2, hosts_per_leaf=4), 12, 5, 18),
    "fat_tree": (FatTree(ports=4), 16, 20, 48),
    "oversubscribed": (FatTree(ports=4, oversubscription=2), 32, 20, 64),
    "dragonfly": (Dragonfly(groups=5, routers_per_group=2, hosts_per_router=3), 30, 10, 30 + 5 + 10),
    "rail_optimised": (RailOptimised(servers=4, gpus_per_server=2, servers_per_pod=2, spines=2), 8, 10, 16 + 8),
}


@pytest.mark.parametrize("name", SPECS)
def test_size(name: str):
    spec, hosts, switches, links = SPECS[name]
    network = build_topology(spec)
    assert (network.hosts, len(network.names) - network.hosts, len(network.links) // 2) == (hosts, switches, links)


@pytest.mark.parametrize("name", SPECS)
def test_every_host_reaches_every_other_by_each_choice(name: str):
    network = build_topology(SPECS[name][0])
    routes = network.routes()
    random = np.random.default_rng(1)
    for source in range(network.hosts):
        for target in range(network.hosts):
            node, hops = source, 0
            while source != target and node != target:
                links = routes.links(node, target)
                node = network.links[links[random.integers(len(links))]].target
                hops += 1
                assert hops <= 6
                assert node >= network.hosts or node == target  # hosts do not forward


def test_equal_paths():
    network = build_topology(LeafSpine(leaves=2, spines=4, hosts_per_leaf=2))
    leaf = network.names.index("leaf0")
    assert len(network.routes().links(leaf, 3)) == 4
    assert len(network.routes().links(leaf, 1)) == 1


def test_gpus_of_one_server_do_not_use_the_network():
    network = build_topology(RailOptimised(servers=2, gpus_per_server=2, servers_per_pod=2, spines=1))
    routes = network.routes()
    names = [network.names[network.links[link].target] for link in routes.links(0, 1)]
    assert names == ["server0"]
    assert [network.names[network.links[link].target] for link in routes.links(0, 2)] == ["leaf0_0"]


def test_routes_avoid_a_failed_link():
    network = build_topology(LeafSpine(leaves=2, spines=2, hosts_per_leaf=1))
    failed = network.between("leaf0", "spine1")
    routes = network.routes(failed)
    assert len(failed) == 2
    assert not set(failed) & set(routes.choices[1:].tolist())
    assert [network.names[network.links[link].target] for link in routes.links(network.names.index("leaf0"), 1)] == [
        "spine0"
    ]
    # The other leaf must not send to the spine that cannot get there.
    assert len(routes.links(network.names.index("leaf1"), 0)) == 1


def test_unknown_nodes_are_named():
    network = build_topology(Star(hosts=2))
    with pytest.raises(TopologyError, match="no node 'spine0'"):
        network.between("host0", "spine0")
    with pytest.raises(TopologyError, match="no link between host0 and host1"):
        network.between("host0", "host1")


def test_impossible_topologies_are_refused():
    with pytest.raises(ValueError, match="even number of ports"):
        FatTree(ports=5)
    with pytest.raises(ValueError, match="do not fill pods"):
        RailOptimised(servers=3, servers_per_pod=2)
    with pytest.raises(TopologyError, match="1 hosts"):
        build_topology(LeafSpine(leaves=1, hosts_per_leaf=1))
