# SPDX-License-Identifier: Apache-2.0
"""Memory through which ranks of one host send each other packets, instead of through their sockets.

Every rank has an inbox: memory with a ring for each rank that may write to it (``dlcp/native/shared.c``), and an
eventfd that wakes it. Behind the rings there may be memory that it lends: what it sends from there is not copied into
rings, the others read it where it is. It hands inbox and eventfd to the others through a Unix socket of an abstract
name. Those names are of a network namespace: whoever gets an answer is where no network lies in between, real or
emulated, and nobody else gets one.
"""

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

RING_BYTES: Final = 1 << 20
"""Of one direction between two ranks; a multiple of the page size. Chosen by us, by time: between 512 KiB and 2 MiB it
makes no difference, less holds too few bursts for a reader that has to be woken."""
LEND_BYTES: Final = 64 << 20
"""What a rank lends by default, for results of buckets that are under way, a shard of each; only what is used takes up
memory. Chosen by us: those of one tensor of 256 MB over four ranks."""
_PAGE: Final = mmap.PAGESIZE
_OFFER: Final = struct.Struct("=QqqqQQ")
"""Token, job, the rank that offers, which ring of its inbox, bytes of each, bytes that it lends."""
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS: Final = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
"""``F_SEAL_*`` of Linux, which other systems and old builds of Python do not name."""
_TURN_S: Final = 0.02
_NOTHING: Final = np.zeros(0, np.uint8)


def available() -> bool:
    """Return whether this system and this Python have what it takes."""
    return all(hasattr(os, name) for name in ("memfd_create", "eventfd")) and hasattr(fcntl, "F_ADD_SEALS")


@dataclass(frozen=True, slots=True)
class Ring:
    """One direction between two ranks.

    Attributes
    ----------
    marks
        How far writer and reader are.
    data
        What is on its way.
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
        """Return a ring of an inbox: a page that says whether its owner sleeps, then for each ring marks and data."""
        start = _PAGE + index * (_PAGE + ring_bytes)
        return cls(memory[start : start + _PAGE], memory[start + _PAGE : start + _PAGE + ring_bytes], memory[:4], bell)


@dataclass(slots=True)
class SharedMemory:
    """The rings between a rank and others of its host; close it when the engine that uses them is gone.

    Attributes
    ----------
    inward, outward
        By rank: where packets come from it, and where they go to it.
    lent
        Memory to send from without copies; empty if there is none.
    borrowed
        By rank: what it has lent.
    """

    inward: dict[int, Ring] = field(default_factory=dict)
    outward: dict[int, Ring] = field(default_factory=dict)
    lent: NDArray[np.uint8] = field(default_factory=lambda: _NOTHING)
    borrowed: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks with a ring in each direction."""
        return frozenset(self.inward.keys() & self.outward.keys())

    def keep(self, ranks: Collection[int]) -> None:
        """Go without the rings to and from all but some ranks: both must want them."""
        dropped = SharedMemory(
            {rank: ring for rank, ring in self.inward.items() if rank not in ranks},
            {rank: ring for rank, ring in self.outward.items() if rank not in ranks},
        )
        self.inward = {rank: ring for rank, ring in self.inward.items() if rank in ranks}
        self.outward = {rank: ring for rank, ring in self.outward.items() if rank in ranks}
        self.borrowed = {rank: memory for rank, memory in self.borrowed.items() if rank in ranks}
        if not self.ranks:
            self.lent = _NOTHING
        dropped.close(keep=self._bells())

    def close(self, keep: Collection[int] = ()) -> None:
        """Close the bells, but for some; memory goes with the arrays."""
        for bell in self._bells().difference(keep):
            os.close(bell)
        self.inward, self.outward, self.borrowed, self.lent = {}, {}, {}, _NOTHING

    def _bells(self) -> set[int]:
        return {ring.bell for ring in [*self.inward.values(), *self.outward.values()]}


class Doorstep:
    """Where ranks of this host leave their offers for this one; a context manager.

    Parameters
    ----------
    lend_bytes
        How much memory to lend them at least.

    Attributes
    ----------
    name
        What the others have to know to find it; drawn at random.
    """

    def __init__(self, lend_bytes: int = LEND_BYTES) -> None:
        self._lend_bytes = lend_bytes + -lend_bytes % _PAGE
        self.name = f"dlcp-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")

    def __enter__(self) -> "Doorstep":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def meet(self, rank: int, names: Mapping[int, str], *, job: int, token: int, timeout_s: float) -> SharedMemory:
        """Exchange offers with those of the other ranks who are on this host.

        Parameters
        ----------
        rank
            This rank.
        names
            The name of each other rank's doorstep, which must exist already.
        job, token
            Offers of other jobs and sessions are not taken.
        timeout_s
            How long to wait for ranks that are here.

        Raises
        ------
        OSError
            The system does not permit it.

        Returns
        -------
        What came of it: the ranks then tell each other with whom they have a ring in each direction, and keep those.
        """
        shared = SharedMemory()
        here = sorted(peer for peer, name in names.items() if _is_there(name))
        if not here:
            return shared
        places = {peer: place for place, peer in enumerate(here)}
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        memory = -1
        try:
            memory = os.memfd_create("dlcp-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, _PAGE + len(here) * (_PAGE + RING_BYTES) + self._lend_bytes)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            inbox = _mapped(memory)
            shared.lent = inbox[len(inbox) - self._lend_bytes :]
            waiting, end_s = dict(places), time.monotonic() + timeout_s
            while (waiting or shared.inward.keys() - shared.outward) and time.monotonic() < end_s:
                for peer, place in list(waiting.items()):
                    offer = _OFFER.pack(token, job, rank, place, RING_BYTES, self._lend_bytes)
                    there = self._offer(names[peer], offer, memory, bell)
                    if there is None:
                        continue  # its queue is full
                    del waiting[peer]
                    if there:
                        shared.inward[peer] = Ring.within(inbox, place, RING_BYTES, bell)
                self._take(shared, names, job, token)
        finally:
            if memory >= 0:
                os.close(memory)
            if not shared.inward:
                os.close(bell)
        return shared

    def _offer(self, name: str, offer: bytes, memory: int, bell: int) -> bool | None:
        """Leave an offer; return whether anybody is there, or None if that is to be tried again."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory, bell]))  # send_fds knows no address
        try:
            self._socket.sendmsg([offer], [rights], 0, f"\0{name}")
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return None
        return True

    def _take(self, shared: SharedMemory, names: Mapping[int, str], job: int, token: int) -> None:
        """Take the offers that have come, or come in a moment."""
        select.select([self._socket], [], [], _TURN_S)
        while True:
            try:
                offer, given, _, _ = socket.recv_fds(self._socket, _OFFER.size + 1, 2)
            except BlockingIOError:
                return
            found = rank = None
            with suppress(OSError, ValueError, struct.error):
                told_token, told_job, rank, place, ring_bytes, lent_bytes = _OFFER.unpack(offer)
                if (told_token, told_job) == (token, job) and rank in names and rank not in shared.outward:
                    found = _offered(given, place, ring_bytes, lent_bytes)
            if found and rank is not None:
                shared.outward[rank], shared.borrowed[rank] = found
                os.close(given[0])
            else:
                for descriptor in given:
                    os.close(descriptor)


def _is_there(name: str) -> bool:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as visitor:
        return visitor.connect_ex(f"\0{name}") == 0


def _offered(given: list[int], place: int, ring_bytes: int, lent_bytes: int) -> tuple[Ring, NDArray[np.uint8]] | None:
    """Return the ring that was offered, and what is lent.

    None if they are not what was said, or might become smaller under our hands.
    """
    if len(given) != 2 or fcntl.fcntl(given[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        return None
    if place < 0 or ring_bytes < _PAGE or ring_bytes % _PAGE or lent_bytes % _PAGE:
        return None
    size = os.fstat(given[0]).st_size
    if size < _PAGE + (place + 1) * (_PAGE + ring_bytes) + lent_bytes:
        return None
    memory = _mapped(given[0])
    return Ring.within(memory, place, ring_bytes, given[1]), memory[size - lent_bytes :]


def _mapped(memory: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), np.uint8)
