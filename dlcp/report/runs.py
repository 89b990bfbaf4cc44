# SPDX-License-Identifier: Apache-2.0
"""Runs of the demo and of a testbed: the time of each to the same accuracy, and its effect on other traffic."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from dlcp.inputs.document import DocumentError, read_json
from dlcp.values.planes import FULL_BITS
from dlcp.wire import DROP_CLASSES

Run = dict[str, Any]
"""The content of one run's file."""

RUN_NAMES: Final = ("gloo", "plain", "dlcp", "dlcp_priority")
OPTIONAL_RUNS: Final = frozenset({"gloo"})
TARGET_STEP: Final = 0.005
"""Targets are multiples of this accuracy: about two of the 360 test images. Finer steps would show noise."""
HELD_SHARE: Final = 0.25
"""Share of the steps, at the end of training, through which every run must have held the target. Not tuned."""
HOLD_TOLERANCE: Final = 0.005
"""How far a run may fall below an accuracy and still hold it: half a point, an evaluation's noise."""
TARGET_MARGIN: Final = 0.01
"""Distance of the target below the accuracy that all runs held, because curves are flat at the end."""
OTHER_TARGETS: Final = (-0.01, 0.01, 0.02, 0.05, 0.10, 0.20)
"""Distances below (or above) the target at which the comparison is repeated, to show whether the target matters."""

_Count = Annotated[int, Meta(ge=0)]
_Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # finite: Python reads NaN and Infinity in JSON
_Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class _Fabric(TypedDict):
    kind: str
    workers: _Count
    rate_bps: _Amount
    depth_packets: _Count
    mtu: _Count


class _Background(TypedDict):
    flows: _Count
    bps: _Amount
    fair_share_bps: _Amount
    samples: list[Any]
    bursts: list[Any]


class _Switch(TypedDict):
    tail_drops: _Count
    policy_drops: _Count
    marked: _Count
    over_share: _Count
    forwarded: _Count
    by_queue: dict[str, Any]


class _Ledger(TypedDict):
    sent: _Count
    lost: _Count
    delivered: _Count
    retransmitted: _Count
    violations: _Count
    max_message_ratio: _Amount
    bound: _Amount
    by_bits: dict[Annotated[str, Meta(pattern="^[0-9]+$")], tuple[_Count, _Count]]
    by_class: Annotated[list[Any], Meta(min_length=DROP_CLASSES, max_length=DROP_CLASSES)]
    by_layer: dict[str, Any]


class _Evaluation(TypedDict):
    step: _Amount
    seconds: _Amount
    accuracy: Annotated[float, Meta(ge=0, le=1)]


class _RunForm(TypedDict):
    """The fields of a run that the page and the summary read; it may have more."""

    title: str
    collective: str
    program_digest: str
    command: str
    seed: _Count
    parameters: _Count
    gradient_bytes: _Count
    replicas_identical: bool
    final_accuracy: _Amount
    fabric: _Fabric
    background: _Background
    switch: _Switch
    ledger: _Ledger | None
    curve: Annotated[list[_Evaluation], Meta(min_length=2)]
    steps: Annotated[list[_Seconds], Meta(min_length=1)]
    compute_seconds: list[Any]
    layer_names: dict[str, str]
    layer_seconds: dict[str, Any] | None
    versions: dict[str, str]


_SAME_IN_ALL: Final = (
    *("seed", "parameters", "program_digest", "fabric.kind", "fabric.workers"),
    *("fabric.rate_bps", "fabric.depth_packets", "fabric.mtu"),
)


class RunFileError(ValueError):
    """A run's file is invalid, or the runs cannot be compared."""


def load_runs(directory: Path, only: Collection[str] = ()) -> dict[str, Run]:
    """Read ``directory/runs/*.json``, or only those of these names.

    Returns
    -------
    Runs by name, in the order of ``RUN_NAMES``.

    Raises
    ------
    RunFileError
        A run is unknown or not JSON, or the runs cannot be compared.
    """
    folder = directory / "runs"
    runs: dict[str, Run] = {}
    for path in sorted(path for path in folder.glob("*.json") if not only or path.stem in only):
        try:
            runs[path.stem] = read_json(path)
        except DocumentError as error:
            raise RunFileError(f"{path} is not JSON: {error}; run the demo again") from None
    if not runs:
        raise RunFileError(f"{folder} holds no run; `dlcp demo` writes them")
    check_runs(runs)
    return {name: runs[name] for name in RUN_NAMES if name in runs}


def write_summary(summary: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/summary.json`` and return its path."""
    path = directory / "summary.json"
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def summarize(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Compare the demo's runs.

    A rule derives the target accuracy from the results: one point (``TARGET_MARGIN``) below the highest accuracy, in
    steps of ``TARGET_STEP``, that every run held through at least the last quarter of its steps (see
    :func:`held_from`). The slowest learner determines it, so every run reaches it. It lies below because curves are
    flat at the end: a single test image decides when a run reaches its final accuracy. ``other_targets`` repeats the
    comparison at other accuracies, and so shows whether the result depends on the target.

    Time to the target is training time, without evaluation, interpolated linearly between the last evaluation below
    the target and the first from which it was held. All runs are evaluated at the same steps, so interpolation favours
    none; without it, times would be multiples of the evaluation interval.

    Parameters
    ----------
    runs
        Run files by name; at least one.

    Returns
    -------
    The document of ``summary.json``. Speed-ups are ratios of seconds to the target accuracy, the other run's over
    DLCP's: more than 1 means that DLCP was faster. They are None if a run is absent or there is no target.

    Raises
    ------
    RunFileError
        A run is malformed, or runs differ in seed, links, model or switch program.
    """
    check_runs(runs)
    target = target_accuracy(runs)
    figures = {name: run_figures(runs[name], target) if name in runs else None for name in RUN_NAMES}
    any_run = next(iter(runs.values()))
    return {
        "target_accuracy": target,
        "speedup_over_gloo": speedup(runs, "gloo", "dlcp", target),
        "speedup_over_plain": speedup(runs, "plain", "dlcp", target),
        "speedup_over_gloo_with_priority": speedup(runs, "gloo", "dlcp_priority", target),
        "speedup_over_plain_with_priority": speedup(runs, "plain", "dlcp_priority", target),
        "replicas_identical": all(run["replicas_identical"] for run in runs.values()),
        **figures,
        "background_bps": {name: run["background"]["bps"] for name, run in runs.items()},
        "background_fair_share_bps": any_run["background"]["fair_share_bps"],
        "other_targets": other_targets(runs, target),
        "collective": any_run["collective"],
        "seed": any_run["seed"],
        "program_digest": any_run["program_digest"],
    }


def held_from(curve: Sequence[Mapping[str, float]], accuracy: float) -> int | None:
    """Return the index of the evaluation from which a run held an accuracy, or None.

    It is the first evaluation at or above the accuracy after which no evaluation falls more than ``HOLD_TOLERANCE``
    below it.
    """
    reached = None
    for index, point in enumerate(curve):
        if point["accuracy"] < accuracy - HOLD_TOLERANCE - 1e-9:
            reached = None
        elif reached is None and point["accuracy"] >= accuracy - 1e-9:
            reached = index
    return reached


def target_accuracy(runs: Mapping[str, Run]) -> float | None:
    """Return the target: ``TARGET_MARGIN`` below the accuracy that every run held through its last quarter of steps.

    That accuracy is a multiple of ``TARGET_STEP``. None if the target does not exceed the best run's first accuracy:
    then the runs have learned nothing that could be compared.
    """
    began = max(run["curve"][0]["accuracy"] for run in runs.values())
    for count in range(round(1 / TARGET_STEP), 0, -1):
        accuracy = round(count * TARGET_STEP, 6)
        if accuracy <= began:
            return None
        if all(_held_long(run["curve"], accuracy) for run in runs.values()):
            target = round(accuracy - TARGET_MARGIN, 6)
            return target if target > began else None
    return None


def _held_long(curve: Sequence[Mapping[str, float]], accuracy: float) -> bool:
    index = held_from(curve, accuracy)
    return index is not None and curve[index]["step"] <= (1 - HELD_SHARE) * curve[-1]["step"]


def progress_to(run: Run, accuracy: float | None, unit: str) -> float | None:
    """Return the training seconds or steps (``unit``) after which a run held an accuracy, or None if it never did."""
    curve = run["curve"]
    index = None if accuracy is None else held_from(curve, accuracy)
    if accuracy is None or index is None:
        return None
    after = curve[index]
    if index == 0:
        return float(after[unit])
    before = curve[index - 1]
    part = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
    return float(before[unit] + min(1.0, part) * (after[unit] - before[unit]))


def speedup(runs: Mapping[str, Run], other: str, ours: str, accuracy: float | None) -> float | None:
    """Return the speed-up of run ``ours`` over ``other`` to an accuracy; None if either never reached it."""
    if other not in runs or ours not in runs:
        return None
    theirs = progress_to(runs[other], accuracy, "seconds")
    own = progress_to(runs[ours], accuracy, "seconds")
    return None if theirs is None or not own else theirs / own


def other_targets(runs: Mapping[str, Run], target: float | None) -> list[dict[str, float | None]]:
    """Return the speed-ups at other targets, the highest target first."""
    if target is None:
        return []
    began = max(run["curve"][0]["accuracy"] for run in runs.values())
    lower = [round(target - less, 6) for less in OTHER_TARGETS]
    return [
        {
            "target_accuracy": accuracy,
            "speedup_over_gloo": speedup(runs, "gloo", "dlcp", accuracy),
            "speedup_over_plain": speedup(runs, "plain", "dlcp", accuracy),
        }
        for accuracy in lower
        if accuracy > began
    ]


def run_figures(run: Run, target: float | None) -> dict[str, Any]:
    """Return one run's part of the summary.

    ``packets.sent`` and ``retransmitted`` are the training job's own, from its ledger or, for Gloo, from the kernel
    (``tcp``) if the run has them. The switch's drops count all traffic, including the background.
    """
    switch, ledger = run["switch"], run["ledger"]
    counts = ledger or run.get("tcp") or {}
    steps = np.asarray(run["steps"], np.float64)
    p50, p99 = np.percentile(steps, (50, 99)).tolist()
    return {
        "title": run["title"],
        "seconds_to_target": progress_to(run, target, "seconds"),
        "steps_to_target": progress_to(run, target, "step"),
        "final_accuracy": run["final_accuracy"],
        "step_seconds": {"mean": float(steps.mean()), "p50": p50, "p99": p99},
        "packets": {
            "sent": counts.get("sent"),
            "retransmitted": counts.get("retransmitted"),
            "dropped_by_policy": switch["policy_drops"],
            "dropped_by_tail": switch["tail_drops"],
        },
        "loss": {key: ledger[key] for key in ("bound", "max_message_ratio", "violations")} if ledger else None,
        "precision": _precision(ledger["by_bits"]) if ledger else None,
    }


def _precision(by_bits: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the shares of encoded packets by precision, and of lost packets those that held lower digits only."""
    packets, lost = (sum(row[column] for row in by_bits.values()) for column in range(2))
    encoded = {bits: row for bits, row in by_bits.items() if int(bits) < FULL_BITS}
    return {
        "encoded": {bits: row[0] / packets for bits, row in encoded.items()},
        "lower_digits": sum(row[1] for row in encoded.values()) / max(1, lost),
    }


def fair_share_ratio(run: Run) -> float:
    """Return the background's mean throughput over its fair share."""
    return float(run["background"]["bps"] / max(1, run["background"]["fair_share_bps"]))


def check_runs(runs: Mapping[str, Run]) -> None:
    """Check that runs are known, well formed and comparable.

    Raises
    ------
    RunFileError
        They are not; the message names the run and the field.
    """
    unknown = set(runs) - set(RUN_NAMES)
    if unknown:
        raise RunFileError(f"unknown run {min(unknown)!r}: runs are {', '.join(RUN_NAMES)}")
    for name, run in runs.items():
        _check_run(name, run)
    first = "dlcp" if "dlcp" in runs else next(iter(runs))
    reference = runs[first]
    for name, run in runs.items():
        for path in _SAME_IN_ALL:
            if _value(run, path) != _value(reference, path):
                raise RunFileError(
                    f"runs cannot be compared: {path} is {_value(run, path)!r} in {name!r} and "
                    f"{_value(reference, path)!r} in {first!r}. Run the demo again, all runs in one go"
                )


def check_complete(runs: Mapping[str, Run]) -> None:
    """Raise RunFileError if a run that the page compares is missing; it names all that are."""
    if missing := [name for name in RUN_NAMES if name not in {*runs, *OPTIONAL_RUNS}]:
        raise RunFileError(
            f"run {missing[0]!r} is missing; the page needs all but gloo: make them with --only {' '.join(missing)}"
        )


def _check_run(name: str, run: Run) -> None:
    try:
        msgspec.convert(run, _RunForm)
    except msgspec.ValidationError as error:
        raise RunFileError(f"run {name!r}: {error}. Run the demo again") from None
    if run["ledger"] is None and name != "gloo":
        raise RunFileError(f"run {name!r}: ledger may be null for gloo only")
    if not all(a["seconds"] < b["seconds"] and a["step"] < b["step"] for a, b in pairwise(run["curve"])):
        raise RunFileError(f"run {name!r}: steps and seconds of the curve must increase")


def _value(run: Mapping[str, Any], path: str) -> Any:
    value: Any = run
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
