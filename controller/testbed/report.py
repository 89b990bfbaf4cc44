# SPDX-License-Identifier: Apache-2.0
"""The page of the runs on a testbed: the demo's, with what hosts and switches counted side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlcp.commands.demo import tell
from dlcp.demo.summary import Run, load_runs, summarize, write_summary
from dlcp.report.page import write_report

if TYPE_CHECKING:
    from rich.console import Console


def write(console: "Console", folder: Path) -> dict[str, Run]:
    """Write summary and page of the runs in a folder, say in a few lines what came out, and return the runs.

    Raises
    ------
    RunFileError
        A run is missing, or the runs cannot be compared.
    """
    runs = load_runs(folder)
    summary: dict[str, Any] = summarize(runs)
    write_summary(summary, folder)
    tell(console, summary, write_report(runs, summary, folder))
    return runs


def disagreements(runs: Mapping[str, Run]) -> list[str]:
    """Return a line for each comparison in which hosts and switches counted differently."""
    return [
        f"{name}: {finding['what']}: {finding['hosts']} and {finding['switches']}. {finding['note']}"
        for name, run in runs.items()
        for finding in run.get("agreement", ())
        if finding["agree"] is False
    ]
