# SPDX-License-Identifier: Apache-2.0
"""Plots of an experiment: bars or lines over an axis, means and the range of seeds, as SVG that needs no script."""

import math
from collections.abc import Mapping
from typing import Final

from dlcp.sim.experiment import Figure
from dlcp.sim.report.results import Spread

from dlcp.report.svg import STYLE as DRAWING_STYLE
from dlcp.report.svg import Drawing, Scale, text_width

COLOURS: Final = ("s0", "s1", "s2", "s3", "s4", "s5")
OWN: Final = "dlcp"
"""The colour of DLCP itself, the same in all plots."""
DASHES: Final = ("9 4", "2 3", "12 3 2 3", "5 2", "1 2", "14 4")
STYLE: Final = (
    DRAWING_STYLE
    + """
:root { --s0: #8b949e; --s1: #c04a00; --s2: #8a6d00; --s3: #00805b; --s4: #8250a8; --s5: #a3345f; }
@media (prefers-color-scheme: dark) { :root {
  --s0: #8b949e; --s1: #ff8f4d; --s2: #e3c04b; --s3: #3fcf9f; --s4: #c79af0; --s5: #f285ab; } }
svg .range { stroke-dasharray: none; stroke-width: 1.2; }
"""
)
WIDTH: Final = 448
_LEFT: Final = 62.0
_LABEL_LINES: Final = 4


def draw(figure: Figure, series: Mapping[str, Mapping[str, Spread]]) -> Drawing:
    """Draw a figure's numbers, as `dlcp.sim.report.results.series_of` gives them.

    Raises
    ------
    ValueError
        There is no number to draw.
    """
    if in_milliseconds(figure):
        series = {name: {x: value.times(1e3) for x, value in line.items()} for name, line in series.items()}
    names = list(series)
    xs = list(dict.fromkeys(x for line in series.values() for x in line))
    values = [end for line in series.values() for value in line.values() for end in (value.least, value.most)]
    if not values:
        raise ValueError(f"{figure.title}: there is nothing to draw")
    rows = _legend_rows(names) if len(names) > 1 else []
    top = 24.0 + 22 * len(rows)
    drawing = Drawing(WIDTH, top + 222 + 15 * (1 + max((len(_wrapped(name, len(xs))) for name in xs), default=1)))
    low, high = _range(values, figure.logarithmic, figure.kind)
    y = Scale(low, high, top + 200, top, figure.logarithmic)
    for tick in y.ticks(5):
        drawing.line(_LEFT, y(tick), WIDTH - 8, y(tick))
        drawing.text(_LEFT - 8, y(tick) + 4, number(tick), "soft", "end")
    look = _looks(names)
    for index, row in enumerate(rows):
        x = 8.0
        for name in row:
            drawing.rect(x, 10 + 22 * index, 13, 13, look[name])
            drawing.text(x + 19, 21 + 22 * index, name)
            x += 19 + text_width(name) + 18
    if figure.kind == "lines" and len(xs) > 1:
        _lines(drawing, series, xs, y, look)
    else:
        _bars(drawing, series, xs, y, look)
    drawing.line(_LEFT, y.start, WIDTH - 8, y.start, "axis")
    for index, x_name in enumerate(xs):
        for line, words in enumerate(_wrapped(x_name, len(xs))):
            drawing.text(_middle(index, len(xs)), y.start + 19 + 15 * line, words, "soft", "middle")
    below = 23 + 15 * max(len(_wrapped(name, len(xs))) for name in xs)
    drawing.text((_LEFT + WIDTH - 8) / 2, y.start + below + 4, figure.x.replace("_", " "), "soft", "middle")
    return drawing


def in_milliseconds(figure: Figure) -> bool:
    """Return whether a figure shows times, which are drawn in milliseconds."""
    return figure.metric.endswith("_s") and not figure.metric.endswith("_per_s") and figure.relative_to is None


def number(value: float) -> str:
    """Return a number with three significant digits, without needless zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.2e}"


def _range(values: list[float], logarithmic: bool, kind: str) -> tuple[float, float]:
    high = max(values)
    if logarithmic and min(values) > 0:
        return min(values) / 1.5, high * 1.3
    return 0.0, high * 1.08 if high > 0 else 1.0


def _bars(
    drawing: Drawing,
    series: Mapping[str, Mapping[str, Spread]],
    xs: list[str],
    y: Scale,
    look: Mapping[str, str],
) -> None:
    room = (WIDTH - 8 - _LEFT) / len(xs)
    width = min(46.0, room * 0.82 / len(series))
    for index, x in enumerate(xs):
        left = _middle(index, len(xs)) - width * len(series) / 2
        for place, (name, line) in enumerate(series.items()):
            if x not in line:
                continue
            value = line[x]
            top = y(value.mean)
            colour = look[name] if len(series) > 1 else OWN if _is_own(x) else COLOURS[0]
            drawing.rect(left + place * width, top, width - 2, y.start - top, colour, _tip(name, x, value))
            middle = left + place * width + width / 2 - 1
            _range_mark(drawing, middle, y, value)
            if width >= 30:
                drawing.text(middle, y(value.most) - 5, number(value.mean), "soft", "middle")


def _lines(
    drawing: Drawing,
    series: Mapping[str, Mapping[str, Spread]],
    xs: list[str],
    y: Scale,
    look: Mapping[str, str],
) -> None:
    for index, (name, line) in enumerate(series.items()):
        points = [(_middle(place, len(xs)), y(line[x].mean)) for place, x in enumerate(xs) if x in line]
        drawing.path(points, look[name], "" if look[name] == OWN else DASHES[index % len(DASHES)], name)
        for place, x in enumerate(xs):
            if x in line:
                _range_mark(drawing, _middle(place, len(xs)), y, line[x])
                drawing.dot(_middle(place, len(xs)), y(line[x].mean), look[name], 4, _tip(name, x, line[x]))


def _range_mark(drawing: Drawing, x: float, y: Scale, value: Spread) -> None:
    """Draw from the least to the most that a seed gave."""
    if value.most > value.least:
        drawing.line(x, y(value.least), x, y(value.most), "limit range")
        for end in (value.least, value.most):
            drawing.line(x - 4, y(end), x + 4, y(end), "limit range")


def _tip(name: str, x: str, value: Spread) -> str:
    spread = f" ({number(value.least)} to {number(value.most)}, {value.seeds} seeds)" if value.seeds > 1 else ""
    return f"{name}, {x}: {number(value.mean)}{spread}"


def _middle(index: int, count: int) -> float:
    return _LEFT + (index + 0.5) * (WIDTH - 8 - _LEFT) / count


def _is_own(name: str) -> bool:
    return name.lower().startswith("dlcp")


def _looks(names: list[str]) -> dict[str, str]:
    """Return the colours of series: DLCP's own for its first, or the last where none is called that; others in turn."""
    own = next((name for name in names if _is_own(name)), names[-1])
    others = [name for name in names if name != own]
    looks = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)}
    return {
        name: OWN if name == own and (len(names) > 1 or _is_own(name)) else looks.get(name, COLOURS[0])
        for name in names
    }


def _wrapped(name: str, count: int) -> list[str]:
    """Return a point's name in lines that have room under its place; a word that has not is cut."""
    most = max(5, int((WIDTH - 8 - _LEFT) / count / 6.9))
    lines: list[str] = []
    for word in name.split():
        kept = word if len(word) <= most else word[: most - 1] + "…"
        if lines and len(lines[-1]) + 1 + len(kept) <= most:
            lines[-1] += f" {kept}"
        else:
            lines.append(kept)
    return lines[:_LABEL_LINES]


def _legend_rows(names: list[str]) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    used = 8.0
    for name in names:
        wide = 19 + text_width(name) + 18
        if rows[-1] and used + wide > WIDTH:
            rows.append([])
            used = 8.0
        rows[-1].append(name)
        used += wide
    return rows
