# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of slow ports, for real and simulated ranks: which are slow, and how to size shards."""

import math
from collections.abc import Container, Mapping
from typing import Final

SAME_SPEED_RATIO: Final = 0.5
"""Ranks above this share of the fastest rate count as equally fast: without other traffic, rates vary by as much from
step to step."""
RECOVERED_RATIO: Final = 0.75
"""A rank that was slow counts as fast again above this share of the fastest rate. It is higher than
``SAME_SPEED_RATIO``, so that a rank does not switch between the two with every variation."""


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
