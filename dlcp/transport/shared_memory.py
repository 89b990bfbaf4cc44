# SPDX-License-Identifier: Apache-2.0
"""Shared memory through which ranks of one host exchange packets instead of through sockets.

Every rank has an inbox: memory with a ring for each rank that may write to it (``dlcp/native/ring.c``), and an eventfd,
the bell, that wakes it. A rank may also export memory behind the rings: other ranks read messages there in place,
without a copy into a ring. A rank passes inbox and bell to the others in a handshake over a Unix socket with an
abstract name. These names belong to a network namespace, so two ranks can connect only if no network, real or emulated,
lies between them.

A process of another user cannot be a peer, because the kernel reports the user at the other end (``SO_PEERCRED``).
"""

import fcntl
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.messages import EMPTY

RING_BYTES: Final = 1 << 20
"""Per direction between two ranks; a multiple of the page size. From 512 KiB to 2 MiB, times are equal; a smaller ring
holds too few bursts while its reader wakes up."""
EXPORT_BYTES: Final = 64 << 20
"""Size of a rank's exported memory by default, for the results of pending buckets, a shard of each: enough for one
tensor of 256 MB over four ranks. Only used pages take up memory."""
_PAGE: Final = mmap.PAGESIZE
_HANDSHAKE: Final = struct.Struct("=QqqqQQ")
"""Token, job, the sender's rank, the index of the receiver's ring in the sender's inbox, ring and exported bytes."""
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS: Final = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
"""``F_SEAL_*`` of Linux, which other systems and old builds of Python do not define."""
_POLL_S: Final = 0.02
_BACKLOG: Final = 1024
"""Ranks that may connect before this one accepts; the kernel may allow fewer."""


def supported() -> bool:
    """Return whether ranks of this host can share memory, which needs a recent Linux and a Python built on one."""
    return all(hasattr(os, name) for name in ("memfd_create", "eventfd")) and hasattr(fcntl, "F_ADD_SEALS")


@dataclass(frozen=True, slots=True)
class Ring:
    """One direction between two ranks.

    Attributes
    ----------
    marks
        Positions of writer and reader.
    data
        Data in flight.
    asleep
        Whether the reader waits for its bell.
    bell
        The reader's eventfd.
    """

    marks: NDArray[np.uint8]
    data: NDArray[np.uint8]
    asleep: NDArray[np.uint8]
    bell: int

    @classmethod
    def within(cls, memory: NDArray[np.uint8], index: int, ring_bytes: int, bell: int) -> "Ring":
        """Return a ring of an inbox: a page with the owner's sleep flag, then for each ring its positions and data."""
        start = _PAGE + index * (_PAGE + ring_bytes)
        return cls(memory[start : start + _PAGE], memory[start + _PAGE : start + _PAGE + ring_bytes], memory[:4], bell)


@dataclass(slots=True)
class SharedMemory:
    """The rings between a rank and others of its host; close it after the engine that uses them.

    Attributes
    ----------
    inward, outward
        Rings for packets from and to a rank, by rank.
    exported
        Memory to send from without copies; may be empty.
    imported
        Exported memory of each rank, by rank.
    """

    inward: dict[int, Ring] = field(default_factory=dict)
    outward: dict[int, Ring] = field(default_factory=dict)
    exported: NDArray[np.uint8] = field(default_factory=lambda: EMPTY)
    imported: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks with a ring in each direction."""
        return frozenset(self.inward.keys() & self.outward.keys())

    def keep(self, ranks: Collection[int]) -> None:
        """Drop the rings of all other ranks, because both ends must agree."""
        dropped = SharedMemory(
            {rank: ring for rank, ring in self.inward.items() if rank not in ranks},
            {rank: ring for rank, ring in self.outward.items() if rank not in ranks},
        )
        self.inward = {rank: ring for rank, ring in self.inward.items() if rank in ranks}
        self.outward = {rank: ring for rank, ring in self.outward.items() if rank in ranks}
        self.imported = {rank: memory for rank, memory in self.imported.items() if rank in ranks}
        if not self.ranks:
            self.exported = EMPTY
        dropped.close(keep=self._bells())

    def close(self, keep: Collection[int] = ()) -> None:
        """Close the bells, with exceptions. Memory is freed with the arrays."""
        for bell in self._bells().difference(keep):
            os.close(bell)
        self.inward, self.outward, self.imported, self.exported = {}, {}, {}, EMPTY

    def _bells(self) -> set[int]:
        return {ring.bell for ring in [*self.inward.values(), *self.outward.values()]}


class SharedMemoryRendezvous:
    """The rendezvous of this host's ranks, to share memory; a context manager.

    Parameters
    ----------
    export_bytes
        Memory to export, at least.

    Attributes
    ----------
    name
        The address at which others connect; random.
    """

    def __init__(self, export_bytes: int = EXPORT_BYTES) -> None:
        self._export_bytes = export_bytes + -export_bytes % _PAGE
        self.name = f"dlcp-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)

    def __enter__(self) -> "SharedMemoryRendezvous":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect(self, rank: int, names: Mapping[int, str], *, job: int, token: int, timeout_s: float) -> SharedMemory:
        """Exchange handshakes with the other ranks on this host.

        Parameters
        ----------
        rank
            This rank.
        names
            The name of each other rank's rendezvous, which must exist already.
        job, token
            Handshakes of other jobs and sessions are refused.
        timeout_s
            The longest wait for ranks on this host.

        Raises
        ------
        OSError
            The system does not allow shared memory.

        Returns
        -------
        The shared memory. The ranks then compare which rings exist in both directions, and keep only those.
        """
        end_s, shared = time.monotonic() + timeout_s, SharedMemory()
        with ExitStack() as open_ends:
            connections: dict[int, socket.socket] = {}
            missing = set(names)
            while True:
                for peer in sorted(missing):
                    connection = open_ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    connection.setblocking(False)
                    try:
                        connection.connect(f"\0{names[peer]}")
                    except BlockingIOError:
                        continue  # the backlog is full: try again
                    except ConnectionRefusedError:
                        missing.discard(peer)  # it is on another host
                        continue
                    missing.discard(peer)
                    if _is_own_user(connection):
                        connections[peer] = connection
                if not missing or time.monotonic() >= end_s:
                    break
                time.sleep(_POLL_S)
            if connections:
                self._exchange(shared, rank, connections, job=job, token=token, end_s=end_s)
        return shared

    def _exchange(
        self, shared: SharedMemory, rank: int, connections: Mapping[int, socket.socket], *, job: int, token: int,
        end_s: float,
    ) -> None:  # fmt: skip
        """Send each connected rank a handshake, and wait for theirs."""
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        memory = -1
        try:
            memory = os.memfd_create("dlcp-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, _PAGE + len(connections) * (_PAGE + RING_BYTES) + self._export_bytes)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            inbox = _mapped(memory)
            shared.exported = inbox[len(inbox) - self._export_bytes :]
            for index, (peer, connection) in enumerate(sorted(connections.items())):
                handshake = _HANDSHAKE.pack(token, job, rank, index, RING_BYTES, self._export_bytes)
                try:
                    socket.send_fds(connection, [handshake], [memory, bell])
                except ConnectionError:
                    continue  # it has left
                shared.inward[peer] = Ring.within(inbox, index, RING_BYTES, bell)
            self._receive(shared, connections, job=job, token=token, end_s=end_s)
        finally:
            if memory >= 0:
                os.close(memory)
            if not shared.inward:
                os.close(bell)

    def _receive(self, shared: SharedMemory, peers: Collection[int], *, job: int, token: int, end_s: float) -> None:
        """Accept handshakes of this user and session until those of all peers have arrived."""
        with ExitStack() as accepted, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while shared.inward.keys() - shared.outward and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if key.fileobj is self._socket:
                        connection = accepted.enter_context(self._socket.accept()[0])
                        connection.setblocking(False)
                        if _is_own_user(connection):
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    try:
                        handshake, given, _, _ = socket.recv_fds(key.fileobj, _HANDSHAKE.size + 1, 2)
                    except OSError:
                        continue
                    rank = _take_handshake(shared, peers, handshake, given, job, token)
                    # The mapping outlives its descriptor; the bell is kept open.
                    for descriptor in given if rank is None else given[:1]:
                        os.close(descriptor)


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to our user; others must not write to our memory."""
    credentials = struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(credentials[1] == os.geteuid())


def _take_handshake(
    shared: SharedMemory, peers: Collection[int], handshake: bytes, given: list[int], job: int, token: int
) -> int | None:
    """Keep a handshake's contents; return its rank, or None if it is invalid or of another session."""
    try:
        its_token, its_job, rank, index, ring_bytes, export_bytes = _HANDSHAKE.unpack(handshake)
        if (its_token, its_job) != (token, job) or rank not in peers or rank in shared.outward:
            return None
        found = _imported(given, index, ring_bytes, export_bytes)
    except (OSError, ValueError, struct.error):
        return None
    if found is None:
        return None
    shared.outward[rank], shared.imported[rank] = found
    return int(rank)


def _imported(
    given: list[int], index: int, ring_bytes: int, export_bytes: int
) -> tuple[Ring, NDArray[np.uint8]] | None:
    """Map the ring of a handshake, and the sender's exported memory.

    None if they differ from the announcement, or might shrink while mapped.
    """
    if len(given) != 2 or fcntl.fcntl(given[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        return None
    if index < 0 or ring_bytes < _PAGE or ring_bytes % _PAGE or export_bytes % _PAGE:
        return None
    size = os.fstat(given[0]).st_size
    if size < _PAGE + (index + 1) * (_PAGE + ring_bytes) + export_bytes:
        return None
    memory = _mapped(given[0])
    return Ring.within(memory, index, ring_bytes, given[1]), memory[size - export_bytes :]


def _mapped(memory: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), np.uint8)
