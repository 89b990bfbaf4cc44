# SPDX-License-Identifier: Apache-2.0
"""How the contributions of several ranks become one: the arithmetic of a reduction, over raw bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType

_WIDENED = {"float16": ValueType.FLOAT16, "bfloat16": ValueType.BFLOAT16}
"""Formats that are added up in float32 and rounded once."""


class ReduceOp(Enum):
    """What becomes of the values of all ranks. ``MEAN`` is for real and complex floats, ``BITWISE_*`` for integers."""

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
"""NumPy's kinds of types (bool, int, unsigned, float, complex) that each operation makes sense for."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A reduction of values of one format.

    Half-precision formats are widened, so that they are rounded once and not with every rank. Bools add as "or" and
    multiply as "and".

    Parameters
    ----------
    op
        What to do.
    format_name
        A NumPy type's name, or ``bfloat16``.

    Raises
    ------
    TypeError
        The operation makes no sense for the format.
    """

    op: ReduceOp
    format_name: str

    def __post_init__(self) -> None:
        kind = "f" if self.format_name in _WIDENED else np.dtype(self.format_name).kind
        if kind not in _KINDS[self.op]:
            raise TypeError(f"{self.op.value} makes no sense for {self.format_name}")

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The NumPy type of a buffer in this format; the bits of bfloat16 are held as uint16."""
        widened = _WIDENED.get(self.format_name)
        return widened.storage if widened else np.dtype(self.format_name)

    @property
    def bears_loss(self) -> bool:
        """Whether an average over those who delivered can stand for the whole."""
        if self.op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return False
        return self.format_name in _WIDENED or self.storage.kind == "f"

    def begin(self, own: memoryview, out: memoryview) -> NDArray[np.generic]:
        """Return the running total, with this rank's contribution in it; it may live in ``out``."""
        mine = np.frombuffer(own, self.storage)
        widened = _WIDENED.get(self.format_name)
        if widened:
            return widened.widen(mine)
        total = np.frombuffer(out, self.storage)
        if mine.ctypes.data != total.ctypes.data:
            np.copyto(total, mine)
        return total

    def add(self, total: NDArray[np.generic], part: memoryview) -> None:
        """Let another rank's contribution go into the total."""
        values = np.frombuffer(part, self.storage)
        widened = _WIDENED.get(self.format_name)
        with np.errstate(all="ignore"):  # infinities and overflow are the caller's, as in any reduction
            _UFUNCS[self.op](total, widened.widen(values) if widened else values, out=total)

    def finish(
        self, total: NDArray[np.generic], out: memoryview, ranks: int, delivered: NDArray[np.generic] | None = None
    ) -> None:
        """Write the result into ``out``.

        Parameters
        ----------
        total
            From :meth:`begin` and :meth:`add`, which this overwrites.
        ranks
            How many ranks there are.
        delivered
            Where values were lost: how many ranks each value holds, shape (values,). The result is then scaled to
            stand for all ranks.
        """
        with np.errstate(all="ignore"):
            if delivered is not None:
                np.divide(total, delivered, out=total, casting="unsafe")
                if self.op is ReduceOp.SUM:
                    np.multiply(total, ranks, out=total, casting="unsafe")
            elif self.op is ReduceOp.MEAN:
                np.divide(total, total.dtype.type(ranks), out=total)
            widened = _WIDENED.get(self.format_name)
            if widened:
                np.copyto(np.frombuffer(out, self.storage), widened.narrow(total))  # type: ignore[arg-type]
