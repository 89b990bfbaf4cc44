# SPDX-License-Identifier: Apache-2.0
"""The size of a run is known before it is built, and a run that is too large is refused."""

import numpy as np
import pytest

from dlcp.sim import run_size
from dlcp.sim.experiment import ExperimentRun, RunSetting
from dlcp.sim.models import StepProfile, TimedLayer
from dlcp.sim.run_size import RunSizeError, step_nodes, steps_per_graph
from dlcp.sim.running import run
from dlcp.sim.step_graph import pieces_of, step_graph
from dlcp.sim.topology import Star
from dlcp.sim.training import TrainingJob, place_jobs
from dlcp.sim.transports import DctcpTransport

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
    parts = pieces_of(spec, PROFILE.layers)
    built = step_graph(placed, PROFILE, parts, np.ones((1, 8)), 1, 0).graph
    assert step_nodes(placed, PROFILE, parts) == pytest.approx(len(built), rel=0.15)  # barriers are left out


def setting(**fields: object) -> ExperimentRun:
    spec = TrainingJob(name="big", transport="t", model="1MB", **{"steps": 2, **fields})
    made = RunSetting(topology=Star(hosts=64), transports={"t": DctcpTransport()}, training=(spec,), engine="flows")
    return ExperimentRun(experiment="e", point={}, setting=made, convergence="published")


def test_a_run_that_does_not_fit_is_refused_before_it_is_built(monkeypatch) -> None:
    monkeypatch.setattr(run_size, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr("dlcp.sim.training_run.step_graph", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(RunSizeError, match=r"big: a step has 8,.* messages .* 0 GB are free: use `collective: hier"):
        run(setting(workers=64))


def test_large_steps_have_graphs_of_their_own() -> None:
    assert [steps_per_graph(nodes) for nodes in (1000, 1_000_000, 1_500_000, 50_000_000)] == [4, 4, 2, 1]


def test_sharded_groups_take_as_long_as_a_ring() -> None:
    times = {
        collective: run(setting(workers=16, sharding="fsdp", collective=collective, group=4))["metrics"]["step_s"]
        for collective in ("ring", "hierarchical")
    }
    assert times["hierarchical"] == pytest.approx(times["ring"], rel=0.5)
    assert times["hierarchical"] < times["ring"]  # both send the same bytes, and 6 messages follow each other, not 15
