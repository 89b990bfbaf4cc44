# SPDX-License-Identifier: Apache-2.0
"""Arrays that grow, and ranges of them that are allocated and freed: the memory of both compiled engines."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LINE_BYTES: Final = 64


class Room:
    """Allocates ranges of a growing array."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        self._end = 0

    def take(self, count: int) -> slice:
        """Allocate the first free range that is large enough."""
        for position, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                if stop - start == count:
                    del self._free[position]
                else:
                    self._free[position] = (start + count, stop)
                return slice(start, start + count)
        start = self._end
        self._end += count
        return slice(start, self._end)

    def give(self, room: slice) -> None:
        """Free a range, and merge it with adjacent free ranges."""
        if room.start == room.stop:
            return
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._free, (room.start, room.stop)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        if merged[-1][1] == self._end:
            self._end = merged.pop()[0]
        self._free = merged


def enlarged(array: NDArray[Any], needed: int) -> NDArray[Any]:
    """Return an array with room for ``needed`` rows: the same array if it is large enough."""
    if len(array) >= needed:
        return array
    larger = aligned_zeros(max(needed, 2 * len(array)), array)
    larger[: len(array)] = array
    return larger


def aligned_zeros(count: int, like: NDArray[Any]) -> NDArray[Any]:
    """Return zeros with the rows of ``like``, aligned to a cache line."""
    size = count * like.itemsize * math.prod(like.shape[1:])
    room = np.zeros(size + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + size].view(like.dtype).reshape(count, *like.shape[1:])
