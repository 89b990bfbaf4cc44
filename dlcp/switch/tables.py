# SPDX-License-Identifier: Apache-2.0
"""Tables as the control plane sees them, and the rows that the running program reads.

An entry has a handle, the lowest that is free, as in BMv2: among ternary entries of one priority the lowest handle
wins. Its row stands at ``(handle + 1) * stride`` in the rows; see `dlcp.switch.codegen.layout`.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.cells import MeterCells, MeterConfig
from dlcp.switch.codegen.layout import TableSlot
from dlcp.switch.errors import ConstantError, DuplicateError, EntryError, FullError, MissingError
from dlcp.switch.lookups import make_lookup
from dlcp.switch.model import TableDef
from dlcp.switch.patterns import Fields, Match, Pattern
from dlcp.switch.profiles import Action, ActionProfile, Actions, Group, Target


class Entry(NamedTuple):
    """An entry as it was inserted."""

    match: dict[str, int | tuple[int, int]]
    target: Target
    priority: int


@dataclass(slots=True)
class _Stored:
    handle: int
    pattern: Pattern
    rank: int
    entry: Entry
    key: tuple[Pattern, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.pattern, self.rank)


class Table:
    """A table of a program.

    Attributes
    ----------
    definition
        The table as the program defines it: keys with name, match kind and width, size.
    rows, index
        What plain generated text reads.
    changed
        Set by every change; the compiled flavour clears it when it has made its arrays anew.
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
        self._stored: dict[tuple[Pattern, int], _Stored] = {}
        self._free: list[int] = []
        self._next_handle = 0
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
            A value for each field; fields that are not exact match anything when left out.
        target
            `Action`, or `Member` or `Group` for a table with an action profile.
        priority
            Above 0 for tables with ternary or range fields, where the greatest wins; else 0.

        Raises
        ------
        EntryError
            If the entry does not fit the table, is there already, or the table is full.
        """
        self._mutable()
        pattern, rank = self._fields.pattern(match), self._rank(priority)
        if (pattern, rank) in self._stored:
            raise DuplicateError(f"{self.where} has an entry for {_show(match)} already; use modify")
        if len(self._stored) >= self.definition.size:
            raise FullError(f"{self.where} is full ({self.definition.size} entries); delete some first")
        return self._add(pattern, rank, Entry(self._fields.named(match), self._checked(target), priority))

    def modify(self, match: Match, target: Target, priority: int = 0) -> int:
        """Give an entry another target and return its handle; errors as `insert`, and if there is no such entry."""
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
        """Remove an entry and return the handle it had; raises EntryError if there is no such entry."""
        self._mutable()
        stored = self._find(match, priority)
        self._remove(stored)
        return stored.handle

    def clear(self) -> None:
        """Remove all entries but those that the program brings."""
        if not self.definition.entries:
            for stored in list(self._stored.values()):
                self._remove(stored)

    def get(self, match: Match, priority: int = 0) -> Entry | None:
        """Return an entry, or None; raises EntryError for a match that cannot be in the table."""
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
        """What runs on a miss; None for a table with an action profile and no default member."""
        return self._default

    def set_default(self, target: Target) -> None:
        """Change what runs on a miss; raises EntryError if the program made it constant."""
        if self.definition.default_const:
            raise ConstantError(f"{self.where} has a constant default action")
        if isinstance(target, Group):
            raise EntryError(f"{self.where}: a group cannot be the default; use one of its members")
        target = self._checked(target)
        self._hold(target)
        self._release(self._default)
        self._default = target
        self._fill(0, target)
        self.changed = True

    def reset_default(self) -> None:
        """Go back to the default of the program."""
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
        """Configure the direct meter of an entry, or take its configuration away."""
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
            raise EntryError(f"{self.where} needs a priority above 0 for each entry (the greatest wins)")
        if not self._prioritised and priority:
            raise EntryError(f"{self.where} takes no priority; its entries cannot overlap but by prefix length")
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
            raise EntryError(f"{self.where} has an action profile; give a Member or a Group, not {target}")
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
        """Write the row at ``place``."""
        row = self.actions.row(target) if isinstance(target, Action) else []
        if self.profile is not None and not isinstance(target, Action):
            row = [self.profile.place(target)]
        end = place + self.slot.stride
        if len(self.rows) < end:
            self.rows.extend([0] * (end - len(self.rows)))
        self.rows[place : place + len(row)] = row

    def _add(self, pattern: Pattern, rank: int, entry: Entry) -> int:
        if self._free:
            handle = heapq.heappop(self._free)
        else:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
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
        heapq.heappush(self._free, stored.handle)
        self.changed = True

    def encode(self) -> NDArray[np.int64]:
        """Return the lookup structure as the array that `dlcp.switch.kernels` looks up in."""
        return self._lookup.encode()


def _show(match: Match) -> str:
    return ", ".join(f"{name}={value}" for name, value in match.items())
