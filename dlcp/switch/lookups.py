# SPDX-License-Identifier: Apache-2.0
"""Structures in which a running program looks up the row that fits a packet's combined key; one for each match kind.

Each has two forms: ``index`` for plain Python, kept up to date, and the array of `Lookup.encode` for
`dlcp.switch.kernels`.
"""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.patterns import Fields, Pattern

CACHE_KEYS: Final = 65_536
"""Keys that a plain lookup structure remembers before it starts anew. Chosen by us: some 10 MB at most."""
HASH_MULTIPLIER: Final = 0x9E3779B97F4A7C1
"""The multiplier that `dlcp.switch.kernels.probe` hashes with."""


class ExactIndex(dict[int, int]):
    """Combined key to place of the row; 0 for a key without an entry."""

    def __missing__(self, key: int) -> int:
        return 0


class CachedIndex(dict[int, int]):
    """As `ExactIndex`, but finds the entry by a search that it remembers."""

    def __init__(self, search: Callable[[int], int]) -> None:
        super().__init__()
        self._search = search

    def __missing__(self, key: int) -> int:
        if len(self) >= CACHE_KEYS:
            self.clear()
        self[key] = place = self._search(key)
        return place


class Lookup(ABC):
    """The entries of a table by what they match. A place is above 0; 0 is that of the default entry.

    Attributes
    ----------
    index
        Combined key to place.
    """

    index: dict[int, int]

    @abstractmethod
    def add(self, pattern: Pattern, rank: int, place: int) -> None:
        """Enter a pattern; of several that fit the lowest rank wins, and of those the lowest place."""

    @abstractmethod
    def remove(self, pattern: Pattern, rank: int, place: int) -> None:
        """Take out a pattern that was entered so."""

    @abstractmethod
    def encode(self) -> NDArray[np.int64]:
        """Return the array that `dlcp.switch.kernels` looks up in."""


class ExactLookup(Lookup):
    """Keys that have to be equal."""

    def __init__(self) -> None:
        self.index = ExactIndex()

    def add(self, pattern: Pattern, rank: int, place: int) -> None:
        """Enter a key; there is one entry for each."""
        self.index[pattern.value] = place

    def remove(self, pattern: Pattern, rank: int, place: int) -> None:
        """Take out a key."""
        del self.index[pattern.value]

    def encode(self) -> NDArray[np.int64]:
        """Return a hash: its mask, then pairs of key and place."""
        return _hashed(self.index)


class PrefixLookup(Lookup):
    """Prefixes, of which the longest that fits wins; by the number of low bits that they leave open."""

    def __init__(self, width: int) -> None:
        self.index = CachedIndex(self._search)
        self._width = width
        self._by_shift: dict[int, dict[int, int]] = {}

    def add(self, pattern: Pattern, rank: int, place: int) -> None:
        """Enter a prefix; there is one entry for each."""
        shift = self._width - pattern.mask.bit_count()
        self._by_shift.setdefault(shift, {})[pattern.value >> shift] = place
        self._by_shift = dict(sorted(self._by_shift.items()))
        self.index.clear()

    def remove(self, pattern: Pattern, rank: int, place: int) -> None:
        """Take out a prefix."""
        shift = self._width - pattern.mask.bit_count()
        del self._by_shift[shift][pattern.value >> shift]
        if not self._by_shift[shift]:
            del self._by_shift[shift]
        self.index.clear()

    def encode(self) -> NDArray[np.int64]:
        """Return how many lengths there are; for each its open bits, where its hash begins, its mask; the hashes."""
        head, tables = [len(self._by_shift)], []
        start = 1 + 3 * len(self._by_shift)
        for shift, items in self._by_shift.items():
            cells = _hashed(items)
            head += [shift, start, int(cells[0])]
            tables.append(cells[1:])
            start += len(cells) - 1
        return np.concatenate([np.array(head, np.int64), *tables])

    def _search(self, key: int) -> int:
        for shift, prefixes in self._by_shift.items():
            place = prefixes.get(key >> shift)
            if place is not None:
                return place
        return 0


class OrderedLookup(Lookup):
    """Patterns with masks and ranges, of which the first in order that fits wins.

    Parameters
    ----------
    ranges
        Where the range fields stand in the combined key, and their masks there; None for a table without any, whose
        array is shorter.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] | None) -> None:
        self.index = CachedIndex(self._search)
        self._ranges = ranges
        self._ordered: list[tuple[int, int, Pattern]] = []

    def add(self, pattern: Pattern, rank: int, place: int) -> None:
        """Enter a pattern."""
        bisect.insort(self._ordered, (rank, place, pattern))
        self.index.clear()

    def remove(self, pattern: Pattern, rank: int, place: int) -> None:
        """Take out a pattern."""
        del self._ordered[bisect.bisect_left(self._ordered, (rank, place, pattern))]
        self.index.clear()

    def encode(self) -> NDArray[np.int64]:
        """Return how many entries there are, and the range fields; then mask, value, bounds and place of each."""
        cells = [len(self._ordered)]
        if self._ranges is not None:
            cells.append(len(self._ranges))
            for shift, full in self._ranges:
                cells += [shift, full]
        for _, place, pattern in self._ordered:
            bounds = {shift: (low, high) for shift, _, low, high in pattern.ranges}
            cells += [pattern.mask, pattern.value]
            for shift, full in self._ranges or ():
                cells += bounds.get(shift, (0, full))
            cells.append(place)
        return np.array(cells, np.int64)

    def _search(self, key: int) -> int:
        return next((place for _, place, pattern in self._ordered if pattern.matches(key)), 0)


def make_lookup(match: str, fields: Fields) -> Lookup:
    """Return an empty structure for a match kind: exact, lpm, ternary or range."""
    if match == "exact":
        return ExactLookup()
    if match == "lpm":
        return PrefixLookup(fields.width)
    return OrderedLookup(fields.ranges if match == "range" else None)


def _hashed(items: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the mask of an open-addressing hash and its (key, entry) pairs."""
    count = len(items)
    size = 4
    while size < 2 * count:
        size *= 2
    keys = np.fromiter(items.keys(), np.int64, count)
    places = np.fromiter(items.values(), np.int64, count)
    cells = np.empty(1 + 2 * size, np.int64)
    cells[0] = size - 1
    table = cells[1:].reshape(size, 2)
    table[:] = -1, 0
    slots = (keys.astype(np.uint64) * np.uint64(HASH_MULTIPLIER) >> np.uint64(20)).astype(np.int64) & (size - 1)
    while len(keys):
        # Of those that want one free slot the first gets it; all others try the next.
        wanted, first = np.unique(slots, return_index=True)
        settled = first[table[wanted, 0] < 0]
        table[slots[settled], 0] = keys[settled]
        table[slots[settled], 1] = places[settled]
        left = np.ones(len(keys), np.bool_)
        left[settled] = False
        keys, places, slots = keys[left], places[left], (slots[left] + 1) & (size - 1)
    return cells
