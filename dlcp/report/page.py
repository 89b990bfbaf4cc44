# SPDX-License-Identifier: Apache-2.0
"""The demo's report: one page that needs nothing but itself, and its figures as files.

``python -m dlcp.report.page out/demo`` makes both again, and the summary, from ``out/demo/runs/*.json``.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from dlcp.report import wording
from dlcp.report.plots import Figure, draw_all
from dlcp.report.runs import RUN_NAMES, Run, RunFileError, load_runs, summarize, write_summary
from dlcp.report.svg import STYLE

EXPLANATIONS: Final = {
    "gloo": "What people use today: PyTorch's Gloo over the kernel's TCP, which slows down when a queue overflows.",
    "plain": "DLCP's own transport used plainly: every packet reliable, first in first out, without tags.",
    "dlcp": "DLCP: tagged by layer and magnitude, with bounded loss. Held to its fair share of a port: what it sends "
    "beyond that waits behind everybody else's traffic.",
    "dlcp_priority": "The same, but always ahead of the background, as an operator may choose for an urgent job.",
}


def write_report(runs: Mapping[str, Run], summary: Mapping[str, Any], directory: Path) -> Path:
    """Write ``report.html`` and each of its figures as ``NAME.svg``.

    Parameters
    ----------
    runs, summary
        Run files by name, and what :func:`dlcp.report.runs.summarize` makes of them.
    directory
        Where to; made if it does not exist.

    Returns
    -------
    The page's path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    runs = {name: runs[name] for name in RUN_NAMES if name in runs}
    figures = draw_all(runs, summary)
    for figure in figures.values():
        (directory / f"{figure.name}.svg").write_text(figure.standalone, encoding="utf-8")
    page = directory / "report.html"
    page.write_text(render(runs, summary, figures), encoding="utf-8")
    return page


def render(runs: Mapping[str, Run], summary: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": wording.percent,
        "duration": wording.duration,
        "bit_rate": wording.bit_rate,
        "in_words": wording.in_words,
        "count": lambda number: "-" if number is None else f"{number:,}",
    }
    template = environment.from_string((resources.files("dlcp.report") / "report.html").read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        summary=summary,
        figures=figures,
        style=STYLE,
        page_style=page_style(),
        headline=wording.headline(summary),
        second=wording.second_sentence(summary),
        names=wording.SHORT_NAMES,
        explanations=EXPLANATIONS,
        fair_share=wording.fair_share_ratio,
        versus=wording.versus,
        machine=runs["dlcp"]["versions"],
        command=runs["dlcp"]["command"],
        fabric=runs["dlcp"]["fabric"],
        testbed=wording.testbed_words(runs["dlcp"]),
        agreements={name: run["agreement"] for name, run in runs.items() if "agreement" in run},
        agreement_sentence=wording.agreement_sentence(runs),
        late_s=_worst(runs, "late_max_s"),
        busy=_worst(runs, "busy"),
    )


def page_style() -> str:
    """Return the style sheet that all our pages have in common."""
    return resources.files("dlcp.report").joinpath("style.html").read_text(encoding="utf-8")


def _worst(runs: Mapping[str, Run], counter: str) -> float | None:
    """Return the largest value of a switch's counter over all runs, or None if a run lacks it."""
    values = [run["switch"].get(counter) for run in runs.values()]
    return None if None in values else max(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make summary and report again from the runs in a directory."""
    parser = argparse.ArgumentParser(description="Make the demo's summary and report again from its runs.")
    parser.add_argument("directory", type=Path, help="the demo's folder, such as out/demo")
    directory = parser.parse_args(arguments).directory
    try:
        runs = load_runs(directory)
    except RunFileError as error:
        print(error, file=sys.stderr)
        return 1
    summary = summarize(runs)
    write_summary(summary, directory)
    print(write_report(runs, summary, directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
