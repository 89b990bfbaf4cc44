# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to its peers over a socket, in a thread of its own."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Final, TypeVar

from dlcp.host.closing import ending_error
from dlcp.inputs.addresses import format_address
from dlcp.transport.connection import Connection, Links, OnMessage, OnUnexpected
from dlcp.transport.messages import (
    Address,
    Arrival,
    Delivery,
    PeerSilentError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)
from dlcp.transport.peer import FAREWELL, Fail, Then
from dlcp.transport.settings import Membership, TransportOptions
from dlcp.transport.shared_memory import SharedMemory
from dlcp.transport.sockets import UDP_GRO, bind_further, packets_held

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.host.timeline import Timeline
    from dlcp.transport.foreign_trimming import TrimmedPackets

CLOSE_LINGER_S: Final = 1.0
"""The wait of a closing endpoint for the last acknowledgements: several round trips of a long path."""
RAISED_CHARACTERS: Final = 200
"""Most characters of an error that a rank leaves with: one or two lines of its peers' messages."""
FAREWELLS: Final = 3
"""The number of farewells or aborts, which nobody acknowledges. At 10 % packet loss, one rank in a thousand misses all,
and waits ``silence_s`` if it still expects a message."""
_POLL_S: Final = 0.005
_GREET_S: Final = 0.05
"""Interval between greetings of peers that have not answered yet. Not tuned."""

T = TypeVar("T")


class Endpoint:
    """A rank's connection, with a socket and a thread of its own; any thread may call its methods.

    Attributes
    ----------
    connection
        The messages. Other threads may read its rates and counters. Call its methods only in the endpoint's thread:
        from functions passed to :meth:`call`, and from callbacks.

    Parameters
    ----------
    membership
        This rank, and its peers.
    sock
        This rank's socket, from :func:`bind_socket`; closed with the endpoint.
    options
        See :class:`TransportOptions`.
    shared
        Shared memory for packets to and from ranks of this host, from
        :meth:`dlcp.transport.shared_memory.SharedMemoryRendezvous.connect`; closed with the endpoint.
    on_message, timeline
        See :class:`Connection`; the timeline is closed with the endpoint.
    """

    def __init__(
        self,
        membership: Membership,
        sock: socket.socket,
        *,
        options: TransportOptions | None = None,
        shared: SharedMemory | None = None,
        on_message: OnMessage | None = None,
        timeline: "Timeline | None" = None,
    ) -> None:
        options = options or TransportOptions()
        self._socket = sock
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended: str | None = None
        """Why the thread accepts no more commands; protected by the lock."""
        self._closing = False
        # Memory has no paths.
        spread = options.paths > 1 and not (shared and shared.ranks >= membership.peers.keys())
        self._further = bind_further(sock, options.paths - 1 if spread else 0)
        with contextlib.suppress(OSError):  # older kernels deliver datagrams one by one
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        ports = [each.getsockname()[1] for each in self._further]
        room_packets = packets_held(sock, options.payload_bytes)
        links = Links(room_packets, sock=sock, ports=ports, further=self._further, shared=shared)
        self.connection = Connection(
            membership, options, links, call=self.call, on_message=on_message, timeline=timeline
        )
        self._engine = self.connection.engine
        self._trimmed: TrimmedPackets | None = None
        if options.foreign_trimming:
            from dlcp.transport import foreign_trimming  # loaded when options ask for it

            self._trimmed = foreign_trimming.TrimmedPackets(sock, self._take_trimmed)
        self._thread_id = 0
        self._thread = threading.Thread(target=self._run, name=f"dlcp-rank{membership.rank}", daemon=True)
        self._thread.start()

    def send(self, request: SendRequest) -> Future[Delivery]:
        """Send a message; the future resolves once the receiver has acknowledged it."""
        return self._ask(partial(self.connection.send, request))

    def receive(self, request: ReceiveRequest) -> Future[Arrival]:
        """Receive a message; the future resolves when its bound is met."""
        return self._ask(partial(self.connection.receive, request))

    def listen(self, handler: OnUnexpected) -> None:
        """Call ``handler``, in the endpoint's thread, for each unexpected message; see :meth:`Connection.listen`."""
        self.call(partial(self.connection.listen, handler))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the endpoint's thread, in the order of the calls.

        Raises
        ------
        TransportError
            The thread has ended because the endpoint was closed or has failed; the message says which.
        """
        if threading.get_ident() == self._thread_id:
            self._commands.append(function)  # runs before the engine's next turn
            return
        with self._lock:
            if self._ended:
                raise TransportError(self._ended)
            self._commands.append(function)
            self._engine.wake()

    def greet(self, timeout_s: float = 30.0) -> None:
        """Wait until every peer has answered.

        Raises
        ------
        PeerSilentError
            Some have not answered within ``timeout_s``; the message names them and their addresses.
        """
        greet_s = time.monotonic()
        end_s = greet_s + timeout_s
        while strangers := self.connection.liveness.strangers:
            now_s = time.monotonic()
            if now_s > end_s:
                addresses = {peer: self.connection.membership.peers[peer] for peer in strangers}
                where = ", ".join(f"rank {peer} at {format_address(address)}" for peer, address in addresses.items())
                raise PeerSilentError(
                    f"job {self.connection.membership.job}: no answer within {timeout_s:.0f} s from {where}; "
                    "is it running, is the port open, and is the session token the same?"
                )
            if now_s >= greet_s:
                self.call(self.connection.liveness.greet_all)
                greet_s = now_s + _GREET_S
            time.sleep(_POLL_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait until peers have acknowledged all messages; return whether they did in time.

        Raises
        ------
        TransportError
            The endpoint was closed or has failed.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            answer: Future[bool] = Future()
            self.call(partial(self._report_confirmed, answer))  # after all earlier commands
            with contextlib.suppress(FutureTimeoutError):
                if answer.result(max(0.0, end_s - time.monotonic())):
                    return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)

    def close(self, reason: str | None = None) -> None:
        """Stop. Without a ``reason``, first wait for all acknowledgements; with one, send it to the peers.

        After a failure, ``reason`` is by default its message: peers learn why this rank has left, not just that it has.
        Several threads may call it at once. A call with a reason ends the wait of the others. The endpoint's own thread
        releases its resources, so none is in use.
        """
        reason, error = reason or self.connection.failure, ending_error()
        with contextlib.suppress(TransportError):  # it ended before
            if reason is None:
                self._linger()
                raised = error and shorten(f"{type(error).__name__}: {error}", RAISED_CHARACTERS)
                reason = (
                    f"{FAREWELL}its script {f'raised {raised}' if raised else 'has ended or has closed its session'}"
                )
            last = partial(self.connection.liveness.abort, reason)
            for _ in range(FAREWELLS):
                self.call(last)
                time.sleep(_POLL_S)
            self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _take_trimmed(self, datagram: memoryview, tos: int, source: Address) -> None:
        with contextlib.suppress(TransportError):  # it has ended
            self.call(partial(self.connection.on_datagram, datagram, tos, source, time.monotonic()))

    def _linger(self) -> None:
        """Wait until peers have all messages, then briefly until they have stopped retransmitting."""
        if not self.flush(self.connection.options.silence_s):
            return
        self.call(lambda: self._engine.remind(time.monotonic()))  # until they acknowledge
        self.flush(CLOSE_LINGER_S)  # runs after the reminder and checks
        end_s = time.monotonic() + CLOSE_LINGER_S
        while not self._ended and not self.connection.settled and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _report_confirmed(self, answer: "Future[bool]") -> None:
        answer.set_result(self.connection.all_confirmed)

    def _stop(self) -> None:
        self._closing = True
        self.connection.fail(TransportError(self._closed_words))

    @property
    def _closed_words(self) -> str:
        return f"rank {self.connection.rank} has closed its endpoint"

    def _ask(self, question: Callable[[Then[T], Fail], None]) -> Future[T]:
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                question(answer.set_result, answer.set_exception)
            except Exception as error:
                answer.set_exception(error)

        try:
            self.call(ask)
        except TransportError as error:
            answer.set_exception(error)
        return answer

    def _run(self) -> None:
        why, self._thread_id = self._closed_words, threading.get_ident()
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            failure = TransportError(f"rank {self.connection.rank}: the endpoint failed: {error!r}")
            failure.__cause__ = error
            why = str(failure)
            with contextlib.suppress(Exception):  # the connection itself may have failed
                self.connection.liveness.abort(why)
            self.connection.fail(failure)
            raise
        finally:
            self._end(why)
            if self._trimmed is not None:
                self._trimmed.close()
            # In this thread nothing else can be using them: a closed descriptor's number is soon reused.
            self._engine.release()
            for each in (self._socket, *self._further):
                each.close()
            if self.connection.timeline is not None:
                self.connection.timeline.close()

    def _end(self, why: str) -> None:
        """Accept no more commands, and fail pending ones with the connection's error."""
        with self._lock:
            self._ended = why
        while self._commands:
            with contextlib.suppress(Exception):  # the connection has reported the reason
                self._commands.popleft()()

    def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s >= self.connection.due_s:
            self.connection.on_time(now_s)
        while self._commands:  # last, since callbacks add commands without waking the engine
            self._commands.popleft()()
        if not self._closing:
            self._engine.turn(self.connection.due_s)
            self.connection.take_events()
