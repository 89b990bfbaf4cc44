# SPDX-License-Identifier: Apache-2.0
"""How many packets a rank may have on the way to another.

A job should count as one flow on a port, however many ranks send to it, so each of its flows grows by its weight only.
"""

import math
from typing import Protocol

INITIAL_WINDOW_PACKETS = 10.0
"""RFC 6928, shared by the flows of a job in proportion to their weight."""
SMALLEST_JOB_WINDOW_PACKETS = 9.0
SMALLEST_WINDOW_PACKETS = 3.0
"""What a job keeps on the way to a rank at least, divided among its senders, and the most that one of them keeps.

Packets over the job's share wait below all other traffic and hold their place in the window meanwhile, so a smaller
window would leave the share unused. Chosen by us.
"""
ROUND_PACKETS_MIN = 4
"""A smaller window is judged over this many packets: of fewer, none or all are marked. Chosen by us."""
CALM_ROUNDS_MAX = 2
GENTLE = 8
"""A small window grows by an eighth at most, else each increase would overshoot. Chosen by us."""


class RateControl(Protocol):
    """A window in packets, driven by what the receiver reports."""

    window: float
    ecn_capable: bool

    def on_feedback(self, now_s: float, delivered: int, marked: int, lost: int, rtt_s: float) -> None:
        """Take in one report: packets delivered, of these marked congested, and found lost since the last report."""

    def on_timeout(self) -> None:
        """Nothing was heard for a whole probe timeout."""


class Proportional:
    """Window control in proportion to the packets marked or lost; DCTCP's rule (RFC 8257) with losses as marks.

    Bounded loss makes a lost gradient packet a signal rather than a fault, so a loss weighs no more than a mark.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as, 0 to 1.
    """

    GAIN = 1 / 8
    """Weight of the newest window in the average; RFC 8257 has 1/16. Chosen by us: training steps are short."""
    ecn_capable = True

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.window = max(2.0, INITIAL_WINDOW_PACKETS * weight)
        self._smallest = min(SMALLEST_WINDOW_PACKETS, SMALLEST_JOB_WINDOW_PACKETS * weight)
        self._fraction = 0.0
        self._starting = True
        self._delivered = 0
        self._congested = 0
        self._calm_rounds = 0
        self._round = max(self.window, ROUND_PACKETS_MIN)

    def on_feedback(self, now_s: float, delivered: int, marked: int, lost: int, rtt_s: float) -> None:
        """Take in one report; the window shrinks at most once a window's worth of packets."""
        congested = marked + lost
        self._delivered += delivered + lost
        self._congested += congested
        if self._starting and not congested:
            self.window += delivered
        if self._delivered < self._round:
            return
        fraction = min(1.0, self._congested / self._delivered)
        if self._starting and fraction:
            self._starting = False
            self._fraction = fraction
        else:
            self._fraction += self.GAIN * (fraction - self._fraction)
        if fraction:
            self._calm_rounds = 0
            self.window = max(self._smallest, self.window * (1 - self._fraction / 2))
        elif not self._starting:
            # Bursts of others end as suddenly as they begin: what is free for longer is taken faster.
            step = min(self.weight * self._round / self.window, self.window / GENTLE)
            self.window += min(self.window, step * 2**self._calm_rounds)
            self._calm_rounds = min(self._calm_rounds + 1, CALM_ROUNDS_MAX)
        self._delivered = self._congested = 0
        self._round = max(self.window, ROUND_PACKETS_MIN)

    def on_timeout(self) -> None:
        """Halve the window: the network fell silent."""
        self._starting = False
        self.window = max(self._smallest, self.window / 2)


class Cubic:
    """CUBIC (RFC 9438), for traffic that shares a drop-tail queue with TCP; reacts to loss, once a round trip.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as. k flows of weight 1/k together behave as one: the throughput of an
        AIMD flow goes with the square root of its increase, hence the square here.
    """

    SCALE = 0.4
    BETA = 0.7
    ecn_capable = False

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.window = max(2.0, INITIAL_WINDOW_PACKETS * weight)
        self._threshold = math.inf
        self._peak = 0.0
        self._epoch_s = -1.0
        self._reno = 0.0
        self._recovery_until_s = -1.0

    def on_feedback(self, now_s: float, delivered: int, marked: int, lost: int, rtt_s: float) -> None:
        """Take in one report."""
        if lost:
            if now_s >= self._recovery_until_s:
                self._back_off(now_s, rtt_s)
            return
        if self.window < self._threshold:
            self.window += delivered
            return
        if self._epoch_s < 0:
            self._epoch_s, self._reno = now_s, self.window
            self._peak = max(self._peak, self.window)
        increase = self.weight**2
        since_s = now_s - self._epoch_s + rtt_s
        inflection_s = (self._peak * (1 - self.BETA) / (self.SCALE * increase)) ** (1 / 3)
        target = self.SCALE * increase * (since_s - inflection_s) ** 3 + self._peak
        self._reno += increase * 3 * (1 - self.BETA) / (1 + self.BETA) * delivered / self.window
        goal = max(target, self._reno)
        if goal > self.window:
            self.window += min((goal - self.window) / self.window * delivered, delivered / 2)

    def _back_off(self, now_s: float, rtt_s: float) -> None:
        # Fast convergence: a flow that has less than it had gives room to newcomers.
        self._peak = self.window * (1 + self.BETA) / 2 if self.window < self._peak else self.window
        self.window = max(1.0, self.window * self.BETA)
        self._threshold = max(2.0, self.window)
        self._epoch_s = -1.0
        self._recovery_until_s = now_s + rtt_s

    def on_timeout(self) -> None:
        """Start over from one packet, as RFC 5681 has it."""
        self._threshold = max(2.0, self.window * self.BETA)
        self._peak = self.window
        self.window = 1.0
        self._epoch_s = -1.0
