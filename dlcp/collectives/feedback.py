# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what was lost is sent with the next step, so that nothing is lost for good.

The rule is that of error-compensated SGD (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019), with the
network in the place of the compressor: the receiver's bitmap names exactly what did not arrive.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType
from dlcp.tags import Segment


class ErrorFeedback:
    """What this rank still owes, by parameter: frameworks regroup their buffers, parameters stay."""

    def __init__(self) -> None:
        self._owed: dict[str, NDArray[np.floating]] = {}

    def add_to(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Add what is owed to a buffer, in place, and owe it no longer."""
        for segment in segments:
            owed = self._owed.pop(segment.layer.name, None)
            if owed is not None:
                values[segment.start : segment.stop] += owed

    def repay(self, values: NDArray[np.generic], value_type: ValueType, segments: Sequence[Segment]) -> None:
        """Add what is owed to a buffer in the storage of ``value_type``, in place, and owe it no longer."""
        for segment in segments:
            owed = self._owed.pop(segment.layer.name, None)
            if owed is not None:
                part = values[segment.start : segment.stop]
                part[...] = value_type.narrow(value_type.widen(part) + owed)

    def owe(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Owe ``values``, which is 0 wherever all arrived."""
        for segment in segments:
            part = values[segment.start : segment.stop]
            if part.any():
                self._owed[segment.layer.name] = part.copy()

    def owed(self, name: str) -> NDArray[np.floating] | None:
        """Return what is owed of a parameter, flat, or None."""
        return self._owed.get(name)
