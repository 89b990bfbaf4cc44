# SPDX-License-Identifier: Apache-2.0
"""Number formats of gradients."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray


class ValueType(Enum):
    """A number format, with the NumPy type that holds its bits; bfloat16, which NumPy lacks, travels as uint16."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The NumPy type of a buffer in this format."""
        return np.dtype("uint16" if self is ValueType.BFLOAT16 else self.value)

    def check_storage(self, values: NDArray[np.generic]) -> None:
        """Raise TypeError for a buffer that does not have this format's storage type."""
        if values.dtype != self.storage:
            raise TypeError(f"a buffer of {self.value} must be stored as {self.storage}, got {values.dtype}")

    def widen(self, values: NDArray[np.generic]) -> NDArray[np.floating]:
        """Return the values in a type that preserves precision in sums: float32, or float64 for float64."""
        self.check_storage(values)
        if self is ValueType.BFLOAT16:
            bits = values.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        return values.astype(np.float64 if self is ValueType.FLOAT64 else np.float32, copy=False)

    def narrow(self, values: NDArray[np.floating]) -> NDArray[np.generic]:
        """Round values to this format, to nearest, ties to even; the inverse of :meth:`widen`."""
        if self is not ValueType.BFLOAT16:
            with np.errstate(over="ignore"):
                return values.astype(self.storage, copy=False)
        floats = np.ascontiguousarray(values, np.float32)
        bits, is_nan = floats.view(np.uint32), np.isnan(floats)
        rounded = bits >> 16  # in place from here on, which takes a third of the time
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        narrow = rounded.astype(np.uint16)
        if is_nan.any():
            narrow[is_nan] = 0x7FC0
        return narrow
