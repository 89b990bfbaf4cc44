# SPDX-License-Identifier: Apache-2.0
"""Reads the P4 of ``p4/tna`` into trees, so that a test can run it: the part of the language that is used there.

What it does not know is an error that names file and line, never passed over. A tree is a tuple whose first member says
what it is: expressions and statements as :class:`Reader` returns them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tna.p4tokens import P4Error, Token, tokens_of

Tree = tuple[Any, ...]

NUMBER = re.compile(r"(?:(\d+)([ws]))?(.+)")
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"),
          ("+", "-", "++", "|-|", "|+|"), ("*",))  # fmt: skip
"""Operators that take two operands, those that bind least first."""


@dataclass
class Block:
    """A parser or a control: parameters (direction, type, name), what it declares, and what it does."""

    name: str
    parameters: list[Tree]
    variables: list[Tree] = field(default_factory=list)
    instances: list[Tree] = field(default_factory=list)
    actions: dict[str, tuple[list[str], list[Tree]]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, list[Tree]] = field(default_factory=dict)
    body: list[Tree] = field(default_factory=list)


@dataclass
class Source:
    """All that a program declares."""

    constants: dict[str, Tree] = field(default_factory=dict)
    types: dict[str, Tree] = field(default_factory=dict)
    structs: dict[str, tuple[bool, list[tuple[str, Tree, bool]]]] = field(default_factory=dict)
    """Whether it is a header; its fields: name, type, whether the compiler places it as it likes."""
    blocks: dict[str, Block] = field(default_factory=dict)
    instances: list[Tree] = field(default_factory=list)
    pipeline: list[str] = field(default_factory=list)


class Reader:
    """Reads declarations, statements and expressions, one token at a time."""

    def __init__(self, path: Path) -> None:
        self._tokens = [*tokens_of(path.resolve(), {}, set()), Token("end", "", "the end")]
        self._at = 0
        self.source = Source()
        while self._peek().kind != "end":
            self._declaration()

    # ------------------------------------------------------------------------------------------------------- tokens

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _is(self, *texts: str) -> bool:
        return all(self._peek(k).text == text for k, text in enumerate(texts))

    def _skip(self, text: str) -> bool:
        if self._is(text):
            self._at += 1
            return True
        return False

    def _want(self, text: str) -> None:
        token = self._next()
        if token.text != text:
            raise P4Error(f"{token.where}: {token.text!r} where {text!r} should be")

    def _word(self) -> str:
        token = self._next()
        if token.kind != "word":
            raise P4Error(f"{token.where}: {token.text!r} where a name should be")
        return token.text

    def _braced(self) -> Iterator[None]:
        """Yield once for each thing in braces; whoever asks reads it."""
        self._want("{")
        while not self._skip("}"):
            yield

    def _annotations(self) -> dict[str, str]:
        found = {}
        while self._skip("@"):
            name = self._word()
            found[name] = ""
            if self._skip("("):
                found[name] = self._next().text.strip('"')
                self._want(")")
        return found

    # ------------------------------------------------------------------------------------------------- declarations

    def _declaration(self) -> None:
        match self._peek().text:
            case "const":
                self._next()
                self._type()
                name = self._word()
                self._want("=")
                self.source.constants[name] = self.expression()
                self._want(";")
            case "typedef":
                self._next()
                kind = self._type()
                self.source.types[self._word()] = kind
                self._want(";")
            case "header" | "struct" as kind:
                self._next()
                name = self._word()
                self.source.structs[name] = kind == "header", self._fields()
            case "parser" | "control":
                self._next()
                block = self._block()
                self.source.blocks[block.name] = block
            case "Pipeline":
                self._at += 2
                while not self._skip(")"):
                    self.source.pipeline.append(self._word())
                    self._want("(")
                    self._want(")")
                    self._skip(",")
                self._word()
                self._want(";")
            case "Switch":
                while not self._skip(";"):
                    self._next()
            case _:
                self.source.instances.append(self._instance())

    def _fields(self) -> list[tuple[str, Tree, bool]]:
        found = []
        for _ in self._braced():
            notes = self._annotations()
            kind = self._type()
            found.append((self._word(), kind, "flexible" in notes))
            self._want(";")
        return found

    def _type(self) -> Tree:
        """Read a type: (name, what stands in angle brackets)."""
        name = self._word()
        inner: list[Tree] = []
        if self._is("<"):
            self._next()
            while not self._is(">"):
                if self._peek().kind == "number" or name in ("bit", "int"):
                    inner.append(self._level(len(LEVELS) - 2))
                else:
                    inner.append(self._type())
                self._skip(",")
            self._want(">")
        return name, *inner

    def _instance(self) -> Tree:
        kind = self._type()
        self._want("(")
        arguments = self._list(")")
        name = self._word()
        body: Any = None
        if self._skip("="):  # a RegisterAction
            self._want("{")
            self._want("void")
            self._want("apply")
            parameters = self._parameters()
            body = parameters, self.block()
            self._want("}")
        self._want(";")
        return "instance", kind, arguments, name, body

    def _parameters(self) -> list[Tree]:
        found = []
        self._want("(")
        while not self._skip(")"):
            direction = self._word() if self._peek().text in ("in", "out", "inout") else "in"
            kind = self._type()
            found.append((direction, kind, self._word()))
            self._skip(",")
        return found

    def _block(self) -> Block:
        block = Block(self._word(), self._parameters())
        for _ in self._braced():
            match self._peek().text:
                case "action":
                    self._next()
                    name = self._word()
                    block.actions[name] = [parameter for _, _, parameter in self._parameters()], self.block()
                case "table":
                    self._next()
                    name = self._word()
                    block.tables[name] = self._table()
                case "state":
                    self._next()
                    name = self._word()
                    block.states[name] = self.block()
                case "apply":
                    self._next()
                    block.body = self.block()
                case _:
                    start = self._at
                    self._type()
                    if self._is("("):
                        self._at = start
                        block.instances.append(self._instance())
                    else:
                        self._at = start
                        block.variables.append(self.statement())
        return block

    def _table(self) -> dict[str, Any]:
        table: dict[str, Any] = {"key": [], "actions": [], "default": ("NoAction", []), "entries": []}
        for _ in self._braced():
            self._skip("const")
            part = self._word()
            self._want("=")
            match part:
                case "key":
                    table["key"] += [self._key() for _ in self._braced()]
                case "actions":
                    table["actions"] += [self._action_name() for _ in self._braced()]
                case "entries":
                    table["entries"] += [self._entry() for _ in self._braced()]
                case _:
                    value = self.expression()
                    self._want(";")
                    if part == "default_action":
                        table["default"] = value[1][1], value[2]
                    else:
                        table[part] = value
        return table

    def _key(self) -> Tree:
        """Read a key: expression, kind of match, name."""
        value = self.expression()
        self._want(":")
        kind = self._word()
        name = self._annotations().get("name", "")
        self._want(";")
        return value, kind, name

    def _action_name(self) -> str:
        self._annotations()
        name = self._word()
        self._want(";")
        return name

    def _entry(self) -> Tree:
        """Read an entry: value of the key, name of the action, arguments."""
        value = self.expression()
        self._want(":")
        name = self._word()
        self._want("(")
        arguments = self._list(")")
        self._want(";")
        return value, name, arguments

    # --------------------------------------------------------------------------------------------------- statements

    def block(self) -> list[Tree]:
        """Read statements in braces."""
        return [self.statement() for _ in self._braced()]

    def statement(self) -> Tree:
        """Read one: if, transition, variable, assign, call or block."""
        if self._is("{"):
            return "block", self.block()
        if self._skip("if"):
            self._want("(")
            condition = self.expression()
            self._want(")")
            then = self.statement()
            return "if", condition, then, self.statement() if self._skip("else") else ("block", [])
        if self._skip("transition"):
            return self._transition()
        start = self._at
        if self._peek().kind == "word":
            try:
                kind = self._type()
                if self._peek().kind == "word":
                    name = self._word()
                    value = self.expression() if self._skip("=") else None
                    self._want(";")
                    return "variable", kind, name, value
            except P4Error:
                pass
            self._at = start
        target = self.expression()
        if self._skip("="):
            value = self.expression()
            self._want(";")
            return "assign", target, value
        self._want(";")
        return "call", target

    def _transition(self) -> Tree:
        if not self._skip("select"):
            state = self._word()
            self._want(";")
            return "transition", [], [([], state)]
        self._want("(")
        keys = self._list(")")
        cases = []
        for _ in self._braced():
            if self._skip("default"):
                values: list[Tree] = []
            elif self._is("("):
                self._next()
                values = []
                while not self._skip(")"):
                    values.append(self._mask())
                    self._skip(",")
            else:
                values = [self._mask()]
            self._want(":")
            cases.append((values, self._word()))
            self._want(";")
        return "transition", keys, cases

    def _mask(self) -> Tree:
        if self._skip("_"):
            return ("any",)
        value = self.expression()
        return ("mask", value, self.expression()) if self._skip("&&&") else value

    # -------------------------------------------------------------------------------------------------- expressions

    def _list(self, end: str) -> list[Tree]:
        found = []
        while not self._skip(end):
            found.append(self.expression())
            self._skip(",")
        return found

    def expression(self) -> Tree:
        """Read one: number, name, member, slice, call, cast, tuple, unary or binary."""
        return self._level(0)

    def _level(self, level: int) -> Tree:
        if level == len(LEVELS):
            return self._unary()
        left = self._level(level + 1)
        while True:
            operator = self._peek().text
            if operator == ">" and self._is(">", ">"):
                operator = ">>"
            if operator not in LEVELS[level]:
                return left
            self._at += 2 if operator == ">>" else 1
            left = "binary", operator, left, self._level(level + 1)

    def _unary(self) -> Tree:
        if self._peek().text in ("~", "!", "-"):
            return "unary", self._next().text, self._unary()
        if self._is("(") and (cast := self._cast()):
            return cast
        return self._postfix()

    def _cast(self) -> Tree | None:
        start = self._at
        self._next()
        try:
            kind = self._type()
            known = kind[0] in ("bit", "int", "bool") or kind[0] in self.source.types or kind[0].endswith("Id_t")
            if known and self._skip(")"):
                return "cast", kind, self._unary()
        except P4Error:
            pass
        self._at = start
        return None

    def _postfix(self) -> Tree:
        token = self._next()
        if token.text == "(":
            found = self.expression()
            self._want(")")
        elif token.text == "{":
            found = "tuple", self._list("}")
        elif token.kind == "number":
            found = _number(token.text)
        elif token.kind == "word":
            found = ("number", token.text == "true", None) if token.text in ("true", "false") else ("name", token.text)
        else:
            raise P4Error(f"{token.where}: {token.text!r} where a value should be")
        while True:
            if self._skip("."):
                found = "member", found, self._word()
            elif self._skip("["):
                high = self.expression()
                self._want(":")
                found = "slice", found, high, self.expression()
                self._want("]")
            elif self._skip("("):
                found = "call", found, self._list(")"), None
            elif self._is("<") and (call := self._typed_call(found)):
                found = call
            else:
                return found

    def _typed_call(self, function: Tree) -> Tree | None:
        start = self._at
        self._next()
        try:
            kind = self._type()
            if self._skip(">") and self._skip("("):
                return "call", function, self._list(")"), kind
        except P4Error:
            pass
        self._at = start
        return None


def _number(text: str) -> Tree:
    width, sign, digits = NUMBER.fullmatch(text).groups()
    return "number", int(digits, 0), (int(width), sign == "s") if width else None
