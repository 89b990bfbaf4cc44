# SPDX-License-Identifier: Apache-2.0
"""Short runs of the demo: real workers, the real switch program, a congested link."""

import dataclasses

import pytest

from dlcp.commands import demo as command
from dlcp.demo.background import BackgroundBurst
from dlcp.demo.run import LoopbackNetwork, NamespaceNetwork, execute
from dlcp.demo.variants import DemoSetup, variants
from dlcp.host import netlab


def run(setup, name, *, namespaces=False):
    variant = next(variant for variant in variants(setup) if variant.name == name)
    steps = []
    record = execute(NamespaceNetwork if namespaces else LoopbackNetwork, setup, variant, progress=steps.append)
    assert steps == list(range(1, setup.steps + 1))
    return record


def assert_16_bits_identical(record):
    assert record["replicas_identical"]
    assert record["gradient_bytes"] == 2 * record["parameters"]


@pytest.mark.timeout(300)
def test_a_run_on_loopback_keeps_the_bound_and_drops_what_matters_least():
    record = run(DemoSetup(steps=3, rate_bps=25_000_000), "dlcp_priority")
    ledger, switch = record["ledger"], record["switch"]
    assert record["fabric"]["kind"] == "loopback"
    assert record["replicas_identical"]
    assert ledger["violations"] == 0
    assert ledger["max_message_ratio"] <= ledger["bound"]
    by_class = switch["policy_drops_by_class"]
    assert by_class[0] == 0
    assert sum(by_class) > 50, "the link is not congested: nothing is shown"
    assert sum(by_class[1:4]) < sum(by_class[5:8]) / 4
    # What the switch dropped by policy, senders know as lost or have sent again.
    assert sum(by_class) <= ledger["lost"] + ledger["retransmitted"]
    front, back = record["layer_seconds"]["0"], record["layer_seconds"]["255"]
    assert sum(front) < sum(back)


@pytest.mark.timeout(300)
def test_a_run_with_a_parameter_server():
    setup = DemoSetup(steps=2, rate_bps=40_000_000, collective="server")
    record = run(setup, "dlcp")
    assert record["replicas_identical"]
    assert record["ledger"]["violations"] == 0
    assert record["switch"]["over_share"] > 0, "the job is held to no share"
    assert record["server_ledger"]["sent"] >= record["server_ledger"]["delivered"] > 0
    assert record["server_ledger"]["lost"] == 0, "results arrive whole"


@pytest.mark.timeout(300)
def test_gloos_16_bit_floats_and_real_tcp_cross_the_same_switch():
    possible, reason = netlab.available()
    if not possible:
        pytest.skip(f"no network namespaces: {reason}")
    setup = DemoSetup(steps=2, rate_bps=60_000_000, fp16=True, optimizer="sgd")
    record = run(setup, "gloo", namespaces=True)
    assert_16_bits_identical(record)
    assert record["ledger"] is None
    assert record["tcp"]["sent"] > 1000
    assert record["background"]["bps"] > 0.2 * setup.rate_bps
    ordinary = record["switch"]["by_queue"]["1"]
    assert ordinary["packets"] == record["switch"]["forwarded"] > 1000


@pytest.mark.timeout(300)
def test_gloo_has_a_parameter_server_of_the_same_pattern():
    possible, reason = netlab.available()
    if not possible:
        pytest.skip(f"no network namespaces: {reason}")
    setup = DemoSetup(steps=2, rate_bps=80_000_000, depth_packets=100, collective="server")
    record = run(setup, "gloo", namespaces=True)
    assert record["replicas_identical"]
    assert record["server_ledger"] is None
    # Every worker's gradients to the server, and a result to each; a ring would carry an eighth less.
    gradients = 2 * setup.workers * setup.steps * record["gradient_bytes"]
    background = record["background"]["bps"] / 8 * sum(record["steps"])
    assert record["switch"]["by_queue"]["1"]["bytes"] > gradients + 0.9 * background


@pytest.mark.timeout(300)
def test_dlcp_sends_16_bit_floats_across_namespaces():
    possible, reason = netlab.available()
    if not possible:
        pytest.skip(f"no network namespaces: {reason}")
    setup = DemoSetup(steps=2, rate_bps=100_000_000, fp16=True, optimizer="sgd")
    assert_16_bits_identical(run(setup, "dlcp", namespaces=True))
    assert setup.command.endswith("--optimizer sgd --burst-seconds 8 --fp16")


def test_a_server_or_another_precision_is_refused_with_16_bits():
    with pytest.raises(ValueError, match="use fp16 with the direct collective"):
        DemoSetup(collective="server", fp16=True)
    with pytest.raises(ValueError, match="fp16 contradicts precision 8"):
        DemoSetup(precision="8", fp16=True)


def test_a_job_may_have_the_share_of_its_flows():
    ring, server = DemoSetup(), DemoSetup(collective="server")
    assert {ring.fair_share(host) for host in range(4)} == {1 / 3}
    assert [server.fair_share(host) for host in range(5)] == [1 / 3] * 4 + [4 / 6]
    bursts = [BackgroundBurst(0, 6, 4), BackgroundBurst(6, 8, 0), BackgroundBurst(8, 100, 4)]
    assert server.background_share(bursts, 8) == pytest.approx((6 * 1 / 3 + 2 * 2 / 3) / 8)


def test_the_background_is_the_same_in_every_run():
    setup = DemoSetup(seed=5)
    assert setup.bursts() == dataclasses.replace(setup, rate_bps=1).bursts()
    assert setup.bursts() != dataclasses.replace(setup, seed=6).bursts()


def test_where_namespaces_cannot_be_had_the_demo_says_why_and_goes_on(monkeypatch):
    def refuse():
        raise netlab.NamespaceError("user namespaces are not allowed here")

    monkeypatch.setattr(netlab, "become_root", refuse)
    assert command.try_namespaces() == (False, "user namespaces are not allowed here")
