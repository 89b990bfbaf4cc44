# SPDX-License-Identifier: Apache-2.0
"""Bounded-loss messages between ranks, without threads or clocks: those are given by whoever drives it.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges what arrives. When
the sender has nothing left to send it asks (PROBE); the receiver answers with what is missing (BITMAP), or that it
needs no more (STOP, repeated until STOP_ACK). Control packets carry their own state and may be lost, repeated or late.

Data, acknowledgements and windows are the engine's (:mod:`dlcp.transport.engine`); all that is rarer is here.
"""

import heapq
import math
import socket
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.tags import PacketTags
from dlcp.transport import native
from dlcp.transport.bound import LossBound
from dlcp.transport.congestion import RateControl
from dlcp.transport.delivery_rate import DeliveryRate
from dlcp.transport.engine import Address, Bytes, Emit, Engine, Flow, Incoming, MessageKey
from dlcp.transport.errors import (
    DeadlineError,
    MessageMismatchError,
    PeerAbortedError,
    PeerSilentError,
    TransportError,
)
from dlcp.transport.options import TransportOptions
from dlcp.transport.plain import PlainEngine
from dlcp.transport.receiving import (
    NOTHING,
    STOP_REPEAT_MAX_S,
    Arrival,
    Awaited,
    Name,
    Receiving,
    Stopping,
    Summation,
    check_places,
)
from dlcp.transport.scratch import Scratch
from dlcp.transport.sending import Delivery, Sending, packets_of
from dlcp.wire import Header, PacketType, Queue

MESSAGE_PACKETS_MAX = 1 << 22
HELLO_REPEAT_S = 0.1
KEEPALIVE_S = 0.5
STEPS_AHEAD_MAX = 1 << 16
MORE = b"\1"
"""Payload of a PROBE whose sender still has packets to send: what is missing is no reason yet to do without."""

USEFUL_WINDOW_BYTES = 2 << 20
FASTEST_BPS = 100e9
"""A window is no larger than what a link of this speed can hold in a round trip, or this many bytes if that is less.

More only stands in buffers, and falls out of a host's caches. Chosen by us, by CPU time on a loopback.
"""

_HELLO = struct.Struct(">II")


@dataclass(slots=True)
class _Peer:
    """What is known of another rank."""

    rank: int
    flow: Flow
    control: RateControl
    rate: DeliveryRate
    sending: dict[MessageKey, Sending]
    greeted: bool = False
    hello_due_s: float = 0.0
    window: int = 1
    """What its receive buffer has room for, in packets."""
    base_rtt_s: float = math.inf
    """The shortest round trip so far."""


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
    now_s
        The time at which the clock of the caller starts.
    sock
        The socket, if the engine is to use it (:meth:`Engine.turn`).
    emit
        How packets leave otherwise.
    compiled
        Whether to use the engine in C; None: if it is here.
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
        now_s: float,
        sock: socket.socket | None = None,
        emit: Emit | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.rank = rank
        self.job = job
        self.token = token
        self.options = options
        self.on_unawaited: Callable[[int, MessageKey], None] | None = None
        self.scratch = Scratch()
        self._refused: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._window = max(1, receive_packets // max(1, len(peers)))
        make = native.NativeEngine if (native.available() if compiled is None else compiled) else PlainEngine
        self.engine: Engine = make(
            rank,
            peers,
            job=job,
            token=token,
            payload_bytes=options.payload_bytes,
            tagged=options.tagged,
            on_control=self._on_control,
            on_unknown=self._on_unknown,
            on_settled=self._on_settled,
            sock=sock,
            emit=emit,
            now_s=now_s,
        )
        self._peers = {
            peer: _Peer(peer, self.engine.flows[peer], options.rate_control(len(peers)), DeliveryRate(), {})
            for peer in peers
        }
        for peer in self._peers.values():
            peer.window = peer.flow.largest_window = self._window
            peer.flow.window = peer.control.window
        self._incoming: dict[Name, Receiving] = {}
        self._stopping: dict[Name, Stopping] = {}
        self._finished: set[Name] = set()
        self._clock_s = self._now_s = now_s
        self.changed = True
        """Whether something has happened since :meth:`on_time` that may make something else due sooner."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._later_serial = 0
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
        tail: Bytes = NOTHING,
    ) -> Future[Delivery]:
        """Send a message; the future resolves once it is confirmed. Until then its bytes must not change."""
        count = len(tags.queue)
        size = len(payload) + len(tail)
        if count != -(-size // self.options.payload_bytes) or not 0 < count <= MESSAGE_PACKETS_MAX:
            raise ValueError(f"{size} bytes need other than {count} packets of {self.options.payload_bytes}")
        if self._failure:
            failed: Future[Delivery] = Future()
            failed.set_exception(self._failure)
            return failed
        to = self._peers[peer]
        header = self._header(PacketType.DATA, key, count=count)
        packets = packets_of(
            header,
            np.frombuffer(payload, np.uint8),
            tail,
            tags,
            bound,
            self.options,
            ecn_capable=to.control.ecn_capable,
        )
        message = self.engine.send(peer, key, packets, now_s)
        sending = to.sending[key] = Sending(
            peer,
            key,
            bound,
            label,
            now_s,
            now_s + self.options.deadline_s,
            int(np.count_nonzero(tags.protected)),
            packets.payload,
            message,
        )
        message.owner = sending
        self.changed = True
        if bound.immediate:
            self._probe(to, sending, now_s)  # tells the receiver how many packets are protected
        return sending.done

    def receive_message(
        self,
        peer: int,
        key: MessageKey,
        message_bytes: int | None,
        bound: LossBound,
        label: str,
        now_s: float,
        *,
        into: Bytes | memoryview | None = None,
        tail: Bytes = NOTHING,
        summation: Summation | None = None,
        position: int = 0,
    ) -> Future[Arrival]:
        """Wait for a message; the future resolves when the bound is met.

        Parameters
        ----------
        message_bytes
            Its size with its tail. None: what the sender says; then the message must have been heard of
            (``on_unawaited``), and its sender must protect the last packet.
        into, tail
            Where its bytes go: first ``into``, then ``tail``.
        summation, position
            Add it to a sum instead, as the member at a position; ``into`` holds what comes out of turn, and may be left
            out for position 0.
        """
        awaited = Awaited(message_bytes, bound, label, now_s + self.options.deadline_s)
        self.changed = True
        if self._failure:
            awaited.done.set_exception(self._failure)
            return awaited.done
        name = (peer, *key)
        receiving = self._incoming.get(name)
        if isinstance(into, memoryview):
            into = np.frombuffer(into, np.uint8)
        check_places(message_bytes, into, tail, None if summation is None else summation.values, label)
        if receiving is None:
            if message_bytes is None:
                raise ValueError(f"{self._where(key.step)}: nothing of {label} has come from rank {peer}: size unknown")
            receiving = self._expect(name, message_bytes, now_s, into, tail, kept=summation is None or position > 0)
        else:
            if not self._agrees(receiving.message, message_bytes):
                self._disagree(receiving, awaited, receiving.message.packets)
                return awaited.done
            self._stashed_bytes -= len(receiving.stash)
            self._unstash(receiving, message_bytes, into, tail, joined=summation is not None)
        receiving.awaited, receiving.placed = awaited, into is not None
        message = receiving.message
        if summation is not None:
            receiving.summation = summation
            summation.join(message, position)
        last = 0 if message_bytes is None else message_bytes - (message.packets - 1) * self.options.payload_bytes
        self.engine.wait(message, bound.required(message.packets), bound.immediate, last, now_s)
        return awaited.done

    def summation(self, values: NDArray[np.float32], members: int, divisor: float | None = None) -> Summation:
        """Return a sum of ``values`` with what ``members`` others send, to be given to :meth:`receive_message`.

        It is divided by ``divisor``: by default the number of ranks, which gives the average.
        """
        per_packet = self.options.payload_bytes // values.itemsize
        return Summation(self.engine, values, per_packet, members, members + 1 if divisor is None else divisor)

    def detach(self, peer: int, key: MessageKey, copy: Bytes | None = None) -> None:
        """Go on sending a message from a copy, so that its payload may change although it is not confirmed.

        Without a ``copy`` one is made.
        """
        sending = self._peers[peer].sending.get(key)
        if sending is not None:
            self.engine.replace_payload(sending.message, sending.payload.copy() if copy is None else copy)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something about ``delay_s`` from now."""
        self._later_serial += 1
        self.changed = True
        heapq.heappush(self._later, (self._now_s + delay_s, self._later_serial, action))

    def forget_before(self, step: int) -> None:
        """Declare all steps before ``step`` over: their packets are refused from now on."""
        self._oldest_step = max(self._oldest_step, step)
        for name in [name for name in self._incoming if name[1] < step]:
            self._drop(name)
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
        return not self._stopping and not any(peer.sending for peer in self._peers.values())

    @property
    def refused(self) -> Counter[str]:
        """Packets refused, by reason."""
        counters = self.engine.counters().items()
        found = {name.removeprefix("refused_"): value for name, value in counters if name.startswith("refused_")}
        return self._refused + Counter(found)

    @property
    def counted(self) -> Counter[str]:
        """Other events, by name."""
        counters = self.engine.counters().items()
        return self._counted + Counter({name: value for name, value in counters if not name.startswith("refused_")})

    def rate_to(self, rank: int) -> float:
        """Return how fast a rank has taken in lately what waited to be sent to it, in bit/s; 0 if that is not known."""
        return self._peers[rank].rate.packets_per_s(self._clock_s) * self.options.payload_bytes * 8

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up."""
        for peer in self._peers:
            self._control(peer, PacketType.ABORT, payload=reason.encode()[: min(1000, self.options.payload_bytes)])

    def fail(self, error: TransportError) -> None:
        """Give up: everything that waits, and everything asked for from now on, gets ``error``."""
        self._failure = self._failure or error
        failed: list[Future[Delivery] | Future[Arrival]] = []
        for peer in self._peers.values():
            for sending in peer.sending.values():
                self.engine.remove(sending.message)
                failed.append(sending.done)
            peer.sending.clear()
        for name in list(self._incoming):
            awaited = self._incoming[name].awaited
            self._drop(name)
            if awaited:
                failed.append(awaited.done)
        self._stopping.clear()
        for future in failed:
            if not future.done():
                future.set_exception(error)

    # Messages in ------------------------------------------------------------------------------------------------------

    def _expect(
        self, name: Name, message_bytes: int, now_s: float, into: Bytes | None, tail: Bytes, *, kept: bool
    ) -> Receiving:
        if into is None and kept:
            into = np.empty(message_bytes - len(tail), np.uint8)
        packets = -(-message_bytes // self.options.payload_bytes)
        message = self.engine.expect(name[0], MessageKey(*name[1:]), packets, into, tail)
        receiving = self._incoming[name] = Receiving(name, message, now_s, NOTHING)
        receiving.payload = NOTHING if into is None else into
        message.owner = receiving
        return receiving

    def _unstash(
        self, receiving: Receiving, message_bytes: int | None, into: Bytes | None, tail: Bytes, *, joined: bool
    ) -> None:
        stash, receiving.stash = receiving.stash, NOTHING
        if joined:
            receiving.payload = stash  # what came is summed from where it is
            return
        if into is None and message_bytes is not None:
            receiving.payload = stash[: message_bytes - len(tail)]
            if len(tail):
                self.engine.move(receiving.message, receiving.payload, tail)
            return
        if into is None:
            receiving.payload = stash  # as long as the sender says, which only its last packet tells
            return
        self.engine.move(receiving.message, into, tail)
        self.scratch.give(stash)
        receiving.payload = into

    def _agrees(self, message: Incoming, message_bytes: int | None) -> bool:
        if message_bytes is None:
            return True
        last = message_bytes - (message.packets - 1) * self.options.payload_bytes
        return 0 < last <= self.options.payload_bytes and message.last_bytes in (0, last)

    def _drop(self, name: Name) -> None:
        receiving = self._incoming.pop(name)
        self._stashed_bytes -= len(receiving.stash)
        self.engine.close(receiving.message)
        if receiving.summation is None:
            self.engine.free(receiving.message)

    def _disagree(self, receiving: Receiving, awaited: Awaited, packets: int) -> None:
        name = receiving.name
        self._drop(name)
        self._finished.add(name)
        if not awaited.done.done():
            awaited.done.set_exception(
                MessageMismatchError(
                    f"{self._where(name[1])}: rank {name[0]} sends {awaited.label} in {packets} packets, but "
                    f"{awaited.message_bytes} bytes were expected; do all ranks run the same model and options?"
                )
            )

    def _on_unknown(self, rank: int, header: Header, size: int, now_s: float) -> Incoming | None:
        name = (rank, header.step, header.message)
        if not self._oldest_step <= header.step <= self._oldest_step + STEPS_AHEAD_MAX:
            self._refused["stale"] += 1
            return None
        if self._failure:
            return None
        if name in self._finished:
            self._counted["late"] += 1
            stopping = self._stopping.get(name)
            if stopping and now_s > stopping.due_s - stopping.repeat_s / 2:
                self._stop(name, stopping, now_s)
            return None
        payload_bytes = self.options.payload_bytes
        is_last = header.index == header.count - 1
        if header.index >= header.count or not (size == payload_bytes or (is_last and 0 < size < payload_bytes)):
            self._refused["malformed"] += 1
            return None
        receiving = self._stash(name, header.count, now_s)
        return receiving.message if receiving else None

    def _stash(self, name: Name, packets: int, now_s: float) -> Receiving | None:
        size = packets * self.options.payload_bytes
        if not 0 < packets <= MESSAGE_PACKETS_MAX:
            self._refused["malformed"] += 1
            return None
        if self._stashed_bytes + size > self.options.stash_bytes:
            self._counted["stash_full"] += 1  # nothing is lost: unacknowledged packets are sent again
            return None
        stash = self.scratch.take(size)
        message = self.engine.expect(name[0], MessageKey(*name[1:]), packets, stash, NOTHING)
        receiving = self._incoming[name] = Receiving(name, message, now_s, stash)
        message.owner = receiving
        self._stashed_bytes += size
        if self.on_unawaited:
            self.on_unawaited(name[0], MessageKey(*name[1:]))
        return receiving

    def _on_misfit(self, rank: int, header: Header, payload: memoryview) -> None:
        self._refused["malformed"] += 1
        receiving = self._incoming.get((rank, header.step, header.message))
        if receiving is None or receiving.awaited is None:
            return
        is_last = header.index == header.count - 1
        payload_bytes = self.options.payload_bytes
        whole = 0 < len(payload) <= payload_bytes and (is_last or len(payload) == payload_bytes)
        if whole and (header.count != receiving.message.packets or is_last):
            self._disagree(receiving, receiving.awaited, header.count)

    def _on_settled(self, message: Incoming, now_s: float) -> None:
        receiving: Receiving = message.owner
        name, awaited = receiving.name, receiving.awaited
        assert awaited
        del self._incoming[name]
        self._finished.add(name)
        self.changed = True
        if awaited.message_bytes is None:
            size = (message.packets - 1) * self.options.payload_bytes + message.last_bytes
            receiving.payload = receiving.payload[:size]
        arrival = receiving.arrival(now_s, self.options.payload_bytes)
        self.engine.close(message)
        if receiving.summation is None:
            self.engine.free(message)
        span = self.options.payload_bytes * 8
        stopping = Stopping.of(arrival.delivered, span, now_s, now_s + self.options.deadline_s)
        self._stopping[name] = stopping
        self._stop(name, stopping, now_s)
        if not awaited.done.done():
            awaited.done.set_result(arrival)

    def _stop(self, name: Name, stopping: Stopping, now_s: float) -> None:
        for first in stopping.unconfirmed:
            part = stopping.bitmap[first // 8 : first // 8 + self.options.payload_bytes]
            key = MessageKey(*name[1:])
            self._control(name[0], PacketType.STOP, key, index=first, count=stopping.packets, payload=part)
        stopping.due_s = now_s + stopping.repeat_s
        stopping.repeat_s = min(STOP_REPEAT_MAX_S, stopping.repeat_s * 2)

    # Control packets --------------------------------------------------------------------------------------------------

    def on_datagram(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Take in one datagram; whatever is wrong with it is counted in ``refused``. For use without a socket."""
        self.engine.take_in(datagram, tos, source, now_s)
        self.on_reports(now_s)

    def _on_control(self, rank: int, header: Header, payload: memoryview, now_s: float) -> None:
        self.changed = True
        peer = self._peers[rank]
        kind = header.type
        if kind is PacketType.DATA:
            self._on_misfit(rank, header, payload)
        elif kind is PacketType.PROBE:
            self._on_probe(peer, header, payload, now_s)
        elif kind is PacketType.BITMAP or kind is PacketType.STOP:
            self._on_bitmap(peer, header, payload, now_s)
        elif kind is PacketType.STOP_ACK:
            self._on_stop_ack(peer, header)
        elif kind is PacketType.ABORT:
            reason = bytes(payload[:1000]).decode(errors="replace")
            self.fail(PeerAbortedError(f"job {self.job}: rank {peer.rank} gave up: {reason}"))
        else:
            self._on_hello(peer, header, payload, now_s)

    def _on_probe(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        name = (peer.rank, header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            self._stop(name, stopping, now_s)
            return
        if name in self._finished or not self._oldest_step <= header.step <= self._oldest_step + STEPS_AHEAD_MAX:
            self._refused["stale"] += 1
            return
        receiving = self._incoming.get(name) or self._stash(name, header.count, now_s)
        if receiving is None:
            return
        message = receiving.message
        if header.count != message.packets or header.index > message.packets:
            self._refused["malformed"] += 1
            return
        if payload != MORE and self.engine.ask(message, header.index, now_s):
            return
        bitmap = np.packbits(message.bitmap()).tobytes()
        for first in range(0, message.packets, self.options.payload_bytes * 8):
            part = bitmap[first // 8 : first // 8 + self.options.payload_bytes]
            key = MessageKey(header.step, header.message)
            self._control(peer.rank, PacketType.BITMAP, key, index=first, count=message.packets, payload=part)

    def _on_bitmap(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        key = MessageKey(header.step, header.message)
        sending = peer.sending.get(key)
        if sending is None:
            if header.type is PacketType.STOP:  # our last answer was lost; the bitmap has been read
                self._control(peer.rank, PacketType.STOP_ACK, key, index=header.index)
            else:
                self._counted["late"] += 1
            return
        packets, span = sending.message.packets, self.options.payload_bytes * 8
        whole = header.type is PacketType.STOP and not payload
        part = packets if whole else min(span, packets - header.index)
        fits = not header.index if whole else not header.index % span and len(payload) == -(-part // 8)
        if header.count != packets or part < 1 or not fits:
            self._refused["malformed"] += 1
            return
        if whole:
            delivered = np.ones(packets, np.bool_)
        else:
            delivered = np.unpackbits(np.frombuffer(payload, np.uint8), count=part).astype(np.bool_)
        if header.type is PacketType.STOP:
            self._control(peer.rank, PacketType.STOP_ACK, key, index=header.index)
            if sending.confirm(header.index, delivered):
                del peer.sending[key]
                self.engine.remove(sending.message)
                sending.finish(now_s)
        elif sending.asked_s is not None:
            # A peer that is not there yet answers without news: ask it less often, but the network is not to blame.
            sending.probes_unanswered = 0
            if self.engine.take_bitmap(sending.message, header.index, delivered, sending.asked_s, now_s):
                sending.probes_without_news = 0
            if header.index + part >= packets:
                sending.asked_s = None

    def _on_stop_ack(self, peer: _Peer, header: Header) -> None:
        name = (peer.rank, header.step, header.message)
        stopping = self._stopping.get(name)
        if stopping:
            stopping.unconfirmed.discard(header.index)
            if not stopping.unconfirmed:
                del self._stopping[name]

    def _on_hello(self, peer: _Peer, header: Header, payload: memoryview, now_s: float) -> None:
        if len(payload) != _HELLO.size:
            self._refused["malformed"] += 1
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
        peer.window = max(1, window)
        self._limit(peer, 0.0)
        if header.type is PacketType.HELLO:
            self._hello(peer, PacketType.HELLO_ACK, now_s)

    # What time brings -------------------------------------------------------------------------------------------------

    def acknowledge(self, now_s: float) -> float:
        """Send the acknowledgements that are due; return when the next one will be."""
        return self.engine.acknowledge(now_s)

    def pump(self, now_s: float) -> bool:
        """Send what the windows admit, a burst to each peer; return whether anything was sent."""
        return self.engine.pump(now_s) > 0

    def on_reports(self, now_s: float) -> None:
        """Let the windows follow what came back."""
        self._now_s = now_s
        for peer in self._peers.values():
            report = peer.flow.take_report(now_s)
            if report is not None:
                peer.control.on_report(report)
                self._limit(peer, report.rtt_s)
                peer.flow.window = peer.control.window
                peer.rate.on_feedback(now_s, report.delivered, any(s.message.unsent for s in peer.sending.values()))

    def _limit(self, peer: _Peer, rtt_s: float) -> None:
        """Bound a window by what the receiver has room for, and by what may be of use on a path."""
        if rtt_s:
            peer.base_rtt_s = min(peer.base_rtt_s, rtt_s)
        useful_bytes = max(USEFUL_WINDOW_BYTES, peer.base_rtt_s * FASTEST_BPS / 8)
        peer.flow.largest_window = max(1, int(min(float(peer.window), useful_bytes / self.options.payload_bytes)))
        # A window must not grow on the strength of what the bound lets through.
        peer.control.window = min(peer.control.window, float(peer.flow.largest_window))

    def on_time(self, now_s: float) -> float:
        """Do what is due; return when to be called next.

        Returns
        -------
        A time on the clock of the caller, at most ``HELLO_REPEAT_S`` ahead.
        """
        stalled_s = now_s - self._clock_s - HELLO_REPEAT_S
        if stalled_s > KEEPALIVE_S:  # this process was not running: what peers sent meanwhile is still to be read
            for peer in self._peers.values():
                peer.flow.heard_s += stalled_s
        self._clock_s = self._now_s = now_s
        self.changed = False
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        due_s = min(now_s + HELLO_REPEAT_S, self._later[0][0] if self._later else math.inf)
        for peer in self._peers.values():
            due_s = min(due_s, self._watch(peer, now_s))
        for name, stopping in list(self._stopping.items()):
            if now_s >= stopping.give_up_s:
                del self._stopping[name]
            elif now_s >= stopping.due_s:
                self._stop(name, stopping, now_s)
            due_s = min(due_s, stopping.due_s)
        for receiving in self._incoming.values():
            if receiving.awaited and now_s >= receiving.awaited.deadline_s:
                self.fail(self._late(receiving, receiving.awaited))
                break
        return max(due_s, now_s)

    def _watch(self, peer: _Peer, now_s: float) -> float:
        flow = peer.flow
        waited_for = bool(peer.sending) or any(
            name[0] == peer.rank and receiving.awaited for name, receiving in self._incoming.items()
        )
        if not waited_for:
            flow.heard_s = max(flow.heard_s, now_s - self.options.silence_s / 2)
            return now_s + HELLO_REPEAT_S
        if now_s - flow.heard_s > self.options.silence_s:
            self.fail(self._silent(peer, now_s))
            return now_s
        if now_s - flow.heard_s > KEEPALIVE_S and now_s >= peer.hello_due_s:
            self._hello(peer, PacketType.HELLO, now_s)
        due_s = now_s + HELLO_REPEAT_S
        for sending in list(peer.sending.values()):
            if now_s >= sending.deadline_s:
                self.fail(self._unconfirmed(sending, now_s))
                return now_s
            probe_due_s = sending.probe_due_s(flow)
            if now_s >= probe_due_s:
                self._probe(peer, sending, now_s)
                probe_due_s = sending.probe_due_s(flow)
            due_s = min(due_s, probe_due_s)
        return due_s

    def _probe(self, peer: _Peer, sending: Sending, now_s: float) -> None:
        if sending.probes_unanswered > 1:
            peer.control.on_timeout()
            peer.flow.window = peer.control.window
        sending.asked(now_s)
        self._counted["probe"] += 1
        message = sending.message
        self._control(
            peer.rank,
            PacketType.PROBE,
            sending.key,
            index=sending.protected_packets,
            count=message.packets,
            payload=MORE if message.unsent and not sending.bound.immediate else b"",
        )

    def _unconfirmed(self, sending: Sending, now_s: float) -> TransportError:
        message = sending.message
        share = message.delivered / message.packets
        need = sending.bound.required(message.packets) / message.packets
        return DeadlineError(
            f"{self._where(sending.key.step)}: rank {sending.peer} confirmed {share:.0%} of {sending.label} "
            f"(bound {need:.0%}) in {now_s - sending.started_s:.1f} s"
        )

    def _late(self, receiving: Receiving, awaited: Awaited) -> TransportError:
        message = receiving.message
        need = awaited.bound.required(message.packets) / message.packets
        return DeadlineError(
            f"{self._where(receiving.name[1])}: rank {receiving.name[0]} delivered "
            f"{message.arrived / message.packets:.0%} of {awaited.label} (bound {need:.0%}) "
            f"in {self.options.deadline_s:.1f} s"
        )

    def _silent(self, peer: _Peer, now_s: float) -> TransportError:
        labels = [(sending.key.step, sending.label) for sending in peer.sending.values()]
        labels += [
            (name[1], receiving.awaited.label)
            for name, receiving in self._incoming.items()
            if name[0] == peer.rank and receiving.awaited
        ]
        step, label = min(labels)
        return PeerSilentError(
            f"{self._where(step)}: rank {peer.rank} has been silent for {now_s - peer.flow.heard_s:.1f} s "
            f"while rank {self.rank} waited for {label}; is its process alive and the path up?"
        )

    def _where(self, step: int) -> str:
        return f"job {self.job}, step {step}"

    # Packets ----------------------------------------------------------------------------------------------------------

    def _header(self, kind: PacketType, key: MessageKey, *, index: int = 0, count: int = 0) -> Header:
        queue = Queue.CONTROL if self.options.tagged else Queue.ORDINARY
        return Header(kind, 0, queue, 0, 0, self.job, 0, key.step, key.message, self.rank, index, count, self.token)

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
        datagram = self._header(kind, key, index=index, count=count).encode() + payload
        tos = wire.dscp(Queue.CONTROL, False) << 2 if self.options.tagged else 0
        # A control packet that the socket cannot take now is as good as lost, and repeated as such.
        if not self.engine.send_control(peer, datagram, tos):
            self._counted["control_unsent"] += 1
