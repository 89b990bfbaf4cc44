# SPDX-License-Identifier: Apache-2.0
"""Read hand-written YAML and JSON files into dataclasses, with errors that name the line.

Plain scalars follow YAML 1.2: ``true`` and ``false`` are the only booleans, ``1e9`` is a number, and ``no``, ``12:30``
and ``02:00:00:00:00:01`` are text. A value then means the same in YAML as in JSON.

The time and memory to read a file are bounded by its length: its nesting and the expansion of its aliases are limited.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from dlcp.json_files import MOST_LEVELS, DocumentError, integer, parse_json, read_text, real
from dlcp.suggestion import nearest

__all__ = ["Document", "DocumentError", "PlaceError", "Step", "Steps"]
_T = TypeVar("_T")
Step = str | int
Steps = tuple[Step, ...]
"""Names and indices that lead from a document to a part of it."""
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]")
_TAG: Final = "tag:yaml.org,2002:"
MOST_REPEATED: Final = 100_000
"""Most values that all aliases of a file may expand to. A fabric of a thousand hosts has about ten thousand values."""


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
        self._root: yaml.Node | None = None
        self.text = read_text(path)
        self.content: Any = self._json() if path.suffix == ".json" else self._build(self._compose(), ())

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
        return _Conversion(self, origin_of).convert(self.content if content is None else content, kind)

    def error(self, message: str, steps: Sequence[Step]) -> DocumentError:
        """Return an error about the value that ``steps`` (names and indices) lead to."""
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
        return DocumentError(f"{self.path}:{self.line(steps)}: {place + ': ' if place else ''}{message}")

    def line(self, steps: Sequence[Step]) -> int:
        """Return the line, from 1, of the value that ``steps`` lead to, or of its last existing ancestor."""
        node = self._root or self._compose()
        number: int = node.start_mark.line if node is not None else 0
        for step in steps:
            found = _enter(node, step)
            if found is None:
                break
            number, node = found
        return number + 1

    def _json(self) -> Any:
        """Return the content of JSON, by the json module, which is much faster; YAML nodes only locate errors."""
        repeated = []

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            content = dict(items)
            repeated.extend([content] if len(content) < len(items) else [])
            return content

        content = parse_json(self.path, self.text, pairs)
        return self._build(self._compose(), ()) if repeated else content

    def _compose(self) -> yaml.Node | None:
        """Return the root node of the file; nodes have line numbers."""
        # YAML allows tabs as white space in some places only; JSON allows them everywhere.
        text = self.text.replace("\t", " ") if self.path.suffix == ".json" else self.text
        try:
            self._check_size(text)
            self._root = yaml.compose(text, _Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.path}:{mark.line + 1}" if mark else str(self.path)
            column = f" (column {mark.column + 1})" if mark else ""
            raise DocumentError(f"{where}: {', '.join(filter(None, (error.context, error.problem)))}{column}") from None
        except yaml.YAMLError as error:
            raise DocumentError(f"{self.path}: {error}") from None
        return self._root

    def _check_size(self, text: str) -> None:
        """Refuse nesting and aliases beyond the bounds, before building objects.

        YAML's events arrive as a flat sequence. For each anchor, this method records the number of values that it
        stands for, and the number of their levels.
        """
        anchors: dict[str, tuple[int, int]] = {}
        above: list[tuple[str | None, int]] = []  # of each open collection: its anchor, and the count of values before
        deepest: list[int] = [0]
        values = repeated = 0
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                above.append((event.anchor, values))
                deepest.append(0)
                values += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = above.pop()
                levels = deepest.pop() + 1
                deepest[-1] = max(deepest[-1], levels)
                if anchor is not None:
                    anchors[anchor] = values - before, levels
            elif isinstance(event, yaml.ScalarEvent):
                values += 1
                if event.anchor is not None:
                    anchors[event.anchor] = 1, 0
            elif isinstance(event, yaml.AliasEvent):
                # An alias within its own anchor is not recorded yet; `_build` refuses it.
                more, levels = anchors.get(event.anchor or "", (1, 0))
                values, repeated = values + more, repeated + more
                deepest[-1] = max(deepest[-1], levels)
            line = event.start_mark.line + 1 if event.start_mark else 1
            if len(above) + deepest[-1] > MOST_LEVELS:
                raise DocumentError(f"{self.path}:{line}: nested too deeply: at most {MOST_LEVELS} levels are allowed")
            if repeated > MOST_REPEATED:
                raise DocumentError(
                    f"{self.path}:{line}: aliases stand for more than {MOST_REPEATED:,} values; write them out"
                )

    def _build(self, node: yaml.Node | None, steps: tuple[Step, ...], above: tuple[yaml.Node, ...] = ()) -> Any:
        """Return the value of a node."""
        if node is None:
            return None
        if node in above:
            raise self.error("this contains itself", steps)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, steps)
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item, (*steps, index), (*above, node)) for index, item in enumerate(node.value)]
        content: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise DocumentError(f"{self.path}:{key.start_mark.line + 1}: a key must be a word or a number")
            if key.value in content:
                line = key.start_mark.line + 1
                place = self.error(f"{key.value!r} is given twice, here and on line {line}", (*steps, key.value))
                raise place
            content[key.value] = self._build(value, (*steps, key.value), (*above, node))
        return content

    def _scalar(self, node: yaml.ScalarNode, steps: tuple[Step, ...]) -> Any:
        tag, text = node.tag.removeprefix(_TAG), node.value
        if tag == "str":
            return text
        if tag == "null":
            return None
        if tag == "bool":
            return text == "true"
        try:
            if tag == "int":
                return integer(text)
            if tag == "float":
                return real(text)
        except ValueError as error:
            raise self.error(str(error), steps) from None
        raise self.error(f"a value tagged {node.tag} is not supported", steps)


class _Conversion:
    """Converts content into records; its errors name the place of a wrong value."""

    def __init__(self, document: Document, origin_of: Callable[[Steps], Steps]) -> None:
        self._document, self._origin_of = document, origin_of

    def convert(self, content: Any, kind: type[_T]) -> _T:
        """Return content as a record, or raise DocumentError."""
        self._refuse_unknown(content, kind, ())
        try:
            return msgspec.convert(content, kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise self._refused(error, content, kind, ()) from None

    def _error(self, message: str, steps: Steps) -> DocumentError:
        return self._document.error(message, self._origin_of(steps))

    def _refused(self, error: msgspec.ValidationError, content: Any, kind: Any, steps: Steps) -> DocumentError:
        """Return the error for ``content``, at ``steps``, which cannot be converted to ``kind``."""
        message, _, place = str(error).partition(" - at `")
        key, _, place = place.partition("$")
        found, cut, _ = place.rstrip("`").partition("[...]")
        for name, index in _STEP.findall(found):
            step: Step = name or int(index)
            kind = _inner_kind(_kind_of(content, kind), step)
            content, steps = _inner(content, step), (*steps, step)
        kind = _kind_of(content, kind)
        arguments = typing.get_args(kind)
        if (cut or key) and isinstance(content, dict) and len(arguments) == 2:
            # msgspec does not say which member of a dict it refuses, so try each one alone.
            for name, value in content.items():
                try:
                    msgspec.convert({name: value}, kind, str_keys=True)
                except msgspec.ValidationError as refused:
                    return self._refused_member(refused, name, value, arguments, steps)
        if isinstance(error.__cause__, PlaceError):
            return self._error(message, (*steps, *error.__cause__.steps))
        return self._error(message, steps)

    def _refused_member(
        self, error: msgspec.ValidationError, name: str, value: Any, kinds: Sequence[Any], steps: Steps
    ) -> DocumentError:
        """Return the error for a member of a dict: for its value if msgspec refuses that, else for its name."""
        try:
            msgspec.convert(value, kinds[1], str_keys=True)
        except msgspec.ValidationError as refused:
            return self._refused(refused, value, kinds[1], (*steps, name))
        return self._error(str(error).partition(" - at `")[0], (*steps, name))

    def _refuse_unknown(self, value: Any, kind: Any, steps: Steps) -> None:
        """Refuse unknown fields and choices: msgspec ignores unknown fields, and makes no suggestions."""
        kind = _kind_of(value, kind)
        arguments = typing.get_args(kind)
        if isinstance(value, dict):
            self._refuse_unknown_fields(value, kind, steps)
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            tags = _tagged(arguments)
            if tags and isinstance(value, dict):
                name = value.get("kind")
                problem = f"there is no kind {name!r}" if name else "kind is missing"
                raise self._error(problem + nearest(str(name or ""), tags), (*steps, "kind") if name else steps)
            for alternative in arguments:
                self._refuse_unknown(value, alternative, steps)
        elif typing.get_origin(kind) is typing.Literal and isinstance(value, str) and value not in arguments:
            known = nearest(value, [str(word) for word in arguments])
            raise self._error(f"there is no {steps[-1] if steps else 'choice'} {value!r}{known}", steps)
        elif typing.get_origin(kind) in (tuple, list) and isinstance(value, list):
            for index, inner in enumerate(value):
                self._refuse_unknown(inner, arguments[0], (*steps, index))
        elif typing.get_origin(kind) is dict and isinstance(value, dict):
            for name, inner in value.items():
                self._refuse_unknown(inner, arguments[1], (*steps, name))

    def _refuse_unknown_fields(self, value: Mapping[str, Any], kind: Any, steps: Steps) -> None:
        hints = _fields(kind)
        if hints is None:
            return
        tag = kind.__struct_config__.tag_field if issubclass(kind, msgspec.Struct) else None
        for name, inner in value.items():
            if name == tag:
                continue
            if name not in hints:
                raise self._error(f"there is no field {name!r}{nearest(name, hints)}", (*steps, name))
            self._refuse_unknown(inner, hints[name], (*steps, name))


if typing.TYPE_CHECKING:
    _Fastest = yaml.SafeLoader
else:
    _Fastest = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may have been built without libyaml


class _Loader(_Fastest):
    """Resolves plain scalars as YAML 1.2 does, and accepts underscores in numbers."""


_Loader.yaml_implicit_resolvers = {}  # instead of the inherited ones of YAML 1.1
for _kind, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)


def _enter(node: yaml.Node | None, step: Step) -> tuple[int, yaml.Node] | None:
    """Return the line, from 0, and the node of a node's member ``step``; None if it has no such member."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item = node.value[step]
        return item.start_mark.line, item
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line, value
    return None


def _inner(content: Any, step: Step) -> Any:
    """Return a member of the content; None if it has no such member."""
    if isinstance(content, dict):
        return content.get(step)
    return content[step] if isinstance(content, list) and isinstance(step, int) and step < len(content) else None


def _fields(kind: Any) -> dict[str, Any] | None:
    """Return the types of a record's fields by name; None if ``kind`` is not a record."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        names = list(kind.__struct_fields__)
    else:
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in names}


def _tagged(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the tagged structs among some types, by tag."""
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return {str(kind.__struct_config__.tag): kind for kind in structs if kind.__struct_config__.tag is not None}


def _kind_of(value: Any, kind: Any) -> Any:
    """Return a type without annotations; for a union, the alternative that the value's tag names, if any."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and isinstance(value, dict):
        return _tagged(typing.get_args(kind)).get(str(value.get("kind")), kind)
    return kind


def _inner_kind(kind: Any, step: Step) -> Any:
    """Return the type of a member of a type; None if it cannot be determined."""
    fields = _fields(kind)
    if fields is not None:
        return fields.get(str(step))
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        known = [_inner_kind(alternative, step) for alternative in arguments]
        return next((found for found in known if found is not None), None)
    return arguments[0] if arguments and isinstance(step, int) else None
