# SPDX-License-Identifier: Apache-2.0
"""Step metadata: each rank's number of samples, at the start of a step.

It is the first bucket of the step, a table with a value per rank, and is sent without loss. Each rank fills in its own
value and leaves the others 0. The average times the number of ranks is the whole table, bitwise equal on every rank. So
ranks derive the same weights from it, with any collective. The framework can finish the exchange if DLCP cannot.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment

LAYER: Final = Layer("step metadata", 0)


def bucket_of(samples: int, index: int, ranks: int) -> Bucket:
    """Return a rank's contribution: its samples behind its mean gradients of this step, and zeros for the others.

    Parameters
    ----------
    index
        Index of this rank among the contributors, ascending.
    """
    table: NDArray[np.float32] = np.zeros(ranks, np.float32)
    table[index] = samples
    return Bucket(table, ValueType.FLOAT32, [Segment(LAYER, 0, ranks)], exact=True)


def read_samples(average: NDArray[np.floating], contributors: Sequence[int]) -> dict[int, int]:
    """Return every rank's number of samples, by rank, from the average of their tables."""
    ranks = sorted(contributors)
    return dict(zip(ranks, map(round, (average.astype(np.float64) * len(ranks)).tolist()), strict=True))
