# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out, but for their packets: who asks when, and what the receiver confirmed."""

import ctypes
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dlcp import native, wire
from dlcp.native import address
from dlcp.tags import AS_SEEDED, PacketTags, Turn, send_order
from dlcp.transport.bound import LossBound
from dlcp.transport.engine import Bytes, Flow, MessageKey, Outgoing, Packets, first_block_seed
from dlcp.transport.options import TransportOptions
from dlcp.transport.promise import Promise
from dlcp.wire import Flag, Header, PacketType, Queue

PROBE_TIMEOUT_MIN_S = 0.005
PROBE_TIMEOUT_MAX_S = 0.2
"""Bounds of the probe timeout. The lower one covers a scheduling delay on a busy host. Chosen by us."""
BACKOFF_MAX = 6
"""Probes without news are spaced by up to two to the power of this many timeouts."""
UNANSWERED_PATIENCE = 4
"""Questions without an answer that count as one answer without news. Chosen by us: at 30 % loss half are answered."""
ECN_CAPABLE = 2

_TOS = np.array([[wire.dscp(queue, droppable) << 2 for droppable in (False, True)] for queue in range(8)], np.uint8)
"""Type of service by queue and by whether a packet may be dropped, shape (8, 2)."""
_TOS_ECN = _TOS | np.uint8(ECN_CAPABLE)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a message, as its receiver confirmed it.

    ``delivered`` has shape (packets,); ``sent`` counts every transmission, ``resent`` those after a packet's first.
    """

    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    seconds: float

    @property
    def recovered(self) -> int:
        """Packets that were lost and arrived when sent again; at most ``resent``."""
        return min(self.resent, int(self.delivered.sum()))


@dataclass(slots=True)
class Sending:
    """One message to one peer, until its receiver has confirmed it."""

    peer: int
    key: MessageKey
    bound: LossBound
    label: str
    started_s: float
    deadline_s: float
    protected_packets: int
    payload: Bytes
    message: Outgoing
    done: Promise[Delivery] = field(default_factory=Promise)
    asked_s: float | None = None
    """When the first PROBE left that has not been answered."""
    probed_s: float = 0.0
    probes_unanswered: int = 0
    probes_without_news: int = 0
    _confirmed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    _delivered_seen: int = 0

    def probe_due_s(self, flow: Flow) -> float:
        """Return when to ask what is missing; infinity while packets leave freely."""
        message = self.message
        if message.delivered != self._delivered_seen:
            self._delivered_seen = message.delivered
            self.probes_unanswered = self.probes_without_news = 0
        idle = not message.unsent and not message.flying
        if not idle and not message.flying:
            return float("inf")
        if idle and message.delivered < message.packets and not self.probes_without_news:
            return 0.0  # what is missing may stay lost, if the receiver agrees
        # Questions and answers get lost like anything else: only answers without news say that asking is no use.
        idle_answers = self.probes_without_news - self.probes_unanswered + self.probes_unanswered // UNANSWERED_PATIENCE
        backoff: int = 2 ** min(BACKOFF_MAX, idle_answers)
        return max(message.active_s, self.probed_s) + probe_timeout_s(flow) * backoff

    def asked(self, now_s: float) -> None:
        """Note that a PROBE leaves."""
        if self.asked_s is None:
            self.asked_s = now_s
        self.probed_s = now_s
        self.probes_without_news += 1
        self.probes_unanswered += 1

    def confirm(self, first: int, delivered: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Take in one part of a STOP; return them together once every part is in."""
        self._confirmed[first] = delivered
        if sum(map(len, self._confirmed.values())) < self.message.packets:
            return None
        return np.concatenate([self._confirmed[first] for first in sorted(self._confirmed)])

    def finish(self, delivered: NDArray[np.bool_], now_s: float) -> None:
        """Resolve ``done``."""
        if not self.done.done():
            message = self.message
            self.done.set_result(Delivery(delivered, message.sent, message.resent, now_s - self.started_s))


def probe_timeout_s(flow: Flow) -> float:
    """Return how long to wait for news before asking."""
    if not flow.smoothed_rtt_s:
        return 4 * PROBE_TIMEOUT_MIN_S
    timeout = flow.smoothed_rtt_s + 4 * flow.rtt_variation_s
    return min(PROBE_TIMEOUT_MAX_S, max(PROBE_TIMEOUT_MIN_S, timeout))


def packets_of(
    header: Header,
    payload: Bytes,
    tail: Bytes,
    tags: PacketTags,
    bound: LossBound,
    options: TransportOptions,
    turn: Turn = AS_SEEDED,
    *,
    ecn_capable: bool,
) -> Packets:
    """Return the packets of a message; ``header`` is what they have in common.

    Its tags are left out with ``options.tagged`` False: all is ordinary traffic then.
    """
    count, seed = header.count, first_block_seed(MessageKey(header.step, header.message))
    if options.tagged:
        encoded, droppable = encode_tags(tags, bound.ratio > 0, ecn_capable=ecn_capable)
        order = send_order(tags.queue, droppable, seed, turn)
    else:
        encoded = np.empty((count, 4), np.uint8)
        encoded[:, 0] = np.where(tags.protected, np.uint8(Flag.PROTECTED), np.uint8(0))
        encoded[:, 1], encoded[:, 2] = Queue.ORDINARY << 5, tags.layer
        encoded[:, 3] = ECN_CAPABLE if ecn_capable else 0
        order = send_order(np.zeros(count, np.uint8), np.zeros(count, np.bool_), seed, turn)
    budget = min(0xFFFF, bound.allowed(count) // options.switch_hops)
    head = header._replace(type=PacketType.DATA, budget=budget).encode()
    return Packets(payload, tail, encoded, order, head, bound.allowed(count))


def encode_tags(tags: PacketTags, bounded: bool, *, ecn_capable: bool) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return what the packets of a message carry of their tags, and which of them may be dropped.

    Parameters
    ----------
    bounded
        Whether anything of the message may stay lost.
    ecn_capable
        Whether its rate control heeds marks.

    Returns
    -------
    Bytes 1 to 3 of each header and its type of service, shape (packets, 4); and shape (packets,).
    """
    count, service = len(tags.queue), _TOS_ECN if ecn_capable else _TOS
    library = native.library()
    if library is None:
        return _encode_tags_numpy(tags, bounded, service)
    encoded, droppable = np.empty((count, 4), np.uint8), np.empty(count, np.bool_)
    given = [np.ascontiguousarray(each) for each in (tags.queue, tags.drop_class, tags.layer, tags.protected)]
    _compiled(library).dlcp_encode_tags(
        *map(address, given), count, bounded, Flag.PROTECTED, *map(address, (service, encoded, droppable))
    )
    return encoded, droppable


@cache
def _compiled(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare what the library's function takes."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    library.dlcp_encode_tags.argtypes = [*[pointer] * 4, *[number] * 3, *[pointer] * 3]
    library.dlcp_encode_tags.restype = None
    return library


def _encode_tags_numpy(
    tags: PacketTags, bounded: bool, service: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    encoded = np.empty((len(tags.queue), 4), np.uint8)
    droppable = ~tags.protected & (tags.drop_class > 0) & bounded
    encoded[:, 0] = np.where(tags.protected, np.uint8(Flag.PROTECTED), np.uint8(0))
    encoded[:, 1] = tags.queue << 5 | np.where(droppable, tags.drop_class, 0) << 2
    encoded[:, 2] = tags.layer
    encoded[:, 3] = service[tags.queue, droppable.view(np.uint8)]
    return encoded, droppable
