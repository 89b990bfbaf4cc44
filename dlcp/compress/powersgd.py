# SPDX-License-Identifier: Apache-2.0
"""PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): the average gradient as a product of two narrow matrices.

With M the gradient of a layer as a matrix, on every rank, and Q what was found at the last step:

    P = orthonormal(average of M Q),    Q = average of M^T P,    result P Q^T

which is one step of a power iteration for the average of all ranks' M. Both averages are all-reduces. It is exact for
matrices of the rank asked for, or less. Each rank owes M - P (M^T P)^T (their algorithm 2).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Occasion, Values
from dlcp.compress.matrices import Shape, orthonormal, product, shape_of
from dlcp.dtypes import ValueType
from dlcp.tags import Layer, Segment

SAVING = 2
"""Layers that would not become smaller by this factor are sent whole, as PyTorch's hook has it."""


class _Stage(NamedTuple):
    """What is known of a bucket: its layers' matrices, its values in the first round, P by layer in the second."""

    segments: tuple[Segment, ...]
    shapes: dict[str, Shape]
    values: Values | None
    left: dict[str, Values]


class PowerSgd(Compressor):
    """Low rank, by power iteration. What is found for a layer is where the next step begins.

    Parameters
    ----------
    rank
        Columns of P and Q; 1 and more.
    """

    name = "powersgd"
    reduces = True
    rounds = 2

    def __init__(self, rank: int = 2) -> None:
        if rank < 1:
            raise ValueError(f"powersgd takes the rank of what is sent, 1 or more, got {rank}")
        self.rank = rank
        self._right: dict[str, Values] = {}

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return M Q of those layers that are matrices worth it; if none is, all values, and there is no next round."""
        shapes = {segment.layer.name: shape for segment in segments if (shape := self._shape(segment))}
        stage = _Stage(tuple(segments), shapes, values, {})
        if not shapes:
            return self._last(stage)
        parts, layers = [], []
        with np.errstate(all="ignore"):
            for segment in segments:
                shape = shapes.get(segment.layer.name)
                if shape is None:
                    continue
                right = self._start(segment.layer.name, shape, occasion)
                parts.append((shape.matrix(values[segment.start : segment.stop]) @ right).ravel())
                layers.append(segment.layer)
        return _joined(parts, layers, stage)

    def refine(self, encoded: Encoded, mean: Content) -> Encoded | None:
        """Return M^T P, and the values of all other layers; after that, remember Q."""
        stage: _Stage = encoded.memory
        if stage.values is None:
            self._remember(encoded, mean)
            return None
        sums = mean.astype(np.float32, copy=False)
        left = {
            segment.layer.name: orthonormal(sums[segment.start : segment.stop].reshape(-1, self.rank))
            for segment in encoded.segments
        }
        return self._last(stage._replace(left=left))

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return P Q^T; of the first round, nothing."""
        stage: _Stage = encoded.memory
        values: Values = np.zeros(stage.segments[-1].stop, np.float32)
        if stage.values is not None:
            return values
        floats = content.astype(np.float32, copy=False)
        sent: Values = floats if present is None else np.where(present, floats, np.float32(0))
        for segment, place in zip(stage.segments, encoded.segments, strict=True):
            part = sent[place.start : place.stop]
            left = stage.left.get(segment.layer.name)
            if left is not None:
                part = product(left, part.reshape(-1, self.rank)).ravel()[: segment.stop - segment.start]
            values[segment.start : segment.stop] = part
        return values

    def _shape(self, segment: Segment) -> Shape | None:
        shape = shape_of(segment)
        if shape and SAVING * self.rank * (shape.rows + shape.columns) <= segment.stop - segment.start:
            return shape
        return None

    def _start(self, name: str, shape: Shape, occasion: Occasion) -> Values:
        """Return the Q that the last step has left, with new columns, the same on all ranks, for those that were 0."""
        right = self._right.get(name)
        if right is None or right.shape != (shape.columns, self.rank):
            right = np.zeros((shape.columns, self.rank), np.float32)
        lost = ~right.any(axis=0)
        if lost.any():
            raw = occasion.shared(name).bit_generator.random_raw(shape.columns * self.rank)
            # Any directions will do that are not orthogonal to what is looked for; raw bits are the same everywhere.
            fresh = ((raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1).reshape(right.shape)
            right = np.where(lost, fresh, right)
        return right

    def _last(self, stage: _Stage) -> Encoded:
        """Return what the last round averages."""
        assert stage.values is not None
        parts = []
        with np.errstate(all="ignore"):
            for segment in stage.segments:
                part, left = stage.values[segment.start : segment.stop], stage.left.get(segment.layer.name)
                if left is not None:
                    part = (stage.shapes[segment.layer.name].matrix(part).T @ left).ravel()
                parts.append(part)
        return _joined(parts, [segment.layer for segment in stage.segments], stage._replace(values=None))

    def _remember(self, encoded: Encoded, mean: Content) -> None:
        stage: _Stage = encoded.memory
        for place in encoded.segments:
            if place.layer.name in stage.left:
                right: Values = mean[place.start : place.stop].astype(np.float32).reshape(-1, self.rank)
                if np.isfinite(right).all():
                    self._right[place.layer.name] = right
                else:
                    self._right.pop(place.layer.name, None)


def _joined(parts: Sequence[Values], layers: Sequence[Layer], stage: _Stage) -> Encoded:
    stops = np.cumsum([len(part) for part in parts]).tolist()
    content = np.concatenate(parts).astype(np.float32, copy=False)
    segments = tuple(map(Segment, layers, [0, *stops[:-1]], stops))
    return Encoded(content, segments, 32, ValueType.FLOAT32, memory=stage)
