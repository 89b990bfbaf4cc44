# SPDX-License-Identifier: Apache-2.0
"""What every part of a BMv2 JSON is made of: headers and fields, expressions over them, hashes of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from dlcp.switch.errors import ProgramError, UnsupportedFeature
from dlcp.switch.model import (
    COMPARISONS,
    Bits,
    Calculation,
    Const,
    Expr,
    Field,
    Header,
    Op,
    Param,
    Parameter,
    Valid,
    Variable,
)

Json: TypeAlias = Mapping[str, Any]

MAX_WIDTH: Final = 63
"""Widest value that can be computed with: what a signed 64-bit integer holds without a sign."""

HASHES: Final = frozenset({"crc16", "crc32", "csum16", "identity", "xor16"})
_DATA_OPS: Final = frozenset({"+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"})
_BINARY: Final = _DATA_OPS | COMPARISONS | {"and", "or", "usat_cast"}
_UNARY: Final = frozenset({"~", "not", "d2b", "b2d"})


def where_is(item: Json, fallback: str) -> str:
    """Return the line of the P4 source that an object comes from, if the compiler says so."""
    info = item.get("source_info") or {}
    return f"{info['filename']}:{info['line']}" if "filename" in info and "line" in info else fallback


def number(text: str) -> int:
    """Return the value of a hexadecimal number."""
    return int(text, 16)


class Words:
    """Reads fields, expressions and hashes of one document; ``where`` says where they stand, for errors.

    Attributes
    ----------
    headers
        All headers, metadata included.
    calculations
        The hashes and checksums that have been asked for.
    """

    def __init__(self, document: Json) -> None:
        self._document = document
        self._calculations = {item["name"]: item for item in document.get("calculations", [])}
        self.headers = self._read_headers()
        self.calculations: dict[str, Calculation] = {}

    def _read_headers(self) -> dict[str, Header]:
        types = {item["name"]: item for item in self._document["header_types"]}
        headers = {}
        for item in self._document["headers"]:
            fields: dict[str, Field] = {}
            signed = set()
            offset = 0
            for name, width, *rest in types[item["header_type"]]["fields"]:
                if width == "*":
                    raise UnsupportedFeature("varbit fields", f"{item['name']}.{name}")
                if rest and rest[0]:
                    signed.add(name)
                fields[name] = Field(item["name"], name, width, offset, bool(item.get("metadata")))
                offset += width
            headers[item["name"]] = Header(item["name"], bool(item.get("metadata")), fields, frozenset(signed))
        return headers

    def header(self, name: str, where: str) -> Header:
        """Return a header; raises ProgramError if there is none of this name."""
        if name not in self.headers:
            raise ProgramError(f"{where}: no header {name!r} in the program")
        return self.headers[name]

    def field(self, value: Sequence[str], where: str) -> Field:
        """Return a field; raises UnsupportedFeature if it cannot be computed with."""
        header = self.header(value[0], where)
        found = header.fields[value[1]]
        if value[1] in header.signed:
            raise UnsupportedFeature(f"signed fields ({value[0]}.{value[1]})", where)
        if found.width > MAX_WIDTH:
            raise UnsupportedFeature(f"fields wider than {MAX_WIDTH} bits ({value[0]}.{value[1]})", where)
        return found

    def variable(self, value: Sequence[str], where: str) -> Variable:
        """Return a field, or whether a header is valid."""
        if value[1] == "$valid$":
            return Valid(self.header(value[0], where).name)
        return self.field(value, where)

    def target(self, parameter: Json, where: str) -> Field:
        """Return the field that something is assigned to."""
        if parameter["type"] != "field":
            raise UnsupportedFeature(f"assignment to a {parameter['type']}", where)
        return self.field(parameter["value"], where)

    def errors(self) -> dict[str, int]:
        """Return the numbers of the parser's errors, by name."""
        errors: dict[str, int] = dict(self._document.get("errors", []))
        # BMv2 numbers the core errors that a program does not list after those that it does.
        for name in ("NoError", "PacketTooShort"):
            if name not in errors:
                errors[name] = max(errors.values(), default=-1) + 1
        return errors

    def expression(self, item: Json, where: str, parameters: Sequence[Parameter] = ()) -> Expr:
        """Read an expression; ``parameters`` are those of the action that it stands in."""
        kind, value = item["type"], item["value"]
        if kind == "expression":
            return self.expression(value, where, parameters) if "type" in value else self._op(value, where, parameters)
        if kind == "field":
            return self.variable(value, where)
        if kind == "hexstr":
            return Const(number(value))
        if kind == "bool":
            return Const(int(value))
        if kind in ("runtime_data", "local"):
            return Param(value, parameters[value].width)
        raise UnsupportedFeature(f"expressions on a {kind}", where)

    def _op(self, value: Json, where: str, parameters: Sequence[Parameter]) -> Expr:
        op = value["op"]
        if op == "valid":
            if value["right"]["type"] != "header":
                raise UnsupportedFeature(f"isValid on a {value['right']['type']}", where)
            return Valid(self.header(value["right"]["value"], where).name)
        if op == "?":
            names: tuple[str, ...] = ("cond", "left", "right")
        elif op in _UNARY:
            names = ("right",)
        elif op in _BINARY:
            names = ("left", "right")
        else:
            raise UnsupportedFeature(f"the operation {op}", where)
        return Op(op, tuple(self.expression(value[name], where, parameters) for name in names))

    def calculation(self, name: str, where: str) -> Calculation:
        """Return a hash by its name."""
        if name not in self.calculations:
            item = self._calculations[name]
            where = where_is(item, where)
            self.calculations[name] = Calculation(
                name, self.algorithm(item["algo"], where), self.inputs(item["input"], where), where
            )
        return self.calculations[name]

    @staticmethod
    def algorithm(name: str, where: str) -> str:
        """Return the name of a hash algorithm; raises UnsupportedFeature for one that is not run."""
        if name not in HASHES:
            raise UnsupportedFeature(f"the hash {name}", where)
        return name

    def inputs(self, items: Sequence[Json], where: str) -> tuple[Field | Bits, ...]:
        """Return what is hashed: fields, and constant bits."""
        inputs: list[Field | Bits] = []
        for item in items:
            if item["type"] == "field":
                inputs.append(self.field(item["value"], where))
            elif item["type"] == "hexstr":
                inputs.append(Bits(number(item["value"]), item["bitwidth"]))
            else:
                raise UnsupportedFeature(f"a hash over a {item['type']}", where)
        return tuple(inputs)
