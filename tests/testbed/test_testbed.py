# SPDX-License-Identifier: Apache-2.0
"""Testbeds as root brings them up: made, crashed and removed; the right rate; training, also while a switch dies."""

import dataclasses
import os
import signal
import socket
from pathlib import Path

import pytest

pytest.importorskip("finsy", reason="switches are programmed over P4Runtime: pip install dlcp[fabric]")
pytest.importorskip("torch", reason="the demo trains with PyTorch")

from dlcp import cli
from dlcp.commands import testbed as command
from dlcp.controller.fabric import leaf_spine, star
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.accounts import port_rates
from dlcp.controller.testbed.layout import RUN_FOLDER, StateFile
from dlcp.controller.testbed.lifecycle import down, fabric_of, find, up
from dlcp.demo.testbed_runs import TestbedSetup, check, train
from dlcp.demo.variants import variants
from dlcp.host.netlab import HOST_INTERFACE, NamedNamespace
from dlcp.switch import PortQueueing
from tests.waiting import until

RATE_BPS = 32_000_000
KINDS = ["builtin", "bmv2"]
DEADLINE_S = 20.0


def small_star(hosts=3, depth=32):
    return star(hosts, ports="packet", queueing=PortQueueing(rate_bps=RATE_BPS, depth_packets=depth))


def names_of(name):
    folder = Path("/run/netns")
    return [each.name for each in folder.glob(f"{name}-*")] if folder.exists() else []


def pids_in(state):
    return {pid for namespace in state.namespaces for pid in NamedNamespace(namespace).pids()}


def talk(state, sender, receiver):
    """Send a line over TCP from one host to another and return what arrives."""
    port = 40_000
    server = NamedNamespace(receiver.namespace).call(lambda: socket.create_server((receiver.address, port)))
    with server:
        client = NamedNamespace(sender.namespace).call(
            lambda: socket.create_connection((receiver.address, port), timeout=DEADLINE_S)
        )
        with client:
            server.settimeout(DEADLINE_S)
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"hello")
                accepted.settimeout(DEADLINE_S)
                return accepted.recv(16)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_up_carries_its_rate_over_any_mix_of_queues_and_leaves_nothing(needs, name, kind):
    needs(kind)
    state = up(small_star(), kind, name)
    first, *_, last = state.layout.hosts
    assert talk(state, first, last) == b"hello"
    # On a busy machine a switch may be late, and carry less for a while; never more.
    tries = [port_rates(state.layout) for _ in range(3)]
    for mix in zip(*tries, strict=True):
        carried = [rate.carried_bps / RATE_BPS for rate in mix]
        assert max(carried) < 1.02, mix
        assert max(carried) > 0.9, mix
    with pytest.raises(TestbedError, match="is already up"):
        up(small_star(), kind, name)
    pids = [state.keeper, *(switch.process for switch in state.switches.values())]
    assert down(name) >= 2
    assert not any(process.alive for process in pids)
    assert not names_of(name)
    assert not list(RUN_FOLDER.glob(f"{name}.*"))


@pytest.mark.timeout(120)
def test_what_a_crash_leaves_is_found_and_removed(needs, name, capsys):
    needs("bmv2")
    state = up(small_star(), "bmv2", name)
    switch = state.switches["switch"].process
    os.kill(state.keeper.pid, signal.SIGKILL)
    until(lambda: not state.keeper.alive, "the keeper does not die")
    until(lambda: pids_in(state) == {switch.pid}, "the hosts' shells outlive the keeper, which held their input")
    assert switch.alive
    with pytest.raises(TestbedError, match="has crashed"):
        find(name)
    assert command.run(_arguments("down", "--name", name)) == 0
    assert "1 processes ended" in capsys.readouterr().out
    assert not switch.alive
    assert not names_of(name)
    assert command.run(_arguments("down", "--name", name)) == 0
    assert command.run(_arguments("status", "--name", name)) == 1


@pytest.mark.timeout(120)
def test_names_that_others_have_given_are_left_alone(needs, name):
    needs("bmv2")
    foreign = NamedNamespace(f"{name}-host1")
    foreign.attach(os.getpid())
    try:
        with pytest.raises(TestbedError, match="already exists; run"):
            up(small_star(), "bmv2", name)
        assert foreign.exists
    finally:
        os.system(f"ip netns delete {foreign.name}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_every_host_of_a_leaf_spine_reaches_every_other(needs, name, kind):
    needs(kind)
    fabric = leaf_spine(2, 2, 2, queueing=PortQueueing(rate_bps=RATE_BPS, depth_packets=32))
    hosts = up(fabric, kind, name).layout.hosts
    for sender in hosts:
        for receiver in hosts:
            if sender is not receiver:
                assert talk(None, sender, receiver) == b"hello", (sender.name, receiver.name)


@pytest.mark.timeout(120)
def test_a_switch_that_dies_is_started_again_and_programmed_by_whoever_controls_it(needs, name):
    needs("bmv2")
    from dlcp.controller.testbed.lifecycle import Controller

    state = up(small_star(), "bmv2", name)
    with Controller(fabric_of(name)) as controller:
        os.kill(state.switches["switch"].process.pid, signal.SIGKILL)
        until(lambda: StateFile(name).read().switches["switch"].restarts == 1, "it is not started again")
        until(lambda: controller.installs == 1, "it is not programmed again")
        until(lambda: talk(state, *state.layout.hosts[:2]) == b"hello", "hosts do not reach each other")


def _training(kind, steps, **changes):
    collective = "server" if kind == "bmv2" else "direct"
    setup = TestbedSetup(steps=steps, collective=collective, switch=kind, one_port=kind == "bmv2", **changes)
    fabric = small_star(setup.hosts, 64 if kind == "bmv2" else 32)
    return dataclasses.replace(setup, depth_packets=fabric.queueing.depth_packets), fabric


def _variant(setup, name):
    return next(variant for variant in variants(setup) if variant.name == name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_training_with_dlcp_keeps_its_bound_and_hosts_and_switch_agree(needs, name, kind):
    needs(kind)
    setup, fabric = _training(kind, steps=3)
    state = up(fabric, kind, name)
    record = train(state, fabric, setup, _variant(setup, "dlcp"), progress=lambda step: None)
    assert record["ledger"]["violations"] == 0
    assert record["replicas_identical"]
    assert [finding for finding in record["agreement"] if finding["agree"] is False] == []
    assert len(record["agreement"]) == 5
    if kind == "builtin":
        assert all(finding["agree"] for finding in record["agreement"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_training_over_a_leaf_spine_crosses_it_and_hosts_and_switches_agree(needs, name, kind):
    needs(kind)
    setup, star_fabric = _training(kind, steps=2)
    fabric = leaf_spine(2, 2, 4, queueing=star_fabric.queueing)
    setup = dataclasses.replace(setup, shape="leaf-spine")
    state = up(fabric, kind, name)
    record = train(state, fabric, setup, _variant(setup, "dlcp"), progress=lambda step: None)
    assert len(record["steps"]) == 2
    assert record["replicas_identical"]
    assert record["ledger"]["violations"] == 0
    findings = record["agreement"]
    assert len(findings) == 5
    assert [finding for finding in findings if finding["agree"] is False] == []
    if kind == "builtin":
        assert all(finding["agree"] for finding in findings[:2]), findings
    # More was forwarded than received: half of the workers are at the other leaf.
    received = int(findings[0]["hosts"].replace(",", ""))
    assert record["switch"]["forwarded"] > 1.5 * received


@pytest.mark.timeout(120)
def test_each_port_has_the_rate_of_its_own_link(needs, name):
    needs("builtin")
    fabric = small_star()
    slow_bps = RATE_BPS // 4
    slow = dataclasses.replace(fabric.links[2], rate_bps=slow_bps, depth_packets=16)
    state = up(dataclasses.replace(fabric, links=(*fabric.links[:2], slow)), "builtin", name)
    carried = port_rates(state.layout, [1, 1, 1])
    assert {rate.asked_bps for rate in carried} == {slow_bps}
    assert 0.9 < max(rate.carried_bps for rate in carried) / slow_bps < 1.02
    back = dataclasses.replace(state.layout, hosts=state.layout.hosts[::-1])
    assert max(rate.carried_bps for rate in port_rates(back, [1, 1, 1])) > 2 * slow_bps
    NamedNamespace(state.layout.hosts[0].namespace).ip(f"link set {HOST_INTERFACE} down")
    with pytest.raises(TestbedError, match=r"10\.0\.0\.1 cannot send to 10\.0\.0\.3"):
        port_rates(state.layout, [1])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "steps", "accuracy"), [("builtin", 12, 0.8), ("bmv2", 5, 0.6)])
def test_training_survives_a_switch_that_dies(needs, name, kind, steps, accuracy):
    needs(kind)
    setup, fabric = _training(kind, steps)
    state = up(fabric, kind, name)

    def kill_once(step):
        if step == steps // 3:
            os.kill(state.switches["switch"].process.pid, signal.SIGKILL)

    variant = _variant(setup, "dlcp_priority")
    record = train(state, fabric, setup, variant, progress=kill_once)
    assert StateFile(name).read().switches["switch"].restarts == 1
    assert len(record["steps"]) == steps
    assert record["ledger"]["violations"] == 0
    assert record["replicas_identical"]
    undisturbed = train(state, fabric, setup, variant, progress=lambda step: None)
    assert abs(record["final_accuracy"] - undisturbed["final_accuracy"]) < 0.05
    assert record["final_accuracy"] > accuracy


def test_all_reduce_over_bmv2_is_refused_with_the_reason(needs, name):
    needs("bmv2")
    state = up(small_star(6), "bmv2", name)
    with pytest.raises(TestbedError, match="single transmit thread"):
        check(TestbedSetup(collective="direct"), state)
    with pytest.raises(TestbedError, match="needs 7 hosts"):
        check(TestbedSetup(collective="server"), state)


def _arguments(*words):
    return cli.parse(["testbed", *words])
