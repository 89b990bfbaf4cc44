# SPDX-License-Identifier: Apache-2.0
"""Who sends what to whom, and what waits for what, without any network."""

import numpy as np
import pytest

from dlcp.sim.experiments.experiment import RunSetting
from dlcp.sim.graphs.collectives import RESULT_MESSAGE, WITH_SERVERS, AllReduceSpec, all_reduce, ring
from dlcp.sim.graphs.graph import Graph, GraphBuilder
from dlcp.sim.jobs.models import StepProfile, TimedLayer
from dlcp.sim.jobs.step_graph import UNIFORM_PROFILE, class_shares, piece_limit, pieces_of, step_graph
from dlcp.sim.jobs.training import StragglerSpec, TrainingJob, place_jobs
from dlcp.sim.jobs.training_run import training
from dlcp.sim.network.nodes import LinkSpec
from dlcp.sim.network.topology import Star
from dlcp.sim.simulation import Simulation
from dlcp.sim.transports.specs import DctcpTransport

LAYERS = tuple(TimedLayer(f"layer{i}", 1_000_000 * (i + 1), 0.001, 0.002) for i in range(4))


def reached(graph: Graph) -> list[set[int]]:
    """Return the ranks whose ``after`` node lies before each node (nodes 0 to n - 1 are those of ranks)."""
    before: list[set[int]] = [set() for _ in range(len(graph))]
    waits = graph.waits.copy()
    ready = [int(node) for node in np.flatnonzero(waits == 0)]
    while ready:
        node = ready.pop()
        for other in graph.followers[graph.starts[node] : graph.starts[node + 1]]:
            before[other] |= before[node] | {node}
            waits[other] -= 1
            if not waits[other]:
                ready.append(int(other))
    assert not waits.any(), "the graph has a circle"
    return before


@pytest.mark.parametrize(
    "collective", ["parameter_server", "byteps", "ring", "direct", "halving_doubling", "tree", "hierarchical"]
)
def test_everybody_gets_everybodys(collective) -> None:
    count = 8
    builder = GraphBuilder()
    after = builder.delays(np.zeros(count, np.int64))
    exchange = AllReduceSpec(list(range(count)), 8_000_000, 0, loss_bound=0.1)
    servers = (8, 9) if collective in WITH_SERVERS else ()
    ends = all_reduce(builder, collective, exchange, after, servers=servers, group=4)
    graph = builder.build()
    before = reached(graph)
    assert len(ends) == count
    for end in ends:
        assert set(range(count)) <= before[int(end)], "a rank's result does not wait for all ranks"
    pulls = (graph.nodes["message"] & RESULT_MESSAGE) != 0
    assert (graph.nodes["loss_bound"][pulls] == 0).all(), "results may be lost"
    pushes = (graph.nodes["size_bytes"] > 0) & ~pulls
    assert (graph.nodes["loss_bound"][pushes] == 0.1).all()


def test_a_rank_of_a_ring_adds_its_own_values_to_all_that_it_passes_on() -> None:
    count = 5
    builder = GraphBuilder()
    after = builder.delays(np.zeros(count, np.int64))
    ends = ring(builder, AllReduceSpec(list(range(count)), 1_000_000, 0), after)
    graph = builder.build()
    before = reached(graph)
    reducing = (graph.nodes["size_bytes"] > 0) & ((graph.nodes["message"] & RESULT_MESSAGE) == 0)
    results = (graph.nodes["size_bytes"] > 0) & ~reducing
    for rank in range(count):
        own = graph.nodes["source"] == rank
        assert all(rank in before[node] for node in np.flatnonzero(own & reducing))
        # What is complete has everybody's values in it, and a rank waits for all of it, in whatever order it comes.
        assert all(set(range(count)) <= before[node] for node in np.flatnonzero(own & results))
        to_rank = np.flatnonzero(results & (graph.nodes["target"] == rank))
        assert len(to_rank) == count - 1
        for node in to_rank:
            assert ends[rank] in graph.followers[graph.starts[node] : graph.starts[node + 1]]
    with pytest.raises(ValueError, match="at least two hosts, and has 1"):
        ring(GraphBuilder(), AllReduceSpec([0], 1000, 0))


@pytest.mark.parametrize(
    ("collective", "share"), [("ring", 7 / 8), ("direct", 7 / 8), ("halving_doubling", 7 / 8), ("tree", 1.0)]
)
def test_bytes_are_those_of_theory(collective, share) -> None:
    builder = GraphBuilder()
    after = builder.delays(np.zeros(8, np.int64))
    all_reduce(builder, collective, AllReduceSpec(list(range(8)), 8_000_000, 0), after, group=4)
    nodes = builder.build().nodes
    ranks = 7 if collective == "tree" else 8
    assert nodes["size_bytes"].sum() == 2 * ranks * share * 8_000_000


def test_two_levels_cross_groups_with_a_shard_only() -> None:
    builder = GraphBuilder()
    after = builder.delays(np.zeros(8, np.int64))
    all_reduce(builder, "hierarchical", AllReduceSpec(list(range(8)), 8_000_000, 0), after, group=4)
    nodes = builder.build().nodes
    crossing = nodes["source"] // 4 != nodes["target"] // 4
    assert nodes["size_bytes"][crossing].sum() == 2 * 8_000_000  # two groups' rings over shards, 2 (2 - 1) / 2 each way


def test_pieces_hold_all_and_priority_follows_layers() -> None:
    total = sum(layer.parameters for layer in LAYERS) * 4
    for scheduler in ("fifo", "p3", "bytescheduler", "dlcp"):
        job = TrainingJob(name="j", workers=8, servers=2, collective="parameter_server", scheduler=scheduler)
        parts = pieces_of(job, LAYERS)
        assert sum(piece.size_bytes for piece in parts) == total
        assert max(piece.size_bytes for piece in parts) <= max(piece_limit(job), 16_000_000 * (scheduler == "fifo"))
        if scheduler == "fifo":
            assert {piece.layers for piece in parts} == {(0,)}, "the next forward pass waits for all buckets"
        else:
            assert all(piece.order == piece.ready == piece.layers[0] for piece in parts)
            assert [piece.ready for piece in parts] == sorted((piece.ready for piece in parts), reverse=True)
    assert {piece.queue for piece in parts if piece.ready == 0} == {6}
    assert {piece.queue for piece in parts if piece.ready == 3} == {2}
    alike = pieces_of(TrainingJob(name="j", scheduler="dlcp", layer_queues=False, magnitude_classes=False), LAYERS)
    assert {(piece.queue, piece.shares) for piece in alike} == {(-1, UNIFORM_PROFILE)}
    assert len(class_shares()) == UNIFORM_PROFILE + 1
    assert all(sum(shares) == pytest.approx(1) for shares in class_shares())


def test_a_step_waits_for_what_it_needs() -> None:
    job = TrainingJob(name="j", workers=4, scheduler="p3", piece_bytes=4_000_000, transport="t", steps=2)
    placed = place_jobs([job], 4, 1)[0]
    parts = pieces_of(job, LAYERS)
    placed.profile = StepProfile("m", LAYERS, 1, "-")
    steps = step_graph(placed, parts, np.ones((2, 4)), 0, 0)
    before = reached(steps.graph)
    assert len(before[steps.ends[0]]) < len(before[steps.ends[1]])
    sends = set(np.flatnonzero(steps.graph.nodes["size_bytes"] > 0).tolist())
    assert sends <= before[steps.ends[1]]
    computing = steps.graph.nodes["delay_ps"].sum() / 1e12
    assert computing == pytest.approx(2 * 4 * 0.012)


def test_jobs_get_hosts_of_their_own() -> None:
    jobs = [
        TrainingJob(name="a", workers=3, servers=1, collective="parameter_server", copies=2),
        TrainingJob(name="b", workers=4, placement="random"),
    ]
    placed = place_jobs(jobs, 12, 7)
    hosts = [host for job in placed for host in (*job.workers, *job.servers)]
    assert sorted(hosts) == list(range(12))
    assert placed == place_jobs(jobs, 12, 7)
    assert [job.name for job in placed] == ["a0", "a1", "b"]
    with pytest.raises(ValueError, match="need 12 hosts, but the topology has 11"):
        place_jobs(jobs, 11, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "parameter_server"}, "needs at least one"),
        ({"servers": 2}, "servers are for parameter_server"),
        ({"collective": "byteps", "workers": 2, "servers": 3}, "at most as many servers as workers"),
        ({"collective": "halving_doubling", "workers": 6}, "power of two"),
        ({"collective": "hierarchical", "workers": 10, "group": 4}, "groups of 4"),
        ({"stragglers": (StragglerSpec(worker=8),)}, "rank is beyond"),
    ],
)
def test_contradictions_are_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingJob(name="j", **fields)


def test_a_slow_port_owns_a_smaller_shard() -> None:
    topology = Star(
        hosts=5, host_link=LinkSpec(rate_gbps=100.0), host_links={"host2": LinkSpec(rate_gbps=60.0)}
    ).build()
    job = TrainingJob(name="j", workers=4, collective="direct")
    weights = job.shard_weights((0, 1, 2, 3), topology)
    assert sum(weights) == pytest.approx(1)
    # All ports take equally long: each receives (1 + (n - 2) w) buffers.
    times = [(1 + 2 * weight) / rate for weight, rate in zip(weights, (100, 100, 60, 100), strict=True)]
    assert times == pytest.approx([times[0]] * 4)
    assert TrainingJob(name="j", workers=4).shard_weights((0, 1, 2, 3), topology) == (), "a ring has equal shards"
    assert job.shard_weights((0, 1, 3), topology) == ()
    builder = GraphBuilder()
    all_reduce(builder, "direct", AllReduceSpec((0, 1, 2, 3), 1_000_000, 0), weights=weights)
    nodes = builder.build().nodes
    received = np.bincount(nodes["target"][nodes["size_bytes"] > 0], nodes["size_bytes"][nodes["size_bytes"] > 0])
    assert received / [100, 100, 60, 100] == pytest.approx(np.full(4, 1_000_000 * times[0]), rel=1e-5)


def steps_of(*jobs: TrainingJob, seed: int = 1) -> dict[str, list[float]]:
    """Run jobs on links so fast that computing decides; return the steps of each."""
    profile = StepProfile("m", tuple(TimedLayer(f"layer{i}", 500, 0.001, 0.002) for i in range(2)), 1, "-")
    links = Star(hosts=sum((job.workers + job.servers) * job.copies for job in jobs))
    setting = RunSetting(topology=links, transports={"t": DctcpTransport()}, training=jobs, seed=seed)
    simulation = Simulation(setting, engine="reference", class_shares=class_shares())
    progress = place_jobs(jobs, links.hosts, seed)
    for item in progress:
        item.profile = profile
        simulation.process(training(simulation, item))
    simulation.run()
    return {item.name: item.step_s for item in progress}


def test_a_straggler_holds_all_up() -> None:
    slow = TrainingJob(name="j", workers=4, transport="t", steps=2, stragglers=(StragglerSpec(worker=2, factor=3.0),))
    assert steps_of(slow)["j"] == pytest.approx([0.018, 0.018], rel=0.02)
    assert steps_of(TrainingJob(name="j", workers=4, transport="t", steps=2))["j"] == pytest.approx(
        [0.006] * 2, rel=0.05
    )


def test_jitter_makes_the_slowest_worker_count() -> None:
    job = TrainingJob(name="j", workers=16, transport="t", steps=20, jitter=0.1)
    steps = np.array(steps_of(job)["j"])
    # The largest of 16 normal values lies 1.77 deviations above their mean.
    assert steps.mean() / 0.006 == pytest.approx(1 + 1.77 * 0.1, abs=0.04)
    assert steps_of(job)["j"] == steps.tolist()
    assert steps_of(job, seed=2)["j"] != steps.tolist()


def test_jobs_run_side_by_side_each_with_a_jitter_of_its_own() -> None:
    steps = steps_of(
        TrainingJob(name="a", workers=2, transport="t", copies=2, jitter=0.1, stagger_s=0.001),
        TrainingJob(name="b", workers=3, transport="t", jitter=0.1, stragglers=(StragglerSpec(worker=0, factor=2.0),)),
    )
    assert set(steps) == {"a0", "a1", "b"}
    assert steps["a0"] != steps["a1"]
    assert min(steps["b"]) > max(*steps["a0"], *steps["a1"])
