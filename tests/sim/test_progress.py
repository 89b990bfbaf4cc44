# SPDX-License-Identifier: Apache-2.0
"""Progress of simulations on a terminal."""

import io
import sys

import numpy as np
import pytest

from dlcp.cli import main
from dlcp.sim import CollectiveJob, Scenario, TrafficSpec, simulate, simulation
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.sweep import sweep
from dlcp.sim.network.topology import Star
from tests.sim.experiments_small import write_experiment


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


SCENARIO = Scenario(
    topology=Star(hosts=4),
    jobs=(CollectiveJob(name="job", hosts=(0, 1, 2, 3), size_bytes=200_000, steps=3, compute_s=1e-4),),
    traffic=(TrafficSpec(load=0.3, stop_s=0.002),),
    stop_s=1.0,
)


@pytest.mark.parametrize("engine", ["reference", "flows"])
def test_progress_is_shown_on_a_terminal_and_changes_nothing(engine, monkeypatch):
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    expected = simulate(SCENARIO, engine=engine)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(simulation, "_FIRST_SLICE_PS", 12_345)
    found = simulate(SCENARIO, engine=engine)
    assert quiet.getvalue() == ""
    assert "/3" in terminal.getvalue()
    assert "ms simulated" in terminal.getvalue()
    assert found.counts == expected.counts
    assert np.array_equal(found.messages, expected.messages)


def test_a_sweep_on_a_terminal_shows_the_remaining_time_below_its_lines(tmp_path):
    described = read(write_experiment(tmp_path))
    sweep(described.runs[:2], tmp_path / "out", progress=(terminal := Terminal()))
    text = terminal.getvalue()
    assert "[2/2] " in text
    assert "runs" in text
    assert text.count("left") >= 2


def test_a_sweep_of_nothing_lists_the_experiments(capsys):
    assert main(["sim", "sweep"]) == 2
    assert "name experiments, of ablation, background" in capsys.readouterr().err
