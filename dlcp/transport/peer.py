# SPDX-License-Identifier: Apache-2.0
"""Other ranks: the window, rate and messages of each, how clear the path to it is, and whether it is alive."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from dlcp import wire
from dlcp.host.ip import family_of
from dlcp.transport.congestion import RateControl
from dlcp.transport.dctcp import QUEUE_MIN_S
from dlcp.transport.engine import ControlPacket, Engine, Reported
from dlcp.transport.messages import (
    Arrival,
    Bytes,
    Delivery,
    LossBound,
    MessageKey,
    MessageMismatchError,
    PeerAbortedError,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    TransportError,
    at_step,
)
from dlcp.transport.path_mtu import NarrowPath
from dlcp.transport.settings import PATHS_MAX, Membership, TransportOptions
from dlcp.wire import GREETING, GREETING_PORT, PacketType

USEFUL_WINDOW_BYTES = 2 << 20
FASTEST_BPS = 100e9
"""A window is limited to a round trip at this rate, or to this many bytes if that is more.

A larger window only fills buffers, and exceeds a host's caches. Chosen by CPU time on a loopback.
"""
READ_EVERY_S = 0.02
"""The longest time between two reads of the receive buffer. The buffer must hold the packets of this time, not a whole
window of a longer path. It is several times a process's wait on a busy host.
"""
UNLIMITED_PACKETS = 1 << 40
PACED_RTT_MIN_S = 0.005
"""Windows are paced on paths at least this long. Otherwise a window that opened during a pause of training leaves as
one burst, and overflows queues that are shorter than the path. On shorter paths such bursts are small."""
PACE, PACE_SLOW_START = 1.25, 2.0
"""Windows sent per round trip, about as in Linux."""
RATE_MEMORY_S = 0.3
"""Time constant of the rate's average, in seconds of sending: a part of a training step on a slow network."""
RATE_MIN_S = 0.03
"""The average time for which packets must have waited before the rate is meaningful."""
RATE_STALE_S = 3.0
QUEUED_MEMORY_S = 10.0
"""The time for which a path counts as congested after packets have queued on it: as long as its idle round trip is
remembered."""
HELLO_REPEAT_S: Final = 0.1
"""Time between unanswered greetings before a round trip is known. With round trips of 0.1 ms, a lost greeting delays
the start by this time; with 100 ms, each rank sends one or two needless greetings."""
KEEPALIVE_S: Final = 0.5
"""A silent peer with a pending answer is greeted after this time, to check that it is alive. It must be well below
``silence_s``."""
ABORT_BYTES_MAX: Final = 1000
FAREWELL: Final = "\0"
"""The first character of the reason when a rank leaves without giving up: its peers need not give up either."""
LAST_PACKETS_S: Final = 0.25
"""The time after a farewell in which earlier packets may still arrive: the delay of many queues."""

T = TypeVar("T")
Then: TypeAlias = Callable[[T], object]
"""Takes a delivery or an arrival; if it raises, the message fails with that error."""
Fail: TypeAlias = Callable[[Exception], object]
"""Takes the error that ended a message."""


class DeliveryRate:
    """Rate of one flow, from acknowledgements that arrive while packets wait (sampled as in BBR, but averaged).

    It is measured only while packets wait; otherwise it would include the sender's idle time.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._packets = 0.0
        self._last_s = 0.0
        self._waiting = False

    def on_feedback(self, now_s: float, delivered: int, waiting: bool) -> None:
        """Add ``delivered`` packets; ``waiting`` says whether more wait to be sent."""
        if self._waiting:
            elapsed_s = now_s - self._last_s
            keep = math.exp(-elapsed_s / RATE_MEMORY_S)
            self._seconds = keep * self._seconds + elapsed_s
            self._packets = keep * self._packets + delivered
        self._last_s, self._waiting = now_s, waiting

    def packets_per_s(self, now_s: float) -> float:
        """Return the rate, or 0 if unknown."""
        if self._seconds < RATE_MIN_S or now_s - self._last_s > RATE_STALE_S:
            return 0.0
        return self._packets / self._seconds


def pace_of(control: RateControl, base_rtt_s: float, smoothed_rtt_s: float) -> float:
    """Return the pace in packets per second; infinity if the path is too short for pacing to matter."""
    if base_rtt_s < PACED_RTT_MIN_S:
        return math.inf
    return (PACE_SLOW_START if control.slow_start else PACE) * control.window / max(base_rtt_s, smoothed_rtt_s)


@dataclass(slots=True)
class Sending:
    """A message that its receiver has not acknowledged."""

    request: SendRequest
    """Keeps the bytes that the engine reads."""
    then: Then[Delivery]
    fail: Fail
    bound: LossBound
    started_s: float
    deadline_s: float
    copy: Bytes | None = None
    """The copy that the engine reads instead of the payload, see ``Connection.detach``."""


@dataclass(slots=True)
class Receiving:
    """A posted receive whose message is incomplete."""

    request: ReceiveRequest
    then: Then[Arrival]
    fail: Fail
    bound: LossBound
    started_s: float
    deadline_s: float
    payload: Bytes
    """The engine's destination for the message, without its tail."""
    clear: bool
    """Whether missing packets must read as zeros."""


@dataclass(slots=True)
class Peer:
    """Another rank, and the path to it.

    Parameters
    ----------
    rank
        Its number.
    flow
        The state of the flow to it, a ``flow_view`` of ``engine.h``.
    control
        Its congestion control.
    options
        The transport's.
    clock
        The connection's clock.
    room_packets
        Packets that its receive buffer holds.
    local
        Whether it is reached through memory, which limits senders by itself.
    """

    rank: int
    flow: Any
    control: RateControl
    options: TransportOptions
    clock: Callable[[], float]
    room_packets: int
    local: bool = False
    rate: DeliveryRate = field(default_factory=DeliveryRate)
    sending: dict[MessageKey, Sending] = field(default_factory=dict)
    """Messages that it has not acknowledged. All have the same timeout, so the earliest deadline comes first."""
    receiving: dict[MessageKey, Receiving] = field(default_factory=dict)
    """Receives posted for its messages, in the same order."""
    greeted: bool = False
    answered: bool = False
    """Whether it has answered a greeting, and so knows this rank's ports."""
    left: str = ""
    """Its reason for leaving; it sends and needs nothing more."""
    kept: list[Sending] = field(default_factory=list)
    """Messages in flight when it left, which the engine may read until the end."""
    hello_due_s: float = 0.0
    smoothed_rtt_s: float = 0.0
    """As of the last report; 0 if unknown."""
    base_rtt_s: float = math.inf
    """The shortest round trip so far."""
    congested_s: float = -math.inf
    """The time when a packet to it was last lost or marked."""
    queued_s: float = -math.inf
    """The time when packets to it last queued."""
    _largest: float = math.inf

    def __post_init__(self) -> None:
        self.limit_window()

    def on_send(self, now_s: float) -> None:
        """Shrink the window if a message begins after a pause; long paths are paced instead."""
        if not self.sending and self.base_rtt_s < PACED_RTT_MIN_S and self.control.restart(now_s):
            self._apply_window()

    def on_report(self, reported: Reported) -> None:
        """Update the window from feedback."""
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
        """Shrink the window because probes are unanswered."""
        self.control.on_timeout()
        self._apply_window()

    @property
    def rate_bps(self) -> float:
        """Its recent delivery rate while packets were waiting, in bit/s; 0 if unknown, as for local peers."""
        if self.local:
            return 0.0
        return self.rate.packets_per_s(self.clock()) * self.options.payload_bytes * 8

    @property
    def window_packets(self) -> float:
        """The congestion window in packets; 0 for local peers."""
        return 0.0 if self.local else self.control.window

    @property
    def is_clear(self) -> bool:
        """Whether no packet to it was lost or marked recently. Any thread may ask.

        Always true for local peers; never if ``TransportOptions.clear_after_s`` is infinite.
        """
        clear_after_s = self.options.clear_after_s
        return self.local or (clear_after_s < math.inf and self.clock() - self.congested_s > clear_after_s)

    @property
    def signed_rate_bps(self) -> float:
        """The rate, negative without signs of congestion: the path is clear, and no packets queued on it recently."""
        return self.rate_bps if not self.is_clear or self.has_queued(QUEUED_MEMORY_S) else -self.rate_bps

    def has_queued(self, within_s: float) -> bool:
        """Return whether packets to it queued in the last ``within_s`` seconds. Any thread may ask."""
        return self.clock() - self.queued_s <= within_s

    def limit_window(self) -> None:
        """Limit the window to the receiver's buffer and to a useful size."""
        if self.local:
            self.flow.largest_window = UNLIMITED_PACKETS
        else:
            base_s = 0.0 if self.base_rtt_s == math.inf else self.base_rtt_s
            useful_packets = max(USEFUL_WINDOW_BYTES, self.base_rtt_s * FASTEST_BPS / 8) / self.options.payload_bytes
            room_packets = self.room_packets * max(1.0, base_s / READ_EVERY_S)
            largest = self.flow.largest_window = max(1, int(min(room_packets, useful_packets)))
            self._largest = float(largest)
        self._apply_window()

    def _apply_window(self) -> None:
        control, flow = self.control, self.flow
        if control.window > self._largest:  # it must not grow while another limit applies
            control.window = self._largest
        flow.window, flow.slow_start, flow.pace = control.window, control.slow_start, math.inf
        if self.base_rtt_s < math.inf:
            flow.pace = pace_of(control, self.base_rtt_s, self.smoothed_rtt_s)


class Liveness:
    """Greets all peers, and notices when one is silent, leaves or gives up. Only for the connection's thread.

    Parameters
    ----------
    membership, options, engine, peers
        The connection's.
    ports
        This rank's source ports of all paths but the first, in order.
    room_packets
        Packets from one peer that this rank's receive buffer holds.
    clock, call_later
        The connection's.
    fail
        Makes the connection give up, with an error.
    go_on_without
        Makes it continue without a peer that has left.

    Attributes
    ----------
    refused
        Control packets refused, by reason.
    """

    def __init__(
        self,
        membership: Membership,
        options: TransportOptions,
        engine: Engine,
        peers: Mapping[int, Peer],
        *,
        ports: Sequence[int],
        room_packets: int,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
        fail: Callable[[TransportError], None],
        go_on_without: Callable[[Peer], None],
    ) -> None:
        self._membership, self._options, self._engine, self._peers = membership, options, engine, peers
        self._ports = ports
        self._greeting = GREETING.pack(options.payload_bytes, room_packets) + b"".join(map(GREETING_PORT.pack, ports))
        self._clock, self._call_later = clock, call_later
        self._fail, self._go_on_without = fail, go_on_without
        self._narrow: dict[int, NarrowPath] = {}
        self._looked_s = clock()
        self.refused: Counter[str] = Counter()

    # Greeting and leaving ---------------------------------------------------------------------------------------------

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return [rank for rank, peer in self._peers.items() if not peer.greeted]

    def greet_all(self) -> None:
        """Announce this rank to all peers."""
        for peer in self._peers.values():
            self._greet(peer, self._clock())

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up, or leaves normally if the reason begins with :data:`FAREWELL`."""
        payload = reason.encode()[: min(ABORT_BYTES_MAX, self._options.payload_bytes)]
        for peer in self._peers:
            self._engine.send_control(peer, PacketType.ABORT, payload)

    def _greet(self, peer: Peer, now_s: float, kind: PacketType = PacketType.HELLO) -> None:
        peer.hello_due_s = now_s + HELLO_REPEAT_S
        self._engine.send_control(peer.rank, kind, self._greeting)

    # Silence ----------------------------------------------------------------------------------------------------------

    def on_time(self, now_s: float) -> None:
        """Note the time, which the connection does every :data:`HELLO_REPEAT_S`, before it asks for silence."""
        # This process may not have run for this long: packets from the meantime are still unread.
        paused_s = now_s - self._looked_s - HELLO_REPEAT_S
        if paused_s > KEEPALIVE_S:
            for peer in self._peers.values():
                peer.flow.heard_s += paused_s
        self._looked_s = now_s

    def silence_of(self, peer: Peer, now_s: float) -> TransportError | None:
        """Check that a peer with pending messages is alive; return the error if it has been silent for too long."""
        silent_s, silence_s = now_s - peer.flow.heard_s, self._options.silence_s
        if not peer.sending and not peer.receiving:
            peer.flow.heard_s = max(peer.flow.heard_s, now_s - silence_s / 2)
        elif silent_s > silence_s:
            # A pending receive says more than a sent message, which may have arrived with only its acknowledgement
            # lost.
            waiting: dict[MessageKey, Any] = peer.receiving or peer.sending
            step, label = min((key.step, message.request.label) for key, message in waiting.items())
            return PeerSilentError(
                f"{at_step(self._membership.job, step)}: rank {peer.rank} has been silent for {silent_s:.1f} s "
                f"while rank {self._membership.rank} waited for {label}; is its process alive and the path up?"
            )
        elif now_s >= peer.hello_due_s and (silent_s > KEEPALIVE_S or (self._ports and not peer.answered)):
            self._greet(peer, now_s)
        return None

    # Control packets --------------------------------------------------------------------------------------------------

    def on_control(self, event: ControlPacket) -> None:
        """Process a packet about a peer rather than a message."""
        header, payload = wire.decode(event.datagram), event.datagram[wire.HEADER_BYTES :]
        if header.type is PacketType.ABORT:
            self._on_departure(self._peers[event.peer], payload[:ABORT_BYTES_MAX].decode(errors="replace"))
        elif header.index:  # a probe of the path carries its size there
            if header.count != header.index:  # a late packet from before the start
                self.refused["stale"] += 1
            elif header.type is PacketType.HELLO_ACK and not payload:
                path = self._narrow.get(event.peer)
                self.refused["stale"] += path is None or not path.on_answer(header.index)
            elif header.type is PacketType.HELLO and header.index == len(payload):
                self._engine.send_control(event.peer, PacketType.HELLO_ACK, b"", header.index)
                self.path_to(event.peer).on_probe(event.now_s)
            else:
                self.refused["malformed"] += 1
        elif len(payload) - GREETING.size not in range(0, PATHS_MAX * GREETING_PORT.size, GREETING_PORT.size):
            self.refused["malformed"] += 1
        else:
            self._on_hello(self._peers[event.peer], header.type, payload, event.now_s)

    def path_to(self, rank: int) -> NarrowPath:
        """Return the probe that detects whether the path to a rank has become too narrow."""
        if rank not in self._narrow:
            label, flow = f"job {self._membership.job}, rank {rank}", self._peers[rank].flow
            probe = partial(self._probe_size, rank)
            family = family_of(self._membership.peers[rank][0])
            self._narrow[rank] = NarrowPath(label, self._options.payload_bytes, family, flow, probe, self._call_later)
        return self._narrow[rank]

    def _probe_size(self, rank: int, size: int) -> None:
        self._engine.send_control(rank, PacketType.HELLO, bytes(size), size)

    def _on_departure(self, peer: Peer, reason: str) -> None:
        if not reason.startswith(FAREWELL):
            error = PeerAbortedError(f"job {self._membership.job}: rank {peer.rank} gave up: {reason}")
            # Not at once: a peer relies on packets of the same batch, because the engine has acknowledged them.
            self._call_later(0.0, partial(self._fail, error))
        elif not peer.left:
            peer.left = reason[1:]
            # Its last packets may still be in flight: on another path, or in another queue.
            self._call_later(LAST_PACKETS_S, partial(self._go_on_without, peer))

    def _on_hello(self, peer: Peer, kind: PacketType, payload: bytes, now_s: float) -> None:
        payload_bytes, room_packets = GREETING.unpack_from(payload)
        ports = [port for (port,) in GREETING_PORT.iter_unpack(payload[GREETING.size :])]
        if payload_bytes != self._options.payload_bytes:
            self._fail(
                MessageMismatchError(
                    f"job {self._membership.job}: rank {peer.rank} sends {payload_bytes} bytes a packet and rank "
                    f"{self._membership.rank} {self._options.payload_bytes}; give all ranks the same payload_bytes"
                )
            )
            return
        peer.greeted = True
        peer.room_packets = max(1, room_packets)
        peer.limit_window()
        self._engine.accept(peer.rank, ports)
        if kind is PacketType.HELLO:
            self._greet(peer, now_s, PacketType.HELLO_ACK)
            if self._ports and not peer.answered:  # it was not up when it was greeted
                self._greet(peer, now_s)
        else:
            peer.answered = True
            self._engine.spread(peer.rank, 1 + len(self._ports))
