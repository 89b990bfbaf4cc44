# SPDX-License-Identifier: Apache-2.0
"""A few bits per value: codes with a scale per group (QSGD, TernGrad, signs).

Scales are sent first and must arrive; every other packet can be decoded by itself.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlcp.compress.compressor import Compressor, Content, Encoded, Feedback, Occasion, Values
from dlcp.values.tags import Layer, Segment

SCALE = np.dtype("<f4")
GROUP_VALUES = 512
"""Values per norm in QSGD: the bucket size that its authors used with 4 bits (section 5 of their paper)."""
Codes = NDArray[np.uint8]


class ScaledCodes(Compressor):
    """Values as codes of 1, 2, 4 or 8 bits, times a scale per group. Missing values decode to 0.

    Parameters
    ----------
    bits
        Bits per code.
    group
        Largest number of values that share a scale; None for a whole layer. Groups never cross layers.
    """

    def __init__(self, bits: int, group: int | None) -> None:
        if bits not in (1, 2, 4, 8):
            raise ValueError(f"{self.name} takes 1, 2, 4 or 8 bits per value, got {bits}")
        self.bits, self.group = bits, group

    @abstractmethod
    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the scale of each group; groups begin at ``starts``."""

    @abstractmethod
    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return the code of each value, given its group's scale."""

    @abstractmethod
    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return the values of codes, in units of the scale."""

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
        """Return the values of scales and codes."""
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
    """Return the starts of groups of at most ``longest`` values that do not cross layers."""
    starts = [np.arange(s.start, s.stop, longest or max(1, s.stop - s.start)) for s in segments]
    return np.concatenate(starts).astype(np.int64)


def pack(codes: Codes, bits: int) -> Codes:
    """Pack codes of a few bits into bytes, the first code into the lowest bits."""
    each = 8 // bits
    padded = np.zeros(-(-len(codes) // each) * each, np.uint8)
    padded[: len(codes)] = codes
    packed: Codes = padded[::each].copy()
    for place in range(1, each):
        packed |= padded[place::each] << np.uint8(place * bits)
    return packed


def unpack(packed: Codes, bits: int) -> Codes:
    """Undo :func:`pack`; additional codes of 0 may follow."""
    each = 8 // bits
    codes = np.empty((len(packed), each), np.uint8)
    for place in range(each):
        codes[:, place] = packed >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return codes.ravel()


class Qsgd(ScaledCodes):
    """QSGD (Alistarh et al., NeurIPS 2017): a norm per group, and per value its sign and one of s + 1 levels.

    Value v of a group of d with norm N becomes N sgn(v) l/s, where l is |v| s / N rounded up or down at random so that
    its expectation is kept. The squared error is at most min(d/s^2, sqrt(d)/s) times the squared norm (Lemma 3.1).

    Unlike the authors' Elias codes, codes here have a fixed length, so that every packet can be decoded by itself.

    Parameters
    ----------
    bits
        2, 4 or 8: s is 1, 7 or 127.
    """

    name = "qsgd"
    feedback = Feedback.LOST

    def __init__(self, bits: int = 4) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"qsgd takes 2, 4 or 8 bits per value, for sign and level, got {bits}")
        super().__init__(bits, GROUP_VALUES)
        self.top = (1 << bits - 1) - 1

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the groups' Euclidean norms."""
        squares = np.square(values, dtype=np.float64)
        return np.asarray(np.sqrt(np.add.reduceat(squares, starts)))

    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return codes with the sign in the highest bit and the level below."""
        exact = np.nan_to_num(np.abs(values) / scales, nan=0.0, posinf=0.0) * np.float32(self.top)
        levels: Codes = np.minimum(_round_at_random(exact, draws), self.top).astype(np.uint8)
        negative = (np.signbit(values) & (levels > 0)).astype(np.uint8)
        levels |= negative << np.uint8(self.bits - 1)
        return levels

    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return signed levels in units of the norm."""
        sizes = (codes & np.uint8(self.top)).astype(np.float32) / np.float32(self.top)
        signed: NDArray[np.float32] = np.where(codes > self.top, -sizes, sizes)
        return signed


class TernGrad(Qsgd):
    """TernGrad (Wen et al., NeurIPS 2017): -1, 0 or 1 times the largest absolute value of the layer.

    Value v of a layer with largest absolute value s becomes s sgn(v) with probability |v| / s, else 0: QSGD with one
    level and another norm. Its authors first clip gradients at 2.5 standard deviations. That causes a bias, so it is
    left to the optimizer.
    """

    name = "terngrad"

    def __init__(self) -> None:
        super().__init__(2)
        self.group = None

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the layers' largest absolute values."""
        return np.asarray(np.maximum.reduceat(np.abs(values), starts))


def _round_at_random(exact: NDArray[np.floating], draws: np.random.Generator) -> NDArray[np.floating]:
    """Round each number up or down at random, so that its expectation is the number."""
    below: NDArray[np.floating] = np.floor(exact)
    below += draws.random(len(exact), np.float32) < exact - below
    return below


class _Signs(ScaledCodes):
    def __init__(self) -> None:
        super().__init__(1, None)

    def codes(self, values: NDArray[np.float32], scales: NDArray[np.float32], draws: np.random.Generator) -> Codes:
        """Return 1 for negative values, 0 for positive ones, and either at random for 0, which a dead unit gives."""
        codes = (values < 0).astype(np.uint8)
        zeros = np.flatnonzero(values == 0)
        codes[zeros] = draws.integers(0, 2, len(zeros), np.uint8)
        return codes

    def levels(self, codes: Codes) -> NDArray[np.float32]:
        """Return 1 or -1."""
        return np.array([1, -1], np.float32)[codes]


class SignSgd(_Signs):
    """signSGD with majority vote (Bernstein et al., ICML 2018 and ICLR 2019): the sign of most ranks.

    The result is 1, -1, or 0 for a tie, at any size of the gradients; choose the learning rate accordingly. Ranks whose
    packet was lost abstain. There is no error feedback, because a vote is not an average. Its authors prove convergence
    with large batches, or with unimodal and symmetric noise; otherwise it may not converge at all (Karimireddy et al.,
    ICML 2019).
    """

    name = "signsgd"
    feedback = Feedback.NOTHING

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return 1, or NaN if a gradient of the layer is NaN."""
        return np.where(np.isnan(np.add.reduceat(values, starts)), np.nan, 1.0)

    def combine(self, parts: Iterable[Values]) -> Values:
        """Return the vote."""
        votes = iter(parts)
        total = next(votes).copy()
        for part in votes:
            total += part
        return np.asarray(np.sign(total))


class ScaledSigns(_Signs):
    """EF-signSGD (Karimireddy et al., ICML 2019): the sign of each value times the mean absolute value of its layer.

    It keeps at least ||v||_1^2 / (d ||v||_2^2) of the squared norm, so with error feedback it converges like SGD.
    """

    name = "efsignsgd"

    def scales(self, values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the layers' mean absolute values."""
        return np.add.reduceat(np.abs(values, dtype=np.float64), starts) / np.diff(starts, append=len(values))
