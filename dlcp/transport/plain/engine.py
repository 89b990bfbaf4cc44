# SPDX-License-Identifier: Apache-2.0
"""The engine in NumPy, and the loop that moves whole bursts between it and its socket."""

import math
import socket
import time
from collections import Counter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.transport.engine import (
    ACK_WHOLE,
    BLOCK_PACKETS,
    REORDER_MIN_S,
    Emit,
    Flow,
    Fold,
    Incoming,
    OnControl,
    OnSettled,
    OnTaken,
    OnUnknown,
    Outgoing,
    Packets,
)
from dlcp.transport.messages import Address, Bytes, MessageKey
from dlcp.transport.plain.acknowledge import ENTRY, Acknowledgements, indices_of
from dlcp.transport.plain.burst_socket import Burst, BurstSocket
from dlcp.transport.plain.flow import PlainFlow
from dlcp.transport.plain.fold import PlainFold
from dlcp.transport.plain.incoming import PlainIncoming
from dlcp.transport.plain.outgoing import DELIVERED, FLYING, UNSENT, Indices, PlainOutgoing
from dlcp.wire import Flag, Header, PacketType, Queue

ECN_MASK = 3
CONGESTED = 3
BURSTS_A_TURN = 16
BUSY_RETRY_S = 0.0005


class PlainEngine:
    """See :class:`dlcp.transport.engine.Engine`; parameters as of :class:`dlcp.transport.native.NativeEngine`."""

    def __init__(
        self,
        rank: int,
        peers: dict[int, Address],
        *,
        job: int,
        token: int,
        payload_bytes: int,
        tagged: bool,
        on_control: OnControl,
        on_unknown: OnUnknown,
        on_settled: OnSettled,
        on_taken: OnTaken,
        sock: socket.socket | None,
        emit: Emit | None,
        now_s: float,
    ) -> None:
        self._rank, self._job, self._token, self._payload_bytes = rank, job, token, payload_bytes
        self._queue = Queue.CONTROL if tagged else Queue.ORDINARY
        self._control_tos = wire.dscp(self._queue, False) << 2 if tagged else 0
        self._on_control, self._on_unknown, self._on_settled = on_control, on_unknown, on_settled
        self._on_taken = on_taken
        self._emit, self._peers = emit, peers
        packet_bytes = wire.HEADER_BYTES + payload_bytes
        self._plain = {peer: PlainFlow(now_s, packet_bytes, REORDER_MIN_S) for peer in peers}
        self.flows: dict[int, Flow] = dict(self._plain)
        self._acknowledgements = {peer: Acknowledgements() for peer in peers}
        self._incoming: dict[tuple[int, int, int], PlainIncoming] = {}
        self._counters: Counter[str] = Counter()
        self._socket = BurstSocket(sock, self._counters) if sock else None
        self._woken = False

    def counters(self) -> dict[str, int]:
        """See :meth:`dlcp.transport.engine.Engine.counters`."""
        return {name: value for name, value in self._counters.items() if value}

    @property
    def offload(self) -> bool:
        """Whether the kernel takes whole bursts (UDP_SEGMENT)."""
        return self._socket is None or self._socket.offload

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, rank: int, key: MessageKey, packets: Packets, now_s: float) -> Outgoing:
        """See :meth:`dlcp.transport.engine.Engine.send`."""
        message = PlainOutgoing(rank, key, packets, self._payload_bytes, now_s)
        self._plain[rank].messages[key] = message
        return message

    def remove(self, message: Outgoing) -> None:
        """See :meth:`dlcp.transport.engine.Engine.remove`."""
        assert isinstance(message, PlainOutgoing)
        self._plain[message.rank].remove(message)

    def replace_payload(self, message: Outgoing, payload: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.replace_payload`."""
        assert isinstance(message, PlainOutgoing)
        message.kept.payload = payload

    def take_bitmap(
        self, message: Outgoing, first: int, arrived: NDArray[np.bool_], before_s: float, now_s: float
    ) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.take_bitmap`."""
        assert isinstance(message, PlainOutgoing)
        flow = self._plain[message.rank]
        part = slice(first, first + len(arrived))
        state = message.state[part]
        landed = np.flatnonzero(arrived & (state != DELIVERED) & (state != UNSENT)) + first
        lost = np.flatnonzero(~arrived & (state == FLYING) & (message.sent_s[part] < before_s)) + first
        if len(landed):
            flow.land(message, landed.astype(np.uint32), now_s)
        if len(lost):
            flow.lose(message, lost.astype(np.uint32))
        flow.feed_back(len(landed), 0, len(lost), now_s)
        return bool(len(landed) or len(lost))

    def expect(self, rank: int, key: MessageKey, packets: int, buffer: Bytes | None, tail: Bytes) -> Incoming:
        """See :meth:`dlcp.transport.engine.Engine.expect`."""
        message = PlainIncoming(rank, key, packets, self._payload_bytes, buffer, tail)
        self._incoming[rank, key.step, key.message] = message
        return message

    def move(self, message: Incoming, buffer: Bytes, tail: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.move`."""
        cast(PlainIncoming, message).move(buffer, tail)

    def join(self, message: Incoming, fold: Fold, position: int) -> None:
        """See :meth:`dlcp.transport.engine.Engine.join`."""
        cast(PlainIncoming, message).join(cast(PlainFold, fold), position)

    def wait(self, message: Incoming, required: int, immediate: bool, last_bytes: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.wait`."""
        assert isinstance(message, PlainIncoming)
        message.required, message.immediate = required, immediate
        message.last_bytes = last_bytes or message.last_bytes
        return self._settle(message, now_s)

    def ask(self, message: Incoming, protected_packets: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.ask`."""
        assert isinstance(message, PlainIncoming)
        message.asked, message.protected_packets = True, protected_packets
        return self._settle(message, now_s)

    def close(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.close`."""
        assert isinstance(message, PlainIncoming)
        self._incoming.pop((message.rank, *message.key), None)
        self._acknowledgements[message.rank].drop(message)

    def free(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.free`."""
        cast(PlainIncoming, message).leave()

    def fold(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> Fold:
        """See :meth:`dlcp.transport.engine.Engine.fold`."""
        return PlainFold(values, per_packet, members, divisor, first_block)

    def _settle(self, message: PlainIncoming, now_s: float) -> bool:
        if message.settled or not message.done:
            return False
        message.settled = True
        if message.arrived == message.packets:
            self._acknowledgements[message.rank].note_whole(message)
        self._acknowledge(message.rank, now_s)
        self._on_settled(message, now_s)
        return True

    # Packets in -------------------------------------------------------------------------------------------------------

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.take_in`."""
        try:
            header = wire.decode(datagram)
        except wire.HeaderError:
            self._counters["refused_malformed"] += 1
            return
        rank = header.sender
        if header.token != self._token:
            self._counters["refused_token"] += 1
        elif header.job != self._job:
            self._counters["refused_job"] += 1
        elif self._peers.get(rank) != source:
            self._counters["refused_sender"] += 1
        else:
            self._plain[rank].heard_s = now_s
            payload = datagram[wire.HEADER_BYTES :]
            if header.type is PacketType.DATA:
                self._take_data(rank, header, payload, tos, now_s)
            elif header.type is PacketType.ACK:
                self._take_acknowledgement(rank, header, payload, now_s)
            else:
                self._on_control(rank, header, payload, now_s)

    def _take_data(self, rank: int, header: Header, payload: memoryview, tos: int, now_s: float) -> None:
        message = self._incoming.get((rank, header.step, header.message))
        if message is None:
            message = cast("PlainIncoming | None", self._on_unknown(rank, header, len(payload), now_s))
        if message is None:
            return
        if header.count != message.packets or not message.fits(header.index, len(payload)):
            self._on_control(rank, header, payload, now_s)
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
        self._settle(message, now_s)

    def _split(self, burst: Burst, now_s: float) -> None:
        """Take in the packets of a burst: the leading ones together if that can be, the others one by one."""
        together_bytes = self._take_together(burst, now_s)
        for packet in burst.packets(together_bytes):
            self.take_in(packet, burst.tos, burst.peer, now_s)

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
        rank = int(first["sender"])
        indices = headers["index"].astype(np.uint32)
        if self._peers.get(rank) != burst.peer:
            return 0
        if len(np.unique(indices)) < count or indices.max() >= first["count"] - 1:
            return 0
        message = self._incoming.get((rank, int(first["step"]), int(first["message"])))
        if message is None or message.packets != first["count"]:
            return 0  # the first of a message, or none that is wanted: one by one
        self._plain[rank].heard_s = now_s
        protected = headers["flags"] & Flag.PROTECTED != 0
        self._store(message, indices, rows[:, wire.HEADER_BYTES :], headers["layer"], protected, burst.tos, now_s)
        return count * size

    def _take_acknowledgement(self, rank: int, header: Header, payload: memoryview, now_s: float) -> None:
        if not payload or len(payload) % ENTRY.size:
            self._counters["refused_malformed"] += 1
            return
        flow = self._plain[rank]
        marked = flow.marked_since(header.count)
        newest_s, delivered, taken = 0.0, 0, []
        for step, number, block, bits in ENTRY.iter_unpack(payload):
            message = flow.messages.get(MessageKey(step, number))
            if message is None:
                continue
            whole, block = block & ACK_WHOLE, block & ~ACK_WHOLE
            if block * BLOCK_PACKETS >= message.packets:
                continue
            indices = indices_of(block, bits)
            indices = indices[indices < message.packets]
            state = message.state[indices]
            indices = indices[(state != DELIVERED) & (state != UNSENT)]
            if len(indices):
                flow.land(message, indices, now_s)
                delivered += len(indices)
                # Karn: the time of a packet that was sent twice is no round trip.
                once = indices[message.kept.tags[indices, 0] & Flag.RETRANSMISSION == 0]
                newest_s = max(newest_s, float(message.sent_s[once].max(initial=0.0)))
            if whole and message.all_sent:
                rest = np.flatnonzero(message.state != DELIVERED).astype(np.uint32)
                flow.land(message, rest, now_s)
                delivered += len(rest)
                taken.append(message.key)
        if newest_s:
            flow.sample_rtt(now_s - newest_s - header.step * 1e-6)
        flow.feed_back(delivered, marked, 0, now_s)
        for key in taken:
            self._on_taken(rank, key, now_s)

    # Packets out ------------------------------------------------------------------------------------------------------

    def send_control(self, rank: int, datagram: bytes, tos: int) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.send_control`."""
        if self._emit:
            return self._emit(rank, datagram, tos)
        assert self._socket
        return self._socket.send_packet(memoryview(datagram), tos, self._peers[rank])

    def acknowledge(self, now_s: float) -> float:
        """See :meth:`dlcp.transport.engine.Engine.acknowledge`."""
        due_s = math.inf
        for rank, waiting in self._acknowledgements.items():
            this_due_s = waiting.due_s(self._plain[rank].smoothed_rtt_s)
            if now_s >= this_due_s:
                self._acknowledge(rank, now_s)
            else:
                due_s = min(due_s, this_due_s)
        return due_s

    def _acknowledge(self, rank: int, now_s: float) -> None:
        waiting = self._acknowledgements[rank]
        if not waiting.waiting:
            return
        ago_us = min(0xFFFFFFFF, max(0, int((now_s - waiting.newest_s) * 1e6)))
        header = Header(
            PacketType.ACK,
            0,
            self._queue,
            0,
            0,
            self._job,
            0,
            ago_us,
            0,
            self._rank,
            waiting.data_received & 0xFFFFFFFF,
            waiting.marked_received & 0xFFFFFFFF,
            self._token,
        ).encode()
        for payload in waiting.take(self._payload_bytes, now_s):
            self._counters["acknowledgements"] += 1
            self.send_control(rank, header + payload, self._control_tos)

    def pump(self, now_s: float) -> int:
        """See :meth:`dlcp.transport.engine.Engine.pump`."""
        sent = 0
        for flow in self._plain.values():
            if flow.messages:
                count = flow.pump(now_s, self._emit_burst)
                if count < 0:
                    return -1
                sent += count
        return sent

    def _emit_burst(self, message: PlainOutgoing, chosen: Indices) -> bool:
        size = wire.HEADER_BYTES + self._payload_bytes
        tos = int(message.kept.tags[chosen[0], 3])
        burst = Burst(message.bytes_of(chosen).data, size, tos, self._peers[message.rank])
        if self._emit:
            return burst.send_each(lambda packet: self.send_control(message.rank, bytes(packet), tos))
        assert self._socket
        return self._socket.send(burst)

    # The loop ---------------------------------------------------------------------------------------------------------

    def report_due_s(self) -> float:
        """See :meth:`dlcp.transport.engine.Engine.report_due_s`."""
        return min((flow.report_due_s for flow in self._plain.values()), default=math.inf)

    def turn(self, until_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.turn`."""
        while True:
            received = self._receive()
            now_s = time.monotonic()
            acknowledge_s = self.acknowledge(now_s)
            sent = self.pump(now_s)
            due_s = min(until_s, self.report_due_s())
            attention = any(flow.attention for flow in self._plain.values())
            if now_s >= due_s or attention or self._woken:
                break
            if not received and sent <= 0:
                self._wait(min(due_s, acknowledge_s, self._resume_s()), full=sent < 0)
        self._woken = False
        for flow in self._plain.values():
            flow.attention = False
        return attention

    def _resume_s(self) -> float:
        paused = [f.paused_until_s for f in self._plain.values() if f.messages and f.window < 1 and not f.flying]
        return min(paused, default=math.inf)

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
        if self._socket:
            self._socket.release()
