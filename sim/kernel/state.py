# SPDX-License-Identifier: Apache-2.0
"""The arrays that the kernel works on, and the numbers that mean something in them.

A few structured arrays, handed over one by one: a tuple of seventy made the loop eight times slower. Lists are linked
through them by index, -1 is the end. Rows fill whole cache lines, what is touched for every packet comes first: with
a thousand hosts the kernel waits for memory more than for anything else.
"""

from typing import Any, Final

import numpy as np
from dlcp.sim.plan import QUEUES

i8, i4, i2, i1, f8 = np.int64, np.int32, np.int16, np.int8, np.float64
Rows = Any
"""A structured array, a row of one, or what Numba makes of it."""
Number = Any
"""An integer, as Numba or NumPy have it."""

# Kinds of events.
ARRIVE, PORT_FREE, BEGIN, TIMER, PULL_DUE, PROBE_DUE = range(6)
ID_BITS: Final = 26
KIND_BITS: Final = 3
ID_MASK: Final = (1 << ID_BITS) - 1
KIND_MASK: Final = (1 << KIND_BITS) - 1
SEQUENCE_SHIFT: Final = ID_BITS + KIND_BITS
SEQUENCE_MAX: Final = 1 << (62 - SEQUENCE_SHIFT)
"""Events that have been put in when those that wait are numbered anew; half of what a key has room for."""

# Kinds of packets.
DATA, ACK, NACK, PULL, PROBE, ANSWER = range(6)

# State of a packet of a message: drop class in bits 0-2, what its sender knows in bits 3-5, whether it has arrived.
CLASS_MASK: Final = 7
STATE_MASK: Final = 0x38
UNSENT, FLYING, ACKED, LOST, HOLE = 0x00, 0x08, 0x10, 0x18, 0x20
RECEIVED: Final = 0x40

# Why the loop was left.
IDLE, LIMIT, NOTED, GROW = range(4)

# Kinds of notes: a watched node is done, a graph is done, a graph is forgotten.
NODE_DONE, GRAPH_DONE, GRAPH_CLOSED = range(3)

# Room that one event may need at most, besides for a stream's packets on the way and a node's followers.
SPARE: Final = 16

SWITCH: Final = np.dtype(
    [("random", i8), ("salt", i8), ("used", i8), ("turn", i4), ("divisor", i4)],
    align=True,
)

PORT: Final = np.dtype(
    [
        ("busy", i8),
        ("delay", i8),
        ("sent_bytes", i8),
        ("bytes", i8),
        ("bytes_max", i8),
        ("kib", i4),
        ("node", i4),
        ("target", i4),
        ("control_head", i4),
        ("control_tail", i4),
        ("mask", np.uint8),
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
"""One direction of a link, with the first cache line for what every packet needs. ``mask`` has a bit for each queue
that is not empty, ``lossy`` tells whether ``loss`` is above 0."""

QUEUE: Final = np.dtype(
    [("head", i4), ("tail", i4), ("packets", i4), ("depth", i4), ("waiting_bytes", i8), ("unused", i8)],
    align=True,
)
"""A queue of a port, at ``port * QUEUES + queue``. At a host, ``head`` to ``tail`` are streams that are ready to send;
at a switch they are packets. ``depth`` is the register that the P4 program reads: when a packet last left it."""

PACKET: Final = np.dtype(
    [
        ("serial", i8),
        ("node", i4),
        ("index", i4),
        ("record", i4),
        ("next", i4),
        ("port", i4),
        ("target", i4),
        ("hash", np.uint32),
        ("size", i4),
        ("rank", i4),
        ("kind", i1),
        ("queue", i1),
        ("drop_class", i1),
        ("ecn", i1),
        ("sprayed", i1),
        ("flag", i1),
        ("again", i1),
        ("trimmed", i1),
        ("echo", i1),
        ("unused", i8),
    ],
    align=True,
)
"""A packet, or where the next unused one is. Of an answer, ``flag`` says that the target needs no more, and ``echo``
that what it answers came marked."""

RECORD: Final = np.dtype(
    [
        ("serial", i8),
        ("number", i8),
        ("sent", i8),
        ("node", i4),
        ("index", i4),
        ("previous", i4),
        ("next", i4),
        ("queue", i4),
        ("again", i4),
    ],
    align=True,
)
"""A packet as its sender remembers it: on the way (in a list by stream and queue), or to be sent again. ``again``: it
was lost before."""

STREAM: Final = np.dtype(
    [
        ("window", f8),
        ("threshold", f8),
        ("number", i8),
        ("deadline", i8),
        ("timer_at", i8),
        ("tail_at", i8),
        ("rtt", i8),
        ("rtt_var", i8),
        ("round_end", i8),
        ("source", i4),
        ("target", i4),
        ("hash", np.uint32),
        ("hash_back", np.uint32),
        ("flying", i4),
        ("next", i4),
        ("head", i4),
        ("again_head", i4),
        ("repairing", i4),
        ("acked", i4),
        ("marked", i4),
        ("transport", i1),
        ("ready", i1),
        ("own", i1),
        ("dead", i1),
        ("asking", i1),
        ("tail_open", i1),
        ("spare", i1),
        ("backoff", i1),
        ("unused", i4),
        ("first", i4, (QUEUES,)),
        ("last", i4, (QUEUES,)),
        ("alpha", f8),
        ("recover", i8),
        ("reduced", i8),
        ("rtt_min", i8),
        ("cut_at", i8),
        ("epoch", i8),
        ("peak", f8),
        ("reno", f8),
        ("tail", i4),
        ("again_tail", i4),
        ("timers", i4),
        ("credit", i4),
        ("tail_number", i8),
        ("tail_node", i4),
        ("tail_index", i4),
        ("serial", i8),
        ("unused_too", i8, (3,)),
    ],
    align=True,
)
"""A flow of messages: its window, those of its messages that have something unsent (``head``), packets to be sent again
(``again_head``), and packets on the way by queue (``first``).

``deadline`` is when all on the way is given up, ``tail_at`` when the tail is probed, ``timer_at`` the event that counts
of the ``timers`` that wait. ``tail_open``: a probe numbered ``tail_number`` has not been answered. ``spare`` packets
may go beyond the window; ``repairing`` were lost and are not known to have arrived; ``asking``: a question instead of
data goes out (pFabric)."""

MESSAGE: Final = np.dtype(
    [
        ("offset", i8),
        ("stream", i4),
        ("packets", i4),
        ("last_bytes", i4),
        ("next", i4),
        ("acked", i4),
        ("received", i4),
        ("flying", i4),
        ("refs", i4),
        ("sent", i4),
        ("waiting", i4),
        ("holes", i4),
        ("transport", i1),
        ("queue", i1),
        ("bounded", i1),
        ("listed", i1),
        ("done", i1),
        ("stopped", i1),
        ("asked", i1),
        ("resending", i1),
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
        ("link", i4),
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
"""A node of a graph. ``next`` is the first packet not sent yet; ``protected`` those of class 0 that have not arrived;
``waiting`` those to be sent again; ``holes`` those that may stay lost; ``refs`` what refers to the message from
elsewhere: packets in the network and timers."""

GRAPH: Final = np.dtype([("remaining", i4), ("open", i4), ("first", i8)], align=True)

SLOT: Final = np.dtype([("owner", np.uint32), ("used", np.uint32), ("spent", np.uint32)], align=True)
"""A drop budget at a switch, as the P4 program's three registers."""
SLOTS: Final = 1 << 16
SLOT_OWNED: Final = 0x80000000
SLOT_IDLE_US: Final = 1_000_000

EVENT: Final = np.dtype([("time", i8), ("key", i8), ("next", i8)])
"""An event in the list of its bucket, or an unused one."""
