# SPDX-License-Identifier: Apache-2.0
"""The traffic manager of one port: eight strict-priority queues in front of a line with a rate.

The caller passes in the time in nanoseconds; nothing here reads a clock. The line keeps its own virtual clock: a packet
departs at the time it was due even if the caller is late, so the average rate is exact. An idle line accumulates no
credit.

Depths are those that BMv2's simple_switch reports: ``enq_qdepth`` is the queue length before the packet joins,
``deq_qdepth`` the length after it has left (simple_switch.cpp, ``enqueue`` and ``egress_thread``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

QUEUES: Final = 8
"""Queues of a port; 7 is the most urgent."""
DEPTH_PACKETS: Final = 64
"""Default depth of a queue, as in BMv2."""
NEVER_NS: Final = 1 << 62
"""A time that is never reached (146 years)."""
SERVE_EVERY_PACKETS: Final = 8
"""Arrivals of one instant after which the departures due at that instant are processed: few relative to a queue's
depth, so that a port without a rate limit drops nothing."""

LOSS_MODULUS: Final = 2**31 - 1
LOSS_MULTIPLIER: Final = 48_271
"""Random loss: the generator of Park and Miller (CACM 36(7), 1993), identical in plain and compiled code."""

COUNTED: Final = ("max_depth", "enqueued", "transmitted", "transmitted_bytes", "tail_drops", "egress_drops")
"""Counters of each queue: their names in `QueueCounters` and in snapshots."""

_MOST_URGENT = tuple(mask.bit_length() - 1 for mask in range(1 << QUEUES))


def loss_threshold(loss: float) -> int:
    """Return the threshold below which a draw of 1..LOSS_MODULUS - 1 loses the frame."""
    return round(loss * (LOSS_MODULUS - 1)) + 1 if loss else 0


def loss_seed(seed: int) -> int:
    """Return the generator's initial state for a seed; neighbouring seeds start far apart."""
    state = seed * 2_654_435_761 % (LOSS_MODULUS - 1) + 1
    for _ in range(3):
        state = state * LOSS_MULTIPLIER % LOSS_MODULUS
    return state


@dataclass(frozen=True)
class PortQueueing:
    """Queueing and line of a port.

    Parameters
    ----------
    rate_bps
        Line rate in bit/s over whole frames: Ethernet header to the end of the payload. 0 means unlimited.
    depth_packets
        Capacity of each queue in packets: one number for all, or eight, queue 0 first.
    limit_packets, limit_bytes
        Capacity of all queues of the port together, as in a switch with a small buffer per port; None: unlimited.
        An empty queue accepts a packet regardless: switches reserve a place for each queue, and the program relies on
        a tail drop happening only in a queue that holds packets.
    delay_s
        Propagation delay of the line away from the switch, in seconds.
    loss
        Fraction of frames that the line loses at random in each direction, 0..1: a failing cable.
    seed
        Seed of the random loss.
    """

    rate_bps: int = 0
    depth_packets: int | tuple[int, ...] = DEPTH_PACKETS
    limit_packets: int | None = None
    limit_bytes: int | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.rate_bps < 0:
            raise ValueError(f"rate_bps is {self.rate_bps}; give a positive rate, or 0 for no limit")
        if isinstance(self.depth_packets, Sequence) and len(self.depth_packets) != QUEUES:
            raise ValueError(f"depth_packets has {len(self.depth_packets)} numbers; give one for all queues, or 8")
        if min(self.depths()) < 0:
            raise ValueError(f"depth_packets is {self.depth_packets}; give 0 or more packets")
        for name, limit in (("limit_packets", self.limit_packets), ("limit_bytes", self.limit_bytes)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}; give 0 or more, or omit it for no limit")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss}; give the fraction of frames lost, 0..1")
        if self.delay_s < 0:
            raise ValueError(f"delay_s is {self.delay_s}; give 0 or more seconds")

    def depths(self) -> tuple[int, ...]:
        """Return the depth of each of the eight queues in packets, queue 0 first."""
        depth = self.depth_packets
        return (depth,) * QUEUES if isinstance(depth, int) else tuple(depth)


class QueueCounters(Protocol):
    """Counters of a port's queues; lists have one number per queue."""

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
        """Packets that the program dropped in egress, or that were queued when it was replaced."""

    @property
    def max_depth(self) -> list[int]:
        """Maximum length of each queue, in packets."""

    @property
    def lost(self) -> int:
        """Frames lost on the line away from the switch."""

    @property
    def lost_arriving(self) -> int:
        """Frames lost on the line towards the switch."""

    def depth(self, queue: int) -> int:
        """Return the number of packets in a queue."""

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss."""


class Departure(NamedTuple):
    """A dequeued packet, with the queueing metadata for egress."""

    packet: bytearray
    carry: Any
    queue: int
    start_ns: int
    """Time at which it left its queue."""
    enqueued_ns: int
    enq_depth: int
    """Packets in the queue when it was enqueued, excluding itself."""
    deq_depth: int
    """Packets in the queue after it was dequeued."""


class PortQueues:
    """The queues of one port and the line behind them.

    The caller dequeues due packets, lets egress edit each, and puts it on the line. :meth:`arrivals` returns the
    packets that have reached the far end::

        while departure := queues.dequeue(now_ns):
            ...
            queues.transmit(departure.packet, departure.queue)
        for packet in queues.arrivals(now_ns): ...

    Dequeue all due packets before enqueueing a later one. Otherwise it competes for the line with packets that should
    already have left.
    """

    def __init__(self, queueing: PortQueueing | None = None) -> None:
        self._waiting: tuple[deque[tuple[bytearray, Any, int, int]], ...] = tuple(deque() for _ in range(QUEUES))
        self._busy = 0
        """Bit q is set while queue q holds a packet."""
        self._held_packets = 0
        self._held_bytes = 0
        self._free_ns = 0
        """Time at which the line becomes free."""
        self._fraction = 0
        """Remainder of `_free_ns` below a nanosecond, in units of 1/rate ns."""
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
        """Maximum length of each queue, in packets."""
        self.lost = 0
        """Frames lost on the line away from the switch."""
        self.lost_arriving = 0
        """Frames lost on the line towards the switch."""
        self.configure(queueing or PortQueueing())

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss; queued packets stay, even above a new depth."""
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
        """Drop all queued packets, counted as egress drops. Packets on the line still arrive."""
        for queue, waiting in enumerate(self._waiting):
            self.egress_drops[queue] += len(waiting)
            waiting.clear()
        self._busy = self._held_packets = self._held_bytes = 0

    def adopt(self, before: "QueueCounters") -> None:
        """Continue the counts of another port's queues."""
        for name in COUNTED:
            setattr(self, name, list(getattr(before, name)))
        self.lost, self.lost_arriving = before.lost, before.lost_arriving

    def depth(self, queue: int) -> int:
        """Return the number of packets in a queue."""
        return len(self._waiting[queue])

    def enqueue(self, packet: bytearray, carry: Any, queue: int, now_ns: int) -> bool:
        """Enqueue a packet; return False if it was dropped because the queue or the port is full."""
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
        """Remove and return the next packet of the most urgent queue, or None while the line is busy."""
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
        # _free_ns is never before the packet was enqueued: enqueue advances the clock of an idle line.
        return Departure(packet, carry, queue, self._free_ns, enqueued_ns, enq_depth, depth)

    def transmit(self, packet: bytearray, queue: int) -> None:
        """Put the packet dequeued last on the line; it arrives when its last bit does."""
        size = len(packet)
        self._occupy(size)
        self.transmitted[queue] += 1
        self.transmitted_bytes[queue] += size
        if self._loss and self._loses():
            self.lost += 1
            return
        self._line.append((self._free_ns + self._delay_ns, packet))

    def discard(self, packet: bytearray, queue: int) -> None:
        """Count the packet dequeued last as an egress drop. It still occupies the line, as in hardware."""
        self._occupy(len(packet))
        self.egress_drops[queue] += 1

    def arrivals(self, now_ns: int) -> list[bytearray]:
        """Return the packets that have reached the far end of the line by ``now_ns``, oldest first."""
        line = self._line
        arrived = []
        while line and line[0][0] <= now_ns:
            arrived.append(line.popleft()[1])
        return arrived

    def loses_arriving(self) -> bool:
        """Draw whether the line loses the next frame towards the switch, and count it if so."""
        if self._loss and self._loses():
            self.lost_arriving += 1
            return True
        return False

    def wake_ns(self) -> int:
        """Return the time of the next departure or arrival; ``NEVER_NS`` if there is none."""
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
