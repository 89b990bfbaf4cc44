# SPDX-License-Identifier: Apache-2.0
"""Messages on their way in: which packets of them have arrived, and where their bytes go."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.messages import Bytes, MessageKey
from dlcp.transport.plain.fold import PlainFold


def are_neighbours(indices: NDArray[np.uint32]) -> bool:
    """Tell whether each is one more than the one before."""
    if len(indices) == 1:
        return True
    span = int(indices[-1]) - int(indices[0])
    return span == len(indices) - 1 and bool((indices[1:] == indices[:-1] + np.uint32(1)).all())


class PlainIncoming:
    """The receiver's view of one message; see :class:`dlcp.transport.engine.Incoming`."""

    def __init__(
        self, rank: int, key: MessageKey, packets: int, payload_bytes: int, buffer: Bytes | None, tail: Bytes
    ) -> None:
        self.owner: Any = None
        self.rank = rank
        self.key = key
        self.packets = packets
        self.arrived = self.arrived_protected = self.last_bytes = 0
        self.protected_packets: int | None = None
        self.required: int | None = None
        self.immediate = self.asked = self.settled = False
        self.delivered: NDArray[np.bool_] = np.zeros(packets, np.bool_)
        self.layer: Bytes = np.zeros(packets, np.uint8)
        self.buffer, self.tail = buffer, tail
        self.fold: PlainFold | None = None
        self.position = 0
        self._payload_bytes = payload_bytes

    def bitmap(self) -> NDArray[np.bool_]:
        """Return which packets are in, shape (packets,)."""
        return np.array(self.delivered, np.bool_)

    def layers(self) -> Bytes:
        """Return the layer position that each packet told, shape (packets,)."""
        return np.array(self.layer, np.uint8)

    def join(self, fold: PlainFold, position: int) -> None:
        """Be summed from now on."""
        self.fold, self.position = fold, position
        fold.members[position] = self
        fold.catch_up(position)

    def leave(self) -> None:
        """Be no part of a sum any more."""
        if self.fold:
            self.fold.members[self.position] = None

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
        if self.fold:
            self.fold.add(self.position, indices, rows)
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
        return (last + 1) * self._payload_bytes <= len(self.buffer) and are_neighbours(indices)

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

    def move(self, buffer: Bytes, tail: Bytes) -> None:
        """Move what has arrived to where it belongs."""
        old, self.buffer, self.tail = self.buffer, buffer, tail
        assert old is not None
        total = len(buffer) + len(tail)
        for index in np.flatnonzero(self.delivered).tolist():
            start = index * self._payload_bytes
            self.keep(index, old[start : min(start + self._payload_bytes, total)])

    @property
    def done(self) -> bool:
        """Whether whoever waits for it has enough."""
        if self.required is None:
            return False
        if self.arrived == self.packets:
            return True
        return (
            (self.asked or self.immediate)
            and self.protected_packets is not None
            and self.arrived >= self.required
            and self.arrived_protected >= self.protected_packets
        )
