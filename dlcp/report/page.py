# SPDX-License-Identifier: Apache-2.0
"""Reports: each is one self-contained page, with its plots beside it as files.

``python -m dlcp.report.page out/demo`` creates the demo's page and summary again, from ``out/demo/runs/*.json``.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlcp.report.drawing import Plot
from dlcp.report.plots import HUES, draw_all
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
from dlcp.report.style import FILTERS, SHORT_NAMES, TEMPLATES, render, sentence


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
        FILTERS,
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
