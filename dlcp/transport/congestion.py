# SPDX-License-Identifier: Apache-2.0
"""How many packets a rank may have on the way to another: what a rate control is told, and what it answers.

A job should count as one flow on a port, however many ranks send to it, so each of its flows grows by its weight only.
"""

import math
from typing import NamedTuple, Protocol

INITIAL_WINDOW_PACKETS = 10.0
"""RFC 6928, shared by the flows of a job in proportion to their weight."""


class Report(NamedTuple):
    """What became of packets since the last report; it may cover one acknowledgement, or several windows.

    Parameters
    ----------
    now_s
        Time on the clock of the transport.
    delivered, marked, lost
        Packets newly confirmed, how many of these were marked congested (ECN), and packets found lost.
    rtt_s
        The smallest round-trip time that was sampled, without the receiver's delay; 0 if none was.
    smoothed_rtt_s
        The average round-trip time, 0 if it is not known.
    limited
        Whether the window held packets back.
    one_way_s
        The smallest one-way time that was sampled, less what the hosts' clocks differ by; infinity if none was. It can
        be below 0, and is of use only beside others.
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
    """A window in packets, driven by reports; one of less than a packet admits a packet now and then.

    Attributes
    ----------
    weight
        The share of a flow that this flow counts as; it may be changed at any time.
    """

    window: float
    weight: float
    ecn_capable: bool

    @property
    def slow_start(self) -> bool:
        """Whether the window grows by all that is delivered while it holds packets back: then each report counts."""

    def on_report(self, report: Report) -> None:
        """Take in one report."""

    def restart(self, now_s: float) -> bool:
        """After a pause in which nothing was on the way a message begins; return whether the window shrank."""

    def on_timeout(self) -> None:
        """Nothing was heard for a whole probe timeout."""


class NoWindow:
    """No window: there is no network in between that could be congested."""

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
