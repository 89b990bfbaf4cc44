# SPDX-License-Identifier: Apache-2.0
"""The traffic managers of all ports as arrays, for Numba; `dlcp.switch.ports.queues` is the same with objects.

All functions are plain Python that Numba can compile; `dlcp.switch.executor.source` uses their source. A packet is a
row of bytes; its number is its *slot*. One array holds a row of numbers for each slot, another one for each port; the
names below are their columns. Queued packets form linked lists of slots, and so do packets on the line.

Both implementations must agree in every packet, time and counter; a test compares them.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.ports.queues import (
    COUNTED,
    LOSS_MODULUS,
    LOSS_MULTIPLIER,
    NEVER_NS,
    QUEUES,
    PortQueueing,
    QueueCounters,
    loss_seed,
    loss_threshold,
)

Numbers = NDArray[np.int64]

# Columns of a slot.
LENGTH: Final = 0
"""Bytes of the packet."""
QUEUE: Final = 1
ENQUEUED_NS: Final = 2
ENQ_DEPTH: Final = 3
NEXT: Final = 4
"""The next slot in the queue or on the line, -1 for none."""
DUE_NS: Final = 5
"""Time of arrival at the far end of the line."""
SLOT_CELLS: Final = 6

# Columns of a port. Its configuration:
NUMBER: Final = 0
RATE_BPS: Final = 1
DELAY_NS: Final = 2
LIMIT_PACKETS: Final = 3
LIMIT_BYTES: Final = 4
LOSS: Final = 5
"""Number of the LOSS_MODULUS possible draws that lose a frame."""
# Its state:
BUSY: Final = 6
HELD_PACKETS: Final = 7
HELD_BYTES: Final = 8
FREE_NS: Final = 9
FRACTION: Final = 10
RANDOM: Final = 11
LINE_HEAD: Final = 12
LINE_TAIL: Final = 13
OUT: Final = 14
"""Packets that have reached the far end and wait to be sent."""
# Its counters:
LOST: Final = 15
LOST_ARRIVING: Final = 16
INGRESS_DROPS: Final = 17
# First of eight columns, one per queue:
DEPTH: Final = 18
WAITING: Final = 26
HEAD: Final = 34
TAIL: Final = 42
ENQUEUED: Final = 50
TRANSMITTED: Final = 58
TRANSMITTED_BYTES: Final = 66
TAIL_DROPS: Final = 74
EGRESS_DROPS: Final = 82
MAX_DEPTH: Final = 90
PORT_CELLS: Final = 98

# Values for the whole switch.
WAKE_NS: Final = 0
"""Time of the next departure or arrival."""
NO_PORT: Final = 1
LATE_NS: Final = 2
TREATED_NS: Final = 3
"""Time up to which everything has been processed; no packet arrives before it."""
READY_COUNT: Final = 4
"""Number of ports with packets in OUT; their places follow."""
TOTAL_CELLS: Final = 5

# Columns of received packets.
SLOT: Final = 0
PLACE: Final = 1
"""Row of the port in the array of ports."""
CAME_NS: Final = 2
BYTES: Final = 3
ARRIVED_CELLS: Final = 4


def loses(port: Any) -> bool:
    """Draw whether the line loses the next frame."""
    port[RANDOM] = port[RANDOM] * LOSS_MULTIPLIER % LOSS_MODULUS
    return bool(port[RANDOM] < port[LOSS])


def enqueue(port: Any, slots: Any, slot: int, queue: int, now_ns: int) -> bool:
    """Enqueue a packet; return False if it was dropped because the queue or the port is full."""
    depth = port[WAITING + queue]
    held_bytes = port[HELD_BYTES] + slots[slot, LENGTH]
    is_full = port[HELD_PACKETS] >= port[LIMIT_PACKETS] or held_bytes > port[LIMIT_BYTES]
    if depth >= port[DEPTH + queue] or (depth > 0 and is_full):
        port[TAIL_DROPS + queue] += 1
        return False
    if port[BUSY] == 0 and now_ns > port[FREE_NS]:
        port[FREE_NS] = now_ns
        port[FRACTION] = 0
    slots[slot, QUEUE] = queue
    slots[slot, ENQUEUED_NS] = now_ns
    slots[slot, ENQ_DEPTH] = depth
    slots[slot, NEXT] = -1
    if depth == 0:
        port[HEAD + queue] = slot
    else:
        slots[port[TAIL + queue], NEXT] = slot
    port[TAIL + queue] = slot
    port[WAITING + queue] = depth + 1
    port[BUSY] |= 1 << queue
    port[HELD_PACKETS] += 1
    port[HELD_BYTES] = held_bytes
    port[ENQUEUED + queue] += 1
    if depth >= port[MAX_DEPTH + queue]:
        port[MAX_DEPTH + queue] = depth + 1
    return True


def dequeue(port: Any, slots: Any, now_ns: int) -> int:
    """Remove and return the next packet of the most urgent queue; -1 if there is none or the line is busy."""
    if port[BUSY] == 0 or port[FREE_NS] > now_ns:
        return -1
    queue = 7
    while not port[BUSY] >> queue & 1:
        queue -= 1
    slot = port[HEAD + queue]
    port[HEAD + queue] = slots[slot, NEXT]
    port[WAITING + queue] -= 1
    if port[WAITING + queue] == 0:
        port[BUSY] &= ~(1 << queue)
    port[HELD_PACKETS] -= 1
    port[HELD_BYTES] -= slots[slot, LENGTH]
    return int(slot)


def occupy(port: Any, size: int) -> None:
    """Keep the line busy for the transmission time of ``size`` bytes."""
    if port[RATE_BPS]:
        bits = size * 8_000_000_000 + port[FRACTION]
        port[FREE_NS] += bits // port[RATE_BPS]
        port[FRACTION] = bits % port[RATE_BPS]


def transmit(port: Any, slots: Any, slot: int) -> bool:
    """Put the packet dequeued last on the line; return False if the line lost it."""
    queue = slots[slot, QUEUE]
    occupy(port, slots[slot, LENGTH])
    port[TRANSMITTED + queue] += 1
    port[TRANSMITTED_BYTES + queue] += slots[slot, LENGTH]
    if port[LOSS] and loses(port):
        port[LOST] += 1
        return False
    slots[slot, DUE_NS] = port[FREE_NS] + port[DELAY_NS]
    slots[slot, NEXT] = -1
    if port[LINE_HEAD] < 0:
        port[LINE_HEAD] = slot
    else:
        slots[port[LINE_TAIL], NEXT] = slot
    port[LINE_TAIL] = slot
    return True


def discard(port: Any, slots: Any, slot: int) -> None:
    """Count the packet dequeued last as an egress drop. It still occupies the line, as in hardware."""
    occupy(port, slots[slot, LENGTH])
    port[EGRESS_DROPS + slots[slot, QUEUE]] += 1


def hand_over(port: Any, slots: Any, out: Any, now_ns: int) -> bool:
    """Move the packets that have reached the far end of the line by ``now_ns`` to ``out``, oldest first.

    Returns
    -------
    True if ``out`` was empty before and no longer is.
    """
    before = port[OUT]
    while port[LINE_HEAD] >= 0 and slots[port[LINE_HEAD], DUE_NS] <= now_ns:
        slot = port[LINE_HEAD]
        port[LINE_HEAD] = slots[slot, NEXT]
        out[port[OUT]] = slot
        port[OUT] += 1
    return bool(before == 0 and port[OUT] > 0)


def wake_ns(port: Any, slots: Any) -> int:
    """Return the time of the next departure or arrival; NEVER_NS if there is none."""
    wake = NEVER_NS
    if port[BUSY]:
        wake = port[FREE_NS]
    if port[LINE_HEAD] >= 0 and slots[port[LINE_HEAD], DUE_NS] < wake:
        wake = slots[port[LINE_HEAD], DUE_NS]
    return int(wake)


def give_back(spare: Any, slot: int) -> None:
    """Push a slot on the stack of free slots; its first element is their number."""
    spare[0] += 1
    spare[spare[0]] = slot


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


def new_port(number: int, queueing: PortQueueing) -> Numbers:
    """Return the row of an empty port."""
    port = np.zeros(PORT_CELLS, np.int64)
    port[NUMBER] = number
    port[[LINE_HEAD, LINE_TAIL]] = -1
    configure(port, queueing)
    return port


def configure(port: Numbers, queueing: PortQueueing) -> None:
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

    def __get__(self, columns: "PortColumns", owner: type | None = None) -> list[int]:
        values: list[int] = columns._port[self.column : self.column + QUEUES].tolist()
        return values


class PortColumns:
    """The counters of one port, with the names of `dlcp.switch.ports.queues.PortQueues`.

    Parameters
    ----------
    port
        The port's row; a view, not copied.
    """

    max_depth = _EachQueue(MAX_DEPTH)
    enqueued = _EachQueue(ENQUEUED)
    transmitted = _EachQueue(TRANSMITTED)
    transmitted_bytes = _EachQueue(TRANSMITTED_BYTES)
    tail_drops = _EachQueue(TAIL_DROPS)
    egress_drops = _EachQueue(EGRESS_DROPS)

    def __init__(self, port: Numbers, queueing: PortQueueing) -> None:
        self._port = port
        self.queueing = queueing

    def configure(self, queueing: PortQueueing) -> None:
        """Change rate, depths, delay and loss; queued packets stay, even above a new depth."""
        self.queueing = queueing
        configure(self._port, queueing)

    def clear(self) -> None:
        """Drop all queued packets, counted as egress drops. Packets on the line still arrive."""
        port = self._port
        port[EGRESS_DROPS : EGRESS_DROPS + QUEUES] += port[WAITING : WAITING + QUEUES]
        port[WAITING : WAITING + QUEUES] = 0
        port[[BUSY, HELD_PACKETS, HELD_BYTES]] = 0

    def adopt(self, before: QueueCounters) -> None:
        """Continue the counts of another port's queues."""
        for name in COUNTED:
            column = vars(PortColumns)[name].column
            self._port[column : column + QUEUES] = getattr(before, name)
        self._port[LOST], self._port[LOST_ARRIVING] = before.lost, before.lost_arriving

    def depth(self, queue: int) -> int:
        """Return the number of packets in a queue."""
        return int(self._port[WAITING + queue])

    @property
    def lost(self) -> int:
        """Frames lost on the line away from the switch."""
        return int(self._port[LOST])

    @property
    def lost_arriving(self) -> int:
        """Frames lost on the line towards the switch."""
        return int(self._port[LOST_ARRIVING])
