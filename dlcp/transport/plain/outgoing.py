# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out: which packets are on the wire, delivered, lost, or to be sent again."""

import heapq
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.engine import Packets
from dlcp.transport.messages import MessageKey
from dlcp.transport.plain.incoming import are_neighbours
from dlcp.wire import Flag

UNSENT: Final = 0
FLYING: Final = 1
DELIVERED: Final = 2
FORGONE: Final = 3
"""Lost, and not to be sent again."""
AGAIN: Final = 4
"""Lost, and to be sent again."""

Indices = NDArray[np.uint32]


class PlainOutgoing:
    """The sender's view of one message; see :class:`dlcp.transport.engine.Outgoing`."""

    def __init__(self, rank: int, key: MessageKey, packets: Packets, payload_bytes: int, now_s: float) -> None:
        self.rank = rank
        self.key = key
        self.kept = packets
        self.packets = self.unsent = len(packets.order)
        self.flying = self.sent = self.resent = self.delivered = 0
        self.active_s = now_s
        self.idle_told = False
        self.state = np.zeros(self.packets, np.uint8)
        self.sent_s = np.zeros(self.packets)
        self._payload_bytes = payload_bytes
        self._next = 0
        self._again: deque[int] = deque()
        self._forgone: list[tuple[int, int, int]] = []
        """Drop class, the latest first, and packet."""
        self._losses = 0

    @property
    def all_sent(self) -> bool:
        """Whether each packet has been sent at least once."""
        return self._next == self.packets

    def next_packet(self) -> int:
        """Return the packet that is next to be sent; call it only while some are unsent."""
        while self._again:
            if self.state[self._again[0]] == AGAIN:
                return self._again[0]
            self._again.popleft()
        return int(self.kept.order[self._next])

    def size_of(self, index: int) -> int:
        """Return how many bytes of the message a packet carries."""
        left = len(self.kept.payload) + len(self.kept.tail) - index * self._payload_bytes
        return min(left, self._payload_bytes)

    def gather(self, limit: int) -> tuple[Indices, bool]:
        """Choose packets that may leave in one burst, and say whether they are sent again.

        All but the last are of full size, and all have one type of service and queue.
        """
        self.next_packet()
        again = bool(self._again)
        if again:
            chosen = np.fromiter((i for _, i in zip(range(limit), self._again, strict=False)), np.uint32)
        else:
            chosen = self.kept.order[self._next : self._next + limit]
        tags = self.kept.tags[chosen]
        fits = (tags[:, 3] == tags[0, 3]) & (tags[:, 1] >> 5 == tags[0, 1] >> 5)
        if again:
            fits &= self.state[chosen] == AGAIN
        short = np.flatnonzero(chosen == self.packets - 1)
        if len(short) and self.size_of(self.packets - 1) < self._payload_bytes:
            fits[short[0] + 1 :] = False
        end = len(chosen) if fits.all() else int(np.argmin(fits))
        return chosen[:end], again

    def bytes_of(self, chosen: Indices) -> NDArray[np.uint8]:
        """Return packets as they leave, one after the other, each with its header."""
        size, kept = self._payload_bytes, self.kept
        last = int(chosen[-1])
        missing = size - self.size_of(last)
        out = np.empty((len(chosen), 32 + size), np.uint8)
        out[:, :32] = np.frombuffer(kept.head, np.uint8)
        out[:, 1:4] = kept.tags[chosen, :3]
        out[:, 16:20] = chosen.astype(">u4").view(np.uint8).reshape(-1, 4)
        whole = len(kept.payload) // size
        inside = chosen < whole
        first = int(chosen[0])
        if inside.all() and are_neighbours(chosen):
            out[:, 32:] = kept.payload[first * size : (last + 1) * size].reshape(-1, size)
        else:
            rows = kept.payload[: whole * size].reshape(whole, size)
            out[inside, 32:] = rows[chosen[inside]]
            for row in np.flatnonzero(~inside):
                part = self._crossing(int(chosen[row]))
                out[row, 32 : 32 + len(part)] = part
        return out.reshape(-1)[: out.size - missing]

    def _crossing(self, index: int) -> NDArray[np.uint8]:
        start, stop = index * self._payload_bytes, index * self._payload_bytes + self.size_of(index)
        border = len(self.kept.payload)
        return np.concatenate(
            [self.kept.payload[start:stop], self.kept.tail[max(0, start - border) : max(0, stop - border)]]
        )

    def note_sent(self, chosen: Indices, again: bool, now_s: float) -> None:
        """Note that packets from :meth:`gather` have left."""
        count = len(chosen)
        if again:
            for _ in range(count):
                self._again.popleft()
            self.resent += count
        else:
            self._next += count
        self.state[chosen] = FLYING
        self.sent_s[chosen] = now_s
        self.unsent -= count
        self.flying += count
        self.sent += count
        self.active_s = now_s
        self.idle_told = False

    def mark_resent(self, chosen: Indices) -> None:
        """Set the retransmission flag in the headers of packets."""
        self.kept.tags[chosen, 0] |= np.uint8(Flag.RETRANSMISSION)

    def land(self, indices: Indices, now_s: float) -> tuple[int, int]:
        """Note that packets arrived; return how many of them were on the wire, and how many had been found lost."""
        states = self.state[indices]
        flew = int(np.count_nonzero(states == FLYING))
        late = len(indices) - flew
        self.unsent -= int(np.count_nonzero(states == AGAIN))
        self.flying -= flew
        self.state[indices] = DELIVERED
        self.delivered += len(indices)
        self.active_s = now_s
        return flew, late

    def lose(self, indices: Indices) -> None:
        """Note that flying packets are lost, and choose what to send again.

        Protected packets always are. Of the others the least valuable are forgone, up to the bound.
        """
        self.flying -= len(indices)
        for index in indices.tolist():
            flags, tags = self.kept.tags[index, :2]
            if flags & Flag.PROTECTED:
                self._send_again(index)
                continue
            self.state[index] = FORGONE
            self._losses += 1
            heapq.heappush(self._forgone, (int(tags) >> 2 & 7, -self._losses, index))
            while len(self._forgone) > self.kept.allowed:
                most_valuable = heapq.heappop(self._forgone)[-1]
                if self.state[most_valuable] == FORGONE:
                    self._send_again(most_valuable)

    def _send_again(self, index: int) -> None:
        self.state[index] = AGAIN
        self._again.append(index)
        self.unsent += 1

    def drop(self) -> int:
        """Forget everything but the numbers; return how many packets were flying."""
        flying, self.flying, self.unsent = self.flying, 0, 0
        self.state = np.full(self.packets, DELIVERED, np.uint8)  # nothing of it can be lost any more
        return flying
