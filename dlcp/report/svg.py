# SPDX-License-Identifier: Apache-2.0
"""Small SVG drawings that follow the reader's light or dark mode: scales, axes, marks. They need no script."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

STYLE: Final = """
:root { color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f9; --ink: #1c2128; --soft: #59636e; --grid: #dde1e6;
  --gloo: #c04a00; --plain: #8a6d00; --dlcp: #0067b0; --dlcp_priority: #00805b; --neutral: #8b949e; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181d; --raised: #1d2229; --ink: #e8ebee; --soft: #a3adb8; --grid: #343b44;
  --gloo: #ff8f4d; --plain: #e3c04b; --dlcp: #5cb6f2; --dlcp_priority: #3fcf9f; --neutral: #7d8894; } }
svg text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .on { fill: var(--paper); } svg .strong { font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 5px; stroke-linejoin: round; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .line { fill: none; stroke-width: 2.25; stroke-linejoin: round; }
svg .shade { fill: var(--soft); opacity: .16; }
"""
"""Colours and type of page and drawings. Hues after Okabe and Ito, whom readers with colour-blindness tell apart."""

DASHES: Final = {"gloo": "2 3", "plain": "9 4", "dlcp": "", "dlcp_priority": "12 3 2 3"}
"""Line patterns by run, so that nothing is told by colour alone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from ``low`` to ``high`` to positions from ``start`` to ``stop``, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        if self.logarithmic:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Return about ``count`` round values within the scale, ascending; by logarithm 1, 2 and 5 of every decade."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        else:
            step = round_up((self.high - self.low) / count)
            first = math.ceil(self.low / step - 1e-9)
            ticks = [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def round_up(value: float) -> float:
    """Return the least of 1, 2, 2.5, 5 times a power of ten that is not less than ``value`` (> 0)."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= value * (1 - 1e-9))


class Drawing:
    """An SVG image being drawn, in pixels from the top left.

    Parameters
    ----------
    width, height
        Size of its coordinates; it is shown as wide as there is room.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def inline(self, title: str, description: str) -> str:
        """Return the drawing for a page that has ``STYLE``; title and description are for those who cannot see it."""
        names = f"<desc>{html.escape(description)}</desc>"
        label = html.escape(title, quote=True)
        box = f"0 0 {self.width:g} {self.height:g}"
        return f'<svg role="img" aria-label="{label}" viewBox="{box}">{names}{"".join(self._parts)}</svg>'

    def standalone(self, title: str, description: str) -> str:
        """Return the drawing as a file of its own."""
        names = f"<title>{html.escape(title)}</title><desc>{html.escape(description)}</desc>"
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" style="fill:var(--paper)"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{names}<style>{STYLE}</style>'
            f"{paper}{''.join(self._parts)}</svg>\n"
        )

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start", colour: str = "") -> None:
        """Write a line of text on the base line ``y``; ``anchor`` is start, middle or end."""
        style = f' style="fill:var(--{colour})"' if colour else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{css}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "grid", colour: str = "") -> None:
        """Draw a straight line."""
        style = f' style="stroke:var(--{colour})"' if colour else ""
        self._parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{css}"{style}/>')

    def path(self, points: Iterable[tuple[float, float]], colour: str, dash: str = "", tip: str = "") -> None:
        """Draw a line through points."""
        corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{corners}" class="line" stroke-dasharray="{dash}" '
            f'style="stroke:var(--{colour})">{_tip(tip)}</polyline>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str = "", tip: str = "", opacity: float = 1
    ) -> None:
        """Fill a rectangle; without a colour as a shade behind the rest."""
        look = f'style="fill:var(--{colour});opacity:{opacity:g}"' if colour else 'class="shade"'
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}" {look}>'
            f"{_tip(tip)}</rect>"
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 4, tip: str = "") -> None:
        """Draw a filled circle."""
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" style="fill:var(--{colour})">{_tip(tip)}</circle>'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Name the colours of runs in a row: pairs of colour and text, with the runs' line patterns."""
        for colour, text in entries:
            self.path([(x, y - 4), (x + 26, y - 4)], colour, DASHES.get(colour, ""))
            self.text(x + 32, y, text)
            x += 32 + text_width(text) + 22

    def axes(
        self,
        x: Scale,
        y: Scale,
        x_format: Callable[[float], str],
        y_format: Callable[[float], str],
        x_label: str = "",
        ticks: tuple[int, int] = (8, 5),
    ) -> None:
        """Draw grid lines, about as many ``ticks`` as given on x and y, and the label below."""
        for tick in y.ticks(ticks[1]):
            self.line(x.start, y(tick), x.stop, y(tick))
            self.text(x.start - 8, y(tick) + 4, y_format(tick), "soft", "end")
        for tick in x.ticks(ticks[0]):
            self.line(x(tick), y.start, x(tick), y.start + 5, "axis")
            self.text(x(tick), y.start + 19, x_format(tick), "soft", "middle")
        self.line(x.start, y.start, x.stop, y.start, "axis")
        if x_label:
            self.text((x.start + x.stop) / 2, y.start + 38, x_label, "soft", "middle")


def text_width(text: str) -> float:
    """Return about how wide a text is at 13 px, in px. 6.9 a character, measured on DejaVu Sans, a wide face."""
    return 6.9 * len(text)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tip(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
