# SPDX-License-Identifier: Apache-2.0
"""How a buffer is divided among the ranks that add it up."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np


def shard_bounds(values: int, values_per_packet: int, weights: Mapping[int, float]) -> dict[int, tuple[int, int]]:
    """Divide a buffer in proportion to weights, at packet borders.

    Parameters
    ----------
    values
        Length of the buffer, in values.
    values_per_packet
        Shards begin at multiples of this.
    weights
        Weight of each owner; one of weight 0 owns nothing.

    Returns
    -------
    For each owner its first value and the one after its last; in the order of ``weights``, without gaps.
    """
    shares = np.array(list(weights.values()), float)
    if (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"weights must be >= 0 and not all 0, got {dict(weights)}")
    packets = -(-values // values_per_packet)
    borders = np.rint(np.concatenate([[0.0], np.cumsum(shares) / shares.sum()]) * packets).astype(int)
    cuts = np.minimum(borders * values_per_packet, values).tolist()
    return dict(zip(weights, pairwise(cuts), strict=True))
