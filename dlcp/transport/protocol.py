# SPDX-License-Identifier: Apache-2.0
"""Bounded-loss messages between ranks, without threads or clocks: those are given by whoever drives it.

A sender numbers the packets of a message and sends them within its window. The receiver acknowledges what arrives, and
with the last of them that it has taken the message whole. When the sender has nothing left to send it asks (PROBE); the
receiver answers with what is missing (BITMAP), or that it needs no more (STOP). A STOP that leaves packets out is sent
without being asked for, and repeated until STOP_ACK. Control packets carry their own state and may be lost, repeated or
late.

Data, acknowledgements and windows are the engine's (:mod:`dlcp.transport.engine`). All that is rarer is of the
outbox (:mod:`dlcp.transport.outbox`) and the inbox (:mod:`dlcp.transport.inbox`), or concerns a peer as a whole
(:mod:`dlcp.transport.liveness`).
"""

import heapq
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.transport import native
from dlcp.transport.buffers import BufferPool, ExportedMemory
from dlcp.transport.congestion import NoWindow
from dlcp.transport.control_packets import ControlPackets
from dlcp.transport.engine import Emit, Engine, Incoming
from dlcp.transport.errors import PeerAbortedError, TransportError
from dlcp.transport.inbox import Inbox
from dlcp.transport.liveness import HELLO_REPEAT_S, Liveness
from dlcp.transport.messages import (
    EMPTY,
    RELIABLE,
    Address,
    Arrival,
    Bytes,
    Delivery,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
)
from dlcp.transport.options import TransportOptions, weight_of
from dlcp.transport.outbox import Outbox
from dlcp.transport.peer import Peer
from dlcp.transport.plain import PlainEngine
from dlcp.transport.promise import Promise
from dlcp.transport.receiving import STOP_REPEAT_S, Awaited
from dlcp.transport.reduction import StreamingReduction
from dlcp.transport.sending import PROBE_TIMEOUT_MIN_S
from dlcp.transport.shared_memory import SharedMemory
from dlcp.wire import Header, PacketType


class Protocol:
    """All messages of one rank, without a thread. Whoever drives it gives it packets and time.

    Attributes
    ----------
    local_peers
        Ranks to and from which packets go through memory: nothing gets lost there.
    buffers
        Memory for what arrives early or out of turn.
    exported
        Memory from which local peers read what is sent to them.
    on_unexpected
        Called with sender and key of a message that arrives before its receive is posted.

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
    clock
        The clock of whoever drives it.
    sock
        The socket, if the engine is to use it (:meth:`Engine.turn`).
    emit
        How packets leave otherwise.
    compiled
        Whether to use the engine in C; None: if it is here.
    shared
        Memory through which packets go to and come from ranks of this host; for the engine in C only.
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
        compiled: bool | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.rank = rank
        self.job = job
        self.token = token
        self.options = options
        self.buffers = BufferPool()
        self.exported = ExportedMemory(shared.exported if shared else EMPTY)
        self._clock, now_s = clock, clock()
        self._refused: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self.local_peers = shared.ranks if shared else frozenset[int]()
        self._window = max(1, receive_packets // max(1, len(peers) - len(self.local_peers)))
        make: Callable[..., Engine] = PlainEngine
        if native.available() if compiled is None else compiled:
            make = partial(native.NativeEngine, shared=shared)
        elif self.local_peers:
            raise TransportError(f"rank {rank}: only the engine in C reads memory that ranks share")
        self._engine = make(
            rank,
            peers,
            job=job,
            token=token,
            payload_bytes=options.payload_bytes,
            tagged=options.tagged,
            on_control=self._on_control,
            on_unknown=self._on_unknown,
            on_settled=self._on_settled,
            on_taken=self._on_taken,
            sock=sock,
            emit=emit,
            now_s=now_s,
        )
        self._packets = ControlPackets(
            self._engine,
            rank,
            job=job,
            token=token,
            payload_bytes=options.payload_bytes,
            tagged=options.tagged,
            counted=self._counted,
        )
        self._peers = {
            peer: Peer(
                peer,
                self._engine.flows[peer],
                NoWindow() if peer in self.local_peers else options.rate_control(len(peers)),
                options.payload_bytes,
                self._window,
                peer in self.local_peers,
            )
            for peer in peers
        }
        self._inbox = Inbox(
            self._engine,
            self._packets,
            job=job,
            options=options,
            buffers=self.buffers,
            refused=self._refused,
            counted=self._counted,
        )
        self._outbox = Outbox(
            self._engine,
            self._packets,
            self._peers,
            job=job,
            options=options,
            refused=self._refused,
            counted=self._counted,
        )
        self._liveness = Liveness(
            rank,
            job,
            self._packets,
            self._peers,
            self._inbox,
            self._outbox,
            window=self._window,
            options=options,
            refused=self._refused,
        )
        self._clock_s = self._now_s = self.due_s = now_s
        """When to call :meth:`on_time` next, if no message falls idle before."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._later_serial = 0
        self._failure: TransportError | None = None

    # What the owner asks for ------------------------------------------------------------------------------------------

    def send(self, request: SendRequest) -> Future[Delivery]:
        """Send a message; the future resolves once the receiver has confirmed it."""
        now_s = self._clock()
        self._outbox.check(len(request.payload) + len(request.tail), len(request.tags.queue))
        if self._failure:
            failed: Promise[Delivery] = Promise()
            failed.set_exception(self._failure)
            return failed
        self._due_by(now_s + PROBE_TIMEOUT_MIN_S)
        return self._outbox.send(request, self._bound(request.peer, request.bound), now_s)

    def receive(self, request: ReceiveRequest) -> Future[Arrival]:
        """Receive a message; the future resolves when its bound is met."""
        now_s = self._clock()
        bound = self._bound(request.peer, request.bound)
        awaited = Awaited(request.message_bytes, bound, request.label, now_s + self.options.deadline_s)
        if self._failure:
            awaited.done.set_exception(self._failure)
            return awaited.done
        self._inbox.wait(request, awaited, now_s)
        return awaited.done

    def reduction(
        self,
        values: NDArray[np.float32],
        members: int,
        divisor: float | None = None,
        key: MessageKey | None = None,
    ) -> StreamingReduction:
        """Return a reduction of ``values`` with what ``members`` others send, for their :class:`ReceiveRequest`.

        The sum is divided by ``divisor``: by default the number of ranks, which gives the average. Others that begin
        with different chunks all send it as ``key``; the one at position k then has the order
        ``ChunkOrder(-k % members, members)``.
        """
        per_packet = self.options.payload_bytes // values.itemsize
        divisor = members + 1 if divisor is None else divisor
        return StreamingReduction(self._engine, values, per_packet, members, divisor, key)

    def detach(self, peer: int, key: MessageKey, copy: Bytes | None = None) -> None:
        """Go on sending a message from a copy, so that its payload may change although it is not confirmed.

        Without a ``copy`` one is made, if anything of it may still have to be sent.
        """
        self._outbox.detach(peer, key, copy)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function where the protocol runs: at once."""
        function()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something about ``delay_s`` from now."""
        self._later_serial += 1
        self._due_by(self._now_s + delay_s)
        heapq.heappush(self._later, (self._now_s + delay_s, self._later_serial, action))

    @property
    def on_unexpected(self) -> Callable[[int, MessageKey], None] | None:
        """Called with sender and key of a message that arrives before its receive is posted."""
        return self._inbox.on_unexpected

    @on_unexpected.setter
    def on_unexpected(self, action: Callable[[int, MessageKey], None] | None) -> None:
        self._inbox.on_unexpected = action

    def forget(self, peer: int, key: MessageKey) -> None:
        """Forget a complete message, of which no packets will come any more."""
        self._inbox.forget(peer, key)

    @property
    def first_step(self) -> int:
        """The step of the last :meth:`begin_step`."""
        return self._inbox.oldest_step

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on; receives that are still posted for them fail."""
        self._inbox.begin_step(step)

    def tell_again(self) -> None:
        """Tell senders again which messages came whole, until they confirm it: before this rank cannot be asked."""
        self._inbox.tell_again(self._now_s)
        self.due_s = self._now_s

    def greet_all(self) -> None:
        """Announce this rank to all peers."""
        for peer in self._peers.values():
            self._liveness.greet(peer, self._clock())

    @property
    def strangers(self) -> list[int]:
        """Ranks that have not answered a greeting yet."""
        return self._liveness.strangers

    @property
    def all_confirmed(self) -> bool:
        """Whether peers have confirmed all that was sent to them."""
        return self._outbox.settled

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way and every peer knows it."""
        return self._inbox.settled and self._outbox.settled

    @property
    def refused(self) -> Counter[str]:
        """Packets refused, by reason."""
        counters = self._engine.counters().items()
        found = {name.removeprefix("refused_"): value for name, value in counters if name.startswith("refused_")}
        return self._refused + Counter(found)

    def counters(self) -> Counter[str]:
        """Return what else was counted, by name."""
        counters = self._engine.counters().items()
        return self._counted + Counter({name: value for name, value in counters if not name.startswith("refused_")})

    def rate_to(self, rank: int) -> float:
        """Return how fast a rank has taken in lately what waited to be sent to it, in bit/s; 0 if that is not known.

        It is not known of local peers: a rank's rate is that of its port.
        """
        if rank in self.local_peers or rank not in self._peers:
            return 0.0
        return self._peers[rank].rate.packets_per_s(self._clock_s) * self.options.payload_bytes * 8

    def rtt_to(self, rank: int) -> float:
        """Return the smoothed round-trip time to a rank in seconds; 0 if it is not known."""
        return self._peers[rank].flow.smoothed_rtt_s if rank in self._peers else 0.0

    def set_flow_weight(self, flow_weight: float | None) -> None:
        """Let each flow count as another share of one from now on; see ``TransportOptions.flow_weight``."""
        for peer in self._peers.values():
            peer.control.weight = weight_of(flow_weight, len(self._peers))

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up."""
        for peer in self._peers:
            self._packets.send(peer, PacketType.ABORT, payload=reason.encode()[: min(1000, self.options.payload_bytes)])

    def fail(self, error: TransportError) -> None:
        """Give up: everything that waits, and everything asked for from now on, gets ``error``."""
        self._failure = self._failure or error
        failed: list[Promise[Delivery] | Promise[Arrival]] = [*self._outbox.fail(), *self._inbox.fail()]
        for future in failed:
            if not future.done():
                future.set_exception(error)

    # What the engine tells --------------------------------------------------------------------------------------------

    def _on_unknown(self, rank: int, header: Header, size: int, now_s: float) -> Incoming | None:
        return self._inbox.on_unknown(rank, header, size, now_s)

    def _on_settled(self, message: Incoming, now_s: float) -> None:
        self._due_by(now_s + STOP_REPEAT_S)
        self._inbox.on_settled(message, now_s)

    def _on_taken(self, rank: int, key: MessageKey, now_s: float) -> None:
        self._outbox.on_taken(rank, key, now_s)

    # Control packets --------------------------------------------------------------------------------------------------

    def on_datagram(self, datagram: memoryview, tos: int, source: Address, now_s: float) -> None:
        """Take in one datagram; whatever is wrong with it is counted in ``refused``. For use without a socket."""
        self._engine.take_in(datagram, tos, source, now_s)
        self.on_reports(now_s)

    def _on_control(self, rank: int, header: Header, payload: memoryview, now_s: float) -> None:
        peer = self._peers[rank]
        kind = header.type
        if kind is PacketType.DATA:
            self._inbox.on_misfit(rank, header, payload)
        elif kind is PacketType.PROBE:
            self._inbox.on_probe(rank, header, payload, now_s)
        elif kind is PacketType.BITMAP or kind is PacketType.STOP:
            self._outbox.on_bitmap(rank, header, payload, now_s)
            self._due_by(peer.look_s)
        elif kind is PacketType.STOP_ACK:
            self._inbox.on_stop_ack(rank, header)
        elif kind is PacketType.ABORT:
            reason = bytes(payload[:1000]).decode(errors="replace")
            self.fail(PeerAbortedError(f"job {self.job}: rank {peer.rank} gave up: {reason}"))
        else:
            mismatch = self._liveness.on_hello(peer, header, payload, now_s)
            if mismatch:
                self.fail(mismatch)

    # What time brings -------------------------------------------------------------------------------------------------

    def acknowledge(self, now_s: float) -> float:
        """Send the acknowledgements that are due; return when the next one will be."""
        return self._engine.acknowledge(now_s)

    def pump(self, now_s: float) -> bool:
        """Send what the windows admit, a burst to each peer; return whether anything was sent."""
        return self._engine.pump(now_s) > 0

    def on_reports(self, now_s: float) -> None:
        """Let the windows follow what came back."""
        self._now_s = now_s
        if now_s >= self._engine.report_due_s():
            for peer in self._peers.values():
                peer.follow_reports(now_s)

    def on_time(self, now_s: float, *, idle: bool = True) -> None:
        """Do what is due, and find :attr:`due_s`, at most ``HELLO_REPEAT_S`` ahead.

        Parameters
        ----------
        idle
            Whether a message may have nothing left to send that is not confirmed, as :meth:`Engine.turn` tells.
        """
        self._liveness.excuse(now_s - self._clock_s - HELLO_REPEAT_S)
        self._clock_s = self._now_s = now_s
        self.due_s = now_s + HELLO_REPEAT_S
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        if self._later:
            self._due_by(self._later[0][0])
        for peer in self._peers.values():
            self._due_by(self._watch(peer, now_s, idle=idle))
        self._due_by(self._inbox.on_time(now_s))
        late = self._inbox.overdue(now_s)
        if late:
            self.fail(late)

    def _bound(self, peer: int, bound: LossBound) -> LossBound:
        """Return what a message may lose, where it may lose ``bound`` in the network."""
        return RELIABLE if peer in self.local_peers else bound

    def _due_by(self, at_s: float) -> None:
        self.due_s = min(self.due_s, at_s)

    def _watch(self, peer: Peer, now_s: float, *, idle: bool) -> float:
        error = self._liveness.watch(peer, now_s) or self._outbox.overdue(peer.rank, now_s)
        if error:
            self.fail(error)
            return now_s
        return self._outbox.on_time(peer.rank, now_s, idle=idle)
