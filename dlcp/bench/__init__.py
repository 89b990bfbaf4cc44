# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: figures of two sides that took turns, with the machine, as one JSON document.

``dlcp bench allreduce`` is in this package; all other measurements are in ``tests/bench``.
"""

import os
import platform
import shlex
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlcp import __version__
from dlcp.host import installed_version, processor

_DIGITS: Final = 4
"""Significant digits of a figure; more would be noise."""
_LIMITS: Final = {
    "rmem_max_bytes": "net/core/rmem_max",
    "wmem_max_bytes": "net/core/wmem_max",
    "tcp_congestion_control": "net/ipv4/tcp_congestion_control",
}
_LOAD_BEFORE: Final = round(os.getloadavg()[0], 2)
"""Load of the last minute before this program measured anything."""


class BenchError(RuntimeError):
    """A measurement is not possible here; the message says why."""


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 of a single value, or if the median is 0."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One figure of a benchmark.

    Parameters
    ----------
    name
        Name of the measurement, ``area.what``.
    value, unit
        Our figure: the median over the runs, or the mean where rare runs matter.
    peer
        The figure of the other side; None if there is none.
    ratio
        Speed-up over the peer, more is better: the median of the ratios within each round.
    runs
        Number of runs of each side that count.
    spread
        Interquartile range of our runs over their median.
    details
        Further facts needed to judge the figure, as plain values.
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
) -> BenchResult:
    """Summarize the runs of one side, or of two sides of the same rounds.

    Parameters
    ----------
    values, peer_values
        One value per round, in ``unit``; both of the same length.

    Raises
    ------
    ValueError
        There are no values, or the sides have different numbers of values.
    """
    if not values or (peer_values is not None and len(peer_values) != len(values)):
        theirs = None if peer_values is None else len(peer_values)
        raise ValueError(f"{name}: {len(values)} values and {theirs} of the peer; each side needs one per round")
    ratio = None
    if peer_values is not None:
        pairs = zip(peer_values, values, strict=True) if smaller_is_better else zip(values, peer_values, strict=True)
        ratio = median([above / below for above, below in pairs])
    peer = None if peer_values is None else median(peer_values)
    return BenchResult(name, median(values), unit, peer, ratio, len(values), spread(values), details or {})


def document(results: Sequence[BenchResult], seed: int | None = None) -> dict[str, Any]:
    """Return a benchmark's whole document, with the machine as it is now, and the command line.

    Parameters
    ----------
    seed
        Seed of the order in which the sides took turns; None if they took none.
    """
    return {
        "machine": describe_machine(),
        "command": shlex.join(sys.argv),
        "seed": seed,
        "results": [entry.as_json() for entry in results],
    }


def say(words: str) -> None:
    """Print progress to standard error: standard output belongs to the document."""
    print(words, file=sys.stderr, flush=True)


def significant(value: float) -> float:
    """Round to a few significant digits; large numbers become whole ones."""
    if abs(value) >= 10**_DIGITS:
        return round(value)
    return float(f"{value:.{_DIGITS}g}")


def describe_machine() -> dict[str, Any]:
    """Return name, processor, kernel, versions, network buffers, and the load."""
    return {
        "host": socket.gethostname(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "dlcp": __version__,
        "numpy": installed_version("numpy"),
        "torch": installed_version("torch"),
        **{name: _kernel_setting(path) for name, path in _LIMITS.items()},
        "load_before": _LOAD_BEFORE,
    }


def _kernel_setting(path: str) -> int | str | None:
    """Return the content of a file below /proc/sys; None if there is no such file."""
    try:
        text = Path("/proc/sys", path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else text
