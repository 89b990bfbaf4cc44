# SPDX-License-Identifier: Apache-2.0
"""A message on its way in: which of its packets have arrived, and where their bytes go.

``dlcp/native/incoming.c`` in NumPy.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.engine import RULES
from dlcp.transport.messages import EMPTY, Bytes, MessageKey
from dlcp.transport.plain.reduction import PlainReduction

Name = tuple[int, int, int]
"""Sender, step and number of a message."""


def are_consecutive(indices: NDArray[np.uint32]) -> bool:
    """Tell whether each is one more than the one before."""
    if len(indices) == 1:
        return True
    span = int(indices[-1]) - int(indices[0])
    return span == len(indices) - 1 and bool((indices[1:] == indices[:-1] + np.uint32(1)).all())


@dataclass(slots=True)
class Finished:
    """A message that is complete here, of which packets may still come.

    Its sender may not know: it was told by an acknowledgement if ``whole``, and is told by STOP while ``stopping``.
    """

    packets: int
    completed_s: float
    whole: bool = False
    bitmap: bytes = b""
    """Most significant bit first; empty if every packet is in."""
    unconfirmed: set[int] = field(default_factory=set)
    """Parts of the bitmap, by first packet, that the sender has not confirmed."""
    due_s: float = 0.0
    give_up_s: float = 0.0
    repeat_s: float = RULES["stop_repeat_s"]

    @property
    def stopping(self) -> bool:
        """Whether the sender is told until it confirms that."""
        return bool(self.unconfirmed)


class PlainIncoming:
    """One message until its bound is met."""

    def __init__(self, rank: int, key: MessageKey, packets: int, payload_bytes: int) -> None:
        self.rank, self.key, self.packets = rank, key, packets
        self.arrived = self.arrived_protected = self.last_bytes = 0
        self.protected_packets: int | None = None
        self.required: int | None = None
        """None: no receive is posted."""
        self.deferred = self.deferrable = 0
        """Packets that will not be sent, as far as the sender has said, and how many those may be."""
        self.immediate = self.asked = self.complete = False
        self.delivered: NDArray[np.bool_] = np.zeros(packets, np.bool_)
        self.layer: Bytes = np.zeros(packets, np.uint8)
        self.buffer: Bytes | None = None
        self.tail = EMPTY
        self.early_bytes = 0
        self.reduction: PlainReduction | None = None
        self.position = 0
        self._payload_bytes = payload_bytes

    @property
    def name(self) -> Name:
        """What tells it from all others."""
        return self.rank, *self.key

    def place(
        self, buffer: Bytes | None, tail: Bytes, reduction: PlainReduction | None = None, position: int = 0
    ) -> None:
        """Have its bytes stored there or added to a reduction, those that have arrived and those to come."""
        early, self.buffer, self.tail = self.buffer, buffer, tail
        self.reduction, self.position = reduction, position
        if reduction is not None:
            reduction.members[position] = self
        total = tail.size + (0 if buffer is None else buffer.size)
        for index in np.flatnonzero(self.delivered).tolist():
            assert early is not None
            start = index * self._payload_bytes
            row = early[start : start + self._payload_bytes]
            if reduction is not None:
                reduction.add(position, np.array([index], np.uint32), row[None])
            else:
                self.keep(index, row[: max(0, total - start)])

    def fits(self, index: int, size: int) -> bool:
        """Tell whether a payload has the size its place asks for."""
        if index < self.packets - 1:
            return size == self._payload_bytes
        return index == self.packets - 1 and 0 < size <= self._payload_bytes and self.last_bytes in (0, size)

    def store(self, indices: NDArray[np.uint32], rows: NDArray[np.uint8], layers: Bytes, protected: int) -> None:
        """Store payloads of one size that fit and have not come before."""
        if indices[-1] == self.packets - 1:
            self.last_bytes = rows.shape[1]
        self.delivered[indices] = True
        if self.reduction is not None:
            self.reduction.add(self.position, indices, rows)
        elif self.buffer is not None and self._contiguous_inside(indices):
            start = int(indices[0]) * self._payload_bytes
            self.buffer[start : start + rows.size] = rows.reshape(-1)
        else:
            for index, row in zip(indices.tolist(), rows, strict=True):
                self.keep(index, row)
        self.layer[indices] = layers
        self.arrived += len(indices)
        self.arrived_protected += protected

    def _contiguous_inside(self, indices: NDArray[np.uint32]) -> bool:
        assert self.buffer is not None
        last = int(indices[-1])
        return (last + 1) * self._payload_bytes <= len(self.buffer) and are_consecutive(indices)

    def keep(self, index: int, row: NDArray[np.uint8]) -> None:
        """Put a payload into the buffer, and what is beyond it into the tail."""
        buffer = np.zeros(0, np.uint8) if self.buffer is None else self.buffer
        start = index * self._payload_bytes
        direct = max(0, min(len(row), len(buffer) - start))
        buffer[start : start + direct] = row[:direct]
        if direct < len(row) and len(self.tail):
            first = start + direct - len(buffer)
            self.tail[first : first + len(row) - direct] = row[direct:]

    def kept(self, index: int) -> NDArray[np.uint8]:
        """Return a payload out of the buffer, where there may be more behind it."""
        assert self.buffer is not None
        return self.buffer[index * self._payload_bytes : (index + 1) * self._payload_bytes]

    @property
    def meets_bound(self) -> bool:
        """Whether the posted receive has enough."""
        if self.required is None:
            return False
        settled = self.arrived + self.deferred
        if settled >= self.packets:
            return True
        return (
            (self.asked or self.immediate)
            and self.protected_packets is not None
            and settled >= self.required
            and self.arrived_protected >= self.protected_packets
        )
