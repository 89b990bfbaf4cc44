# SPDX-License-Identifier: Apache-2.0
"""The model of a P4 program, and the reader of the JSON that p4c writes for BMv2.

Format: JSON_format.md of the behavioral model, version 2. The model has only the features that the built-in switch
supports. The reader finds all others, and names them, before any packet is processed.

From top to bottom: errors and names; expressions, statements, tables, controls and the parser; the layout of the
state; the reader.
"""

import dataclasses
import hashlib
import json
import logging
import operator
import runpy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from dlcp.error_text import nearest

T = TypeVar("T")


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
    """An entry, member, group, name or index does not fit the program; the message says which, and what would.

    Attributes
    ----------
    code
        The canonical code of google.rpc for it, which P4Runtime's errors carry: INVALID_ARGUMENT.
    """

    code = 3


class DuplicateError(EntryError):
    """The entry, member or group to add already exists: ALREADY_EXISTS."""

    code = 6


class MissingError(EntryError):
    """The entry, member or group does not exist: NOT_FOUND."""

    code = 5


class FullError(EntryError):
    """The table or action profile is full: RESOURCE_EXHAUSTED."""

    code = 8


class InUseError(EntryError):
    """The member or group is still in use: FAILED_PRECONDITION."""

    code = 9


class ConstantError(EntryError):
    """The program declares the entries or the default action constant: PERMISSION_DENIED."""

    code = 7


class CellError(EntryError, IndexError):
    """The index is outside the register, counter or meter array: OUT_OF_RANGE."""

    code = 11


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


Statement: TypeAlias = Assign | Count | RegisterRead | RegisterWrite | Hash | ExecuteMeter | Exit


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
    """One field of a table's key; ``mask`` is the program's static mask, or None."""

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
    """A constant entry of the program; the lowest ``rank`` wins."""

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
    users: dict[str, int] = {}
    for number, table in enumerate(visible_tables(program)):
        widest = max((len(action.parameters) for action in table.actions), default=0)
        if table.profile is not None:
            if table.profile in users:
                raise UnsupportedFeatureError(
                    "an action profile that two tables share", f"action profile {table.profile}"
                )
            users[table.profile] = widest
            widest = 0
        names = (f"T{number}", f"R{number}", f"e{number}", f"a{number}", f"m{number}")
        tables[table.name] = TableSlot(*names, stride=1 + widest)
    profiles = {
        name: ProfileSlot(f"D{number}", f"G{number}", f"M{number}", stride=1 + users.get(name, 0))
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


# ----------------------------------------------------------------------------------------------------------- the reader


Json: TypeAlias = Mapping[str, Any]

MAX_WIDTH: Final = 63
"""Widest value in computations: the bits of a signed 64-bit integer without the sign."""

HASHES: Final = frozenset({"crc16", "crc32", "csum16", "identity", "xor16"})
_DATA_OPS: Final = frozenset({"+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"})
_BINARY: Final = _DATA_OPS | frozenset(COMPARISONS) | {"and", "or", "usat_cast"}
_UNARY: Final = frozenset({"~", "not", "d2b", "b2d"})


def where_is(item: Json, fallback: str) -> str:
    """Return an object's file and line in the P4 source if the compiler recorded them, else ``fallback``."""
    info = item.get("source_info") or {}
    return f"{info['filename']}:{info['line']}" if "filename" in info and "line" in info else fallback


def _hex(text: str) -> int:
    """Return the value of a hexadecimal number."""
    return int(text, 16)


_INSTALLED: Final = Path(__file__).parents[1] / "p4"
PROGRAM_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[3] / "p4" / "build"
"""Folder of ``dlcp.json`` and ``dlcp.p4info.txtpb``: ``dlcp/switch/p4`` once installed, ``p4/build`` in a checkout."""
PROGRAM_PATH: Final = PROGRAM_FOLDER / "dlcp.json"
"""The program for BMv2 and the built-in switch."""
_LOGGER: Final = logging.getLogger("dlcp.switch")


@cache
def _warn_if_outdated() -> None:
    """In a checkout, warn if the program was not compiled from the current sources."""
    script = PROGRAM_FOLDER.parent / "compile.py"
    if script.is_file():
        for sentence in runpy.run_path(str(script))["differences"]():
            _LOGGER.warning("%s; until then, switches run the program as it was", sentence)


def load_definition(path: str | Path) -> ProgramDef:
    """Read a program.

    Raises
    ------
    UnsupportedFeatureError
        The program uses a feature that the built-in switch does not support.
    ProgramError
        The file is not a BMv2 JSON.
    """
    if Path(path) == PROGRAM_PATH:
        _warn_if_outdated()
    data = Path(path).read_bytes()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{path} is not JSON ({error}); give the file that p4c-bm2-ss writes with -o") from None
    return parse(document, hashlib.sha256(data).hexdigest(), str(path))


def parse(document: Any, digest: str = "", source: str = "program") -> ProgramDef:
    """Build the model from a decoded JSON document; errors as `load_definition`."""
    if not isinstance(document, Mapping) or "pipelines" not in document:
        raise ProgramError(f"{source} has no pipelines: not a BMv2 JSON; give the file that p4c-bm2-ss writes with -o")
    try:
        version = document.get("__meta__", {}).get("version", [2, 0])
        if version[0] != 2:
            raise ProgramError(f"{source} has JSON format version {version}, not 2; use a current p4c-bm2-ss")
        return _Reader(document).program(digest)
    except ProgramError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        raise ProgramError(f"{source} is a damaged BMv2 JSON: {type(error).__name__} {error}") from error


_ABSENT: Final = {
    "header_stacks": "header stacks",
    "header_unions": "header unions",
    "header_union_stacks": "header union stacks",
    "parse_vsets": "parser value sets",
    "learn_lists": "digests",
    "extern_instances": "externs",
}
_PRIMITIVES: Final = {
    "add_header": "setValid on a header",
    "remove_header": "setInvalid on a header",
    "clone_ingress_pkt_to_egress": "clone",
    "clone_egress_pkt_to_egress": "clone",
    "generate_digest": "digest",
    "truncate": "truncate",
    "modify_field_rng_uniform": "random",
    "assign_header": "assignment of whole headers",
    "push": "push on a header stack",
    "pop": "pop on a header stack",
    "_jump": "if inside an action",
    "_jump_if_zero": "if inside an action",
}
"""P4 names of unsupported primitives; others are refused by their name in the JSON."""


class _Reader:
    """Reads one document. Methods take the JSON of an object and, for errors, its place.

    ``parameters`` are those of the action that contains an expression.
    """

    def __init__(self, document: Json) -> None:
        self.document = document
        for key, feature in _ABSENT.items():
            if document.get(key):
                raise UnsupportedFeatureError(feature, str(document[key][0].get("name", key)))
        self._calculations = {item["name"]: item for item in document.get("calculations", [])}
        self.headers = self._read_headers()
        self.calculations: dict[str, Calculation] = {}
        """The hashes and checksums in use."""
        self.registers = {
            item["name"]: RegisterDef(item["name"], item["size"], item["bitwidth"])
            for item in document.get("register_arrays", [])
        }
        for register in self.registers.values():
            if register.width > MAX_WIDTH:
                raise UnsupportedFeatureError(f"registers wider than {MAX_WIDTH} bits", register.name)
        self.counters = {}
        for item in document.get("counter_arrays", []):
            if item.get("is_direct"):
                raise UnsupportedFeatureError("direct counters", f"counter {item['name']}")
            self.counters[item["name"]] = CounterDef(item["name"], item["size"])
        self.meters = {item["name"]: self._meter(item) for item in document.get("meter_arrays", [])}
        self.actions = {item["id"]: self._action(item) for item in document.get("actions", [])}

    def program(self, digest: str) -> ProgramDef:
        document = self.document
        if len(document["parsers"]) != 1 or len(document["deparsers"]) != 1:
            raise UnsupportedFeatureError("more than one parser or deparser", "parsers")
        parser, deparser = document["parsers"][0], document["deparsers"][0]
        if deparser.get("primitives"):
            raise UnsupportedFeatureError("statements in the deparser", where_is(deparser, "deparser"))
        pipelines = {item["name"]: item for item in document["pipelines"]}
        profiles = {
            item["name"]: self._profile(item)
            for pipeline in document["pipelines"]
            for item in pipeline.get("action_profiles", [])
        }
        standard = {
            f"standard_metadata.{name}": item
            for name, item in self._header("standard_metadata", "program").fields.items()
        }
        for alias, (header, name) in document.get("field_aliases", []):
            standard[alias] = self._header(header, alias).fields[name]
        return ProgramDef(
            digest=digest,
            headers=self.headers,
            errors=self._errors(),
            first_state=parser["init_state"],
            states={item["name"]: self._state(item) for item in parser["parse_states"]},
            emitted=tuple(deparser["order"]),
            ingress=self._pipeline(pipelines["ingress"]),
            egress=self._pipeline(pipelines["egress"]),
            profiles=profiles,
            checksums=tuple(self._checksum(item) for item in document.get("checksums", [])),
            calculations=self.calculations,
            registers=self.registers,
            counters=self.counters,
            meters=self.meters,
            standard=standard,
        )

    def _checksum(self, item: Json) -> Checksum:
        where = where_is(item, f"checksum {item['name']}")
        if item.get("type", "generic") != "generic":
            raise UnsupportedFeatureError(f"checksums of type {item['type']}", where)
        condition = item.get("if_cond")
        return Checksum(
            name=item["name"],
            target=self._field(item["target"], where),
            calculation=self._calculation(item["calculation"], where),
            condition=None if condition is None else self._expression(condition, where),
            update=item.get("update", True),
            verify=item.get("verify", True),
        )

    def _meter(self, item: Json) -> MeterDef:
        where = f"meter {item['name']}"
        if item.get("rate_count", 2) != 2:
            raise UnsupportedFeatureError(f"meters with {item['rate_count']} rates", where)
        target = self._field(item["result_target"], where) if item.get("is_direct") else None
        return MeterDef(item["name"], item["size"], item["type"] == "bytes", target)

    # ---------------------------------------------------------------------------------------------------- parser

    def _state(self, item: Json) -> ParserState:
        where = f"parser state {item['name']}"
        operations = tuple(self._operation(entry, where) for entry in item["parser_ops"])
        keys = []
        for entry in item["transition_key"]:
            if entry["type"] != "field":
                raise UnsupportedFeatureError(f"select on a {entry['type']}", where)
            keys.append(self._field(entry["value"], where))
        cases, default = [], None
        for entry in item["transitions"]:
            if entry.get("type") == "parse_vset":
                raise UnsupportedFeatureError("parser value sets", where)
            if entry["value"] in ("default", None):
                default = entry["next_state"]
            else:
                cases.append(_case(entry, keys))
        return ParserState(item["name"], operations, tuple(keys), tuple(cases), default)

    def _operation(self, item: Json, where: str) -> Extract | Assign | Verify:
        given = item["parameters"]
        if item["op"] == "extract" and given[0]["type"] == "regular":
            return Extract(self._header(given[0]["value"], where).name)
        if item["op"] == "set":
            return Assign(self._target(given[0], where), self._expression(given[1], where))
        if item["op"] == "verify":
            return Verify(self._expression(given[0], where), self._expression(given[1], where))
        feature = {"extract": f"extract into a {given[0].get('type')}", "extract_VL": "varbit fields"}
        raise UnsupportedFeatureError(feature.get(item["op"], f"the parser operation {item['op']}"), where)

    # ------------------------------------------------------------------------------------------------- pipelines

    def _pipeline(self, item: Json) -> Control:
        nodes: dict[str, Node] = {}
        if item.get("action_calls"):
            raise UnsupportedFeatureError("action calls outside tables", f"control {item['name']}")
        for entry in item.get("conditionals", []):
            where = where_is(entry, f"conditional {entry['name']}")
            condition = self._expression(entry["expression"], where)
            nodes[entry["name"]] = Conditional(entry["name"], condition, entry["true_next"], entry["false_next"], where)
        for entry in item.get("tables", []):
            nodes[entry["name"]] = self._table(entry)
        return Control(item["name"], item["init_table"], nodes)

    def _table(self, item: Json) -> TableDef:
        where = f"table {item['name']}"
        if item.get("with_counters"):
            raise UnsupportedFeatureError("direct counters", where)
        if item.get("support_timeout"):
            raise UnsupportedFeatureError("entries that time out", where)
        if item["type"] not in ("simple", "indirect", "indirect_ws"):
            raise UnsupportedFeatureError(f"tables of type {item['type']}", where)
        if item["match_type"] not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedFeatureError(f"match type {item['match_type']}", where)
        keys = tuple(self._key(entry, where) for entry in item["key"])
        width = sum(key.width for key in keys)
        if width > MAX_WIDTH:
            raise UnsupportedFeatureError(f"keys wider than {MAX_WIDTH} bits (this one has {width})", where)
        actions = tuple(self.actions[identity] for identity in item["action_ids"])
        # Two actions may share a name; they then have the same successor.
        following = {action.id: item["next_tables"].get(action.name) for action in actions}
        default = item.get("default_entry")
        return TableDef(
            name=item["name"],
            match=item["match_type"],
            keys=keys,
            size=item["max_size"],
            actions=actions,
            next={
                action: node for action, node in following.items() if self.actions[action].name in item["next_tables"]
            },
            base_next=item.get("base_default_next"),
            on_hit=("__HIT__" in item["next_tables"], item["next_tables"].get("__HIT__")),
            on_miss=("__MISS__" in item["next_tables"], item["next_tables"].get("__MISS__")),
            default=default and (default["action_id"], tuple(_hex(data) for data in default["action_data"])),
            default_const=bool(default and (default.get("action_const") or default.get("action_entry_const"))),
            meter=item.get("direct_meters"),
            profile=item.get("action_profile") if item["type"] != "simple" else None,
            entries=tuple(_const_entry(entry) for entry in item.get("entries", [])),
            where=where_is(item, where),
        )

    def _key(self, item: Json, where: str) -> Key:
        if item["match_type"] == "valid":
            target = item["target"] if isinstance(item["target"], str) else item["target"][0]
            source: Variable = Valid(self._header(target, where).name)
        else:
            source = self._variable(item["target"], where)
        match = "exact" if item["match_type"] in ("valid", "exact") else item["match_type"]
        if match not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedFeatureError(f"match type {match}", where)
        name = item.get("name") or ".".join(item["target"])
        mask = None if item.get("mask") is None else _hex(item["mask"])
        return Key(name, match, source, mask)

    def _profile(self, item: Json) -> ProfileDef:
        selector = item.get("selector")
        where = where_is(item, f"action profile {item['name']}")
        if selector is None:
            return ProfileDef(item["name"], item["max_size"], None, ())
        fields = tuple(entry for entry in self._inputs(selector["input"], where) if isinstance(entry, Field))
        return ProfileDef(item["name"], item["max_size"], self._algorithm(selector["algo"], where), fields)

    # ------------------------------------------------------------------------------------------------------ actions

    def _action(self, item: Json) -> ActionDef:
        """Read an action; raises UnsupportedFeatureError or ProgramError."""
        where = where_is(item, f"action {item['name']}")
        parameters = tuple(Parameter(entry["name"], entry["bitwidth"]) for entry in item["runtime_data"])
        for parameter in parameters:
            if parameter.width > MAX_WIDTH:
                raise UnsupportedFeatureError(
                    f"action parameters wider than {MAX_WIDTH} bits ({parameter.name})", f"action {item['name']}"
                )
        body: list[Statement] = []
        for call in item["primitives"]:
            body += self._primitive(call, where_is(call, where), parameters)
        return ActionDef(item["id"], item["name"], parameters, tuple(body), where)

    def _primitive(self, call: Json, where: str, parameters: Sequence[Parameter]) -> list[Statement]:
        op, given = call["op"], call["parameters"]

        def expression(index: int) -> Expr:
            return self._expression(given[index], where, parameters)

        match op:
            case "no_op":
                return []
            case "exit":
                return [Exit()]
            case "assign" | "modify_field":
                target = self._target(given[0], where)
                if (target.header, target.name) == ("standard_metadata", "mcast_grp") and expression(1) != Const(0):
                    raise UnsupportedFeatureError("multicast", where)
                return [Assign(target, expression(1))]
            case "mark_to_drop" | "drop":
                return [Assign(self._field(("standard_metadata", "egress_spec"), where), Const(511))]
            case "count":
                return [Count(self._named(self.counters, given[0], where), expression(1))]
            case "register_read":
                name = self._named(self.registers, given[1], where)
                return [RegisterRead(self._target(given[0], where), name, expression(2))]
            case "register_write":
                return [RegisterWrite(self._named(self.registers, given[0], where), expression(1), expression(2))]
            case "execute_meter":
                name = self._named(self.meters, given[0], where)
                return [ExecuteMeter(self._target(given[2], where), name, expression(1))]
            case "modify_field_with_hash_based_offset":
                size = expression(3)
                if not isinstance(size, Const):
                    raise UnsupportedFeatureError("hashes with a non-constant maximum", where)
                calculation = self._calculation(given[2]["value"], where)
                return [Hash(self._target(given[0], where), expression(1), calculation.name, size.value)]
        raise UnsupportedFeatureError(_PRIMITIVES.get(op, f"the primitive {op}"), where)

    @staticmethod
    def _named(known: Container[str], parameter: Json, where: str) -> str:
        name = str(parameter["value"])
        if name not in known:
            raise ProgramError(f"{where}: no {parameter['type']} {name!r} in the program")
        return name

    # -------------------------------------------------------------------------------------- headers and expressions

    def _read_headers(self) -> dict[str, HeaderDef]:
        types = {item["name"]: item for item in self.document["header_types"]}
        headers = {}
        for item in self.document["headers"]:
            fields: dict[str, Field] = {}
            signed = set()
            offset = 0
            for name, width, *rest in types[item["header_type"]]["fields"]:
                if width == "*":
                    raise UnsupportedFeatureError("varbit fields", f"{item['name']}.{name}")
                if rest and rest[0]:
                    signed.add(name)
                fields[name] = Field(item["name"], name, width, offset, bool(item.get("metadata")))
                offset += width
            headers[item["name"]] = HeaderDef(item["name"], bool(item.get("metadata")), fields, frozenset(signed))
        return headers

    def _header(self, name: str, where: str) -> HeaderDef:
        """Return a header; raises ProgramError for an unknown name."""
        if name not in self.headers:
            raise ProgramError(f"{where}: no header {name!r} in the program")
        return self.headers[name]

    def _field(self, value: Sequence[str], where: str) -> Field:
        """Return a field; raises UnsupportedFeatureError if it is signed or too wide."""
        header = self._header(value[0], where)
        found = header.fields[value[1]]
        if value[1] in header.signed:
            raise UnsupportedFeatureError(f"signed fields ({value[0]}.{value[1]})", where)
        if found.width > MAX_WIDTH:
            raise UnsupportedFeatureError(f"fields wider than {MAX_WIDTH} bits ({value[0]}.{value[1]})", where)
        return found

    def _variable(self, value: Sequence[str], where: str) -> Variable:
        """Return a field or a header's validity bit."""
        if value[1] == "$valid$":
            return Valid(self._header(value[0], where).name)
        return self._field(value, where)

    def _target(self, parameter: Json, where: str) -> Field:
        """Return the target field of an assignment."""
        if parameter["type"] != "field":
            raise UnsupportedFeatureError(f"assignment to a {parameter['type']}", where)
        return self._field(parameter["value"], where)

    def _errors(self) -> dict[str, int]:
        """Return the numbers of the parser's errors, by name."""
        errors: dict[str, int] = dict(self.document.get("errors", []))
        # BMv2 numbers core errors that the program does not list after those that it lists.
        for name in ("NoError", "PacketTooShort"):
            if name not in errors:
                errors[name] = max(errors.values(), default=-1) + 1
        return errors

    def _expression(self, item: Json, where: str, parameters: Sequence[Parameter] = ()) -> Expr:
        """Read an expression; ``parameters`` are those of the action that contains it."""
        kind, value = item["type"], item["value"]
        if kind == "expression":
            return self._expression(value, where, parameters) if "type" in value else self._op(value, where, parameters)
        if kind == "field":
            return self._variable(value, where)
        if kind == "hexstr":
            return Const(_hex(value))
        if kind == "bool":
            return Const(int(value))
        if kind in ("runtime_data", "local"):
            return Param(value, parameters[value].width)
        raise UnsupportedFeatureError(f"expressions on a {kind}", where)

    def _op(self, value: Json, where: str, parameters: Sequence[Parameter]) -> Expr:
        op = value["op"]
        if op == "valid":
            if value["right"]["type"] != "header":
                raise UnsupportedFeatureError(f"isValid on a {value['right']['type']}", where)
            return Valid(self._header(value["right"]["value"], where).name)
        if op == "?":
            names: tuple[str, ...] = ("cond", "left", "right")
        elif op in _UNARY:
            names = ("right",)
        elif op in _BINARY:
            names = ("left", "right")
        else:
            raise UnsupportedFeatureError(f"the operation {op}", where)
        return Op(op, tuple(self._expression(value[name], where, parameters) for name in names))

    def _calculation(self, name: str, where: str) -> Calculation:
        """Return a hash by its name."""
        if name not in self.calculations:
            item = self._calculations[name]
            where = where_is(item, where)
            self.calculations[name] = Calculation(
                name, self._algorithm(item["algo"], where), self._inputs(item["input"], where), where
            )
        return self.calculations[name]

    @staticmethod
    def _algorithm(name: str, where: str) -> str:
        """Return the name of a hash algorithm; raises UnsupportedFeatureError for an unsupported one."""
        if name not in HASHES:
            raise UnsupportedFeatureError(f"the hash {name}", where)
        return name

    def _inputs(self, items: Sequence[Json], where: str) -> tuple[Field | Bits, ...]:
        """Return the inputs of a hash: fields and constant bits."""
        inputs: list[Field | Bits] = []
        for item in items:
            if item["type"] == "field":
                inputs.append(self._field(item["value"], where))
            elif item["type"] == "hexstr":
                inputs.append(Bits(_hex(item["value"]), item["bitwidth"]))
            else:
                raise UnsupportedFeatureError(f"a hash over a {item['type']}", where)
        return tuple(inputs)


def _case(entry: Json, keys: Sequence[Field]) -> Case:
    """Split a transition's value, in which every key is padded to whole bytes, into one value per key."""
    value = _hex(entry["value"])
    mask = -1 if entry.get("mask") is None else _hex(entry["mask"])
    values, masks = [], []
    for key in reversed(keys):
        padded = (key.width + 7) // 8 * 8
        full = (1 << key.width) - 1
        masks.append(mask & full)
        values.append(value & full & mask)
        value >>= padded
        mask >>= padded
    return Case(tuple(reversed(values)), tuple(reversed(masks)), entry["next_state"])


def _const_entry(entry: Json) -> ConstEntry:
    keys: list[Any] = []
    for item in entry["match_key"]:
        match item["match_type"]:
            case "exact":
                keys.append(_hex(item["key"]))
            case "valid":
                keys.append(int(item["key"]))
            case "lpm":
                keys.append((_hex(item["key"]), item["prefix_length"]))
            case "ternary":
                keys.append((_hex(item["key"]), _hex(item["mask"])))
            case _:
                keys.append((_hex(item["start"]), _hex(item["end"])))
    action = entry["action_entry"]
    data = tuple(_hex(value) for value in action["action_data"])
    return ConstEntry(tuple(keys), action["action_id"], data, entry.get("priority", 0))
