# SPDX-License-Identifier: Apache-2.0
"""The entities that controllers write and read: table entries, action profiles, counters, meters and registers.

A kind of entity has two methods. ``change`` checks an update and returns the `Change` that makes it; ``read`` yields
the entities that a request selects. Both raise Refused for what is wrong at first sight.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from finsy.proto import p4r, rpc_code

from dlcp.switch.executor.cells import Counter, MeterCells, MeterConfig, Register
from dlcp.switch.executor.profiles import Action, GroupRef, MemberRef, Target
from dlcp.switch.executor.tables import Entry, Match
from dlcp.switch.p4runtime.messages import (
    Refused,
    encode,
    find,
    read_action,
    read_match,
    read_meter,
    write_action,
    write_match,
    write_meter,
)
from dlcp.switch.p4runtime.schema import ProfileInfo, TableInfo

_T = TypeVar("_T")
Change: TypeAlias = Callable[[], object]
"""What the packet loop calls to make one change; it raises EntryError if the change cannot be made."""

INSERT: Final = p4r.Update.INSERT
MODIFY: Final = p4r.Update.MODIFY
DELETE: Final = p4r.Update.DELETE


class Ask(Protocol):
    """Has the packet loop call a function, and returns what that returned."""

    def __call__(self, function: Callable[[], _T], /) -> _T:
        """Raise what the function raises."""


# ----------------------------------------------------------------------------------------------------------- tables


class Notes(NamedTuple):
    """What a controller wants back with an entry; the switch ignores it."""

    controller_metadata: int = 0
    metadata: bytes = b""


_NONE: Final = Notes()
_DEFAULT: Final = -1
"""The key of the default entry's notes; other entries have handles from 0 up."""


class TableEntries:
    """The entries of one table, as ``table_entry``, and their direct meters, as ``direct_meter_entry``."""

    def __init__(self, info: TableInfo) -> None:
        self.info, self.table, self.name = info, info.table, info.name
        self.where = f"table {info.name}"
        self._actions = {number: use.info for number, use in info.actions.items()}
        self._by_name = {use.info.name: use.info for use in info.actions.values()}
        self._fields = tuple(info.fields.values())
        self._notes: dict[int, Notes] = {}

    def change(self, kind: int, entry: p4r.TableEntry) -> Change:
        """Return the change that an update asks for."""
        if entry.is_default_action:
            return self._change_default(kind, entry)
        match = read_match(self.info.fields, entry.match, self.where)
        priority = entry.priority
        if kind == DELETE:
            return lambda: self._notes.pop(self.table.delete(match, priority), None)
        self._check(entry)
        target = self._target(entry)
        meter = None
        if entry.HasField("meter_config"):
            self._check_meter()
            meter = read_meter(entry.meter_config, self.where)
        notes = Notes(entry.controller_metadata, entry.metadata)
        if kind == INSERT:
            return lambda: self._keep(self.table.insert(match, target, priority), meter, notes)
        return lambda: self._keep(self.table.modify(match, target, priority), meter, notes)

    def _keep(self, handle: int, meter: MeterConfig | None, notes: Notes) -> None:
        """Keep what belongs to an entry. Modifying an entry without a meter removes its meter."""
        if self.table.meters is not None:
            self.table.meters[handle] = meter
        if notes != _NONE:
            self._notes[handle] = notes
        else:
            self._notes.pop(handle, None)

    def _change_default(self, kind: int, entry: p4r.TableEntry) -> Change:
        self._check(entry)
        self._check_default(entry)
        if kind != MODIFY:
            raise Refused(f"{self.where}: the default entry is always there; use MODIFY")
        if self.table.profile is not None:
            raise Refused(f"{self.where} has an action profile; its default cannot be changed")
        if self.info.const_default:
            raise Refused(f"{self.where} has a constant default action", rpc_code.PERMISSION_DENIED)
        if entry.HasField("meter_config"):
            raise Refused(f"{self.where}: the default entry has no meter", rpc_code.UNIMPLEMENTED)
        target = self._target(entry) if entry.HasField("action") else None
        notes = Notes(entry.controller_metadata, entry.metadata)

        def change() -> None:
            if target is None:
                self.table.reset_default()
                self._notes.pop(_DEFAULT, None)
            else:
                self.table.set_default(target)
                self._notes[_DEFAULT] = notes

        return change

    def _check(self, entry: p4r.TableEntry) -> None:
        """Refuse what the switch does not do."""
        if entry.idle_timeout_ns or entry.HasField("time_since_last_hit"):
            raise Refused(f"{self.where}: its entries do not time out")
        if entry.HasField("counter_data"):
            raise Refused(f"{self.where} has no direct counter")
        if entry.HasField("meter_counter_data"):
            raise Refused(f"{self.where}: meters do not count by colour", rpc_code.UNIMPLEMENTED)

    def _check_default(self, entry: p4r.TableEntry) -> None:
        if entry.match or entry.priority:
            raise Refused(f"{self.where}: the default entry has neither match nor priority")

    def _check_meter(self) -> None:
        if self.table.meters is None:
            raise Refused(f"{self.where} has no direct meter")

    def _target(self, entry: p4r.TableEntry) -> Target:
        kind = entry.action.WhichOneof("type")
        if kind is None:
            raise Refused(f"{self.where}: no action is given")
        if (kind == "action") != (self.table.profile is None):
            wanted = "an action" if self.table.profile is None else "a member or a group of its action profile"
            raise Refused(f"{self.where} takes {wanted}")
        if kind == "action_profile_member_id":
            return MemberRef(entry.action.action_profile_member_id)
        if kind == "action_profile_group_id":
            return GroupRef(entry.action.action_profile_group_id)
        if kind == "action_profile_action_set":
            raise Refused(f"{self.where}: write members and groups, not action sets", rpc_code.UNIMPLEMENTED)
        action = read_action(self._actions, entry.action.action, self.where)
        use = self.info.actions[entry.action.action.action_id]
        if not (use.as_default if entry.is_default_action else use.in_entries):
            role = "the default" if entry.is_default_action else "an entry"
            raise Refused(f"{self.where}: {action.name} cannot be {role}", rpc_code.PERMISSION_DENIED)
        return action

    def read(self, wanted: p4r.TableEntry) -> Iterator[p4r.Entity]:
        """Return the entries that a request selects; every field that it sets narrows the choice."""
        if wanted.HasField("time_since_last_hit"):
            raise Refused(f"{self.where}: its entries do not time out")
        if wanted.is_default_action:
            self._check_default(wanted)
            yield self._default_entity()
            return
        action_id = wanted.action.action.action_id
        for handle, entry in self._selected(wanted):
            notes = self._notes.get(handle, _NONE)
            if (
                (wanted.priority and entry.priority != wanted.priority)
                or (wanted.controller_metadata and notes.controller_metadata != wanted.controller_metadata)
                or (wanted.metadata and notes.metadata != wanted.metadata)
                or (action_id and not (isinstance(entry.target, Action) and self._info(entry.target).id == action_id))
            ):
                continue
            entity = p4r.Entity()
            message = entity.table_entry
            self._write_key(entry, message)
            self._write_target(entry.target, message.action)
            if notes is not _NONE:
                message.controller_metadata, message.metadata = notes
            if self.table.definition.entries:
                message.is_const = True
            if wanted.HasField("meter_config") and self.table.meters is not None:
                write_meter(self.table.meters[handle], message.meter_config)
            yield entity

    def change_meter(self, kind: int, item: p4r.DirectMeterEntry) -> Change:
        """Return the change that configures the direct meter of an entry."""
        if item.HasField("counter_data"):
            raise Refused(f"{self.where}: meters do not count by colour", rpc_code.UNIMPLEMENTED)
        config = read_meter(item.config, self.where) if item.HasField("config") else None
        match, priority = self._metered(item.table_entry), item.table_entry.priority
        return lambda: self.table.set_meter(match, config, priority)

    def read_meters(self, wanted: p4r.TableEntry) -> Iterator[p4r.Entity]:
        """Return the direct meters of the entries that a request selects; EntryError if there is no such entry."""
        self._check_meter()
        assert self.table.meters is not None
        if wanted.match:
            match = self._metered(wanted)
            chosen = {self.table.handle(match, wanted.priority): Entry(dict(match), Action(""), wanted.priority)}
        else:
            chosen = self.table.by_handle()
        for handle, entry in chosen.items():
            entity = p4r.Entity()
            self._write_key(entry, entity.direct_meter_entry.table_entry)
            write_meter(self.table.meters[handle], entity.direct_meter_entry.config)
            yield entity

    def _selected(self, wanted: p4r.TableEntry) -> Iterator[tuple[int, Entry]]:
        if not wanted.match:
            yield from self.table.by_handle().items()
            return
        match = read_match(self.info.fields, wanted.match, self.where)
        entry = self.table.get(match, wanted.priority)
        if entry is not None:
            yield self.table.handle(match, wanted.priority), entry

    def _metered(self, entry: p4r.TableEntry) -> Match:
        """Return the match of an entry whose direct meter a request names."""
        self._check_meter()
        if entry.is_default_action:
            raise Refused(f"{self.where}: the default entry has no meter", rpc_code.UNIMPLEMENTED)
        return read_match(self.info.fields, entry.match, self.where)

    def _default_entity(self) -> p4r.Entity:
        entity = p4r.Entity()
        message = entity.table_entry
        message.table_id, message.is_default_action = self.info.id, True
        if self.table.default is not None:
            self._write_target(self.table.default, message.action)
        message.controller_metadata, message.metadata = self._notes.get(_DEFAULT, _NONE)
        return entity

    def _write_key(self, entry: Entry, message: p4r.TableEntry) -> None:
        message.table_id = self.info.id
        if entry.priority:
            message.priority = entry.priority
        write_match(self._fields, entry.match, message)

    def _write_target(self, target: Target, message: p4r.TableAction) -> None:
        if isinstance(target, MemberRef):
            message.action_profile_member_id = target.id
        elif isinstance(target, GroupRef):
            message.action_profile_group_id = target.id
        else:
            write_action(self._info(target), target, message.action)

    def _info(self, action: Action) -> Any:
        return self._by_name[self.table.actions.full_name(action.name)]


class Tables:
    """The entries of all tables, with their direct meters and, as ``direct_counter_entry``, none of the counters."""

    def __init__(self, infos: Mapping[int, TableInfo]) -> None:
        self._tables = {number: TableEntries(info) for number, info in infos.items()}

    def change(self, kind: int, entry: p4r.TableEntry) -> Change:
        """Return the change that an update asks for."""
        return self._table(entry).change(kind, entry)

    def read(self, wanted: p4r.TableEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the entries that a request selects."""
        if wanted.table_id:
            yield from self._table(wanted).read(wanted)
            return
        for number, table in self._tables.items():
            everything = p4r.TableEntry(table_id=number, is_default_action=wanted.is_default_action)
            if wanted.HasField("meter_config"):
                everything.meter_config.SetInParent()
            yield from table.read(everything)

    def change_meter(self, kind: int, item: p4r.DirectMeterEntry) -> Change:
        """Return the change that configures the direct meter of an entry."""
        if kind != MODIFY:
            raise Refused("direct meters come and go with their entries; use MODIFY")
        return self._table(item.table_entry).change_meter(kind, item)

    def read_meters(self, wanted: p4r.DirectMeterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the direct meters that a request selects; EntryError if there is no such entry."""
        if wanted.table_entry.table_id:
            yield from self._table(wanted.table_entry).read_meters(wanted.table_entry)
            return
        for number, table in self._tables.items():
            if table.table.meters is not None:
                yield from table.read_meters(p4r.TableEntry(table_id=number))

    def change_counter(self, kind: int, item: p4r.DirectCounterEntry) -> Change:
        """Refuse a direct counter; the built-in switch runs no program that has one."""
        raise Refused(f"{self._table(item.table_entry).where} has no direct counter")

    def read_counters(self, wanted: p4r.DirectCounterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return no direct counters for all tables; refuse those of one table."""
        if wanted.table_entry.table_id:
            self.change_counter(MODIFY, wanted)
        return iter(())

    def _table(self, entry: p4r.TableEntry) -> TableEntries:
        return find(self._tables, entry.table_id, "no table")


# -------------------------------------------------------------------------------------------------- action profiles


class ProfileEntries:
    """The members and groups of one action profile."""

    def __init__(self, info: ProfileInfo) -> None:
        self.info, self.profile, self.name = info, info.profile, info.name
        self.where = f"action profile {info.name}"
        self._by_name = {action.name: action for action in info.actions.values()}
        self._sizes: dict[int, int] = {}
        """The ``max_size`` that each group was made with."""

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for."""
        number = item.member_id
        if not number:
            raise Refused(f"{self.where}: a member has a number above 0")
        if kind == DELETE:
            return lambda: self.profile.delete_member(number)
        action = read_action(self.info.actions, item.action, self.where)
        if kind == INSERT:
            return lambda: self.profile.add_member(number, action)
        return lambda: self.profile.modify_member(number, action)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for."""
        number, size = item.group_id, item.max_size
        if not number:
            raise Refused(f"{self.where}: a group has a number above 0")
        if kind == DELETE:
            return lambda: self._delete_group(number)
        weights = self._weights(item)
        limit = self.info.group_size_max
        if kind == INSERT:
            if size < 0 or (limit and size > limit):
                raise Refused(f"{self.where}: max_size is {size}; give 0..{limit or 'any'}")
            return lambda: self._add_group(number, size, weights)
        return lambda: self._modify_group(number, size, weights)

    def _weights(self, item: p4r.ActionProfileGroup) -> dict[int, int]:
        weights: dict[int, int] = {}
        for member in item.members:
            if member.weight < 1:
                raise Refused(f"{self.where}: member {member.member_id} weighs {member.weight}")
            if member.member_id in weights:
                raise Refused(f"{self.where}: member {member.member_id} is named twice; give weights")
            if member.WhichOneof("watch_kind"):
                raise Refused(f"{self.where}: ports are not watched; leave watch_port out", rpc_code.UNIMPLEMENTED)
            weights[member.member_id] = member.weight
        return weights

    def _add_group(self, number: int, size: int, weights: dict[int, int]) -> None:
        self._check_room(number, size, weights)
        self.profile.add_group(number, weights)
        self._sizes[number] = size

    def _modify_group(self, number: int, size: int, weights: dict[int, int]) -> None:
        if not self.profile.has_group(number):
            raise Refused(f"{self.where} has no group {number}", rpc_code.NOT_FOUND)
        before = self._sizes.get(number, 0)
        # As in PI, a size that is left out means the present one.
        if size not in (0, before):
            raise Refused(f"{self.where}: max_size of group {number} cannot become {size}")
        self._check_room(number, before, weights)
        self.profile.modify_group(number, weights)

    def _delete_group(self, number: int) -> None:
        self.profile.delete_group(number)
        self._sizes.pop(number, None)

    def _check_room(self, number: int, size: int, weights: dict[int, int]) -> None:
        limit = size or self.info.group_size_max
        if limit and sum(weights.values()) > limit:
            message = f"{self.where}: group {number} holds {limit} members by weight at most"
            raise Refused(message, rpc_code.RESOURCE_EXHAUSTED)

    def read_members(self, wanted: p4r.ActionProfileMember) -> Iterator[p4r.Entity]:
        """Return one member, or all for number 0."""
        for number, action in self.profile.members().items():
            if wanted.member_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_member
                message.action_profile_id, message.member_id = self.info.id, number
                info = self._by_name[self.profile.actions.full_name(action.name)]
                write_action(info, action, message.action)
                yield entity

    def read_groups(self, wanted: p4r.ActionProfileGroup) -> Iterator[p4r.Entity]:
        """Return one group, or all for number 0."""
        for number, weights in self.profile.weights().items():
            if wanted.group_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_group
                message.action_profile_id, message.group_id = self.info.id, number
                message.max_size = self._sizes.get(number, 0)
                for member, weight in sorted(weights.items()):
                    message.members.add(member_id=member, weight=weight)
                yield entity


class Profiles:
    """All action profiles, as ``action_profile_member`` and ``action_profile_group``."""

    def __init__(self, infos: Mapping[int, ProfileInfo]) -> None:
        self._profiles = {number: ProfileEntries(info) for number, info in infos.items()}

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for."""
        return self._profile(item.action_profile_id).change_member(kind, item)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for."""
        return self._profile(item.action_profile_id).change_group(kind, item)

    def read_members(self, wanted: p4r.ActionProfileMember, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the members that a request selects."""
        for profile in self._selected(wanted.action_profile_id):
            yield from profile.read_members(wanted)

    def read_groups(self, wanted: p4r.ActionProfileGroup, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the groups that a request selects."""
        for profile in self._selected(wanted.action_profile_id):
            yield from profile.read_groups(wanted)

    def _selected(self, number: int) -> Iterable[ProfileEntries]:
        return [self._profile(number)] if number else self._profiles.values()

    def _profile(self, number: int) -> ProfileEntries:
        return find(self._profiles, number, "no action profile")


# ------------------------------------------------------------------------------------------------------------ cells


ArrayT = TypeVar("ArrayT", bound=Counter | MeterCells | Register)


class Cells(ABC, Generic[ArrayT]):
    """Counter, meter or register arrays, whose cells have numbers; an entity names one cell, or all without an index.

    Parameters
    ----------
    kind
        ``counter``, ``meter`` or ``register``: the beginning of the names in P4Runtime's messages.
    """

    def __init__(self, kind: str, arrays: Mapping[int, ArrayT]) -> None:
        self._kind, self._arrays = kind, arrays

    @abstractmethod
    def change(self, kind: int, item: Any) -> Change:
        """Return the change that sets the cells."""

    @abstractmethod
    def fill(self, message: Any, value: Any) -> None:
        """Put the value of a cell into a message."""

    def read(self, wanted: Any, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, those of an array all as they were at one moment."""
        number = self._id(wanted)
        for identity in [number] if number else self._arrays:
            array = self._array(identity)
            index = _index(wanted, array)
            # The packet loop copies them between two bursts, so no packet is counted in one cell and not in another.
            cells: Iterable[tuple[int, Any]]
            if index is None:
                values: Any = ask(array.values)
                cells = enumerate(values if isinstance(values, list) else values.tolist())
            else:
                cells = [(index, ask(partial(array.__getitem__, index)))]
            for cell, value in cells:
                entity = p4r.Entity()
                message = getattr(entity, f"{self._kind}_entry")
                setattr(message, f"{self._kind}_id", identity)
                message.index.index = cell
                self.fill(message, value)
                yield entity

    def _id(self, item: Any) -> int:
        return int(getattr(item, f"{self._kind}_id"))

    def _array(self, number: int) -> ArrayT:
        return find(self._arrays, number, f"no {self._kind}")

    def _changed(self, kind: int, item: Any) -> ArrayT:
        """Return the array that an update names."""
        array = self._array(self._id(item))
        if kind != MODIFY:
            raise Refused(f"the cells of {array.name} are always there; use MODIFY")
        return array


class Counters(Cells[Counter]):
    """Counter arrays. Each cell counts packets and bytes, whatever p4info says, as in BMv2."""

    def change(self, kind: int, item: p4r.CounterEntry) -> Change:
        """Return the change that sets one cell or all."""
        counter = self._changed(kind, item)
        count = item.data.packet_count, item.data.byte_count
        if min(count) < 0:
            raise Refused(f"counter {counter.name} counts from 0 up; got {count[0]}, {count[1]}")
        index = _index(item, counter)
        if not item.HasField("data"):
            return lambda: None
        return partial(counter.fill, *count) if index is None else partial(counter.__setitem__, index, count)

    def fill(self, message: p4r.CounterEntry, value: tuple[int, int]) -> None:
        """Put the count of a cell into a message."""
        message.data.packet_count, message.data.byte_count = value


class Meters(Cells[MeterCells]):
    """Meter arrays."""

    def change(self, kind: int, item: p4r.MeterEntry) -> Change:
        """Return the change that configures one meter or all."""
        meters = self._changed(kind, item)
        if item.HasField("counter_data"):
            raise Refused(f"meter {meters.name} does not count by colour", rpc_code.UNIMPLEMENTED)
        config = read_meter(item.config, f"meter {meters.name}") if item.HasField("config") else None
        index = _index(item, meters)

        def change() -> None:
            for cell in range(len(meters)) if index is None else (index,):
                meters[cell] = config

        return change

    def fill(self, message: p4r.MeterEntry, value: MeterConfig | None) -> None:
        """Put the configuration of a meter into a message."""
        write_meter(value, message.config)


class Registers(Cells[Register]):
    """Register arrays. They can only be read: BMv2 refuses writes too, and the data path owns the cells."""

    def change(self, kind: int, item: p4r.RegisterEntry) -> Change:
        """Refuse to write, as BMv2 does."""
        name = self._array(self._id(item)).name
        raise Refused(f"register {name} cannot be written over P4Runtime", rpc_code.UNIMPLEMENTED)

    def fill(self, message: p4r.RegisterEntry, value: int) -> None:
        """Put the value of a cell into a message."""
        message.data.bitstring = encode(value)


def _index(item: Any, array: Counter | MeterCells | Register) -> int | None:
    """Return which cell an entity names; None for all."""
    if not item.HasField("index"):
        return None
    index = int(item.index.index)
    if index < 0:
        raise Refused(f"{array.name} has no cell {index}; cells are numbered from 0")
    if index >= len(array):
        raise Refused(f"{array.name} has no cell {index}; the last is {len(array) - 1}", rpc_code.OUT_OF_RANGE)
    return index
