# SPDX-License-Identifier: Apache-2.0
"""The buffer that the all-reduce benchmark averages: whole numbers, in layers, in buckets."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import Layer, Segment

LAYERS: Final = 48
LARGEST_VALUE: Final = 1000
"""Of the magnitudes; small enough that sums over ranks are exact in float32."""
SPREAD: Final = 200
"""Standard deviation of the last layer's values; the first has a hundredth of it, as gradients differ by layer."""


def whole_numbers(count: int, seed: int = 1) -> NDArray[np.float32]:
    """Return ``count`` whole numbers, normally distributed within each layer, float32."""
    numbers = np.random.default_rng(seed).standard_normal(count, np.float32)
    bounds = layer_bounds(count)
    for (start, stop), scale in zip(bounds, np.geomspace(SPREAD / 100, SPREAD, len(bounds)), strict=True):
        numbers[start:stop] *= np.float32(scale)
    np.rint(numbers, out=numbers)
    return np.clip(numbers, -LARGEST_VALUE, LARGEST_VALUE, out=numbers)


def layer_bounds(values: int) -> list[tuple[int, int]]:
    """Return where the layers begin and end: all of one size, the last with what is left over.

    Raises
    ------
    ValueError
        There are fewer values than layers.
    """
    size = values // LAYERS
    if not size:
        raise ValueError(f"{values} values cannot be divided into {LAYERS} layers")
    return [(i * size, (i + 1) * size if i < LAYERS - 1 else values) for i in range(LAYERS)]


def bucket_bounds(values: int, buckets: int) -> list[tuple[int, int]]:
    """Return where the buckets begin and end: each has as many layers, so ``buckets`` has to divide their number."""
    layers = layer_bounds(values)
    each = LAYERS // buckets
    return [(layers[i * each][0], layers[(i + 1) * each - 1][1]) for i in range(buckets)]


def segments(values: int, start: int, stop: int) -> list[Segment]:
    """Return the layers of the bucket from ``start`` to ``stop`` in a buffer of ``values``, in places of the bucket."""
    return [
        Segment(Layer(f"layer{number}.weight", round(number * 255 / (LAYERS - 1))), first - start, last - start)
        for number, (first, last) in enumerate(layer_bounds(values))
        if start <= first and last <= stop
    ]
