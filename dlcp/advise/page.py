# SPDX-License-Identifier: Apache-2.0
"""What ``dlcp advise`` says: what it would set, what that rests on, and what came of trying it."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from dlcp.tuning.rules import Advice

SLOWER: Final = 0.98
"""Settings that make steps this much longer are not advised. Chosen by us: steps vary by as much on a quiet machine."""


def judge(advice: Advice, default_s: Sequence[float] = (), advised_s: Sequence[float] = ()) -> dict[str, Any]:
    """Return the advice as one document.

    Parameters
    ----------
    default_s, advised_s
        How long steps took that were done in turn, with the settings in force and with the advised ones; none if these
        are the same, or were not tried.

    Returns
    -------
    ``figures`` and ``choices``; ``tried``, with the median of the ratios of steps next to each other, or None;
    ``settings``, what is to be set. That is nothing if the trial went against it.
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
    follow = tried is None or tried["ratio"] >= SLOWER
    return {**advice.as_json(), "tried": tried, "settings": advice.changes if follow else {}}


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """Say it in a few lines."""
    figures, tried = found["figures"], found["tried"]
    waiting = figures["waited_s"] / figures["step_s"]
    lines = [
        "",
        f"DLCP advises, for {figures['ranks']} ranks on {figures['hosts']} {_plural('host', figures['hosts'])} with "
        f"{figures['gradient_bytes'] / 1e6:,.1f} MB of gradients:",
        f"  a step takes {1e3 * figures['step_s']:.1f} ms, of which {waiting:.0%} is waiting for communication; "
        f"round trips {1e3 * figures['rtt_s']:.1f} ms",
        "",
    ]
    for choice in found["choices"]:
        same = "stays" if choice["value"] == choice["was"] else f"instead of {_word(choice['was'])}"
        lines += [f"  {choice['option']} = {_word(choice['value'])}  ({same})", f"      {choice['why']}"]
    lines.append("")
    if tried:
        lines.append(
            f"  Tried for {tried['steps']} steps each, in turn: {1e3 * tried['default_step_s']:.1f} ms as it was, "
            f"{1e3 * tried['advised_step_s']:.1f} ms as advised, {tried['ratio']:.2f} times as fast."
        )
    if found["settings"]:
        words = ", ".join(f"{name} = {_word(value)}" for name, value in found["settings"].items())
        options = " ".join(f"--option {name}={_bare(value)}" for name, value in found["settings"].items())
        lines += [f"  To set it: in dlcp.toml {words}", f"             or dlcp train {options} ..."]
    elif tried:
        lines.append("  That is slower, so leave everything as it is.")
    else:
        lines.append("  Nothing has to be changed.")
    return lines


def _word(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _bare(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
