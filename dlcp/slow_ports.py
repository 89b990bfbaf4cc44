# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of slow ports, for real and simulated ranks: which are slow, how to size shards, how much to defer.

:mod:`dlcp.collectives.deferral` measures ports and chooses packets by value. :mod:`dlcp.sim.deferral` only counts
packets.
"""

import math
from collections.abc import Container, Mapping
from typing import Final, NamedTuple

SAME_SPEED_RATIO: Final = 0.5
"""Ranks above this share of the fastest rate count as equally fast: without other traffic, rates vary by as much from
step to step."""
RECOVERED_RATIO: Final = 0.75
"""A rank that was slow counts as fast again above this share of the fastest rate. It is higher than
``SAME_SPEED_RATIO``, so that a rank does not switch between the two with every variation."""
REFRESH_STEPS: Final = 8
"""Each packet is sent in one of this many steps whatever its values, which limits the age of a residual. Not tuned, but
well above 2: with a bound of one half, sending everything every other step would leave no choice by value."""
SHARE_MIN: Final = 0.05
"""Deferring a smaller share saves less than the choice of packets costs; not tuned."""


def snap_to_fastest(rates_bps: Mapping[int, float], slow: Container[int] = ()) -> dict[int, float]:
    """Return the rates by rank, with those of equally fast ranks set to the fastest rate.

    A rank counts as equally fast if its rate is unknown (0), or above ``SAME_SPEED_RATIO`` of the fastest. Ranks that
    were ``slow`` before must exceed ``RECOVERED_RATIO``.
    """
    fastest = max(rates_bps.values(), default=0.0)
    return {
        rank: fastest if rate == 0 or rate > (RECOVERED_RATIO if rank in slow else SAME_SPEED_RATIO) * fastest else rate
        for rank, rate in rates_bps.items()
    }


def weights_for_rates(rates_bps: Mapping[int, float]) -> dict[int, float]:
    """Return the shard weights that minimize the time of the slowest rank.

    Rank r owns a share w of a buffer of size S. It receives w S from each of the n - 1 others, and results of S - w S:
    (1 + (n - 2) w) S in all. So with rates R the time is max (1 + (n - 2) w) S / R, which is minimal if all owners take
    the same time; ranks that are slower even without a shard own none.

    Parameters
    ----------
    rates_bps
        Each rank's receive rate.

    Returns
    -------
    Weights that add up to 1. Two ranks get equal weights, since their division makes no difference.
    """
    count = len(rates_bps)
    fastest = max(rates_bps.values(), default=0.0)
    if count <= 2 or not math.isfinite(fastest) or fastest <= 0:
        return dict.fromkeys(rates_bps, 1 / max(1, count))
    speed = {rank: max(rate, 0.0) / fastest for rank, rate in rates_bps.items()}
    owners = sorted(speed, key=lambda rank: -speed[rank])
    while True:
        # the sum of (T speed - 1) / (n - 2) over the owners is 1
        time = (count - 2 + len(owners)) / sum(speed[rank] for rank in owners)
        if time * speed[owners[-1]] >= 1:
            break
        owners.pop()
    return {rank: (time * speed[rank] - 1) / (count - 2) if rank in owners else 0.0 for rank in rates_bps}


class PortLoads(NamedTuple):
    """Traffic of a slow port and of another port in a step without deferral, both in the same unit.

    Parameters
    ----------
    slow
        Traffic of the slow port. All of it can be deferred.
    whole, cut
        Traffic of the other port: ``whole`` is never deferred; of ``cut``, the same share is deferred as of ``slow``.
    """

    slow: float
    whole: float
    cut: float

    @classmethod
    def of_direct(cls, ranks: int, weight: float, largest: float) -> "PortLoads":
        """Return the loads of a direct all-reduce, in units of a buffer.

        A rank with the weight w receives (n - 1) w in contributions and 1 - w in averages. If a share u of all traffic
        to the slow rank is sent, and the same share of averages to the others, the slow rank receives
        u ((n - 1) w + 1 - w), and the others receive (n - 1) v + u (1 - v) with the largest weight v.
        """
        others = ranks - 1
        return cls(others * weight + 1 - weight, others * largest, 1 - largest)

    @classmethod
    def of_reduce_scatter(cls, ranks: int, weight: float, largest: float) -> "PortLoads":
        """Return the loads of a reduce-scatter, in units of a buffer: only the contributions to each rank's shard."""
        return cls((ranks - 1) * weight, (ranks - 1) * largest, 0.0)

    @classmethod
    def of_server(cls, workers: int, weight: float) -> "PortLoads":
        """Return the loads of a parameter server with the weight ``weight`` and of a worker, in units of a buffer.

        A server receives every worker's contribution to its shard, and sends as many averages. A worker sends one
        buffer and receives one, and a share of both can be deferred.
        """
        return cls(workers * weight, 0.0, 1.0)


def share_to_defer(loads: PortLoads, slowness: float, ceiling: float) -> float:
    """Return the share to defer so that both ports finish together, at most ``ceiling``.

    Parameters
    ----------
    slowness
        The other port's rate over the slow port's.
    """
    excess = slowness * loads.slow - loads.cut
    return min(ceiling, max(0.0, 1 - loads.whole / excess)) if excess > 0 else 0.0
