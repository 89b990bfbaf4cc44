# SPDX-License-Identifier: Apache-2.0
"""How the numbers of two results differ: of two versions, two seeds, or two settings."""

from pathlib import Path
from typing import Any

from dlcp.sim.report.results import read_json
from dlcp.sim.report.summary import ReportError


def compare(old: Path, new: Path, above: float) -> int:
    """Print every metric that differs by more than ``above`` (a share); of folders, file by file.

    Returns
    -------
    0 if nothing differs by more, else 1.

    Raises
    ------
    ReportError
        Nothing in the two has the same name, or a file is no result.
    """
    pairs = _pairs(old, new)
    differing = 0
    for name, one, other in pairs:
        lines = _lines(_metrics(one), _metrics(other), above)
        differing += len(lines)
        if lines:
            print(name)
            print("\n".join(lines))
    print(f"{len(pairs)} results compared, {differing} numbers differ by more than {above:.3%}")
    return 1 if differing else 0


def _pairs(old: Path, new: Path) -> list[tuple[str, Path, Path]]:
    if old.is_file() and new.is_file():
        return [(f"{old} -> {new}", old, new)]
    names = {path.relative_to(old) for path in old.rglob("*.json") if path.name != "summary.json"}
    both = sorted(name for name in names if (new / name).is_file())
    if not both:
        raise ReportError(f"{old} and {new} have no result files of the same name")
    return [(str(name), old / name, new / name) for name in both]


def _metrics(path: Path) -> dict[str, float]:
    try:
        found: dict[str, float] = read_json(path)["metrics"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} is no result of a run: {error!r}") from error
    return found


def _lines(one: dict[str, Any], other: dict[str, Any], above: float) -> list[str]:
    lines = []
    for name in dict.fromkeys([*one, *other]):
        before, after = one.get(name), other.get(name)
        if before is None or after is None:
            lines.append(f"  {name:18} {before} -> {after}")
        elif before != after:
            change = (after - before) / abs(before) if before else float("inf")
            if abs(change) > above:
                lines.append(f"  {name:18} {before:.6g} -> {after:.6g}  ({change:+.2%})")
    return lines
