# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what was lost is sent with the next step, so that nothing is lost for good.

The rule is that of error-compensated SGD (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019), with the
network in the place of the compressor: the receiver's bitmap names exactly what did not arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.dtypes import ValueType
from dlcp.tags import Segment


@dataclass(slots=True)
class _Debt:
    """What is owed of one parameter: values, and where they belong in it; some places may come more than once."""

    size: int
    parts: list[tuple[NDArray[np.int64] | slice, NDArray[np.floating]]] = field(default_factory=list)

    def add_to(self, values: NDArray[np.floating]) -> None:
        for places, owed in self.parts:
            values[places] += owed


class ErrorFeedback:
    """What this rank still owes, by parameter: frameworks regroup their buffers, parameters stay.

    Of what was lost only that is kept, and not the rest as zeros: of a large model that is little. What a compressor
    leaves out is most of the values, and kept without places.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def add_to(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Add what is owed to a buffer, in place, and owe it no longer."""
        for segment in segments:
            debt = self._debts.pop(segment.layer.name, None)
            if debt is not None:
                debt.add_to(values[segment.start : segment.stop])

    def repay(self, values: NDArray[np.generic], value_type: ValueType, segments: Sequence[Segment]) -> None:
        """Add what is owed to a buffer in the storage of ``value_type``, in place, and owe it no longer."""
        for segment in segments:
            debt = self._debts.pop(segment.layer.name, None)
            if debt is None:
                continue
            part = values[segment.start : segment.stop]
            for places, owed in debt.parts:
                part[places] = value_type.narrow(value_type.widen(part[places]) + owed)

    def owe(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Owe a whole buffer's ``values``, which are 0 wherever all arrived."""
        places = np.flatnonzero(values)
        self.owe_at(places, values[places], segments)

    def owe_all(self, values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Owe a whole buffer's ``values``, few of which are 0."""
        for segment in segments:
            if segment.start < segment.stop:
                debt = self._debts.setdefault(segment.layer.name, _Debt(segment.stop - segment.start))
                debt.parts.append((slice(None), values[segment.start : segment.stop].copy()))

    def owe_at(self, places: NDArray[np.int64], values: NDArray[np.floating], segments: Sequence[Segment]) -> None:
        """Owe ``values`` that belong at ``places`` of a buffer, which ascend and are each there once."""
        if not len(places):
            return
        borders = np.searchsorted(places, [segment.start for segment in segments] + [segments[-1].stop])
        for segment, first, last in zip(segments, borders, borders[1:], strict=False):
            if first < last:
                size = segment.stop - segment.start
                debt = self._debts.setdefault(segment.layer.name, _Debt(size))
                debt.parts.append((places[first:last] - segment.start, values[first:last].copy()))

    def owed(self, name: str) -> NDArray[np.floating] | None:
        """Return what is owed of a parameter, flat and with zeros where nothing is, or None."""
        debt = self._debts.get(name)
        if debt is None:
            return None
        values: NDArray[np.floating] = np.zeros(debt.size, debt.parts[0][1].dtype)
        debt.add_to(values)
        return values

    @property
    def values(self) -> int:
        """How many values are owed."""
        return sum(len(owed) for debt in self._debts.values() for _, owed in debt.parts)

    def forgive(self) -> None:
        """Owe nothing any more."""
        self._debts.clear()
