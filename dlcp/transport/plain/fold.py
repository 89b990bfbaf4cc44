# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks, formed while packets arrive: own values first, then the others by position."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dlcp.transport.plain.incoming import PlainIncoming


class PlainFold:
    """See :class:`dlcp.transport.engine.Fold`."""

    def __init__(self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a sum needs contiguous, writable float32 values")
        self.values = values
        self.per_packet = per_packet
        self.packets = -(-len(values) // per_packet)
        self.members: list[PlainIncoming | None] = [None] * members
        self.divisor = np.float32(divisor)
        self.folded = np.zeros(self.packets, np.uint16)

    def add(self, position: int, indices: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        """Add packets of full size of the member at a position; ``rows`` are their payloads."""
        member = self.members[position]
        assert member is not None
        ready = self.folded[indices] == position
        for index, row in zip(indices[~ready].tolist(), rows[~ready], strict=True):
            member.keep(index, row)
        chosen = indices[ready]
        if len(chosen):
            whole = chosen < len(self.values) // self.per_packet
            self._add_rows(chosen[whole], rows[ready][whole])
            for index, row in zip(chosen[~whole].tolist(), rows[ready][~whole], strict=True):
                self._add_one(index, row)
            self._go_on(chosen)

    def _add_rows(self, indices: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        if not len(indices):
            return
        count = len(self.values) // self.per_packet
        into = self.values[: count * self.per_packet].reshape(count, self.per_packet)
        parts = np.ascontiguousarray(rows[:, : self.per_packet * 4]).view(np.float32)
        sums = into[indices] + parts
        self.folded[indices] += 1
        if self.folded[indices[0]] == len(self.members):
            sums /= self.divisor
        into[indices] = sums

    def _add_one(self, index: int, row: NDArray[np.uint8]) -> None:
        into = self._part(index)
        into += np.ascontiguousarray(row[: len(into) * 4]).view(np.float32)
        self.folded[index] += 1
        if self.folded[index] == len(self.members):
            into /= self.divisor

    def _go_on(self, indices: NDArray[np.uint32]) -> None:
        """Add what has been waiting for its turn."""
        while len(indices):
            position = int(self.folded[indices[0]])
            if position >= len(self.members):
                return
            waiting = self.members[position]
            if waiting is None or waiting.buffer is None:
                return
            indices = indices[waiting.delivered[indices]]
            for index in indices.tolist():
                self._add_one(index, waiting.kept(index))

    def _part(self, index: int) -> NDArray[np.float32]:
        return self.values[index * self.per_packet : (index + 1) * self.per_packet]

    def catch_up(self, position: int) -> None:
        """Add what had arrived of a member before it was joined."""
        member = self.members[position]
        assert member is not None
        indices = np.flatnonzero(member.delivered & (self.folded == position)).astype(np.uint32)
        for index in indices.tolist():
            self._add_one(index, member.kept(index))
        self._go_on(indices)

    def included(self, position: int) -> NDArray[np.bool_]:
        """See :meth:`dlcp.transport.engine.Fold.included`."""
        return self.folded > position

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None) -> int:
        """See :meth:`dlcp.transport.engine.Fold.finish`."""
        incomplete = np.flatnonzero(self.folded < len(self.members)).tolist()
        for index in incomplete:
            into = self._part(index)
            contributions = 1 + int(self.folded[index])
            for member in self.members[self.folded[index] :]:
                if member is not None and member.buffer is not None and member.delivered[index]:
                    into += np.ascontiguousarray(member.kept(index)[: len(into) * 4]).view(np.float32)
                    contributions += 1
            self.folded[index] = len(self.members)
            total = into.copy()
            into /= np.float32(contributions) if rescale else self.divisor
            if owed is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    error = total - self.divisor * into
                part = owed[index * self.per_packet : index * self.per_packet + len(into)]
                part += np.where(np.isfinite(error), error, 0)
        return len(incomplete)
