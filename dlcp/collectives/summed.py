# SPDX-License-Identifier: Apache-2.0
"""The sum of all ranks' gradients: the average of n times each."""

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.reducer import Reducer


class SummedReducer:
    """Adds up buckets, where another reducer averages them.

    Values are multiplied before, and not the average after, so that what is owed is of one kind with what is sent.

    Parameters
    ----------
    plain
        What averages.
    ranks
        How many ranks contribute.
    """

    def __init__(self, plain: Reducer, ranks: int) -> None:
        self.plain, self.ranks = plain, ranks

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self.plain.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Add up a bucket; the future's result is ``bucket.values``, written in place. What is exact is averaged."""
        if not bucket.exact:
            wide = bucket.value_type.widen(bucket.values)
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(bucket.values, bucket.value_type.narrow(wide * wide.dtype.type(self.ranks)))
            bucket.magnitudes = None
        return self.plain.start(step, sequence, bucket)
