# SPDX-License-Identifier: Apache-2.0
"""Another implementation of queues, lines and the loop around a program, with objects; the switch must agree with it.

`dlcp.switch.queues` and `dlcp.switch.forwarding` do the same over tables of numbers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dlcp.switch import DROP_PORT, PortGroup, PortQueueing, Switch
from dlcp.switch.forwarding import BURST_PACKETS, PacketProgram
from dlcp.switch.queues import (
    COUNTED,
    LOSS_MODULUS,
    LOSS_MULTIPLIER,
    NEVER_NS,
    QUEUES,
    SERVE_EVERY_PACKETS,
    loss_seed,
    loss_threshold,
)

_MOST_URGENT = tuple(mask.bit_length() - 1 for mask in range(1 << QUEUES))


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


class ObjectQueues:
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
        self._capacity = queueing.depths()
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

    def adopt(self, before: Any) -> None:
        """Continue the counts of another port's queues."""
        for name in COUNTED:
            setattr(self, name, list(getattr(before, name)))
        self.lost, self.lost_arriving = before.lost, before.lost_arriving

    @property
    def depths(self) -> list[int]:
        """Packets that wait now."""
        return [len(waiting) for waiting in self._waiting]

    def enqueue(self, packet: bytearray, carry: Any, queue: int, now_ns: int) -> bool:
        """Enqueue a packet; return False if it was dropped because the queue or the port is full."""
        waiting = self._waiting[queue]
        depth = len(waiting)
        held_bytes = self._held_bytes + len(packet)
        is_full = self._held_packets >= self._limit_packets or held_bytes > self._limit_bytes
        if depth >= self._capacity[queue] or (depth and is_full):
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


class ObjectForwarding:
    """Forwards one packet at a time.

    Parameters
    ----------
    program
        Decides what happens to a packet.
    group_of
        The ports, by number.
    queueing
        How each port queues and sends.
    now_ns
        The switch's clock.
    """

    def __init__(
        self,
        program: PacketProgram,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
    ) -> None:
        self._ingress, self._egress = program.ingress, program.egress
        self._group_of = group_of
        self._group_of_fileno = {fileno: group for group in group_of.values() for fileno in group.filenos()}
        self._now_ns = now_ns
        self.queues = {port: ObjectQueues(queueing.get(port)) for port in group_of}
        self.ingress_drops = dict.fromkeys(group_of, 0)
        self.no_port = 0
        self.wake_ns = NEVER_NS
        """Time of the next departure or arrival."""
        self.late_max_ns = 0
        self._active: set[int] = set()
        """Ports with a packet in a queue or on the line."""
        self._arrived: dict[int, list[bytearray]] = {}

    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""
        count = 0
        for fileno in filenos:
            burst = self._group_of_fileno[fileno].receive(fileno, BURST_PACKETS)
            for port, packet in zip(burst.ports, burst.packets, strict=True):
                now_ns = self._now_ns()
                if self.wake_ns <= now_ns and (self.wake_ns < now_ns or count % SERVE_EVERY_PACKETS == 0):
                    self._depart(now_ns)
                self._take(port, packet, now_ns)
                count += 1
        self.serve(self._now_ns())

    def serve(self, now_ns: int) -> None:
        """Process all departures and arrivals due by ``now_ns``."""
        if self.wake_ns <= now_ns:
            self._depart(now_ns)
        if self._arrived:
            arrived, self._arrived = self._arrived, {}
            for port, packets in arrived.items():
                self._group_of[port].send(port, packets)

    def finish(self) -> None:
        """Drop queued packets, counted as egress drops, and deliver the packets on a line."""
        for queues in self.queues.values():
            queues.clear()
        self.serve(NEVER_NS)

    def adopt(self, before: Any) -> None:
        """Continue the counts of another forwarding."""
        self.ingress_drops = dict(before.ingress_drops)
        self.no_port, self.late_max_ns = before.no_port, before.late_max_ns
        for port, queues in self.queues.items():
            queues.adopt(before.queues[port])

    def _take(self, port: int, packet: bytearray, now_ns: int) -> None:
        """Run ingress on a packet, and enqueue it if it is forwarded."""
        arrived_at = self.queues[port]
        if arrived_at.queueing.loss and arrived_at.loses_arriving():
            return
        egress_port, queue, carry = self._ingress(packet, port, now_ns // 1000)
        if egress_port == DROP_PORT:
            self.ingress_drops[port] += 1
            return
        queues = self.queues.get(egress_port)
        if queues is None:
            self.no_port += 1
        elif queues.enqueue(packet, carry, queue, now_ns):
            self._active.add(egress_port)
            wake_ns = queues.wake_ns()
            if wake_ns < self.wake_ns:
                self.wake_ns = wake_ns

    def _depart(self, now_ns: int) -> None:
        """Process due departures, collect arrived packets, and update `wake_ns`."""
        if now_ns - self.wake_ns > self.late_max_ns:
            self.late_max_ns = now_ns - self.wake_ns
        egress = self._egress
        next_ns = NEVER_NS
        for port in sorted(self._active):
            queues = self.queues[port]
            while departure := queues.dequeue(now_ns):
                packet, carry, queue, start_ns, enqueued_ns, enq_depth, deq_depth = departure
                start_us, enq_us = start_ns // 1000, enqueued_ns // 1000
                delta_us = start_us - enq_us
                if egress(packet, carry, port, enq_us, delta_us, enq_depth, deq_depth, start_us):
                    queues.transmit(packet, queue)
                else:
                    queues.discard(packet, queue)
            arrived = queues.arrivals(now_ns)
            if arrived:
                self._arrived.setdefault(port, []).extend(arrived)
            wake_ns = queues.wake_ns()
            if wake_ns == NEVER_NS:
                self._active.discard(port)
            elif wake_ns < next_ns:
                next_ns = wake_ns
        self.wake_ns = next_ns


class ObjectSwitch(Switch):
    """A switch that forwards with objects."""

    def _make(self, program: Any, queueing: Mapping[int, PortQueueing]) -> Any:
        return ObjectForwarding(program, self._group_of, queueing, self.now_ns)
