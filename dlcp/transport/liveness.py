# SPDX-License-Identifier: Apache-2.0
"""Who is there: peers greet each other with what they have to agree on, and whoever falls silent is noticed."""

import struct
from collections import Counter
from collections.abc import Mapping

from dlcp.transport.control_packets import ControlPackets
from dlcp.transport.errors import MessageMismatchError, PeerSilentError, at_step
from dlcp.transport.inbox import Inbox
from dlcp.transport.options import TransportOptions
from dlcp.transport.outbox import Outbox
from dlcp.transport.peer import Peer
from dlcp.wire import Header, PacketType

HELLO_REPEAT_S = 0.1
KEEPALIVE_S = 0.5
_HELLO = struct.Struct(">II")


class Liveness:
    """Greetings of one rank and its peers. Not thread-safe: the thread of the protocol drives it.

    Parameters
    ----------
    rank, job
        This rank and its job.
    packets
        What sends greetings.
    peers
        Whom to greet, by rank.
    inbox, outbox
        What is waited for from a peer, and what it has not confirmed: only then its silence matters.
    window
        How many packets a peer may have on the way to this rank.
    options
        See :class:`dlcp.transport.TransportOptions`.
    refused
        Where packets that are refused are counted by reason.
    """

    def __init__(
        self,
        rank: int,
        job: int,
        packets: ControlPackets,
        peers: Mapping[int, Peer],
        inbox: Inbox,
        outbox: Outbox,
        *,
        window: int,
        options: TransportOptions,
        refused: Counter[str],
    ) -> None:
        self._rank, self._job, self._packets, self._peers = rank, job, packets, peers
        self._inbox, self._outbox = inbox, outbox
        self._window, self._options, self._refused = window, options, refused

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return [rank for rank, peer in self._peers.items() if not peer.greeted]

    def greet(self, peer: Peer, now_s: float, kind: PacketType = PacketType.HELLO) -> None:
        """Tell a peer of this rank, or answer its greeting."""
        peer.hello_due_s = now_s + HELLO_REPEAT_S
        self._packets.send(peer.rank, kind, payload=_HELLO.pack(self._options.payload_bytes, self._window))

    def on_hello(self, peer: Peer, header: Header, payload: memoryview, now_s: float) -> MessageMismatchError | None:
        """Take in a greeting, or the answer to one; return what makes it of no use to talk, if anything does."""
        if len(payload) != _HELLO.size:
            self._refused["malformed"] += 1
            return None
        payload_bytes, window = _HELLO.unpack(payload)
        if payload_bytes != self._options.payload_bytes:
            return MessageMismatchError(
                f"job {self._job}: rank {peer.rank} sends {payload_bytes} bytes a packet and rank {self._rank} "
                f"{self._options.payload_bytes}; give all ranks the same payload_bytes"
            )
        peer.greeted = True
        peer.room_packets = max(1, window)
        peer.limit_window()
        if header.type is PacketType.HELLO:
            self.greet(peer, now_s, PacketType.HELLO_ACK)
        return None

    def excuse(self, paused_s: float) -> None:
        """Note that this process may not have run for so long: what peers sent meanwhile is still to be read."""
        if paused_s > KEEPALIVE_S:
            for peer in self._peers.values():
                peer.flow.heard_s += paused_s

    def watch(self, peer: Peer, now_s: float) -> PeerSilentError | None:
        """Ask a peer for a sign of life where something hangs on it; return the error if it is silent for too long."""
        flow = peer.flow
        if not peer.sending and not self._inbox.waits_for(peer.rank):
            flow.heard_s = max(flow.heard_s, now_s - self._options.silence_s / 2)
        elif now_s - flow.heard_s > self._options.silence_s:
            return self._silent(peer, now_s)
        elif now_s - flow.heard_s > KEEPALIVE_S and now_s >= peer.hello_due_s:
            self.greet(peer, now_s)
        return None

    def _silent(self, peer: Peer, now_s: float) -> PeerSilentError:
        # What somebody waits for tells more than what is sent and may be in, of which only the confirmation is lost.
        step, label = min([*self._inbox.awaited_from(peer.rank)] or [*self._outbox.unconfirmed_by(peer.rank)])
        return PeerSilentError(
            f"{at_step(self._job, step)}: rank {peer.rank} has been silent for {now_s - peer.flow.heard_s:.1f} s "
            f"while rank {self._rank} waited for {label}; is its process alive and the path up?"
        )
