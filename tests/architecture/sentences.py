# SPDX-License-Identifier: Apache-2.0
"""Draw sentences at random, to judge how plain they are: as many from docstrings, messages, comments and pages.

``python -m tests.architecture.sentences --seed 3 docs dlcp/wire``; without folders, from the whole project.
"""

import argparse
import ast
import inspect
import random
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KINDS = "docstring", "message", "comment", "page"
ALL = "dlcp", "controller", "sim", "p4", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md"
_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")
_WORD = re.compile(r"(?<![^\s(])[a-z]+(?![^\s,.:;)])")
_COMMENTS = {
    ".py": re.compile(r"(?:(?:^|(?<=  ))# .*\n?[ ]*)+", re.MULTILINE),
    ".p4": re.compile(r"(?:// .*\n?[ ]*)+"),
    ".c": re.compile(r"/\*.*?\*/", re.DOTALL),
}
_COMMENTS[".h"] = _COMMENTS[".c"]
_NO_PROSE = re.compile(r"(?ms)```.*?```|<!--.*?-->|^\|[-| :]*\|$")


class Sentence(NamedTuple):
    """A sentence, and the line where its paragraph or string begins."""

    kind: str
    path: str
    line: int
    text: str


def sentences(paths: Iterable[str] = ALL) -> list[Sentence]:
    """Return the sentences of four words or more in ``paths``, which are folders or files."""
    files = [file for path in paths for file in (ROOT / path, *sorted((ROOT / path).rglob("*"))) if file.is_file()]
    return [
        Sentence(kind, file.relative_to(ROOT).as_posix(), line, " ".join(text.split()))
        for file in files
        if file.suffix in _PARAGRAPHS
        for kind, line, paragraph in _PARAGRAPHS[file.suffix](file.read_text())
        for text in _END.split(paragraph)
        if len(_WORD.findall(text)) >= 4
    ]


def draw(pool: list[Sentence], seed: int, count: int = 60) -> list[Sentence]:
    """Return ``count`` sentences, equally many of each kind; fewer if a kind has too few."""
    mixed, each = random.Random(seed).sample(pool, len(pool)), count // len(KINDS)
    return [drawn for kind in KINDS for drawn in [sentence for sentence in mixed if sentence.kind == kind][:each]]


def _python(source: str) -> Iterator[tuple[str, int, str]]:
    seen: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            seen.add(node.value)  # below, headings and the names of parameters are left out
            text = re.sub(r"(?m)^\S.*\n-+$|^\S.*(?=\n    )", "", inspect.cleandoc(node.value.value))
            yield from (("docstring", node.lineno, part) for part in re.split(r"\n\s*\n|\n\s*(?=[-*] )", text))
        elif isinstance(node, ast.JoinedStr | ast.Constant) and node not in seen:
            seen.update(ast.walk(node))
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            yield "message", node.lineno, text


def _comments(suffix: str, source: str) -> Iterator[tuple[str, int, str]]:
    for match in _COMMENTS[suffix].finditer(source):
        text = re.sub(r"(?m)^\s*(?:#|//|/?\*+) ?|type: ignore\S* #|noqa: \S+ +#|\*/|-{4,}", "", match[0])
        yield "comment", source.count("\n", 0, match.start()) + 1, text


def _python_with_comments(source: str) -> Iterator[tuple[str, int, str]]:
    yield from _python(source)
    yield from _comments(".py", source)


def _markdown(source: str) -> Iterator[tuple[str, int, str]]:
    text = _NO_PROSE.sub(lambda match: "\n" * match[0].count("\n"), source)  # lines keep their numbers
    for match in re.finditer(r"[^\s|].*?(?=\n\s*\n|\n\s*(?:[-*]|\d+\.) | \||\n#|\Z)", text, re.DOTALL):
        yield "page", text.count("\n", 0, match.start()) + 1, match[0]


_PARAGRAPHS = {".py": _python_with_comments, ".md": _markdown}
_PARAGRAPHS |= {suffix: partial(_comments, suffix) for suffix in (".c", ".h", ".p4")}
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("paths", nargs="*", default=ALL)
    options = parser.parse_args()
    for _, path, line, text in draw(sentences(options.paths), options.seed):
        print(f"{path}:{line}: {text}")
