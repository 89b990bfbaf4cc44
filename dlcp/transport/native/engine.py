# SPDX-License-Identifier: Apache-2.0
"""The engine in C (``dlcp/native``), behind the interface of :mod:`dlcp.transport.engine`."""

import contextlib
import ctypes
import os
import socket
import struct
from ctypes import c_void_p
from typing import cast

import numpy as np
from numpy.typing import NDArray

import dlcp.native
from dlcp import wire
from dlcp.transport.engine import (
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
from dlcp.transport.errors import TransportError
from dlcp.transport.messages import Address, Bytes, MessageKey
from dlcp.transport.native.messages import NativeFold, NativeIncoming, NativeOutgoing
from dlcp.transport.native.mirror import (
    COUNTERS,
    PARAMETERS,
    ControlFunction,
    EmitFunction,
    EngineNumbers,
    NativeFlow,
    SettledFunction,
    TakenFunction,
    UnknownFunction,
    available,
)
from dlcp.transport.shared_memory import SharedMemory


class NativeEngine:
    """See :class:`dlcp.transport.engine.Engine`.

    Parameters
    ----------
    rank, peers
        This rank, and the address of every other.
    job, token, payload_bytes, tagged
        As in :class:`dlcp.transport.protocol.Protocol` and :class:`dlcp.transport.TransportOptions`.
    on_control, on_unknown, on_settled, on_taken
        What the protocol is asked and told.
    sock
        A non-blocking socket; None sends through ``emit``.
    shared
        Memory through which packets go to and come from ranks of this host, instead of the socket; closed with the
        engine.
    """

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
        shared: SharedMemory | None = None,
    ) -> None:
        library = dlcp.native.library()
        if not available() or library is None:
            raise TransportError(f"the engine in C is not here: {dlcp.native.status()}")
        self._library = library
        self._on_control, self._on_unknown, self._on_settled, self._emit = on_control, on_unknown, on_settled, emit
        self._on_taken = on_taken
        self._ranks = list(peers)
        self._numbers = {peer: number for number, peer in enumerate(peers)}
        self._outgoing: dict[int, NativeOutgoing] = {}
        self._incoming: dict[int, NativeIncoming] = {}
        self._error: Exception | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if sock else (-1, -1)
        # What C calls must outlive the engine.
        self._callbacks = (
            ControlFunction(self._take_control),
            UnknownFunction(self._take_unknown),
            SettledFunction(self._take_settled),
            TakenFunction(self._take_taken),
            EmitFunction(self._take_emitted),
        )
        queue = wire.Queue.CONTROL if tagged else wire.Queue.ORDINARY
        self._engine = library.dlcp_engine_new(
            rank,
            job,
            token,
            payload_bytes,
            queue,
            len(peers),
            max(peers, default=0) + 1,
            -1 if sock is None else sock.fileno(),
            self._wake_read,
            wire.dscp(queue, False) << 2 if tagged else 0,
            *self._callbacks[:4],
            ctypes.cast(self._callbacks[4], c_void_p) if emit else None,
        )
        if not self._engine:
            raise MemoryError
        self._state = EngineNumbers.from_address(self._engine)
        for name, (_, value) in PARAMETERS.items():
            setattr(self._state, name, value)
        self.flows: dict[int, Flow] = {
            peer: NativeFlow.from_address(
                library.dlcp_engine_peer(self._engine, number, peer, ipv4_number(peers[peer][0]), peers[peer][1], now_s)
            )
            for peer, number in self._numbers.items()
        }
        self._shared = shared or SharedMemory()
        for rings, share in (
            (self._shared.inward, library.dlcp_engine_share_in),
            (self._shared.outward, library.dlcp_engine_share_out),
        ):
            for peer, ring in rings.items():
                where = ring.marks.ctypes.data, ring.data.ctypes.data, len(ring.data), ring.asleep.ctypes.data
                share(self._engine, self._numbers[peer], *where, ring.bell)
        if len(self._shared.exported):
            library.dlcp_engine_lend(self._engine, self._shared.exported.ctypes.data, len(self._shared.exported))
        for peer, memory in self._shared.imported.items():
            library.dlcp_engine_borrow(self._engine, self._numbers[peer], memory.ctypes.data, len(memory))

    def counters(self) -> dict[str, int]:
        """See :meth:`dlcp.transport.engine.Engine.counters`."""
        return {name: value for name in COUNTERS if (value := getattr(self._state, name)) and name != "last_errno"}

    @property
    def offload(self) -> bool:
        """Whether the kernel takes whole bursts (UDP_SEGMENT)."""
        return bool(self._state.offload)

    def send(self, rank: int, key: MessageKey, packets: Packets, now_s: float) -> Outgoing:
        """See :meth:`dlcp.transport.engine.Engine.send`."""
        payload, tail = packets.payload, packets.tail
        pointer = self._library.dlcp_outgoing_new(
            self._engine,
            self._numbers[rank],
            key.step,
            key.message,
            len(packets.order),
            payload.ctypes.data,
            len(payload),
            tail.ctypes.data,
            len(tail),
            packets.tags.ctypes.data,
            packets.order.ctypes.data,
            packets.head,
            packets.allowed,
            now_s,
        )
        if not pointer:
            raise MemoryError(f"no memory for a message of {len(payload)} bytes to rank {rank}")
        message = self._outgoing[pointer] = NativeOutgoing(pointer, packets)
        return cast(Outgoing, message)

    def remove(self, message: Outgoing) -> None:
        """See :meth:`dlcp.transport.engine.Engine.remove`."""
        assert isinstance(message, NativeOutgoing)
        if self._outgoing.pop(message.pointer, None) is None:
            return
        kept = message.kept  # until C has let go of it
        message.detach()
        self._library.dlcp_outgoing_remove(self._engine, message.pointer)
        del kept

    def replace_payload(self, message: Outgoing, payload: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.replace_payload`."""
        assert isinstance(message, NativeOutgoing)
        assert message.kept
        self._library.dlcp_outgoing_replace(message.pointer, payload.ctypes.data)
        message.kept.payload = payload

    def take_bitmap(
        self, message: Outgoing, first: int, arrived: NDArray[np.bool_], before_s: float, now_s: float
    ) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.take_bitmap`."""
        assert isinstance(message, NativeOutgoing)
        flags = np.ascontiguousarray(arrived, np.uint8)
        return bool(
            self._library.dlcp_outgoing_bitmap(
                self._engine, message.pointer, first, len(flags), flags.ctypes.data, before_s, now_s
            )
        )

    def expect(self, rank: int, key: MessageKey, packets: int, buffer: Bytes | None, tail: Bytes) -> Incoming:
        """See :meth:`dlcp.transport.engine.Engine.expect`."""
        pointer = self._library.dlcp_incoming_new(
            self._engine, self._numbers[rank], key.step, key.message, packets, *_place(buffer), *_place(tail)
        )
        if not pointer:
            raise MemoryError(f"no memory for a message of {packets} packets from rank {rank}")
        message = self._incoming[pointer] = NativeIncoming(pointer, (buffer, tail))
        return cast(Incoming, message)

    def move(self, message: Incoming, buffer: Bytes, tail: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.move`."""
        assert isinstance(message, NativeIncoming)
        self._library.dlcp_incoming_move(self._engine, message.pointer, *_place(buffer), *_place(tail))
        message.kept = (buffer, tail)

    def join(self, message: Incoming, fold: Fold, position: int) -> None:
        """See :meth:`dlcp.transport.engine.Engine.join`."""
        assert isinstance(message, NativeIncoming)
        assert isinstance(fold, NativeFold)
        message.kept, message.joined = (*message.kept, fold), True
        self._library.dlcp_incoming_join(self._engine, message.pointer, fold.pointer, position)

    def wait(self, message: Incoming, required: int, immediate: bool, last_bytes: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.wait`."""
        assert isinstance(message, NativeIncoming)
        return bool(
            self._library.dlcp_incoming_wait(self._engine, message.pointer, required, immediate, last_bytes, now_s)
        )

    def ask(self, message: Incoming, protected_packets: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.ask`."""
        assert isinstance(message, NativeIncoming)
        return bool(self._library.dlcp_incoming_ask(self._engine, message.pointer, protected_packets, now_s))

    def close(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.close`."""
        assert isinstance(message, NativeIncoming)
        self._library.dlcp_incoming_close(self._engine, message.pointer)

    def free(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.free`."""
        assert isinstance(message, NativeIncoming)
        if self._incoming.pop(message.pointer, None) is None:
            return
        kept = message.kept  # until C has let go of it
        message.detach()
        self._library.dlcp_incoming_free(message.pointer)
        del kept

    def fold(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> Fold:
        """See :meth:`dlcp.transport.engine.Engine.fold`."""
        return NativeFold(self._library, values, per_packet, members, divisor, first_block)

    def send_control(self, rank: int, datagram: bytes, tos: int) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.send_control`."""
        number = self._numbers[rank]
        return bool(self._library.dlcp_engine_send(self._engine, number, datagram, len(datagram), tos) >= 0)

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """See :meth:`dlcp.transport.engine.Engine.take_in`."""
        raw = np.frombuffer(datagram, np.uint8)
        self._library.dlcp_engine_take_in(
            self._engine, raw.ctypes.data, len(raw), ipv4_number(source[0]), source[1], tos, now_s
        )
        self._raise()

    def acknowledge(self, now_s: float) -> float:
        """See :meth:`dlcp.transport.engine.Engine.acknowledge`."""
        return float(self._library.dlcp_engine_acknowledge(self._engine, now_s))

    def pump(self, now_s: float) -> int:
        """See :meth:`dlcp.transport.engine.Engine.pump`."""
        sent = int(self._library.dlcp_engine_pump(self._engine, now_s))
        self._raise()
        return sent

    def report_due_s(self) -> float:
        """See :meth:`dlcp.transport.engine.Engine.report_due_s`."""
        return float(self._library.dlcp_engine_report_due(self._engine))

    def turn(self, until_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.turn`."""
        idle = bool(self._library.dlcp_engine_turn(self._engine, until_s))
        self._raise()
        return idle

    def wake(self) -> None:
        """See :meth:`dlcp.transport.engine.Engine.wake`."""
        self._state.woken = 1
        with contextlib.suppress(OSError):  # full, which wakes as well; or closed
            os.write(self._wake_write, b"\0")

    def release(self) -> None:
        """See :meth:`dlcp.transport.engine.Engine.release`."""
        for outgoing in list(self._outgoing.values()):
            self.remove(cast(Outgoing, outgoing))
        for incoming in list(self._incoming.values()):
            self.close(cast(Incoming, incoming))
            if not incoming.joined:  # what a sum holds can still be saved; it lets go of its messages itself
                self.free(cast(Incoming, incoming))
        self._state = EngineNumbers.from_buffer_copy(self._state)
        self.flows = {}
        self._library.dlcp_engine_free(self._engine)
        self._shared.close()
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._wake_write = -1

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    # What C calls; an exception must wait until C has returned --------------------------------------------------------

    def _take_control(self, number: int, address: int, size: int, now_s: float) -> int:
        try:
            datagram = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            self._on_control(self._ranks[number], wire.decode(datagram), datagram[wire.HEADER_BYTES :], now_s)
        except Exception as error:
            self._error = self._error or error
            self._state.woken = 1
        return 0

    def _take_unknown(self, number: int, address: int, size: int, now_s: float) -> int | None:
        try:
            header = wire.decode(ctypes.string_at(address, wire.HEADER_BYTES))
            message = self._on_unknown(self._ranks[number], header, size - wire.HEADER_BYTES, now_s)
        except Exception as error:
            self._error = self._error or error
            self._state.woken = 1
            return None
        return None if message is None else cast(NativeIncoming, message).pointer

    def _take_settled(self, pointer: int, now_s: float) -> None:
        try:
            self._on_settled(cast(Incoming, self._incoming[pointer]), now_s)
        except Exception as error:
            self._error = self._error or error
            self._state.woken = 1

    def _take_taken(self, number: int, step: int, message: int, now_s: float) -> None:
        try:
            self._on_taken(self._ranks[number], MessageKey(step, message), now_s)
        except Exception as error:
            self._error = self._error or error
            self._state.woken = 1

    def _take_emitted(self, number: int, address: int, size: int, tos: int) -> int:
        try:
            assert self._emit
            return 0 if self._emit(self._ranks[number], ctypes.string_at(address, size), tos) else -1
        except Exception as error:
            self._error = self._error or error
            return 0


def ipv4_number(host: str) -> int:
    """Return an IPv4 address as a number in host byte order."""
    return int(struct.unpack(">I", socket.inet_aton(host))[0])


def _place(buffer: Bytes | None) -> tuple[int | None, int]:
    return (None, 0) if buffer is None or not len(buffer) else (buffer.ctypes.data, len(buffer))
