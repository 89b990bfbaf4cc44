# SPDX-License-Identifier: Apache-2.0
"""The parser as nested ifs: every way through it has its own text, so every offset is a constant."""

from dlcp.switch.codegen.analysis import Stacks
from dlcp.switch.codegen.expressions import Expressions, fit
from dlcp.switch.codegen.packets import Placed, Stores, emit_load
from dlcp.switch.codegen.writer import Helpers, Names, Writer
from dlcp.switch.model import Assign, Case, Extract, ProgramDef, State, Valid, Variable


class ParserText:
    """Emits a program's parser.

    Parameters
    ----------
    needed
        What is read after the parser or in it; other fields are not taken from the packet.
    """

    def __init__(
        self,
        program: ProgramDef,
        stacks: Stacks,
        write: Writer,
        names: Names,
        helpers: Helpers,
        expressions: Expressions,
        needed: frozenset[Variable],
    ) -> None:
        self.program, self.stacks, self.write, self.names = program, stacks, write, names
        self.helpers, self.expressions, self.needed = helpers, expressions, needed
        self.error = program.standard.get("standard_metadata.parser_error")

    def emit(self) -> None:
        """Emit the whole parser."""
        self._state(self.program.first_state, (), 0)

    def initial(self) -> set[Variable]:
        """Return what the parser may read before it has a value."""
        found: set[Variable] = set()
        for state in self.program.states.values():
            found |= {key for key in state.keys if key.metadata}
        return found

    def _state(self, name: str | None, path: tuple[str, ...], offset: int) -> None:
        if name is not None:
            self._operations(self.program.states[name], 0, path, offset)

    def _operations(self, state: State, index: int, path: tuple[str, ...], offset: int) -> None:
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
            stores = Stores(self.write, self.names, self.helpers, self.stacks.offsets)
            stores.add(target, self.names(target))
            stores.flush(path)

    def _extract(self, state: State, index: int, path: tuple[str, ...], offset: int) -> None:
        """Emit the extract at ``index``, together with those that follow it at once."""
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
        """Read what is needed of headers that are there, and mark them valid."""
        needed = [
            Placed(start * 8 + item.offset, item)
            for name, start in zip(headers, starts, strict=False)
            for item in self.program.headers[name].fields.values()
            if item in self.needed
        ]
        emit_load(self.write, self.names, self.helpers, needed)
        for name, start in zip(headers, starts, strict=False):
            if Valid(name) in self.needed:
                several = len(self.stacks.offsets[name]) > 1
                self.write(f"{self.names(Valid(name))} = {start + 1 if several else 1}")

    def _error(self, error: str) -> list[str]:
        """Return the lines that note an error, if anybody reads it."""
        if self.error is None or self.error not in self.needed:
            return []
        return [f"{self.names(self.error)} = {error}"]

    def _otherwise(self, lines: list[str]) -> None:
        if lines:
            with self.write.block("else:"):
                for line in lines:
                    self.write(line)

    def _select(self, state: State, path: tuple[str, ...], offset: int) -> None:
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

    def _matches(self, state: State, case: Case) -> str:
        parts = []
        for key, value, mask in zip(state.keys, case.values, case.masks, strict=True):
            full = (1 << key.width) - 1
            name = self.expressions.value(key, f"parser state {state.name}").text
            if mask == full:
                parts.append(f"{name} == {hex(value)}")
            elif mask:
                parts.append(f"({name} & {hex(mask)}) == {hex(value)}")
        return " and ".join(parts)
