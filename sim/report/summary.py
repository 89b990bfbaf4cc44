# SPDX-License-Identifier: Apache-2.0
"""Published figures and what stands against each: ``summary.json``."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlcp import __version__
from dlcp.sim.experiment import Claim
from dlcp.sim.report.results import Combination, Results, Spread
from dlcp.sim.running import sources_digest


class ReportError(RuntimeError):
    """There is nothing to report."""


@dataclass(frozen=True, slots=True)
class ClaimFinding:
    """A claim with what was measured; None where the runs for it are missing.

    Parameters
    ----------
    best
        The combination that gave the best value, where the claim asks for the best.
    """

    claim: Claim
    experiment: str
    measured: Spread | None
    best: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; ``measured`` is the mean over the seeds, ``spread`` the least and the most."""
        claim, measured = self.claim, self.measured
        found: dict[str, Any] = {
            "name": f"{self.experiment}.{claim.name}",
            "paper": claim.paper,
            "measured": None if measured is None else _rounded(measured.mean, claim.unit),
            "unit": claim.unit,
            "source": claim.source or "nothing is published",
        }
        if measured is not None:
            ends = [_rounded(measured.least, claim.unit), _rounded(measured.most, claim.unit)]
            found |= {"spread": ends, "seeds": measured.seeds}
            if claim.paper is not None:
                found["deviation"] = _rounded(measured.mean - claim.paper, claim.unit)
        words = {"at": self.best, "against": claim.against, "reason": claim.reason}
        return found | {name: text for name, text in words.items() if text}


def findings(results: Results) -> list[ClaimFinding]:
    """Return what an experiment's runs say to its claims."""
    return [_finding(results, claim) for claim in results.experiment.claims]


def _finding(results: Results, claim: Claim) -> ClaimFinding:
    ours = results.values(claim.metric, claim.ours)
    if claim.form == "value":
        return _chosen(results, claim, ours)
    found: dict[Combination, dict[int, float]] = {}
    for rest, values in ours.items():
        # The other axes stay what they are; an axis that only ``theirs`` names is where the two differ.
        where = {axis: name for axis, name in rest if axis not in claim.theirs} | _shared(claim) | claim.theirs
        theirs = results.value(claim.metric, where)
        # Seed by seed, for both have the same hosts and the same jitter then.
        pairs = {seed: (value, theirs[seed]) for seed, value in values.items() if value and theirs.get(seed)}
        if pairs:
            found[rest] = {seed: _percent(claim, *pair) for seed, pair in pairs.items()}
    return _chosen(results, claim, found)


def _percent(claim: Claim, ours: float, theirs: float) -> float:
    return 100 * (ours / theirs - 1 if claim.form == "change_percent" else theirs / ours - 1)


def _shared(claim: Claim) -> dict[str, str]:
    return {axis: name for axis, name in claim.ours.items() if axis not in claim.theirs}


def _rounded(value: float, unit: str) -> float:
    """Return percents with three decimals, all else, such as seconds, with four digits that count."""
    return round(value, 3) if unit == "%" else float(f"{value:.4g}")


def _chosen(results: Results, claim: Claim, found: Mapping[Combination, Mapping[int, float]]) -> ClaimFinding:
    """Return the best combination by its mean over seeds, or every seed's mean over the combinations."""
    name = results.experiment.name
    if not found:
        return ClaimFinding(claim, name, None)
    if claim.over == "mean":
        seeds = set.intersection(*(set(values) for values in found.values()))
        if not seeds:
            return ClaimFinding(claim, name, None)
        means = [math.fsum(values[seed] for values in found.values()) / len(found) for seed in sorted(seeds)]
        return ClaimFinding(claim, name, Spread.of(means))
    spreads = {rest: Spread.of(list(values.values())) for rest, values in found.items()}
    pick = min if claim.form == "change_percent" else max
    rest = pick(spreads, key=lambda key: spreads[key].mean)
    return ClaimFinding(claim, name, spreads[rest], ", ".join(f"{axis} {point}" for axis, point in rest))


def write_summary(every: Sequence[Results], path: Path) -> list[ClaimFinding]:
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
        "sources": sources_digest(),
        "seeds": sorted({int(item["seed"]) for results in every for _, item in results.documents}),
        "figures": [finding.as_json() for finding in found],
        "missing_runs": {results.experiment.name: len(results.missing) for results in every if results.missing},
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found
