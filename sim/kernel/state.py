# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory: arrays of rows, their fields, and the record that holds them all.

Passing arrays one by one costs more than most functions do with them, and so does reference counting. So every function
takes one record, ``w`` (the world): the addresses and lengths of all arrays, and the network-wide numbers.
``packets_of(w)`` turns such an address into an array, which takes a load or two. The owner of the record,
`dlcp.sim.kernel.kernel_engine`, has to keep the arrays alive.

Lists link rows by index, and -1 ends them. Rows fill whole cache lines, and the fields that every packet needs come
first: with a thousand hosts, the kernel is bound by memory latency.

Rows have the same names everywhere: ``x`` a packet, ``r`` a transmission, ``s`` a stream, ``m`` a message, ``t`` the
rules of a transport, ``p`` a port, ``q`` a queue. ``packet``, ``stream``, ``message`` and so on are their indices.
"""

import importlib
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import GOLDEN
from dlcp.sim.jit import AVAILABLE, call
from dlcp.sim.plan import PORT_QUEUES, SWITCH_RULES_ROW, TRANSPORT_ROW, Number, Row

i8, i4, i2, i1, f8 = np.int64, np.int32, np.int16, np.int8, np.float64


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

# State of a packet of a message: drop class in bits 0-2, the sender's state in bits 3-5, and whether it has arrived.
# A hole is a lost packet that is not retransmitted unless the receiver needs it.
CLASS_MASK: Final = 0x07
STATE_MASK: Final = 0x38
STATE_UNSENT, STATE_IN_FLIGHT, STATE_ACKED, STATE_LOST, STATE_HOLE = 0x00, 0x08, 0x10, 0x18, 0x20
STATE_RECEIVED: Final = 0x40


SPARE_ROWS: Final = 16
"""Rows of each array that one event may need, in addition to a stream's packets in flight and a node's followers."""

SWITCH_ROW: Final = np.dtype(
    [("random", i8), ("salt", i8), ("used", i8), ("turn", i4), ("divisor", i4)],
    align=True,
)

PORT_ROW: Final = np.dtype(
    [
        ("busy_until", i8),
        ("delay", i8),
        ("sent_bytes", i8),
        ("bytes", i8),
        ("bytes_max", i8),
        ("kibibyte_ps", i4),
        ("node", i4),
        ("target", i4),
        ("control_head", i4),
        ("control_tail", i4),
        ("nonempty", np.uint8),
        ("pending", i1),
        ("lossy", i1),
        ("pulling", i1),
        ("loss", i8),
        ("random", i8),
        ("pull_next", i8),
        ("pull_head", i4),
        ("pull_tail", i4),
        ("unused", i8, (4,)),
    ],
    align=True,
)
"""One direction of a link; the first cache line has the fields that every packet needs. ``nonempty`` has a bit for each
queue. ``pending``: a PORT_FREE event is scheduled. ``lossy``: ``loss`` is above 0."""

QUEUE_ROW: Final = np.dtype(
    [("head", i4), ("tail", i4), ("packets", i4), ("depth", i4), ("waiting_bytes", i8), ("unused", i8)],
    align=True,
)
"""A queue of a port, at ``port * PORT_QUEUES + queue``. At a host, ``head`` to ``tail`` are streams that are ready to
send; at a switch they are packets. ``depth`` is the register with the queue depth that the P4 program reads."""

PACKET_ROW: Final = np.dtype(
    [
        ("serial", i8),
        ("message", i4),
        ("index", i4),
        ("transmission", i4),
        ("next", i4),
        ("port", i4),
        ("target", i4),
        ("path_hash", np.uint32),
        ("size", i4),
        ("rank", i4),
        ("kind", i1),
        ("queue", i1),
        ("drop_class", i1),
        ("ecn", i1),
        ("sprayed", i1),
        ("satisfied", i1),
        ("retransmission", i1),
        ("trimmed", i1),
        ("ecn_echo", i1),
        ("unused", i8),
    ],
    align=True,
)
"""A packet in the network, or an unused row. ``satisfied`` (in an ACK or a reply to a probe): the receiver needs no
more packets of the message. ``ecn_echo``: the acknowledged packet arrived with a mark. ``rank``: the packets that its
message has left."""

TRANSMISSION_ROW: Final = np.dtype(
    [
        ("serial", i8),
        ("number", i8),
        ("sent_at", i8),
        ("message", i4),
        ("index", i4),
        ("previous", i4),
        ("next", i4),
        ("queue", i4),
        ("repeated", i4),
    ],
    align=True,
)
"""The sender's record of a packet: in flight (in a list by stream and queue) or to be retransmitted.

``serial`` is the packet's while in flight, otherwise -1, so that late acknowledgements do not match. ``number`` counts
the stream's transmissions. ``repeated``: the packet was lost before."""

STREAM_ROW: Final = np.dtype(
    [
        ("window", f8),
        ("threshold", f8),
        ("number", i8),
        ("deadline", i8),
        ("timer_at", i8),
        ("tail_due", i8),
        ("rtt", i8),
        ("rtt_var", i8),
        ("round_end", i8),
        ("source", i4),
        ("target", i4),
        ("path_hash", np.uint32),
        ("reverse_path_hash", np.uint32),
        ("in_flight", i4),
        ("next", i4),
        ("head", i4),
        ("retransmit_head", i4),
        ("repairing", i4),
        ("acked", i4),
        ("marked", i4),
        ("transport", i1),
        ("ready", i1),
        ("single_use", i1),
        ("dead", i1),
        ("probe_mode", i1),
        ("tail_probing", i1),
        ("spare", i1),
        ("backoff", i1),
        ("unused", i4),
        ("first", i4, (PORT_QUEUES,)),
        ("last", i4, (PORT_QUEUES,)),
        ("alpha", f8),
        ("recover", i8),
        ("reduced", i8),
        ("rtt_min", i8),
        ("cut_at", i8),
        ("epoch", i8),
        ("peak", f8),
        ("reno", f8),
        ("tail", i4),
        ("retransmit_tail", i4),
        ("timers", i4),
        ("credit", i4),
        ("tail_number", i8),
        ("tail_message", i4),
        ("tail_index", i4),
        ("serial", i8),
        ("unused_too", i8, (3,)),
    ],
    align=True,
)
"""A stream of messages: its window, its messages with unsent packets (``head``), its packets to be retransmitted
(``retransmit_head``), and its packets in flight by queue (``first``).

``deadline``: when all packets in flight are declared lost. ``tail_due``: when the tail is probed. ``timer_at``: time of
the only valid event among the ``timers`` scheduled. ``tail_probing``: the tail probe has not been acknowledged; its
number is ``tail_number``, and it repeats a packet of ``tail_message`` if that is not -1. ``spare``: packets allowed
beyond the window. ``repairing``: packets that were lost and not acknowledged since. ``probe_mode``: send probes instead
of data (pFabric). ``credit``: packets that NDP's PULLs have requested."""

MESSAGE_ROW: Final = np.dtype(
    [
        ("offset", i8),
        ("stream", i4),
        ("packets", i4),
        ("last_bytes", i4),
        ("next_index", i4),
        ("acked", i4),
        ("received", i4),
        ("in_flight", i4),
        ("refs", i4),
        ("sent", i4),
        ("retransmits", i4),
        ("holes", i4),
        ("transport", i1),
        ("queue", i1),
        ("bounded", i1),
        ("listed", i1),
        ("done", i1),
        ("satisfied", i1),
        ("probed", i1),
        ("filling_holes", i1),
        ("probing", i1),
        ("closed", i1),
        ("profile", i2),
        ("begin", i8),
        ("end", i8),
        ("delay", i8),
        ("order", i8),
        ("step", i8),
        ("followers", i8),
        ("follower_count", i4),
        ("waits", i4),
        ("graph", i4),
        ("next_in_stream", i4),
        ("owner", i8),
        ("salt", i8),
        ("probe_at", i8),
        ("protected", i4),
        ("required", i4),
        ("budget", i4),
        ("missing", i4),
        ("pulls", i4),
        ("trims", i4),
        ("watched", i1),
        ("probe_timer", i1),
        ("probe_backoff", i1),
        ("unused", i8),
    ],
    align=True,
)
"""A node of a graph. Its packets' states begin at ``offset``; a node that sends nothing has none.

At the sender: ``next_index`` is the first unsent packet, ``retransmits`` counts packets to be retransmitted, ``holes``
those that may stay lost. ``filling_holes``: the receiver needs the holes after all. ``satisfied``: the receiver needs
no more packets. ``listed``: the message is in its stream's list. At the receiver: ``protected`` counts packets of class
0 that have not arrived, ``required`` is the number of packets that the loss bound demands. ``probed``: the sender has
sent everything and probed. ``refs`` counts packets in the network and timers that refer to the message; its row can be
reused only when there are none."""

GRAPH_ROW: Final = np.dtype([("remaining", i4), ("open", i4), ("first", i8)], align=True)

SLOT_ROW: Final = np.dtype([("owner", np.uint32), ("used", np.uint32), ("spent", np.uint32)], align=True)
"""A switch's slot for a drop budget: the P4 program's three registers."""

EVENT_ROW: Final = np.dtype([("time", i8), ("key", i8), ("next", i8)])
"""An event in the list of its bucket, or an unused row."""

_INT: Final = np.dtype(np.int64)
_INT32: Final = np.dtype(np.int32)
_BYTE: Final = np.dtype(np.uint8)

ARRAYS: Final = {
    "times": _INT,
    "keys": _INT,
    "far_times": _INT,
    "far_keys": _INT,
    "events": EVENT_ROW,
    "buckets": _INT32,
    "occupied": _INT,
    "ports": PORT_ROW,
    "queues": QUEUE_ROW,
    "packets": PACKET_ROW,
    "switches": SWITCH_ROW,
    "slots": SLOT_ROW,
    "streams": STREAM_ROW,
    "messages": MESSAGE_ROW,
    "graphs": GRAPH_ROW,
    "followers": _INT32,
    "completions": _INT,
    "transmissions": TRANSMISSION_ROW,
    "states": _BYTE,
    "transports": TRANSPORT_ROW,
    "profiles": _BYTE,
    "route_row": _INT32,
    "route_table": _INT32,
    "choices": _INT32,
    "rules": SWITCH_RULES_ROW,
    "counts": _INT,
}
"""The arrays by name, flattened to one dimension."""

WORLD: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "now",
            "sequence",
            "heap_length",
            "far_length",
            "bucketed",
            "events_waiting",
            "bucket_now",
            "bucket_shift",
            "free_event",
            "prefetched",
            "free_packet_head",
            "free_packets",
            "free_transmission_head",
            "free_transmissions",
            "serial",
            "completed",
            "hosts",
            "free_stream",
            "in_flight_max",
            "followers_max",
            *(f"{name}_at" for name in ARRAYS),
            *(f"{name}_len" for name in ARRAYS),
        )
    ]
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


_carray: Any = None
_pointer: Any = None
if AVAILABLE:
    _numba: Any = importlib.import_module("numba")
    _ir: Any = importlib.import_module("llvmlite.ir")
    _carray = _numba.carray

    def _make_pointer(typingctx: Any, address: Any) -> Any:
        """Convert an address to a pointer."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], _ir.IntType(8).as_pointer())

        return _numba.core.types.voidptr(_numba.types.int64), generate

    _pointer = importlib.import_module("numba.extending").intrinsic(_make_pointer)


def _accessor(name: str) -> Any:
    """Return the compiled function that turns the address in the record into an array."""
    at, length, row = f"{name}_at", f"{name}_len", ARRAYS[name]

    def array_of(w: Row) -> Row:
        return _carray(_pointer(w[at]), w[length], row)

    return call(array_of)


times_of = _accessor("times")
keys_of = _accessor("keys")
far_times_of = _accessor("far_times")
far_keys_of = _accessor("far_keys")
events_of = _accessor("events")
buckets_of = _accessor("buckets")
occupied_of = _accessor("occupied")
ports_of = _accessor("ports")
queues_of = _accessor("queues")
packets_of = _accessor("packets")
switches_of = _accessor("switches")
slots_of = _accessor("slots")
streams_of = _accessor("streams")
messages_of = _accessor("messages")
graphs_of = _accessor("graphs")
followers_of = _accessor("followers")
completions_of = _accessor("completions")
transmissions_of = _accessor("transmissions")
states_of = _accessor("states")
transports_of = _accessor("transports")
profiles_of = _accessor("profiles")
route_row_of = _accessor("route_row")
route_table_of = _accessor("route_table")
choices_of = _accessor("choices")
rules_of = _accessor("rules")
counts_of = _accessor("counts")

_MULTIPLIER: Final = GOLDEN - (1 << 64)
_BELOW_57: Final = (1 << 57) - 1
_BELOW_31: Final = (1 << 31) - 1


@call
def draw(row: Row) -> Number:
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
def mix(value: int, salt: int) -> Number:
    """Hash a value and a salt to 31 bits, as in `dlcp.sim.arithmetic.mix`."""
    return (((value ^ salt) * _MULTIPLIER) >> 33) & _BELOW_31
