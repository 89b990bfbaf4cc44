# SPDX-License-Identifier: Apache-2.0
"""The interface of rate control, which limits the packets that a rank may have in flight to a peer.

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
    """A window in packets, driven by reports. Below 1, it admits one packet now and then.

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
