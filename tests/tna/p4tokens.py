# SPDX-License-Identifier: Apache-2.0
"""Splits P4 into tokens, with included files, and with macros replaced."""

import re
from pathlib import Path
from typing import NamedTuple

TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)|(?P<number>\d+[ws](?:0x[0-9a-fA-F]+|\d+)|0x[0-9a-fA-F]+|\d+)"
    r'|(?P<word>[A-Za-z_]\w*)|(?P<text>"[^"]*")|(?P<mark>&&&|\+\+|\|-\||\|\+\||==|!=|<=|>=|<<|&&|\|\||[-+*/%&|^~!<>=(){}\[\].,;:@?])',
    re.DOTALL,
)


class P4Error(ValueError):
    """P4 that is not known here."""


class Token(NamedTuple):
    kind: str
    text: str
    where: str


def tokens_of(path: Path, macros: dict[str, list[Token]], seen: set[Path]) -> list[Token]:
    """Return the tokens of a file and of the files that it includes, each once, with macros replaced."""
    if path in seen:
        return []
    seen.add(path)
    found: list[Token] = []
    for number, line in enumerate(path.read_text().replace("\\\n", " ").splitlines(), 1):
        directive = line.split()
        where = f"{path.name}:{number}"
        if not line.startswith("#"):
            for token in _split(line, where):
                found += macros.get(token.text, [token])
        elif directive[0] == "#include":
            if directive[1].startswith('"'):
                found += tokens_of((path.parent / directive[1].strip('"')).resolve(), macros, seen)
        elif directive[0] == "#define" and len(directive) > 2 and "(" not in directive[1]:
            macros[directive[1]] = _split(" ".join(directive[2:]).split("//")[0], where)
    return found


def _split(line: str, where: str) -> list[Token]:
    at, found = 0, []
    while at < len(line):
        match = TOKEN.match(line, at)
        if not match or match.lastgroup is None:
            raise P4Error(f"{where}: {line[at:]!r}")
        if match.lastgroup != "space":
            found.append(Token(match.lastgroup, match[0], where))
        at = match.end()
    return found
