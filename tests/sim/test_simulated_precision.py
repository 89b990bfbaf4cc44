# SPDX-License-Identifier: Apache-2.0
"""Precision in simulated training: sizes of messages, the choice of a step's bits, both engines alike, and its cost."""

from typing import get_args

import numpy as np
import pytest

from dlcp.convergence import curve
from dlcp.document import DocumentError
from dlcp.planes import PlaneLayout
from dlcp.precision import AUTO_BITS, CLEAR_STEPS, PRECISIONS, RATE_MAX_BPS
from dlcp.sim.collectives import RESULT_MESSAGE
from dlcp.sim.deferral import DeferralSpec
from dlcp.sim.experiment import RunSetting, read
from dlcp.sim.graph import GraphBuilder
from dlcp.sim.plan import PROFILE_CELLS
from dlcp.sim.precision import Precision, SimulatedPrecision
from dlcp.sim.running import run
from dlcp.sim.simulation import Simulation
from dlcp.sim.topology import Star
from dlcp.sim.transports import DlcpTransport
from dlcp.tags import plain_tags
from dlcp.wire import DROP_CLASSES
from tests.sim.experiments_small import EXPERIMENT, write_experiment
from tests.sim.test_simulated_deferral import DIRECT, SERVERS, SLOW_PORT, Outcome, Submitted

PAYLOAD = 1440
VALUES = 100_000


def encoded(bits, value_bytes=4, loss_bound=0.1):
    """Return the sizes of two messages, of many values and of a few, in full precision and after `encode`."""
    simulation = Simulation(RunSetting(topology=Star(hosts=2), transports={"t": DlcpTransport()}), engine="reference")
    builder = GraphBuilder()
    builder.messages(0, 1, [value_bytes * VALUES, value_bytes * 40], transport=0, loss_bound=loss_bound, delay_ps=1000)
    submitted = simulation.submit(builder.build())
    plain = submitted.sizes.copy()
    simulation.encode(submitted, bits, value_bytes)
    sizes = submitted.sizes.copy()
    simulation.encode(submitted, 32, value_bytes)
    np.testing.assert_array_equal(submitted.sizes, plain)
    return plain, sizes, simulation.plan


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "value_bytes"), [(16, 4), (8, 4), (4, 4), (8, 2), (4, 2)])
def test_sizes_are_those_of_real_messages(bits, value_bytes):
    plain, sizes, _ = encoded(bits, value_bytes)
    layout = PlaneLayout(VALUES, bits, PAYLOAD)
    count = layout.planes * layout.packets
    last_bytes = layout.bytes - (count - 1) * PAYLOAD
    assert sizes[0].tolist()[:3] == (count, last_bytes, layout.packets)
    assert count < 1.1 * bits / (8 * value_bytes) * plain["packets"][0]
    assert sizes[1] == plain[1], "one packet cannot become fewer"


@pytest.mark.parametrize(("loss_bound", "share"), [(0.1, 0.1), (0.7, 0.5), (0.0, 0.0)])
def test_only_packets_of_the_lower_plane_may_be_lost(loss_bound, share):
    sizes = encoded(8, loss_bound=loss_bound)[1][0]
    assert sizes["allowed"] == sizes["budget"] == int(share * sizes["packets"])
    assert encoded(4, loss_bound=loss_bound)[1][0]["allowed"] == 0


def test_drop_classes_are_those_of_real_messages():
    _, sizes, plan = encoded(8)
    assert sizes["profile"][0] == plan.lower_profile
    cells = np.bincount(plan.profiles[plan.lower_profile], minlength=DROP_CLASSES)
    layout = PlaneLayout(VALUES, 8, PAYLOAD)
    code = np.zeros(layout.bytes, np.uint8)
    layout.encode(np.exp(np.linspace(-9, 9, VALUES)).astype(np.float32), code)
    plain = plain_tags(-(-4 * VALUES // PAYLOAD))
    tags = layout.tags(plain, PAYLOAD // 4, code, np.ones(layout.packets, bool))
    assert not tags.drop_class[: layout.packets].any()
    real = np.bincount(tags.drop_class[layout.packets :], minlength=DROP_CLASSES) / layout.packets
    np.testing.assert_allclose(cells / PROFILE_CELLS, real, atol=1.5 / layout.packets + 1 / PROFILE_CELLS)


# The choice -----------------------------------------------------------------------------------------------------------


def test_precisions_are_those_of_real_ranks():
    assert tuple(map(str, get_args(Precision))) == PRECISIONS


class Chosen(Submitted):
    """All-reduces in which each rank's packets take a second to arrive, and ``slow_s`` at the last rank."""

    def __init__(self, servers=(), *, error_feedback=True, precision="auto", payload_bytes=1000):
        super().__init__((0, 1, 2, 3), servers)
        self.one = SimulatedPrecision(
            precision, 4, payload_bytes, (0, 1, 2, 3), has_servers=bool(servers), error_feedback=error_feedback
        )

    def after(self, *, congested=False, slow_s=1.0):
        """Return the bits of the step after one."""
        records = self.records(*[lambda target: slow_s if target == 3 else 1.0] * 2)
        records["congested"][np.flatnonzero(self.packets)[0]] = congested
        self.one.learn(self, records, 0)
        return self.one.bits


@pytest.mark.parametrize("servers", [(), (4, 5)])
def test_auto_lowers_the_precision_while_packets_are_lost_or_marked(servers):
    chosen = Chosen(servers)
    assert chosen.one.bits == chosen.after() == 32
    assert chosen.after(congested=True) == AUTO_BITS
    # The report of the next step still has the congestion of this one.
    assert [chosen.after() for _ in range(CLEAR_STEPS + 1)] == [AUTO_BITS] * CLEAR_STEPS + [32]


def test_auto_keeps_all_bits_where_encoding_takes_longer_than_it_saves():
    fast = Chosen(payload_bytes=int(RATE_MAX_BPS))
    assert fast.after(congested=True) == 32
    assert Chosen((4, 5), payload_bytes=int(RATE_MAX_BPS)).after(congested=True) == AUTO_BITS, "no rates are known"


def test_auto_lowers_the_precision_for_a_slow_rank():
    assert Chosen().after(slow_s=3.0) == AUTO_BITS
    assert Chosen().after(slow_s=1.5) == 32
    assert Chosen((4, 5)).after(slow_s=3.0) == 32, "a worker behind servers reports no rates"


def test_some_jobs_keep_their_precision():
    assert Chosen(error_feedback=False).after(congested=True) == 32
    assert Chosen(precision=4).after() == 4
    half = SimulatedPrecision(16, 2, PAYLOAD, (0, 1), has_servers=False, error_feedback=True)
    assert half.bits == 16


# What is run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SERVERS, {"precision": "auto"}),
        (SERVERS, {"precision": 16}),
        (SERVERS, {"precision": "auto", "deferral": DeferralSpec(ceiling=0.5)}),
        (DIRECT, {"precision": 8}),
        (DIRECT, {"precision": 4}),
        (DIRECT, {"precision": "auto", "host_links": SLOW_PORT}),
    ],
    ids=["servers, auto", "servers, 16", "servers, deferral", "direct, 8", "direct, 4", "slow port"],
)
def test_engines_agree_at_lower_precision(kind, fields):
    pytest.importorskip("numba")
    kernel, reference, again = (
        Outcome(engine=engine, **fields, **kind) for engine in ("kernel", "reference", "kernel")
    )
    for other in (reference, again):
        assert kernel.step_s == other.step_s
        assert kernel.bits == other.bits
        assert kernel.counts == other.counts
        assert kernel.link_bytes == other.link_bytes
        np.testing.assert_array_equal(kernel.records, other.records)
    assert min(kernel.bits) < 32


def test_auto_shortens_steps_under_congestion():
    plain, auto, eight = (Outcome(precision=precision, **SERVERS) for precision in (32, "auto", 8))
    assert plain.records["congested"].any()
    assert plain.records["missing_packets"].any()
    assert plain.bits == []
    assert (auto.bits, eight.bits) == ([32, 8, 8, 8, 8], [8] * 5)
    assert np.mean(plain.step_s[1:]) / np.mean(auto.step_s[1:]) > 2.5
    assert np.mean(auto.step_s[1:]) == pytest.approx(np.mean(eight.step_s[1:]), rel=0.05)


def test_auto_changes_nothing_on_a_clear_path():
    plain, auto = (Outcome(rate_gbps=400.0, precision=precision, **DIRECT) for precision in (32, "auto"))
    assert auto.bits == [32] * 5
    assert (auto.step_s, auto.counts, auto.link_bytes) == (plain.step_s, plain.counts, plain.link_bytes)
    np.testing.assert_array_equal(auto.records, plain.records)


@pytest.mark.parametrize("kind", [SERVERS, DIRECT], ids=["servers", "direct"])
def test_all_messages_of_a_step_have_one_precision(kind):
    auto = Outcome(precision="auto", host_links=SLOW_PORT, jitter=0.5, **kind)
    for step, bits in enumerate(auto.bits):
        own = (auto.whole > 0) & (auto.nodes["step"] == step)
        share = auto.records["packets"][own] / auto.whole[own]
        assert share.min() == share.max() == 1 if bits == 32 else share.max() < 0.4


def test_lost_packets_are_of_the_lower_plane():
    bounded = Outcome(precision=8, **SERVERS)
    contributions = (bounded.whole > 0) & ((bounded.nodes["message"] & RESULT_MESSAGE) == 0)
    assert bounded.records["missing_packets"][contributions].sum() > 0
    assert not bounded.records["missing_packets"][~contributions].any()
    assert (bounded.records["missing_packets"] <= 0.1 * bounded.records["packets"]).all()
    one_plane = Outcome(precision=4, **SERVERS)
    assert one_plane.counts["drops_policy"] == one_plane.records["missing_packets"].sum() == 0


def test_planes_of_the_same_values_are_deferred_together():
    eight, both = (Outcome(precision=8, deferral=each, **SERVERS) for each in (None, DeferralSpec(ceiling=0.5)))
    assert np.mean(both.step_s[1:]) < 0.8 * np.mean(eight.step_s[1:])
    later = (both.whole > 0) & (both.nodes["step"] > 0)
    assert both.records["packets"][later].sum() < 0.8 * eight.records["packets"][later].sum()
    assert not (both.records["packets"][later] % 2).any()


# Time to accuracy -----------------------------------------------------------------------------------------------------

LOWER = EXPERIMENT.replace("collective: ring", "collective: direct, precision: 8").replace(
    "scheduler: fifo, transport: tcp", "scheduler: fifo, transport: dlcp"
)


def test_a_run_says_what_precision_costs(tmp_path):
    document = run(read(write_experiment(tmp_path, LOWER)).runs[2])
    metrics = document["metrics"]
    assert metrics["bits_per_value"] == 8
    assert document["jobs"][0]["bits"] == [8, 8]
    assert metrics["loss_ratio"] == 0, "without a packet of the lower plane, no value is missing"
    assert metrics["steps_factor"] == pytest.approx(curve("precision_sgd").steps_factor(0.75))
    assert metrics["accuracy_step_s"] == pytest.approx(metrics["steps_factor"] * metrics["step_s"])
    adam = read(write_experiment(tmp_path, LOWER.replace("precision: 8", "precision: 4, optimizer: adamw")))
    assert run(adam.runs[2])["metrics"]["steps_factor"] == pytest.approx(curve("precision_adamw").steps_factor(0.875))
    plain = run(read(write_experiment(tmp_path, LOWER.replace("precision: 8", "precision: 32"))).runs[2])
    assert "bits_per_value" not in plain["metrics"]
    assert "bits" not in plain["jobs"][0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("precision: 8", "precision: 12", "there is no precision 12"),
        ("precision: 8", "precision: mixed", "there is no precision 'mixed'; it has auto, 32"),
        ("precision: 8", "precison: 8", "there is no field 'precison'; did you mean"),
        ("collective: direct", "collective: ring", "precision is for parameter_server and direct"),
        ("precision: 8", "precision: 8, compression: 4", "without compression"),
        ("fifo, transport: dlcp, steps: 2", "fifo, transport: dlcp, steps: 1", "auto begins with the second step"),
        ("fifo, transport: dlcp", "fifo, transport: tcp", "needs a transport of kind dlcp, but 'tcp' is cubic"),
    ],
)
def test_mistakes_are_reported(tmp_path, old, new, message):
    text = LOWER.replace("precision: 8", "precision: auto") if message.startswith("auto") else LOWER
    assert old in text
    path = write_experiment(tmp_path, text.replace(old, new, 1))
    with pytest.raises(DocumentError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:10:")
