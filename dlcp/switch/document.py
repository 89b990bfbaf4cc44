# SPDX-License-Identifier: Apache-2.0
"""JSON files that people write: read into dataclasses, with errors that say where to look."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dlcp.switch.errors import nearest

_T = TypeVar("_T")
Step = str | int
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_DECODER = json.JSONDecoder()


class DocumentError(ValueError):
    """A file that cannot be used; the message names the file, the line, the place in it, and what is wrong."""


class Document:
    """A JSON file as it was read.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    DocumentError
        It cannot be read or is no JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
            self.content: Any = json.loads(self.text)
        except OSError as error:
            raise DocumentError(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise DocumentError(f"{path}: this is no UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise DocumentError(f"{path}:{error.lineno}: {error.msg} (column {error.colno})") from None

    def convert(self, kind: type[_T]) -> _T:
        """Return the content as a dataclass.

        Raises
        ------
        DocumentError
            Unknown fields, missing fields, values of the wrong type or that the dataclass refuses.
        """
        self._refuse_unknown(self.content, kind, ())
        try:
            return msgspec.convert(self.content, kind, str_keys=True)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            steps: list[Step] = [name or int(index) for name, index in _STEP.findall(place.split("[...]")[0])]
            raise self.error(message, steps) from None

    def error(self, message: str, steps: Sequence[Step]) -> DocumentError:
        """Return an error about the place in the document that ``steps`` (names and indices) lead to."""
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
        return DocumentError(f"{self.path}:{self._line(steps)}: {place + ': ' if place else ''}{message}")

    def _line(self, steps: Sequence[Step]) -> int:
        """Return the line of a place, or of the last thing on the way there that exists."""
        position = _skip_space(self.text, 0)
        for step in steps:
            found = _enter(self.text, position, step)
            if found is None:
                break
            position = found
        return self.text.count("\n", 0, position) + 1

    def _refuse_unknown(self, value: Any, kind: Any, steps: tuple[Step, ...]) -> None:
        """Refuse fields that a dataclass has not got; msgspec would ignore them."""
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            hints = typing.get_type_hints(kind)
            for name, inner in value.items():
                if name not in hints:
                    raise self.error(f"there is no field {name!r}{nearest(name, hints)}", (*steps, name))
                self._refuse_unknown(inner, hints[name], (*steps, name))
            return
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            for alternative in arguments:
                self._refuse_unknown(value, alternative, steps)
        elif typing.get_origin(kind) in (tuple, list) and isinstance(value, list):
            for index, inner in enumerate(value):
                self._refuse_unknown(inner, arguments[0], (*steps, index))
        elif typing.get_origin(kind) is dict and isinstance(value, dict):
            for name, inner in value.items():
                self._refuse_unknown(inner, arguments[1], (*steps, name))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,:":
        position += 1
    return position


def _enter(text: str, position: int, step: Step) -> int | None:
    """Return where the value of the member ``step`` of what is at ``position`` begins; None when there is none."""
    if text[position] != ("[" if isinstance(step, int) else "{"):
        return None
    position = _skip_space(text, position + 1)
    index = 0
    while text[position] not in "]}":
        key: Step = index
        if isinstance(step, str):
            key, position = _DECODER.raw_decode(text, position)
            position = _skip_space(text, position)
        if key == step:
            return position
        position = _skip_space(text, _DECODER.raw_decode(text, position)[1])
        index += 1
    return None
