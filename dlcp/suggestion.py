# SPDX-License-Identifier: Apache-2.0
"""What somebody may have meant who wrote a name that there is not."""

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the one known name that looks most like ``name``; empty if none does."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the known names that look most like ``name``, else all there are."""
    names = list(known)
    short = {item.rpartition(".")[2]: item for item in names}
    found = [item for item in names if item in difflib.get_close_matches(name, names, 3)]
    found += [short[item] for item in difflib.get_close_matches(name.rpartition(".")[2], short, 3)]
    found = list(dict.fromkeys(found))[:3]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; it has {', '.join(names)}" if names else "; it has none"
