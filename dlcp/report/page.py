# SPDX-License-Identifier: Apache-2.0
"""Reports: each is one self-contained page, with its plots next to it as files.

``python -m dlcp.report.page out/demo`` creates the demo's page and summary again, from ``out/demo/runs/*.json``.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlcp.report.drawing import HALF_PX, INK, PAPER, SOFT, WIDE_PX, Plot, blank, finish, legend, look, tip
from dlcp.report.runs import (
    RUN_NAMES,
    Run,
    RunFileError,
    check_complete,
    fair_share_ratio,
    load_runs,
    summarize,
    write_summary,
)
from dlcp.report.style import COLOURS, SHORT_NAMES, TEMPLATES, bit_rate, duration, percent, render, sentence
from dlcp.wire import DROP_CLASSES, Queue

MOST_POINTS: Final = 300
"""Points in a line: more than a laptop's screen shows, and few enough for a small page."""
HUES: Final = {"gloo": "orange", "plain": "ochre", "dlcp": "blue", "dlcp_priority": "green"}
"""Colours of the runs."""
_DASHES: Final[dict[str, Any]] = {
    "gloo": (0, (2, 3)),
    "plain": (0, (9, 4)),
    "dlcp": "-",
    "dlcp_priority": (0, (12, 3, 2, 3)),
}
"""Line patterns by run, so that nothing depends on colour alone."""
_GREY: Final = COLOURS["grey"][0]
_LIMIT: Final[dict[str, Any]] = {"color": INK, "linewidth": 1.5, "linestyle": (0, (5, 4))}

Runs = Mapping[str, Run]


def draw_all(runs: Runs, summary: Mapping[str, Any]) -> dict[str, Plot]:
    """Draw every plot for which the runs hold data.

    Returns
    -------
    Plots by name: accuracy, steps, waiting, background, drops, loss_by_class, loss_by_layer, bound, and layers if the
    runs hold the completion times of layers.
    """
    with look():
        plots = [
            _accuracy(runs, summary),
            _steps(runs, summary),
            _waiting(runs, summary),
            _background(runs),
            _drops(runs),
            _loss_by_class(runs),
            _loss_by_layer(runs),
            _bound(runs, summary),
        ]
        if "dlcp" in layer_medians(runs):
            plots.append(_layers(runs))
    return {plot.name: plot for plot in plots}


def layer_medians(runs: Runs) -> dict[str, dict[int, float]]:
    """Return the median seconds until a layer was complete, by run and layer position, ascending."""
    return {
        name: {
            int(position): float(np.median(values))
            for position, values in sorted(run["layer_seconds"].items(), key=lambda item: int(item[0]))
            if values
        }
        for name, run in runs.items()
        if run["layer_seconds"]
    }


def _accuracy(runs: Runs, summary: Mapping[str, Any]) -> Plot:
    figure, (axes,) = blank(WIDE_PX, 416)
    end = max(run["curve"][-1]["seconds"] for run in runs.values())
    axes.set(xlim=(0, end * 1.02), ylim=(0, 1.04), xlabel="seconds of training, without evaluation")
    _percent_axis(axes)
    _name_runs(figure, runs, 4)
    for name in reversed(list(runs)):
        curve = runs[name]["curve"]
        seconds, accuracies = [point["seconds"] for point in curve], [point["accuracy"] for point in curve]
        axes.plot(seconds, accuracies, color=_colour(name), linestyle=_DASHES[name])
        for point in curve:
            text = f"{percent(point['accuracy'])} after {duration(point['seconds'])}, step {point['step']}"
            dot = axes.plot(point["seconds"], point["accuracy"], "o", color=_colour(name), markersize=4)
            tip(dot[0], f"{SHORT_NAMES[name]}: {text}")
    target = summary["target_accuracy"]
    if target is not None:
        _mark_target(axes, runs, summary, target, end)
    return finish(figure, "accuracy", "Accuracy over training time", sentence("accuracy", summary))


def _mark_target(axes: Axes, runs: Runs, summary: Mapping[str, Any], target: float, end: float) -> None:
    axes.axhline(target, **_LIMIT)
    axes.annotate(
        f"target {percent(target)}",
        (end * 1.02, target),
        (0, -16),
        textcoords="offset points",
        ha="right",
        weight="bold",
    )
    reached = sorted((summary[name]["seconds_to_target"], name) for name in runs)
    for index, (seconds, name) in enumerate(reached):
        axes.vlines(seconds, 0, target, color=_colour(name), linewidth=1)
        axes.plot(seconds, target, "o", color=_colour(name), markersize=10)
        # Labels are stacked, so that those of runs with similar times do not overlap.
        height, right = 14 + 20 * (len(reached) - 1 - index), seconds > 0.75 * end
        axes.annotate(
            f"{SHORT_NAMES[name]}: {duration(seconds)}",
            (seconds, 0),
            (-6 if right else 8, height),
            textcoords="offset points",
            ha="right" if right else "left",
            color=_colour(name),
            weight="bold",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        )


def _steps(runs: Runs, summary: Mapping[str, Any]) -> Plot:
    figure, (axes,) = blank(HALF_PX, 306)
    steps = {name: np.sort(np.asarray(run["steps"], np.float64)) for name, run in runs.items()}
    low, high = min(values[0] for values in steps.values()), max(values[-1] for values in steps.values())
    logarithmic = high > 8 * low
    if logarithmic:
        axes.set_xscale("log")
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set(xlim=(low / 1.1 if logarithmic else 0, high * 1.05), ylim=(0, 1))
    axes.set_xlabel("seconds a step" + (", logarithmic" if logarithmic else ""))
    _percent_axis(axes)
    _name_runs(figure, runs, 2)
    for name in reversed(list(runs)):
        shares = np.linspace(0, 1, min(MOST_POINTS, len(steps[name])))
        line = axes.plot(np.quantile(steps[name], shares), shares, color=_colour(name), linestyle=_DASHES[name])
        tip(line[0], SHORT_NAMES[name])
    return finish(figure, "steps", "How long steps take", sentence("steps", summary))


def _waiting(runs: Runs, summary: Mapping[str, Any]) -> Plot:
    figure, (axes,) = blank(HALF_PX, 60 + 52 * len(runs))
    _rows(axes, [SHORT_NAMES[name] for name in runs])
    legend(figure, {"computing": {"color": _GREY}, "waiting for gradients": {"color": _colour("dlcp")}}, 2)
    shares: dict[str, float | None] = {}
    for row, (name, run) in enumerate(runs.items()):
        mean = summary[name]["step_seconds"]["mean"]
        compute = min(mean, float(np.mean(run["compute_seconds"]))) if run["compute_seconds"] else 0.0
        shares[name] = 1 - compute / mean if run["compute_seconds"] else None
        _bar(axes, row, 0, compute, _GREY, f"computing {duration(compute)}")
        _bar(axes, row, compute, mean - compute, _colour(name), f"waiting {duration(mean - compute)}")
        _label(axes, row, mean, duration(mean))
    axes.set_xlim(0, 1.22 * max(summary[name]["step_seconds"]["mean"] for name in runs))
    return finish(figure, "waiting", "Where a step's time goes (mean of all steps)", sentence("waiting", shares))


def _background(runs: Runs) -> Plot:
    figure, panels = blank(WIDE_PX, 58 + 104 * len(runs), len(runs), sharex=True, sharey=True)
    end = max([1.0, *(sample[0] for run in runs.values() for sample in run["background"]["samples"])])
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        background = run["background"]
        for start, stop, *_ in background["bursts"]:
            axes.axvspan(min(start, end), min(stop, end), color=SOFT, alpha=0.16, linewidth=0)
        points = binned(background["samples"], end)
        axes.plot([when for when, _ in points], [bps / 1e6 for _, bps in points], color=_colour(name))
        axes.axhline(background["fair_share_bps"] / 1e6, **_LIMIT)
        ratio = percent(fair_share_ratio(run), 0)
        title = f"beside {SHORT_NAMES[name]}: {bit_rate(background['bps'])}, {ratio} of its fair share"
        axes.set_title(title, color=_colour(name))
        axes.yaxis.set_major_locator(MaxNLocator(2))
    panels[-1].set(xlim=(0, end * 1.01), ylim=(0, None), xlabel="seconds since the start")
    figure.supylabel("Mbit/s", fontsize=13, color=SOFT)
    legend(figure, {"fair share": _LIMIT, "while a burst is on": {"color": SOFT, "alpha": 0.16, "linewidth": 0}}, 2)
    shares = {name: fair_share_ratio(run) for name, run in runs.items()}
    return finish(figure, "background", "What the other traffic got", sentence("background", shares))


def binned(samples: Sequence[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    """Return mean rates over at most ``MOST_POINTS`` equal spans up to ``end_s``, at their middles.

    Parameters
    ----------
    samples
        Pairs of seconds and bit/s at even intervals; a missing sample counts as 0.
    """
    if len(samples) < 2:
        return []
    times, rates = np.asarray(samples, np.float64).T
    interval = float(np.median(np.diff(times)))
    per_bin = max(1, math.ceil(end_s / interval / MOST_POINTS))
    bins = np.floor((times - 1e-9) / (interval * per_bin)).astype(int).clip(0)
    sums = np.bincount(bins, rates)
    return [((index + 0.5) * interval * per_bin, float(total) / per_bin) for index, total in enumerate(sums)]


def _drops(runs: Runs) -> Plot:
    figure, (axes,) = blank(WIDE_PX, 60 + 44 * len(runs))
    kinds = {
        "chosen: least valuable gradients": _colour("dlcp"),
        "queue full: gradients": _colour("gloo"),
        "queue full: ordinary traffic": _GREY,
    }
    legend(figure, {text: {"color": colour} for text, colour in kinds.items()}, 3)
    _rows(axes, [f"while {SHORT_NAMES[name]} ran" for name in runs])
    shares = {name: drop_shares(run) for name, run in runs.items()}
    for row, (name, parts) in enumerate(shares.items()):
        start = 0.0
        for (text, colour), share in zip(kinds.items(), parts, strict=True):
            _bar(axes, row, start, share, colour, f"{text}: {percent(share, 2)} of the packets that reached the switch")
            start += share
        count = runs[name]["switch"]["policy_drops"] + runs[name]["switch"]["tail_drops"]
        _label(axes, row, start, f"{percent(start, 2)} of packets, {count:,} dropped")
    axes.set_xlim(0, 1.5 * max(1e-6, *(sum(parts) for parts in shares.values())))
    switch, blind = runs["dlcp"]["switch"], runs["plain"]["switch"]["tail_drops"]
    gradients = switch["policy_drops"] + switch["tail_drops"] - _ordinary_tail_drops(runs["dlcp"])
    caption = sentence("drops", switch["policy_drops"], gradients, blind)
    return finish(figure, "drops", "What the switch dropped, and why", caption)


def drop_shares(run: Run) -> tuple[float, float, float]:
    """Return the shares of packets dropped by policy, by a full queue of gradients, and by the full ordinary queue.

    They are shares of all packets that reached the switch. The gradients of a run without tags are in the ordinary
    queue.
    """
    switch = run["switch"]
    ordinary = _ordinary_tail_drops(run)
    arrived = max(1, switch["forwarded"] + switch["tail_drops"] + switch["policy_drops"])
    return switch["policy_drops"] / arrived, (switch["tail_drops"] - ordinary) / arrived, ordinary / arrived


def _ordinary_tail_drops(run: Run) -> int:
    return int(run["switch"]["by_queue"].get(str(int(Queue.ORDINARY)), {}).get("tail_drops", 0))


def _loss_by_class(runs: Runs) -> Plot:
    figure, (axes,) = blank(HALF_PX, 290)
    lossy = _lossy(runs)
    _name_bars(figure, lossy)
    highest = 0.01
    for index, (name, run) in enumerate(lossy.items()):
        for drop_class, (packets, lost, *_) in enumerate(run["ledger"]["by_class"]):
            rate = lost / packets if packets else 0.0
            bars = axes.bar(drop_class + (index - 0.5) * 0.38, rate, 0.36, color=_colour(name))
            tip(bars[0], f"{SHORT_NAMES[name]}, class {drop_class}: {lost:,} of {packets:,} packets lost")
            highest = max(highest, rate)
    axes.set(xlim=(-0.6, DROP_CLASSES - 0.4), ylim=(0, 1.08 * highest), xticks=range(DROP_CLASSES))
    axes.set_xlabel("drop class, from 0, never dropped, to 7, the least valuable")
    _percent_axis(axes)
    rates = [lost / max(1, packets) for packets, lost, *_ in runs["dlcp"]["ledger"]["by_class"]]
    return finish(figure, "loss_by_class", "Loss by drop class", sentence("loss_by_class", rates))


def _loss_by_layer(runs: Runs) -> Plot:
    lossy = _lossy(runs)
    tables = {name: run["ledger"]["by_layer"] for name, run in lossy.items()}
    positions = sorted({int(position) for table in tables.values() for position in table})
    row_height = _row_height(len(positions))
    figure, (axes,) = blank(HALF_PX, 60 + row_height * len(positions))
    layers = [_layer_name(runs["dlcp"], position) for position in positions]
    _rows(axes, layers)
    _name_bars(figure, lossy)
    highest = 0.01
    for row, position in enumerate(positions):
        for index, (name, table) in enumerate(tables.items()):
            packets, lost, *_ = table.get(str(position), [0, 0])
            rate = lost / max(1, packets)
            text = f"{SHORT_NAMES[name]}, {layers[row]}: {lost:,} of {packets:,} packets lost"
            height = row + (index - 0.5) * 0.4
            _bar(axes, height, 0, rate, _colour(name), text, 0.38)
            if row_height >= 30:
                _label(axes, height, rate, percent(rate), color=SOFT, size=11)
            highest = max(highest, rate)
    axes.set_xlim(0, 1.2 * highest)
    rates = {
        _layer_name(runs["dlcp"], int(position)): lost / max(1, packets)
        for position, (packets, lost, *_) in tables["dlcp"].items()
    }
    return finish(figure, "loss_by_layer", "Loss by layer", sentence("loss_by_layer", rates))


def _bound(runs: Runs, summary: Mapping[str, Any]) -> Plot:
    figure, (axes,) = blank(HALF_PX, 226)
    bound = runs["dlcp"]["ledger"]["bound"]
    rows: list[tuple[str, float]] = []
    for name, run in _lossy(runs).items():
        ledger = run["ledger"]
        mean = ledger["lost"] / max(1, ledger["lost"] + ledger["delivered"])
        for what, share in (("worst message", ledger["max_message_ratio"]), ("all messages", mean)):
            label = f"{what}: {percent(share, 2)}"
            _bar(axes, len(rows), 0, share, _colour(name), label)
            inside = share > 0.4 * bound
            _label(axes, len(rows), share, percent(share, 2), inside=inside, color=PAPER if inside else INK)
            rows.append((f"{SHORT_NAMES[name]}\n{what}", share))
    _rows(axes, [text for text, _ in rows])
    axes.axvline(bound, zorder=0.5, **_LIMIT)
    axes.set_xlim(0, 1.3 * max(bound, 0.01, *(share for _, share in rows)))
    axes.set_title(f"bound {percent(bound)}", x=bound / axes.get_xlim()[1], ha="center")
    return finish(figure, "bound", "The bound", sentence("bound", summary))


def _layers(runs: Runs) -> Plot:
    timed = {name: run for name, run in runs.items() if run["layer_seconds"]}
    positions = sorted({int(position) for run in timed.values() for position in run["layer_seconds"]})
    figure, (axes,) = blank(WIDE_PX, 92 + (_row_height(len(positions)) + 4) * len(positions))
    _rows(axes, [_layer_name(runs["dlcp"], position) for position in positions])
    _name_runs(figure, timed, 4, dashes=False)
    for row, position in enumerate(positions):
        for index, (name, run) in enumerate(timed.items()):
            if not run["layer_seconds"].get(str(position)):
                continue
            low, median, high = np.percentile(run["layer_seconds"][str(position)], (10, 50, 90)).tolist()
            height = row + (index - (len(timed) - 1) / 2) * 0.27
            text = f"{SHORT_NAMES[name]}: median {duration(median)}, 8 of 10 steps {duration(low)} to {duration(high)}"
            line = axes.plot([1e3 * low, 1e3 * high], [height, height], color=_colour(name))
            dot = axes.plot(1e3 * median, height, "o", color=_colour(name), markersize=9)
            for drawn in (*line, *dot):
                tip(drawn, text)
    axes.set(
        xlim=(0, 1.04 * axes.get_xlim()[1]),
        xlabel="ms since the step's first packet; dots: medians, lines: 8 of 10 steps",
    )
    axes.xaxis.set_visible(True)
    axes.grid(visible=True, axis="x")
    medians = {name: list(layers.values()) for name, layers in layer_medians(runs).items()}
    return finish(figure, "layers", "When each layer is complete", sentence("layers", medians))


def _colour(name: str) -> str:
    return COLOURS[HUES[name]][0]


def _lossy(runs: Runs) -> dict[str, Run]:
    return {name: runs[name] for name in ("dlcp", "dlcp_priority")}


def _name_runs(figure: Figure, runs: Runs, columns: int, *, dashes: bool = True) -> None:
    legend(
        figure,
        {SHORT_NAMES[n]: {"color": _colour(n), "linestyle": _DASHES[n] if dashes else "-"} for n in runs},
        columns,
    )


def _name_bars(figure: Figure, runs: Runs) -> None:
    legend(figure, {SHORT_NAMES[name]: {"color": _colour(name)} for name in runs}, 2)


def _percent_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda share, _: percent(share))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Make the axes rows from top to bottom, for horizontal bars."""
    axes.set(ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)


def _bar(axes: Axes, row: float, start: float, width: float, colour: str, text: str, height: float = 0.6) -> None:
    tip(axes.barh(row, width, height, start, color=colour)[0], text)


def _label(axes: Axes, row: float, end: float, text: str, *, inside: bool = False, **options: Any) -> None:
    side: dict[str, Any] = {"ha": "right"} if inside else {}
    axes.annotate(
        text, (end, row), (-6 if inside else 6, 0), textcoords="offset points", va="center", **side, **options
    )


def _layer_name(run: Run, position: int) -> str:
    return str(run["layer_names"].get(str(position), f"layer {position}"))


def _row_height(rows: int) -> float:
    return max(16.0, min(36.0, 500 / max(1, rows)))


def write_report(runs: Mapping[str, Run], summary: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` and each of its plots as ``NAME.svg``.

    Parameters
    ----------
    runs, summary
        Runs by name, all but perhaps Gloo's, and their summary by :func:`dlcp.report.runs.summarize`.
    folder
        Folder of the page; created if missing.

    Returns
    -------
    The page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = {name: runs[name] for name in RUN_NAMES if name in runs}
    plots = draw_all(runs, summary)
    for plot in plots.values():
        (folder / f"{plot.name}.svg").write_text(plot.standalone, encoding="utf-8")
    page = folder / "report.html"
    page.write_text(_runs_page(runs, summary, plots), encoding="utf-8")
    return page


def _runs_page(runs: Mapping[str, Run], summary: Mapping[str, Any], plots: Mapping[str, Plot]) -> str:
    agreements = {name: run["agreement"] for name, run in runs.items() if "agreement" in run}
    return render(
        TEMPLATES / "runs.html",
        runs=runs,
        summary=summary,
        plots=plots,
        names=SHORT_NAMES,
        hues=HUES,
        sentence=sentence,
        fair_share=fair_share_ratio,
        agreements=agreements,
        late_s=_worst(runs, "late_max_s"),
        busy=_worst(runs, "busy"),
    )


def _worst(runs: Mapping[str, Run], counter: str) -> float | None:
    """Return the largest value of a switch's counter over all runs, or None if a run lacks it."""
    values = [run["switch"].get(counter) for run in runs.values()]
    return None if None in values else max(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create summary and report again from the runs in a folder."""
    parser = argparse.ArgumentParser(description="Create the demo's summary and report again from its runs.")
    parser.add_argument("folder", type=Path, help="the demo's folder, such as out/demo")
    folder = parser.parse_args(arguments).folder
    try:
        check_complete(runs := load_runs(folder))
    except RunFileError as error:
        print(error, file=sys.stderr)
        return 1
    summary = summarize(runs)
    write_summary(summary, folder)
    print(write_report(runs, summary, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
