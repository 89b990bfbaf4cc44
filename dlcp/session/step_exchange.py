# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell each other at the start of a step: their samples, and the norm of the last average gradient.

A step begins with a bucket of metadata (:mod:`dlcp.collectives.step_metadata`). After it all ranks have the same data,
so they agree on each rank's weight and on the loss bound of the step. The training session sends that bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.reduction_rules import check_samples, weight_of
from dlcp.collectives.step_metadata import StepMetadata, read_table, samples_of, table_of
from dlcp.phases import Phases
from dlcp.transport import LossBound

NORM_VALUES: Final = 1 << 16
"""Values sampled from a bucket, in evenly spaced runs, to estimate its norm to about 1 %."""
_RUN_VALUES: Final = 1 << 10


class StepExchange:
    """A rank's metadata, and the weights and bound that follow from all ranks'. For one thread, except on_averaged.

    Parameters
    ----------
    bound
        The user's loss bound.
    rank, contributors
        This rank, and all ranks whose gradients are averaged.
    samples
        This rank's samples per step; 0 gives all ranks equal weight.
    phases
        Whether to tighten the bound in critical regimes (:mod:`dlcp.phases`).

    Attributes
    ----------
    metadata
        Metadata that each rank published at the beginning of this step.
    samples_here
        This rank's samples per step, from the next step on.
    """

    def __init__(
        self, bound: LossBound, rank: int, contributors: Sequence[int], *, samples: int = 0, phases: bool = False
    ) -> None:
        self.metadata: dict[int, StepMetadata] = {}
        self.weighted = samples > 0
        self.samples_here = check_samples(samples)
        self.phases = Phases() if phases else None
        self._bound, self._rank, self._contributors = bound, rank, sorted(contributors)
        self._steps = 0
        self._squares = 0.0

    @property
    def sends(self) -> bool:
        """Whether steps begin with metadata."""
        return len(self._contributors) > 1 and (self.weighted or self.phases is not None)

    def table(self) -> NDArray[np.float32]:
        """Return this rank's metadata for the next step's first bucket, which is averaged over all ranks."""
        own = StepMetadata(self.samples_here if self.weighted else 1, math.sqrt(self._squares))
        self._squares = 0.0
        return table_of(own, self._contributors.index(self._rank), len(self._contributors))

    def read(self, average: NDArray[np.floating]) -> None:
        """Read the metadata of all ranks."""
        self.metadata = read_table(average, self._contributors)
        self._steps += 1
        if self.phases and self._steps > 1:
            self.phases.add(self.metadata[self._contributors[0]].norm)

    @property
    def weight(self) -> float:
        """Factor for this rank's mean gradient in this step."""
        return weight_of(samples_of(self.metadata), self._rank) if self.weighted else 1.0

    @property
    def samples(self) -> dict[int, int] | None:
        """Samples of each rank in this step; None if all ranks have equal weight."""
        return samples_of(self.metadata) if self.weighted else None

    @property
    def bound(self) -> LossBound:
        """The loss bound for this step's buckets."""
        return replace(self._bound, ratio=self.phases.bound(self._bound.ratio)) if self.phases else self._bound

    def on_averaged(self, bucket: Bucket) -> None:
        """Record that a bucket has been averaged; from any thread."""
        if self.phases:
            self._squares += squares_of(bucket)


def squares_of(bucket: Bucket) -> float:
    """Return a bucket's sum of squares, estimated from a sample if it has more than :data:`NORM_VALUES` values."""
    values, count = bucket.values, len(bucket.values)
    if count > NORM_VALUES:
        starts = np.linspace(0, count - _RUN_VALUES, NORM_VALUES // _RUN_VALUES).astype(np.int64)
        values = np.concatenate([values[start : start + _RUN_VALUES] for start in starts.tolist()])
    part = bucket.value_type.widen(values).astype(np.float64)
    return float(part @ part) * count / max(1, len(part))
