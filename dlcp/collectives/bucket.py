# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce is given: a buffer of gradients, and what of it may be lost."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.layer_bounds import LayerBounds
from dlcp.dtypes import ValueType
from dlcp.tags import Segment
from dlcp.transport import RELIABLE, LossBound


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """What an all-reduce may lose and how it makes up for it.

    Parameters
    ----------
    bound
        The loss that the first hop may suffer.
    error_feedback
        Send what was lost with the next step.
    rescale
        Divide each sum by how many ranks it holds rather than by how many there are, so that loss does not shrink it.
    adaptive_shards
        Give ranks that receive slowly, because their port is congested, less to add up.
    layers
        Which layers have a bound of their own.
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    error_feedback: bool = True
    rescale: bool = True
    adaptive_shards: bool = True
    layers: LayerBounds = field(default_factory=LayerBounds)

    def bound_of(self, bucket: "Bucket") -> LossBound:
        """Return what a bucket may lose where its layers have no bound of their own."""
        return RELIABLE if bucket.exact else bucket.bound or self.bound


@dataclass(slots=True)
class Bucket:
    """A buffer of gradients: flat ``values`` in the storage of ``value_type``, and the layers in it.

    The average is written back into ``values``. Where these are ``lent`` to ranks of this host, in memory of
    ``Endpoint.exported``, the caller has them back only when none of those reads there any more. ``magnitudes`` are
    those of its packets, shape (packets,), if somebody has found them already, as
    :func:`dlcp.magnitudes.packet_magnitudes` would.

    What follows is the same on all ranks. ``bound`` is what this bucket may lose, if not what all may. ``exact`` says
    that it is no gradient: whatever may be lost, rounded or left out of those, it arrives as it is. ``samples`` are how
    many samples each contributor's values are the mean of, where that differs: ``values`` have been multiplied by
    :func:`dlcp.collectives.samples.weight_of`, and where contributions are lost the rest is divided by its own samples.
    """

    values: NDArray[np.generic]
    value_type: ValueType
    segments: Sequence[Segment]
    magnitudes: NDArray[np.float32] | None = None
    lent: bool = False
    bound: LossBound | None = None
    exact: bool = False
    samples: Mapping[int, int] | None = None

    def label(self, start: int, stop: int) -> str:
        """Return the layers of the values from ``start`` to before ``stop`` in words, for messages."""
        first, last = (
            self.segments[bisect_right(self.segments, place, key=attrgetter("start")) - 1].layer.name
            for place in (start, stop - 1)
        )
        return first if first == last else f"{first}..{last}"
