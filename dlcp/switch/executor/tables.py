# SPDX-License-Identifier: Apache-2.0
"""Control-plane access to the action profiles and tables of a running program.

They keep the rows that the program reads; `dlcp.switch.executor.model` describes their layout. An entry gets the lowest
free handle, as in BMv2: among ternary entries of one priority the lowest handle wins. Its row is at
``(handle + 1) * stride`` in the rows.
"""

import bisect
import heapq
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.executor.cells import MeterCells, MeterConfig
from dlcp.switch.executor.model import (
    ActionDef,
    ConstantError,
    DuplicateError,
    EntryError,
    FullError,
    InUseError,
    Key,
    MissingError,
    Named,
    ProfileDef,
    ProfileSlot,
    TableDef,
    TableSlot,
    UnknownNameError,
)

# ------------------------------------------------------------------------------------------------------ action profiles


@dataclass(frozen=True, slots=True)
class Action:
    """An action by its p4info name or alias, with a value for each parameter."""

    name: str
    params: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemberRef:
    """A member of the table's action profile."""

    id: int


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group of the table's action profile; a hash of the packet selects one of its members."""

    id: int


Target: TypeAlias = Action | MemberRef | GroupRef

GROUP_SIZE_MAX: Final = 65_536
"""Maximum sum of the weights in a group, so that no weight can exhaust memory. Not tuned."""
TIDY_CELLS: Final = 1024
"""Unused cells allowed beyond the number of used ones before `_tidy` runs. Not tuned."""


def fitting(value: Any, width: int, what: str) -> int:
    """Return ``value`` as an int; raise EntryError, beginning with ``what``, unless it fits ``width`` bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise EntryError(f"{what} takes a number, not {value!r}") from None
    if not 0 <= number < 1 << width:
        raise EntryError(f"{what} has {width} bits; {number:#x} does not fit")
    return number


class Handles:
    """Allocates handles like BMv2: the lowest free number."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        """Allocate a handle."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, handle: int) -> None:
        """Free a handle."""
        heapq.heappush(self._free, handle)


def put_row(rows: list[int], place: int, stride: int, row: Sequence[int]) -> None:
    """Write a row of up to ``stride`` cells; ``rows`` grows as needed."""
    missing = place + stride - len(rows)
    if missing > 0:
        rows.extend([0] * missing)
    rows[place : place + len(row)] = row


class Actions:
    """The actions of one table, numbered in the table's order."""

    def __init__(self, actions: Sequence[ActionDef], where: str) -> None:
        self.where = where
        self.definitions = actions
        numbers = {action.name: number for number, action in enumerate(actions)}
        self._numbers: Named[int] = Named("action", numbers, where)

    def full_name(self, name: str) -> str:
        """Return the p4info name of an action; raises EntryError if the table has no such action."""
        return self.definitions[self._numbers[name]].name

    def row(self, action: Action) -> list[int]:
        """Return the action's number and its arguments, in order.

        Raises
        ------
        EntryError
            The table has no such action, or the arguments do not fit it.
        """
        number = self._numbers[action.name]
        parameters = self.definitions[number].parameters
        names = [parameter.name for parameter in parameters]
        for name in action.params:
            if name not in names:
                raise UnknownNameError("parameter", name, names, f"{self.where}: action {action.name}")
        row = [number]
        for parameter in parameters:
            if parameter.name not in action.params:
                raise EntryError(f"{self.where}: action {action.name} needs a value for {parameter.name}")
            what = f"{self.where}: parameter {parameter.name} of {action.name}"
            row.append(fitting(action.params[parameter.name], parameter.width, what))
        return row


Members: TypeAlias = Sequence[int] | Mapping[int, int]
"""The members of a group; a mapping gives each a weight above 0, else all weights are 1."""


@dataclass(slots=True)
class _Member:
    handles: list[int]
    """Its own handle, plus one for each further unit of its largest weight."""
    action: Action
    place: int
    users: int = 0


@dataclass(slots=True)
class _Group:
    members: dict[int, int]
    """Weight of each member."""
    place: int
    users: int = 0


class ActionProfile:
    """An action profile, with or without a selector.

    A member gets the lowest free handle, as in BMv2. A hash selects among a group's members in the order of their
    handles, not of their insertion. A member with weight w takes w places in the group, with one handle each, as in
    BMv2's P4Runtime server.

    Attributes
    ----------
    group_cells, choices, rows
        Read by plain generated text; see `dlcp.switch.executor.model`.
    changed
        Set by every change.
    """

    def __init__(self, definition: ProfileDef, slot: ProfileSlot, actions: Actions) -> None:
        self.definition, self.slot, self.actions = definition, slot, actions
        self.name = definition.name
        self.where = f"action profile {self.name}"
        self.group_cells: list[int] = [0, 0]
        self.choices: list[int] = []
        self.rows: list[int] = []
        self.changed = True
        self._members: dict[int, _Member] = {}
        self._groups: dict[int, _Group] = {}
        self._handles = Handles()
        self._free_places: list[int] = []
        self._tidy_at = TIDY_CELLS

    # --------------------------------------------------------------------------------------------------- members

    def add_member(self, member_id: int, action: Action) -> None:
        """Add a member; raises EntryError if it does not fit or already exists, or if the profile is full."""
        if member_id in self._members:
            raise DuplicateError(f"{self.where} has a member {member_id} already; use modify_member")
        if len(self._members) >= self.definition.size:
            raise FullError(f"{self.where} is full ({self.definition.size} members); delete some first")
        row = self.actions.row(action)
        member = _Member([self._handles.take()], action, self._new_place())
        self._members[member_id] = member
        self._fill(member.handles[0], row)
        self._choose(member.place, {member_id: 1})

    def modify_member(self, member_id: int, action: Action) -> None:
        """Change a member's action; raises EntryError if it does not fit or there is no such member."""
        member = self._member(member_id)
        row = self.actions.row(action)
        for handle in member.handles:
            self._fill(handle, row)
        member.action = action

    def delete_member(self, member_id: int) -> None:
        """Remove a member; raises EntryError if an entry or a group uses it."""
        member = self._member(member_id)
        groups = [str(number) for number, group in self._groups.items() if member_id in group.members]
        if groups:
            raise InUseError(f"{self.where}: member {member_id} is in group {', '.join(groups)}; take it out first")
        if member.users:
            raise InUseError(f"{self.where}: member {member_id} is used by {member.users} entries; change them first")
        self._drop_place(member.place)
        del self._members[member_id]
        for handle in member.handles:
            self._handles.give_back(handle)

    def members(self) -> dict[int, Action]:
        """Return every member's action."""
        return {number: member.action for number, member in self._members.items()}

    # ---------------------------------------------------------------------------------------------------- groups

    def add_group(self, group_id: int, members: Members = ()) -> None:
        """Add a group; raises EntryError if it already exists or a member does not."""
        if self.definition.algorithm is None:
            raise EntryError(f"{self.where} has no selector, so it cannot have groups")
        if group_id in self._groups:
            raise DuplicateError(f"{self.where} has a group {group_id} already; use modify_group")
        weights = self._weights(group_id, members)
        group = _Group({}, self._new_place())
        self._groups[group_id] = group
        self._regroup(group, weights)

    def modify_group(self, group_id: int, members: Members) -> None:
        """Replace a group's members; raises EntryError if entries use the group and it would become empty."""
        group = self._group(group_id)
        weights = self._weights(group_id, members)
        if not members and group.users:
            raise InUseError(f"{self.where}: group {group_id} is used by {group.users} entries; it needs a member")
        self._regroup(group, weights)

    def delete_group(self, group_id: int) -> None:
        """Remove a group; raises EntryError if an entry uses it."""
        group = self._group(group_id)
        if group.users:
            raise InUseError(f"{self.where}: group {group_id} is used by {group.users} entries; change them first")
        self._drop_place(group.place)
        del self._groups[group_id]
        self._trim(group.members)

    def has_group(self, group_id: int) -> bool:
        """Whether the group exists."""
        return group_id in self._groups

    def groups(self) -> dict[int, list[int]]:
        """Return every group's members."""
        return {number: list(group.members) for number, group in self._groups.items()}

    def weights(self) -> dict[int, dict[int, int]]:
        """Return every group's members with their weights."""
        return {number: dict(group.members) for number, group in self._groups.items()}

    def clear(self) -> None:
        """Remove all groups and members; raises EntryError if an entry uses one."""
        for number in list(self._groups):
            self.delete_group(number)
        for number in list(self._members):
            self.delete_member(number)

    # ----------------------------------------------------------------------------------------------- for entries

    def place(self, target: MemberRef | GroupRef) -> int:
        """Return the cell of a member or a group; raises EntryError if an entry cannot refer to it."""
        if isinstance(target, MemberRef):
            return self._member(target.id).place
        group = self._group(target.id)
        if not group.members:
            raise InUseError(f"{self.where}: group {target.id} is empty; add a member before an entry uses it")
        return group.place

    def hold(self, target: MemberRef | GroupRef) -> None:
        """Record that an entry uses ``target``."""
        self._used(target).users += 1

    def release(self, target: MemberRef | GroupRef) -> None:
        """Record that an entry no longer uses ``target``."""
        self._used(target).users -= 1

    def _used(self, target: MemberRef | GroupRef) -> _Member | _Group:
        return self._member(target.id) if isinstance(target, MemberRef) else self._group(target.id)

    # --------------------------------------------------------------------------------------------------- storage

    def _member(self, number: int) -> _Member:
        if number not in self._members:
            raise MissingError(f"{self.where} has no member {number}; it has {_listed(self._members)}")
        return self._members[number]

    def _group(self, number: int) -> _Group:
        if number not in self._groups:
            raise MissingError(f"{self.where} has no group {number}; it has {_listed(self._groups)}")
        return self._groups[number]

    def _weights(self, group_id: int, members: Members) -> dict[int, int]:
        """Return the weight of each member; raises EntryError for invalid members or weights."""
        if len(set(members)) != len(members):
            raise EntryError(f"{self.where}: group {group_id} names a member twice: {list(members)}")
        weights = dict(members) if isinstance(members, Mapping) else dict.fromkeys(members, 1)
        for number, weight in weights.items():
            self._member(number)
            if weight < 1:
                raise EntryError(f"{self.where}: group {group_id}: weight {weight} of member {number} is below 1")
        if sum(weights.values()) > GROUP_SIZE_MAX:
            raise FullError(f"{self.where}: the weights of group {group_id} add up to more than {GROUP_SIZE_MAX}")
        return weights

    def _regroup(self, group: _Group, weights: dict[int, int]) -> None:
        """Replace a group's members; allocates and frees handles in BMv2's order."""
        before, group.members = group.members, weights
        for number in sorted(weights):
            member = self._members[number]
            while len(member.handles) < weights[number]:
                member.handles.append(self._handles.take())
                self._fill(member.handles[-1], self.actions.row(member.action))
        self._choose(group.place, weights)
        self._trim({*before, *weights})

    def _trim(self, numbers: Iterable[int]) -> None:
        """Free handles that no group needs any more."""
        for number in sorted(numbers):
            handles = self._members[number].handles
            if len(handles) > 1:
                needed = max((group.members.get(number, 1) for group in self._groups.values()), default=1)
                while len(handles) > needed:
                    self._handles.give_back(handles.pop())

    def _new_place(self) -> int:
        if self._free_places:
            return self._free_places.pop()
        self.group_cells += [0, 0]
        return len(self.group_cells) - 2

    def _drop_place(self, place: int) -> None:
        self.group_cells[place] = 0
        self._free_places.append(place)
        self.changed = True

    def _fill(self, handle: int, row: list[int]) -> None:
        put_row(self.rows, handle * self.slot.stride, self.slot.stride, row)
        self.changed = True

    def _choose(self, place: int, members: Mapping[int, int]) -> None:
        """Point ``place`` to members of these weights. Its former cells stay unused until `_tidy`."""
        handles = self._handles_of(members)
        self.group_cells[place : place + 2] = [len(handles), len(self.choices)]
        self.choices += [handle * self.slot.stride for handle in handles]
        self.changed = True
        if len(self.choices) > self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        self.choices.clear()
        for member in self._members.values():
            self.group_cells[member.place : member.place + 2] = [1, len(self.choices)]
            self.choices.append(member.handles[0] * self.slot.stride)
        for group in self._groups.values():
            handles = self._handles_of(group.members)
            self.group_cells[group.place : group.place + 2] = [len(handles), len(self.choices)]
            self.choices += [handle * self.slot.stride for handle in handles]
        self._tidy_at = 2 * len(self.choices) + TIDY_CELLS

    def _handles_of(self, members: Mapping[int, int]) -> list[int]:
        return sorted(handle for number, weight in members.items() for handle in self._members[number].handles[:weight])


def _listed(numbers: Mapping[int, object]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)[:10]) or "none"


# --------------------------------------------------------------------------------------------------------------- tables


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
