# SPDX-License-Identifier: Apache-2.0
"""A message on its way out: which of its packets are on the wire, delivered or lost, and when its receiver is asked.

``dlcp/native/outgoing.c`` in NumPy.
"""

import heapq
import math
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.tags import encode_tags, send_order
from dlcp.transport.engine import RULES, chunk_seed
from dlcp.transport.messages import Bytes, LossBound, SendRequest
from dlcp.transport.plain.incoming import are_consecutive
from dlcp.wire import Flag

UNSENT: Final = 0
FLYING: Final = 1
DELIVERED: Final = 2
ABANDONED: Final = 3
"""Lost, and not to be sent again."""
RETRANSMIT: Final = 4
"""Lost, and to be sent again."""

Indices = NDArray[np.uint32]


class PlainOutgoing:
    """One message until its receiver has confirmed it.

    Attributes
    ----------
    payload, tail
        Its bytes: those of ``tail`` follow those of ``payload``.
    tags
        Bytes 1 to 3 of each packet's header (flags; queue and drop class; layer) and its IPv4 type of service, shape
        (packets, 4).
    order
        The packets to send, in the order of sending.
    """

    def __init__(
        self,
        request: SendRequest,
        bound: LossBound,
        head: wire.Header,
        service: NDArray[np.uint8],
        *,
        payload_bytes: int,
        tagged: bool,
        switch_hops: int,
        now_s: float,
    ) -> None:
        self.key = request.key
        self.payload: Bytes = np.frombuffer(request.payload, np.uint8)
        self.tail = request.tail
        self.packets = len(request.tags.queue)
        tags = request.tags
        if not tagged:
            tags = tags._replace(queue=np.full(self.packets, wire.Queue.ORDINARY, np.uint8))
        self.allowed, self.immediate = bound.allowed(self.packets), bound.immediate
        self.tags, droppable = encode_tags(tags, tagged and bound.ratio > 0, service)
        self.order = send_order(tags.queue, droppable, chunk_seed(request.key), request.order)
        if request.deferred is not None:
            self.order = self.order[~request.deferred[self.order]]
        self.to_send = self.unsent = len(self.order)
        """All packets but the deferred ones."""
        budget = min(0xFFFF, self.allowed // switch_hops)
        self._head = head._replace(type=wire.PacketType.DATA, budget=budget, count=self.packets).encode()
        self.flying = self.sent = self.resent = self.delivered = 0
        self.active_s = now_s
        self.idle_noticed = False
        self.state = np.zeros(self.packets, np.uint8)
        self.sent_s = np.zeros(self.packets)
        self.path = np.zeros(self.packets, np.uint8)
        self.protected_packets = int(np.count_nonzero(request.tags.protected))
        self.asked_s: float | None = None
        """An answer tells of what was sent before that; None: no question is open."""
        self.probes_unanswered = self.probes_without_news = 0
        self._probed_s = 0.0
        self._delivered_seen = 0
        self._confirmed: dict[int, NDArray[np.bool_]] = {}
        self._payload_bytes = payload_bytes
        self._next = 0
        self._retransmit: deque[int] = deque()
        self._abandoned: list[tuple[int, int, int]] = []
        """Drop class, the latest first, and packet."""
        self._losses = 0

    def ask_due_s(self, timeout_s: float) -> float:
        """Return when to ask what is missing, after a probe timeout; infinity while packets leave freely."""
        if self.delivered != self._delivered_seen:
            self._delivered_seen = self.delivered
            self.probes_unanswered = self.probes_without_news = 0
        idle = not self.unsent and not self.flying
        if not idle and not self.flying:
            return math.inf
        if idle and self.delivered < self.to_send and not self.probes_without_news:
            return 0.0  # what is missing may stay lost, if the receiver agrees
        # Questions and answers get lost like anything else: only answers without news say that asking is no use.
        patience = int(RULES["unanswered_patience"])
        without_news = self.probes_without_news - self.probes_unanswered + self.probes_unanswered // patience
        most = int(RULES["backoff_max"])
        # On a slow path, or one that a forged answer makes look slow, doubling must not end in minutes.
        wait_s = min(timeout_s * float(2 ** min(most, without_news)), RULES["probe_timeout_max_s"] * float(2**most))
        return max(self.active_s, self._probed_s) + max(timeout_s, wait_s)

    def note_asked(self, now_s: float) -> None:
        """Note that a PROBE leaves."""
        # The last question but one: an answer may be late, but what left before that is not on its way any more.
        self.asked_s = now_s if self.asked_s is None else self._probed_s
        self._probed_s = now_s
        self.probes_without_news += 1
        self.probes_unanswered += 1

    def note_answered(self) -> None:
        """Note that a BITMAP has come: one answer, however many questions were lost before."""
        self.probes_without_news -= max(0, self.probes_unanswered - 1)
        self.probes_unanswered = 0

    def confirm(self, first: int, delivered: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Take in one part of a STOP; return them together once every part is here."""
        self._confirmed[first] = delivered
        if sum(map(len, self._confirmed.values())) < self.packets:
            return None
        return np.concatenate([self._confirmed[first] for first in sorted(self._confirmed)])

    @property
    def all_sent(self) -> bool:
        """Whether each packet has been sent at least once."""
        return self._next == self.to_send

    def next_packet(self) -> int:
        """Return the packet that is next to be sent; call it only while some are unsent."""
        while self._retransmit:
            if self.state[self._retransmit[0]] == RETRANSMIT:
                return self._retransmit[0]
            self._retransmit.popleft()
        return int(self.order[self._next])

    def size_of(self, index: int) -> int:
        """Return how many bytes of the message a packet carries."""
        left = len(self.payload) + len(self.tail) - index * self._payload_bytes
        return min(left, self._payload_bytes)

    def gather(self, limit: int) -> tuple[Indices, bool]:
        """Choose packets that may leave in one burst, and say whether they are sent again.

        All but the last are of full size, and all have one type of service and queue.
        """
        self.next_packet()
        again = bool(self._retransmit)
        if again:
            chosen = np.fromiter((i for _, i in zip(range(limit), self._retransmit, strict=False)), np.uint32)
        else:
            chosen = self.order[self._next : self._next + limit]
        tags = self.tags[chosen]
        fits = (tags[:, 3] == tags[0, 3]) & (tags[:, 1] >> 5 == tags[0, 1] >> 5)
        if again:
            fits &= self.state[chosen] == RETRANSMIT
        short = np.flatnonzero(chosen == self.packets - 1)
        if len(short) and self.size_of(self.packets - 1) < self._payload_bytes:
            fits[short[0] + 1 :] = False
        end = len(chosen) if fits.all() else int(np.argmin(fits))
        return chosen[:end], again

    def bytes_of(self, chosen: Indices) -> NDArray[np.uint8]:
        """Return packets as they leave, one after the other, each with its header."""
        size = self._payload_bytes
        last = int(chosen[-1])
        missing = size - self.size_of(last)
        out = np.empty((len(chosen), 32 + size), np.uint8)
        out[:, :32] = np.frombuffer(self._head, np.uint8)
        out[:, 1:4] = self.tags[chosen, :3]
        out[:, 16:20] = chosen.astype(">u4").view(np.uint8).reshape(-1, 4)
        whole = len(self.payload) // size
        inside = chosen < whole
        first = int(chosen[0])
        if inside.all() and are_consecutive(chosen):
            out[:, 32:] = self.payload[first * size : (last + 1) * size].reshape(-1, size)
        else:
            rows = self.payload[: whole * size].reshape(whole, size)
            out[inside, 32:] = rows[chosen[inside]]
            for row in np.flatnonzero(~inside):
                part = self._crossing(int(chosen[row]))
                out[row, 32 : 32 + len(part)] = part
        return out.reshape(-1)[: out.size - missing]

    def _crossing(self, index: int) -> NDArray[np.uint8]:
        start, stop = index * self._payload_bytes, index * self._payload_bytes + self.size_of(index)
        border = len(self.payload)
        return np.concatenate([self.payload[start:stop], self.tail[max(0, start - border) : max(0, stop - border)]])

    def note_sent(self, chosen: Indices, again: bool, path: int, now_s: float) -> None:
        """Note that packets from :meth:`gather` have left, on a path."""
        count = len(chosen)
        if again:
            for _ in range(count):
                self._retransmit.popleft()
            self.resent += count
        else:
            self._next += count
        self.state[chosen] = FLYING
        self.sent_s[chosen] = now_s
        self.path[chosen] = path
        self.unsent -= count
        self.flying += count
        self.sent += count
        self.active_s = now_s
        self.idle_noticed = False

    def mark_resent(self, chosen: Indices) -> None:
        """Set the retransmission flag in the headers of packets."""
        self.tags[chosen, 0] |= np.uint8(Flag.RETRANSMISSION)

    def land(self, indices: Indices, now_s: float) -> tuple[int, int]:
        """Note that packets arrived; return how many of them were on the wire, and how many had been found lost."""
        states = self.state[indices]
        flew = int(np.count_nonzero(states == FLYING))
        late = len(indices) - flew
        self.unsent -= int(np.count_nonzero(states == RETRANSMIT))
        self.flying -= flew
        self.state[indices] = DELIVERED
        self.delivered += len(indices)
        self.active_s = now_s
        return flew, late

    def lose(self, indices: Indices) -> None:
        """Note that flying packets are lost, and choose what to send again.

        Protected packets always are. Of the others the least valuable are abandoned, up to the bound.
        """
        self.flying -= len(indices)
        for index in indices.tolist():
            flags, tags = self.tags[index, :2]
            if flags & Flag.PROTECTED:
                self._send_again(index)
                continue
            self.state[index] = ABANDONED
            self._losses += 1
            heapq.heappush(self._abandoned, (int(tags) >> 2 & 7, -self._losses, index))
            while len(self._abandoned) > self.allowed:
                most_valuable = heapq.heappop(self._abandoned)[-1]
                if self.state[most_valuable] == ABANDONED:
                    self._send_again(most_valuable)

    def _send_again(self, index: int) -> None:
        self.state[index] = RETRANSMIT
        self._retransmit.append(index)
        self.unsent += 1

    def drop(self) -> int:
        """Forget everything but the numbers; return how many packets were flying."""
        flying, self.flying, self.unsent = self.flying, 0, 0
        self.state = np.full(self.packets, DELIVERED, np.uint8)  # nothing of it can be lost any more
        return flying
