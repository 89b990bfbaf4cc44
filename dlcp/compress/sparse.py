# SPDX-License-Identifier: Apache-2.0
"""A few values of each layer: the largest ones (top-k), or a random draw that all ranks share (random-k).

Both are k-contractions: they leave out at most (1 - k/d) of the squared norm (Stich, Cordonnier and Jaggi, NeurIPS
2018). With error feedback SGD then converges as fast as without compression, up to a term of higher order. Without it
top-k may not converge at all (Karimireddy et al., ICML 2019).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Feedback, Occasion, Values
from dlcp.values.tags import Segment

PAIR = np.dtype([("place", "<u4"), ("value", "<f4")])
"""A value and its index in the bucket. Packets hold whole pairs, because payloads are multiples of 8 bytes."""


class _Sparse(Compressor):
    """A share of each layer's values.

    Parameters
    ----------
    ratio
        The share, more than 0 and at most 1; at least one value is sent.
    whole_below
        Layers with fewer values are sent whole: they are small and important.
    """

    def __init__(self, ratio: float, whole_below: int = 0) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"{self.name} takes a share of values, more than 0 and at most 1, got {ratio:g}")
        self.ratio, self.whole_below = ratio, whole_below

    def count(self, size: int) -> int:
        """Return the number of values sent from a layer of ``size`` values."""
        return size if size < self.whole_below else max(1, math.ceil(self.ratio * size))

    def _layout(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        stops = np.cumsum([self.count(s.stop - s.start) for s in segments if s.stop > s.start]).tolist()
        filled = [segment.layer for segment in segments if segment.stop > segment.start]
        return tuple(map(Segment, filled, [0, *stops[:-1]], stops))


class TopK(_Sparse):
    """The largest values of each layer, with their indices; largest first, so that packets hold similar values.

    Ranks choose different indices, so each rank sends its values to all.
    """

    name = "topk"

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return indices and values."""
        layout = self._layout(segments)
        pairs = np.empty(layout[-1].stop, PAIR)
        for segment, chosen in zip([s for s in segments if s.stop > s.start], layout, strict=True):
            part = values[segment.start : segment.stop]
            places = largest(np.abs(part), chosen.stop - chosen.start)
            pairs["place"][chosen.start : chosen.stop] = places + segment.start
            pairs["value"][chosen.start : chosen.stop] = part[places]
        return Encoded(pairs.view(np.uint8), layout, 64, worth=np.abs(pairs["value"]), memory=len(values))

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the values at their indices, and 0 elsewhere."""
        pairs = content.view(PAIR)
        if present is not None:
            pairs = pairs[present]
        values: Values = np.zeros(encoded.memory, np.float32)
        values[pairs["place"]] = pairs["value"]
        return values


class RandomK(_Sparse):
    """Values of each layer drawn from a shared seed, different ones at each step; indices need not be sent.

    Parameters
    ----------
    unbiased
        Multiply by d/k, so that the expectation is the gradient. Not for use with error feedback: the variance grows by
        d/k, and the residual with it.
    """

    name = "randomk"
    reduces = True

    def __init__(self, ratio: float, whole_below: int = 0, *, unbiased: bool = False) -> None:
        super().__init__(ratio, whole_below)
        self.unbiased = unbiased
        self.feedback = Feedback.LOST if unbiased else Feedback.ALL

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return the drawn values, in the order of their indices."""
        layout = self._layout(segments)
        places = np.empty(layout[-1].stop, np.int64)
        factors = np.ones(layout[-1].stop, np.float32)
        for segment, chosen in zip([s for s in segments if s.stop > s.start], layout, strict=True):
            size, count = segment.stop - segment.start, chosen.stop - chosen.start
            mine = slice(chosen.start, chosen.stop)
            places[mine] = segment.start + _draw(size, count, occasion.shared(segment.layer.name))
            if self.unbiased:
                factors[mine] = size / count
        content = (values[places] * factors).astype(np.float32, copy=False)
        return Encoded(content, layout, 32, memory=(len(values), places))

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the values at their indices, and 0 elsewhere."""
        size, places = encoded.memory
        values: Values = np.zeros(size, np.float32)
        values[places] = content if present is None else np.where(present, content, 0)
        return values


def largest(sizes: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` largest of ``sizes``, the largest first; NaN counts as the largest."""
    places = np.argpartition(sizes, len(sizes) - count)[len(sizes) - count :]
    return places[np.argsort(sizes[places], kind="stable")[::-1]]


def _draw(size: int, count: int, draws: np.random.Generator) -> NDArray[np.int64]:
    """Draw ``count`` of ``size`` indices uniformly; return them in ascending order.

    Uses only the generator's raw bits, which do not change between versions of NumPy, so that all ranks draw alike.
    """
    if count == size:
        return np.arange(size)
    lots = draws.bit_generator.random_raw(size)
    last = np.partition(lots, count - 1)[count - 1]
    return np.flatnonzero(lots <= last)[:count]
