# SPDX-License-Identifier: Apache-2.0
"""Python interface to the C engine (``dlcp/native``).

``engine.h`` documents the records and functions. ctypes declares them here again, because it needs neither Python's
headers nor a compiler where DLCP is installed from a wheel; ``dlcp_sizes`` reveals differences between the two.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import dlcp.native
from dlcp import wire
from dlcp.native import address
from dlcp.transport.congestion import Report
from dlcp.transport.engine import (
    RULES,
    Arrived,
    ControlPacket,
    Datagram,
    Event,
    Mismatch,
    PathState,
    Reported,
    Sent,
    Unanswered,
    Unexpected,
    all_of,
    chunk_seed,
)
from dlcp.transport.messages import EMPTY, Address, Bytes, LossBound, MessageKey, ReceiveRequest, SendRequest
from dlcp.transport.options import PATHS_MAX, TransportOptions
from dlcp.transport.shared_memory import SharedMemory
from dlcp.wire import PacketType, Queue

_ECN_CAPABLE: Final = 2
_NO_MEMORY: Final = -3
_COUNTERS: Final = (
    *("refused_malformed", "refused_token", "refused_job", "refused_sender", "refused_stale"),
    *("data", "duplicate", "late", "early_full", "probe", "control_unsent"),
    *("send_errors", "last_errno", "truncated", "acknowledgements", "received_bursts", "sent_bursts"),
)


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return a structure's fields; each group is a type and the names of its fields, in the order of ``engine.h``."""
    return [(field, kind) for kind, names in groups for field in names.split()]


def _record(name: str, **fields: Any) -> type[ctypes.Structure]:
    """Return a structure; each argument is a type and the names of its fields, in the order of ``engine.h``."""
    return type(name, (ctypes.Structure,), {"_fields_": _fields(*fields.values())})


_Config = _record(
    "Config",
    a=(c_int64, "rank job"),
    b=(c_uint64, "token"),
    c=(c_int64, "payload_bytes tagged peers ranks socket wake control_queue control_tos early_bytes_max"),
    d=(c_double, "silence_s deadline_s disorder_first disorder_min disorder_max disorder_decay"),
    e=(c_double, "report_min_s report_calm_s ack_delay_s ack_delay_max_s ack_spacing_s ack_round_trips"),
    f=(c_int64, "ack_every ack_at_once"),
    g=(c_double, "initial_rtt_s probe_timeout_max_s"),
    h=(c_int64, "backoff_max unanswered_patience lossy_packets"),
    i=(c_double, "stop_repeat_max_s known_after_s remind_s"),
    j=(c_int64, "path_packets path_burst path_judged"),
    k=(c_double, "path_gain path_loss_gain path_lossy path_lossier path_slow path_marked path_least path_calm"),
    l=(c_double, "path_again_s path_again_max_s pace_turn_s inbound_s inbound_pause_s"),
    m=(c_int64, "inbound_packets"),
)
_Head = _record(
    "Head",
    a=(c_void_p, "events"),
    b=(c_int64, "event_count woken failed offload room stopping_count early_bytes oldest_step"),
    c=(c_int64, " ".join(_COUNTERS)),
    d=(c_double, "inbound_peak"),
)


class Flow(ctypes.Structure):
    """Everything in flight to one peer."""

    _fields_ = _fields(
        (c_double, "window"),
        (c_int64, "largest_window flying"),
        (c_double, "smoothed_rtt_s rtt_variation_s heard_s"),
        (c_int64, "burst mute slow_start"),
        (c_double, "pace"),
    )
    window: float
    """Packets that may be in flight; a window below one packet admits one now and then."""
    largest_window: int
    """The limit set by the receiver's buffer, in packets."""
    flying: int
    """Packets in flight."""
    smoothed_rtt_s: float
    """Round-trip time, smoothed as in RFC 6298; 0 if unknown."""
    rtt_variation_s: float
    """Its mean deviation."""
    heard_s: float
    """When the last packet from the peer arrived."""
    burst: int
    """The most packets in one send."""
    mute: bool
    """Send only control packets."""
    slow_start: bool
    """Whether the window should grow at once when it is the limit."""
    pace: float
    """Maximum packets per second; infinity: as many as the window admits."""


_EVENT: Final = struct.Struct("17q 4d 2P")
_SEND_REQUEST: Final = struct.Struct("4q 2P 2q 5P 7q")
_RECEIVE_REQUEST: Final = struct.Struct("8q 2P 2q P q")
"""Records needed several times per message are packed and unpacked: that takes a fifth of the time."""
_SIZES: Final = {
    **{mirror.__name__: ctypes.sizeof(mirror) for mirror in (_Head, Flow, _Config)},
    "Event": _EVENT.size,
    "SendRequest": _SEND_REQUEST.size,
    "ReceiveRequest": _RECEIVE_REQUEST.size,
}
"""In the order of ``dlcp_sizes``."""


class _Event(NamedTuple):
    """An event, in the order of ``engine.h``."""

    kind: int
    peer: int
    step: int
    message: int
    packets: int
    sent: int
    resent: int
    deferred: int
    last_bytes: int
    delivered: int
    marked: int
    lost: int
    limited: int
    waiting: int
    tos: int
    bytes: int
    path: int
    now_s: float
    rtt_s: float
    smoothed_rtt_s: float
    one_way_s: float
    bits: int
    data: int


_NUMBERS = c_int64 * 4
_STATE = c_double * 5
_SIGNATURES: Final[dict[str, tuple[Any, Sequence[Any]]]] = {
    "dlcp_sizes": (c_int64, [c_int64]),
    "dlcp_engine_new": (c_void_p, [POINTER(_Config)]),
    "dlcp_engine_stop": (None, [c_void_p]),
    "dlcp_engine_free": (None, [c_void_p]),
    "dlcp_peer": (c_void_p, [c_void_p, c_int64, c_int64, c_uint32, c_int64, c_char_p, c_double]),
    "dlcp_add_socket": (c_int64, [c_void_p, c_int64]),
    "dlcp_accept": (None, [c_void_p, c_int64, c_void_p, c_int64]),
    "dlcp_spread": (c_int64, [c_void_p, c_int64, c_int64]),
    "dlcp_path_state": (None, [c_void_p, c_int64, c_int64, POINTER(_STATE)]),
    "dlcp_ring_in": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, ctypes.c_int]),
    "dlcp_ring_out": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, ctypes.c_int]),
    "dlcp_export": (None, [c_void_p, c_void_p, c_int64]),
    "dlcp_import": (None, [c_void_p, c_int64, c_void_p, c_int64]),
    "dlcp_send": (c_int64, [c_void_p, c_char_p, c_double]),
    "dlcp_detach": (c_int64, [c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "dlcp_sending": (None, [c_void_p, c_int64, c_int64, c_int64, POINTER(_NUMBERS)]),
    "dlcp_receive": (c_int64, [c_void_p, c_char_p, c_double]),
    "dlcp_receiving": (None, [c_void_p, c_int64, c_int64, c_int64, POINTER(_NUMBERS)]),
    "dlcp_begin_step": (None, [c_void_p, c_int64, c_double]),
    "dlcp_forget": (None, [c_void_p, c_int64, c_int64, c_int64]),
    "dlcp_remind": (None, [c_void_p, c_double]),
    "dlcp_send_control": (None, [c_void_p, c_int64, c_int64, c_char_p, c_int64]),
    "dlcp_take_in": (None, [c_void_p, c_void_p, c_int64, c_uint32, c_int64, c_int64, c_double]),
    "dlcp_tick": (c_double, [c_void_p, c_double]),
    "dlcp_pump": (c_int64, [c_void_p, c_double]),
    "dlcp_turn": (c_int64, [c_void_p, c_double]),
    "dlcp_reduction_new": (c_void_p, [c_void_p, c_int64, c_int64, c_int64, c_float, c_int64]),
    "dlcp_reduction_copy": (None, [c_void_p, c_void_p]),
    "dlcp_reduction_free": (None, [c_void_p]),
    "dlcp_reduction_included": (None, [c_void_p, c_int64, c_void_p]),
    "dlcp_reduction_finish": (c_int64, [c_void_p, c_int64]),
}


def _load() -> ctypes.CDLL:
    """Load the compiled library and declare its functions.

    Raises
    ------
    ImportError
        It is missing, or its records do not match this module; the message says what to do.
    """
    library = dlcp.native.library()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for which, (name, size) in enumerate(_SIZES.items()):
        if library.dlcp_sizes(which) != size:
            raise ImportError(f"record {name} has a different size in {dlcp.native.LIBRARY}; reinstall DLCP")
    return library


_LIBRARY: Final = _load()
"""Loaded at import, so that a program without it fails there and not in the first step."""


class StreamingReduction:
    """The average of this rank's values and the others' contributions, computed in place as packets arrive.

    Own values come first, then those of the others in a fixed order, whichever arrives first, so the result is always
    the same. With ``first_block`` each of the others begins with another chunk of its message
    (:class:`dlcp.tags.ChunkOrder`), and the order differs by chunk accordingly. Packets that arrive before their turn
    wait in a buffer. Use it in the endpoint's thread.

    Parameters
    ----------
    values
        Own values, shape (m,); holds the average in the end.
    per_packet
        How many values a packet carries.
    members
        How many others contribute.
    divisor
        Divisor of the sum.
    first_block
        The block of packets at which chunk 0 begins; below 0 for no chunks.
    """

    def __init__(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a reduction needs contiguous, writable float32 values")
        # Kept here, too: module globals may be gone when __del__ runs at exit.
        self._library = _LIBRARY
        self.values = values
        self._members, self._by_chunks = members, first_block >= 0
        self._packets = -(-len(values) // per_packet)
        self.kept: list[Bytes | None] = []
        """Buffers of its messages."""
        self.pointer = self._library.dlcp_reduction_new(
            address(values), len(values), per_packet, members, divisor, first_block
        )
        if not self.pointer:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.dlcp_reduction_free(self.pointer)

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may arrive early and need a buffer."""
        return self._members > 1 and (self._by_chunks or position > 0)

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """Also write each packet's average to ``copy`` as soon as it is complete; call it before anything arrives.

        Averages that :meth:`finish` computes are not written there.
        """
        self._copy = copy
        self._library.dlcp_reduction_copy(self.pointer, copy.ctypes.data)

    def included(self, position: int) -> NDArray[np.bool_]:
        """Return which packets of a contribution are in the sum, shape (packets,); call it before :meth:`finish`."""
        bits = np.zeros(-(-self._packets // 64), np.uint64)
        self._library.dlcp_reduction_included(self.pointer, position, bits.ctypes.data)
        return np.unpackbits(bits.view(np.uint8), count=self._packets, bitorder="little").astype(np.bool_)

    def finish(self, rescale: bool) -> int:
        """Average packets with contributions that will never arrive; return how many there were.

        Complete packets are averaged already. This ends the reduction.

        Parameters
        ----------
        rescale
            Divide by the number of contributing ranks instead of the divisor.
        """
        incomplete = int(self._library.dlcp_reduction_finish(self.pointer, rescale))
        self.pointer = None
        self.kept.clear()
        return incomplete


class Engine:
    """The messages of one rank. Not thread-safe, except :meth:`wake`.

    Attributes
    ----------
    flows
        State of the flow to each peer, by rank.

    Parameters
    ----------
    rank, peers
        This rank, and the address of every other.
    ecn_capable
        Per peer, whether its packets may be marked instead of dropped.
    job, token, options
        As in :class:`dlcp.transport.Endpoint`.
    sock
        A non-blocking socket; without one, packets to send become events.
    further
        More sockets to send from, one per path; packets that arrive there are ignored.
    shared
        Memory for packets to and from ranks of this host, instead of the socket; closed with the engine.
    """

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
        shared: SharedMemory | None = None,
        further: Sequence[socket.socket] = (),
    ) -> None:
        self._library, self._options = _LIBRARY, options
        self._ranks = list(peers)
        self._numbers = {peer: number for number, peer in enumerate(peers)}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if sock else (-1, -1)
        queue = Queue.CONTROL if options.tagged else Queue.ORDINARY
        rules = _Config(
            rank=rank,
            job=job,
            token=token,
            payload_bytes=options.payload_bytes,
            tagged=options.tagged,
            peers=len(peers),
            ranks=max(peers, default=0) + 1,
            socket=-1 if sock is None else sock.fileno(),
            wake=self._wake_read,
            control_queue=queue,
            control_tos=wire.dscp(queue, False) << 2 if options.tagged else 0,
            early_bytes_max=options.early_buffer_bytes,
            silence_s=options.silence_s,
            deadline_s=options.deadline_s,
            **RULES,
        )
        self._engine = self._library.dlcp_engine_new(byref(rules))
        if not self._engine:
            raise MemoryError
        for each in further:
            if self._library.dlcp_add_socket(self._engine, each.fileno()) == _NO_MEMORY:
                raise ValueError(f"{len(further) + 1} paths are more than {PATHS_MAX}")
        self._head = _Head.from_address(self._engine)
        self._readers: Sequence[Callable[[int, _Event], Event]] = (
            *(self._sent, self._arrived, self._unexpected, self._mismatch),
            *(self._control, self._report, self._timeout, self._datagram),
        )
        """How to read an event, in the order of ``event_kind``."""
        self.flows: dict[int, Flow] = {}
        for peer, number in self._numbers.items():
            service = service_of(options.tagged, ecn_capable[peer]).tobytes()
            host, port = ipv4_number(peers[peer][0]), peers[peer][1]
            address = self._library.dlcp_peer(self._engine, number, peer, host, port, service, now_s)
            if not address:
                raise MemoryError
            self.flows[peer] = Flow.from_address(address)
        self._share(shared or SharedMemory())

    def _share(self, shared: SharedMemory) -> None:
        self._shared = shared
        for rings, share in (
            (shared.inward, self._library.dlcp_ring_in),
            (shared.outward, self._library.dlcp_ring_out),
        ):
            for peer, ring in rings.items():
                where = ring.marks.ctypes.data, ring.data.ctypes.data, len(ring.data), ring.asleep.ctypes.data
                share(self._engine, self._numbers[peer], *where, ring.bell)
        if len(shared.exported):
            self._library.dlcp_export(self._engine, shared.exported.ctypes.data, len(shared.exported))
        for peer, memory in shared.imported.items():
            self._library.dlcp_import(self._engine, self._numbers[peer], memory.ctypes.data, len(memory))

    def __del__(self) -> None:
        # Not sooner: other threads read counters and flows as long as they hold a reference.
        if getattr(self, "_engine", None):
            self._library.dlcp_engine_free(self._engine)

    @property
    def room(self) -> int:
        """How many datagrams may leave without a socket; negative for no limit."""
        return int(self._head.room)

    @room.setter
    def room(self, datagrams: int) -> None:
        self._head.room = datagrams

    @property
    def offload(self) -> bool:
        """Whether the kernel accepts whole bursts (UDP_SEGMENT)."""
        return bool(self._head.offload)

    @property
    def stopping(self) -> bool:
        """Whether the sender of an incomplete message does not know its outcome; of complete ones it will ask."""
        return bool(self._head.stopping_count)

    @property
    def early_bytes(self) -> int:
        """Memory in use for messages that arrived before their receive was posted."""
        return int(self._head.early_bytes)

    @property
    def inbound_peak(self) -> float:
        """The fastest that data arrived through the network since this was set to 0, in packets/s."""
        return float(self._head.inbound_peak)

    @inbound_peak.setter
    def inbound_peak(self, packets_per_s: float) -> None:
        self._head.inbound_peak = packets_per_s

    def counters(self) -> dict[str, int]:
        """Return the counters; names that begin with ``refused_`` are of refused packets."""
        return {name: value for name in _COUNTERS if (value := getattr(self._head, name)) and name != "last_errno"}

    # Events -----------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call, in order.

        Raises
        ------
        MemoryError
            Memory ran out where nothing could be refused; the engine must not be used any more.
        """
        head = self._head
        if head.failed:
            raise MemoryError("the engine ran out of memory for its state; use smaller or fewer messages")
        count = head.event_count
        if not count:
            return []
        records = map(_Event._make, _EVENT.iter_unpack(ctypes.string_at(head.events, count * _EVENT.size)))
        found = [self._readers[event.kind](self._ranks[event.peer], event) for event in records]
        head.event_count = 0
        return found

    @staticmethod
    def _delivered(event: _Event) -> NDArray[np.bool_]:
        if not event.bits:
            return all_of(event.packets)
        raw = np.frombuffer(ctypes.string_at(event.bits, -(-event.packets // 8)), np.uint8)
        return np.unpackbits(raw, count=event.packets, bitorder="little").astype(np.bool_)

    def _sent(self, peer: int, event: _Event) -> Event:
        key = MessageKey(event.step, event.message)
        return Sent(peer, key, self._delivered(event), event.sent, event.resent, event.now_s)

    def _arrived(self, peer: int, event: _Event) -> Event:
        key = MessageKey(event.step, event.message)
        layer = np.frombuffer(ctypes.string_at(event.data, event.packets), np.uint8)
        return Arrived(peer, key, self._delivered(event), layer, event.last_bytes, event.deferred, event.now_s)

    def _unexpected(self, peer: int, event: _Event) -> Event:
        return Unexpected(peer, MessageKey(event.step, event.message))

    def _mismatch(self, peer: int, event: _Event) -> Event:
        return Mismatch(peer, MessageKey(event.step, event.message), event.packets)

    def _control(self, peer: int, event: _Event) -> Event:
        return ControlPacket(peer, ctypes.string_at(event.data, event.bytes), event.now_s)

    def _report(self, peer: int, event: _Event) -> Event:
        counts = event.delivered, event.marked, event.lost
        report = Report(event.now_s, *counts, event.rtt_s, event.smoothed_rtt_s, bool(event.limited), event.one_way_s)
        return Reported(peer, report, bool(event.waiting))

    def _timeout(self, peer: int, _event: _Event) -> Event:
        return Unanswered(peer)

    def _datagram(self, peer: int, event: _Event) -> Event:
        return Datagram(peer, ctypes.string_at(event.data, event.bytes), event.tos, event.path)

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, request: SendRequest, bound: LossBound, now_s: float) -> None:
        """Send a message with a loss bound; its bytes are kept until :class:`Sent`."""
        payload, tail, key = request.payload, request.tail, request.key
        queue, drop_class, layer, protected = map(np.ascontiguousarray, request.tags)
        packets, deferred, allowed = len(queue), request.deferred, 0
        if bound.ratio:
            allowed = bound.allowed(packets)
        record = _SEND_REQUEST.pack(
            *(self._numbers[request.peer], key.step, key.message, packets),
            *(address(payload), address(tail), len(payload), len(tail)),
            *(address(queue), address(drop_class), address(layer), address(protected)),
            0 if deferred is None else address(deferred),
            *(allowed, min(0xFFFF, allowed // self._options.switch_hops), bound.ratio > 0, bound.immediate),
            *(chunk_seed(key) & 0xFFFFFFFF, *request.order),
        )
        if self._library.dlcp_send(self._engine, record, now_s) == _NO_MEMORY:
            raise MemoryError(f"no memory for a message of {len(payload)} bytes to rank {request.peer}")

    def detach(self, peer: int, key: MessageKey, payload: Bytes | None) -> bool:
        """Continue sending from a copy of a message's payload; return whether any of it may still be sent."""
        address = None if payload is None else payload.ctypes.data
        return bool(self._library.dlcp_detach(self._engine, self._numbers[peer], *key, address))

    def sending(self, peer: int, key: MessageKey) -> tuple[int, int, int, int]:
        """Return how many packets of a message are delivered, in flight, unsent, and in total; 0 if it is gone."""
        progress = _NUMBERS()
        self._library.dlcp_sending(self._engine, self._numbers[peer], *key, byref(progress))
        return progress[0], progress[1], progress[2], progress[3]

    def receive(
        self, request: ReceiveRequest, packets: int, buffer: Bytes | None, bound: LossBound, now_s: float
    ) -> int:
        """Post a receive into ``buffer`` and ``request.tail``, or into its reduction.

        Without a buffer, the reduction must not need one. Memory is kept until :class:`Arrived`, or for a reduction
        until it is over.

        Returns
        -------
        0, or the packet count of the sender's message if the sizes differ.
        """
        key, size, tail, reduction = request.key, request.message_bytes, request.tail, request.reduction
        last = 0 if size is None else size - (packets - 1) * self._options.payload_bytes
        pointer = 0
        if reduction is not None:
            reduction.kept.append(buffer)
            pointer = reduction.pointer
        buffer = EMPTY if buffer is None else buffer
        record = _RECEIVE_REQUEST.pack(
            *(self._numbers[request.peer], key.step, key.message, packets),
            *(bound.required(packets), bound.immediate, bound.deferrable(packets) if bound.deferral else 0, last),
            *(address(buffer), address(tail), len(buffer), len(tail)),
            *(pointer, request.position),
        )
        done = int(self._library.dlcp_receive(self._engine, record, now_s))
        if done == _NO_MEMORY:
            raise MemoryError(f"no memory for a message of {packets} packets from rank {request.peer}")
        return done

    def receiving(self, peer: int, key: MessageKey) -> tuple[int, int]:
        """Return how many packets of a message have arrived, and how many it has; 0 if unknown."""
        progress = _NUMBERS()
        self._library.dlcp_receiving(self._engine, self._numbers[peer], *key, byref(progress))
        return progress[0], progress[1]

    def reduction(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> StreamingReduction:
        """Return a reduction of ``values`` with those of ``members`` others, divided by ``divisor``."""
        return StreamingReduction(values, per_packet, members, divisor, first_block)

    def begin_step(self, step: int, now_s: float) -> None:
        """Refuse packets of steps before ``step``, and drop receives for them."""
        self._library.dlcp_begin_step(self._engine, step, now_s)

    def forget(self, peer: int, key: MessageKey) -> None:
        """Forget a complete message, for which no more packets will come."""
        self._library.dlcp_forget(self._engine, self._numbers[peer], *key)

    def remind(self, now_s: float) -> None:
        """Remind senders which messages are complete, until they acknowledge it: this rank will soon be gone."""
        self._library.dlcp_remind(self._engine, now_s)

    def send_control(self, peer: int, kind: PacketType, payload: bytes) -> None:
        """Send a packet about a peer rather than a message."""
        self._library.dlcp_send_control(self._engine, self._numbers[peer], kind, payload, len(payload))

    # Paths ------------------------------------------------------------------------------------------------------------

    def accept(self, peer: int, ports: Sequence[int]) -> None:
        """Also accept packets of a peer from these other ports of its address, at most ``PATHS_MAX`` - 1."""
        numbers = np.array(ports, np.uint16)
        self._library.dlcp_accept(self._engine, self._numbers[peer], numbers.ctypes.data, len(numbers))

    def spread(self, peer: int, paths: int) -> None:
        """Send packets to a peer on this many paths: it knows all their ports."""
        if self._library.dlcp_spread(self._engine, self._numbers[peer], paths) == _NO_MEMORY:
            raise MemoryError(f"no memory for {paths} paths to rank {peer}")

    def paths_to(self, peer: int) -> list[PathState]:
        """Return the state of the paths to a peer, in use or abandoned."""
        found = []
        for number in range(PATHS_MAX):
            state = _STATE()
            self._library.dlcp_path_state(self._engine, self._numbers[peer], number, byref(state))
            found.append(PathState(state[0], state[1], state[2], state[3], int(state[4])))
        return [each for each in found if each.sent]

    # Packets ----------------------------------------------------------------------------------------------------------

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Process one datagram, for use without a socket."""
        raw = np.frombuffer(datagram, np.uint8)
        host, port = ipv4_number(source[0]), source[1]
        self._library.dlcp_take_in(self._engine, raw.ctypes.data, len(raw), host, port, tos, now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due: acknowledge, probe, repeat, report; return when something is due next."""
        return float(self._library.dlcp_tick(self._engine, now_s))

    def pump(self, now_s: float) -> int:
        """Send a burst to each peer whose window admits it; return how many packets, or -1 if the socket is full."""
        return int(self._library.dlcp_pump(self._engine, now_s))

    def turn(self, until_s: float) -> None:
        """Move packets between socket and messages until a time, or until there are events."""
        self._library.dlcp_turn(self._engine, until_s)

    def wake(self) -> None:
        """Make :meth:`turn` return; callable from any thread."""
        self._head.woken = 1
        with contextlib.suppress(OSError):  # full, which also wakes it; or closed
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        """Drop all messages, and accept no more."""
        self._library.dlcp_engine_stop(self._engine)

    def release(self) -> None:
        """Stop, and close what the engine opened."""
        self.stop()
        self._shared.close()
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._wake_read = self._wake_write = -1


def ipv4_number(host: str) -> int:
    """Return an IPv4 address as a number in host byte order."""
    return int(struct.unpack(">I", socket.inet_aton(host))[0])


def service_of(tagged: bool, ecn_capable: bool) -> NDArray[np.uint8]:
    """Return the IPv4 type of service by queue and droppability, shape (8, 2)."""
    service = np.zeros((8, 2), np.uint8)
    if tagged:
        service[:] = [[wire.dscp(queue, droppable) << 2 for droppable in (False, True)] for queue in range(8)]
    service |= np.uint8(_ECN_CAPABLE if ecn_capable else 0)
    return service
