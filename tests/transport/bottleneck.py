# SPDX-License-Identifier: Apache-2.0
"""Endless flows through one port in virtual time, for testing a rate control without the protocol around it.

The port has eight strict-priority queues. Losses become known a quarter of a round-trip time after the packet would
have been confirmed, as a sender finds them that allows for disorder (RACK, RFC 8985).
"""

import heapq
import random
from collections import deque

from dlcp.transport.congestion import CubicWindow, Report
from dlcp.transport.peer import pace_of

ORDINARY, DATA, OVER_SHARE = 1, 4, 0
DISORDER = 0.25
PACE_BURST = 4
PROBE_TIMEOUT_S = 0.005


class Flow:
    """A sender that always has something to send, or ``packets`` of it.

    ``report_s`` is the shortest time between reports: 0 reports every acknowledgement, as slow paths do.
    """

    def __init__(self, control, *, queue=DATA, start_s=0.0, packets=None, report_s=0.001, metered=False, pauses=None):
        self.control = control
        self.queue, self.start_s, self.report_s, self.metered = queue, start_s, report_s, metered
        self.left = packets
        self.unconfirmed = packets
        self.pauses = pauses
        """Sends for the first number of seconds, then rests for the second: a training job."""
        self.flying = 0
        self.sent = self.lost = self.marked = 0
        self.done_s = None
        self.confirmed = []
        """When each packet was confirmed."""
        self.smoothed_rtt_s = self.base_rtt_s = 0.0
        self.waiting_for_pace = False
        self.paced_until_s = 0.0
        """When a control with a pace of its own lets the next packet go."""
        self._last_sent_s = -1.0
        self._last_report_s = 0.0
        self._clear()

    def _clear(self):
        self._delivered = self._marks = self._losses = 0
        self._rtt_s = 0.0
        self._limited = False

    def room(self, now_s):
        """Whether one more packet may go now."""
        if self.left == 0 or (self.pauses and (now_s - self.start_s) % sum(self.pauses) > self.pauses[0]):
            return False
        if now_s < self.paced_until_s:
            return False
        window = self.control.window
        if window < 1:
            return self.flying == 0 and now_s >= self._last_sent_s + (self.smoothed_rtt_s or 0.01) / window - 1e-12
        return self.flying < int(window)

    def take(self, now_s):
        self.flying += 1
        self.sent += 1
        self._last_sent_s = now_s
        if self.left is not None:
            self.left -= 1
        if isinstance(self.control, CubicWindow) or not self.base_rtt_s:
            return  # Linux paces none of it by default; of others nothing is known yet
        pace = getattr(self.control, "pace", 0.0) or pace_of(self.control, self.base_rtt_s, self.smoothed_rtt_s)
        self.paced_until_s = max(self.paced_until_s, now_s - PACE_BURST / pace) + 1 / pace

    def confirm(self, now_s, sent_s, marked):
        self.flying -= 1
        self.confirmed.append(now_s)
        self.marked += marked
        self._delivered += 1
        self._marks += marked
        rtt_s = now_s - sent_s
        self._rtt_s = min(self._rtt_s or rtt_s, rtt_s)
        self.base_rtt_s = min(self.base_rtt_s or rtt_s, rtt_s)
        self.smoothed_rtt_s += (rtt_s - self.smoothed_rtt_s) / 8 if self.smoothed_rtt_s else rtt_s
        if self.unconfirmed is not None:
            self.unconfirmed -= 1
            if self.unconfirmed == 0:
                self.done_s = now_s
        self._report(now_s)

    def lose(self, now_s):
        self.flying -= 1
        self.lost += 1
        self._losses += 1
        if self.left is not None:
            self.left += 1
        self._report(now_s)

    def _report(self, now_s):
        self._limited |= self.left != 0
        if self.report_s and now_s - self._last_report_s < max(self.report_s, self.smoothed_rtt_s):
            return
        self._last_report_s = now_s
        if self._delivered or self._losses:
            report = Report(now_s, self._delivered, self._marks, self._losses, self._rtt_s, self.smoothed_rtt_s,
                            self._limited)  # fmt: skip
            self._clear()
            self.control.on_report(report)

    def goodput(self, since_s, until_s):
        """Packets confirmed per second between two times."""
        return sum(since_s < when <= until_s for when in self.confirmed) / (until_s - since_s)


class Bottleneck:
    """One port of ``rate`` packets a second, ``rtt_s`` away and back without queueing.

    ``share`` packets a second of the metered flows keep their queue, with ``burst`` at once; what is more waits below.
    ``noise_s`` is the longest that an acknowledgement is late, as on a busy host.
    """

    def __init__(
        self, flows, *, rate, rtt_s, depth, ecn_depth=None, loss=0.0, noise_s=0.0, share=None, burst=16, seed=0
    ):
        self.flows, self.rate, self.rtt_s, self.depth, self.ecn_depth = flows, rate, rtt_s, depth, ecn_depth
        self.loss, self.noise_s, self.share, self.burst = loss, noise_s, share, burst
        self.random = random.Random(seed)
        self.now = 0.0
        self.queues = [deque() for _ in range(8)]
        self.busy = False
        self.dropped = 0
        self.most_waiting = 0
        self._tokens, self._metered_s = float(burst), 0.0
        self._events = []
        self._serial = 0
        for flow in flows:
            self.at(flow.start_s, self.pump, flow)

    def at(self, when, action, *arguments):
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, action, arguments))

    def run(self, until_s=1e9):
        """Run until a time, or until every flow that ends has ended."""
        ending = [flow for flow in self.flows if flow.unconfirmed is not None]
        while self._events and self._events[0][0] <= until_s:
            if ending and all(flow.done_s is not None for flow in ending):
                break
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        return self

    def pump(self, flow, paced=False):
        if paced:
            flow.waiting_for_pace = False
        while flow.room(self.now):
            flow.take(self.now)
            if self.random.random() < self.loss:
                self.at(self.now + self.rtt_s * (1 + DISORDER), self.find_lost, flow)
            else:
                self.enqueue(flow)
        if flow.left == 0 or flow.waiting_for_pace:
            return
        if self.now < flow.paced_until_s:
            flow.waiting_for_pace = True
            self.at(flow.paced_until_s, self.pump, flow, True)
            return
        if flow.control.window < 1 and flow.flying == 0:
            flow.waiting_for_pace = True
            due_s = flow._last_sent_s + (flow.smoothed_rtt_s or 0.01) / flow.control.window
            self.at(max(self.now + 1e-6, due_s), self.pump, flow, True)
        elif flow.pauses and flow.flying == 0:
            flow.waiting_for_pace = True
            self.at(self.now + flow.pauses[1] / 20, self.pump, flow, True)

    def enqueue(self, flow):
        queue = flow.queue
        if flow.metered and self.share is not None:
            self._tokens = min(self.burst, self._tokens + (self.now - self._metered_s) * self.share)
            self._metered_s = self.now
            if self._tokens >= 1:
                self._tokens -= 1
            else:
                queue = OVER_SHARE
        waiting = self.queues[queue]
        if len(waiting) >= self.depth:
            self.dropped += 1
            queueing_s = len(waiting) / self.rate
            self.at(self.now + queueing_s + self.rtt_s * (1 + DISORDER), self.find_lost, flow)
            return
        marked = self.ecn_depth is not None and flow.control.ecn_capable and len(waiting) >= self.ecn_depth
        packet = [flow, self.now, marked]
        waiting.append(packet)
        if queue == OVER_SHARE:
            # It may wait there without end; the sender asks, and sends it again.
            self.at(self.now + max(PROBE_TIMEOUT_S, 2 * flow.smoothed_rtt_s), self.give_up, packet)
        self.most_waiting = max(self.most_waiting, len(waiting))
        if not self.busy:
            self.transmit()

    def give_up(self, packet):
        flow = packet[0]
        if flow is not None:
            packet[0] = None
            self.find_lost(flow)

    def transmit(self):
        for waiting in reversed(self.queues):
            if waiting:
                self.busy = True
                self.at(self.now + 1 / self.rate, self.arrive, waiting.popleft())
                return
        self.busy = False

    def arrive(self, packet):
        flow, sent_s, marked = packet
        packet[0] = None
        if flow is not None:
            late_s = self.random.random() * self.noise_s
            self.at(self.now + self.rtt_s + late_s, self.confirm, flow, sent_s, marked)
        self.transmit()

    def confirm(self, flow, sent_s, marked):
        flow.confirm(self.now, sent_s, marked)
        self.pump(flow)

    def find_lost(self, flow):
        flow.lose(self.now)
        self.pump(flow)


def jain(shares):
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
