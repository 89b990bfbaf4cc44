# SPDX-License-Identifier: Apache-2.0
"""Half precision: every value is rounded to 16 bits. Sums are formed in 32 and rounded once.

What rounding leaves out is sent with the next step, as error feedback does for any compressor (Seide et al.,
Interspeech 2014). Values beyond 65504 become infinite in float16; bfloat16 has float32's range and 8 bits of precision.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Occasion, Values
from dlcp.dtypes import ValueType
from dlcp.tags import Segment


class Cast(Compressor):
    """Rounds values to a narrower format, to nearest."""

    reduces = True
    value_type: ClassVar[ValueType]

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return the rounded values."""
        content = self.value_type.narrow(values.astype(np.float32, copy=False))
        return Encoded(content, tuple(segments), 16, self.value_type)

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the values in float32."""
        values = content if content.dtype.itemsize > 2 else self.value_type.widen(content)
        widened = cast(NDArray[np.floating[Any]], values)
        return widened if present is None else np.where(present, widened, widened.dtype.type(0))


class Float16(Cast):
    """IEEE 754 half precision."""

    name = "fp16"
    value_type = ValueType.FLOAT16


class BFloat16(Cast):
    """The upper half of float32."""

    name = "bf16"
    value_type = ValueType.BFLOAT16
