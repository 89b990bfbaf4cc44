# SPDX-License-Identifier: Apache-2.0
"""How benchmarks measure and report: contenders in turns, medians of ratios, and one JSON document.

Contenders take turns, so that whatever else the machine does affects all of them alike. The document has one
``machine``, and ``results`` with ratios of which more is better.
"""

import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlcp import __version__

Samples = dict[str, list[float]]
"""What was measured, by contender: one value a round, round by round."""
_DIGITS: Final = 4
"""Significant digits of a figure; more would be noise."""
LEAST_ROUNDS: Final = 5
"""Rounds that a time budget leaves in any case: with fewer, quartiles say nothing."""
_HOPELESS: Final = 3.0
"""How many times another's slowest run a contender's fastest must take before it leaves."""
_HOPELESS_RUNS: Final = 2
_LIMITS: Final = {
    "rmem_max_bytes": "net/core/rmem_max",
    "wmem_max_bytes": "net/core/wmem_max",
    "tcp_congestion_control": "net/ipv4/tcp_congestion_control",
}
_LOAD_BEFORE: Final = round(os.getloadavg()[0], 2)
"""Of the last minute before this program measured anything: what others do at the same time."""


class BenchError(RuntimeError):
    """Something cannot be measured here; the message says why."""


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 2,
    seed: int = 1,
    progress: Callable[[str], None] | None = None,
    budget_s: float | None = None,
    may_leave: Sequence[str] = (),
) -> Samples:
    """Run every contender once a round, in an order that is drawn anew for each round.

    Parameters
    ----------
    contenders
        What each returns is its value in that round.
    rounds, warm_up
        Rounds that count, and rounds before them that do not.
    seed
        Of the orders.
    progress
        Called with a line about every round.
    budget_s
        Stop once the next round would exceed it, warm-ups included, but not before :data:`LEAST_ROUNDS` rounds. None:
        unlimited.
    may_leave
        Contenders of which only the fastest counts. With a budget, one leaves when its fastest run takes three times
        the slowest run of another of them; it then has fewer samples.

    Raises
    ------
    ValueError
        There is nothing to run.
    """
    if not contenders or rounds < 1 or warm_up < 0:
        raise ValueError(f"{len(contenders)} contenders, {rounds} rounds and {warm_up} before them: nothing to measure")
    samples: Samples = {name: [] for name in contenders}
    draw = random.Random(seed)
    began_s = time.monotonic()
    runs: Samples = {name: [] for name in contenders}
    staying = list(contenders)
    for number in range(-warm_up, rounds):
        order = list(staying)
        draw.shuffle(order)
        values = {name: contenders[name]() for name in order}
        for name, value in values.items():
            runs[name].append(value)
            if number >= 0:
                samples[name].append(value)
        if progress:
            figures = ", ".join(f"{name} {values[name]:.4g}" for name in staying)
            progress(f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {figures}")
        if budget_s is None or number < 0:
            continue
        left = hopeless({name: runs[name] for name in may_leave if name in staying})
        staying = [name for name in staying if name not in left]
        per_round_s = (time.monotonic() - began_s) / (number + 1 + warm_up)
        if number + 1 >= LEAST_ROUNDS and per_round_s * (number + 2 + warm_up) > budget_s:
            break
    return samples


def hopeless(runs: Samples) -> set[str]:
    """Return the contenders whose fastest of two runs or more takes three times another's slowest, or longer."""
    enough = {name: times for name, times in runs.items() if len(times) >= _HOPELESS_RUNS}
    if not enough:
        return set()
    limit = _HOPELESS * min(max(times) for times in enough.values())
    return {name for name, times in enough.items() if min(times) >= limit}


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.fmean(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, 1 to 99, interpolated between values."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One figure of a benchmark.

    Parameters
    ----------
    name
        What was measured, ``area.what``.
    value, unit
        Ours: the median over the runs; the mean where rare runs count (:func:`mean_against`).
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
) -> BenchResult:
    """Summarize the runs of one side, or of two sides of the same rounds.

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
    return BenchResult(name, median(values), unit, peer, ratio, len(values), spread(values), details or {})


def against_best(
    name: str, unit: str, samples: Samples, ours: str, peers: Sequence[str], details: Mapping[str, Any] | None = None
) -> BenchResult:
    """Compare times of ours with that of the peers' settings whose median is best; ``details`` name it.

    A peer that left early (see :func:`interleave`) is compared over the rounds that it took part in.

    Parameters
    ----------
    samples
        Times by contender, from :func:`interleave`.
    ours, peers
        Names of contenders.
    """
    best = min(peers, key=lambda peer: median(samples[peer]))
    tried = {peer: significant(median(samples[peer])) for peer in peers}
    mine = samples[ours][: len(samples[best])]
    ratios = [theirs / own for theirs, own in zip(samples[best], mine, strict=True)]
    more = {
        "peer": best,
        "peers_tried": tried,
        "ratio_quartiles": [significant(percentile(ratios, percent)) for percent in (25, 75)],
        # Medians hide what happens to fewer than half of the runs, as the loss of a small message's only packet.
        "ratio_of_means": significant(min(mean(samples[peer]) for peer in peers) / mean(samples[ours])),
        **(details or {}),
    }
    return result(name, unit, mine, samples[best], details=more)


def mean_against(
    name: str, unit: str, samples: Samples, ours: str, peer: str, details: Mapping[str, Any] | None = None
) -> BenchResult:
    """Compare means, where it is rare runs that count; ``details`` have everybody's mean and 99th percentile.

    Parameters
    ----------
    samples
        Times by contender, from :func:`interleave`.
    ours, peer
        Names of contenders.
    """
    means = {contender: mean(values) for contender, values in samples.items()}
    more = {
        "peer": peer,
        "means": {contender: significant(value) for contender, value in means.items()},
        "p99": {contender: significant(percentile(values, 99)) for contender, values in samples.items()},
        **(details or {}),
    }
    mine = samples[ours]
    return BenchResult(name, means[ours], unit, means[peer], means[peer] / means[ours], len(mine), spread(mine), more)


def document(results: Sequence[BenchResult], failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a benchmark's whole document, with the machine as it is now.

    ``failed`` has, by name, why a cell of a sweep has no result; the document names it only if there is one.
    """
    found = {"machine": describe_machine(), "results": [entry.as_json() for entry in results]}
    return found | {"failed": dict(failed)} if failed else found


def show(results: Sequence[BenchResult], failed: Mapping[str, str] | None = None) -> None:
    """Print the document to standard output."""
    print(json.dumps(document(results, failed), indent=2))


def say(words: str) -> None:
    """Print progress to standard error: standard output belongs to the document."""
    print(words, file=sys.stderr, flush=True)


def significant(value: float) -> float:
    """Round to a few significant digits; large numbers become whole ones."""
    if abs(value) >= 10**_DIGITS:
        return round(value)
    return float(f"{value:.{_DIGITS}g}")


def describe_machine() -> dict[str, Any]:
    """Return processor, kernel, versions, network buffers, and the load."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "dlcp": __version__,
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        **{name: _kernel_setting(path) for name, path in _LIMITS.items()},
        "load_before": _LOAD_BEFORE,
    }


def processor() -> str:
    """Return the name of the processor, from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel_setting(path: str) -> int | str | None:
    """Return what a file below /proc/sys holds; None where there is no such file."""
    try:
        text = Path("/proc/sys", path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else text
