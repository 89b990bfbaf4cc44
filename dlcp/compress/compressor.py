# SPDX-License-Identifier: Apache-2.0
"""What every compressor is: a way to make a bucket of gradients smaller, and back.

A compressor knows nothing of the network. It says whether sums of what it makes mean anything, for then they go through
an all-reduce, and else each rank's go to all ranks; and what error feedback has to make up for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType
from dlcp.tags import Segment

Values = NDArray[np.floating[Any]]
Content = NDArray[np.generic]

_SHARED = 0xFFFFFFFF
"""In the place of a rank, where all ranks draw alike."""


class Feedback(Enum):
    """What is sent with the next step, if error feedback is on."""

    NOTHING = "nothing"
    """The result is no average, as with a vote: nothing that could be made up for."""
    LOST = "lost"
    """What the network lost. What coding changes is right on average over the draws."""
    ALL = "all"
    """What the network lost and what coding left out."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """When and where a bucket is compressed: all that random choices follow from.

    Parameters
    ----------
    step, rank
        Training step, and the rank that compresses.
    seed
        The same on all ranks.
    """

    step: int
    rank: int
    seed: int = 0

    def own(self, name: str) -> np.random.Generator:
        """Return draws for a layer that are this rank's own."""
        return np.random.Generator(np.random.PCG64(self._sequence(name, self.rank)))

    def shared(self, name: str) -> np.random.Generator:
        """Return draws for a layer that are the same on all ranks."""
        return np.random.Generator(np.random.PCG64(self._sequence(name, _SHARED)))

    def _sequence(self, name: str, rank: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, self.step, rank, crc32(name.encode())])


@dataclass(slots=True)
class Encoded:
    """A bucket as it travels.

    Parameters
    ----------
    content
        What is sent, flat: in the storage of ``value_type`` where it is to be added up, else bytes.
    segments
        Whose units lie where in it: ascending, without gaps. A unit is the least that means something by itself;
        packets hold whole ones.
    unit_bits
        Bits of a unit.
    value_type
        How ``content`` is added up; None where it cannot be.
    worth
        How much it matters that each unit arrives, in the measure of a gradient's values, shape (units,), float32;
        infinity: it must. Drop classes follow from it. None where the units are gradient values themselves.
    memory
        What the compressor needs to decode it, the same on all ranks.
    """

    content: Content
    segments: tuple[Segment, ...]
    unit_bits: int
    value_type: ValueType | None = None
    worth: NDArray[np.float32] | None = None
    memory: Any = None

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.segments[-1].stop


class Compressor(ABC):
    """One way to make buckets smaller. It may remember something of each layer, by name.

    Attributes
    ----------
    name
        What it is asked for by.
    reduces
        The average of what ranks send decodes to the average of what each of them sent.
    rounds
        How many averages it takes; more than one only where it ``reduces``.
    feedback
        What error feedback sends again.
    """

    name: ClassVar[str]
    reduces: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    feedback: Feedback = Feedback.ALL

    @abstractmethod
    def encode(self, values: Values, segments: Sequence[Segment], occasion: Occasion) -> Encoded:
        """Return what is sent of a bucket; its layout is the same on all ranks.

        Parameters
        ----------
        values
            Gradients, shape (m,), float32 or float64; not changed. All are NaN where a rank's gradients are not finite:
            so everybody's result must be.
        segments
            The layers in it: ascending, without gaps, from 0 to m.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, content: Content, present: NDArray[np.bool_] | None = None) -> Values:
        """Return the gradients that a content stands for, shape (m,), bit by bit the same on all ranks.

        Parameters
        ----------
        encoded
            Any rank's, for the layout.
        content
            Some rank's, or where the compressor ``reduces``, an average or other sum of contents, widened.
        present
            Which units of it are there, shape (units,); what is not counts as 0. None: all.
        """

    def refine(self, encoded: Encoded, mean: Content) -> Encoded | None:
        """Return what is to be averaged next, now that the ``mean`` of ``encoded`` is known; None: that was all."""
        return None

    def combine(self, parts: Iterable[Values]) -> Values | None:
        """Return the result of all ranks' gradients, in the order of ranks; None: it is their average."""
        return None


def average(parts: Iterable[Values]) -> Values:
    """Return the mean of arrays, added up in the order given."""
    total: Values | None = None
    count = 0
    for part in parts:
        total = part.copy() if total is None else np.add(total, part, out=total)
        count += 1
    assert total is not None
    with np.errstate(invalid="ignore"):
        total /= total.dtype.type(count)
    return total
