# SPDX-License-Identifier: Apache-2.0
"""Another rank: how much may be on its way there, how fast it takes that in, and whether it is there at all."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from dlcp.transport.congestion import RateControl
from dlcp.transport.engine import Reported
from dlcp.transport.idle_path import QUEUE_MIN_S
from dlcp.transport.messages import Arrival, Bytes, Delivery, LossBound, MessageKey, ReceiveRequest, SendRequest
from dlcp.transport.native_engine import Flow

USEFUL_WINDOW_BYTES = 2 << 20
FASTEST_BPS = 100e9
"""A window is no larger than what a link of this speed can hold in a round trip, or this many bytes if that is less.

More only stands in buffers, and falls out of a host's caches. Chosen by us, by CPU time on a loopback.
"""
READ_EVERY_S = 0.02
"""How often a receiver reads its buffer at least: what arrives within that has to fit in, not what a longer path holds.
Chosen by us: several times what a busy host makes a process wait.
"""
UNLIMITED_PACKETS = 1 << 40
PACED_RTT_MIN_S = 0.005
"""Windows leave at a pace on paths at least so long: what a pause of training saves up would else leave as one burst,
and overflow a queue that is shorter than the path. On shorter ones it is a matter of few packets. Chosen by us."""
PACE, PACE_SLOW_START = 1.25, 2.0
"""So many windows a round trip may leave, about as Linux has it."""
RATE_MEMORY_S = 0.3
"""Time constant of the rate's average, in seconds of sending. Chosen by us: a part of a training step on a slow
network."""
RATE_MIN_S = 0.03
"""How long packets must have been waiting, in the average, before the rate means something."""
RATE_STALE_S = 3.0

T = TypeVar("T")
Outcome: TypeAlias = T | Exception
Then: TypeAlias = Callable[[Outcome[T]], object]
"""Called with what became of a message: its delivery or arrival, or the error that ended it."""


class DeliveryRate:
    """Rate of one flow, from acknowledgements that arrive while packets wait (as BBR samples it, but averaged).

    It is judged only while there is something to send: else one would measure one's own idleness.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._packets = 0.0
        self._last_s = 0.0
        self._waiting = False

    def on_feedback(self, now_s: float, delivered: int, waiting: bool) -> None:
        """Take in that ``delivered`` packets arrived; ``waiting`` says whether more wait to be sent."""
        if self._waiting:
            elapsed_s = now_s - self._last_s
            keep = math.exp(-elapsed_s / RATE_MEMORY_S)
            self._seconds = keep * self._seconds + elapsed_s
            self._packets = keep * self._packets + delivered
        self._last_s, self._waiting = now_s, waiting

    def packets_per_s(self, now_s: float) -> float:
        """Return the rate, or 0 if it is not known."""
        if self._seconds < RATE_MIN_S or now_s - self._last_s > RATE_STALE_S:
            return 0.0
        return self._packets / self._seconds


def pace_of(control: RateControl, base_rtt_s: float, smoothed_rtt_s: float) -> float:
    """Return how many packets a second may leave at most; infinity if the path is too short for that to matter."""
    if base_rtt_s < PACED_RTT_MIN_S:
        return math.inf
    return (PACE_SLOW_START if control.slow_start else PACE) * control.window / max(base_rtt_s, smoothed_rtt_s)


@dataclass(slots=True)
class Sending:
    """A message until its receiver has confirmed it."""

    request: SendRequest
    """It holds the bytes that the engine reads."""
    then: Then[Delivery]
    bound: LossBound
    started_s: float
    deadline_s: float
    copy: Bytes | None = None
    """What the engine reads instead of the payload, see ``Connection.detach``."""


@dataclass(slots=True)
class Receiving:
    """A posted receive until its message is complete."""

    request: ReceiveRequest
    then: Then[Arrival]
    bound: LossBound
    started_s: float
    deadline_s: float
    payload: Bytes
    """Where the engine puts the message, without its tail."""
    clear: bool
    """Whether missing packets are to read as zeros."""


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
    """Messages that it has not confirmed, in the order of their deadlines: all are given equally long."""
    receiving: dict[MessageKey, Receiving] = field(default_factory=dict)
    """Receives posted for its messages, in the same order."""
    greeted: bool = False
    answered: bool = False
    """Whether it has answered a greeting, and so knows what ports packets come from."""
    left: str = ""
    """Why it has left; it sends nothing more, and needs nothing more."""
    kept: list[Sending] = field(default_factory=list)
    """What was on its way to it when it left: the engine may read these messages until the end."""
    hello_due_s: float = 0.0
    smoothed_rtt_s: float = 0.0
    """As of the last report; 0 if it is not known."""
    base_rtt_s: float = math.inf
    """The shortest round trip so far."""
    congested_s: float = -math.inf
    """When a packet to it was last lost or marked."""
    queued_s: float = -math.inf
    """When packets to it last waited in a queue."""
    _largest: float = math.inf

    def __post_init__(self) -> None:
        self.limit_window()

    def on_send(self, now_s: float) -> None:
        """Let the window be smaller if a message begins after a pause; long paths pace it instead."""
        if not self.sending and self.base_rtt_s < PACED_RTT_MIN_S and self.control.restart(now_s):
            self._apply_window()

    def on_report(self, reported: Reported) -> None:
        """Let the window follow what came back."""
        report = reported.report
        if report.lost or report.marked:
            self.congested_s = report.now_s
        if report.smoothed_rtt_s - self.base_rtt_s > QUEUE_MIN_S:
            self.queued_s = report.now_s
        self.smoothed_rtt_s = report.smoothed_rtt_s
        self.control.on_report(report)
        if 0 < report.rtt_s < self.base_rtt_s:
            self.base_rtt_s = report.rtt_s
            self.limit_window()
        else:
            self._apply_window()
        self.rate.on_feedback(report.now_s, report.delivered, reported.waiting)

    def on_timeout(self) -> None:
        """Shrink the window: questions go unanswered."""
        self.control.on_timeout()
        self._apply_window()

    def limit_window(self) -> None:
        """Bound the window by what the receiver has room for, and by what may be of use."""
        if self.local:
            self.flow.largest_window = UNLIMITED_PACKETS
        else:
            base_s = 0.0 if self.base_rtt_s == math.inf else self.base_rtt_s
            useful_packets = max(USEFUL_WINDOW_BYTES, self.base_rtt_s * FASTEST_BPS / 8) / self.payload_bytes
            room_packets = self.room_packets * max(1.0, base_s / READ_EVERY_S)
            largest = self.flow.largest_window = max(1, int(min(room_packets, useful_packets)))
            self._largest = float(largest)
        self._apply_window()

    def _apply_window(self) -> None:
        control, flow = self.control, self.flow
        if control.window > self._largest:  # it must not grow on the strength of what the bound lets through
            control.window = self._largest
        flow.window, flow.slow_start, flow.pace = control.window, control.slow_start, math.inf
        if self.base_rtt_s < math.inf:
            flow.pace = pace_of(control, self.base_rtt_s, self.smoothed_rtt_s)
