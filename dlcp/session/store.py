# SPDX-License-Identifier: Apache-2.0
"""The key-value store through which the ranks of a job without PyTorch meet: served by rank 0, over gRPC.

Every call and every answer carries a proof that its sender knows the job's secret. Callers without the secret can
neither read nor write, and the resources they can occupy are bounded. Replayed and altered calls are refused. Only TLS
hides the ranks' data from eavesdroppers.

Each rank keeps one call open while it lives. When that call ends, because the rank closed its connection, its process
ended or its host no longer answers, the store writes the rank's last will: the values that it deposited for this case.
It does the same for a rank that has asked for a lease and is not heard from any more: its process stands still, or its
network is down. How long that takes to be sure is learned from the intervals in which the rank was heard before.
"""

import ast
import asyncio
import concurrent.futures
import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import logging
import os
import resource
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

# Silence gRPC's non-error logging, such as closed connections. gRPC reads this variable only when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

try:
    import grpc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ranks without PyTorch, and parameter servers, meet over gRPC, which is missing: pip install 'dlcp[store]'",
        name=error.name,
    ) from None

from dlcp.host.closing import ExitCallback
from dlcp.inputs.addresses import format_address
from dlcp.session.addresses import listening_host
from dlcp.session.secret import PROOF_BYTES, REFUSALS_LOGGED, proof
from dlcp.transport import Address, DeadlineError, RankEndedError, TransportError

log = logging.getLogger("dlcp")

ANSWER_S: Final = 20.0
"""Time limit of a call, in addition to the wait that it requests. A healthy store answers within milliseconds; a busy
host gets time to recover. Not tuned."""
AFTER_SILENCE_S: Final = 1.0
"""Time limit of the calls after one that was not answered in time, so that a rank that is cut off can end."""
WAIT_S_MAX: Final = 10.0
"""Longest time that one call waits for a key; a client that waits longer calls again. Not tuned."""
KEEP_ALIVE_S: Final = 15.0
"""After this long without a packet, each side pings the other, which has the same time to answer."""
KEYS_MAX: Final = 1 << 18
KEY_BYTES_MAX: Final = 1 << 10
VALUE_BYTES_MAX: Final = 1 << 26
TOTAL_BYTES_MAX: Final = 1 << 33
STORE_CONNECTIONS_MAX: Final = 1 << 14
CALLS_MAX: Final = 1 << 10
"""Limits of one store, beyond the needs of any job. They bound the memory that clients can occupy. ``CALLS_MAX`` is the
number of concurrent calls per connection."""
HANDSHAKE_S: Final = 5.0
"""Time limit of a new connection's TLS and HTTP/2 handshakes. Afterwards it is closed, so that idle strangers do not
keep connections. Not tuned."""
STOP_S: Final = 5.0
"""Time limit for closing a store's connections, so that it cannot keep a process from ending. Not tuned."""
BEAT_S: Final = 0.15
"""Interval in which a rank with a lease shows that it lives. It takes about 0.5 ms of processor time on both sides."""
LEASE_S_MIN: Final = 0.6
"""A lease is never shorter: a rank whose process a busy machine has not run for this long is common."""
SPARE_DESCRIPTORS: Final = 4
"""Connections leave one in this many of the process's free file descriptors to the training. Not tuned."""
CHUNK_BYTES: Final = 1 << 22
"""Longer arrays are added in parts of this size, so that no request occupies the store for long. Not tuned."""
STANDS_STILL: Final = "stands still, or its network is down"
"""In the reason that the store gives for a rank whose lease has expired."""
ENDED: Final = "ended"
"""Prefix of the keys under which the store keeps the reasons why ranks have ended."""
SERVICE: Final = "/dlcp.Store/"
_CALL: Final = "dlcp-call-bin"
_CALL_HEAD: Final = struct.Struct(">16sQ32s")
"""A call's metadata: the caller's random ID, the call's number, and the SHA-256 of the message."""
_PROOF: Final = "dlcp-proof-bin"
_HEAD: Final = struct.Struct(">I")
_OPTIONS: Final = [
    ("grpc.max_send_message_length", 2 * VALUE_BYTES_MAX),
    ("grpc.max_receive_message_length", 2 * VALUE_BYTES_MAX),
    ("grpc.keepalive_time_ms", int(1000 * KEEP_ALIVE_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * KEEP_ALIVE_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(500 * KEEP_ALIVE_S)),
    ("grpc.enable_http_proxy", 0),
]


class StoreError(TransportError):
    """The store does not answer, refuses a call, or has no value for a key."""


def ended_key(who: int | str) -> str:
    """Return the key under which the store holds why a rank, or a parameter server's session, has ended."""
    return f"{ENDED}/{who}"


def connections_max() -> int:
    """Return the connection limit of a store: rank 0, which serves it, also needs descriptors for training."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return STORE_CONNECTIONS_MAX
    free = limit - sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(1, min(STORE_CONNECTIONS_MAX, free - free // SPARE_DESCRIPTORS))


# Serving --------------------------------------------------------------------------------------------------------------


class StoreServer(grpc.GenericRpcHandler):
    """Serves keys and values to callers that know the secret.

    Parameters
    ----------
    address
        The address to listen on.
    secret
        The secret that callers must prove to know.
    tls
        Folder with the TLS certificates, see :class:`dlcp.session.options.Options`; ``""`` for no TLS.

    Attributes
    ----------
    refused
        Number of refused calls: without proof of the secret, replayed, or altered.

    Raises
    ------
    OSError
        The address is in use, or does not belong to this host.
    """

    def __init__(self, address: Address, secret: bytes, tls: str = "") -> None:
        self.refused = 0
        self._secret, self._nonce = secret, secrets.token_bytes(16)
        self._heard: dict[bytes, ReplayWindow] = {}
        self._tls = tls
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._last_wills: dict[bytes, dict[str, bytes]] = {}
        self._leases = Leases()
        self._watching: asyncio.Future[None] | None = None
        self._loop = _event_loop()
        port = asyncio.run_coroutine_threadsafe(self._listen(address), self._loop).result()
        self.address: Address = (address[0], port)

    @property
    def users(self) -> int:
        """The number of connected ranks."""
        return len(self._last_wills)

    def close(self) -> None:
        """Close all connections."""
        if self._watching:
            self._loop.call_soon_threadsafe(self._watching.cancel)
        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop)
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            stopping.result(STOP_S)

    async def _listen(self, address: Address) -> int:
        self._changed = asyncio.Condition()
        options = [
            *_OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", CALLS_MAX),
            ("grpc.max_allowed_incoming_connections", connections_max()),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
            ("grpc.max_connection_idle_ms", int(3000 * KEEP_ALIVE_S)),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(handlers=[self], options=options)
        try:
            where = format_address((listening_host(address[0]), address[1]))
            if self._tls:
                key, certificate, root = _certificates(self._tls)
                credentials = grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=True)
                port = self._server.add_secure_port(where, credentials)
            else:
                port = self._server.add_insecure_port(where)
        except RuntimeError:
            port = 0
        if not port:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        await self._server.start()
        return int(port)

    # The metadata, which comes before the message, decides whether a call is accepted. So the server never reads, or
    # allocates memory for, a message from a caller without the secret.

    def service(self, details: Any) -> Any:
        """Return the handler of a call, chosen by the call's name and proof."""
        name = details.method.removeprefix(SERVICE)
        if name == "challenge":
            return grpc.stream_unary_rpc_method_handler(self._challenge)
        metadata = dict(details.invocation_metadata)
        call, given = metadata.get(_CALL, b""), metadata.get(_PROOF, b"")
        if not self._proven(name, call, given):
            return grpc.stream_unary_rpc_method_handler(partial(self._refuse, "does not know the job's secret"))
        rank, number, _ = _CALL_HEAD.unpack(call)
        if not self._heard.setdefault(rank, ReplayWindow()).is_new(number):
            return grpc.stream_unary_rpc_method_handler(partial(self._refuse, "replays a recorded call"))
        if name == "attend":
            return grpc.unary_stream_rpc_method_handler(partial(self._attend, rank, given))
        return grpc.unary_unary_rpc_method_handler(partial(self._answer, name, call, given))

    def _proven(self, name: str, call: bytes, given: bytes) -> bool:
        known = hmac.compare_digest(given, proof(self._secret, b"call", self._nonce, name.encode(), call))
        return known and len(call) == _CALL_HEAD.size

    async def _challenge(self, requests: Any, context: Any) -> bytes:
        return self._nonce

    async def _refuse(self, why: str, requests: Any, context: Any) -> None:
        self.refused += 1
        if self.refused <= REFUSALS_LOGGED:
            log.warning("the store refuses %s, which %s", unquote(context.peer()), why)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    async def _attend(self, rank: bytes, given: bytes, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Answer with proof that this store also knows the secret; stay open until the caller is gone.

        Then write the caller's last will.
        """
        self._last_wills.setdefault(rank, {})
        try:
            yield proof(self._secret, b"answer", given)
            await asyncio.Event().wait()
        finally:
            self._leases.end(rank)
            self._execute_will(rank)

    def _execute_will(self, rank: bytes, why: str = "") -> None:
        for key, value in self._last_wills.pop(rank, {}).items():
            self._set(key, why.encode() or value)
        # Not awaited, because the calling coroutine may be being cancelled.
        self._notifying = asyncio.ensure_future(self._notify())

    async def _watch_leases(self, most_s: float) -> None:
        """Execute the wills of ranks whose leases have expired."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S / 3)
            now_s = time.monotonic()
            if now_s - looked_s > BEAT_S:  # this process itself has not run, and what came meanwhile is still unread
                self._leases.forgive(now_s - looked_s)
            for rank, silent_s in self._leases.expired(most_s, now_s).items():
                self._leases.end(rank)
                self._execute_will(rank, f"it {STANDS_STILL} ({silent_s:.1f} s without a sign of life)")
            looked_s = now_s

    async def _answer(self, name: str, call: bytes, given: bytes, request: bytes, context: Any) -> bytes:
        rank, _, digest = _CALL_HEAD.unpack(call)
        if not hmac.compare_digest(digest, hashlib.sha256(request).digest()):
            await self._refuse("sent an altered message", None, context)
        head, value = _unpack(request)
        keys: list[str] = head["keys"]
        exceeded = self._exceeded_limit(keys, value)
        if exceeded:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, exceeded)
        answer: Any = True
        found = b""
        if name == "first":
            answer, found = await self._first(keys, min(float(head["wait_s"]), WAIT_S_MAX))
        elif name == "check":
            answer = all(key in self._values for key in keys)
        elif name == "read":
            await self._come(keys[: head["wanted"]], keys[head["wanted"] :], head["wait_s"])
            there = {key: self._values[key] for key in keys if key in self._values}
            answer, found = {key: len(value) for key, value in there.items()}, b"".join(there.values())
        elif name == "leave":
            self._last_wills[rank][keys[0]] = value
        elif name == "beat":
            answer = self._renew(rank, head["most_s"])
        elif name == "set":
            self._set(keys[0], value)
            await self._notify()
        elif name == "compare_set":
            if self._values.get(keys[0], b"") == head["expected"].encode():
                self._set(keys[0], value)
                await self._notify()
            found = self._values.get(keys[0], b"")
        elif name == "delete":
            self._delete(keys)
        elif name == "clear":
            self._delete([key for key in self._values if key.startswith(tuple(keys))])
        else:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"unknown store call {name!r}")
        packed = _pack(answer, found)
        return proof(self._secret, b"answer", given, packed) + packed

    def _renew(self, rank: bytes, most_s: float) -> bool:
        """Renew a rank's lease, which begins with the first call; return False if it has expired."""
        if rank in self._last_wills:
            self._leases.renew(rank, time.monotonic())
            if self._watching is None:
                self._watching = asyncio.ensure_future(self._watch_leases(most_s))
        return rank in self._last_wills

    async def _first(self, keys: list[str], wait_s: float) -> tuple[Any, bytes]:
        async with self._changed:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: any(key in self._values for key in keys)), wait_s)
        there = next((key for key in keys if key in self._values), None)
        return there, self._values[there] if there is not None else b""

    async def _come(self, wanted: list[str], ends: list[str], wait_s: float) -> None:
        """Wait until all wanted keys have a value, or one of the ends."""

        def came() -> bool:
            return all(key in self._values for key in wanted) or any(key in self._values for key in ends)

        async with self._changed:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(came), min(wait_s, WAIT_S_MAX))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _set(self, key: str, value: bytes) -> None:
        self._bytes += len(value) - len(self._values.get(key, b""))
        self._values[key] = value

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._bytes -= len(self._values.pop(key, b""))

    def _exceeded_limit(self, keys: list[str], value: bytes) -> str:
        """Return which limit a call exceeds, for its caller; ``""`` if none."""
        if len(keys) > KEYS_MAX or any(len(key) > KEY_BYTES_MAX for key in keys):
            return f"a call may have at most {KEYS_MAX} keys of at most {KEY_BYTES_MAX} characters"
        if len(value) > VALUE_BYTES_MAX:
            return f"a value may have at most {VALUE_BYTES_MAX} bytes, got {len(value)}"
        if value and (len(self._values) >= KEYS_MAX or self._bytes + len(value) > TOTAL_BYTES_MAX):
            return f"the store is full: it holds {len(self._values)} keys and {self._bytes} bytes"
        return ""


class Leases:
    """When ranks were heard from last, and how long they may be silent.

    The limit is learned from the intervals of all ranks: on a busy machine, all of them are late at times, and what one
    has survived another one may, too.
    """

    INTERVALS: Final = 1024
    """The number of intervals that the limit is learned from: of four ranks, those of half a minute."""
    FEW: Final = 8
    """With fewer intervals than this, the limit is the longest."""
    TIMES: Final = 3.0
    """The limit is this many times the longest interval, at least :data:`LEASE_S_MIN`. Intervals of ranks on two cores
    grew to 0.7 s at a load of 13 to 17. A limit of 0.6 s took some of these ranks for dead, and this one none."""

    def __init__(self) -> None:
        self._heard_s: dict[bytes, float] = {}
        self._intervals: deque[float] = deque(maxlen=self.INTERVALS)

    def renew(self, rank: bytes, now_s: float) -> None:
        """Note that a rank was heard from; the first time begins its lease."""
        if rank in self._heard_s:
            self._intervals.append(now_s - self._heard_s[rank])
        self._heard_s[rank] = now_s

    def forgive(self, lost_s: float) -> None:
        """Note that nobody could be heard for some time."""
        for rank in self._heard_s:
            self._heard_s[rank] += lost_s

    def end(self, rank: bytes) -> None:
        """End a rank's lease."""
        self._heard_s.pop(rank, None)

    def expired(self, most_s: float, now_s: float) -> dict[bytes, float]:
        """Return how long each rank has been silent whose lease has expired, in seconds.

        Parameters
        ----------
        most_s
            The longest lease.
        now_s
            The time (monotonic).
        """
        limit_s = most_s
        if len(self._intervals) >= self.FEW:
            limit_s = min(most_s, max(LEASE_S_MIN, self.TIMES * max(self._intervals)))
        return {rank: now_s - heard_s for rank, heard_s in self._heard_s.items() if now_s - heard_s > limit_s}


class ReplayWindow:
    """The replay window of one caller: accepts each call number once.

    Numbers arrive nearly in order, 1, 2, ..., and some never arrive. This is the anti-replay window of IPsec's ESP
    (RFC 4303, section 3.4.3).
    """

    WINDOW: Final = 1024
    """A call is refused if it comes this many numbers or more behind the highest. That is more calls than a rank makes
    at once."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0  # bit i: whether call number highest - i was seen

    def is_new(self, number: int) -> bool:
        """Record a call; return False if it has come before, or is too old to tell."""
        if number > self._highest:
            ahead = min(number - self._highest, self.WINDOW)
            self._seen = (self._seen << ahead | 1) & ((1 << self.WINDOW) - 1)
            self._highest = number
            return True
        behind = self._highest - number
        if behind >= self.WINDOW or self._seen >> behind & 1:
            return False
        self._seen |= 1 << behind
        return True


def _certificates(folder: str) -> list[bytes]:
    """Return private key, certificate and root certificate.

    Raises
    ------
    OSError
        A file cannot be read; the message names it.
    """
    found = []
    for name in ("tls.key", "tls.crt", "ca.crt"):
        path = Path(folder) / name
        try:
            found.append(path.read_bytes())
        except OSError as error:
            raise OSError(error.errno, f"TLS needs {path}, which cannot be read ({error.strerror})") from None
    return found


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all stores of this process; its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="dlcp-store", daemon=True).start()
    return loop


_servers: dict[Address, StoreServer] = {}
_serving = threading.Lock()


def serve(address: Address, secret: bytes, tls: str = "") -> StoreServer:
    """Serve a store at an address until the process ends. Later calls with the same address return the same store.

    Raises
    ------
    OSError
        See :class:`StoreServer`; the message says what to do.
    """
    with _serving:
        if address not in _servers:
            try:
                _servers[address] = StoreServer(address, secret, tls)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"rank 0 cannot serve the store at {format_address(address)} ({error.strerror}); MASTER_ADDR must "
                    "be an address of its host, and MASTER_PORT a free TCP port there",
                ) from None
            ExitCallback(_servers[address].close)
        return _servers[address]


# Using it -------------------------------------------------------------------------------------------------------------


class Store:
    """One rank's view of the store: the keys below a prefix. Safe to use from several threads.

    Parameters
    ----------
    address
        The address at which rank 0 serves the store.
    deadline_s
        How long to wait, in seconds, until rank 0 serves it.
    secret, tls
        As for :class:`StoreServer`.
    owner
        Who serves the store, for messages.

    Raises
    ------
    StoreError
        No store answers at the address, or it belongs to another job.
    OSError
        A certificate cannot be read.
    """

    def __init__(
        self, address: Address, deadline_s: float, secret: bytes, tls: str = "", owner: str = "rank 0"
    ) -> None:
        self._link = _Link(address, deadline_s, secret, tls, owner)
        self._prefix = ""

    def under(self, prefix: str) -> "Store":
        """Return a view of the keys that begin with a prefix, over the same connection."""
        view = object.__new__(Store)
        view._link, view._prefix = self._link, f"{self._prefix}{prefix}/"
        return view

    def set(self, key: str, value: str | bytes | memoryview) -> None:
        """Write a value of at most 64 MiB."""
        self._link.call("set", self._head([key]), value.encode() if isinstance(value, str) else value)

    def get(self, key: str, deadline_s: float = ANSWER_S) -> bytes:
        """Wait for a key's value and return it.

        Raises
        ------
        StoreError
            The key was not written within ``deadline_s`` seconds.
        """
        found = self.first([key], deadline_s)
        if found is None:
            raise StoreError(f"{self._prefix}{key} was not written within {deadline_s:g} s")
        return found[1]

    def first(self, keys: Iterable[str], deadline_s: float, *, answer_s: float = ANSWER_S) -> tuple[str, bytes] | None:
        """Wait up to ``deadline_s`` seconds until any of the keys has a value.

        Parameters
        ----------
        answer_s
            How much longer the store may take to answer, in seconds.

        Returns
        -------
        The first of the keys, in the given order, that has a value, and that value; None if none has.
        """
        wanted = list(keys)
        end_s = time.monotonic() + deadline_s
        while True:
            wait_s = min(WAIT_S_MAX, max(0.0, end_s - time.monotonic()))
            head = {**self._head(wanted), "wait_s": wait_s}
            there, value = self._link.call("first", head, limit_s=wait_s + answer_s)
            if there is not None:
                return there[len(self._prefix) :], value
            if time.monotonic() >= end_s:
                return None

    @property
    def is_connected(self) -> bool:
        """Whether the connection has not broken."""
        return self._link.is_connected

    def check(self, keys: Iterable[str], *, answer_s: float = ANSWER_S) -> bool:
        """Return whether all these keys have a value; the store may take ``answer_s`` seconds to answer."""
        return bool(self._link.call("check", self._head(keys), limit_s=answer_s)[0])

    def read(self, keys: Iterable[str], ends: Iterable[str] = (), wait_s: float = 0.0) -> dict[str, bytes]:
        """Return the values of those of the keys that have one, in one query.

        Parameters
        ----------
        ends, wait_s
            First wait, for at most ``wait_s`` seconds, until every key has a value, or one of ``ends`` has.
        """
        wanted = list(keys)
        head = {**self._head([*wanted, *ends]), "wanted": len(wanted), "wait_s": wait_s}
        sizes, values = self._link.call("read", head, limit_s=wait_s + ANSWER_S)
        borders = list(itertools.accumulate(sizes.values(), initial=0))
        parts = (values[start:stop] for start, stop in itertools.pairwise(borders))
        return {key[len(self._prefix) :]: part for key, part in zip(sizes, parts, strict=True)}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected`` (``""``: no value); return the value afterwards."""
        return self._link.call("compare_set", {**self._head([key]), "expected": expected}, desired.encode())[1]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys and their values; unknown keys are ignored."""
        self._link.call("delete", self._head(keys))

    def clear(self, folders: Iterable[str]) -> None:
        """Delete all keys of views that :meth:`under` returns for these prefixes."""
        self._link.call("clear", self._head(f"{folder}/" for folder in folders))

    def leave(self, key: str, value: str) -> None:
        """Deposit a value that the store writes when this connection ends, for whatever reason."""
        self._link.call("leave", self._head([key]), value.encode())

    def beat(self, most_s: float) -> bool:
        """Show that this rank lives; the first call begins its lease, of at most ``most_s`` seconds.

        Returns
        -------
        False if the lease has expired: the store has written the rank's last will, and the others take it for dead.
        """
        return bool(self._link.call("beat", {**self._head([]), "most_s": most_s}, limit_s=most_s)[0])

    def close(self) -> None:
        """Close the connection, which all views of the store share."""
        self._link.close()

    def _head(self, keys: Iterable[str]) -> dict[str, Any]:
        return {"keys": [self._prefix + key for key in keys]}


class _Link:
    """A rank's connection to the store. It sends a proof of the secret with each call, and verifies each answer's."""

    def __init__(self, address: Address, deadline_s: float, secret: bytes, tls: str, owner: str) -> None:
        target = format_address(address)
        self._where, self._owner = f"the store of {owner} at {target}", owner
        options = [*_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
        options += [("grpc.max_reconnect_backoff_ms", 500)]
        if tls:
            key, certificate, root = _certificates(tls)
            credentials = grpc.ssl_channel_credentials(root, key, certificate)
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._calls: dict[str, Callable[..., bytes]] = {}
        self._secret, self._rank = secret, secrets.token_bytes(16)
        self._is_silent = False
        self._numbers = itertools.count(1)
        try:
            self._nonce: bytes = self._unary("challenge")(b"", timeout=deadline_s, wait_for_ready=True)
            attend: Any = self._channel.unary_stream(f"{SERVICE}attend")
            metadata, given = self._proof_of("attend", b"")
            self._attendance = attend(b"", metadata=metadata)
            answer = next(self._attendance)
        except grpc.RpcError as error:
            self._channel.close()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise self._wrong_secret() from None
            certificates = f" that it accepts the certificates in {tls}," if tls else ""
            raise StoreError(
                f"no answer from {self._where} in {deadline_s:g} s ({error.details()}); check that {owner} is running,"
                f"{certificates} and that all ranks have its address (MASTER_ADDR and MASTER_PORT, or that of the "
                "option collective)"
            ) from None
        if not hmac.compare_digest(answer, proof(secret, b"answer", given)):
            self.close()
            raise self._wrong_secret()

    def _proof_of(self, name: str, request: bytes) -> tuple[tuple[tuple[str, bytes], ...], bytes]:
        """Return a call's metadata, and the proof that it contains."""
        call = _CALL_HEAD.pack(self._rank, next(self._numbers), hashlib.sha256(request).digest())
        given = proof(self._secret, b"call", self._nonce, name.encode(), call)
        return ((_CALL, call), (_PROOF, given)), given

    def _wrong_secret(self) -> StoreError:
        return StoreError(
            f"{self._where} belongs to another job or user: its secret differs. Set DLCP_SECRET_FILE to files of the "
            "same content on all ranks, or start the ranks with a shared home directory"
        )

    def call(
        self, name: str, head: dict[str, Any], value: bytes | memoryview = b"", *, limit_s: float = ANSWER_S
    ) -> tuple[Any, bytes]:
        request = _pack(head, value)
        metadata, given = self._proof_of(name, request)
        limit_s = min(limit_s, AFTER_SILENCE_S) if self._is_silent else limit_s
        try:
            answer = self._unary(name)(request, timeout=limit_s, metadata=metadata)
            self._is_silent = False
        except grpc.RpcError as error:
            self._is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise StoreError(f"{self._where} refuses: {error.details()}") from None
            problem = error.details()
        except ValueError as error:  # the channel is closed
            problem = str(error)
        else:
            packed = answer[PROOF_BYTES:]
            if not hmac.compare_digest(answer[:PROOF_BYTES], proof(self._secret, b"answer", given, packed)):
                raise StoreError(f"an answer from {self._where} has no valid proof of the job's secret: it was altered")
            return _unpack(packed)
        raise StoreError(f"{self._where} does not answer, so {self._owner} has probably ended ({problem})")

    def _unary(self, name: str) -> Callable[..., bytes]:
        if name not in self._calls:
            call: Any = self._channel.unary_unary(f"{SERVICE}{name}")
            self._calls[name] = call
        return self._calls[name]

    @property
    def is_connected(self) -> bool:
        return bool(self._attendance.is_active())

    def close(self) -> None:
        self._attendance.cancel()
        self._channel.close()


def _pack(head: Any, value: bytes | memoryview) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_HEAD.pack(len(text)), text, value))


def _unpack(message: bytes) -> tuple[Any, bytes]:
    (head_bytes,) = _HEAD.unpack_from(message)
    stop = _HEAD.size + head_bytes
    return json.loads(message[_HEAD.size : stop]), message[stop:]


COMPLETE, OVER = "complete", "over"
"""Outcomes of a round of a channel whose ranks may end: all ranks have all items, or none has."""


class StoreChannel:
    """Collective operations of all ranks over the store. All ranks must make the same calls in the same order.

    Parameters
    ----------
    store
        The group's store.
    topic
        Name of this channel; channels of different names are independent.
    rank, ranks
        This rank, and all ranks.
    deadline_s
        Time limit of one call, in seconds.
    over
        Keys that have a value once another rank takes part no more.
    """

    def __init__(
        self, store: Store, topic: str, rank: int, ranks: Sequence[int], deadline_s: float, over: Sequence[str] = ()
    ) -> None:
        self.rank, self.ranks, self.deadline_s, self._over = rank, sorted(ranks), deadline_s, over
        self._store = store
        self._topic = topic
        self._round = 0
        self._written: list[str] = []
        """Keys that this rank has written and not yet deleted."""

    def gather(self, item: Any) -> dict[int, Any]:
        """Return every rank's item, by rank.

        Parameters
        ----------
        item
            A number, text, bytes or None, or a tuple, list or dict of these.

        Raises
        ------
        RankEndedError
            A rank has ended; the message says which and why.
        DeadlineError
            A rank did not make this call within ``deadline_s``; the message names it.
        """
        older, end_s = self._begin_round()
        self._give(f"{self.rank}", repr(_plain(item)).encode())
        everyone = {rank: f"{rank}" for rank in self.ranks}
        try:
            given = self._take_all(everyone, end_s)
        except RankEndedError:
            if self._outcome(OVER) == OVER:
                raise
            given = self._take_all(everyone, end_s, heeds_end=False)
        else:
            if self._outcome(COMPLETE) == OVER:
                raise RankEndedError(f"another rank has left ({self._topic})")
        self._store.delete(older)
        return {rank: ast.literal_eval(text.decode()) for rank, text in given.items()}

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over all ranks, with the same errors as :meth:`gather`.

        It has the shape and type of ``values``. The first rank adds in rank order, so all ranks get identical bits.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        total = np.empty_like(flat)
        step = CHUNK_BYTES // flat.itemsize
        for start in range(0, len(flat), step):
            total[start : start + step] = self._add_part(flat[start : start + step])
        return total.reshape(values.shape)

    def broadcast(self, values: NDArray[Any], root: int) -> None:
        """Copy the root's ``values``, of shape (n,), into those of every rank; same errors as :meth:`gather`."""
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
                # Kept: only the root knows that all ranks are in this round.
                self._written = [*older, *self._written]

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
        """Begin a round; return the keys to delete once all ranks are in it, and the round's deadline."""
        self._round += 1
        older, self._written = self._written, []
        return older, time.monotonic() + self.deadline_s

    def _give(self, name: str, value: bytes) -> None:
        key = f"{self._topic}/{self._round}/{name}"
        self._written.append(key)
        self._store.set(key, value)

    def _outcome(self, mine: str) -> str:
        """Return whether this round holds, the same on all ranks: some may have all items, and others miss an end."""
        if not self._over:
            return mine
        key = f"{self._topic}/{self._round}/outcome"
        if self.rank == self.ranks[0]:
            self._written.append(key)
        return self._store.compare_set(key, "", mine).decode()

    def _take(self, name: str, rank: int, end_s: float) -> bytes:
        """Return what a rank gives in this round."""
        return self._take_all({rank: name}, end_s)[rank]

    def _take_all(self, names: Mapping[int, str], end_s: float, *, heeds_end: bool = True) -> dict[int, bytes]:
        """Return what each of these ranks gives in this round under its name."""
        keys = {rank: f"{self._topic}/{self._round}/{name}" for rank, name in names.items()}
        missing = list(keys)
        while True:
            ends = [*map(ended_key, missing), *self._over] if heeds_end else []
            left_s = end_s - time.monotonic()
            found = self._store.read(keys.values(), ends, max(0.0, min(WAIT_S_MAX, left_s)))
            missing = [rank for rank, key in keys.items() if key not in found]
            if not missing:
                return {rank: found[key] for rank, key in keys.items()}
            for rank in missing:
                if (key := ended_key(rank)) in found:
                    raise RankEndedError(f"rank {rank} has ended: {found[key].decode()} ({self._topic})")
            if left := next((found[key] for key in self._over if key in found), None):
                raise RankEndedError(f"another rank has left: {left.decode()} ({self._topic})")
            if left_s <= 0:
                who = " and ".join(f"rank {rank}" for rank in missing)
                raise DeadlineError(f"rank {self.rank} has waited {self.deadline_s:g} s for {who} ({self._topic})")


def _plain(item: Any) -> Any:
    """Return an item with plain tuples instead of named ones, so that ``ast.literal_eval`` can read its repr."""
    if isinstance(item, tuple):
        return tuple(_plain(part) for part in item)
    if isinstance(item, list):
        return [_plain(part) for part in item]
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return item
