# SPDX-License-Identifier: Apache-2.0
"""Memory for messages: buffers that are used again, and memory that ranks of this host read."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SIZES_KEPT: Final = 64
_BUFFERS_KEPT: Final = 16
"""How many sizes a pool keeps, and how many buffers of each. Chosen by us: more than a step's buckets need."""
_ALIGNMENT: Final = 64
"""Of pieces of exported memory, in bytes: a cache line."""


class BufferPool:
    """Buffers for what arrives early or out of turn, used again and again: fresh memory costs as much as a reduction.

    Sizes are rounded up by at most an eighth, so that messages of almost the same size share buffers.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a buffer of ``size`` bytes; its content is arbitrary."""
        step = 1 << max(0, size.bit_length() - 4)
        rounded = -(-size // step) * step
        free = self._free.get(rounded)
        whole = free.pop() if free else np.empty(rounded, np.uint8)
        return whole[:size]

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer, or a part of one that stands for it, that nobody uses any more."""
        if not len(buffer):
            return
        whole: NDArray[np.uint8] = buffer if buffer.base is None else buffer.base
        if whole.size not in self._free and len(self._free) >= _SIZES_KEPT:
            self._free.pop(next(iter(self._free)))
        free = self._free.setdefault(whole.size, [])
        if len(free) < _BUFFERS_KEPT:
            free.append(whole)


class ExportedMemory:
    """Memory of this rank that other ranks of its host map: what is sent from here, they read where it is.

    As with all messages, the bytes must not change until they are confirmed, not even once a copy has taken their place
    (``Endpoint.detach``).
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}
        """Start and end of each piece in use."""

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Return how many bytes pieces of such sizes take up together."""
        return sum(size + -size % _ALIGNMENT for size in sizes)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Return a piece of ``size`` bytes that begins with a cache line; None if there is no room for it."""
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
        """Return a piece that nobody uses any more."""
        del self._taken[piece.ctypes.data - self.memory.ctypes.data]
