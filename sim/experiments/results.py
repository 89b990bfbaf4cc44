# SPDX-License-Identifier: Apache-2.0
"""Load results of experiments, and compare them with published figures."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dlcp import __version__
from dlcp.sim.experiments.experiment import Claim, Experiment, ExperimentRun, Figure, PlannedExperiment
from dlcp.sim.experiments.running import sources_digest
from dlcp.sim.experiments.sweep import saved
from dlcp.sim.limits import SimulatorError

Combination: TypeAlias = tuple[tuple[str, str], ...]
"""Points by axis."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over several seeds: mean, least, most, and the number of seeds."""

    mean: float
    least: float
    most: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(math.fsum(values) / len(values), min(values), max(values), len(values))

    def times(self, factor: float) -> "Spread":
        """Return the spread multiplied by ``factor``, to change its unit."""
        return Spread(self.mean * factor, self.least * factor, self.most * factor, self.seeds)


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment with its results.

    Parameters
    ----------
    documents
        Runs and the contents of their result files.
    missing
        Runs without complete results of this version and setting.
    unfinished
        Jobs and messages that did not end, by the name of the run, for incomplete results.
    """

    experiment: Experiment
    documents: tuple[tuple[ExperimentRun, Mapping[str, Any]], ...]
    missing: tuple[ExperimentRun, ...]
    unfinished: Mapping[str, str] = field(default_factory=dict)

    def points(self, axis: str) -> list[str]:
        """Return the points of an axis that have results, in the order of the experiment's file."""
        there = {run.point[axis] for run, _ in self.documents}
        names = next(known.points for known in self.experiment.axes if known.name == axis)
        return [point.name for point in names if point.name in there]

    def values(self, metric: str, where: Mapping[str, str]) -> dict[Combination, dict[int, float]]:
        """Return a metric of all runs at ``where``, by their points on the other axes, then by seed."""
        found: dict[Combination, dict[int, float]] = {}
        for run, document in self.documents:
            if all(run.point.get(axis) == name for axis, name in where.items()) and metric in document["metrics"]:
                rest = tuple((axis, name) for axis, name in run.point.items() if axis not in where)
                found.setdefault(rest, {})[run.setting.seed] = float(document["metrics"][metric])
        return found

    def value(self, metric: str, where: Mapping[str, str]) -> dict[int, float]:
        """Return a metric of the one combination at ``where``, by seed; empty without results."""
        return next(iter(self.values(metric, where).values()), {})

    @property
    def approximate(self) -> int:
        """Return the number of runs that simulated flows."""
        return sum(map(is_approximate, self.documents))

    def rows(self) -> Iterator[dict[str, str | float | int]]:
        """Return a table row for every run: its points, seed, version and metrics."""
        for run, document in self.documents:
            yield {**run.point, "seed": document["seed"], "version": document["version"], **document["metrics"]}


def load(described: PlannedExperiment, out: Path) -> Results:
    """Load an experiment's results."""
    folder = out / described.experiment.name
    documents, missing, unfinished = [], [], {}
    for item in described.runs:
        document = saved(folder, item)
        if document is not None and document.get("complete"):
            documents.append((item, document))
            continue
        missing.append(item)
        if document is not None:
            unfinished[item.name] = str(document.get("unfinished"))
    return Results(described.experiment, tuple(documents), tuple(missing), unfinished)


def series_of(results: Results, figure: Figure) -> dict[str, dict[str, Spread]]:
    """Return a figure's numbers: by series (by the metric if it has none), then by point on the x axis."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    names = results.points(figure.series) if figure.series else [figure.metric]
    for name in names:
        found[name] = {}
        for x in results.points(figure.x):
            where = {**figure.where, figure.x: x} | ({figure.series: name} if figure.series else {})
            found[name][x] = results.value(figure.metric, where)
    if figure.relative_to:
        found = _relative(found, figure)
    return {
        name: {x: Spread.of(values) for x, by_seed in line.items() if (values := list(by_seed.values()))}
        for name, line in found.items()
    }


CurvePoint: TypeAlias = tuple[float, Spread]
"""A time in seconds, and the spread of a test's result."""


def curves_of(results: Results, figure: Figure) -> dict[str, list[CurvePoint]]:
    """Return a figure's curves by point on its axis; each test is at its mean time over seeds.

    With several jobs that learn, these are the first one's.
    """
    found: dict[str, list[CurvePoint]] = {}
    for name in results.points(figure.x):
        where = {**figure.where, figure.x: name}
        runs = [
            next(job["curve"] for job in document["jobs"] if "curve" in job)
            for run, document in results.documents
            if all(run.point.get(axis) == point for axis, point in where.items())
            and any("curve" in job for job in document["jobs"])
        ]
        found[name] = [
            (
                math.fsum(test["seconds"] for test in tests) / len(tests),
                Spread.of([test[figure.metric] for test in tests]),
            )
            for tests in zip(*runs, strict=True)
        ]
    return found


def _relative(
    found: Mapping[str, Mapping[str, Mapping[int, float]]], figure: Figure
) -> dict[str, dict[str, dict[int, float]]]:
    """Divide each number by that of ``relative_to``, seed by seed."""
    base = figure.relative_to or ""
    changed: dict[str, dict[str, dict[int, float]]] = {}
    for name, line in found.items():
        changed[name] = {}
        for x, values in line.items():
            bases = found.get(base, {}).get(x, {}) if figure.series else line.get(base, {})
            changed[name][x] = _by_seed(bases, values) if figure.inverse else _by_seed(values, bases)
    return changed


def _by_seed(values: Mapping[int, float], bases: Mapping[int, float]) -> dict[int, float]:
    """Return the ratio of two metrics by seed: runs with the same seed have the same hosts and the same jitter."""
    return {seed: value / bases[seed] for seed, value in values.items() if value and bases.get(seed)}


class ReportError(SimulatorError):
    """There are no results to report or to compare."""


@dataclass(frozen=True, slots=True)
class ClaimFinding:
    """A claim with its simulated value; None if its runs are missing.

    Parameters
    ----------
    best
        The combination with the best value, if the claim asks for the best.
    """

    claim: Claim
    experiment: str
    measured: Spread | None
    best: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; ``measured`` is the mean over seeds, ``spread`` the least and the most."""
        claim, measured = self.claim, self.measured
        found: dict[str, Any] = {
            "name": f"{self.experiment}.{claim.name}",
            "paper": claim.paper,
            "measured": None if measured is None else _rounded(measured.mean, claim.unit),
            "unit": claim.unit,
            "source": claim.source or "nothing is published",
        }
        if measured is not None:
            ends = [_rounded(measured.least, claim.unit), _rounded(measured.most, claim.unit)]
            found |= {"spread": ends, "seeds": measured.seeds}
            if claim.paper is not None:
                found["deviation"] = _rounded(measured.mean - claim.paper, claim.unit)
        words = {"at": self.best, "against": claim.against, "reason": claim.reason}
        return found | {name: text for name, text in words.items() if text}


def findings(results: Results) -> list[ClaimFinding]:
    """Evaluate an experiment's claims. Only packets count: flows are too inexact to compare with published figures."""
    exact = dataclasses.replace(
        results, documents=tuple(item for item in results.documents if not is_approximate(item))
    )
    return [_finding(exact, claim) for claim in results.experiment.claims]


def is_approximate(item: tuple[ExperimentRun, Mapping[str, Any]]) -> bool:
    """Return whether a run simulated flows."""
    return item[0].setting.engine == "flows"


def _finding(results: Results, claim: Claim) -> ClaimFinding:
    ours = results.values(claim.metric, claim.ours)
    if claim.form == "value":
        return _chosen(results, claim, ours)
    found: dict[Combination, dict[int, float]] = {}
    for rest, values in ours.items():
        # Both share the other axes; an axis that only ``theirs`` names is where they differ.
        shared = {axis: name for axis, name in (*rest, *claim.ours.items()) if axis not in claim.theirs}
        theirs = results.value(claim.metric, shared | claim.theirs)
        ratios = _by_seed(values, theirs) if claim.form == "change_percent" else _by_seed(theirs, values)
        if ratios:
            found[rest] = {seed: 100 * (ratio - 1) for seed, ratio in ratios.items()}
    return _chosen(results, claim, found)


def _rounded(value: float, unit: str) -> float:
    """Round percentages to three decimals, and other units, such as seconds, to four significant digits."""
    return round(value, 3) if unit == "%" else float(f"{value:.4g}")


def _chosen(results: Results, claim: Claim, found: Mapping[Combination, Mapping[int, float]]) -> ClaimFinding:
    """Return the combination with the best mean over seeds, or the spread of each seed's mean over combinations."""
    name = results.experiment.name
    if not found:
        return ClaimFinding(claim, name, None)
    if claim.over == "mean":
        seeds = set.intersection(*(set(values) for values in found.values()))
        if not seeds:
            return ClaimFinding(claim, name, None)
        means = [math.fsum(values[seed] for values in found.values()) / len(found) for seed in sorted(seeds)]
        return ClaimFinding(claim, name, Spread.of(means))
    spreads = {rest: Spread.of(list(values.values())) for rest, values in found.items()}
    pick = min if claim.form == "change_percent" else max
    rest = pick(spreads, key=lambda key: spreads[key].mean)
    return ClaimFinding(claim, name, spreads[rest], ", ".join(f"{axis} {point}" for axis, point in rest))


def write_summary(every: Sequence[Results], path: Path) -> list[ClaimFinding]:
    """Write ``summary.json`` and return the findings.

    Raises
    ------
    ReportError
        No experiment has any results.
    """
    unfinished = {results.experiment.name: results.unfinished for results in every if results.unfinished}
    if not any(results.documents for results in every):
        if unfinished:
            name, (sentence, *_) = next((name, list(runs.values())) for name, runs in unfinished.items())
            raise ReportError(f"{name}: no run is complete: {sentence}")
        raise ReportError("there are no results of this version with these settings; run `dlcp sim sweep` first")
    found = [finding for results in every for finding in findings(results)]
    document = {
        "version": __version__,
        "sources": sources_digest(),
        "seeds": sorted({int(item["seed"]) for results in every for _, item in results.documents}),
        "figures": [finding.as_json() for finding in found],
        "missing_runs": {results.experiment.name: len(results.missing) for results in every if results.missing},
        **({"unfinished_runs": unfinished} if unfinished else {}),
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found
