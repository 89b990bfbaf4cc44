# SPDX-License-Identifier: Apache-2.0
"""A P4 program as the built-in switch knows it: expressions, statements, tables, controls and the parser."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

COMPARISONS: Final = frozenset({"==", "!=", "<", "<=", ">", ">="})
BOOLEAN_OPS: Final = COMPARISONS | {"and", "or", "not", "d2b"}


# ---------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class Const:
    """A number."""

    value: int


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a header or of metadata; ``offset`` counts bits from the start of the header."""

    header: str
    name: str
    width: int
    offset: int
    metadata: bool


@dataclass(frozen=True, slots=True)
class Valid:
    """Whether a header is valid."""

    header: str


@dataclass(frozen=True, slots=True)
class Param:
    """An argument of an action, by position."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operation on expressions; ``?`` has condition, then and else."""

    op: str
    args: tuple["Expr", ...]


Expr: TypeAlias = Const | Field | Valid | Param | Op
Variable: TypeAlias = Field | Valid


def reads(expression: Expr) -> set[Variable]:
    """Return the fields and validity bits that an expression reads."""
    if isinstance(expression, Field | Valid):
        return {expression}
    if isinstance(expression, Op):
        return set().union(*(reads(arg) for arg in expression.args))
    return set()


# ------------------------------------------------------------------------------------------------------ statements


@dataclass(frozen=True, slots=True)
class Assign:
    """``target = value``, cut to the width of the target."""

    target: Field
    value: Expr


@dataclass(frozen=True, slots=True)
class Count:
    """Count the packet and its bytes in one cell of a counter."""

    counter: str
    index: Expr


@dataclass(frozen=True, slots=True)
class RegisterRead:
    """``target = register[index]``; an index out of range leaves the target alone."""

    target: Field
    register: str
    index: Expr


@dataclass(frozen=True, slots=True)
class RegisterWrite:
    """``register[index] = value``; an index out of range writes nothing."""

    register: str
    index: Expr
    value: Expr


@dataclass(frozen=True, slots=True)
class Hash:
    """``target = base + hash(calculation) % size``."""

    target: Field
    base: Expr
    calculation: str
    size: int


@dataclass(frozen=True, slots=True)
class ExecuteMeter:
    """``target = colour`` of one cell of an indirect meter."""

    target: Field
    meter: str
    index: Expr


@dataclass(frozen=True, slots=True)
class Exit:
    """Leave the pipeline after this action."""


Statement: TypeAlias = Assign | Count | RegisterRead | RegisterWrite | Hash | ExecuteMeter | Exit


# --------------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True, slots=True)
class HeaderDef:
    """A header or metadata instance. ``signed`` and ``varbit`` name fields that may exist but not be used."""

    name: str
    metadata: bool
    fields: Mapping[str, Field]
    signed: frozenset[str]

    @property
    def width(self) -> int:
        """Width in bits."""
        return sum(item.width for item in self.fields.values())


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an action."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class ActionDef:
    """An action."""

    id: int
    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    where: str

    @property
    def exits(self) -> bool:
        """Whether the pipeline ends after it."""
        return any(isinstance(statement, Exit) for statement in self.body)


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a table's key; ``mask`` is the program's own static mask, or None."""

    name: str
    match: str
    source: Variable
    mask: int | None

    @property
    def width(self) -> int:
        """Width in bits."""
        return self.source.width if isinstance(self.source, Field) else 1


@dataclass(frozen=True, slots=True)
class ConstEntry:
    """An entry that the program itself brings; the lowest ``rank`` wins."""

    keys: tuple[Any, ...]
    action: int
    arguments: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class TableDef:
    """A table. ``match`` is exact, lpm, ternary or range; ``actions`` and ``next`` are by action id."""

    name: str
    match: str
    keys: tuple[Key, ...]
    size: int
    actions: tuple[ActionDef, ...]
    next: Mapping[int, str | None]
    base_next: str | None
    on_hit: tuple[bool, str | None]
    on_miss: tuple[bool, str | None]
    default: tuple[int, tuple[int, ...]] | None
    default_const: bool
    meter: str | None
    profile: str | None
    entries: tuple[ConstEntry, ...]
    where: str

    @property
    def hidden(self) -> bool:
        """Whether the compiler made it for statements outside tables: no key, and an action nobody can change."""
        return not self.keys and self.default_const and self.profile is None

    def next_of(self, action: int, hit: bool) -> str | None:
        """Return the node after this table when ``action`` ran."""
        known, node = self.on_hit if hit else self.on_miss
        return node if known else self.next.get(action, self.base_next)


@dataclass(frozen=True, slots=True)
class Conditional:
    """An ``if`` of a control."""

    name: str
    condition: Expr
    then: str | None
    otherwise: str | None
    where: str


Node: TypeAlias = TableDef | Conditional


@dataclass(frozen=True, slots=True)
class ProfileDef:
    """An action profile; ``algorithm`` is None without a selector."""

    name: str
    size: int
    algorithm: str | None
    inputs: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """The control ``ingress`` or ``egress`` as a graph of nodes."""

    name: str
    first: str | None
    nodes: Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Bits:
    """A constant of a calculation's input."""

    value: int
    width: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """A hash or checksum over fields, packed without gaps; fields of invalid headers are left out."""

    name: str
    algorithm: str
    inputs: tuple[Field | Bits, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum field and how it is computed."""

    name: str
    target: Field
    calculation: Calculation
    condition: Expr | None
    update: bool
    verify: bool


@dataclass(frozen=True, slots=True)
class RegisterDef:
    """A register array; ``width`` in bits."""

    name: str
    size: int
    width: int


@dataclass(frozen=True, slots=True)
class CounterDef:
    """A counter array."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class MeterDef:
    """A meter array; a direct one has one meter per entry of its table and writes the colour to ``target`` on a hit."""

    name: str
    size: int
    by_bytes: bool
    target: Field | None


@dataclass(frozen=True, slots=True)
class Extract:
    """Take the next bytes as a header."""

    header: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Stop parsing with an error unless a condition holds."""

    condition: Expr
    error: Expr


@dataclass(frozen=True, slots=True)
class Case:
    """One transition; a value and a mask for each key."""

    values: tuple[int, ...]
    masks: tuple[int, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class ParserState:
    """A parser state. Without a matching case the parser goes to ``default`` (None: accept)."""

    name: str
    operations: tuple[Extract | Assign | Verify, ...]
    keys: tuple[Field, ...]
    cases: tuple[Case, ...]
    default: str | None


@dataclass(frozen=True, slots=True)
class ProgramDef:
    """A whole program. ``standard`` maps the target's field names to the program's fields."""

    digest: str
    headers: Mapping[str, HeaderDef]
    errors: Mapping[str, int]
    first_state: str
    states: Mapping[str, ParserState]
    emitted: tuple[str, ...]
    ingress: Control
    egress: Control
    profiles: Mapping[str, ProfileDef]
    calculations: Mapping[str, Calculation]
    checksums: tuple[Checksum, ...]
    registers: Mapping[str, RegisterDef]
    counters: Mapping[str, CounterDef]
    meters: Mapping[str, MeterDef]
    standard: Mapping[str, Field] = field(default_factory=dict)
