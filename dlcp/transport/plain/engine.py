# SPDX-License-Identifier: Apache-2.0
"""The engine in NumPy: messages and their control packets, and the loop that moves bursts between them and a socket.

``dlcp/native/engine.c`` does the same, with what concerns one message beside that message.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.transport.engine import (
    MESSAGE_PACKETS_MAX,
    RULES,
    STEPS_AHEAD_MAX,
    Arrived,
    ControlPacket,
    Datagram,
    Event,
    Flow,
    Mismatch,
    PathState,
    Reported,
    Sent,
    StreamingReduction,
    Unanswered,
    Unexpected,
)
from dlcp.transport.messages import EMPTY, Address, Bytes, LossBound, MessageKey, ReceiveRequest, SendRequest
from dlcp.transport.native_engine import service_of
from dlcp.transport.options import PATHS_MAX, TransportOptions
from dlcp.transport.plain.burst_socket import Burst, BurstSocket
from dlcp.transport.plain.flow import Acknowledgements, PlainFlow, indices_of
from dlcp.transport.plain.incoming import Finished, Name, PlainIncoming
from dlcp.transport.plain.outgoing import DELIVERED, FLYING, UNSENT, Indices, PlainOutgoing
from dlcp.transport.plain.reduction import PlainReduction
from dlcp.wire import ACK_BLOCK_PACKETS, ACK_ENTRY, ACK_PATH, ACK_WHOLE, QUESTION, Flag, Header, PacketType, Queue

ECN_MASK = 3
CONGESTED = 3
BURSTS_A_TURN = 16
BUSY_RETRY_S = 0.0005
NO_MESSAGE = MessageKey(0, 0)
"""What a packet says that is about no message."""
ABOUT_A_PEER = frozenset({PacketType.HELLO, PacketType.HELLO_ACK, PacketType.ABORT})


class PlainEngine:
    """See :class:`dlcp.transport.engine.Engine`; the parameters are as of ``NativeEngine``."""

    def __init__(
        self,
        rank: int,
        peers: dict[int, Address],
        ecn_capable: dict[int, bool],
        *,
        job: int,
        token: int,
        options: TransportOptions,
        sock: socket.socket | None,
        now_s: float,
        further: Sequence[socket.socket] = (),
    ) -> None:
        self._rank, self._job, self._token, self._options = rank, job, token, options
        self._payload_bytes = options.payload_bytes
        self._queue = Queue.CONTROL if options.tagged else Queue.ORDINARY
        self._control_tos = wire.dscp(self._queue, False) << 2 if options.tagged else 0
        self._peers = peers
        self._service = {peer: service_of(options.tagged, ecn_capable[peer]) for peer in peers}
        self._flows = {peer: PlainFlow(now_s, wire.HEADER_BYTES + options.payload_bytes) for peer in peers}
        self.flows: dict[int, Flow] = dict(self._flows)
        self.room = -1
        self.early_bytes = 0
        self.inbound_peak = 0.0
        self._inbound_since_s = self._inbound_last_s = -math.inf
        self._inbound_count = 0
        self._acknowledgements = {peer: Acknowledgements() for peer in peers}
        self._incoming: dict[Name, PlainIncoming] = {}
        self._finished: dict[Name, Finished] = {}
        """In the order in which they were completed."""
        self._stopping: dict[Name, Finished] = {}
        self._oldest_step = 0
        self._reminded_s = -math.inf
        self._stopped = False
        self._events: list[Event] = []
        self._counters: Counter[str] = Counter()
        self._socket = BurstSocket(sock, further, self._counters) if sock else None
        self._paths_max = 1 + len(further) if sock else PATHS_MAX
        self._sources = dict.fromkeys(peers.items(), 0)
        """Where packets of a peer may come from, and on which path that is."""
        self._woken = False

    def counters(self) -> dict[str, int]:
        """See :meth:`dlcp.transport.engine.Engine.counters`."""
        return {name: value for name, value in self._counters.items() if value}

    @property
    def offload(self) -> bool:
        """Whether the kernel takes whole bursts (UDP_SEGMENT)."""
        return self._socket is None or self._socket.offload

    @property
    def stopping(self) -> bool:
        """See :attr:`dlcp.transport.engine.Engine.stopping`."""
        return bool(self._stopping)

    def take_events(self) -> list[Event]:
        """See :meth:`dlcp.transport.engine.Engine.take_events`."""
        events, self._events = self._events, []
        return events

    # Messages out -----------------------------------------------------------------------------------------------------

    def send(self, request: SendRequest, bound: LossBound, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.send`."""
        peer, options = request.peer, self._options
        message = PlainOutgoing(
            request,
            bound,
            self._header(PacketType.DATA, request.key),
            self._service[peer],
            payload_bytes=self._payload_bytes,
            tagged=options.tagged,
            switch_hops=options.switch_hops,
            now_s=now_s,
        )
        flow = self._flows[peer]
        flow.messages[request.key] = message
        flow.look_s = min(flow.look_s, now_s + RULES["probe_timeout_min_s"])
        if bound.immediate or message.to_send < message.packets:
            self._ask(peer, message, now_s)  # tells the receiver how many packets are protected, and how many deferred

    def detach(self, peer: int, key: MessageKey, payload: Bytes | None) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.detach`."""
        message = self._flows[peer].messages.get(key)
        if message is None or message.delivered == message.to_send:
            return False
        if payload is not None:
            message.payload = payload
        return True

    def sending(self, peer: int, key: MessageKey) -> tuple[int, int, int, int]:
        """See :meth:`dlcp.transport.engine.Engine.sending`."""
        message = self._flows[peer].messages.get(key)
        return (message.delivered, message.flying, message.unsent, message.packets) if message else (0, 0, 0, 0)

    def _complete_sending(self, peer: int, message: PlainOutgoing, delivered: NDArray[np.bool_], now_s: float) -> None:
        self._events.append(Sent(peer, message.key, delivered, message.sent, message.resent, now_s))
        self._flows[peer].remove(message)

    def _ask(self, peer: int, message: PlainOutgoing, now_s: float) -> None:
        if message.probes_unanswered > 1:
            self._events.append(Unanswered(peer))
        message.note_asked(now_s)
        self._counters["probe"] += 1
        deferred = message.packets - message.to_send
        question = QUESTION.pack(message.unsent > 0 and not message.immediate, deferred)
        payload = question if deferred else question[:1].rstrip(b"\0")
        counts = {"index": message.protected_packets, "count": message.packets}
        self._send_control(peer, PacketType.PROBE, message.key, payload, **counts)

    def _ask_due(self, peer: int, now_s: float) -> float:
        """Ask a peer what is missing, where that is due; return when to look again."""
        flow = self._flows[peer]
        if not flow.messages:
            return math.inf
        if now_s < flow.look_s:
            return flow.look_s
        due_s, timeout_s = now_s + RULES["look_s"], flow.probe_timeout_s
        for message in flow.messages.values():
            ask_s = message.ask_due_s(timeout_s)
            if now_s >= ask_s:
                self._ask(peer, message, now_s)
                ask_s = message.ask_due_s(timeout_s)
            due_s = min(due_s, ask_s)
        flow.look_s = max(due_s, now_s + RULES["probe_timeout_min_s"] / 2)
        return flow.look_s

    def _take_bitmap(self, peer: int, header: Header, payload: memoryview, now_s: float) -> None:
        """Take in which packets of a message have arrived, or that no more of them are needed."""
        key, flow, is_stop = MessageKey(header.step, header.message), self._flows[peer], header.type is PacketType.STOP
        message = flow.messages.get(key)
        if message is None:
            if is_stop:  # our last answer was lost; the bitmap has been read
                self._send_control(peer, PacketType.STOP_ACK, key, index=header.index)
            else:
                self._counters["late"] += 1
            return
        packets, span = message.packets, self._bitmap_packets
        whole = is_stop and not payload
        part = packets if whole else min(span, packets - header.index)
        if whole:
            fits = not header.index and message.to_send == packets
        else:
            fits = not header.index % span and len(payload) == -(-part // 8)
        if header.count != packets or part < 1 or not fits:
            self._counters["refused_malformed"] += 1
            return
        if whole:
            delivered = np.ones(packets, np.bool_)
        else:
            delivered = np.unpackbits(np.frombuffer(payload, np.uint8), count=part).astype(np.bool_)
        if is_stop:
            self._send_control(peer, PacketType.STOP_ACK, key, index=header.index)
            confirmed = message.confirm(header.index, delivered)
            if confirmed is not None:
                self._complete_sending(peer, message, confirmed, now_s)
        elif message.asked_s is not None:
            # A peer that is not there yet answers without news: ask it less often, but the network is not to blame.
            message.note_answered()
            flow.answered_s = max(flow.answered_s, now_s - message.asked_s)
            flow.look_s = now_s
            if self._take_missing(flow, message, header.index, delivered, now_s):
                message.probes_without_news = 0
            if header.index + part >= packets:
                message.asked_s = None

    def _take_missing(
        self, flow: PlainFlow, message: PlainOutgoing, first: int, arrived: NDArray[np.bool_], now_s: float
    ) -> bool:
        """Take as lost what was sent before the question and has not arrived; return whether there is news."""
        assert message.asked_s is not None
        part = slice(first, first + len(arrived))
        state = message.state[part]
        landed = np.flatnonzero(arrived & (state != DELIVERED) & (state != UNSENT)) + first
        lost = np.flatnonzero(~arrived & (state == FLYING) & (message.sent_s[part] < message.asked_s)) + first
        if len(landed):
            flow.land(message, landed.astype(np.uint32), now_s)
        if len(lost):
            flow.lose(message, lost.astype(np.uint32))
        flow.feed_back(len(landed), 0, len(lost), now_s)
        return bool(len(landed) or len(lost))

    # Messages in ------------------------------------------------------------------------------------------------------

    def receive(
        self, request: ReceiveRequest, packets: int, buffer: Bytes | None, bound: LossBound, now_s: float
    ) -> int:
        """See :meth:`dlcp.transport.engine.Engine.receive`."""
        name, size = (request.peer, *request.key), request.message_bytes
        last = 0 if size is None else size - (packets - 1) * self._payload_bytes
        message = self._incoming.get(name)
        if message is not None and last and (message.packets != packets or message.last_bytes not in (0, last)):
            self._drop(message)
            self._finish(name, message.packets, now_s)
            return message.packets
        if message is None:
            message = self._incoming[name] = PlainIncoming(request.peer, request.key, packets, self._payload_bytes)
        self.early_bytes -= message.early_bytes
        message.early_bytes = 0
        reduction = request.reduction
        assert reduction is None or isinstance(reduction, PlainReduction)
        message.place(buffer, request.tail, reduction, request.position)
        message.required, message.immediate = bound.required(packets), bound.immediate
        message.deferrable = bound.deferrable(packets)
        if message.deferred > message.deferrable:
            self._counters["refused_malformed"] += 1
            message.deferred = 0
        message.last_bytes = last or message.last_bytes
        self._complete(message, now_s)
        return 0

    def receiving(self, peer: int, key: MessageKey) -> tuple[int, int]:
        """See :meth:`dlcp.transport.engine.Engine.receiving`."""
        message = self._incoming.get((peer, *key))
        return (message.arrived, message.packets) if message else (0, 0)

    def reduction(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> StreamingReduction:
        """See :meth:`dlcp.transport.engine.Engine.reduction`."""
        return PlainReduction(values, per_packet, members, divisor, first_block)

    def begin_step(self, step: int, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.begin_step`."""
        self._oldest_step = max(self._oldest_step, step)
        for message in [message for message in self._incoming.values() if message.key.step < step]:
            self._drop(message)
        # A sender that missed our acknowledgement may still ask; after twice the silence that we bear, it will not.
        asked_since_s = now_s - 2 * self._options.silence_s
        over = []
        for name, finished in self._finished.items():
            if name[1] >= step or (finished.whole and finished.completed_s > asked_since_s):
                break  # what follows is younger
            if not finished.stopping:
                over.append(name)
        for name in over:
            del self._finished[name]

    def forget(self, peer: int, key: MessageKey) -> None:
        """See :meth:`dlcp.transport.engine.Engine.forget`."""
        finished = self._finished.get((peer, *key))
        if finished is not None and not finished.stopping:
            del self._finished[peer, key.step, key.message]

    def remind(self, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.remind`."""
        for name, finished in self._finished.items():
            if finished.whole:
                finished.whole = False
                if finished.completed_s > now_s - RULES["known_after_s"]:
                    self._begin_stop(name, finished, {0}, now_s, now_s + RULES["remind_s"])

    def _drop(self, message: PlainIncoming) -> None:
        self._incoming.pop(message.name, None)
        self._acknowledgements[message.rank].drop(message)
        self.early_bytes -= message.early_bytes
        message.early_bytes = 0

    def _finish(self, name: Name, packets: int, now_s: float) -> Finished:
        self._finished.pop(name, None)
        self._stopping.pop(name, None)
        finished = self._finished[name] = Finished(packets, now_s)
        return finished

    def _complete(self, message: PlainIncoming, now_s: float) -> bool:
        if not message.meets_bound:
            return False
        message.complete = True
        whole, peer, name = message.arrived == message.packets, message.rank, message.name
        finished = self._finish(name, message.packets, now_s)
        if whole:
            self._acknowledgements[peer].note_whole(message)
        self._acknowledge(peer, now_s)
        self._drop(message)
        delivered, layer = message.delivered.copy(), message.layer.copy()
        self._events.append(Arrived(peer, message.key, delivered, layer, message.last_bytes, message.deferred, now_s))
        if whole:
            finished.whole = True
        else:
            finished.bitmap = np.packbits(delivered).tobytes()
            parts = set(range(0, message.packets, self._bitmap_packets))
            self._begin_stop(name, finished, parts, now_s, now_s + self._options.deadline_s)
        return True

    def _begin_stop(self, name: Name, finished: Finished, parts: set[int], now_s: float, give_up_s: float) -> None:
        finished.unconfirmed, finished.give_up_s = parts, give_up_s
        finished.repeat_s = RULES["stop_repeat_s"]
        self._stopping[name] = finished
        self._stop(name, finished, now_s)

    def _stop(self, name: Name, finished: Finished, now_s: float) -> None:
        for first in sorted(finished.unconfirmed):
            part = finished.bitmap[first // 8 : first // 8 + self._payload_bytes]
            counts = {"index": first, "count": finished.packets}
            self._send_control(name[0], PacketType.STOP, MessageKey(*name[1:]), part, **counts)
        finished.due_s = now_s + finished.repeat_s
        finished.repeat_s = min(RULES["stop_repeat_max_s"], finished.repeat_s * 2)

    def _tell_whole(self, name: Name, finished: Finished) -> None:
        self._send_control(name[0], PacketType.STOP, MessageKey(*name[1:]), count=finished.packets)

    def _repeat_stops(self, now_s: float) -> float:
        """Say again what senders have not confirmed; return when to do so next."""
        due_s = math.inf
        for name, finished in list(self._stopping.items()):
            if now_s >= finished.give_up_s:
                del self._stopping[name]
                finished.unconfirmed = set()
                continue
            if now_s >= finished.due_s:
                self._stop(name, finished, now_s)
            due_s = min(due_s, finished.due_s, finished.give_up_s)
        return due_s

    def _is_current(self, step: int) -> bool:
        return self._oldest_step <= step <= self._oldest_step + STEPS_AHEAD_MAX

    def _begin(self, peer: int, header: Header, size: int, now_s: float) -> PlainIncoming | None:
        """Return the message that data belongs to which is not known yet; None if none is to be begun."""
        name = (peer, header.step, header.message)
        if not self._is_current(header.step):
            self._counters["refused_stale"] += 1
            return None
        if self._stopped:
            return None
        finished = self._finished.get(name)
        if finished is not None:
            self._counters["late"] += 1
            told_s = max(self._reminded_s, finished.completed_s)
            if finished.stopping:
                if now_s > finished.due_s - finished.repeat_s / 2:
                    self._stop(name, finished, now_s)
            elif finished.whole and now_s > told_s + RULES["stop_repeat_s"] / 2:
                self._reminded_s = now_s
                self._tell_whole(name, finished)
            return None
        is_last = header.index == header.count - 1
        if header.index >= header.count or not (
            size == self._payload_bytes or (is_last and 0 < size < self._payload_bytes)
        ):
            self._counters["refused_malformed"] += 1
            return None
        return self._begin_unexpected(peer, header)

    def _begin_unexpected(self, peer: int, header: Header) -> PlainIncoming | None:
        packets, key = header.count, MessageKey(header.step, header.message)
        if not 0 < packets <= MESSAGE_PACKETS_MAX:
            self._counters["refused_malformed"] += 1
            return None
        size = packets * self._payload_bytes
        if self.early_bytes + size > self._options.early_buffer_bytes:
            self._counters["early_full"] += 1  # nothing is lost: unacknowledged packets are sent again
            return None
        message = self._incoming[peer, key.step, key.message] = PlainIncoming(peer, key, packets, self._payload_bytes)
        message.place(np.empty(size, np.uint8), EMPTY)
        message.early_bytes = size
        self.early_bytes += size
        self._events.append(Unexpected(peer, key))
        return message

    def _refuse_misfit(self, message: PlainIncoming, header: Header, size: int, now_s: float) -> None:
        """Refuse data that does not fit its message: whoever posted the receive learns that sizes differ."""
        self._counters["refused_malformed"] += 1
        if message.required is None:
            return
        is_last = header.index == header.count - 1
        sound = 0 < size <= self._payload_bytes and (is_last or size == self._payload_bytes)
        if sound and (header.count != message.packets or is_last):
            self._events.append(Mismatch(message.rank, message.key, header.count))
            self._drop(message)
            self._finish(message.name, message.packets, now_s)

    def _take_probe(self, peer: int, header: Header, payload: memoryview, now_s: float) -> None:
        """Answer what is missing, or that no more is needed."""
        name = (peer, header.step, header.message)
        finished = self._finished.get(name)
        if finished is not None and finished.stopping:
            self._stop(name, finished, now_s)
            return
        # A sender that has not asked for so long knows.
        if finished is not None and finished.whole and now_s < finished.completed_s + 2 * self._options.silence_s:
            self._tell_whole(name, finished)
            return
        if finished is not None or not self._is_current(header.step):
            self._counters["refused_stale"] += 1
            return
        message = self._incoming.get(name)
        if message is None and not self._stopped:
            message = self._begin_unexpected(peer, header)
        if message is None:
            return
        if header.count != message.packets or header.index > message.packets:
            self._counters["refused_malformed"] += 1
            return
        more, deferred = QUESTION.unpack(bytes(payload[: QUESTION.size]).ljust(QUESTION.size, b"\0"))
        if deferred > (message.packets - 1 if message.required is None else message.deferrable):
            self._counters["refused_malformed"] += 1
            return
        message.deferred = deferred or message.deferred
        if not more:
            message.asked, message.protected_packets = True, header.index
        if self._complete(message, now_s):
            return
        bitmap = np.packbits(message.delivered).tobytes()
        for first in range(0, message.packets, self._bitmap_packets):
            part = bitmap[first // 8 : first // 8 + self._payload_bytes]
            counts = {"index": first, "count": message.packets}
            self._send_control(peer, PacketType.BITMAP, message.key, part, **counts)

    def _take_stop_ack(self, peer: int, header: Header) -> None:
        """Note that a sender knows one part of what became of its message."""
        name = (peer, header.step, header.message)
        finished = self._finished.get(name)
        if finished is None:
            return
        finished.whole = False
        finished.unconfirmed.discard(header.index)
        if not finished.unconfirmed:
            self._stopping.pop(name, None)

    def stop(self) -> None:
        """See :meth:`dlcp.transport.engine.Engine.stop`."""
        self._stopped = True
        for flow in self._flows.values():
            for outgoing in list(flow.messages.values()):
                flow.remove(outgoing)
        for incoming in list(self._incoming.values()):
            self._drop(incoming)
        self._finished.clear()
        self._stopping.clear()

    # Packets in -------------------------------------------------------------------------------------------------------

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.take_in`."""
        self._take_in(datagram, tos, source, now_s)
        self._report(now_s)  # as after each batch from a socket

    def _take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        try:
            header = wire.decode(datagram)
        except wire.HeaderError:
            self._counters["refused_malformed"] += 1
            return
        peer = header.sender
        if header.token != self._token:
            self._counters["refused_token"] += 1
        elif header.job != self._job:
            self._counters["refused_job"] += 1
        elif (path := self._sources.get((peer, source))) is None:
            self._counters["refused_sender"] += 1
        else:
            if header.type is PacketType.DATA:
                self._note_inbound(1, now_s)
                if tos & ECN_MASK == CONGESTED:
                    self._acknowledgements[peer].note_marked(path, 1)
            self._flows[peer].heard_s = now_s
            payload = datagram[wire.HEADER_BYTES :]
            match header.type:
                case PacketType.DATA:
                    self._take_data(peer, header, payload, tos, now_s)
                case PacketType.ACK:
                    self._take_acknowledgement(peer, header, payload, now_s)
                case PacketType.PROBE:
                    self._take_probe(peer, header, payload, now_s)
                case PacketType.BITMAP | PacketType.STOP:
                    self._take_bitmap(peer, header, payload, now_s)
                case PacketType.STOP_ACK:
                    self._take_stop_ack(peer, header)
                case _:
                    self._events.append(ControlPacket(peer, bytes(datagram), now_s))

    def _note_inbound(self, packets: int, now_s: float) -> None:
        """Note that data has come through the network."""
        if now_s - self._inbound_last_s > RULES["inbound_pause_s"]:
            self._inbound_since_s, self._inbound_count = now_s, packets - 1
        else:
            self._inbound_count += packets
        self._inbound_last_s = now_s
        seconds = now_s - self._inbound_since_s
        if seconds >= RULES["inbound_s"] and self._inbound_count >= RULES["inbound_packets"]:
            self.inbound_peak = max(self.inbound_peak, self._inbound_count / seconds)
            self._inbound_since_s, self._inbound_count = now_s, 0

    def _take_data(self, peer: int, header: Header, payload: memoryview, tos: int, now_s: float) -> None:
        message = self._incoming.get((peer, header.step, header.message))
        if message is None:
            message = self._begin(peer, header, len(payload), now_s)
        if message is None:
            return
        if header.count != message.packets or not message.fits(header.index, len(payload)):
            self._refuse_misfit(message, header, len(payload), now_s)
            return
        row = np.frombuffer(payload, np.uint8)[None]
        layer = np.array([header.layer], np.uint8)
        protected = np.array([bool(header.flags & Flag.PROTECTED)])
        self._store(message, np.array([header.index], np.uint32), row, layer, protected, tos, now_s)

    def _store(
        self,
        message: PlainIncoming,
        indices: Indices,
        rows: NDArray[np.uint8],
        layers: Bytes,
        protected: NDArray[np.bool_],
        tos: int,
        now_s: float,
    ) -> None:
        self._acknowledgements[message.rank].note(message, indices, tos & ECN_MASK == CONGESTED, now_s)
        new = ~message.delivered[indices]
        fresh = int(np.count_nonzero(new))
        self._counters["duplicate"] += len(indices) - fresh
        if not fresh:
            return
        if fresh < len(indices):
            indices, rows, layers, protected = indices[new], rows[new], layers[new], protected[new]
        message.store(indices, rows, layers, int(np.count_nonzero(protected)))
        self._counters["data"] += fresh
        self._complete(message, now_s)

    def _split(self, burst: Burst, now_s: float) -> None:
        """Take in the packets of a burst: the leading ones together if that can be, the others one by one."""
        together_bytes = self._take_together(burst, now_s)
        for packet in burst.packets(together_bytes):
            self._take_in(packet, burst.tos, burst.peer, now_s)

    def _take_together(self, burst: Burst, now_s: float) -> int:
        """Take in the leading packets of a burst if they are data of one message; return their bytes, else 0."""
        size = burst.packet_bytes
        count = len(burst.data) // size
        if count < 2 or size != wire.HEADER_BYTES + self._payload_bytes:
            return 0
        rows = np.frombuffer(burst.data, np.uint8, count * size).reshape(count, size)
        headers, valid = wire.unpack(rows)
        first = headers[0]
        same = valid & (headers["kind"] & 15 == PacketType.DATA)
        for name in ("token", "job", "sender", "step", "message", "count"):
            same &= headers[name] == first[name]
        if not same.all() or first["token"] != self._token or first["job"] != self._job:
            return 0
        peer = int(first["sender"])
        indices = headers["index"].astype(np.uint32)
        path = self._sources.get((peer, burst.peer))
        if path is None:
            return 0
        if len(np.unique(indices)) < count or indices.max() >= first["count"] - 1:
            return 0
        message = self._incoming.get((peer, int(first["step"]), int(first["message"])))
        if message is None or message.packets != first["count"]:
            return 0  # the first of a message, or none that is wanted: one by one
        self._flows[peer].heard_s = now_s
        self._note_inbound(count, now_s)
        if burst.tos & ECN_MASK == CONGESTED:
            self._acknowledgements[peer].note_marked(path, count)
        protected = headers["flags"] & Flag.PROTECTED != 0
        self._store(message, indices, rows[:, wire.HEADER_BYTES :], headers["layer"], protected, burst.tos, now_s)
        return count * size

    def _take_acknowledgement(self, peer: int, header: Header, payload: memoryview, now_s: float) -> None:
        if not payload or len(payload) % ACK_ENTRY.size:
            self._counters["refused_malformed"] += 1
            return
        flow = self._flows[peer]
        marked = flow.marked_since(header.count)
        sampled: dict[int, float] = {}
        delivered = 0
        complete: dict[MessageKey, PlainOutgoing] = {}
        for step, number, block, bits in ACK_ENTRY.iter_unpack(payload):
            if block == ACK_PATH:
                flow.take_marks(step, bits & 0xFFFFFFFF)
                continue
            message = flow.messages.get(MessageKey(step, number))
            if message is None:
                continue
            whole, block = block & ACK_WHOLE, block & ~ACK_WHOLE
            if block * ACK_BLOCK_PACKETS >= message.packets:
                continue
            indices = indices_of(block, bits)
            indices = indices[indices < message.packets]
            state = message.state[indices]
            indices = indices[(state != DELIVERED) & (state != UNSENT)]
            if len(indices):
                flow.land(message, indices, now_s)
                delivered += len(indices)
                # Karn: the time of a packet that was sent twice is no round trip.
                once = indices[message.tags[indices, 0] & Flag.RETRANSMISSION == 0]
                for path, sent_s in zip(message.path[once].tolist(), message.sent_s[once].tolist(), strict=True):
                    if sent_s > sampled.get(path, 0.0):
                        sampled[path] = sent_s
            if whole and message.all_sent:
                rest = np.flatnonzero(message.state != DELIVERED).astype(np.uint32)
                flow.land(message, rest, now_s)
                delivered += len(rest)
                complete[message.key] = message
        flow.sample_paths(sampled, header, now_s)
        flow.feed_back(delivered, marked, 0, now_s)
        for message in complete.values():
            self._complete_sending(peer, message, np.ones(message.packets, np.bool_), now_s)

    # Packets out ------------------------------------------------------------------------------------------------------

    @property
    def _bitmap_packets(self) -> int:
        """How many packets one BITMAP or STOP tells of."""
        return self._payload_bytes * 8

    def _header(self, kind: PacketType, key: MessageKey, *, index: int = 0, count: int = 0) -> Header:
        return Header(kind, 0, self._queue, 0, 0, self._job, 0, *key, self._rank, index, count, self._token)

    def _send_control(
        self,
        peer: int,
        kind: PacketType,
        key: MessageKey = NO_MESSAGE,
        payload: bytes = b"",
        *,
        index: int = 0,
        count: int = 0,
    ) -> None:
        datagram = self._header(kind, key, index=index, count=count).encode() + payload
        # A control packet that the socket cannot take now is as good as lost, and repeated as such.
        # A greeting tells the peer which other ports are ours, so it comes from the one that is known.
        path = 0 if kind in ABOUT_A_PEER else self._flows[peer].paths.for_control
        if not self._send_datagram(peer, datagram, self._control_tos, path):
            self._counters["control_unsent"] += 1

    def send_control(self, peer: int, kind: PacketType, payload: bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.send_control`."""
        self._send_control(peer, kind, payload=payload)

    def accept(self, peer: int, ports: Sequence[int]) -> None:
        """See :meth:`dlcp.transport.engine.Engine.accept`."""
        host = self._peers[peer][0]
        self._sources = {source: path for source, path in self._sources.items() if source[0] != peer or not path}
        for path, port in enumerate(ports, 1):
            self._sources.setdefault((peer, (host, port)), path)

    def spread(self, peer: int, paths: int) -> None:
        """See :meth:`dlcp.transport.engine.Engine.spread`."""
        self._flows[peer].paths.make(min(paths, self._paths_max))

    def paths_to(self, peer: int) -> list[PathState]:
        """See :meth:`dlcp.transport.engine.Engine.paths_to`."""
        return [path.state for path in self._flows[peer].paths if path.sent]

    def _send_datagram(self, peer: int, datagram: bytes, tos: int, path: int) -> bool:
        if self._socket:
            return self._socket.send_packet(memoryview(datagram), tos, self._peers[peer], path)
        if not self.room:
            return False
        self.room -= self.room > 0
        self._events.append(Datagram(peer, datagram, tos, path))
        return True

    def _acknowledge_due(self, now_s: float) -> float:
        due_s = math.inf
        for peer, waiting in self._acknowledgements.items():
            this_due_s = waiting.due_s(self._flows[peer].smoothed_rtt_s)
            if now_s >= this_due_s:
                self._acknowledge(peer, now_s)
            else:
                due_s = min(due_s, this_due_s)
        return due_s

    def _acknowledge(self, peer: int, now_s: float) -> None:
        waiting = self._acknowledgements[peer]
        if not waiting.waiting:
            return
        ago_us = min(4_000_000_000, max(0, int((now_s - waiting.newest_s) * 1e6)))
        counts = {"index": int(waiting.newest_s * 1e6) & 0xFFFFFFFF, "count": waiting.marked_received & 0xFFFFFFFF}
        header = self._header(PacketType.ACK, MessageKey(ago_us, 0), **counts).encode()
        by_path = sum(source[0] == peer for source in self._sources) > 1
        for payload in waiting.take(self._payload_bytes, by_path, now_s):
            self._counters["acknowledgements"] += 1
            self._send_datagram(peer, header + payload, self._control_tos, self._flows[peer].paths.for_control)

    def pump(self, now_s: float) -> int:
        """See :meth:`dlcp.transport.engine.Engine.pump`."""
        sent = 0
        for peer, flow in self._flows.items():
            if flow.messages:
                count = flow.pump(now_s, self._emit_burst_to(peer))
                if count < 0:
                    return -1
                sent += count
        return sent

    def _emit_burst_to(self, peer: int) -> Callable[[PlainOutgoing, Indices, int], bool]:
        def emit(message: PlainOutgoing, chosen: Indices, path: int) -> bool:
            size = wire.HEADER_BYTES + self._payload_bytes
            tos = int(message.tags[chosen[0], 3])
            burst = Burst(message.bytes_of(chosen).data, size, tos, self._peers[peer], path)
            if self._socket:
                return self._socket.send(burst)
            return burst.send_each(lambda packet: self._send_datagram(peer, bytes(packet), tos, path))

        return emit

    # The loop ---------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> float:
        """See :meth:`dlcp.transport.engine.Engine.tick`."""
        due_s = self._acknowledge_due(now_s)
        for peer in self._flows:
            due_s = min(due_s, self._ask_due(peer, now_s))
        return min(due_s, self._repeat_stops(now_s), self._report(now_s))

    def _report(self, now_s: float) -> float:
        due_s = min((flow.report_due_s for flow in self._flows.values()), default=math.inf)
        if now_s < due_s:
            return due_s
        for peer, flow in self._flows.items():
            report = flow.take_report(now_s)
            if report is not None:
                waiting = any(message.unsent for message in flow.messages.values())
                self._events.append(Reported(peer, report, waiting))
        return min((flow.report_due_s for flow in self._flows.values()), default=math.inf)

    def turn(self, until_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.turn`."""
        while not self._events:
            received = self._receive()
            now_s = time.monotonic()
            due_s = self.tick(now_s)
            sent = self.pump(now_s)
            if now_s >= until_s or self._woken:
                break
            if not received and sent <= 0 and not self._events:
                resume_s = min((flow.resumes_s(now_s) for flow in self._flows.values()), default=math.inf)
                self._wait(min(until_s, due_s, resume_s), full=sent < 0)
        self._woken = False

    def _wait(self, until_s: float, *, full: bool) -> None:
        wait_s = max(0.0, until_s - time.monotonic())
        if full:
            wait_s = min(wait_s, BUSY_RETRY_S)
        assert self._socket
        if self._socket.wait(wait_s):
            self._woken = True

    def _receive(self) -> int:
        assert self._socket
        for number in range(BURSTS_A_TURN):
            burst = self._socket.receive()
            if burst is None:
                return number
            self._split(burst, time.monotonic())
        return BURSTS_A_TURN

    def wake(self) -> None:
        """See :meth:`dlcp.transport.engine.Engine.wake`."""
        self._woken = True
        if self._socket:
            self._socket.wake()

    def release(self) -> None:
        """See :meth:`dlcp.transport.engine.Engine.release`."""
        self.stop()
        if self._socket:
            self._socket.release()
