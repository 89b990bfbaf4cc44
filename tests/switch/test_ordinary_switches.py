# SPDX-License-Identifier: Apache-2.0
"""Exported configurations: a Linux router with tc's queues serves the urgent first, and SONiC's tables fit together."""

import json
import random
import shutil
import socket
import time
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("finsy", reason="switches are programmed over P4Runtime: pip install dlcp[fabric]")

from dlcp.cli import main
from dlcp.controller.fabric import FabricError, Policy, star
from dlcp.controller.ordinary_switches import export_sonic, export_tc
from dlcp.switch import PortQueueing
from dlcp.wire import UDP_PORT_BASE, Queue, dscp

RATE_BPS = 4_000_000
PACKET_BYTES = 500


def a_fabric(**changes):
    return star(2, ports="packet", queueing=PortQueueing(rate_bps=RATE_BPS), **changes)


# Linux ----------------------------------------------------------------------------------------------------------------


def route(network, script):
    """Make the switch's namespace a router between the hosts, and run a script there."""
    switch = network.switch
    switch.sysctl("net/ipv4/ip_forward", "1")
    for host in network.hosts:
        address, port = f"10.0.0.{host.port}", f"port{host.port}"
        mac = f"02:ff:00:00:00:{host.port:02x}"
        other = f"10.0.0.{3 - host.port}"
        switch.ip(f"link set {port} address {mac}", f"route add {address}/32 dev {port}")
        switch.ip(f"neigh replace {address} lladdr {host.mac} dev {port}")
        host.namespace.ip(f"neigh replace {other} lladdr {mac} dev eth0")
    done = switch.run(["sh"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def udp(host):
    return host.namespace.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


def received_of(network, kinds, seconds=1.0):
    """Send packets of each kind, (queue, droppable), at the kind's rate; return the shares that arrive, by kind."""
    sent, got, draw = Counter(), Counter(), random.Random(1)
    with udp(network.hosts[0]) as source, udp(network.hosts[1]) as sink:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        sink.bind(("10.0.0.2", UDP_PORT_BASE))
        began_s = time.monotonic()
        while (now_s := time.monotonic() - began_s) < seconds:
            for kind, rate_bps in draw.sample(list(kinds.items()), len(kinds)):
                while sent[kind] * PACKET_BYTES * 8 < now_s * rate_bps:
                    source.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp(*kind) << 2)
                    payload = bytes([kind[0], kind[1]]).ljust(PACKET_BYTES - 42, b"\0")
                    source.sendto(payload, ("10.0.0.2", UDP_PORT_BASE))
                    sent[kind] += 1
            time.sleep(0.001)
        sink.settimeout(1.0)
        try:
            while True:
                data = sink.recv(2048)
                got[data[0], bool(data[1])] += 1
        except TimeoutError:
            return {kind: got[kind] / sent[kind] for kind in kinds}


@pytest.fixture
def router(namespaces):
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed: apt-get install nftables")
    with namespaces.StarNetwork(2) as network:
        yield network


def test_a_linux_router_serves_urgent_queues_first_and_drops_what_may_be_dropped(router):
    route(router, export_tc(a_fabric(), "switch"))
    kinds = {
        (Queue.CONTROL, False): 0.05 * RATE_BPS,
        (6, False): 0.2 * RATE_BPS,
        (6, True): 0.5 * RATE_BPS,
        (3, True): 0.8 * RATE_BPS,
        (Queue.EXCESS, True): 0.8 * RATE_BPS,
    }
    shares = received_of(router, kinds)
    assert shares[Queue.CONTROL, False] == shares[6, False] == 1
    assert shares[6, True] > 0.95
    assert 0.1 < shares[3, True] < 0.6
    assert shares[Queue.EXCESS, True] < 0.2


def test_tags_of_hosts_that_are_not_trusted_have_no_effect(router):
    fabric = a_fabric()
    fabric = replace(fabric, hosts=tuple(replace(host, trusted=host is not fabric.hosts[0]) for host in fabric.hosts))
    route(router, export_tc(fabric, "switch"))
    shares = received_of(router, {(6, True): RATE_BPS, (3, True): RATE_BPS})
    assert abs(shares[6, True] - shares[3, True]) < 0.15


def test_the_script_may_run_again(router):
    script = export_tc(a_fabric(), "switch")
    route(router, script + script)


def test_a_port_needs_a_rate():
    with pytest.raises(FabricError, match="port switch:1 has no rate, which tc's HTB needs; give it a rate_bps"):
        export_tc(star(2, ports="packet", queueing=PortQueueing()), "switch")


# SONiC ----------------------------------------------------------------------------------------------------------------


def test_sonic_s_tables_refer_to_each_other():
    tables = json.loads(export_sonic(a_fabric(), "switch"))
    assert set(tables["PORT_QOS_MAP"]) == {"port1", "port2"}
    for entry in tables["PORT_QOS_MAP"].values():
        assert entry["dscp_to_tc_map"] in tables["DSCP_TO_TC_MAP"]
        assert entry["tc_to_queue_map"] in tables["TC_TO_QUEUE_MAP"]
    assert set(tables["QUEUE"]) == {f"port{port}|{queue}" for port in (1, 2) for queue in range(8)}
    for entry in tables["QUEUE"].values():
        assert entry["scheduler"] in tables["SCHEDULER"]
        assert entry.get("wred_profile") in (*tables["WRED_PROFILE"], None)
    assert {entry["profile"] for entry in tables["BUFFER_QUEUE"].values()} == set(tables["BUFFER_PROFILE"])
    assert all(isinstance(value, str) for table in tables.values() for row in table.values() for value in row.values())


def queues_of(fabric, interface="port1"):
    """The queue of each DSCP from an interface."""
    tables = json.loads(export_sonic(fabric, "switch"))
    entry = tables["PORT_QOS_MAP"][interface]
    classes = tables["TC_TO_QUEUE_MAP"][entry["tc_to_queue_map"]]
    return {int(one): int(classes[two]) for one, two in tables["DSCP_TO_TC_MAP"][entry["dscp_to_tc_map"]].items()}


def test_on_sonic_urgency_is_kept_and_what_may_be_dropped_has_queues_of_its_own():
    queues = queues_of(a_fabric())
    assert set(queues) == set(range(64))
    for droppable in (False, True):
        places = [queues[dscp(queue, droppable)] for queue in (0, 2, 3, 4, 5, 6)]
        assert places == sorted(places)
    for queue in (3, 4, 5, 6):
        assert queues[dscp(queue, False)] != queues[dscp(queue, True)]
    assert queues[dscp(Queue.CONTROL, False)] == 7
    assert queues[0] == queues[46] == queues[dscp(Queue.ORDINARY, False)] == 1


def test_on_sonic_tags_of_hosts_that_are_not_trusted_have_no_effect():
    fabric = a_fabric()
    fabric = replace(fabric, hosts=tuple(replace(host, trusted=False) for host in fabric.hosts))
    assert set(queues_of(fabric).values()) == {1}


def test_sonic_trims_if_the_fabric_trims():
    tables = json.loads(export_sonic(a_fabric(policy=Policy(trim=(1,))), "switch"))
    assert tables["BUFFER_PROFILE"]["DLCP"]["packet_discard_action"] == "trim"
    assert tables["SWITCH_TRIMMING"]["GLOBAL"] == {"size": "128", "dscp_value": "48", "queue_index": "7"}
    assert queues_of(a_fabric(policy=Policy(trim=(1,))))[48] == 7
    assert "SWITCH_TRIMMING" not in json.loads(export_sonic(a_fabric(), "switch"))


def test_the_command_prints_either(capsys):
    file = "controller/examples/star.yaml"
    assert main(["fabric", "export", "tc", file, "s1"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/sh\n")
    assert main(["fabric", "export", "sonic", file, "s1"]) == 0
    assert "DSCP_TO_TC_MAP" in json.loads(capsys.readouterr().out)
    assert main(["fabric", "export", "tc", file, "s9"]) == 2
    assert "unknown switch 's9'; the fabric has s1" in capsys.readouterr().err
