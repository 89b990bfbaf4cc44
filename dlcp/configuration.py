# SPDX-License-Identifier: Apache-2.0
"""Read options from arguments, the environment (``DLCP_*``), a file, and the defaults, in this order of precedence.

The file is the one that ``DLCP_CONFIG`` names, else ``dlcp.toml`` in the working directory, if it exists. It is TOML,
with one line for each option: ``loss_bound = 0.05``.

The allowed values of an option are declared with its field, as ``Annotated[float, Range(0, 1)]`` or
``Annotated[str, HostPort()]``. :func:`check` validates an instance. :func:`settings` and :func:`parse` validate text,
and their errors name the variable, file or flag.
"""

import contextlib
import functools
import importlib
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

PREFIX: Final = "DLCP_"
FILE_VARIABLE: Final = "DLCP_CONFIG"
DEFAULT_FILE: Final = "dlcp.toml"
DEFAULT_ORIGIN: Final = "default"

_Options = TypeVar("_Options")
_Simple = bool | int | float | str
_TRUTHS: Final = {"1": True, "true": True, "0": False, "false": False}
_EXPECTED: Final = {bool: "1 or 0", int: "int", float: "float", str: "str"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: its value, and its origin (``default``, the name of a variable or file, or ``argument``)."""

    name: str
    value: object
    origin: str

    @property
    def is_default(self) -> bool:
        """Whether the value is the default."""
        return self.origin == DEFAULT_ORIGIN


@dataclass(frozen=True, slots=True)
class Range:
    """The range of an option's numbers. NaN is in no range.

    Parameters
    ----------
    least, most
        The bounds, inclusive by default.
    above, below
        Exclude ``least``, or ``most``.
    infinite
        Also allow infinity.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    infinite: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return False
        if self.infinite and value == math.inf:
            return True
        number = cast(float, value)  # not converted: an int may be larger than any float
        least = number > self.least if self.above else number >= self.least
        return least and (number < self.most if self.below else number <= self.most)

    def __str__(self) -> str:
        if isinstance(self.least, int) and isinstance(self.most, int) and not (self.above or self.below):
            return f"{self.least}..{self.most}"
        text = f"{'(' if self.above else '['}{_number(self.least)}, {_number(self.most)}{')' if self.below else ']'}"
        return text + (" or be inf" if self.infinite else "")

    def check(self, name: str, value: object) -> None:
        """Raise ValueError with the name if a value is not in the range."""
        if value not in self:
            raise ValueError(f"{name} must lie in {self}, got {short(value)}")


@dataclass(frozen=True, slots=True)
class HostPort:
    """An option's address: ``host:port``, or empty for none.

    Parameters
    ----------
    least_port
        Smallest port: 0 if the system may choose one.
    """

    least_port: int = 0

    def check(self, name: str, value: object) -> None:
        """Raise ValueError with the name if a value is not such an address."""
        if not isinstance(value, str):
            raise ValueError(f"{name} must be host:port, got {short(value)}")
        if value:
            try:
                host_and_port(value, None, self.least_port)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


_PORTS: Final = 1 << 16
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")


def host_and_port(text: str, default_port: int | None, least_port: int = 0) -> tuple[str, int]:
    """Return host and port of ``host:port``; without a port, ``default_port`` or 0.

    Raises
    ------
    ValueError
        The text is not such an address.
    """
    host, _, port = text.partition(":")
    if not _HOST.fullmatch(host) or (port and not (port.isascii() and port.isdecimal())):
        raise ValueError(f"expected host:port, got {short(text)}")
    # Check the length first: Python refuses to convert thousands of digits, with an error that does not help users.
    if port and (len(port) > len(str(_PORTS)) or not least_port <= int(port) < _PORTS):
        raise ValueError(f"expected host:port, got {short(text)}: ports are {least_port} to {_PORTS - 1}")
    return host, int(port) if port else default_port or 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of an option: a simple type, whether it may be None, and the allowed values."""

    type: type[_Simple]
    optional: bool
    allowed: Range | HostPort | None = None

    def check(self, name: str, value: object) -> None:
        """Raise ValueError with the name if a value is not allowed."""
        if self.allowed is None or (value is None and self.optional):
            return
        if self.type is int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise ValueError(f"{name} must be a whole number, got {short(value)}")
        if self.type is float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ValueError(f"{name} must be a number, got {short(value)}")
        self.allowed.check(name, value)


def simple_options(cls: type) -> dict[str, object]:
    """Return the names and defaults of a dataclass's fields that the environment and a file can set."""
    return {name: default for name, (_, default) in _declared(cls).items()}


def settings(
    cls: type, environment: Mapping[str, str] | None = None, arguments: Mapping[str, object] | None = None
) -> list[Setting]:
    """Return every simple option of a dataclass, with its value in force and its origin.

    Parameters
    ----------
    cls
        A dataclass, such as ``dlcp.torch.Options``.
    environment
        By default that of this process.
    arguments
        The caller's values, which take precedence over all others.

    Raises
    ------
    ValueError
        A variable or a line of the file has an invalid value, the file has an unknown option, or it cannot be read; the
        message names the variable or the file.
    """
    environment = os.environ if environment is None else environment
    declared = _declared(cls)
    path = file_in_force(environment)
    from_file = _check_file(path, read_file(path), declared) if path else {}
    found = []
    for name, (kind, default) in declared.items():
        variable = PREFIX + name.upper()
        if arguments and name in arguments:
            kind.check(name, arguments[name])
            found.append(Setting(name, arguments[name], "argument"))
        elif variable in environment:
            found.append(Setting(name, _parse(variable, environment[variable], kind), variable))
        elif name in from_file:
            kind.check(f"{path}: {name}", from_file[name])
            found.append(Setting(name, from_file[name], str(path)))
        else:
            found.append(Setting(name, default, DEFAULT_ORIGIN))
    return found


def build(cls: type[_Options], environment: Mapping[str, str] | None = None) -> _Options:
    """Return an instance of a dataclass of options, with the values of the environment and the file.

    Raises
    ------
    ValueError
        See :func:`settings`; or the options contradict each other.
    """
    chosen = [setting for setting in settings(cls, environment) if not setting.is_default]
    try:
        return cls(**{setting.name: setting.value for setting in chosen})
    except ValueError as error:
        named = set(re.findall(r"\w+", str(error)))
        origins = dict.fromkeys(setting.origin for setting in chosen if setting.name in named)
        raise ValueError(f"{error} (set by {', '.join(origins)})" if origins else str(error)) from None


def check(options: object) -> None:
    """Validate an instance of a dataclass of options; for use in its ``__post_init__``.

    Raises
    ------
    ValueError
        A value is not allowed; the message names the field.
    """
    for name, kind in _allowed(cast(Hashable, type(options))).items():
        kind.check(name, getattr(options, name))


def parse(cls: type, name: str, text: str, where: str) -> Any:
    """Parse the value of an option.

    Parameters
    ----------
    cls, name
        A dataclass of options, and the option's name.
    where
        The origin of the text, such as ``--job``; errors begin with it.

    Raises
    ------
    ValueError
        The text has the wrong type, or the value is not allowed.
    """
    return _parse(where, text, _declared(cls)[name][0])


def file_in_force(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the options file in force; None if there is none.

    Raises
    ------
    ValueError
        ``DLCP_CONFIG`` names a file that does not exist.
    """
    environment = os.environ if environment is None else environment
    named = environment.get(FILE_VARIABLE, "")
    path = Path(named or DEFAULT_FILE)
    if path.is_file():
        return path
    if named:
        raise ValueError(f"{FILE_VARIABLE} names {named}, which does not exist; correct or unset it")
    return None


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises
    ------
    ValueError
        It is not TOML, cannot be read, or this Python cannot read TOML.
    """
    toml = _toml_reader()
    if toml is None:
        raise ValueError(
            f"{path}: Python 3.10 reads TOML only with the package tomli: pip install tomli, "
            f"or set the options as {PREFIX}* variables and remove the file"
        )
    try:
        held: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return held


def _toml_reader() -> Any:
    """Return the module that reads TOML: ``tomllib``, or ``tomli`` before Python 3.11; None without either."""
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _declared(cls: type) -> dict[str, tuple[_Kind, object]]:
    """Return the kind and default of each simple option, by name."""
    kinds = _kinds(cls)
    return {
        entry.name: (kinds[entry.name], entry.default)
        for entry in fields(cls)
        if entry.name in kinds and entry.default is not MISSING
    }


def _kinds(cls: type) -> dict[str, _Kind]:
    """Return the kinds of a dataclass's fields of simple types, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {entry.name: kind for entry in fields(cls) if (kind := _kind_of(hints[entry.name]))}


@functools.cache
def _allowed(cls: Hashable) -> dict[str, _Kind]:
    """Return the kinds of a dataclass's fields that declare allowed values, by name."""
    return {name: kind for name, kind in _kinds(cast(type, cls)).items() if kind.allowed is not None}


def _kind_of(hint: Any) -> _Kind | None:
    if typing.get_origin(hint) is typing.Annotated:
        bare, *marks = typing.get_args(hint)
        kind = _kind_of(bare)
        allowed = next((mark for mark in marks if isinstance(mark, Range | HostPort)), None)
        return kind and _Kind(kind.type, kind.optional, allowed)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        others = [part for part in typing.get_args(hint) if part is not types.NoneType]
        inner = _kind_of(others[0]) if len(others) == 1 else None
        return inner and _Kind(inner.type, optional=True, allowed=inner.allowed)
    return _Kind(hint, optional=False) if hint in _EXPECTED else None


def _parse(name: str, text: str, kind: _Kind) -> object:
    """Parse a variable's text."""
    if kind.optional and text.lower() in ("", "none"):
        return None
    try:
        if kind.type is bool:
            return _TRUTHS[text.lower()]
        value = int(text, 0) if kind.type is int else kind.type(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {_EXPECTED[kind.type]}, got {short(text)}") from None
    kind.check(name, value)
    return value


def _number(value: float) -> str:
    """Format a bound; whole numbers have all their digits."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 65 else f"{value:g}"


_SHOWN: Final = 60
"""Number of characters of a refused value that an error shows."""


def short(value: object) -> str:
    """Format a value for an error message: of a long one, only the beginning."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * _SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_file(path: Path, held: Mapping[str, Any], declared: Mapping[str, tuple[_Kind, object]]) -> dict[str, object]:
    """Validate a file's options, and convert ints to float where an option needs it."""
    found: dict[str, object] = {}
    for name, value in held.items():
        if name not in declared:
            from dlcp.suggestion import closest  # rarely needed

            raise ValueError(f"{path}: there is no option {name!r}{closest(name, declared)}")
        wanted = declared[name][0].type
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            expected = "true or false" if wanted is bool else _EXPECTED[wanted]
            raise ValueError(f"{path}: {name} must be {expected}, got {value!r}")
        found[name] = value
    return found
