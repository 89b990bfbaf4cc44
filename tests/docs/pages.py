# SPDX-License-Identifier: Apache-2.0
"""The pages that a user reads, and the code blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "dlcp", "controller", "sim", "p4")
_FENCE = re.compile(r"^(```+)([\w{}]*)[^\n]*\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block: its language, its text, and where it stands (``file:line``)."""

    language: str
    text: str
    place: str


def pages():
    """Return every page, of the site and of the repository."""
    return sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def blocks(*languages):
    """Return the code blocks of all pages, of some languages or of all."""
    found = []
    for page in pages():
        text = page.read_text()
        for fence in _FENCE.finditer(text):
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, fence.start()) + 1}"
            found.append(Block(fence[2], fence[3], place))
    return [block for block in found if not languages or block.language in languages]


def commands():
    """Return every command of a shell block, with where it stands."""
    lines = []
    for block in blocks("sh"):
        text = block.text.replace("\\\n", " ")
        lines += [(line, block.place) for line in text.splitlines() if line.strip()]
    return lines
