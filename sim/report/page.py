# SPDX-License-Identifier: Apache-2.0
"""Write ``report.html``, one self-contained page, and a CSV and an SVG file for every figure beside it."""

import csv
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlcp import __version__
from dlcp.convergence import curves
from dlcp.report.drawing import Plot
from dlcp.report.style import render
from dlcp.sim.experiment import Figure, PlannedExperiment
from dlcp.sim.report.plots import draw, number
from dlcp.sim.report.results import ClaimFinding, Results, Spread, load, series_of, write_summary
from dlcp.sim.running import sources_digest

_NAMES: Final = {
    "dlcp": "DLCP",
    "tcp": "TCP",
    "dctcp": "DCTCP",
    "pfabric": "pFabric",
    "p3": "P3",
    "bytescheduler": "ByteScheduler",
    "resnet50": "ResNet-50",
    "adamw": "AdamW",
    "16x": "16 times less",
}


@dataclass(frozen=True, slots=True)
class ExperimentSection:
    """An experiment on the page."""

    results: Results
    plots: tuple[Plot, ...]
    findings: tuple[ClaimFinding, ...]


def write_report(described: Sequence[PlannedExperiment], out: Path) -> Path:
    """Write ``report.html``, ``summary.json``, and ``figures/*.csv`` and ``*.svg``.

    Returns
    -------
    The page's path.

    Raises
    ------
    dlcp.sim.report.results.ReportError
        No experiment has any results.
    """
    every = [load(item, out) for item in described]
    # Experiments with the most published figures come first.
    every.sort(key=lambda results: -sum(claim.paper is not None for claim in results.experiment.claims))
    out.mkdir(parents=True, exist_ok=True)
    found = write_summary(every, out / "summary.json")
    (out / "figures").mkdir(exist_ok=True)
    sections = []
    for results in every:
        if results.documents:
            _write_table(out / "figures" / f"{results.experiment.name}.csv", list(results.rows()))
            own = tuple(item for item in found if item.experiment == results.experiment.name)
            sections.append(ExperimentSection(results, tuple(_plots(results, out / "figures")), own))
    page = out / "report.html"
    page.write_text(page_of(sections, [item for item in every if not item.documents]), encoding="utf-8")
    return page


def page_of(sections: Sequence[ExperimentSection], empty: Sequence[Results] = ()) -> str:
    """Return the page.

    Parameters
    ----------
    empty
        Experiments without results.
    """
    documents = [document for section in sections for _, document in section.results.documents]
    return render(
        Path(__file__).parent / "experiments.html",
        {"number": _cell, "signed": _signed, "measured": _measured, "range": _range, "words": _words},
        sections=sections,
        empty=empty,
        version=__version__,
        sources=sources_digest(),
        seeds=sorted({document["seed"] for document in documents}),
        runs=len(documents),
        used_curves=_curves(sections),
        columns=_columns,
        reasons=_reasons,
        sources_of=_sources(sections),
    )


def _plots(results: Results, folder: Path) -> list[Plot]:
    plots = []
    for index, figure in enumerate(results.experiment.figures, 1):
        series = series_of(results, figure)
        if not any(series.values()):
            continue
        name = f"{results.experiment.name}_{index}"
        plot = draw(figure, series, name, _describe(figure))
        (folder / f"{name}.svg").write_text(plot.standalone, encoding="utf-8")
        _write_series(folder / f"{name}.csv", figure, series)
        plots.append(plot)
    return plots


def _describe(figure: Figure) -> str:
    words = f"{figure.metric} by {figure.x}" + (f" and {figure.series}" if figure.series else "")
    return words + "".join(f", {axis} {name}" for axis, name in figure.where.items())


def _write_series(path: Path, figure: Figure, series: Mapping[str, Mapping[str, Spread]]) -> None:
    rows: list[dict[str, Any]] = []
    for name, line in series.items():
        for x, value in line.items():
            spread = {"value": value.mean, "least": value.least, "most": value.most, "seeds": value.seeds}
            rows.append({figure.series or "metric": name, figure.x: x} | spread)
    _write_table(path, rows)


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _columns(results: Results) -> dict[str, str]:
    """Return the metrics in the table of an experiment, with their headings."""
    wanted = {
        "step_s": "step, ms",
        "compute_s": "computing, ms",
        "fct_mean_s": "completion mean, ms",
        "fct_p99_s": "99 %, ms",
        "fct_p999_s": "99.9 %, ms",
        "small_p99_s": "others' small 99 %, ms",
        "loss_ratio": "lost, %",
        "deferred_contributions_ratio": "contributions deferred, %",
        "deferred_averages_ratio": "averages deferred, %",
        "steps_factor": "factor on steps",
        "accuracy_step_s": "step times factor, ms",
    }
    there = {name for _, document in results.documents for name in document["metrics"]}
    return {name: heading for name, heading in wanted.items() if name in there}


def _sources(sections: Sequence[ExperimentSection]) -> list[str]:
    """Return the sources of the published figures, each once."""
    every = [finding.claim.source for section in sections for finding in section.findings]
    return list(dict.fromkeys(source for source in every if source))


def _curves(sections: Sequence[ExperimentSection]) -> list[Any]:
    used = {section.results.experiment.convergence for section in sections}
    return [item for name, item in curves().items() if name in used or item.measured]


def _cell(value: float | None, name: str = "") -> str:
    if value is None:
        return "-"
    scale = 1e3 if name.endswith("_s") else 100.0 if name.endswith("_ratio") else 1.0
    return html.escape(number(value * scale))


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{number(value * 1e3)} ms"
    return f"{value:+.1f} %" if unit == "%" else f"{number(value)} {unit}"


def _measured(value: Spread | None, unit: str) -> str:
    return _signed(None if value is None else value.mean, unit)


def _range(value: Spread | None, unit: str) -> str:
    """Return the range over seeds as text; empty for a single seed."""
    if value is None or value.seeds < 2:
        return ""
    return f"{_signed(value.least, unit)} to {_signed(value.most, unit)}"


def _words(name: str) -> str:
    """Return a claim's name as words, with proper names in their own spelling."""
    words = [_NAMES.get(word, word) for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:] if words[0] not in _NAMES.values() else words[0], *words[1:]])


def _reasons(findings: Sequence[ClaimFinding]) -> list[str]:
    """Return the reasons why figures differ, each once."""
    return list(dict.fromkeys(finding.claim.reason for finding in findings if finding.claim.reason))
