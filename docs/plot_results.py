# SPDX-License-Identifier: Apache-2.0
"""Draws ``results.svg`` from the table in README.md: ``python docs/plot_results.py [FILE]``; ``-`` prints it."""

import io
import re
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
_ROW = re.compile(r"^\| (.*?) \|.*?\|.*?\| \**([\d.]+)x", re.MULTILINE)
_LABEL_CHARACTERS = 44


def draw(readme: str) -> str:
    """Return the plot of a README's table as SVG: a bar for each row, from 1 on, the speed of Gloo."""
    rows = _ROW.findall(readme)
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dlcp", "font.family": "sans-serif", "font.size": 10})
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes = figure.add_subplot()
    ratios = [float(ratio) for _, ratio in rows]
    colours = ["#2f6f4f" if ratio >= 1 else "#b5543a" for ratio in ratios]
    axes.barh(range(len(rows)), [ratio - 1 for ratio in ratios], left=1, color=colours, height=0.6)
    axes.set_yticks(range(len(rows)), [_short(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    for place, ratio in enumerate(ratios):
        axes.text(max(ratio, 1) + 0.02, place, f"{ratio:g}x", va="center")
    axes.set_xlim(0.5, 2.4)
    axes.set_xlabel("speed of DLCP; 1 is the speed of Gloo")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _short(name: str) -> str:
    words, _, rest = name.partition(",")
    return f"{words},{rest}" if len(name) <= _LABEL_CHARACTERS else f"{words},\n{rest.strip()}"


if __name__ == "__main__":
    picture = draw((HERE.parent / "README.md").read_text())
    if sys.argv[1:] == ["-"]:
        print(picture, end="")
    else:
        Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "results.svg").write_text(picture)
