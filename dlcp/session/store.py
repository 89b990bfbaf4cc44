# SPDX-License-Identifier: Apache-2.0
"""A store that the ranks of a job meet by: keys and values over TCP, held by rank 0.

It knows when a rank has ended, for the operating system closes its connection. Nothing in it is ever executed.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from dlcp.transport import Address, TransportError

MAGIC: Final = b"dlcp-store-1"
ANSWER_S: Final = 20.0
"""So long the store may take for an answer, beside what it was told to wait. Chosen by us."""
TURN_S: Final = 0.1
"""So long the store waits for a key at most before others of the same rank get their turn. Chosen by us."""
RETRY_S: Final = 0.05
HEAD_BYTES_MAX: Final = 1 << 22
VALUE_BYTES_MAX: Final = 1 << 26
_FRAME: Final = struct.Struct(">II")


class StoreError(TransportError):
    """The store does not answer, or does not know a key."""


class StoreServer:
    """Holds keys and values; each connection is served by a thread of its own, which ends with it.

    Parameters
    ----------
    address
        Where to listen.

    Raises
    ------
    OSError
        The address is in use, or not this host's.
    """

    def __init__(self, address: Address) -> None:
        self._listener = socket.create_server(address)
        self.address: Address = self._listener.getsockname()[:2]
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="dlcp-store", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="dlcp-store-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        testaments: dict[str, bytes] = {}
        with connection, contextlib.suppress(OSError, EOFError, ValueError, TypeError, LookupError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(ANSWER_S)
            if _receive_exactly(connection, len(MAGIC)) != MAGIC:
                return
            connection.settimeout(None)
            while True:
                head, value = _receive(connection)
                answer, found = self._answer(head, value, testaments)
                _send(connection, answer, found)
        with self._changed:
            self._values.update(testaments)
            self._changed.notify_all()

    def _answer(self, head: dict[str, Any], value: bytes, testaments: dict[str, bytes]) -> tuple[Any, bytes]:
        keys: list[str] = head["keys"]
        with self._changed:
            if head["do"] == "set":
                self._values[keys[0]] = value
                self._changed.notify_all()
            elif head["do"] == "compare_set":
                if self._values.get(keys[0], b"") == head["expected"].encode():
                    self._values[keys[0]] = value
                    self._changed.notify_all()
                return True, self._values.get(keys[0], b"")
            elif head["do"] == "delete":
                for key in keys:
                    self._values.pop(key, None)
            elif head["do"] == "leave":
                testaments[keys[0]] = value
            elif head["do"] == "check":
                return all(key in self._values for key in keys), b""
            elif head["do"] == "first":
                self._changed.wait_for(lambda: any(key in self._values for key in keys), head["wait_s"])
                there = next((key for key in keys if key in self._values), None)
                return there, self._values[there] if there is not None else b""
            else:
                raise ValueError(f"a store cannot {head['do']!r}")
        return True, b""


class _Link:
    """A connection to the store; requests of several threads take turns."""

    def __init__(self, address: Address, deadline_s: float) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._socket = _connect(address, deadline_s)

    def request(self, head: dict[str, Any], value: bytes | memoryview = b"", wait_s: float = 0.0) -> tuple[Any, bytes]:
        host, port = self.address
        with self._lock:
            try:
                self._socket.settimeout(wait_s + ANSWER_S)
                _send(self._socket, head, value)
                return _receive(self._socket)
            except (OSError, EOFError, ValueError) as error:
                self._socket.close()  # an answer that comes later would be taken for that to another request
                raise StoreError(
                    f"the store at {host}:{port} does not answer, so rank 0 has probably ended ({error or 'closed'})"
                ) from error

    def close(self) -> None:
        self._socket.close()


class Store:
    """One rank's view of the store: keys below a prefix. Safe to use from several threads.

    Parameters
    ----------
    address
        Where rank 0 serves it.
    deadline_s
        How long it may take until rank 0 does.

    Raises
    ------
    StoreError
        Nobody serves it there.
    """

    def __init__(self, address: Address, deadline_s: float) -> None:
        self._link = _Link(address, deadline_s)
        self._prefix = ""

    def under(self, prefix: str) -> "Store":
        """Return a view of the keys that begin with a prefix, over the same connection."""
        view = object.__new__(Store)
        view._link, view._prefix = self._link, f"{self._prefix}{prefix}/"
        return view

    def set(self, key: str, value: str | bytes | memoryview) -> None:
        """Write a value of at most 64 MiB."""
        self._link.request(self._head("set", [key]), value.encode() if isinstance(value, str) else value)

    def get(self, key: str, deadline_s: float = ANSWER_S) -> bytes:
        """Return a value as soon as it is there.

        Raises
        ------
        StoreError
            It has not been written within the deadline.
        """
        found = self.first([key], deadline_s)
        if found is None:
            raise StoreError(f"nobody has written {self._prefix}{key} in {deadline_s:g} s")
        return found[1]

    def first(self, keys: Iterable[str], deadline_s: float) -> tuple[str, bytes] | None:
        """Wait until one of some keys has a value; return the first such key and its value, None if time is up."""
        wanted = list(keys)
        end_s = time.monotonic() + deadline_s
        while True:
            wait_s = min(TURN_S, max(0.0, end_s - time.monotonic()))
            there, value = self._link.request({**self._head("first", wanted), "wait_s": wait_s}, wait_s=wait_s)
            if there is not None:
                return there[len(self._prefix) :], value
            if time.monotonic() >= end_s:
                return None

    def check(self, keys: Iterable[str]) -> bool:
        """Tell whether all these keys have a value."""
        return bool(self._link.request(self._head("check", keys))[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` where the value is ``expected``, nothing being ``""``; return what is there then."""
        return self._link.request({**self._head("compare_set", [key]), "expected": expected}, desired.encode())[1]

    def delete(self, keys: Iterable[str]) -> None:
        """Forget keys, whether they are there or not."""
        self._link.request(self._head("delete", keys))

    def leave(self, key: str, value: str) -> None:
        """Have a value written when this connection ends, however it does."""
        self._link.request(self._head("leave", [key]), value.encode())

    def close(self) -> None:
        """End the connection, of all views of it."""
        self._link.close()

    def _head(self, what: str, keys: Iterable[str]) -> dict[str, Any]:
        return {"do": what, "keys": [self._prefix + key for key in keys]}


_servers: dict[Address, StoreServer] = {}
_serving = threading.Lock()


def serve(address: Address) -> StoreServer:
    """Serve a store at an address from now on until the process ends; once, however often it is asked for.

    Raises
    ------
    OSError
        See :class:`StoreServer`; the message says what to do.
    """
    with _serving:
        if address not in _servers:
            try:
                _servers[address] = StoreServer(address)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"rank 0 cannot serve the store at {address[0]}:{address[1]} ({error.strerror}); MASTER_ADDR must "
                    "be an address of its host, and MASTER_PORT a TCP port that is free there",
                ) from None
        return _servers[address]


def _connect(address: Address, deadline_s: float) -> socket.socket:
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            connection = socket.create_connection(address, max(RETRY_S, end_s - time.monotonic()))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(MAGIC)
            return connection
        except OSError as error:
            if time.monotonic() + RETRY_S >= end_s:
                raise StoreError(
                    f"no answer from the store at {address[0]}:{address[1]} in {deadline_s:g} s ({error}); is rank 0 "
                    "started, and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
                ) from error
            time.sleep(RETRY_S)


def _send(connection: socket.socket, head: Any, value: bytes | memoryview) -> None:
    text = json.dumps(head).encode()
    if len(text) > HEAD_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"a request of {len(text)} + {len(value)} bytes is too large for a store")
    connection.sendall(_FRAME.pack(len(text), len(value)) + text)
    if len(value):
        connection.sendall(value)


def _receive(connection: socket.socket) -> tuple[Any, bytes]:
    head_bytes, value_bytes = _FRAME.unpack(_receive_exactly(connection, _FRAME.size))
    if head_bytes > HEAD_BYTES_MAX or value_bytes > VALUE_BYTES_MAX:
        raise ValueError(f"a message of {head_bytes} + {value_bytes} bytes is none of a store")
    head = json.loads(_receive_exactly(connection, head_bytes))
    return head, _receive_exactly(connection, value_bytes)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    room = memoryview(data)
    while room:
        count = connection.recv_into(room)
        if not count:
            raise EOFError("the other side has closed the connection")
        room = room[count:]
    return bytes(data)
