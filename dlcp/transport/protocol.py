# SPDX-License-Identifier: Apache-2.0
"""Bounded-loss messages between ranks, without sockets, threads or clocks: those are given by whoever drives it.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges what arrives. When
the sender has nothing left to send it asks (PROBE); the receiver answers with what is missing (BITMAP), or that it
needs no more (STOP, repeated until STOP_ACK). Control packets carry their own state and may be lost, repeated or late.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.tags import PacketTags
from dlcp.transport.bound import LossBound
from dlcp.transport.errors import (
    DeadlineError,
    MessageMismatchError,
    PeerAbortedError,
    PeerSilentError,
    TransportError,
)
from dlcp.transport.flow import Flow
from dlcp.transport.incoming import Arrival, Awaited, IncomingMessage
from dlcp.transport.options import TransportOptions
from dlcp.transport.outgoing import DELIVERED, Delivery, MessageKey, OutgoingMessage
from dlcp.wire import Flag, Header, PacketType, Queue

ACK_ENTRY = struct.Struct(">IHI")
"""Step, message and index of a packet that arrived."""
ACK_EVERY_PACKETS = 8
ACK_DELAY_S = 0.001
"""An acknowledgement waits for this many packets, or this long. Chosen by us: it costs as much as a packet of data."""
ACK_REPEATED = 8
"""How many entries of the last acknowledgement the next one repeats, in case it was lost. Chosen by us."""
ECN_CAPABLE = 2
ECN_MASK = 3
CONGESTED = 3
MESSAGE_PACKETS_MAX = 1 << 22
STOP_REPEAT_S = 0.02
STOP_REPEAT_MAX_S = 0.5
HELLO_REPEAT_S = 0.1
KEEPALIVE_S = 0.5
STEPS_AHEAD_MAX = 1 << 16

Address = tuple[str, int]
Name = tuple[int, int, int]
"""Sender, step and number of a message."""
Send = Callable[[int, bytes | memoryview, bytes | memoryview, int], bool]
"""Sends header, payload and IPv4 type of service to a rank; False if the socket is full."""

_HELLO = struct.Struct(">II")


@dataclass(slots=True)
class _Peer:
    """What is known of another rank."""

    rank: int
    address: Address
    flow: Flow
    heard_s: float
    greeted: bool = False
    hello_due_s: float = 0.0
    data_received: int = 0
    marked_received: int = 0
    to_acknowledge: list[bytes] = field(default_factory=list)
    acknowledged: list[bytes] = field(default_factory=list)
    acknowledge_due_s: float = math.inf


@dataclass(slots=True)
class _Stopping:
    """A message that is done here, of which the sender may not know yet."""

    bitmap: bytes
    packets: int
    due_s: float
    repeat_s: float
    give_up_s: float
    unconfirmed: set[int]


class Protocol:
    """All messages of one rank. Not thread-safe: one thread drives it.

    Parameters
    ----------
    rank, peers
        This rank, and the address of every other.
    job, token
        Job number, and the session token that all ranks share; packets without it are refused.
    options
        See :class:`TransportOptions`.
    receive_packets
        How many packets the socket's receive buffer holds; peers divide it among themselves.
    send
        How packets leave.
    now_s
        The time at which the clock of the caller starts.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, Address],
        *,
        job: int,
        token: int,
        options: TransportOptions,
        receive_packets: int,
        send: Send,
        now_s: float,
    ) -> None:
        self.rank = rank
        self.job = job
        self.token = token
        self.options = options
        self.refused: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.on_unawaited: Callable[[int, MessageKey], None] | None = None
        self._send = send
        self._window = max(1, receive_packets // max(1, len(peers)))
        self._peers = {
            peer: _Peer(peer, address, Flow(options.rate_control(len(peers)), self._window), now_s)
            for peer, address in peers.items()
        }
        self._incoming: dict[Name, IncomingMessage] = {}
        self._stopping: dict[Name, _Stopping] = {}
        self._finished: set[Name] = set()
        self._clock_s = now_s
        self._stashed_bytes = 0
        self._oldest_step = 0
        self._failure: TransportError | None = None

    # What the owner asks for ------------------------------------------------------------------------------------------

    def send_message(
        self,
        peer: int,
        key: MessageKey,
        payload: memoryview,
        tags: PacketTags,
        bound: LossBound,
        label: str,
        now_s: float,
    ) -> Future[Delivery]:
        """Send a message; the future resolves once it is confirmed. Until then ``payload`` must not change."""
        count = len(tags.queue)
        if count != -(-len(payload) // self.options.payload_bytes) or not 0 < count <= MESSAGE_PACKETS_MAX:
            raise ValueError(f"{len(payload)} bytes need other than {count} packets of {self.options.payload_bytes}")
        headers, tos = self._encode(key, tags, bound, count)
        message = OutgoingMessage(
            key,
            payload,
            self.options.payload_bytes,
            tags,
            bound,
            headers,
            tos,
            label,
            now_s,
            now_s + self.options.deadline_s,
        )
        if self._failure:
            message.done.set_exception(self._failure)
            return message.done
        self._peers[peer].flow.add(message)
        if bound.immediate:
            self._probe(peer, message, now_s)  # tells the receiver how many packets are protected
        return message.done

    def receive_message(
        self, peer: int, key: MessageKey, message_bytes: int | None, bound: LossBound, label: str, now_s: float
    ) -> Future[Arrival]:
        """Wait for a message; the future resolves when the bound is met.

        Without ``message_bytes`` its size is what the sender says; it must have been heard of (``on_unawaited``).
        """
        done: Future[Arrival] = Future()
        if self._failure:
            done.set_exception(self._failure)
            return done
        name = (peer, *key)
        message = self._incoming.get(name)
        if message is None:
            if message_bytes is None:
                raise ValueError(f"{self._where(key.step)}: nothing of {label} has come from rank {peer}: size unknown")
            packets = -(-message_bytes // self.options.payload_bytes)
            message = self._incoming[name] = IncomingMessage(packets, self.options.payload_bytes, now_s)
        else:
            self._stashed_bytes -= len(message.buffer)
        awaited = Awaited(message_bytes, bound, label, now_s + self.options.deadline_s, done)
        if not message.wait(awaited):
            self._disagree(name, awaited, message.packets)
            return done
        self._settle(name, message, now_s, asked=message.asked)
        return done

    def forget_before(self, step: int) -> None:
        """Declare all steps before ``step`` over: their packets are refused from now on."""
        self._oldest_step = max(self._oldest_step, step)
        for name in [name for name in self._incoming if name[1] < step]:
            message = self._incoming.pop(name)
            if message.awaited is None:
                self._stashed_bytes -= len(message.buffer)
        self._finished = {name for name in self._finished if name[1] >= step}

    def greet(self, now_s: float) -> None:
        """Announce this rank to all peers."""
        for peer in self._peers.values():
            self._hello(peer, PacketType.HELLO, now_s)

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return [rank for rank, peer in self._peers.items() if not peer.greeted]

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way and every peer knows it."""
        return not self._stopping and not any(peer.flow.messages for peer in self._peers.values())

    def rate_to(self, rank: int) -> float:
        """Return how fast a rank has taken in lately what waited to be sent to it, in bit/s; 0 if that is not known."""
        return self._peers[rank].flow.rate.packets_per_s(self._clock_s) * self.options.payload_bytes * 8

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up."""
        for peer in self._peers:
            self._control(peer, PacketType.ABORT, payload=reason.encode()[: min(1000, self.options.payload_bytes)])

    def fail(self, error: TransportError) -> None:
        """Give up: everything that waits, and everything asked for from now on, gets ``error``."""
        self._failure = self._failure or error
        for peer in self._peers.values():
            for sending in list(peer.flow.messages.values()):
                peer.flow.remove(sending)
                if not sending.done.done():
                    sending.done.set_exception(error)
        for waiting in self._incoming.values():
            if waiting.awaited and not waiting.awaited.done.done():
                waiting.awaited.done.set_exception(error)
        self._incoming.clear()
        self._stopping.clear()
        self._stashed_bytes = 0

    # What the network brings ------------------------------------------------------------------------------------------

    def on_datagram(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Take in one datagram; whatever is wrong with it is counted in ``refused``."""
        try:
            header = wire.decode(datagram)
        except wire.HeaderError:
            self.refused["malformed"] += 1
            return
        peer = self._peers.get(header.sender)
        if header.token != self.token:
            self.refused["token"] += 1
        elif header.job != self.job:
            self.refused["job"] += 1
        elif peer is None or peer.address != source:
            self.refused["sender"] += 1
        else:
            peer.heard_s = now_s
            self._dispatch(peer, header, datagram[wire.HEADER_BYTES :], tos, now_s)

    def _dispatch(self, peer: _Peer, header: Header, payload: memoryview, tos: int, now_s: float) -> None:
        kind = header.type
        if kind is PacketType.DATA:
            self._on_data(peer, header, payload, tos, now_s)
        elif kind is PacketType.ACK:
            self._on_ack(peer, header, payload, now_s)
        elif kind is PacketType.PROBE:
            self._on_probe(peer, header, now_s)
        elif kind is PacketType.BITMAP or kind is PacketType.STOP:
            self._on_bitmap(peer, header, payload, now_s)
        elif kind is PacketType.STOP_ACK:
            self._on_stop_ack(peer, header)
        elif kind is PacketType.ABORT:
            reason = bytes(payload[:1000]).decode(errors="replace")
            self.fail(PeerAbortedError(f"job {self.job}: rank {peer.rank} gave up: {reason}"))
        else:
            self._on_hello(peer, header, payload, now_s)

    def _on_data(self, peer: _Peer, header: Header, payload: memoryview, tos: int, now_s: float) -> None:
        name = (peer.rank, header.step, header.message)
        if not self._oldest_step <= header.step <= self._oldest_step + STEPS_AHEAD_MAX:
            self.refused["stale"] += 1
            return
        if name in self._finished:
            self.counted["late"] += 1
            stopping = self._stopping.get(name)
            if stopping and now_s > stopping.due_s - stopping.repeat_s / 2:
                self._stop(name, stopping, now_s)
            return
        message = self._incoming.get(name)
        if message is None:
            message = self._stash(name, header, now_s, payload)
            if message is None:
                return
        index = header.index
        if header.count != message.packets or index >= message.packets or not message.fits(index, payload):
            self.refused["malformed"] += 1
            is_last = index == header.count - 1
            whole = 0 < len(payload) <= self.options.payload_bytes and (
                is_last or len(payload) == self.options.payload_bytes
            )
            if message.awaited and whole and (header.count != message.packets or is_last):
                self._disagree(name, message.awaited, header.count)
            return
        peer.data_received += 1
        peer.marked_received += tos & ECN_MASK == CONGESTED
        peer.to_acknowledge.append(ACK_ENTRY.pack(header.step, header.message, index))
        if len(peer.to_acknowledge) == 1:
            peer.acknowledge_due_s = now_s + ACK_DELAY_S
        if message.delivered[index]:
            self.counted["duplicate"] += 1
            return
        message.store(index, payload, header.layer, bool(header.flags & Flag.PROTECTED))
        self.counted["data"] += 1
        self._settle(name, message, now_s)

    def _disagree(self, name: Name, awaited: Awaited, packets: int) -> None:
        self._incoming.pop(name)
        self._finished.add(name)
        if not awaited.done.done():
            awaited.done.set_exception(
                MessageMismatchError(
                    f"{self._where(name[1])}: rank {name[0]} sends {awaited.label} in {packets} packets, but "
                    f"{awaited.message_bytes} bytes were expected; do all ranks run the same model and options?"
                )
            )

    def _stash(
        self, name: Name, header: Header, now_s: float, payload: memoryview | None = None
    ) -> IncomingMessage | None:
        size = header.count * self.options.payload_bytes
        if not 0 < header.count <= MESSAGE_PACKETS_MAX or header.index >= header.count:
            self.refused["malformed"] += 1
            return None
        if self._stashed_bytes + size > self.options.stash_bytes:
            self.counted["stash_full"] += 1  # nothing is lost: unacknowledged packets are sent again
            return None
        message = IncomingMessage(header.count, self.options.payload_bytes, now_s)
        if payload is not None and not message.fits(header.index, payload):
            self.refused["malformed"] += 1
            return None
        self._stashed_bytes += size
        self._incoming[name] = message
        if self.on_unawaited:
            self.on_unawaited(name[0], MessageKey(header.step, header.message))
        return message

    def _settle(self, name: Name, message: IncomingMessage, now_s: float, *, asked: bool = False) -> bool:
        awaited = message.awaited
        if awaited is None or not (message.complete or (message.enough and (asked or awaited.bound.immediate))):
            return False
        del self._incoming[name]
        self._finished.add(name)
        bitmap = message.bitmap()
        span = self.options.payload_bytes * 8
        stopping = _Stopping(
            np.packbits(bitmap).tobytes(),
            message.packets,
            now_s,
            STOP_REPEAT_S,
            now_s + self.options.deadline_s,
            set(range(0, message.packets, span)),
        )
        self._stopping[name] = stopping
        self._stop(name, stopping, now_s)
        if not awaited.done.done():
            awaited.done.set_result(message.arrival(now_s))
        return True

    def _stop(self, name: Name, stopping: _Stopping, now_s: float) -> None:
        for first in stopping.unconfirmed:
            part = stopping.bitmap[first // 8 : first // 8 + self.options.payload_bytes]
            self._control(
                name[0], PacketType.STOP, MessageKey(*name[1:]), index=first, count=stopping.packets, payload=part
            )
        stopping.due_s = now_s + stopping.repeat_s
        stopping.repeat_s = min(STOP_REPEAT_MAX_S, stopping.repeat_s * 2)

    def _on_probe(self, peer: _Peer, header: Header, now_s: float) -> None:
        name = (peer.rank, header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            self._stop(name, stopping, now_s)
            return
        if name in self._finished or not self._oldest_step <= header.step <= self._oldest_step + STEPS_AHEAD_MAX:
            self.refused["stale"] += 1
            return
        message = self._incoming.get(name)
        if message is None:
            message = self._stash(name, header._replace(index=0), now_s)
            if message is None:
                return
        if header.count != message.packets or header.index > message.packets:
            self.refused["malformed"] += 1
            return
        message.protected_packets = header.index
        message.asked = True
        if self._settle(name, message, now_s, asked=True):
            return
        bitmap = np.packbits(message.bitmap()).tobytes()
        for first in range(0, message.packets, self.options.payload_bytes * 8):
            part = bitmap[first // 8 : first // 8 + self.options.payload_bytes]
            self._control(
                peer.rank,
                PacketType.BITMAP,
                MessageKey(header.step, header.message),
                index=first,
                count=message.packets,
                payload=part,
            )

    def _on_ack(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        if not payload or len(payload) % ACK_ENTRY.size:
            self.refused["malformed"] += 1
            return
        peer.flow.on_ack(now_s, ACK_ENTRY.iter_unpack(payload), header.count)

    def _on_bitmap(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        key = MessageKey(header.step, header.message)
        message = peer.flow.messages.get(key)
        if header.type is PacketType.STOP and message is None:
            # Our last answer was lost; the bitmap has been read.
            self._control(peer.rank, PacketType.STOP_ACK, key, index=header.index)
            return
        span = self.options.payload_bytes * 8
        if message is None:
            self.counted["late"] += 1
            return
        part = min(span, message.packets - header.index)
        if header.count != message.packets or header.index % span or part < 1 or len(payload) != -(-part // 8):
            self.refused["malformed"] += 1
            return
        delivered = np.unpackbits(np.frombuffer(payload, np.uint8), count=part).astype(np.bool_)
        if header.type is PacketType.STOP:
            self._control(peer.rank, PacketType.STOP_ACK, key, index=header.index)
            if message.confirm(header.index, delivered):
                peer.flow.remove(message)
                message.finish(now_s)
        elif message.probed_s is not None:
            # A peer that is not there yet answers without news: ask it less often, but the network is not to blame.
            message.probes_unanswered = 0
            if peer.flow.on_bitmap(now_s, message, header.index, delivered, message.probed_s):
                message.probes_without_news = 0
            if header.index + part >= message.packets:
                message.probed_s = None

    def _on_stop_ack(self, peer: _Peer, header: Header) -> None:
        name = (peer.rank, header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            stopping.unconfirmed.discard(header.index)
            if not stopping.unconfirmed:
                del self._stopping[name]

    def _on_hello(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        if len(payload) != _HELLO.size:
            self.refused["malformed"] += 1
            return
        payload_bytes, window = _HELLO.unpack(payload)
        if payload_bytes != self.options.payload_bytes:
            error = MessageMismatchError(
                f"job {self.job}: rank {peer.rank} sends {payload_bytes} bytes a packet and rank {self.rank} "
                f"{self.options.payload_bytes}; give all ranks the same payload_bytes"
            )
            self.fail(error)
            return
        peer.greeted = True
        peer.flow.largest_window = max(1, window)
        if header.type is PacketType.HELLO:
            self._hello(peer, PacketType.HELLO_ACK, now_s)

    # What time brings -------------------------------------------------------------------------------------------------

    def acknowledge(self, now_s: float) -> float:
        """Send the acknowledgements that are due; return when the next one will be."""
        due_s = math.inf
        for peer in self._peers.values():
            if peer.to_acknowledge:
                if len(peer.to_acknowledge) >= ACK_EVERY_PACKETS or now_s >= peer.acknowledge_due_s:
                    self._acknowledge(peer)
                else:
                    due_s = min(due_s, peer.acknowledge_due_s)
        return due_s

    def _acknowledge(self, peer: _Peer) -> None:
        fresh = peer.to_acknowledge
        entries = self.options.payload_bytes // ACK_ENTRY.size
        repeated = min(ACK_REPEATED, entries // 2)
        limit = entries - repeated
        for start in range(0, len(fresh), limit):
            part = fresh[start : start + limit]
            self._control(
                peer.rank,
                PacketType.ACK,
                index=peer.data_received & 0xFFFFFFFF,
                count=peer.marked_received & 0xFFFFFFFF,
                payload=b"".join(part + peer.acknowledged),
            )
            peer.acknowledged = part[-repeated:]
        fresh.clear()

    def pump(self, now_s: float, burst: int = 8) -> bool:
        """Send what the windows admit, a burst to each peer in turn; return whether more could be sent right away.

        Raises
        ------
        BlockingIOError
            The socket is full; call again when it is writable.
        """
        more = False
        for peer in self._peers.values():
            flow = peer.flow
            if flow.messages:
                more |= flow.pump(now_s, burst, partial(self._send, peer.rank)) == burst
        return more

    def on_time(self, now_s: float) -> float:
        """Do what is due; return when to be called next.

        Returns
        -------
        A time on the clock of the caller, at most ``HELLO_REPEAT_S`` ahead.
        """
        self._clock_s = now_s
        due_s = now_s + HELLO_REPEAT_S
        for peer in self._peers.values():
            due_s = min(due_s, self._watch(peer, now_s))
        for name, stopping in list(self._stopping.items()):
            if now_s >= stopping.give_up_s:
                del self._stopping[name]
            elif now_s >= stopping.due_s:
                self._stop(name, stopping, now_s)
            due_s = min(due_s, stopping.due_s)
        for name, waiting in self._incoming.items():
            if waiting.awaited and now_s >= waiting.awaited.deadline_s:
                self.fail(self._late(name, waiting))
                break
        return max(due_s, now_s)

    def _watch(self, peer: _Peer, now_s: float) -> float:
        waited_for = bool(peer.flow.messages) or any(
            name[0] == peer.rank and message.awaited for name, message in self._incoming.items()
        )
        if not waited_for:
            peer.heard_s = max(peer.heard_s, now_s - self.options.silence_s / 2)
            return now_s + HELLO_REPEAT_S
        if now_s - peer.heard_s > self.options.silence_s:
            self.fail(self._silent(peer, now_s))
            return now_s
        if now_s - peer.heard_s > KEEPALIVE_S and now_s >= peer.hello_due_s:
            self._hello(peer, PacketType.HELLO, now_s)
        due_s = now_s + HELLO_REPEAT_S
        if peer.flow.control.window < 1:
            due_s = min(due_s, max(now_s, peer.flow.paused_until_s))
        for message in list(peer.flow.messages.values()):
            if now_s >= message.deadline_s:
                share = message.state.count(DELIVERED) / message.packets
                need = message.bound.required(message.packets) / message.packets
                self.fail(
                    DeadlineError(
                        f"{self._where(message.key.step)}: rank {peer.rank} confirmed {share:.0%} of {message.label} "
                        f"(bound {need:.0%}) in {now_s - message.started_s:.1f} s"
                    )
                )
                return now_s
            idle = not message.has_unsent and message.flying == 0
            if message.flying or idle:
                if now_s >= message.probe_due_s or (idle and not message.probes_without_news):
                    self._probe(peer.rank, message, now_s)
                due_s = min(due_s, message.probe_due_s)
        return due_s

    def _probe(self, peer: int, message: OutgoingMessage, now_s: float) -> None:
        flow = self._peers[peer].flow
        if message.probed_s is None:
            message.probed_s = now_s
        if message.probes_unanswered > 1:
            flow.control.on_timeout()
        message.probe_due_s = now_s + flow.probe_timeout_s * 2 ** min(6, message.probes_without_news)
        message.probes_without_news += 1
        message.probes_unanswered += 1
        self.counted["probe"] += 1
        self._control(peer, PacketType.PROBE, message.key, index=message.protected_packets, count=message.packets)

    def _late(self, name: Name, message: IncomingMessage) -> TransportError:
        assert message.awaited
        need = message.awaited.bound.required(message.packets) / message.packets
        return DeadlineError(
            f"{self._where(name[1])}: rank {name[0]} delivered {message.arrived / message.packets:.0%} of "
            f"{message.awaited.label} (bound {need:.0%}) in {self.options.deadline_s:.1f} s"
        )

    def _silent(self, peer: _Peer, now_s: float) -> TransportError:
        labels = [(message.key.step, message.label) for message in peer.flow.messages.values()]
        labels += [
            (name[1], message.awaited.label)
            for name, message in self._incoming.items()
            if name[0] == peer.rank and message.awaited
        ]
        step, label = min(labels)
        return PeerSilentError(
            f"{self._where(step)}: rank {peer.rank} has been silent for {now_s - peer.heard_s:.1f} s "
            f"while rank {self.rank} waited for {label}; is its process alive and the path up?"
        )

    def _where(self, step: int) -> str:
        return f"job {self.job}, step {step}"

    # Packets ----------------------------------------------------------------------------------------------------------

    def _encode(
        self, key: MessageKey, tags: PacketTags, bound: LossBound, count: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        tagged = self.options.tagged
        droppable = tagged & ~tags.protected & (tags.drop_class > 0) & (bound.ratio > 0)
        queue = tags.queue if tagged else np.full(count, Queue.ORDINARY, np.uint8)
        headers = wire.pack(
            count,
            packet_type=PacketType.DATA,
            flags=np.where(tags.protected, Flag.PROTECTED, 0),
            queue=queue,
            drop_class=np.where(droppable, tags.drop_class, 0),
            layer=tags.layer,
            job=self.job,
            budget=min(0xFFFF, bound.allowed(count) // self.options.switch_hops),
            step=key.step,
            message=key.message,
            sender=self.rank,
            index=np.arange(count),
            count=count,
            token=self.token,
        )
        ecn = ECN_CAPABLE if next(iter(self._peers.values())).flow.control.ecn_capable else 0
        codes = np.array([[wire.dscp(q, d) << 2 | ecn for d in (False, True)] for q in range(8)], np.uint8)
        tos = codes[queue, droppable.astype(np.uint8)] if tagged else np.full(count, ecn, np.uint8)
        return headers.view(np.uint8).reshape(count, wire.HEADER_BYTES), tos

    def _hello(self, peer: _Peer, kind: PacketType, now_s: float) -> None:
        peer.hello_due_s = now_s + HELLO_REPEAT_S
        self._control(peer.rank, kind, payload=_HELLO.pack(self.options.payload_bytes, self._window))

    def _control(
        self,
        peer: int,
        kind: PacketType,
        key: MessageKey = MessageKey(0, 0),  # noqa: B008
        *,
        index: int = 0,
        count: int = 0,
        payload: bytes = b"",
    ) -> None:
        tagged = self.options.tagged
        queue = Queue.CONTROL if tagged else Queue.ORDINARY
        header = Header(kind, 0, queue, 0, 0, self.job, 0, key.step, key.message, self.rank, index, count, self.token)
        tos = wire.dscp(queue, False) << 2 if tagged else 0
        # A control packet that the socket cannot take now is as good as lost, and repeated as such.
        if not self._send(peer, header.encode(), payload, tos):
            self.counted["control_unsent"] += 1
