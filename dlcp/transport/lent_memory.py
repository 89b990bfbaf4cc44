# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks of one host read, each from the one that sends."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT: Final = 64
"""Of pieces, in bytes: a cache line."""


class LentMemory:
    """Memory from which messages go to ranks of this host without being copied, in pieces.

    As with all messages, their bytes must not change until they are confirmed, even if a copy has taken their place
    (:meth:`dlcp.transport.protocol.Protocol.detach`).
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}
        """Where pieces that are taken begin and end."""

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Return how many bytes pieces of such sizes take up together."""
        return sum(size + -size % _ALIGNMENT for size in sizes)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Return room for ``size`` bytes, at a multiple of a cache line; None if there is not as much."""
        start = 0
        for first, last in sorted(self._taken.items()):
            if first - start >= size:
                break
            start = last
        if start + size > len(self.memory) or not size:
            return None
        self._taken[start] = start + self.needed([size])
        return self.memory[start : start + size]

    def give(self, room: NDArray[np.uint8]) -> None:
        """Take room back that came from here, once nobody uses it any more."""
        del self._taken[room.ctypes.data - self.memory.ctypes.data]
