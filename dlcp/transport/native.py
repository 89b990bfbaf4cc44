# SPDX-License-Identifier: Apache-2.0
"""The engine in C (``dlcp/native``), behind the interface of :mod:`dlcp.transport.engine`."""

import contextlib
import ctypes
import os
import socket
import struct
from ctypes import POINTER, c_double, c_int, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import dlcp.native
from dlcp import wire
from dlcp.transport.congestion import Report
from dlcp.transport.engine import (
    REPORT_CALM_S,
    REPORT_MIN_S,
    Address,
    Bytes,
    Emit,
    Flow,
    Fold,
    Incoming,
    MessageKey,
    OnControl,
    OnSettled,
    OnUnknown,
    Outgoing,
    Packets,
)
from dlcp.transport.errors import TransportError

_COUNTERS = (
    "refused_malformed",
    "refused_token",
    "refused_job",
    "refused_sender",
    "data",
    "duplicate",
    "send_errors",
    "last_errno",
    "truncated",
    "acknowledgements",
    "received_bursts",
    "sent_bursts",
)


class _Engine(ctypes.Structure):
    _fields_ = [*((name, c_int64) for name in (*_COUNTERS, "woken", "offload")), ("reorder_min_s", c_double)]


class _Flow(ctypes.Structure):
    _fields_ = [
        ("window", c_double),
        ("largest_window", c_int64),
        ("flying", c_int64),
        ("smoothed_rtt_s", c_double),
        ("rtt_variation_s", c_double),
        ("heard_s", c_double),
        ("delivered", c_int64),
        ("marked", c_int64),
        ("lost", c_int64),
        ("rtt_s", c_double),
        ("limited", c_int64),
        ("reported_s", c_double),
        ("burst", c_int64),
        ("mute", c_int64),
    ]
    window: float
    largest_window: int
    flying: int
    smoothed_rtt_s: float
    rtt_variation_s: float
    heard_s: float
    delivered: int
    marked: int
    lost: int
    rtt_s: float
    limited: int
    reported_s: float
    burst: int
    mute: bool

    def take_report(self, now_s: float) -> Report | None:
        """See :meth:`dlcp.transport.engine.Flow.take_report`."""
        if not (self.delivered or self.lost):
            return None
        calm_s = REPORT_MIN_S if self.lost or self.marked or self.limited else REPORT_CALM_S
        if now_s < self.reported_s + max(calm_s, self.smoothed_rtt_s):
            return None
        report = Report(
            now_s, self.delivered, self.marked, self.lost, self.rtt_s, self.smoothed_rtt_s, bool(self.limited)
        )
        self.delivered = self.marked = self.lost = self.limited = 0
        self.rtt_s = 0.0
        self.reported_s = now_s
        return report


class _Outgoing(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("packets", "flying", "sent", "resent", "delivered", "unsent")),
        ("active_s", c_double),
    ]


class _Incoming(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("packets", "arrived", "arrived_protected", "protected_packets", "required")),
        *((name, c_int64) for name in ("immediate", "asked", "last_bytes", "settled")),
        ("bits", POINTER(c_uint8)),
        ("layer", POINTER(c_uint8)),
    ]


_ControlFunction = ctypes.CFUNCTYPE(c_int, c_int64, c_void_p, c_int64, c_double)
_UnknownFunction = ctypes.CFUNCTYPE(c_void_p, c_int64, c_void_p, c_int64, c_double)
_SettledFunction = ctypes.CFUNCTYPE(None, c_void_p, c_double)
_EmitFunction = ctypes.CFUNCTYPE(c_int, c_int64, c_void_p, c_int64, c_int64)

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlcp_engine_new": (
        c_void_p,
        (
            *(c_int64, c_int64, ctypes.c_uint64, *(c_int64,) * 4, c_int, c_int, c_int),
            *(_ControlFunction, _UnknownFunction, _SettledFunction, c_void_p),
        ),
    ),
    "dlcp_engine_peer": (c_void_p, (c_void_p, c_int64, c_int64, ctypes.c_uint32, c_int64, c_double)),
    "dlcp_engine_free": (None, (c_void_p,)),
    "dlcp_engine_send": (c_int64, (c_void_p, c_int64, ctypes.c_char_p, c_int64, c_int64)),
    "dlcp_engine_take_in": (
        None,
        (c_void_p, c_void_p, c_int64, ctypes.c_uint32, c_int64, c_int64, c_double),
    ),
    "dlcp_engine_pump": (c_int64, (c_void_p, c_double)),
    "dlcp_engine_acknowledge": (c_double, (c_void_p, c_double)),
    "dlcp_engine_report_due": (c_double, (c_void_p,)),
    "dlcp_engine_turn": (c_int64, (c_void_p, c_double)),
    "dlcp_sizes": (c_int64, (c_int64,)),
    "dlcp_outgoing_new": (
        c_void_p,
        (
            *(c_void_p, *(c_int64,) * 4, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
            *(ctypes.c_char_p, c_int64, c_double),
        ),
    ),
    "dlcp_outgoing_remove": (None, (c_void_p, c_void_p)),
    "dlcp_outgoing_replace": (None, (c_void_p, c_void_p)),
    "dlcp_outgoing_bitmap": (
        c_int64,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_double, c_double),
    ),
    "dlcp_incoming_new": (
        c_void_p,
        (c_void_p, *(c_int64,) * 4, c_void_p, c_int64, c_void_p, c_int64),
    ),
    "dlcp_incoming_close": (None, (c_void_p, c_void_p)),
    "dlcp_incoming_free": (None, (c_void_p,)),
    "dlcp_incoming_move": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "dlcp_incoming_join": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "dlcp_incoming_wait": (c_int64, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_double)),
    "dlcp_incoming_ask": (c_int64, (c_void_p, c_void_p, c_int64, c_double)),
    "dlcp_fold_new": (c_void_p, (c_void_p, c_int64, c_int64, c_int64, ctypes.c_float)),
    "dlcp_fold_free": (None, (c_void_p,)),
    "dlcp_fold_included": (None, (c_void_p, c_int64, c_void_p)),
    "dlcp_fold_finish": (c_int64, (c_void_p, c_int64, c_void_p)),
}


def available() -> bool:
    """Return whether the engine in C is here.

    Raises
    ------
    TransportError
        It is, but its structures are not those that this module mirrors.
    """
    library = dlcp.native.library()
    return library is not None and _declared(library)


@cache
def _declared(library: ctypes.CDLL) -> bool:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for which, mirror in enumerate((_Engine, _Flow, _Outgoing, _Incoming)):
        if library.dlcp_sizes(which) != ctypes.sizeof(mirror):
            raise TransportError(f"{mirror.__name__} in C has another size; compile DLCP again")
    return True


class _Sent:
    """An outgoing message; see :class:`dlcp.transport.engine.Outgoing`."""

    def __init__(self, pointer: int, packets: Packets) -> None:
        self.owner: Any = None
        self.pointer = pointer
        self.kept: Packets | None = packets  # the engine reads them
        self.numbers = _Outgoing.from_address(pointer)

    def detach(self) -> None:
        """Keep the numbers, and nothing that the engine frees."""
        self.numbers = _Outgoing.from_buffer_copy(self.numbers)
        self.numbers.flying = self.numbers.unsent = 0
        self.kept = None

    packets = property(lambda self: self.numbers.packets)
    flying = property(lambda self: self.numbers.flying)
    unsent = property(lambda self: self.numbers.unsent)
    sent = property(lambda self: self.numbers.sent)
    resent = property(lambda self: self.numbers.resent)
    delivered = property(lambda self: self.numbers.delivered)
    active_s = property(lambda self: self.numbers.active_s)


class _Received:
    """An incoming message; see :class:`dlcp.transport.engine.Incoming`."""

    def __init__(self, pointer: int, kept: tuple[Bytes | None, Bytes]) -> None:
        self.owner: Any = None
        self.pointer = pointer
        self.kept: tuple[Any, ...] = kept
        self.joined = False
        self.numbers = _Incoming.from_address(pointer)

    packets = property(lambda self: self.numbers.packets)
    arrived = property(lambda self: self.numbers.arrived)
    last_bytes = property(lambda self: self.numbers.last_bytes)

    def detach(self) -> None:
        """Keep the numbers, and nothing that the engine frees."""
        self.numbers = _Incoming.from_buffer_copy(self.numbers)
        self.numbers.bits = self.numbers.layer = None
        self.kept = ()

    def bitmap(self) -> NDArray[np.bool_]:
        """Return which packets are in, shape (packets,)."""
        packets = self.numbers.packets
        if self.numbers.arrived == packets:
            return np.ones(packets, np.bool_)
        raw: Bytes = np.ctypeslib.as_array(self.numbers.bits, (-(-packets // 8),))
        return np.unpackbits(raw, count=packets, bitorder="little").astype(np.bool_)

    def layers(self) -> Bytes:
        """Return the layer position that each packet told, shape (packets,)."""
        return np.array(np.ctypeslib.as_array(self.numbers.layer, (self.numbers.packets,)), np.uint8)


class _Sum:
    """A sum over ranks; see :class:`dlcp.transport.engine.Fold`."""

    def __init__(
        self, library: ctypes.CDLL, values: NDArray[np.float32], per_packet: int, members: int, divisor: float
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a sum needs contiguous, writable float32 values")
        self._library = library
        self._values = values
        self._packets = -(-len(values) // per_packet)
        self.pointer = library.dlcp_fold_new(values.ctypes.data, len(values), per_packet, members, divisor)
        if not self.pointer:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.dlcp_fold_free(self.pointer)

    def included(self, position: int) -> NDArray[np.bool_]:
        """See :meth:`dlcp.transport.engine.Fold.included`."""
        bits = np.zeros(-(-self._packets // 64), np.uint64)
        self._library.dlcp_fold_included(self.pointer, position, bits.ctypes.data)
        return np.unpackbits(bits.view(np.uint8), count=self._packets, bitorder="little").astype(np.bool_)

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None) -> int:
        """See :meth:`dlcp.transport.engine.Fold.finish`."""
        into = None if owed is None else owed.ctypes.data
        return int(self._library.dlcp_fold_finish(self.pointer, rescale, into))


class NativeEngine:
    """See :class:`dlcp.transport.engine.Engine`.

    Parameters
    ----------
    rank, peers
        This rank, and the address of every other.
    job, token, payload_bytes, tagged
        As in :class:`dlcp.transport.protocol.Protocol` and :class:`dlcp.transport.TransportOptions`.
    on_control, on_unknown, on_settled
        What the protocol is asked and told.
    sock
        A non-blocking socket; None sends through ``emit``.
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
        sock: socket.socket | None,
        emit: Emit | None,
        now_s: float,
    ) -> None:
        library = dlcp.native.library()
        if not available() or library is None:
            raise TransportError(f"the engine in C is not here: {dlcp.native.status()}")
        self._library = library
        self._on_control, self._on_unknown, self._on_settled, self._emit = on_control, on_unknown, on_settled, emit
        self._ranks = list(peers)
        self._numbers = {peer: number for number, peer in enumerate(peers)}
        self._outgoing: dict[int, _Sent] = {}
        self._incoming: dict[int, _Received] = {}
        self._error: Exception | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if sock else (-1, -1)
        # What C calls must outlive the engine.
        self._callbacks = (
            _ControlFunction(self._take_control),
            _UnknownFunction(self._take_unknown),
            _SettledFunction(self._take_settled),
            _EmitFunction(self._take_emitted),
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
            *self._callbacks[:3],
            ctypes.cast(self._callbacks[3], c_void_p) if emit else None,
        )
        if not self._engine:
            raise MemoryError
        self._state = _Engine.from_address(self._engine)
        self.flows: dict[int, Flow] = {
            peer: _Flow.from_address(
                library.dlcp_engine_peer(self._engine, number, peer, ipv4_number(peers[peer][0]), peers[peer][1], now_s)
            )
            for peer, number in self._numbers.items()
        }

    @property
    def reorder_min_s(self) -> float:
        """Disorder that counts as none, at least."""
        return float(self._state.reorder_min_s)

    @reorder_min_s.setter
    def reorder_min_s(self, seconds: float) -> None:
        self._state.reorder_min_s = seconds

    def counters(self) -> dict[str, int]:
        """See :meth:`dlcp.transport.engine.Engine.counters`."""
        return {name: value for name in _COUNTERS if (value := getattr(self._state, name)) and name != "last_errno"}

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
        message = self._outgoing[pointer] = _Sent(pointer, packets)
        return cast(Outgoing, message)

    def remove(self, message: Outgoing) -> None:
        """See :meth:`dlcp.transport.engine.Engine.remove`."""
        assert isinstance(message, _Sent)
        if self._outgoing.pop(message.pointer, None) is None:
            return
        kept = message.kept  # until C has let go of it
        message.detach()
        self._library.dlcp_outgoing_remove(self._engine, message.pointer)
        del kept

    def replace_payload(self, message: Outgoing, payload: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.replace_payload`."""
        assert isinstance(message, _Sent)
        assert message.kept
        self._library.dlcp_outgoing_replace(message.pointer, payload.ctypes.data)
        message.kept.payload = payload

    def take_bitmap(
        self, message: Outgoing, first: int, arrived: NDArray[np.bool_], before_s: float, now_s: float
    ) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.take_bitmap`."""
        assert isinstance(message, _Sent)
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
        message = self._incoming[pointer] = _Received(pointer, (buffer, tail))
        return cast(Incoming, message)

    def move(self, message: Incoming, buffer: Bytes, tail: Bytes) -> None:
        """See :meth:`dlcp.transport.engine.Engine.move`."""
        assert isinstance(message, _Received)
        self._library.dlcp_incoming_move(self._engine, message.pointer, *_place(buffer), *_place(tail))
        message.kept = (buffer, tail)

    def join(self, message: Incoming, fold: Fold, position: int) -> None:
        """See :meth:`dlcp.transport.engine.Engine.join`."""
        assert isinstance(message, _Received)
        assert isinstance(fold, _Sum)
        message.kept, message.joined = (*message.kept, fold), True
        self._library.dlcp_incoming_join(self._engine, message.pointer, fold.pointer, position)

    def wait(self, message: Incoming, required: int, immediate: bool, last_bytes: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.wait`."""
        assert isinstance(message, _Received)
        return bool(
            self._library.dlcp_incoming_wait(self._engine, message.pointer, required, immediate, last_bytes, now_s)
        )

    def ask(self, message: Incoming, protected_packets: int, now_s: float) -> bool:
        """See :meth:`dlcp.transport.engine.Engine.ask`."""
        assert isinstance(message, _Received)
        return bool(self._library.dlcp_incoming_ask(self._engine, message.pointer, protected_packets, now_s))

    def close(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.close`."""
        assert isinstance(message, _Received)
        self._library.dlcp_incoming_close(self._engine, message.pointer)

    def free(self, message: Incoming) -> None:
        """See :meth:`dlcp.transport.engine.Engine.free`."""
        assert isinstance(message, _Received)
        if self._incoming.pop(message.pointer, None) is None:
            return
        kept = message.kept  # until C has let go of it
        message.detach()
        self._library.dlcp_incoming_free(message.pointer)
        del kept

    def fold(self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float) -> Fold:
        """See :meth:`dlcp.transport.engine.Engine.fold`."""
        return _Sum(self._library, values, per_packet, members, divisor)

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
        self._state = _Engine.from_buffer_copy(self._state)
        self.flows = {}
        self._library.dlcp_engine_free(self._engine)
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
        return None if message is None else cast(_Received, message).pointer

    def _take_settled(self, pointer: int, now_s: float) -> None:
        try:
            self._on_settled(cast(Incoming, self._incoming[pointer]), now_s)
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
