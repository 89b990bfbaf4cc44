# SPDX-License-Identifier: Apache-2.0
"""A small bucket of three layers, and what becomes of it."""

import numpy as np

from dlcp.compress import Occasion, make_compressor
from dlcp.values.tags import Segment, layers_in_order

SHAPES = {"conv.weight": (24, 50), "conv.bias": (40,), "fc.weight": (60, 30)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
LAYERS = layers_in_order(list(SHAPES), SHAPES)
STOPS = np.cumsum(list(SIZES.values())).tolist()
SEGMENTS = [Segment(LAYERS[name], stop - SIZES[name], stop) for name, stop in zip(SHAPES, STOPS, strict=True)]
SIZE = STOPS[-1]
FIRST = Occasion(0, 0)
EVERY = ["topk:0.1", "randomk:0.1", "qsgd:2", "qsgd:4", "qsgd:8", "terngrad", "signsgd", "efsignsgd", "atomo:2",
         "powersgd:2"]  # fmt: skip


def gradient(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(SIZE) * rng.lognormal(0, 1, SIZE)).astype(np.float32)


def matrix_of(values, name):
    (segment,) = [segment for segment in SEGMENTS if segment.layer.name == name]
    return values[segment.start : segment.stop].reshape(SHAPES[name])


def alone(compressor, values, occasion=FIRST, segments=SEGMENTS):
    """One rank's values after an exchange without others: every average is its own."""
    encoded = compressor.encode(values, segments, occasion)
    while True:
        following = compressor.refine(encoded, encoded.content)
        if following is None:
            return compressor.decode(encoded, encoded.content), encoded
        encoded = following


def made(text, **options):
    return make_compressor(text, **options)
