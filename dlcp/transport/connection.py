# SPDX-License-Identifier: Apache-2.0
"""A rank's messages to and from all its peers, without a thread, a clock or a socket (sans-I/O).

The engine moves packets; :class:`Connection` submits messages to it and runs their completion callbacks.
:class:`dlcp.transport.endpoint.Endpoint` adds a thread and a socket; tests add a network in virtual time.
"""

import heapq
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
    PeerLeftError,
    ReceiveRequest,
    SendRequest,
    TransportError,
    at_step,
)
from dlcp.transport.peer import HELLO_REPEAT_S, Fail, Liveness, Peer, Receiving, Sending, Then
from dlcp.transport.settings import Membership, TransportOptions
from dlcp.transport.shared_memory import SharedMemory

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.host.timeline import Timeline

Emit = Callable[[int, bytes, int, int], object]
"""Sends a packet without a socket: rank, datagram, type of service, path."""
Call = Callable[[Callable[[], None]], None]
"""Runs a function in a connection's thread, in the order of the calls."""
OnMessage = Callable[[int, float], None]
OnUnexpected = Callable[[int, MessageKey], None]
log = logging.getLogger("dlcp")


def _at_once(function: Callable[[], None]) -> None:
    function()


@dataclass(frozen=True, slots=True)
class Links:
    """What a connection's packets leave and arrive through.

    Parameters
    ----------
    receive_packets
        Capacity of the socket's receive buffer in packets; peers share it.
    sock
        The socket, if the engine is to use it.
    emit
        Sends packets if there is no socket.
    ports
        Source ports of all paths but the first, in order.
    further
        The sockets bound to these ports, if the engine is to use a socket.
    shared
        Memory for packets to and from ranks of this host.
    """

    receive_packets: int
    sock: socket.socket | None = None
    emit: Emit | None = None
    ports: Sequence[int] = ()
    further: Sequence[socket.socket] = ()
    shared: SharedMemory | None = None


class Connection:
    """All messages of one rank. The caller supplies packets and the time. Only one thread may use a connection.

    :meth:`send` and :meth:`receive` take a callback, which gets the message's outcome or the error that ended it.
    :meth:`take_events` calls it once; after a failure, it is called at once.

    It has more methods than most classes: those of messages, which callers use, and those of packets and time, which
    only :class:`Endpoint` and tests use, share all of its state.

    Attributes
    ----------
    peers
        The state of the path to every other rank.
    liveness
        Whether the peers are there.
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
    membership
        This rank, and its peers.
    options
        See :class:`TransportOptions`.
    links
        What packets leave and arrive through.
    clock
        The caller's clock.
    call
        Runs a function in the connection's thread, from any thread; by default it runs at once.
    on_message
        Called with a peer and the time when a message from it completes, or it acknowledges one.
    timeline
        Records the outcome of messages; None for no record. Closed with the endpoint.
    """

    def __init__(
        self,
        membership: Membership,
        options: TransportOptions,
        links: Links,
        *,
        clock: Callable[[], float] = time.monotonic,
        call: Call = _at_once,
        on_message: OnMessage | None = None,
        timeline: "Timeline | None" = None,
    ) -> None:
        self.membership, self.rank, self.options = membership, membership.rank, options
        shared, count = links.shared, len(membership.peers)
        self.local_peers = shared.ranks if shared else frozenset[int]()
        self.buffers = BufferPool()
        self.exported = ExportedMemory(shared.exported if shared else EMPTY)
        self.timeline = timeline
        self.on_message = on_message
        self._on_unexpected: OnUnexpected | None = None
        self._on_left: Callable[[], None] | None = None
        self.first_step = 0
        self.call, self.clock, self._emit = call, clock, links.emit
        self.due_s = now_s = clock()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._later_serial = 0
        self._failure: TransportError | None = None
        self._inbound_before = 0.0
        window = max(1, links.receive_packets // max(1, count - len(self.local_peers)))
        controls = {
            peer: NoWindow() if peer in self.local_peers else options.rate_control(count) for peer in membership.peers
        }
        ecn_capable = {peer: control.ecn_capable for peer, control in controls.items()}
        self.engine = Engine(
            membership,
            ecn_capable,
            options=options,
            sock=links.sock,
            now_s=now_s,
            shared=shared,
            further=links.further,
        )
        self.peers = {
            peer: Peer(peer, self.engine.flows[peer], control, options, clock, window, peer in self.local_peers)
            for peer, control in controls.items()
        }
        self.liveness = Liveness(
            membership,
            options,
            self.engine,
            self.peers,
            ports=links.ports,
            room_packets=window,
            clock=clock,
            call_later=self.call_later,
            fail=self.fail,
            go_on_without=self._go_on_without,
        )

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, request: SendRequest, then: Then[Delivery], fail: Fail) -> None:
        """Send a message, and call ``then`` once the receiver has acknowledged it."""
        size, packets = len(request.payload) + len(request.tail), len(request.tags.queue)
        if packets != self._packets(size) or not 0 < packets <= MESSAGE_PACKETS_MAX:
            raise ValueError(f"{size} bytes do not fit {packets} packets of {self.options.payload_bytes} bytes")
        now_s, bound = self.clock(), self._bound(request.peer, request.bound)
        if self._failure:
            _report(fail, self._failure)
            return
        sending = Sending(request, then, fail, bound, now_s, now_s + self.options.deadline_s)
        peer = self.peers[request.peer]
        peer.on_send(now_s)
        self.engine.send(request, bound, now_s)
        unconfirmed = peer.sending
        unconfirmed.pop(request.key, None)  # keeps the order of deadlines
        unconfirmed[request.key] = sending
        if peer.left:
            self.call_later(0.0, partial(self._go_on_without, peer))

    def detach(self, peer: int, key: MessageKey, copy: Bytes | None = None) -> None:
        """Continue sending a message from a copy, so that its payload may change.

        Without ``copy``, this method makes one if a part may still be sent.
        """
        sending = self.peers[peer].sending.get(key)
        if sending is None or not self.engine.detach(peer, key, copy):
            return
        sending.copy = np.frombuffer(sending.request.payload, np.uint8).copy() if copy is None else copy
        if copy is None:
            self.engine.detach(peer, key, sending.copy)

    def receive(self, request: ReceiveRequest, then: Then[Arrival], fail: Fail) -> None:
        """Receive a message, and call ``then`` when its bound is met."""
        now_s, bound, into = self.clock(), self._bound(request.peer, request.bound), request.checked_into()
        if self._failure:
            _report(fail, self._failure)
            return
        receiving = Receiving(request, then, fail, bound, now_s, now_s + self.options.deadline_s, EMPTY, False)
        peer, reduction = request.peer, request.reduction
        if request.message_bytes is None:
            packets = self.engine.receiving(peer, request.key)[1]
            size = packets * self.options.payload_bytes
            if not packets:
                raise ValueError(
                    f"{at_step(self.membership.job, request.key.step)}: size of {request.label} is unknown: "
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
        posted = self.peers[peer].receiving
        posted.pop(request.key, None)
        posted[request.key] = receiving
        theirs = self.engine.receive(request, packets, into, bound, now_s)
        if theirs:
            self._on_mismatch(Mismatch(peer, request.key, theirs))
        if self.peers[peer].left:
            self.call_later(0.0, partial(self._go_on_without, self.peers[peer]))

    def listen(self, handler: OnUnexpected, on_left: Callable[[], None] | None = None) -> None:
        """Call ``handler`` with sender and key of each message that arrives before its receive is posted.

        It is called at once for those that have arrived already: peers may send before this rank listens. ``on_left``
        is called when a peer has left.
        """
        self.take_events()  # the events that these report are reported again below
        self._on_unexpected, self._on_left = handler, on_left
        self.engine.report_unexpected(self.clock())
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
        if step <= self.first_step:
            return
        self.first_step, view = step, self.engine.view
        self._inbound_before, view.inbound_peak = view.inbound_peak, 0.0
        self.engine.begin_step(step, self.clock())
        for peer in self.peers.values():
            for key in [key for key in peer.receiving if key.step < step]:
                receiving = peer.receiving.pop(key)
                error = TransportError(
                    f"{at_step(self.membership.job, key.step)} is over: no longer waiting for "
                    f"{receiving.request.label} from rank {peer.rank}"
                )
                _report(receiving.fail, error)

    def _packets(self, size: int) -> int:
        return -(-size // self.options.payload_bytes)

    def _bound(self, peer: int, bound: LossBound) -> LossBound:
        """Return a message's bound to or from a peer: for a local peer, ``bound`` without loss."""
        return RELIABLE if peer in self.local_peers else bound

    # Calls and shutdown -----------------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run a function about ``delay_s`` from now."""
        self._later_serial += 1
        due_s = self.clock() + delay_s
        self.due_s = min(self.due_s, due_s)
        heapq.heappush(self._later, (due_s, self._later_serial, function))

    def _go_on_without(self, peer: Peer) -> None:
        """Continue without a peer that has left; fail if a message from it is missing.

        It needs no message in flight to it. Its last packets have been processed, because events come first.
        """
        if self._on_left:
            self._on_left()
        if peer.receiving:
            key, receiving = min(peer.receiving.items(), key=lambda item: item[0].step)
            self.fail(
                PeerLeftError(
                    f"{at_step(self.membership.job, key.step)}: rank {peer.rank} has left ({peer.left}) while rank "
                    f"{self.rank} waited for {receiving.request.label}; do all ranks run the same number of steps?"
                )
            )
            return
        now_s = self.clock()
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
        for peer in self.peers.values():
            failed += [sending.fail for sending in peer.sending.values()]
            failed += [receiving.fail for receiving in peer.receiving.values()]
            peer.sending.clear()
            peer.receiving.clear()
        for fail in failed:
            _report(fail, error)

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why all requests fail; None while none has to."""
        return str(self._failure) if self._failure else None

    @property
    def all_confirmed(self) -> bool:
        """Whether peers have acknowledged all messages to them."""
        return not any(peer.sending for peer in self.peers.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight, and every peer knows that its messages are complete."""
        return self.all_confirmed and not self.engine.view.stopping_count

    @property
    def refused(self) -> Counter[str]:
        """Packets refused, by reason."""
        counted = self.engine.counters().items()
        by_engine = {n.removeprefix("refused_"): v for n, v in counted if n.startswith("refused_")}
        return self.liveness.refused + Counter(by_engine)

    def counters(self) -> Counter[str]:
        """Return the other counters, by name."""
        return Counter({n: v for n, v in self.engine.counters().items() if not n.startswith("refused_")})

    @property
    def inbound_bps(self) -> float:
        """The fastest inbound rate in this step or the last one, in bit/s; 0 if unknown.

        It is at most the rate of this rank's port, and of the senders.
        """
        return max(self._inbound_before, float(self.engine.view.inbound_peak)) * self.options.payload_bytes * 8

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
                        self.peers[event.peer].on_report(event)
                    case Unexpected():
                        if self._on_unexpected:
                            self._on_unexpected(event.peer, event.key)
                    case ControlPacket():
                        self.liveness.on_control(event)
                    case Unanswered():
                        self.peers[event.peer].on_timeout()
                    case Narrow():
                        self.liveness.path_to(event.peer).suspect()
                    case Mismatch():
                        self._on_mismatch(event)
                    case Datagram():
                        assert self._emit
                        self._emit(*event)

    def _on_sent(self, event: Sent) -> None:
        sending = self.peers[event.peer].sending.pop(event.key, None)
        if sending is not None:
            if self.on_message is not None:
                self.on_message(event.peer, event.now_s)
            seconds = event.now_s - sending.started_s
            delivery = Delivery(event.delivered, event.sent, event.resent, seconds, event.probes)
            if self.timeline is not None:
                self._note_sent(self.timeline, event, sending, delivery)
            _finish(sending, delivery)

    def _note_sent(self, timeline: "Timeline", event: Sent, sending: Sending, delivery: Delivery) -> None:
        peer = self.peers[event.peer]
        path = int(peer.window_packets), int(peer.rate_bps), int(1e6 * peer.smoothed_rtt_s)
        counts, label = (len(delivery.delivered), delivery.lost, delivery.resent), sending.request.label
        span_s = sending.started_s, event.now_s
        timeline.note_message("sent", event.key.step, event.key.message, event.peer, span_s, *counts, *path, label)

    def _on_arrived(self, event: Arrived) -> None:
        receiving = self.peers[event.peer].receiving.pop(event.key, None)
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
        receiving = self.peers[event.peer].receiving.pop(event.key, None)
        if receiving is not None:
            error = MessageMismatchError(
                f"{at_step(self.membership.job, event.key.step)}: rank {event.peer} sends {receiving.request.label} in "
                f"{event.packets} packets, but {receiving.request.message_bytes} bytes were expected; do all ranks "
                "run the same model and options?"
            )
            _report(receiving.fail, error)

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
        self.liveness.on_time(now_s)
        self.due_s = now_s + HELLO_REPEAT_S
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        if self._later:
            self.due_s = min(self.due_s, self._later[0][0])
        overdue: list[tuple[float, TransportError]] = []
        for peer in self.peers.values():
            error = self.liveness.silence_of(peer, now_s)
            if error:
                self.fail(error)
            overdue += self._overdue(peer, now_s)
        if overdue:  # the longest wait explains the others, which wait for a rank that waits itself
            self.fail(min(overdue, key=itemgetter(0))[1])

    def _overdue(self, peer: Peer, now_s: float) -> Iterator[tuple[float, TransportError]]:
        """Yield the errors of messages that missed their deadlines, with these deadlines."""
        for key, sending in peer.sending.items():
            if now_s < sending.deadline_s:
                break  # the others are due later
            delivered, _, _, packets = self.engine.sending(peer.rank, key)
            text = (
                f"{at_step(self.membership.job, key.step)}: rank {peer.rank} acknowledged {delivered / packets:.0%} of "
                f"{sending.request.label} (bound {sending.bound.required(packets) / packets:.0%}) "
                f"in {now_s - sending.started_s:.1f} s"
            )
            yield sending.deadline_s, DeadlineError(text)
        for key, receiving in peer.receiving.items():
            if now_s < receiving.deadline_s:
                break
            arrived, packets = self.engine.receiving(peer.rank, key)
            text = (
                f"{at_step(self.membership.job, key.step)}: rank {peer.rank} delivered {arrived / packets:.0%} of "
                f"{receiving.request.label} (bound {receiving.bound.required(packets) / packets:.0%}) "
                f"in {self.options.deadline_s:.1f} s"
            )
            yield receiving.deadline_s, DeadlineError(text)


def _finish(message: Sending | Receiving, result: Any) -> None:
    """Pass a message's result on; an error in its callback must not end the other messages."""
    try:
        message.then(result)
    except Exception as error:
        _report(message.fail, error)


def _report(fail: Fail, error: Exception) -> None:
    """Pass an error on; one in its callback must not end the other messages, either."""
    try:
        fail(error)
    except Exception:
        log.exception("a callback for a failed message failed itself")
