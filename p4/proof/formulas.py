# SPDX-License-Identifier: Apache-2.0
"""A compiled program as formulas over one packet, for z3.

What a control plane writes is arbitrary: any entry may match, with any action and any arguments, except that it names a
port that exists. Meters may give any colour, hashes any number, and registers may hold anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import z3

from dlcp.switch import DROP_PORT
from dlcp.switch.executor import analysis, model
from dlcp.switch.executor.hashes import OVER_BYTES, pack
from dlcp.wire import FIELD_BITS

WORK_BITS: Final = 80
"""Width of computations: BMv2 computes with numbers of any size, and this is more than any of the program's needs."""
ROUTES: Final = ("ipv4_route", "ipv6_route", "ethernet_route")
MESSAGE_BITS: Final = {name: FIELD_BITS[name] for name in ("job", "step", "message", "sender")}
"""What identifies a message, as the program hashes it."""

_Name = TypeVar("_Name")


class Lookup(NamedTuple):
    """What one packet finds in a table."""

    hit: Any
    action: Any
    """The number of the action among the table's; one more than the last for none."""
    arguments: tuple[tuple[Any, ...], ...]
    """For each action."""
    colour: Any
    """What the entry's meter says; None for a table without one."""


@dataclass
class State:
    """Everything that a packet can change: fields and validity bits, registers, and how the packet got here."""

    fields: dict[model.Field, Any]
    valid: dict[str, Any]
    registers: dict[str, Any]
    size: Any
    applied: dict[str, Any] = field(default_factory=dict)
    keys: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Of the tables met, by their short name and the key's place."""

    def copy(self) -> "State":
        """Return a copy that can be changed on its own."""
        fields, valid, registers = dict(self.fields), dict(self.valid), dict(self.registers)
        return State(fields, valid, registers, self.size, dict(self.applied), dict(self.keys))

    def join(self, condition: Any, other: "State") -> "State":
        """Return this state where a condition holds, and the other one elsewhere."""
        if z3.is_true(condition):
            return self
        if z3.is_false(condition):
            return other

        def each(mine: dict[_Name, Any], theirs: dict[_Name, Any]) -> dict[_Name, Any]:
            return {name: _choose(condition, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}

        return State(
            each(self.fields, other.fields),
            each(self.valid, other.valid),
            each(self.registers, other.registers),
            z3.If(condition, self.size, other.size),
            each(self.applied, other.applied),
            each(self.keys, other.keys),
        )


def _choose(condition: Any, one: Any, other: Any) -> Any:
    if one is None or other is None:  # `applied` and `keys` lack names: of tables not met
        known = other if one is None else one
        return z3.And(known, condition == z3.BoolVal(known is one)) if z3.is_bool(known) else known
    return one if one is other or one.eq(other) else z3.If(condition, one, other)


def _until(
    run: Callable[[str | None, str | None, State], State], stop: str | None, name: str | None, state: State
) -> State:
    """Run the nodes from ``name`` up to ``stop``."""
    return run(name, stop, state)


class Machine:
    """A program as formulas over one packet.

    Parameters
    ----------
    program
        The compiled program.
    name
        Prefix of the packet's variables.
    registers
        Register contents before the packet; arbitrary by default.
    messages
        Messages whose owners are computed as switches do; else a hash is an arbitrary function of its input.

    Attributes
    ----------
    before, parsed, queued, sent
        The packet's state as it comes, after the parser, after ingress, and after egress.
    lookups
        By short name of the table.
    short
        For each header, whether the packet ends within it.
    time_us, port
        When and where it comes.
    left_behind
        The packets in its queue when it leaves.
    """

    def __init__(
        self,
        program: model.ProgramDef,
        name: str,
        registers: Mapping[str, Any] | None = None,
        messages: "Sequence[tuple[int, ...]]" = (),
    ) -> None:
        self.program, self.name, self.messages = program, name, messages
        self.lookups: dict[str, Lookup] = {}
        self._free = 0
        self._rules: list[Any] = []
        fields = {
            item: z3.BitVecVal(0, item.width) if header.metadata else z3.BitVec(f"{name}.{text_of(item)}", item.width)
            for header in program.headers.values()
            for item in header.fields.values()
        }
        self.time_us = z3.BitVec(f"{name}.time_us", 48)
        self.port = z3.BitVec(f"{name}.port", 9)
        self.wrong_checksum = z3.BitVec(f"{name}.wrong_checksum", 1)
        length = z3.BitVec(f"{name}.length", 32)
        given = {"standard_metadata.ingress_port": self.port, "standard_metadata.packet_length": length}
        given["intrinsic_metadata.ingress_global_timestamp"] = self.time_us
        for alias, value in given.items():
            if alias in program.standard:
                fields[program.standard[alias]] = value
        self.short = {header: z3.Bool(f"{name}.short.{header}") for header in program.headers}
        self.before = State(
            fields,
            {header: z3.BoolVal(False) for header in program.headers},
            dict(registers) if registers is not None else arbitrary_registers(program, name),
            z3.ZeroExt(WORK_BITS - 32, length),
        )
        self.parsed = self._parse()
        self.queued = self._control(program.ingress, self._verified(self.parsed))
        after = self.queued.copy()
        self.left_behind = z3.BitVec(f"{name}.left_behind", 19)
        after.fields[program.standard["queueing_metadata.deq_qdepth"]] = self.left_behind
        after.fields[program.standard["standard_metadata.egress_port"]] = self.spec(self.queued)
        self.sent = self._control(program.egress, after)

    # ---------------------------------------------------------------------------------------------------- questions

    def field(self, state: State, name: str) -> Any:
        """Return a field's value in a state, by ``header.name``; a wide one as the numbers of its words, joined."""
        header, _, label = name.rpartition(".")
        fields = self.program.headers[header].fields
        if label in fields:
            return state.fields[fields[label]]
        return z3.Concat(*(state.fields[item] for key, item in fields.items() if key.startswith(f"{label}[")))

    def spec(self, state: State) -> Any:
        """Return the egress port that a state asks for."""
        return state.fields[self.program.standard["standard_metadata.egress_spec"]]

    @property
    def queue(self) -> Any:
        """The queue that ingress has chosen."""
        return self.queued.fields[self.program.standard["intrinsic_metadata.priority"]]

    @property
    def dropped(self) -> Any:
        """Whether ingress drops the packet."""
        return self.spec(self.queued) == DROP_PORT

    @property
    def routed(self) -> Any:
        """Whether the packet can be forwarded: it is whole, and a table has given it an egress port."""
        port = self.program.standard["standard_metadata.egress_spec"]
        ways = []
        for name in ROUTES:
            numbers = [
                number
                for number, action in enumerate(self.table(name).actions)
                if any(analysis.target_of(statement) == port for statement in action.body)
            ]
            chosen = z3.Or(*(self.lookups[name].action == number for number in numbers))
            ways.append(z3.And(self.met(name), self.lookups[name].hit, chosen))
        return z3.Or(*ways)

    @property
    def trimmed(self) -> Any:
        """Whether egress cuts the packet, or ingress or egress calls it trimmed."""
        called = self.field(self.sent, "dlcp.trimmed") != self.field(self.before, "dlcp.trimmed")
        return z3.And(z3.Not(self.dropped), z3.Or(self.sent.size != self.before.size, called))

    def chose(self, table: str, action: str) -> Any:
        """Return whether a table runs an action on the packet."""
        names = [item.name.rpartition(".")[2] for item in self.table(table).actions]
        return z3.And(self.met(table), self.lookups[table].action == names.index(action))

    def argument(self, table: str, action: str, name: str) -> Any:
        """Return an argument of an action that a table runs on a hit."""
        actions = self.table(table).actions
        number = [item.name.rpartition(".")[2] for item in actions].index(action)
        place = [item.name for item in actions[number].parameters].index(name)
        return self.lookups[table].arguments[number][place]

    def met(self, table: str) -> Any:
        """Return whether the packet is looked up in a table."""
        return self.sent.applied.get(table, z3.BoolVal(False))

    def keys(self, table: str) -> list[Any]:
        """Return the packet's keys in a table; arbitrary if it is not met."""
        return [self.sent.keys[table, place] for place in range(len(self.table(table).keys))]

    def table(self, name: str) -> model.TableDef:
        """Return a table by its short name."""
        tables = model.visible_tables(self.program)
        return next(item for item in tables if item.name.rpartition(".")[2] == name)

    @property
    def sane(self) -> Any:
        """What holds anyway: lookups find what tables can hold, and entries name ports other than the drop port."""
        rules = list(self._rules)
        for name in ROUTES:
            for action, values in zip(self.table(name).actions, self.lookups[name].arguments, strict=True):
                for parameter, value in zip(action.parameters, values, strict=True):
                    if parameter.name == "port":
                        rules.append(value != DROP_PORT)
        return z3.And(*rules)

    # ------------------------------------------------------------------------------------------------------- parser

    def _parse(self) -> State:
        ends = list(self._paths(self.program.first_state, z3.BoolVal(True), self.before.copy()))
        state = ends[-1][1]
        for condition, other in reversed(ends[:-1]):
            state = other.join(condition, state)
        return state

    def _paths(self, name: str | None, condition: Any, state: State) -> Iterator[tuple[Any, State]]:
        """Yield each way through the parser: its condition, and the state at its end."""
        if name is None:
            yield condition, state
            return
        step = self.program.states[name]
        for operation in step.operations:
            if isinstance(operation, model.Extract):
                short = self.short[operation.header]
                ended = state.copy()
                error = self.program.standard.get("standard_metadata.parser_error")
                if error is not None:
                    ended.fields[error] = z3.BitVecVal(self.program.errors["PacketTooShort"], error.width)
                yield z3.And(condition, short), ended
                condition = z3.And(condition, z3.Not(short))
                state.valid[operation.header] = z3.BoolVal(True)
            elif isinstance(operation, model.Assign):
                self._assign(state, operation, ())
            else:
                raise model.UnsupportedFeatureError("verify in the parser", f"parser state {name}")
        rest = condition
        for case in step.cases:
            same = [
                state.fields[key] & mask == z3.BitVecVal(value, key.width)
                for key, value, mask in zip(step.keys, case.values, case.masks, strict=True)
            ]
            yield from self._paths(case.next, z3.And(rest, *same), state.copy())
            rest = z3.And(rest, z3.Not(z3.And(*same)))
        yield from self._paths(step.default, rest, state.copy())

    def _verified(self, state: State) -> State:
        """Return the state after the verification of checksums, which may find anything."""
        flag = self.program.standard.get("standard_metadata.checksum_error")
        if flag is None or not any(item.verify for item in self.program.checksums):
            return state
        state = state.copy()
        guards = [
            z3.And(state.valid[item.target.header], self._condition(state, item.condition, ()))
            for item in self.program.checksums
            if item.verify and item.condition is not None
        ]
        state.fields[flag] = z3.If(z3.Or(*guards), self.wrong_checksum, z3.BitVecVal(0, flag.width))
        return state

    # ----------------------------------------------------------------------------------------------------- controls

    def _control(self, control: model.Control, state: State) -> State:
        control = analysis.shorten(control)
        joins = analysis.joins(control)

        def run(name: str | None, stop: str | None, state: State) -> State:
            while name is not None and name != stop:
                node, join = control.nodes[name], joins[name]
                if isinstance(node, model.Conditional):
                    condition = z3.simplify(self._condition(state, node.condition, ()))
                    then = run(node.then, join, state.copy())
                    state = then.join(condition, run(node.otherwise, join, state.copy()))
                else:
                    state = self._table(node, state, partial(_until, run, join))
                name = join
            return state

        return run(control.first, None, state)

    def _table(self, table: model.TableDef, state: State, go_on: Callable[[str | None, State], State]) -> State:
        if table.hidden:
            assert table.default is not None
            action = analysis.Usage.default_action(table)
            values = [z3.BitVecVal(table.default.params[item.name], item.width) for item in action.parameters]
            self._act(action, values, state)
            return go_on(analysis.successor(table, action, hit=False), state)
        short = table.name.rpartition(".")[2]
        found = self._look_up(table, state, short)
        none = len(table.actions)
        default = table.default.name if table.default is not None else None
        ways: dict[str | None, tuple[Any, State]] = {}  # by the node that follows
        for number in range(none, -1, -1):
            for hit in (False, True):
                after = state.copy()
                after.applied[short] = z3.BoolVal(True)
                if number == none:
                    if default is not None or (hit and table.profile is None):
                        continue
                    known, node = table.on_hit if hit else table.on_miss
                    following = node if known else table.base_next
                else:
                    action = table.actions[number]
                    if not hit and (default is None or (table.default_const and action.name != default)):
                        continue
                    values = list(found.arguments[number])
                    if not hit and table.default_const and table.default is not None:
                        values = [
                            z3.BitVecVal(table.default.params[item.name], item.width) for item in action.parameters
                        ]
                    if hit and table.meter is not None:
                        target = self.program.meters[table.meter].target
                        assert target is not None
                        after.fields[target] = found.colour
                    self._act(action, values, after)
                    following = analysis.successor(table, action, hit)
                met = z3.And(found.action == number, found.hit == z3.BoolVal(hit))
                if following in ways:
                    others, other = ways[following]
                    ways[following] = z3.Or(met, others), after.join(met, other)
                else:
                    ways[following] = met, after
        self._rules.append(z3.Or(*(met for met, _ in ways.values())))
        result: State | None = None
        for following, (met, after) in ways.items():
            after = go_on(following, after)
            result = after if result is None else after.join(met, result)
        assert result is not None
        return result

    def _look_up(self, table: model.TableDef, state: State, short: str) -> Lookup:
        for place, key in enumerate(table.keys):
            words = []
            for source in key.sources:
                if isinstance(source, model.Valid):
                    words.append(z3.If(state.valid[source.header], z3.BitVecVal(1, 1), z3.BitVecVal(0, 1)))
                elif source.metadata:
                    words.append(state.fields[source])
                else:
                    zero = z3.BitVecVal(0, source.width)
                    words.append(z3.If(state.valid[source.header], state.fields[source], zero))
            state.keys[short, place] = z3.Concat(*words) if len(words) > 1 else words[0]
        if short in self.lookups:  # on another branch; a packet takes one of them
            return self.lookups[short]
        arguments = tuple(
            tuple(self._any(item.width, f"{short}.{action.name}.{item.name}") for item in action.parameters)
            for action in table.actions
        )
        hit = z3.Bool(f"{self.name}.{short}.hit") if table.keys else z3.BoolVal(False)
        number = z3.BitVec(f"{self.name}.{short}.action", 8)
        colour = None if table.meter is None else self._any(self._colour_bits(table.meter), f"{short}.colour")
        self.lookups[short] = Lookup(hit, number, arguments, colour)
        return self.lookups[short]

    def _colour_bits(self, meter: str) -> int:
        target = self.program.meters[meter].target
        assert target is not None
        return target.width

    def _act(self, action: model.ActionDef, arguments: Sequence[Any], state: State) -> None:
        for statement in action.body:
            if isinstance(statement, model.Assign):
                self._assign(state, statement, arguments)
            elif isinstance(statement, model.RegisterRead):
                index, known = self._cell(state, statement.register, statement.index, arguments)
                value = _fit(state.registers[statement.register][index], statement.target.width)
                state.fields[statement.target] = z3.If(known, value, state.fields[statement.target])
            elif isinstance(statement, model.RegisterWrite):
                register = self.program.registers[statement.register]
                index, known = self._cell(state, statement.register, statement.index, arguments)
                value = z3.Extract(register.width - 1, 0, self._value(state, statement.value, arguments))
                before = state.registers[statement.register]
                state.registers[statement.register] = z3.If(known, z3.Store(before, index, value), before)
            elif isinstance(statement, model.Hash):
                state.fields[statement.target] = self._hash(state, statement, arguments)
            elif isinstance(statement, model.Truncate):
                length = self._value(state, statement.length, arguments)
                state.size = z3.If(length < state.size, length, state.size)
            elif isinstance(statement, model.ExecuteMeter):
                state.fields[statement.target] = self._any(statement.target.width, "colour")
            elif not isinstance(statement, model.Count):
                raise model.UnsupportedFeatureError(f"a proof about {type(statement).__name__}", action.where)

    def _cell(self, state: State, register: str, index: model.Expr, arguments: Sequence[Any]) -> tuple[Any, Any]:
        place = self._value(state, index, arguments)
        size = self.program.registers[register].size
        return z3.Extract(31, 0, place), z3.And(place >= 0, place < size)

    def _hash(self, state: State, statement: model.Hash, arguments: Sequence[Any]) -> Any:
        calculation = self.program.calculations[statement.calculation]
        parts = []
        for item in calculation.inputs:
            if isinstance(item, model.Bits):
                parts.append(z3.BitVecVal(item.value, item.width))
            else:
                parts.append(state.fields[item])
        joined = z3.Concat(*parts) if len(parts) > 1 else parts[0]
        value = z3.Function(f"{calculation.algorithm}.{joined.size()}", joined.sort(), z3.BitVecSort(32))(joined)
        if joined.size() == sum(MESSAGE_BITS.values()):
            for numbers in self.messages:
                data = pack(numbers, list(MESSAGE_BITS.values()))
                met = joined == z3.BitVecVal(int.from_bytes(data, "big"), joined.size())
                value = z3.If(met, z3.BitVecVal(OVER_BYTES[calculation.algorithm](data), 32), value)
        base = self._value(state, statement.base, arguments)
        if statement.size & (statement.size - 1):
            raise model.UnsupportedFeatureError("a proof about hashes modulo other numbers", calculation.where)
        total = base + (z3.ZeroExt(WORK_BITS - 32, value) & (statement.size - 1))
        return z3.Extract(statement.target.width - 1, 0, total)

    def _assign(self, state: State, statement: model.Assign, arguments: Sequence[Any]) -> None:
        value = self._value(state, statement.value, arguments)
        state.fields[statement.target] = _fit(value, statement.target.width)

    # -------------------------------------------------------------------------------------------------- expressions

    def _any(self, width: int, what: str) -> Any:
        self._free += 1
        return z3.BitVec(f"{self.name}.{what}.{self._free}", width)

    def _value(self, state: State, expression: model.Expr, arguments: Sequence[Any]) -> Any:
        """Return an expression as a signed number of WORK_BITS."""
        if _bits(expression) >= WORK_BITS:
            raise model.UnsupportedFeatureError(f"a proof about numbers of {WORK_BITS} bits", "an expression")
        if isinstance(expression, model.Const):
            return z3.BitVecVal(expression.value, WORK_BITS)
        if isinstance(expression, model.Field):
            return _fit(state.fields[expression], WORK_BITS)
        if isinstance(expression, model.Param):
            return _fit(arguments[expression.index], WORK_BITS)
        one, zero = z3.BitVecVal(1, WORK_BITS), z3.BitVecVal(0, WORK_BITS)
        if isinstance(expression, model.Valid) or expression.op in (*model.BOOLEAN_OPS, "b2d"):
            inner = expression.args[0] if isinstance(expression, model.Op) and expression.op == "b2d" else expression
            return z3.If(self._condition(state, inner, arguments), one, zero)
        if expression.op == "?":
            left, right = (self._value(state, item, arguments) for item in expression.args[1:])
            return z3.If(self._condition(state, expression.args[0], arguments), left, right)
        values = [self._value(state, item, arguments) for item in expression.args]
        if expression.op == "~":
            return ~values[0]
        left, right = values
        match expression.op:
            case "+":
                return left + right
            case "-":
                return left - right
            case "&":
                return left & right
            case "|":
                return left | right
            case "^":
                return left ^ right
            case "<<":
                return left << right
            case ">>":
                return left >> right
            case "usat_cast":
                high = (z3.BitVecVal(1, WORK_BITS) << right) - 1
                return z3.If(left < 0, zero, z3.If(left > high, high, left))
        raise model.UnsupportedFeatureError(f"a proof about the operation {expression.op}", "an expression")

    def _condition(self, state: State, expression: model.Expr | None, arguments: Sequence[Any]) -> Any:
        if expression is None:
            return z3.BoolVal(True)
        if isinstance(expression, model.Valid):
            return state.valid[expression.header]
        if isinstance(expression, model.Const):
            return z3.BoolVal(bool(expression.value))
        if isinstance(expression, model.Op):
            args = expression.args
            match expression.op:
                case "and":
                    return z3.And(*(self._condition(state, item, arguments) for item in args))
                case "or":
                    return z3.Or(*(self._condition(state, item, arguments) for item in args))
                case "not":
                    return z3.Not(self._condition(state, args[0], arguments))
                case "d2b" | "b2d":
                    return self._condition(state, args[0], arguments)
                case "?":
                    test, one, other = (self._condition(state, item, arguments) for item in args)
                    return z3.If(test, one, other)
            if expression.op in model.COMPARISONS:
                left, right = (self._value(state, item, arguments) for item in args)
                return model.COMPARISONS[expression.op](left, right)
        return self._value(state, expression, arguments) != 0


def _bits(expression: model.Expr) -> int:
    """Return a bound of an expression's bits, without the sign."""
    if isinstance(expression, model.Const):
        return expression.value.bit_length()
    if isinstance(expression, model.Field | model.Param):
        return expression.width
    if isinstance(expression, model.Valid) or expression.op in (*model.BOOLEAN_OPS, "b2d"):
        return 1
    inner = [_bits(item) for item in expression.args[expression.op == "?" :]]
    if expression.op == "<<":
        by = expression.args[1]
        return inner[0] + (by.value if isinstance(by, model.Const) else WORK_BITS)
    if expression.op == "&":
        masks = [item.value.bit_length() for item in expression.args if isinstance(item, model.Const)]
        return min([max(inner), *masks]) if max(inner) < WORK_BITS else WORK_BITS
    return max(inner) + (expression.op in ("+", "-", "~"))


def _fit(value: Any, width: int) -> Any:
    size = value.size()
    return (
        value if size == width else z3.ZeroExt(width - size, value) if size < width else z3.Extract(width - 1, 0, value)
    )


def text_of(item: model.Field) -> str:
    """Return ``header.field``."""
    return f"{item.header}.{item.name}"


def arbitrary_registers(program: model.ProgramDef, name: str) -> dict[str, Any]:
    """Return registers that may hold anything."""
    return {
        item.name: z3.Array(f"{name}.{item.name}", z3.BitVecSort(32), z3.BitVecSort(item.width))
        for item in program.registers.values()
    }
