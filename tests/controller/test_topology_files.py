# SPDX-License-Identifier: Apache-2.0
"""Topologies of p4-utils and of p4lang's tutorials are read as fabrics, or refused by what is not supported."""

import json
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.controller.fabric import Link, load
from dlcp.inputs.document import DocumentError

P4APP = json.loads((Path(__file__).parents[2] / "controller/examples/p4app.json").read_text())
TUTORIAL = {
    "hosts": {
        "h1": {
            "ip": "10.0.1.1/24",
            "mac": "08:00:00:00:01:11",
            "commands": ["route add default gw 10.0.1.10 dev eth0", "arp -i eth0 -s 10.0.1.10 08:00:00:00:01:00"],
        },
        "h2": {"ip": "10.0.2.2/24", "mac": "08:00:00:00:02:22", "commands": []},
    },
    "switches": {"s1": {"runtime_json": "pod-topo/s1-runtime.json"}, "s2": {"cli_input": "s2.txt"}},
    "links": [["h1", "s1-p1"], ["s1-p3", "s2-p2", "5ms", 0.5], ["s2-p1", "h2", 2]],
}


@pytest.fixture
def read(tmp_path):
    def from_content(content):
        path = tmp_path / "topology.json"
        path.write_text(json.dumps(content))
        return load(path)

    return from_content


def test_hosts_of_p4_utils_get_its_addresses_and_switches_mininets_ports(read):
    fabric = read(P4APP)
    assert [(host.name, host.address, host.mac) for host in fabric.hosts] == [
        ("h1", "10.0.1.1", "00:00:0a:00:01:01"),
        ("h2", "10.0.1.2", "00:00:0a:00:01:02"),
        ("h3", "10.0.4.3", "00:00:0a:00:04:03"),
        ("h4", "10.0.4.4", "00:00:0a:00:04:04"),
    ]
    assert fabric.links[3] == Link("h4", "s4:2", rate_bps=10_000_000, delay_s=0.002)
    assert fabric.links[4] == Link("s1:3", "s2:1", rate_bps=20_000_000)
    assert fabric.switch("s1").interface(3) == "s1-eth3"


@pytest.mark.parametrize(
    ("strategy", "addresses"), [("l2", ["10.0.0.1", "10.0.0.3"]), ("l3", ["10.1.1.2", "10.4.3.2"])]
)
def test_other_strategies_of_p4_utils(read, strategy, addresses):
    fabric = read({**P4APP, "topology": {**P4APP["topology"], "assignment_strategy": strategy}})
    assert [fabric.hosts[0].address, fabric.hosts[2].address] == addresses


def test_a_tutorial_says_addresses_ports_delay_and_rate(read):
    fabric = read(TUTORIAL)
    assert [(host.address, host.mac) for host in fabric.hosts] == [
        ("10.0.1.1", "08:00:00:00:01:11"),
        ("10.0.2.2", "08:00:00:00:02:22"),
    ]
    assert fabric.links[1] == Link("s1:3", "s2:2", rate_bps=500_000, delay_s=0.005)
    assert fabric.links[2] == Link("s2:1", "h2", delay_s=0.002)


def test_it_is_checked_as_other_fabrics(capsys):
    assert main(["fabric", "check", "controller/examples/p4app.json"]) == 0
    assert "s4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            ("topology", "switches", "s1", "cpu_port"),
            True,
            "cpu_port of s1 is not supported: the switches",
        ),
        (("topology", "links", 4), ["s1", "s2", {"weight": 5}], "links[4]: weight of a link is not supported: packets"),
        (("topology", "links", 4), ["s1", "s2", {"delay": "soon"}], "links[4]: delay is 'soon'; write a number"),
        (("topology", "links", 4), ["s1", "s9"], "links[4]: 's9' is neither a host nor a switch"),
        (("topology", "hosts", "h1"), {"auto": True}, "auto of h1 is not supported: hosts have fixed addresses"),
        (("topology", "hosts", "h1"), {"commands": ["iperf -s"]}, "run it with `dlcp testbed shell h1 iperf -s`"),
        (("topology", "routers"), {}, "routers of a topology is not supported: there are only hosts and switches"),
        (("topology", "links"), [["h1", "s1"]], "topology.hosts.h2: host h2 has no link"),
    ],
)
def test_what_is_not_supported_is_named_with_what_to_do(read, part, value, message):
    content = json.loads(json.dumps(P4APP))
    *parents, last = part
    place = content
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(DocumentError) as found:
        read(content)
    assert message in str(found.value)
    assert "topology.json:1: topology." in str(found.value)
