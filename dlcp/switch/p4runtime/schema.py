# SPDX-License-Identifier: Apache-2.0
"""The p4info of a program, joined to what the program has: numbers on one side, objects on the other."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from finsy.proto import p4i, rpc_code

from dlcp.switch.executor.model import EntryError
from dlcp.switch.executor.profiles import ActionProfile, Actions
from dlcp.switch.executor.program import Program
from dlcp.switch.executor.tables import Table
from dlcp.switch.p4runtime.messages import ActionInfo, FieldInfo, ParamInfo, Refused

MATCH_KINDS: Final[Mapping[int, str]] = {
    p4i.MatchField.EXACT: "exact",
    p4i.MatchField.LPM: "lpm",
    p4i.MatchField.TERNARY: "ternary",
    p4i.MatchField.RANGE: "range",
    p4i.MatchField.OPTIONAL: "optional",
}
"""Kinds of match by their number in p4info; each is also the name of its part of a FieldMatch."""
_UNSUPPORTED: Final = ("externs", "value_sets", "digests", "direct_counters")

T = TypeVar("T")
S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, slots=True)
class ActionUse:
    """An action of one table: whether entries, and whether the default, may be it."""

    info: ActionInfo
    in_entries: bool
    as_default: bool


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table; ``actions`` are those it may run, by number."""

    id: int
    name: str
    fields: Mapping[int, FieldInfo]
    actions: Mapping[int, ActionUse]
    const_default: bool
    table: Table


@dataclass(frozen=True, slots=True)
class ProfileInfo:
    """An action profile. ``group_size_max`` is 0 where p4info sets no limit."""

    id: int
    name: str
    actions: Mapping[int, ActionInfo]
    group_size_max: int
    profile: ActionProfile


class _Described(Protocol):
    @property
    def preamble(self) -> p4i.Preamble: ...


class _DescribedSize(_Described, Protocol):
    @property
    def size(self) -> int: ...


class Schema:
    """Everything that has a number in p4info, joined to the program's object for it.

    Raises
    ------
    Refused
        p4info is not that of the program, or uses what the built-in switch does not do.
    """

    def __init__(self, p4info: p4i.P4Info, program: Program) -> None:
        for part in _UNSUPPORTED:
            if len(getattr(p4info, part)):
                raise Refused(f"p4info has {part}, which the built-in switch does not do", rpc_code.UNIMPLEMENTED)
        self.actions = {item.preamble.id: _action(item) for item in p4info.actions}
        self.tables = {item.preamble.id: self._table(item, program) for item in p4info.tables}
        self.profiles = {item.preamble.id: self._profile(item, p4info, program) for item in p4info.action_profiles}
        self.counters = {item.preamble.id: _sized(program.counters, item) for item in p4info.counters}
        self.meters = {item.preamble.id: _sized(program.meters, item) for item in p4info.meters}
        self.registers = {item.preamble.id: _sized(program.registers, item) for item in p4info.registers}

    def _table(self, item: p4i.Table, program: Program) -> TableInfo:
        table = _named(program.tables, item)
        name = item.preamble.name
        keys = table.definition.keys
        if len(keys) != len(item.match_fields):
            raise Refused(f"table {name} has {len(item.match_fields)} fields in p4info and {len(keys)} in the program")
        fields = {}
        for field, key in zip(item.match_fields, keys, strict=True):
            kind = MATCH_KINDS.get(field.match_type)
            if kind is None or field.HasField("type_name"):
                raise Refused(f"table {name}: field {field.name} has a kind or type of its own", rpc_code.UNIMPLEMENTED)
            known = "ternary" if kind == "optional" else kind
            if (field.name, field.bitwidth, known) != (key.name, key.width, key.match):
                raise Refused(
                    f"table {name}: p4info says {known} {field.name} of {field.bitwidth} bits, the program "
                    f"{key.match} {key.name} of {key.width}"
                )
            fields[field.id] = FieldInfo(field.id, field.name, kind, field.bitwidth)
        if bool(item.implementation_id) != (table.profile is not None):
            raise Refused(f"table {name}: p4info and the program differ on its action profile")
        uses = {}
        for reference in item.action_refs:
            info = self._known(reference.id, name)
            uses[info.id] = ActionUse(
                info,
                reference.scope != p4i.ActionRef.DEFAULT_ONLY,
                reference.scope != p4i.ActionRef.TABLE_ONLY,
            )
        _check_actions(table.actions if table.profile is None else table.profile.actions, uses.values(), name)
        return TableInfo(item.preamble.id, name, fields, uses, bool(item.const_default_action_id), table)

    def _profile(self, item: p4i.ActionProfile, p4info: p4i.P4Info, program: Program) -> ProfileInfo:
        profile = _named(program.profiles, item)
        actions: dict[int, ActionInfo] = {}
        for table in p4info.tables:
            if table.implementation_id == item.preamble.id:
                actions.update(
                    (reference.id, self._known(reference.id, item.preamble.name))
                    for reference in table.action_refs
                    if reference.scope != p4i.ActionRef.DEFAULT_ONLY
                )
        return ProfileInfo(item.preamble.id, item.preamble.name, actions, item.max_group_size, profile)

    def _known(self, action: int, where: str) -> ActionInfo:
        if action not in self.actions:
            raise Refused(f"{where} names the action {action}, which p4info does not describe")
        return self.actions[action]


def _action(item: p4i.Action) -> ActionInfo:
    for param in item.params:
        if param.HasField("type_name"):
            raise Refused(
                f"action {item.preamble.name}: parameter {param.name} has a type of its own", rpc_code.UNIMPLEMENTED
            )
    params = {param.id: ParamInfo(param.id, param.name, param.bitwidth) for param in item.params}
    return ActionInfo(item.preamble.id, item.preamble.name, params)


def _check_actions(actions: Actions, uses: Iterable[ActionUse], where: str) -> None:
    """Compare names and widths with those of the program."""
    known = {action.name: [(param.name, param.width) for param in action.parameters] for action in actions.definitions}
    for use in uses:
        described = [(param.name, param.width) for param in use.info.params.values()]
        if known.get(use.info.name) != described:
            raise Refused(
                f"{where}: action {use.info.name} has the parameters {described} in p4info and "
                f"{known.get(use.info.name, 'is not there')} in the program"
            )


def _named(objects: Mapping[str, T], item: _Described) -> T:
    """Return the object of the program that p4info describes."""
    try:
        return objects[item.preamble.name]
    except EntryError as error:
        raise Refused(f"p4info is not that of the program: {error}") from None


def _sized(objects: Mapping[str, S], item: _DescribedSize) -> S:
    """Return the array of the program that p4info describes."""
    found = _named(objects, item)
    if len(found) != item.size:
        raise Refused(f"{item.preamble.name} has {item.size} cells in p4info and {len(found)} in the program")
    return found
