# SPDX-License-Identifier: Apache-2.0
"""A testbed by hand: looked into, followed, broken and mended; and DLCP's switches in a Mininet script."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("finsy", reason="switches are programmed over P4Runtime: pip install dlcp[fabric]")

from dlcp import cli
from dlcp.commands import testbed as command
from dlcp.controller.fabric import leaf_spine
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.faults import (
    _NO_ROOM,
    break_links,
    break_switch,
    change_links,
    changes,
    mend_links,
    mend_switch,
)
from dlcp.controller.testbed.layout import StateFile
from dlcp.controller.testbed.lifecycle import fabric_of, up
from dlcp.controller.testbed.probes import TaggedFlow, capture, kind_of, trace
from dlcp.host.netlab import NamedNamespace
from dlcp.switch import PortQueueing
from tests.docs.pages import ROOT

KINDS = ["builtin", "bmv2"]
FABRIC = leaf_spine(2, 1, 2, queueing=PortQueueing(rate_bps=32_000_000, depth_packets=32))
SCRIPT = ROOT / "controller/examples/mininet_script.py"


def follow(name, **flow):
    state = StateFile(name).read()
    hosts = state.layout.hosts
    return trace(state, fabric_of(name), hosts[0], hosts[-1], TaggedFlow(**flow))


def run(*words):
    return command.run(cli.parse(["testbed", *words]))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_packets_are_followed_through_what_is_broken_and_mended(needs, name, kind, capsys):
    needs(kind)
    state = up(FABRIC, kind, name)
    whole = follow(name)
    assert (whole.received, [(hop.switch, hop.left) for hop in whole.hops]) == (
        100,
        [("leaf1", 100), ("spine1", 100), ("leaf2", 100)],
    )
    assert run("ping", "--name", name) == 0
    assert "12 of 12 pairs answered all requests" in capsys.readouterr().out

    dropped = follow(name, count=400, rate_bps=64e6, drop_class=5)
    assert dropped.received < 400
    assert dropped.hops[0].account.count("POLICY_DROP", ports=[3], queues=[6]) == 400 - dropped.hops[0].left

    break_links(state, ["leaf1", "spine1"])
    assert [line.partition(":")[0] for line in changes(state)] == ["link leaf1"]
    lost = follow(name)
    assert (lost.received, lost.hops[0].arrived, lost.hops[0].left) == (0, 100, 0)
    if kind == "builtin":
        assert lost.hops[0].notes[-1] == "100 sent to a link that is down at leaf1:3"
    assert run("ping", "--name", name, "host0", "host3", "--deadline", "1") == 1
    mend_links(state, ["leaf1", "spine1"])
    assert follow(name).received == 100

    break_switch(state, "spine1")
    assert "spine1 is broken" in changes(state)[0]
    assert follow(name).received == 0
    with pytest.raises(TestbedError, match="leaf1 is not broken"):
        mend_switch(state, "leaf1")
    mend_switch(state, "spine1")
    assert follow(name).received == 100
    assert changes(state) == []


@pytest.mark.timeout(120)
def test_all_hosts_of_an_ipv6_testbed_answer(needs, name, capsys):
    needs("builtin")
    assert run("up", "--ipv6", "--name", name) == 0
    assert run("ping", "--name", name) == 0
    assert "42 of 42 pairs answered all requests" in capsys.readouterr().out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_gets_slower_while_it_is_in_use(needs, name, kind):
    needs(kind)
    state = up(FABRIC, kind, name)
    change_links(state, ["host3"], rate_bps=2_000_000)
    assert "has 2 Mbit/s" in changes(state)[0]
    assert follow(name, rate_bps=16e6, count=200).received < 200
    if kind == "bmv2":
        with pytest.raises(TestbedError, match="neither delay nor loss"):
            change_links(state, ["host3"], delay_s=0.001)
    else:
        change_links(state, ["leaf1", "spine1"], loss=1.0)
        lost = follow(name)
        assert (lost.hops[0].left, lost.hops[0].notes[-1]) == (0, "100 lost on the line from leaf1:3")
    mend_links(state, ["leaf1"])
    mend_links(state, ["host3"])
    assert changes(state) == []
    assert follow(name).received == 100


@pytest.mark.timeout(120)
def test_mending_deletes_only_the_queue_that_breaking_made(needs, name):
    needs("builtin")
    state = up(FABRIC, "builtin", name)
    ((at_switch, at_host),) = state.layout.links_of(["host0"])
    spaces = [NamedNamespace(end.namespace) for end in (at_switch, at_host)]
    spaces[0].tc("qdisc", "replace", "dev", at_switch.interface, "root", *_NO_ROOM)
    spaces[1].limit_rate(at_host.interface, 10**6, burst_bytes=3000, limit_bytes=10**5)
    spaces[1].ip(f"link set {at_host.interface} down")
    assert "is broken" in changes(state)[0]
    mend_links(state, ["host0"])
    assert changes(state) == []
    shown = [space.run(["tc", "qdisc"], capture_output=True, text=True).stdout for space in spaces]
    assert ["qdisc pfifo" in shown[0], "qdisc tbf" in shown[1]] == [False, True]


@pytest.mark.timeout(120)
def test_a_capture_has_both_directions(needs, name):
    needs("builtin")
    state = up(FABRIC, "builtin", name)
    found = []
    tap = threading.Thread(target=lambda: found.extend(capture(state, "leaf2:2", 20, 104, threading.Event())[0]))
    tap.start()
    assert follow(name).received == 100
    assert run("ping", "--name", name, "host3", "host0") == 0
    tap.join()
    kinds = [(str(frame.end), kind_of(frame.data)) for frame in found]
    assert kinds.count(("host3", "DLCP DATA job 0 queue 6 class 0")) == 100
    assert kinds.count(("leaf2:2", "ICMP")) == kinds.count(("host3", "ICMP")) == 2


@pytest.mark.timeout(120)
def test_a_command_runs_in_a_hosts_network(needs, name):
    needs("builtin")
    up(FABRIC, "builtin", name)
    shell = [sys.executable, "-m", "dlcp.cli", "testbed", "shell", "--name", name]
    done = subprocess.run([*shell, "host1", "ip", "-brief", "address"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "10.0.0.2/32" in done.stdout) == (0, True)
    assert subprocess.run([*shell, "host1", "false"], timeout=60).returncode == 1


@pytest.mark.timeout(120)
def test_a_mininet_script_of_ones_own(needs):
    needs("builtin")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "0% dropped (12/12 received)" in done.stderr
    assert not list(Path("/run/netns").glob("mininet-*"))
    assert StateFile("mininet").read() is None
