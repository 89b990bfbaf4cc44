# SPDX-License-Identifier: Apache-2.0
"""The results of an experiment as they lie in its folder."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dlcp.sim.experiment import Experiment, ExperimentRun, Figure, PlannedExperiment
from dlcp.sim.sweep import existing

Combination: TypeAlias = tuple[tuple[str, str], ...]
"""Points by axis."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number with what other seeds give: their mean, the least, the most, and how many there are."""

    mean: float
    least: float
    most: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(math.fsum(values) / len(values), min(values), max(values), len(values))

    def times(self, factor: float) -> "Spread":
        """Return it in another unit."""
        return Spread(self.mean * factor, self.least * factor, self.most * factor, self.seeds)


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment with what was run of it.

    Parameters
    ----------
    documents
        Result files with their runs.
    missing
        Runs that have no complete results of this version and setting.
    """

    experiment: Experiment
    documents: tuple[tuple[ExperimentRun, Mapping[str, Any]], ...]
    missing: tuple[ExperimentRun, ...]

    def points(self, axis: str) -> list[str]:
        """Return the points of an axis of which there are results, in the file's order."""
        there = {run.point[axis] for run, _ in self.documents}
        names = next(known.points for known in self.experiment.axes if known.name == axis)
        return [point.name for point in names if point.name in there]

    def values(self, metric: str, where: Mapping[str, str]) -> dict[Combination, dict[int, float]]:
        """Return a metric of all runs at ``where``: by their points on the other axes, then by seed."""
        found: dict[Combination, dict[int, float]] = {}
        for run, document in self.documents:
            if all(run.point.get(axis) == name for axis, name in where.items()) and metric in document["metrics"]:
                rest = tuple((axis, name) for axis, name in run.point.items() if axis not in where)
                found.setdefault(rest, {})[run.setting.seed] = float(document["metrics"][metric])
        return found

    def value(self, metric: str, where: Mapping[str, str]) -> dict[int, float]:
        """Return a metric of the one combination at ``where``, by seed; nothing if there are no results."""
        return next(iter(self.values(metric, where).values()), {})

    def rows(self) -> Iterator[dict[str, str | float | int]]:
        """Return a row of a table for every run: its points, seed, version and numbers."""
        for run, document in self.documents:
            yield {
                **run.point,
                "seed": document["seed"],
                "version": document["version"],
                **document["metrics"],
            }


def load(described: PlannedExperiment, out: Path) -> Results:
    """Read what was run of an experiment."""
    folder = out / described.experiment.name
    documents, missing = [], []
    for item in described.runs:
        document = existing(folder, item)
        if document is None:
            missing.append(item)
        else:
            documents.append((item, document))
    return Results(described.experiment, tuple(documents), tuple(missing))


def series_of(results: Results, figure: Figure) -> dict[str, dict[str, Spread]]:
    """Return a figure's numbers: by series (its metric's name without), then by point on the x axis."""
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


def _relative(
    found: Mapping[str, Mapping[str, Mapping[int, float]]], figure: Figure
) -> dict[str, dict[str, dict[int, float]]]:
    """Divide each number by that of the point that it stands against, seed by seed."""
    changed: dict[str, dict[str, dict[int, float]]] = {}
    base_name = figure.relative_to or ""
    for name, line in found.items():
        changed[name] = {}
        for x, by_seed in line.items():
            bases = found.get(base_name, {}).get(x, {}) if figure.series else line.get(base_name, {})
            pairs = {seed: (value, bases[seed]) for seed, value in by_seed.items() if value and bases.get(seed)}
            changed[name][x] = {
                seed: base / value if figure.inverse else value / base for seed, (value, base) in pairs.items()
            }
    return changed


def read_json(path: Path) -> dict[str, Any]:
    """Return a result file's content."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
