# SPDX-License-Identifier: Apache-2.0
"""A rank's socket, and the thread that runs the protocol over it."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from dlcp import wire
from dlcp.transport.errors import PeerSilentError, TransportError
from dlcp.transport.messages import Address, Arrival, Delivery, ReceiveRequest, SendRequest
from dlcp.transport.options import TransportOptions
from dlcp.transport.protocol import Protocol
from dlcp.transport.shared_memory import SharedMemory

RECEIVE_BUFFER_BYTES = 8 << 20
SKB_OVERHEAD_BYTES = 832
"""What Linux charges a datagram for beside its bytes, rounded up (sk_buff and its data's alignment)."""
CLOSE_LINGER_S = 1.0
TURN_S = 0.005
_SO_RCVBUFFORCE = 33
_UDP_GRO = 104


class Endpoint(Protocol):
    """One rank's end of all its conversations, over a socket, with a thread of its own.

    Any thread may call :meth:`send`, :meth:`receive`, :meth:`call`, :meth:`greet`, :meth:`flush` and :meth:`close`. The
    others are for functions given to :meth:`call` and for callbacks, which all run in the endpoint's thread.

    Parameters
    ----------
    rank
        This rank.
    sock
        This rank's socket, from :func:`bind_socket`; closed with the endpoint.
    peers
        Where to reach every other rank, and where its packets come from.
    job, token
        Job number and session token, the same on all ranks.
    options
        See :class:`TransportOptions`.
    shared
        Memory through which packets go to and come from ranks of this host, from
        :meth:`dlcp.transport.shared_memory.SharedMemoryRendezvous.meet`; closed with the endpoint.
    """

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        peers: dict[int, Address],
        *,
        job: int = 0,
        token: int,
        options: TransportOptions | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        options = options or TransportOptions()
        self._socket = sock
        self._addresses = peers
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended: str | None = None
        """Why the thread takes no more commands; changed, and read by others, under the lock."""
        self._closing = self._closed = False
        self._idle = False
        with contextlib.suppress(OSError):  # an older kernel hands over datagrams one by one
            sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        super().__init__(
            rank,
            peers,
            job=job,
            token=token,
            options=options,
            receive_packets=_receive_packets(sock, options.payload_bytes),
            sock=sock,
            shared=shared,
        )
        self._thread = threading.Thread(target=self._run, name=f"dlcp-rank{rank}", daemon=True)
        self._thread.start()

    def send(self, request: SendRequest) -> Future[Delivery]:
        """Send a message; the future resolves once the receiver has confirmed it."""
        return self._ask(lambda: Protocol.send(self, request))

    def receive(self, request: ReceiveRequest) -> Future[Arrival]:
        """Receive a message; the future resolves when its bound is met."""
        return self._ask(lambda: Protocol.receive(self, request))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the endpoint's thread, in the order of the calls.

        Raises
        ------
        TransportError
            The thread has ended, because the endpoint was closed or has failed; the message says which.
        """
        if threading.current_thread() is self._thread:
            self._commands.append(function)
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
            Some have not within ``timeout_s``; the message names them and their addresses.
        """
        end_s = time.monotonic() + timeout_s
        while strangers := self.strangers:
            if time.monotonic() > end_s:
                where = ", ".join(
                    f"rank {peer} at {self._addresses[peer][0]}:{self._addresses[peer][1]}" for peer in strangers
                )
                raise PeerSilentError(
                    f"job {self.job}: no answer within {timeout_s:.0f} s from {where}; "
                    "is it started, is the port open, and does the session token agree?"
                )
            self.call(self.greet_all)
            time.sleep(0.05)

    def close(self, reason: str | None = None) -> None:
        """Stop; without a ``reason`` once peers have confirmed what is done, with one after telling them of it."""
        if self._closing or self._closed:
            return
        if reason is None:
            self._linger()
        with contextlib.suppress(TransportError):  # it has failed before, and told the peers
            if reason is not None:
                self.call(partial(self.abort, reason))
            self.call(self._stop)
        self._thread.join(5)
        self._socket.close()
        if not self._thread.is_alive():
            self._closed = True
            self._engine.release()

    def flush(self, timeout_s: float) -> bool:
        """Wait until peers have confirmed all that was sent, and its senders know; tell whether that came in time.

        Raises
        ------
        TransportError
            The endpoint has been closed, or has failed.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            answer: Future[bool] = Future()
            self.call(partial(self._report_confirmed, answer))  # after all that was asked before
            with contextlib.suppress(FutureTimeoutError):
                if answer.result(max(0.0, end_s - time.monotonic())):
                    return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(TURN_S)

    def _report_confirmed(self, answer: "Future[bool]") -> None:
        answer.set_result(self.all_confirmed)

    def _linger(self) -> None:
        """Wait until peers have what was sent to them, and for a moment until they know that it is confirmed."""
        with contextlib.suppress(TransportError):
            if not self.flush(self.options.silence_s):
                return
            self.call(self.tell_again)
            self.flush(CLOSE_LINGER_S)  # which asks after that was done
        end_s = time.monotonic() + CLOSE_LINGER_S
        while not self.settled and self._thread.is_alive() and time.monotonic() < end_s:
            time.sleep(TURN_S)

    def _stop(self) -> None:
        self._closing = True
        self.fail(TransportError(self._closed_words))

    @property
    def _closed_words(self) -> str:
        return f"rank {self.rank} has closed its endpoint"

    def _ask(self, question: Callable[[], Future[Any]]) -> Future[Any]:
        """Return a future that the caller may wait for; in the endpoint's own thread, which may not wait, a promise."""
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                question().add_done_callback(lambda inner: _copy(inner, answer))
            except Exception as error:
                answer.set_exception(error)

        try:
            self.call(ask)
        except TransportError as error:
            answer.set_exception(error)
        return answer

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            failure = TransportError(f"rank {self.rank}: the endpoint failed: {error!r}")
            failure.__cause__ = error
            with contextlib.suppress(Exception):  # it may be what has failed
                self.abort(str(failure))
            self.fail(failure)
            self._end(str(failure))
            raise
        self._end(self._closed_words)

    def _end(self, why: str) -> None:
        """Take no more commands, and answer those that came meanwhile: with the error that the protocol has by now."""
        with self._lock:
            self._ended = why
        while self._commands:
            with contextlib.suppress(Exception):  # what fails was told why by the protocol
                self._commands.popleft()()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        now_s = time.monotonic()
        self.on_reports(now_s)
        if self._idle or now_s >= self.due_s:
            self.on_time(now_s, idle=self._idle)
        self._idle = self._engine.turn(self.due_s)


def bind_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """Bind a UDP socket to the first of ``ports`` that is free, with as large a receive buffer as the kernel grants.

    Raises
    ------
    OSError
        None of them can be bound; the message names them.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    tried = []
    for port in ports:
        try:
            sock.bind((host, port))
            break
        except OSError as error:
            tried.append(f"{port} ({error.strerror})")
    else:
        sock.close()
        raise OSError(
            f"cannot bind UDP at {host}, port {', '.join(tried)}; end the job that holds it, or choose another address"
        )
    sock.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_RECVTOS", 13), 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _receive_packets(sock: socket.socket, payload_bytes: int) -> int:
    """Return how many full packets the receive buffer holds: the kernel may have granted less than was asked for."""
    granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return max(8, int(granted // (payload_bytes + wire.HEADER_BYTES + SKB_OVERHEAD_BYTES)))


def _copy(source: Future[Any], target: Future[Any]) -> None:
    error = source.exception()
    if error:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def parse_address(text: str) -> Address:
    """Return host and port of ``host:port``; the port may be left out.

    Raises
    ------
    ValueError
        The port is no number.
    """
    host, _, port = text.partition(":")
    try:
        return host, int(port or wire.UDP_PORT_BASE)
    except ValueError:
        raise ValueError(f"expected host:port, got {text!r}") from None
