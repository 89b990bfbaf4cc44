# SPDX-License-Identifier: Apache-2.0
"""The advice of ``dlcp advise``: settings, the figures they are based on, and the result of a trial."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from dlcp.train import headroom
from dlcp.train.launcher import Report
from dlcp.tuning.rules import Advice, Figures, Settings, decide

SLOWER: Final = 0.98
"""Smallest speed-up at which advice still stands; step times vary by 2 % even on a quiet machine."""


class NothingMeasuredError(RuntimeError):
    """The ranks' reports hold no measurement; the message says why."""


def from_reports(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the advice from a measurement, in the format of :func:`judge`.

    Raises
    ------
    NothingMeasuredError
        Nothing was measured, or not with DLCP.
    """
    if headroom.evaluate(reports) is None:
        raise NothingMeasuredError(headroom.nothing_measured(reports))
    measured = next(report["measured"] for report in reports if report["measured"])
    if measured["advice"] is None:
        raise NothingMeasuredError(f"DLCP was not measured: {measured['why_not']}")
    figures = Figures.of_json(measured["advice"]["figures"])
    given = Settings(**{choice["option"]: choice["was"] for choice in measured["advice"]["choices"]})
    steps = headroom.slowest_steps(reports)
    advised_s = steps[headroom.ADVISED]
    default_s = steps[headroom.DLCP][-len(advised_s) :] if advised_s else []
    return judge(decide(figures, given), default_s, advised_s)


def from_file(file: Path) -> dict[str, Any]:
    """Return the advice from the figures in a file written by ``dlcp advise --save``.

    Raises
    ------
    ValueError
        The file is not such a document.
    """
    # Imports the options only, without PyTorch.
    from dlcp.session.options import Options

    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        figures = Figures.of_json(document.get("figures", document) if isinstance(document, dict) else document)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    return judge(decide(figures, Settings.of(Options())))


def judge(advice: Advice, default_s: Sequence[float] = (), advised_s: Sequence[float] = ()) -> dict[str, Any]:
    """Return the advice as one document.

    Parameters
    ----------
    default_s, advised_s
        Durations of alternating steps with the current and with the advised settings, in seconds; empty if these are
        the same or were not tried.

    Returns
    -------
    ``figures``, ``choices`` and their cost in steps; ``tried``, or None: among others the median ratio of neighbouring
    steps, and the ratio of times to the same accuracy, which accounts for the numbers of steps; ``settings``, the
    changes to make, empty if the trial went against the advice.
    """
    pairs = list(zip(default_s, advised_s, strict=False))
    tried = None
    if pairs:
        tried = {
            "steps": len(pairs),
            "default_step_s": median(default for default, _ in pairs),
            "advised_step_s": median(advised for _, advised in pairs),
            "ratio": median(default / advised for default, advised in pairs),
        }
        tried["accuracy_ratio"] = tried["ratio"] * advice.given_steps_factor / advice.steps_factor
    follow = tried is None or tried["accuracy_ratio"] >= SLOWER
    return {**advice.as_json(), "tried": tried, "settings": advice.changes if follow else {}}


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the advice in a few lines."""
    figures, tried = found["figures"], found["tried"]
    waiting = figures["waited_s"] / figures["step_s"]
    hosts = f"{figures['hosts']} host{'s' * (figures['hosts'] != 1)}"
    lines = [
        "",
        f"DLCP's advice for {figures['ranks']} ranks on {hosts} with {figures['gradient_bytes'] / 1e6:,.1f} MB of "
        "gradients:",
        f"  a step takes {1e3 * figures['step_s']:.1f} ms, of which {waiting:.0%} is waiting for communication; "
        f"round trips take {1e3 * figures['rtt_s']:.1f} ms",
        "",
    ]
    for choice in found["choices"]:
        change = "unchanged" if choice["value"] == choice["was"] else f"instead of {_quoted(choice['was'])}"
        lines += [f"  {choice['option']} = {_quoted(choice['value'])}  ({change})", f"      {choice['why']}"]
    lines.append("")
    if tried:
        lines.append(
            f"  In a trial of {tried['steps']} steps each, in turn, a step took {1e3 * tried['default_step_s']:.1f} ms "
            f"as before, {1e3 * tried['advised_step_s']:.1f} ms as advised: {tried['ratio']:.2f} times as fast."
        )
        if tried["accuracy_ratio"] != tried["ratio"]:
            lines.append(
                "  The number of steps to the same accuracy changes too, as measured on small models: training "
                f"reaches it {tried['accuracy_ratio']:.2f} times as fast."
            )
    if found["settings"]:
        words = ", ".join(f"{name} = {_quoted(value)}" for name, value in found["settings"].items())
        options = " ".join(f"--option {name}={_bare(value)}" for name, value in found["settings"].items())
        lines += [f"  To apply it, put in dlcp.toml: {words}", f"  or run: dlcp train {options} ..."]
    elif tried:
        lines.append("  That is slower: leave everything as it is.")
    else:
        lines.append("  Nothing needs to change.")
    return lines


def _quoted(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _bare(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
