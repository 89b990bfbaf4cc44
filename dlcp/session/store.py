# SPDX-License-Identifier: Apache-2.0
"""A store that the ranks of a job meet by: keys and values over TCP, held by rank 0.

It knows when a rank has ended, for the operating system closes its connection. Nothing in it is ever executed.
"""

import ast
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.session.session import RankEndedError
from dlcp.transport import Address, DeadlineError, TransportError

MAGIC: Final = b"dlcp-store-1"
ANSWER_S: Final = 20.0
"""So long the store may take for an answer, beside what it was told to wait. Chosen by us."""
TURN_S: Final = 0.1
"""So long the store waits for a key at most before others of the same rank get their turn. Chosen by us."""
RETRY_S: Final = 0.05
HEAD_BYTES_MAX: Final = 1 << 22
VALUE_BYTES_MAX: Final = 1 << 26
CHUNK_BYTES: Final = 1 << 22
"""Longer arrays are added up in parts of this size, so that no request keeps the store for long. Chosen by us."""
ENDED: Final = "ended"
"""Below it the store has why ranks have ended, if they have."""
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


def ended_key(rank: int) -> str:
    """Return the key that the store has once a rank has ended, with the reason."""
    return f"{ENDED}/{rank}"


class StoreChannel:
    """A channel of all ranks; they must make the same calls in the same order.

    Parameters
    ----------
    store
        The group's store.
    topic
        Name of this channel; channels of different names do not get into each other's way.
    rank, ranks
        This rank, and all there are.
    deadline_s
        How long one call may take.
    """

    def __init__(self, store: Store, topic: str, rank: int, ranks: Sequence[int], deadline_s: float) -> None:
        self.rank, self.ranks, self.deadline_s = rank, sorted(ranks), deadline_s
        self._store = store
        self._topic = topic
        self._round = 0
        self._written: list[str] = []
        """What this rank has written and nobody has been asked to forget."""

    def gather(self, item: Any) -> dict[int, Any]:
        """Return what every rank gave, by rank; numbers, text, bytes, None, and tuples, lists and dicts of them.

        Raises
        ------
        RankEndedError
            A rank has ended.
        DeadlineError
            A rank has not come within the deadline; the message names it.
        """
        older, end_s = self._begin_round()
        self._give(f"{self.rank}", repr(_plain(item)).encode())
        given = {rank: self._take(f"{rank}", rank, end_s) for rank in self.ranks}
        self._store.delete(older)
        return {rank: ast.literal_eval(text.decode()) for rank, text in given.items()}

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over all ranks, in the order of ranks, bit by bit the same on all; same errors as gather."""
        flat = np.ascontiguousarray(values).reshape(-1)
        total = np.empty_like(flat)
        step = CHUNK_BYTES // flat.itemsize
        for start in range(0, len(flat), step):
            total[start : start + step] = self._add_part(flat[start : start + step])
        return total.reshape(values.shape)

    def broadcast(self, values: NDArray[Any], root: int) -> None:
        """Write the root's flat ``values`` into every rank's; same errors as gather."""
        data = values.view(np.uint8)
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            older, end_s = self._begin_round()
            if self.rank == root:
                self._give(f"{root}", part.tobytes())
                for rank in self.ranks:
                    if rank != root:
                        self._take(f"{rank}", rank, end_s)
                self._store.delete([*older, *self._written])
                self._written.clear()
            else:
                part[:] = np.frombuffer(self._take(f"{root}", root, end_s), np.uint8)
                self._give(f"{self.rank}", b"")
                self._written = [*older, *self._written]  # no other rank is known to have come as far

    def _add_part(self, part: NDArray[Any]) -> NDArray[Any]:
        first = self.ranks[0]
        older, end_s = self._begin_round()
        if self.rank == first:
            total: NDArray[Any] = part.copy()
            for rank in self.ranks[1:]:
                total += np.frombuffer(self._take(f"{rank}", rank, end_s), part.dtype)
            self._give("total", total.tobytes())
        else:
            self._give(f"{self.rank}", part.tobytes())
            total = np.frombuffer(self._take("total", first, end_s), part.dtype)
        self._store.delete(older)
        return total

    def _begin_round(self) -> tuple[list[str], float]:
        """Return what this rank can have forgotten once all ranks are in this round, and when that must be."""
        self._round += 1
        older, self._written = self._written, []
        return older, time.monotonic() + self.deadline_s

    def _give(self, name: str, value: bytes) -> None:
        key = f"{self._topic}/{self._round}/{name}"
        self._written.append(key)
        self._store.set(key, value)

    def _take(self, name: str, rank: int, end_s: float) -> bytes:
        key = f"{self._topic}/{self._round}/{name}"
        found = self._store.first([key, ended_key(rank)], max(0.0, end_s - time.monotonic()))
        if found is None:
            raise DeadlineError(f"rank {self.rank} has waited {self.deadline_s:g} s for rank {rank} ({self._topic})")
        if found[0] != key:
            raise RankEndedError(f"rank {rank} has ended: {found[1].decode()} ({self._topic})")
        return found[1]


def _plain(item: Any) -> Any:
    """Return an item with named tuples as plain ones, so that its text can be read again."""
    if isinstance(item, tuple):
        return tuple(_plain(part) for part in item)
    if isinstance(item, list):
        return [_plain(part) for part in item]
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return item
