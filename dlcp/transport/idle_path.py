# SPDX-License-Identifier: Apache-2.0
"""What a path is like when nothing waits in it, and what it carries: found from rounds of packets."""

import math
from collections import deque

from dlcp.transport.congestion import Report

QUEUE_MIN_S, QUEUE_PART = 0.0012, 1 / 16
"""A round whose shortest round trip is longer than the idle path's by this, and by this part of it, has met a standing
queue. Chosen by us: a little more than an acknowledgement may be delayed, for less cannot be told from the wake-up
times of a busy host; and well below the shallowest buffer that a long path should have, a fifth of what it holds."""
FULL_PART = 0.5
"""Where packets have waited for at least this part of the longest that they did lately, a buffer may have been full, so
that a loss is congestion. Where they waited for less, the buffer has held more without a loss. Chosen by us; loss
differentiation by round trips (Spike, mBiaz; Cen et al., ToN 2003) has such thresholds."""
DELAY_MIN_S, DELAY_PART = 0.005, 1 / 4
"""More delay than this, and than this part of the idle path's round trip, is too much in itself, even without losses or
marks: CoDel's target (RFC 8289), and on long paths what bursts need (chosen by us; LEDBAT++ allows 60 ms on any)."""
BASE_MEMORY_S, BASE_MEMORY_ROUNDS = 10.0, 50
"""How long the shortest round-trip time is remembered at least: BBR's window, or as many round trips where a deep
queue makes these long."""
RATE_MEMORY_ROUNDS = 10
"""How many rounds the highest rate is remembered; BBR's window."""


class Round:
    """What became of about a window's worth of packets."""

    __slots__ = ("began_s", "delivered", "lost", "marked", "one_way_s", "rtt_s")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.delivered = self.marked = self.lost = 0
        self.rtt_s, self.one_way_s = 0.0, math.inf

    @property
    def packets(self) -> int:
        """Packets confirmed or lost."""
        return self.delivered + self.lost

    def add(self, report: Report) -> None:
        """Take in one report."""
        self.delivered += report.delivered
        self.marked += report.marked
        self.lost += report.lost
        if report.rtt_s and (not self.rtt_s or report.rtt_s < self.rtt_s):
            self.rtt_s = report.rtt_s
        self.one_way_s = min(self.one_way_s, report.one_way_s)


class IdlePath:
    """A path's round-trip time without queues, and how much it has carried lately.

    Attributes
    ----------
    rate
        The most packets a second in any of the last ``RATE_MEMORY_ROUNDS`` rounds, as BBR estimates bandwidth.
    back_s
        How long acknowledgements have waited on their way back in the last round, where one-way times tell.
    """

    def __init__(self) -> None:
        self._shortest_s = [math.inf, math.inf]
        self._quickest_s = [math.inf, math.inf]
        """One way."""
        self._longest_s = [0.0, 0.0]
        """Of the memory's older half, and of the newer one."""
        self._memory_s = BASE_MEMORY_S
        self._renewed_s = self._met_s = 0.0
        self._rates: deque[float] = deque(maxlen=RATE_MEMORY_ROUNDS)
        self.back_s = 0.0

    @property
    def base_s(self) -> float:
        """The shortest round-trip time of the memory to twice that, in seconds; 0 if there was none."""
        base_s = min(self._shortest_s)
        return 0.0 if base_s == math.inf else base_s

    @property
    def rate(self) -> float:
        """Return the rate in packets a second; 0 if there was no round yet."""
        return max(self._rates, default=0.0)

    @property
    def carried(self) -> float:
        """Packets that are on the way at that rate if none waits."""
        return self.rate * (self.base_s + self.back_s)

    @property
    def allowed_s(self) -> float:
        """The delay that is not too much."""
        return max(DELAY_MIN_S, self.base_s * DELAY_PART)

    def add(self, finished: Round, now_s: float, *, keep: bool) -> float:
        """Take in a round, return by how much its shortest way there was longer than the idle path's.

        Without one-way times, the way back counts, too.

        With ``keep``, nothing is forgotten: others keep the queue from ever being empty.
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
        """Take the round-trip time of the idle path for known as of now."""
        self._met_s = now_s

    def average_s(self, smoothed_rtt_s: float) -> float:
        """Return by how much the way there is longer than the idle path's in the average."""
        return smoothed_rtt_s - self.base_s - self.back_s

    def queued(self, delay_s: float) -> bool:
        """Return whether a round with that delay has met a standing queue."""
        return delay_s > max(QUEUE_MIN_S, self.base_s * QUEUE_PART)

    def may_be_full(self, delay_s: float, smoothed_rtt_s: float) -> bool:
        """Return whether that queue may have been all that there is room for.

        On a long path a queue is filled and emptied within a round: there the average counts, too.
        """
        if self.base_s > DELAY_MIN_S:
            delay_s = max(delay_s, self.average_s(smoothed_rtt_s))
        return self.queued(delay_s) and delay_s > (max(self._longest_s) - self.base_s) * FULL_PART

    def fading(self, now_s: float) -> bool:
        """Return whether the idle path was not met for so long that its round-trip time will be forgotten soon."""
        return now_s - self._met_s > self._memory_s / 2
