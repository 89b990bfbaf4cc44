# SPDX-License-Identifier: Apache-2.0
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dlcp.demo.run import report
from dlcp.report.runs import (
    HOLD_TOLERANCE,
    RunFileError,
    check_complete,
    held_from,
    load_runs,
    progress_to,
    summarize,
    target_accuracy,
    write_summary,
)

LEARNED = [0.1, 0.5, 0.9, 0.9, 0.9]


def curve(accuracies, seconds_per_step=1.0, every=10):
    return [
        {"step": every * i, "seconds": every * i * seconds_per_step, "accuracy": accuracy, "loss": 1.0}
        for i, accuracy in enumerate(accuracies)
    ]


@pytest.fixture
def timed(runs):
    """Runs that learn alike, with steps of 3, 1, 0.5 and 0.25 s."""
    for name, seconds in {"gloo": 3.0, "plain": 1.0, "dlcp": 0.5, "dlcp_priority": 0.25}.items():
        runs[name]["curve"] = curve(LEARNED, seconds)
    return runs


def test_speedups_are_ratios_of_seconds_to_the_same_accuracy(timed):
    summary = summarize(timed)
    assert summary["target_accuracy"] == 0.89  # a point below what all held
    seconds = {name: summary[name]["seconds_to_target"] for name in timed}
    # 0.39 of the 0.4 between the evaluations at 10 s and 20 s of the plain run
    assert seconds == pytest.approx({"gloo": 59.25, "plain": 19.75, "dlcp": 9.875, "dlcp_priority": 4.9375})
    assert summary["speedup_over_gloo"] == pytest.approx(6)
    assert summary["speedup_over_plain"] == pytest.approx(2)
    assert summary["speedup_over_gloo_with_priority"] == pytest.approx(12)
    assert summary["speedup_over_plain_with_priority"] == pytest.approx(4)


def test_a_slower_dlcp_has_a_speedup_below_one(timed):
    timed["dlcp"]["curve"] = curve(LEARNED, 2.0)
    assert summarize(timed)["speedup_over_plain"] == pytest.approx(0.5)


def test_without_gloo_its_figures_are_null(timed):
    del timed["gloo"]
    summary = summarize(timed)
    assert summary["gloo"] is None
    assert summary["speedup_over_gloo"] is None
    assert summary["speedup_over_gloo_with_priority"] is None
    assert summary["speedup_over_plain"] == pytest.approx(2)


def test_the_slowest_learner_sets_the_target_and_others_are_interpolated(timed):
    timed["dlcp"]["curve"] = curve([0.1, 0.5, 1.0, 1.0, 1.0])
    summary = summarize(timed)
    assert summary["target_accuracy"] == 0.89
    assert summary["dlcp"]["seconds_to_target"] == pytest.approx(17.8)  # 0.39 of the 0.5 between 10 s and 20 s
    assert summary["dlcp"]["steps_to_target"] == pytest.approx(17.8)


def test_what_is_reached_only_at_the_end_is_no_target(timed):
    timed["plain"]["curve"] = curve([0.1, 0.5, 0.7, 0.8, 0.9])
    assert target_accuracy(timed) == 0.79  # 0.8 was held from step 30 of 40 on: the last quarter
    assert progress_to(timed["plain"], 0.8, "seconds") == 30
    assert progress_to(timed["plain"], 0.9, "seconds") == 40  # late, but reached


def test_a_fall_after_the_target_means_it_was_not_held(timed):
    timed["plain"]["curve"] = curve([0.1, 0.9, 0.89, 0.9, 0.9])
    assert progress_to(timed["plain"], 0.9, "seconds") == 30
    timed["plain"]["curve"] = curve([0.1, 0.9, 0.895, 0.9, 0.9])
    assert progress_to(timed["plain"], 0.9, "seconds") == 10


def test_targets_are_multiples_of_half_a_point(timed):
    for run in timed.values():
        run["curve"] = curve([0.1, 0.5, 0.9234, 0.9234, 0.9234])
    assert target_accuracy(timed) == 0.91


def test_runs_that_learned_nothing_have_no_target_and_no_speedup(timed):
    timed["dlcp"]["curve"] = curve([0.1, 0.1, 0.1, 0.1, 0.1])
    summary = summarize(timed)
    assert summary["target_accuracy"] is None
    assert summary["speedup_over_plain"] is None
    assert summary["plain"]["seconds_to_target"] is None
    assert summary["other_targets"] == []


def test_other_targets_show_the_same_comparison_lower_down(timed):
    timed["plain"]["curve"] = curve([0.1, 0.1, 0.9, 0.9, 0.9])
    by_target = {row["target_accuracy"]: row for row in summarize(timed)["other_targets"]}
    assert list(by_target) == [0.9, 0.88, 0.87, 0.84, 0.79, 0.69]
    # To 0.69: the plain run at 10 + 10 * 0.59 / 0.8 = 17.375 s, DLCP at (10 + 10 * 0.19 / 0.4) / 2 = 7.375 s.
    assert by_target[0.69]["speedup_over_plain"] == pytest.approx(17.375 / 7.375)
    assert by_target[0.69]["speedup_over_gloo"] == pytest.approx(6)


@given(
    st.lists(st.integers(0, 20).map(lambda n: n / 20), min_size=1, max_size=12),
    st.integers(1, 20).map(lambda n: n / 20),
)
def test_held_from_is_the_first_evaluation_that_nothing_later_contradicts(accuracies, target):
    stays = [
        index
        for index, accuracy in enumerate(accuracies)
        if accuracy >= target and min(accuracies[index:]) >= target - HOLD_TOLERANCE
    ]
    assert held_from(curve(accuracies), target) == (stays[0] if stays else None)


def test_step_times(timed):
    timed["dlcp"]["steps"] = [5, 1, 4, 2, 3]
    figures = summarize(timed)["dlcp"]["step_seconds"]
    assert figures == {"mean": 3, "p50": 3, "p99": pytest.approx(4.96)}  # 4 + 0.96: rank 3.96 of 0..4


def test_packets_come_from_ledger_and_switch_and_are_null_where_unknown(timed):
    timed["dlcp"]["ledger"] |= {"sent": 1000, "retransmitted": 7}
    timed["dlcp"]["switch"] |= {"policy_drops": 20, "tail_drops": 3}
    summary = summarize(timed)
    assert summary["dlcp"]["packets"] == {
        "sent": 1000,
        "retransmitted": 7,
        "dropped_by_policy": 20,
        "dropped_by_tail": 3,
    }
    assert summary["gloo"]["packets"]["sent"] is None
    assert summary["gloo"]["packets"]["retransmitted"] is None
    assert summary["gloo"]["packets"]["dropped_by_tail"] == timed["gloo"]["switch"]["tail_drops"]
    timed["gloo"]["tcp"] = {"sent": 900, "retransmitted": 12}
    assert summarize(timed)["gloo"]["packets"]["retransmitted"] == 12


def test_precision_is_told_with_the_losses_of_lower_digits(timed):
    timed["dlcp"]["ledger"]["by_bits"] = {"4": [100, 0], "8": [500, 30], "32": [400, 10]}
    summary = summarize(timed)
    assert summary["dlcp"]["precision"] == {"encoded": {"4": 0.1, "8": 0.5}, "lower_digits": 0.75}
    assert summary["plain"]["precision"] == {"encoded": {}, "lower_digits": 0}
    assert summary["gloo"]["precision"] is None


def test_violations_and_diverging_replicas_are_told(timed):
    assert summarize(timed)["replicas_identical"] is True
    timed["dlcp"]["ledger"] |= {"violations": 3, "max_message_ratio": 0.2, "bound": 0.1}
    timed["gloo"]["replicas_identical"] = False
    summary = summarize(timed)
    assert summary["dlcp"]["loss"] == {"bound": 0.1, "max_message_ratio": 0.2, "violations": 3}
    assert summary["replicas_identical"] is False


def test_background_seed_and_program(timed):
    summary = summarize(timed)
    assert summary["background_bps"] == {name: run["background"]["bps"] for name, run in timed.items()}
    assert summary["background_fair_share_bps"] == 3e7
    assert (summary["seed"], summary["collective"]) == (1, "direct")
    assert summary["program_digest"] == timed["dlcp"]["program_digest"]


@pytest.mark.parametrize("names", [["gloo", "dlcp"], ["gloo"], ["dlcp_priority"], ["plain", "dlcp_priority"]])
def test_any_runs_show_their_figures(timed, tmp_path, names):
    (tmp_path / "runs").mkdir()
    for name in names:
        (tmp_path / "runs" / f"{name}.json").write_text(json.dumps(timed[name]))
    stale = timed["plain" if "plain" not in names else "dlcp"] | {"seed": 7}
    (tmp_path / "runs" / f"{stale['name']}.json").write_text(json.dumps(stale))
    console = Console(file=(said := io.StringIO()), width=200)
    assert list(report(console, tmp_path, names)) == names
    text = said.getvalue()
    assert "older runs in" in text
    assert all(f"  {name:<14} " in text for name in names)
    assert "s per step" in text
    assert "no page yet: run " in text
    assert ("times as fast as gloo" in text) == (names == ["gloo", "dlcp"])
    assert json.loads((tmp_path / "summary.json").read_text())["seed"] == 1


def test_runs_without_a_common_accuracy_show_their_figures_too(timed, tmp_path):
    (tmp_path / "runs").mkdir()
    run = timed["dlcp"] | {"curve": curve([0.1, 0.1])}
    (tmp_path / "runs" / "dlcp.json").write_text(json.dumps(run))
    console = Console(file=(said := io.StringIO()), width=200)
    report(console, tmp_path, ["dlcp"])
    assert "no accuracy in common" in said.getvalue()
    assert "s per step, final accuracy" in said.getvalue()
    with pytest.raises(RunFileError, match="make them with --only plain dlcp_priority"):
        report(console, tmp_path, None)


def test_unknown_runs_are_refused_and_no_page_is_made_of_some(timed):
    with pytest.raises(RunFileError, match="unknown run 'mlt'"):
        summarize(timed | {"mlt": timed["dlcp"]})
    del timed["plain"]
    with pytest.raises(RunFileError, match="run 'plain' is missing"):
        check_complete(timed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.update(seed=2), "runs cannot be compared: seed is 2 in 'plain' and 1 in 'dlcp'"),
        (lambda run: run["fabric"].update(rate_bps=1e8), "fabric.rate_bps is 100000000.0 in 'plain'"),
        (lambda run: run.pop("curve"), "'plain': .*missing required field `curve`"),
        (lambda run: run.update(curve=curve([0.1])), "length >= 2 - at `.*curve`"),
        (lambda run: run.update(curve=curve([0.1, 1.2])), r"<= 1.0 - at `.*curve\[1\].accuracy`"),
        (lambda run: run.update(curve=curve([0.1, 0.2], 0.0)), "steps and seconds of the curve must increase"),
        (lambda run: run.update(curve=[{"step": 0}, {"step": 1}]), r"missing required field `\w+` - at `.*curve\[0\]`"),
        (lambda run: run.update(steps=[]), "length >= 1 - at `.*steps`"),
        (lambda run: run.update(steps=[1.0, math.nan]), r"> 0.0 - at `.*steps\[1\]`"),
        (lambda run: run.update(seed=True), "Expected `int`, got `bool` - at `.*seed`"),
        (lambda run: run.update(final_accuracy=math.inf), "- at `.*final_accuracy`"),
        (lambda run: run["background"].update(bps=-1), ">= 0.0 - at `.*background.bps`"),
        (lambda run: run["switch"].pop("tail_drops"), "missing required field `tail_drops` - at `.*switch`"),
        (lambda run: run["ledger"].pop("violations"), "missing required field `violations` - at `.*ledger`"),
        (lambda run: run["ledger"].update(by_class=[[1, 0]]), "length >= 8 - at `.*ledger.by_class`"),
        (lambda run: run["ledger"].update(by_bits={"8": [1]}), r"length 2.* - at `.*ledger.by_bits"),
        (lambda run: run["ledger"].update(by_bits={"x": [1, 0]}), "regex.* - at `key.*ledger.by_bits"),
        (lambda run: run.update(ledger=None), "ledger may be null for gloo only"),
        (lambda run: run.pop("layer_seconds"), "missing required field `layer_seconds`"),
    ],
)
def test_a_malformed_run_is_refused_by_name(timed, change, message):
    change(timed["plain"])
    with pytest.raises(RunFileError, match=message):
        summarize(timed)


def test_runs_are_read_in_order_and_the_summary_is_strict_json(timed, tmp_path):
    (tmp_path / "runs").mkdir()
    for name, run in timed.items():
        (tmp_path / "runs" / f"{name}.json").write_text(json.dumps(run))
    read = load_runs(tmp_path)
    assert list(read) == ["gloo", "plain", "dlcp", "dlcp_priority"]
    assert read == timed
    summary = summarize(read)
    path = write_summary(summary, tmp_path)
    assert json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name)) == summary


def test_a_folder_without_runs_and_a_file_that_is_no_json_are_told(tmp_path):
    with pytest.raises(RunFileError, match="holds no run"):
        load_runs(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dlcp.json").write_text("{")
    with pytest.raises(RunFileError, match=r"dlcp\.json is not JSON"):
        load_runs(tmp_path)
