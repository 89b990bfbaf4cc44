# SPDX-License-Identifier: Apache-2.0
"""Deferral in simulated training: how much, when, on both engines alike, and what it costs in steps."""

import numpy as np
import pytest

from dlcp.document import DocumentError
from dlcp.sim.collectives import RESULT_MESSAGE, AllReduceSpec, all_reduce
from dlcp.sim.deferral import DeferralSpec, SimulatedDeferral, deferred_packets, seconds_under_way
from dlcp.sim.experiment import RunSetting, read
from dlcp.sim.graph import NODE_RECORD, GraphBuilder
from dlcp.sim.models import StepProfile, TimedLayer
from dlcp.sim.packet_engine import counts_by_name
from dlcp.sim.running import run
from dlcp.sim.scenario import SwitchSpec
from dlcp.sim.simulation import Simulation
from dlcp.sim.step_graph import class_shares
from dlcp.sim.topology import LinkSpec, Star
from dlcp.sim.training import TrainingJob, place_jobs
from dlcp.sim.training_run import Progress, training
from dlcp.sim.transports import DlcpTransport
from dlcp.slow_ports import REFRESH_STEPS, SHARE_MIN
from tests.sim.experiments_small import EXPERIMENT, write_experiment

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
        progress = Progress(place_jobs([job], job.workers + job.servers, 1)[0], PROFILE)
        simulation.process(training(simulation, progress))
        simulation.run()
        self.job, self.step_s, self.bits = progress.job, progress.step_s, progress.bits
        self.counts = counts_by_name(simulation.engine.counts)
        self.nodes = np.concatenate([submitted.graph.nodes for submitted, _ in kept])
        self.records = np.concatenate([records for _, records in kept])
        self.whole = np.concatenate([submitted.packets for submitted, _ in kept])
        self.link_bytes = simulation.engine.port_bytes()["sent_bytes"].tolist()

    def deferred(self, *, result, step=None):
        """Return the share of the packets of contributions, or of averages, that were deferred."""
        chosen = (self.whole > 0) & (((self.nodes["message"] & RESULT_MESSAGE) != 0) == result)
        chosen &= (self.nodes["step"] == step) if step is not None else (self.nodes["step"] > 0)
        return 1 - self.records["packets"][chosen].sum() / self.whole[chosen].sum()


# What is run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "host_links", "spec"),
    [
        (SERVERS, {}, DeferralSpec(ceiling=0.5)),
        (SERVERS, {}, DeferralSpec(ceiling=0.75, halves="averages")),
        (DIRECT, {}, DeferralSpec(ceiling=0.5, ports="all")),
        (DIRECT, SLOW_PORT, DeferralSpec(ceiling=0.5)),
    ],
    ids=["servers", "averages", "all ports", "slow port"],
)
def test_engines_agree_where_something_is_deferred(kind, host_links, spec):
    pytest.importorskip("numba")
    kernel, reference = (
        Outcome(engine=engine, host_links=host_links, deferral=spec, **kind) for engine in ("kernel", "reference")
    )
    assert kernel.step_s == reference.step_s
    assert kernel.counts == reference.counts
    assert kernel.link_bytes == reference.link_bytes
    np.testing.assert_array_equal(kernel.records, reference.records)
    assert kernel.deferred(result=True) > 0.1


@pytest.mark.parametrize("kind", [SERVERS, DIRECT], ids=["servers", "direct"])
@pytest.mark.parametrize("ports", ["slow", "all"])
def test_nothing_is_deferred_where_nobody_waits_for_the_network(kind, ports):
    spec = DeferralSpec(ceiling=0.75, ports=ports)
    plain, allowed = (Outcome(rate_gbps=400.0, deferral=each, **kind) for each in (None, spec))
    assert (allowed.step_s, allowed.counts, allowed.link_bytes) == (plain.step_s, plain.counts, plain.link_bytes)
    np.testing.assert_array_equal(allowed.records, plain.records)


def test_nothing_is_deferred_where_ports_have_as_much_to_carry():
    plain, allowed = (Outcome(deferral=each, **DIRECT) for each in (None, DeferralSpec(ceiling=0.75)))
    assert (allowed.step_s, allowed.counts) == (plain.step_s, plain.counts)
    assert np.mean(plain.step_s) > 2 * PROFILE.compute_s, "the network is what a step waits for"


def test_a_step_of_servers_is_as_short_as_its_bytes():
    plain, half = (Outcome(deferral=each, **SERVERS) for each in (None, DeferralSpec(ceiling=0.5)))
    assert half.step_s[0] == plain.step_s[0], "nothing is known before the first step"
    assert half.deferred(result=False, step=0) == half.deferred(result=True, step=0) == 0
    waiting, less = (np.mean(each.step_s[1:]) - PROFILE.compute_s for each in (plain, half))
    assert waiting > 3 * PROFILE.compute_s, "the servers' links are what a step waits for"
    assert 1.8 < waiting / less < 2.4
    for result in (False, True):
        assert 0.4 < half.deferred(result=result) <= 0.5
    assert half.counts["sent"] < 0.65 * plain.counts["sent"]


@pytest.mark.parametrize(("halves", "contributions"), [("contributions", True), ("averages", False)])
def test_one_half_is_deferred(halves, contributions):
    run_ = Outcome(deferral=DeferralSpec(ceiling=0.5, halves=halves), **SERVERS)
    shares = run_.deferred(result=False), run_.deferred(result=True)
    assert shares == (pytest.approx(0.5 * contributions), pytest.approx(0.5 * (not contributions)))


def test_averages_are_alike_for_all_and_those_for_the_slow_rank_are_fewer():
    plain, run_ = (Outcome(host_links=SLOW_PORT, deferral=each, **DIRECT) for each in (None, DeferralSpec(ceiling=0.5)))
    results = (run_.whole > 0) & ((run_.nodes["message"] & RESULT_MESSAGE) != 0)
    shards = {}
    for node, record in zip(run_.nodes[results], run_.records[results], strict=True):
        key = int(node["step"]), int(node["message"]), int(node["source"])
        shards.setdefault(key, set()).add(int(record["packets"]))
    assert len(shards) > 4
    assert all(len(packets) == 1 for packets in shards.values()), "an owner decides once for all receivers"
    contributions = (run_.whole > 0) & ~results & (run_.nodes["step"] > 1)
    short = (run_.records["packets"] < run_.whole) & contributions
    assert set(run_.nodes["target"][short]) == {0}, "contributions to the slow rank alone are deferred"
    assert np.mean(plain.step_s[1:]) / np.mean(run_.step_s[1:]) > 1.3


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


# The rule -------------------------------------------------------------------------------------------------------------


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


def learned(spec, ranks, servers, contribution_s, average_s, compute_s):
    submitted = Submitted(ranks, servers)
    one = SimulatedDeferral(spec, ranks, servers)
    one.learn(submitted, submitted.records(contribution_s, average_s), 0, compute_s)
    return one, submitted


def test_servers_are_through_when_their_workers_have_computed():
    spec, ranks, servers = DeferralSpec(ceiling=0.75), (0, 1, 2, 3), (4, 5)
    one, submitted = learned(spec, ranks, servers, lambda _: 4.0, lambda _: 5.0, 2.0)
    assert one.shares == {4: pytest.approx((0.6, 0.6)), 5: pytest.approx((0.6, 0.6))}
    # With 40 % of the packets both halves take two fifths of that: the same share again.
    records = submitted.records(lambda _: 1.6, lambda _: 2.0)
    records["packets"] = 0.4 * submitted.packets
    one.learn(submitted, records, 0, 2.0)
    assert one.shares[4] == pytest.approx((0.6, 0.6))
    low = DeferralSpec(ceiling=0.25)
    assert learned(low, ranks, servers, lambda _: 4.0, lambda _: 5.0, 2.0)[0].shares[4] == (0.25, 0.25)
    for none in (5.0, 5.0 / (1 - 0.9 * SHARE_MIN)):
        assert learned(spec, ranks, servers, lambda _: 1.0, lambda _, took=none: took, 5.0)[0].shares[4] == (0, 0)
    # As many servers as workers: no port has more to carry than another.
    assert learned(spec, (0, 1), (2, 3), lambda _: 4.0, lambda _: 5.0, 2.0)[0].shares[2] == (0, 0)


def test_a_slow_rank_is_done_when_the_others_are():
    spec, ranks = DeferralSpec(ceiling=0.9), (0, 1, 2, 3)

    def times(rank):
        return 3.0 if rank == 2 else 1.0

    # u 3 (3/4 + 3/4) = 3/4 + u 3/4, so u = 1/5.
    one, submitted = learned(spec, ranks, (), times, times, 0.1)
    assert one.shares == {rank: pytest.approx((0.8 if rank == 2 else 0, 0 if rank == 2 else 0.8)) for rank in ranks}
    # Never more than makes it through by the time that all have computed: 3 u = 1.2.
    assert learned(spec, ranks, (), times, times, 1.2)[0].shares[2] == pytest.approx((0.6, 0))
    assert learned(spec, ranks, (), lambda _: 3.0, lambda _: 3.0, 0.1)[0].shares[2] == (0, 0)
    everywhere = DeferralSpec(ceiling=0.5, ports="all")
    assert learned(everywhere, ranks, (), lambda _: 3.0, lambda _: 3.0, 0.1)[0].shares[2] == (0.5, 0.5)
    # What is not twice as slow is noise, unless it was before.
    one.learn(submitted, submitted.records(*[lambda rank: 1.6 if rank == 2 else 1.0] * 2), 0, 0.1)
    assert one.shares[2][0] > 0
    one.learn(submitted, submitted.records(*[lambda rank: 1.2 if rank == 2 else 1.0] * 2), 0, 0.1)
    one.learn(submitted, submitted.records(*[lambda rank: 1.6 if rank == 2 else 1.0] * 2), 0, 0.1)
    assert one.shares[2] == (0, 0)


def test_some_packets_are_sent_in_any_case():
    packets = np.array([0, 1, 2, 8, 9, 100], np.int32)
    assert deferred_packets(packets, np.full(6, 0.5)).tolist() == [0, 0, 1, 4, 4, 50]
    most = deferred_packets(packets, np.full(6, 0.99))
    assert (packets - most).tolist() == [-(-each // REFRESH_STEPS) for each in packets]


def test_time_under_way_counts_once():
    records = np.zeros(4, NODE_RECORD)
    records["begin_ps"], records["end_ps"] = [5, 0, 1, 10], [6, 4, 2, 12]
    assert seconds_under_way(records) == 7e-12
    assert seconds_under_way(records[:0]) == 0


# Time to accuracy -----------------------------------------------------------------------------------------------------

DEFERRING = EXPERIMENT.replace("collective: ring", "collective: direct, deferral: {ceiling: 0.5, ports: all}")


def test_a_run_says_what_deferral_costs(tmp_path):
    described = read(write_experiment(tmp_path, DEFERRING))
    metrics = run(described.runs[0])["metrics"]
    share = max(metrics["deferred_contributions_ratio"], metrics["deferred_averages_ratio"])
    curve = described.runs[0].setting.training[0].deferral_curve()
    assert curve.name == "deferral_servers_sgd"
    assert 0.2 < share <= 0.5
    assert metrics["steps_factor"] == pytest.approx(max(1.0, curve.steps_factor(share)))
    assert metrics["accuracy_step_s"] == pytest.approx(metrics["steps_factor"] * metrics["step_s"])
    plain = read(write_experiment(tmp_path))
    assert "deferred_averages_ratio" not in run(plain.runs[0])["metrics"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ceiling: 0.5", "ceiling: 0.99", "the ceiling is 99%, but deferral_servers_sgd was measured only up to"),
        ("ceiling: 0.5", "cieling: 0.5", "there is no field 'cieling'; did you mean ceiling"),
        ("collective: direct", "collective: ring", "deferral is for parameter_server and direct"),
        ("steps: 2", "steps: 1", "begins with the second step"),
    ],
)
def test_mistakes_are_reported(tmp_path, old, new, message):
    assert old in DEFERRING
    path = write_experiment(tmp_path, DEFERRING.replace(old, new, 1))
    with pytest.raises(DocumentError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:10:")
