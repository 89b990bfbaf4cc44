# SPDX-License-Identifier: Apache-2.0
"""A message on its way out: which of its packets are on the wire, delivered, lost, or to be sent again."""

import contextlib
import heapq
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.tags import PacketTags
from dlcp.transport.bound import LossBound

UNSENT: Final = 0
FLYING: Final = 1
DELIVERED: Final = 2
LOST: Final = 3


class MessageKey(NamedTuple):
    """What tells the messages between two ranks apart: training step (generation) and number within it."""

    step: int
    message: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a message, as its receiver confirmed it.

    ``delivered`` has shape (packets,); ``sent`` counts every transmission, ``resent`` those after a packet's first.
    """

    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    seconds: float

    @property
    def recovered(self) -> int:
        """Packets that were lost and arrived when sent again; at most ``resent``."""
        return min(self.resent, int(self.delivered.sum()))


class OutgoingMessage:
    """The sender's view of one message.

    Parameters
    ----------
    key
        Step and number.
    payload
        The bytes to send; not copied, so they must not change until ``done`` is resolved.
    payload_bytes
        Bytes per packet; the last packet carries the rest.
    tags
        Tags per packet.
    bound
        How much may be lost.
    headers
        The encoded headers, shape (packets, 32), and ``tos`` the IPv4 type of service of each packet.
    label
        The layers in it, for error messages.
    deadline_s
        When it must be confirmed, on the clock of the transport.
    """

    def __init__(
        self,
        key: MessageKey,
        payload: memoryview,
        payload_bytes: int,
        tags: PacketTags,
        bound: LossBound,
        headers: NDArray[np.uint8],
        tos: NDArray[np.uint8],
        label: str,
        now_s: float,
        deadline_s: float,
    ) -> None:
        self.key = key
        self.packets = len(headers)
        self.bound = bound
        self.label = label
        self.started_s = now_s
        self.deadline_s = deadline_s
        self.protected_packets = int(tags.protected.sum())
        self.state = bytearray(self.packets)
        self.sent_at_s = [0.0] * self.packets
        self.queue: list[int] = tags.queue.tolist()
        self.flying = 0
        self.sent = 0
        self.resent = 0
        self.probe_due_s = now_s
        self.probed_s: float | None = None
        self.probes_unanswered = 0
        self.probes_without_news = 0
        self.confirmed: dict[int, NDArray[np.bool_]] = {}
        self.done: Future[Delivery] = Future()
        self._allowed = bound.allowed(self.packets)
        self._protected: list[bool] = tags.protected.tolist()
        self._drop_class: list[int] = tags.drop_class.tolist()
        self._payload = payload
        self._payload_bytes = payload_bytes
        self._headers = headers.reshape(-1).data
        self._tos = tos.tolist()
        self._order = self._send_order(tags.queue, key)
        self._next = 0
        self._taken = 0, False
        self._again: deque[int] = deque()
        self._forgone: list[tuple[int, int]] = []

    @staticmethod
    def _send_order(queue: NDArray[np.uint8], key: MessageKey) -> list[int]:
        # Urgent queues first; within one a new order each step, else congestion would always hit the same tensors.
        shuffled = np.random.default_rng(key).permutation(len(queue))
        order: list[int] = shuffled[np.argsort(-queue[shuffled].astype(np.int8), kind="stable")].tolist()
        return order

    @property
    def has_unsent(self) -> bool:
        """Whether a packet waits to be sent, for the first time or again."""
        return bool(self._again) or self._next < self.packets

    @property
    def next_queue(self) -> int:
        """The queue of the next packet to send; call only if ``has_unsent``."""
        return self.queue[self._again[0] if self._again else self._order[self._next]]

    def take(self, now_s: float) -> tuple[int, memoryview, memoryview, int]:
        """Take the next packet to send: its index, header, payload and type of service."""
        again = bool(self._again)
        if again:
            index = self._again.popleft()
        else:
            index = self._order[self._next]
            self._next += 1
        self._taken = index, again
        self.state[index] = FLYING
        self.sent_at_s[index] = now_s
        self.flying += 1
        self.sent += 1
        offset = index * wire.HEADER_BYTES
        header = self._headers[offset : offset + wire.HEADER_BYTES]
        if again:
            self.resent += 1
            copy = bytearray(header)
            copy[1] |= wire.Flag.RETRANSMISSION
            header = memoryview(copy)
        start = index * self._payload_bytes
        return index, header, self._payload[start : start + self._payload_bytes], self._tos[index]

    def put_back(self) -> None:
        """Undo the last :meth:`take`: the socket would not accept the packet."""
        index, again = self._taken
        self.flying -= 1
        self.sent -= 1
        if again:
            self.resent -= 1
            self.state[index] = LOST
            self._again.appendleft(index)
        else:
            self.state[index] = UNSENT
            self._next -= 1

    def mark_delivered(self, index: int) -> bool:
        """Note that a packet arrived; return whether it was counted as flying. Call it once per packet."""
        flew = self.state[index] == FLYING
        self.flying -= flew
        self.state[index] = DELIVERED
        if not flew and self._again:
            with contextlib.suppress(ValueError):
                self._again.remove(index)
        return flew

    def mark_lost(self, index: int) -> None:
        """Note that a flying packet is lost, and choose what to send again.

        Protected packets are always sent again. Of the others the least valuable are forgone, up to the bound.
        """
        self.state[index] = LOST
        self.flying -= 1
        if self._protected[index]:
            self._again.append(index)
            return
        heapq.heappush(self._forgone, (self._drop_class[index], index))
        while len(self._forgone) > self._allowed:
            _, most_valuable = heapq.heappop(self._forgone)
            if self.state[most_valuable] == LOST:
                self._again.append(most_valuable)

    def confirm(self, first: int, delivered: NDArray[np.bool_]) -> bool:
        """Take in one part of a STOP; return whether every part is in."""
        self.confirmed[first] = delivered
        return sum(map(len, self.confirmed.values())) >= self.packets

    def finish(self, now_s: float) -> None:
        """Resolve ``done`` from the parts of the STOP."""
        delivered = np.concatenate([self.confirmed[first] for first in sorted(self.confirmed)])[: self.packets]
        if not self.done.done():
            self.done.set_result(Delivery(delivered, self.sent, self.resent, now_s - self.started_s))
