# SPDX-License-Identifier: Apache-2.0
"""Read YAML and JSON files, optionally as dataclasses or structs; errors name the line and the field.

Plain scalars follow YAML 1.2: ``true`` and ``false`` are the only booleans, ``1e9`` is a number, and ``no``, ``12:30``
and ``02:00:00:00:00:01`` are text. A value then means the same in YAML as in JSON.

The time and memory to read a file are bounded by its length: its nesting and the expansion of its aliases are limited.
"""

import copy
import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import yaml

from dlcp.inputs.error_text import nearest
from dlcp.inputs.foreign_formats import foreign_format

_T = TypeVar("_T")
Step = str | int
Steps = tuple[Step, ...]
"""Names and indices that lead from a document to a part of it."""
MOST_LEVELS: Final = 64
"""Deepest nesting of values. Hand-written files have fewer than 10 levels, and Python limits recursion."""
MOST_REPEATED: Final = 100_000
"""Most values that all aliases of a file may expand to. A fabric of a thousand hosts has about ten thousand values."""
_INTEGER_BITS: Final = 64
_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = {
    "null": r"~|null|",
    "bool": r"true|false",
    "int": r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}
"""The YAML types of plain scalars, as in YAML 1.2 but with underscores in numbers; anything else is text."""

_TOO_DEEP: Final = f"nested too deeply: at most {MOST_LEVELS} levels are allowed"


class DocumentError(ValueError):
    """A file that cannot be used; the message names the file, the line, the field, and what is wrong."""


class PlaceError(ValueError):
    """A dataclass refuses its values. If it is read from a file, the error names the line of the wrong value.

    Parameters
    ----------
    message
        What is wrong, and what would be valid.
    steps
        Names and indices that lead from the dataclass to the wrong value.
    """

    def __init__(self, message: str, *steps: Step) -> None:
        super().__init__(message)
        self.steps = steps


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    DocumentError
        It cannot be read, or is not JSON.
    """
    return _parse_json(path, _read_text(path))[0]


class Document:
    """The content of a YAML or JSON file.

    Parameters
    ----------
    path
        The file. If its name ends in ``.json``, it must be JSON.

    Attributes
    ----------
    content
        Dicts with str keys, lists, strings, numbers, booleans and None.

    Raises
    ------
    DocumentError
        It cannot be read, is neither YAML nor JSON, or has a key twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = _read_text(path)
        self._lines: dict[Steps, int] = {}
        self.content: Any = None
        try:
            repeated = True
            if path.suffix == ".json":
                self.content, repeated = _parse_json(path, self._text)
            if repeated:
                self.content = self._yaml()  # for a JSON file with a repeated key: this error names both lines
        except DocumentError:
            self._refuse_foreign()
            raise

    def _refuse_foreign(self) -> None:
        """Raise DocumentError if the file is another tool's."""
        if sentence := foreign_format(self._text.encode(errors="replace"), self.content):
            raise DocumentError(f"{self.path}: {sentence}")

    def convert(self, kind: type[_T], *, content: Any = None, origin_of: Callable[[Steps], Steps] = tuple) -> _T:
        """Return the content as a dataclass or a `msgspec.Struct`.

        Parameters
        ----------
        content
            Converted instead of the file's whole content.
        origin_of
            Maps the steps to a part of ``content`` to those of its place in the file, which errors name.

        Raises
        ------
        DocumentError
            A field is unknown or missing, a value has the wrong type, or the record refuses it.
        """
        try:
            return converted(self.content if content is None else content, kind)
        except PlaceError as error:
            if content is None:
                self._refuse_foreign()
            raise self.error(str(error), origin_of(error.steps)) from None

    def error(self, message: str, steps: Sequence[Step]) -> DocumentError:
        """Return an error about the value that ``steps`` (names and indices) lead to."""
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
        return DocumentError(f"{self.path}:{self.line(steps)}: {place + ': ' if place else ''}{message}")

    def line(self, steps: Sequence[Step]) -> int:
        """Return the line, from 1, of the value that ``steps`` lead to, or of its last existing ancestor."""
        if not self._lines:
            self._yaml()  # the json module reads JSON much faster, but without lines
        known = (tuple(steps[:depth]) for depth in range(len(steps), -1, -1))
        return next((self._lines[each] for each in known if each in self._lines), 1)

    def _yaml(self) -> Any:
        """Return the content, and note the line of each value."""
        # YAML allows tabs as white space in some places only; JSON allows them everywhere.
        text = self._text.replace("\t", " ") if self.path.suffix == ".json" else self._text
        # PyYAML may have been built without libyaml.
        events: Iterator[Any] = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        try:
            _, first = next(events), next(events)
            if isinstance(first, yaml.StreamEndEvent):
                return None
            content = _YamlBuilder(self, events, self._lines).value(next(events), ())
            _, last = next(events), next(events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.path}:{mark.line + 1}" if mark else str(self.path)
            column = f" (column {mark.column + 1})" if mark else ""
            raise DocumentError(f"{where}: {', '.join(filter(None, (error.context, error.problem)))}{column}") from None
        except yaml.YAMLError as error:
            raise DocumentError(f"{self.path}: {error}") from None
        if not isinstance(last, yaml.StreamEndEvent):
            raise DocumentError(f"{self.path}:{last.start_mark.line + 1}: a second document begins; give one per file")
        return content


class _YamlBuilder:
    """Builds a document's content from the events of PyYAML's parser, which come in the order of the text."""

    def __init__(self, document: Document, events: Iterator[Any], lines: dict[Steps, int]) -> None:
        self._document, self._events, self._lines = document, events, lines
        self._anchors: dict[str, list[Any]] = {}
        """The value of each anchor, in a list that is empty until the value is complete."""
        self._repeated = 0

    def value(self, event: Any, steps: Steps) -> Any:
        """Return the value that begins with an event, and note its line."""
        self._lines.setdefault(steps, event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, steps)
        anchored: list[Any] = []
        if event.anchor is not None:
            self._anchors[event.anchor] = anchored
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, steps)
        else:
            self._check_levels(len(steps) + 1, steps)
            if isinstance(event, yaml.SequenceStartEvent):
                value = [self.value(item, (*steps, index)) for index, item in enumerate(self._members())]
            else:
                value = self._mapping(steps)
        anchored.append(value)
        return value

    def _members(self) -> Iterator[Any]:
        """Yield the first event of each member of a collection."""
        while not isinstance(event := next(self._events), yaml.CollectionEndEvent):
            yield event

    def _mapping(self, steps: Steps) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key in self._members():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarEvent):
                raise DocumentError(f"{self._document.path}:{line}: a key must be a word or a number")
            inner = (*steps, key.value)
            if key.value in content:
                raise self._document.error(f"{key.value!r} is given twice, here and on line {line}", inner)
            self._lines.setdefault(inner, line)
            content[key.value] = self.value(next(self._events), inner)
        return content

    def _alias(self, event: Any, steps: Steps) -> Any:
        """Return a copy of an anchor's value."""
        anchored = self._anchors.get(event.anchor)
        if not anchored:
            known = anchored is not None
            raise self._document.error(
                "this contains itself" if known else f"there is no anchor &{event.anchor}", steps
            )
        levels, values = _extent(anchored[0])
        self._check_levels(len(steps) + levels, steps)
        self._repeated += values
        if self._repeated > MOST_REPEATED:
            more = f"aliases stand for more than {MOST_REPEATED:,} values; write them out"
            raise DocumentError(f"{self._document.path}:{self._lines[steps]}: {more}")
        return copy.deepcopy(anchored[0])

    def _check_levels(self, levels: int, steps: Steps) -> None:
        if levels > MOST_LEVELS:
            raise DocumentError(f"{self._document.path}:{self._lines[steps]}: {_TOO_DEEP}")

    def _scalar(self, event: yaml.ScalarEvent, steps: Steps) -> Any:
        text, kind = event.value, (event.tag or "").removeprefix(_TAG)
        if not kind:
            plain = (name for name, pattern in _PLAIN.items() if event.implicit[0] and re.fullmatch(pattern, text))
            kind = next(plain, "str")
        try:
            match kind:
                case "str" | "!":
                    return text
                case "null":
                    return None
                case "bool":
                    return text == "true"
                case "int":
                    return _integer(text)
                case "float":
                    return _real(text)
        except ValueError as error:
            raise self._document.error(str(error), steps) from None
        raise self._document.error(f"a value tagged {event.tag} is not supported", steps)


# Text and numbers -----------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    """Return the text of a file, or raise DocumentError."""
    raw = b""
    try:
        raw = path.read_bytes()
        return raw.decode()
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: {foreign_format(raw) or 'this is not UTF-8 text'}") from None
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # the path contains a NUL
        raise DocumentError(f"{str(path)!r}: {error}") from None


def _parse_json(path: Path, text: str) -> tuple[Any, bool]:
    """Return the content of JSON text, and whether an object has a key twice; or raise DocumentError."""
    repeated = False

    def build(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        content = dict(items)
        repeated |= len(content) < len(items)
        return content

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON; give a number")

    try:
        content = json.loads(
            text, object_pairs_hook=build, parse_float=_real, parse_int=_integer, parse_constant=refuse
        )
        if _extent(content)[0] > MOST_LEVELS:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise DocumentError(f"{path}:{error.lineno}: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DocumentError(f"{path}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from None
    return content, repeated


def _extent(content: Any) -> tuple[int, int]:
    """Return the levels of dicts and lists in some content (0 for a scalar), and its number of values."""
    levels, values, level = 0, 1, [content]
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        levels, values = levels + 1, values + len(level)
    return levels, values


def _integer(text: str) -> int:
    """Parse a whole number; raise ValueError if it has more than 64 bits."""
    if len(text) <= 2 * _INTEGER_BITS:
        value = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if abs(value) < 1 << _INTEGER_BITS:
            return value
    raise ValueError(f"a whole number may have at most {_INTEGER_BITS} bits; this one has {len(text)} characters")


def _real(text: str) -> int | float:
    """Parse a number. ``1e9`` becomes an int, so that rates can be written without all their zeros."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    whole = "e" in text.lower() and value.is_integer() and abs(value) < 1 << _INTEGER_BITS
    return int(value) if whole else value


# Records --------------------------------------------------------------------------------------------------------------


def converted(value: Any, kind: type[_T]) -> _T:
    """Return plain values as a dataclass or a `msgspec.Struct`.

    Raises
    ------
    PlaceError
        A field is unknown or missing, a value has the wrong type, or the record refuses it; ``steps`` lead to it.
    """
    found: _T = _convert(value, kind, ())
    return found


def _convert(value: Any, kind: Any, steps: Steps) -> Any:
    """Return a value as a type, or raise PlaceError.

    msgspec converts, but names no place within a dict, ignores unknown fields of dataclasses, and suggests nothing. So
    each part is converted before the whole: the first one that fails is at fault.
    """
    form = _alternative(value, kind, steps)
    arguments, fields = typing.get_args(form), _fields(form)
    origin = typing.get_origin(form) or form
    if origin is Literal and isinstance(value, str | int) and value not in arguments:
        known = nearest(str(value), map(str, arguments))
        raise PlaceError(f"there is no {steps[-1] if steps else 'choice'} {value!r}{known}", *steps)
    if origin in (tuple, list) and isinstance(value, list) and (origin is list or arguments[-1] is ...):
        for index, inner in enumerate(value):
            _convert(inner, arguments[0], (*steps, index))
    elif origin is dict and isinstance(value, dict):
        for name, inner in value.items():
            _convert(inner, arguments[1], (*steps, name))
            _converted({name: None}, dict[arguments[0], Any], (*steps, name))  # type: ignore[valid-type]
    elif fields is not None and isinstance(value, dict):
        for name, inner in value.items():
            if name not in fields:
                raise PlaceError(f"there is no field {name!r}{nearest(name, fields)}", *steps, name)
            _convert(inner, fields[name], (*steps, name))
    return _converted(value, kind, steps)


def _converted(value: Any, kind: Any, steps: Steps) -> Any:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        inner = error.__cause__.steps if isinstance(error.__cause__, PlaceError) else ()
        raise PlaceError(refusal(error, value), *steps, *inner) from None


_NAMES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "fields with values",
    "null": "nothing",
}
"""Names of types for users, by msgspec's."""
_COMPARED: Final = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}


def refusal(error: msgspec.ValidationError, value: Any) -> str:
    """Return msgspec's reason for refusing a value in words for users; a record's own reason stays as it is."""
    reason = str(error).partition(" - at `")[0]
    got = "" if isinstance(value, dict | list) else f", got {_shown(value)}"
    if found := re.fullmatch(r"Expected `([a-z |]+)`(?:, got `(\w+)`)?", reason):
        names = [_NAMES.get(name, name) for name in found[1].split(" | ") if name != "null"]
        return f"expected {' or '.join(names)}{got or f', got {_NAMES.get(found[2], found[2])}'}"
    if found := re.fullmatch(r"Expected `\w+` (<=?|>=?) (\S+)", reason):
        limit = float(found[2])
        return f"must be {_COMPARED[found[1]]} {f'{limit:,.0f}' if limit.is_integer() else f'{limit:g}'}{got}"
    if found := re.fullmatch(r"Expected `\w+` of length (<=|>=|) ?(\d+)(?:, got \d+)?", reason):
        length = f", got {len(value)}" if isinstance(value, list | str | dict) else ""
        return f"needs {_COMPARED.get(found[1], 'exactly')} {int(found[2]):,} entries{length}"
    if found := re.fullmatch(r"Expected `str` matching regex '(.*)'", reason):
        return f"does not match {found[1]}{got}"
    if found := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        return f"{found[1]} is missing"
    return reason


def _shown(value: Any) -> str:
    """Return a value as in YAML, shortened."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _alternative(value: Any, kind: Any, steps: Steps) -> Any:
    """Return a type without annotations; of a union, the alternative that fits the value's form, if any."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    kinds = [_alternative(value, each, steps) for each in typing.get_args(kind)]
    if isinstance(value, dict):
        tagged = {_tag(each): each for each in kinds if _tag(each)}
        if tagged:
            name = str(value.get("kind") or "")
            if name not in tagged:
                problem = f"there is no kind {name!r}" if name else "kind is missing"
                raise PlaceError(problem + nearest(name, tagged), *steps, *(["kind"] if name else []))
            return tagged[name]
        return next((each for each in kinds if _fields(each) is not None), kind)
    origins: tuple[Any, ...] = (tuple, list) if isinstance(value, list) else (Literal,)
    return next((each for each in kinds if typing.get_origin(each) in origins), kind)


def _tag(kind: Any) -> str:
    """Return the value of ``kind`` that stands for a tagged struct; empty if it is none."""
    return str(kind.__struct_config__.tag or "") if hasattr(kind, "__struct_config__") else ""


@functools.cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """Return the types of a record's fields by name, its tag among them; None if ``kind`` is not a record."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__struct_fields__"):
        names = list(kind.__struct_fields__)
    else:
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in names} | ({"kind": str} if _tag(kind) else {})
