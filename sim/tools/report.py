# SPDX-License-Identifier: Apache-2.0
"""Report experiments: a self-contained page, ``report.html``, and a CSV and an SVG file for every figure."""

import csv
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from dlcp import __version__
from dlcp.convergence import curves
from dlcp.report.drawing import HALF_PX, INK, SOFT, Plot, blank, finish, legend, look, tip
from dlcp.report.style import COLOURS, render
from dlcp.sim.experiments.experiment import Figure, PlannedExperiment
from dlcp.sim.experiments.results import (
    ClaimFinding,
    CurvePoint,
    Results,
    Spread,
    curves_of,
    load,
    series_of,
    write_summary,
)
from dlcp.sim.experiments.running import sources_digest

Series = Mapping[str, Mapping[str, Spread]]
"""Numbers of a plot: by series, then by point on the x axis."""

_OWN: Final = COLOURS["blue"][0]
"""The colour of DLCP itself, the same in all plots."""
_OTHERS: Final = [COLOURS[name][0] for name in ("grey", "orange", "ochre", "green", "purple", "pink")]
_DASHES: Final = ((9, 4), (2, 3), (12, 3, 2, 3), (5, 2), (1, 2), (14, 4))
_LABEL_LINES: Final = 4
_CHARACTER: Final = 6.9
"""Approximate width of a character in px, measured on DejaVu Sans, a wide typeface."""
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


def write_report(described: Sequence[PlannedExperiment], out: Path) -> tuple[Path, dict[str, str]]:
    """Write ``report.html``, ``summary.json``, and ``figures/*.csv`` and ``*.svg``.

    Returns
    -------
    The page's path, and why runs did not finish, by experiment and run; all numbers leave these out.

    Raises
    ------
    dlcp.sim.experiments.results.ReportError
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
    return page, {f"{each.experiment.name} {run}": why for each in every for run, why in each.unfinished.items()}


def page_of(sections: Sequence[ExperimentSection], empty: Sequence[Results] = ()) -> str:
    """Return the page.

    Parameters
    ----------
    empty
        Experiments without results.
    """
    documents = [document for section in sections for _, document in section.results.documents]
    findings = [each for section in sections for each in section.findings]
    return render(
        Path(__file__).parent / "experiments.html",
        {"number": _cell, "signed": signed, "range": _range, "words": words_of},
        sections=sections,
        empty=empty,
        version=__version__,
        sources=sources_digest(),
        seeds=sorted({document["seed"] for document in documents}),
        runs=len(documents),
        used_curves=_curves(sections),
        columns=_columns,
        sources_of=list(dict.fromkeys(each.claim.source for each in findings if each.claim.source)),
    )


def _plots(results: Results, folder: Path) -> list[Plot]:
    plots = []
    for index, figure in enumerate(results.experiment.figures, 1):
        name = f"{results.experiment.name}_{index}"
        if figure.kind == "curves":
            curves = {point: tests for point, tests in curves_of(results, figure).items() if tests}
            if not curves:
                continue
            plot = draw_curves(figure, curves, name, _describe(figure))
            _write_curves(folder / f"{name}.csv", figure, curves)
        else:
            series = series_of(results, figure)
            if not any(series.values()):
                continue
            plot = draw(figure, series, name, _describe(figure))
            _write_series(folder / f"{name}.csv", figure, series)
        (folder / f"{name}.svg").write_text(plot.standalone, encoding="utf-8")
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


def _write_curves(path: Path, figure: Figure, curves: Mapping[str, Sequence[CurvePoint]]) -> None:
    rows = [
        {figure.x: name, "seconds": seconds, figure.metric: value.mean, "least": value.least, "most": value.most}
        for name, tests in curves.items()
        for seconds, value in tests
    ]
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
        "loss_ratio": "contributions lost, %",
        "result_loss_ratio": "results lost, %",
        "steps_factor": "factor on steps",
        "accuracy_step_s": "step times factor, ms",
        "accuracy": "final accuracy",
        "accuracy_steps": "steps to the target",
        "accuracy_s": "time to the target, ms",
    }
    there = {name for _, document in results.documents for name in document["metrics"]}
    return {name: heading for name, heading in wanted.items() if name in there}


def _curves(sections: Sequence[ExperimentSection]) -> list[Any]:
    used = {section.results.experiment.convergence for section in sections}
    return [item for name, item in curves().items() if name in used or item.measured]


def _cell(value: float | None, name: str = "") -> str:
    if value is None:
        return "-"
    scale = 1e3 if name.endswith("_s") else 100.0 if name.endswith("_ratio") else 1.0
    return number(value * scale)


def signed(value: float | None, unit: str) -> str:
    """Return the value of a claim as text."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{number(value * 1e3)} ms"
    return f"{value:+.1f} %" if unit == "%" else f"{number(value)} {unit}"


def _range(value: Spread | None, unit: str) -> str:
    """Return the range over seeds as text; empty for a single seed."""
    if value is None or value.seeds < 2:
        return ""
    return f"{signed(value.least, unit)} to {signed(value.most, unit)}"


def words_of(name: str) -> str:
    """Return a claim's name as words, with proper names in their own spelling."""
    words = [_NAMES.get(word, word) for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:] if words[0] not in _NAMES.values() else words[0], *words[1:]])


# --------------------------------------------------------------------------------------------------------------- plots


def draw(figure: Figure, series: Series, name: str, caption: str) -> Plot:
    """Draw a figure's numbers, as `dlcp.sim.experiments.results.series_of` gives them.

    Raises
    ------
    ValueError
        There are no numbers to draw.
    """
    if figure.metric.endswith("_s") and not figure.metric.endswith("_per_s") and figure.relative_to is None:
        series = {name: {x: value.times(1e3) for x, value in line.items()} for name, line in series.items()}
    xs = list(dict.fromkeys(x for line in series.values() for x in line))
    if not xs:
        raise ValueError(f"{figure.title}: there is nothing to draw")
    labels = [_wrapped(x, len(xs)) for x in xs]
    columns = max(1, int(HALF_PX / (50 + _CHARACTER * max(map(len, series))))) if len(series) > 1 else 0
    height = 244 + 16 * max(label.count("\n") + 1 for label in labels) + 20 * math.ceil(len(series) / (columns or 99))
    with look():
        canvas, (axes,) = blank(HALF_PX, height)
        _scale(axes, figure, series)
        colours = _colours(list(series))
        if columns:
            legend(canvas, {name: {"color": colour} for name, colour in colours.items()}, columns)
        if figure.kind == "lines" and len(xs) > 1:
            _lines(axes, series, xs, colours)
        else:
            _bars(axes, series, xs, colours)
        axes.set_xlim(-0.5, len(xs) - 0.5)
        axes.set_xticks(range(len(xs)), labels)
        axes.set_xlabel(figure.x.replace("_", " "))
        return finish(canvas, name, figure.title, caption)


def draw_curves(figure: Figure, curves: Mapping[str, Sequence[CurvePoint]], name: str, caption: str) -> Plot:
    """Draw the curves of a figure, as `dlcp.sim.experiments.results.curves_of` gives them.

    Means over seeds are lines, and ranges over seeds bands.
    """
    columns = max(1, int(HALF_PX / (50 + _CHARACTER * max(map(len, curves)))))
    with look():
        canvas, (axes,) = blank(HALF_PX, 276 + 20 * math.ceil(len(curves) / columns))
        colours = _colours(list(curves))
        legend(canvas, {series: {"color": colour} for series, colour in colours.items()}, columns)
        for index, (series, tests) in enumerate(curves.items()):
            dashes = "-" if colours[series] == _OWN else (0, _DASHES[index % len(_DASHES)])
            times, values = [seconds for seconds, _ in tests], [value for _, value in tests]
            least, most = [value.least for value in values], [value.most for value in values]
            axes.fill_between(times, least, most, color=colours[series], alpha=0.15, linewidth=0)
            drawn = axes.plot(times, [value.mean for value in values], color=colours[series], linestyle=dashes)
            tip(drawn[0], f"{series}: {number(values[-1].mean)} after {number(times[-1])} s")
        axes.set_xlim(0, max(tests[-1][0] for tests in curves.values()))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.set_xlabel("seconds of training")
        return finish(canvas, name, figure.title, caption)


def number(value: float) -> str:
    """Return a number with three significant digits, without needless zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.2e}"


def _scale(axes: Axes, figure: Figure, series: Series) -> None:
    ends = [end for line in series.values() for value in line.values() for end in (value.least, value.most)]
    low, high = min(ends), max(ends)
    if figure.logarithmic and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, high * 1.3)
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        axes.yaxis.set_major_locator(FixedLocator([digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, high * 1.08 if high > 0 else 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))


def _bars(axes: Axes, series: Series, xs: Sequence[str], colours: Mapping[str, str]) -> None:
    width = min(0.11 * len(xs), 0.82 / len(series))
    floor = axes.get_ylim()[0]
    for index, (name, line) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        for position, x in enumerate(xs):
            if x not in line:
                continue
            value = line[x]
            colour = colours[name] if len(series) > 1 else _OWN if _is_own(x) else _OTHERS[0]
            bars: BarContainer = axes.bar(position + offset, value.mean - floor, 0.96 * width, floor, color=colour)
            tip(bars[0], _tip(name, x, value))
            _mark_range(axes, position + offset, value)
            if width * 352 / len(xs) >= 36:
                axes.annotate(
                    number(value.mean),
                    (position + offset, value.most),
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                    color=SOFT,
                )


def _lines(axes: Axes, series: Series, xs: Sequence[str], colours: Mapping[str, str]) -> None:
    for index, (name, line) in enumerate(series.items()):
        colour = colours[name]
        dashes = "-" if colour == _OWN else (0, _DASHES[index % len(_DASHES)])
        there = [position for position, x in enumerate(xs) if x in line]
        drawn = axes.plot(there, [line[xs[position]].mean for position in there], color=colour, linestyle=dashes)
        tip(drawn[0], name)
        for position in there:
            value = line[xs[position]]
            _mark_range(axes, position, value)
            tip(axes.plot(position, value.mean, "o", color=colour, markersize=8)[0], _tip(name, xs[position], value))


def _mark_range(axes: Axes, x: float, value: Spread) -> None:
    """Draw the range over seeds."""
    if value.most > value.least:
        axes.plot([x, x], [value.least, value.most], color=INK, linewidth=1.2, marker="_", markersize=8)


def _tip(name: str, x: str, value: Spread) -> str:
    spread = f" ({number(value.least)} to {number(value.most)}, {value.seeds} seeds)" if value.seeds > 1 else ""
    return f"{name}, {x}: {number(value.mean)}{spread}"


def _is_own(name: str) -> bool:
    return name.lower().startswith("dlcp")


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colours of series: DLCP's own for its first series (or the last of several), others in turn."""
    own = next((name for name in names if _is_own(name)), names[-1] if len(names) > 1 else None)
    others = [name for name in names if name != own]
    return {name: _OWN if name == own else _OTHERS[others.index(name) % len(_OTHERS)] for name in names}


def _wrapped(name: str, count: int) -> str:
    """Wrap a point's name into lines that fit below it; cut words that are too long."""
    most = max(5, int(375 / count / _CHARACTER))
    words = [word if len(word) <= most else f"{word[: most - 1]}…" for word in name.split()]
    return "\n".join(textwrap.wrap(" ".join(words), most)[:_LABEL_LINES])
