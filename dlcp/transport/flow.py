# SPDX-License-Identifier: Apache-2.0
"""Everything on its way from this rank to one other: its window, its round-trip time, and what of it is lost."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.congestion import RateControl
from dlcp.transport.delivery_rate import DeliveryRate
from dlcp.transport.outgoing import DELIVERED, FLYING, LOST, OutgoingMessage

PROBE_TIMEOUT_MIN_S = 0.005
PROBE_TIMEOUT_MAX_S = 0.2
"""Bounds of the probe timeout. The lower one covers a scheduling delay on a busy host. Chosen by us."""
REORDER_MIN_S = 0.001
"""Disorder that counts as none, at least: spraying sends neighbours over different paths."""

DISORDER_MIN, DISORDER_MAX = 0.25, 4.0
"""Disorder to be expected, in round-trip times; doubled when a packet that counted as lost arrives (RFC 8985)."""
DISORDER_DECAY = 0.98
QUEUES = 8

Emit = Callable[[bytes | memoryview, bytes | memoryview, int], bool]
"""Sends header, payload and type of service to the peer; False if the socket is full."""


class Flow:
    """The sending side towards one peer.

    Packets count as lost when one that was sent later into the same queue has arrived, by more than the disorder to be
    expected (RACK, RFC 8985, kept per queue because strict priority reorders across queues).
    """

    def __init__(self, control: RateControl, largest_window: int) -> None:
        self.control = control
        self.largest_window = largest_window
        self.messages: dict[tuple[int, int], OutgoingMessage] = {}
        self.flying = 0
        self.rate = DeliveryRate()
        self.smoothed_rtt_s = 0.0
        self.rtt_variation_s = 0.0
        self._newest_delivered_s = [-1.0] * QUEUES
        self._sent: list[deque[tuple[float, OutgoingMessage, int]]] = [deque() for _ in range(QUEUES)]
        """What was sent into each queue, in that order."""
        self._marked_seen = 0
        self._sent_last_s = 0.0
        self._disorder = DISORDER_MIN

    @property
    def probe_timeout_s(self) -> float:
        """How long to wait for news before asking."""
        if not self.smoothed_rtt_s:
            return 4 * PROBE_TIMEOUT_MIN_S
        timeout = self.smoothed_rtt_s + 4 * self.rtt_variation_s
        return min(PROBE_TIMEOUT_MAX_S, max(PROBE_TIMEOUT_MIN_S, timeout))

    def add(self, message: OutgoingMessage) -> None:
        """Queue a message for sending."""
        self.messages[message.key] = message

    def remove(self, message: OutgoingMessage) -> None:
        """Forget a message that is done or given up."""
        if self.messages.pop(message.key, None) is not None:
            self.flying -= message.flying
            message.flying = 0
            message.state = bytearray([DELIVERED]) * message.packets  # nothing of it can be lost any more

    def room(self, now_s: float) -> int:
        """Return how many packets the window still admits; one of less than a packet admits one now and then."""
        if self.control.window < 1:
            return int(self.flying == 0 and now_s >= self.paused_until_s)
        return int(min(self.control.window, self.largest_window)) - self.flying

    @property
    def paused_until_s(self) -> float:
        """When a window of less than a packet admits the next one."""
        return self._sent_last_s + self.smoothed_rtt_s / min(1.0, self.control.window)

    def pump(self, now_s: float, limit: int, emit: Emit) -> int:
        """Send up to ``limit`` packets within the window, the most urgent queue first; return how many were sent.

        Raises
        ------
        BlockingIOError
            The socket is full.
        """
        sent = 0
        room = min(limit, self.room(now_s))
        while sent < room:
            message = self._most_urgent()
            if message is None:
                break
            index, header, payload, tos = message.take(now_s)
            if not emit(header, payload, tos):
                message.put_back()
                raise BlockingIOError
            self._sent[message.queue[index]].append((now_s, message, index))
            self.flying += 1
            self._sent_last_s = now_s
            sent += 1
            message.probe_due_s = now_s + self.probe_timeout_s
        return sent

    def _most_urgent(self) -> OutgoingMessage | None:
        best, best_queue = None, -1
        for message in self.messages.values():
            if message.has_unsent and message.next_queue > best_queue:
                best, best_queue = message, message.next_queue
        return best

    def on_ack(self, now_s: float, entries: Iterable[tuple[int, int, int]], marked_total: int) -> None:
        """Take in which packets arrived.

        Parameters
        ----------
        entries
            Step, message and index of each.
        marked_total
            How many packets of this flow arrived marked so far, modulo 2**32.
        """
        marked = (marked_total - self._marked_seen) & 0xFFFFFFFF
        if marked < 0x80000000:
            self._marked_seen = marked_total
        else:
            marked = 0  # an acknowledgement overtaken by a later one
        delivered = 0
        newest_s = 0.0
        for step, number, index in entries:
            message = self.messages.get((step, number))
            if message is None or index >= message.packets or message.state[index] == DELIVERED:
                continue
            delivered += 1
            sent_s = self._land(now_s, message, index)
            # Karn: the time of a packet that was sent twice is no round trip.
            if not message.resent:
                newest_s = max(newest_s, sent_s)
        if newest_s:
            self._sample_rtt(now_s - newest_s)
        self._feed_back(now_s, delivered, marked)

    def on_bitmap(
        self, now_s: float, message: OutgoingMessage, first: int, delivered: NDArray[np.bool_], before_s: float
    ) -> bool:
        """Take in which packets of a message have arrived; return whether that was news.

        What was sent before ``before_s`` and is not among them is lost.
        """
        news = lost = 0
        for index, arrived in enumerate(delivered.tolist(), first):
            state = message.state[index]
            if arrived and state != DELIVERED:
                self._land(now_s, message, index)
                news += 1
            elif not arrived and state == FLYING and message.sent_at_s[index] < before_s:
                self._lose(message, index)
                lost += 1
        self._feed_back(now_s, news, 0, lost)
        return bool(news or lost)

    def _land(self, now_s: float, message: OutgoingMessage, index: int) -> float:
        if message.state[index] == LOST:
            # It was late, not lost: an over-share packet, say, that waited in a lower queue.
            self._disorder = min(DISORDER_MAX, self._disorder * 2)
        self.flying -= message.mark_delivered(index)
        message.probes_unanswered = message.probes_without_news = 0
        message.probe_due_s = now_s + self.probe_timeout_s
        sent_s = message.sent_at_s[index]
        queue = message.queue[index]
        if sent_s > self._newest_delivered_s[queue]:
            self._newest_delivered_s[queue] = sent_s
        return sent_s

    def _lose(self, message: OutgoingMessage, index: int) -> None:
        message.mark_lost(index)
        self.flying -= 1

    def _feed_back(self, now_s: float, delivered: int, marked: int, lost: int = 0) -> None:
        if delivered:
            lost += self._find_lost()
            self.rate.on_feedback(now_s, delivered, any(message.has_unsent for message in self.messages.values()))
        if delivered or lost:
            self.control.on_feedback(now_s, delivered, min(marked, delivered), lost, self.smoothed_rtt_s)

    def _sample_rtt(self, rtt_s: float) -> None:
        if not self.smoothed_rtt_s:
            self.smoothed_rtt_s, self.rtt_variation_s = rtt_s, rtt_s / 2
            return
        self.rtt_variation_s += (abs(self.smoothed_rtt_s - rtt_s) - self.rtt_variation_s) / 4
        self.smoothed_rtt_s += (rtt_s - self.smoothed_rtt_s) / 8

    def _find_lost(self) -> int:
        disorder_s = max(REORDER_MIN_S, self.smoothed_rtt_s * self._disorder)
        lost = 0
        for sent, newest_s in zip(self._sent, self._newest_delivered_s, strict=True):
            while sent and sent[0][0] < newest_s - disorder_s:
                sent_s, message, index = sent.popleft()
                if message.state[index] == FLYING and message.sent_at_s[index] == sent_s:
                    self._lose(message, index)
                    lost += 1
        if lost:
            self._disorder = max(DISORDER_MIN, self._disorder * DISORDER_DECAY)
        return lost
