# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out, but for their packets: who asks when, and what the receiver confirmed."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.tags import AS_SEEDED, ChunkOrder, PacketTags, encode_tags, send_order
from dlcp.transport.engine import Flow, Outgoing, Packets, first_block_seed
from dlcp.transport.messages import Bytes, Delivery, LossBound, MessageKey
from dlcp.transport.options import TransportOptions
from dlcp.transport.promise import Promise
from dlcp.wire import Header, PacketType, Queue

PROBE_TIMEOUT_MIN_S = 0.005
PROBE_TIMEOUT_MAX_S = 0.2
"""Bounds of the probe timeout. The lower one covers a scheduling delay on a busy host. Chosen by us."""
BACKOFF_MAX = 6
"""Probes without news are spaced by up to two to the power of this many timeouts."""
UNANSWERED_PATIENCE = 4
"""Questions without an answer that count as one answer without news. Chosen by us: at 30 % loss half are answered."""
ECN_CAPABLE = 2

_SERVICE = {
    True: np.array([[wire.dscp(queue, drop) << 2 for drop in (False, True)] for queue in range(8)], np.uint8),
    False: np.zeros((8, 2), np.uint8),
}
"""Type of service by queue and by whether a packet may be dropped, shape (8, 2); of tagged packets, and of others."""


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

    def probe_due_s(self, timeout_s: float) -> float:
        """Return when to ask what is missing, by :func:`probe_timeout_s`; infinity while packets leave freely."""
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
        return max(message.active_s, self.probed_s) + timeout_s * backoff

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


def probe_timeout_s(flow: Flow, local: bool) -> float:
    """Return how long to wait for news before asking; a local peer loses nothing, it is only slow."""
    if local:
        return PROBE_TIMEOUT_MAX_S
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
    order: ChunkOrder = AS_SEEDED,
    *,
    ecn_capable: bool,
) -> Packets:
    """Return the packets of a message; ``header`` is what they have in common.

    Its tags are left out with ``options.tagged`` False: all is ordinary traffic then.
    """
    count, seed = header.count, first_block_seed(MessageKey(header.step, header.message))
    if not options.tagged:
        tags = tags._replace(queue=np.full(count, Queue.ORDINARY, np.uint8))
    service = _SERVICE[options.tagged] | np.uint8(ECN_CAPABLE if ecn_capable else 0)
    encoded, droppable = encode_tags(tags, options.tagged and bound.ratio > 0, service)
    indices = send_order(tags.queue, droppable, seed, order)
    budget = min(0xFFFF, bound.allowed(count) // options.switch_hops)
    head = header._replace(type=PacketType.DATA, budget=budget).encode()
    return Packets(payload, tail, encoded, indices, head, bound.allowed(count))
