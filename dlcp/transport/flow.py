# SPDX-License-Identifier: Apache-2.0
"""Everything on its way from this rank to one other: its window, its round-trip time, and what of it is lost."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.congestion import RateControl
from dlcp.transport.outgoing import FLYING, MessageKey, OutgoingMessage

PROBE_TIMEOUT_MIN_S = 0.005
PROBE_TIMEOUT_MAX_S = 0.2
"""Bounds of the probe timeout. The lower one covers a scheduling delay on a busy host. Chosen by us."""
REORDER_MIN_S = 0.001
"""Disorder that counts as none, at least: spraying sends neighbours over different paths."""

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
        self.messages: dict[MessageKey, OutgoingMessage] = {}
        self.flying = 0
        self.smoothed_rtt_s = 0.0
        self.rtt_variation_s = 0.0
        self._newest_delivered_s = np.full(8, -1.0)
        self._marked_seen = 0

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

    def room(self) -> int:
        """Return how many packets the window still admits."""
        return int(min(self.control.window, self.largest_window)) - self.flying

    def pump(self, now_s: float, limit: int, emit: Emit) -> int:
        """Send up to ``limit`` packets within the window, the most urgent queue first; return how many were sent.

        Raises
        ------
        BlockingIOError
            The socket is full.
        """
        sent = 0
        room = min(limit, self.room())
        while sent < room:
            message = self._most_urgent()
            if message is None:
                break
            header, payload, tos = message.take(now_s)
            if not emit(header, payload, tos):
                message.put_back()
                raise BlockingIOError
            self.flying += 1
            sent += 1
            message.probe_due_s = now_s + self.probe_timeout_s
        return sent

    def _most_urgent(self) -> OutgoingMessage | None:
        best, best_queue = None, -1
        for message in self.messages.values():
            if message.has_unsent and message.next_queue > best_queue:
                best, best_queue = message, message.next_queue
        return best

    def on_ack(self, now_s: float, entries: NDArray[np.void], marked_total: int) -> None:
        """Take in which packets arrived.

        Parameters
        ----------
        entries
            Records with fields step, message and index.
        marked_total
            How many packets of this flow arrived marked so far, modulo 2**32.
        """
        marked = (marked_total - self._marked_seen) & 0xFFFFFFFF
        if marked < 0x80000000:
            self._marked_seen = marked_total
        else:
            marked = 0  # an acknowledgement overtaken by a later one
        delivered = 0
        rtt_s = 0.0
        start = 0
        keys = np.flatnonzero((np.diff(entries["step"]) != 0) | (np.diff(entries["message"]) != 0)) + 1
        for stop in [*keys.tolist(), len(entries)]:
            group = entries[start:stop]
            start = stop
            message = self.messages.get(MessageKey(int(group["step"][0]), int(group["message"][0])))
            if message is None:
                continue
            indices = group["index"].astype(np.intp)
            news, newest_rtt_s = self._deliver(now_s, message, indices[indices < message.packets])
            delivered += news
            rtt_s = rtt_s or newest_rtt_s
        if rtt_s:
            self._sample_rtt(rtt_s)
        lost = self._find_lost() if delivered else 0
        if delivered or lost:
            self.control.on_feedback(now_s, delivered, min(marked, delivered), lost, self.smoothed_rtt_s)

    def _deliver(self, now_s: float, message: OutgoingMessage, indices: NDArray[np.intp]) -> tuple[int, float]:
        news, landed = message.mark_delivered(indices)
        if not len(news):
            return 0, 0.0
        self.flying -= landed
        message.forget_delivered()
        message.probes_unanswered = 0
        message.probe_due_s = now_s + self.probe_timeout_s
        sent_at = message.sent_at_s[news]
        np.maximum.at(self._newest_delivered_s, message.queue[news], sent_at)
        # Karn: the time of a packet that was sent twice is no round trip.
        return len(news), 0.0 if message.resent else float(now_s - sent_at.max())

    def _sample_rtt(self, rtt_s: float) -> None:
        if not self.smoothed_rtt_s:
            self.smoothed_rtt_s, self.rtt_variation_s = rtt_s, rtt_s / 2
            return
        self.rtt_variation_s += (abs(self.smoothed_rtt_s - rtt_s) - self.rtt_variation_s) / 4
        self.smoothed_rtt_s += (rtt_s - self.smoothed_rtt_s) / 8

    def _find_lost(self) -> int:
        horizon = self._newest_delivered_s - max(REORDER_MIN_S, self.smoothed_rtt_s / 4)
        lost = 0
        for message in self.messages.values():
            if message.flying:
                lost += message.mark_lost((message.state == FLYING) & (message.sent_at_s < horizon[message.queue]))
        self.flying -= lost
        return lost

    def on_bitmap(
        self, now_s: float, message: OutgoingMessage, first: int, delivered: NDArray[np.bool_], before_s: float
    ) -> bool:
        """Take in which packets of a message have arrived; return whether that was news.

        What was sent before ``before_s`` and is not among them is lost.
        """
        indices = np.flatnonzero(delivered[: message.packets - first]) + first
        news, _ = self._deliver(now_s, message, indices)
        overdue = np.zeros(message.packets, np.bool_)
        overdue[first : first + len(delivered)] = message.sent_at_s[first : first + len(delivered)] < before_s
        lost = message.mark_lost(overdue)
        self.flying -= lost
        if news or lost:
            self.control.on_feedback(now_s, news, 0, lost, self.smoothed_rtt_s)
        return bool(news or lost)
