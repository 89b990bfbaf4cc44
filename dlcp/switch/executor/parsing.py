# SPDX-License-Identifier: Apache-2.0
"""Generates the parser as nested ifs, and the loads and stores of packet fields.

Every path through the parser has its own text, so every offset is a constant. A header's fields are read once, when
the header is extracted, and only if they are needed. An assigned field is written back into the packet at once, so
the packet always equals the deparser's output.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dlcp.switch.executor.analysis import Context
from dlcp.switch.executor.model import (
    Assign,
    Case,
    Extract,
    Field,
    ParserState,
    UnsupportedFeatureError,
    Valid,
    Variable,
)
from dlcp.switch.executor.text import Helpers, LoadBytes, Names, StoreBytes, Writer, at, fit


class Placed(NamedTuple):
    """A field and its position in the packet, in bits."""

    bit: int
    field: Field


def emit_load(write: Writer, names: Names, helpers: Helpers, needed: Sequence[Placed]) -> None:
    """Emit one load of several fields of a packet."""
    if not needed:
        return
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
    loader = helpers.name(LoadBytes(tuple(parts)))
    comma = "," if len(variables) == 1 else ""
    write(f"{', '.join(variables)}{comma} = {loader}(p, {offset})")
    for line in decode:
        write(line)


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
        if size > 7 and (size != 8 or len(members) > 1):
            fields = ", ".join(member.field.name for member in members)
            feature = f"fields that share bytes over more than 7 bytes ({fields})"
            raise UnsupportedFeatureError(feature, f"header {members[0].field.header}")
    return runs


def _pieces(size: int) -> list[int]:
    return {1: [1], 2: [2], 3: [1, 2], 4: [4], 5: [1, 4], 6: [2, 4], 7: [1, 2, 4], 8: [8]}[size]


def _decode(names: Names, members: list[Placed], start: int, size: int, raw: list[str], pieces: list[int]) -> list[str]:
    lines = []
    source = raw[0]
    if len(raw) > 1:
        terms, rest = [], size
        for text, piece in zip(raw, pieces, strict=True):
            rest -= piece
            terms.append(f"{text} << {8 * rest}" if rest else text)
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

    def __init__(self, write: Writer, context: Context) -> None:
        self.write, self.names, self.helpers = write, context.names, context.helpers
        self.offsets = context.stacks.offsets
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
            if text.isdigit() or text.startswith("0x"):
                piece = str(((int(text, 0) >> (end - high)) & ((1 << (high - low)) - 1)) << (byte * 8 + 8 - high))
            else:
                piece = text if end == high else f"{text} >> {end - high}"
                if low > item.offset:
                    piece = (
                        f"({piece}) & {(1 << (high - low)) - 1}"
                        if end != high
                        else f"{piece} & {(1 << (high - low)) - 1}"
                    )
                if byte * 8 + 8 > high:
                    piece = (
                        f"({piece}) << {byte * 8 + 8 - high}" if " " in piece else f"{piece} << {byte * 8 + 8 - high}"
                    )
                elif " " in piece:
                    piece = f"({piece})"
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
                part = f"{text} >> {8 * rest}" if rest else text
                if len(pieces) > 1 and rest + piece < size:
                    part = (
                        f"{part} & {hex((1 << 8 * piece) - 1)}"
                        if not rest
                        else f"({part}) & {hex((1 << 8 * piece) - 1)}"
                    )
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

    def __init__(self, context: Context, write: Writer, needed: frozenset[Variable]) -> None:
        self.context, self.write, self.needed = context, write, needed
        self.program, self.names, self.expressions = context.program, context.names, context.expressions
        self.stacks = context.stacks
        self.error = self.program.standard.get("standard_metadata.parser_error")

    def emit(self) -> None:
        """Emit the whole parser."""
        self._state(self.program.first_state, (), 0)

    def initial(self) -> set[Variable]:
        """Return the metadata that the parser may read before it is assigned."""
        found: set[Variable] = set()
        for state in self.program.states.values():
            found |= {key for key in state.keys if key.metadata}
        return found

    def _state(self, name: str | None, path: tuple[str, ...], offset: int) -> None:
        if name is not None:
            self._operations(self.program.states[name], 0, path, offset)

    def _operations(self, state: ParserState, index: int, path: tuple[str, ...], offset: int) -> None:
        where = f"parser state {state.name}"
        while index < len(state.operations):
            operation = state.operations[index]
            if isinstance(operation, Extract):
                self._extract(state, index, path, offset)
                return
            index += 1
            if isinstance(operation, Assign):
                self._assign(operation, path, where)
            else:
                condition = self.expressions.condition(operation.condition, where)
                with self.write.block(f"if {condition}:"):
                    self._operations(state, index, path, offset)
                self._otherwise(self._error(self.expressions.value(operation.error, where).text))
                return
        self._select(state, path, offset)

    def _assign(self, operation: Assign, path: tuple[str, ...], where: str) -> None:
        target = operation.target
        value = fit(self.expressions.value(operation.value, where, wraps=True), target.width)
        self.write(f"{self.names(target)} = {value.text}")
        if not target.metadata:
            stores = Stores(self.write, self.context)
            stores.add(target, self.names(target))
            stores.flush(path)

    def _extract(self, state: ParserState, index: int, path: tuple[str, ...], offset: int) -> None:
        """Emit the extract at ``index`` together with those that directly follow it."""
        headers: list[str] = []
        while index < len(state.operations) and isinstance(operation := state.operations[index], Extract):
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
        emit_load(self.write, self.names, self.context.helpers, needed)
        for name, start in zip(headers, starts, strict=False):
            if Valid(name) in self.needed:
                several = len(self.stacks.offsets[name]) > 1
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

    def _select(self, state: ParserState, path: tuple[str, ...], offset: int) -> None:
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

    def _matches(self, state: ParserState, case: Case) -> str:
        parts = []
        for key, value, mask in zip(state.keys, case.values, case.masks, strict=True):
            full = (1 << key.width) - 1
            name = self.expressions.value(key, f"parser state {state.name}").text
            if mask == full:
                parts.append(f"{name} == {hex(value)}")
            elif mask:
                parts.append(f"({name} & {hex(mask)}) == {hex(value)}")
        return " and ".join(parts)
