# SPDX-License-Identifier: Apache-2.0
"""What is measured in a run, as it goes on: memory does not grow with the number of messages."""

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from dlcp.sim.collectives import PULL_MESSAGE
from dlcp.sim.simulation import Running
from numpy.typing import NDArray

PRECISION: Final = 0.002
"""Quantiles are at most this much off, relatively. Chosen by us."""
QUANTILES: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
SMALL_BYTES: Final = 100_000
"""Flows up to this size are small ones, as in pFabric's and PIAS' figures."""
_BASE: Final = math.log1p(PRECISION)


@dataclass(slots=True)
class Distribution:
    """Times in picoseconds, counted in buckets that grow by `PRECISION`; the mean is exact."""

    count: int = 0
    total_ps: int = 0
    least_ps: int = 0
    most_ps: int = 0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, times_ps: NDArray[np.int64]) -> None:
        """Count times, int64 (n,)."""
        if not len(times_ps):
            return
        least, most = int(times_ps.min()), int(times_ps.max())
        self.least_ps = least if not self.count else min(self.least_ps, least)
        self.most_ps = max(self.most_ps, most)
        self.count += len(times_ps)
        self.total_ps += int(times_ps.sum())
        numbers = np.floor(np.log(np.maximum(times_ps, 1)) / _BASE).astype(np.int64)
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._buckets[int(number)] = self._buckets.get(int(number), 0) + int(count)

    @property
    def mean_s(self) -> float:
        """Return the mean in seconds, 0 without any."""
        return self.total_ps / self.count / 1e12 if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """Return the time in seconds that ``share`` of all do not exceed, 0 without any."""
        wanted, seen = share * self.count, 0
        for number in sorted(self._buckets):
            seen += self._buckets[number]
            if seen >= wanted:
                middle = math.exp((number + 0.5) * _BASE)
                return min(max(middle, self.least_ps), self.most_ps) / 1e12
        return 0.0

    def as_json(self) -> dict[str, Any]:
        """Return count, mean and quantiles."""
        return {
            "count": self.count,
            "mean_s": significant(self.mean_s),
            "quantiles_s": [[share, significant(self.quantile_s(share))] for share in QUANTILES],
        }


@dataclass(slots=True)
class Messages:
    """Completion times and losses, by what a message was: ``push`` (to be summed), ``pull`` (results), ``other``.

    A message's time runs from when its sender had it to when its target had what it needed; waiting for others of the
    same sender counts.

    Parameters
    ----------
    traffic
        Names of what is not training.
    """

    traffic: frozenset[str] = frozenset()
    times: dict[str, Distribution] = field(
        default_factory=lambda: {name: Distribution() for name in ("all", "push", "pull", "other", "other_small")}
    )
    packets: int = 0
    missing: int = 0
    sent: int = 0

    def __call__(self, running: Running, records: NDArray[Any]) -> None:
        """Take in the records of a graph; messages of it that are not over do not count."""
        nodes = running.graph.nodes
        sends = (nodes["size_bytes"] > 0) & (records["end_ps"] > 0)
        nodes, records = nodes[sends], records[sends]
        took = records["end_ps"] - records["begin_ps"]
        if running.label[0] in self.traffic:
            self.times["other"].add(took)
            self.times["other_small"].add(took[nodes["size_bytes"] <= SMALL_BYTES])
            return
        pulls = (nodes["message"] & PULL_MESSAGE) != 0
        self.times["all"].add(took)
        self.times["push"].add(took[~pulls])
        self.times["pull"].add(took[pulls])
        self.packets += int(records["packets"][~pulls].sum())
        self.missing += int(records["missing_packets"][~pulls].sum())
        self.sent += int(records["sent_packets"].sum())

    @property
    def loss_ratio(self) -> float:
        """Return the share of packets to be summed that never came."""
        return self.missing / self.packets if self.packets else 0.0


def significant(value: float, digits: int = 9) -> float:
    """Return a number with that many significant digits, which is all that a file needs."""
    return float(f"{value:.{digits}g}")
