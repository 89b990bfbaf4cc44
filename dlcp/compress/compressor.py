# SPDX-License-Identifier: Apache-2.0
"""The interface of compressors, which encode a bucket of gradients into fewer bytes, and decode it.

A compressor is independent of the network. It declares whether its output can be summed, and what error feedback must
compensate. Output that can be summed goes through an all-reduce; otherwise each rank sends its output to all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dlcp.values.tags import Segment

Values = NDArray[np.floating[Any]]
Content = NDArray[np.generic]

_SHARED = 0xFFFFFFFF
"""Takes the place of the rank in the seed of draws that are the same on all ranks."""


class Feedback(Enum):
    """Content that error feedback sends with the next step."""

    NOTHING = "nothing"
    """Nothing: the result is not an average but, for example, a vote."""
    LOST = "lost"
    """Losses in the network. The coding itself is unbiased."""
    ALL = "all"
    """Losses in the network, and values left out by the coding."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """The step and rank of a compression, which seed its random choices.

    Parameters
    ----------
    step, rank
        Training step, and the rank that compresses.
    seed
        Seed, the same on all ranks.
    """

    step: int
    rank: int
    seed: int = 0

    def own(self, name: str) -> np.random.Generator:
        """Return a generator for a layer that differs between ranks."""
        return np.random.Generator(np.random.PCG64(self._sequence(name, self.rank)))

    def shared(self, name: str) -> np.random.Generator:
        """Return a generator for a layer that is the same on all ranks."""
        return np.random.Generator(np.random.PCG64(self._sequence(name, _SHARED)))

    def _sequence(self, name: str, rank: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, self.step, rank, crc32(name.encode())])


@dataclass(slots=True)
class Encoded:
    """An encoded bucket.

    Parameters
    ----------
    content
        The data to send, flat: float32 if the compressor ``reduces``, else bytes.
    segments
        Each layer's units in ``content``: ascending, without gaps. A unit is the smallest part that can be decoded by
        itself; packets hold whole units.
    unit_bits
        Bits of a unit.
    worth
        Importance of each unit, on the scale of gradient values, shape (units,), float32; infinity if it must arrive.
        Determines drop classes. None if the units are gradient values themselves.
    memory
        The compressor's state for decoding, the same on all ranks.
    """

    content: Content
    segments: tuple[Segment, ...]
    unit_bits: int
    worth: NDArray[np.float32] | None = None
    memory: Any = None

    @property
    def units(self) -> int:
        """Number of units."""
        return self.segments[-1].stop


class Compressor(ABC):
    """A way to compress buckets. It may keep state for each layer, by name.

    Attributes
    ----------
    name
        Its name in the option ``compression``.
    reduces
        Whether the average of encoded contents decodes to the average of the gradients.
    rounds
        Number of averages; more than one only if it ``reduces``.
    feedback
        Content that error feedback sends with the next step.
    """

    name: ClassVar[str]
    reduces: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    feedback: Feedback = Feedback.ALL

    @abstractmethod
    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Encode a bucket; the result's layout must be the same on all ranks.

        Parameters
        ----------
        values
            Gradients, shape (m,), float32 or float64; not changed. If a rank's gradients are not finite, all its values
            are NaN, and every rank's result must be NaN.
        segments
            The bucket's layers: ascending, without gaps, from 0 to m.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the decoded gradients, shape (m,), with the same bits on all ranks.

        Parameters
        ----------
        encoded
            Any rank's, for the layout.
        content
            A rank's content; if the compressor ``reduces``, also an average or another sum of contents.
        present
            Mask of the units that have arrived, shape (units,); missing units count as 0. None if all have.
        """

    def refine(self, encoded: Encoded, mean: Content) -> Encoded | None:
        """Return the content to average in the next round, given this round's ``mean``; None after the last round."""
        return None

    def combine(self, parts: Iterable[Values]) -> Values | None:
        """Combine the ranks' decoded gradients, in rank order, and return the result; None means their average."""
        return None


def average(parts: Iterable[Values]) -> Values:
    """Return the mean of arrays, summed in the given order."""
    total: Values | None = None
    count = 0
    for part in parts:
        total = part.copy() if total is None else np.add(total, part, out=total)
        count += 1
    assert total is not None
    with np.errstate(invalid="ignore"):
        total /= total.dtype.type(count)
    return total
