# SPDX-License-Identifier: Apache-2.0
"""Program analysis: reads and writes, possible header sequences, and simplification of controls."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dlcp.switch.executor import model
from dlcp.switch.executor.model import Field, UnsupportedFeatureError, Valid, Variable

MAX_PATHS: Final = 1024
"""Maximum number of paths through the parser: each has its own generated text. Not tuned."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Every possible sequence of headers after parsing, and the possible offsets of each header, in bytes."""

    sequences: frozenset[tuple[str, ...]]
    offsets: dict[str, frozenset[int]]

    def implied(self, valid: Iterable[str]) -> frozenset[str]:
        """Return the headers that are valid whenever those in ``valid`` are."""
        wanted = frozenset(valid)
        possible = [frozenset(sequence) for sequence in self.sequences if wanted <= set(sequence)]
        return frozenset.intersection(*possible) if possible else wanted

    def combinations(self, headers: frozenset[str], known: frozenset[str]) -> list[frozenset[str]]:
        """Return the subsets of ``headers`` that can be valid when ``known`` are valid, largest first."""
        found = {headers & set(sequence) for sequence in self.sequences if known <= set(sequence)}
        return sorted((frozenset(item) for item in found), key=lambda item: (-len(item), sorted(item)))


def stacks(program: model.ProgramDef) -> Stacks:
    """Follow every path through the parser.

    Raises
    ------
    UnsupportedFeatureError
        For loops, headers extracted twice, and headers that the deparser omits or reorders: packets are edited in
        place, so headers cannot move.
    """
    sequences: set[tuple[str, ...]] = set()
    offsets: dict[str, set[int]] = {}
    paths = 0

    def end(path: tuple[str, ...]) -> None:
        nonlocal paths
        paths += 1
        if paths > MAX_PATHS:
            raise UnsupportedFeatureError(f"parsers with more than {MAX_PATHS} paths", "parser")
        sequences.add(path)
        if path != tuple(name for name in program.emitted if name in path):
            raise UnsupportedFeatureError(f"a deparser that does not emit {', '.join(path)} as parsed", "deparser")

    def follow(name: str | None, path: tuple[str, ...], offset: int, seen: tuple[str, ...]) -> None:
        if name is None:
            return end(path)
        if name in seen:
            raise UnsupportedFeatureError("loops in the parser", f"parser state {name}")
        state = program.states[name]
        for operation in state.operations:
            if isinstance(operation, model.Extract):
                end(path)  # the packet may be too short
                header = program.headers[operation.header]
                if header.name in path:
                    raise UnsupportedFeatureError(f"header {header.name} extracted twice", f"parser state {name}")
                if header.width % 8:
                    raise UnsupportedFeatureError(f"a header of {header.width} bits", f"header {header.name}")
                offsets.setdefault(header.name, set()).add(offset)
                path, offset = (*path, header.name), offset + header.width // 8
            elif isinstance(operation, model.Verify):
                end(path)
        for following in {state.default, *(case.next for case in state.cases)}:
            follow(following, path, offset, (*seen, name))
        return None

    follow(program.first_state, (), 0, ())
    return Stacks(frozenset(sequences), {name: frozenset(item) for name, item in offsets.items()})


# ------------------------------------------------------------------------------------------------ reads and writes


def input_reads(inputs: Iterable[Field | model.Bits]) -> set[Variable]:
    """Return the variables that a hash over ``inputs`` reads: fields, and the validity of their headers."""
    fields = [item for item in inputs if isinstance(item, Field)]
    return {*fields, *(Valid(item.header) for item in fields if not item.metadata)}


def target_of(statement: model.Statement) -> Field | None:
    """Return the field that a statement writes, if any."""
    if isinstance(statement, model.Assign | model.RegisterRead | model.Hash | model.ExecuteMeter):
        return statement.target
    return None


class Usage:
    """Reads, writes and liveness of a program's nodes."""

    def __init__(self, program: model.ProgramDef) -> None:
        self.program = program
        self.written = {target for target in self._targets() if not target.metadata}
        """Header fields that the program assigns: their variables can be nonzero while the header is invalid."""

    def _targets(self) -> Iterator[Field]:
        for state in self.program.states.values():
            yield from (operation.target for operation in state.operations if isinstance(operation, model.Assign))
        for action in self.actions():
            yield from (target for statement in action.body if (target := target_of(statement)) is not None)
        yield from (meter.target for meter in self.program.meters.values() if meter.target is not None)

    def assigned(self) -> set[Field]:
        """Return every field that the program writes."""
        return set(self._targets())

    def actions(self) -> Iterator[model.ActionDef]:
        """Return every action that a table of the program can run."""
        for pipeline in (self.program.ingress, self.program.egress):
            for node in pipeline.nodes.values():
                if isinstance(node, model.TableDef):
                    yield from node.actions

    def statement_reads(self, statement: model.Statement) -> set[Variable]:
        """Return the variables that a statement reads, including the inputs of a hash."""
        if isinstance(statement, model.Hash):
            return model.reads(statement) | input_reads(self.program.calculations[statement.calculation].inputs)
        return model.reads(statement)

    def body_live(self, body: Iterable[model.Statement], after: frozenset[Variable]) -> frozenset[Variable]:
        """Return the variables live before ``body`` if ``after`` are live after it."""
        live = set(after)
        for statement in reversed(tuple(body)):
            if isinstance(statement, model.Assign | model.Hash):
                live.discard(statement.target)
            live |= self.statement_reads(statement)
        return frozenset(live)

    def key_reads(self, table: model.TableDef) -> set[Variable]:
        """Return the variables that a table's lookup reads."""
        found: set[Variable] = set()
        for key in table.keys:
            found.update(key.sources)
            found |= {Valid(item.header) for item in key.sources if isinstance(item, Field) and item in self.written}
        if table.profile is not None:
            found |= input_reads(self.program.profiles[table.profile].inputs)
        return found

    def pipeline_live(self, pipeline: model.Control, after: frozenset[Variable]) -> frozenset[Variable]:
        """Return the variables live at a pipeline's start if ``after`` are live at its end."""
        live: dict[str | None, frozenset[Variable]] = {None: after}

        def table_live(table: model.TableDef) -> frozenset[Variable]:
            if table.hidden:
                assert table.default is not None
                action = self.default_action(table)
                return self.body_live(action.body, live[successor(table, action, hit=False)])
            found = frozenset(self.key_reads(table))
            for action in table.actions:
                for hit in (True, False):
                    found |= self.body_live(action.body, live[successor(table, action, hit)])
            for name in successors(table):
                found |= live[name]
            meter = self.program.meters[table.meter] if table.meter else None
            if meter is not None and meter.target is not None and not meter.target.metadata:
                found |= {Valid(meter.target.header)}
            return found

        for name in followers_first(pipeline):
            node = pipeline.nodes[name]
            if isinstance(node, model.Conditional):
                live[name] = live[node.then] | live[node.otherwise] | model.reads(node.condition)
            else:
                live[name] = table_live(node)
        return live[pipeline.first]

    @staticmethod
    def default_action(table: model.TableDef) -> model.ActionDef:
        """Return the action that a hidden table runs."""
        assert table.default is not None
        return next(action for action in table.actions if action.name == table.default.name)

    def checksum_reads(self, checksum: model.Checksum) -> frozenset[Variable]:
        """Return the variables that a checksum reads.

        Its inputs are not among them if it is summed over the packet's bytes, nor header fields if it is an update,
        which loads them anew.
        """
        found: set[Variable] = {Valid(checksum.target.header)}
        if checksum.condition is not None:
            found |= model.reads(checksum.condition)
        if checksum.verify:
            found.add(checksum.target)
        if summed_range(checksum) is None:
            inputs = input_reads(checksum.calculation.inputs)
            found |= {item for item in inputs if isinstance(item, Valid) or item.metadata or not checksum.update}
        return frozenset(found)

    def parser_reads(self) -> set[Variable]:
        """Return all variables that the parser reads."""
        found: set[Variable] = set()
        for state in self.program.states.values():
            found |= self.state_reads(state)
        return found

    @staticmethod
    def state_reads(state: model.ParserState) -> set[Variable]:
        """Return the variables that one parser state reads."""
        return set(state.keys).union(*(model.reads(operation) for operation in state.operations))

    def all_reads(self) -> set[Variable]:
        """Return all variables that are read anywhere; no others need to be computed."""
        found = self.parser_reads()
        for pipeline in (self.program.ingress, self.program.egress):
            for node in pipeline.nodes.values():
                found |= model.reads(node.condition) if isinstance(node, model.Conditional) else self.key_reads(node)
        for action in self.actions():
            for statement in action.body:
                found |= self.statement_reads(statement)
        for checksum in self.program.checksums:
            found |= self.checksum_reads(checksum)
        return found


def successor(table: model.TableDef, action: model.ActionDef, hit: bool) -> str | None:
    """Return the node after ``action`` of ``table``."""
    return None if action.exits else table.next_of(action.id, hit)


def successors(node: model.Conditional | model.TableDef) -> list[str | None]:
    """Return every node that can follow, without duplicates."""
    if isinstance(node, model.Conditional):
        found = [node.then, node.otherwise]
    elif node.hidden:
        found = [successor(node, Usage.default_action(node), hit=False)]
    else:
        found = [successor(node, action, hit) for action in node.actions for hit in (True, False)]
        if node.profile is not None:  # a table without a default member, or with an empty group, runs no action
            found += [node.on_miss[1] if node.on_miss[0] else node.base_next]
    return list(dict.fromkeys(found))


def followers_first(pipeline: model.Control) -> list[str]:
    """Return the reachable nodes, each after all of its possible successors.

    Raises
    ------
    UnsupportedFeatureError
        The pipeline has a loop; P4 has none, so the JSON is damaged.
    """
    order: list[str] = []
    open_nodes: dict[str, list[str]] = {}
    path = [] if pipeline.first is None else [pipeline.first]
    done: set[str] = set()
    while path:
        name = path[-1]
        if name not in open_nodes:
            open_nodes[name] = [item for item in successors(pipeline.nodes[name]) if item is not None]
        following = next((item for item in open_nodes[name] if item not in done), None)
        if following is None:
            order.append(path.pop())
            done.add(name)
        elif following in open_nodes:
            raise UnsupportedFeatureError("loops in a control", f"control {pipeline.name}, at {following}")
        else:
            path.append(following)
    return order


def joins(pipeline: model.Control) -> dict[str, str | None]:
    """Return every node's immediate postdominator, where all paths from it meet again (None: the end)."""
    result: dict[str, str | None] = {}
    depth: dict[str | None, int] = {None: 0}
    for name in followers_first(pipeline):
        following = successors(pipeline.nodes[name])
        meeting = following[0]
        for other in following[1:]:
            left, right = meeting, other
            while left != right:
                if depth[left] >= depth[right]:
                    assert left is not None
                    left = result[left]
                else:
                    assert right is not None
                    right = result[right]
            meeting = left
        result[name] = meeting
        depth[name] = depth[meeting] + 1
    return result


def summed_range(checksum: model.Checksum) -> tuple[int, int, int] | None:
    """Return (first byte, end, byte of the checksum) within the header if the checksum can be summed over the packet.

    This requires a 16-bit one's complement sum over adjacent fields of one header, in order, that omits only the
    checksum itself and starts an even number of bytes before it. Otherwise return None.
    """
    calculation, target = checksum.calculation, checksum.target
    fields = [item for item in calculation.inputs if isinstance(item, Field)]
    if calculation.algorithm != "csum16" or len(fields) != len(calculation.inputs) or not fields:
        return None
    if any(item.header != target.header for item in fields) or target.width != 16:
        return None
    position = fields[0].offset
    for item in fields:
        if item.offset == position + 16 and position == target.offset:
            position += 16
        if item.offset != position:
            return None
        position += item.width
    first, gap = fields[0].offset, target.offset
    if first % 8 or position % 8 or (gap - first) % 16 or (position - first) % 16 or not first < gap < position:
        return None
    return first // 8, position // 8, gap // 8


def constant_fields(program: model.ProgramDef, usage: Usage) -> set[Field]:
    """Return the metadata fields that are never written, and so are always zero."""
    given = set(program.standard.values())
    written = usage.assigned()
    return {
        item
        for header in program.headers.values()
        if header.metadata
        for item in header.fields.values()
        if item not in given and item not in written
    }


def shorten(pipeline: model.Control) -> model.Control:
    """Return the pipeline without unreachable nodes.

    If a condition on constants directly follows the hidden table that assigns them, it is evaluated here.
    """
    nodes = dict(pipeline.nodes)
    for name in followers_first(pipeline):
        node = nodes[name]
        if isinstance(node, model.TableDef) and node.hidden:
            nodes[name] = _threaded(node, nodes)
    shorter = replace(pipeline, nodes=nodes)
    reached = set(followers_first(shorter))
    return replace(shorter, nodes={name: node for name, node in nodes.items() if name in reached})


def _threaded(table: model.TableDef, nodes: Mapping[str, model.Node]) -> model.TableDef:
    action = Usage.default_action(table)
    if action.exits or not all(isinstance(statement, model.Assign) for statement in action.body):
        return table
    known: dict[Field, int] = {}
    for statement in action.body:
        assert isinstance(statement, model.Assign)
        if isinstance(value := constant(statement.value, known), int):
            known[statement.target] = value & ((1 << statement.target.width) - 1)
        else:
            known.pop(statement.target, None)
    following = table.next_of(action.id, hit=False)
    while following is not None:
        node = nodes[following]
        decided = constant(node.condition, known) if isinstance(node, model.Conditional) else None
        if decided is None:
            break
        assert isinstance(node, model.Conditional)
        following = node.then if decided else node.otherwise
    return replace(table, next={action.id: following}, on_hit=(False, None), on_miss=(False, None))


def constant(expression: model.Expr, known: Mapping[Field, int]) -> int | None:
    """Return the value of an expression over constants and ``known`` fields, or None if it is not constant."""
    if isinstance(expression, model.Const):
        return expression.value
    if isinstance(expression, Field):
        return known.get(expression)
    if isinstance(expression, model.Op):
        values = [constant(arg, known) for arg in expression.args]
        if expression.op in ("d2b", "b2d") and values[0] is not None:
            return int(values[0] != 0)
        if expression.op == "not" and values[0] is not None:
            return int(values[0] == 0)
        if expression.op == "==" and values[0] is not None and values[1] is not None:
            return int(values[0] == values[1])
    return None
