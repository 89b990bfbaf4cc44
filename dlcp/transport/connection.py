# SPDX-License-Identifier: Apache-2.0
"""A rank's messages to and from all its peers, without a thread, a clock or a socket (sans-I/O).

The engine moves packets; :class:`Connection` submits messages to it and runs their completion callbacks.
:class:`dlcp.transport.endpoint.Endpoint` adds a thread and a socket; tests add a network in virtual time.
"""

import heapq
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlcp import wire
from dlcp.transport.buffers import BufferPool, ExportedMemory
from dlcp.transport.congestion import NoWindow
from dlcp.transport.engine import (
    MESSAGE_PACKETS_MAX,
    Arrived,
    ControlPacket,
    Datagram,
    Engine,
    Mismatch,
    Narrow,
    PathState,
    Reported,
    Sent,
    StreamingReduction,
    Unanswered,
    Unexpected,
    first_block,
)
from dlcp.transport.messages import (
    EMPTY,
    RELIABLE,
    Address,
    Arrival,
    Bytes,
    DeadlineError,
    Delivery,
    LossBound,
    MessageKey,
    MessageMismatchError,
    PeerAbortedError,
    PeerLeftError,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    TransportError,
    at_step,
)
from dlcp.transport.path_mtu import NarrowPath
from dlcp.transport.peer import Fail, Peer, Receiving, Sending, Then
from dlcp.transport.settings import PATHS_MAX, TransportOptions
from dlcp.transport.shared_memory import SharedMemory
from dlcp.wire import GREETING, GREETING_PORT, PacketType

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.host.timeline import Timeline

HELLO_REPEAT_S: Final = 0.1
"""Time between unanswered greetings before a round trip is known. With round trips of 0.1 ms, a lost greeting delays
the start by this time; with 100 ms, each rank sends one or two needless greetings."""
KEEPALIVE_S: Final = 0.5
"""A silent peer with a pending answer is greeted after this time, to check that it is alive. It must be well below
``silence_s``."""
QUEUED_MEMORY_S: Final = 10.0
"""The time for which a path counts as congested after packets have queued on it: as long as its idle round trip is
remembered."""
ABORT_BYTES_MAX: Final = 1000
FAREWELL: Final = "\0"
"""The first character of the reason when a rank leaves without giving up: its peers need not give up either."""
LAST_PACKETS_S: Final = 0.25
"""The time after a farewell in which earlier packets may still arrive: the delay of many queues."""

T = TypeVar("T")
Emit = Callable[[int, bytes, int, int], object]
"""Sends a packet without a socket: rank, datagram, IPv4 type of service, path."""
Call = Callable[[Callable[[], None]], None]
"""Runs a function in a connection's thread, in the order of the calls."""
OnMessage = Callable[[int, float], None]
OnUnexpected = Callable[[int, MessageKey], None]
log = logging.getLogger("dlcp")


def _at_once(function: Callable[[], None]) -> None:
    function()


class Connection:
    """All messages of one rank. The caller supplies packets and the time. Only one thread may use a connection.

    :meth:`send` and :meth:`receive` take a callback, which gets the message's outcome or the error that ended it.
    :meth:`take_events` calls it once; after a failure, it is called at once.

    Attributes
    ----------
    local_peers
        Ranks reached through shared memory, without loss.
    buffers
        Memory for packets that arrive out of order.
    exported
        Memory from which local peers read messages to them.
    first_step
        The step of the last :meth:`begin_step`; packets of earlier steps are refused.
    due_s
        When to call :meth:`on_time` next.

    Parameters
    ----------
    rank, peers
        This rank, and the address of every other.
    job, token
        Job number, and the session token that all ranks share; packets without it are refused.
    options
        See :class:`TransportOptions`.
    receive_packets
        Capacity of the socket's receive buffer in packets; peers share it.
    clock
        The caller's clock.
    call
        Runs a function in the connection's thread, from any thread; by default it runs at once.
    sock
        The socket, if the engine is to use it.
    emit
        Sends packets if there is no socket.
    shared
        Memory for packets to and from ranks of this host.
    ports
        Source ports of all paths but the first, in order.
    further
        The sockets bound to these ports, if the engine is to use a socket.
    on_message
        Called with a peer and the time when a message from it completes, or it acknowledges one.
    timeline
        Records the outcome of messages; None for no record. Closed with the endpoint.
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
        clock: Callable[[], float] = time.monotonic,
        sock: socket.socket | None = None,
        emit: Emit | None = None,
        shared: SharedMemory | None = None,
        ports: Sequence[int] = (),
        further: Sequence[socket.socket] = (),
        call: Call = _at_once,
        on_message: OnMessage | None = None,
        timeline: "Timeline | None" = None,
    ) -> None:
        self.rank, self.job, self.token, self.options = rank, job, token, options
        self._ports = ports
        self.local_peers = shared.ranks if shared else frozenset[int]()
        self.buffers = BufferPool()
        self.exported = ExportedMemory(shared.exported if shared else EMPTY)
        self.timeline = timeline
        self.on_message = on_message
        self._on_unexpected: OnUnexpected | None = None
        self.first_step = 0
        self.call = call
        self._clock, self._emit = clock, emit
        self._looked_s = self.due_s = now_s = clock()
        self._refused: Counter[str] = Counter()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._later_serial = 0
        self._failure: TransportError | None = None
        self._inbound_before = 0.0
        self._window = max(1, receive_packets // max(1, len(peers) - len(self.local_peers)))
        controls = {
            peer: NoWindow() if peer in self.local_peers else options.rate_control(len(peers)) for peer in peers
        }
        self.engine = Engine(
            rank,
            peers,
            {peer: control.ecn_capable for peer, control in controls.items()},
            job=job,
            token=token,
            options=options,
            sock=sock,
            now_s=now_s,
            shared=shared,
            further=further,
        )
        self._peers = {
            peer: Peer(
                *(peer, self.engine.flows[peer], control, options.payload_bytes),
                *(self._window, peer in self.local_peers),
            )
            for peer, control in controls.items()
        }
        self._narrow: dict[int, NarrowPath] = {}

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, request: SendRequest, then: Then[Delivery], fail: Fail) -> None:
        """Send a message, and call ``then`` once the receiver has acknowledged it."""
        size, packets = len(request.payload) + len(request.tail), len(request.tags.queue)
        if packets != self._packets(size) or not 0 < packets <= MESSAGE_PACKETS_MAX:
            raise ValueError(f"{size} bytes do not fit {packets} packets of {self.options.payload_bytes} bytes")
        now_s, bound = self._clock(), self._bound(request.peer, request.bound)
        if self._failure:
            _fail(fail, self._failure)
            return
        sending = Sending(request, then, fail, bound, now_s, now_s + self.options.deadline_s)
        peer = self._peers[request.peer]
        peer.on_send(now_s)
        self.engine.send(request, bound, now_s)
        unconfirmed = peer.sending
        unconfirmed.pop(request.key, None)  # keeps the order of deadlines
        unconfirmed[request.key] = sending
        if peer.left:
            self.call_later(0.0, partial(self._without, peer))

    def detach(self, peer: int, key: MessageKey, copy: Bytes | None = None) -> None:
        """Continue sending a message from a copy, so that its payload may change.

        Without ``copy``, this method makes one if a part may still be sent.
        """
        sending = self._peers[peer].sending.get(key)
        if sending is None or not self.engine.detach(peer, key, copy):
            return
        sending.copy = np.frombuffer(sending.request.payload, np.uint8).copy() if copy is None else copy
        if copy is None:
            self.engine.detach(peer, key, sending.copy)

    def receive(self, request: ReceiveRequest, then: Then[Arrival], fail: Fail) -> None:
        """Receive a message, and call ``then`` when its bound is met."""
        now_s, bound, into = self._clock(), self._bound(request.peer, request.bound), request.checked_into()
        if self._failure:
            _fail(fail, self._failure)
            return
        receiving = Receiving(request, then, fail, bound, now_s, now_s + self.options.deadline_s, EMPTY, False)
        peer, reduction = request.peer, request.reduction
        if request.message_bytes is None:
            packets = self.engine.receiving(peer, request.key)[1]
            size = packets * self.options.payload_bytes
            if not packets:
                raise ValueError(
                    f"{at_step(self.job, request.key.step)}: size of {request.label} is unknown: "
                    f"nothing has arrived from rank {peer}"
                )
        else:
            size = request.message_bytes
            packets = self._packets(size)
        if into is None and reduction is None:
            into, receiving.clear = np.empty(size - len(request.tail), np.uint8), True
        elif reduction is not None and reduction.needs_buffer(request.position):
            into = self.buffers.take(reduction.message_bytes)
        receiving.payload = EMPTY if into is None else into
        posted = self._peers[peer].receiving
        posted.pop(request.key, None)
        posted[request.key] = receiving
        theirs = self.engine.receive(request, packets, into, bound, now_s)
        if theirs:
            self._on_mismatch(Mismatch(peer, request.key, theirs))
        if self._peers[peer].left:
            self.call_later(0.0, partial(self._without, self._peers[peer]))

    def listen(self, handler: OnUnexpected) -> None:
        """Call ``handler`` with sender and key of each message that arrives before its receive is posted.

        It is called at once for those that have arrived already: peers may send before this rank listens.
        """
        self.take_events()  # what these report is reported again below
        self._on_unexpected = handler
        self.engine.report_unexpected(self._clock())
        self.take_events()

    def reduction(
        self,
        values: NDArray[np.float32],
        members: int,
        divisor: float | None = None,
        key: MessageKey | None = None,
    ) -> StreamingReduction:
        """Return a reduction of ``values`` with ``members`` contributions, for their :class:`ReceiveRequest`.

        The sum is divided by ``divisor``, by default the number of ranks, which gives the average. If the others begin
        with different chunks, all send it as ``key``, and the one at position k has the order ``ChunkOrder(-k %
        members, members)``.
        """
        per_packet = self.options.payload_bytes // values.itemsize
        first = -1 if key is None else first_block(key, len(values), per_packet)
        divisor = members + 1 if divisor is None else divisor
        return StreamingReduction(values, per_packet, members, divisor, first)

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on; receives still posted for them fail."""
        if step > self.first_step:
            self.first_step = step
            view = self.engine.view
            self._inbound_before, view.inbound_peak = view.inbound_peak, 0.0
        self.engine.begin_step(step, self._clock())
        for peer in self._peers.values():
            for key in [key for key in peer.receiving if key.step < step]:
                receiving = peer.receiving.pop(key)
                error = TransportError(
                    f"{at_step(self.job, key.step)} is over: no longer waiting for {receiving.request.label} from rank "
                    f"{peer.rank}"
                )
                _fail(receiving.fail, error)

    def forget(self, peer: int, key: MessageKey) -> None:
        """Forget a complete message; no more of its packets will arrive."""
        self.engine.forget(peer, key)

    def remind(self) -> None:
        """Remind senders of complete messages until they acknowledge, because this rank is about to leave."""
        self.engine.remind(self._clock())

    def _packets(self, size: int) -> int:
        return -(-size // self.options.payload_bytes)

    def _bound(self, peer: int, bound: LossBound) -> LossBound:
        """Return a message's bound to or from a peer: for a local peer, ``bound`` without loss."""
        return RELIABLE if peer in self.local_peers else bound

    # Calls and shutdown -----------------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function about ``delay_s`` from now."""
        self._later_serial += 1
        due_s = self._clock() + delay_s
        self.due_s = min(self.due_s, due_s)
        heapq.heappush(self._later, (due_s, self._later_serial, function))

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up, or leaves normally if the reason begins with :data:`FAREWELL`."""
        payload = reason.encode()[: min(ABORT_BYTES_MAX, self.options.payload_bytes)]
        for peer in self._peers:
            self.engine.send_control(peer, PacketType.ABORT, payload)

    def _without(self, peer: Peer) -> None:
        """Continue without a peer that has left; fail if a message from it is missing.

        It needs no message in flight to it. Its last packets have been processed, because events come first.
        """
        if peer.receiving:
            key, receiving = min(peer.receiving.items(), key=lambda item: item[0].step)
            self.fail(
                PeerLeftError(
                    f"{at_step(self.job, key.step)}: rank {peer.rank} has left ({peer.left}) while rank {self.rank} "
                    f"waited for {receiving.request.label}; do all ranks run the same number of steps?"
                )
            )
            return
        now_s = self._clock()
        for key, sending in list(peer.sending.items()):
            self.detach(peer.rank, key)
            peer.kept.append(sending)
            del peer.sending[key]
            delivered = np.ones(len(sending.request.tags.queue), np.bool_)
            _finish(sending, Delivery(delivered, 0, 0, now_s - sending.started_s))

    def fail(self, error: TransportError) -> None:
        """Give up: all pending and future requests fail with ``error``."""
        self._failure = self._failure or error
        self.engine.stop()
        failed: list[Fail] = []
        for peer in self._peers.values():
            failed += [sending.fail for sending in peer.sending.values()]
            failed += [receiving.fail for receiving in peer.receiving.values()]
            peer.sending.clear()
            peer.receiving.clear()
        for fail in failed:
            _fail(fail, error)

    def greet_all(self) -> None:
        """Announce this rank to all peers."""
        for peer in self._peers.values():
            self._greet(peer, self._clock())

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return list(self._peers)

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return [rank for rank, peer in self._peers.items() if not peer.greeted]

    @property
    def failure(self) -> str | None:
        """Why all requests fail; None while none has to."""
        return str(self._failure) if self._failure else None

    @property
    def all_confirmed(self) -> bool:
        """Whether peers have acknowledged all messages to them."""
        return not any(peer.sending for peer in self._peers.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight, and every peer knows that its messages are complete."""
        return self.all_confirmed and not self.engine.view.stopping_count

    @property
    def refused(self) -> Counter[str]:
        """Packets refused, by reason."""
        counted = self.engine.counters().items()
        return self._refused + Counter({n.removeprefix("refused_"): v for n, v in counted if n.startswith("refused_")})

    def counters(self) -> Counter[str]:
        """Return the other counters, by name."""
        return Counter({n: v for n, v in self.engine.counters().items() if not n.startswith("refused_")})

    def rate_to(self, rank: int) -> float:
        """Return a rank's recent delivery rate while packets were waiting, in bit/s; 0 if unknown.

        It is unknown for local peers, which use no port.
        """
        if rank in self.local_peers or rank not in self._peers:
            return 0.0
        return self._peers[rank].rate.packets_per_s(self._looked_s) * self.options.payload_bytes * 8

    @property
    def inbound_bps(self) -> float:
        """The fastest inbound rate in this step or the last one, in bit/s; 0 if unknown.

        It is at most the rate of this rank's port, and of the senders.
        """
        return max(self._inbound_before, float(self.engine.view.inbound_peak)) * self.options.payload_bytes * 8

    def is_clear(self, rank: int) -> bool:
        """Return whether no packet to a rank was lost or marked recently; callable from any thread.

        Always true for local peers; never if ``TransportOptions.clear_after_s`` is infinite.
        """
        if rank in self.local_peers or rank not in self._peers:
            return True
        clear_after_s = self.options.clear_after_s
        return clear_after_s < math.inf and self._clock() - self._peers[rank].congested_s > clear_after_s

    def is_congested(self, rank: int) -> bool:
        """Return whether the path to a rank is not clear, or packets to it queued recently.

        Never true for local peers.
        """
        if self.is_clear(rank):
            return self._clock() - self._peers[rank].queued_s <= QUEUED_MEMORY_S if rank in self._peers else False
        return True

    def has_queued(self, rank: int, within_s: float) -> bool:
        """Return whether packets to a rank queued in the last ``within_s`` seconds; callable from any thread."""
        return self._clock() - self._peers[rank].queued_s <= within_s

    def rtt_to(self, rank: int) -> float:
        """Return the smoothed round-trip time to a rank in seconds; 0 if unknown."""
        return self._peers[rank].smoothed_rtt_s if rank in self._peers else 0.0

    def window_to(self, rank: int) -> float:
        """Return the congestion window to a rank in packets; 0 for local peers, which are reached through memory."""
        peer = self._peers[rank]
        return 0.0 if peer.local else peer.control.window

    def paths_to(self, rank: int) -> list[PathState]:
        """Return the state of the paths to a rank on which packets have been sent."""
        return self.engine.paths_to(rank)

    # Events -----------------------------------------------------------------------------------------------------------

    def take_events(self) -> None:
        """Process the engine's events; callbacks run here."""
        while events := self.engine.take_events():
            for event in events:
                match event:
                    case Sent():
                        self._on_sent(event)
                    case Arrived():
                        self._on_arrived(event)
                    case Reported():
                        self._peers[event.peer].on_report(event)
                    case Unexpected():
                        if self._on_unexpected:
                            self._on_unexpected(event.peer, event.key)
                    case ControlPacket():
                        self._on_control(event)
                    case Unanswered():
                        self._peers[event.peer].on_timeout()
                    case Narrow():
                        self._path_to(event.peer).suspect()
                    case Mismatch():
                        self._on_mismatch(event)
                    case Datagram():
                        assert self._emit
                        self._emit(*event)

    def _on_sent(self, event: Sent) -> None:
        sending = self._peers[event.peer].sending.pop(event.key, None)
        if sending is not None:
            if self.on_message is not None:
                self.on_message(event.peer, event.now_s)
            seconds = event.now_s - sending.started_s
            delivery = Delivery(event.delivered, event.sent, event.resent, seconds, event.probes)
            if self.timeline is not None:
                self._note_sent(self.timeline, event, sending, delivery)
            _finish(sending, delivery)

    def _note_sent(self, timeline: "Timeline", event: Sent, sending: Sending, delivery: Delivery) -> None:
        peer = self._peers[event.peer]
        path = int(self.window_to(event.peer)), int(self.rate_to(event.peer)), int(1e6 * peer.smoothed_rtt_s)
        counts, label = (len(delivery.delivered), delivery.lost, delivery.resent), sending.request.label
        span_s = sending.started_s, event.now_s
        timeline.note_message("sent", event.key.step, event.key.message, event.peer, span_s, *counts, *path, label)

    def _on_arrived(self, event: Arrived) -> None:
        receiving = self._peers[event.peer].receiving.pop(event.key, None)
        if receiving is None:
            return
        if self.on_message is not None:
            self.on_message(event.peer, event.now_s)
        payload, packet_bytes = receiving.payload, self.options.payload_bytes
        if receiving.request.message_bytes is None:
            payload = payload[: (len(event.delivered) - 1) * packet_bytes + event.last_bytes]
        if receiving.clear:
            for index in np.flatnonzero(~event.delivered).tolist():
                payload[index * packet_bytes : (index + 1) * packet_bytes] = 0
        if self.timeline is not None:
            packets, span_s = len(event.delivered), (receiving.started_s, event.now_s)
            counts, label = (packets, packets - int(np.count_nonzero(event.delivered))), receiving.request.label
            self.timeline.note_message("arrived", event.key.step, event.key.message, event.peer, span_s, *counts, label)
        seconds = event.now_s - receiving.started_s
        _finish(receiving, Arrival(payload, event.delivered, event.layer, seconds))

    def _on_mismatch(self, event: Mismatch) -> None:
        receiving = self._peers[event.peer].receiving.pop(event.key, None)
        if receiving is not None:
            error = MessageMismatchError(
                f"{at_step(self.job, event.key.step)}: rank {event.peer} sends {receiving.request.label} in "
                f"{event.packets} packets, but {receiving.request.message_bytes} bytes were expected; do all ranks "
                "run the same model and options?"
            )
            _fail(receiving.fail, error)

    def _on_control(self, event: ControlPacket) -> None:
        header, payload = wire.decode(event.datagram), event.datagram[wire.HEADER_BYTES :]
        if header.type is PacketType.ABORT:
            peer = self._peers[event.peer]
            reason = payload[:ABORT_BYTES_MAX].decode(errors="replace")
            if reason.startswith(FAREWELL):
                if not peer.left:
                    peer.left = reason[1:]
                    # Its last packets may still be in flight: on another path, or in another queue.
                    self.call_later(LAST_PACKETS_S, partial(self._without, peer))
                return
            error = PeerAbortedError(f"job {self.job}: rank {event.peer} gave up: {reason}")
            # Not at once: a peer counts on what arrived in the same batch, since the engine has acknowledged it.
            self.call_later(0.0, partial(self.fail, error))
        elif header.index:  # a probe of the path carries its size there
            if header.count != header.index:  # a late one, from before the start
                self._refused["stale"] += 1
            elif header.type is PacketType.HELLO_ACK and not payload:
                self._refused["stale"] += not self._answers(event.peer, header.index)
            elif header.type is PacketType.HELLO and header.index == len(payload):
                self.engine.send_control(event.peer, PacketType.HELLO_ACK, b"", header.index)
                self._path_to(event.peer).on_probe(event.now_s)
            else:
                self._refused["malformed"] += 1
        elif len(payload) - GREETING.size not in range(0, PATHS_MAX * GREETING_PORT.size, GREETING_PORT.size):
            self._refused["malformed"] += 1
        else:
            self._on_hello(self._peers[event.peer], header.type, payload, event.now_s)

    def _path_to(self, rank: int) -> NarrowPath:
        """Return what finds out whether the path to a rank has become too narrow."""
        if rank not in self._narrow:
            label, flow = f"job {self.job}, rank {rank}", self._peers[rank].flow
            probe = partial(self._probe_size, rank)
            self._narrow[rank] = NarrowPath(label, self.options.payload_bytes, flow, probe, self.call_later)
        return self._narrow[rank]

    def _probe_size(self, rank: int, size: int) -> None:
        self.engine.send_control(rank, PacketType.HELLO, bytes(size), size)

    def _answers(self, rank: int, size: int) -> bool:
        return rank in self._narrow and self._narrow[rank].on_answer(size)

    def _on_hello(self, peer: Peer, kind: PacketType, payload: bytes, now_s: float) -> None:
        payload_bytes, window = GREETING.unpack_from(payload)
        ports = [port for (port,) in GREETING_PORT.iter_unpack(payload[GREETING.size :])]
        if payload_bytes != self.options.payload_bytes:
            self.fail(
                MessageMismatchError(
                    f"job {self.job}: rank {peer.rank} sends {payload_bytes} bytes a packet and rank {self.rank} "
                    f"{self.options.payload_bytes}; give all ranks the same payload_bytes"
                )
            )
            return
        peer.greeted = True
        peer.room_packets = max(1, window)
        peer.limit_window()
        self.engine.accept(peer.rank, ports)
        if kind is PacketType.HELLO:
            self._greet(peer, now_s, PacketType.HELLO_ACK)
            if self._ports and not peer.answered:  # it was not up when it was greeted
                self._greet(peer, now_s)
        else:
            peer.answered = True
            self.engine.spread(peer.rank, 1 + len(self._ports))

    def _greet(self, peer: Peer, now_s: float, kind: PacketType = PacketType.HELLO) -> None:
        peer.hello_due_s = now_s + HELLO_REPEAT_S
        ports = b"".join(map(GREETING_PORT.pack, self._ports))
        self.engine.send_control(peer.rank, kind, GREETING.pack(self.options.payload_bytes, self._window) + ports)

    # Packets and time, for the caller ---------------------------------------------------------------------------------

    def on_datagram(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Process one datagram; invalid ones are counted in ``refused``. For use without a socket."""
        self.engine.take_in(datagram, tos, source, now_s)
        self.take_events()

    def tick(self, now_s: float) -> None:
        """Run due timers of the engine and of the connection. For use without a socket."""
        self.engine.tick(now_s)
        self.take_events()
        self.on_time(now_s)
        self.take_events()

    def pump(self, now_s: float) -> bool:
        """Send packets that the windows admit, one burst per peer; return whether any were sent."""
        sent = self.engine.pump(now_s) > 0
        self.take_events()
        return sent

    def on_time(self, now_s: float) -> None:
        """Run delayed calls, check for overdue peers and messages, and set :attr:`due_s`."""
        # This process may not have run for this long: packets from the meantime are still unread.
        paused_s = now_s - self._looked_s - HELLO_REPEAT_S
        if paused_s > KEEPALIVE_S:
            for peer in self._peers.values():
                peer.flow.heard_s += paused_s
        self._looked_s = now_s
        self.due_s = now_s + HELLO_REPEAT_S
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        if self._later:
            self.due_s = min(self.due_s, self._later[0][0])
        overdue: list[tuple[float, TransportError]] = []
        for peer in self._peers.values():
            error = self._silence(peer, now_s)
            if error:
                self.fail(error)
            overdue += self._overdue(peer, now_s)
        if overdue:  # the longest wait explains the others, which wait for a rank that waits itself
            self.fail(min(overdue, key=itemgetter(0))[1])

    def _silence(self, peer: Peer, now_s: float) -> TransportError | None:
        """Check that a peer with pending messages is alive; return the error if it has been silent for too long."""
        silent_s = now_s - peer.flow.heard_s
        if not peer.sending and not peer.receiving:
            peer.flow.heard_s = max(peer.flow.heard_s, now_s - self.options.silence_s / 2)
        elif silent_s > self.options.silence_s:
            # A pending receive says more than a sent message, which may have arrived with only its acknowledgement
            # lost.
            waiting: dict[MessageKey, Any] = peer.receiving or peer.sending
            step, label = min((key.step, message.request.label) for key, message in waiting.items())
            return PeerSilentError(
                f"{at_step(self.job, step)}: rank {peer.rank} has been silent for {silent_s:.1f} s "
                f"while rank {self.rank} waited for {label}; is its process alive and the path up?"
            )
        elif now_s >= peer.hello_due_s and (silent_s > KEEPALIVE_S or (self._ports and not peer.answered)):
            self._greet(peer, now_s)
        return None

    def _overdue(self, peer: Peer, now_s: float) -> Iterator[tuple[float, TransportError]]:
        """Yield the errors of messages that missed their deadlines, with these deadlines."""
        for key, sending in peer.sending.items():
            if now_s < sending.deadline_s:
                break  # the others are due later
            delivered, _, _, packets = self.engine.sending(peer.rank, key)
            text = (
                f"{at_step(self.job, key.step)}: rank {peer.rank} acknowledged {delivered / packets:.0%} of "
                f"{sending.request.label} (bound {sending.bound.required(packets) / packets:.0%}) "
                f"in {now_s - sending.started_s:.1f} s"
            )
            yield sending.deadline_s, DeadlineError(text)
        for key, receiving in peer.receiving.items():
            if now_s < receiving.deadline_s:
                break
            arrived, packets = self.engine.receiving(peer.rank, key)
            text = (
                f"{at_step(self.job, key.step)}: rank {peer.rank} delivered {arrived / packets:.0%} of "
                f"{receiving.request.label} (bound {receiving.bound.required(packets) / packets:.0%}) "
                f"in {self.options.deadline_s:.1f} s"
            )
            yield receiving.deadline_s, DeadlineError(text)


def _finish(message: Sending | Receiving, result: Any) -> None:
    """Pass a message's result on; an error in its callback must not end the other messages."""
    try:
        message.then(result)
    except Exception as error:
        _fail(message.fail, error)


def _fail(fail: Fail, error: Exception) -> None:
    try:
        fail(error)
    except Exception:
        log.exception("a callback for a failed message failed itself")
