# SPDX-License-Identifier: Apache-2.0
"""Table entries, with the direct meters and the metadata that go with them."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from finsy.proto import p4r

from dlcp.switch.cells import MeterConfig
from dlcp.switch.p4runtime.matches import read_action, read_match, write_action, write_match
from dlcp.switch.p4runtime.meters import read_config, write_config
from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, Refused
from dlcp.switch.p4runtime.schema import Schema, TableInfo
from dlcp.switch.patterns import Match
from dlcp.switch.profiles import Action, Group, Member, Target
from dlcp.switch.tables import Entry

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
            return Member(entry.action.action_profile_member_id)
        if kind == "action_profile_group_id":
            return Group(entry.action.action_profile_group_id)
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
        if isinstance(target, Member):
            message.action_profile_member_id = target.id
        elif isinstance(target, Group):
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
