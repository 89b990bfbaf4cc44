# SPDX-License-Identifier: Apache-2.0
"""Values rounded at random to one of a few levels, so that they are right on average: QSGD and TernGrad."""

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.codes import Codes, ScaledCodes
from dlcp.compress.compressor import Feedback

GROUP_VALUES = 512
"""Values that share a norm in QSGD: the bucket size that its authors used with 4 bits (section 5 of their paper)."""


class Qsgd(ScaledCodes):
    """QSGD (Alistarh et al., NeurIPS 2017): the norm of a group, and of each value its sign and a level of s + 1.

    Value v of a group of d with norm N becomes N sgn(v) l/s, where l is |v| s / N rounded up or down at random so that
    its expectation is kept. The squared error is at most min(d/s^2, sqrt(d)/s) times the squared norm (Lemma 3.1).

    Codes have a fixed length, where the authors follow with Elias coding: so every packet can be read by itself.

    Parameters
    ----------
    bits
        2, 4 or 8: s is 1, 7 or 127.
    """

    name = "qsgd"
    feedback = Feedback.LOST

    def __init__(self, bits: int = 4) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"qsgd takes 2, 4 or 8 bits a value, sign and level, got {bits}")
        super().__init__(bits, GROUP_VALUES)
        self.top = (1 << bits - 1) - 1

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the groups' Euclidean norms."""
        squares = np.square(values, dtype=np.float64)
        return np.asarray(np.sqrt(np.add.reduceat(squares, starts)))

    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return signs in the highest bit, and levels."""
        exact = np.nan_to_num(np.abs(values) / scales, nan=0.0, posinf=0.0) * np.float32(self.top)
        levels: Codes = np.minimum(_round_at_random(exact, draws), self.top).astype(np.uint8)
        negative = (np.signbit(values) & (levels > 0)).astype(np.uint8)
        levels |= negative << np.uint8(self.bits - 1)
        return levels

    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return signed levels in units of the norm."""
        sizes = (codes & np.uint8(self.top)).astype(np.float32) / np.float32(self.top)
        signed: NDArray[np.float32] = np.where(codes > self.top, -sizes, sizes)
        return signed


class TernGrad(ScaledCodes):
    """TernGrad (Wen et al., NeurIPS 2017): -1, 0 or 1 times the largest value of the layer.

    Value v of a layer whose largest is s becomes s sgn(v) with probability |v| / s, else 0. Its authors clip gradients
    at 2.5 standard deviations before; that is left to the optimizer, for it makes a bias.
    """

    name = "terngrad"
    feedback = Feedback.LOST

    def __init__(self) -> None:
        super().__init__(2, None)

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the layers' largest absolute values."""
        return np.asarray(np.maximum.reduceat(np.abs(values), starts))

    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return 0, 1 for the scale, and 3 for the negative scale."""
        kept = _round_at_random(np.nan_to_num(np.abs(values) / scales, nan=0.0, posinf=0.0), draws) > 0
        codes: Codes = np.where(kept, np.where(np.signbit(values), np.uint8(3), np.uint8(1)), np.uint8(0))
        return codes

    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return -1, 0 or 1."""
        return np.array([0, 1, 0, -1], np.float32)[codes]


def _round_at_random(exact: NDArray[np.floating], draws: np.random.Generator) -> NDArray[np.floating]:
    """Round to one of the two integers next to each number, so that the expectation is the number."""
    below: NDArray[np.floating] = np.floor(exact)
    below += draws.random(len(exact), np.float32) < exact - below
    return below
