# SPDX-License-Identifier: Apache-2.0
"""What ranks can do over their store: gather and add up. It is slow, but whole, and it knows when a rank has ended."""

import ast
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.session.store import Store
from dlcp.transport import DeadlineError, PeerSilentError

CHUNK_BYTES: Final = 1 << 22
"""Longer arrays are added up in parts of this size, so that no request keeps the store for long. Chosen by us."""
ENDED: Final = "ended"
"""Below it the store has why ranks have ended, if they have."""


class RankEndedError(PeerSilentError):
    """A rank's process has ended, or has left the group."""


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
