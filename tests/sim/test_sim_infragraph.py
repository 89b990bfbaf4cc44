# SPDX-License-Identifier: Apache-2.0
"""Networks described in InfraGraph: which of their components are hosts, switches and links."""

import re
import sys

import pytest

from dlcp.inputs.document import DocumentError
from dlcp.sim import CollectiveJob, Scenario, simulate
from dlcp.sim.network.topology import FileTopology, build_topology

infragraph = pytest.importorskip("infragraph")

INFRASTRUCTURE = """
name: two-racks
devices:
  - name: server
    components:
      - {name: xpu, count: 2, choice: xpu}
      - {name: nic, count: 2, choice: nic}
      - {name: nvsw, count: 1, choice: switch}
    links:
      - name: nvlink
        physical: {bandwidth: {choice: gigabytes_per_second, gigabytes_per_second: 450}, latency: {choice: ns, ns: 500}}
      - {name: pcie}
    edges:
      - {ep1: {component: xpu}, ep2: {component: nvsw}, scheme: many2many, link: nvlink}
      - {ep1: {component: xpu}, ep2: {component: nic}, scheme: one2one, link: pcie}
  - name: switch
    components:
      - {name: asic, count: 1, choice: cpu}
      - {name: port, count: 8, choice: port}
    links:
      - {name: ic}
    edges:
      - {ep1: {component: asic}, ep2: {component: port}, scheme: many2many, link: ic}
instances:
  - {name: host, device: server, count: 4}
  - {name: leaf, device: switch, count: 2}
  - {name: spine, device: switch, count: 2}
links:
  - name: access
    physical: {bandwidth: {choice: gigabits_per_second, gigabits_per_second: 100}}
  - name: trunk
    physical: {bandwidth: {choice: gigabits_per_second, gigabits_per_second: 400}, latency: {choice: us, us: 2}}
edges:
  - ep1: {instance: "host[0:4]", component: "nic[0]"}
    ep2: {instance: "leaf[0]", component: "port[0:4]"}
    scheme: one2one
    link: access
  - ep1: {instance: "host[0:4]", component: "nic[1]"}
    ep2: {instance: "leaf[1]", component: "port[0:4]"}
    scheme: one2one
    link: access
  - ep1: {instance: "leaf[0:2]", component: "port[4]"}
    ep2: {instance: "spine[0]", component: "port[0:2]"}
    scheme: one2one
    link: trunk
  - ep1: {instance: "leaf[0:2]", component: "port[5]"}
    ep2: {instance: "spine[1]", component: "port[0:2]"}
    scheme: one2one
    link: trunk
"""
PCIE = "      - {name: pcie}\n"
OTHER_PCIE = (
    "      - name: pcie\n        physical: {bandwidth: {choice: gigabits_per_second, gigabits_per_second: 256}}\n"
)
NVLINK = "{choice: gigabytes_per_second, gigabytes_per_second: 450}, latency: {choice: ns, ns: 500}"


@pytest.fixture
def build(tmp_path):
    def build(text):
        (file := tmp_path / "fabric.yaml").write_text(text)
        return build_topology(FileTopology(file=str(file)))

    return build


def links(network, name):
    """Return the links of a node: their other ends, rates and delays."""
    own = network.names.index(name)
    found = [link for link in network.links if link.source == own]
    return [(network.names[link.target], link.spec.rate_gbps, link.spec.delay_us) for link in found]


def test_gpus_are_hosts_where_the_server_limits_what_they_send_each_other(build):
    network = build(INFRASTRUCTURE)
    assert network.names[: network.hosts] == [f"host.{server}.xpu.{gpu}" for server in range(4) for gpu in range(2)]
    assert sorted(network.names[network.hosts :]) == [
        *(f"host.{server}.nvsw.0" for server in range(4)),
        *("leaf.0", "leaf.1", "spine.0", "spine.1"),
    ]
    assert links(network, "host.2.xpu.1") == [("host.2.nvsw.0", 3600, 0.5), ("leaf.1", 100, 1)]
    assert links(network, "leaf.0")[-2:] == [("spine.0", 400, 2), ("spine.1", 400, 2)]


def test_a_server_without_inner_limits_is_one_host(build):
    assert NVLINK in INFRASTRUCTURE
    network = build(INFRASTRUCTURE.replace(f"        physical: {{bandwidth: {NVLINK}}}\n", ""))
    assert network.names == ["host.0", "host.1", "host.2", "host.3", "leaf.0", "leaf.1", "spine.0", "spine.1"]
    assert links(network, "host.3") == [("leaf.0", 100, 1), ("leaf.1", 100, 1)]


def test_network_cards_are_nodes_where_the_way_to_them_has_a_limit(build):
    network = build(INFRASTRUCTURE.replace(PCIE, OTHER_PCIE))
    assert links(network, "host.0.xpu.1") == [("host.0.nvsw.0", 3600, 0.5), ("host.0.nic.1", 256, 1)]
    assert links(network, "host.0.nic.1") == [("host.0.xpu.1", 256, 1), ("leaf.1", 100, 1)]


def test_network_cards_are_hosts_where_there_are_no_gpus(build):
    network = build(INFRASTRUCTURE.replace("choice: xpu", "choice: memory"))
    assert network.names[: network.hosts] == [f"host.{server}.xpu.{card}" for server in range(4) for card in range(2)]


def test_links_between_devices_have_a_default(build):
    network = build(re.sub(r"        physical: .*100.*\n", "", INFRASTRUCTURE))
    assert links(network, "host.2.xpu.1") == [("host.2.nvsw.0", 3600, 0.5), ("leaf.1", 100, 1)]


def test_blueprints_of_the_package(build):
    from infragraph.blueprints.devices.generic.server import Server
    from infragraph.blueprints.fabrics.closfabric import ClosFabric
    from infragraph.blueprints.fabrics.single_tier_fabric import SingleTierFabric

    for fabric, hosts, nodes, count in (
        (ClosFabric(), 4, 11, 4 * 2 + 4 * 3),
        (SingleTierFabric(Server(2), 5), 5, 6, 5 * 4),
    ):
        network = build(fabric.serialize("yaml"))
        assert (network.hosts, len(network.names), len(network.links) // 2) == (hosts, nodes, count)


def test_both_engines_simulate_it_alike(tmp_path, build):
    build(INFRASTRUCTURE)
    job = CollectiveJob(name="job", hosts=tuple(range(8)), size_bytes=100_000)
    scenario = Scenario(topology=FileTopology(file=str(tmp_path / "fabric.yaml")), jobs=(job,))
    reference, kernel = (simulate(scenario, engine=engine) for engine in ("reference", "kernel"))
    assert (reference.end_ps, reference.counts) == (kernel.end_ps, kernel.counts)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "choice: gigabytes_per_second, gigabytes",
            "choice: gigatransfers_per_second, gigatransfers",
            r"'nvlink' .* GT/s",
        ),
        ("device: switch, count: 2}", "device: router, count: 2}", r"not a valid InfraGraph infrastructure: .*router"),
        ("choice: xpu}", "choice: npu}", r"not a valid InfraGraph infrastructure: .*npu"),
        ('instance: "spine[0]"', 'instance: "spin[0]"', r"not a valid InfraGraph infrastructure: .*spin"),
        (
            "host, device: server, count: 4",
            "host, device: server, count: 5",
            r"no path .* from host\.0\.xpu\.0 to host\.4",
        ),
    ],
)
def test_what_is_wrong_names_the_file(build, old, new, message):
    assert old in INFRASTRUCTURE
    with pytest.raises(DocumentError, match=rf"fabric\.yaml.*{message}"):
        build(INFRASTRUCTURE.replace(old, new))


def test_a_fabric_without_hosts(build):
    text = INFRASTRUCTURE.replace("choice: xpu", "choice: memory").replace("choice: nic", "choice: memory")
    with pytest.raises(DocumentError, match=r"fabric\.yaml:\d+: devices: no component is an xpu or a nic"):
        build(text)


def test_without_the_package_the_error_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "infragraph", None)
    with pytest.raises(DocumentError, match=r"fabric\.yaml .*pip install 'dlcp\[infragraph\]'"):
        build(INFRASTRUCTURE)


def test_the_infrastructure_may_be_below_a_root(build):
    inner = "\n".join(f"    {line}" for line in INFRASTRUCTURE.splitlines())
    assert build(f"infrastructure:\n{inner}\n").names == build(INFRASTRUCTURE).names
    assert build(f"version: 3.1.0\n{INFRASTRUCTURE}").names == build(INFRASTRUCTURE).names


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('component: "nic[1]"', 'component: "nic[7]"', r"edges: an edge names host\.\d\.nic\.7, which no instance has"),
        ("device: server, count: 4", "device: server, count: 100000000", "their components are 500,000,0.*; at most"),
        ("gigabits_per_second: 400", "gigabits_per_second: 0.0001", r"links\.\d+\.rate_gbps: must be at least 0\.004"),
        ("devices:", "version: 9.0\ndevices: 3\nothers:", r"not a valid InfraGraph .*\(the file has version 9"),
    ],
)
def test_a_wrong_infrastructure_is_refused_in_words(build, old, new, message):
    with pytest.raises(DocumentError, match=message):
        build(INFRASTRUCTURE.replace(old, new, 1))


def test_an_infrastructure_of_an_older_version_is_named(build):
    with pytest.raises(DocumentError, match=r"an InfraGraph infrastructure before version 1\.0, with connections"):
        build("infrastructure:\n  name: old\n  connections: [server.0.nic.0.eth1.leaf.0.port.0]\n")
