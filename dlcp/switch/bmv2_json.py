# SPDX-License-Identifier: Apache-2.0
"""The JSON that p4c writes for BMv2, read into a typed model; what cannot be run is refused by name.

Format: JSON_format.md of the behavioral model, version 2. Only what the built-in switch runs has a place in the model,
so whatever else a program uses is found here, and not while packets are under way.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dlcp.switch.bmv2_actions import ActionReader
from dlcp.switch.bmv2_words import MAX_WIDTH, Json, Words, number, where_is
from dlcp.switch.errors import ProgramError, UnsupportedFeature
from dlcp.switch.model import (
    Assign,
    Case,
    Checksum,
    Conditional,
    ConstEntry,
    CounterDef,
    Extract,
    Field,
    Key,
    MeterDef,
    Node,
    Pipeline,
    ProfileDef,
    ProgramDef,
    RegisterDef,
    State,
    TableDef,
    Valid,
    Variable,
    Verify,
)


def load(path: str | Path) -> ProgramDef:
    """Read a program.

    Raises
    ------
    UnsupportedFeature
        If the program uses what the built-in switch does not run.
    ProgramError
        If the file is no BMv2 JSON.
    """
    data = Path(path).read_bytes()
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ProgramError(f"{path} is not JSON ({error}); give the file that p4c-bm2-ss writes with -o") from None
    return parse(document, hashlib.sha256(data).hexdigest(), str(path))


def parse(document: Any, digest: str = "", source: str = "program") -> ProgramDef:
    """Build the model from a decoded JSON document; errors as `load`."""
    if not isinstance(document, Mapping) or "pipelines" not in document:
        raise ProgramError(f"{source} has no pipelines: not a BMv2 JSON; give the file that p4c-bm2-ss writes with -o")
    version = document.get("__meta__", {}).get("version", [2, 0])
    if version[0] != 2:
        raise ProgramError(f"{source} has JSON format version {version}, not 2; compile it with a current p4c-bm2-ss")
    try:
        return _Reader(document).program(digest)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ProgramError(f"{source} is a damaged BMv2 JSON: {type(error).__name__} {error}") from error


_ABSENT: Final = {
    "header_stacks": "header stacks",
    "header_unions": "header unions",
    "header_union_stacks": "header union stacks",
    "parse_vsets": "parser value sets",
    "learn_lists": "digests",
    "extern_instances": "externs",
}


class _Reader:
    """Reads one document. Methods take the JSON of an object and where it stands."""

    def __init__(self, document: Json) -> None:
        self.document = document
        for key, feature in _ABSENT.items():
            if document.get(key):
                raise UnsupportedFeature(feature, str(document[key][0].get("name", key)))
        self._words = Words(document)
        self.registers = {
            item["name"]: RegisterDef(item["name"], item["size"], item["bitwidth"])
            for item in document.get("register_arrays", [])
        }
        for register in self.registers.values():
            if register.width > MAX_WIDTH:
                raise UnsupportedFeature(f"registers wider than {MAX_WIDTH} bits", register.name)
        self.counters = {}
        for item in document.get("counter_arrays", []):
            if item.get("is_direct"):
                raise UnsupportedFeature("direct counters", f"counter {item['name']}")
            self.counters[item["name"]] = CounterDef(item["name"], item["size"])
        self.meters = {item["name"]: self._meter(item) for item in document.get("meter_arrays", [])}
        actions = ActionReader(self._words, self.counters, self.registers, self.meters)
        self.actions = {item["id"]: actions.action(item) for item in document.get("actions", [])}

    def program(self, digest: str) -> ProgramDef:
        document = self.document
        if len(document["parsers"]) != 1 or len(document["deparsers"]) != 1:
            raise UnsupportedFeature("more than one parser or deparser", "parsers")
        parser, deparser = document["parsers"][0], document["deparsers"][0]
        if deparser.get("primitives"):
            raise UnsupportedFeature("statements in the deparser", where_is(deparser, "deparser"))
        pipelines = {item["name"]: item for item in document["pipelines"]}
        profiles = {
            item["name"]: self._profile(item)
            for pipeline in document["pipelines"]
            for item in pipeline.get("action_profiles", [])
        }
        standard = {
            f"standard_metadata.{name}": item
            for name, item in self._words.header("standard_metadata", "program").fields.items()
        }
        for alias, (header, name) in document.get("field_aliases", []):
            standard[alias] = self._words.header(header, alias).fields[name]
        return ProgramDef(
            digest=digest,
            headers=self._words.headers,
            errors=self._words.errors(),
            first_state=parser["init_state"],
            states={item["name"]: self._state(item) for item in parser["parse_states"]},
            emitted=tuple(deparser["order"]),
            ingress=self._pipeline(pipelines["ingress"]),
            egress=self._pipeline(pipelines["egress"]),
            profiles=profiles,
            checksums=tuple(self._checksum(item) for item in document.get("checksums", [])),
            calculations=self._words.calculations,
            registers=self.registers,
            counters=self.counters,
            meters=self.meters,
            standard=standard,
        )

    def _checksum(self, item: Json) -> Checksum:
        where = where_is(item, f"checksum {item['name']}")
        if item.get("type", "generic") != "generic":
            raise UnsupportedFeature(f"checksums of type {item['type']}", where)
        condition = item.get("if_cond")
        return Checksum(
            name=item["name"],
            target=self._words.field(item["target"], where),
            calculation=self._words.calculation(item["calculation"], where),
            condition=None if condition is None else self._words.expression(condition, where),
            update=item.get("update", True),
            verify=item.get("verify", True),
        )

    def _meter(self, item: Json) -> MeterDef:
        where = f"meter {item['name']}"
        if item.get("rate_count", 2) != 2:
            raise UnsupportedFeature(f"meters with {item['rate_count']} rates", where)
        target = self._words.field(item["result_target"], where) if item.get("is_direct") else None
        return MeterDef(item["name"], item["size"], item["type"] == "bytes", target)

    # ---------------------------------------------------------------------------------------------------- parser

    def _state(self, item: Json) -> State:
        where = f"parser state {item['name']}"
        operations = tuple(self._operation(entry, where) for entry in item["parser_ops"])
        keys = []
        for entry in item["transition_key"]:
            if entry["type"] != "field":
                raise UnsupportedFeature(f"select on a {entry['type']}", where)
            keys.append(self._words.field(entry["value"], where))
        cases, default = [], None
        for entry in item["transitions"]:
            if entry.get("type") == "parse_vset":
                raise UnsupportedFeature("parser value sets", where)
            if entry["value"] in ("default", None):
                default = entry["next_state"]
            else:
                cases.append(_case(entry, keys))
        return State(item["name"], operations, tuple(keys), tuple(cases), default)

    def _operation(self, item: Json, where: str) -> Extract | Assign | Verify:
        given = item["parameters"]
        if item["op"] == "extract" and given[0]["type"] == "regular":
            return Extract(self._words.header(given[0]["value"], where).name)
        if item["op"] == "set":
            return Assign(self._words.target(given[0], where), self._words.expression(given[1], where))
        if item["op"] == "verify":
            return Verify(self._words.expression(given[0], where), self._words.expression(given[1], where))
        feature = {"extract": f"extract into a {given[0].get('type')}", "extract_VL": "varbit fields"}
        raise UnsupportedFeature(feature.get(item["op"], f"the parser operation {item['op']}"), where)

    # ------------------------------------------------------------------------------------------------- pipelines

    def _pipeline(self, item: Json) -> Pipeline:
        nodes: dict[str, Node] = {}
        if item.get("action_calls"):
            raise UnsupportedFeature("action calls outside tables", f"control {item['name']}")
        for entry in item.get("conditionals", []):
            where = where_is(entry, f"conditional {entry['name']}")
            condition = self._words.expression(entry["expression"], where)
            nodes[entry["name"]] = Conditional(entry["name"], condition, entry["true_next"], entry["false_next"], where)
        for entry in item.get("tables", []):
            nodes[entry["name"]] = self._table(entry)
        return Pipeline(item["name"], item["init_table"], nodes)

    def _table(self, item: Json) -> TableDef:
        where = f"table {item['name']}"
        if item.get("with_counters"):
            raise UnsupportedFeature("direct counters", where)
        if item.get("support_timeout"):
            raise UnsupportedFeature("entries that time out", where)
        if item["type"] not in ("simple", "indirect", "indirect_ws"):
            raise UnsupportedFeature(f"tables of type {item['type']}", where)
        if item["match_type"] not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedFeature(f"match type {item['match_type']}", where)
        keys = tuple(self._key(entry, where) for entry in item["key"])
        width = sum(key.width for key in keys)
        if width > MAX_WIDTH:
            raise UnsupportedFeature(f"keys wider than {MAX_WIDTH} bits (this one has {width})", where)
        actions = tuple(self.actions[identity] for identity in item["action_ids"])
        # Two actions may have one name; where they do, the program never tells them apart by what follows.
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
            default=default and (default["action_id"], tuple(number(data) for data in default["action_data"])),
            default_const=bool(default and (default.get("action_const") or default.get("action_entry_const"))),
            meter=item.get("direct_meters"),
            profile=item.get("action_profile") if item["type"] != "simple" else None,
            entries=tuple(_const_entry(entry) for entry in item.get("entries", [])),
            where=where_is(item, where),
        )

    def _key(self, item: Json, where: str) -> Key:
        if item["match_type"] == "valid":
            target = item["target"] if isinstance(item["target"], str) else item["target"][0]
            source: Variable = Valid(self._words.header(target, where).name)
        else:
            source = self._words.variable(item["target"], where)
        match = "exact" if item["match_type"] in ("valid", "exact") else item["match_type"]
        if match not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedFeature(f"match type {match}", where)
        name = item.get("name") or ".".join(item["target"])
        mask = None if item.get("mask") is None else number(item["mask"])
        return Key(name, match, source, mask)

    def _profile(self, item: Json) -> ProfileDef:
        selector = item.get("selector")
        where = where_is(item, f"action profile {item['name']}")
        if selector is None:
            return ProfileDef(item["name"], item["max_size"], None, ())
        fields = tuple(entry for entry in self._words.inputs(selector["input"], where) if isinstance(entry, Field))
        return ProfileDef(item["name"], item["max_size"], self._words.algorithm(selector["algo"], where), fields)


def _case(entry: Json, keys: Sequence[Field]) -> Case:
    """Cut a transition's value, in which every key is padded to whole bytes, into one value for each key."""
    value = number(entry["value"])
    mask = -1 if entry.get("mask") is None else number(entry["mask"])
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
                keys.append(number(item["key"]))
            case "valid":
                keys.append(int(item["key"]))
            case "lpm":
                keys.append((number(item["key"]), item["prefix_length"]))
            case "ternary":
                keys.append((number(item["key"]), number(item["mask"])))
            case _:
                keys.append((number(item["start"]), number(item["end"])))
    action = entry["action_entry"]
    data = tuple(number(value) for value in action["action_data"])
    return ConstEntry(tuple(keys), action["action_id"], data, entry.get("priority", 0))
