# SPDX-License-Identifier: Apache-2.0
"""Control-plane access to tables, and the rows that the running program reads.

An entry gets the lowest free handle, as in BMv2: among ternary entries of one priority the lowest handle wins. Its row
is at ``(handle + 1) * stride`` in the rows; see `dlcp.switch.executor.model`.
"""

import bisect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.executor.cells import MeterCells, MeterConfig
from dlcp.switch.executor.model import (
    ConstantError,
    DuplicateError,
    EntryError,
    FullError,
    Key,
    MissingError,
    Named,
    TableDef,
    TableSlot,
    UnknownNameError,
)
from dlcp.switch.executor.profiles import Action, ActionProfile, Actions, GroupRef, Handles, Target, fitting, put_row

Match: TypeAlias = Mapping[str, int | tuple[int, int]]
"""A value for each field: a number (exact), (value, prefix length), (value, mask) or (low, high)."""


class KeyPattern(NamedTuple):
    """A pattern for the combined key of a packet.

    A key matches if ``key & mask == value`` and the field of each of ``ranges`` (shift, field mask, low, high) is
    within bounds.
    """

    value: int
    mask: int
    ranges: tuple[tuple[int, int, int, int], ...] = ()

    def matches(self, key: int) -> bool:
        """Whether a combined key matches."""
        return key & self.mask == self.value and all(
            low <= (key >> shift & full) <= high for shift, full, low, high in self.ranges
        )


class Fields:
    """The fields of a table's key.

    Parameters
    ----------
    definition, slot
        The table, and the positions of its fields in the combined key.
    where
        Prefix of error messages.
    """

    def __init__(self, definition: TableDef, slot: TableSlot, where: str) -> None:
        self._keys, self._where = definition.keys, where
        self._by_name: Named[Key] = Named("field", {key.name: key for key in definition.keys}, where)
        self._shifts = {key.name: shift for key, shift in slot.shifts(definition)}

    @property
    def width(self) -> int:
        """Width of the combined key in bits."""
        return sum(key.width for key in self._keys)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Position of each range field in the combined key, and its mask after shifting down."""
        return [(self._shifts[key.name], (1 << key.width) - 1) for key in self._keys if key.match == "range"]

    def named(self, match: Match) -> dict[str, int | tuple[int, int]]:
        """Return a match with the fields' full names."""
        return {self._by_name[name].name: item for name, item in match.items()}

    def pattern(self, match: Match) -> KeyPattern:
        """Return the key pattern of a match.

        Raises
        ------
        EntryError
            An unknown field, an exact field without a value, or an invalid value.
        """
        value = mask = 0
        ranges = []
        for name in match:
            if name not in self._by_name:
                raise UnknownNameError("field", name, self._by_name, self._where)
        given = {id(self._by_name[name]): item for name, item in match.items()}
        for key in self._keys:
            shift = self._shifts[key.name]
            full = (1 << key.width) - 1
            item = given.get(id(key))
            if key.match == "range":
                low, high = (0, full) if item is None else self._pair(key, item, "(low, high)")
                self._fits(key, low)
                self._fits(key, high)
                if low > high:
                    raise EntryError(f"{self._where}: field {key.name} has an empty range {low}..{high}")
                if (low, high) != (0, full):
                    ranges.append((shift, full, low, high))
                continue
            part, bits = self._part(key, item, full)
            if key.mask is not None:
                part, bits = part & key.mask, bits & (key.mask | ~full)
            value |= part << shift
            mask |= bits << shift
        return KeyPattern(value, mask, tuple(ranges))

    def _part(self, key: Key, item: Any, full: int) -> tuple[int, int]:
        """Return value and mask of one field that is not a range."""
        if key.match == "exact":
            if item is None:
                raise EntryError(f"{self._where}: no value for field {key.name}")
            if isinstance(item, tuple):
                raise EntryError(f"{self._where}: field {key.name} is exact; give a number, not {item}")
            return self._fits(key, item), full
        if item is None:
            return 0, 0
        if key.match == "lpm":
            part, length = self._pair(key, item, "(value, prefix length)")
            if not 0 <= length <= key.width:
                raise EntryError(f"{self._where}: field {key.name}: prefix length {length} is outside 0..{key.width}")
            bits = full ^ (full >> length)
        else:
            part, bits = self._pair(key, item, "(value, mask)")
            self._fits(key, bits)
        if self._fits(key, part) & ~bits:
            raise EntryError(
                f"{self._where}: field {key.name}: value {part:#x} has bits outside {bits:#x}; set them to 0"
            )
        return part, bits

    def _pair(self, key: Key, item: Any, shape: str) -> tuple[int, int]:
        if not isinstance(item, tuple) or len(item) != 2:
            raise EntryError(f"{self._where}: field {key.name} is {key.match}; give {shape}, not {item!r}")
        return operator.index(item[0]), operator.index(item[1])

    def _fits(self, key: Key, value: Any) -> int:
        return fitting(value, key.width, f"{self._where}: field {key.name}")


CACHE_KEYS: Final = 65_536
"""Keys that a plain lookup structure caches before it clears the cache: about 10 MB at most."""
HASH_MULTIPLIER: Final = 0x9E3779B97F4A7C1
"""The multiplier of the hash in `probe`."""


class ExactIndex(dict[int, int]):
    """Maps a combined key to the offset of its row; 0 for a key without an entry."""

    def __missing__(self, key: int) -> int:
        return 0


class CachedIndex(dict[int, int]):
    """Like `ExactIndex`, but searches for the entry and caches the result."""

    def __init__(self, search: Callable[[int], int]) -> None:
        super().__init__()
        self._search = search

    def __missing__(self, key: int) -> int:
        if len(self) >= CACHE_KEYS:
            self.clear()
        self[key] = place = self._search(key)
        return place


class Lookup(ABC):
    """The lookup structure of a table. A place, the offset of a row, is above 0; the default entry is at 0.

    Attributes
    ----------
    index
        Maps a combined key to a place.
    """

    index: dict[int, int]

    @abstractmethod
    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a pattern; of several that match the lowest rank wins, then the lowest place."""

    @abstractmethod
    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a pattern added with the same arguments."""

    @abstractmethod
    def encode(self) -> NDArray[np.int64]:
        """Return the array for the lookup functions below."""


class ExactLookup(Lookup):
    """Lookup of exact keys."""

    def __init__(self) -> None:
        self.index = ExactIndex()

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a key, which has no other entry."""
        self.index[pattern.value] = place

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a key."""
        del self.index[pattern.value]

    def encode(self) -> NDArray[np.int64]:
        """Return a hash table: its mask, then pairs of key and place."""
        return _hashed(self.index)


class PrefixLookup(Lookup):
    """Longest-prefix lookup, with one hash table for each number of wildcard bits."""

    def __init__(self, width: int) -> None:
        self.index = CachedIndex(self._search)
        self._width = width
        self._by_shift: dict[int, dict[int, int]] = {}

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a prefix, which has no other entry."""
        shift = self._width - pattern.mask.bit_count()
        self._by_shift.setdefault(shift, {})[pattern.value >> shift] = place
        self._by_shift = dict(sorted(self._by_shift.items()))
        self.index.clear()

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a prefix."""
        shift = self._width - pattern.mask.bit_count()
        del self._by_shift[shift][pattern.value >> shift]
        if not self._by_shift[shift]:
            del self._by_shift[shift]
        self.index.clear()

    def encode(self) -> NDArray[np.int64]:
        """Return the number of lengths; wildcard bits, start and mask of the hash table of each; the hash tables."""
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
    """Lookup of patterns with masks and ranges; the first match in order of rank and place wins.

    Parameters
    ----------
    ranges
        Positions and masks of the range fields in the combined key; None for a table without any, whose array is
        shorter.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] | None) -> None:
        self.index = CachedIndex(self._search)
        self._ranges = ranges
        self._ordered: list[tuple[int, int, KeyPattern]] = []

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a pattern."""
        bisect.insort(self._ordered, (rank, place, pattern))
        self.index.clear()

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a pattern."""
        del self._ordered[bisect.bisect_left(self._ordered, (rank, place, pattern))]
        self.index.clear()

    def encode(self) -> NDArray[np.int64]:
        """Return the number of entries and the range fields; then mask, value, bounds and place of each entry."""
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
    """Return an empty lookup structure for a match kind: exact, lpm, ternary or range."""
    if match == "exact":
        return ExactLookup()
    if match == "lpm":
        return PrefixLookup(fields.width)
    return OrderedLookup(fields.ranges if match == "range" else None)


def probe(index: Any, start: int, mask: int, key: int) -> int:
    """Look a key up in an open-addressing hash table of (key, entry) pairs at ``start``; 0 if it is absent."""
    i = ((key * 0x9E3779B97F4A7C1) >> 20) & mask
    while True:
        found = index[start + 2 * i]
        if found == key:
            return int(index[start + 2 * i + 1])
        if found < 0:
            return 0
        i = (i + 1) & mask


def lookup_exact(index: Any, key: int) -> int:
    """Look a key up in the array of `ExactLookup.encode`: mask, then pairs."""
    return probe(index, 1, index[0], key)


def lookup_lpm(index: Any, key: int) -> int:
    """Look a key up in the array of `PrefixLookup.encode`: a count, then (shift, start, mask) of each length."""
    for i in range(index[0]):
        found = probe(index, index[3 * i + 2], index[3 * i + 3], key >> index[3 * i + 1])
        if found > 0:
            return found
    return 0


def lookup_ternary(index: Any, key: int) -> int:
    """Look a key up in the array of `OrderedLookup.encode`: a count, then (mask, value, entry), the winner first."""
    for i in range(index[0]):
        if key & index[3 * i + 1] == index[3 * i + 2]:
            return int(index[3 * i + 3])
    return 0


def lookup_range(index: Any, key: int) -> int:
    """Like `lookup_ternary`, with range fields.

    The array has the numbers of entries and of range fields; (shift, mask) of each range field; then, for each entry,
    mask, value, (low, high) of each range field, and entry.
    """
    fields = index[1]
    size = 3 + 2 * fields
    start = 2 + 2 * fields
    for _ in range(index[0]):
        if key & index[start] == index[start + 1]:
            inside = True
            for i in range(fields):
                value = (key >> index[2 + 2 * i]) & index[3 + 2 * i]
                if value < index[start + 2 + 2 * i] or value > index[start + 3 + 2 * i]:
                    inside = False
                    break
            if inside:
                return int(index[start + size - 1])
        start += size
    return 0


LOOKUPS: Final = (probe, lookup_exact, lookup_lpm, lookup_ternary, lookup_range)
"""The functions included in compiled text, callees first."""


def _hashed(items: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the mask of an open-addressing hash table and its (key, entry) pairs."""
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
        # The first key for a free slot gets it; all others try the next slot.
        wanted, first = np.unique(slots, return_index=True)
        settled = first[table[wanted, 0] < 0]
        table[slots[settled], 0] = keys[settled]
        table[slots[settled], 1] = places[settled]
        left = np.ones(len(keys), np.bool_)
        left[settled] = False
        keys, places, slots = keys[left], places[left], (slots[left] + 1) & (size - 1)
    return cells


class Entry(NamedTuple):
    """An entry as it was inserted."""

    match: dict[str, int | tuple[int, int]]
    target: Target
    priority: int


@dataclass(slots=True)
class _Stored:
    handle: int
    pattern: KeyPattern
    rank: int
    entry: Entry
    key: tuple[KeyPattern, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.pattern, self.rank)


class Table:
    """A table of a program.

    Attributes
    ----------
    definition
        The table as the program defines it: keys with name, match kind and width, size.
    rows, index
        Read by plain generated text.
    changed
        Set by every change; compiled code clears it when it rebuilds its arrays.
    """

    def __init__(
        self, definition: TableDef, slot: TableSlot, profile: ActionProfile | None, meters: MeterCells | None
    ) -> None:
        self.definition, self.slot, self.profile, self.meters = definition, slot, profile, meters
        self.name = definition.name
        self.where = f"table {self.name}"
        self.actions = Actions(definition.actions, self.where)
        self.rows: list[int] = [0] * slot.stride
        self._fields = Fields(definition, slot, self.where)
        self._lookup = make_lookup(definition.match, self._fields)
        self.index = self._lookup.index
        self.changed = True
        self._prioritised = definition.match in ("ternary", "range")
        self._stored: dict[tuple[KeyPattern, int], _Stored] = {}
        self._handles = Handles()
        self._default: Target | None = None
        self.reset_default()
        for const in definition.entries:
            match = {key.name: value for key, value in zip(definition.keys, const.keys, strict=True)}
            self._add(
                self._fields.pattern(match),
                const.rank,
                Entry(match, self._const_action(const.action, const.arguments), 0),
            )

    def _const_action(self, number: int, arguments: tuple[int, ...]) -> Action:
        definition = next(action for action in self.definition.actions if action.id == number)
        names = (parameter.name for parameter in definition.parameters)
        return Action(definition.name, dict(zip(names, arguments, strict=True)))

    # -------------------------------------------------------------------------------------------------- changing

    def insert(self, match: Match, target: Target, priority: int = 0) -> int:
        """Add an entry and return its handle.

        Parameters
        ----------
        match
            A value for each field; an omitted field matches anything unless it is exact.
        target
            `Action`, or `MemberRef` or `GroupRef` for a table with an action profile.
        priority
            Above 0 for tables with ternary or range fields, where the highest wins; else 0.

        Raises
        ------
        EntryError
            The entry does not fit the table or already exists, or the table is full.
        """
        self._mutable()
        pattern, rank = self._fields.pattern(match), self._rank(priority)
        if (pattern, rank) in self._stored:
            raise DuplicateError(f"{self.where} has an entry for {_show(match)} already; use modify")
        if len(self._stored) >= self.definition.size:
            raise FullError(f"{self.where} is full ({self.definition.size} entries); delete some first")
        return self._add(pattern, rank, Entry(self._fields.named(match), self._checked(target), priority))

    def modify(self, match: Match, target: Target, priority: int = 0) -> int:
        """Change an entry's target and return its handle; errors as `insert`, or if there is no such entry."""
        self._mutable()
        stored = self._find(match, priority)
        target = self._checked(target)
        self._hold(target)
        self._release(stored.entry.target)
        stored.entry = Entry(stored.entry.match, target, stored.entry.priority)
        self._fill(self._place(stored.handle), target)
        self.changed = True
        return stored.handle

    def delete(self, match: Match, priority: int = 0) -> int:
        """Remove an entry and return its former handle; raises EntryError if there is no such entry."""
        self._mutable()
        stored = self._find(match, priority)
        self._remove(stored)
        return stored.handle

    def clear(self) -> None:
        """Remove all entries except constant ones."""
        if not self.definition.entries:
            for stored in list(self._stored.values()):
                self._remove(stored)

    def get(self, match: Match, priority: int = 0) -> Entry | None:
        """Return an entry, or None; raises EntryError for a match that does not fit the table."""
        stored = self._stored.get((self._fields.pattern(match), self._rank(priority)))
        return None if stored is None else stored.entry

    def handle(self, match: Match, priority: int = 0) -> int:
        """Return the handle of an entry; raises EntryError if there is no such entry."""
        return self._find(match, priority).handle

    def entries(self) -> list[Entry]:
        """Return all entries, in the order of their handles."""
        return list(self.by_handle().values())

    def by_handle(self) -> dict[int, Entry]:
        """Return all entries by their handles, in order."""
        return {item.handle: item.entry for item in sorted(self._stored.values(), key=lambda item: item.handle)}

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def default(self) -> Target | None:
        """The target on a miss; None for a table with an action profile and no default member."""
        return self._default

    def set_default(self, target: Target) -> None:
        """Change the target on a miss; raises EntryError if it is constant or does not fit the table."""
        if self.definition.default_const:
            raise ConstantError(f"{self.where} has a constant default action")
        if isinstance(target, GroupRef):
            raise EntryError(f"{self.where}: a group cannot be the default; use one of its members")
        target = self._checked(target)
        self._hold(target)
        self._release(self._default)
        self._default = target
        self._fill(0, target)
        self.changed = True

    def reset_default(self) -> None:
        """Restore the program's default action."""
        self._release(self._default)
        self._default = None
        self.changed = True
        for cell in range(self.slot.stride):
            self.rows[cell] = 0
        if self.profile is not None:
            return
        if self.definition.default is not None:
            self._default = self._const_action(*self.definition.default)
            self._fill(0, self._default)
        else:
            self.rows[0] = -1

    def set_meter(self, match: Match, config: MeterConfig | None, priority: int = 0) -> None:
        """Configure the direct meter of an entry; None removes its configuration."""
        self._direct()[self._find(match, priority).handle] = config

    def get_meter(self, match: Match, priority: int = 0) -> MeterConfig | None:
        """Return the configuration of an entry's direct meter."""
        return self._direct()[self._find(match, priority).handle]

    def _direct(self) -> MeterCells:
        if self.meters is None:
            raise EntryError(f"{self.where} has no direct meter")
        return self.meters

    # ------------------------------------------------------------------------------------------------- the match

    def _mutable(self) -> None:
        if self.definition.entries:
            raise ConstantError(f"{self.where} has constant entries; they cannot be changed")
        if not self.definition.keys:
            raise EntryError(f"{self.where} has no key, so no entries; use set_default")

    def _rank(self, priority: int) -> int:
        if self._prioritised and priority <= 0:
            raise EntryError(f"{self.where} needs a priority above 0 for each entry (the highest wins)")
        if not self._prioritised and priority:
            raise EntryError(f"{self.where} takes no priority: its entries overlap only by prefix length; use 0")
        return -priority

    def _find(self, match: Match, priority: int) -> _Stored:
        stored = self._stored.get((self._fields.pattern(match), self._rank(priority)))
        if stored is None:
            raise MissingError(f"{self.where} has no entry for {_show(match)}")
        return stored

    # --------------------------------------------------------------------------------------------------- storage

    def _checked(self, target: Target) -> Target:
        if self.profile is None:
            if not isinstance(target, Action):
                raise EntryError(f"{self.where} has no action profile; give an Action, not {target}")
            self.actions.row(target)
            return target
        if isinstance(target, Action):
            raise EntryError(f"{self.where} has an action profile; give a MemberRef or a GroupRef, not {target}")
        self.profile.place(target)
        return target

    def _hold(self, target: Target | None) -> None:
        if self.profile is not None and target is not None and not isinstance(target, Action):
            self.profile.hold(target)

    def _release(self, target: Target | None) -> None:
        if self.profile is not None and target is not None and not isinstance(target, Action):
            self.profile.release(target)

    def _place(self, handle: int) -> int:
        return (handle + 1) * self.slot.stride

    def _fill(self, place: int, target: Target) -> None:
        """Write a target's row at ``place``."""
        row = self.actions.row(target) if isinstance(target, Action) else []
        if self.profile is not None and not isinstance(target, Action):
            row = [self.profile.place(target)]
        put_row(self.rows, place, self.slot.stride, row)

    def _add(self, pattern: KeyPattern, rank: int, entry: Entry) -> int:
        handle = self._handles.take()
        stored = _Stored(handle, pattern, rank, entry)
        self._hold(entry.target)
        place = self._place(handle)
        self._fill(place, entry.target)
        self._stored[stored.key] = stored
        self._lookup.add(pattern, rank, place)
        self.changed = True
        return handle

    def _remove(self, stored: _Stored) -> None:
        del self._stored[stored.key]
        self._lookup.remove(stored.pattern, stored.rank, self._place(stored.handle))
        if self.meters is not None:
            self.meters[stored.handle] = None
        self._release(stored.entry.target)
        self._handles.give_back(stored.handle)
        self.changed = True

    def encode(self) -> NDArray[np.int64]:
        """Return the lookup structure as the array for the lookup functions above."""
        return self._lookup.encode()


def _show(match: Match) -> str:
    return ", ".join(f"{name}={value}" for name, value in match.items())
