# SPDX-License-Identifier: Apache-2.0
"""The model of a P4 program: only the features that the built-in switch supports.

From top to bottom: errors and names; entries; expressions, statements, tables, controls and the parser; the layout of
the state.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from dlcp.inputs.error_text import nearest

T = TypeVar("T")

NUMBER_BITS: Final = 63
"""Widest value in computations: the bits of a signed 64-bit integer without the sign."""
SPLIT_BITS: Final = 32
"""Wider fields are split into words of this width, the first of which may be narrower. They can be copied, hashed and
matched by prefix, but not computed with."""


class ProgramError(ValueError):
    """A program cannot be loaded or run; the message says what is wrong, where, and what to do."""


class UnsupportedFeatureError(ProgramError):
    """A feature of the program that the built-in switch does not support.

    Attributes
    ----------
    feature
        The feature, in terms of the P4 language or the JSON format.
    where
        Its place in the program.
    """

    def __init__(self, feature: str, where: str) -> None:
        super().__init__(
            f"{where}: the built-in switch does not support {feature}; use BMv2 for this program, or avoid the feature"
        )
        self.feature = feature
        self.where = where


class EntryError(ValueError):
    """An entry, member, group, name or index does not fit the program; the message says which, and what would."""


class DuplicateError(EntryError):
    """The entry, member or group to add already exists."""


class MissingError(EntryError):
    """The entry, member or group does not exist."""


class FullError(EntryError):
    """The table or action profile is full."""


class InUseError(EntryError):
    """The member or group is still in use."""


class ConstantError(EntryError):
    """The program declares the entries or the default action constant."""


class CellError(EntryError, IndexError):
    """The index is outside the register, counter or meter array."""


class UnknownNameError(EntryError, KeyError):
    """The program has no object of this name."""

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str = "the program") -> None:
        super().__init__(f"{where} has no {kind} {name!r}{nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class Named(Mapping[str, T]):
    """Objects by p4info name or by alias: a suffix of the name that no other object shares."""

    def __init__(self, kind: str, items: Mapping[str, T], where: str = "the program") -> None:
        self._kind, self._items, self._where = kind, dict(items), where
        self._aliases: dict[str, str | None] = {}
        for name in self._items:
            parts = name.split(".")
            for start in range(1, len(parts)):
                alias = ".".join(parts[start:])
                self._aliases[alias] = None if alias in self._aliases else name

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        full = self._aliases.get(name)
        if full is None:
            raise UnknownNameError(self._kind, name, self._items, self._where)
        return self._items[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


# -------------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class Action:
    """An action by its p4info name or alias, with a value for each parameter."""

    name: str
    params: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemberRef:
    """A member of the table's action profile."""

    id: int


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group of the table's action profile; a hash of the packet selects one of its members."""

    id: int


Target: TypeAlias = Action | MemberRef | GroupRef
Match: TypeAlias = Mapping[str, int | tuple[int, int]]
"""A value for each field: a number (exact), (value, prefix length), (value, mask) or (low, high)."""


@dataclass(frozen=True, slots=True)
class MeterConfig:
    """A two-rate three-colour meter, as in P4Runtime.

    Attributes
    ----------
    cir, pir
        Committed and peak rate, in bytes/s or packets/s.
    cburst, pburst
        Burst sizes, in bytes or packets.

    Raises
    ------
    EntryError
        One of them is negative, or the committed rate exceeds the peak rate.
    """

    cir: int
    cburst: int
    pir: int
    pburst: int

    def __post_init__(self) -> None:
        """Refuse invalid rates and bursts."""
        rates = self.cir, self.cburst, self.pir, self.pburst
        if min(rates) < 0:
            raise EntryError(f"rates and bursts must not be negative: {rates}")
        if self.cir > self.pir:
            raise EntryError(f"the committed rate {self.cir} exceeds the peak rate {self.pir}")


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One entry of a table.

    Attributes
    ----------
    table
        The table's name.
    match, target, priority
        As in `Table.insert`.
    meter
        The configuration to write with the entry; a table keeps it in its direct meters.
    notes
        A controller's own data, kept with the entry.
    handle
        The entry's handle in its table; -1 outside a table.
    """

    table: str
    match: Match
    target: Target
    priority: int = 0
    meter: MeterConfig | None = None
    notes: Any = field(default=None, compare=False)
    handle: int = field(default=-1, compare=False)


# ---------------------------------------------------------------------------------------------------------- expressions


COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BOOLEAN_OPS: Final = frozenset(COMPARISONS) | {"and", "or", "not", "d2b"}


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
    """A parameter of an action, by position."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operation on expressions; the arguments of ``?`` are condition, then and else."""

    op: str
    args: tuple["Expr", ...]


Expr: TypeAlias = Const | Field | Valid | Param | Op
Variable: TypeAlias = Field | Valid


def reads(thing: Any) -> set[Variable]:
    """Return the fields and validity bits that an expression, a statement or a parser operation reads.

    A store into a header's field reads the header's validity bit, since only a valid header has a place in the packet.
    The inputs of a hash's calculation are not included; see `Usage.statement_reads`.
    """
    if isinstance(thing, Field | Valid):
        return {thing}
    if isinstance(thing, Op):
        return set().union(*(reads(arg) for arg in thing.args))
    found: set[Variable] = set()
    if dataclasses.is_dataclass(thing):
        for part in dataclasses.fields(thing):
            value = getattr(thing, part.name)
            if part.name != "target":
                found |= reads(value)
            elif not value.metadata:
                found.add(Valid(value.header))
    return found


# ------------------------------------------------------------------------------------------------------ statements


@dataclass(frozen=True, slots=True)
class Assign:
    """``target = value``, truncated to the width of the target."""

    target: Field
    value: Expr


@dataclass(frozen=True, slots=True)
class Count:
    """Count the packet and its bytes in one cell of a counter."""

    counter: str
    index: Expr


@dataclass(frozen=True, slots=True)
class RegisterRead:
    """``target = register[index]``; an index out of range leaves the target unchanged."""

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
    """End the pipeline after this action."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Send at most the first ``length`` bytes of the packet."""

    length: Expr


Statement: TypeAlias = Assign | Count | RegisterRead | RegisterWrite | Hash | ExecuteMeter | Exit | Truncate


# --------------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True, slots=True)
class HeaderDef:
    """A header or metadata instance. ``signed`` lists its signed fields, which are unsupported once used."""

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
        """Whether the pipeline ends after the action."""
        return any(isinstance(statement, Exit) for statement in self.body)


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a table's key; a wide one has several words. ``mask`` is the program's static mask, or None."""

    name: str
    match: str
    sources: tuple[Variable, ...]
    mask: int | None

    @property
    def width(self) -> int:
        """Width in bits."""
        return sum(source.width if isinstance(source, Field) else 1 for source in self.sources)


@dataclass(frozen=True, slots=True)
class TableDef:
    """A table.

    ``match`` is exact, lpm, ternary or range; ``actions`` and ``next`` are by action id. ``entries`` are constant, and
    among them the lowest priority wins.
    """

    name: str
    match: str
    keys: tuple[Key, ...]
    size: int
    actions: tuple[ActionDef, ...]
    next: Mapping[int, str | None]
    base_next: str | None
    on_hit: tuple[bool, str | None]
    on_miss: tuple[bool, str | None]
    default: Action | None
    default_const: bool
    meter: str | None
    profile: str | None
    entries: tuple[TableEntry, ...]
    where: str

    @property
    def hidden(self) -> bool:
        """Whether the compiler generated the table for a statement outside tables: no key and a constant action."""
        return not self.keys and self.default_const and self.profile is None

    def next_of(self, action: int, hit: bool) -> str | None:
        """Return the node that follows this table after ``action``."""
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
    """A constant input of a calculation."""

    value: int
    width: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """A hash or checksum over fields, packed without gaps; fields of invalid headers are omitted."""

    name: str
    algorithm: str
    inputs: tuple[Field | Bits, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum field and its calculation."""

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
    """Extract the next bytes into a header."""

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


# ---------------------------------------------------------------------------------------------------------------- state


# An entry is the offset of its row in the table's ``rows``. A row holds the number of the action (its position among
# the table's actions) and the arguments. Offset 0 is the default entry, so an entry other than 0 is a hit.
#
# In tables with an action profile, a row is one cell: an offset in the profile's ``groups``, where a group or a single
# member has its size and its offset in ``choices``. ``choices`` holds offsets in ``members``, whose rows are as above.
# Group 0 is empty: the entry of a table without a default member.

FLAT: Final = ("registers", "packets_counted", "bytes_counted", "meter_rates", "meter_tokens")
"""The arrays of registers, counters and meters."""


@dataclass(frozen=True, slots=True)
class TableSlot:
    """Names of a table's arrays and variables in generated text, and the number of cells in a row."""

    index: str
    """The lookup structure."""
    rows: str
    entry: str
    """The variable for the entry found."""
    action: str
    """The variable for the number of the action."""
    member: str
    """The variable for the member chosen."""
    stride: int

    @staticmethod
    def shifts(table: TableDef) -> Iterator[tuple[Key, int]]:
        """Return each key with its bit position in the combined key; an LPM field is the lowest."""
        order = sorted(table.keys, key=lambda key: key.match == "lpm")
        shift = sum(key.width for key in order)
        for key in order:
            shift -= key.width
            yield key, shift


@dataclass(frozen=True, slots=True)
class ProfileSlot:
    """Names of an action profile's arrays in generated text, and the number of cells in a member's row."""

    groups: str
    choices: str
    """The members of groups."""
    members: str
    """The members' rows."""
    stride: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All slots, the offset of each object in the flat arrays, and the sizes of those arrays."""

    tables: Mapping[str, TableSlot]
    profiles: Mapping[str, ProfileSlot]
    registers: Mapping[str, int]
    counters: Mapping[str, int]
    meters: Mapping[str, int]
    register_cells: int
    counter_cells: int
    meter_cells: int

    def structures(self) -> list[str]:
        """Return the names of all tables' and profiles' arrays, in the order of `CompiledMachine.prepare`."""
        names = [name for slot in self.tables.values() for name in (slot.index, slot.rows)]
        return names + [name for slot in self.profiles.values() for name in (slot.groups, slot.choices, slot.members)]


def visible_tables(program: ProgramDef) -> list[TableDef]:
    """Return the tables that the control plane sees: all that are not hidden."""
    pipelines: tuple[Control, ...] = (program.ingress, program.egress)
    return [
        node
        for pipeline in pipelines
        for node in pipeline.nodes.values()
        if isinstance(node, TableDef) and not node.hidden
    ]


def lay_out(program: ProgramDef) -> StateLayout:
    """Assign names and offsets to all tables, profiles, registers, counters and meters."""
    tables = {}
    users: dict[str, list[tuple[str, tuple[Parameter, ...]]]] = {}
    widths: dict[str, int] = {}
    for number, table in enumerate(visible_tables(program)):
        widest = max((len(action.parameters) for action in table.actions), default=0)
        if table.profile is not None:
            # The compiler copies an action for each table that uses it.
            actions = [(action.name, action.parameters) for action in table.actions]
            if users.setdefault(table.profile, actions) != actions:
                raise UnsupportedFeatureError(
                    "an action profile that tables with different actions share", f"action profile {table.profile}"
                )
            widths[table.profile] = widest
            widest = 0
        names = (f"T{number}", f"R{number}", f"e{number}", f"a{number}", f"m{number}")
        tables[table.name] = TableSlot(*names, stride=1 + widest)
    profiles = {
        name: ProfileSlot(f"D{number}", f"G{number}", f"M{number}", stride=1 + widths.get(name, 0))
        for number, name in enumerate(program.profiles)
    }
    registers, register_cells = _bases({item.name: item.size for item in program.registers.values()})
    counters, counter_cells = _bases({item.name: item.size for item in program.counters.values()})
    meters, meter_cells = _bases({item.name: item.size for item in program.meters.values()})
    return StateLayout(tables, profiles, registers, counters, meters, register_cells, counter_cells, meter_cells)


def _bases(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    bases, total = {}, 0
    for name, size in sizes.items():
        bases[name] = total
        total += size
    return bases, total
