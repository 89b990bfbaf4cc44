# SPDX-License-Identifier: Apache-2.0
"""The constants of the engine, and the events that it returns.

The engine (:class:`dlcp.transport.native_engine.Engine`, written in C) moves messages: their packets, acknowledgements,
windows and losses, and the control packets by which sender and receiver agree that a message is complete. The endpoint
submits messages, runs the engine for a while, reads the events that came of it, and runs callbacks then. The engine
calls nobody.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges what arrives, and
with the last of them that the message is complete. When the sender has nothing left to send it asks (PROBE); the
receiver answers with what is missing (BITMAP), or that it needs no more (STOP). A STOP that leaves packets out is sent
without being asked for, and repeated until STOP_ACK. Control packets carry their own state and may be lost, repeated or
late.

What a sender defers it does not send at all. It says how many packets that are in a PROBE before the first packet, so
that the receiver waits for none of them.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS
from dlcp.transport.congestion import Report
from dlcp.transport.messages import Bytes, MessageKey

MESSAGE_PACKETS_MAX: Final = 1 << 22

RULES: Final = {
    # By how many round trips a packet may be late that is not lost: RFC 8985's reordering window. It begins with one, for
    # a fabric that sprays packets puts them out of order; grows at once to what is seen, and is doubled when a packet
    # that counted as lost arrives; and shrinks with each loss found, that is, to the least after 14 where none is late.
    "disorder_first": 1.0,
    "disorder_min": 0.25,
    "disorder_max": 4.0,
    "disorder_decay": 0.9,
    # The least time between two reports on a flow, or a round trip if that is longer: with something to react to, and
    # without. Chosen by us: a report costs as much as a burst of packets. That a window holds packets back is something
    # to react to in slow start.
    "report_min_s": 0.001,
    "report_calm_s": 0.01,
    # An acknowledgement waits for so many packets, or for a quarter of a round trip, within these bounds. It costs as
    # much processor time as a packet of data: hence the lower one, which is half a round trip where that takes 0.4 ms.
    # The upper one holds until a round trip is known, and keeps windows moving on long paths.
    "ack_every": 8,
    "ack_delay_s": 0.0002,
    "ack_delay_max_s": 0.001,
    # On fast paths they leave no closer than this, no more often than so many a round trip, or after so many packets.
    # Chosen by us, by CPU time on a loopback; TACK (SIGCOMM 2020) finds that two to four a round trip are enough.
    "ack_spacing_s": 0.0002,
    "ack_round_trips": 1 / 8,
    "ack_at_once": 512,
    # The probe timeout until a round trip is known, and its upper bound, or two round trips if these are longer. RFC 9002
    # begins with 1 s: peers have answered a greeting before, mostly, and a needless question costs two small packets.
    "initial_rtt_s": 0.02,
    "probe_timeout_max_s": 0.2,
    # Probes without news are spaced by up to two to the power of this many timeouts.
    "backoff_max": 6,
    # Questions without an answer that count as one answer without news. Chosen by us: at 30 % loss half are answered.
    "unanswered_patience": 4,
    # For so many packets after a loss another one is expected: of 1 in 1,000, that misses 1 in 60.
    "lossy_packets": 4096,
    # A STOP is repeated after a probe timeout, then after twice as long each time up to this.
    "stop_repeat_max_s": 0.5,
    # A sender that does not know that its message is complete asks within the first of these, and a rank that leaves
    # reminds it for the second. Both are several of a sender's timeouts, or of the times between STOPs. Chosen by us.
    "known_after_s": 1.0,
    "remind_s": 0.2,
    # A flow uses one path more for each of these packets of its window, so that a path has some all the time: packets
    # are found lost by later ones of their own path. A burst is no smaller than the second unless the window is. A path
    # is judged whenever so many of its packets have come back or are lost, by averages to which these add a part of
    # such size; of losses a smaller one, since a full queue loses many packets at a time. Chosen by us.
    "path_packets": 4,
    "path_burst": 4,
    "path_judged": 32,
    "path_gain": 0.25,
    "path_loss_gain": 1 / 16,
    # A path loses half its weight while it loses more than this and so many times what the others do, in their median;
    # part of it while its delay is so many times the best one's and the deviation of round trips, or while it has so much more
    # marked. Below the least weight it is left; while all is well it gains so much. Chosen by us: a path with a quarter
    # of the others' rate is hardly worth the wait for what is still on it when a message ends.
    "path_lossy": 0.025,
    "path_lossier": 2.0,
    "path_slow": 2.0,
    "path_marked": 0.25,
    "path_least": 0.25,
    "path_calm": 0.125,
    # It is tried again after the first of these, then after twice as long each time up to the second. Nothing of what
    # is on it has come for the third, and two round trips, although what others sent so much later has: it is left at
    # once. Chosen by us.
    "path_again_s": 1.0,
    "path_again_max_s": 16.0,
    "path_stalled_s": 0.02,
    # Where packets are paced, those of so long leave together, or ``path_burst`` of them if that is more. Chosen by us:
    # a timer costs as much as a burst.
    "pace_turn_s": 0.001,
    # The rate at which data comes is that of the fastest stretch of so long and so many packets, without a pause of the
    # last of these. Chosen by us: a shorter one would show what the last switch saved up, and a longer one pauses of
    # the senders.
    "inbound_s": 0.03,
    "inbound_packets": 8,
    "inbound_pause_s": 0.02,
}
"""What the engine goes by, with the reasons."""


class Sent(NamedTuple):
    """The receiver has confirmed a message: which packets arrived, and how many were sent, the first time and again."""

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    now_s: float


class Arrived(NamedTuple):
    """A message is complete, as far as its bound asks; ``layer`` and ``delivered`` as in ``Arrival``."""

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    layer: Bytes
    last_bytes: int
    deferred: int
    now_s: float


class Unexpected(NamedTuple):
    """The first packet of a message has arrived before its receive was posted."""

    peer: int
    key: MessageKey


class Mismatch(NamedTuple):
    """The sender's message has another size than the receive that was posted; it has so many packets."""

    peer: int
    key: MessageKey
    packets: int


class ControlPacket(NamedTuple):
    """A packet about a peer, not about a message: HELLO, HELLO_ACK or ABORT."""

    peer: int
    datagram: bytes
    now_s: float


class Reported(NamedTuple):
    """What became of packets to a peer since the last report, and whether more wait to be sent."""

    peer: int
    report: Report
    waiting: bool


class Unanswered(NamedTuple):
    """A peer leaves questions unanswered."""

    peer: int


class Datagram(NamedTuple):
    """Without a socket: a packet leaves, with an IPv4 type of service, on a path."""

    peer: int
    datagram: bytes
    tos: int
    path: int


class PathState(NamedTuple):
    """What is known of one of the paths to a peer."""

    weight: float
    """Of 1: how much it carries, compared with the best; 0: it is left."""
    delay_s: float
    """Its round-trip time, averaged; 0 if not known."""
    loss: float
    """The share of packets lost, averaged; of those marked, the next one."""
    marks: float
    sent: int
    """Packets sent on it so far, each time counted."""


Event = Sent | Arrived | Unexpected | Mismatch | ControlPacket | Reported | Unanswered | Datagram


@lru_cache(64)
def all_of(packets: int) -> NDArray[np.bool_]:
    """Return which packets of a message arrived where all did, shape (packets,); for all who ask, so read-only."""
    every = np.ones(packets, np.bool_)
    every.flags.writeable = False
    return every


def chunk_seed(key: MessageKey) -> int:
    """Return what decides which block of a message is sent first; see ``dlcp_send_order`` in C."""
    return key.step * 31 + key.message


def first_block(key: MessageKey, values: int, per_packet: int) -> int:
    """Return the block of packets with which chunk 0 of a reduction begins, whose contributions are sent as ``key``."""
    return chunk_seed(key) % max(1, -(-values // (per_packet * SEND_BLOCK_PACKETS)))
