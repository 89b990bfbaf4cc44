# SPDX-License-Identifier: Apache-2.0
"""Result of a measurement: the share of communication in a step, each of DLCP's ways, and the largest gain."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Final

from dlcp.policies.arms import fastest
from dlcp.train.launcher import Report, failures

NONE: Final = "none"
UNCHANGED: Final = "framework"
WARM_UP_ROUNDS: Final = 3
"""Rounds that do not count: DDP rearranges its buckets after the first step, and rate control has to find its rate."""
MEASURED_STEPS: Final = 80
FEWEST_STEPS: Final = 12
LITTLE: Final = 0.05
"""A smaller share of a step is not worth saving. Not tuned."""


def checked_steps(steps: int) -> int:
    """Return the number of steps to measure, checked.

    Raises
    ------
    ValueError
        There are fewer than :data:`FEWEST_STEPS`.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"--steps must be at least {FEWEST_STEPS}, got {steps}")
    return steps


def evaluate(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Return the results, in seconds and shares; None if nothing was measured.

    A step takes as long as for its slowest rank: of all, or, if the script has ended before all was measured, of those
    of this machine. Values are medians over steps; ``spread_s`` is the interquartile range.
    """
    measured = [report["measured"] for report in reports if report["measured"]]
    if not measured:
        return None
    factors: dict[str, float] = measured[0]["steps_factors"]
    names = dict.fromkeys([NONE, UNCHANGED, *factors])
    steps = {way: _slowest([each["seconds"].get(way, []) for each in measured]) for way in names}
    if len(steps[NONE]) < 2 or len(steps[UNCHANGED]) < 2:
        return None
    ways = {
        way: {"step_s": median(seconds), "spread_s": _spread(seconds), "steps": len(seconds)}
        for way, seconds in steps.items()
        if len(seconds) >= 2
    }
    floor, framework = ways[NONE]["step_s"], ways[UNCHANGED]["step_s"]
    found = {
        "model": measured[0]["model"],
        "gradient_bytes": measured[0]["gradient_bytes"],
        "backend": measured[0]["backend"],
        "ranks": reports[0]["ranks"],
        "ranks_measured": len(measured),
        "ways": ways,
        "communication_share": max(0.0, 1 - floor / framework),
        "speedup_at_most": framework / floor,
        "why_not": measured[0]["why_not"],
    }
    costs = {way: factor * ways[way]["step_s"] for way, factor in factors.items() if way in ways}
    if costs:
        found["chosen"] = chosen = fastest(costs)
        found["speedup"] = framework / costs[chosen]
    return found


def as_lines(found: dict[str, Any]) -> list[str]:
    """Return the result in a few lines."""
    ways, backend = found["ways"], found["backend"]
    floor, framework = ways[NONE], ways[UNCHANGED]
    noise_s = max(floor["spread_s"], framework["spread_s"])
    lines = [
        "",
        f"DLCP measured {found['model']}, {found['gradient_bytes'] / 1e6:,.1f} MB of gradients, "
        f"{found['ranks']} ranks, {framework['steps']} steps each way, in turn; ms per step",
        _line("no communication", floor, "the floor: nothing can be faster"),
        _line(f"{backend}, unchanged", framework, f"{found['communication_share']:.0%} of a step is communication"),
    ]
    possible_s = framework["step_s"] - floor["step_s"]
    lines += [
        _line(f"DLCP, {name}", way, _gain(framework["step_s"], way["step_s"], possible_s))
        for name, way in ways.items()
        if name not in (NONE, UNCHANGED)
    ]
    if found["why_not"]:
        lines.append(f"  DLCP was not measured: {found['why_not']}")
    elif "chosen" in found:
        chosen = f"leaves averaging to {backend}" if found["chosen"] == UNCHANGED else f"uses {found['chosen']}"
        lines.append(f"  With these options, DLCP {chosen} here.")
    else:
        lines.append("  The script ended before DLCP was measured: train longer, or pass fewer --steps.")
    lines.append(f"  {_verdict(found, possible_s, noise_s)}")
    return [*lines, "  This was a measurement: the model was not trained properly. Discard what the script saved."]


def nothing_measured(reports: Sequence[Report]) -> str:
    """Return why there is no result."""
    if not reports:
        return "no rank has left a report: nothing was measured"
    if failed := failures(reports):
        return f"rank {failed[0]['rank']} ended with {failed[0]['error']}: too little was measured"
    left_alone = [model["note"] for report in reports for model in report["models"] if not model["on"]]
    if left_alone:
        return f"{left_alone[0]}: nothing was measured"
    if not any(report["measured"] for report in reports):
        return "the script trained no DistributedDataParallel model: nothing was measured"
    return "the script ended before enough steps were measured: train longer, or pass fewer --steps"


def _line(name: str, way: dict[str, float], remark: str) -> str:
    return f"  {name:<18} {way['step_s'] * 1e3:9.1f} ± {way['spread_s'] * 500:<6.1f} {remark}"


def _verdict(found: dict[str, Any], possible_s: float, noise_s: float) -> str:
    if found["communication_share"] < LITTLE and noise_s < LITTLE * found["ways"][UNCHANGED]["step_s"]:
        return "Steps hardly wait for the network here: DLCP cannot gain much until other traffic congests it."
    if possible_s <= noise_s / 2:
        return "Steps vary by more than communication takes: use a quieter machine, or more --steps."
    return f"DLCP can gain at most {found['speedup_at_most']:.2f}x here, more while other traffic congests the network."


def _gain(framework_s: float, step_s: float, possible_s: float) -> str:
    speedup, gained_s = framework_s / step_s, framework_s - step_s
    if gained_s <= 0:
        return f"{speedup:.2f}x: slower by {-gained_s * 1e3:.1f} ms"
    share = f", {min(1.0, gained_s / possible_s):.0%} of what can be saved" if possible_s > 0 else ""
    return f"{speedup:.2f}x: saves {gained_s * 1e3:.1f} ms{share}"


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of each step, up to the last step that all ranks have."""
    return [max(step) for step in zip(*ranks, strict=False)]


def _spread(seconds: Sequence[float]) -> float:
    low, _, high = quantiles(seconds, n=4)
    return high - low
