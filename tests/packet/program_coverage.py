# SPDX-License-Identifier: Apache-2.0
"""Which statements, branches, parser transitions and kinds of entries of a program packet tests have reached.

What there is to reach is computed from the compiled program: every action gets a counter of its own, and so does every
way out of an ``if``. The entries that a packet hit are seen by looking over the shoulder of the lookups.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlcp.switch import Action, GroupRef, MemberRef, MeterConfig, Program, ProgramDef, load_definition
from dlcp.switch.executor.model import (
    ActionDef,
    Conditional,
    Const,
    Control,
    Count,
    CounterDef,
    Extract,
    Field,
    ParserState,
    TableDef,
)
from dlcp.switch.executor.tables import Table
from tests.conformance import p4testgen
from tests.packet.stf import BuiltIn

COUNTER = "coverage"
P4INFO = "dlcp.p4info.txtpb"
"""A file next to the compiled program, which shows the actions that no entry may have."""


class Covered(BuiltIn):
    """The built-in switch with its program made to tell where a packet went."""

    def __init__(self, path: str) -> None:
        definition = load_definition(path)
        self._default_only = _default_only(Path(path).with_name(P4INFO))
        counted, self._points = _counted(definition)
        self._parser = _Parser(definition)
        self.program = Program(counted)
        super().__init__(self.program)
        self.reached: set[str] = set()
        for table in self.program.tables.values():
            table.index = _Watched(table.index, table, self)  # type: ignore[assignment]
        self.program.machine.attach(self.program.tables, self.program.profiles)
        self.program.ingress, self.program.egress = self.program.machine.ingress, self.program.machine.egress

    def restart(self) -> None:
        self._collect()
        super().restart()

    def send(self, port: int, data: bytes) -> None:
        self.reached |= set(self._parser.walk(data))
        super().send(port, data)

    def everything(self) -> set[str]:
        """Return all there is to reach."""
        tables = self.program.tables.values()
        kinds = {kind for table in tables for kind in _kinds(table, self._default_only)}
        # A table with an action profile has no default action on BMv2, so these never run there.
        never = {
            f"table {table.name}: action {name}"
            for table in tables
            if table.definition.profile is not None
            for where, name in self._default_only
            if where == table.name
        }
        return {*self._points, *self._parser.everything(), *kinds} - never

    def missed(self) -> set[str]:
        """Return what no packet reached."""
        self._collect()
        return self.everything() - self.reached

    def _collect(self) -> None:
        cells = self.program.counters[COUNTER].values()[:, 0]
        self.reached |= {point for point, count in zip(self._points, cells, strict=True) if count}


# ------------------------------------------------------------------------------------------- statements and branches


def _counted(definition: ProgramDef) -> tuple[ProgramDef, list[str]]:
    """Return a program that counts in a counter of its own, and what each of its cells stands for."""
    points: list[str] = []

    def count(what: str) -> Count:
        points.append(what)
        return Count(COUNTER, Const(len(points) - 1))

    def pipeline(item: Control) -> Control:
        nodes: dict[str, Any] = {}
        for name, node in item.nodes.items():
            if isinstance(node, Conditional):
                ways = {}
                for way, following in (("true", node.then), ("false", node.otherwise)):
                    ways[way] = f"{name} {way}"
                    action = ActionDef(-1, ways[way], (), (count(f"{node.where} if: {way}"),), node.where)
                    nodes[ways[way]] = _always(ways[way], action, following)
                nodes[name] = dataclasses.replace(node, then=ways["true"], otherwise=ways["false"])
            else:
                what = node.where if node.hidden else f"table {node.name}"
                actions = tuple(
                    dataclasses.replace(action, body=(count(f"{what}: action {action.name}"), *action.body))
                    for action in node.actions
                )
                nodes[name] = dataclasses.replace(node, actions=actions)
        return dataclasses.replace(item, nodes=nodes)

    ingress, egress = pipeline(definition.ingress), pipeline(definition.egress)
    counters = {**definition.counters, COUNTER: CounterDef(COUNTER, len(points))}
    return dataclasses.replace(definition, ingress=ingress, egress=egress, counters=counters), points


def _always(name: str, action: ActionDef, following: str | None) -> TableDef:
    return TableDef(
        name=name,
        match="exact",
        keys=(),
        size=1,
        actions=(action,),
        next={},
        base_next=following,
        on_hit=(False, None),
        on_miss=(False, None),
        default=Action(action.name),
        default_const=True,
        meter=None,
        profile=None,
        entries=(),
        where=action.where,
    )


# ----------------------------------------------------------------------------------------------------------- entries


class _Watched(dict[int, int]):
    """A table's lookups, which notes the kind of every entry that is hit, and misses."""

    def __init__(self, index: dict[int, int], table: Table, covered: Covered) -> None:
        super().__init__()
        self._index, self._table, self._covered = index, table, covered

    def __missing__(self, key: int) -> int:
        place = self._index[key]
        self._covered.reached |= set(_kinds_of(self._table, place))
        return place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


def _default_only(p4info: Path) -> set[tuple[str, str]]:
    """Return the actions that no entry or member may have, each with its table."""
    info = p4testgen.parse(p4info.read_text(encoding="utf-8"))
    names = {action["preamble"][0]["id"][0]: action["preamble"][0]["name"][0].decode() for action in info["actions"]}
    return {
        (table["preamble"][0]["name"][0].decode(), names[reference["id"][0]])
        for table in info["tables"]
        for reference in table["action_refs"]
        if reference.get("scope") == ["DEFAULT_ONLY"]
    }


def _kinds(table: Table, default_only: set[tuple[str, str]]) -> Iterator[str]:
    """Return every kind of entry that a table can have."""
    definition, where = table.definition, f"table {table.name}"
    yield f"{where}: no entry hit"
    if definition.profile is not None:
        yield from (f"{where}: {what}" for what in ("member", "group of one", "group of several"))
    may = [action.name for action in definition.actions if (table.name, action.name) not in default_only]
    names = [name.rpartition(".")[2] for name in may]
    yield from (f"{where}: entry does {name}" for name in names)
    forms = {"exact": ["exact"], "lpm": ["any", "prefix", "whole"], "ternary": ["any", "mask", "whole"]}
    for key in definition.keys:
        yield from (f"{where}: {key.name} {form}" for form in forms[key.match])
    if definition.meter:
        yield from (f"{where}: meter {what}" for what in ("set", "not set"))


def _kinds_of(table: Table, place: int) -> Iterator[str]:
    """Return the kinds that the entry at a place is of."""
    where = f"table {table.name}"
    if place == 0:
        yield f"{where}: no entry hit"
        return
    handle = place // table.slot.stride - 1
    (entry,) = (one for one in table.entries() if one.handle == handle)
    target, actions = entry.target, []
    match target:
        case Action():
            actions.append(target)
        case MemberRef(number):
            assert table.profile is not None
            yield f"{where}: member"
            actions.append(table.profile.members()[number])
        case GroupRef(number):
            assert table.profile is not None
            members = table.profile.groups()[number]
            yield f"{where}: group of {'one' if len(members) == 1 else 'several'}"
            actions += [table.profile.members()[member] for member in members]
    for action in actions:
        yield f"{where}: entry does {action.name.rpartition('.')[2]}"
    for key in table.definition.keys:
        yield f"{where}: {key.name} {_form(key.match, key.width, entry.match.get(key.name))}"
    if table.definition.meter:
        config: MeterConfig | None = table.get_meter(entry.match, entry.priority)
        yield f"{where}: meter {'not set' if config is None else 'set'}"


def _form(match: str, width: int, value: Any) -> str:
    if match == "exact":
        return "exact"
    bits = 0 if value is None else value[1]
    if bits == 0:
        return "any"
    return "whole" if bits == (width if match == "lpm" else (1 << width) - 1) else {"lpm": "prefix"}.get(match, "mask")


# ------------------------------------------------------------------------------------------------------------ parser


class _Parser:
    """Walks a packet through the states of a program's parser."""

    def __init__(self, definition: ProgramDef) -> None:
        self._definition = definition

    def everything(self) -> set[str]:
        return {point for state in self._definition.states.values() for point in self._points(state)}

    @staticmethod
    def _points(state: ParserState) -> Iterator[str]:
        yield from (f"parser {state.name}: to {case.next or 'accept'}, {case.values}" for case in state.cases)
        yield f"parser {state.name}: default"
        yield from (f"parser {state.name}: too short for {one.header}" for one in _extracted(state))

    def walk(self, data: bytes) -> Iterator[str]:
        name: str | None = self._definition.first_state
        offset, values = 0, dict[Field, int]()
        while name is not None:
            state = self._definition.states[name]
            for one in _extracted(state):
                header = self._definition.headers[one.header]
                size = header.width // 8
                if len(data) - offset < size:
                    yield f"parser {state.name}: too short for {one.header}"
                    return
                whole = int.from_bytes(data[offset : offset + size], "big")
                for field in header.fields.values():
                    values[field] = whole >> (header.width - field.offset - field.width) & ((1 << field.width) - 1)
                offset += size
            keys = [values[key] for key in state.keys]
            for case in state.cases:
                if all(k & m == v for k, m, v in zip(keys, case.masks, case.values, strict=True)):
                    yield f"parser {state.name}: to {case.next or 'accept'}, {case.values}"
                    name = case.next
                    break
            else:
                yield f"parser {state.name}: default"
                name = state.default


def _extracted(state: ParserState) -> list[Extract]:
    return [one for one in state.operations if isinstance(one, Extract)]
