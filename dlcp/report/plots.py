# SPDX-License-Identifier: Apache-2.0
"""The report's figures, one function each, drawn from run files and their summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dlcp.report import wording
from dlcp.report.runs import Run
from dlcp.report.svg import DASHES, Drawing, Scale, text_width
from dlcp.report.wording import SHORT_NAMES, bit_rate, duration, percent

WIDE: Final = 920
HALF: Final = 448
MOST_POINTS: Final = 300
"""Points in a line. Chosen by us: more than a laptop's screen shows, few enough for a small page."""

Runs = Mapping[str, Run]


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its title and the sentence that says what to see."""

    name: str
    title: str
    caption: str
    drawing: Drawing

    @property
    def inline(self) -> str:
        """The drawing, for a page."""
        return self.drawing.inline(self.title, self.caption)

    @property
    def standalone(self) -> str:
        """The drawing, for a file of its own."""
        return self.drawing.standalone(self.title, self.caption)


def draw_all(runs: Runs, summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw every figure for which the runs hold data.

    Returns
    -------
    Figures by name: accuracy, steps, waiting, background, drops, loss_by_class, loss_by_layer, bound, and layers if the
    runs say when layers were complete.
    """
    figures = [
        _accuracy(runs, summary),
        _steps(runs, summary),
        _waiting(runs, summary),
        _background(runs, summary),
        _drops(runs, summary),
        _loss_by_class(runs),
        _loss_by_layer(runs),
        _bound(runs, summary),
    ]
    if "dlcp" in layer_medians(runs):
        figures.append(_layers(runs))
    return {figure.name: figure for figure in figures}


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


def _lossy(runs: Runs) -> dict[str, Run]:
    return {name: runs[name] for name in ("dlcp", "dlcp_priority")}


def _legend(drawing: Drawing, runs: Runs) -> None:
    drawing.legend(56 if drawing.width == WIDE else 8, 18, [(name, SHORT_NAMES[name]) for name in runs])


def _accuracy(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(WIDE, 416)
    end = max(run["curve"][-1]["seconds"] for run in runs.values())
    x = Scale(0, end * 1.02, 56, WIDE - 16)
    y = Scale(0, 1, 370, 60)
    drawing.axes(x, y, _plain, lambda a: percent(a, 0), "seconds of training, without evaluation")
    _legend(drawing, runs)
    figure = Figure("accuracy", "Accuracy over training time", wording.accuracy_sentence(summary), drawing)
    for name in reversed(list(runs)):
        drawing.path(
            [(x(point["seconds"]), y(point["accuracy"])) for point in runs[name]["curve"]],
            name,
            DASHES[name],
        )
        for point in runs[name]["curve"]:
            tip = f"{percent(point['accuracy'])} after {duration(point['seconds'])}, step {point['step']}"
            drawing.dot(x(point["seconds"]), y(point["accuracy"]), name, 2, f"{SHORT_NAMES[name]}: {tip}")
    target = summary["target_accuracy"]
    if target is None:
        return figure
    drawing.line(x.start, y(target), x.stop, y(target), "limit")
    drawing.text(x.stop, y(target) + 19, f"target {percent(target)}", "strong halo", "end")
    reached = sorted((summary[name]["seconds_to_target"], name) for name in runs)
    for seconds, name in reached:
        drawing.line(x(seconds), y(target), x(seconds), y.start, "axis", name)
        drawing.dot(x(seconds), y(target), name, 5)
    for index, (seconds, name) in enumerate(reached):
        # Labels stand one below the other, so that runs of about the same time stay readable.
        height = y.start - 14 - 20 * (len(reached) - 1 - index)
        label = f"{SHORT_NAMES[name]}: {duration(seconds)}"
        fits = x(seconds) + 8 + text_width(label) < x.stop
        drawing.text(x(seconds) + (6 if fits else -6), height, label, "strong halo", "start" if fits else "end", name)
    return figure


def _steps(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(HALF, 306)
    steps = {name: np.sort(np.asarray(run["steps"], np.float64)) for name, run in runs.items()}
    low, high = min(s[0] for s in steps.values()), max(s[-1] for s in steps.values())
    wide_range = high > 8 * low
    x = Scale(low / 1.1 if wide_range else 0, high * 1.05, 48, HALF - 12, wide_range)
    y = Scale(0, 1, 262, 58)
    label = "seconds a step" + (", logarithmic" if wide_range else "")
    drawing.axes(x, y, _plain, lambda a: percent(a, 0), label, (6, 5))
    _legend_in_rows(drawing, runs)
    for name in reversed(list(runs)):
        shares = np.linspace(0, 1, min(MOST_POINTS, len(steps[name])))
        values = np.quantile(steps[name], shares)
        drawing.path([(x(v), y(s)) for v, s in zip(values, shares, strict=True)], name, DASHES[name], SHORT_NAMES[name])
    return Figure("steps", "How long steps take", wording.step_sentence(summary), drawing)


def _waiting(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(HALF, 52 + 60 * len(runs))
    longest = max(summary[name]["step_seconds"]["mean"] for name in runs)
    x = Scale(0, longest, 8, HALF - 76)
    drawing.rect(8, 8, 13, 13, "neutral")
    drawing.text(27, 19, "computing")
    drawing.rect(112, 8, 13, 13, "dlcp")
    drawing.text(131, 19, "waiting for gradients (mean of all steps)")
    for index, (name, run) in enumerate(runs.items()):
        top = 52 + index * 60
        mean = summary[name]["step_seconds"]["mean"]
        compute = min(mean, float(np.mean(run["compute_seconds"]))) if run["compute_seconds"] else 0.0
        drawing.text(8, top, SHORT_NAMES[name], "strong")
        drawing.rect(8, top + 8, x(compute) - 8, 22, "neutral", f"computing {duration(compute)}")
        drawing.rect(x(compute), top + 8, x(mean) - x(compute), 22, name, f"waiting {duration(mean - compute)}")
        drawing.text(x(mean) + 7, top + 24, duration(mean))
    return Figure("waiting", "Where a step's time goes", wording.waiting_sentence(runs), drawing)


def _background(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(WIDE, 58 + 104 * len(runs))
    end = max([1.0, *(sample[0] for run in runs.values() for sample in run["background"]["samples"])])
    rates = {name: binned(run["background"]["samples"], end) for name, run in runs.items()}
    fair_shares = [run["background"]["fair_share_bps"] for run in runs.values()]
    most = max([1.0, *fair_shares, *(bps for points in rates.values() for _, bps in points)])
    drawing.text(64, 18, "Background traffic in Mbit/s; dashed: its fair share; shaded: while a burst was on", "soft")
    for index, (name, run) in enumerate(runs.items()):
        top = 58 + index * 104
        background = run["background"]
        x, y = Scale(0, end * 1.01, 64, WIDE - 16), Scale(0, most * 1.1 / 1e6, top + 66, top)
        last = index == len(runs) - 1
        for start, stop, *_ in background["bursts"]:
            drawing.rect(x(start), top, x(min(stop, end)) - x(start), 66)
        drawing.axes(x, y, _plain if last else _nothing, _plain, "seconds since the start" if last else "", (8, 2))
        drawing.path([(x(t), y(bps / 1e6)) for t, bps in rates[name]], name)
        fair = y(background["fair_share_bps"] / 1e6)
        drawing.line(x.start, fair, x.stop, fair, "limit")
        ratio = percent(wording.fair_share_ratio(run), 0)
        title = f"beside {SHORT_NAMES[name]}: {bit_rate(background['bps'])}, {ratio} of its fair share"
        drawing.text(64, top - 8, title, "strong", colour=name)
    return Figure("background", "What the others got", wording.background_sentence(runs), drawing)


def binned(samples: Sequence[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    """Return mean rates over at most ``MOST_POINTS`` equal spans up to ``end_s``, at their middles.

    Parameters
    ----------
    samples
        Pairs of seconds and bit/s at even intervals; a sample that is missing counts as 0.
    """
    if len(samples) < 2:
        return []
    times, rates = np.asarray(samples, np.float64).T
    interval = float(np.median(np.diff(times)))
    per_bin = max(1, math.ceil(end_s / interval / MOST_POINTS))
    bins = np.floor((times - 1e-9) / (interval * per_bin)).astype(int).clip(0)
    sums = np.bincount(bins, rates)
    return [((index + 0.5) * interval * per_bin, float(total) / per_bin) for index, total in enumerate(sums)]


def _drops(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(WIDE, 54 + 54 * len(runs))
    kinds = ("dlcp", "gloo", "neutral")
    names = ("chosen: least valuable gradients", "queue full: gradients", "queue full: ordinary traffic")
    left = 64.0
    for kind, text in zip(kinds, names, strict=True):
        drawing.rect(left, 8, 13, 13, kind)
        drawing.text(left + 19, 19, text)
        left += 45 + text_width(text)
    shares = {name: drop_shares(run) for name, run in runs.items()}
    x = Scale(0, max(1e-6, *(sum(parts) for parts in shares.values())), 64, WIDE - 250)
    for index, (name, parts) in enumerate(shares.items()):
        top = 54 + index * 54
        switch = runs[name]["switch"]
        drawing.text(64, top, f"while {SHORT_NAMES[name]} ran", "strong")
        start = 0.0
        for kind, text, share in zip(kinds, names, parts, strict=True):
            tip = f"{text}: {percent(share, 2)} of the packets that reached the switch"
            drawing.rect(x(start), top + 8, x(start + share) - x(start), 22, kind, tip)
            start += share
        count = switch["policy_drops"] + switch["tail_drops"]
        drawing.text(x(start) + 8, top + 24, f"{percent(start, 2)} of packets, {count:,} dropped")
    return Figure("drops", "What the switch dropped, and why", wording.drops_sentence(runs), drawing)


def drop_shares(run: Run) -> tuple[float, float, float]:
    """Return the shares of packets dropped by policy, by a full queue of gradients, and by the full ordinary queue.

    They are shares of all packets that reached the switch.
    A run that does not tag its packets has its gradients in the ordinary queue.
    """
    switch = run["switch"]
    ordinary = wording.ordinary_tail_drops(run)
    arrived = max(1, switch["forwarded"] + switch["tail_drops"] + switch["policy_drops"])
    return switch["policy_drops"] / arrived, (switch["tail_drops"] - ordinary) / arrived, ordinary / arrived


def _loss_by_class(runs: Runs) -> Figure:
    drawing = Drawing(HALF, 290)
    lossy = _lossy(runs)
    rates = {
        name: [lost / packets if packets else 0.0 for packets, lost in run["ledger"]["by_class"]]
        for name, run in lossy.items()
    }
    x = Scale(0, 8, 48, HALF - 8)
    y = Scale(0, 1.08 * max(0.01, *(max(values) for values in rates.values())), 240, 46)
    for tick in y.ticks(5):
        drawing.line(x.start, y(tick), x.stop, y(tick))
        drawing.text(x.start - 8, y(tick) + 4, percent(tick), "soft", "end")
    _squares(drawing, lossy)
    width = (x(1) - x(0)) * 0.36
    for drop_class in range(8):
        drawing.text(x(drop_class + 0.5), 259, str(drop_class), "soft", "middle")
        for index, (name, values) in enumerate(rates.items()):
            packets, lost = lossy[name]["ledger"]["by_class"][drop_class]
            tip = f"{SHORT_NAMES[name]}, class {drop_class}: {lost:,} of {packets:,} packets lost"
            top = y(values[drop_class])
            left = x(drop_class + 0.5) + (index - 1) * width
            drawing.rect(left, top, width - 2, y.start - top, name, tip)
    drawing.line(x.start, y.start, x.stop, y.start, "axis")
    drawing.text(x.start, 280, "never dropped", "soft")
    drawing.text(x.stop, 280, "least valuable", "soft", "end")
    return Figure("loss_by_class", "Loss by drop class", wording.class_sentence(runs), drawing)


def _loss_by_layer(runs: Runs) -> Figure:
    lossy = _lossy(runs)
    tables = {name: run["ledger"]["by_layer"] for name, run in lossy.items()}
    positions = sorted({int(position) for table in tables.values() for position in table})
    row = _row_height(len(positions))
    drawing = Drawing(HALF, 50 + row * len(positions))
    rates = {
        name: [table.get(str(p), [0, 0])[1] / max(1, table.get(str(p), [0, 0])[0]) for p in positions]
        for name, table in tables.items()
    }
    x = Scale(0, max(0.01, *(max(values, default=0) for values in rates.values())), 110, HALF - 60)
    _squares(drawing, lossy)
    for index, position in enumerate(positions):
        middle = 44 + (index + 0.5) * row
        drawing.text(102, middle + 4, _layer_name(runs["dlcp"], position), "soft", "end")
        for number, (name, values) in enumerate(rates.items()):
            packets, lost = tables[name].get(str(position), [0, 0])
            tip = f"{SHORT_NAMES[name]}, {_layer_name(runs['dlcp'], position)}: {lost:,} of {packets:,} packets lost"
            top = middle + (number - 1) * row * 0.38
            drawing.rect(x.start, top, x(values[index]) - x.start, row * 0.38 - 1, name, tip)
            if row >= 30:
                drawing.text(x(values[index]) + 5, top + row * 0.19 + 4, percent(values[index]), "soft")
    return Figure("loss_by_layer", "Loss by layer", wording.layer_sentence(runs), drawing)


def _bound(runs: Runs, summary: Mapping[str, Any]) -> Figure:
    drawing = Drawing(HALF, 226)
    bound = runs["dlcp"]["ledger"]["bound"]
    worst = max(run["ledger"]["max_message_ratio"] for run in _lossy(runs).values())
    x = Scale(0, 1.12 * max(bound, worst, 0.01), 8, HALF - 8)
    drawing.line(x(bound), 30, x(bound), drawing.height - 6, "limit")
    drawing.text(x(bound) - 6, 24, f"bound {percent(bound)}", "strong", "end")
    for index, (name, run) in enumerate(_lossy(runs).items()):
        top = 52 + index * 92
        ledger = run["ledger"]
        mean = ledger["lost"] / max(1, ledger["lost"] + ledger["delivered"])
        drawing.text(8, top, SHORT_NAMES[name], "strong")
        for offset, text, share in ((8, "worst message", ledger["max_message_ratio"]), (34, "all messages", mean)):
            label = f"{text}: {percent(share, 2)}"
            drawing.rect(8, top + offset, max(1, x(share) - 8), 22, name, label)
            inside = x(share) - 16 > text_width(label)
            drawing.text(x(share) + 8 if not inside else 16, top + offset + 16, label, "on" if inside else "halo")
    return Figure("bound", "The bound", wording.bound_sentence(summary), drawing)


def _layers(runs: Runs) -> Figure:
    timed = {name: run for name, run in runs.items() if run["layer_seconds"]}
    positions = sorted({int(p) for run in timed.values() for p in run["layer_seconds"]})
    ranges = {
        (name, position): np.percentile(run["layer_seconds"][str(position)], (10, 50, 90))
        for name, run in timed.items()
        for position in positions
        if run["layer_seconds"].get(str(position))
    }
    row = _row_height(len(positions)) + 4
    bottom = 44 + row * len(positions)
    drawing = Drawing(WIDE, bottom + 48)
    x = Scale(0, 1.04 * max(float(values[2]) for values in ranges.values()), 130, WIDE - 16)
    _legend(drawing, timed)
    for tick in x.ticks(8):
        drawing.line(x(tick), 40, x(tick), bottom)
        drawing.text(x(tick), bottom + 19, f"{tick * 1e3:g}", "soft", "middle")
    drawing.text(
        (x.start + x.stop) / 2,
        bottom + 38,
        "ms since the step's first packet; dots: medians, lines: 8 of 10 steps",
        "soft",
        "middle",
    )
    for index, position in enumerate(positions):
        middle = 44 + (index + 0.5) * row
        drawing.text(122, middle + 4, _layer_name(runs["dlcp"], position), "soft", "end")
        for number, name in enumerate(timed):
            if (name, position) not in ranges:
                continue
            low, median, high = (float(value) for value in ranges[name, position])
            height = middle + (number - (len(timed) - 1) / 2) * row * 0.27
            tip = f"{SHORT_NAMES[name]}: median {duration(median)}, 8 of 10 steps {duration(low)} to {duration(high)}"
            drawing.path([(x(low), height), (x(high), height)], name, tip=tip)
            drawing.dot(x(median), height, name, 4.5, tip)
    return Figure(
        "layers",
        "When each layer is complete",
        wording.order_sentence({name: list(layers.values()) for name, layers in layer_medians(runs).items()}),
        drawing,
    )


def _layer_name(run: Run, position: int) -> str:
    return str(run["layer_names"].get(str(position), f"layer {position}"))


def _row_height(rows: int) -> float:
    return max(16.0, min(36.0, 500 / max(1, rows)))


def _plain(value: float) -> str:
    return f"{value:g}"


def _nothing(value: float) -> str:
    return ""


def _squares(drawing: Drawing, runs: Runs) -> None:
    left = 8.0
    for name in runs:
        drawing.rect(left, 8, 13, 13, name)
        drawing.text(left + 19, 19, SHORT_NAMES[name])
        left += 45 + text_width(SHORT_NAMES[name])


def _legend_in_rows(drawing: Drawing, runs: Runs) -> None:
    names = list(runs)
    for row, part in enumerate((names[:2], names[2:])):
        drawing.legend(8, 16 + 20 * row, [(name, SHORT_NAMES[name]) for name in part])
