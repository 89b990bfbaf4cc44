# SPDX-License-Identifier: Apache-2.0
"""Steps of training that are skipped: how long they take, how many are simulated, and what ends a skip."""

from statistics import fmean

import msgspec
import pytest

from dlcp.inputs.document import DocumentError
from dlcp.sim.experiments.experiment import RunSetting, read
from dlcp.sim.experiments.running import run
from tests.sim.experiments_small import EXPERIMENT, write_experiment

LONG = EXPERIMENT.replace("steps: 2, jitter: 0.1", "steps: 400, jitter: 0.05")


@pytest.fixture
def runs(tmp_path):
    """Run FIFO over fast links for 400 steps, as it is and with steps skipped; ``changes`` are of its setting.

    A step takes a third of a millisecond.
    """

    def both(jobs=({},), **changes):
        item = read(write_experiment(tmp_path, LONG)).runs[1]
        described = msgspec.to_builtins(item.setting) | {"traffic": []} | changes
        described["training"] = [described["training"][0] | job for job in jobs]
        found = []
        for error in (0.0, 0.02):
            setting = msgspec.convert(described | {"skip_steady": error}, RunSetting)
            found.append(run(msgspec.structs.replace(item, setting=setting)))
        return found

    return both


def steps_of(document, job=0):
    return document["jobs"][job]["step_s"]


def test_skipped_steps_are_like_simulated_ones(runs):
    whole, skipping = runs()
    simulated = 400 - skipping["jobs"][0]["skipped_steps"]
    assert simulated < 80
    assert "skipped_steps" not in whole["jobs"][0]
    assert len(steps_of(skipping)) == 400
    assert steps_of(skipping)[:simulated] == steps_of(whole)[:simulated]
    assert fmean(steps_of(skipping)) == pytest.approx(fmean(steps_of(whole)), rel=0.02)
    for metric, within in (("simulated_s", 0.02), ("samples_per_s", 0.02), ("packets_per_sample", 0.001)):
        assert skipping["metrics"][metric] == pytest.approx(whole["metrics"][metric], rel=within)


def test_a_skip_ends_where_the_network_changes(runs):
    trouble = {"nodes": ["host0", "leaf0"], "loss_ratio": 0.01, "start_s": 0.04, "stop_s": 0.08}
    whole, skipping = runs(failures=[trouble])
    usual = min(steps_of(whole))
    slow, found = (sum(step > 1.3 * usual for step in steps_of(each)) for each in (whole, skipping))
    assert slow > 50
    assert found == pytest.approx(slow, rel=0.1)
    assert skipping["jobs"][0]["skipped_steps"] > 200


def test_other_traffic_begins_and_ends_when_it_should(runs):
    other = {"name": "others", "load": 0.1, "most_bytes": 10_000, "transport": "tcp", "start_s": 0.03, "stop_s": 0.1}
    whole, skipping = runs(traffic=[other])
    assert skipping["metrics"]["simulated_s"] == pytest.approx(whole["metrics"]["simulated_s"], rel=0.03)
    assert 0 < skipping["times"]["other"]["count"] < whole["times"]["other"]["count"]


def test_jobs_skip_together_up_to_a_change(runs):
    trouble = {"nodes": ["host0", "leaf0"], "loss_ratio": 0.005, "start_s": 0.06, "stop_s": 0.07}
    whole, skipping = runs(jobs=[{}, {"name": "longer", "steps": 500}], failures=[trouble])
    for job, steps in enumerate((400, 500)):
        assert len(steps_of(skipping, job)) == steps
        assert skipping["jobs"][job]["skipped_steps"] > steps / 4
    assert skipping["metrics"]["simulated_s"] == pytest.approx(whole["metrics"]["simulated_s"], rel=0.05)


def test_jobs_skip_the_same_time_together(runs):
    jobs = [{}, {"name": "longer", "steps": 700, "start_s": 0.02, "batch": 2}]
    whole, skipping = runs(jobs=jobs)
    for job, steps in enumerate((400, 700)):
        assert len(steps_of(skipping, job)) == steps
        assert skipping["jobs"][job]["skipped_steps"] > steps / 2
        assert fmean(steps_of(skipping, job)) == pytest.approx(fmean(steps_of(whole, job)), rel=0.02)
    assert skipping["metrics"]["simulated_s"] == pytest.approx(whole["metrics"]["simulated_s"], rel=0.03)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("learn: {task: digits, target: 0.9, batch: 8}, model: trained", "skip_steady is for jobs without learn"),
        ("pipeline: '4'", "skip_steady is for jobs without pipeline"),
    ],
)
def test_jobs_whose_steps_all_count_are_refused(tmp_path, change, complaint):
    model = "model: PROFILE, " if "model" not in change else ""
    text = LONG.replace("setting:\n", "setting:\n  skip_steady: 0.01\n").replace("model: PROFILE,", f"{model}{change},")
    with pytest.raises(DocumentError, match=complaint):
        read(write_experiment(tmp_path, text))
