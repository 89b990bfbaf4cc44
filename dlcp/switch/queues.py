# SPDX-License-Identifier: Apache-2.0
"""The traffic managers of all ports: eight strict-priority queues for each, in front of a line with a rate.

The caller passes in the time in nanoseconds; nothing here reads a clock. The line keeps its own virtual clock: a packet
departs at the time it was due even if the caller is late, so the average rate is exact. An idle line accumulates no
credit.

Depths are those that BMv2's simple_switch reports: ``enq_qdepth`` is the queue length before the packet joins,
``deq_qdepth`` the length after it has left (simple_switch.cpp, ``enqueue`` and ``egress_thread``).

All state is numbers in tables: lists in plain Python, arrays under Numba. A packet has a row of bytes and a row of
numbers; its number is its *slot*. Each port has a row of numbers, too; the names below are the columns. Queued packets
form linked lists of slots, and so do packets on the line. The same functions run in plain Python and, by their source,
in the text that `dlcp.switch.executor.codegen` writes for Numba. The tests have another implementation, with objects,
which must agree in every packet, time and counter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

DROP_PORT: Final = 511
"""BMv2's default drop port; packets that leave ingress or egress for this port are dropped."""
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
"""Random loss: the generator of Park and Miller (CACM 36(7), 1993)."""

COUNTED: Final = ("max_depth", "enqueued", "transmitted", "transmitted_bytes", "tail_drops", "egress_drops")
"""Counters of each queue: their names in `PortQueues` and in snapshots."""


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


LENGTH, QUEUE, ENQUEUED_NS, ENQ_DEPTH, NEXT, DUE_NS, SLOT_CELLS = range(7)
"""Columns of a slot: bytes of the packet; its queue, and when and at which depth it was enqueued; the next slot in the
queue or on the line, -1 for none; the time of arrival at the far end of the line."""

NUMBER, RATE_BPS, DELAY_NS, LIMIT_PACKETS, LIMIT_BYTES, LOSS = range(6)
"""Columns of a port: its configuration. LOSS is the number of the LOSS_MODULUS possible draws that lose a frame."""
BUSY, HELD_PACKETS, HELD_BYTES, FREE_NS, FRACTION, RANDOM, LINE_HEAD, LINE_TAIL, OUT = range(6, 15)
"""Its state. Bit q of BUSY is set while queue q holds a packet. The line is free from FREE_NS on, plus FRACTION in
units of 1/rate ns. OUT is the number of packets that have reached the far end and wait to be sent."""
LOST, LOST_ARRIVING, INGRESS_DROPS = range(15, 18)
"""Its counters: frames lost on the line away from the switch and towards it, and packets dropped in ingress."""
(
    DEPTH,
    WAITING,
    HEAD,
    TAIL,
    ENQUEUED,
    TRANSMITTED,
    TRANSMITTED_BYTES,
    TAIL_DROPS,
    EGRESS_DROPS,
    MAX_DEPTH,
    PORT_CELLS,
) = range(18, 99, QUEUES)
"""The first of eight columns, one for each queue: capacity, packets waiting, first and last slot; and counters."""

WAKE_NS, NO_PORT, LATE_NS, TREATED_NS, READY_COUNT, TOTAL_CELLS = range(6)
"""Values for the whole switch: time of the next departure or arrival; packets to a port that does not exist; maximum
lateness of the caller; the time up to which everything has been processed, before which no packet arrives; the number
of ports with packets in OUT, whose places follow."""

SLOT, PLACE, CAME_NS, BYTES, ARRIVED_CELLS = range(5)
"""Columns of received packets; PLACE is the row of the port in the table of ports."""


def loses(port: Any) -> bool:
    """Draw whether the line loses the next frame."""
    port[RANDOM] = port[RANDOM] * LOSS_MULTIPLIER % LOSS_MODULUS
    lost: bool = port[RANDOM] < port[LOSS]
    return lost


def enqueue(port: Any, slots: Any, slot: int, queue: int, now_ns: int) -> bool:
    """Enqueue a packet; return False if it was dropped because the queue or the port is full."""
    packet, depth = slots[slot], port[WAITING + queue]
    held_bytes = port[HELD_BYTES] + packet[LENGTH]
    is_full = port[HELD_PACKETS] >= port[LIMIT_PACKETS] or held_bytes > port[LIMIT_BYTES]
    if depth >= port[DEPTH + queue] or (depth > 0 and is_full):
        port[TAIL_DROPS + queue] += 1
        return False
    if port[BUSY] == 0 and now_ns > port[FREE_NS]:
        port[FREE_NS] = now_ns
        port[FRACTION] = 0
    packet[QUEUE] = queue
    packet[ENQUEUED_NS] = now_ns
    packet[ENQ_DEPTH] = depth
    packet[NEXT] = -1
    if depth == 0:
        port[HEAD + queue] = slot
    else:
        slots[port[TAIL + queue]][NEXT] = slot
    port[TAIL + queue] = slot
    port[WAITING + queue] = depth + 1
    port[BUSY] |= 1 << queue
    port[HELD_PACKETS] += 1
    port[HELD_BYTES] = held_bytes
    port[ENQUEUED + queue] += 1
    if depth >= port[MAX_DEPTH + queue]:
        port[MAX_DEPTH + queue] = depth + 1
    return True


def dequeue(port: Any, slots: Any) -> int:
    """Remove and return the next packet of the most urgent queue. Only for a port with packets whose line is free."""
    busy, queue = port[BUSY], QUEUES - 1
    while not busy >> queue & 1:
        queue -= 1
    slot: int = port[HEAD + queue]
    packet = slots[slot]
    port[HEAD + queue] = packet[NEXT]
    port[WAITING + queue] -= 1
    if port[WAITING + queue] == 0:
        port[BUSY] = busy & ~(1 << queue)
    port[HELD_PACKETS] -= 1
    port[HELD_BYTES] -= packet[LENGTH]
    return slot


def occupy(port: Any, size: int) -> None:
    """Keep the line busy for the transmission time of ``size`` bytes."""
    if port[RATE_BPS]:
        bits = size * 8_000_000_000 + port[FRACTION]
        port[FREE_NS] += bits // port[RATE_BPS]
        port[FRACTION] = bits % port[RATE_BPS]


def transmit(port: Any, slots: Any, slot: int) -> bool:
    """Put the packet dequeued last on the line; return False if the line lost it."""
    packet = slots[slot]
    queue, size = packet[QUEUE], packet[LENGTH]
    occupy(port, size)
    port[TRANSMITTED + queue] += 1
    port[TRANSMITTED_BYTES + queue] += size
    if port[LOSS] and loses(port):
        port[LOST] += 1
        return False
    packet[DUE_NS] = port[FREE_NS] + port[DELAY_NS]
    packet[NEXT] = -1
    if port[LINE_HEAD] < 0:
        port[LINE_HEAD] = slot
    else:
        slots[port[LINE_TAIL]][NEXT] = slot
    port[LINE_TAIL] = slot
    return True


def discard(port: Any, slots: Any, slot: int) -> None:
    """Count the packet dequeued last as an egress drop. It still occupies the line, as in hardware."""
    occupy(port, slots[slot][LENGTH])
    port[EGRESS_DROPS + slots[slot][QUEUE]] += 1


def hand_over(port: Any, slots: Any, out: Any, now_ns: int) -> bool:
    """Move the packets that have reached the far end of the line by ``now_ns`` to ``out``, oldest first.

    Returns
    -------
    True if ``out`` was empty before and no longer is.
    """
    before = port[OUT]
    while port[LINE_HEAD] >= 0 and slots[port[LINE_HEAD]][DUE_NS] <= now_ns:
        slot = port[LINE_HEAD]
        port[LINE_HEAD] = slots[slot][NEXT]
        out[port[OUT]] = slot
        port[OUT] += 1
    filled: bool = before == 0 and port[OUT] > 0
    return filled


def wake_ns(port: Any, slots: Any) -> int:
    """Return the time of the next departure or arrival; NEVER_NS if there is none."""
    wake: int = NEVER_NS
    if port[BUSY]:
        wake = port[FREE_NS]
    if port[LINE_HEAD] >= 0 and slots[port[LINE_HEAD]][DUE_NS] < wake:
        wake = slots[port[LINE_HEAD]][DUE_NS]
    return wake


def give_back(spare: Any, slot: int) -> None:
    """Push a slot on the stack of free slots; its first element is their number."""
    spare[0] += 1
    spare[spare[0]] = slot


def loop(  # noqa: C901  # one branch for each path of a packet, compiled as one function
    ingress: Callable[..., tuple[int, int]],
    egress: Callable[..., int],
    compiled: Callable[[Any], Any] = lambda function: function,
) -> Callable[..., None]:
    """Return ``forward(until_ns, arrived, count, places, pool, in_state, out_state)``, the loop around a program.

    It processes received packets, in order, and all departures and arrivals due up to ``until_ns``. A packet with an
    arrival time before TREATED_NS is processed as if it had arrived at TREATED_NS. Its arguments:

    - the first ``count`` rows of ``arrived`` are processed;
    - ``places`` maps a port number to its row, -1 for no such port;
    - ``pool`` has rows of packets, columns of slots, what ingress passes to egress, the stack of free slots, columns of
      ports, values of the switch, and the packets that have reached the far end of each port's line;
    - ``in_state`` and ``out_state`` are passed to ingress and egress.

    Parameters
    ----------
    ingress, egress
        The program. Both take a packet's row, its length, the carries of all slots, its slot and the state, then the
        arguments of `Program`'s functions. Ingress sets the slot's carry, and returns egress port and queue; egress
        returns how many bytes of the packet to send, 0 for none.
    compiled
        Compiles a function.
    """

    @compiled
    def serve(now_ns: int, pool: Any, out_state: Any) -> None:
        # Process the departures and arrivals due by now_ns.
        rows, slots, carry, spare, ports, totals, out = pool
        wake = NEVER_NS
        for place in range(len(ports)):
            port = ports[place]
            if port[BUSY] == 0 and port[LINE_HEAD] < 0:
                continue
            while port[BUSY] and port[FREE_NS] <= now_ns:
                slot = dequeue(port, slots)
                packet = slots[slot]
                # FREE_NS is still the time at which the packet left its queue.
                start_us, enq_us = port[FREE_NS] // 1000, packet[ENQUEUED_NS] // 1000
                row, size, waited_us = rows[slot], packet[LENGTH], start_us - enq_us
                enq_depth, depth, number = packet[ENQ_DEPTH], port[WAITING + packet[QUEUE]], port[NUMBER]
                left = egress(row, size, carry, slot, out_state, number, enq_us, waited_us, enq_depth, depth, start_us)
                if not left:
                    discard(port, slots, slot)
                    give_back(spare, slot)
                    continue
                packet[LENGTH] = left
                if not transmit(port, slots, slot):
                    give_back(spare, slot)
            if port[LINE_HEAD] >= 0 and hand_over(port, slots, out[place], now_ns):
                totals[READY_COUNT] += 1
                totals[READY_COUNT + totals[READY_COUNT]] = place
            due = wake_ns(port, slots)
            if due < wake:
                wake = due
        totals[WAKE_NS] = wake
        totals[TREATED_NS] = max(totals[TREATED_NS], now_ns)

    @compiled
    def forward(until_ns: int, arrived: Any, count: int, places: Any, pool: Any, in_state: Any, out_state: Any) -> None:
        rows, slots, carry, spare, ports, totals, _ = pool
        totals[LATE_NS] = max(totals[LATE_NS], until_ns - totals[WAKE_NS])
        for i in range(count + 1):
            now_ns = until_ns
            if i < count:
                if arrived[i][CAME_NS] < now_ns:
                    now_ns = arrived[i][CAME_NS]
                if now_ns < totals[TREATED_NS]:
                    now_ns = totals[TREATED_NS]
            # A single call site, since Numba would compile the inlined code again for a second one.
            if totals[WAKE_NS] < now_ns or (totals[WAKE_NS] == now_ns and (i == count or i % SERVE_EVERY_PACKETS == 0)):
                serve(now_ns, pool, out_state)
            if i == count:
                break
            totals[TREATED_NS] = now_ns
            slot = arrived[i][SLOT]
            slots[slot][LENGTH] = arrived[i][BYTES]
            port = ports[arrived[i][PLACE]]
            if port[LOSS] and loses(port):
                port[LOST_ARRIVING] += 1
                give_back(spare, slot)
                continue
            row, size, now_us = rows[slot], arrived[i][BYTES], now_ns // 1000
            egress_port, queue = ingress(row, size, carry, slot, in_state, port[NUMBER], now_us)
            if egress_port == DROP_PORT:
                port[INGRESS_DROPS] += 1
                give_back(spare, slot)
                continue
            place = places[egress_port]
            if place < 0:
                totals[NO_PORT] += 1
                give_back(spare, slot)
                continue
            if not enqueue(ports[place], slots, slot, queue, now_ns):
                give_back(spare, slot)
                continue
            due = wake_ns(ports[place], slots)
            if due < totals[WAKE_NS]:
                totals[WAKE_NS] = due

    function: Callable[..., None] = forward
    return function


COMPILED: Final = (
    loses,
    enqueue,
    dequeue,
    occupy,
    transmit,
    discard,
    hand_over,
    wake_ns,
    give_back,
)
"""The functions included in compiled code, callees first."""

CONSTANTS: Final = {name: value for name, value in list(globals().items()) if name.isupper() and isinstance(value, int)}
"""The constants that those functions use."""


def new_port(number: int, queueing: PortQueueing) -> list[int]:
    """Return the row of an empty port."""
    port = [0] * PORT_CELLS
    port[NUMBER], port[LINE_HEAD], port[LINE_TAIL] = number, -1, -1
    configure(port, queueing)
    return port


def configure(port: Any, queueing: PortQueueing) -> None:
    """Change rate, depths, delay and loss; queued packets stay, even above a new depth."""
    port[RATE_BPS] = queueing.rate_bps
    port[DELAY_NS] = round(queueing.delay_s * 1e9)
    port[LIMIT_PACKETS] = NEVER_NS if queueing.limit_packets is None else queueing.limit_packets
    port[LIMIT_BYTES] = NEVER_NS if queueing.limit_bytes is None else queueing.limit_bytes
    port[LOSS] = loss_threshold(queueing.loss)
    port[RANDOM] = loss_seed(queueing.seed)
    port[FRACTION] = 0
    port[DEPTH : DEPTH + QUEUES] = queueing.depths()


class _EachQueue:
    """Descriptor of a per-queue counter, as a list; ``column`` is the first of its eight columns."""

    def __init__(self, column: int) -> None:
        self.column = column

    def __get__(self, queues: "PortQueues", owner: type | None = None) -> list[int]:
        return [int(value) for value in queues.port[self.column : self.column + QUEUES]]

    def __set__(self, queues: "PortQueues", values: Sequence[int]) -> None:
        queues.port[self.column : self.column + QUEUES] = values


class PortQueues:
    """The queues of one port: their configuration and counters. Lists have one number for each queue.

    Parameters
    ----------
    port
        The port's row; not copied.
    """

    enqueued = _EachQueue(ENQUEUED)
    """Packets accepted."""
    transmitted = _EachQueue(TRANSMITTED)
    """Packets sent."""
    transmitted_bytes = _EachQueue(TRANSMITTED_BYTES)
    tail_drops = _EachQueue(TAIL_DROPS)
    """Packets refused because the queue or the port was full."""
    egress_drops = _EachQueue(EGRESS_DROPS)
    """Packets that the program dropped in egress, or that were queued when it was replaced."""
    max_depth = _EachQueue(MAX_DEPTH)
    """Maximum length in packets."""
    depths = _EachQueue(WAITING)
    """Packets that wait now."""

    def __init__(self, port: Any, queueing: PortQueueing) -> None:
        self.port, self.queueing = port, queueing

    @property
    def lost(self) -> int:
        """Frames lost on the line away from the switch."""
        return int(self.port[LOST])

    @property
    def lost_arriving(self) -> int:
        """Frames lost on the line towards the switch."""
        return int(self.port[LOST_ARRIVING])

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss; queued packets stay, even above a new depth."""
        self.queueing = queueing
        configure(self.port, queueing)

    def clear(self) -> None:
        """Drop all queued packets, counted as egress drops. Packets on the line still arrive."""
        self.egress_drops = [drops + depth for drops, depth in zip(self.egress_drops, self.depths, strict=True)]
        self.depths = [0] * QUEUES
        self.port[BUSY] = self.port[HELD_PACKETS] = self.port[HELD_BYTES] = 0

    def adopt(self, before: "PortQueues") -> None:
        """Continue the counts of another port's queues."""
        for name in COUNTED:
            setattr(self, name, getattr(before, name))
        self.port[LOST], self.port[LOST_ARRIVING] = before.lost, before.lost_arriving
