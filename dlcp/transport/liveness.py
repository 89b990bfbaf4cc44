# SPDX-License-Identifier: Apache-2.0
"""Whether the other ranks are there: greetings, silence, departures, and paths that full packets no longer pass."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dlcp import wire
from dlcp.transport.engine import ControlPacket, Engine
from dlcp.transport.membership import Membership
from dlcp.transport.messages import (
    MessageKey,
    MessageMismatchError,
    PeerAbortedError,
    PeerSilentError,
    TransportError,
    at_step,
)
from dlcp.transport.path_mtu import NarrowPath
from dlcp.transport.peer import Peer
from dlcp.transport.settings import PATHS_MAX, TransportOptions
from dlcp.wire import GREETING, GREETING_PORT, PacketType

HELLO_REPEAT_S: Final = 0.1
"""Time between unanswered greetings before a round trip is known. With round trips of 0.1 ms, a lost greeting delays
the start by this time; with 100 ms, each rank sends one or two needless greetings."""
KEEPALIVE_S: Final = 0.5
"""A silent peer with a pending answer is greeted after this time, to check that it is alive. It must be well below
``silence_s``."""
ABORT_BYTES_MAX: Final = 1000
FAREWELL: Final = "\0"
"""The first character of the reason when a rank leaves without giving up: its peers need not give up either."""
LAST_PACKETS_S: Final = 0.25
"""The time after a farewell in which earlier packets may still arrive: the delay of many queues."""


class Liveness:
    """Greets all peers, and notices when one is silent, leaves or gives up. Only for the connection's thread.

    Parameters
    ----------
    membership, options, engine, peers
        The connection's.
    ports
        This rank's source ports of all paths but the first, in order.
    room_packets
        Packets from one peer that this rank's receive buffer holds.
    clock, call_later
        The connection's.
    fail
        Makes the connection give up, with an error.
    go_on_without
        Makes it continue without a peer that has left.

    Attributes
    ----------
    refused
        Control packets refused, by reason.
    """

    def __init__(
        self,
        membership: Membership,
        options: TransportOptions,
        engine: Engine,
        peers: Mapping[int, Peer],
        *,
        ports: Sequence[int],
        room_packets: int,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
        fail: Callable[[TransportError], None],
        go_on_without: Callable[[Peer], None],
    ) -> None:
        self._membership, self._options, self._engine, self._peers = membership, options, engine, peers
        self._ports = ports
        self._greeting = GREETING.pack(options.payload_bytes, room_packets) + b"".join(map(GREETING_PORT.pack, ports))
        self._clock, self._call_later = clock, call_later
        self._fail, self._go_on_without = fail, go_on_without
        self._narrow: dict[int, NarrowPath] = {}
        self._looked_s = clock()
        self.refused: Counter[str] = Counter()

    # Greeting and leaving ---------------------------------------------------------------------------------------------

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return [rank for rank, peer in self._peers.items() if not peer.greeted]

    def greet_all(self) -> None:
        """Announce this rank to all peers."""
        for peer in self._peers.values():
            self._greet(peer, self._clock())

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up, or leaves normally if the reason begins with :data:`FAREWELL`."""
        payload = reason.encode()[: min(ABORT_BYTES_MAX, self._options.payload_bytes)]
        for peer in self._peers:
            self._engine.send_control(peer, PacketType.ABORT, payload)

    def _greet(self, peer: Peer, now_s: float, kind: PacketType = PacketType.HELLO) -> None:
        peer.hello_due_s = now_s + HELLO_REPEAT_S
        self._engine.send_control(peer.rank, kind, self._greeting)

    # Silence ----------------------------------------------------------------------------------------------------------

    def on_time(self, now_s: float) -> None:
        """Note the time, which the connection does every :data:`HELLO_REPEAT_S`, before it asks for silence."""
        # This process may not have run for this long: packets from the meantime are still unread.
        paused_s = now_s - self._looked_s - HELLO_REPEAT_S
        if paused_s > KEEPALIVE_S:
            for peer in self._peers.values():
                peer.flow.heard_s += paused_s
        self._looked_s = now_s

    def silence_of(self, peer: Peer, now_s: float) -> TransportError | None:
        """Check that a peer with pending messages is alive; return the error if it has been silent for too long."""
        silent_s, silence_s = now_s - peer.flow.heard_s, self._options.silence_s
        if not peer.sending and not peer.receiving:
            peer.flow.heard_s = max(peer.flow.heard_s, now_s - silence_s / 2)
        elif silent_s > silence_s:
            # A pending receive says more than a sent message, which may have arrived with only its acknowledgement
            # lost.
            waiting: dict[MessageKey, Any] = peer.receiving or peer.sending
            step, label = min((key.step, message.request.label) for key, message in waiting.items())
            return PeerSilentError(
                f"{at_step(self._membership.job, step)}: rank {peer.rank} has been silent for {silent_s:.1f} s "
                f"while rank {self._membership.rank} waited for {label}; is its process alive and the path up?"
            )
        elif now_s >= peer.hello_due_s and (silent_s > KEEPALIVE_S or (self._ports and not peer.answered)):
            self._greet(peer, now_s)
        return None

    # Control packets --------------------------------------------------------------------------------------------------

    def on_control(self, event: ControlPacket) -> None:
        """Process a packet about a peer rather than a message."""
        header, payload = wire.decode(event.datagram), event.datagram[wire.HEADER_BYTES :]
        if header.type is PacketType.ABORT:
            self._on_departure(self._peers[event.peer], payload[:ABORT_BYTES_MAX].decode(errors="replace"))
        elif header.index:  # a probe of the path carries its size there
            if header.count != header.index:  # a late one, from before the start
                self.refused["stale"] += 1
            elif header.type is PacketType.HELLO_ACK and not payload:
                path = self._narrow.get(event.peer)
                self.refused["stale"] += path is None or not path.on_answer(header.index)
            elif header.type is PacketType.HELLO and header.index == len(payload):
                self._engine.send_control(event.peer, PacketType.HELLO_ACK, b"", header.index)
                self.path_to(event.peer).on_probe(event.now_s)
            else:
                self.refused["malformed"] += 1
        elif len(payload) - GREETING.size not in range(0, PATHS_MAX * GREETING_PORT.size, GREETING_PORT.size):
            self.refused["malformed"] += 1
        else:
            self._on_hello(self._peers[event.peer], header.type, payload, event.now_s)

    def path_to(self, rank: int) -> NarrowPath:
        """Return what finds out whether the path to a rank has become too narrow."""
        if rank not in self._narrow:
            label, flow = f"job {self._membership.job}, rank {rank}", self._peers[rank].flow
            probe = partial(self._probe_size, rank)
            self._narrow[rank] = NarrowPath(label, self._options.payload_bytes, flow, probe, self._call_later)
        return self._narrow[rank]

    def _probe_size(self, rank: int, size: int) -> None:
        self._engine.send_control(rank, PacketType.HELLO, bytes(size), size)

    def _on_departure(self, peer: Peer, reason: str) -> None:
        if not reason.startswith(FAREWELL):
            error = PeerAbortedError(f"job {self._membership.job}: rank {peer.rank} gave up: {reason}")
            # Not at once: a peer counts on what arrived in the same batch, since the engine has acknowledged it.
            self._call_later(0.0, partial(self._fail, error))
        elif not peer.left:
            peer.left = reason[1:]
            # Its last packets may still be in flight: on another path, or in another queue.
            self._call_later(LAST_PACKETS_S, partial(self._go_on_without, peer))

    def _on_hello(self, peer: Peer, kind: PacketType, payload: bytes, now_s: float) -> None:
        payload_bytes, room_packets = GREETING.unpack_from(payload)
        ports = [port for (port,) in GREETING_PORT.iter_unpack(payload[GREETING.size :])]
        if payload_bytes != self._options.payload_bytes:
            self._fail(
                MessageMismatchError(
                    f"job {self._membership.job}: rank {peer.rank} sends {payload_bytes} bytes a packet and rank "
                    f"{self._membership.rank} {self._options.payload_bytes}; give all ranks the same payload_bytes"
                )
            )
            return
        peer.greeted = True
        peer.room_packets = max(1, room_packets)
        peer.limit_window()
        self._engine.accept(peer.rank, ports)
        if kind is PacketType.HELLO:
            self._greet(peer, now_s, PacketType.HELLO_ACK)
            if self._ports and not peer.answered:  # it was not up when it was greeted
                self._greet(peer, now_s)
        else:
            peer.answered = True
            self._engine.spread(peer.rank, 1 + len(self._ports))
