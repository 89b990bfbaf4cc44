# SPDX-License-Identifier: Apache-2.0
"""State of messages, streams and packets in both packet engines: the kernel's rows, and the reference's objects."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dlcp.sim.graphs.graph import row_type

PORT_QUEUES: Final = 8
i8, i4, i2, i1, u4, u1, f8 = np.int64, np.int32, np.int16, np.int8, np.uint32, np.uint8, np.float64


class Row:
    """A row of an array as Numba sees it, or an object with the numbers of one, which are 0 at first.

    Parameters
    ----------
    fields
        The type of the row.
    """

    def __init_subclass__(cls, fields: np.dtype[Any]) -> None:
        for name in fields.names or ():
            if fields[name].kind in "iuf" and name not in vars(cls):
                setattr(cls, name, fields[name].type(0).item())

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, index: Any) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


LIST: Final = row_type((i4, "head tail"))
"""A list of rows, which their ``next`` links; see `append`."""

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
    (i4, "upper given_up unused"),
)
"""A node of a graph. Its packets' states begin at ``offset``; a node that sends nothing has none.

At the sender: ``next_index`` is the first unsent packet, ``retransmits`` counts packets to be retransmitted, ``holes``
those that may stay lost. ``upper`` packets have the upper plane of an encoded message: they come first, in class 0.
``congested``: a packet was lost, or arrived with a mark. ``filling_holes``: the receiver needs the holes after all.
``satisfied``: the receiver needs no more packets. ``listed``: the message is in its stream's list. At the receiver:
``protected`` counts packets of class 0 that have not arrived, ``required`` is the number of packets that the loss bound
demands, and ``given_up`` counts packets that arrived without their payload. ``probed``: the sender has sent
everything and probed. ``refs`` counts packets in the network and timers that refer to the message; its row can be
reused only when there are none."""

GRAPH_ROW: Final = row_type((i4, "remaining open"))
"""The numbers of nodes that are not done, and of those that are not closed."""
