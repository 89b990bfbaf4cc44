# SPDX-License-Identifier: Apache-2.0
"""How a rank talks to its peers."""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from dlcp.configuration import Range, Unit, check
from dlcp.transport.congestion import RateControl
from dlcp.transport.cubic import CubicWindow
from dlcp.transport.dctcp import DctcpWindow

CONGESTION: Final = ("dctcp", "ecn", "cubic")
"""How a rank may react to congestion."""
PATHS_MAX: Final = 64
"""The most paths to a peer."""
PathCount = Annotated[int, Range(1, PATHS_MAX)]
SECONDS: Final = Range(0, 1e9, above=True)
"""Deadlines. 30 years are the most: clocks and locks of the system overflow not far beyond."""
Seconds = Annotated[float, SECONDS, Unit("s")]
SwitchHops = Annotated[int, Range(1, 0xFFFF)]
"""The drop budget that is divided by it has 16 bits."""
FlowWeight = Annotated[float, Range(0.0, 100)]
"""A share of a flow, or so many flows; 0 is the default. 100 is chosen by us: one that weighs more than that leaves
nothing to others."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How a rank talks to its peers.

    Parameters
    ----------
    payload_bytes
        Bytes of a message per packet. 1440 fills an MTU of 1500 (20 IPv4, 8 UDP, 32 DLCP).
    tagged
        False sends everything as ordinary traffic in one queue: no tags, nothing droppable, no urgent control packets.
    congestion
        ``dctcp`` (DCTCP-like: reacts to ECN, loss and delay, for tagged traffic), ``ecn`` (the same without delay: for
        a path where packets wait behind other traffic after they have left their queues, as in BMv2), or ``cubic`` (for
        a queue shared with TCP).
    flow_weight
        The share of one flow that traffic to each peer counts as; None divides one flow among those who send to a rank.
    switch_hops
        Switches that the packets of one message may cross, all equal paths taken together: 1 + 1 + S between two leaves
        under S spines. The drop budget is divided by it, so that all of them together keep the bound. ``dlcp fabric
        check`` tells the number.
    silence_s
        A peer that answers nothing for this long is dead.
    deadline_s
        A message that takes longer than this has failed.
    paths
        Ports to send from, 1 to 64, so that a fabric that chooses among equal routes by addresses and ports (ECMP) has
        as many choices for each peer. Of four routes 8 ports miss one in 38 % of all cases, 12 in 13 %, 16 in 4 %. The
        default is chosen by us: on a loopback, where there is one route only, an all-reduce with 8 took as much
        processor time as with 1, and with 16 took 2 to 3 % more.
    early_buffer_bytes
        The most memory for messages that arrive before anybody waits for them.
    clear_after_s
        A path on which nothing was lost or marked for so long is clear: what goes there is not tagged by magnitude.
        Infinity: no path ever is. The default is chosen by us: where bursts of other traffic matter, they come more
        often than once a minute.
    """

    payload_bytes: int = 1440
    tagged: bool = True
    congestion: str = "dctcp"
    flow_weight: FlowWeight | None = None
    switch_hops: SwitchHops = 1
    silence_s: Seconds = 10.0
    deadline_s: Seconds = 120.0
    paths: PathCount = 12
    early_buffer_bytes: Annotated[int, Range(1, 1 << 62)] = 1 << 28
    clear_after_s: Annotated[float, Range(0, math.inf, infinite=True)] = 60.0

    def __post_init__(self) -> None:
        check(self)
        if self.congestion not in CONGESTION:
            raise ValueError(f"congestion must be one of {', '.join(CONGESTION)}, got {self.congestion!r}")
        if not 64 <= self.payload_bytes <= 65000 or self.payload_bytes % 8:
            raise ValueError(f"payload_bytes must be a multiple of 8 from 64 to 65000, got {self.payload_bytes}")

    def rate_control(self, senders: int) -> RateControl:
        """Return the window control of one flow, where ``senders`` ranks send to its receiver."""
        weight = weight_of(self.flow_weight, senders)
        if self.congestion == "cubic":
            return CubicWindow(weight)
        return DctcpWindow(weight, heed_delay=self.congestion == "dctcp")


def weight_of(flow_weight: float | None, senders: int) -> float:
    """Return the share of a flow that one counts as; None divides one among all ``senders`` to its receiver."""
    return flow_weight or 1 / max(1, senders)
