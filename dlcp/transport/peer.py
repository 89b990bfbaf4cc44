# SPDX-License-Identifier: Apache-2.0
"""What is known of another rank, and how much may be on its way there."""

import math
from dataclasses import dataclass, field

from dlcp.transport.congestion import RateControl
from dlcp.transport.delivery_rate import DeliveryRate
from dlcp.transport.engine import Flow
from dlcp.transport.messages import MessageKey
from dlcp.transport.sending import Sending

USEFUL_WINDOW_BYTES = 2 << 20
FASTEST_BPS = 100e9
"""A window is no larger than what a link of this speed can hold in a round trip, or this many bytes if that is less.

More only stands in buffers, and falls out of a host's caches. Chosen by us, by CPU time on a loopback.
"""
UNLIMITED_PACKETS = 1 << 40


@dataclass(slots=True)
class Peer:
    """Another rank.

    Parameters
    ----------
    rank
        Which.
    flow
        What is on its way there.
    control
        What finds the window.
    payload_bytes
        Bytes of a message per packet.
    room_packets
        What its receive buffer has room for.
    local
        Packets go there through memory, which says itself when it is full.
    """

    rank: int
    flow: Flow
    control: RateControl
    payload_bytes: int
    room_packets: int
    local: bool = False
    rate: DeliveryRate = field(default_factory=DeliveryRate)
    sending: dict[MessageKey, Sending] = field(default_factory=dict)
    """Messages that it has not confirmed."""
    look_s: float = 0.0
    """When to look next which of them to ask about, if none falls idle before."""
    greeted: bool = False
    hello_due_s: float = 0.0
    base_rtt_s: float = math.inf
    """The shortest round trip so far."""

    def __post_init__(self) -> None:
        self.limit_window()
        self.flow.window = self.control.window

    def follow_reports(self, now_s: float) -> None:
        """Let the window follow what came back."""
        report = self.flow.take_report(now_s)
        if report is not None:
            self.control.on_report(report)
            self.limit_window(report.rtt_s)
            self.flow.window, self.flow.eager = self.control.window, self.control.eager
            self.rate.on_feedback(now_s, report.delivered, any(s.message.unsent for s in self.sending.values()))

    def limit_window(self, rtt_s: float = 0.0) -> None:
        """Bound the window by what the receiver has room for, and by what may be of use; 0: no new round trip."""
        if self.local:
            self.flow.largest_window = UNLIMITED_PACKETS
            return
        if rtt_s:
            self.base_rtt_s = min(self.base_rtt_s, rtt_s)
        useful_bytes = max(USEFUL_WINDOW_BYTES, self.base_rtt_s * FASTEST_BPS / 8)
        self.flow.largest_window = max(1, int(min(float(self.room_packets), useful_bytes / self.payload_bytes)))
        # A window must not grow on the strength of what the bound lets through.
        self.control.window = min(self.control.window, float(self.flow.largest_window))

    def on_timeout(self) -> None:
        """Note that questions go unanswered."""
        self.control.on_timeout()
        self.flow.window, self.flow.eager = self.control.window, self.control.eager
