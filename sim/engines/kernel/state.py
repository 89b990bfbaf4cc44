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

from dlcp.sim.engines.arithmetic import GOLDEN
from dlcp.sim.engines.jit import call
from dlcp.sim.engines.plan import PORT_QUEUES, SWITCH_RULES_ROW, TRANSPORT_ROW, Number, Row
from dlcp.sim.jobs.graph import row_type

i8, i4, i2, i1, u4, u1, f8 = np.int64, np.int32, np.int16, np.int8, np.uint32, np.uint8, np.float64


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
# whether it arrived before its message was done. A hole is a lost packet that is not retransmitted unless the receiver
# needs it.
CLASS_MASK: Final = 0x07
STATE_MASK: Final = 0x38
STATE_UNSENT, STATE_IN_FLIGHT, STATE_ACKED, STATE_LOST, STATE_HOLE = 0x00, 0x08, 0x10, 0x18, 0x20
STATE_RECEIVED: Final = 0x40
STATE_DELIVERED: Final = 0x80


SPARE_ROWS: Final = 16
"""Rows of each array that one event may need, in addition to a stream's packets in flight and a node's followers."""


LIST: Final = row_type((i4, "head tail"))
"""A list of rows, which their ``next`` links; see `append`."""

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

PACKET_ROW: Final = row_type(
    (i8, "serial"),
    (i4, "message index transmission next port target"),
    (u4, "path_hash"),
    (i4, "size rank"),
    (i1, "kind queue drop_class ecn sprayed satisfied retransmission trimmed ecn_echo"),
    (i4, "credit unused"),
)
"""A packet in the network, or an unused row. ``satisfied`` (in an ACK or a reply to a probe): the receiver needs no
more packets of the message. ``ecn_echo``: the acknowledged packet arrived with a mark. ``rank``: the packets that its
message has left. ``credit``: of RCCC's data, the total that the sender wants; of its PULLs, what is granted."""

TRANSMISSION_ROW: Final = row_type((i8, "serial number sent_at"), (i4, "message index previous next queue repeated"))
"""The sender's record of a packet: in flight (in a list by stream and queue) or to be retransmitted.

``serial`` is the packet's while in flight, otherwise -1, so that late acknowledgements do not match. ``number`` counts
the stream's transmissions. ``repeated``: the packet was lost before."""

STREAM_ROW: Final = row_type(
    (f8, "window threshold"),
    (i8, "number deadline timer_at tail_due rtt rtt_var round_end"),
    (i4, "source target"),
    (u4, "path_hash reverse_path_hash"),
    (i4, "in_flight next head"),
    (LIST, "retransmissions"),
    (i4, "repairing acked marked"),
    (i1, "transport ready single_use dead probe_mode tail_probing spare backoff"),
    ((i4, PORT_QUEUES), "first last"),
    (f8, "alpha"),
    (i8, "recover reduced rtt_min cut_at epoch"),
    (f8, "peak reno"),
    (i4, "tail timers"),
    (i8, "tail_number"),
    (i4, "tail_message tail_index credit backlog"),
    (i8, "serial acked_at"),
    (i4, "step_acked step_packets asked granted"),
    (f8, "mean_delay growth"),
    (i8, "base_rtt adapt_at grown_at"),
    (i4, "arrived arrived_since ignoring undelayed pulled"),
    (i1, "fast trimmed speculating pulling"),
)
"""A stream of messages: its window, its messages with unsent packets (``head``), its packets to be retransmitted
(``retransmissions``), and its packets in flight by queue (``first``).

``deadline``: when all packets in flight are declared lost. ``tail_due``: when the tail is probed. ``timer_at``: time of
the only valid event among the ``timers`` scheduled. ``tail_probing``: the tail probe has not been acknowledged; its
number is ``tail_number``, and it repeats a packet of ``tail_message`` if that is not -1. ``spare``: packets allowed
beyond the window. ``repairing``: packets that were lost and not acknowledged since. ``probe_mode``: send probes instead
of data (pFabric). ``credit``: packets that PULLs have requested. ``step_acked``:
acknowledged packets of the present training step, the last one at ``acked_at``; ``step_packets``: those of the step
before (MLTCP).

For NSCC: ``base_rtt`` is the shortest round trip, ``mean_delay`` the average above it. ``growth`` is to be divided by
the window and added to it; that was last done after a round trip at ``grown_at``, and packets that arrived since any
growth are ``arrived_since``. ``arrived`` counts those since the round trip that ends at ``adapt_at``, when quick adapt
looks at them; then ``trimmed`` says whether a packet was trimmed. ``ignoring`` packets from before are still to be
answered, and their marks do not count. ``undelayed`` packets in a row met no delay; more than a window makes growth
``fast``.

For RCCC, in packets: the sender has ``backlog`` to send and ``credit`` for some, after ``pulled`` in total;
``speculating``: its credit is not the receiver's. The receiver was ``asked`` for a total and has ``granted`` one;
``pulling``: the queues in which it has a PULL."""

MESSAGE_ROW: Final = row_type(
    (i8, "offset"),
    (i4, "stream packets last_bytes next_index acked received in_flight refs sent retransmits holes"),
    (i1, "transport queue bounded listed done satisfied probed filling_holes probing closed"),
    (i2, "profile"),
    (i8, "begin end delay order step followers"),
    (i4, "follower_count waits graph next_in_stream"),
    (i8, "owner salt probe_at"),
    (i4, "protected required budget missing pulls trims"),
    (i1, "watched probe_timer probe_backoff congested"),
    (i4, "upper"),
    (i8, "unused"),
)
"""A node of a graph. Its packets' states begin at ``offset``; a node that sends nothing has none.

At the sender: ``next_index`` is the first unsent packet, ``retransmits`` counts packets to be retransmitted, ``holes``
those that may stay lost. ``upper`` packets have the upper plane of an encoded message: they come first, in class 0.
``congested``: a packet was lost, or arrived with a mark. ``filling_holes``: the receiver needs the holes after all.
``satisfied``: the receiver needs no more packets. ``listed``: the message is in its stream's list. At the receiver:
``protected`` counts packets of class 0 that have not arrived, ``required`` is the number of packets that the loss bound
demands. ``probed``: the sender has sent everything and probed. ``refs`` counts packets in the network and timers that
refer to the message; its row can be reused only when there are none."""

GRAPH_ROW: Final = row_type((i4, "remaining open"), (i8, "first"))

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
packets_of = _array("packets", PACKET_ROW)
switches_of = _array("switches", SWITCH_ROW)
slots_of = _array("slots", SLOT_ROW)
streams_of = _array("streams", STREAM_ROW)
messages_of = _array("messages", MESSAGE_ROW)
graphs_of = _array("graphs", GRAPH_ROW)
followers_of = _array("followers", i4)
completions_of = _array("completions", i8)
transmissions_of = _array("transmissions", TRANSMISSION_ROW)
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
def draw(row: Row) -> Number:
    """Return 31 random bits, and advance the generator in ``row.random``, as in `dlcp.sim.engines.arithmetic.draw`.

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
    """Hash a value and a salt to 31 bits, as in `dlcp.sim.engines.arithmetic.mix`."""
    return (((value ^ salt) * _MULTIPLIER) >> 33) & _BELOW_31
