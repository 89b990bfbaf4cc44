# SPDX-License-Identifier: Apache-2.0
"""Runs what ``p4syntax`` has read, with the parts of TNA that ``p4/tna`` uses, after ``tna.p4`` and its manual.

Numbers are Python's; an operation gives as many bits as its operands have. What nobody wrote reads as zero.
"""

import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from p4syntax import Block, P4Error, Reader, Tree

Width = tuple[int, bool]
"""Bits, and whether signed."""
INTRINSIC = {
    "ingress_intrinsic_metadata_t": {"ingress_port": 9, "ingress_mac_tstamp": 48},
    "ingress_intrinsic_metadata_for_deparser_t": {"drop_ctl": 3, "mirror_type": 3},
    "ingress_intrinsic_metadata_for_tm_t": {"ucast_egress_port": 9, "qid": 5, "packet_color": 2},
    "egress_intrinsic_metadata_t": {"deq_qdepth": 19},
    "egress_intrinsic_metadata_for_deparser_t": {"drop_ctl": 3, "mirror_type": 3},
}
"""The fields of tna.p4 that the program reads or writes."""
WIDTHS = {"bool": 1, "PortId_t": 9, "QueueId_t": 5, "MirrorId_t": 10, "MirrorType_t": 3}


class Value(NamedTuple):
    number: int
    width: Width | None = None
    """None: a number without a width of its own."""

    @property
    def bits(self) -> int:
        """How many."""
        if self.width is None:
            raise P4Error(f"{self.number} has no width")
        return self.width[0]

    def to(self, width: Width | None) -> "Value":
        """Return it with another width: bits beyond it are lost."""
        if width is None:
            return self
        bits, signed = width
        number = int(self.number) & (1 << bits) - 1
        return Value(number - (1 << bits) if signed and number >> bits - 1 else number, width)


class TooShortError(Exception):
    """The packet ends within a header: the parser drops it."""


class Struct:
    """A header or struct: fields with widths, other structs among them."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.name, self.valid, self.header = name, False, False
        self.fields: dict[str, Any] = {}
        self.widths: dict[str, Width] = {}
        self.order: list[str] = []
        if name in INTRINSIC:
            members: list[tuple[str, Tree]] = [
                (each, ("bit", ("number", bits, None))) for each, bits in INTRINSIC[name].items()
            ]
        elif name in machine.source.structs:
            self.header, given = machine.source.structs[name]
            members = [(each, kind) for each, kind, _ in given]
        else:  # of tna.p4, and never looked at
            members = []
        for each, kind in members:
            self.order.append(each)
            if kind[0] in machine.source.structs:
                self.fields[each] = Struct(machine, kind[0])
            else:
                self.widths[each] = machine.width(kind)
                self.fields[each] = Value(0, self.widths[each])

    def put(self, name: str, value: Value) -> None:
        """Write a field."""
        self.fields[name] = value.to(self.widths[name])

    @property
    def flat(self) -> list[Value]:
        """All its fields."""
        return [self.fields[name] for name in self.order]


def joined(values: list[Value]) -> Value:
    """Return the bits of some values, one after the other."""
    number = bits = 0
    for value in values:
        number = number << value.bits | value.number & (1 << value.bits) - 1
        bits += value.bits
    return Value(number, (bits, False))


def to_bytes(value: Value) -> bytes:
    """Return the bits of a value as bytes, zeros at the end."""
    size = -(-value.bits // 8)
    return (value.number << 8 * size - value.bits).to_bytes(size, "big")


def ones_sum(values: list[Value]) -> int:
    """Return the sum of 16-bit words in ones' complement."""
    data = to_bytes(joined(values))
    total = sum(int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


# Externs ----------------------------------------------------------------------------------------------------------


class Extern:
    """Something that keeps state, or computes, under a name."""


class Register(Extern):
    def __init__(self, machine: "Machine", kind: Tree) -> None:
        self.kind, self._machine = kind[1], machine
        self.cells: dict[int, Any] = {}

    def cell(self, index: int) -> Any:
        if index not in self.cells:
            made = self._machine.source.structs.get(self.kind[0])
            self.cells[index] = (
                Struct(self._machine, self.kind[0]) if made else Value(0, self._machine.width(self.kind))
            )
        return self.cells[index]


class RegisterAction(Extern):
    def __init__(self, machine: "Machine", kind: Tree, register: Register, scope: "Scope", body: Any) -> None:
        self._machine, self._register, self._scope = machine, register, scope
        self._parameters, self._body = body
        self._result = machine.width(kind[3]) if len(kind) > 3 else None
        self.accessed = 0

    def execute(self, index: Value) -> Value:
        """Run it on a cell; twice for one packet is what no chip does."""
        if self._machine.accessed.get(id(self._register)):
            raise P4Error("a packet accesses a register twice")
        self._machine.accessed[id(self._register)] = True
        scope = Scope(self._scope)
        name = self._parameters[0][2]
        cell = self._register.cell(index.number)
        scope.declare(name, cell, None if isinstance(cell, Struct) else cell.width)
        if len(self._parameters) > 1:
            scope.declare(self._parameters[1][2], Value(0, self._result), self._result)
        scope.declare("this", self, None)
        self._machine.run(self._body, scope)
        self._register.cells[index.number] = scope.find(name)
        return scope.find(self._parameters[1][2]) if len(self._parameters) > 1 else Value(0, (1, False))

    def predicate(self, first: Value, second: Value) -> Value:
        """Return one bit of four: which of the two conditions hold."""
        return Value(1 << (bool(first.number) | bool(second.number) << 1), (8, False))


class Hash(Extern):
    def __init__(self, machine: "Machine", kind: Tree, algorithm: str) -> None:
        self._width, self._algorithm = machine.width(kind[1]), algorithm
        self.always = 0
        """Bits that are set in whatever it gives."""

    def get(self, values: list[Value]) -> Value:
        whole = joined(values)
        number = whole.number if self._algorithm == "IDENTITY" else zlib.crc32(to_bytes(whole))
        return Value(number | self.always, (whole.bits, False)).to(self._width)


class Counter(Extern):
    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.cells: dict[int, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, index: Value) -> None:
        if self._machine.accessed.get(id(self)):
            raise P4Error("a packet is counted twice by one array")
        self._machine.accessed[id(self)] = True
        cell = self.cells[index.number]
        cell[0] += 1
        cell[1] += self._machine.frame_bytes


@dataclass
class Bucket:
    """A meter of an entry: committed and peak rate in bytes/s, with what is left of either burst."""

    rates: tuple[int, int, int, int]
    left: list[float] = field(default_factory=list)
    filled_s: float | None = None

    def color(self, size: int, now_s: float) -> int:
        """Return green (0), yellow (1) or red (3) for a frame, as RFC 2698 has it."""
        cir, cburst, pir, pburst = self.rates
        if self.filled_s is None:
            self.left = [float(cburst), float(pburst)]
        else:
            since_s = now_s - self.filled_s
            self.left = [min(cburst, self.left[0] + cir * since_s), min(pburst, self.left[1] + pir * since_s)]
        self.filled_s = now_s
        if self.left[1] < size:
            return 3
        self.left[1] -= size
        if self.left[0] < size:
            return 1
        self.left[0] -= size
        return 0


class DirectMeter(Extern):
    def __init__(self, machine: "Machine") -> None:
        self._machine = machine

    def execute(self) -> Value:
        bucket = self._machine.matched.bucket
        color = 0 if bucket is None else bucket.color(self._machine.frame_bytes, self._machine.now_ns / 1e9)
        return Value(color, (8, False))


class Checksum(Extern):
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was given: each packet has its own."""
        self._added: list[Value] = []
        self._rest = 0

    def add(self, values: Any) -> None:
        self._added += values.flat if isinstance(values, Struct) else values

    def subtract(self, values: list[Value]) -> None:
        self._rest = ones_sum([Value(self._rest, (16, False)), Value(0xFFFF ^ ones_sum(values), (16, False))])

    def verify(self) -> Value:
        return Value(int(ones_sum(self._added) != 0xFFFF), (1, False))

    def get(self) -> Value:
        return Value(self._rest, (16, False))

    def update(self, values: list[Value], zeros_as_ones: Value | None = None) -> Value:
        found = 0xFFFF ^ ones_sum(values)
        return Value(0xFFFF if zeros_as_ones and zeros_as_ones.number and not found else found, (16, False))


class Mirror(Extern):
    def __init__(self, machine: "Machine", kind: int) -> None:
        self._machine, self.kind = machine, kind

    def emit(self, session: Value, values: list[Value], header: str) -> None:
        """Send a copy of the packet, cut to the header of this name."""
        made = Struct(self._machine, header)
        widened = [value.to(made.widths[name]) for name, value in zip(made.order, values, strict=True)]
        self._machine.mirrored.append((session.number, to_bytes(joined(widened))))


class Selector(Extern):
    """An action selector; its hash is that of the selector fields."""


class PacketIn(Extern):
    def __init__(self, data: bytes, intrinsic: dict[str, int], port: int) -> None:
        self.data, self.at, self._intrinsic, self._port = data, 0, intrinsic, port

    def extract(self, into: Struct) -> None:
        if into.name in INTRINSIC:
            for name in into.order:
                into.put(name, Value(self._intrinsic.get(name, 0)))
            return
        values = self.bits(sum(into.widths[name][0] for name in into.order))
        for name in into.order:
            width = into.widths[name]
            values, number = divmod_left(values, width[0])
            into.put(name, Value(number))
        into.valid = True

    def bits(self, count: int, *, keep: bool = False) -> tuple[int, int]:
        """Return the next bits, and how many they are; without ``keep`` they are taken, up to a whole byte."""
        size = -(-count // 8)
        taken = self.data[self.at : self.at + size]
        if len(taken) < size:
            raise TooShortError
        self.at += 0 if keep else size
        return int.from_bytes(taken, "big") >> 8 * size - count, count

    def lookahead(self, width: Width) -> Value:
        return Value(self.bits(width[0], keep=True)[0], width)

    def unpack(self, machine: "Machine", name: str) -> Struct:
        """Return what the driver keeps for the port: here ports have the fabric's numbers."""
        made = Struct(machine, name)
        made.put(made.order[0], Value(self._port))
        return made


def divmod_left(values: tuple[int, int], width: int) -> tuple[tuple[int, int], int]:
    """Take the first bits of some; return what is left, and them."""
    number, count = values
    return (number & (1 << count - width) - 1, count - width), number >> count - width


class PacketOut(Extern):
    def __init__(self) -> None:
        self.data = b""

    def emit(self, what: Struct) -> None:
        for each in [what] if what.header else what.flat:
            if each.valid:
                self.data += to_bytes(joined(each.flat))


# Tables -----------------------------------------------------------------------------------------------------------


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
    """What the control plane has written into a table."""

    entries: list[Entry] = field(default_factory=list)
    default: tuple[str, list[int]] | None = None


class Scope:
    """Names in force, and those around them."""

    def __init__(self, outer: "Scope | None" = None) -> None:
        self._outer = outer
        self._values: dict[str, Any] = {}
        self._widths: dict[str, Width | None] = {}

    def declare(self, name: str, value: Any, width: Width | None) -> None:
        self._values[name], self._widths[name] = value, width

    def _owner(self, name: str) -> "Scope | None":
        scope: Scope | None = self
        while scope is not None and name not in scope._values:
            scope = scope._outer
        return scope

    def find(self, name: str) -> Any:
        owner = self._owner(name)
        return None if owner is None else owner._values[name]

    def put(self, name: str, value: Value) -> None:
        owner = self._owner(name)
        if owner is None:
            raise P4Error(f"no variable {name}")
        owner._values[name] = value.to(owner._widths[name])


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
            # As BMv2, which leaves out what is not there; a Tofino chooses in its own way.
            fields = [tree for tree, kind, _ in table["key"] if kind == "selector"]
            there = [
                tree for tree in fields if self.value(tree[1], scope).valid or not self.value(tree[1], scope).header
            ]
            selecting = [self.value(tree, scope) for tree in there]
            members = self.groups[what]
            what = members[zlib.crc32(to_bytes(joined(selecting))) % len(members)]
        self._act_with(*(what if how == "action" else self.members[what]), instance, scope)
        return _outcome(hit=True)

    def _act_with(self, name: str, numbers: list[int], instance: Instance, scope: Scope) -> None:
        self._act(name, [Value(number) for number in numbers], scope)


def _outcome(*, hit: bool) -> dict[str, Value]:
    return {"hit": Value(int(hit), (1, False)), "miss": Value(int(not hit), (1, False))}
