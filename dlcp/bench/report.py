# SPDX-License-Identifier: Apache-2.0
"""The form of a benchmark's document: one ``machine``, and ``results`` with ratios of which more is better."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlcp.bench.interleave import Samples, median, spread
from dlcp.bench.machine import describe

DIGITS = 4
"""Significant digits of a figure; more would be noise."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure of a benchmark.

    Parameters
    ----------
    name
        What was measured, ``area.what``.
    value, unit
        Ours: the median over the runs.
    peer
        The same of what it is compared with; None where there is no peer.
    ratio
        Ours over the peer's, turned so that more is better: the median of the ratios within each round.
    runs
        How many runs of each side count.
    spread
        Interquartile range of our runs over their median.
    details
        Whatever else a reader needs to judge the figure, in plain values.
    """

    name: str
    value: float
    unit: str
    peer: float | None
    ratio: float | None
    runs: int
    spread: float
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, without ``details`` if there are none."""
        known: dict[str, Any] = {
            "name": self.name,
            "value": significant(self.value),
            "unit": self.unit,
            "peer": None if self.peer is None else significant(self.peer),
            "ratio": None if self.ratio is None else significant(self.ratio),
            "runs": self.runs,
            "spread": significant(self.spread),
        }
        return known | {"details": dict(self.details)} if self.details else known


def result(
    name: str,
    unit: str,
    values: Sequence[float],
    peer_values: Sequence[float] | None = None,
    *,
    smaller_is_better: bool = True,
    details: Mapping[str, Any] | None = None,
) -> Result:
    """Sum up the runs of one side, or of two sides of the same rounds.

    Parameters
    ----------
    values, peer_values
        One value a round, in ``unit``; both of the same length, round by round.

    Raises
    ------
    ValueError
        There are no values, or not as many of one side as of the other.
    """
    if not values or (peer_values is not None and len(peer_values) != len(values)):
        raise ValueError(
            f"{name}: {len(values)} values and {None if peer_values is None else len(peer_values)} of the peer; "
            "both sides need one a round"
        )
    ratio = None
    if peer_values is not None:
        pairs = zip(peer_values, values, strict=True) if smaller_is_better else zip(values, peer_values, strict=True)
        ratio = median([above / below for above, below in pairs])
    peer = None if peer_values is None else median(peer_values)
    return Result(name, median(values), unit, peer, ratio, len(values), spread(values), details or {})


def against_best(
    name: str, unit: str, samples: Samples, ours: str, peers: Sequence[str], details: Mapping[str, Any] | None = None
) -> Result:
    """Compare times of ours with that of the peers' settings whose median is best; ``details`` name it.

    Parameters
    ----------
    samples
        Times by contender, from :func:`dlcp.bench.interleave.interleave`.
    ours, peers
        Names of contenders.
    """
    best = min(peers, key=lambda peer: median(samples[peer]))
    tried = {peer: significant(median(samples[peer])) for peer in peers}
    return result(
        name, unit, samples[ours], samples[best], details={"peer": best, "peers_tried": tried, **(details or {})}
    )


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Return a benchmark's whole document, with the machine as it is now."""
    return {"machine": describe(), "results": [entry.as_json() for entry in results]}


def show(results: Sequence[Result]) -> None:
    """Print the document to standard output."""
    print(json.dumps(document(results), indent=2))


def say(words: str) -> None:
    """Tell a waiting person something, on standard error: standard output belongs to the document."""
    print(words, file=sys.stderr, flush=True)


def significant(value: float) -> float:
    """Round to a few significant digits; large numbers become whole ones."""
    if abs(value) >= 10**DIGITS:
        return round(value)
    return float(f"{value:.{DIGITS}g}")
