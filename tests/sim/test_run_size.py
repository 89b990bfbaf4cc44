# SPDX-License-Identifier: Apache-2.0
"""The size of a run is known before it is built, and a run that is too large is refused."""

import numpy as np
import pytest

from dlcp.sim.experiments.experiment import ExperimentRun, RunSetting
from dlcp.sim.experiments.running import run
from dlcp.sim.experiments.trace_experiment import job_graph
from dlcp.sim.jobs import run_size
from dlcp.sim.jobs.models import StepProfile, TimedLayer
from dlcp.sim.jobs.run_size import RunSizeError, step_nodes, steps_per_graph
from dlcp.sim.jobs.step_graph import pieces_of, step_graph
from dlcp.sim.jobs.training import TrainingJob, place_jobs
from dlcp.sim.network.topology import Star
from dlcp.sim.scenario import FlowPattern, TraceJob
from dlcp.sim.traces.operations import OperationKind, RankOperation, Workload
from dlcp.sim.traces.traced_jobs import TraceProgress, trace_size
from dlcp.sim.transports.specs import DctcpTransport

PROFILE = StepProfile("m", (TimedLayer("layer", 3_000_000, 0.001, 0.002),) * 5, 1, "-")
JOBS = {
    "ring": {},
    "direct": {"collective": "direct"},
    "tree": {"collective": "tree"},
    "halving_doubling": {"collective": "halving_doubling"},
    "hierarchical": {"collective": "hierarchical", "group": 4},
    "servers": {"collective": "parameter_server", "servers": 2},
    "byteps": {"collective": "byteps", "servers": 2},
    "fsdp": {"sharding": "fsdp"},
    "kept": {"sharding": "fsdp", "reshard_after_forward": False},
    "grouped": {"sharding": "fsdp", "collective": "hierarchical", "group": 4},
}


@pytest.mark.parametrize("fields", JOBS.values(), ids=JOBS)
def test_the_nodes_of_a_step_are_counted(fields: dict[str, object]) -> None:
    spec = TrainingJob(name="j", workers=8, transport="t", **fields)
    placed = place_jobs([spec], 16, 1)[0]
    placed.profile = PROFILE
    parts = pieces_of(spec, PROFILE.layers)
    built = step_graph(placed, parts, np.ones((1, 8)), 1, 0).graph
    assert step_nodes(placed, parts) == pytest.approx(len(built), rel=0.15)  # barriers are left out


def setting(**fields: object) -> ExperimentRun:
    spec = TrainingJob(name="big", transport="t", model="1MB", **{"steps": 2, **fields})
    made = RunSetting(topology=Star(hosts=64), transports={"t": DctcpTransport()}, training=(spec,), engine="flows")
    return ExperimentRun(experiment="e", point={}, setting=made, convergence="published")


def test_a_run_that_does_not_fit_is_refused_before_it_is_built(monkeypatch) -> None:
    monkeypatch.setattr(run_size, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr("dlcp.sim.jobs.training_run.step_graph", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(RunSizeError, match=r"big: a step has 8,.* messages .* 0 GB are free: use `collective: hier"):
        run(setting(workers=64))


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "all_to_all"])
def test_a_trace_and_a_pattern_that_do_not_fit_are_refused_before_they_are_built(monkeypatch, collective) -> None:
    monkeypatch.setattr(run_size, "available_bytes", lambda: 100_000)
    monkeypatch.setattr("dlcp.sim.graphs.graph.GraphBuilder.messages", lambda *_, **__: pytest.fail("built"))
    operation = RankOperation(
        OperationKind.COLLECTIVE, "c", "p", size_bytes=999, collective=collective, group=(*range(16),)
    )
    traced = Workload("w", [[operation] * 30 for _ in range(16)])
    monkeypatch.setattr("dlcp.sim.traces.traced_jobs.read_trace", lambda _: traced)
    trace = RunSetting(
        topology=Star(hosts=64),
        transports={"t": DctcpTransport()},
        traces=(TraceJob(file="w.goal", name="w", transport="t"),),
    )
    with pytest.raises(RunSizeError, match=r"w: the trace has [\d,]+ messages and computations"):
        job_graph(trace)
    flows = RunSetting(
        topology=Star(hosts=64),
        transports={"t": DctcpTransport()},
        patterns=(FlowPattern(name="f", pattern="all_to_all", transport="t"),),
    )
    for made, words in ((trace, "w: the trace has"), (flows, "f: the pattern has 4,032 messages .* use fewer `hosts`")):
        item = ExperimentRun(experiment="e", point={}, setting=made, convergence="published")
        with pytest.raises(RunSizeError, match=words):
            run(item)


def test_a_job_that_does_not_fit_is_not_exported(monkeypatch) -> None:
    monkeypatch.setattr(run_size, "available_bytes", lambda: 30_000_000)
    monkeypatch.setattr("dlcp.sim.experiments.trace_experiment.training_graph", lambda *_: pytest.fail("built"))
    with pytest.raises(RunSizeError, match=r"big: a step has 8,.* use fewer steps, `collective: hierarchical`"):
        job_graph(setting(workers=64, steps=6).setting)


def test_the_nodes_of_a_trace_are_counted() -> None:
    operations = [
        [
            RankOperation(OperationKind.COMPUTE, "c", "p", duration_ps=9),
            RankOperation(OperationKind.COLLECTIVE, "r", "p", after=[0], size_bytes=999, group=(*range(8),)),
            RankOperation(
                OperationKind.COLLECTIVE, "b", "p", after=[1], size_bytes=9, collective="broadcast", group=(*range(8),)
            ),
        ]
        for _ in range(8)
    ]
    progress = TraceProgress(
        TraceJob(file="w.goal", name="w", transport="t"), Workload("w", operations), (*range(8),), 0
    )
    assert trace_size(progress).nodes == pytest.approx(len(progress.graph(0).graph), rel=0.15)


def test_large_steps_have_graphs_of_their_own() -> None:
    assert [steps_per_graph(nodes) for nodes in (1000, 1_000_000, 1_500_000, 50_000_000)] == [4, 4, 2, 1]


def test_sharded_groups_take_as_long_as_a_ring() -> None:
    times = {
        collective: run(setting(workers=16, sharding="fsdp", collective=collective, group=4))["metrics"]["step_s"]
        for collective in ("ring", "hierarchical")
    }
    assert times["hierarchical"] == pytest.approx(times["ring"], rel=0.5)
    assert times["hierarchical"] < times["ring"]  # both send the same bytes, and 6 messages follow each other, not 15
