# SPDX-License-Identifier: Apache-2.0
"""Published figures and what stands against each: ``summary.json``."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlcp import __version__
from sim.experiment import Claim
from sim.report.results import Results


class ReportError(RuntimeError):
    """There is nothing to report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim with what was measured; None where the runs for it are missing.

    Parameters
    ----------
    best
        The combination that gave the best value, where the claim asks for the best.
    """

    claim: Claim
    experiment: str
    measured: float | None
    best: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        claim = self.claim
        found: dict[str, Any] = {
            "name": f"{self.experiment}.{claim.name}",
            "paper": claim.paper,
            "measured": None if self.measured is None else round(self.measured, 3),
            "unit": claim.unit,
            "source": claim.source,
        }
        if claim.paper is not None and self.measured is not None:
            found["deviation"] = round(self.measured - claim.paper, 3)
        return found | ({"at": self.best} if self.best else {}) | ({"reason": claim.reason} if claim.reason else {})


def findings(results: Results) -> list[Finding]:
    """Return what an experiment's runs say to its claims."""
    return [_finding(results, claim) for claim in results.experiment.claims]


def _finding(results: Results, claim: Claim) -> Finding:
    ours = results.values(claim.metric, claim.ours)
    if claim.form == "value":
        return _best(results, claim, ours)
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for rest, value in ours.items():
        # The other axes stay what they are; an axis that only ``theirs`` names is where the two differ.
        where = {axis: name for axis, name in rest if axis not in claim.theirs} | _shared(claim) | claim.theirs
        theirs = results.value(claim.metric, where)
        if theirs and value:
            found[rest] = 100 * (value / theirs - 1 if claim.form == "change_percent" else theirs / value - 1)
    return _best(results, claim, found)


def _shared(claim: Claim) -> dict[str, str]:
    return {axis: name for axis, name in claim.ours.items() if axis not in claim.theirs}


def _best(results: Results, claim: Claim, found: Mapping[tuple[tuple[str, str], ...], float]) -> Finding:
    name = results.experiment.name
    if not found:
        return Finding(claim, name, None)
    if claim.over == "mean":
        return Finding(claim, name, math.fsum(found.values()) / len(found))
    pick = min if claim.form == "change_percent" else max
    rest = pick(found, key=lambda key: found[key])
    return Finding(claim, name, found[rest], ", ".join(f"{axis} {point}" for axis, point in rest))


def write_summary(every: Sequence[Results], path: Path) -> list[Finding]:
    """Write ``summary.json`` and return the findings.

    Raises
    ------
    ReportError
        No experiment has any results.
    """
    if not any(results.documents for results in every):
        raise ReportError("there are no results of this version and these settings; run `dlcp sim sweep` first")
    found = [finding for results in every for finding in findings(results)]
    document = {
        "version": __version__,
        "seeds": sorted({int(item["seed"]) for results in every for _, item in results.documents}),
        "figures": [finding.as_json() for finding in found],
        "missing_runs": {results.experiment.name: len(results.missing) for results in every if results.missing},
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found
