# SPDX-License-Identifier: Apache-2.0
"""The entities that controllers write and read: table entries, action profiles, counters, meters and registers.

`kinds_of` joins p4info to a running program: for each kind of entity it has the program's objects and two functions.
``change`` checks an update of one object and returns the `Change` that makes it. ``read`` yields the entities of one
object that a request selects. Both raise Refused for errors that do not depend on the current entries.

p4info's descriptions of fields and parameters (number, name, width, match kind) are used directly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from finsy.proto import p4i, p4r, rpc_code

from dlcp.switch.executor import model
from dlcp.switch.executor.cells import Counter, MeterCells, Register
from dlcp.switch.executor.model import Action, EntryError, GroupRef, Match, MemberRef, MeterConfig, TableEntry, Target
from dlcp.switch.executor.program import Program
from dlcp.switch.executor.tables import ActionProfile, Actions, Table

BURST_MAX: Final = (1 << 32) - 1
"""BMv2 stores a burst in 32 bits."""


class Refused(EntryError):  # noqa: N818 - the name says what it is
    """A refused request; the message says what is wrong, where, and what to do.

    Attributes
    ----------
    code
        Canonical code of google.rpc.
    """

    def __init__(self, message: str, code: int = rpc_code.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


_CODES: Final[Mapping[type[EntryError], int]] = {
    model.DuplicateError: rpc_code.ALREADY_EXISTS,
    model.MissingError: rpc_code.NOT_FOUND,
    model.FullError: rpc_code.RESOURCE_EXHAUSTED,
    model.InUseError: rpc_code.FAILED_PRECONDITION,
    model.ConstantError: rpc_code.PERMISSION_DENIED,
    model.CellError: rpc_code.OUT_OF_RANGE,
}


def code_of(error: EntryError) -> int:
    """Return the canonical code of google.rpc for an error."""
    return error.code if isinstance(error, Refused) else _CODES.get(type(error), rpc_code.INVALID_ARGUMENT)


def find(things: Mapping[int, Any], number: int, what: str) -> Any:
    """Return an object by its number. Raises Refused, which starts with ``what`` and lists the existing objects."""
    if number not in things:
        known = ", ".join(f"{key} ({getattr(thing, 'preamble', thing).name})" for key, thing in things.items())
        raise Refused(f"{what} {number}; there are {known or 'none'}")
    return things[number]


Described: TypeAlias = p4i.MatchField | p4i.Action.Param
"""A field of a table's key or a parameter of an action, as p4info describes it."""


# ----------------------------------------------------------------------------------------------------------- values


def decode(value: bytes, field: Described) -> int:
    """Return the number of a big-endian byte string; leading zeros are allowed, as specified (8.4).

    Raises
    ------
    Refused
        The string is empty, or the number does not fit the field or parameter.
    """
    number = int.from_bytes(value, "big")
    if number >> field.bitwidth or not value:
        given = f"0x{value[:32].hex()}" if value else "an empty string"
        raise Refused(f"{field.name} has {field.bitwidth} bits; {given} does not fit", rpc_code.OUT_OF_RANGE)
    return number


def encode(number: int) -> bytes:
    """Return the shortest byte string for a number; zero takes one byte."""
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")


# ---------------------------------------------------------------------------------------------------------- matches

_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "exact": ("value",),
    "lpm": ("value", "prefix_len"),
    "ternary": ("value", "mask"),
    "range": ("low", "high"),
    "optional": ("value",),
}
"""Fields of each kind of FieldMatch, in the order of the program's tables; all except ``prefix_len`` are byte
strings."""


_KINDS: Final = {number: name.lower() for name, number in p4i.MatchField.MatchType.items()}


def _kind(field: p4i.MatchField) -> str:
    """Return a field's kind of match: the name of an alternative of FieldMatch, or of none."""
    return _KINDS.get(field.match_type, "unknown")


def read_match(fields: Mapping[int, p4i.MatchField], items: Iterable[p4r.FieldMatch], where: str) -> Match:
    """Return a match for the program's table; omitted fields stay omitted.

    Raises
    ------
    Refused
        A field that is unknown, given twice, of the wrong match kind, or matches anything: P4Runtime requires omitting
        such a field.
    """
    match: dict[str, int | tuple[int, int]] = {}
    for item in items:
        field = find(fields, item.field_id, f"{where} has no field")
        kind = item.WhichOneof("field_match_type")
        if kind is None or kind != _kind(field):
            raise Refused(f"{where}: field {field.name} is {_kind(field)}, not {kind or 'empty'}")
        if field.name in match:
            raise Refused(f"{where}: field {field.name} is given twice")
        said = getattr(item, kind)
        parts = [getattr(said, name) for name in _PARTS[kind]]
        first, *more = (part if isinstance(part, int) else decode(part, field) for part in parts)
        if kind == "exact":
            match[field.name] = first
            continue
        value = first, more[0] if more else (1 << field.bitwidth) - 1
        if _is_anything(kind, value, field):
            raise Refused(f"{where}: field {field.name} matches anything; omit the field")
        match[field.name] = value
    return match


def write_match(fields: Iterable[p4i.MatchField], match: Match, entry: p4r.TableEntry) -> None:
    """Put a match into a message, without the fields that match anything, as P4Runtime requires."""
    for field in fields:
        value: Any = match.get(field.name)
        kind = _kind(field)
        if value is None or _is_anything(kind, value, field):
            continue
        said = getattr(entry.match.add(field_id=field.id), kind)
        for name, part in zip(_PARTS[kind], value if isinstance(value, tuple) else (value,), strict=False):
            setattr(said, name, part if name == "prefix_len" else encode(part))


def _is_anything(kind: str, value: Any, field: p4i.MatchField) -> bool:
    """Whether a field matches anything: an empty mask or prefix, or a range over all values."""
    if kind == "range":
        return bool(value == (0, (1 << field.bitwidth) - 1))
    return kind != "exact" and not value[1]


# ------------------------------------------------------------------------------------------------ actions and meters


def read_action(actions: Mapping[int, p4i.Action], action: p4r.Action, where: str) -> Action:
    """Return an action for the program; raises Refused if it is not in ``actions`` or its parameters are invalid."""
    info = find(actions, action.action_id, f"{where} has no action")
    name, params = info.preamble.name, {param.id: param for param in info.params}
    given: dict[str, int] = {}
    for item in action.params:
        param = params.pop(item.param_id, None)
        if param is None:
            raise Refused(f"{where}: parameter {item.param_id} of action {name} is unknown or given twice")
        given[param.name] = decode(item.value, param)
    if params:
        missing = ", ".join(param.name for param in params.values())
        raise Refused(f"{where}: action {name} needs a value for {missing}")
    return Action(name, given)


def write_action(info: p4i.Action, action: Action, message: p4r.Action) -> None:
    """Put an action into a message."""
    message.action_id = info.preamble.id
    for param in info.params:
        message.params.add(param_id=param.id, value=encode(action.params[param.name]))


def read_meter(config: p4r.MeterConfig, where: str) -> MeterConfig | None:
    """Return a meter's configuration; None for the default, where every packet is green.

    Raises
    ------
    Refused
        It does not describe a two-rate meter, or a burst exceeds BMv2's limit.
    """
    rates = config.cir, config.cburst, config.pir, config.pburst
    # PI, and so BMv2, also accepts this as the default, besides no configuration.
    if rates == (-1, -1, -1, -1):
        return None
    if config.eburst:
        raise Refused(f"{where}: a two-rate meter has no excess burst; omit eburst")
    if max(config.cburst, config.pburst) > BURST_MAX:
        raise Refused(f"{where}: a burst must not exceed {BURST_MAX}", rpc_code.UNIMPLEMENTED)
    try:
        return MeterConfig(*rates)
    except EntryError as error:
        raise Refused(f"{where}: {error}") from None


def write_meter(config: MeterConfig | None, message: p4r.MeterConfig) -> None:
    """Put a meter's configuration into a message; leave the message empty for the default."""
    if config is not None:
        message.cir, message.cburst = config.cir, config.cburst
        message.pir, message.pburst = config.pir, config.pburst


_T = TypeVar("_T")
Change: TypeAlias = Callable[[], object]
"""Function that the packet loop calls to make one change; it raises EntryError if the change is not possible."""

INSERT: Final = p4r.Update.INSERT
MODIFY: Final = p4r.Update.MODIFY
DELETE: Final = p4r.Update.DELETE


class Ask(Protocol):
    """Calls a function on the packet loop's thread."""

    def __call__(self, function: Callable[[], _T], /) -> _T:
        """Return the function's result, or raise its exception."""


# ----------------------------------------------------------------------------------------------------------- tables


class Notes(NamedTuple):
    """A controller's own data, returned with an entry; the switch ignores it."""

    controller_metadata: int = 0
    metadata: bytes = b""


_NONE: Final = Notes()


class TableEntries:
    """The entries of one table, as ``table_entry``, and their direct meters, as ``direct_meter_entry``."""

    def __init__(self, item: p4i.Table, actions: Mapping[int, p4i.Action], program: Program) -> None:
        self.id, self.name = item.preamble.id, item.preamble.name
        self.where = f"table {self.name}"
        self.table: Table = _object(program.tables, item)
        self._const_default = bool(item.const_default_action_id)
        self._fields = {field.id: field for field in item.match_fields}
        self._scopes = {reference.id: reference.scope for reference in item.action_refs}
        self._actions = {number: _action(actions, number, self.name) for number in self._scopes}
        self._by_name = {info.preamble.name: info for info in self._actions.values()}
        self._default_notes = _NONE
        self._compare_fields(item)
        profile = self.table.profile
        if bool(item.implementation_id) != (profile is not None):
            raise Refused(f"{self.where}: only one of p4info and the program gives it an action profile")
        _compare_actions(self.table.actions if profile is None else profile.actions, self._by_name, self.name)

    def _compare_fields(self, item: p4i.Table) -> None:
        """Refuse p4info whose fields differ from the program's."""
        keys = self.table.definition.keys
        if len(keys) != len(item.match_fields):
            raise Refused(f"{self.where} has {len(item.match_fields)} fields in p4info and {len(keys)} in the program")
        for field, key in zip(item.match_fields, keys, strict=True):
            kind = _kind(field)
            if kind not in _PARTS or field.HasField("type_name"):
                raise Refused(
                    f"{self.where}: field {field.name} has an unsupported match kind or type", rpc_code.UNIMPLEMENTED
                )
            known = "ternary" if kind == "optional" else kind
            if (field.name, field.bitwidth, known) != (key.name, key.width, key.match):
                raise Refused(
                    f"{self.where}: p4info has {known} field {field.name} of {field.bitwidth} bits, the program "
                    f"{key.match} field {key.name} of {key.width}"
                )

    @property
    def default_can_change(self) -> bool:
        """Whether a controller may set the default action."""
        return not self._const_default and self.table.profile is None

    def change(self, kind: int, entry: p4r.TableEntry) -> Change:
        """Check an update and return its change."""
        if entry.is_default_action:
            return self._change_default(kind, entry)
        match = read_match(self._fields, entry.match, self.where)
        priority = entry.priority
        if kind == DELETE:
            return lambda: self.table.delete(match, priority)
        self._check(entry)
        target = self._target(entry)
        meter = None
        if entry.HasField("meter_config"):
            self._check_meter()
            meter = read_meter(entry.meter_config, self.where)
        notes = Notes(entry.controller_metadata, entry.metadata)
        if kind == INSERT:
            return lambda: self.table.insert(match, target, priority, meter, notes)

        def modify() -> None:
            handle = self.table.modify(match, target, priority, notes).handle
            if self.table.meters is not None:  # modifying an entry without a meter removes its meter
                self.table.meters[handle] = meter

        return modify

    def _change_default(self, kind: int, entry: p4r.TableEntry) -> Change:
        self._check(entry)
        self._check_default(entry)
        if kind != MODIFY:
            raise Refused(f"{self.where}: the default entry always exists; use MODIFY")
        if self.table.profile is not None:
            raise Refused(f"{self.where} has an action profile; its default cannot be changed")
        if self._const_default:
            raise Refused(f"{self.where} has a constant default action", rpc_code.PERMISSION_DENIED)
        if entry.HasField("meter_config"):
            raise Refused(f"{self.where}: the default entry has no meter", rpc_code.UNIMPLEMENTED)
        target = self._target(entry) if entry.HasField("action") else None
        notes = Notes(entry.controller_metadata, entry.metadata)

        def change() -> None:
            if target is None:
                self.table.reset_default()
            else:
                self.table.set_default(target)
            self._default_notes = notes if target is not None else _NONE

        return change

    def _check(self, entry: p4r.TableEntry) -> None:
        """Refuse unsupported features."""
        if entry.idle_timeout_ns or entry.HasField("time_since_last_hit"):
            raise Refused(f"{self.where}: idle timeouts are not supported")
        if entry.HasField("counter_data"):
            raise Refused(f"{self.where} has no direct counter")
        if entry.HasField("meter_counter_data"):
            raise Refused(f"{self.where}: counters per colour are not supported", rpc_code.UNIMPLEMENTED)

    def _check_default(self, entry: p4r.TableEntry) -> None:
        if entry.match or entry.priority:
            raise Refused(f"{self.where}: the default entry has neither match nor priority")

    def _check_meter(self) -> None:
        if self.table.meters is None:
            raise Refused(f"{self.where} has no direct meter")

    def _target(self, entry: p4r.TableEntry) -> Target:
        kind = entry.action.WhichOneof("type")
        if kind is None:
            raise Refused(f"{self.where}: the entry has no action")
        if kind == "action_profile_member_id":
            return MemberRef(entry.action.action_profile_member_id)
        if kind == "action_profile_group_id":
            return GroupRef(entry.action.action_profile_group_id)
        if kind == "action_profile_action_set":
            raise Refused(
                f"{self.where}: action sets are not supported; write members and groups", rpc_code.UNIMPLEMENTED
            )
        action = read_action(self._actions, entry.action.action, self.where)
        role, barred = "an entry", p4i.ActionRef.DEFAULT_ONLY
        if entry.is_default_action:
            role, barred = "the default", p4i.ActionRef.TABLE_ONLY
        if self._scopes[entry.action.action.action_id] == barred:
            raise Refused(f"{self.where}: {action.name} cannot be {role}", rpc_code.PERMISSION_DENIED)
        return action

    def read(self, wanted: p4r.TableEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the entries that a request selects; within one table, each field it sets narrows the selection."""
        if not wanted.table_id:
            everything = p4r.TableEntry(is_default_action=wanted.is_default_action)
            if wanted.HasField("meter_config"):
                everything.meter_config.SetInParent()
            wanted = everything
        if wanted.HasField("time_since_last_hit"):
            raise Refused(f"{self.where}: idle timeouts are not supported")
        if wanted.is_default_action:
            self._check_default(wanted)
            yield self._default_entity()
            return
        asked = wanted.priority, wanted.controller_metadata, wanted.metadata, wanted.action.action.action_id
        for entry in self._selected(wanted):
            notes = entry.notes or _NONE
            action_id = self._info(entry.target).preamble.id if isinstance(entry.target, Action) else 0
            held = entry.priority, *notes, action_id
            if any(value and value != own for value, own in zip(asked, held, strict=True)):
                continue
            entity = p4r.Entity()
            message = entity.table_entry
            self._write_key(entry, message)
            self._write_target(entry.target, message.action)
            message.controller_metadata, message.metadata = notes
            if self.table.definition.entries:
                message.is_const = True
            if wanted.HasField("meter_config") and self.table.meters is not None:
                write_meter(self.table.meters[entry.handle], message.meter_config)
            yield entity

    def change_meter(self, kind: int, item: p4r.DirectMeterEntry) -> Change:
        """Return the change that configures the direct meter of an entry."""
        if kind != MODIFY:
            raise Refused("direct meters exist as long as their entries; use MODIFY")
        if item.HasField("counter_data"):
            raise Refused(f"{self.where}: counters per colour are not supported", rpc_code.UNIMPLEMENTED)
        config = read_meter(item.config, self.where) if item.HasField("config") else None
        match, priority = self._metered(item.table_entry), item.table_entry.priority
        return lambda: self.table.set_meter(match, config, priority)

    def read_meters(self, item: p4r.DirectMeterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the direct meters of the selected entries; raises EntryError if there is no such entry."""
        wanted = item.table_entry
        if wanted.table_id:
            self._check_meter()
        if self.table.meters is None:
            return
        chosen = self.table.entries()
        if wanted.table_id and wanted.match:
            chosen = [self.table.find(self._metered(wanted), wanted.priority)]
        for entry in chosen:
            entity = p4r.Entity()
            self._write_key(entry, entity.direct_meter_entry.table_entry)
            write_meter(self.table.meters[entry.handle], entity.direct_meter_entry.config)
            yield entity

    def change_counter(self, kind: int, item: p4r.DirectCounterEntry) -> Change:
        """Refuse a direct counter; the built-in switch does not support programs that have one."""
        raise Refused(f"{self.where} has no direct counter")

    def read_counters(self, item: p4r.DirectCounterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return nothing for all tables; refuse a request for one table."""
        if item.table_entry.table_id:
            self.change_counter(MODIFY, item)
        return iter(())

    def _selected(self, wanted: p4r.TableEntry) -> list[TableEntry]:
        if not wanted.match:
            return self.table.entries()
        entry = self.table.get(read_match(self._fields, wanted.match, self.where), wanted.priority)
        return [] if entry is None else [entry]

    def _metered(self, entry: p4r.TableEntry) -> Match:
        """Return the match of an entry in a request about its direct meter."""
        self._check_meter()
        if entry.is_default_action:
            raise Refused(f"{self.where}: the default entry has no meter", rpc_code.UNIMPLEMENTED)
        return read_match(self._fields, entry.match, self.where)

    def _default_entity(self) -> p4r.Entity:
        entity = p4r.Entity()
        message = entity.table_entry
        message.table_id, message.is_default_action = self.id, True
        if self.table.default is not None:
            self._write_target(self.table.default, message.action)
        message.controller_metadata, message.metadata = self._default_notes
        return entity

    def _write_key(self, entry: TableEntry, message: p4r.TableEntry) -> None:
        message.table_id = self.id
        if entry.priority:
            message.priority = entry.priority
        write_match(self._fields.values(), entry.match, message)

    def _write_target(self, target: Target, message: p4r.TableAction) -> None:
        if isinstance(target, MemberRef):
            message.action_profile_member_id = target.id
        elif isinstance(target, GroupRef):
            message.action_profile_group_id = target.id
        else:
            write_action(self._info(target), target, message.action)

    def _info(self, action: Action) -> p4i.Action:
        return self._by_name[self.table.actions.full_name(action.name)]


# -------------------------------------------------------------------------------------------------- action profiles


class ProfileEntries:
    """The members and groups of one action profile."""

    def __init__(
        self, item: p4i.ActionProfile, tables: Iterable[p4i.Table], actions: Mapping[int, p4i.Action], program: Program
    ) -> None:
        self.id, self.name = item.preamble.id, item.preamble.name
        self.where = f"action profile {self.name}"
        self.profile: ActionProfile = _object(program.profiles, item)
        self._group_size_max = item.max_group_size
        """0 if p4info sets no limit."""
        references = [item for table in tables if table.implementation_id == self.id for item in table.action_refs]
        self._actions = {reference.id: _action(actions, reference.id, self.name) for reference in references}
        self._default_only = {item.id for item in references if item.scope == p4i.ActionRef.DEFAULT_ONLY}
        self._default_only -= {item.id for item in references if item.scope != p4i.ActionRef.DEFAULT_ONLY}
        self._by_name = {info.preamble.name: info for info in self._actions.values()}
        self._sizes: dict[int, int] = {}
        """The ``max_size`` with which each group was inserted."""

    def change_member(self, kind: int, item: p4r.ActionProfileMember) -> Change:
        """Check an update and return its change."""
        number = item.member_id
        if not number:
            raise Refused(f"{self.where}: member_id must be above 0")
        if kind == DELETE:
            return lambda: self.profile.delete_member(number)
        action = read_action(self._actions, item.action, self.where)
        if item.action.action_id in self._default_only:
            raise Refused(f"{self.where}: {action.name} cannot be a member", rpc_code.PERMISSION_DENIED)
        if kind == INSERT:
            return lambda: self.profile.add_member(number, action)
        return lambda: self.profile.modify_member(number, action)

    def change_group(self, kind: int, item: p4r.ActionProfileGroup) -> Change:
        """Check an update and return its change."""
        number, size = item.group_id, item.max_size
        if not number:
            raise Refused(f"{self.where}: group_id must be above 0")
        if kind == DELETE:
            return lambda: self._delete_group(number)
        weights = self._weights(item)
        limit = self._group_size_max
        if kind == INSERT and (size < 0 or (limit and size > limit)):
            raise Refused(f"{self.where}: max_size is {size}; give 0..{limit or 'any'}")
        return lambda: (self._add_group if kind == INSERT else self._modify_group)(number, size, weights)

    def _weights(self, item: p4r.ActionProfileGroup) -> dict[int, int]:
        weights: dict[int, int] = {}
        for member in item.members:
            if member.member_id in weights:
                raise Refused(f"{self.where}: member {member.member_id} is named twice; set its weight instead")
            if member.WhichOneof("watch_kind"):
                raise Refused(f"{self.where}: watch ports are not supported; omit them", rpc_code.UNIMPLEMENTED)
            weights[member.member_id] = member.weight
        return weights

    def _add_group(self, number: int, size: int, weights: dict[int, int]) -> None:
        self._check_room(number, size, weights)
        self.profile.add_group(number, weights)
        self._sizes[number] = size

    def _modify_group(self, number: int, size: int, weights: dict[int, int]) -> None:
        self.profile.find(GroupRef(number))
        before = self._sizes.get(number, 0)
        # As in PI, an omitted size means the current one.
        if size not in (0, before):
            raise Refused(f"{self.where}: max_size of group {number} cannot change to {size}; it stays {before}")
        self._check_room(number, before, weights)
        self.profile.modify_group(number, weights)

    def _delete_group(self, number: int) -> None:
        self.profile.delete_group(number)
        self._sizes.pop(number, None)

    def _check_room(self, number: int, size: int, weights: dict[int, int]) -> None:
        limit = size or self._group_size_max
        if limit and sum(weights.values()) > limit:
            message = f"{self.where}: the weights of group {number} add up to more than {limit}"
            raise Refused(message, rpc_code.RESOURCE_EXHAUSTED)

    def read_members(self, wanted: p4r.ActionProfileMember, ask: Ask) -> Iterator[p4r.Entity]:
        """Return one member, or all for number 0."""
        for number, action in self.profile.members().items():
            if wanted.member_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_member
                message.action_profile_id, message.member_id = self.id, number
                info = self._by_name[self.profile.actions.full_name(action.name)]
                write_action(info, action, message.action)
                yield entity

    def read_groups(self, wanted: p4r.ActionProfileGroup, ask: Ask) -> Iterator[p4r.Entity]:
        """Return one group, or all for number 0."""
        for number, weights in self.profile.groups().items():
            if wanted.group_id in (0, number):
                entity = p4r.Entity()
                message = entity.action_profile_group
                message.action_profile_id, message.group_id = self.id, number
                message.max_size = self._sizes.get(number, 0)
                for member, weight in sorted(weights.items()):
                    message.members.add(member_id=member, weight=weight)
                yield entity


# ------------------------------------------------------------------------------------------------------------ cells


ArrayT = TypeVar("ArrayT", bound=Counter | MeterCells | Register)


class Cells(ABC, Generic[ArrayT]):
    """A counter, meter or register array. An entity refers to the cell at its index, or without one to all cells."""

    kind: str
    """``counter``, ``meter`` or ``register``: the prefix of the names in P4Runtime's messages."""

    def __init__(self, item: Any, arrays: Mapping[str, ArrayT]) -> None:
        self.id, self.name = item.preamble.id, item.preamble.name
        self.array = _object(arrays, item)
        if len(self.array) != item.size:
            raise Refused(f"{self.name} has {item.size} cells in p4info and {len(self.array)} in the program")

    @abstractmethod
    def change(self, kind: int, item: Any) -> Change:
        """Return the change that sets one cell, or all cells."""

    @abstractmethod
    def fill(self, message: Any, value: Any) -> None:
        """Put the value of a cell into a message."""

    def read(self, wanted: Any, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, in a consistent snapshot."""
        index = self._index(wanted)
        # The packet loop copies them between two bursts, so no packet is counted in only some of the cells.
        cells: Iterable[tuple[int, Any]]
        if index is None:
            values: Any = ask(self.array.values)
            cells = enumerate(values if isinstance(values, list) else values.tolist())
        else:
            cells = [(index, ask(partial(self.array.__getitem__, index)))]
        for cell, value in cells:
            entity = p4r.Entity()
            message = getattr(entity, f"{self.kind}_entry")
            setattr(message, f"{self.kind}_id", self.id)
            message.index.index = cell
            self.fill(message, value)
            yield entity

    def _check_kind(self, kind: int) -> None:
        if kind != MODIFY:
            raise Refused(f"the cells of {self.name} always exist; use MODIFY")

    def _index(self, item: Any) -> int | None:
        """Return the index in an entity; None for all cells."""
        if not item.HasField("index"):
            return None
        index = int(item.index.index)
        if index < 0:
            raise Refused(f"{self.name} has no cell {index}; cells are numbered from 0")
        if index >= len(self.array):
            last = len(self.array) - 1
            raise Refused(f"{self.name} has no cell {index}; the last is {last}", rpc_code.OUT_OF_RANGE)
        return index


class Counters(Cells[Counter]):
    """A counter array. As in BMv2, each cell counts packets and bytes regardless of its unit in p4info."""

    kind = "counter"

    def change(self, kind: int, item: p4r.CounterEntry) -> Change:
        """Return the change that sets one cell, or all cells."""
        self._check_kind(kind)
        count = item.data.packet_count, item.data.byte_count
        if min(count) < 0:
            raise Refused(f"counter {self.name}: counts must not be negative: {count[0]}, {count[1]}")
        index = self._index(item)
        if not item.HasField("data"):
            return lambda: None
        return partial(self.array.fill, *count) if index is None else partial(self.array.__setitem__, index, count)

    def fill(self, message: p4r.CounterEntry, value: tuple[int, int]) -> None:
        """Put the count of a cell into a message."""
        message.data.packet_count, message.data.byte_count = value


class Meters(Cells[MeterCells]):
    """A meter array."""

    kind = "meter"

    def change(self, kind: int, item: p4r.MeterEntry) -> Change:
        """Return the change that configures one meter, or all."""
        self._check_kind(kind)
        if item.HasField("counter_data"):
            raise Refused(f"meter {self.name}: counters per colour are not supported", rpc_code.UNIMPLEMENTED)
        config = read_meter(item.config, f"meter {self.name}") if item.HasField("config") else None
        index = self._index(item)

        def change() -> None:
            for cell in range(len(self.array)) if index is None else (index,):
                self.array[cell] = config

        return change

    def fill(self, message: p4r.MeterEntry, value: MeterConfig | None) -> None:
        """Put the configuration of a meter into a message."""
        write_meter(value, message.config)


class Registers(Cells[Register]):
    """A register array, read-only as in BMv2: the data path owns the cells."""

    kind = "register"

    def change(self, kind: int, item: p4r.RegisterEntry) -> Change:
        """Refuse writes, as BMv2 does."""
        raise Refused(f"register {self.name} cannot be written over P4Runtime", rpc_code.UNIMPLEMENTED)

    def fill(self, message: p4r.RegisterEntry, value: int) -> None:
        """Put the value of a cell into a message."""
        message.data.bitstring = encode(value)


# --------------------------------------------------------------------------------------------------- all of a program


class EntityKind(NamedTuple):
    """A kind of entity: its objects by number, and the functions that change and read one."""

    objects: Mapping[int, Any]
    what: str
    """The name of an object of this kind, for errors."""
    number: str
    """Path of the object's number in a message; 0 there means all objects."""
    change: Callable[[Any, int, Any], Change]
    read: Callable[[Any, Any, Ask], Iterator[p4r.Entity]]

    def one(self, message: Any) -> Any:
        """Return the object that a message names; raises Refused if there is none of its number."""
        return find(self.objects, attrgetter(self.number)(message), f"no {self.what}")

    def selected(self, message: Any) -> Iterable[Any]:
        """Return the object that a message names, or all for number 0; raises Refused for an unknown number."""
        return [self.one(message)] if attrgetter(self.number)(message) else self.objects.values()


_UNSUPPORTED: Final = ("externs", "value_sets", "digests", "direct_counters")


def kinds_of(p4info: p4i.P4Info, program: Program) -> dict[str, EntityKind]:
    """Join the objects in p4info to those of the program; return every kind of entity by its name.

    Raises
    ------
    Refused
        p4info describes another program, or uses a feature that the built-in switch does not support.
    """
    for part in _UNSUPPORTED:
        if len(getattr(p4info, part)):
            raise Refused(f"p4info has {part}, which the built-in switch does not support", rpc_code.UNIMPLEMENTED)
    for item in p4info.actions:
        for param in item.params:
            if param.HasField("type_name"):
                what = f"action {item.preamble.name}: parameter {param.name}"
                raise Refused(f"{what} has a user-defined type", rpc_code.UNIMPLEMENTED)
    actions = {item.preamble.id: item for item in p4info.actions}
    tables = {item.preamble.id: TableEntries(item, actions, program) for item in p4info.tables}
    profiles = {
        item.preamble.id: ProfileEntries(item, p4info.tables, actions, program) for item in p4info.action_profiles
    }
    counters = {item.preamble.id: Counters(item, program.counters) for item in p4info.counters}
    meters = {item.preamble.id: Meters(item, program.meters) for item in p4info.meters}
    registers = {item.preamble.id: Registers(item, program.registers) for item in p4info.registers}
    table = partial(EntityKind, tables, "table")
    profile = partial(EntityKind, profiles, "action profile", "action_profile_id")
    direct = "table_entry.table_id"
    return {
        "table_entry": table("table_id", TableEntries.change, TableEntries.read),
        "direct_meter_entry": table(direct, TableEntries.change_meter, TableEntries.read_meters),
        "direct_counter_entry": table(direct, TableEntries.change_counter, TableEntries.read_counters),
        "action_profile_member": profile(ProfileEntries.change_member, ProfileEntries.read_members),
        "action_profile_group": profile(ProfileEntries.change_group, ProfileEntries.read_groups),
        "counter_entry": EntityKind(counters, "counter", "counter_id", Counters.change, Counters.read),
        "meter_entry": EntityKind(meters, "meter", "meter_id", Meters.change, Meters.read),
        "register_entry": EntityKind(registers, "register", "register_id", Registers.change, Registers.read),
    }


def _action(actions: Mapping[int, p4i.Action], number: int, where: str) -> p4i.Action:
    if number not in actions:
        raise Refused(f"{where} refers to action {number}, which p4info does not describe")
    return actions[number]


def _compare_actions(actions: Actions, described: Mapping[str, p4i.Action], where: str) -> None:
    """Refuse p4info whose actions differ from the program's in name, or in their parameters' names or widths."""
    known = {action.name: [(param.name, param.width) for param in action.parameters] for action in actions.definitions}
    for name, info in described.items():
        params = [(param.name, param.bitwidth) for param in info.params]
        if known.get(name) != params:
            there = known.get(name, "does not exist")
            raise Refused(f"{where}: action {name} has parameters {params} in p4info, but {there} in the program")


def _object(objects: Mapping[str, _T], item: Any) -> _T:
    """Return the object of the program that p4info describes."""
    try:
        return objects[item.preamble.name]
    except EntryError as error:
        raise Refused(f"p4info does not describe the program: {error}") from None
