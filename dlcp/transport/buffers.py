# SPDX-License-Identifier: Apache-2.0
"""Memory for messages: reusable buffers, and memory that other ranks of this host can read."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SIZES_KEPT: Final = 64
_BUFFERS_KEPT: Final = 16
"""The most sizes in a pool, and the most buffers of each size: more than a step's buckets need."""
_ALIGNMENT: Final = 64
"""Alignment of pieces of exported memory, in bytes: a cache line."""


class BufferPool:
    """Reusable buffers for early and out-of-order packets, since fresh memory costs as much as a reduction.

    Sizes are rounded up by at most an eighth, so that messages of almost the same size share buffers. Several threads
    may use it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a buffer of ``size`` bytes; its content is arbitrary."""
        step = 1 << max(0, size.bit_length() - 4)
        rounded = -(-size // step) * step
        try:
            whole = self._free[rounded].pop()
        except (KeyError, IndexError):
            whole = np.empty(rounded, np.uint8)
        return whole[:size]

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return an unused buffer, or a part of it."""
        if not len(buffer):
            return
        whole: NDArray[np.uint8] = buffer if buffer.base is None else buffer.base
        if whole.size not in self._free and len(self._free) >= _SIZES_KEPT:
            self._free.pop(next(iter(self._free)))
        free = self._free.setdefault(whole.size, [])
        if len(free) < _BUFFERS_KEPT:
            free.append(whole)


class ExportedMemory:
    """Memory of this rank that other ranks of its host map, so that they read messages in place.

    The bytes of a message must not change until it is acknowledged, even after ``Endpoint.detach`` has replaced them by
    a copy.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}
        """The end of each piece in use, by its start."""

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Return the bytes that pieces of these sizes occupy together."""
        return sum(size + -size % _ALIGNMENT for size in sizes)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Return a piece of ``size`` bytes aligned to a cache line; None if there is no room."""
        start = 0
        for first, last in sorted(self._taken.items()):
            if first - start >= size:
                break
            start = last
        if start + size > len(self.memory) or not size:
            return None
        self._taken[start] = start + self.needed([size])
        return self.memory[start : start + size]

    def give(self, piece: NDArray[np.uint8]) -> None:
        """Return an unused piece."""
        del self._taken[piece.ctypes.data - self.memory.ctypes.data]
