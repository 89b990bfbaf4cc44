# SPDX-License-Identifier: Apache-2.0
"""Draw the plots of README.md and docs/measurements.md, and write parts of pages, from measurements.

``python -m tests.bench.plots [FILE...]`` does all of it. ``results.svg`` shows the table in README.md. The first table
of docs/alternatives.md comes from ``alternatives.jsonl``; ``sweep.svg`` and the text about it from ``sweep.json``.
Given files are documents of ``python -m tests.bench loss --sweep``, which replace ``sweep.json``; if a cell is in
several files, the last one counts.
"""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from dlcp.report.drawing import INK, SOFT, WIDE_PX, blank, finish, legend, look
from dlcp.report.style import COLOURS
from tests.bench.alternatives import SETTINGS, CellFile, compare
from tests.bench.alternatives import table as alternatives_table
from tests.bench.sweep import ratios, size_words, time_words

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KEPT = DOCS / "sweep.json"
README = ROOT / "README.md"
MEASUREMENTS = DOCS / "measurements.md"
"""The page with a block about the sweep."""
ALTERNATIVES = DOCS / "alternatives.md"
CELLS = DOCS / "alternatives.jsonl"
_METHODS = {
    "gloo": "Gloo",
    "bf16": "bf16 hook",
    "powersgd": "PowerSGD's hook (rank)",
    "local": "model averaging over Gloo (period)",
    "dlcp:32": "DLCP, `precision=32`",
    "dlcp:8": "DLCP, `precision=8`",
    "dlcp:4": "DLCP, `precision=4`",
    "dlcp-powersgd": "DLCP, `compression=powersgd:4` (bits)",
    "dlcp-local": "`LocalSGD` (period, bits)",
}
"""What readers call the rows of the table of alternatives."""
_BLOCK = re.compile(r"(<!-- (\w+): by tests/bench/plots.py -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_ROW = re.compile(r"^\| (.*?) \| .*? \| \*\*([\d.]+)x", re.MULTILINE)
_LINES = tuple(
    (COLOURS[hue][0], marker) for hue, marker in zip(("blue", "orange", "green", "purple"), "os^D", strict=True)
)
_PHONE_PX = 460
"""Width of the plot in README.md: where it is shown 360 wide, its text has 11 pixels."""
_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
Cell = dict[str, Any]


def draw_results(readme: str) -> str:
    """Return the plot of README.md's table as SVG: a bar per row, which begins at 1, the speed of Gloo."""
    rows = [(name, float(ratio)) for name, ratio in _ROW.findall(readme)]
    title = "Speed of DLCP in times that of Gloo: above 1, DLCP is faster"
    with look():
        figure, (axes,) = blank(_PHONE_PX, 78 * len(rows) + 60)
        for place, (name, ratio) in enumerate(rows):
            colour = COLOURS["green" if ratio >= 1 else "orange"][0]
            axes.barh(place, ratio - 1, left=1, color=colour, height=0.4)
            axes.plot([1, 1], [place - 0.25, place + 0.25], color=INK, linewidth=1)
            axes.text(max(ratio, 1) + 0.03, place, f"{ratio:g}x", va="center", fontweight="bold", fontsize=14)
            axes.text(0, place - 0.28, textwrap.fill(name, 46), va="bottom", fontsize=14, linespacing=1.1)
        axes.set_ylim(len(rows) - 0.6, -1)
        axes.set_xlim(0, 1.15 * max(ratio for _, ratio in rows))
        axes.set_yticks([])
        axes.set_xlabel("times Gloo's speed (higher is better)", fontsize=14)
        axes.tick_params(labelsize=14)
        axes.grid(visible=False)
        return finish(figure, "results", title, title).standalone + "\n"


def keep(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the contents of ``sweep.json``: the machine, one entry per cell, and the cells that failed."""
    cells: dict[tuple[float, int, float], Cell] = {}
    failed: dict[str, str] = {}
    for document in documents:
        failed |= document.get("failed", {})
        details = {entry["name"]: entry for entry in document["results"]}
        for found in ratios(document["results"]):
            if found.cell.rtt_ms or not found.name.startswith("allreduce.loss"):
                continue
            entry = details[found.name]
            cells[found.cell.loss_percent, found.cell.ranks, found.cell.megabytes] = {
                "name": found.name,
                "loss_percent": found.cell.loss_percent,
                "ranks": found.cell.ranks,
                "megabytes": found.cell.megabytes,
                "ratio": found.ratio,
                "ratio_quartiles": entry["details"]["ratio_quartiles"],
                "ratio_of_means": found.mean_ratio,
                "dlcp_ms": found.value_ms,
                "spread": entry["spread"],
                "gloo_ms": found.gloo_ms,
                "gloo": entry["details"]["peer"],
                "runs": entry["runs"],
            }
    measured = {cell["name"] for cell in cells.values()}
    failed = {name: why for name, why in failed.items() if not any(known.startswith(name + ".") for known in measured)}
    return {
        "machine": documents[-1]["machine"],
        "cells": [cells[key] for key in sorted(cells)],
        "failed": failed,
    }


def draw(cells: Sequence[Cell]) -> str:
    """Return the plot as SVG: a panel for each loss rate, a line for each number of ranks."""
    losses = sorted({cell["loss_percent"] for cell in cells})
    counts = sorted({cell["ranks"] for cell in cells})
    columns = min(3, len(losses))
    rows = -(-len(losses) // columns)
    worst, best = (choose(cells, key=lambda cell: cell["ratio"]) for choose in (min, max))
    title = "Speed of DLCP in times that of Gloo at its best: above 1, DLCP is faster"
    with look():
        figure = Figure(figsize=(WIDE_PX / 72, (270 * rows + 70) / 72))
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for number, (loss, axes) in enumerate(zip(losses, panels, strict=False)):
            here = [cell for cell in cells if cell["loss_percent"] == loss]
            for count, (colour, marker) in zip(counts, _LINES, strict=False):
                line = sorted((cell for cell in here if cell["ranks"] == count), key=lambda cell: cell["megabytes"])
                _draw_line(axes, line, colour, marker)
            axes.axhline(1, color=INK, linewidth=1)
            axes.set_title("no loss" if not loss else f"{loss:g} % of packets lost")
            for cell, word in ((worst, "worst"), (best, "best")):
                if cell in here:
                    _label(axes, cell, word, cells)
            axes.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(losses))
        _set_scales(panels[0], cells)
        panels[0].margins(x=0.04)
        for axes in panels[len(losses) :]:
            axes.set_axis_off()
        lines = {f"{count} ranks": _line(*_LINES[number]) for number, count in enumerate(counts)}
        means = {"ratio of the means": {"color": SOFT, "linestyle": ":", "linewidth": 1}}
        legend(figure, lines | means, len(counts) + 1)
        figure.supylabel("times Gloo's speed (higher is better)", fontsize=13, color=SOFT)
        figure.supxlabel("size of the all-reduce; bands: the middle half of the rounds", fontsize=13, color=SOFT)
        return finish(figure, "sweep", title, title).standalone + "\n"


def _line(colour: str, marker: str) -> dict[str, Any]:
    return {"color": colour, "marker": marker, "markersize": 5, "linestyle": "-", "linewidth": 1.5}


def _draw_line(axes: Axes, line: Sequence[Cell], colour: str, marker: str) -> None:
    sizes = [cell["megabytes"] for cell in line]
    middle = [cell["ratio"] for cell in line]
    low, high = zip(*(cell["ratio_quartiles"] for cell in line), strict=True) if line else ((), ())
    axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(sizes, [cell["ratio_of_means"] for cell in line], color=colour, linestyle=":", linewidth=1)
    axes.plot(sizes, middle, **_line(colour, marker))


def _label(axes: Axes, cell: Cell, word: str, cells: Sequence[Cell]) -> None:
    sizes = [each["megabytes"] for each in cells]
    left = cell["megabytes"] ** 2 < min(sizes) * max(sizes)  # in the left half of a logarithmic axis
    axes.annotate(
        f"{word}: {cell['ratio']:.2f}x",
        (cell["megabytes"], cell["ratio"]),
        xytext=(6 if left else -6, 9 if word == "best" else -9),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom" if word == "best" else "top",
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "linewidth": 0.8, "color": INK},
    )


def _set_scales(axes: Axes, cells: Sequence[Cell]) -> None:
    """Set the axes that all panels share."""
    every = [cell[kind] for cell in cells for kind in ("ratio", "ratio_of_means")]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(0.5, min(every)) / 1.6, max(2.0, max(every)) * 3)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 1, 10, 100]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_words(value).replace(" ", "\N{NO-BREAK SPACE}")))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())


def sentences(kept: dict[str, Any]) -> str:
    """Return a summary of the sweep, worst cell first."""
    cells = kept["cells"]
    worst, best = (choose(cells, key=lambda cell: cell["ratio"]) for choose in (min, max))
    worst_mean = min(cells, key=lambda cell: cell["ratio_of_means"])
    middle = median(cell["ratio"] for cell in cells)
    slower = sum(cell["ratio"] < 1 for cell in cells)
    words = (
        f"In {len(cells)} combinations of size, number of ranks and random loss, DLCP reaches between "
        f"**{worst['ratio']:.2f}** ({_where(worst)}) and {best['ratio']:.2f} times ({_where(best)}) the speed of the "
        f"best Gloo setting; the median is {middle:.2f}. It is slower in {slower} of them. Compared by means, which "
        f"include rare slow runs, the worst is {worst_mean['ratio_of_means']:.2f} ({_where(worst_mean)})."
    )
    failed = kept["failed"]
    names = ", ".join(f"`{name}`" for name in failed)
    return words + (f" Not measured because a run failed: {names}." if failed else "")


def _where(cell: Cell) -> str:
    loss = f"{cell['loss_percent']:g} % loss" if cell["loss_percent"] else "no loss"
    return f"{size_words(cell['megabytes'])}, {cell['ranks']} ranks, {loss}"


def table(cells: Sequence[Cell]) -> str:
    """Return all cells as a table: ratios of medians and of means, and both times."""
    counts = sorted({cell["ranks"] for cell in cells})
    known = {(cell["loss_percent"], cell["megabytes"], cell["ranks"]): cell for cell in cells}
    lines = ["| Lost | Size | " + " | ".join(f"{count} ranks" for count in counts) + " |"]
    lines.append("|---:|---:|" + "---:|" * len(counts))
    for loss, size in sorted({key[:2] for key in known}):
        row = [known.get((loss, size, count)) for count in counts]
        words = [_figures(cell) if cell else "" for cell in row]
        lines.append(f"| {loss:g} % | {size_words(size)} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _figures(cell: Cell) -> str:
    times = f"{time_words(cell['dlcp_ms'])}, {time_words(cell['gloo_ms'])}"
    return f"{cell['ratio']:.2f}x ({cell['ratio_of_means']:.2f}x): {times}"


def block(kept: dict[str, Any]) -> str:
    """Return the text of the block about the sweep."""
    runs = [cell["runs"] for cell in kept["cells"]]
    machine = kept["machine"]
    parts = [
        "![Speed of DLCP relative to Gloo over size, ranks and loss](sweep.svg)",
        textwrap.fill(sentences(kept), 120, break_long_words=False, break_on_hyphens=False),
        "Each cell: ratio of the medians (of the means), and the medians of DLCP and of Gloo. "
        f"{min(runs)} to {max(runs)} rounds on {machine['cores']} cores of {machine['processor']}.",
        table(kept["cells"]),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def alternatives(page: str) -> str:
    """Return the table of seconds to the same loss, of the methods in the page's command; the fastest are bold."""
    cells = CellFile(CELLS, machine=None)
    command = re.search(r"bench alternatives --tasks digits --methods (.*)", page)
    assert command, "the page has no command for its first table"
    names = ["gloo", *command[1].split()]
    seeds = sorted({seed for _, _, seed in cells.trainings})
    found = [compare(cells, setting, "digits", name, seeds) for setting in SETTINGS for name in names]
    heading, line, *rows = alternatives_table([each for each in found if each], "digits")
    shown = []
    for row in rows:
        name, *figures = (cell.strip() for cell in row.strip("|").split("|"))
        # Omit parameters that are the same in the whole row: no initial steps, rank 4.
        shown.append([_METHODS[name], *(figure.replace(":0)", ")").replace("(4, ", "(") for figure in figures)])
    for number in range(1, len(shown[0])):
        best = min(shown, key=lambda row, number=number: float(row[number].split()[0]))
        best[number] = re.sub(r"^\S+", r"**\g<0>**", best[number])
    table = [heading.replace("digits", ""), line, *("| " + " | ".join(row) + " |" for row in shown)]
    return "\n" + "\n".join(table) + "\n\n"


def fill(text: str, words: str) -> str:
    """Return the text of a page with its block replaced."""
    return _BLOCK.sub(lambda marks: marks[1] + words + marks[3], text)


if __name__ == "__main__":
    (DOCS / "results.svg").write_text(draw_results(README.read_text()))
    if sys.argv[1:]:
        made = keep([json.loads(Path(name).read_text()) for name in sys.argv[1:]])
        KEPT.write_text(json.dumps(made, indent=1) + "\n")
    made = json.loads(KEPT.read_text())
    (DOCS / "sweep.svg").write_text(draw(made["cells"]))
    MEASUREMENTS.write_text(fill(MEASUREMENTS.read_text(), block(made)))
    page = ALTERNATIVES.read_text()
    ALTERNATIVES.write_text(fill(page, alternatives(page)))
    print(sentences(made))
