# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory: arrays of rows, their fields, and the record that holds them all.

Passing arrays one by one costs more than most functions do with them, and so does reference counting. So every function
takes one record, ``w`` (the world): the addresses and lengths of all arrays, and the network-wide numbers.
``packets_of(w)`` turns such an address into an array, which takes a load or two. The owner of the record,
`dlcp.sim.engines.kernel.kernel_engine`, has to keep the arrays alive.

Lists link rows by index, and -1 ends them. Rows fill whole cache lines, and the fields that every packet needs come
first: with a thousand hosts, the kernel is bound by memory latency.

Rows have the same names everywhere: ``x`` a packet, ``r`` a transmission, ``s`` a stream, ``m`` a message, ``t`` the
rules of a transport, ``p`` a port, ``q`` a queue. ``packet``, ``stream``, ``message`` and so on are their indices.
"""

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dlcp.sim import rows
from dlcp.sim.arithmetic import GOLDEN
from dlcp.sim.engines.network_tables import SWITCH_RULES_ROW, TRANSPORT_ROW
from dlcp.sim.graphs.graph import row_type
from dlcp.sim.jit import call
from dlcp.sim.rows import LIST, Row, i1, i4, i8, u1, u4


class EventKind(IntEnum):
    """Event types, whose numbers name a packet, port, message, stream, port and message, in this order."""

    ARRIVE = 0
    PORT_FREE = 1
    BEGIN = 2
    STREAM_TIMER = 3
    PULL_DUE = 4
    PROBE_DUE = 5


# An event's key: its insertion number, its kind, and the number of its packet, port, stream or message. So events of
# the same instant are in the order of insertion, and keys are unique.
ID_BITS: Final = 26
KIND_BITS: Final = 3
ID_MASK: Final = (1 << ID_BITS) - 1
KIND_MASK: Final = (1 << KIND_BITS) - 1
SEQUENCE_SHIFT: Final = ID_BITS + KIND_BITS
SEQUENCE_MAX: Final = 1 << (62 - SEQUENCE_SHIFT)
"""Insertions after which the waiting events are renumbered: half of the range of a key."""

# State of a packet of a message: drop class in bits 0-2, the sender's state in bits 3-5, whether it has arrived, and
# whether it arrived before its message was done. The last bit without the one before means that only its headers have
# arrived. A hole is a lost packet that is not retransmitted unless the receiver
# needs it.
CLASS_MASK: Final = 0x07
STATE_MASK: Final = 0x38
STATE_UNSENT, STATE_IN_FLIGHT, STATE_ACKED, STATE_LOST, STATE_HOLE = 0x00, 0x08, 0x10, 0x18, 0x20
STATE_RECEIVED: Final = 0x40
STATE_DELIVERED: Final = 0x80


EVENTS_PER_CALL: Final = 1 << 22
"""Events after which the compiled loop returns to Python, which only then handles signals: less than a second."""
SPARE_ROWS: Final = 16
"""Rows of each array that one event may need, in addition to a stream's packets in flight and a node's followers."""


SWITCH_ROW: Final = row_type((i8, "random salt used"), (i4, "turn divisor"))

PORT_ROW: Final = row_type(
    (i8, "busy_until delay sent_bytes bytes bytes_max"),
    (i4, "kibibyte_ps node target"),
    (LIST, "control"),
    (u1, "nonempty"),
    (i1, "pending lossy pulling"),
    (i8, "loss random pull_next"),
    (LIST, "pulls spare_pulls"),
    (i8, "unused1 unused2 unused3"),
)
"""One direction of a link; the first cache line has the fields that every packet needs. ``nonempty`` has a bit for each
queue. ``pending``: a PORT_FREE event is scheduled. ``lossy``: ``loss`` is above 0."""

QUEUE_ROW: Final = row_type((i4, "head tail packets depth"), (i8, "waiting_bytes unused"))
"""A queue of a port, at ``port * PORT_QUEUES + queue``. At a host, ``head`` to ``tail`` are streams that are ready to
send; at a switch they are packets. ``depth`` is the register with the queue depth that the P4 program reads."""

SLOT_ROW: Final = row_type((u4, "owner used spent"))
"""A switch's slot for a drop budget: the P4 program's three registers."""

EVENT_ROW: Final = row_type((i8, "time key next"))
"""An event in the list of its bucket, or an unused row."""


def _make_pointer(typingctx: Any, address: Any) -> Any:
    """Convert an address to a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_carray: Any = numba.carray  # type: ignore[attr-defined]  # it is exported, but not declared so
_pointer: Any = intrinsic(_make_pointer)
ARRAYS: Final[dict[str, np.dtype[Any]]] = {}
"""The type of each array's rows, by the array's name. Arrays have one dimension here."""


def _array(name: str, row_type: Any) -> Any:
    """Declare an array; return the compiled function that turns its address in the record into the array."""
    at, length, row = f"{name}_at", f"{name}_len", np.dtype(row_type)
    ARRAYS[name] = row

    def array_of(w: Row) -> Row:
        return _carray(_pointer(w[at]), w[length], row)

    return call(array_of)


times_of = _array("times", i8)
keys_of = _array("keys", i8)
far_times_of = _array("far_times", i8)
far_keys_of = _array("far_keys", i8)
events_of = _array("events", EVENT_ROW)
buckets_of = _array("buckets", i4)
occupied_of = _array("occupied", i8)
ports_of = _array("ports", PORT_ROW)
queues_of = _array("queues", QUEUE_ROW)
packets_of = _array("packets", rows.PACKET_ROW)
switches_of = _array("switches", SWITCH_ROW)
slots_of = _array("slots", SLOT_ROW)
streams_of = _array("streams", rows.STREAM_ROW)
messages_of = _array("messages", rows.MESSAGE_ROW)
graphs_of = _array("graphs", rows.GRAPH_ROW)
followers_of = _array("followers", i4)
completions_of = _array("completions", i8)
transmissions_of = _array("transmissions", rows.TRANSMISSION_ROW)
states_of = _array("states", u1)
transports_of = _array("transports", TRANSPORT_ROW)
profiles_of = _array("profiles", u1)
route_row_of = _array("route_row", i4)
route_cells_of = _array("route_cells", i4)
route_first_of = _array("route_first", i4)
route_targets_of = _array("route_targets", i4)
choices_of = _array("choices", i4)
rules_of = _array("rules", SWITCH_RULES_ROW)
counts_of = _array("counts", i8)

WORLD: Final = row_type(
    (i8, "now sequence heap_length far_length bucketed events_waiting bucket_now bucket_shift free_event prefetched"),
    (i8, "free_packet_head free_packets free_transmission_head free_transmissions serial completed hosts free_stream"),
    (i8, "in_flight_max followers_max"),
    *((i8, f"{name}_at {name}_len") for name in ARRAYS),
)
"""Network-wide numbers, then addresses and lengths of the arrays. ``free_packet_head`` is the first of ``free_packets``
unused packets, and so on. ``completed`` counts rows of ``completions``. ``in_flight_max`` and ``followers_max`` bound
the rows that one event may need."""


def bind(world: Any, name: str, array: NDArray[Any]) -> None:
    """Store an array's address in the record. The array has to be contiguous and of the right type."""
    if array.dtype != ARRAYS[name] or not array.flags.c_contiguous:
        raise TypeError(f"{name} has to be a contiguous array of {ARRAYS[name]}, got one of {array.dtype}")
    world[f"{name}_at"] = array.ctypes.data
    world[f"{name}_len"] = array.size


_MULTIPLIER: Final = GOLDEN - (1 << 64)
_BELOW_57: Final = (1 << 57) - 1
_BELOW_31: Final = (1 << 31) - 1


@call
def append(rows: Row, listed: Row, index: int) -> None:
    """Append a row to a list, or to a queue."""
    rows[index].next = -1
    if listed.head < 0:
        listed.head = index
    else:
        rows[listed.tail].next = index
    listed.tail = index


@call
def draw(row: Row) -> int:
    """Return 31 random bits, and advance the generator in ``row.random``, as in `dlcp.sim.arithmetic.draw`.

    Numba's 64-bit integers are signed, so the copies of the sign bit after ``>>`` have to be masked.
    """
    state = row.random
    state ^= state << 13
    state ^= (state >> 7) & _BELOW_57
    state ^= state << 17
    row.random = state
    return (state >> 33) & _BELOW_31


@call
def mix(value: int, salt: int) -> int:
    """Hash a value and a salt to 31 bits, as in `dlcp.sim.arithmetic.mix`."""
    return (((value ^ salt) * _MULTIPLIER) >> 33) & _BELOW_31
