# SPDX-License-Identifier: Apache-2.0
"""Parts of error messages: the text of another error, suggestions for a mistyped name, and values in short form."""

import difflib
import traceback
from collections.abc import Iterable
from typing import Final


def describe(error: BaseException) -> str:
    """Return an error's message; if that is empty, its type and the line that raised it."""
    text = str(error)
    if text.strip():
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return repr(error)
    last = frames[-1]
    return f"{error!r} in {last.name} ({last.filename}, line {last.lineno})"


def closest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name most similar to ``name``; empty if none is similar."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with up to three similar names, else the list of all known names."""
    names = list(known)
    short = {item.rpartition(".")[2]: item for item in names}
    found = [item for item in names if item in difflib.get_close_matches(name, names, 3)]
    found += [short[item] for item in difflib.get_close_matches(name.rpartition(".")[2], short, 3)]
    found = list(dict.fromkeys(found))[:3]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; it has {', '.join(names)}" if names else "; it has none"


_SHOWN: Final = 60
"""Number of characters of a refused value that an error shows."""


def short(value: object) -> str:
    """Format a value for an error message: of a long one, only the beginning."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * _SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
