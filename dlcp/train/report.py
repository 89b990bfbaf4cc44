# SPDX-License-Identifier: Apache-2.0
"""What each rank leaves behind for the launcher to read: one JSON file a rank."""

import json
import os
from pathlib import Path
from typing import Any

Report = dict[str, Any]
"""``rank``, ``ranks``, ``restart``, ``error`` (None, or the last line of what went wrong), ``backend`` (None without
``--backend``), ``models`` (a list), and ``measured`` (None without ``--measure``)."""


def write_report(folder: Path, report: Report) -> None:
    """Write one rank's report, whole or not at all."""
    path = folder / f"rank-{report['rank']}-{report['restart']}.json"
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps(report))
    part.replace(path)


def read_reports(folder: Path) -> list[Report]:
    """Return the reports of the last start, by rank: torchrun may have started the ranks again after a failure."""
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    last = max((report["restart"] for report in reports), default=0)
    return sorted((report for report in reports if report["restart"] == last), key=lambda report: int(report["rank"]))
