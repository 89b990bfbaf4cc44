# SPDX-License-Identifier: Apache-2.0
"""How work is divided among ranks: the shards of a buffer, and the branches of a broadcast."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LIKE = 0.5
"""Chosen by us: rates vary by this much from step to step on ports without other traffic."""


def shard_bounds(values: int, values_per_packet: int, weights: Mapping[int, float]) -> dict[int, tuple[int, int]]:
    """Divide a buffer in proportion to weights, at packet borders.

    Parameters
    ----------
    values
        Length of the buffer, in values.
    values_per_packet
        Shards begin at multiples of this.
    weights
        Weight of each owner. Each owns at least one packet, if there are as many packets as owners.

    Returns
    -------
    For each owner its first value and the one after its last; in the order of ``weights``, without gaps.
    """
    shares = np.array(list(weights.values()), float)
    if (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"weights must be >= 0 and not all 0, got {dict(weights)}")
    packets = -(-values // values_per_packet)
    least = int(packets >= len(shares))
    spare = packets - least * len(shares)
    borders = np.rint(np.concatenate([[0.0], np.cumsum(shares) / shares.sum()]) * spare).astype(int)
    borders += least * np.arange(len(borders))
    cuts = np.minimum(borders * values_per_packet, values).tolist()
    return dict(zip(weights, pairwise(cuts), strict=True))


def inbound_rates(told_bps: Mapping[int, NDArray[np.generic]]) -> dict[int, float]:
    """Return how fast each rank can receive, from the rates at which the others say they reach it.

    Parameters
    ----------
    told_bps
        For each rank what it told: its rates to all ranks, in the order of ranks; 0 where it does not know.

    Returns
    -------
    Rates in bit/s. Differences of less than ``LIKE`` are noise: those ranks count as equally fast.
    """
    ranks = sorted(told_bps)
    table = np.array([told_bps[rank] for rank in ranks], float)
    # The median, for one sender's own trouble says nothing about the receiver.
    rates = np.array([np.median(column[column > 0]) if (column > 0).any() else 0.0 for column in table.T])
    rates *= len(ranks) - 1
    fastest = float(rates.max())
    even = (rates == 0) | (rates > LIKE * fastest)
    return dict(zip(ranks, np.where(even, fastest, rates).tolist(), strict=True))


def weights_for_rates(rates_bps: Mapping[int, float]) -> dict[int, float]:
    """Return the shard weights with which the slowest rank has its part soonest.

    Rank r owns a share w of a buffer of size S. It receives w S from each of the n - 1 others, and S - w S of results:
    (1 + (n - 2) w) S in all. So with rates R the time is max (1 + (n - 2) w) S / R, and it is least when all ranks that
    own something take the same time; those that are slower even without a shard own none.

    Parameters
    ----------
    rates_bps
        How fast each rank can receive.

    Returns
    -------
    Weights that add up to 1; equal ones for two ranks, for whom the division makes no difference.
    """
    count = len(rates_bps)
    fastest = max(rates_bps.values(), default=0.0)
    if count <= 2 or not math.isfinite(fastest) or fastest <= 0:
        return dict.fromkeys(rates_bps, 1 / max(1, count))
    speed = {rank: max(rate, 0.0) / fastest for rank, rate in rates_bps.items()}
    owners = sorted(speed, key=lambda rank: -speed[rank])
    while True:
        # sum of (T speed - 1) / (n - 2) over the owners is 1
        time = (count - 2 + len(owners)) / sum(speed[rank] for rank in owners)
        if time * speed[owners[-1]] >= 1:
            break
        owners.pop()
    return {rank: (time * speed[rank] - 1) / (count - 2) if rank in owners else 0.0 for rank in rates_bps}


class Branch(NamedTuple):
    """An edge of a binomial tree: to ``rank``, over 2**hop ranks."""

    rank: int
    hop: int


def binomial_tree(rank: int, root: int, ranks: int) -> tuple[Branch | None, list[Branch]]:
    """Return the parent of a rank in a broadcast of ``root``, None for that, and its children, the farthest first."""
    position = (rank - root) % ranks
    reach = position & -position if position else 1 << (ranks - 1).bit_length()
    parent = Branch((rank - reach) % ranks, reach.bit_length() - 1) if position else None
    hops = range(reach.bit_length() - 2, -1, -1)
    return parent, [Branch((rank + (1 << hop)) % ranks, hop) for hop in hops if position + (1 << hop) < ranks]
