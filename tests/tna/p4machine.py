# SPDX-License-Identifier: Apache-2.0
"""Runs what ``p4syntax`` has read: tables, statements and expressions."""

import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tna.p4externs import (
    Bucket,
    Checksum,
    Counter,
    DirectMeter,
    Extern,
    Hash,
    Mirror,
    PacketIn,
    Register,
    RegisterAction,
    Selector,
)
from tests.tna.p4syntax import Block, Reader, Tree
from tests.tna.p4tokens import P4Error
from tests.tna.p4values import CONSTANTS, WIDTHS, Scope, Struct, Value, Width, joined, to_bytes


@dataclass
class Entry:
    """An entry of a table: for each key a value and a mask, and what happens."""

    match: dict[str, tuple[int, int]]
    priority: int
    target: tuple[str, Any]
    """``("action", (name, numbers))``, ``("member", id)`` or ``("group", id)``."""
    bucket: Bucket | None = None

    def fits(self, keys: dict[str, int]) -> bool:
        """Say whether it matches."""
        return all(keys[name] & mask == value & mask for name, (value, mask) in self.match.items())

    @property
    def rank(self) -> tuple[int, int]:
        """The higher goes first: by priority, else the longer prefix; of equals, the one that came first."""
        return self.priority, 0 if self.priority else sum(mask.bit_count() for _, mask in self.match.values())


@dataclass
class TableState:
    """The entries of a table."""

    entries: list[Entry] = field(default_factory=list)
    default: tuple[str, list[int]] | None = None


class Instance:
    """A control or parser with its externs."""

    def __init__(self, machine: "Machine", block: Block, path: str) -> None:
        self.block, self.path = block, path
        self.scope = Scope(machine.top)
        self.parts: dict[str, Any] = {}
        for instance in block.instances:
            name = instance[3]
            self.parts[name] = machine.make(instance, f"{path}.{name}" if path else name, self.scope)
            self.scope.declare(name, self.parts[name], None)


class Machine:
    """A program of ``p4/tna``.

    Attributes
    ----------
    tables
        Entries, by the tables' short names.
    parts
        Externs, by their short names.
    reached
        Actions that ran, and statements, by where they stand in the tree.
    """

    def __init__(self, path: Path) -> None:
        self.source = Reader(path).source
        self.top = Scope()
        self.tables: dict[str, TableState] = defaultdict(TableState)
        self.members: dict[int, tuple[str, list[int]]] = {}
        self.groups: dict[int, list[int]] = {}
        self.parts: dict[str, Extern] = {}
        self.reached: set[str] = set()
        self.accessed: dict[int, bool] = {}
        self.mirrored: list[tuple[int, bytes]] = []
        self.matched = Entry({}, 0, ("action", ("", [])))
        self.now_ns = self.frame_bytes = 0
        for name, (number, bits) in CONSTANTS.items():
            self.top.declare(name, Value(number, (bits, False)), None)
        for name, tree in self.source.constants.items():
            self.top.declare(name, self.value(tree, self.top), None)
        for instance in self.source.instances:
            self.top.declare(instance[3], self.make(instance, instance[3], self.top), None)
        self.stages = [Instance(self, self.source.blocks[name], "") for name in self.source.pipeline]

    def width(self, kind: Tree) -> Width:
        """Return how wide a type is."""
        if kind[0] in ("bit", "int"):
            return self.value(kind[1], self.top).number, kind[0] == "int"
        if kind[0] in self.source.types:
            return self.width(self.source.types[kind[0]])
        if kind[0] in WIDTHS:
            return WIDTHS[kind[0]], False
        raise P4Error(f"how wide is {kind[0]}?")

    def make(self, instance: Tree, name: str, scope: Scope) -> Any:
        """Return what an instantiation makes."""
        _, kind, arguments, short, body = instance
        made: Any
        match kind[0]:
            case "Register":
                made = Register(self, kind)
            case "RegisterAction":
                made = RegisterAction(self, kind, scope.find(arguments[0][1]), scope, body)
            case "Hash":
                made = Hash(self, kind, arguments[0][2])
            case "Counter":
                made = Counter(self)
            case "DirectMeter":
                made = DirectMeter(self)
            case "Checksum":
                made = Checksum()
            case "Mirror":
                made = Mirror(self, self.value(arguments[0], scope).number)
            case "ActionProfile" | "ActionSelector":
                made = Selector()
            case control if control in self.source.blocks:
                return Instance(self, self.source.blocks[control], name)
            case other:
                raise P4Error(f"{name}: no {other} here")
        self.parts[short] = made
        return made

    # -------------------------------------------------------------------------------------------------- statements

    def call_stage(self, instance: Instance, arguments: list[Any]) -> None:
        """Run a control or parser with these arguments."""
        scope = Scope(instance.scope)
        for (_, _, name), argument in zip(instance.block.parameters, arguments, strict=True):
            scope.declare(name, argument, None)
        scope.declare("self", instance, None)
        for part in instance.parts.values():
            if isinstance(part, Checksum):
                part.clear()
        # What a control declares is new for each packet, and known to the actions of its registers.
        for _, kind, name, value in instance.block.variables:
            width = self.width(kind)
            instance.scope.declare(name, self.value(value, scope).to(width) if value else Value(0, width), width)
        for (_, _, name), argument in zip(instance.block.parameters, arguments, strict=True):
            instance.scope.declare(name, argument, None)
        if instance.block.states:
            state = "start"
            while state not in ("accept", "reject"):
                self.reached.add(f"{instance.block.name}.{state}")
                state = self._state(instance.block.states[state], scope)
        else:
            self.run(instance.block.body, scope)

    def _state(self, statements: list[Tree], scope: Scope) -> str:
        for statement in statements:
            if statement[0] != "transition":
                self.run([statement], scope)
                continue
            keys = [self.value(key, scope).number for key in statement[1]]
            for values, state in statement[2]:
                if all(self._selects(value, key, scope) for value, key in zip(values, keys, strict=False)):
                    return str(state)
        return "reject"

    def _selects(self, tree: Tree, key: int, scope: Scope) -> bool:
        if tree[0] == "any":
            return True
        if tree[0] == "mask":
            mask = self.value(tree[2], scope).number
            return key & mask == self.value(tree[1], scope).number & mask
        return bool(key == self.value(tree, scope).number)

    def run(self, statements: list[Tree], scope: Scope) -> None:
        """Run statements."""
        for statement in statements:
            match statement:
                case ("block", inner):
                    self.run(inner, Scope(scope))
                case ("if", condition, then, otherwise):
                    truth = bool(self.value(condition, scope).number)
                    self.reached.add(f"{'then' if truth else 'else'} {id(statement)}")
                    self.run([then if truth else otherwise], scope)
                case ("variable", kind, name, value):
                    width = self.width(kind)
                    scope.declare(name, self.value(value, scope).to(width) if value else Value(0, width), width)
                case ("assign", target, value):
                    self._assign(target, self.value(value, scope), scope)
                case ("call", call):
                    self.value(call, scope)
                case _:
                    raise P4Error(f"no statement {statement[0]} here")

    def _assign(self, target: Tree, value: Any, scope: Scope) -> None:
        if target[0] == "name":
            scope.put(target[1], value)
            return
        owner = self.value(target[1], scope)
        if isinstance(value, Struct):
            owner.fields[target[2]] = value
        else:
            owner.put(target[2], value)

    # ------------------------------------------------------------------------------------------------- expressions

    def value(self, tree: Tree, scope: Scope) -> Any:
        """Return what an expression is."""
        match tree:
            case ("number", bool() as truth, _):
                return Value(int(truth), (1, False))
            case ("number", number, width):
                return Value(number, width)
            case ("name", name):
                found = scope.find(name)
                return found if found is not None else name
            case ("member", inner, name):
                return self._member(self.value(inner, scope), name)
            case ("slice", inner, high, low):
                first, last = (self.value(part, scope).number for part in (high, low))
                return Value(self.value(inner, scope).number >> last).to((first - last + 1, False))
            case ("cast", kind, inner):
                return self.value(inner, scope).to(self.width(kind))
            case ("tuple", parts):
                return [self.value(part, scope) for part in parts]
            case ("unary", operator, inner):
                value = self.value(inner, scope)
                if operator == "!":
                    return Value(int(not value.number), (1, False))
                return Value(~value.number if operator == "~" else -value.number).to(value.width)
            case ("binary", operator, left, right):
                return self._binary(operator, left, right, scope)
            case ("call", function, arguments, kind):
                return self._call(function, arguments, kind, scope)
        raise P4Error(f"no expression {tree[0]} here")

    def _member(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Struct):
            if name in owner.fields:
                return owner.fields[name]
            raise P4Error(f"{owner.name} has no {name}")
        if isinstance(owner, dict):
            return owner[name]
        return f"{owner}.{name}"

    def _binary(self, operator: str, left: Tree, right: Tree, scope: Scope) -> Value:
        first = self.value(left, scope)
        truth = (1, False)
        if operator == "&&":
            return Value(int(bool(first.number) and bool(self.value(right, scope).number)), truth)
        if operator == "||":
            return Value(int(bool(first.number) or bool(self.value(right, scope).number)), truth)
        second = self.value(right, scope)
        a, b = first.number, second.number
        if operator == "++":
            return joined([first, second])
        if operator in ("<<", ">>"):
            return Value(a << b if operator == "<<" else a >> b).to(first.width)
        if operator in ("==", "!=", "<", ">", "<=", ">="):
            compared = {"==": a == b, "!=": a != b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}
            return Value(int(compared[operator]), truth)
        width = first.width or second.width
        if operator == "|-|":
            return Value(max(0, a - b), width)
        computed = {"+": a + b, "-": a - b, "*": a * b, "&": a & b, "|": a | b, "^": a ^ b}
        return Value(computed[operator]).to(width)

    def _call(self, function: Tree, arguments: list[Tree], kind: Tree | None, scope: Scope) -> Any:
        if function[0] == "name":
            if function[1] == "port_metadata_unpack":
                assert kind
                return self.value(arguments[0], scope).unpack(self, kind[0])
            self._act(function[1], [self.value(each, scope) for each in arguments], scope)
            return None
        owner_tree, name = function[1], function[2]
        if owner_tree[0] == "name" and name == "apply":
            instance: Instance = scope.find("self")
            if owner_tree[1] in instance.block.tables:
                return self._apply(owner_tree[1], instance, scope)
        owner = self.value(owner_tree, scope)
        given = [self.value(each, scope) for each in arguments]
        if isinstance(owner, Instance):
            return self.call_stage(owner, given)
        if isinstance(owner, Struct):
            if name == "isValid":
                return Value(int(owner.valid), (1, False))
            owner.valid = {"setValid": True, "setInvalid": False}[name]
            return None
        if isinstance(owner, Mirror):
            assert kind
            return owner.emit(given[0], given[1], kind[0])
        if isinstance(owner, PacketIn) and name == "lookahead":
            assert kind
            return owner.lookahead(self.width(kind))
        if not isinstance(owner, Extern):
            raise P4Error(f"{owner}.{name} is nothing that can be called")
        return getattr(owner, name)(*given)

    def _act(self, name: str, numbers: list[Value], scope: Scope) -> None:
        if name == "NoAction":
            return
        instance: Instance = scope.find("self")
        self.reached.add(f"{instance.block.name}.{name}")
        parameters, body = instance.block.actions[name]
        inner = Scope(scope)
        for parameter, number in zip(parameters, numbers, strict=True):
            inner.declare(parameter, number, number.width)
        self.run(body, inner)

    # ------------------------------------------------------------------------------------------------------ tables

    def _apply(self, name: str, instance: Instance, scope: Scope) -> dict[str, Value]:
        table = instance.block.tables[name]
        keys = {label: self.value(tree, scope).number for tree, kind, label in table["key"] if kind != "selector"}
        for tree, action, numbers in table["entries"]:
            if [self.value(tree, scope).number] == list(keys.values()):
                self._act(action, [self.value(each, scope) for each in numbers], scope)
                return _outcome(hit=True)
        state = self.tables[name]
        fitting = [entry for entry in state.entries if entry.fits(keys)]
        if not fitting:
            self.reached.add(f"{name} missed")
            default = state.default or (
                table["default"][0],
                [self.value(each, scope).number for each in table["default"][1]],
            )
            self._act_with(*default, instance, scope)
            return _outcome(hit=False)
        self.reached.add(f"{name} hit")
        self.matched = max(fitting, key=lambda entry: entry.rank)
        how, what = self.matched.target
        if how == "group":
            what = self._chosen(self.groups[what], table, scope)
        self._act_with(*(what if how == "action" else self.members[what]), instance, scope)
        return _outcome(hit=True)

    def _chosen(self, members: list[int], table: dict[str, Any], scope: Scope) -> int:
        """Return a member by the hash of the flow plus ``entropy``, as the program for BMv2; a Tofino has its way.

        Of IPv6 addresses, all bits count, as on BMv2.
        """
        fields = [tree for tree, kind, _ in table["key"] if kind == "selector"]
        for tree in fields:
            owner = self.value(tree[1], scope)
            if owner.header and not owner.valid:
                raise P4Error(f"a selector reads {tree[2]} of a header that is not there")
        selecting = {tree[2]: self.value(tree, scope) for tree in fields}
        ipv6 = scope.find("hdr").fields["ipv6"]
        if ipv6.valid:
            selecting |= {name: ipv6.fields[name] for name in ("src_addr", "dst_addr")}
        flow = [selecting[name] for name in ("src_addr", "dst_addr", "protocol", "src_port", "dst_port")]
        path = zlib.crc32(to_bytes(joined(flow))) + selecting["entropy"].number
        return members[path % (1 << 32) % len(members)]

    def _act_with(self, name: str, numbers: list[int], instance: Instance, scope: Scope) -> None:
        self._act(name, [Value(number) for number in numbers], scope)


def _outcome(*, hit: bool) -> dict[str, Value]:
    return {"hit": Value(int(hit), (1, False)), "miss": Value(int(not hit), (1, False))}
