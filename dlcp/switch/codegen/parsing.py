# SPDX-License-Identifier: Apache-2.0
"""The parser as nested ifs: every way through it has its own text, so every offset is a constant."""

from dlcp.switch.bmv2_json import Assign, Case, Extract, Field, ProgramDef, State, Valid, Variable, Verify
from dlcp.switch.codegen.analysis import Stacks
from dlcp.switch.codegen.expressions import Expressions, fit
from dlcp.switch.codegen.packets import Stores, emit_load
from dlcp.switch.codegen.writer import Helpers, Names, Writer


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
            index += 1
            if isinstance(operation, Assign):
                self._assign(operation, path, where)
            elif isinstance(operation, Verify):
                condition = self.expressions.condition(operation.condition, where)
                with self.write.block(f"if {condition}:"):
                    self._operations(state, index, path, offset)
                self._fail(self.expressions.value(operation.error, where).text)
                return
            else:
                self._extract(operation, state, index, path, offset)
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

    def _extract(self, operation: Extract, state: State, index: int, path: tuple[str, ...], offset: int) -> None:
        header = self.program.headers[operation.header]
        end = offset + header.width // 8
        with self.write.block(f"if n >= {end}:"):
            fields: list[Field] = [item for item in header.fields.values() if item in self.needed]
            emit_load(self.write, self.names, self.helpers, fields, offset)
            if Valid(header.name) in self.needed:
                several = len(self.stacks.offsets[header.name]) > 1
                self.write(f"{self.names(Valid(header.name))} = {offset + 1 if several else 1}")
            self._operations(state, index, (*path, header.name), end)
        self._fail(str(self.program.errors["PacketTooShort"]))

    def _fail(self, error: str) -> None:
        if self.error is not None and self.error in self.needed:
            with self.write.block("else:"):
                self.write(f"{self.names(self.error)} = {error}")

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
