# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: every number that differs, by how much, and which run is better."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dlcp.inputs.document import refusal
from dlcp.report.style import render
from dlcp.sim.experiments.experiment import Figure
from dlcp.sim.experiments.results import ReportError, Spread

_HIGHER_IS_BETTER: Final = ("samples_per_s", "efficiency", "speedup", "accuracy")
_NEITHER_IS_BETTER: Final = ("simulated_s", "compute_s", "bits_per_value", "measured_step_s")
"""Inputs of a run, and means to an end."""


class ComparedJob(msgspec.Struct, frozen=True):
    """The steps of a job in a result file."""

    name: str
    step_s: list[float]


class ComparedTimes(msgspec.Struct, frozen=True):
    """Completion times in a result file: pairs of a share and the time that this share does not exceed."""

    quantiles_s: list[tuple[float, float]]


class ComparedRun(msgspec.Struct, frozen=True):
    """The part of a result file that is compared; ``unfinished`` says what did not end in an incomplete run."""

    metrics: dict[str, float]
    unfinished: str = ""
    jobs: list[ComparedJob] = []
    times: dict[str, ComparedTimes] = {}

    @property
    def numbers(self) -> dict[str, float]:
        """Return the metrics, and the duration of each step."""
        steps = {f"{job.name} step {number}": seconds for job in self.jobs for number, seconds in enumerate(job.step_s)}
        return {**self.metrics, **steps}


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A number of two runs; None where a run has none."""

    name: str
    one: float | None
    other: float | None

    @property
    def ratio(self) -> float | None:
        """Return the second number over the first."""
        return self.other / self.one if self.one and self.other is not None else None

    @property
    def better(self) -> str:
        """Return the run with the better number, ``A`` or ``B``; empty if that cannot be said."""
        if self.one is None or self.other is None or self.one == self.other or self.name in _NEITHER_IS_BETTER:
            return ""
        return "A" if (self.one > self.other) == (self.name in _HIGHER_IS_BETTER) else "B"

    def exceeds(self, above: float) -> bool:
        """Return whether the numbers differ by more than a share of the first."""
        if self.one is None or self.other is None:
            return True
        return abs(self.other - self.one) > above * abs(self.one)


def read_result(path: Path) -> ComparedRun:
    """Read a result file.

    Raises
    ------
    ReportError
        It is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ComparedRun)
    except (OSError, msgspec.DecodeError) as error:
        reason = refusal(error, {}) if isinstance(error, msgspec.ValidationError) else error
        raise ReportError(f"{path} is not a result file: {reason}") from None


def common_results(old: Path, new: Path) -> list[tuple[str, Path, Path]]:
    """Return the names of the result files that are in both folders, with their paths.

    Raises
    ------
    ReportError
        There are none.
    """
    names = {path.relative_to(old) for path in old.rglob("*.json") if path.name != "summary.json"}
    both = sorted(name for name in names if (new / name).is_file())
    if not both:
        raise ReportError(
            f"{old} and {new} have no result files in common; compare two folders of a sweep, two result files, or "
            "two experiments"
        )
    return [(str(name), old / name, new / name) for name in both]


def differences(one: ComparedRun, other: ComparedRun, above: float) -> list[MetricDifference]:
    """Return the numbers that differ by more than a share."""
    mine, theirs = one.numbers, other.numbers
    found = (MetricDifference(name, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs]))
    return [each for each in found if each.exceeds(above)]


def table_lines(found: Sequence[MetricDifference]) -> Iterator[str]:
    """Yield the lines of a table of differences."""
    if found:
        width = max(18, *(len(each.name) for each in found))
        yield f"  {'':{width}} {'A':>12} {'B':>12} {'B / A':>8} {'change':>10}  better"
        for each in found:
            ratio, change = ("", "") if each.ratio is None else (f"{each.ratio:.3f}", f"{each.ratio - 1:+.2%}")
            cells = f"{_cell(each.one):>12} {_cell(each.other):>12} {ratio:>8} {change:>10}  {each.better}"
            yield f"  {each.name:{width}} {cells}".rstrip()


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


# ----------------------------------------------------------------------------------------------------------------- page


def comparison_page(names: tuple[str, str], one: ComparedRun, other: ComparedRun, above: float) -> str:
    """Return a page with the table, the steps of the first job, and the distribution of completion times."""
    from dlcp.sim.tools.report import number  # loads Matplotlib, which takes a second

    return render(
        Path(__file__).parent / "comparison.html",
        {"number": lambda value: "-" if value is None else number(value)},
        names=names,
        above=above,
        differences=differences(one, other, above),
        unfinished={name: run.unfinished for name, run in (("A", one), ("B", other)) if run.unfinished},
        plots=[*_plots({"A": one, "B": other})],
    )


def _plots(runs: Mapping[str, ComparedRun]) -> Iterator[Any]:
    from dlcp.sim.tools.report import draw  # loads Matplotlib, which takes a second

    series: dict[str, dict[str, dict[str, Spread]]] = {"step": {}, "quantile": {}}
    for name, run in runs.items():
        steps = run.jobs[0].step_s if run.jobs else []
        series["step"][name] = {str(at): Spread.of([seconds]) for at, seconds in enumerate(steps)}
        quantiles = run.times["fct"].quantiles_s if "fct" in run.times else []
        series["quantile"][name] = {f"{100 * share:g} %": Spread.of([s]) for share, s in quantiles if share >= 0.5}
    titles = {"step": "Step time, ms", "quantile": "Completion time of messages, ms"}
    for x, lines in series.items():
        if any(lines.values()):
            figure = Figure(title=titles[x], metric=f"{x}_s", x=x, series="run", kind="lines")
            yield draw(figure, lines, f"{x}s", f"{titles[x]}, by {x} and run")
