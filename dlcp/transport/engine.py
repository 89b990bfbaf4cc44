# SPDX-License-Identifier: Apache-2.0
"""The engine, written in C (``dlcp/native``): it moves messages, and Python reads its events.

It handles packets, acknowledgements, windows and losses, and the control packets with which sender and receiver agree
that a message is complete. The endpoint submits messages, runs the engine for a while, then reads its events and runs
callbacks. The engine never calls Python. ``engine.h`` documents its records and functions.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges packets as they
arrive, and with the last one that the message is complete. A sender with nothing left to send probes (PROBE). The
receiver answers with the packets it has (BITMAP), or that it needs no more (STOP). For an incomplete message it sends
STOP without a probe, and repeats it until STOP_ACK. Control packets are self-contained: they may be lost, repeated or
late.
"""

import contextlib
import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.host.ip import family_of
from dlcp.native import ffi, lib
from dlcp.transport.congestion import Report
from dlcp.transport.messages import EMPTY, Address, Bytes, LossBound, MessageKey, ReceiveRequest, SendRequest
from dlcp.transport.settings import PATHS_MAX, Membership, TransportOptions
from dlcp.transport.shared_memory import SharedMemory
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import BLOCK_PACKETS
from dlcp.wire import PacketType, Queue

MESSAGE_PACKETS_MAX: Final[int] = lib.MESSAGE_PACKETS_MAX
_ECN_CAPABLE: Final = 2
_COUNTERS: Final = tuple(name for name, _ in ffi.typeof("packet_counters").fields)


class Sent(NamedTuple):
    """The receiver has acknowledged a message.

    The event has the packets that arrived, and the numbers sent and retransmitted, and of probes in the packets' queue.
    """

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    probes: int
    now_s: float


class Arrived(NamedTuple):
    """A message is complete within its bound; ``layer`` and ``delivered`` as in ``Arrival``."""

    peer: int
    key: MessageKey
    delivered: NDArray[np.bool_]
    layer: Bytes
    last_bytes: int
    now_s: float


class Unexpected(NamedTuple):
    """The first packet of a message arrived before its receive was posted."""

    peer: int
    key: MessageKey


class Mismatch(NamedTuple):
    """The sender's message has ``packets`` packets, which does not match the posted receive."""

    peer: int
    key: MessageKey
    packets: int


class ControlPacket(NamedTuple):
    """A packet about a peer rather than a message: HELLO, HELLO_ACK or ABORT."""

    peer: int
    datagram: bytes
    now_s: float


class Reported(NamedTuple):
    """Feedback on packets to a peer since the last report, and whether more wait to be sent."""

    peer: int
    report: Report
    waiting: bool


class Unanswered(NamedTuple):
    """A peer leaves probes unanswered."""

    peer: int


class Narrow(NamedTuple):
    """Full packets to a peer do not arrive although it is heard, or it has begun to send its own in pieces."""

    peer: int


class Datagram(NamedTuple):
    """Without a socket: a packet to send, with its type of service and path."""

    peer: int
    datagram: bytes
    tos: int
    path: int


class PathState(NamedTuple):
    """State of one of the paths to a peer."""

    weight: float
    """Relative to the best path, 0 to 1; 0 if the path is abandoned."""
    delay_s: float
    """Its smoothed round-trip time; 0 if unknown."""
    loss: float
    """Smoothed share of packets lost; in the next field, of packets marked."""
    marks: float
    sent: int
    """Packets sent on it so far, including retransmissions."""


Event = Sent | Arrived | Unexpected | Mismatch | ControlPacket | Reported | Unanswered | Narrow | Datagram


def _event_of(event: Any, peer: int) -> Event:
    """Return an event of C with copies of all that it points at; ``peer`` is the rank."""
    kind = event.kind
    if kind == lib.EVENT_REPORT:
        counts = event.delivered, event.marked, event.lost
        times = event.rtt_s, event.smoothed_rtt_s, event.limited, event.one_way_s
        return Reported(peer, Report(event.now_s, *counts, *times), event.waiting)
    if kind == lib.EVENT_DATAGRAM:
        return Datagram(peer, ffi.buffer(event.data, event.bytes)[:], event.tos, event.path)
    if kind == lib.EVENT_CONTROL:
        return ControlPacket(peer, ffi.buffer(event.data, event.bytes)[:], event.now_s)
    if kind == lib.EVENT_TIMEOUT:
        return Unanswered(peer)
    if kind == lib.EVENT_NARROW:
        return Narrow(peer)
    key, packets = MessageKey(event.step, event.message), event.packets
    if kind == lib.EVENT_UNEXPECTED:
        return Unexpected(peer, key)
    if kind == lib.EVENT_MISMATCH:
        return Mismatch(peer, key, packets)
    delivered = _unpacked(ffi.buffer(event.bits, -(-packets // 64) * 8), packets) if event.bits else all_of(packets)
    if kind == lib.EVENT_SENT:
        return Sent(peer, key, delivered, event.sent, event.resent, event.probes, event.now_s)
    layer = np.frombuffer(ffi.buffer(event.data, packets)[:], np.uint8)
    return Arrived(peer, key, delivered, layer, event.last_bytes, event.now_s)


def _unpacked(bits: Any, count: int) -> NDArray[np.bool_]:
    """Return the first bits of 64-bit words, lowest first."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(np.bool_)


@lru_cache(64)
def all_of(packets: int) -> NDArray[np.bool_]:
    """Return a ``delivered`` array of a complete message, shape (packets,); shared, so read-only."""
    every = np.ones(packets, np.bool_)
    every.flags.writeable = False
    return every


def chunk_seed(key: MessageKey) -> int:
    """Return the seed that decides which block of a message is sent first; see ``dlcp_send_order`` in C."""
    return key.step * 31 + key.message


def first_block(key: MessageKey, values: int, per_packet: int) -> int:
    """Return the block of packets at which chunk 0 of a reduction begins, if contributions are sent as ``key``."""
    return chunk_seed(key) % max(1, -(-values // (per_packet * BLOCK_PACKETS)))


class Reduction:
    """A combination of the others' contributions with this rank's values, computed in place as packets arrive.

    The result does not depend on the order of arrival. Use it in the endpoint's thread.

    Attributes
    ----------
    message_bytes
        The size of each contribution, without a tail.
    kept
        Buffers of its messages.
    pointer
        The ``reduction`` of ``engine.h``.
    takes_tail
        Whether contributions may have a tail.
    """

    takes_tail: ClassVar = False

    def __init__(self, pointer: Any, message_bytes: int, packets: int) -> None:
        if not pointer:
            raise MemoryError
        self.message_bytes, self._packets = message_bytes, packets
        self.kept: list[Bytes | None] = []
        self.pointer: Any = ffi.gc(pointer, lib.dlcp_reduction_free)

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may have to wait in a buffer."""
        return True

    def included(self, position: int) -> NDArray[np.bool_]:
        """Return which packets of a contribution are in the sum, shape (packets,); call it before :meth:`finish`."""
        bits = np.zeros(-(-self._packets // 64), np.uint64)
        lib.dlcp_reduction_included(self.pointer, position, ffi.from_buffer("uint64_t[]", bits))
        return _unpacked(bits, self._packets)

    def finish(self, rescale: bool = False) -> int:
        """Combine packets with contributions that will never arrive; return their number.

        Complete packets are combined already. This ends the reduction.

        Parameters
        ----------
        rescale
            Divide by the number of ranks in each sum, instead of the divisor.
        """
        ffi.gc(self.pointer, None)  # C frees it
        incomplete: int = lib.dlcp_reduction_finish(self.pointer, rescale)
        self.pointer = None
        self.kept.clear()
        return incomplete


class StreamingReduction(Reduction):
    """The average of this rank's values and the others' contributions.

    Own values come first, then the others' in a fixed order. With ``first_block`` each of the others begins with a
    different chunk of its message (:class:`dlcp.values.tags.ChunkOrder`), and the order differs by chunk accordingly.
    Packets that arrive before their turn wait in a buffer.

    Parameters
    ----------
    values
        Own values, shape (m,); holds the average in the end.
    per_packet
        The number of values in a packet.
    members
        How many others contribute.
    divisor
        Divisor of the sum.
    first_block
        The block of packets at which chunk 0 begins; below 0 for no chunks.
    """

    def __init__(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a reduction needs contiguous, writable float32 values")
        self.values = values
        self._members, self._by_chunks = members, first_block >= 0
        pointer = lib.dlcp_reduction_new(
            ffi.from_buffer("float[]", values), len(values), per_packet, members, divisor, first_block
        )
        super().__init__(pointer, values.nbytes, -(-len(values) // per_packet))

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may arrive early and need a buffer."""
        return self._members > 1 and (self._by_chunks or position > 0)

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """Also write each packet's average to ``copy`` as soon as it is complete; call it before anything arrives.

        Averages that :meth:`finish` computes are not written there.
        """
        self._copy = copy
        lib.dlcp_reduction_copy(self.pointer, ffi.from_buffer("float[]", copy))


class EncodedReduction(Reduction):
    """A sum of encoded contributions: each packet's values are combined in one pass, once all digits have arrived.

    A packet is one of the upper plane with its lower one. Own values come first, then the others' by position.

    Parameters
    ----------
    layout
        The layout of every contribution, and of the result's code.
    values
        Own values, shape (m,), float32; holds the result in the end, as it is decoded from ``code`` if there is one.
    members
        How many others contribute.
    how
        Further arguments of :meth:`dlcp.values.planes.PlaneLayout.sum`.
    """

    takes_tail: ClassVar = True

    def __init__(self, layout: PlaneLayout, values: NDArray[np.float32], members: int, **how: Any) -> None:
        self._memory = values, how  # which C reads and writes
        total = layout.sum(values, **how)
        super().__init__(lib.dlcp_reduction_new_encoded(layout.record, total, members), layout.bytes, layout.packets)


class Engine:
    """The messages of one rank. Not thread-safe, except :meth:`wake`.

    Attributes
    ----------
    view, flows
        The engine's state, an ``engine_view`` of ``engine.h``, and by rank the state of the flow to each peer, a
        ``flow_view``.

    Parameters
    ----------
    membership, options
        As in :class:`dlcp.transport.Endpoint`.
    ecn_capable
        Per peer, whether its packets may be marked instead of dropped.
    sock
        A non-blocking socket; without one, packets to send become events.
    further
        More sockets to send from, one per path; packets that arrive there are ignored.
    shared
        Memory for packets to and from ranks of this host, instead of the socket; closed with the engine.
    """

    def __init__(
        self,
        membership: Membership,
        ecn_capable: dict[int, bool],
        *,
        options: TransportOptions,
        sock: socket.socket | None,
        now_s: float,
        shared: SharedMemory | None = None,
        further: Sequence[socket.socket] = (),
    ) -> None:
        peers = membership.peers
        self._options, self._ranks = options, list(peers)
        self._numbers = {peer: number for number, peer in enumerate(peers)}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if sock else (-1, -1)
        queue = Queue.CONTROL if options.tagged else Queue.ORDINARY
        config = {
            "rank": membership.rank,
            "job": membership.job,
            "token": membership.token,
            "payload_bytes": options.payload_bytes,
            "tagged": options.tagged,
            "peers": len(peers),
            "ranks": max(peers, default=0) + 1,
            "socket": -1 if sock is None else sock.fileno(),
            "wake": self._wake_read,
            "control_queue": queue,
            "control_tos": wire.dscp(queue, False) << 2 if options.tagged else 0,
            "early_bytes_max": options.early_buffer_bytes,
            "silence_s": options.silence_s,
            "deadline_s": options.deadline_s,
        }
        engine = lib.dlcp_engine_new(ffi.new("config *", config))
        if not engine:
            raise MemoryError
        # Freed with this object, not sooner: other threads may read counters and flows meanwhile.
        self._engine = ffi.gc(engine, lib.dlcp_engine_free)
        self.view: Any = lib.dlcp_engine_view(engine)
        for each in further:
            if lib.dlcp_add_socket(engine, each.fileno()) == lib.NO_MEMORY:
                raise ValueError(f"{len(further) + 1} paths exceed the maximum of {PATHS_MAX}")
        self.flows: dict[int, Any] = {}
        for peer, number in self._numbers.items():
            service = ffi.from_buffer(service_of(options.tagged, ecn_capable[peer]))
            address = _packed(peers[peer])
            self.flows[peer] = lib.dlcp_peer(engine, number, peer, address, len(address), service, now_s)
            if not self.flows[peer]:
                raise MemoryError
        self._share(shared or SharedMemory())

    def _share(self, shared: SharedMemory) -> None:
        self._shared = shared  # keeps the memory
        for rings, share in ((shared.inward, lib.dlcp_ring_in), (shared.outward, lib.dlcp_ring_out)):
            for peer, ring in rings.items():
                data, asleep = ffi.from_buffer(ring.data), ffi.from_buffer("uint32_t[]", ring.asleep)
                marks = ffi.from_buffer(ring.marks)
                share(self._engine, self._numbers[peer], marks, data, len(data), asleep, ring.bell)
        if len(shared.exported):
            lib.dlcp_export(self._engine, ffi.from_buffer(shared.exported), len(shared.exported))
        for peer, memory in shared.imported.items():
            lib.dlcp_import(self._engine, self._numbers[peer], ffi.from_buffer(memory), len(memory))

    def counters(self) -> dict[str, int]:
        """Return the counters; names that begin with ``refused_`` are of refused packets."""
        counters = self.view.counters
        return {name: value for name in _COUNTERS if (value := getattr(counters, name))}

    # Events -----------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order.

        Raises
        ------
        MemoryError
            Memory ran out, and no request could be refused; the engine must not be used any more.
        """
        view, ranks = self.view, self._ranks
        if view.failed:
            raise MemoryError("the engine ran out of memory for its state; use smaller or fewer messages")
        if not view.event_count:
            return []
        events = view.events
        found = [_event_of(event := events[n], ranks[event.peer]) for n in range(view.event_count)]
        view.event_count = 0
        return found

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, request: SendRequest, bound: LossBound, now_s: float) -> None:
        """Send a message with a loss bound; its bytes are kept until :class:`Sent`."""
        payload, tail, key = request.payload, request.tail, request.key
        queue, drop_class, layer, protected = map(np.ascontiguousarray, request.tags)
        packets = len(queue)
        allowed = bound.allowed(packets) if bound.ratio else 0
        record = ffi.new("send_request *")
        record.peer = self._numbers[request.peer]
        record.step = key.step
        record.message = key.message
        record.packets = packets
        record.payload = ffi.from_buffer(payload)
        record.bytes = len(payload)
        record.tail = ffi.from_buffer(tail)
        record.tail_bytes = len(tail)
        record.queue = ffi.from_buffer(queue)
        record.drop_class = ffi.from_buffer(drop_class)
        record.layer = ffi.from_buffer(layer)
        record.is_protected = ffi.from_buffer(protected)
        record.allowed = allowed
        record.budget = min(0xFFFF, allowed)
        record.bounded = bound.ratio > 0
        record.immediate = bound.immediate
        record.seed = chunk_seed(key) & 0xFFFFFFFF
        record.chunk = request.order.chunk
        record.chunks = request.order.chunks
        if request.layout is not None:
            coding = wire.CODING[request.layout.bits]
            record.upper_packets = request.layout.packets
            record.coding, record.lower_coding = coding, coding | wire.CODING_LOWER
        if lib.dlcp_send(self._engine, record, now_s) == lib.NO_MEMORY:
            raise MemoryError(f"no memory for a message of {len(payload)} bytes to rank {request.peer}")

    def detach(self, peer: int, key: MessageKey, payload: Bytes | None) -> bool:
        """Continue sending from a copy of a message's payload; return whether a part may still be sent."""
        copy = ffi.NULL if payload is None else ffi.from_buffer(payload)
        return bool(lib.dlcp_detach(self._engine, self._numbers[peer], *key, copy))

    def sending(self, peer: int, key: MessageKey) -> tuple[int, int, int, int]:
        """Return the numbers of a message's packets: delivered, in flight, unsent, and in total; 0 if it has ended."""
        progress = lib.dlcp_sending(self._engine, self._numbers[peer], *key)
        return progress.delivered, progress.flying, progress.unsent, progress.packets

    def receive(
        self, request: ReceiveRequest, packets: int, buffer: Bytes | None, bound: LossBound, now_s: float
    ) -> int:
        """Post a receive into ``buffer`` and ``request.tail``, or into its reduction.

        ``buffer`` may be missing only if the reduction needs none. Memory is kept until :class:`Arrived`, or until the
        reduction ends.

        Returns
        -------
        0, or the packet count of the sender's message if the sizes differ.
        """
        key, size, tail, reduction = request.key, request.message_bytes, request.tail, request.reduction
        if reduction is not None:
            reduction.kept.append(buffer)
        buffer = EMPTY if buffer is None else buffer
        record = ffi.new("receive_request *")
        record.peer = self._numbers[request.peer]
        record.step = key.step
        record.message = key.message
        record.packets = packets
        record.required = bound.required(packets)
        record.immediate = bound.immediate
        record.last_bytes = 0 if size is None else size - (packets - 1) * self._options.payload_bytes
        record.buffer = ffi.from_buffer(buffer) if len(buffer) else ffi.NULL
        record.bytes = len(buffer)
        record.tail = ffi.from_buffer(tail)
        record.tail_bytes = len(tail)
        record.reduction = ffi.NULL if reduction is None else reduction.pointer
        record.position = request.position
        done: int = lib.dlcp_receive(self._engine, record, now_s)
        if done == lib.NO_MEMORY:
            raise MemoryError(f"no memory for a message of {packets} packets from rank {request.peer}")
        return done

    def receiving(self, peer: int, key: MessageKey) -> tuple[int, int]:
        """Return the numbers of a message's packets that have arrived, and in total; 0 if unknown."""
        progress = lib.dlcp_receiving(self._engine, self._numbers[peer], *key)
        return progress.delivered, progress.packets

    def report_unexpected(self, now_s: float) -> None:
        """Report every message that has arrived without a posted receive, even if it was reported before."""
        lib.dlcp_report_unexpected(self._engine, now_s)

    def begin_step(self, step: int, now_s: float) -> None:
        """Refuse packets of steps before ``step``, and drop receives for them."""
        lib.dlcp_begin_step(self._engine, step, now_s)

    def forget(self, peer: int, key: MessageKey) -> None:
        """Forget a complete message; no more of its packets will arrive."""
        lib.dlcp_forget(self._engine, self._numbers[peer], *key)

    def remind(self, now_s: float) -> None:
        """Remind senders of complete messages until they acknowledge, because this rank is about to leave."""
        lib.dlcp_remind(self._engine, now_s)

    def send_control(self, peer: int, kind: PacketType, payload: bytes, size: int = 0) -> None:
        """Send a packet about a peer rather than a message; probes of the path have the ``size`` to test."""
        lib.dlcp_send_control(self._engine, self._numbers[peer], kind, size, payload, len(payload))

    # Paths ------------------------------------------------------------------------------------------------------------

    def accept(self, peer: int, ports: Sequence[int]) -> None:
        """Also accept packets of a peer from these other ports of its address, at most ``PATHS_MAX`` - 1."""
        numbers = np.array(ports, np.uint16)
        lib.dlcp_accept(self._engine, self._numbers[peer], ffi.from_buffer("uint16_t[]", numbers), len(numbers))

    def spread(self, peer: int, paths: int) -> None:
        """Set the number of paths to a peer, which must know all their ports."""
        if lib.dlcp_spread(self._engine, self._numbers[peer], paths) == lib.NO_MEMORY:
            raise MemoryError(f"no memory for {paths} paths to rank {peer}")

    def paths_to(self, peer: int) -> list[PathState]:
        """Return the state of the paths to a peer, in use or abandoned."""
        found = (lib.dlcp_path(self._engine, self._numbers[peer], number) for number in range(PATHS_MAX))
        return [PathState(path.weight, path.delay_s, path.loss, path.marks, path.sent) for path in found if path.sent]

    # Packets ----------------------------------------------------------------------------------------------------------

    def take_in(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Process one datagram, for use without a socket."""
        address = _packed(source)
        lib.dlcp_take_in(self._engine, ffi.from_buffer(datagram), len(datagram), address, len(address), tos, now_s)

    def tick(self, now_s: float) -> float:
        """Run due timers: acknowledge, probe, repeat, report; return the time of the next one."""
        return float(lib.dlcp_tick(self._engine, now_s))

    def pump(self, now_s: float) -> int:
        """Send a burst to each peer whose window admits it.

        Return the number of packets, or -1 if the socket is full.
        """
        return int(lib.dlcp_pump(self._engine, now_s))

    def turn(self, until_s: float) -> None:
        """Move packets between socket and messages until a time, or until there are events."""
        lib.dlcp_turn(self._engine, until_s)

    def wake(self) -> None:
        """Make :meth:`turn` return; callable from any thread."""
        lib.dlcp_wake(self._engine)
        with contextlib.suppress(OSError):  # the pipe is closed; or it is full, and turn returns anyway
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        """Drop all messages, and accept no more."""
        lib.dlcp_engine_stop(self._engine)

    def release(self) -> None:
        """Stop, and close what the engine opened."""
        self.stop()
        self._shared.close()
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._wake_read = self._wake_write = -1


def _packed(address: Address) -> bytes:
    """Return an address as C has it; a socket's own address may have further items."""
    host, port = address[:2]
    return family_of(host).packed(host, port)


def service_of(tagged: bool, ecn_capable: bool) -> NDArray[np.uint8]:
    """Return the type of service, in IPv6 called traffic class, by queue and droppability, shape (8, 2)."""
    service = np.zeros((8, 2), np.uint8)
    if tagged:
        service[:] = [[wire.dscp(queue, droppable) << 2 for droppable in (False, True)] for queue in range(8)]
    service |= np.uint8(_ECN_CAPABLE if ecn_capable else 0)
    return service
