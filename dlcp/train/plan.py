# SPDX-License-Identifier: Apache-2.0
"""What passes between the launcher and its workers: a plan, as variables of the environment, and reports, as files."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Report = dict[str, Any]
"""``rank``, ``ranks``, ``restart``, ``error`` (None, or the last line of what went wrong), ``backend`` (None without
``--backend``), ``models`` (a list), and ``measured`` (None without ``--measure``)."""
_REPORTS: Final = "DLCP_TRAIN_REPORTS"
_BACKEND: Final = "DLCP_TRAIN_BACKEND"
_MEASURE: Final = "DLCP_TRAIN_MEASURE"
_ADVISE: Final = "DLCP_TRAIN_ADVISE"


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a worker is to do beside running the script.

    Parameters
    ----------
    backend
        Make ``init_process_group`` use DLCP's backend.
    measure_steps
        How many steps to measure, instead of training; 0 trains.
    advise
        Choose settings by what is measured, and try them.
    """

    backend: bool = False
    measure_steps: int = 0
    advise: bool = False

    def as_environment(self, reports: Path) -> dict[str, str]:
        """Return the variables that tell a worker of this plan, and where to leave its report."""
        return {
            _REPORTS: str(reports),
            _BACKEND: str(int(self.backend)),
            _MEASURE: str(self.measure_steps),
            _ADVISE: str(int(self.advise)),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "TrainPlan":
        """Return the plan that the launcher wrote down."""
        environment = os.environ if environment is None else environment
        return cls(
            environment.get(_BACKEND) == "1", int(environment.get(_MEASURE, "0")), environment.get(_ADVISE) == "1"
        )


def report_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return where a worker leaves its report; None without a launcher."""
    environment = os.environ if environment is None else environment
    return Path(environment[_REPORTS]) if environment.get(_REPORTS) else None


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
