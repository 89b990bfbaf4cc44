# SPDX-License-Identifier: Apache-2.0
"""A few bits for each value, and a scale for each group of values.

The scales go first and must arrive; of the rest every packet can be read without the others.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Occasion, Values
from dlcp.tags import Layer, Segment

SCALE = np.dtype("<f4")
Codes = NDArray[np.uint8]


class ScaledCodes(Compressor):
    """Codes of ``bits`` bits, 1, 2, 4 or 8. Code 0 is what is missing.

    Parameters
    ----------
    bits
        Bits for each value.
    group
        The most values that share a scale; None: a layer's. Groups never cross layers.
    """

    def __init__(self, bits: int, group: int | None) -> None:
        if bits not in (1, 2, 4, 8):
            raise ValueError(f"{self.name} takes 1, 2, 4 or 8 bits a value, got {bits}")
        self.bits, self.group = bits, group

    @abstractmethod
    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the scale of each group, where groups begin at ``starts``."""

    @abstractmethod
    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return the code of each value, given its group's scale."""

    @abstractmethod
    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return what codes stand for, in units of the scale."""

    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return scales and codes."""
        floats = values.astype(np.float32, copy=False)
        starts = group_starts(segments, self.group)
        lengths = np.diff(starts, append=len(values))
        with np.errstate(all="ignore"):
            scales = self.scales(floats, starts).astype(SCALE)
            codes = self.codes(floats, np.repeat(scales, lengths), occasion.own(segments[0].layer.name))
        content = np.concatenate([scales.view(np.uint8), pack(codes, self.bits)])
        header = scales.nbytes * 8 // self.bits
        first = Layer(f"{segments[0].layer.name} (scales)", min(segment.layer.position for segment in segments))
        shifted = [Segment(s.layer, s.start + header, s.stop + header) for s in segments]
        worth = np.concatenate([np.full(header, np.inf, np.float32), floats])
        layout = (Segment(first, 0, header), *shifted)
        return Encoded(content, layout, self.bits, worth=worth, memory=lengths)

    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the values that scales and codes stand for."""
        lengths = encoded.memory
        header = len(lengths) * SCALE.itemsize
        raw = content.view(np.uint8)
        scales = raw[:header].view(SCALE).astype(np.float32)
        values = self.levels(unpack(raw[header:], self.bits)[: int(lengths.sum())])
        with np.errstate(invalid="ignore"):
            values *= np.repeat(scales, lengths)
        if present is not None:
            values[~present[encoded.segments[0].stop :]] = 0
        return values


def group_starts(segments: Sequence[Segment], longest: int | None) -> NDArray[np.int64]:
    """Return where groups of at most ``longest`` values begin, none of which crosses a layer's border."""
    starts = [np.arange(s.start, s.stop, longest or max(1, s.stop - s.start)) for s in segments]
    return np.concatenate(starts).astype(np.int64)


def pack(codes: Codes, bits: int) -> Codes:
    """Put codes of a few bits into bytes, the first into the lowest bits."""
    each = 8 // bits
    padded = np.zeros(-(-len(codes) // each) * each, np.uint8)
    padded[: len(codes)] = codes
    packed: Codes = padded[::each].copy()
    for place in range(1, each):
        packed |= padded[place::each] << np.uint8(place * bits)
    return packed


def unpack(packed: Codes, bits: int) -> Codes:
    """Undo :func:`pack`; codes of 0 may follow."""
    each = 8 // bits
    codes = np.empty((len(packed), each), np.uint8)
    for place in range(each):
        codes[:, place] = packed >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return codes.ravel()
