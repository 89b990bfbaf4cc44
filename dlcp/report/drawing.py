# SPDX-License-Identifier: Apache-2.0
"""Common style of all plots: SVG by Matplotlib that follows the reader's light or dark mode.

Importing this module loads Matplotlib, which takes a second: import it only where plots are drawn.
"""

import html
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlcp.report.style import COLOURS, STYLE

PAPER, INK, SOFT, GRID = (COLOURS[name][0] for name in ("paper", "ink", "soft", "grid"))
WIDE_PX: Final = 920
HALF_PX: Final = 420
"""Widths of a plot, in px."""
TEXT_PX_MIN: Final = 11
"""Least size of a plot's text on a page, in px: a common minimum for text on phones. Narrower pages scroll the plot."""

_SVG: Final = "{http://www.w3.org/2000/svg}"
_NAMESPACES: Final = (' xmlns="http://www.w3.org/2000/svg"', ' xmlns:xlink="http://www.w3.org/1999/xlink"')
_TIP: Final = "tip:"
_FONT_PX: Final = re.compile(r"\bfont(?:-size)?:[^;\"]*?([\d.]+)px")
_LONG: Final = re.compile(r"-?\d+\.\d{3,}")
_VARIABLES: Final = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_SETTINGS: Final[Any] = {
    "svg.fonttype": "none",
    "figure.dpi": 72,  # so that a point is a pixel
    "savefig.dpi": 72,
    "figure.constrained_layout.use": True,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    # It comes with Matplotlib and is the widest font that a reader may see, so texts fit in any of them.
    "font.family": "DejaVu Sans",
    "font.size": 13,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 13,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0,
    "grid.color": GRID,
    "grid.linewidth": 1,
    "xtick.bottom": False,
    "ytick.left": False,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "lines.linewidth": 2.25,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0.2,
    "legend.handlelength": 2,
    "legend.columnspacing": 1.6,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its title and caption."""

    name: str
    title: str
    caption: str
    inline: str
    """SVG for a page with the style sheet ``STYLE``."""

    @property
    def readable_px(self) -> int:
        """The least width on a page, in px, at which all text has at least :data:`TEXT_PX_MIN`."""
        width = float(self.inline.split(' width="', 1)[1].split('"', 1)[0])
        smallest = min(map(float, _FONT_PX.findall(self.inline)))
        return math.ceil(width * TEXT_PX_MIN / smallest)

    @property
    def standalone(self) -> str:
        """The SVG as a file of its own."""
        opened = self.inline.replace("<svg", "<svg" + "".join(_NAMESPACES), 1)
        return opened.replace(">", f"><title>{html.escape(self.title, quote=False)}</title><style>{STYLE}</style>", 1)


@contextmanager
def look() -> Iterator[None]:
    """Give figures that are created inside the common style."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def blank(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of a size in px, and its axes, from top to bottom."""
    figure = Figure(figsize=(width / 72, height / 72))
    FigureCanvasSVG(figure)
    return figure, figure.subplots(rows, 1, squeeze=False, **options)[:, 0].tolist()


def finish(figure: Figure, name: str, title: str, caption: str) -> Plot:
    """Return a figure as a plot. The same figure gives the same text on every machine."""
    text = io.BytesIO()
    # The salt keeps the names of marks unique among the plots of a page.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(text.getvalue())
    for child in [*root.iterfind(f"{_SVG}metadata"), *root.iterfind(f"{_SVG}defs")]:
        root.remove(child)  # about Matplotlib, and a style that would apply to the whole page
    width, height = root.get("viewBox", "").split()[2:]
    for key in ("width", "height", "version"):
        root.attrib.pop(key)
    root.attrib |= {"role": "img", "aria-label": title, "width": width, "height": height}
    for element in root.iter():
        _clean(element)
    description = ElementTree.Element(f"{_SVG}desc")
    description.text = caption
    root.insert(0, description)
    ElementTree.register_namespace("", _SVG[1:-1])
    inline = ElementTree.tostring(root, encoding="unicode")
    for namespace in _NAMESPACES:
        inline = inline.replace(namespace, "")
    return Plot(name, title, caption, re.sub(r"\n\s*", "\n", inline))


def tip(artist: Artist, text: str) -> None:
    """Show a text when the pointer rests on an artist."""
    artist.set_gid(_TIP + text)


def legend(figure: Figure, entries: Mapping[str, Mapping[str, Any]], columns: int, **options: Any) -> None:
    """Explain colours and lines above a figure.

    Parameters
    ----------
    entries
        Style by text: of a line (``color``, ``linestyle``), or without ``linestyle`` of a filled square.
    """
    handles = [
        Line2D([], [], label=text, **style) if "linestyle" in style else Patch(label=text, **style)
        for text, style in entries.items()
    ]
    squares = {} if any("linestyle" in style for style in entries.values()) else {"handlelength": 1, "handleheight": 1}
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, **squares, **options)


def _clean(element: ElementTree.Element) -> None:
    """Replace colours by variables and names by tips, and remove what the style sheet defines."""
    style = element.get("style", "")
    if style:
        style = re.sub(r"#[0-9a-f]{6}", lambda found: _VARIABLES.get(found.group(), found.group()), style)
        element.set("style", style.replace("font-family: 'DejaVu Sans'; ", ""))
    if element.tag == f"{_SVG}text" and "rotate(-0" in element.get("transform", ""):
        element.attrib.pop("transform")
    name = element.attrib.pop("id", "") if element.tag == f"{_SVG}g" else ""
    if name.startswith(_TIP):
        title = ElementTree.Element(f"{_SVG}title")
        title.text = name.removeprefix(_TIP)
        element.insert(0, title)
    element.attrib.pop("clip-path", None)  # no data lie outside the axes
    for key, value in list(element.attrib.items()):
        if key in ("d", "x", "y"):
            element.set(key, _LONG.sub(lambda found: f"{float(found.group()):.2f}", value))
        elif key.endswith("}href"):
            element.set("href", element.attrib.pop(key))
