# SPDX-License-Identifier: Apache-2.0
"""Memory for what arrives early or out of turn."""

import numpy as np
from numpy.typing import NDArray

SIZES_KEPT = 64
PIECES_KEPT = 16
"""How many sizes are kept, and how many pieces of each. Chosen by us: more than a step's buckets have."""


class Scratch:
    """Room for what arrives out of turn, used again and again: fresh memory costs as much as the sum itself.

    Sizes are rounded up by at most an eighth, so that messages of almost the same size share rooms.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return room for ``size`` bytes."""
        step = 1 << max(0, size.bit_length() - 4)
        rounded = -(-size // step) * step
        free = self._free.get(rounded)
        whole = free.pop() if free else np.empty(rounded, np.uint8)
        return whole[:size]

    def give(self, room: NDArray[np.uint8]) -> None:
        """Take room back that came from here, all of it or a part, once nobody uses it any more."""
        if not len(room):
            return
        whole: NDArray[np.uint8] = room if room.base is None else room.base
        if whole.size not in self._free and len(self._free) >= SIZES_KEPT:
            self._free.pop(next(iter(self._free)))
        free = self._free.setdefault(whole.size, [])
        if len(free) < PIECES_KEPT:
            free.append(whole)
