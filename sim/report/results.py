# SPDX-License-Identifier: Apache-2.0
"""The results of an experiment as they lie in its folder."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.experiment import Experiment, Figure, Run
from sim.reading import Described
from sim.sweep import existing


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
    documents: tuple[tuple[Run, Mapping[str, Any]], ...]
    missing: tuple[Run, ...]

    def points(self, axis: str) -> list[str]:
        """Return the points of an axis of which there are results, in the file's order."""
        there = {run.point[axis] for run, _ in self.documents}
        names = next(known.points for known in self.experiment.axes if known.name == axis)
        return [point.name for point in names if point.name in there]

    def values(self, metric: str, where: Mapping[str, str]) -> dict[tuple[tuple[str, str], ...], float]:
        """Return a metric of all runs at ``where``, by their points on the other axes."""
        found = {}
        for run, document in self.documents:
            if all(run.point.get(axis) == name for axis, name in where.items()) and metric in document["metrics"]:
                rest = tuple((axis, name) for axis, name in run.point.items() if axis not in where)
                found[rest] = float(document["metrics"][metric])
        return found

    def value(self, metric: str, where: Mapping[str, str]) -> float | None:
        """Return a metric of the one run at ``where``; None if there is none."""
        return next(iter(self.values(metric, where).values()), None)

    def rows(self) -> Iterator[dict[str, str | float | int]]:
        """Return a row of a table for every run: its points, seed, version and numbers."""
        for run, document in self.documents:
            yield {
                **run.point,
                "seed": document["seed"],
                "version": document["version"],
                **document["metrics"],
            }


def load(described: Described, out: Path) -> Results:
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


def series_of(results: Results, figure: Figure) -> dict[str, dict[str, float]]:
    """Return a figure's numbers: by series (its metric's name without), then by point on the x axis."""
    found: dict[str, dict[str, float]] = {}
    names = results.points(figure.series) if figure.series else [figure.metric]
    for name in names:
        line = {}
        for x in results.points(figure.x):
            where = {**figure.where, figure.x: x} | ({figure.series: name} if figure.series else {})
            value = results.value(figure.metric, where)
            if value is not None:
                line[x] = value
        found[name] = line
    return _relative(found, figure) if figure.relative_to else found


def _relative(found: dict[str, dict[str, float]], figure: Figure) -> dict[str, dict[str, float]]:
    changed: dict[str, dict[str, float]] = {}
    for name, line in found.items():
        changed[name] = {}
        for x, value in line.items():
            base = (
                found.get(figure.relative_to or "", {}).get(x) if figure.series else line.get(figure.relative_to or "")
            )
            if base and value:
                changed[name][x] = base / value if figure.inverse else value / base
    return changed


def read_json(path: Path) -> dict[str, Any]:
    """Return a result file's content."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
