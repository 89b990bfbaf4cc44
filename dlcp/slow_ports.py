# SPDX-License-Identifier: Apache-2.0
"""Slow ports: which they are, and how much is deferred because of them. Arithmetic alone, for real and simulated ranks.

:mod:`dlcp.collectives.deferral` measures ports and chooses packets by value; :mod:`dlcp.sim.deferral` counts them.
"""

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

LIKE: Final = 0.5
"""Chosen by us: rates vary by this much from step to step on ports without other traffic."""
LIKE_AGAIN: Final = 0.75
"""A rank that was slow counts as fast again above this share of the fastest one's rate. Chosen by us: rates vary."""
REFRESH_STEPS: Final = 8
"""Each packet is sent in one of so many steps, whatever its values: no residual grows older. Chosen by us; well above
the two steps that a bound of a half needs to send everything in turn, for that would leave no choice by value."""
SHARE_MIN: Final = 0.05
"""Less than this is not worth what it costs to choose packets. Chosen by us."""


def level(rates_bps: Mapping[int, float], slow: Container[int] = ()) -> dict[int, float]:
    """Return rates without the differences that are noise: whoever is about as fast as the fastest counts as it.

    So does a rank whose rate is not known. About as fast is more than ``LIKE`` of the fastest, for ranks that were
    ``slow`` before more than ``LIKE_AGAIN``.
    """
    fastest = max(rates_bps.values(), default=0.0)
    return {
        rank: fastest if rate == 0 or rate > (LIKE_AGAIN if rank in slow else LIKE) * fastest else rate
        for rank, rate in rates_bps.items()
    }


class PortLoads(NamedTuple):
    """What a slow port and another one have to carry in a step, in any unit, if nothing is deferred.

    Parameters
    ----------
    slow
        All that the slow port carries; it can be cut.
    whole, cut
        What the other carries: what stays whole, and what is cut by the same share as the slow port's.
    """

    slow: float
    whole: float
    cut: float

    @classmethod
    def of_direct(cls, ranks: int, weight: float, largest: float) -> "PortLoads":
        """Return the loads of a direct all-reduce, in units of a buffer.

        A rank with the weight w receives (n - 1) w in contributions and 1 - w in averages. If all that is sent to the
        slow rank is cut to a share u, and so are averages to the others, it takes u ((n - 1) w + 1 - w), and they take
        (n - 1) v + u (1 - v) with the largest weight v.
        """
        others = ranks - 1
        return cls(others * weight + 1 - weight, others * largest, 1 - largest)

    @classmethod
    def of_reduce_scatter(cls, ranks: int, weight: float, largest: float) -> "PortLoads":
        """Return the loads of a reduce-scatter, in units of a buffer: contributions to each rank's own shard alone."""
        return cls((ranks - 1) * weight, (ranks - 1) * largest, 0.0)

    @classmethod
    def of_server(cls, workers: int, weight: float) -> "PortLoads":
        """Return the loads of a parameter server with a weight, in units of a buffer, beside a worker's.

        A server receives every worker's contribution to its shard, and sends as many averages. A worker sends one
        buffer and receives one, and all of that is cut.
        """
        return cls(workers * weight, 0.0, 1.0)


def share_to_defer(loads: PortLoads, slowness: float, ceiling: float) -> float:
    """Return the share with which a port that is so many times slower than another is done when that one is."""
    excess = slowness * loads.slow - loads.cut
    return min(ceiling, max(0.0, 1 - loads.whole / excess)) if excess > 0 else 0.0
