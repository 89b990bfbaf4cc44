# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations: combine several ranks' contributions, over raw bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dlcp.values.dtypes import ValueType

_WIDENED = {"float16": ValueType.FLOAT16, "bfloat16": ValueType.BFLOAT16}
"""Formats that are added in float32 and rounded once."""

BLOCK_VALUES = 1 << 15
"""Values reduced at a time: a few such blocks fit into a core's L2 cache."""


class ReduceOp(Enum):
    """Reduction operations. ``MEAN`` is for real and complex floats, ``BITWISE_*`` for integers."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "minimum"
    MAX = "maximum"
    BITWISE_AND = "bitwise and"
    BITWISE_OR = "bitwise or"
    BITWISE_XOR = "bitwise xor"


_UFUNCS: dict[ReduceOp, Callable[..., NDArray[np.generic]]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BITWISE_AND: np.bitwise_and,
    ReduceOp.BITWISE_OR: np.bitwise_or,
    ReduceOp.BITWISE_XOR: np.bitwise_xor,
}
_KINDS = {
    ReduceOp.SUM: "biufc",
    ReduceOp.MEAN: "fc",
    ReduceOp.PRODUCT: "biufc",
    ReduceOp.MIN: "biuf",
    ReduceOp.MAX: "biuf",
    ReduceOp.BITWISE_AND: "biu",
    ReduceOp.BITWISE_OR: "biu",
    ReduceOp.BITWISE_XOR: "biu",
}
"""The kinds of NumPy types (bool, int, unsigned, float, complex) that each operation supports."""


@dataclass(frozen=True, slots=True)
class ElementwiseOp:
    """A reduction of values of one format.

    Half-precision formats are widened, so that they are rounded once and not with every rank. Bools use "or" for sums
    and "and" for products.

    Parameters
    ----------
    kind
        The operation.
    format_name
        A NumPy type's name, or ``bfloat16``.

    Raises
    ------
    TypeError
        The format does not support the operation.
    """

    kind: ReduceOp
    format_name: str

    def __post_init__(self) -> None:
        numbers = "f" if self.format_name in _WIDENED else np.dtype(self.format_name).kind
        if numbers not in _KINDS[self.kind]:
            raise TypeError(f"{self.kind.value} is not supported for {self.format_name}")

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The NumPy type of a buffer in this format; bfloat16 is stored as uint16."""
        widened = _WIDENED.get(self.format_name)
        return widened.storage if widened else np.dtype(self.format_name)

    @property
    def bears_loss(self) -> bool:
        """Whether an average over the delivered contributions can replace the complete one."""
        if self.kind not in (ReduceOp.SUM, ReduceOp.MEAN):
            return False
        return self.format_name in _WIDENED or self.storage.kind == "f"

    def reduce(
        self,
        parts: Sequence[memoryview],
        out: memoryview,
        ranks: int,
        delivered: NDArray[np.generic] | None = None,
    ) -> None:
        """Combine the contributions of all ranks, in the given order.

        It works block by block, so that intermediate values stay in the cache.

        Parameters
        ----------
        parts
            One per rank, all of the same size; ``out`` may be the first of them.
        ranks
            Number of ranks.
        delivered
            If values were lost, and are 0: the number of ranks in each value, shape (values,). The result is then
            scaled to represent all ranks.
        """
        values = [np.frombuffer(part, self.storage) for part in parts]
        result = np.frombuffer(out, self.storage)
        with np.errstate(all="ignore"):  # infinities and overflow are the caller's concern, as in any reduction
            for start in range(0, len(result), BLOCK_VALUES):
                block = slice(start, start + BLOCK_VALUES)
                held = None if delivered is None else delivered[block]
                self._reduce_block([part[block] for part in values], result[block], ranks, held)

    def _reduce_block(
        self,
        parts: list[NDArray[np.generic]],
        result: NDArray[np.generic],
        ranks: int,
        held: NDArray[np.generic] | None,
    ) -> None:
        widened = _WIDENED.get(self.format_name)
        if widened:
            total: NDArray[np.generic] = widened.widen(parts[0])
        else:
            total = result
            if len(parts) == 1:
                np.copyto(total, parts[0])
        first = total if widened else parts[0]
        for part in parts[1:]:
            first = _UFUNCS[self.kind](first, widened.widen(part) if widened else part, out=total)
        if held is not None:
            np.divide(total, held, out=total, casting="unsafe")
            if self.kind is ReduceOp.SUM:
                np.multiply(total, ranks, out=total, casting="unsafe")
        elif self.kind is ReduceOp.MEAN:
            np.divide(total, total.dtype.type(ranks), out=total)
        if widened:
            np.copyto(result, widened.narrow(cast(NDArray[np.floating], total)))
