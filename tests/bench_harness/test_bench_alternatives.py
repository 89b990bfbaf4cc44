# SPDX-License-Identifier: Apache-2.0
"""The comparison with alternatives: how a figure is calculated, how cells are kept, and a small real run."""

import json

import pytest

pytest.importorskip("torch")

from dlcp.bench import BenchResult
from tests.bench import alternatives
from tests.bench.__main__ import main
from tests.bench.alternatives import CellFile, StepTimes, Training, compare, table, trained_by, whole_periods
from tests.bench.methods import METHODS

SEEDS = range(1, 4)
FALLING = [float(loss) for loss in range(12, 0, -1)]
LATE = [12.0, 12.0, *FALLING[:-2]]


@pytest.fixture
def cells(tmp_path):
    return CellFile(tmp_path / "deep" / "cells.jsonl", alternatives.machine())


def times(method, first_s, step_s, bits=(32,), machine=None, setting="clean"):
    machine = machine or alternatives.machine()
    return StepTimes(machine, setting, "table", method, "wire", [first_s] * len(step_s), list(step_s), list(bits))


def train(cells, method, losses):
    for seed in SEEDS:
        cells.add(Training("table", method, seed, losses))


def test_first_steps_count_at_their_own_time():
    found = times("powersgd:4", [5.0, 4.0], [1.0, 3.0, 2.0])
    assert found.seconds_for(10, 0) == 20
    assert found.seconds_for(10, 2) == 9 + 16
    assert found.seconds_for(10.5, 2) == 9 + 17
    assert found.seconds_for(1.5, 2) == 5 + 0.5 * 2


def test_model_averaging_is_timed_over_whole_periods():
    assert [whole_periods(steps, 8) for steps in (3, 8, 8.5, 0, -7)] == [8, 8, 16, 0, 0]
    assert whole_periods(2.5, 1) == 3


def test_dlcp_is_trained_at_every_precision_that_it_may_choose():
    assert trained_by(["bf16", "dlcp", "dlcp:4", "dlcp-powersgd:2"]) == [
        *("gloo", "bf16", "dlcp:32", "dlcp:8", "dlcp:4", "dlcp-powersgd:2:32", "dlcp-powersgd:2:8")
    ]


def test_a_figure_is_steps_to_the_loss_times_the_time_of_a_step(cells):
    train(cells, "gloo", FALLING[:4])  # the loss that others have to reach is its last one, at step 16
    train(cells, "powersgd:4", LATE)  # eight steps later
    cells.add(times("gloo", [9.0], [1.0, 1.0, 1.0]))
    assert compare(cells, "clean", "table", "powersgd:4", SEEDS) is None
    cells.add(times("powersgd:4", [2.0, 2.0], [0.5, 0.1, 0.2]))
    found = compare(cells, "clean", "table", "powersgd:4", SEEDS)
    assert (found.value, found.peer) == (pytest.approx(2 * 2.0 + 22 * 0.2), 16)
    assert found.details["steps"] == [24, 24, 24]
    assert compare(cells, "clean", "table", "gloo", SEEDS).ratio == 1
    assert compare(cells, "clean", "table", "gloo", range(1, 5)) is None, "a seed that was not trained"


def test_the_steps_are_those_of_the_precision_that_dlcp_chose(cells):
    train(cells, "gloo", FALLING[:4])
    train(cells, "dlcp:32", FALLING)
    train(cells, "dlcp:8", LATE)
    cells.add(times("gloo", [1.0], [1.0]))
    cells.add(times("dlcp", [1.0] * 3, [1.0] * 3, [32, 8, 32]))
    assert compare(cells, "clean", "table", "dlcp", SEEDS).details["steps"] == [16] * 3
    cells.add(times("dlcp", [1.0] * 3, [1.0] * 3, [8, 8, 32]))
    assert compare(cells, "clean", "table", "dlcp", SEEDS).details["steps"] == [24] * 3


def test_what_never_reaches_the_loss_counts_with_all_its_steps(cells):
    train(cells, "gloo", FALLING[:4])
    train(cells, "bf16", [12.0] * 12)
    for method in ("gloo", "bf16"):
        cells.add(times(method, [1.0], [1.0]))
    found = compare(cells, "clean", "table", "bf16", SEEDS)
    assert found.value == 48
    assert found.details["steps"] == [None] * 3
    assert table([found], "table")[-1] == "| bf16 | 48 (3 never) |"


def test_cells_are_kept_but_not_times_of_another_machine(cells, tmp_path):
    train(cells, "gloo", FALLING[:4])
    cells.add(times("gloo", [1.0], [1.0]))
    cells.add(times("bf16", [1.0], [1.0], machine="another"))
    again = CellFile(tmp_path / "deep" / "cells.jsonl", alternatives.machine())
    assert again.trainings == cells.trainings
    assert list(again.times) == [("clean", "table", "gloo")]


def test_the_best_of_a_family_is_in_the_table():
    def entry(setting, method, seconds, bits=(32,)):
        details = {"setting": setting, "task": "table", "method": method, "steps": [1.0], "bits": list(bits)}
        return BenchResult("name", seconds, "s", None, None, 1, 0.0, details)

    ours = [entry("clean", "dlcp", 2.0, (8, 32)), entry("clean", "dlcp:4", 1.0), entry("loss1", "dlcp:4", 3.0)]
    peers = [entry("clean", "gloo", 4.0), entry("clean", "powersgd:1", 6.0), entry("clean", "powersgd:8", 5.0)]
    assert table([*ours, *peers], "table") == [
        "| table | clean | loss1 |",
        "|---|---|---|",
        "| gloo | 4 |  |",
        "| powersgd | 5 (8) |  |",
        "| dlcp | 2 (8/32 bits) |  |",
        "| dlcp:4 | 1 | 3 |",
    ]


@pytest.mark.parametrize(("option", "kind"), [("--settings", "setting"), ("--tasks", "task"), ("--methods", "method")])
def test_unknown_names_are_refused(option, kind, capsys, tmp_path):
    assert main(["alternatives", option, "nothing", "--cells", str(tmp_path / "cells")]) == 1
    assert f"there is no {kind} 'nothing'" in capsys.readouterr().err


@pytest.mark.timeout(110)
def test_a_small_run_is_measured_once(tmp_path, capsys, monkeypatch):
    chosen = {"settings": "clean", "tasks": "table", "methods": "dlcp:4", "seeds": 1, "rounds": 1}
    options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    command = ["alternatives", *options, "--cells", str(tmp_path / "cells.jsonl")]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)["results"]
    assert [entry["name"] for entry in first] == ["alternatives.clean.table.gloo", "alternatives.clean.table.dlcp:4"]
    assert first[1]["details"]["bits"] == [4]
    assert all(entry["value"] > 0 and None not in entry["details"]["steps"] for entry in first)
    monkeypatch.setattr(alternatives, "trainees_on", None)
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["results"] == first


def test_every_method_has_a_name_of_its_own():
    assert METHODS.keys() == {method.name for method in METHODS.values()}
    assert len(METHODS) == 28
