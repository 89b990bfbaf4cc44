# SPDX-License-Identifier: Apache-2.0
"""Networks have the shape, the paths and the failures that they should."""

import numpy as np
import pytest

from dlcp.inputs.document import DocumentError
from dlcp.sim import CollectiveJob, Scenario, simulate
from dlcp.sim.network.nodes import LinkSpec, NetworkTopology, Routes, TopologyError
from dlcp.sim.network.topology import (
    Dragonfly,
    FatTree,
    FileTopology,
    LeafSpine,
    NetworkFile,
    NetworkLink,
    RailOptimised,
    Star,
    build_topology,
)

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
    routes = Routes.of(network)
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


def next_hops(network, failed, target):
    """Return each node's links to a host: found link by link, from the host backwards."""
    links = [number for number in range(len(network.links)) if number not in failed]
    distance, level = {target: 0}, 0
    while any(at == level for at in distance.values()):
        for number in links:
            link = network.links[number]
            forwards = link.target >= network.hosts or link.target == target
            if forwards and distance.get(link.target) == level:
                distance.setdefault(link.source, level + 1)
        level += 1
    found = {node: [] for node in range(len(network.names))}
    for number in links:
        link = network.links[number]
        forwards = link.target >= network.hosts or link.target == target
        if forwards and distance.get(link.target, level) == distance.get(link.source, -1) - 1:
            found[link.source].append(number)
    return found


@pytest.mark.parametrize("failing", [0.0, 0.1, 0.4])
def test_routes_are_the_shortest_paths_of_any_network(failing):
    for seed in range(60):
        random = np.random.default_rng(seed)
        network = NetworkTopology(int(random.integers(2, 12)))
        switches = [network.add_switch(f"s{i}") for i in range(random.integers(1, 8))]
        for host in range(network.hosts):
            for switch in random.choice(switches, random.integers(1, 4)):
                network.connect(host, int(switch), LinkSpec())
        for one, other in random.choice(switches, (random.integers(14), 2)):
            if one != other:
                network.connect(int(one), int(other), LinkSpec())
        failed = np.flatnonzero(random.random(len(network.links)) < failing).tolist()
        routes = Routes.of(network, failed)
        for target in range(network.hosts):
            expected = next_hops(network, failed, target)
            for node in range(len(network.names)):
                own = [number for number, link in enumerate(network.links) if link.source == node]
                if node < network.hosts and (len(own) == 1 or not expected[node]):
                    expected[node] = own[:1]  # a host without a path still sends
                if node != target:
                    assert routes.links(node, target) == expected[node], (seed, node, target)


def test_gpus_that_share_their_paths_share_memory():
    """One cell for all GPUs elsewhere, and one for each of the server."""
    network = build_topology(RailOptimised(servers=32, gpus_per_server=8, servers_per_pod=16, spines=4))
    routes = Routes.of(network)
    assert len(routes.cells) == (len(network.names) - 256) * 256 + 256 * 8


def test_equal_paths():
    network = build_topology(LeafSpine(leaves=2, spines=4, hosts_per_leaf=2))
    leaf = network.names.index("leaf0")
    assert len(Routes.of(network).links(leaf, 3)) == 4
    assert len(Routes.of(network).links(leaf, 1)) == 1


def test_gpus_of_one_server_do_not_use_the_network():
    network = build_topology(RailOptimised(servers=2, gpus_per_server=2, servers_per_pod=2, spines=1))
    routes = Routes.of(network)
    names = [network.names[network.links[link].target] for link in routes.links(0, 1)]
    assert names == ["server0"]
    assert [network.names[network.links[link].target] for link in routes.links(0, 2)] == ["leaf0_0"]


def test_routes_avoid_a_failed_link():
    network = build_topology(LeafSpine(leaves=2, spines=2, hosts_per_leaf=1))
    failed = network.between("leaf0", "spine1")
    routes = Routes.of(network, failed)
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


NETWORK = """
hosts: [a, b, c, d]
switches: [left, right, top, bottom]
links:
  - {between: [a, left], rate_gbps: 25}
  - {between: [b, left], rate_gbps: 25}
  - {between: [c, right], rate_gbps: 25}
  - {between: [d, right], rate_gbps: 10, delay_us: 5}
  - {between: [left, top]}
  - {between: [left, bottom]}
  - {between: [right, top]}
  - {between: [bottom, right], loss_ratio: 0.001}
"""


def as_file(network):
    names = network.names
    links = [(names[link.source], names[link.target]) for link in network.links[::2]]
    return NetworkFile(
        hosts=tuple(names[: network.hosts]),
        switches=tuple(names[network.hosts :]),
        links=tuple(NetworkLink(between=ends) for ends in links),
    )


@pytest.mark.parametrize("spec", [FatTree(ports=4), FatTree(ports=6), LeafSpine(leaves=3, spines=2, hosts_per_leaf=4)])
def test_a_network_from_a_file_has_the_paths_and_choices_of_the_built_in_one(spec):
    network = spec.build()
    read = as_file(network).build()
    assert read.names == network.names
    assert read.divisors == network.divisors
    assert np.array_equal(Routes.of(read).cells, Routes.of(network).cells)
    assert np.array_equal(Routes.of(read).choices, Routes.of(network).choices)


def test_a_network_from_a_file_is_simulated_alike_by_both_engines(tmp_path):
    (file := tmp_path / "network.yaml").write_text(NETWORK)
    network = build_topology(FileTopology(file=str(file)))
    assert network.names[3:5] == ["d", "left"]
    assert [network.names[network.links[link].target] for link in Routes.of(network).links(4, 2)] == ["top", "bottom"]
    assert network.links[network.between("d", "right")[0]].spec.delay_us == 5
    job = CollectiveJob(name="job", hosts=(0, 1, 2, 3), size_bytes=100_000)
    scenario = Scenario(topology=FileTopology(file=str(file)), jobs=(job,))
    reference, kernel = (simulate(scenario, engine=engine) for engine in ("reference", "kernel"))
    assert (reference.end_ps, reference.counts) == (kernel.end_ps, kernel.counts)
    assert reference.end_ps > 100_000 * 8 * 2 * 3 / 4 / 10e9 * 1e12, "d's link is the slowest"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[b, left]", "[b, lefd]", r"network.yaml:6: links\[1\].between: there is no node 'lefd'; did you mean left"),
        ("[b, left]", "[b, a]", r":6: links\[1\].between: 'b' and 'a' are both hosts.*put a switch between"),
        ("[b, left]", "[b, b]", r":6: links\[1\].between: the link connects 'b' with itself"),
        ("top, bottom]", "top, a]", r":3: switches\[3\]: two nodes are called 'a'"),
        ("  - {between: [d, right], rate_gbps: 10, delay_us: 5}\n", "", r":2: hosts\[3\]: no path .* from a to d"),
        ("rate_gbps: 10,", "rate_gbps: -1,", r":8: links\[3\].rate_gbps"),
        ("rate_gbps: 10,", "rate: 10,", r":8: links\[3\].* did you mean rate_gbps"),
    ],
)
def test_mistakes_in_a_network_file_name_the_line(tmp_path, old, new, message):
    (file := tmp_path / "network.yaml").write_text(NETWORK.replace(old, new))
    with pytest.raises(DocumentError, match=message):
        build_topology(FileTopology(file=str(file)))


def test_a_network_file_that_is_not_there():
    with pytest.raises(DocumentError, match=r"nowhere\.yaml"):
        build_topology(FileTopology(file="nowhere.yaml"))
