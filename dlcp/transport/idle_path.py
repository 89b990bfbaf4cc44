# SPDX-License-Identifier: Apache-2.0
"""A path's delay without queues and its capacity, estimated from rounds of packets."""

import math
from collections import deque

from dlcp.transport.congestion import Report

QUEUE_MIN_S, QUEUE_PART = 0.0012, 1 / 16
"""A round has met a standing queue if its minimum round trip exceeds the idle path's by both of these. The first is
slightly more than the delay of an acknowledgement: less is indistinguishable from wake-up times of a busy host. The
second is well below the shallowest sensible buffer of a long path, a fifth of its bandwidth-delay product."""
FULL_PART = 0.5
"""If packets have queued for at least this part of the longest recent delay, a buffer may have been full, so a loss is
congestion. Below it, the buffer has held more packets without a loss. Loss differentiation by round trips (Spike,
mBiaz; Cen et al., ToN 2003) has such thresholds."""
DELAY_MIN_S, DELAY_PART = 0.005, 1 / 4
"""More delay than both of these is congestion, even without losses or marks: CoDel's target (RFC 8289), and on long
paths room for bursts (LEDBAT++ allows 60 ms on any path)."""
BASE_MEMORY_S, BASE_MEMORY_ROUNDS = 10.0, 50
"""The minimum time for which the minimum round-trip time is remembered: BBR's window, or this many round trips if a
deep queue makes them long."""
RATE_MEMORY_ROUNDS = 10
"""Rounds for which the highest rate is remembered; BBR's window."""


class Round:
    """Feedback on about a window of packets."""

    __slots__ = ("began_s", "delivered", "lost", "marked", "one_way_s", "rtt_s")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.delivered = self.marked = self.lost = 0
        self.rtt_s, self.one_way_s = 0.0, math.inf

    @property
    def packets(self) -> int:
        """Packets acknowledged or lost."""
        return self.delivered + self.lost

    def add(self, report: Report) -> None:
        """Add one report."""
        self.delivered += report.delivered
        self.marked += report.marked
        self.lost += report.lost
        if report.rtt_s and (not self.rtt_s or report.rtt_s < self.rtt_s):
            self.rtt_s = report.rtt_s
        self.one_way_s = min(self.one_way_s, report.one_way_s)


class IdlePath:
    """A path's round-trip time without queues, and its recent throughput.

    Attributes
    ----------
    rate
        Highest rate in packets/s of the last ``RATE_MEMORY_ROUNDS`` rounds, as BBR estimates bandwidth.
    back_s
        The queueing time of acknowledgements in the last round, if one-way delays are known.
    """

    def __init__(self) -> None:
        self._shortest_s = [math.inf, math.inf]
        self._quickest_s = [math.inf, math.inf]
        """Minimum one-way delay in the older and in the newer half of the memory."""
        self._longest_s = [0.0, 0.0]
        """Longest round-trip time without queueing on the way back, in the same order."""
        self._memory_s = BASE_MEMORY_S
        self._renewed_s = self._met_s = 0.0
        self._rates: deque[float] = deque(maxlen=RATE_MEMORY_ROUNDS)
        self.back_s = 0.0

    @property
    def base_s(self) -> float:
        """Minimum RTT over the last one to two windows, in seconds; 0 if there was none."""
        base_s = min(self._shortest_s)
        return 0.0 if base_s == math.inf else base_s

    @property
    def rate(self) -> float:
        """Return the rate in packets/s; 0 before the first round."""
        return max(self._rates, default=0.0)

    @property
    def carried(self) -> float:
        """Packets in flight at that rate with empty queues."""
        return self.rate * (self.base_s + self.back_s)

    @property
    def allowed_s(self) -> float:
        """The largest acceptable delay."""
        return max(DELAY_MIN_S, self.base_s * DELAY_PART)

    def add(self, finished: Round, now_s: float, *, keep: bool) -> float:
        """Add a round; return the excess of its minimum forward delay over the idle path's.

        Without one-way delays, this includes the way back.

        With ``keep``, nothing is forgotten, because other flows never let the queue become empty.
        """
        if now_s > finished.began_s:
            self._rates.append(finished.delivered / (now_s - finished.began_s))
        if keep:
            self._renewed_s += now_s - finished.began_s
            self._met_s += now_s - finished.began_s
        if not finished.rtt_s:
            return 0.0
        self._memory_s = max(BASE_MEMORY_S, BASE_MEMORY_ROUNDS * finished.rtt_s)
        if now_s - self._renewed_s > self._memory_s:
            self._shortest_s = [self._shortest_s[1], math.inf]
            self._quickest_s = [self._quickest_s[1], math.inf]
            self._longest_s = [self._longest_s[1], 0.0]
            self._renewed_s = now_s
        self._shortest_s[1] = min(self._shortest_s[1], finished.rtt_s)
        delay_s, self.back_s = finished.rtt_s - self.base_s, 0.0
        if finished.one_way_s < math.inf:
            self._quickest_s[1] = min(self._quickest_s[1], finished.one_way_s)
            self.back_s = max(0.0, delay_s - (finished.one_way_s - min(self._quickest_s)))
            delay_s -= self.back_s
        self._longest_s[1] = max(self._longest_s[1], finished.rtt_s - self.back_s)
        if delay_s < QUEUE_PART * self.base_s:
            self._met_s = now_s
        return delay_s

    def meet(self, now_s: float) -> None:
        """Restart the memory of the idle path's round-trip time."""
        self._met_s = now_s

    def average_s(self, smoothed_rtt_s: float) -> float:
        """Return the excess of the average forward delay over the idle path's."""
        return smoothed_rtt_s - self.base_s - self.back_s

    def queued(self, delay_s: float) -> bool:
        """Return whether a round with this delay has met a standing queue."""
        return delay_s > max(QUEUE_MIN_S, self.base_s * QUEUE_PART)

    def may_be_full(self, delay_s: float, smoothed_rtt_s: float) -> bool:
        """Return whether that queue may have filled its buffer.

        On a long path a queue fills and drains within a round, so the average counts, too.
        """
        if self.base_s > DELAY_MIN_S:
            delay_s = max(delay_s, self.average_s(smoothed_rtt_s))
        return self.queued(delay_s) and delay_s > (max(self._longest_s) - self.base_s) * FULL_PART

    def fading(self, now_s: float) -> bool:
        """Return whether the idle path's round-trip time will soon be forgotten."""
        return now_s - self._met_s > self._memory_s / 2
