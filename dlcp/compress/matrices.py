# SPDX-License-Identifier: Apache-2.0
"""Layers as matrices, and arithmetic on them that gives the same bits on every machine.

A rank that decodes must find what all others find, or replicas drift apart. Matrix products of a BLAS are summed in an
order that depends on the processor; here every sum has one order, of operations that IEEE 754 defines to the bit.
"""

import math
from dataclasses import dataclass

import numpy as np

from dlcp.compress.compressor import Values
from dlcp.tags import Segment

DEPENDENT = 1e-6
"""A column that keeps less than this of its length depends on those before it. Chosen by us, above float32's error."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix that a layer is laid out as, with zeros in what is too much."""

    rows: int
    columns: int

    def matrix(self, values: Values) -> Values:
        """Return a layer's values as a matrix; a view where it fits."""
        missing = self.rows * self.columns - len(values)
        return (np.pad(values, (0, missing)) if missing else values).reshape(self.rows, self.columns)


def shape_of(segment: Segment) -> Shape | None:
    """Return the matrix that a layer is: its first dimension by all the others; None for a vector.

    Where the layer's shape is not known, or is not that of the segment, it is about as wide as high.
    """
    size, shape = segment.stop - segment.start, segment.layer.shape
    if math.prod(shape) == size and shape:
        return Shape(shape[0], size // shape[0]) if size and shape[0] not in (1, size) else None
    columns = math.isqrt(size)
    return Shape(-(-size // columns), columns) if columns > 1 else None


def product(left: Values, right: Values) -> Values:
    """Return ``left @ right.T`` for matrices of few columns, shapes (m, r) and (n, r); the same bits everywhere."""
    total = np.zeros((len(left), len(right)), np.result_type(left, right))
    with np.errstate(invalid="ignore"):
        for one, other in zip(left.T, right.T, strict=True):
            total += one[:, None] * other[None, :]
    return total


def folded_sum(values: Values) -> Values:
    """Return the sum over the first axis, formed by adding halves to each other; the same bits everywhere."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        upper = values[half:]
        values = values[:half].copy()
        values[: len(upper)] += upper
    return values[0] if len(values) else np.zeros(values.shape[1:], values.dtype)


def orthonormal(matrix: Values) -> Values:
    """Return columns of length 1, orthogonal to each other, that span the same; 0 for those that depend on others.

    By Gram and Schmidt, twice, which is enough (Giraud, Langou and Rozloznik, 2005); in float64.
    """
    columns: Values = np.array(matrix, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for place in range(columns.shape[1]):
            column = columns[:, place]
            before = np.sqrt(folded_sum(column * column))
            for _ in range(2):
                for other in columns.T[:place]:
                    column -= folded_sum(column * other) * other
            length = np.sqrt(folded_sum(column * column))
            column[:] = 0 if length <= DEPENDENT * before else column / length
    return columns.astype(np.float32)
