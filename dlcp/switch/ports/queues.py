# SPDX-License-Identifier: Apache-2.0
"""The traffic manager of one port: eight strict-priority queues in front of a line with a rate.

Time is a number of nanoseconds that the caller passes in; nothing here looks at a clock. The line keeps a virtual clock
of its own: a packet that should have left before the caller came round leaves at the time it should have, so the
average rate is exact however late the caller is, and a line that had nothing to send saves nothing up.

Depths are what BMv2's simple_switch reports: ``enq_qdepth`` is the length of the queue before the packet joins it,
``deq_qdepth`` the length after it has left (simple_switch.cpp, ``enqueue`` and ``egress_thread``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

QUEUES: Final = 8
"""Queues of a port; 7 is the most urgent."""
DEPTH_PACKETS: Final = 64
"""Depth of a queue unless told otherwise, as in BMv2."""
NEVER_NS: Final = 1 << 62
"""A time that does not come (146 years)."""
SERVE_EVERY_PACKETS: Final = 8
"""Packets of one instant after which those depart that are due at that instant. Chosen by us: few beside a queue's
depth, so that a port without a rate drops nothing."""

LOSS_MODULUS: Final = 2**31 - 1
LOSS_MULTIPLIER: Final = 48_271
"""Random loss: the generator of Park and Miller (CACM 36(7), 1993), which plain and compiled code draw alike."""

COUNTED: Final = ("max_depth", "enqueued", "transmitted", "transmitted_bytes", "tail_drops", "egress_drops")
"""What is counted of each queue: the names in `QueueCounters`, and in snapshots."""

_MOST_URGENT = tuple(mask.bit_length() - 1 for mask in range(1 << QUEUES))


def loss_threshold(loss: float) -> int:
    """Return the number below which a draw of 1..LOSS_MODULUS - 1 means that a frame is lost."""
    return round(loss * (LOSS_MODULUS - 1)) + 1 if loss else 0


def loss_seed(seed: int) -> int:
    """Return the state of the generator for a seed; neighbouring seeds begin far from one another."""
    state = seed * 2_654_435_761 % (LOSS_MODULUS - 1) + 1
    for _ in range(3):
        state = state * LOSS_MULTIPLIER % LOSS_MODULUS
    return state


@dataclass(frozen=True)
class PortQueueing:
    """How a port queues and sends.

    Parameters
    ----------
    rate_bps
        Line rate in bit/s over whole frames: Ethernet header to the end of the payload. 0 means as fast as it comes.
    depth_packets
        Packets each queue holds: one number for all, or eight, queue 0 first.
    limit_packets, limit_bytes
        What all queues of the port may hold together, as in a switch whose ports have a small buffer each; None: no
        such limit. An empty queue takes a packet all the same: switches keep a place for each, and the program relies
        on it that a packet that finds no room has others before it in its queue.
    delay_s
        Propagation delay of the line away from the switch, in seconds.
    loss
        Share of frames that the line loses at random, 0..1, in either direction: a failing cable.
    seed
        Seed of that loss.
    """

    rate_bps: int = 0
    depth_packets: int | tuple[int, ...] = DEPTH_PACKETS
    limit_packets: int | None = None
    limit_bytes: int | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no port can have."""
        if self.rate_bps < 0:
            raise ValueError(f"rate_bps is {self.rate_bps}; give a positive rate, or 0 for no limit")
        if isinstance(self.depth_packets, Sequence) and len(self.depth_packets) != QUEUES:
            raise ValueError(f"depth_packets has {len(self.depth_packets)} numbers; give 1 for all queues or 8")
        if min(self.depths()) < 0:
            raise ValueError(f"depth_packets is {self.depth_packets}; a queue holds 0 packets or more")
        for name, limit in (("limit_packets", self.limit_packets), ("limit_bytes", self.limit_bytes)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}; give 0 or more, or leave it out for no limit")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss}; give the share of frames lost, 0..1")
        if self.delay_s < 0:
            raise ValueError(f"delay_s is {self.delay_s}; give 0 or more seconds")

    def depths(self) -> tuple[int, ...]:
        """Return the depth of each of the eight queues in packets, queue 0 first."""
        depth = self.depth_packets
        return (depth,) * QUEUES if isinstance(depth, int) else tuple(depth)


class QueueCounters(Protocol):
    """What is told of a port's queues; lists have a number for each queue."""

    queueing: PortQueueing

    @property
    def enqueued(self) -> list[int]:
        """Packets accepted."""

    @property
    def transmitted(self) -> list[int]:
        """Packets sent."""

    @property
    def transmitted_bytes(self) -> list[int]:
        """Bytes sent."""

    @property
    def tail_drops(self) -> list[int]:
        """Packets refused because the queue or the port was full."""

    @property
    def egress_drops(self) -> list[int]:
        """Packets that the program dropped in egress, or that waited when it was replaced."""

    @property
    def max_depth(self) -> list[int]:
        """The longest each queue has been, in packets."""

    @property
    def lost(self) -> int:
        """Frames lost on the line away from the switch."""

    @property
    def lost_arriving(self) -> int:
        """Frames lost on the line towards the switch."""

    def depth(self, queue: int) -> int:
        """Return how many packets wait in a queue."""

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss."""


class Departure(NamedTuple):
    """A packet at the head of the line, with what egress is told about its wait."""

    packet: bytearray
    carry: Any
    queue: int
    start_ns: int
    """When it left its queue."""
    enqueued_ns: int
    enq_depth: int
    """Packets in the queue when it came, itself not counted."""
    deq_depth: int
    """Packets in the queue when it left, itself not counted."""


class PortQueues:
    """The queues of one port and the line behind them.

    The caller asks for departures that are due, lets egress edit each, and puts it on the line; what has reached the
    far end is collected with :meth:`arrivals`::

        while departure := queues.dequeue(now_ns):
            ...
            queues.transmit(departure.packet, departure.queue)
        for packet in queues.arrivals(now_ns): ...

    Departures that are due must be taken before a later packet is enqueued, else that packet competes for a place
    that was given away before it came.
    """

    def __init__(self, queueing: PortQueueing | None = None) -> None:
        self._waiting: tuple[deque[tuple[bytearray, Any, int, int]], ...] = tuple(deque() for _ in range(QUEUES))
        self._busy = 0
        """Bit q is set while queue q holds a packet."""
        self._held_packets = 0
        self._held_bytes = 0
        self._free_ns = 0
        """When the line has sent the last bit of what it was given."""
        self._fraction = 0
        """What integer nanoseconds left over of that time, in units of 1/rate ns."""
        self._line: deque[tuple[int, bytearray]] = deque()
        self.enqueued = [0] * QUEUES
        """Packets accepted, per queue."""
        self.transmitted = [0] * QUEUES
        """Packets sent, per queue."""
        self.transmitted_bytes = [0] * QUEUES
        self.tail_drops = [0] * QUEUES
        """Packets refused because the queue or the port was full, per queue."""
        self.egress_drops = [0] * QUEUES
        """Packets that the program dropped in egress, per queue."""
        self.max_depth = [0] * QUEUES
        """The longest each queue has been, in packets."""
        self.lost = 0
        """Frames lost on the line away from the switch."""
        self.lost_arriving = 0
        """Frames lost on the line towards the switch."""
        self.configure(queueing or PortQueueing())

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss; what waits already stays, even above a new depth."""
        self.queueing = queueing
        self._rate_bps = queueing.rate_bps
        self._depths = queueing.depths()
        self._limit_packets = NEVER_NS if queueing.limit_packets is None else queueing.limit_packets
        self._limit_bytes = NEVER_NS if queueing.limit_bytes is None else queueing.limit_bytes
        self._delay_ns = round(queueing.delay_s * 1e9)
        self._fraction = 0
        self._loss = loss_threshold(queueing.loss)
        self._random = loss_seed(queueing.seed)

    def clear(self) -> None:
        """Drop all packets that wait; they count as dropped in egress. What is on the line arrives."""
        for queue, waiting in enumerate(self._waiting):
            self.egress_drops[queue] += len(waiting)
            waiting.clear()
        self._busy = self._held_packets = self._held_bytes = 0

    def adopt(self, before: "QueueCounters") -> None:
        """Go on counting where another one has stopped."""
        for name in COUNTED:
            setattr(self, name, list(getattr(before, name)))
        self.lost, self.lost_arriving = before.lost, before.lost_arriving

    def depth(self, queue: int) -> int:
        """Return how many packets wait in a queue."""
        return len(self._waiting[queue])

    def enqueue(self, packet: bytearray, carry: Any, queue: int, now_ns: int) -> bool:
        """Let a packet wait in a queue; False when it was dropped because there is no room."""
        waiting = self._waiting[queue]
        depth = len(waiting)
        held_bytes = self._held_bytes + len(packet)
        is_full = self._held_packets >= self._limit_packets or held_bytes > self._limit_bytes
        if depth >= self._depths[queue] or (depth and is_full):
            self.tail_drops[queue] += 1
            return False
        if not self._busy and now_ns > self._free_ns:
            self._free_ns = now_ns
            self._fraction = 0
        waiting.append((packet, carry, now_ns, depth))
        self._busy |= 1 << queue
        self._held_packets += 1
        self._held_bytes = held_bytes
        self.enqueued[queue] += 1
        if depth >= self.max_depth[queue]:
            self.max_depth[queue] = depth + 1
        return True

    def dequeue(self, now_ns: int) -> Departure | None:
        """Take the next packet of the most urgent queue, if the line is free for it by now."""
        busy = self._busy
        if not busy or self._free_ns > now_ns:
            return None
        queue = _MOST_URGENT[busy]
        waiting = self._waiting[queue]
        packet, carry, enqueued_ns, enq_depth = waiting.popleft()
        depth = len(waiting)
        if not depth:
            self._busy = busy & ~(1 << queue)
        self._held_packets -= 1
        self._held_bytes -= len(packet)
        # Found occupied, the line cannot have been free before the packet came; found idle, enqueue moved its clock on.
        return Departure(packet, carry, queue, self._free_ns, enqueued_ns, enq_depth, depth)

    def transmit(self, packet: bytearray, queue: int) -> None:
        """Give the line the packet that was dequeued last; it is at the far end when its last bit is."""
        size = len(packet)
        self._occupy(size)
        self.transmitted[queue] += 1
        self.transmitted_bytes[queue] += size
        if self._loss and self._loses():
            self.lost += 1
            return
        self._line.append((self._free_ns + self._delay_ns, packet))

    def discard(self, packet: bytearray, queue: int) -> None:
        """Note that egress dropped the packet that was dequeued last. Its turn on the line is gone, as in hardware."""
        self._occupy(len(packet))
        self.egress_drops[queue] += 1

    def arrivals(self, now_ns: int) -> list[bytearray]:
        """Return the packets that have reached the far end of the line by now, oldest first."""
        line = self._line
        arrived = []
        while line and line[0][0] <= now_ns:
            arrived.append(line.popleft()[1])
        return arrived

    def loses_arriving(self) -> bool:
        """Say whether the line loses the next frame on its way to the switch."""
        if self._loss and self._loses():
            self.lost_arriving += 1
            return True
        return False

    def wake_ns(self) -> int:
        """Return when there is something to do next: a departure or an arrival; ``NEVER_NS`` when all is empty."""
        wake = self._free_ns if self._busy else NEVER_NS
        line = self._line
        if line and line[0][0] < wake:
            return line[0][0]
        return wake

    def _loses(self) -> bool:
        self._random = self._random * LOSS_MULTIPLIER % LOSS_MODULUS
        return self._random < self._loss

    def _occupy(self, size: int) -> None:
        if self._rate_bps:
            taken, self._fraction = divmod(size * 8_000_000_000 + self._fraction, self._rate_bps)
            self._free_ns += taken
