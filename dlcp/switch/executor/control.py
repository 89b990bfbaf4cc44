# SPDX-License-Identifier: Apache-2.0
"""Generates controls: the graph of tables and conditions as nested ifs, tables as lookups, actions inline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dlcp.switch.executor.analysis import Context, Usage, joins, successor, successors, summed_range
from dlcp.switch.executor.model import (
    ActionDef,
    Assign,
    Bits,
    Calculation,
    Checksum,
    Conditional,
    Control,
    Count,
    ExecuteMeter,
    Exit,
    Expr,
    Field,
    Hash,
    Key,
    MeterDef,
    Op,
    RegisterRead,
    RegisterWrite,
    Statement,
    TableDef,
    TableSlot,
    UnsupportedFeatureError,
    Valid,
)
from dlcp.switch.executor.parsing import Stores
from dlcp.switch.executor.text import HashOf, LoadBytes, Value, Writer, bare, fit, number

HASH_BITS = {"crc16": 16, "crc32": 32, "csum16": 16, "xor16": 16}


def positive_facts(condition: Expr) -> frozenset[str]:
    """Return the headers that are valid when a condition holds."""
    if isinstance(condition, Valid):
        return frozenset({condition.header})
    if isinstance(condition, Op):
        if condition.op == "and":
            return positive_facts(condition.args[0]) | positive_facts(condition.args[1])
        if condition.op in ("d2b", "b2d"):
            return positive_facts(condition.args[0])
        if condition.op == "not":
            return negative_facts(condition.args[0])
    return frozenset()


def negative_facts(condition: Expr) -> frozenset[str]:
    """Return the headers that are valid when a condition does not hold."""
    if isinstance(condition, Op):
        if condition.op == "or":
            return negative_facts(condition.args[0]) | negative_facts(condition.args[1])
        if condition.op == "not":
            return positive_facts(condition.args[0])
        if condition.op in ("d2b", "b2d"):
            return negative_facts(condition.args[0])
    return frozenset()


class ControlText:
    """Emits one pipeline."""

    def __init__(self, context: Context, pipeline: Control, write: Writer) -> None:
        self.context, self.pipeline, self.write = context, pipeline, write
        self.names, self.expressions = context.names, context.expressions
        self.joins = joins(pipeline)

    def emit(self) -> None:
        """Emit the whole pipeline."""
        self._run(self.pipeline.first, None, frozenset())

    def _run(self, name: str | None, stop: str | None, facts: frozenset[str]) -> None:
        """Emit the nodes from ``name`` up to ``stop``; the headers in ``facts`` are known to be valid."""
        while name is not None and name != stop:
            node = self.pipeline.nodes[name]
            join = self.joins[name]
            if isinstance(node, Conditional):
                condition = self.expressions.condition(node.condition, node.where)
                then = self._taken(node.then, join, self._implied(facts | positive_facts(node.condition)))
                otherwise = self._taken(node.otherwise, join, self._implied(facts | negative_facts(node.condition)))
                self.write.branch(condition, then, otherwise)
            else:
                self._table(node, join, facts)
            name = join

    def _implied(self, facts: frozenset[str]) -> frozenset[str]:
        return self.context.stacks.implied(facts) if facts else facts

    def _taken(self, name: str | None, stop: str | None, facts: frozenset[str]) -> list[str]:
        mark = self.write.mark()
        self._run(name, stop, facts)
        return self.write.since(mark)

    # ---------------------------------------------------------------------------------------------------- tables

    def _table(self, table: TableDef, join: str | None, facts: frozenset[str]) -> None:
        if table.hidden:
            assert table.default is not None
            action = Usage.default_action(table)
            self._action(action, [number(value) for value in table.default[1]], facts)
            return
        slot = self.context.layout.tables[table.name]
        self.write(f"{slot.entry} = {self._lookup(table, slot, facts)}")
        if table.meter is not None:
            self._direct_meter(table, slot, facts)
        if table.profile is None:
            self._dispatch(table, f"{slot.rows}[{slot.entry}]", slot.rows, slot.entry, facts, always=True)
        else:
            self._indirect(table, slot, facts)
        self._follow(table, slot, join, facts)

    def _follow(self, table: TableDef, slot: TableSlot, join: str | None, facts: frozenset[str]) -> None:
        """Emit the branches after a table, up to ``join``."""
        if len(successors(table)) == 1:
            return
        if table.on_hit[0] or table.on_miss[0]:
            if any(action.exits for action in table.actions):
                raise UnsupportedFeatureError("exit in an action of a table whose hit or miss is tested", table.where)
            hit = self._taken(table.on_hit[1], join, facts)
            miss = self._taken(table.on_miss[1], join, facts)
            self.write.branch(slot.entry, hit, miss)
            return
        ways: dict[str | None, list[int]] = {}
        for index, action in enumerate(table.actions):
            ways.setdefault(successor(table, action, hit=True), []).append(index)
        if table.profile is not None:
            ways.setdefault(table.base_next, []).append(-1)
        head = "if"
        items = sorted(ways.items(), key=lambda item: (item[0] == join, len(item[1])))
        for position, (node, actions) in enumerate(items):
            body = self._taken(node, join, facts)
            last = position == len(items) - 1
            if last and not body:
                continue
            test = " or ".join(f"{slot.action} == {index}" for index in actions)
            self.write("else:" if last else f"{head} {test}:")
            self.write.indented(body or [self.write_pass()])
            head = "elif"

    def write_pass(self) -> str:
        """Return an empty statement at the current depth."""
        mark = self.write.mark()
        self.write("pass")
        return self.write.since(mark)[0]

    def _lookup(self, table: TableDef, slot: TableSlot, facts: frozenset[str]) -> str:
        if not table.keys:
            return "0"
        terms = []
        for key, shift in slot.shifts(table):
            text = self._key(key, table, facts)
            if text != "0":
                terms.append(f"{text} << {shift}" if shift else text)
        return f"lookup_{table.match}({slot.index}, {' | '.join(terms) or '0'})"

    def _key(self, key: Key, table: TableDef, facts: frozenset[str]) -> str:
        value = self.expressions.value(key.source, table.where)
        text = value.text
        if isinstance(key.source, Field) and key.source in self.context.usage.written:
            header = key.source.header
            if header not in facts:  # a field of an invalid header is 0 in a key, even if assigned
                text = f"({text} if {self.names(Valid(header))} else 0)"
        if key.mask is not None and key.mask & ((1 << key.width) - 1) != (1 << key.width) - 1:
            text = f"({text} & {hex(key.mask)})"
        return text

    def _direct_meter(self, table: TableDef, slot: TableSlot, facts: frozenset[str]) -> None:
        assert table.meter is not None
        meter = self.context.program.meters[table.meter]
        assert meter.target is not None
        base = self.context.layout.meters[table.meter]
        cell = f"{slot.entry} // {slot.stride}" if slot.stride > 1 else slot.entry
        shift = base - 1
        cell = f"{cell} - 1" if shift == -1 else cell if not shift else f"{cell} + {shift}"
        with self.write.block(f"if {slot.entry}:"):
            self._set(meter.target, fit(self._colour(cell, meter), meter.target.width), facts)

    @staticmethod
    def _colour(cell: str, meter: MeterDef) -> Value:
        amount = "n" if meter.by_bytes else "1"
        return Value(f"run_meter(meter_rates, meter_tokens, {cell}, {amount}, now_us)", 0, 2)

    def _indirect(self, table: TableDef, slot: TableSlot, facts: frozenset[str]) -> None:
        assert table.profile is not None
        profile = self.context.layout.profiles[table.profile]
        self.write(f"i = {slot.rows}[{slot.entry}]")
        self.write(f"k = {profile.groups}[i]")
        with self.write.block("if k:"):
            self.write(f"i = {profile.groups}[i + 1]")
            definition = self.context.program.profiles[table.profile]
            if definition.algorithm is not None:
                with self.write.block("if k > 1:"):
                    calculation = Calculation(table.profile, definition.algorithm, definition.inputs, table.where)
                    self._hash(calculation, facts)
                    self.write("i += h % k")
            self.write(f"{slot.member} = {profile.choices}[i]")
            self.write(f"{slot.action} = {profile.members}[{slot.member}]")
            self._dispatch(table, slot.action, profile.members, slot.member, facts, always=False)
        if self._asks_action(table):
            with self.write.block("else:"):
                self.write(f"{slot.action} = -1")

    def _asks_action(self, table: TableDef) -> bool:
        return len(successors(table)) > 1 and not (table.on_hit[0] or table.on_miss[0])

    def _dispatch(self, table: TableDef, action: str, rows: str, row: str, facts: frozenset[str], always: bool) -> None:
        """Run the action whose number is ``action``, with arguments from ``rows`` after ``row``."""
        slot = self.context.layout.tables[table.name]
        bodies = []
        for index, definition in enumerate(table.actions):
            arguments = [
                Value(f"{rows}[{row} + {position + 1}]", 0, (1 << parameter.width) - 1)
                for position, parameter in enumerate(definition.parameters)
            ]
            mark = self.write.mark()
            self._action(definition, arguments, facts)
            body = self.write.since(mark)
            if body:
                bodies.append((index, body))
        asks = self._asks_action(table)
        if always and (asks or len(bodies) > 1):
            self.write(f"{slot.action} = {action}")
            action = slot.action
        # A table without a default action runs none on a miss, so even a single action needs a test.
        certain = table.default is not None or table.profile is not None
        if len(table.actions) == 1 and bodies and certain:
            self.write.lines += bodies[0][1]
            return
        for position, (index, body) in enumerate(bodies):
            last = position == len(bodies) - 1 and len(bodies) == len(table.actions) and certain
            if position and last:
                self.write("else:")
            else:
                test = f"{action} == {index}" if index else f"not {action}"
                self.write(f"{'elif' if position else 'if'} {test}:")
            self.write.indented(body)

    # --------------------------------------------------------------------------------------------------- actions

    def _action(self, action: ActionDef, arguments: Sequence[Value], facts: frozenset[str]) -> None:
        stores = self._stores()
        for statement in action.body:
            self._statement(statement, action, arguments, stores)
        stores.flush(facts)
        self.expressions.bounds.clear()

    def _stores(self) -> Stores:
        return Stores(self.write, self.context)

    def _statement(self, statement: Statement, action: ActionDef, arguments: Sequence[Value], stores: Stores) -> None:
        where = action.where
        if isinstance(statement, Assign):
            value = self.expressions.value(statement.value, where, arguments, wraps=True)
            self._put(statement.target, fit(value, statement.target.width), stores)
        elif isinstance(statement, Count):
            counter = self.context.program.counters[statement.counter]
            base = self.context.layout.counters[statement.counter]
            with self._cell(statement.index, where, arguments, base, counter.size) as cell:
                self.write(f"packets_counted[{cell}] += 1")
                self.write(f"bytes_counted[{cell}] += n")
        elif isinstance(statement, RegisterRead):
            register = self.context.program.registers[statement.register]
            base = self.context.layout.registers[statement.register]
            with self._cell(statement.index, where, arguments, base, register.size) as cell:
                value = Value(f"registers[{cell}]", 0, (1 << register.width) - 1)
                self._put(statement.target, fit(value, statement.target.width), stores)
        elif isinstance(statement, RegisterWrite):
            register = self.context.program.registers[statement.register]
            base = self.context.layout.registers[statement.register]
            value = fit(self.expressions.value(statement.value, where, arguments, wraps=True), register.width)
            with self._cell(statement.index, where, arguments, base, register.size) as cell:
                self.write(f"registers[{cell}] = {value.text}")
        elif isinstance(statement, Hash):
            self._hash_into(statement, where, arguments, stores)
        elif isinstance(statement, ExecuteMeter):
            meter = self.context.program.meters[statement.meter]
            base = self.context.layout.meters[statement.meter]
            with self._cell(statement.index, where, arguments, base, meter.size) as cell:
                self._put(statement.target, fit(self._colour(cell, meter), statement.target.width), stores)
        else:
            assert isinstance(statement, Exit)

    @contextmanager
    def _cell(self, index: Expr, where: str, arguments: Sequence[Value], base: int, size: int) -> Iterator[str]:
        """Yield an index into a flat array; lines written in the ``with`` block run only if it is in range."""
        value = self.expressions.value(index, where, arguments)
        if value.constant is not None and 0 <= value.constant < size:
            yield str(value.constant + base)
        elif value.low >= 0 and value.high < size:
            yield f"{value.text} + {base}" if base else value.text
        else:
            self.write(f"i = {value.text}")
            with self.write.block(f"if {'0 <= ' if value.low < 0 else ''}i < {size}:"):
                yield f"i + {base}" if base else "i"

    def _put(self, target: Field, value: Value, stores: Stores) -> None:
        """Assign within an action; header fields are written to the packet when the action ends."""
        text = value.text
        self.expressions.bounds[target] = value
        if target in self.context.read:
            if text != self.names(target):
                self.write(f"{self.names(target)} = {bare(text)}")
            text = self.names(target)
        elif not target.metadata and value.constant is None:
            self.write(f"{self.names(target)} = {bare(text)}")
            text = self.names(target)
        if not target.metadata:
            stores.add(target, text)

    def _set(self, target: Field, value: Value, facts: frozenset[str]) -> None:
        stores = self._stores()
        self._put(target, value, stores)
        stores.flush(facts)

    # ---------------------------------------------------------------------------------------- hashes and checksums

    def _hash_into(self, statement: Hash, where: str, arguments: Sequence[Value], stores: Stores) -> None:
        calculation = self.context.program.calculations[statement.calculation]
        bits = self._hash(calculation, frozenset())
        size = max(statement.size, 1)
        text, high = "h", (1 << bits) - 1
        if size <= high:
            text = f"h & {hex(size - 1)}" if size & (size - 1) == 0 else f"h % {size}"
            high = size - 1
        base = self.expressions.value(statement.base, where, arguments)
        if base.constant != 0:
            text = f"({text}) + {base.text}"
        if base.low < 0 or high + base.high >= 1 << 63:
            raise UnsupportedFeatureError("hashes with a base that can be negative or exceed 63 bits", where)
        self._put(statement.target, fit(Value(text, base.low, high + base.high), statement.target.width), stores)

    def _hash(self, calculation: Calculation, facts: frozenset[str]) -> int:
        """Set ``h`` to a hash over the fields of valid headers; return its width in bits."""
        headers = frozenset(item.header for item in calculation.inputs if isinstance(item, Field) and not item.metadata)
        choices = self.context.stacks.combinations(headers, facts) if headers else [frozenset[str]()]
        bits = max(self._hash_bits(calculation, choice) for choice in choices)
        for position, choice in enumerate(choices):
            call = self._hash_call(calculation, choice)
            if len(choices) == 1:
                self.write(f"h = {call}")
                break
            tests = [self.names(Valid(header)) for header in sorted(choice - facts)]
            last = position == len(choices) - 1
            self.write("else:" if last else f"{'elif' if position else 'if'} {' and '.join(tests)}:")
            self.write(f"    h = {call}")
        return bits

    @staticmethod
    def _present(calculation: Calculation, valid: frozenset[str]) -> list[Field | Bits]:
        return [item for item in calculation.inputs if isinstance(item, Bits) or item.metadata or item.header in valid]

    def _hash_bits(self, calculation: Calculation, valid: frozenset[str]) -> int:
        if calculation.algorithm in HASH_BITS:
            return HASH_BITS[calculation.algorithm]
        width = min((sum(item.width for item in self._present(calculation, valid)) + 7) // 8, 8) * 8
        if width > 63:
            raise UnsupportedFeatureError("identity hashes over more than 7 bytes", calculation.where)
        return width

    def _hash_call(self, calculation: Calculation, valid: frozenset[str]) -> str:
        inputs = self._present(calculation, valid)
        helper = self.context.helpers.name(HashOf(calculation.algorithm, tuple(item.width for item in inputs)))
        texts = [
            str(item.value) if isinstance(item, Bits) else self.expressions.value(item, calculation.where).text
            for item in inputs
        ]
        return f"{helper}({', '.join(texts)})"

    def verify(self, checksum: Checksum, flag: Field) -> None:
        """Emit the verification of a checksum; a mismatch sets ``flag``."""
        with self.write.block(f"if {bare(self._guard(checksum))}:"):
            self._compute(checksum)
            target = self.expressions.value(checksum.target, checksum.calculation.where).text
            with self.write.block(f"if h != {target}:"):
                self.write(f"{self.names(flag)} = 1")

    def update(self, checksum: Checksum) -> None:
        """Emit the update of a checksum in the packet."""
        with self.write.block(f"if {bare(self._guard(checksum))}:"):
            bits = self._compute(checksum)
            value = fit(Value("h", 0, (1 << bits) - 1), checksum.target.width)
            self._set(checksum.target, value, frozenset({checksum.target.header}))

    def _compute(self, checksum: Checksum) -> int:
        """Set ``h`` to the computed checksum; return its width in bits."""
        covered = summed_range(checksum)
        if covered is None:
            return self._hash(checksum.calculation, frozenset({checksum.target.header}))
        # 65536 is 1 modulo 65535, and so is its square. So the one's complement sum of all 16-bit words is the sum of
        # 2- or 4-byte words modulo 65535, except that 0 means 65535 unless all words are zero.
        load = self.context.helpers.name(LoadBytes(word_units(*covered)))
        header = checksum.target.header
        starts = self.context.stacks.offsets.get(header, frozenset({0}))
        start = str(next(iter(starts))) if len(starts) == 1 else f"{self.names(Valid(header))} - 1"
        self.write(f"h = sum({load}(p, {start}))")
        self.write("k = h % 65535")
        self.write("h = 65535 - k if k or not h else 0")
        return 16

    def _guard(self, checksum: Checksum) -> str:
        valid = self.names(Valid(checksum.target.header))
        if checksum.condition is None:
            return valid
        condition = self.expressions.condition(checksum.condition, checksum.calculation.where)
        return condition if checksum.target.header in positive_facts(checksum.condition) else f"{valid} and {condition}"


def word_units(first: int, end: int, gap: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) units that cover bytes ``first`` to ``end`` except the two at ``gap``."""
    units = []
    for start, stop in ((first, gap), (gap + 2, end)):
        while start < stop:
            size = 4 if stop - start >= 4 else 2
            units.append((start, size))
            start += size
    return tuple(units)
