# SPDX-License-Identifier: Apache-2.0
"""Low rank: PowerSGD and ATOMO, which send a layer as products of narrow matrices, and their arithmetic.

PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019) sends the average gradient as a product of two narrow matrices.
With M the gradient of a layer as a matrix, on every rank, and Q the result of the last step:

    P = orthonormal(average of M Q),    Q = average of M^T P,    result P Q^T

which is one step of a power iteration for the average of all ranks' M. Both averages are all-reduces. It is exact for
matrices of the chosen rank or less. Each rank's residual is M - P (M^T P)^T (their algorithm 2).

Spectral ATOMO (Wang et al., NeurIPS 2018) sends a few singular vectors of each layer, drawn so that they are unbiased.
A layer's matrix is the sum of l_i u_i v_i^T. Atom i is sent with probability p_i, as (l_i / p_i) u_i v_i^T. Their
algorithm 1 gives the p_i that add up to the wanted number of atoms and minimise the variance. They draw each atom
independently; here exactly the wanted number is drawn, each atom still with its p_i (systematic sampling, Madow 1949).
The expectation is the same and, as atoms are orthogonal, so is the variance, sum of l_i^2 (1/p_i - 1); and every
message has the same size. It needs a singular value decomposition, so large matrices are cut into bands of rows.

All ranks must decode to the same bits, or replicas drift apart. A BLAS sums matrix products in an order that depends on
the processor. So :func:`product`, :func:`folded_sum` and :func:`orthonormal` sum in a fixed order, with operations that
IEEE 754 defines to the bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Feedback, Occasion, Values
from dlcp.values.tags import Layer, Segment

DEPENDENT = 1e-6
"""A column that keeps less than this part of its length depends on the columns before it. Above float32's rounding
error."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a layer as a matrix, padded with zeros."""

    rows: int
    columns: int

    def matrix(self, values: Values) -> Values:
        """Return a layer's values as a matrix; a view if no padding is needed."""
        missing = self.rows * self.columns - len(values)
        return (np.pad(values, (0, missing)) if missing else values).reshape(self.rows, self.columns)


def shape_of(segment: Segment) -> Shape | None:
    """Return a layer's shape as a matrix: its first dimension by all the others; None for a vector.

    If the layer's shape is unknown, or does not match the segment, the matrix is roughly square.
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
    """Return the sum over the first axis by adding halves to each other; the same bits everywhere."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        upper = values[half:]
        values = values[:half].copy()
        values[: len(upper)] += upper
    return values[0] if len(values) else np.zeros(values.shape[1:], values.dtype)


def orthonormal(matrix: Values) -> Values:
    """Return orthonormal columns that span the same space, with zeros for columns that depend on earlier ones.

    Gram-Schmidt in float64, applied twice, which is enough (Giraud, Langou and Rozloznik, 2005).
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


SAVING = 2
"""Layers are sent uncompressed unless they become smaller by this factor, as in PyTorch's hook."""


class _Stage(NamedTuple):
    """A bucket's state: its layers' matrix shapes; in the first round its values; in the second P by layer."""

    segments: tuple[Segment, ...]
    shapes: dict[str, Shape]
    values: Values | None
    left: dict[str, Values]


class PowerSgd(Compressor):
    """Low rank by power iteration. Each step starts from the layer's Q of the last one.

    Parameters
    ----------
    rank
        Columns of P and Q; at least 1.
    """

    name = "powersgd"
    reduces = True
    rounds = 2

    def __init__(self, rank: int = 2) -> None:
        if rank < 1:
            raise ValueError(f"powersgd takes a rank of 1 or more, got {rank}")
        self.rank = rank
        self._right: dict[str, Values] = {}

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return M Q of the layers worth compressing. If there are none, return all values, in the only round."""
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
        """Return M^T P, and the values of all other layers; after the second round store Q, and return None."""
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
        """Return P Q^T; zeros for the first round."""
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
        """Return the last step's Q. Columns that were 0 are drawn anew, the same on all ranks."""
        right = self._right.get(name)
        if right is None or right.shape != (shape.columns, self.rank):
            right = np.zeros((shape.columns, self.rank), np.float32)
        lost = ~right.any(axis=0)
        if lost.any():
            raw = occasion.shared(name).bit_generator.random_raw(shape.columns * self.rank)
            # Any directions not orthogonal to the result will do; the generator's raw bits are the same everywhere.
            fresh = ((raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1).reshape(right.shape)
            right = np.where(lost, fresh, right)
        return right

    def _last(self, stage: _Stage) -> Encoded:
        """Return the last round's content."""
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
    return Encoded(content, segments, 32, memory=stage)


BAND_ROWS = 128
"""Matrices with more rows and columns than this are cut, so that a decomposition takes only a few milliseconds."""
FLOAT = np.dtype("<f4")


class _Band(NamedTuple):
    """A band of rows of a layer's matrix: its place in the bucket, and its number of atoms; 0 sends it uncompressed."""

    layer: Layer
    start: int
    stop: int
    columns: int
    atoms: int

    @property
    def rows(self) -> int:
        return -(-(self.stop - self.start) // self.columns)

    @property
    def floats(self) -> int:
        return self.atoms * (self.rows + self.columns) or self.stop - self.start


class Atomo(Compressor):
    """A few atoms of each layer's singular value decomposition.

    Parameters
    ----------
    atoms
        Atoms sent per layer, or per 128 rows of a large one.
    """

    name = "atomo"
    feedback = Feedback.LOST

    def __init__(self, atoms: int = 3) -> None:
        if atoms < 1:
            raise ValueError(f"atomo takes a number of atoms, 1 or more, got {atoms}")
        self.atoms = atoms

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return the atoms drawn for each band: u and v, each scaled by the square root of the atom's size."""
        bands = [band for segment in segments for band in self._bands(segment)]
        parts, worths = [], []
        draws = occasion.own(segments[0].layer.name)
        for band in bands:
            part = values[band.start : band.stop]
            if band.atoms:
                left, right = self._drawn(band, part, draws)
                sent = np.concatenate([left.T, right.T], axis=1)
                # An entry of u changes the gradient by its value times the length of v, which is that root again.
                worths.append((np.abs(sent) * np.linalg.norm(right, axis=0)[:, None]).ravel())
                parts.append(sent.ravel())
            else:
                parts.append(part)
                worths.append(np.abs(part))
        content = np.concatenate(parts).astype(FLOAT)
        worth = np.concatenate(worths).astype(np.float32)
        return Encoded(content.view(np.uint8), tuple(_layout(bands)), 32, worth=worth, memory=tuple(bands))

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the sum of the atoms."""
        bands: tuple[_Band, ...] = encoded.memory
        floats = content.view(FLOAT).astype(np.float32, copy=False)
        sent = floats if present is None else np.where(present, floats, np.float32(0))
        values: Values = np.empty(bands[-1].stop, np.float32)
        first = 0
        for band in bands:
            part = sent[first : first + band.floats]
            first += band.floats
            if band.atoms:
                both = part.reshape(band.atoms, -1).T
                part = product(both[: band.rows], both[band.rows :]).ravel()[: band.stop - band.start]
            values[band.start : band.stop] = part
        return values

    def _bands(self, segment: Segment) -> Iterator[_Band]:
        shape = shape_of(segment)
        if shape is None:
            yield _Band(segment.layer, segment.start, segment.stop, 1, 0)
            return
        rows = shape.rows if min(shape.rows, shape.columns) <= BAND_ROWS else BAND_ROWS
        for start in range(segment.start, segment.stop, rows * shape.columns):
            stop = min(start + rows * shape.columns, segment.stop)
            band = _Band(segment.layer, start, stop, shape.columns, self.atoms)
            whole = band.floats >= stop - start
            yield band._replace(atoms=0) if whole else band

    def _drawn(self, band: _Band, values: Values, draws: np.random.Generator) -> tuple[Values, Values]:
        """Draw atoms; return their u and v, shapes (rows, atoms) and (columns, atoms), with 0 for missing atoms."""
        left: Values = np.zeros((band.rows, band.atoms))
        right: Values = np.zeros((band.columns, band.atoms))
        if not np.isfinite(values).all():
            left[:] = right[:] = np.nan
            return left, right
        matrix = Shape(band.rows, band.columns).matrix(values.astype(np.float64))
        u, sizes, vt = np.linalg.svd(matrix, full_matrices=False)
        chances = probabilities(sizes, band.atoms)
        drawn = systematic(chances, draws.random())
        roots = np.sqrt(sizes[drawn] / chances[drawn])
        left[:, : len(drawn)], right[:, : len(drawn)] = u[:, drawn] * roots, vt[drawn].T * roots
        return left, right


def probabilities(sizes: NDArray[np.floating], atoms: int) -> NDArray[np.float64]:
    """Return the probability of each atom that minimises the variance (algorithm 1 of ATOMO).

    Parameters
    ----------
    sizes
        Sizes of the atoms, at least 0 and descending.
    atoms
        Sum of the probabilities, unless fewer atoms have a size above 0.
    """
    chances = np.zeros(len(sizes))
    sizes = np.where(sizes > 1e-12 * sizes[0], sizes, 0) if len(sizes) else sizes
    for place, size in enumerate(sizes):
        rest = sizes[place:].sum()
        if atoms == place or rest == 0:
            break
        if (atoms - place) * size <= rest:
            chances[place:] = (atoms - place) * sizes[place:] / rest
            break
        chances[place] = 1
    return chances


def systematic(chances: NDArray[np.float64], start: float) -> NDArray[np.int64]:
    """Draw as many indices as the probabilities add up to, given one ``start`` drawn uniformly from [0, 1)."""
    ends = np.cumsum(chances)
    ends[ends >= np.rint(ends[-1]) - 1e-9] = np.rint(ends[-1])
    passed = np.floor(ends - start)
    return np.flatnonzero(np.diff(passed, prepend=np.floor(-start)) > 0)


def _layout(bands: Sequence[_Band]) -> Iterator[Segment]:
    """Yield the segment of each layer's floats."""
    stop = 0
    for place, band in enumerate(bands):
        start, stop = stop, stop + band.floats
        if place and bands[place - 1].layer == band.layer:
            continue
        last = max(n for n, other in enumerate(bands) if other.layer == band.layer)
        yield Segment(band.layer, start, start + sum(other.floats for other in bands[place : last + 1]))
