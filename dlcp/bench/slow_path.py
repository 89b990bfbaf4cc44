# SPDX-License-Identifier: Apache-2.0
"""All-reduce where the last rank's port has a part of the others' rate, and nothing is lost on purpose.

DLCP with a deferral bound runs beside DLCP without any bound and Gloo, in turns. What is deferred is sent later in real
training, so that a time alone says half: the share of packets that were deferred is with it, and ``dlcp bench
convergence`` says what that costs.
"""

from collections.abc import Callable
from typing import Final

from dlcp.bench import allreduce
from dlcp.bench.allreduce import LOSSLESS, AllReduceContender, contenders
from dlcp.bench.path import RoutedPath
from dlcp.bench.results import BenchResult, against_best, significant
from dlcp.collectives.deferral import WHOLE_STEPS

DEFERRING: Final = "dlcp, deferral"
_BUCKETS: Final = 4
_VALUE_BYTES: Final = 4


def measure(
    *,
    ranks: int,
    rate_bps: int,
    slowness: float,
    megabytes: float,
    deferral_bound: float,
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None],
    name: str | None = None,
    budget_s: float | None = None,
) -> list[BenchResult]:
    """Measure one setting.

    Parameters
    ----------
    ranks
        How many there are.
    rate_bps, slowness
        Of each port, and how many times slower the last rank's is.
    megabytes
        Size of the float32 buffer, which is exchanged in four buckets.
    deferral_bound
        See :class:`dlcp.session.options.Options`.
    rounds, warm_up, progress, budget_s
        See :func:`dlcp.bench.results.interleave`; there are so many warm-ups at least that deferral may begin.
    name
        Of the first result; by default ``slow_path.nR``.

    Returns
    -------
    ``slow_path.nR``: ms of an all-reduce with deferral beside one without; ``slow_path.nR.gloo``: beside Gloo's best.
    """
    name = name or f"slow_path.n{ranks}"
    settling = max(warm_up, WHOLE_STEPS + 2)
    path = RoutedPath(ranks, rate_bps=rate_bps, slowest_bps=round(rate_bps / slowness))
    with path:
        progress(f"{name}: {path.words}, {megabytes:g} MB, times in ms")
        gloo = [way for way in contenders(path.controls) if way.control]
        ours = [
            AllReduceContender(DEFERRING, _BUCKETS, bound=0, deferral=deferral_bound),
            AllReduceContender(LOSSLESS, _BUCKETS, bound=0),
        ]
        found = allreduce.measure(
            path,
            values=int(megabytes * 1e6) // _VALUE_BYTES,
            ways=[*ours, *gloo],
            rounds=rounds,
            warm_up=settling,
            progress=progress,
            budget_s=budget_s,
        )
    packets = found.ledgers[DEFERRING]
    # The ledger has the warm-ups, too; in the first of them nothing is deferred.
    steps = len(found.costs[DEFERRING])
    counted = (steps - WHOLE_STEPS) / steps
    details = {
        "path": path.words,
        "packets": packets,
        "deferred_share": significant(packets["deferred"] / counted / (packets["delivered"] + packets["deferred"])),
    }
    peers = [way.name for way in gloo]
    return [
        against_best(name, "ms", found.samples, DEFERRING, [LOSSLESS], details),
        against_best(f"{name}.gloo", "ms", found.samples, DEFERRING, peers, details),
    ]
