# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dlcp.controller.fabric import (
    Fabric,
    FabricError,
    FabricSwitch,
    Host,
    Job,
    Link,
    Policy,
    Port,
    Tls,
    leaf_spine,
    load,
    star,
)
from dlcp.inputs.document import DocumentError
from dlcp.switch import PortQueueing

EXAMPLES = Path(__file__).parents[2] / "controller/examples"
LEAF_SPINE = (EXAMPLES / "leaf-spine.yaml").read_text()
LAST_LINKS = LEAF_SPINE[LEAF_SPINE.index('- {a: "leaf2:3"') : LEAF_SPINE.index("queueing:")]


def test_neighbours_and_attachments_of_a_leaf_spine():
    fabric = leaf_spine(2, 2, 2)
    assert fabric.attachments == {
        "host0": Port("leaf1", 1),
        "host1": Port("leaf1", 2),
        "host2": Port("leaf2", 1),
        "host3": Port("leaf2", 2),
    }
    assert [neighbour.port for neighbour in fabric.neighbours["leaf1"].values()] == [
        None,
        None,
        Port("spine1", 1),
        Port("spine2", 1),
    ]
    assert [neighbour.port for neighbour in fabric.neighbours["spine2"].values()] == [
        Port("leaf1", 4),
        Port("leaf2", 4),
    ]


def test_links_override_the_queueing_of_the_fabric():
    fabric = star(2, queueing=PortQueueing(10**9, 100, limit_packets=50))
    slow = replace(fabric.links[1], rate_bps=10**6, depth_packets=(1, 2, 3, 4, 5, 6, 7, 8), loss=0.5)
    fabric = replace(fabric, links=(fabric.links[0], slow))
    assert fabric.queueing_at(Port("switch", 1)) == PortQueueing(10**9, 100, limit_packets=50)
    assert fabric.queueing_at(Port("switch", 2)) == PortQueueing(10**6, (1, 2, 3, 4, 5, 6, 7, 8), 50, loss=0.5)


def test_shares_are_by_port_by_host_or_the_same_everywhere():
    job = Job(1, share=0.5, shares={"host1": 0.25, "leaf1:3": 0.125})
    fabric = leaf_spine(2, 2, 2, jobs=[job])
    assert [fabric.share_at(job, Port("leaf1", port)) for port in (1, 2, 3, 4)] == [0.5, 0.25, 0.125, 0.5]


def test_examples_are_fabrics():
    fabric = load(EXAMPLES / "star.yaml")
    assert [host.name for host in fabric.hosts] == ["h1", "h2", "h3", "h4"]
    assert fabric.queueing_at(Port("s1", 3)) == PortQueueing(20_000_000, 64)
    fabric = load(EXAMPLES / "leaf-spine.yaml")
    assert {switch.name: len(fabric.neighbours[switch.name]) for switch in fabric.switches} == {
        "leaf1": 4,
        "leaf2": 4,
        "spine1": 2,
        "spine2": 2,
    }


def test_fabric_is_written_as_json_and_read_back(tmp_path):
    fabric = leaf_spine(2, 3, 2, jobs=[Job(3, 0.5, shares={"leaf1:1": 0.25})], policy=Policy(ecn_at=0.5))
    fabric = replace(fabric, switches=(replace(fabric.switches[0], interfaces={2: "eth7"}), *fabric.switches[1:]))
    path = tmp_path / "fabric.json"
    path.write_text(json.dumps(asdict(fabric)))
    assert load(path) == fabric


def test_number_of_hosts_stands_for_a_star(tmp_path):
    path = tmp_path / "star.yaml"
    path.write_text("hosts: 3\n")
    assert load(path) == star(3)
    path.write_text("hosts: 2\nswitches: [{name: s9}]\n")
    fabric = load(path)
    assert fabric.links == (Link("s9:1", "host0"), Link("s9:2", "host1"))
    assert fabric.switches == (FabricSwitch("s9"),)


def test_certificates_are_beside_the_file(tmp_path):
    path = tmp_path / "star.yaml"
    tls = "tls: {ca: ca.pem, certificate: c.pem, key: /etc/k.pem}"
    path.write_text(f"hosts: 1\nswitches:\n- name: s\n  grpc: 10.0.0.9:9559\n  {tls}\n")
    [switch] = load(path).switches
    assert switch.tls == Tls(str(tmp_path / "ca.pem"), str(tmp_path / "c.pem"), "/etc/k.pem")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('a: h3, b: "leaf2:1"', 'a: h33, b: "leaf2:1"', r":20: links\[2\]\.a: unknown host 'h33'.*mean h3\b"),
        ('"leaf1:3", b:', '"leef1:3", b:', r":22: links\[4\]\.a: unknown switch 'leef1'.*mean leaf1\b"),
        ('"leaf1:3", b:', '"leaf1:64", b:', r":22: links\[4\]\.a: port 64 is not in 1\.\.63"),
        ('"leaf1:3", b:', '"leaf1:x", b:', r":22: links\[4\]\.a: port x is not"),
        (
            '"leaf1:3", b:',
            '"leaf1", b:',
            r":22: links\[4\]\.a: leaf1 is a switch; name one of its ports, as in leaf1:1",
        ),
        ('"leaf1:3", b:', '"leaf1:2", b:', r":22: links\[4\]\.a: leaf1:2 already has a link, links\[1\]"),
        ('a: h2, b: "leaf1:2"', 'a: h1, b: "leaf1:2"', r":19: links\[1\]\.a: h1 already has a link, links\[0\]"),
        ('a: h1, b: "leaf1:1"', "a: h1, b: h2", r":18: links\[0\]: h1 and h2 are both hosts"),
        ('- {a: h2, b: "leaf1:2"}\n', "", r":13: hosts\[1\]: host 'h2' has no link"),
        (LAST_LINKS, "", r":14: hosts\[2\]: host 'h3' cannot be reached"),
        ("rate_bps: 20e6", "rate_bps: 0", r":31: jobs: port leaf1:1 \(h1\) has no rate"),
        (
            "share: 0.9",
            "share: 0.96",
            r":31: jobs: the jobs' shares of port leaf1:1 \(h1\) add up to 1.01, more than 1",
        ),
        ("share: 0.9", "share: 9", r":33: jobs\[0\]\.share: job 1: a share must be in \(0, 1\], not 9"),
        (
            "shares: {h4: 0.5}",
            "shares: {h44: 0.5}",
            r":35: jobs\[0\]\.shares\.h44: no linked port or host is named 'h44'.*mean h4",
        ),
        ("id: 1\n", "id: 70000\n", r":32: jobs\[0\]\.id: a job id must be in"),
        ("0.2, 0.1, 0.05]", "0.2, 0.1]", r":39: policy\.by_queue\.2\.drop_at: drop_at has 6 values; it needs 7"),
        ("0.2, 0.1, 0.05]", "0.2, 0.1, 0.3]", r":39: policy\.by_queue\.2\.drop_at: .*class 6 would be dropped first"),
        ("    2: {", "    8: {", r":39: policy\.by_queue\.8: a queue must be in 0\.\.7, not 8"),
        ("to_queue: 2", "to_queue: 9", r":41: policy\.remap\[0\]\.to_queue: to_queue must be in 0\.\.7, not 9"),
        (
            "  remap: #",
            "  trim: [1, 70000]\n  remap: #",
            r":40: policy\.trim\[1\]: a job must be in 0\.\.65535, not 70000",
        ),
        ("  remap: #", "  trim: [1, 1]\n  remap: #", r":40: policy\.trim\[1\]: job 1 is named twice"),
        (", to_queue: 2", "", r":41: policy\.remap\[0\]: a remap without"),
        (
            "name: leaf2, grpc: 127.0.0.1:9562",
            "name: leaf2, grpc: 127.0.0.1:9561",
            r":7: switches\[1\]\.grpc: .*already",
        ),
        ("insecure: true, device_id: 3", "device_id: 3", r":8: switches\[2\]\.grpc: a control connection needs"),
        (
            "name: leaf2, grpc: 127.0.0.1:9562",
            "name: leaf2, grpc: here",
            r":7: switches\[1\]\.grpc: expected host:port, got 'here'",
        ),
        ("name: leaf2, g", "name: leaf1, g", r":7: switches\[1\]\.name: name leaf1 is already used by switches\[0\]"),
        ("name: leaf2, g", "name: leaf2, kind: bmv3, g", r":7: switches\[1\]\.kind: .*bmv3.*did you mean bmv2"),
        (
            "name: leaf2, g",
            "name: leaf2, thrift: 'a:1', g",
            r":7: switches\[1\]\.thrift: only bmv2 has a Thrift server",
        ),
        (
            "name: leaf2, g",
            "name: leaf2, ports: loopback, g",
            r":2[0-9]: links\[6\]\.a: loopback ports lead only to hosts",
        ),
        (
            "name: h2, address: 10.0.0.2",
            "name: h2, address: 10.0.0.1",
            r":13: hosts\[1\]\.address: .*already used by hosts\[0\]",
        ),
        (
            "name: h2, address: 10.0.0.2",
            "name: h2, address: 10.0.0",
            r":13: hosts\[1\]\.address: '10.0.0' is not an IP",
        ),
        ('00:04"', '0004"', r":15: hosts\[3\]\.mac: '02:00:00:00:0004' is not a unicast Ethernet"),
        ("name: h2, address", "name: leaf1, address", r":13: hosts\[1\]\.name: 'leaf1' is also the name of a switch"),
        ("name: h2, address", "name: h/2, address", r":13: hosts\[1\]\.name: 'h/2' is not a valid name"),
        ("depth_packets", "depth_packet", r":29: queueing\.depth_packet: .*did you mean depth_packets"),
    ],
)
def test_file_errors_point_at_the_line(tmp_path, old, new, says):
    assert LEAF_SPINE.count(old) == 1, LEAF_SPINE.count(old)
    path = tmp_path / "f.yaml"
    path.write_text(LEAF_SPINE.replace(old, new))
    with pytest.raises(DocumentError, match=f"f.yaml{says}"):
        load(path)


def test_two_bmv2_switches_must_not_share_a_device_id():
    switches = (FabricSwitch("a", "bmv2"), FabricSwitch("b", "bmv2"))
    links = (Link("a:1", "host0"), Link("b:1", "a:2"))
    with pytest.raises(FabricError, match="device_id 1 is already used by"):
        Fabric(switches, (Host.numbered(0),), links)
    Fabric((switches[0], replace(switches[1], device_id=2)), (Host.numbered(0),), links)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hosts": ()}, "needs at least one host"),
        ({"switches": ()}, "needs at least one switch"),
        ({"links": ()}, "host 'host0' has no link"),
        ({"jobs": (Job(1), Job(1))}, r"id 1 is already used by jobs\[0\]"),
        ({"jobs": (Job(1, share=0.6), Job(2, share=0.5))}, r"port switch:1 \(host0\) add up to 1.2, more than 1"),
        ({"jobs": (Job(1, share=0.0),)}, "job 1: a share must be in"),
        ({"jobs": (Job(1, burst_s=0),)}, "burst_s must be above 0"),
        ({"jobs": (Job(1),), "queueing": PortQueueing()}, "has no rate, so no job can have a share"),
        ({"switches": (FabricSwitch("switch", tls=Tls("a", "b", "c"), insecure=True),)}, "tls and insecure contradict"),
        ({"switches": (FabricSwitch("switch", "bmv2", "loopback"),)}, "bmv2 has packet ports only"),
        (
            {"switches": (FabricSwitch("switch"), FabricSwitch("lonely"))},
            "no link leads from the hosts to switch 'lonely'",
        ),
    ],
)
def test_fabric_that_cannot_be_is_refused(changes, says):
    with pytest.raises(FabricError, match=says):
        replace(star(2), **changes)


def test_shape_that_cannot_be_is_refused():
    with pytest.raises(FabricError, match="needs at least one host"):
        star(0)
    with pytest.raises(FabricError, match="port 64 is not in"):
        star(64)
    with pytest.raises(FabricError, match="each must be 1 or more"):
        leaf_spine(2, 0, 2)


def test_hosts_over_one_number_of_an_address_are_numbered_on():
    assert Host.numbered(254) == Host("host254", "10.0.0.255", "02:00:00:00:00:ff")
    assert Host.numbered(255) == Host("host255", "10.0.1.0", "02:00:00:00:01:00")


def test_unknown_switch_is_named_with_those_there_are():
    with pytest.raises(FabricError, match="unknown switch 'x'; the fabric has leaf1, spine1"):
        leaf_spine(1, 1, 1).switch("x")
