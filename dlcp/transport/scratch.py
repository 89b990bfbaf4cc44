# SPDX-License-Identifier: Apache-2.0
"""Memory for what arrives early or out of turn."""

import numpy as np
from numpy.typing import NDArray

SIZES_KEPT = 64
PIECES_KEPT = 16
"""How many sizes are kept, and how many pieces of each. Chosen by us: more than a step's buckets have."""


class Scratch:
    """Room for what arrives out of turn, used again and again: fresh memory costs as much as the sum itself."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return room for ``size`` bytes."""
        free = self._free.get(size)
        return free.pop() if free else np.empty(size, np.uint8)

    def give(self, room: NDArray[np.uint8]) -> None:
        """Take room back, which nobody uses any more."""
        if not len(room):
            return
        if room.size not in self._free and len(self._free) >= SIZES_KEPT:
            self._free.pop(next(iter(self._free)))
        free = self._free.setdefault(room.size, [])
        if len(free) < PIECES_KEPT:
            free.append(room)
