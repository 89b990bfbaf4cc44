# SPDX-License-Identifier: Apache-2.0
"""Lines of text, names of variables, and the small functions that the generated text calls."""

import keyword
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from dlcp.switch.errors import UnsupportedFeature
from dlcp.switch.model import Valid, Variable

MAX_LINES: Final = 20_000
"""Longest generated text; a control flow that jumps about can repeat itself. Chosen by us."""

RESERVED: Final = frozenset(
    {"p", "n", "carry", "now_us", "ingress_port", "port", "enq_us", "deq_delta_us", "enq_depth", "deq_depth"}
    | {"np", "registers", "packets_counted", "bytes_counted", "meter_rates", "meter_tokens", "min", "max", "bool"}
)


class Load(NamedTuple):
    """A function that reads big-endian units from a packet: (offset in the header, bytes) each."""

    units: tuple[tuple[int, int], ...]


class Store(NamedTuple):
    """A function that writes big-endian units of these bytes into a packet, one after the other."""

    units: tuple[int, ...]


class HashOf(NamedTuple):
    """A function that hashes numbers of these widths, packed without gaps."""

    algorithm: str
    widths: tuple[int, ...]


Helper = Load | Store | HashOf


class Helpers:
    """The small functions that a text needs, each made once."""

    def __init__(self) -> None:
        self.names: dict[Helper, str] = {}

    def name(self, helper: Helper) -> str:
        """Return the name of a helper, asking for it to be made."""
        if helper not in self.names:
            kind = {Load: "load", Store: "store", HashOf: "hash"}[type(helper)]
            self.names[helper] = f"{kind}_{sum(type(other) is type(helper) for other in self.names)}"
        return self.names[helper]


class Names:
    """One variable for each field and each validity bit."""

    def __init__(self) -> None:
        self._names: dict[Variable, str] = {}
        self._taken: set[str] = set(RESERVED)

    def __call__(self, variable: Variable) -> str:
        """Return the variable's name."""
        if variable not in self._names:
            self._names[variable] = self._unique(variable)
        return self._names[variable]

    def give(self, variable: Variable, name: str) -> None:
        """Let a variable have the name of a parameter."""
        self._names[variable] = name

    def _unique(self, variable: Variable) -> str:
        if isinstance(variable, Valid):
            text = f"valid_{variable.header}"
        elif variable.header == "scalars":
            text = variable.name
        else:
            text = f"{variable.header}_{variable.name}"
        text = re.sub(r"\W", "_", text.replace("metadata_t.", "meta_"))
        if not text[0].isalpha() or keyword.iskeyword(text) or re.fullmatch(r"[A-Z]\d+|[a-z]\d*", text):
            text = f"v_{text}"
        name, count = text, 1
        while name in self._taken:
            count += 1
            name = f"{text}_{count}"
        self._taken.add(name)
        return name


class Writer:
    """Collects indented lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1

    def __call__(self, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * self._depth + line)
        if len(self.lines) > MAX_LINES:
            raise UnsupportedFeature(f"programs that need more than {MAX_LINES} lines of generated text", "control")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add ``head`` and indent what follows; an empty block becomes ``pass``."""
        self(head)
        start = len(self.lines)
        self._depth += 1
        yield
        if len(self.lines) == start:
            self("pass")
        self._depth -= 1

    def mark(self) -> int:
        """Return a position for `since`."""
        return len(self.lines)

    def since(self, mark: int) -> list[str]:
        """Take back the lines after ``mark``."""
        taken = self.lines[mark:]
        del self.lines[mark:]
        return taken

    def indented(self, lines: list[str]) -> None:
        """Add lines that were taken back, one level deeper."""
        self.lines += [f"    {line}" for line in lines]

    def branch(self, condition: str, then: list[str], otherwise: list[str]) -> None:
        """Add an if with two bodies that were taken back, leaving out what is empty."""
        condition = bare(condition)
        if condition in ("True", "False"):
            self.lines += then if condition == "True" else otherwise
        elif then:
            self(f"if {condition}:")
            self.indented(then)
            if otherwise:
                self("else:")
                self.indented(otherwise)
        elif otherwise:
            self(f"if {negated(condition)}:")
            self.indented(otherwise)


def bare(text: str) -> str:
    """Return an expression without the parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def negated(condition: str) -> str:
    """Return the opposite of a condition."""
    if re.fullmatch(r"not \w+", condition):
        return condition[4:]
    return f"not {condition}" if re.fullmatch(r"\w+", condition) else f"not ({condition})"


def at(base: str, offset: int) -> str:
    """Return ``base + offset`` as text; ``base`` is empty for zero."""
    if not base:
        return str(offset)
    return f"{base} + {offset}" if offset else base
