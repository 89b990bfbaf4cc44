# SPDX-License-Identifier: Apache-2.0
"""CUBIC for flows that count as a fraction of one."""

import math

from dlcp.transport.congestion import INITIAL_WINDOW_PACKETS, Report


class CubicWindow:
    """CUBIC (RFC 9438), for traffic that shares a drop-tail queue with TCP; reacts to loss once per round trip.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as: k flows of weight 1/k together should behave as one. If all
        packets are equally likely to be lost, an AIMD flow's throughput is proportional to the square root of its
        increase, hence the square. If a flow loses the packets by which it grew, throughput is inversely proportional
        to the decrease, so a light flow also decreases by more. The root is a compromise between the two.
    """

    SCALE = 0.4
    DECREASE = 0.3
    DECREASE_MAX = 0.7
    ecn_capable = False

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.window = max(2.0, INITIAL_WINDOW_PACKETS * weight)
        self._threshold = math.inf
        self._peak = 0.0
        self._epoch_s = -1.0
        self._inflection_s = 0.0
        self._reno = 0.0
        self._recovery_until_s = -1.0

    @property
    def slow_start(self) -> bool:
        """See :class:`RateControl`: in slow start."""
        return self.window < self._threshold

    @property
    def _keep(self) -> float:
        return 1 - min(self.DECREASE_MAX, self.DECREASE / math.sqrt(self.weight))

    def on_report(self, report: Report) -> None:
        """Process one report."""
        if report.lost:
            if report.now_s >= self._recovery_until_s:
                self.back_off(report.now_s, report.smoothed_rtt_s)
        elif self.window < self._threshold:
            self.window += report.delivered
        else:
            self.grow(report)

    def resume(self, window: float) -> None:
        """Continue from the window of another control."""
        self.window = self._threshold = self._peak = window

    def grow(self, report: Report) -> None:
        """Grow with each delivery, in congestion avoidance."""
        now_s, delivered, rtt_s = report.now_s, report.delivered, report.smoothed_rtt_s
        if self._epoch_s < 0:
            self._epoch_s, self._reno = now_s, self.window
            self._peak = max(self._peak, self.window)
            self._inflection_s = ((self._peak - self.window) / (self.SCALE * self.weight**2)) ** (1 / 3)
        increase = self.weight**2
        since_s = now_s - self._epoch_s + rtt_s
        target = self.SCALE * increase * (since_s - self._inflection_s) ** 3 + self._peak
        self._reno += increase * 3 * (1 - self._keep) / (1 + self._keep) * delivered / self.window
        goal = max(target, self._reno)
        if goal > self.window:
            self.window += min((goal - self.window) / self.window * delivered, delivered / 2)

    def back_off(self, now_s: float, rtt_s: float) -> None:
        """Shrink after a loss; losses within a round trip of ``rtt_s`` count as the same one."""
        # Fast convergence: a shrinking flow makes room for newcomers.
        self._peak = self.window * (1 + self._keep) / 2 if self.window < self._peak else self.window
        self.window = max(1.0, self.window * self._keep)
        self._threshold = max(2.0, self.window)
        self._epoch_s = -1.0
        self._recovery_until_s = now_s + rtt_s

    def restart(self, now_s: float) -> bool:
        """See :meth:`RateControl.restart`: the window stays, as CUBIC's does in pauses shorter than a timeout."""
        return False

    def on_timeout(self) -> None:
        """Start over from one packet (RFC 5681)."""
        self._threshold = max(2.0, self.window * self._keep)
        self._peak = self.window
        self.window = 1.0
        self._epoch_s = -1.0
