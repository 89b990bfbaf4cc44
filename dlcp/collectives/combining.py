# SPDX-License-Identifier: Apache-2.0
"""What the gradients of all ranks become: their average, their sum, or Adasum.

Adasum (Maleki et al., MLSys 2021, arXiv 2006.02924) adds what is orthogonal and averages what is parallel, so that the
step of many ranks is as long as the data bears, without tuning the learning rate anew for their number. For two:

    (1 - g1.g2 / (2 |g1|^2)) g1  +  (1 - g1.g2 / (2 |g2|^2)) g2

and for more, by halves: neighbours first, then pairs of pairs. It is done for every layer by itself. If ranks are no
power of two, those that are too many are first combined with one of the others each.

Whatever the tree, the result is a linear combination of the ranks' gradients, and every scalar product in it follows
from those between ranks. So these n (n+1)/2 per layer are all that has to be known before anything is added up.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.gathered import Combine, average_of
from dlcp.compress.compressor import Values
from dlcp.compress.matrices import folded_sum
from dlcp.tags import Segment

AVERAGE: Final = "average"
SUM: Final = "sum"
ADASUM: Final = "adasum"
COMBINES: Final = (AVERAGE, SUM, ADASUM)

Products = NDArray[np.float64]
"""Scalar products between ranks, shape (n, n) or for each layer (layers, n, n)."""


def coefficients(products: Products) -> NDArray[np.float64]:
    """Return what each rank's gradient of a layer is multiplied by in Adasum, shape (n,), the same bits everywhere.

    Parameters
    ----------
    products
        Scalar products of the ranks' gradients, shape (n, n).
    """
    ranks = len(products)
    own = list(np.eye(ranks))
    even = 1 << ranks.bit_length() - 1
    combined = [_pair(products, own[r], own[r + even]) if r + even < ranks else own[r] for r in range(even)]
    while len(combined) > 1:
        combined = [_pair(products, *two) for two in zip(combined[::2], combined[1::2], strict=True)]
    return combined[0]


def scalar_products(parts: Sequence[Values], borders: Sequence[int]) -> Products:
    """Return the scalar products between arrays, by layer; the same bits everywhere.

    Parameters
    ----------
    parts
        One for each rank, shape (m,).
    borders
        Where layers begin, and where the last one ends.

    Returns
    -------
    Shape (layers, n, n).
    """
    ranks = len(parts)
    found = np.zeros((len(borders) - 1, ranks, ranks))
    for layer, (start, stop) in enumerate(pairwise(borders)):
        wide = [part[start:stop].astype(np.float64) for part in parts]
        for one in range(ranks):
            for other in range(one + 1):
                with np.errstate(all="ignore"):
                    found[layer, one, other] = found[layer, other, one] = folded_sum(wide[one] * wide[other])
    return found


def combine_with(parts: Sequence[Values], borders: Sequence[int], factors: NDArray[np.float64]) -> Values:
    """Return the sum of arrays, each layer of each multiplied by its factor, shape (layers, n)."""
    total: Values = np.zeros_like(parts[0])
    lengths = np.diff(borders)
    with np.errstate(all="ignore"):
        for rank, part in enumerate(parts):
            total += part * np.repeat(factors[:, rank].astype(part.dtype), lengths)
    return total


def adasum_of(parts: Sequence[Callable[[], Values]], segments: Sequence[Segment]) -> Values:
    """Return Adasum of what all ranks sent, as a rule for what is gathered."""
    decoded = [part() for part in parts]
    borders = [segment.start for segment in segments] + [segments[-1].stop]
    products = scalar_products(decoded, borders)
    return combine_with(decoded, borders, np.array([coefficients(layer) for layer in products]))


def sum_of(parts: Sequence[Callable[[], Values]], segments: Sequence[Segment]) -> Values:
    """Return the sum of what all ranks sent, as a rule for what is gathered."""
    mean = average_of(parts, segments)
    mean *= mean.dtype.type(len(parts))
    return mean


RULES: Final[dict[str, Combine]] = {AVERAGE: average_of, SUM: sum_of, ADASUM: adasum_of}
"""By name, for what is gathered."""


def _pair(products: Products, one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Combine two linear combinations of gradients."""

    def product(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
        with np.errstate(invalid="ignore"):
            return float(folded_sum((left[:, None] * products * right[None, :]).ravel()))

    between, first, second = product(one, other), product(one, one), product(other, other)
    # A gradient of 0 has no direction; what it is multiplied by does not matter. NaN must spread.
    return _factor(between, first) * one + _factor(between, second) * other


def _factor(between: float, square: float) -> float:
    return 1.0 if square <= 0 else 1 - between / (2 * square)
