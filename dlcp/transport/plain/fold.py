# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks, formed while packets arrive: own values first, then the others in a fixed order."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS

if TYPE_CHECKING:
    from dlcp.transport.plain.incoming import PlainIncoming


class PlainFold:
    """See :class:`dlcp.transport.engine.Fold`."""

    def __init__(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a sum needs contiguous, writable float32 values")
        self.values = values
        self.per_packet = per_packet
        self.packets = -(-len(values) // per_packet)
        self.members: list[PlainIncoming | None] = [None] * members
        self.divisor = np.float32(divisor)
        self.copy: NDArray[np.float32] | None = None
        self.folded = np.zeros(self.packets, np.uint16)
        self.region = np.zeros(self.packets, np.int64)
        """By how many places the order of the members is turned."""
        if first_block >= 0:
            blocks = -(-self.packets // SEND_BLOCK_PACKETS)
            self.region[:] = (np.arange(self.packets) // SEND_BLOCK_PACKETS - first_block) % blocks * members // blocks

    def _turns(self, position: int) -> NDArray[np.int64]:
        """Return how many others come before a member, by packets."""
        return (position + self.region) % len(self.members)

    def add(self, position: int, indices: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        """Add packets of full size of the member at a position; ``rows`` are their payloads."""
        member = self.members[position]
        assert member is not None
        ready = self.folded[indices] == self._turns(position)[indices]
        for index, row in zip(indices[~ready].tolist(), rows[~ready], strict=True):
            member.keep(index, row)
        chosen, rows = indices[ready], rows[ready]
        whole = chosen < len(self.values) // self.per_packet
        for region in np.unique(self.region[chosen]).tolist():
            here = self.region[chosen] == region
            self._add_rows(chosen[here & whole], rows[here & whole])
            for index, row in zip(chosen[here & ~whole].tolist(), rows[here & ~whole], strict=True):
                self._add_one(index, row)
            self._go_on(chosen[here])

    def _add_rows(self, indices: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        if not len(indices):
            return
        count = len(self.values) // self.per_packet
        into = self.values[: count * self.per_packet].reshape(count, self.per_packet)
        parts = np.ascontiguousarray(rows[:, : self.per_packet * 4]).view(np.float32)
        sums = into[indices] + parts
        self.folded[indices] += 1
        complete = self.folded[indices[0]] == len(self.members)
        if complete:
            sums /= self.divisor
        into[indices] = sums
        if complete and self.copy is not None:
            self.copy[: into.size].reshape(into.shape)[indices] = sums

    def _add_one(self, index: int, row: NDArray[np.uint8]) -> None:
        into = self._part(index)
        into += np.ascontiguousarray(row[: len(into) * 4]).view(np.float32)
        self.folded[index] += 1
        if self.folded[index] == len(self.members):
            into /= self.divisor
            if self.copy is not None:
                self.copy[index * self.per_packet : index * self.per_packet + len(into)] = into

    def _go_on(self, indices: NDArray[np.uint32]) -> None:
        """Add what has been waiting for its turn, of packets of one region to which as many have been added."""
        while len(indices):
            folded = int(self.folded[indices[0]])
            if folded >= len(self.members):
                return
            waiting = self._members_from(int(indices[0]))[folded]
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
        indices = np.flatnonzero(member.delivered & (self.folded == self._turns(position))).astype(np.uint32)
        for index in indices.tolist():
            self._add_one(index, member.kept(index))
        for region in np.unique(self.region[indices]).tolist():
            self._go_on(indices[self.region[indices] == region])

    def _members_from(self, index: int) -> "list[PlainIncoming | None]":
        """Return the members in the order in which they are added to a packet."""
        first = -int(self.region[index]) % len(self.members)
        return self.members[first:] + self.members[:first]

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """See :meth:`dlcp.transport.engine.Fold.copy_into`."""
        self.copy = copy

    def included(self, position: int) -> NDArray[np.bool_]:
        """See :meth:`dlcp.transport.engine.Fold.included`."""
        return self.folded > self._turns(position)

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None) -> int:
        """See :meth:`dlcp.transport.engine.Fold.finish`."""
        incomplete = np.flatnonzero(self.folded < len(self.members)).tolist()
        for index in incomplete:
            into = self._part(index)
            contributions = 1 + int(self.folded[index])
            for member in self._members_from(index)[self.folded[index] :]:
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
