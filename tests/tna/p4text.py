# SPDX-License-Identifier: Apache-2.0
"""The declarations of P4 sources, read from their text, so that two programs can be compared."""

import re
from dataclasses import dataclass, field
from pathlib import Path

P4 = Path(__file__).parents[2] / "p4"

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
BLOCK = re.compile(r"^(control|parser) (\w+)\(", re.MULTILINE)
ACTION = re.compile(r"\baction (\w+)\(([^)]*)\)")
TABLE = re.compile(r"\btable (\w+) \{")
ARRAY = re.compile(
    r"\b(?:register|Register|counter|Counter|direct_meter|DirectMeter|action_selector|ActionSelector|ActionProfile)"
    r"(?:<[^;(]*>)?\([^;]*\) (\w+);"
)
HEADER = re.compile(r"^(?:header|struct) (\w+) \{", re.MULTILINE)
CONSTANT = re.compile(r"^(?:const [\w<>]+ |#define )(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """The keys (name and kind of match), the actions and the size of a table."""

    keys: frozenset[tuple[str, str]]
    actions: frozenset[str]
    size: str


@dataclass
class Sources:
    """All that the files of one folder declare, by name."""

    files: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    tables: dict[str, Table] = field(default_factory=dict)
    actions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    headers: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


def read(folder: str) -> Sources:
    """Read the P4 files of ``p4/<folder>``."""
    found = Sources()
    for path in sorted((P4 / folder).glob("*.p4")):
        text = COMMENT.sub("", path.read_text())
        found.files.add(path.name)
        found.blocks |= {name for _, name in BLOCK.findall(text)}
        found.actions |= {name: tuple(re.split(r",\s*", given)) for name, given in ACTION.findall(text)}
        found.tables |= {match[1]: _table(_braces(text, match.end() - 1)) for match in TABLE.finditer(text)}
        found.arrays |= set(ARRAY.findall(text))
        found.headers |= set(HEADER.findall(text))
        found.constants |= {name for name in CONSTANT.findall(text) if not name.endswith("_P4")}
        found.words |= set(re.findall(r"\w+", text))
    return found


def differences() -> dict[str, str]:
    """Return the rows of the table of differences in ``p4/tna/README.md``, by each name in their first column."""
    text = (P4 / "tna" / "README.md").read_text()
    rows = text.split("| v1model, and here |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def _table(body: str) -> Table:
    keys = re.search(r"key = (\{.*?\n?\s*\})", body, re.DOTALL)
    actions = re.search(r"actions = \{(.*?)\}", body, re.DOTALL)
    size = re.search(r"size = (\w+);", body)
    assert actions
    assert size
    matches = re.findall(r"([\w.()]+): (\w+)(?: @name\(\"(\w+)\"\))?;", keys[1] if keys else "")
    return Table(
        frozenset((name or expression, kind) for expression, kind, name in matches),
        frozenset(re.findall(r"\w+", re.sub(r"@\w+", "", actions[1]))),
        size[1],
    )


def _braces(text: str, start: int) -> str:
    """Return the block that opens at ``start``."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start : at + 1]
    raise AssertionError("a brace is not closed")
