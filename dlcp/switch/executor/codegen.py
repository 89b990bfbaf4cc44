# SPDX-License-Identifier: Apache-2.0
"""Generates a program as text: one body each for ingress and egress, wrapped as plain code or for Numba.

From top to bottom: loads and stores of packet fields; the parser as nested ifs; the controls, with the graph of tables
and conditions as nested ifs, tables as lookups and actions inline; the whole program. `expressions` has the parts.

Every path through the parser has its own text, so every offset is a constant. A header's fields are read once, when
the header is extracted, and only if they are needed. An assigned field is written back into the packet at once, so
the packet always equals the deparser's output.

Plain: ``ingress(p, ingress_port, now_us)`` and ``egress(p, carry, port, ...)`` over bytearrays, with lists and
dictionaries as globals. For Numba: the same bodies over arrays in a tuple ``state``, and the sources of the functions
that they call and of `dlcp.switch.queues.loop`, which takes a batch through ingress, queues, egress and lines.
"""

import inspect
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

from dlcp.switch import queues
from dlcp.switch.executor import model
from dlcp.switch.executor.analysis import (
    Usage,
    constant_fields,
    joins,
    shorten,
    stacks,
    successor,
    successors,
    summed_range,
    target_of,
)
from dlcp.switch.executor.cells import run_meter
from dlcp.switch.executor.expressions import (
    Expressions,
    Names,
    Value,
    Writer,
    at,
    bare,
    fit,
    number,
)
from dlcp.switch.executor.hashes import HashOf, compiled_tables
from dlcp.switch.executor.model import Expr, Field, UnsupportedFeatureError, Valid
from dlcp.switch.executor.tables import LOOKUPS, lookup_joined

# ------------------------------------------------------------------------------------------ functions that a text calls


_CODES: Final = {1: "B", 2: "H", 4: "I"}


class LoadBytes(NamedTuple):
    """A function that reads big-endian units from a packet, each given as (offset from the start, bytes)."""

    units: tuple[tuple[int, int], ...]

    def plain(self, name: str, namespace: dict[str, Any]) -> str:
        """Add the function to ``namespace``, or return its source."""
        layout, position = ">", 0
        for offset, size in self.units:
            layout += f"{offset - position}x{_CODES[size]}"
            position = offset + size
        namespace[name] = struct.Struct(layout).unpack_from
        return ""

    def compiled(self, name: str) -> str:
        """Return the function's source for Numba."""
        values = []
        for offset, size in self.units:
            terms = []
            for i in range(size):
                shift = 8 * (size - 1 - i)
                byte = f"np.int64(p[o + {offset + i}])"
                terms.append(f"({byte} << {shift})" if shift else byte)
            values.append(" | ".join(terms))
        return f"def {name}(p, o):\n    return (\n        " + ",\n        ".join(values) + ",\n    )\n"


class StoreBytes(NamedTuple):
    """A function that writes consecutive big-endian units of these sizes, in bytes, into a packet."""

    units: tuple[int, ...]

    def plain(self, name: str, namespace: dict[str, Any]) -> str:
        """Add the function to ``namespace``, or return its source."""
        namespace[name] = struct.Struct(">" + "".join(_CODES[size] for size in self.units)).pack_into
        return ""

    def compiled(self, name: str) -> str:
        """Return the function's source for Numba."""
        arguments = [f"v{i}" for i in range(len(self.units))]
        lines = [f"def {name}(p, o, {', '.join(arguments)}):"]
        position = 0
        for argument, size in zip(arguments, self.units, strict=True):
            for i in range(size):
                shift = 8 * (size - 1 - i)
                text = f"{argument} >> {shift}" if shift else argument
                lines.append(f"    p[o + {position}] = ({text}) & 255")
                position += 1
        return "\n".join(lines) + "\n"


class Helpers:
    """The helper functions of a text, each generated once."""

    def __init__(self) -> None:
        self.names: dict[LoadBytes | StoreBytes | HashOf, str] = {}

    def name(self, helper: LoadBytes | StoreBytes | HashOf) -> str:
        """Return the name of a helper, and add the helper to the text if it is new."""
        if helper not in self.names:
            kind = {LoadBytes: "load", StoreBytes: "store", HashOf: "hash"}[type(helper)]
            self.names[helper] = f"{kind}_{sum(type(other) is type(helper) for other in self.names)}"
        return self.names[helper]


# ----------------------------------------------------------------------------------------------------------- the parser


class Placed(NamedTuple):
    """A field and its position in the packet, in bits."""

    bit: int
    field: Field


def emit_load(text: "ProgramText", needed: Sequence[Placed], base: str = "") -> None:
    """Emit one load of several fields of a packet, whose positions count from ``base``."""
    if not needed:
        return
    names = text.names
    offset = min(item.bit for item in needed) // 8
    parts: list[tuple[int, int]] = []
    variables: list[str] = []
    decode: list[str] = []
    for start, size, members in _runs(needed):
        pieces = _pieces(size)
        only = members[0].field if len(members) == 1 else None
        whole = only is not None and only.width == size * 8 and len(pieces) == 1
        position = start
        raw = []
        for piece in pieces:
            parts.append((position - offset, piece))
            raw.append(names(only) if whole and only is not None else f"u{len(variables)}")
            variables.append(raw[-1])
            position += piece
        if not whole:
            decode += _decode(names, members, start, size, raw, pieces)
    loader = text.helpers.name(LoadBytes(tuple(parts)))
    comma = "," if len(variables) == 1 else ""
    text.write(f"{', '.join(variables)}{comma} = {loader}(p, {at(base, offset)})")
    for line in decode:
        text.write(line)


def _runs(needed: Sequence[Placed]) -> list[tuple[int, int, list[Placed]]]:
    """Group fields into runs of whole bytes: (first byte, bytes, fields). Fields that share a byte share a run.

    Raises UnsupportedFeatureError if several fields share a run of more than seven bytes.
    """
    runs: list[tuple[int, int, list[Placed]]] = []
    for item in sorted(needed, key=lambda item: item.bit):
        first, end = item.bit // 8, (item.bit + item.field.width + 7) // 8
        if runs and first < runs[-1][0] + runs[-1][1]:
            start, _, members = runs[-1]
            runs[-1] = (start, end - start, [*members, item])
        else:
            runs.append((first, end - first, [item]))
    for _, size, members in runs:
        if size > 7:
            fields = ", ".join(member.field.name for member in members)
            feature = f"fields that share bytes over more than 7 bytes ({fields})"
            raise UnsupportedFeatureError(feature, f"header {members[0].field.header}")
    return runs


def _pieces(size: int) -> list[int]:
    return {1: [1], 2: [2], 3: [1, 2], 4: [4], 5: [1, 4], 6: [2, 4], 7: [1, 2, 4]}[size]


def _decode(names: Names, members: list[Placed], start: int, size: int, raw: list[str], pieces: list[int]) -> list[str]:
    lines = []
    source = raw[0]
    if len(raw) > 1:
        terms, rest = [], size
        for part, piece in zip(raw, pieces, strict=True):
            rest -= piece
            terms.append(f"{part} << {8 * rest}" if rest else part)
        joined = " | ".join(terms)
        if len(members) == 1 and members[0].field.width == size * 8:
            return [f"{names(members[0].field)} = {joined}"]
        lines.append(f"{source} = {joined}")
    for bit, member in members:
        shift = (start + size) * 8 - bit - member.width
        text = f"{source} >> {shift}" if shift else source
        if bit != start * 8:
            text = f"{text} & {hex((1 << member.width) - 1)}"
        lines.append(f"{names(member)} = {text}")
    return lines


class Stores:
    """Header fields assigned in one straight-line piece of text, written back together at its end."""

    def __init__(self, text: "ProgramText") -> None:
        self.write, self.names, self.helpers = text.write, text.names, text.helpers
        self.offsets = text.stacks.offsets
        self.pending: dict[Field, str] = {}

    def add(self, target: Field, text: str) -> None:
        """Record that ``target`` now has the value ``text``, a variable or a constant."""
        self.pending[target] = text

    def flush(self, known_valid: Iterable[str]) -> None:
        """Emit the stores of pending fields of valid headers; test validity of those not in ``known_valid``."""
        known = set(known_valid)
        for header in dict.fromkeys(item.header for item in self.pending):
            starts = self.offsets.get(header)
            if starts is None:  # never extracted, so never valid
                continue
            fields = sorted((item for item in self.pending if item.header == header), key=lambda item: item.offset)
            valid = self.names(Valid(header))
            base = "" if len(starts) == 1 else f"{valid} - 1"
            first = next(iter(starts)) if len(starts) == 1 else 0
            if header in known:
                self._emit(fields, base, first)
            else:
                with self.write.block(f"if {valid}:"):
                    self._emit(fields, base, first)
        self.pending.clear()

    def _emit(self, fields: list[Field], base: str, first: int) -> None:
        run: list[tuple[int, int, str]] = []
        for item in fields:
            byte, rest = divmod(item.offset, 8)
            if rest == 0 and item.width % 8 == 0:
                if run and run[-1][0] + run[-1][1] != byte:
                    self._emit_run(run, base, first)
                    run = []
                run.append((byte, item.width // 8, self.pending[item]))
        if run:
            self._emit_run(run, base, first)
        partial: dict[int, tuple[int, list[str]]] = {}
        for item in fields:
            if item.offset % 8 or item.width % 8:
                self._split(item, partial)
        for byte, (mask, terms) in sorted(partial.items()):
            place = at(base, first + byte)
            kept = [] if mask == 255 else [f"p[{place}] & {255 ^ mask}"]
            terms = [term for term in terms if term != "0"]
            self.write(f"p[{place}] = {' | '.join([*kept, *terms]) or '0'}")

    def _split(self, item: Field, partial: dict[int, tuple[int, list[str]]]) -> None:
        text = self.pending[item]
        end = item.offset + item.width
        for byte in range(item.offset // 8, (end + 7) // 8):
            low, high = max(item.offset, byte * 8), min(end, byte * 8 + 8)
            mask = ((1 << (high - low)) - 1) << (byte * 8 + 8 - high)
            right, left, bits = end - high, byte * 8 + 8 - high, (1 << (high - low)) - 1
            if text.isdigit() or text.startswith("0x"):
                piece = str((int(text, 0) >> right & bits) << left)
            else:
                piece = f"({text} >> {right})" if right else text
                piece = f"({piece} & {bits})" if low > item.offset else piece
                piece = f"({piece} << {left})" if left else piece
            old_mask, terms = partial.get(byte, (0, []))
            partial[byte] = (old_mask | mask, [*terms, piece])

    def _emit_run(self, run: list[tuple[int, int, str]], base: str, first: int) -> None:
        if len(run) == 1 and run[0][1] == 1:
            self.write(f"p[{at(base, first + run[0][0])}] = {run[0][2]}")
            return
        units: list[int] = []
        values: list[str] = []
        for _, size, text in run:
            rest = size
            pieces = _pieces(size)
            for piece in pieces:
                rest -= piece
                part = f"({text} >> {8 * rest})" if rest else text
                if rest + piece < size:
                    part = f"{part} & {hex((1 << 8 * piece) - 1)}"
                units.append(piece)
                values.append(part)
        store = self.helpers.name(StoreBytes(tuple(units)))
        self.write(f"{store}(p, {at(base, first + run[0][0])}, {', '.join(values)})")


class ParserText:
    """Emits a program's parser.

    Parameters
    ----------
    needed
        Variables read in or after the parser; other fields are not loaded from the packet.
    """

    def __init__(self, text: "ProgramText", needed: frozenset[model.Variable]) -> None:
        self.text, self.write, self.needed = text, text.write, needed
        self.program, self.names, self.expressions = text.program, text.names, text.expressions
        self.error = self.program.standard.get("standard_metadata.parser_error")

    def emit(self) -> None:
        """Emit the whole parser."""
        self._state(self.program.first_state, (), 0)

    def _state(self, name: str | None, path: tuple[str, ...], offset: int) -> None:
        if name is not None:
            self._operations(self.program.states[name], 0, path, offset)

    def _operations(self, state: model.ParserState, index: int, path: tuple[str, ...], offset: int) -> None:
        where = f"parser state {state.name}"
        while index < len(state.operations):
            operation = state.operations[index]
            if isinstance(operation, model.Extract):
                self._extract(state, index, path, offset)
                return
            index += 1
            if isinstance(operation, model.Assign):
                self._assign(operation, path, where)
            else:
                condition = self.expressions.condition(operation.condition, where)
                with self.write.block(f"if {condition}:"):
                    self._operations(state, index, path, offset)
                self._otherwise(self._error(self.expressions.value(operation.error, where).text))
                return
        self._select(state, path, offset)

    def _assign(self, operation: model.Assign, path: tuple[str, ...], where: str) -> None:
        target = operation.target
        value = fit(self.expressions.value(operation.value, where, wraps=True), target.width)
        self.write(f"{self.names(target)} = {value.text}")
        if not target.metadata:
            stores = Stores(self.text)
            stores.add(target, self.names(target))
            stores.flush(path)

    def _extract(self, state: model.ParserState, index: int, path: tuple[str, ...], offset: int) -> None:
        """Emit the extract at ``index`` together with those that directly follow it."""
        headers: list[str] = []
        while index < len(state.operations) and isinstance(operation := state.operations[index], model.Extract):
            headers.append(operation.header)
            index += 1
        ends = [offset]
        for name in headers:
            ends.append(ends[-1] + self.program.headers[name].width // 8)
        short = self._error(str(self.program.errors["PacketTooShort"]))
        with self.write.block(f"if n >= {ends[-1]}:"):
            self._take(headers, ends)
            self._operations(state, index, (*path, *headers), ends[-1])
        for count in range(len(headers) - 1, 0, -1):
            with self.write.block(f"elif n >= {ends[count]}:"):
                self._take(headers[:count], ends)
                for line in short:
                    self.write(line)
        self._otherwise(short)

    def _take(self, headers: list[str], starts: list[int]) -> None:
        """Load the needed fields of extracted headers, and mark the headers valid."""
        needed = [
            Placed(start * 8 + item.offset, item)
            for name, start in zip(headers, starts, strict=False)
            for item in self.program.headers[name].fields.values()
            if item in self.needed
        ]
        emit_load(self.text, needed)
        for name, start in zip(headers, starts, strict=False):
            if Valid(name) in self.needed:
                several = len(self.text.stacks.offsets[name]) > 1
                self.write(f"{self.names(Valid(name))} = {start + 1 if several else 1}")

    def _error(self, error: str) -> list[str]:
        """Return the lines that set the parser error, or none if it is never read."""
        if self.error is None or self.error not in self.needed:
            return []
        return [f"{self.names(self.error)} = {error}"]

    def _otherwise(self, lines: list[str]) -> None:
        if lines:
            with self.write.block("else:"):
                for line in lines:
                    self.write(line)

    def _select(self, state: model.ParserState, path: tuple[str, ...], offset: int) -> None:
        head = "if"
        for case in state.cases:
            condition = self._matches(state, case)
            if not condition:
                if head == "if":
                    self._state(case.next, path, offset)
                    return
                with self.write.block("else:"):
                    self._state(case.next, path, offset)
                return
            with self.write.block(f"{head} {condition}:"):
                self._state(case.next, path, offset)
            head = "elif"
        if head == "if":
            self._state(state.default, path, offset)
        elif state.default is not None:
            with self.write.block("else:"):
                self._state(state.default, path, offset)

    def _matches(self, state: model.ParserState, case: model.Case) -> str:
        parts = []
        for key, value, mask in zip(state.keys, case.values, case.masks, strict=True):
            full = (1 << key.width) - 1
            name = self.expressions.value(key, f"parser state {state.name}").text
            if mask == full:
                parts.append(f"{name} == {hex(value)}")
            elif mask:
                parts.append(f"({name} & {hex(mask)}) == {hex(value)}")
        return " and ".join(parts)


# --------------------------------------------------------------------------------------------------------- the controls


HASH_BITS = {"crc16": 16, "crc32": 32, "csum16": 16, "xor16": 16}


def facts_of(condition: Expr, holds: bool) -> frozenset[str]:
    """Return the headers that are known to be valid when a condition holds, or when it does not."""
    if isinstance(condition, Valid) and holds:
        return frozenset({condition.header})
    if isinstance(condition, model.Op):
        if condition.op == "not":
            return facts_of(condition.args[0], not holds)
        if condition.op in ("d2b", "b2d"):
            return facts_of(condition.args[0], holds)
        if condition.op == ("and" if holds else "or"):
            return facts_of(condition.args[0], holds) | facts_of(condition.args[1], holds)
    return frozenset()


class ControlText:
    """Emits one pipeline."""

    def __init__(self, text: "ProgramText", pipeline: model.Control) -> None:
        self.text, self.pipeline, self.write = text, pipeline, text.write
        self.names, self.expressions = text.names, text.expressions
        self.joins = joins(pipeline)

    def emit(self) -> None:
        """Emit the whole pipeline."""
        self._run(self.pipeline.first, None, frozenset())

    def _run(self, name: str | None, stop: str | None, facts: frozenset[str]) -> None:
        """Emit the nodes from ``name`` up to ``stop``; the headers in ``facts`` are known to be valid."""
        while name is not None and name != stop:
            node = self.pipeline.nodes[name]
            join = self.joins[name]
            if isinstance(node, model.Conditional):
                condition = self.expressions.condition(node.condition, node.where)
                then = self._taken(node.then, join, self._implied(facts | facts_of(node.condition, True)))
                otherwise = self._taken(node.otherwise, join, self._implied(facts | facts_of(node.condition, False)))
                self.write.branch(condition, then, otherwise)
            else:
                self._table(node, join, facts)
            name = join

    def _implied(self, facts: frozenset[str]) -> frozenset[str]:
        return self.text.stacks.implied(facts) if facts else facts

    def _taken(self, name: str | None, stop: str | None, facts: frozenset[str]) -> list[str]:
        mark = self.write.mark()
        self._run(name, stop, facts)
        return self.write.since(mark)

    # ---------------------------------------------------------------------------------------------------- tables

    def _table(self, table: model.TableDef, join: str | None, facts: frozenset[str]) -> None:
        if table.hidden:
            assert table.default is not None
            action = Usage.default_action(table)
            self._action(action, [number(value) for value in table.default.params.values()], facts)
            return
        slot = self.text.layout.tables[table.name]
        self.write(f"{slot.entry} = {self._lookup(table, slot, facts)}")
        if table.meter is not None:
            self._direct_meter(table, slot, facts)
        if table.profile is None:
            self._dispatch(table, f"{slot.rows}[{slot.entry}]", slot.rows, slot.entry, facts, always=True)
        else:
            self._indirect(table, slot, facts)
        self._follow(table, slot, join, facts)

    def _follow(self, table: model.TableDef, slot: model.TableSlot, join: str | None, facts: frozenset[str]) -> None:
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
            with self.write.block("else:" if last else f"{head} {test}:"):
                self.write.indented(body)
            head = "elif"

    def _lookup(self, table: model.TableDef, slot: model.TableSlot, facts: frozenset[str]) -> str:
        if not table.keys:
            return "0"
        terms = []
        for key, shift in slot.shifts(table):
            if len(key.sources) > 1:
                words = ", ".join(self._source(source, table, facts) for source in key.sources)
                return f"lookup_words({slot.index}, ({words}))"
            text = self._key(key, table, facts)
            if text != "0":
                terms.append(f"{text} << {shift}" if shift else text)
        return f"lookup_{table.match}({slot.index}, {' | '.join(terms) or '0'})"

    def _source(self, source: model.Variable, table: model.TableDef, facts: frozenset[str]) -> str:
        text = self.expressions.value(source, table.where).text
        if isinstance(source, Field) and source in self.text.usage.written and source.header not in facts:
            # A field of an invalid header is 0 in a key, even if assigned.
            text = f"({text} if {self.names(Valid(source.header))} else 0)"
        return text

    def _key(self, key: model.Key, table: model.TableDef, facts: frozenset[str]) -> str:
        text = self._source(key.sources[0], table, facts)
        if key.mask is not None and key.mask & ((1 << key.width) - 1) != (1 << key.width) - 1:
            text = f"({text} & {hex(key.mask)})"
        return text

    def _direct_meter(self, table: model.TableDef, slot: model.TableSlot, facts: frozenset[str]) -> None:
        assert table.meter is not None
        meter = self.text.program.meters[table.meter]
        assert meter.target is not None
        shift = self.text.layout.meters[table.meter] - 1  # the default entry has no meter
        cell = f"{slot.entry} // {slot.stride}" if slot.stride > 1 else slot.entry
        cell = f"{cell} - 1" if shift == -1 else at(cell, shift)
        with self.write.block(f"if {slot.entry}:"):
            self._set(meter.target, fit(self._colour(cell, meter), meter.target.width), facts)

    @staticmethod
    def _colour(cell: str, meter: model.MeterDef) -> Value:
        amount = "n" if meter.by_bytes else "1"
        return Value(f"run_meter(meter_rates, meter_tokens, {cell}, {amount}, now_us)", 0, 2)

    def _indirect(self, table: model.TableDef, slot: model.TableSlot, facts: frozenset[str]) -> None:
        assert table.profile is not None
        profile = self.text.layout.profiles[table.profile]
        self.write(f"i = {slot.rows}[{slot.entry}]")
        self.write(f"k = {profile.groups}[i]")
        with self.write.block("if k:"):
            self.write(f"i = {profile.groups}[i + 1]")
            definition = self.text.program.profiles[table.profile]
            if definition.algorithm is not None:
                with self.write.block("if k > 1:"):
                    calculation = model.Calculation(table.profile, definition.algorithm, definition.inputs, table.where)
                    self._hash(calculation, facts)
                    self.write("i += h % k")
            self.write(f"{slot.member} = {profile.choices}[i]")
            self.write(f"{slot.action} = {profile.members}[{slot.member}]")
            self._dispatch(table, slot.action, profile.members, slot.member, facts, always=False)
        if self._asks_action(table):
            with self.write.block("else:"):
                self.write(f"{slot.action} = -1")

    def _asks_action(self, table: model.TableDef) -> bool:
        return len(successors(table)) > 1 and not (table.on_hit[0] or table.on_miss[0])

    def _dispatch(
        self, table: model.TableDef, action: str, rows: str, row: str, facts: frozenset[str], always: bool
    ) -> None:
        """Run the action whose number is ``action``, with arguments from ``rows`` after ``row``."""
        slot = self.text.layout.tables[table.name]
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

    def _action(self, action: model.ActionDef, arguments: Sequence[Value], facts: frozenset[str]) -> None:
        stores = Stores(self.text)
        for statement in action.body:
            self._statement(statement, action, arguments, stores)
        stores.flush(facts)
        self.expressions.bounds.clear()

    def _statement(
        self, statement: model.Statement, action: model.ActionDef, arguments: Sequence[Value], stores: Stores
    ) -> None:
        where = action.where
        if isinstance(statement, model.Assign):
            value = self.expressions.value(statement.value, where, arguments, wraps=True)
            self._put(statement.target, fit(value, statement.target.width), stores)
        elif isinstance(statement, model.Count):
            with self._cell("counters", statement.counter, statement.index, where, arguments) as cell:
                self.write(f"packets_counted[{cell}] += 1")
                self.write(f"bytes_counted[{cell}] += n")
        elif isinstance(statement, model.RegisterRead):
            width = self.text.program.registers[statement.register].width
            with self._cell("registers", statement.register, statement.index, where, arguments) as cell:
                value = Value(f"registers[{cell}]", 0, (1 << width) - 1)
                self._put(statement.target, fit(value, statement.target.width), stores)
        elif isinstance(statement, model.RegisterWrite):
            width = self.text.program.registers[statement.register].width
            value = fit(self.expressions.value(statement.value, where, arguments, wraps=True), width)
            with self._cell("registers", statement.register, statement.index, where, arguments) as cell:
                self.write(f"registers[{cell}] = {value.text}")
        elif isinstance(statement, model.Truncate):
            if self.pipeline is not self.text.program.egress:
                raise UnsupportedFeatureError("truncate in ingress", where)
            length = self.expressions.value(statement.length, where, arguments)
            self.write(f"size = min(size, {bare(length.text)})")
        elif isinstance(statement, model.Hash):
            self._hash_into(statement, where, arguments, stores)
        elif isinstance(statement, model.ExecuteMeter):
            meter = self.text.program.meters[statement.meter]
            with self._cell("meters", statement.meter, statement.index, where, arguments) as cell:
                self._put(statement.target, fit(self._colour(cell, meter), statement.target.width), stores)
        else:
            assert isinstance(statement, model.Exit)

    @contextmanager
    def _cell(self, kind: str, name: str, index: Expr, where: str, arguments: Sequence[Value]) -> Iterator[str]:
        """Yield an index into a flat array; lines written in the ``with`` block run only if it is in range."""
        base, size = getattr(self.text.layout, kind)[name], getattr(self.text.program, kind)[name].size
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
        if target in self.text.read:
            if text != self.names(target):
                self.write(f"{self.names(target)} = {bare(text)}")
            text = self.names(target)
        elif not target.metadata and value.constant is None:
            self.write(f"{self.names(target)} = {bare(text)}")
            text = self.names(target)
        if not target.metadata:
            stores.add(target, text)

    def _set(self, target: Field, value: Value, facts: frozenset[str]) -> None:
        stores = Stores(self.text)
        self._put(target, value, stores)
        stores.flush(facts)

    # ---------------------------------------------------------------------------------------- hashes and checksums

    def _hash_into(self, statement: model.Hash, where: str, arguments: Sequence[Value], stores: Stores) -> None:
        calculation = self.text.program.calculations[statement.calculation]
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

    def _hash(self, calculation: model.Calculation, facts: frozenset[str]) -> int:
        """Set ``h`` to a hash over the fields of valid headers; return its width in bits."""
        headers = frozenset(item.header for item in calculation.inputs if isinstance(item, Field) and not item.metadata)
        choices = self.text.stacks.combinations(headers, facts) if headers else [frozenset[str]()]
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
    def _present(calculation: model.Calculation, valid: frozenset[str]) -> list[Field | model.Bits]:
        return [
            item for item in calculation.inputs if isinstance(item, model.Bits) or item.metadata or item.header in valid
        ]

    def _hash_bits(self, calculation: model.Calculation, valid: frozenset[str]) -> int:
        if calculation.algorithm in HASH_BITS:
            return HASH_BITS[calculation.algorithm]
        width = min((sum(item.width for item in self._present(calculation, valid)) + 7) // 8, 8) * 8
        if width > 63:
            raise UnsupportedFeatureError("identity hashes over more than 7 bytes", calculation.where)
        return width

    def _hash_call(self, calculation: model.Calculation, valid: frozenset[str]) -> str:
        inputs = self._present(calculation, valid)
        helper = self.text.helpers.name(HashOf(calculation.algorithm, tuple(item.width for item in inputs)))
        texts = [
            str(item.value) if isinstance(item, model.Bits) else self.expressions.value(item, calculation.where).text
            for item in inputs
        ]
        return f"{helper}({', '.join(texts)})"

    def verify(self, checksum: model.Checksum, flag: Field) -> None:
        """Emit the verification of a checksum; a mismatch sets ``flag``."""
        with self.write.block(f"if {bare(self._guard(checksum))}:"):
            self._compute(checksum)
            target = self.expressions.value(checksum.target, checksum.calculation.where).text
            with self.write.block(f"if h != {target}:"):
                self.write(f"{self.names(flag)} = 1")

    def update(self, checksum: model.Checksum) -> None:
        """Emit the update of a checksum in the packet."""
        with self.write.block(f"if {bare(self._guard(checksum))}:"):
            bits = self._compute(checksum)
            value = fit(Value("h", 0, (1 << bits) - 1), checksum.target.width)
            self._set(checksum.target, value, frozenset({checksum.target.header}))

    def _compute(self, checksum: model.Checksum) -> int:
        """Set ``h`` to the computed checksum; return its width in bits."""
        covered = summed_range(checksum)
        if covered is None:
            if checksum.update:
                self._load(checksum.calculation)
            return self._hash(checksum.calculation, frozenset({checksum.target.header}))
        # 65536 is 1 modulo 65535, and so is its square. So the one's complement sum of all 16-bit words is the sum of
        # 2- or 4-byte words modulo 65535, except that 0 means 65535 unless all words are zero.
        load = self.text.helpers.name(LoadBytes(word_units(*covered)))
        header = checksum.target.header
        starts = self.text.stacks.offsets.get(header, frozenset({0}))
        start = str(next(iter(starts))) if len(starts) == 1 else f"{self.names(Valid(header))} - 1"
        self.write(f"h = sum({load}(p, {start}))")
        self.write("k = h % 65535")
        self.write("h = 65535 - k if k or not h else 0")
        return 16

    def _load(self, calculation: model.Calculation) -> None:
        """Load the header fields of a calculation from the packet, so that they need not be kept until then."""
        fields = [item for item in calculation.inputs if isinstance(item, Field) and not item.metadata]
        for header in dict.fromkeys(item.header for item in fields):
            starts = self.text.stacks.offsets.get(header)
            if starts is None:
                continue
            valid, first = self.names(Valid(header)), next(iter(starts)) if len(starts) == 1 else 0
            placed = [Placed(first * 8 + item.offset, item) for item in dict.fromkeys(fields) if item.header == header]
            with self.write.block(f"if {valid}:"):
                emit_load(self.text, placed, "" if len(starts) == 1 else f"{valid} - 1")

    def _guard(self, checksum: model.Checksum) -> str:
        valid = self.names(Valid(checksum.target.header))
        if checksum.condition is None:
            return valid
        condition = self.expressions.condition(checksum.condition, checksum.calculation.where)
        return condition if checksum.target.header in facts_of(checksum.condition, True) else f"{valid} and {condition}"


def word_units(first: int, end: int, gap: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) units that cover bytes ``first`` to ``end`` except the two at ``gap``."""
    units = []
    for start, stop in ((first, gap), (gap + 2, end)):
        while start < stop:
            size = 4 if stop - start >= 4 else 2
            units.append((start, size))
            start += size
    return tuple(units)


# ---------------------------------------------------------------------------------------------------------- the program


_COLUMNS: Final = "port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us"
"""The arguments of egress."""
_FLAT: Final = ", ".join(("structures", *model.FLAT))
"""The arrays of the state: all tables and profiles in one, with their offsets at its start; and the others."""
_INGRESS: Final = {
    "standard_metadata.ingress_port": "ingress_port",
    "standard_metadata.packet_length": "n",
    "intrinsic_metadata.ingress_global_timestamp": "now_us & 0xffffffffffff",
}
_QUEUE: Final = {
    "queueing_metadata.enq_timestamp": "enq_us & 0xffffffff",
    "queueing_metadata.enq_qdepth": "enq_depth & 0x7ffff",
    "queueing_metadata.deq_timedelta": "deq_delta_us & 0xffffffff",
    "queueing_metadata.deq_qdepth": "deq_depth & 0x7ffff",
}
_EGRESS: Final = {
    "standard_metadata.egress_port": "port",
    # simple_switch sets it to one above the drop port, which overflows to 0.
    "standard_metadata.egress_spec": "0",
    "standard_metadata.instance_type": "0",
    "standard_metadata.packet_length": "n",
    "intrinsic_metadata.egress_global_timestamp": "now_us & 0xffffffffffff",
}


def _function(head: str, first: Iterable[str], body: Iterable[str]) -> str:
    return "\n".join([f"def {head}:", *(f"    {line}" for line in first), *body]) + "\n"


_ENTRIES: Final = f"""
@njit(nogil=True, cache=CACHE)
def ingress_batch(packets, lengths, ingress_ports, times_us, ports, priorities, carry, {_FLAT}):
    state = ingress_state({_FLAT})
    for i in range(len(lengths)):
        ports[i], priorities[i] = ingress(packets[i], lengths[i], carry, i, state, ingress_ports[i], times_us[i])


@njit(nogil=True, cache=CACHE)
def egress_batch(packets, lengths, carry, {_COLUMNS}, sizes, {_FLAT}):
    state = egress_state({_FLAT})
    for i in range(len(lengths)):
        sizes[i] = egress(packets[i], lengths[i], carry, i, state, {_COLUMNS.replace(",", "[i],")}[i])


forward = loop(ingress, egress, njit(nogil=True))


@njit(nogil=True, cache=CACHE)
def forward_batch(until_ns, arrived, count, places, rows, slots, carry, spare, ports, totals, out, {_FLAT}):
    pool = rows, slots, carry, spare, ports, totals, out
    forward(until_ns, arrived, count, places, pool, ingress_state({_FLAT}), egress_state({_FLAT}))
"""
"""The functions that Python calls; the state comes as separate arrays."""


class ProgramText:
    """The text of a program. While it is made, this also has what all emitters share.

    Attributes
    ----------
    zero
        Fields that are always zero.
    outputs
        The fields that decide what becomes of a packet.
    read
        Fields and validity bits that are read anywhere; only these get a variable.
    carry
        Variables that ingress passes to egress, in order.
    result
        Egress port and queue, as text.
    ingress, egress
        The bodies, one line each, indented by one level.

    Raises
    ------
    UnsupportedFeatureError
        The program uses a feature that the built-in switch does not support.
    """

    def __init__(self, program: model.ProgramDef) -> None:
        self.program = program = replace(program, ingress=shorten(program.ingress), egress=shorten(program.egress))
        self.write, self.names, self.helpers = Writer(), Names(), Helpers()
        self.stacks, self.usage, self.layout = stacks(program), Usage(program), model.lay_out(program)
        self.standard = program.standard
        # All four fields or none, as in simple_switch.
        self.queue = _QUEUE if all(alias in self.standard for alias in _QUEUE) else {}
        assigned = self.usage.assigned()
        self.zero = frozenset(constant_fields(program, self.usage) | self._unset() - assigned)
        several = frozenset(name for name, places in self.stacks.offsets.items() if len(places) > 1)
        self.expressions = Expressions(self.names, several, self.zero)
        self.spec = self.standard["standard_metadata.egress_spec"]
        self.priority = self.standard.get("intrinsic_metadata.priority")
        self.outputs: frozenset[model.Variable] = frozenset(item for item in (self.spec, self.priority) if item)
        self.read = frozenset(self.usage.all_reads() | self.outputs)
        self.updates = [checksum for checksum in program.checksums if checksum.update]
        for name, argument in {"ingress_port": "ingress_port", "packet_length": "n", "egress_port": "port"}.items():
            item = self.standard.get(f"standard_metadata.{name}")
            if item is not None and item not in assigned:
                self.names.give(item, argument)
        given = {self.standard.get(alias) for alias in (*_EGRESS, *self.queue)}
        live = (item for item in self._egress_live() if item not in given and item not in self.zero)
        carried = sorted(live, key=self.names)
        self._egress()
        self.egress = tuple(self.write.since(0))
        self._ingress(frozenset(carried))
        self.ingress = tuple(self.write.lines)
        self.carry = tuple(self.names(item) for item in carried)
        self.result = f"{self.names(self.spec)}, {self.names(self.priority) if self.priority is not None else '0'}"

    def _unset(self) -> set[Field]:
        """Return the standard metadata fields that the target never sets."""
        set_by_target = {*_INGRESS, *_EGRESS, *self.queue, "intrinsic_metadata.priority"}
        set_by_target |= {"standard_metadata.parser_error", "standard_metadata.checksum_error"}
        set_by_target.discard("standard_metadata.instance_type")
        kept = {self.standard[alias] for alias in set_by_target if alias in self.standard}
        return {item for item in self.standard.values() if item not in kept}

    def plain(self, namespace: dict[str, Any]) -> str:
        """Return the plain text, and add the functions it calls to ``namespace``."""
        namespace["run_meter"] = run_meter
        # Every lookup structure is a dictionary whose __missing__ answers for absent keys.
        namespace.update({f"lookup_{match}": dict.__getitem__ for match in ("exact", "lpm", "ternary", "range")})
        namespace["lookup_words"] = lookup_joined
        functions = [helper.plain(name, namespace) for helper, name in self.helpers.names.items()]
        carried = f"({''.join(f'{name}, ' for name in self.carry)})"
        ingress = _function("ingress(p, ingress_port, now_us)", ["n = len(p)"], self.ingress)
        egress = _function(f"egress(p, carry, {_COLUMNS})", ["n = size = len(p)", f"{carried} = carry"], self.egress)
        return "\n\n".join([*filter(None, functions), f"{ingress}    return {self.result}, {carried}\n", egress])

    def compiled(self) -> str:
        """Return the text for Numba: a whole module with the functions of `_ENTRIES`."""
        functions = [inspect.getsource(function) for function in (run_meter, *LOOKUPS, *queues.COMPILED)]
        functions += [helper.compiled(name) for helper, name in self.helpers.names.items()]
        kept = "".join(f"    carry[slot, {place}] = {name}\n" for place, name in enumerate(self.carry))
        taken, made = self._state(self.ingress)
        ingress = _function("ingress(p, n, carry, slot, state, ingress_port, now_us)", taken, self.ingress)
        functions += [f"{ingress}{kept}    return {self.result}\n", _function(f"ingress_state({_FLAT})", [made], ())]
        taken, made = self._state(self.egress)
        carried = [f"{name} = carry[slot, {place}]" for place, name in enumerate(self.carry)]
        egress = _function(f"egress(p, n, carry, slot, state, {_COLUMNS})", ["size = n", *carried, *taken], self.egress)
        functions += [egress, _function(f"egress_state({_FLAT})", [made], ())]
        head = "from __future__ import annotations\n\nimport numpy as np\nfrom numba import njit\n\nCACHE = False\n"
        constants = "".join(f"{name} = {value}\n" for name, value in queues.CONSTANTS.items())
        return "\n\n".join(
            [
                head + compiled_tables() + constants,
                *(f"@njit(nogil=True)\n{function}" for function in functions),
                inspect.getsource(queues.loop),
                _ENTRIES,
            ]
        )

    def _state(self, body: tuple[str, ...]) -> tuple[list[str], str]:
        """Return statements that take the arrays that a body uses out of ``state``, and one that returns that."""
        names, words = self.layout.structures(), set(re.findall(r"\w+", "\n".join(body)))
        texts = {name: f"structures[structures[{place}] : structures[{place + 1}]]" for place, name in enumerate(names)}
        texts |= {name: name for name in model.FLAT}
        used = [name for name in texts if name in words]
        taken = [f"{name} = state[{place}]" for place, name in enumerate(used)]
        return taken, f"return ({''.join(f'{texts[name]}, ' for name in used)})"

    # ------------------------------------------------------------------------------------------------------ egress

    def _can_drop(self) -> bool:
        """Whether egress can drop a packet."""
        return any(
            target_of(statement) == self.spec
            for node in self.program.egress.nodes.values()
            for action in getattr(node, "actions", ())
            for statement in action.body
        )

    def _egress_live(self) -> frozenset[model.Variable]:
        after: frozenset[model.Variable] = frozenset({self.spec}) if self._can_drop() else frozenset()
        for checksum in self.updates:
            after |= self.usage.checksum_reads(checksum)
        return self.usage.pipeline_live(self.program.egress, after)

    def _egress(self) -> None:
        control = ControlText(self, self.program.egress)
        self._set({**_EGRESS, **self.queue}, self._egress_live())
        control.emit()
        if self._can_drop():
            with self.write.block(f"if {self.names(self.spec)} == {queues.DROP_PORT}:"):
                self.write("return 0")
        for checksum in self.updates:
            control.update(checksum)
        self.write("return size")

    def _set(self, values: dict[str, str], live: frozenset[model.Variable]) -> None:
        for alias, text in values.items():
            item = self.standard.get(alias)
            if item is not None and item in live and item not in self.zero and self.names(item) != text:
                self.write(f"{self.names(item)} = {text}")

    # ----------------------------------------------------------------------------------------------------- ingress

    def _ingress(self, carry: frozenset[model.Variable]) -> None:
        live = self.usage.pipeline_live(self.program.ingress, carry | self.outputs)
        flag = self.standard.get("standard_metadata.checksum_error")
        verified = [item for item in self.program.checksums if item.verify and flag in self.read]
        for checksum in verified:
            live |= self.usage.checksum_reads(checksum)
        parser_reads = self.usage.parser_reads()
        needed = frozenset(live | parser_reads)
        parser = ParserText(self, needed)
        given = {self.standard.get(alias) for alias in _INGRESS}
        first = live | {item for item in self._parser_sets() if item in needed}
        initial = sorted(self.names(item) for item in first if item not in given and item not in self.zero)
        for start in range(0, len(initial), 8):
            self.write(f"{' = '.join(initial[start : start + 8])} = 0")
        self._set(_INGRESS, needed)
        parser.emit()
        control = ControlText(self, self.program.ingress)
        for checksum in verified:
            assert flag is not None
            control.verify(checksum, flag)
        control.emit()

    def _parser_sets(self) -> set[model.Variable]:
        """Return what the parser assigns, or reads without having extracted it: it may have no value before."""
        found: set[model.Variable] = set()
        for state in self.program.states.values():
            found |= self.usage.state_reads(state) - {key for key in state.keys if not key.metadata}
            found |= {item.target for item in state.operations if isinstance(item, model.Assign)}
        return found
