# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON that p4c writes for BMv2 into a model.

Format: JSON_format.md of the behavioral model, version 2. Features that the built-in switch does not support are found,
and named, before any packet is processed.
"""

import hashlib
import json
import logging
import runpy
from collections.abc import Container, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from dlcp.switch.executor import model
from dlcp.switch.executor.hashes import OVER_BYTES
from dlcp.switch.executor.model import NUMBER_BITS, SPLIT_BITS, Field, ProgramError, UnsupportedFeatureError

Json: TypeAlias = Mapping[str, Any]

_DATA_OPS: Final = frozenset({"+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"})
_BINARY: Final = _DATA_OPS | frozenset(model.COMPARISONS) | {"and", "or", "usat_cast"}
_UNARY: Final = frozenset({"~", "not", "d2b", "b2d"})


def where_is(item: Json, fallback: str) -> str:
    """Return an object's file and line in the P4 source if the compiler recorded them, else ``fallback``."""
    info = item.get("source_info") or {}
    return f"{info['filename']}:{info['line']}" if "filename" in info and "line" in info else fallback


def _hex(text: str) -> int:
    """Return the value of a hexadecimal number."""
    return int(text, 16)


PROGRAM_FOLDER: Final = (Path(__file__).parents[1] / "p4").resolve()
"""Folder of ``dlcp.json`` and ``dlcp.p4info.txtpb``: ``dlcp/switch/p4``, in a checkout a link to ``p4/build``."""
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


def load_definition(path: str | Path) -> model.ProgramDef:
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


def parse(document: Any, digest: str = "", source: str = "program") -> model.ProgramDef:
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

    ``parameters`` are those of the action that contains the expression.
    """

    def __init__(self, document: Json) -> None:
        self.document = document
        for key, feature in _ABSENT.items():
            if document.get(key):
                raise UnsupportedFeatureError(feature, str(document[key][0].get("name", key)))
        self._calculations = {item["name"]: item for item in document.get("calculations", [])}
        self._words: dict[tuple[str, str], tuple[Field, ...]] = {}
        """The words of each wide field, by header and name."""
        self.headers = self._read_headers()
        self.calculations: dict[str, model.Calculation] = {}
        """The hashes and checksums in use."""
        self.registers = {
            item["name"]: model.RegisterDef(item["name"], item["size"], item["bitwidth"])
            for item in document.get("register_arrays", [])
        }
        for register in self.registers.values():
            if register.width > NUMBER_BITS:
                raise UnsupportedFeatureError(f"registers wider than {NUMBER_BITS} bits", register.name)
        self.counters = {}
        for item in document.get("counter_arrays", []):
            if item.get("is_direct"):
                raise UnsupportedFeatureError("direct counters", f"counter {item['name']}")
            self.counters[item["name"]] = model.CounterDef(item["name"], item["size"])
        self.meters = {item["name"]: self._meter(item) for item in document.get("meter_arrays", [])}
        self.actions = {item["id"]: self._action(item) for item in document.get("actions", [])}

    def program(self, digest: str) -> model.ProgramDef:
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
        return model.ProgramDef(
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

    def _checksum(self, item: Json) -> model.Checksum:
        where = where_is(item, f"checksum {item['name']}")
        if item.get("type", "generic") != "generic":
            raise UnsupportedFeatureError(f"checksums of type {item['type']}", where)
        condition = item.get("if_cond")
        return model.Checksum(
            name=item["name"],
            target=self._field(item["target"], where),
            calculation=self._calculation(item["calculation"], where),
            condition=None if condition is None else self._expression(condition, where),
            update=item.get("update", True),
            verify=item.get("verify", True),
        )

    def _meter(self, item: Json) -> model.MeterDef:
        where = f"meter {item['name']}"
        if item.get("rate_count", 2) != 2:
            raise UnsupportedFeatureError(f"meters with {item['rate_count']} rates", where)
        target = self._field(item["result_target"], where) if item.get("is_direct") else None
        return model.MeterDef(item["name"], item["size"], item["type"] == "bytes", target)

    # ---------------------------------------------------------------------------------------------------- parser

    def _state(self, item: Json) -> model.ParserState:
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
        return model.ParserState(item["name"], operations, tuple(keys), tuple(cases), default)

    def _operation(self, item: Json, where: str) -> model.Extract | model.Assign | model.Verify:
        given = item["parameters"]
        if item["op"] == "extract" and given[0]["type"] == "regular":
            return model.Extract(self._header(given[0]["value"], where).name)
        if item["op"] == "set":
            return model.Assign(self._target(given[0], where), self._expression(given[1], where))
        if item["op"] == "verify":
            return model.Verify(self._expression(given[0], where), self._expression(given[1], where))
        feature = {"extract": f"extract into a {given[0].get('type')}", "extract_VL": "varbit fields"}
        raise UnsupportedFeatureError(feature.get(item["op"], f"the parser operation {item['op']}"), where)

    # ------------------------------------------------------------------------------------------------- pipelines

    def _pipeline(self, item: Json) -> model.Control:
        nodes: dict[str, model.Node] = {}
        if item.get("action_calls"):
            raise UnsupportedFeatureError("action calls outside tables", f"control {item['name']}")
        for entry in item.get("conditionals", []):
            where = where_is(entry, f"conditional {entry['name']}")
            condition = self._expression(entry["expression"], where)
            nodes[entry["name"]] = model.Conditional(
                entry["name"], condition, entry["true_next"], entry["false_next"], where
            )
        for entry in item.get("tables", []):
            nodes[entry["name"]] = self._table(entry)
        return model.Control(item["name"], item["init_table"], nodes)

    def _table(self, item: Json) -> model.TableDef:
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
        if width > NUMBER_BITS and (item["match_type"] != "lpm" or len(keys) > 1):
            raise UnsupportedFeatureError(f"keys wider than {NUMBER_BITS} bits (this one has {width})", where)
        actions = tuple(self.actions[identity] for identity in item["action_ids"])
        # Two actions may share a name; they then have the same successor.
        following = {action.id: item["next_tables"].get(action.name) for action in actions}
        default = item.get("default_entry")
        return model.TableDef(
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
            default=default and self._call(default),
            default_const=bool(default and (default.get("action_const") or default.get("action_entry_const"))),
            meter=item.get("direct_meters"),
            profile=item.get("action_profile") if item["type"] != "simple" else None,
            entries=tuple(self._const_entry(entry, item["name"], keys) for entry in item.get("entries", [])),
            where=where_is(item, where),
        )

    def _call(self, item: Json) -> model.Action:
        action = self.actions[item["action_id"]]
        names = (parameter.name for parameter in action.parameters)
        return model.Action(action.name, dict(zip(names, map(_hex, item["action_data"]), strict=True)))

    def _const_entry(self, item: Json, table: str, keys: Sequence[model.Key]) -> model.TableEntry:
        match: dict[str, int | tuple[int, int]] = {}
        for key, given in zip(keys, item["match_key"], strict=True):
            match given["match_type"]:
                case "exact":
                    match[key.name] = _hex(given["key"])
                case "valid":
                    match[key.name] = int(given["key"])
                case "lpm":
                    match[key.name] = _hex(given["key"]), given["prefix_length"]
                case "ternary":
                    match[key.name] = _hex(given["key"]), _hex(given["mask"])
                case _:
                    match[key.name] = _hex(given["start"]), _hex(given["end"])
        return model.TableEntry(table, match, self._call(item["action_entry"]), item.get("priority", 0))

    def _key(self, item: Json, where: str) -> model.Key:
        if item["match_type"] == "valid":
            target = item["target"] if isinstance(item["target"], str) else item["target"][0]
            sources: tuple[model.Variable, ...] = (model.Valid(self._header(target, where).name),)
        else:
            sources = self._words.get(tuple(item["target"])) or (self._variable(item["target"], where),)
        match = "exact" if item["match_type"] in ("valid", "exact") else item["match_type"]
        if match not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedFeatureError(f"match type {match}", where)
        name = item.get("name") or ".".join(item["target"])
        mask = None if item.get("mask") is None else _hex(item["mask"])
        return model.Key(name, match, sources, mask)

    def _profile(self, item: Json) -> model.ProfileDef:
        selector = item.get("selector")
        where = where_is(item, f"action profile {item['name']}")
        if selector is None:
            return model.ProfileDef(item["name"], item["max_size"], None, ())
        fields = tuple(entry for entry in self._inputs(selector["input"], where) if isinstance(entry, Field))
        return model.ProfileDef(item["name"], item["max_size"], self._algorithm(selector["algo"], where), fields)

    # ------------------------------------------------------------------------------------------------------ actions

    def _action(self, item: Json) -> model.ActionDef:
        """Read an action; raises UnsupportedFeatureError or ProgramError."""
        where = where_is(item, f"action {item['name']}")
        parameters = tuple(model.Parameter(entry["name"], entry["bitwidth"]) for entry in item["runtime_data"])
        for parameter in parameters:
            if parameter.width > NUMBER_BITS:
                raise UnsupportedFeatureError(
                    f"action parameters wider than {NUMBER_BITS} bits ({parameter.name})", f"action {item['name']}"
                )
        body: list[model.Statement] = []
        for call in item["primitives"]:
            body += self._primitive(call, where_is(call, where), parameters)
        return model.ActionDef(item["id"], item["name"], parameters, tuple(body), where)

    def _primitive(self, call: Json, where: str, parameters: Sequence[model.Parameter]) -> list[model.Statement]:
        op, given = call["op"], call["parameters"]

        def expression(index: int) -> model.Expr:
            return self._expression(given[index], where, parameters)

        match op:
            case "no_op":
                return []
            case "exit":
                return [model.Exit()]
            case "assign" | "modify_field":
                if copied := self._wide_copy(given, where):
                    return copied
                target = self._target(given[0], where)
                if (target.header, target.name) == ("standard_metadata", "mcast_grp") and expression(1) != model.Const(
                    0
                ):
                    raise UnsupportedFeatureError("multicast", where)
                return [model.Assign(target, expression(1))]
            case "truncate":
                return [model.Truncate(expression(0))]
            case "mark_to_drop" | "drop":
                return [model.Assign(self._field(("standard_metadata", "egress_spec"), where), model.Const(511))]
            case "count":
                return [model.Count(self._named(self.counters, given[0], where), expression(1))]
            case "register_read":
                name = self._named(self.registers, given[1], where)
                return [model.RegisterRead(self._target(given[0], where), name, expression(2))]
            case "register_write":
                return [model.RegisterWrite(self._named(self.registers, given[0], where), expression(1), expression(2))]
            case "execute_meter":
                name = self._named(self.meters, given[0], where)
                return [model.ExecuteMeter(self._target(given[2], where), name, expression(1))]
            case "modify_field_with_hash_based_offset":
                size = expression(3)
                if not isinstance(size, model.Const):
                    raise UnsupportedFeatureError("hashes with a non-constant maximum", where)
                calculation = self._calculation(given[2]["value"], where)
                return [model.Hash(self._target(given[0], where), expression(1), calculation.name, size.value)]
        raise UnsupportedFeatureError(_PRIMITIVES.get(op, f"the primitive {op}"), where)

    def _wide_copy(self, given: Sequence[Json], where: str) -> list[model.Statement]:
        """Return the assignments of a wide field's words, or nothing if the target is not wide."""
        target, value = given
        words = self._words.get(tuple(target["value"])) if target["type"] == "field" else None
        if words is None:
            return []
        while value["type"] == "expression" and "type" in value["value"]:
            value = value["value"]
        source = self._words.get(tuple(value["value"])) if value["type"] == "field" else None
        if source is None or len(source) != len(words):
            raise UnsupportedFeatureError(f"computing with fields wider than {NUMBER_BITS} bits", where)
        return [model.Assign(word, item) for word, item in zip(words, source, strict=True)]

    @staticmethod
    def _named(known: Container[str], parameter: Json, where: str) -> str:
        name = str(parameter["value"])
        if name not in known:
            raise ProgramError(f"{where}: no {parameter['type']} {name!r} in the program")
        return name

    # -------------------------------------------------------------------------------------- headers and expressions

    def _read_headers(self) -> dict[str, model.HeaderDef]:
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
                parts = [width]
                if width > NUMBER_BITS:
                    parts = [width % SPLIT_BITS or SPLIT_BITS]
                    parts += [SPLIT_BITS] * ((width - parts[0]) // SPLIT_BITS)
                words = []
                for number, part in enumerate(parts):
                    label = name if len(parts) == 1 else f"{name}[{number}]"
                    words.append(Field(item["name"], label, part, offset, bool(item.get("metadata"))))
                    fields[label] = words[-1]
                    offset += part
                if len(words) > 1:
                    self._words[item["name"], name] = tuple(words)
            headers[item["name"]] = model.HeaderDef(item["name"], bool(item.get("metadata")), fields, frozenset(signed))
        return headers

    def _header(self, name: str, where: str) -> model.HeaderDef:
        """Return a header; raises ProgramError for an unknown name."""
        if name not in self.headers:
            raise ProgramError(f"{where}: no header {name!r} in the program")
        return self.headers[name]

    def _field(self, value: Sequence[str], where: str) -> Field:
        """Return a field; raises UnsupportedFeatureError if it is signed or too wide."""
        header = self._header(value[0], where)
        if value[1] in header.signed:
            raise UnsupportedFeatureError(f"signed fields ({value[0]}.{value[1]})", where)
        if tuple(value) in self._words:
            feature = f"computing with fields wider than {NUMBER_BITS} bits ({value[0]}.{value[1]})"
            raise UnsupportedFeatureError(feature, where)
        return header.fields[value[1]]

    def _variable(self, value: Sequence[str], where: str) -> model.Variable:
        """Return a field or a header's validity bit."""
        if value[1] == "$valid$":
            return model.Valid(self._header(value[0], where).name)
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

    def _expression(self, item: Json, where: str, parameters: Sequence[model.Parameter] = ()) -> model.Expr:
        """Read an expression; ``parameters`` are those of the action that contains it."""
        kind, value = item["type"], item["value"]
        if kind == "expression":
            return self._expression(value, where, parameters) if "type" in value else self._op(value, where, parameters)
        if kind == "field":
            return self._variable(value, where)
        if kind == "hexstr":
            return model.Const(_hex(value))
        if kind == "bool":
            return model.Const(int(value))
        if kind in ("runtime_data", "local"):
            return model.Param(value, parameters[value].width)
        raise UnsupportedFeatureError(f"expressions on a {kind}", where)

    def _op(self, value: Json, where: str, parameters: Sequence[model.Parameter]) -> model.Expr:
        op = value["op"]
        if op == "valid":
            if value["right"]["type"] != "header":
                raise UnsupportedFeatureError(f"isValid on a {value['right']['type']}", where)
            return model.Valid(self._header(value["right"]["value"], where).name)
        if op == "?":
            names: tuple[str, ...] = ("cond", "left", "right")
        elif op in _UNARY:
            names = ("right",)
        elif op in _BINARY:
            names = ("left", "right")
        else:
            raise UnsupportedFeatureError(f"the operation {op}", where)
        return model.Op(op, tuple(self._expression(value[name], where, parameters) for name in names))

    def _calculation(self, name: str, where: str) -> model.Calculation:
        """Return a hash by its name."""
        if name not in self.calculations:
            item = self._calculations[name]
            where = where_is(item, where)
            self.calculations[name] = model.Calculation(
                name, self._algorithm(item["algo"], where), self._inputs(item["input"], where), where
            )
        return self.calculations[name]

    @staticmethod
    def _algorithm(name: str, where: str) -> str:
        """Return the name of a hash algorithm; raises UnsupportedFeatureError for an unsupported one."""
        if name not in OVER_BYTES:
            raise UnsupportedFeatureError(f"the hash {name}", where)
        return name

    def _inputs(self, items: Sequence[Json], where: str) -> tuple[Field | model.Bits, ...]:
        """Return the inputs of a hash: fields, also all of a header, and constant bits."""
        inputs: list[Field | model.Bits] = []
        for item in items:
            if item["type"] == "field":
                inputs += self._words.get(tuple(item["value"])) or (self._field(item["value"], where),)
            elif item["type"] == "header":
                inputs += self._header(item["value"], where).fields.values()
            elif item["type"] == "hexstr":
                inputs.append(model.Bits(_hex(item["value"]), item["bitwidth"]))
            else:
                raise UnsupportedFeatureError(f"a hash over a {item['type']}", where)
        return tuple(inputs)


def _case(entry: Json, keys: Sequence[Field]) -> model.Case:
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
    return model.Case(tuple(reversed(values)), tuple(reversed(masks)), entry["next_state"])
