# SPDX-License-Identifier: Apache-2.0
"""A device behind the client of BF Runtime, as far as ``p4/tna/set_up.py`` uses it.

It knows its tables from the program's ``bf-rt.json`` and from ``driver_tables.json``, which holds names, types and
choices of the driver's own tables, and refuses what the real client or driver would refuse: unknown tables, fields and
actions, values that do not fit, keys that are incomplete or of another kind, and writes to what is read only.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRIVER_TABLES = Path(__file__).parent / "driver_tables.json"
BITS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}


class Refused(Exception):
    """A request that the client or the driver would refuse."""


class AlreadyThere(Exception):
    """An entry that is added twice."""


@dataclass
class Field:
    """A field of a key or of an action's data."""

    name: str
    type: str
    bits: int = 0
    match: str = ""
    repeated: bool = False
    mandatory: bool = False
    read_only: bool = False
    choices: Sequence[str] = ()

    @classmethod
    def of_schema(cls, item: dict[str, Any]) -> "Field":
        """Read a field as ``bf-rt.json`` has it."""
        inner = item.get("singleton", item)
        kind = inner["type"]
        return cls(
            inner["name"],
            kind["type"],
            kind.get("width", BITS.get(kind["type"], 0)),
            item.get("match_type", ""),
            inner.get("repeated", False),
            item.get("mandatory", False),
            item.get("read_only", False),
            kind.get("choices", ()),
        )

    @classmethod
    def of_record(cls, item: dict[str, Any]) -> "Field":
        """Read a field as ``driver_tables.json`` has it."""
        return cls(**{"bits": BITS.get(item["type"], 0), **item})


@dataclass
class KeyTuple:
    """As in ``bfrt_grpc.client``."""

    name: str
    value: Any = None
    mask: int | None = None
    prefix_len: int | None = None

    @property
    def match(self) -> str:
        return "Ternary" if self.mask is not None else "LPM" if self.prefix_len is not None else "Exact"


@dataclass
class DataTuple:
    """As in ``bfrt_grpc.client``: one of the values is given."""

    name: str
    val: int | None = None
    str_val: str | None = None
    bool_val: bool | None = None
    int_arr_val: list[int] | None = None
    bool_arr_val: list[bool] | None = None


@dataclass(frozen=True)
class Target:
    """As in ``bfrt_grpc.client``."""

    device_id: int = 0
    pipe_id: int = 0xFFFF


class Record(dict):
    """An entry read from a table."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


@dataclass
class FakeTable:
    """A table that checks and keeps its entries."""

    name: str
    keys: list[Field]
    data: list[Field]
    actions: dict[str, list[Field]]
    size: int = 0
    one_of: list[set[str]] = field(default_factory=list)
    entries: dict[Any, tuple[str | None, dict[str, Any]]] = field(default_factory=dict)
    fixed: bool = False
    log: list[tuple[str, str]] = field(default_factory=list)

    def make_key(self, fields: list[KeyTuple]) -> tuple[Any, ...]:
        known = {each.name: each for each in self.keys}
        for each in fields:
            if each.name not in known:
                raise Refused(f"{self.name} has no key {each.name}; it has {', '.join(known)}")
            if known[each.name].match != each.match:
                raise Refused(f"{self.name}.{each.name} is {known[each.name].match}, not {each.match}")
            _check_number(f"{self.name}.{each.name}", known[each.name], each.value)
            if each.prefix_len is not None and not 0 <= each.prefix_len <= known[each.name].bits:
                raise Refused(f"{self.name}.{each.name}: prefix of {each.prefix_len}")
            if each.mask is not None:
                _check_number(f"{self.name}.{each.name} mask", known[each.name], each.mask)
        missing = set(known) - {each.name for each in fields}
        if missing:
            raise Refused(f"{self.name}: key without {sorted(missing)}")
        return tuple(sorted((each.name, each.value, each.mask, each.prefix_len) for each in fields))

    def make_data(self, fields: list[DataTuple], action_name: str | None = None) -> tuple[str | None, dict[str, Any]]:
        found = [name for name in self.actions if action_name is not None and _is(action_name, name)]
        if action_name is not None and len(found) != 1:
            raise Refused(f"{self.name} has no action {action_name}; it has {', '.join(self.actions)}")
        known = {each.name: each for each in (*self.data, *(self.actions[found[0]] if found else ()))}
        values = {}
        for each in fields:
            if each.name not in known:
                raise Refused(f"{self.name} {action_name} has no field {each.name}; it has {', '.join(known)}")
            values[each.name] = _value(f"{self.name}.{each.name}", known[each.name], each)
        missing = {name for name, each in known.items() if each.mandatory} - set(values)
        if missing:
            raise Refused(f"{self.name} {action_name}: data without {sorted(missing)}")
        for group in self.one_of:
            if len(group & set(values)) != 1:
                raise Refused(f"{self.name}: one of {sorted(group)} is wanted")
        return (found[0] if found else None), values

    def entry_add(self, target: Target, keys: list[Any], data: list[Any]) -> None:
        if self.fixed:
            raise Refused(f"{self.name} takes no new entries")
        for key, values in zip(keys, data, strict=True):
            if (target.pipe_id, key) in self.entries:
                raise AlreadyThere(f"{self.name} {key}")
            self.entries[target.pipe_id, key] = values
        if self.size and len(self.entries) > self.size:
            raise Refused(f"{self.name} holds {self.size} entries")
        self.log.append(("add", self.name))

    def entry_mod(self, target: Target, keys: list[Any], data: list[Any]) -> None:
        for key, values in zip(keys, data, strict=True):
            if not self.fixed and (target.pipe_id, key) not in self.entries:
                raise Refused(f"{self.name} has no such entry")
            self.entries.setdefault((target.pipe_id, key), (values[0], {}))[1].update(values[1])
        self.log.append(("mod", self.name))

    def entry_del(self, target: Target) -> None:
        if self.fixed:
            raise Refused(f"{self.name} keeps its entries")
        self.entries.clear()
        self.log.append(("del", self.name))

    def entry_get(self, target: Target, keys: list[Any], flags: dict[str, bool]) -> Iterator[tuple[Record, Any]]:
        for key in keys:
            yield Record(self.entries[target.pipe_id, key][1]), key

    def default_entry_get(self, target: Target) -> Iterator[tuple[Record, None]]:
        yield Record(self.entries[target.pipe_id, ()][1]), None


class FakeInfo:
    """The tables of program and driver, by any unambiguous end of their names, as the client finds them."""

    def __init__(self, schema: Path) -> None:
        self.log: list[tuple[str, str]] = []
        self.tables: dict[str, FakeTable] = {}
        for table in json.loads(schema.read_text())["tables"]:
            self._add(_of_schema(table))
        for table in json.loads(DRIVER_TABLES.read_text())["tables"]:
            actions = {name: [Field.of_record(each) for each in data] for name, data in table["actions"].items()}
            keys, data = ([Field.of_record(each) for each in table[part]] for part in ("key", "data"))
            self._add(FakeTable(table["name"], keys, data, actions, fixed=table["name"].startswith("tf1.tm.")))

    def _add(self, table: FakeTable) -> None:
        table.log = self.log
        self.tables[table.name] = table

    def table_get(self, name: str) -> FakeTable:
        found = [table for full, table in self.tables.items() if _is(name, full)]
        if len(found) != 1:
            raise Refused(f"{len(found)} tables are called {name}")
        return found[0]


class FakeClient:
    """The module ``bfrt_grpc.client``."""

    KeyTuple = KeyTuple
    DataTuple = DataTuple
    Target = Target
    BfruntimeReadWriteRpcException = AlreadyThere


def device_with_ports(info: FakeInfo, ports: Sequence[int], queues: int = 8, cells: int = 280_000) -> None:
    """Let the traffic manager have ports: four to a group, whose queues follow one another."""
    everywhere = Target().pipe_id
    info.table_get("tf1.tm.cfg").entries[everywhere, ()] = (None, {"cell_size_bytes": 80, "total_cells": cells})
    table = info.table_get("tf1.tm.port.cfg")
    for port in ports:
        local = port & 0x7F
        place = {
            "pg_id": local // 4,
            "port_queues_count": queues,
            "egress_qid_queues": [local % 4 * 8 + queue for queue in range(8)],
        }
        table.entries[everywhere, table.make_key([KeyTuple("dev_port", port)])] = (None, place)


def _of_schema(table: dict[str, Any]) -> FakeTable:
    actions = {
        action["name"]: [Field.of_schema(each) for each in action.get("data", ())]
        for action in table.get("action_specs", ())
    }
    groups = [each["oneof"] for each in table["data"] if "oneof" in each]
    single = [each for each in table["data"] if "oneof" not in each] + [each for group in groups for each in group]
    keys, data = ([Field.of_schema(each) for each in part] for part in (table["key"], single))
    one_of = [{each["name"] for each in group} for group in groups]
    return FakeTable(table["name"], keys, data, actions, table["size"], one_of)


def _is(name: str, full: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _check_number(where: str, known: Field, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << known.bits:
        raise Refused(f"{where} takes {known.bits} bits, not {value!r}")


def _value(where: str, known: Field, given: DataTuple) -> Any:
    if known.read_only:
        raise Refused(f"{where} is read only")
    if known.repeated:
        value: Any = given.bool_arr_val if known.type == "bool" else given.int_arr_val
        for each in value or ():
            if known.type != "bool":
                _check_number(where, known, each)
    elif known.type == "bool":
        value = given.bool_val
    elif known.type == "string":
        value = given.str_val
        if value not in known.choices:
            raise Refused(f"{where} is one of {known.choices}, not {value!r}")
    else:
        value = given.val
        _check_number(where, known, value)
    if value is None:
        raise Refused(f"{where} wants {'a list of ' if known.repeated else ''}{known.type}: {given}")
    return value
