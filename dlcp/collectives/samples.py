# SPDX-License-Identifier: Apache-2.0
"""Averages of ranks whose batches are of different sizes: every sample counts the same, whoever has seen it.

Rank r of n has the mean gradient g_r of its s_r samples; what is wanted is sum(s_r g_r) / sum(s_r). So each rank
contributes x_r = w_r g_r with the weight w_r = n s_r / sum(s_r), and the plain average of the x_r is that. Where only
the ranks in D have delivered a packet, the plain average of theirs is not: their sum is divided by the sum of their
weights. With all of them that is n again, so nothing changes for packets that are complete.

What is lost is owed as it was contributed, weight included. So the sums over steps of n times the average, and of what
is owed, stay those of all contributions, as they do where all ranks weigh the same (:mod:`dlcp.collectives.feedback`).
This is how clusters of unequal machines are used: Ding et al., HetSeq, AAAI 2021 (arXiv 2009.14783), weigh so as well.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

MOST_SAMPLES = 1 << 22
"""The most samples of a rank and step: told in float32, they are divided by the number of ranks and multiplied."""


def check_samples(samples: object) -> int:
    """Return how many samples a rank says it has.

    Raises
    ------
    ValueError
        It is no whole number from 0 to ``MOST_SAMPLES``.
    """
    if isinstance(samples, float) and samples.is_integer():
        samples = int(samples)
    if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or not 0 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples must be a whole number from 0 to {MOST_SAMPLES}, got {samples!r}")
    return int(samples)


def weight_of(samples: Mapping[int, int], rank: int) -> float:
    """Return by what a rank's mean gradient is multiplied: its samples over the mean of all ranks' samples.

    If no rank has any, it is 0: then the average is 0 as well.
    """
    total = sum(samples.values())
    return len(samples) * samples[rank] / total if total else 0.0


def weigh(values: NDArray[np.floating], weight: float) -> None:
    """Multiply values by a weight, in place; the gradient of no samples is 0 whatever it looks like, such as NaN."""
    if weight == 0:
        values.fill(0)
    elif weight != 1:
        np.multiply(values, values.dtype.type(weight), out=values)


def held_samples(delivered: Mapping[int, NDArray[np.bool_]], samples: Mapping[int, int] | None) -> NDArray[np.int64]:
    """Return how many samples each packet's sum is of, or without ``samples`` how many ranks, shape (packets,).

    Parameters
    ----------
    delivered
        Which packets of each rank arrived, shape (packets,).
    """
    ranks = sorted(delivered)
    counts = (1 if samples is None else samples[rank] for rank in ranks)
    parts = [delivered[rank].astype(np.int64) * count for rank, count in zip(ranks, counts, strict=True)]
    held: NDArray[np.int64] = np.sum(parts, axis=0)
    return held


def all_samples(ranks: int, samples: Mapping[int, int] | None) -> int:
    """Return how many a complete sum is of: samples, or without these ranks."""
    return ranks if samples is None else sum(samples.values())


def divisors(held: NDArray[np.integer], ranks: int, samples: Mapping[int, int] | None) -> NDArray[np.float64]:
    """Return what each packet's sum is to be divided by, shape (packets,): ``ranks`` where nothing is missing.

    Parameters
    ----------
    held
        How many samples each packet's sum is of, or without ``samples`` how many ranks.
    """
    whole = all_samples(ranks, samples)
    found = held.astype(np.float64)
    if samples is not None:
        found *= ranks / whole if whole else 0.0
        found[held == whole] = ranks
    found[found == 0] = 1.0  # a sum of ranks without samples is 0, and stays so
    return found
