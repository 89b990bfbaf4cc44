# SPDX-License-Identifier: Apache-2.0
"""An average over ranks that is formed while packets arrive: ``dlcp/native/reduction.c`` in NumPy."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS
from dlcp.transport.engine import StreamingReduction

if TYPE_CHECKING:
    from dlcp.transport.plain.incoming import PlainIncoming


class PlainReduction(StreamingReduction):
    """See :class:`dlcp.transport.engine.StreamingReduction`."""

    def __init__(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int
    ) -> None:
        super().__init__(values, members, first_block)
        self.per_packet = per_packet
        self.packets = -(-len(values) // per_packet)
        self.members: list[PlainIncoming | None] = [None] * members
        self.divisor = np.float32(divisor)
        self.copy: NDArray[np.float32] | None = None
        self.added = np.zeros(self.packets, np.uint16)
        """How many others are in the sum."""
        self.chunk = np.zeros(self.packets, np.int64)
        """By how many positions the order of the members is rotated."""
        if first_block >= 0:
            blocks = -(-self.packets // SEND_BLOCK_PACKETS)
            self.chunk[:] = (np.arange(self.packets) // SEND_BLOCK_PACKETS - first_block) % blocks * members // blocks

    def _turns(self, position: int) -> NDArray[np.int64]:
        """Return how many others come before a member, by packets."""
        return (position + self.chunk) % len(self.members)

    def add(self, position: int, indices: NDArray[np.uint32], rows: NDArray[np.uint8]) -> None:
        """Add packets of full size of the member at a position; ``rows`` are their payloads."""
        member = self.members[position]
        assert member is not None
        ready = self.added[indices] == self._turns(position)[indices]
        for index, row in zip(indices[~ready].tolist(), rows[~ready], strict=True):
            member.keep(index, row)
        chosen, rows = indices[ready], rows[ready]
        whole = chosen < len(self.values) // self.per_packet
        for chunk in np.unique(self.chunk[chosen]).tolist():
            here = self.chunk[chosen] == chunk
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
        self.added[indices] += 1
        complete = self.added[indices[0]] == len(self.members)
        if complete:
            sums /= self.divisor
        into[indices] = sums
        if complete and self.copy is not None:
            self.copy[: into.size].reshape(into.shape)[indices] = sums

    def _add_one(self, index: int, row: NDArray[np.uint8]) -> None:
        into = self._part(index)
        into += np.ascontiguousarray(row[: len(into) * 4]).view(np.float32)
        self.added[index] += 1
        if self.added[index] == len(self.members):
            into /= self.divisor
            if self.copy is not None:
                self.copy[index * self.per_packet : index * self.per_packet + len(into)] = into

    def _go_on(self, indices: NDArray[np.uint32]) -> None:
        """Add what has been waiting for its turn, of packets of one chunk to which as many have been added."""
        while len(indices):
            added = int(self.added[indices[0]])
            if added >= len(self.members):
                return
            waiting = self._members_from(int(indices[0]))[added]
            if waiting is None or waiting.buffer is None:
                return
            indices = indices[waiting.delivered[indices]]
            for index in indices.tolist():
                self._add_one(index, waiting.kept(index))

    def _part(self, index: int) -> NDArray[np.float32]:
        return self.values[index * self.per_packet : (index + 1) * self.per_packet]

    def _members_from(self, index: int) -> "list[PlainIncoming | None]":
        """Return the members in the order in which they are added to a packet."""
        first = -int(self.chunk[index]) % len(self.members)
        return self.members[first:] + self.members[:first]

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """See :meth:`dlcp.transport.engine.StreamingReduction.copy_into`."""
        self.copy = copy

    def included(self, position: int) -> NDArray[np.bool_]:
        """See :meth:`dlcp.transport.engine.StreamingReduction.included`."""
        return self.added > self._turns(position)

    def finish(self, rescale: bool) -> int:
        """See :meth:`dlcp.transport.engine.StreamingReduction.finish`."""
        incomplete = np.flatnonzero(self.added < len(self.members)).tolist()
        for index in incomplete:
            into = self._part(index)
            contributions = 1 + int(self.added[index])
            for member in self._members_from(index)[self.added[index] :]:
                if member is not None and member.buffer is not None and member.delivered[index]:
                    into += np.ascontiguousarray(member.kept(index)[: len(into) * 4]).view(np.float32)
                    contributions += 1
            self.added[index] = len(self.members)
            into /= np.float32(contributions) if rescale else self.divisor
        self.members = [None] * len(self.members)
        return len(incomplete)
