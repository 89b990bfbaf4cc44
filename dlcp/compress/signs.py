# SPDX-License-Identifier: Apache-2.0
"""One bit for each value, its sign: as a vote, or with a scale."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.codes import Codes, ScaledCodes
from dlcp.compress.compressor import Feedback, Values


class _Signs(ScaledCodes):
    def __init__(self) -> None:
        super().__init__(1, None)

    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return 1 for negative values; of those that are 0, as of a unit that is dead, for a half that is drawn."""
        codes = (values < 0).astype(np.uint8)
        zeros = np.flatnonzero(values == 0)
        codes[zeros] = draws.integers(0, 2, len(zeros), np.uint8)
        return codes

    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return 1 or -1."""
        return np.array([1, -1], np.float32)[codes]


class SignSgd(_Signs):
    """signSGD with majority vote (Bernstein et al., ICML 2018 and ICLR 2019): the sign that most ranks have.

    The result is 1, -1, or 0 where as many say one as the other, whatever the size of the gradients: the learning rate
    has to suit that. Ranks whose packet was lost abstain. Nothing is fed back, for a vote is no average. Its authors
    prove convergence with large batches or noise that is unimodal and symmetric; else it may fail to converge at all
    (Karimireddy et al., ICML 2019).
    """

    name = "signsgd"
    feedback = Feedback.NOTHING

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return 1, or NaN where a gradient is."""
        return np.where(np.isnan(np.add.reduceat(values, starts)), np.nan, 1.0)

    def combine(self, parts: Iterable[Values]) -> Values:
        """Return the vote."""
        votes = iter(parts)
        total = next(votes).copy()
        for part in votes:
            total += part
        return np.asarray(np.sign(total))


class ScaledSigns(_Signs):
    """EF-signSGD (Karimireddy et al., ICML 2019): the sign of each value times the mean size of its layer's.

    It keeps at least ||v||_1^2 / (d ||v||_2^2) of the squared norm, so that with error feedback it converges as SGD
    does.
    """

    name = "efsignsgd"

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the layers' mean absolute values."""
        return np.add.reduceat(np.abs(values, dtype=np.float64), starts) / np.diff(starts, append=len(values))
