# SPDX-License-Identifier: Apache-2.0
"""Read JSON files with bounds on the nesting of values and on the size of numbers.

This module imports only the standard library, because ``dlcp advise`` must work without a YAML package.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MOST_LEVELS: Final = 64
"""Deepest nesting of values. Hand-written files have fewer than 10 levels, and Python limits recursion."""
_INTEGER_BITS: Final = 64


class DocumentError(ValueError):
    """A file that cannot be used; the message names the file, the line, the field, and what is wrong."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    DocumentError
        It cannot be read, or is not JSON.
    """
    return parse_json(path, read_text(path), dict)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises
    ------
    DocumentError
        It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: this is not UTF-8 text") from None
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # the path contains a NUL
        raise DocumentError(f"{str(path)!r}: {error}") from None


def parse_json(path: Path, text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    """Return the content of JSON text. ``pairs`` builds objects from their items; ``path`` is for error messages.

    Raises
    ------
    DocumentError
        It is not JSON, or exceeds the bounds.
    """

    def refuse(word: str) -> None:
        raise DocumentError(f"{path}: {word} is not JSON; give a number")

    try:
        content = json.loads(text, object_pairs_hook=pairs, parse_float=real, parse_int=integer, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{path}:{error.lineno}: {error.msg} (column {error.colno})") from None
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from None
    except RecursionError:
        raise DocumentError(f"{path}: nested too deeply: at most {MOST_LEVELS} levels are allowed") from None
    if _levels(content) > MOST_LEVELS:
        raise DocumentError(f"{path}: nested too deeply: at most {MOST_LEVELS} levels are allowed")
    return content


def _levels(content: Any) -> int:
    """Return the nesting depth of dicts and lists, without recursion; a scalar has 0 levels."""
    levels, level = 0, [content]
    while level := [each for each in level if isinstance(each, dict | list)]:
        levels += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return levels


def integer(text: str) -> int:
    """Parse a whole number; raise ValueError if it has more than 64 bits."""
    if len(text) <= 2 * _INTEGER_BITS:
        value = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if abs(value) < 1 << _INTEGER_BITS:
            return value
    raise ValueError(f"a whole number may have at most {_INTEGER_BITS} bits; this one has {len(text)} characters")


def real(text: str) -> int | float:
    """Parse a number. ``1e9`` becomes an int, so that rates can be written without all their zeros."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    whole = "e" in text.lower() and value.is_integer() and abs(value) < 1 << _INTEGER_BITS
    return int(value) if whole else value
