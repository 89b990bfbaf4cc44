# SPDX-License-Identifier: Apache-2.0
"""All-reduce beside bursts of other traffic: how a step grows with the tail of latency.

OptiReduce (NSDI '25) describes an environment by the ratio of the 99th percentile of latency to the median, which
background traffic sets, and asks how much longer a step takes where that ratio is larger. Here the latency is that of
Gloo's ring alone. Bursts of datagrams at the rate of the port go into each host's port, at random and once a second in
the mean. How long they are is found by trying lengths out until the ring has the wanted ratio. Then all contenders take
turns beside bursts of that length. Which ratio the ring had in these turns is reported with the times.
"""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, NamedTuple

from dlcp.bench import allreduce
from dlcp.bench.allreduce import LOSSLESS, LOSSY, AllReduceContender, contenders
from dlcp.bench.path import RoutedPath
from dlcp.bench.results import BenchResult, Samples, mean, mean_against, percentile, significant
from dlcp.processes import Fork

RATIOS: Final = (1.0, 1.5, 3.0)
"""Those that OptiReduce compares."""
_LENGTHS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Mean lengths of bursts that are tried, the shortest first, until one has the largest ratio. Chosen by us."""
_BURSTS_PER_S: Final = 1.0
"""Into each port. Chosen by us: several steps lie between two."""
_DATAGRAM: Final = bytes(1472)
_FRAME_BYTES: Final = 1514
_TURN_S: Final = 0.001
"""Datagrams of so long leave together. Chosen by us: a tenth of what a port's queue holds."""
_PORT: Final = 9
_VALUE_BYTES: Final = 4


class PortBurst(NamedTuple):
    """A burst into one rank's port, in seconds."""

    start_s: float
    stop_s: float
    rank: int


def bursts(ranks: int, length_s: float, seconds: float, seed: int) -> list[PortBurst]:
    """Return bursts in the order of their beginnings; lengths and pauses are distributed exponentially."""
    found = []
    for rank in range(ranks):
        # Text, so that neither neighbours nor lengths begin with the same numbers.
        draw = random.Random(f"{seed} {rank} {length_s}")
        now_s = draw.expovariate(_BURSTS_PER_S)
        while now_s < seconds:
            stop_s = now_s + draw.expovariate(1 / length_s)
            found.append(PortBurst(now_s, stop_s, rank))
            now_s = stop_s + draw.expovariate(_BURSTS_PER_S)
    return sorted(found)


class BackgroundBursts:
    """Bursts into the ports of a path while it is entered: a context manager.

    Parameters
    ----------
    path
        Whose router sends them.
    length_s
        Of a burst, in the mean; 0: there are none.
    seed
        Of lengths and pauses.
    """

    def __init__(self, path: RoutedPath, length_s: float, seed: int) -> None:
        self._path, self._length_s, self._seed = path, length_s, seed
        self._stack = ExitStack()

    def __enter__(self) -> "BackgroundBursts":
        if not self._length_s:
            return self
        addresses = [self._path.address(rank) for rank in range(len(self._path.hosts))]
        for host, address in zip(self._path.hosts, addresses, strict=True):
            sink = self._stack.enter_context(host.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
            sink.bind((address, _PORT))  # nobody reads it: without it the host would answer each datagram
        arguments = (addresses, self._path.rate_bps, self._length_s, self._seed)
        fork = Fork("bursts", _send_bursts, arguments, namespace=self._path.router.path)
        self._stack.callback(fork.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _send_bursts(channel: Connection, addresses: Sequence[str], rate_bps: int, length_s: float, seed: int) -> None:
    """Send bursts of an hour at most, until killed or the channel is closed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        began_s = time.monotonic()
        on: list[PortBurst] = []
        per_turn = rate_bps / 8 / _FRAME_BYTES * _TURN_S
        due = dict.fromkeys(range(len(addresses)), 0.0)
        coming = iter(bursts(len(addresses), length_s, 3600.0, seed))
        following = next(coming, None)
        while not channel.poll(0):
            now_s = time.monotonic() - began_s
            while following and following.start_s <= now_s:
                on.append(following)
                following = next(coming, None)
            on = [burst for burst in on if burst.stop_s > now_s]
            if not on and not following:
                return
            for burst in on:
                due[burst.rank] += per_turn
                for _ in range(int(due[burst.rank])):
                    with contextlib.suppress(OSError):  # the port's queue is full
                        sock.sendto(_DATAGRAM, (addresses[burst.rank], _PORT))
                due[burst.rank] %= 1
            until_s = now_s + _TURN_S if on or not following else following.start_s
            time.sleep(max(0.0, began_s + until_s - time.monotonic()))


def ratio_of(times: Sequence[float]) -> float:
    """Return the 99th percentile over the median."""
    return percentile(times, 99) / percentile(times, 50)


def length_for(ratio: float, tried: Sequence[tuple[float, float]]) -> float:
    """Return the mean length of bursts that leads to a ratio, by interpolation; what is out of reach is the next best.

    Parameters
    ----------
    tried
        Pairs of length in seconds, growing, and the ratio that it has led to.
    """
    if ratio <= tried[0][1]:
        return tried[0][0]
    for (shorter_s, below), (longer_s, above) in pairwise(tried):
        if below <= ratio <= above:
            part = (ratio - below) / (above - below) if above > below else 0.0
            return shorter_s + part * (longer_s - shorter_s)
    return max(tried, key=lambda pair: pair[1])[0]


def measure(
    *,
    ranks: int,
    rate_bps: int,
    megabytes: float,
    probes: int,
    rounds: int,
    warm_up: int,
    seed: int,
    progress: Callable[[str], None],
    suffix: str = "",
    budget_s: float | None = None,
) -> list[BenchResult]:
    """Measure all ratios over one path.

    Parameters
    ----------
    ranks, rate_bps, megabytes
        How many there are, the rate of each port, and the size of the float32 buffer.
    probes
        How often each length of bursts is tried out.
    rounds, warm_up, progress, budget_s
        See :func:`dlcp.bench.results.interleave`. Half the budget is for finding the lengths, half for the ratios.
    seed
        Of the bursts.
    suffix
        Follows the names of results.

    Returns
    -------
    ``tail.ratioR``: mean ms of a step beside that of Gloo's ring, with the ratio that was reached;
    ``tail.growth``: by how many per cent the mean grows from the second to the third ratio, beside the ring's.
    """
    path = RoutedPath(ranks, rate_bps=rate_bps)
    values = int(megabytes * 1e6) // _VALUE_BYTES
    results, samples = [], []
    with path:
        progress(f"tail{suffix}: {path.words}, {megabytes:g} MB, times in ms")
        ours = [AllReduceContender(LOSSY, 1, bound=0.1), AllReduceContender(LOSSLESS, 1, bound=0)]
        gloo = [way for way in contenders(path.controls) if way.control]
        ring = gloo[0]
        tried = _try_lengths(path, values, ring, probes, seed, progress, None if budget_s is None else budget_s / 2)
        for ratio in RATIOS:
            length_s = 0.0 if ratio == RATIOS[0] else length_for(ratio, tried)
            name = f"tail.ratio{ratio:g}{suffix}"
            progress(f"{name}: bursts of {1e3 * length_s:.0f} ms in the mean")
            with BackgroundBursts(path, length_s, seed):
                found = allreduce.measure(
                    path,
                    values=values,
                    ways=[*ours, *gloo],
                    rounds=rounds,
                    warm_up=warm_up,
                    progress=progress,
                    budget_s=None if budget_s is None else budget_s / 2 / len(RATIOS),
                    all_stay=True,  # rare runs count, so that two fast ones say little
                )
            samples.append(found.samples)
            best = min((way.name for way in gloo), key=lambda name: mean(found.samples[name]))
            details = {
                "path": path.words,
                "burst_ms": significant(1e3 * length_s),
                "ratio_wanted": ratio,
                "ratio_reached": significant(ratio_of(found.samples[ring.name])),
                "gloo_best": best,
                "packets": found.ledgers[LOSSY],
            }
            results.append(mean_against(name, "ms", found.samples, LOSSY, ring.name, details))
    return [*results, _growth(samples, ring.name, suffix)]


def _try_lengths(
    path: RoutedPath,
    values: int,
    ring: AllReduceContender,
    probes: int,
    seed: int,
    progress: Callable[[str], None],
    budget_s: float | None,
) -> list[tuple[float, float]]:
    """Return pairs of length and ratio, from none at all up to the largest that is wanted."""
    tried: list[tuple[float, float]] = []
    for length_s in (0.0, *_LENGTHS_S):
        with BackgroundBursts(path, length_s, seed):
            share_s = None if budget_s is None else budget_s / (1 + len(_LENGTHS_S))
            found = allreduce.measure(path, values=values, ways=[ring], rounds=probes, warm_up=2, budget_s=share_s)
        tried.append((length_s, ratio_of(found.samples[ring.name])))
        progress(f"tail: bursts of {1e3 * length_s:.0f} ms: ratio {tried[-1][1]:.2f}")
        if tried[-1][1] >= RATIOS[-1]:
            break
    return tried


def _growth(samples: Sequence[Samples], ring: str, suffix: str) -> BenchResult:
    """Return by how many per cent mean steps grow from one ratio to the next, in all; ``samples`` are by ratio."""
    means = {name: [mean(found[name]) for found in samples] for name in samples[0]}
    grown = {name: [100 * (later / first - 1) for first, later in pairwise(row)] for name, row in means.items()}
    details = {
        f"{first:g}_to_{later:g}": {name: significant(row[number]) for name, row in grown.items()}
        for number, (first, later) in enumerate(pairwise(RATIOS))
    }
    value, peer = grown[LOSSY][-1], grown[ring][-1]
    ratio = (1 + peer / 100) / (1 + value / 100)
    return BenchResult(f"tail.growth{suffix}", value, "%", peer, ratio, len(samples[0][LOSSY]), 0.0, details)
