# SPDX-License-Identifier: Apache-2.0
"""Congestion control: how many packets a rank may have in flight to a peer; and CUBIC.

A job should count as one flow on a port for any number of senders, so each of its flows grows by its weight.
"""

import math
from typing import NamedTuple, Protocol

INITIAL_WINDOW_PACKETS = 10.0
"""RFC 6928, shared by the flows of a job in proportion to their weight."""


class Report(NamedTuple):
    """Feedback on packets since the last report; covers anything from one acknowledgement to several windows.

    Parameters
    ----------
    now_s
        Time on the transport's clock.
    delivered, marked, lost
        Packets newly acknowledged, those of them with an ECN mark, and packets declared lost.
    rtt_s
        Minimum sampled round-trip time, without the receiver's delay; 0 if there was no sample.
    smoothed_rtt_s
        Smoothed round-trip time; 0 if unknown.
    limited
        Whether the window limited sending.
    one_way_s
        Minimum sampled one-way delay, up to the offset between the hosts' clocks; infinity if there was no sample. It
        can be negative, and is only meaningful relative to other samples.
    """

    now_s: float
    delivered: int
    marked: int
    lost: int
    rtt_s: float
    smoothed_rtt_s: float
    limited: bool
    one_way_s: float = math.inf


class RateControl(Protocol):
    """A window in packets, driven by reports. Below 1, it admits one packet at intervals.

    Attributes
    ----------
    weight
        The share of a flow that this flow counts as; may change at any time.
    """

    window: float
    weight: float
    ecn_capable: bool

    @property
    def slow_start(self) -> bool:
        """Whether the window grows by all delivered packets while it limits sending, so that each report counts."""

    def on_report(self, report: Report) -> None:
        """Process one report."""

    def restart(self, now_s: float) -> bool:
        """Begin a message after a pause with nothing in flight; return whether the window shrank."""

    def on_timeout(self) -> None:
        """React to a whole probe timeout without any arrival."""


class NoWindow:
    """No window: between ranks of one host there is no network to congest."""

    ecn_capable = False
    slow_start = False

    def __init__(self) -> None:
        self.window, self.weight = math.inf, 1.0

    def on_report(self, report: Report) -> None:
        """See :meth:`RateControl.on_report`."""

    def restart(self, now_s: float) -> bool:
        """See :meth:`RateControl.restart`."""
        return False

    def on_timeout(self) -> None:
        """See :meth:`RateControl.on_timeout`."""


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
