# SPDX-License-Identifier: Apache-2.0
"""What an all-reduce is given: a buffer of gradients, and what of it may be lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType
from dlcp.tags import Segment
from dlcp.transport import LossBound

MESSAGES_PER_STEP = 1 << 16
"""How many messages of a step the header can number."""


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
    """

    bound: LossBound = field(default_factory=lambda: LossBound(0.1))
    error_feedback: bool = True
    rescale: bool = True
    adaptive_shards: bool = True


@dataclass(slots=True)
class Bucket:
    """A buffer of gradients: flat ``values`` in the storage of ``value_type``, and the layers in it.

    The average is written back into ``values``. ``magnitudes`` are those of its packets, shape (packets,), if somebody
    has found them already, as :func:`dlcp.magnitudes.packet_magnitudes` would.
    """

    values: NDArray[np.generic]
    value_type: ValueType
    segments: Sequence[Segment]
    magnitudes: NDArray[np.float32] | None = None
