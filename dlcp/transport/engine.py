# SPDX-License-Identifier: Apache-2.0
"""The engine's constants, and the events that it returns.

The engine (:class:`dlcp.transport.native_engine.Engine`, written in C) moves messages: their packets, acknowledgements,
windows and losses, and the control packets by which sender and receiver agree that a message is complete. The endpoint
submits messages, runs the engine for a while, then reads its events and runs callbacks. The engine itself calls nobody.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges packets as they
arrive, and with the last one that the message is complete. A sender with nothing left to send probes (PROBE); the
receiver answers with what is missing (BITMAP), or that it needs no more (STOP). A STOP for an incomplete message is
sent unasked, and repeated until STOP_ACK. Control packets are self-contained: they may be lost, repeated or late.

Deferred packets are not sent at all. A PROBE before the first packet says how many there are, so the receiver does not
wait for them.
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
    # Loss. A packet is declared lost once a packet sent this many round trips later has arrived: the reordering window
    # of RACK (RFC 8985). It begins at one round trip, since fabrics that spray packets reorder them; grows to the
    # reordering observed, and doubles when a packet declared lost arrives. Each loss found shrinks it: 14 in order
    # bring it to the minimum.
    "disorder_first": 1.0,
    "disorder_min": 0.25,
    "disorder_max": 4.0,
    "disorder_decay": 0.9,
    # For this many packets after a loss, another one is expected, and a probe follows each message's last packet. At a
    # loss rate of 1 in 1,000 this misses one loss in 60.
    "lossy_packets": 4096,
    # Reports. A report moves the window and costs as much processor time as a burst of packets, so reports are a round
    # trip apart. They are at least the first value apart after a loss or mark, or if slow start is limited by the
    # window, else the second. At a round trip of 0.1 ms the window therefore reacts 10 or 100 round trips late, which
    # costs little, as it is hardly ever the limit there; at 100 ms neither value matters.
    "report_min_s": 0.001,
    "report_calm_s": 0.01,
    # Acknowledgements. One waits for this many packets or for a quarter of a round trip, within these bounds. It costs
    # as much processor time as a data packet, hence the lower bound: at 0.1 ms it is two round trips, but a message's
    # last packet is acknowledged at once. The upper bound applies until a round trip is known; at 100 ms it makes a
    # round trip 1 % longer.
    "ack_every": 8,
    "ack_delay_s": 0.0002,
    "ack_delay_max_s": 0.001,
    # On fast paths they are at least this far apart, up to this part of a round trip or this many packets. Chosen by
    # processor time on a loopback; TACK (SIGCOMM 2020) finds that two to four per round trip are enough.
    "ack_spacing_s": 0.0002,
    "ack_round_trips": 1 / 8,
    "ack_at_once": 512,
    # Probes. The timeout until a round trip is known: a needless probe costs two small packets, so it may be short. At
    # 0.1 ms a loss in the first message waits this long; at 100 ms the first message sends some needless probes.
    "initial_rtt_s": 0.02,
    # The timeout is at most this or two round trips, whichever is longer. It limits the effect of an outlier.
    "probe_timeout_max_s": 0.2,
    # Probes without progress back off to at most two to the power of this many timeouts.
    "backoff_max": 6,
    # This many unanswered probes count as one answer without progress. At 30 % loss, half of them are answered.
    "unanswered_patience": 4,
    # STOP is repeated after a probe timeout, then after twice as long each time, up to this.
    "stop_repeat_max_s": 0.5,
    # A sender that does not know that its message is complete probes within the first time, and a rank that leaves
    # reminds it for the second one. Both are several probe timeouts, up to a round trip of 100 ms; training does not
    # wait for them.
    "known_after_s": 1.0,
    "remind_s": 0.2,
    # Paths. A flow uses one more path for this many packets of its window, so that each path always carries some:
    # losses are found by later packets on the same path. A burst is no smaller than the second value unless the window
    # is. A path is judged after this many packets have returned or been lost, by averages with these gains; the gain
    # for losses is smaller, since a full queue loses many packets at a time.
    "path_packets": 4,
    "path_burst": 4,
    "path_judged": 32,
    "path_gain": 0.25,
    "path_loss_gain": 1 / 16,
    # A path loses half its weight while it loses more than this share and more than this many times the other paths'
    # median; part of it while its delay exceeds this many times the best path's plus the deviation of round trips, or
    # while its share of marked packets is higher by this. Below the least weight it is abandoned; otherwise it regains
    # this much. A path at a quarter of the others' rate is hardly worth waiting for at the end of a message.
    "path_lossy": 0.025,
    "path_lossier": 2.0,
    "path_slow": 2.0,
    "path_marked": 0.25,
    "path_least": 0.25,
    "path_calm": 0.125,
    # An abandoned path is tried again after the first time, then after twice as long each time up to the second.
    # Repairs take seconds, whatever the round trip; a trial costs one burst.
    "path_again_s": 1.0,
    "path_again_max_s": 16.0,
    # Pacing. Packets due within this time leave together, or ``path_burst`` if that is more: a timer costs as much as a
    # burst. Only paths of 5 ms and more are paced; at 100 ms it is a hundredth of a round trip.
    "pace_turn_s": 0.001,
    # Inbound rate: that of the fastest stretch of at least this long and this many packets, without a pause of the last
    # value. A shorter stretch would measure the last switch's queue, a longer one the senders' pauses.
    "inbound_s": 0.03,
    "inbound_packets": 8,
    "inbound_pause_s": 0.02,
}
"""The engine's constants, with their reasons."""


class Sent(NamedTuple):
    """The receiver has acknowledged a message: which packets arrived, and how many were sent and retransmitted."""

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    now_s: float


class Arrived(NamedTuple):
    """A message is complete within its bound; ``layer`` and ``delivered`` as in ``Arrival``."""

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    layer: Bytes
    last_bytes: int
    deferred: int
    now_s: float


class Unexpected(NamedTuple):
    """The first packet of a message arrived before its receive was posted."""

    peer: int
    key: MessageKey


class Mismatch(NamedTuple):
    """The sender's message, of ``packets`` packets, has another size than the posted receive."""

    peer: int
    key: MessageKey
    packets: int


class ControlPacket(NamedTuple):
    """A packet about a peer rather than a message: HELLO, HELLO_ACK or ABORT."""

    peer: int
    datagram: bytes
    now_s: float


class Reported(NamedTuple):
    """Feedback on packets to a peer since the last report, and whether more wait to be sent."""

    peer: int
    report: Report
    waiting: bool


class Unanswered(NamedTuple):
    """A peer leaves probes unanswered."""

    peer: int


class Datagram(NamedTuple):
    """Without a socket: a packet to send, with its IPv4 type of service and path."""

    peer: int
    datagram: bytes
    tos: int
    path: int


class PathState(NamedTuple):
    """State of one of the paths to a peer."""

    weight: float
    """Relative to the best path, 0 to 1; 0 if the path is abandoned."""
    delay_s: float
    """Its smoothed round-trip time; 0 if unknown."""
    loss: float
    """Smoothed share of packets lost; the next field, of those marked."""
    marks: float
    sent: int
    """Packets sent on it so far, including retransmissions."""


Event = Sent | Arrived | Unexpected | Mismatch | ControlPacket | Reported | Unanswered | Datagram


@lru_cache(64)
def all_of(packets: int) -> NDArray[np.bool_]:
    """Return a ``delivered`` array of a complete message, shape (packets,); shared, so read-only."""
    every = np.ones(packets, np.bool_)
    every.flags.writeable = False
    return every


def chunk_seed(key: MessageKey) -> int:
    """Return the seed that decides which block of a message is sent first; see ``dlcp_send_order`` in C."""
    return key.step * 31 + key.message


def first_block(key: MessageKey, values: int, per_packet: int) -> int:
    """Return the block of packets at which chunk 0 of a reduction begins, if contributions are sent as ``key``."""
    return chunk_seed(key) % max(1, -(-values // (per_packet * SEND_BLOCK_PACKETS)))
