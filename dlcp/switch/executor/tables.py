# SPDX-License-Identifier: Apache-2.0
"""Control-plane access to the action profiles and tables of a running program.

They keep the rows that the program reads; `dlcp.switch.executor.model` describes their layout. An entry gets the lowest
free handle, as in BMv2: among ternary entries of one priority the lowest handle wins. Its row is at
``(handle + 1) * stride`` in the rows.
"""

import bisect
import heapq
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.executor import model
from dlcp.switch.executor.cells import MeterCells
from dlcp.switch.executor.model import (
    NUMBER_BITS,
    SPLIT_BITS,
    Action,
    EntryError,
    GroupRef,
    InUseError,
    Key,
    Match,
    MemberRef,
    TableEntry,
    Target,
)

# ------------------------------------------------------------------------------------------------------ action profiles


GROUP_SIZE_MAX: Final = 65_536
"""Maximum sum of the weights in a group, so that no weight can exhaust memory. Not tuned."""
TIDY_CELLS: Final = 1024
"""Unused cells allowed beyond the number of used ones before the cells are tidied. Not tuned."""


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

    def __init__(self, actions: Sequence[model.ActionDef], where: str) -> None:
        self.where = where
        self.definitions = actions
        numbers = {action.name: number for number, action in enumerate(actions)}
        self._numbers: model.Named[int] = model.Named("action", numbers, where)

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
                raise model.UnknownNameError("parameter", name, names, f"{self.where}: action {action.name}")
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


@dataclass(slots=True)
class _Choice:
    """A group, or a member as a group of its own."""

    weights: dict[int, int]
    """Weight of each member."""
    place: int
    users: int = 0
    """Number of entries that refer to it."""


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

    def __init__(self, definition: model.ProfileDef, slot: model.ProfileSlot, actions: Actions) -> None:
        self.definition, self.slot, self.actions = definition, slot, actions
        self.name = definition.name
        self.where = f"action profile {self.name}"
        self.group_cells: list[int] = [0, 0]
        self.choices: list[int] = []
        self.rows: list[int] = []
        self.changed = True
        self._members: dict[int, _Member] = {}
        self._choices: dict[MemberRef | GroupRef, _Choice] = {}
        self._handles = Handles()
        self._free_places: list[int] = []
        self._tidy_at = TIDY_CELLS

    # --------------------------------------------------------------------------------------------------- members

    def add_member(self, member_id: int, action: Action) -> None:
        """Add a member; raises EntryError if it does not fit or already exists, or if the profile is full."""
        if member_id in self._members:
            raise model.DuplicateError(f"{self.where} has a member {member_id} already; use modify_member")
        if len(self._members) >= self.definition.size:
            raise model.FullError(f"{self.where} is full ({self.definition.size} members); delete some first")
        row = self.actions.row(action)
        member = self._members[member_id] = _Member([self._handles.take()], action)
        self._fill(member.handles[0], row)
        self._choose(self._new_choice(MemberRef(member_id)), {member_id: 1})

    def modify_member(self, member_id: int, action: Action) -> None:
        """Change a member's action; raises EntryError if it does not fit or there is no such member."""
        self.find(MemberRef(member_id))
        member, row = self._members[member_id], self.actions.row(action)
        for handle in member.handles:
            self._fill(handle, row)
        member.action = action

    def delete_member(self, member_id: int) -> None:
        """Remove a member; raises EntryError if an entry or a group uses it."""
        self.find(MemberRef(member_id))
        others = (key for key, each in self._choices.items() if member_id in each.weights)
        groups = [str(key.id) for key in others if isinstance(key, GroupRef)]
        if groups:
            raise InUseError(f"{self.where}: member {member_id} is in group {', '.join(groups)}; take it out first")
        self._drop(MemberRef(member_id))
        for handle in self._members.pop(member_id).handles:
            self._handles.give_back(handle)

    def members(self) -> dict[int, Action]:
        """Return every member's action."""
        return {number: member.action for number, member in self._members.items()}

    # ---------------------------------------------------------------------------------------------------- groups

    def add_group(self, group_id: int, members: Members = ()) -> None:
        """Add a group; raises EntryError if it already exists or a member does not."""
        if self.definition.algorithm is None:
            raise EntryError(f"{self.where} has no selector, so it cannot have groups")
        if GroupRef(group_id) in self._choices:
            raise model.DuplicateError(f"{self.where} has a group {group_id} already; use modify_group")
        weights = self._weights(group_id, members)
        self._regroup(self._new_choice(GroupRef(group_id)), weights)

    def modify_group(self, group_id: int, members: Members) -> None:
        """Replace a group's members; raises EntryError if entries use the group and it would become empty."""
        group = self.find(GroupRef(group_id))
        weights = self._weights(group_id, members)
        if not members and group.users:
            raise InUseError(f"{self.where}: group {group_id} is used by {group.users} entries; it needs a member")
        self._regroup(group, weights)

    def delete_group(self, group_id: int) -> None:
        """Remove a group; raises EntryError if an entry uses it."""
        self._trim(self._drop(GroupRef(group_id)).weights)

    def groups(self) -> dict[int, dict[int, int]]:
        """Return every group's members with their weights."""
        return {key.id: dict(each.weights) for key, each in self._choices.items() if isinstance(key, GroupRef)}

    def clear(self) -> None:
        """Remove all groups and members; raises EntryError if an entry uses one."""
        for number in self.groups():
            self.delete_group(number)
        for number in self.members():
            self.delete_member(number)

    # ----------------------------------------------------------------------------------------------- for entries

    def place(self, target: MemberRef | GroupRef) -> int:
        """Return the cell of a member or a group; raises EntryError if an entry cannot refer to it."""
        choice = self.find(target)
        if not choice.weights:
            raise InUseError(f"{self.where}: group {target.id} is empty; add a member before an entry uses it")
        return choice.place

    def find(self, target: MemberRef | GroupRef) -> _Choice:
        """Return a member or a group; raises EntryError if there is none."""
        if target not in self._choices:
            known = sorted(key.id for key in self._choices if type(key) is type(target))
            listed = ", ".join(map(str, known[:10])) or "none"
            raise model.MissingError(f"{self.where} has no {_NOUNS[type(target)]} {target.id}; it has {listed}")
        return self._choices[target]

    # --------------------------------------------------------------------------------------------------- storage

    def _weights(self, group_id: int, members: Members) -> dict[int, int]:
        """Return the weight of each member; raises EntryError for invalid members or weights."""
        if len(set(members)) != len(members):
            raise EntryError(f"{self.where}: group {group_id} names a member twice: {list(members)}")
        weights = dict(members) if isinstance(members, Mapping) else dict.fromkeys(members, 1)
        for number, weight in weights.items():
            self.find(MemberRef(number))
            if weight < 1:
                raise EntryError(f"{self.where}: group {group_id}: weight {weight} of member {number} is below 1")
        if sum(weights.values()) > GROUP_SIZE_MAX:
            raise model.FullError(f"{self.where}: the weights of group {group_id} add up to more than {GROUP_SIZE_MAX}")
        return weights

    def _regroup(self, group: _Choice, weights: dict[int, int]) -> None:
        """Replace a group's members; allocates and frees handles in BMv2's order."""
        before = group.weights
        for number in sorted(weights):
            member = self._members[number]
            while len(member.handles) < weights[number]:
                member.handles.append(self._handles.take())
                self._fill(member.handles[-1], self.actions.row(member.action))
        self._choose(group, weights)
        self._trim({*before, *weights})

    def _trim(self, numbers: Iterable[int]) -> None:
        """Free handles that no group needs any more."""
        for number in sorted(numbers):
            handles = self._members[number].handles
            if len(handles) > 1:
                needed = max(choice.weights.get(number, 1) for choice in self._choices.values())
                while len(handles) > needed:
                    self._handles.give_back(handles.pop())

    def _new_choice(self, target: MemberRef | GroupRef) -> _Choice:
        if not self._free_places:
            self._free_places.append(len(self.group_cells))
            self.group_cells += [0, 0]
        choice = self._choices[target] = _Choice({}, self._free_places.pop())
        return choice

    def _drop(self, target: MemberRef | GroupRef) -> _Choice:
        """Remove a member or a group; raises EntryError if an entry uses it."""
        choice, noun = self.find(target), _NOUNS[type(target)]
        if choice.users:
            raise InUseError(f"{self.where}: {noun} {target.id} is used by {choice.users} entries; change them first")
        self.group_cells[choice.place] = 0
        self._free_places.append(choice.place)
        self.changed = True
        return self._choices.pop(target)

    def _fill(self, handle: int, row: list[int]) -> None:
        put_row(self.rows, handle * self.slot.stride, self.slot.stride, row)
        self.changed = True

    def _choose(self, choice: _Choice, weights: dict[int, int]) -> None:
        """Set the members. The former cells stay unused until all are tidied."""
        choice.weights = weights
        self._point(choice)
        self.changed = True
        if len(self.choices) > self._tidy_at:
            self.choices.clear()
            for each in self._choices.values():
                self._point(each)
            self._tidy_at = 2 * len(self.choices) + TIDY_CELLS

    def _point(self, choice: _Choice) -> None:
        handles = (self._members[number].handles[:weight] for number, weight in choice.weights.items())
        chosen = [handle * self.slot.stride for handle in sorted(itertools.chain.from_iterable(handles))]
        self.group_cells[choice.place : choice.place + 2] = [len(chosen), len(self.choices)]
        self.choices += chosen


_NOUNS: Final = {MemberRef: "member", GroupRef: "group"}


# --------------------------------------------------------------------------------------------------------------- tables


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

    def __init__(self, definition: model.TableDef, slot: model.TableSlot, where: str) -> None:
        self._match, self._keys, self._where = definition.match, definition.keys, where
        self._by_name: model.Named[Key] = model.Named("field", {key.name: key for key in definition.keys}, where)
        self._shifts = {key.name: shift for key, shift in slot.shifts(definition)}

    def lookup(self) -> "ExactLookup | PrefixLookup | OrderedLookup":
        """Return an empty lookup structure for the table's kind of match."""
        if self._match == "exact":
            return ExactLookup()
        if self._match == "lpm":
            return PrefixLookup(sum(key.width for key in self._keys))
        # Position of each range field in the combined key, and its mask after shifting down.
        ranges = [(self._shifts[key.name], (1 << key.width) - 1) for key in self._keys if key.match == "range"]
        return OrderedLookup(ranges if self._match == "range" else None)

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
        given = self.named(match)
        for key in self._keys:
            shift = self._shifts[key.name]
            full = (1 << key.width) - 1
            item = given.get(key.name)
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
"""The multiplier of the hash in `probe` and `lookup_words`."""


# The lookup structures of tables. For plain text, each is a dictionary from a combined key to a place, the offset of a
# row: above 0, or 0 for a key without an entry. For compiled text, each encodes itself for a lookup function below. Of
# several patterns that match, the one with the lowest rank wins, then the lowest place.


class ExactLookup(dict[int, int]):
    """Lookup of exact keys."""

    def __missing__(self, key: int) -> int:
        return 0

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a key, which has no other entry."""
        self[pattern.value] = place

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a key."""
        del self[pattern.value]

    def encode(self) -> NDArray[np.int64]:
        """Return a hash table: its mask, then pairs of key and place."""
        return _hashed(self, 1)


class CachedLookup(dict[int, int], ABC):
    """A lookup that searches; the dictionary holds the results of searches."""

    def __missing__(self, key: int) -> int:
        if len(self) >= CACHE_KEYS:
            self.clear()
        self[key] = place = self.search(key)
        return place

    @abstractmethod
    def search(self, key: int) -> int:
        """Return the place of a combined key."""


class PrefixLookup(CachedLookup):
    """Longest-prefix lookup, with one hash table for each number of wildcard bits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self._by_shift: dict[int, dict[int, int]] = {}

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a prefix, which has no other entry."""
        shift = self._width - pattern.mask.bit_count()
        self._by_shift.setdefault(shift, {})[pattern.value >> shift] = place
        self._by_shift = dict(sorted(self._by_shift.items()))
        self.clear()

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a prefix."""
        shift = self._width - pattern.mask.bit_count()
        del self._by_shift[shift][pattern.value >> shift]
        if not self._by_shift[shift]:
            del self._by_shift[shift]
        self.clear()

    def encode(self) -> NDArray[np.int64]:
        """Return the number of lengths; wildcard bits, start and mask of the hash table of each; the hash tables."""
        head, tables = [len(self._by_shift)], []
        start = 1 + 3 * len(self._by_shift)
        words = 1 if self._width <= NUMBER_BITS else -(-self._width // SPLIT_BITS)
        for shift, items in self._by_shift.items():
            # The words of a wide key keep their wildcard bits, as zeros.
            cells = _hashed(items if words == 1 else {key << shift: place for key, place in items.items()}, words)
            head += [shift, start, int(cells[0])]
            tables.append(cells[1:])
            start += len(cells) - 1
        return np.concatenate([np.array(head, np.int64), *tables])

    def search(self, key: int) -> int:
        """Return the place of a combined key."""
        for shift, prefixes in self._by_shift.items():
            place = prefixes.get(key >> shift)
            if place is not None:
                return place
        return 0


class OrderedLookup(CachedLookup):
    """Lookup of patterns with masks and ranges; the first match in order of rank and place wins.

    Parameters
    ----------
    ranges
        Positions and masks of the range fields in the combined key; None for a table without any, whose array is
        shorter.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] | None) -> None:
        super().__init__()
        self._ranges = ranges
        self._ordered: list[tuple[int, int, KeyPattern]] = []

    def add(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Add a pattern."""
        bisect.insort(self._ordered, (rank, place, pattern))
        self.clear()

    def remove(self, pattern: KeyPattern, rank: int, place: int) -> None:
        """Remove a pattern."""
        del self._ordered[bisect.bisect_left(self._ordered, (rank, place, pattern))]
        self.clear()

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

    def search(self, key: int) -> int:
        """Return the place of a combined key."""
        return next((place for _, place, pattern in self._ordered if pattern.matches(key)), 0)


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


def lookup_words(index: Any, words: Any) -> int:
    """Look a wide key up, given as 32-bit words, in the array of `PrefixLookup.encode`; see `lookup_lpm`."""
    stride = len(words) + 1
    for i in range(index[0]):
        shift, start, mask = index[3 * i + 1], index[3 * i + 2], index[3 * i + 3]
        h = 0
        for j in range(len(words)):
            cut = min(max(shift - 32 * (len(words) - 1 - j), 0), 32)
            h = (h ^ (words[j] >> cut << cut)) * 0x9E3779B97F4A7C1
        place = (h >> 20) & mask
        while index[start + stride * place] >= 0:
            same = True
            for j in range(len(words)):
                cut = min(max(shift - 32 * (len(words) - 1 - j), 0), 32)
                if index[start + stride * place + j] != words[j] >> cut << cut:
                    same = False
                    break
            if same:
                return int(index[start + stride * place + len(words)])
            place = (place + 1) & mask
    return 0


def lookup_joined(index: dict[int, int], words: Sequence[int]) -> int:
    """Look a wide key up in a `PrefixLookup`, given as 32-bit words: `lookup_words` for plain text."""
    key = 0
    for word in words:
        key = key << 32 | word
    return index[key]


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


LOOKUPS: Final = (probe, lookup_exact, lookup_lpm, lookup_words, lookup_ternary, lookup_range)
"""The functions included in compiled text, callees first."""


def _hashed(items: Mapping[int, int], words: int) -> NDArray[np.int64]:
    """Return the mask of an open-addressing hash table and its rows: the words of a key, and its entry."""
    count = len(items)
    size = 4
    while size < 2 * count:
        size *= 2
    keys = np.empty((count, words), np.int64)
    for word in range(words):
        shift = 32 * (words - 1 - word)
        keys[:, word] = np.fromiter((key >> shift & 0xFFFFFFFF if words > 1 else key for key in items), np.int64, count)
    places = np.fromiter(items.values(), np.int64, count)
    cells = np.empty(1 + (words + 1) * size, np.int64)
    cells[0] = size - 1
    table = cells[1:].reshape(size, words + 1)
    table[:] = -1
    hashes = np.zeros(count, np.uint64)
    for word in range(words):
        hashes = (hashes ^ keys[:, word].astype(np.uint64)) * np.uint64(HASH_MULTIPLIER)
    slots = (hashes >> np.uint64(20)).astype(np.int64) & (size - 1)
    while len(keys):
        # The first key for a free slot gets it; all others try the next slot.
        wanted, first = np.unique(slots, return_index=True)
        settled = first[table[wanted, 0] < 0]
        table[slots[settled], :words] = keys[settled]
        table[slots[settled], words] = places[settled]
        left = np.ones(len(keys), np.bool_)
        left[settled] = False
        keys, places, slots = keys[left], places[left], (slots[left] + 1) & (size - 1)
    return cells


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
        self,
        definition: model.TableDef,
        slot: model.TableSlot,
        profile: ActionProfile | None,
        meters: MeterCells | None,
    ) -> None:
        self.definition, self.slot, self.profile, self.meters = definition, slot, profile, meters
        self.name = definition.name
        self.where = f"table {self.name}"
        self.actions = Actions(definition.actions, self.where)
        self.rows: list[int] = [0] * slot.stride
        self._fields = Fields(definition, slot, self.where)
        self.index = self._fields.lookup()
        self.changed = True
        self._prioritised = definition.match in ("ternary", "range")
        self._stored: dict[tuple[KeyPattern, int], TableEntry] = {}
        """The entries by pattern and rank."""
        self._handles = Handles()
        self.default: Target | None = None
        """The target on a miss; None for a table with an action profile and no default member."""
        self.reset_default()
        for entry in definition.entries:
            key = self._fields.pattern(entry.match), entry.priority
            self._add(key, replace(entry, priority=0), self._row(entry.target))

    # -------------------------------------------------------------------------------------------------- changing

    def insert(
        self, match: Match, target: Target, priority: int = 0, meter: model.MeterConfig | None = None, notes: Any = None
    ) -> TableEntry:
        """Add an entry and return it.

        Parameters
        ----------
        match
            A value for each field; an omitted field matches anything unless it is exact.
        target
            `Action`, or `MemberRef` or `GroupRef` for a table with an action profile.
        priority
            Above 0 for tables with ternary or range fields, where the highest wins; else 0.
        meter
            Configuration of the entry's direct meter.
        notes
            Kept with the entry.

        Raises
        ------
        EntryError
            The entry does not fit the table or already exists, or the table is full.
        """
        key = self._key(match, priority)
        if key in self._stored:
            raise model.DuplicateError(f"{self.where} has an entry for {_show(match)} already; use modify")
        if len(self._stored) >= self.definition.size:
            raise model.FullError(f"{self.where} is full ({self.definition.size} entries); delete some first")
        row = self._row(target)
        meters = None if meter is None else self._direct()
        entry = self._add(key, TableEntry(self.name, self._fields.named(match), target, priority, notes=notes), row)
        if meters is not None:
            meters[entry.handle] = meter
        return entry

    def modify(self, match: Match, target: Target, priority: int = 0, notes: Any = None) -> TableEntry:
        """Change an entry's target and notes, and return it; errors as `insert`, or if there is no such entry."""
        key = self._key(match, priority)
        before = self._at(key, match)
        row = self._row(target)
        entry = self._stored[key] = replace(before, target=target, notes=notes)
        self._put(self._place(entry), row, target, before.target)
        return entry

    def delete(self, match: Match, priority: int = 0) -> None:
        """Remove an entry; raises EntryError if there is no such entry."""
        key = self._key(match, priority)
        self._at(key, match)
        self._remove(key)

    def clear(self) -> None:
        """Remove all entries except constant ones."""
        if not self.definition.entries:
            for key in list(self._stored):
                self._remove(key)

    def get(self, match: Match, priority: int = 0) -> TableEntry | None:
        """Return an entry, or None; raises EntryError for a match that does not fit the table."""
        return self._stored.get((self._fields.pattern(match), self._rank(priority)))

    def find(self, match: Match, priority: int = 0) -> TableEntry:
        """Return an entry; raises EntryError if there is no such entry."""
        return self._at((self._fields.pattern(match), self._rank(priority)), match)

    def _at(self, key: tuple[KeyPattern, int], match: Match) -> TableEntry:
        if key not in self._stored:
            raise model.MissingError(f"{self.where} has no entry for {_show(match)}")
        return self._stored[key]

    def entries(self) -> list[TableEntry]:
        """Return all entries, in the order of their handles."""
        return sorted(self._stored.values(), key=lambda entry: entry.handle)

    def __len__(self) -> int:
        return len(self._stored)

    def set_default(self, target: Target) -> None:
        """Change the target on a miss; raises EntryError if it is constant or does not fit the table."""
        if self.definition.default_const:
            raise model.ConstantError(f"{self.where} has a constant default action")
        if isinstance(target, GroupRef):
            raise EntryError(f"{self.where}: a group cannot be the default; use one of its members")
        self._put(0, self._row(target), target, self.default)
        self.default = target

    def reset_default(self) -> None:
        """Restore the program's default action."""
        if self.profile is not None:
            target, row = None, [0]
        else:
            target = self.definition.default
            row = [-1] if target is None else self._row(target)
        self._put(0, row, target, self.default)
        self.default = target

    def set_meter(self, match: Match, config: model.MeterConfig | None, priority: int = 0) -> None:
        """Configure the direct meter of an entry; None removes its configuration."""
        self._direct()[self.find(match, priority).handle] = config

    def get_meter(self, match: Match, priority: int = 0) -> model.MeterConfig | None:
        """Return the configuration of an entry's direct meter."""
        return self._direct()[self.find(match, priority).handle]

    def _direct(self) -> MeterCells:
        if self.meters is None:
            raise EntryError(f"{self.where} has no direct meter")
        return self.meters

    # ------------------------------------------------------------------------------------------------- the match

    def _key(self, match: Match, priority: int) -> tuple[KeyPattern, int]:
        """Return the pattern and rank of an entry; raises EntryError if the table's entries cannot be changed."""
        if self.definition.entries:
            raise model.ConstantError(f"{self.where} has constant entries; they cannot be changed")
        if not self.definition.keys:
            raise EntryError(f"{self.where} has no key, so no entries; use set_default")
        return self._fields.pattern(match), self._rank(priority)

    def _rank(self, priority: int) -> int:
        if self._prioritised and priority <= 0:
            raise EntryError(f"{self.where} needs a priority above 0 for each entry (the highest wins)")
        if not self._prioritised and priority:
            raise EntryError(f"{self.where} takes no priority: its entries overlap only by prefix length; use 0")
        return -priority

    # --------------------------------------------------------------------------------------------------- storage

    def _row(self, target: Target) -> list[int]:
        """Return the row of a target; raises EntryError if it does not fit the table."""
        if self.profile is None:
            if not isinstance(target, Action):
                raise EntryError(f"{self.where} has no action profile; give an Action, not {target}")
            return self.actions.row(target)
        if isinstance(target, Action):
            raise EntryError(f"{self.where} has an action profile; give a MemberRef or a GroupRef, not {target}")
        return [self.profile.place(target)]

    def _place(self, entry: TableEntry) -> int:
        return (entry.handle + 1) * self.slot.stride

    def _use(self, target: Target | None, count: int) -> None:
        """Count the entries that refer to a member or a group."""
        if self.profile is not None and isinstance(target, MemberRef | GroupRef):
            self.profile.find(target).users += count

    def _put(self, place: int, row: list[int], target: Target | None, before: Target | None) -> None:
        """Write a target's row at ``place``, and count the uses of it and of the target ``before``."""
        self._use(target, 1)
        self._use(before, -1)
        put_row(self.rows, place, self.slot.stride, row)
        self.changed = True

    def _add(self, key: tuple[KeyPattern, int], entry: TableEntry, row: list[int]) -> TableEntry:
        entry = self._stored[key] = replace(entry, handle=self._handles.take())
        self._put(self._place(entry), row, entry.target, None)
        self.index.add(*key, self._place(entry))
        return entry

    def _remove(self, key: tuple[KeyPattern, int]) -> None:
        entry = self._stored.pop(key)
        self.index.remove(*key, self._place(entry))
        if self.meters is not None:
            self.meters[entry.handle] = None
        self._use(entry.target, -1)
        self._handles.give_back(entry.handle)
        self.changed = True


def _show(match: Match) -> str:
    return ", ".join(f"{name}={value}" for name, value in match.items())
