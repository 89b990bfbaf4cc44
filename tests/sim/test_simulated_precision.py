# SPDX-License-Identifier: Apache-2.0
"""Precision in simulated training: sizes of messages, the choice of a step's bits, both engines alike, and its cost."""

from typing import get_args

import numpy as np
import pytest

from dlcp.convergence import curve
from dlcp.inputs.document import DocumentError
from dlcp.policies.arms import AUTO_BITS, PRECISIONS
from dlcp.sim.engines.network_tables import PROFILE_CELLS
from dlcp.sim.engines.packet_engine import counts_by_name
from dlcp.sim.experiments.experiment import RunSetting, read
from dlcp.sim.experiments.running import run
from dlcp.sim.graphs.collectives import RESULT_MESSAGE, AllReduceSpec, all_reduce
from dlcp.sim.graphs.graph import NODE_RECORD, GraphBuilder
from dlcp.sim.jobs.models import StepProfile, TimedLayer
from dlcp.sim.jobs.step_graph import class_shares
from dlcp.sim.jobs.training import Precision, TrainingJob, place_jobs
from dlcp.sim.jobs.training_run import SimulatedPrecision, training
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.simulation import Simulation
from dlcp.sim.transports.specs import DlcpTransport
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import plain_tags
from dlcp.wire import DROP_CLASSES
from tests.sim.experiments_small import EXPERIMENT, write_experiment

PAYLOAD = 1440
VALUES = 100_000
LAYERS = tuple(TimedLayer(f"layer{i}", 40_000, 2e-5, 4e-5) for i in range(3))
PROFILE = StepProfile("small", LAYERS, 1, "made up for this test")
SERVERS = {"collective": "parameter_server", "servers": 2}
DIRECT = {"collective": "direct"}
SLOW_PORT = {"host0": LinkSpec(rate_gbps=2.5)}


class Outcome:
    """A job's run: its steps with their bits, the engine's counts, its messages with records, and each link's bytes."""

    def __init__(self, *, engine="kernel", rate_gbps=10.0, host_links=None, **fields):
        fields = {"workers": 4, "steps": 5, "scheduler": "dlcp", "transport": "t", "jitter": 0.1} | fields
        job = TrainingJob(name="job", loss_bound=0.1, **fields)
        setting = RunSetting(
            topology=Star(
                hosts=job.workers + job.servers, host_link=LinkSpec(rate_gbps=rate_gbps), host_links=host_links or {}
            ),
            switches=SwitchSpec(discipline="dlcp", buffer="queue", buffer_packets=40),
            transports={"t": DlcpTransport()},
            training=(job,),
        )
        kept = []
        simulation = Simulation(
            setting, engine=engine, class_shares=class_shares(), on_records=lambda *closed: kept.append(closed)
        )
        progress = place_jobs([job], job.workers + job.servers, 1)[0]
        progress.profile = PROFILE
        simulation.process(training(simulation, progress))
        simulation.run()
        self.job, self.step_s, self.bits = progress, progress.step_s, progress.bits
        self.counts = counts_by_name(simulation.engine.counts)
        self.nodes = np.concatenate([submitted.graph.nodes for submitted, _ in kept])
        self.records = np.concatenate([records for _, records in kept])
        self.whole = np.concatenate([submitted.packets for submitted, _ in kept])
        self.link_bytes = simulation.engine.port_bytes()["sent_bytes"].tolist()


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
    assert ("exact", *map(str, get_args(Precision))) == PRECISIONS, "exact is precision 32 with loss bound 0 here"


class Submitted:
    """A step of an all-reduce, as its submitter has it; every packet is of 1,000 bytes."""

    def __init__(self, ranks, servers=()):
        builder = GraphBuilder()
        spec = AllReduceSpec(ranks, 100_000 * (len(servers) or len(ranks)), 0)
        all_reduce(builder, "parameter_server" if servers else "direct", spec, servers=servers)
        self.graph, self.number = builder.build(), 0
        self.packets = -(-self.graph.nodes["size_bytes"] // 1000)
        self.sizes = {"packets": self.packets}
        self.results = (self.graph.nodes["message"] & RESULT_MESSAGE) != 0

    def records(self, contribution_s, average_s):
        """Return records in which all messages of a half begin at once; times are by the receiver."""
        records = np.zeros(len(self.graph), NODE_RECORD)
        records["packets"] = self.packets
        for node in np.flatnonzero(self.packets):
            target = int(self.graph.nodes["target"][node])
            begin, took = (100.0, average_s(target)) if self.results[node] else (0.0, contribution_s(target))
            records["begin_ps"][node], records["end_ps"][node] = begin * 1e12, (begin + took) * 1e12
        return records


def choices(steps=60, *, congested=False, compute_s=0.1, step_s=lambda bits: 0.2, **fields):
    """Return the bits that are chosen step by step, if a step with ``bits`` takes ``step_s(bits)`` seconds."""
    submitted = Submitted((0, 1, 2, 3), ())
    records = submitted.records(lambda _: 1.0, lambda _: 1.0)
    records["congested"] = congested
    fixed = {"precision": "auto", "value_bytes": 4, "has_servers": False, "error_feedback": True}
    one = SimulatedPrecision(**fixed | fields)
    bits = []
    for step in range(steps):
        bits.append(one.bits)
        submitted.graph.nodes["step"] = step
        one.learn(submitted, records, step, step_s(one.bits), compute_s)
    return bits


def test_auto_begins_with_few_bits_and_ends_with_what_is_fastest():
    assert choices()[0] == AUTO_BITS
    assert choices()[-1] == 32, "both are alike, so the more exact one"
    assert choices(step_s=lambda bits: 0.1 + 0.005 * bits)[-1] == AUTO_BITS
    assert set(choices(congested=True)) == {AUTO_BITS}, "more would take longer"
    assert choices(congested=True, compute_s=0.2)[-1] == 32, "computing hides it"


def test_some_jobs_keep_their_precision():
    assert set(choices(error_feedback=False)) == {32}
    assert set(choices(has_servers=True)) == {AUTO_BITS}
    assert set(choices(precision=4)) == {4}
    half = SimulatedPrecision(16, 2, has_servers=False, error_feedback=True)
    assert half.bits == 16


# What is run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SERVERS, {"precision": "auto"}),
        (SERVERS, {"precision": 16}),
        (DIRECT, {"precision": 8}),
        (DIRECT, {"precision": 4}),
        (DIRECT, {"precision": "auto", "host_links": SLOW_PORT}),
    ],
    ids=["servers, auto", "servers, 16", "direct, 8", "direct, 4", "slow port"],
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


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_what_has_begun_keeps_its_packets(engine):
    if engine == "kernel":
        pytest.importorskip("numba")
    setting = RunSetting(topology=Star(hosts=2), transports={"t": DlcpTransport()})
    simulation = Simulation(setting, engine=engine)
    builder = GraphBuilder()
    first = builder.messages(0, 1, 144_000, transport=0, watched=True)
    later = builder.messages(0, 1, [144_000, 144_000], transport=0, loss_bound=0.1, delay_ps=1000)
    builder.follow(builder.delays(1_000_000), later[0])
    builder.follow(first, later[1])
    running = simulation.submit(builder.build())
    assert running.packets.tolist() == [100, 100, 100, 0]
    kept = []

    def resize(*packets):
        sizes = running.sizes[: len(packets)].copy()
        sizes["packets"] = packets
        simulation.resize(running, np.arange(len(packets)), sizes)

    def resizing():
        yield simulation.env.timeout(500_000)
        resize(50, 60, 70)
        yield running.nodes[0]
        resize(10, 10, 80)
        yield running.closed
        resize(10)
        kept.append(simulation.records(running))

    simulation.process(resizing())
    simulation.run()
    assert kept[0]["packets"].tolist() == [100, 60, 80, 0]
    assert kept[0]["missing_packets"].tolist() == [0] * 4
    assert kept[0]["sent_packets"].tolist() == [100, 60, 80, 0]


def test_auto_shortens_steps_under_congestion():
    plain, auto, eight = (Outcome(precision=precision, **SERVERS) for precision in (32, "auto", 8))
    assert plain.records["congested"].any()
    assert plain.records["missing_packets"].any()
    assert plain.bits == []
    assert (auto.bits, eight.bits) == ([8] * 5, [8] * 5)
    assert np.mean(plain.step_s) / np.mean(auto.step_s) > 2.5
    assert auto.step_s == eight.step_s


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
        ("precision: 8", "precision: mixed", "there is no precision 'mixed'; it has auto, fast"),
        ("precision: 8", "precison: 8", "there is no field 'precison'; did you mean"),
        ("collective: direct", "collective: ring", "precision is for parameter_server and direct"),
        ("precision: 8", "precision: 8, compression: 4", "without compression"),
        ("fifo, transport: dlcp", "fifo, transport: tcp", "needs a transport of kind dlcp, but 'tcp' is cubic"),
    ],
)
def test_mistakes_are_reported(tmp_path, old, new, message):
    assert old in LOWER
    path = write_experiment(tmp_path, LOWER.replace(old, new, 1))
    with pytest.raises(DocumentError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:10:")
