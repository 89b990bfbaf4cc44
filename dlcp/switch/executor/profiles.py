# SPDX-License-Identifier: Apache-2.0
"""Actions with arguments, and action profiles: members and groups that table entries refer to."""

import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from dlcp.switch.executor.model import (
    ActionDef,
    DuplicateError,
    EntryError,
    FullError,
    InUseError,
    MissingError,
    Named,
    ProfileDef,
    ProfileSlot,
    UnknownNameError,
)


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
