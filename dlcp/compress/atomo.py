# SPDX-License-Identifier: Apache-2.0
"""Spectral ATOMO (Wang et al., NeurIPS 2018): a few singular vectors of each layer, drawn so that they are unbiased.

A layer's matrix is the sum of l_i u_i v_i^T. Atom i is sent with probability p_i, as (l_i / p_i) u_i v_i^T; those p_i
that add up to the number of atoms wanted and make the variance least are their algorithm 1. Where they draw each atom
for itself, here exactly as many are drawn as are wanted, each still with its p_i (systematic sampling, Madow 1949): the
expectation is the same, and as atoms are orthogonal so is the variance, sum of l_i^2 (1/p_i - 1); and every message has
the same size. For small matrices: it takes a singular value decomposition; large ones are cut into bands of rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Feedback, Occasion, Values
from dlcp.compress.matrices import product, shape_of
from dlcp.tags import Layer, Segment

BAND_ROWS = 128
"""Matrices of more rows and columns than this are cut. Chosen by us: a decomposition then takes some milliseconds."""
FLOAT = np.dtype("<f4")


class _Band(NamedTuple):
    """Rows of a layer's matrix: where they lie in the bucket, and how they travel; of 0 atoms, as they are."""

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
        How many are sent of each layer, or of each 128 rows of a large one.
    """

    name = "atomo"
    feedback = Feedback.LOST

    def __init__(self, atoms: int = 3) -> None:
        if atoms < 1:
            raise ValueError(f"atomo takes the number of atoms to send, 1 or more, got {atoms}")
        self.atoms = atoms

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return the atoms drawn of each band, u and v each times the root of the atom's size."""
        bands = [band for segment in segments for band in self._bands(segment)]
        parts, worths = [], []
        draws = occasion.own(segments[0].layer.name)
        for band in bands:
            part = values[band.start : band.stop]
            if band.atoms:
                left, right = self._drawn(band, part, draws)
                sent = np.concatenate([left.T, right.T], axis=1)
                # What an entry of u does to the gradient is it times the length of v: the root once more.
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
        """Return the drawn atoms' u and v, shapes (rows, atoms) and (columns, atoms); 0 for missing ones."""
        left: Values = np.zeros((band.rows, band.atoms))
        right: Values = np.zeros((band.columns, band.atoms))
        if not np.isfinite(values).all():
            left[:] = right[:] = np.nan
            return left, right
        missing = band.rows * band.columns - len(values)
        matrix = np.pad(values.astype(np.float64), (0, missing)).reshape(band.rows, band.columns)
        u, sizes, vt = np.linalg.svd(matrix, full_matrices=False)
        chances = probabilities(sizes, band.atoms)
        drawn = systematic(chances, draws.random())
        roots = np.sqrt(sizes[drawn] / chances[drawn])
        left[:, : len(drawn)], right[:, : len(drawn)] = u[:, drawn] * roots, vt[drawn].T * roots
        return left, right


def probabilities(sizes: NDArray[np.floating], atoms: int) -> NDArray[np.float64]:
    """Return the chance of each atom with which the variance is least (algorithm 1 of ATOMO).

    Parameters
    ----------
    sizes
        Of the atoms, at least 0 and descending.
    atoms
        What the chances add up to, unless fewer have a size.
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
    """Draw as many as the chances add up to, each with its own chance, from one ``start`` drawn evenly from [0, 1)."""
    ends = np.cumsum(chances)
    ends[ends >= np.rint(ends[-1]) - 1e-9] = np.rint(ends[-1])
    passed = np.floor(ends - start)
    return np.flatnonzero(np.diff(passed, prepend=np.floor(-start)) > 0)


def _layout(bands: Sequence[_Band]) -> Iterator[Segment]:
    """Return whose floats lie where."""
    stop = 0
    for place, band in enumerate(bands):
        start, stop = stop, stop + band.floats
        if place and bands[place - 1].layer == band.layer:
            continue
        last = max(n for n, other in enumerate(bands) if other.layer == band.layer)
        yield Segment(band.layer, start, start + sum(other.floats for other in bands[place : last + 1]))
