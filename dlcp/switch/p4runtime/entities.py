# SPDX-License-Identifier: Apache-2.0
"""The entities that controllers write and read: table entries, action profiles, counters, meters and registers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from finsy.proto import p4r

from dlcp.switch.executor.cells import Counter, MeterCells, MeterConfig, Register
from dlcp.switch.executor.profiles import Action, GroupRef, MemberRef, Target
from dlcp.switch.executor.tables import Entry, Match
from dlcp.switch.p4runtime.messages import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    OUT_OF_RANGE,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    Refused,
    encode,
    read_action,
    read_config,
    read_match,
    write_action,
    write_config,
    write_match,
)
from dlcp.switch.p4runtime.schema import ProfileInfo, Schema, TableInfo

Change: TypeAlias = Callable[[], object]
"""What the packet loop calls to make one change; it raises EntryError if the change cannot be made."""

INSERT: Final = p4r.Update.INSERT
MODIFY: Final = p4r.Update.MODIFY
DELETE: Final = p4r.Update.DELETE


class Notes(NamedTuple):
    """What a controller wants back with an entry and the switch does not look at."""

    controller_metadata: int = 0
    metadata: bytes = b""


_NONE: Final = Notes()
_DEFAULT: Final = -1
"""Stands for the default entry where others have a handle."""


class TableEntries:
    """The entries of one table."""

    def __init__(self, info: TableInfo) -> None:
        self.info, self.table = info, info.table
        self.where = f"table {info.name}"
        self._actions = {number: use.info for number, use in info.actions.items()}
        self._by_name = {use.info.name: use.info for use in info.actions.values()}
        self._fields = tuple(info.fields.values())
        self._notes: dict[int, Notes] = {}

    # --------------------------------------------------------------------------------------------------- writing

    def change(self, kind: int, entry: p4r.TableEntry) -> Change:
        """Return the change that an update asks for; raises Refused for what can be seen to be wrong already."""
        if entry.is_default_action:
            return self._change_default(kind, entry)
        match = read_match(self.info.fields, entry.match, self.where)
        priority = entry.priority
        if kind == DELETE:
            return lambda: self._delete(match, priority)
        self._check(entry)
        target = self._target(entry)
        meter = self._meter(entry)
        notes = Notes(entry.controller_metadata, entry.metadata)
        if kind == INSERT:
            return lambda: self._store(self.table.insert(match, target, priority), meter, notes)
        return lambda: self._store(self.table.modify(match, target, priority), meter, notes)

    def change_meter(self, entry: p4r.TableEntry, config: MeterConfig | None) -> Change:
        """Return the change that configures the direct meter of an entry."""
        match = self._existing(entry)
        return lambda: self.table.set_meter(match, config, entry.priority)

    def _store(self, handle: int, meter: MeterConfig | None, notes: Notes) -> None:
        """Keep what goes with an entry. A modified entry has no meter unless it is given again."""
        if self.table.meters is not None:
            self.table.meters[handle] = meter
        if notes != _NONE:
            self._notes[handle] = notes
        else:
            self._notes.pop(handle, None)

    def _delete(self, match: Match, priority: int) -> None:
        self._notes.pop(self.table.delete(match, priority), None)

    def _change_default(self, kind: int, entry: p4r.TableEntry) -> Change:
        self._check(entry)
        if entry.match or entry.priority:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: the default entry has neither match nor priority")
        if kind != MODIFY:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: the default entry is always there; use MODIFY")
        if self.table.profile is not None:
            raise Refused(INVALID_ARGUMENT, f"{self.where} has an action profile; its default cannot be changed")
        if self.info.const_default:
            raise Refused(PERMISSION_DENIED, f"{self.where} has a constant default action")
        if entry.HasField("meter_config"):
            raise Refused(UNIMPLEMENTED, f"{self.where}: the default entry has no meter")
        if not entry.HasField("action"):
            return self._reset_default
        target = self._target(entry)
        notes = Notes(entry.controller_metadata, entry.metadata)

        def change() -> None:
            self.table.set_default(target)
            self._notes[_DEFAULT] = notes

        return change

    def _reset_default(self) -> None:
        self.table.reset_default()
        self._notes.pop(_DEFAULT, None)

    def _check(self, entry: p4r.TableEntry) -> None:
        """Refuse what the switch does not do."""
        if entry.idle_timeout_ns or entry.HasField("time_since_last_hit"):
            raise Refused(INVALID_ARGUMENT, f"{self.where}: its entries do not time out")
        if entry.HasField("counter_data"):
            raise Refused(INVALID_ARGUMENT, f"{self.where} has no direct counter")
        if entry.HasField("meter_counter_data"):
            raise Refused(UNIMPLEMENTED, f"{self.where}: meters do not count by colour")

    def _meter(self, entry: p4r.TableEntry) -> MeterConfig | None:
        if not entry.HasField("meter_config"):
            return None
        if self.table.meters is None:
            raise Refused(INVALID_ARGUMENT, f"{self.where} has no direct meter")
        return read_config(entry.meter_config, self.where)

    def _target(self, entry: p4r.TableEntry) -> Target:
        kind = entry.action.WhichOneof("type")
        if kind is None:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: no action is given")
        if (kind == "action") != (self.table.profile is None):
            wanted = "an action" if self.table.profile is None else "a member or a group of its action profile"
            raise Refused(INVALID_ARGUMENT, f"{self.where} takes {wanted}")
        if kind == "action_profile_member_id":
            return MemberRef(entry.action.action_profile_member_id)
        if kind == "action_profile_group_id":
            return GroupRef(entry.action.action_profile_group_id)
        if kind == "action_profile_action_set":
            raise Refused(UNIMPLEMENTED, f"{self.where}: write members and groups, not action sets")
        action = read_action(self._actions, entry.action.action, self.where)
        use = self.info.actions[entry.action.action.action_id]
        if not (use.as_default if entry.is_default_action else use.in_entries):
            place = "the default" if entry.is_default_action else "an entry"
            raise Refused(PERMISSION_DENIED, f"{self.where}: {action.name} cannot be {place}")
        return action

    # --------------------------------------------------------------------------------------------------- reading

    def read(self, wanted: p4r.TableEntry) -> Iterator[p4r.Entity]:
        """Return the entries that a request selects; every field of it that is set narrows the choice."""
        if wanted.HasField("time_since_last_hit"):
            raise Refused(INVALID_ARGUMENT, f"{self.where}: its entries do not time out")
        if wanted.is_default_action:
            if wanted.match or wanted.priority:
                raise Refused(INVALID_ARGUMENT, f"{self.where}: the default entry has neither match nor priority")
            yield self._default_entity()
            return
        action_id = wanted.action.action.action_id
        for handle, entry in self._selected(wanted):
            notes = self._notes.get(handle, _NONE)
            if (
                (wanted.priority and entry.priority != wanted.priority)
                or (wanted.controller_metadata and notes.controller_metadata != wanted.controller_metadata)
                or (wanted.metadata and notes.metadata != wanted.metadata)
                or (action_id and not (isinstance(entry.target, Action) and self._id(entry.target) == action_id))
            ):
                continue
            entity = p4r.Entity()
            message = entity.table_entry
            self._fill(message, entry, notes)
            if wanted.HasField("meter_config") and self.table.meters is not None:
                config = self.table.meters[handle]
                if config is not None:
                    write_config(config, message.meter_config)
            yield entity

    def read_meters(self, wanted: p4r.TableEntry) -> Iterator[p4r.Entity]:
        """Return the direct meters of the entries that a request selects."""
        if self.table.meters is None:
            raise Refused(INVALID_ARGUMENT, f"{self.where} has no direct meter")
        if wanted.match:
            match = self._existing(wanted)
            chosen = {self.table.handle(match, wanted.priority): Entry(dict(match), Action(""), wanted.priority)}
        else:
            chosen = self.table.by_handle()
        for handle, entry in chosen.items():
            entity = p4r.Entity()
            message = entity.direct_meter_entry
            message.table_entry.table_id = self.info.id
            message.table_entry.priority = entry.priority
            write_match(self._fields, entry.match, message.table_entry)
            config = self.table.meters[handle]
            if config is not None:
                write_config(config, message.config)
            yield entity

    def _selected(self, wanted: p4r.TableEntry) -> Iterator[tuple[int, Entry]]:
        if not wanted.match:
            yield from self.table.by_handle().items()
            return
        match = read_match(self.info.fields, wanted.match, self.where)
        entry = self.table.get(match, wanted.priority)
        if entry is not None:
            yield self.table.handle(match, wanted.priority), entry

    def _existing(self, entry: p4r.TableEntry) -> Match:
        """Return the match of an entry that a direct meter is asked for."""
        if self.table.meters is None:
            raise Refused(INVALID_ARGUMENT, f"{self.where} has no direct meter")
        if entry.is_default_action:
            raise Refused(UNIMPLEMENTED, f"{self.where}: the default entry has no meter")
        return read_match(self.info.fields, entry.match, self.where)

    def _fill(self, message: p4r.TableEntry, entry: Entry, notes: Notes) -> None:
        message.table_id = self.info.id
        if entry.priority:
            message.priority = entry.priority
        write_match(self._fields, entry.match, message)
        self._write_target(message.action, entry.target)
        if notes is not _NONE:
            message.controller_metadata, message.metadata = notes
        if self.table.definition.entries:
            message.is_const = True

    def _default_entity(self) -> p4r.Entity:
        entity = p4r.Entity()
        message = entity.table_entry
        message.table_id, message.is_default_action = self.info.id, True
        if self.table.default is not None:
            self._write_target(message.action, self.table.default)
        message.controller_metadata, message.metadata = self._notes.get(_DEFAULT, _NONE)
        return entity

    def _write_target(self, message: p4r.TableAction, target: Target) -> None:
        if isinstance(target, MemberRef):
            message.action_profile_member_id = target.id
        elif isinstance(target, GroupRef):
            message.action_profile_group_id = target.id
        else:
            write_action(self._by_name[self.table.actions.full_name(target.name)], target, message.action)

    def _id(self, action: Action) -> int:
        return self._by_name[self.table.actions.full_name(action.name)].id


class Tables:
    """The entries of all tables, as ``table_entry``, and their direct meters, as ``direct_meter_entry``."""

    def __init__(self, schema: Schema) -> None:
        self._tables = {number: TableEntries(info) for number, info in schema.tables.items()}

    def change_entry(self, kind: int, entry: p4r.TableEntry) -> Change:
        """Return the change that an update asks for; raises Refused."""
        return self._table(entry.table_id).change(kind, entry)

    def read_entries(self, wanted: p4r.TableEntry) -> Iterator[p4r.Entity]:
        """Return the entries that a request selects; raises Refused."""
        if wanted.table_id:
            yield from self._table(wanted.table_id).read(wanted)
            return
        for number, table in self._tables.items():
            everything = p4r.TableEntry(table_id=number, is_default_action=wanted.is_default_action)
            if wanted.HasField("meter_config"):
                everything.meter_config.SetInParent()
            yield from table.read(everything)

    def change_meter(self, kind: int, item: p4r.DirectMeterEntry) -> Change:
        """Return the change that configures the direct meter of an entry; raises Refused."""
        if kind != MODIFY:
            raise Refused(INVALID_ARGUMENT, "direct meters come and go with their entries; use MODIFY")
        table = self._table(item.table_entry.table_id)
        if item.HasField("counter_data"):
            raise Refused(UNIMPLEMENTED, f"{table.where}: meters do not count by colour")
        config = read_config(item.config, table.where) if item.HasField("config") else None
        return table.change_meter(item.table_entry, config)

    def read_meters(self, wanted: p4r.DirectMeterEntry) -> Iterator[p4r.Entity]:
        """Return the direct meters that a request selects; raises Refused, and EntryError if there is no such entry."""
        if wanted.table_entry.table_id:
            yield from self._table(wanted.table_entry.table_id).read_meters(wanted.table_entry)
            return
        for number, table in self._tables.items():
            if table.table.meters is not None:
                yield from table.read_meters(p4r.TableEntry(table_id=number))

    def change_counter(self, kind: int, item: p4r.DirectCounterEntry) -> Change:
        """Refuse a direct counter, for the built-in switch runs no program that has one."""
        raise Refused(INVALID_ARGUMENT, f"{self._table(item.table_entry.table_id).where} has no direct counter")

    def read_counters(self, wanted: p4r.DirectCounterEntry) -> Iterator[p4r.Entity]:
        """Return no direct counters when those of all tables are asked for; refuse those of one table."""
        if wanted.table_entry.table_id:
            raise Refused(INVALID_ARGUMENT, f"{self._table(wanted.table_entry.table_id).where} has no direct counter")
        return iter(())

    def _table(self, number: int) -> TableEntries:
        found = self._tables.get(number)
        if found is None:
            known = ", ".join(f"{key} ({table.info.name})" for key, table in self._tables.items())
            raise Refused(INVALID_ARGUMENT, f"no table {number}; there are {known}")
        return found


class ProfileEntries:
    """The members and groups of one action profile."""

    def __init__(self, info: ProfileInfo) -> None:
        self.info, self.profile = info, info.profile
        self.where = f"action profile {info.name}"
        self._by_name = {action.name: action for action in info.actions.values()}
        self._sizes: dict[int, int] = {}
        """What each group's ``max_size`` was when it was made."""

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for; raises Refused."""
        number = item.member_id
        if not number:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: a member has a number above 0")
        if kind == DELETE:
            return lambda: self.profile.delete_member(number)
        action = read_action(self.info.actions, item.action, self.where)
        if kind == INSERT:
            return lambda: self.profile.add_member(number, action)
        return lambda: self.profile.modify_member(number, action)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for; raises Refused."""
        number, size = item.group_id, item.max_size
        if not number:
            raise Refused(INVALID_ARGUMENT, f"{self.where}: a group has a number above 0")
        if kind == DELETE:
            return lambda: self._delete(number)
        weights = self._weights(item)
        limit = self.info.group_size_max
        if kind == INSERT:
            if size < 0 or (limit and size > limit):
                raise Refused(INVALID_ARGUMENT, f"{self.where}: max_size is {size}; give 0..{limit or 'any'}")
            return lambda: self._insert(number, size, weights)
        return lambda: self._modify(number, size, weights)

    def _weights(self, item: p4r.ActionProfileGroup) -> dict[int, int]:
        weights: dict[int, int] = {}
        for member in item.members:
            if member.weight < 1:
                raise Refused(INVALID_ARGUMENT, f"{self.where}: member {member.member_id} weighs {member.weight}")
            if member.member_id in weights:
                raise Refused(INVALID_ARGUMENT, f"{self.where}: member {member.member_id} is named twice; give weights")
            if member.WhichOneof("watch_kind"):
                raise Refused(UNIMPLEMENTED, f"{self.where}: ports are not watched; leave watch_port out")
            weights[member.member_id] = member.weight
        return weights

    def _insert(self, number: int, size: int, weights: dict[int, int]) -> None:
        self._room(number, size, weights)
        self.profile.add_group(number, weights)
        self._sizes[number] = size

    def _modify(self, number: int, size: int, weights: dict[int, int]) -> None:
        if not self.profile.has_group(number):
            raise Refused(NOT_FOUND, f"{self.where} has no group {number}")
        before = self._sizes.get(number, 0)
        # As in PI, a size that is left out means the one there is.
        if size not in (0, before):
            raise Refused(INVALID_ARGUMENT, f"{self.where}: max_size of group {number} cannot become {size}")
        self._room(number, before, weights)
        self.profile.modify_group(number, weights)

    def _delete(self, number: int) -> None:
        self.profile.delete_group(number)
        self._sizes.pop(number, None)

    def _room(self, number: int, size: int, weights: dict[int, int]) -> None:
        limit = size or self.info.group_size_max
        if limit and sum(weights.values()) > limit:
            raise Refused(RESOURCE_EXHAUSTED, f"{self.where}: group {number} holds {limit} members by weight at most")

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

    def __init__(self, schema: Schema) -> None:
        self._profiles = {number: ProfileEntries(info) for number, info in schema.profiles.items()}

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Return the change that an update asks for; raises Refused."""
        return self._profile(item.action_profile_id).change_member(kind, item)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Return the change that an update asks for; raises Refused."""
        return self._profile(item.action_profile_id).change_group(kind, item)

    def read_members(self, wanted: p4r.ActionProfileMember) -> Iterator[p4r.Entity]:
        """Return the members that a request selects; raises Refused."""
        for profile in self._chosen(wanted.action_profile_id):
            yield from profile.read_members(wanted)

    def read_groups(self, wanted: p4r.ActionProfileGroup) -> Iterator[p4r.Entity]:
        """Return the groups that a request selects; raises Refused."""
        for profile in self._chosen(wanted.action_profile_id):
            yield from profile.read_groups(wanted)

    def _chosen(self, number: int) -> list[ProfileEntries]:
        return [self._profile(number)] if number else list(self._profiles.values())

    def _profile(self, number: int) -> ProfileEntries:
        found = self._profiles.get(number)
        if found is None:
            known = ", ".join(f"{key} ({item.info.name})" for key, item in self._profiles.items())
            raise Refused(INVALID_ARGUMENT, f"no action profile {number}; there are {known or 'none'}")
        return found


T = TypeVar("T")


class Ask(Protocol):
    """Has the packet loop call a function, and returns what that returned."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Raise what the function raises."""


class _Window(Protocol):
    name: str

    def __len__(self) -> int: ...


WindowT = TypeVar("WindowT", bound=_Window)


class Counters:
    """Counter arrays, as ``counter_entry``. Each cell counts packets and bytes, whatever p4info says, as in BMv2."""

    def __init__(self, schema: Schema) -> None:
        self._counters: Mapping[int, Counter] = schema.counters

    def change(self, kind: int, item: p4r.CounterEntry) -> Change:
        """Return the change that sets one cell, or all without an index; raises Refused."""
        counter = _chosen(self._counters, item.counter_id, "counter")
        _only_modify(kind, counter.name)
        packets, octets = item.data.packet_count, item.data.byte_count
        if min(packets, octets) < 0:
            raise Refused(INVALID_ARGUMENT, f"counter {counter.name} counts from 0 up; got {packets}, {octets}")
        index = _index(item, counter)
        if not item.HasField("data"):
            return _nothing
        if index is None:
            return lambda: counter.fill(packets, octets)
        return partial(counter.__setitem__, index, (packets, octets))

    def read(self, wanted: p4r.CounterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, all as they were at one moment; raises Refused."""
        for number, counter in _selected(self._counters, wanted.counter_id, "counter"):
            index = _index(wanted, counter)
            found: Iterable[tuple[int, Sequence[int]]]
            if index is None:
                found = enumerate(ask(counter.values).tolist())
            else:
                found = [(index, ask(partial(counter.__getitem__, index)))]
            for cell, (packets, octets) in found:
                entity = p4r.Entity()
                message = entity.counter_entry
                message.counter_id = number
                message.index.index = cell
                message.data.packet_count, message.data.byte_count = packets, octets
                yield entity


class Meters:
    """Meter arrays, as ``meter_entry``."""

    def __init__(self, schema: Schema) -> None:
        self._meters: Mapping[int, MeterCells] = schema.meters

    def change(self, kind: int, item: p4r.MeterEntry) -> Change:
        """Return the change that configures one meter, or all without an index; raises Refused."""
        meters = _chosen(self._meters, item.meter_id, "meter")
        _only_modify(kind, meters.name)
        if item.HasField("counter_data"):
            raise Refused(UNIMPLEMENTED, f"meter {meters.name} does not count by colour")
        config = read_config(item.config, f"meter {meters.name}") if item.HasField("config") else None
        index = _index(item, meters)

        def change() -> None:
            for cell in range(len(meters)) if index is None else (index,):
                meters[cell] = config

        return change

    def read(self, wanted: p4r.MeterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the meters that a request selects; raises Refused."""
        for number, meters in _selected(self._meters, wanted.meter_id, "meter"):
            index = _index(wanted, meters)
            for cell in range(len(meters)) if index is None else (index,):
                entity = p4r.Entity()
                message = entity.meter_entry
                message.meter_id = number
                message.index.index = cell
                config = meters[cell]
                if config is not None:
                    write_config(config, message.config)
                yield entity


class Registers:
    """Register arrays, as ``register_entry``. They can be read only: BMv2 refuses both, and the data path owns them."""

    def __init__(self, schema: Schema) -> None:
        self._registers: Mapping[int, Register] = schema.registers

    def change(self, kind: int, item: p4r.RegisterEntry) -> Change:
        """Refuse to write, as BMv2 does."""
        register = _chosen(self._registers, item.register_id, "register")
        raise Refused(UNIMPLEMENTED, f"register {register.name} cannot be written over P4Runtime")

    def read(self, wanted: p4r.RegisterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, all as they were at one moment; raises Refused."""
        for number, register in _selected(self._registers, wanted.register_id, "register"):
            index = _index(wanted, register)
            found: Iterable[tuple[int, int]]
            if index is None:
                found = enumerate(ask(register.values).tolist())
            else:
                found = [(index, ask(partial(register.__getitem__, index)))]
            for cell, value in found:
                entity = p4r.Entity()
                message = entity.register_entry
                message.register_id = number
                message.index.index = cell
                message.data.bitstring = encode(value)
                yield entity


def _chosen(arrays: Mapping[int, WindowT], number: int, kind: str) -> WindowT:
    found = arrays.get(number)
    if found is None:
        known = ", ".join(f"{key} ({array.name})" for key, array in arrays.items())
        raise Refused(INVALID_ARGUMENT, f"no {kind} {number}; there are {known or 'none'}")
    return found


def _selected(arrays: Mapping[int, WindowT], number: int, kind: str) -> list[tuple[int, WindowT]]:
    return [(number, _chosen(arrays, number, kind))] if number else list(arrays.items())


def _index(item: p4r.CounterEntry | p4r.MeterEntry | p4r.RegisterEntry, array: _Window) -> int | None:
    """Return which cell is meant; None for all."""
    if not item.HasField("index"):
        return None
    index = item.index.index
    if index < 0:
        raise Refused(INVALID_ARGUMENT, f"{array.name} has no cell {index}; cells are numbered from 0")
    if index >= len(array):
        raise Refused(OUT_OF_RANGE, f"{array.name} has no cell {index}; the last is {len(array) - 1}")
    return index


def _only_modify(kind: int, name: str) -> None:
    if kind != MODIFY:
        raise Refused(INVALID_ARGUMENT, f"the cells of {name} are always there; use MODIFY")


def _nothing() -> None:
    """Change nothing."""
