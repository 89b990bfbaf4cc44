# SPDX-License-Identifier: Apache-2.0
"""Options from arguments, the environment (``DLCP_*``), a file, and the defaults, in this order of precedence.

The file is the one that ``DLCP_CONFIG`` names, else ``dlcp.toml`` in the working directory, if it exists. It is TOML,
with one line for each option: ``loss_bound = 0.05``.

Each field declares its option completely: ``Annotated[float, Range(0, 1), Unit("s"), Trait.AGREED]``. Everything else
about an option follows from that (:class:`Option`). :func:`check` validates an instance. :func:`settings` and
:meth:`Option.parse` validate text, and their errors name the variable, file or flag.
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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, cast

from dlcp.inputs.addresses import parse_address
from dlcp.inputs.error_text import closest, short

PREFIX: Final = "DLCP_"
FILE_VARIABLE: Final = "DLCP_CONFIG"
SECRET_VARIABLE: Final = "DLCP_SECRET"
_INTERNAL: Final = ("DLCP_IN_", "DLCP_TRAIN_")
"""Prefixes of internal variables, which DLCP's processes set for each other."""
STORE_VARIABLE: Final = "DLCP_IN_LAUNCHERS_STORE"
"""Set if the launcher serves the ranks' store, and not rank 0."""
DEFAULT_FILE: Final = "dlcp.toml"
LOSS_BOUND: Final = 0.1
"""The default loss bound: it does not harm convergence (DLCP, arXiv 2008.08445)."""
DEFAULT_ORIGIN: Final = "default"
_DEFAULT, _FILE, _ENVIRONMENT, _ARGUMENT = range(4)
"""The layers of options, in ascending order of precedence."""

_Options = TypeVar("_Options")
_Simple = bool | int | float | str
_TRUTHS: Final = {"1": True, "true": True, "0": False, "false": False}
_EXPECTED: Final = {bool: "1 or 0", int: "int", float: "float", str: "str"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: its value, its origin (``default``, a variable, a file, or ``""`` for an argument), and its layer."""

    name: str
    value: object
    origin: str
    layer: int = _DEFAULT

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
                parse_address(value, 0, least_port=self.least_port)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class OneOf:
    """The words that an option may hold.

    Parameters
    ----------
    addressed
        One more word, which an address follows: ``server:host:port``.
    """

    words: tuple[str, ...]
    addressed: str = ""

    @property
    def shown(self) -> list[str]:
        """The words, for people."""
        return [*self.words, *([f"{self.addressed}:HOST:PORT"] if self.addressed else [])]

    def check(self, name: str, value: object) -> None:
        """Raise ValueError with the name if a value is none of them."""
        word, _, address = value.partition(":") if isinstance(value, str) else (value, "", "")
        if address and word == self.addressed:
            HostPort(least_port=1).check(name, address)
        elif value not in self.words:
            raise ValueError(f"{name} must be one of {', '.join(self.shown)}, got {short(value)}")


@dataclass(frozen=True, slots=True)
class ByPattern:
    """An option's number, and others for names that match patterns: ``0.1`` or ``0.1, embed*=0, head.*=0.01``.

    Parameters
    ----------
    range
        The range of all these numbers.
    """

    range: Range

    def parse(self, name: str, value: object) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Return the number of all other names, and pairs of a pattern and its number.

        Raises
        ------
        ValueError
            The value is not such a number or text; the message has the ``name`` and the entry.
        """
        if not isinstance(value, str):
            self.range.check(name, value)
            return float(cast(float, value)), ()
        found: list[tuple[str, float]] = []
        for entry in map(str.strip, value.split(",")):
            pattern, equals, number = entry.rpartition("=")
            pattern = pattern.strip()
            try:
                if bool(pattern) is not bool(found) or bool(pattern) is not bool(equals):
                    raise ValueError  # only the first has no pattern
                found.append((pattern, float(number)))
            except ValueError:
                raise ValueError(
                    f"{name} must be a number, or a number and then others by pattern, such as 0.1, embed*=0; "
                    f"got {short(entry)}"
                ) from None
            self.range.check(f"{name}: {pattern}" if pattern else name, found[-1][1])
        return found[0][1], tuple(found[1:])

    def check(self, name: str, value: object) -> None:
        """Raise ValueError with the name if a value is not such a number or text."""
        self.parse(name, value)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of an option's numbers."""

    name: str


class Means(NamedTuple):
    """Words of an option that set another option to a value instead."""

    words: tuple[str, ...]
    option: str
    value: str


class Trait(Enum):
    """Further properties of an option. The values describe them in the documentation."""

    AGREED = "the same on all ranks"
    SET_ALIKE = "set on all ranks or on none"
    WHOLE_STEP = (
        "not with `cross_step`, `LocalSGD`, FSDP2 or the backend `dlcp`, which exchange no step's gradients as a whole"
    )
    WITHOUT_TORCH = "only where ranks meet without PyTorch"
    OWN = "each rank's own"
    """A parameter server does not get it."""
    PROTECTS = "an empty value hides none that is set elsewhere"
    """Otherwise ranks could meet without the secret that their user has set."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option by a field of a dataclass.

    Attributes
    ----------
    default
        ``dataclasses.MISSING`` if there is none.
    allowed, unit, traits, means
        The allowed values, or None for any of the type; their unit or ``""``; further properties; and words for another
        option.
    """

    name: str
    type: type[_Simple]
    default: object
    allowed: Range | HostPort | OneOf | ByPattern | None
    unit: str
    traits: frozenset[Trait]
    means: Means | None

    def check(self, where: str, value: object) -> None:
        """Raise ValueError with ``where`` if a value is not allowed."""
        if self.allowed is None:
            return
        if isinstance(self.allowed, ByPattern):
            self.allowed.check(where, value)
            return
        if self.type is int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise ValueError(f"{where} must be a whole number, got {short(value)}")
        if self.type is float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ValueError(f"{where} must be a number, got {short(value)}")
        self.allowed.check(where, value)

    def is_hidden(self, value: object) -> bool:
        """Return whether a value leaves the choice to the environment, the file or the default."""
        return Trait.PROTECTS in self.traits and not value

    def parse(self, where: str, text: str) -> object:
        """Parse a variable's text; raise ValueError with ``where`` if it does not hold an allowed value."""
        try:
            if self.type is bool:
                return _TRUTHS[text.lower()]
            value = int(text, 0) if self.type is int else self.type(text)
        except (KeyError, ValueError):
            if isinstance(self.allowed, ByPattern):
                self.check(where, text)
                return text
            raise ValueError(f"{where} must be {_EXPECTED[self.type]}, got {short(text)}") from None
        self.check(where, value)
        return value

    def describe(self) -> str:
        """Return range, unit and traits in a line, for the documentation."""
        match self.allowed:
            case Range():
                allowed = f"in {self.allowed} {self.unit}".rstrip()
            case ByPattern(limits):
                allowed = f"in {limits} {self.unit}".rstrip() + ", and others by pattern: `0.1, embed*=0`"
            case OneOf():
                allowed = f"one of `{'`, `'.join(self.allowed.shown)}`"
            case HostPort():
                allowed = "`host:port`"
            case None:
                allowed = self.unit
        return "; ".join(filter(None, [allowed, *(trait.value for trait in Trait if trait in self.traits)]))


@functools.cache
def _fields_of(cls: Hashable) -> dict[str, Option]:
    """Return the fields of simple types of a dataclass, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    for entry in fields(cast(Any, cls)):
        kind, marks = _parts(hints[entry.name])
        if kind in _EXPECTED:
            allowed = next((mark for mark in marks if isinstance(mark, Range | HostPort | OneOf | ByPattern)), None)
            unit = next((mark.name for mark in marks if isinstance(mark, Unit)), "")
            traits = frozenset(mark for mark in marks if isinstance(mark, Trait))
            means = next((mark for mark in marks if isinstance(mark, Means)), None)
            found[entry.name] = Option(entry.name, kind, entry.default, allowed, unit, traits, means)
    return found


def _parts(hint: Any) -> tuple[Any, list[Any]]:
    """Return the bare type of a type hint (of a union, the first one) and its marks."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *marks = typing.get_args(hint)
        bare, more = _parts(inner)
        return bare, more + marks
    if typing.get_origin(hint) is types.UnionType:
        return _parts(typing.get_args(hint)[0])
    return hint, []


def options_of(cls: type) -> dict[str, Option]:
    """Return the options of a dataclass by name: the fields that the environment and a file can set."""
    return {name: each for name, each in _fields_of(cast(Hashable, cls)).items() if each.default is not MISSING}


def settings(
    cls: type, environment: Mapping[str, str] | None = None, arguments: Mapping[str, object] = MappingProxyType({})
) -> list[Setting]:
    """Return every simple option of a dataclass, with its value in force and its origin.

    Parameters
    ----------
    cls
        A dataclass, such as ``dlcp.torch.Options``.
    environment
        By default that of this process.
    arguments
        Values that count before all others.

    Raises
    ------
    ValueError
        A variable or a line of the file has an invalid value, there is no such variable or option, two contradict each
        other, or the file cannot be read; the message names the variable or the file.
    """
    environment = os.environ if environment is None else environment
    declared = options_of(cls)
    _check_variables(environment, declared)
    path = file_in_force(environment)
    from_file = _check_file(path, read_file(path), declared) if path else {}
    found = {}
    for name, option in declared.items():
        variable = PREFIX + name.upper()
        setting = Setting(name, option.default, DEFAULT_ORIGIN)
        if variable in environment and not option.is_hidden(environment[variable]):
            setting = Setting(name, option.parse(variable, environment[variable]), variable, _ENVIRONMENT)
        elif name in from_file:
            setting = Setting(name, from_file[name], str(path), _FILE)
            option.check(f"{path}: {name}", setting.value)
        if name in arguments and not option.is_hidden(arguments[name]):
            setting = Setting(name, arguments[name], "", _ARGUMENT)
        found[name] = setting
    for name, option in declared.items():
        if option.means and found[name].value in option.means.words:
            target = option.means.option
            found[target] = _by_meaning(found[name], option.means, found[target], declared[target].default)
            found[name] = Setting(name, option.default, DEFAULT_ORIGIN)
    return list(found.values())


def _by_meaning(word: Setting, means: Means, target: Setting, default: object) -> Setting:
    """Return the setting of the option that a word means; raise ValueError if the word's layer contradicts it."""
    if target.layer == word.layer and str(target.value) not in (means.value, default):
        with _naming_origins([word, target]):
            raise ValueError(
                f"{word.name} {word.value!r} means {target.name} {means.value}, which contradicts {target.name} "
                f"{target.value}: omit one of the two"
            )
    origin = word.origin or f"{word.name}={word.value!r}"
    return target if target.layer > word.layer else Setting(target.name, means.value, origin, word.layer)


@contextlib.contextmanager
def layered(options: object, arguments: Iterable[str]) -> Iterator[None]:
    """Fill in all fields that are not ``arguments`` from the environment and the file; for use in ``__post_init__``.

    The code within the context validates the result. To its errors, this adds where the options that they name were
    set.

    Raises
    ------
    ValueError
        See :func:`settings`.
    """
    found = settings(type(options), arguments={name: getattr(options, name) for name in arguments})
    for setting in found:
        object.__setattr__(options, setting.name, setting.value)
    with _naming_origins(found):
        yield


def build(cls: type[_Options], environment: Mapping[str, str]) -> _Options:
    """Return an instance of a dataclass of options, set by ``environment`` instead of this process's environment.

    Raises
    ------
    ValueError
        See :func:`settings`; or the options contradict each other.
    """
    found = settings(cls, environment)
    with _naming_origins(found):
        return cls(**{setting.name: setting.value for setting in found})


@contextlib.contextmanager
def _naming_origins(chosen: Sequence[Setting]) -> Iterator[None]:
    """Add to a ValueError where the options that it names were set."""
    try:
        yield
    except ValueError as error:
        named = set(re.findall(r"\w+", str(error)))
        origins = dict.fromkeys(
            each.origin for each in chosen if each.name in named and each.origin and not each.is_default
        )
        raise ValueError(f"{error} (set by {', '.join(origins)})" if origins else str(error)) from None


def check(options: object) -> None:
    """Validate an instance of a dataclass of options; for use in its ``__post_init__``.

    Raises
    ------
    ValueError
        A value is not allowed; the message names the field.
    """
    for name, option in _fields_of(cast(Hashable, type(options))).items():
        option.check(name, getattr(options, name))


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


def _number(value: float) -> str:
    """Format a bound; whole numbers have all their digits."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 65 else f"{value:g}"


def _check_variables(environment: Iterable[str], declared: Iterable[str]) -> None:
    """Refuse an unknown variable: a mistyped one would silently have no effect."""
    known = {PREFIX + name.upper() for name in declared} | {FILE_VARIABLE, SECRET_VARIABLE}
    for name in environment:
        if name.startswith(PREFIX) and name not in known and not name.startswith(_INTERNAL):
            raise ValueError(f"{name} is set, but there is no such variable: correct or unset it{closest(name, known)}")


def _check_file(path: Path, held: Mapping[str, Any], declared: Mapping[str, Option]) -> dict[str, object]:
    """Validate a file's options, and convert ints to what an option needs."""
    found: dict[str, object] = {}
    for name, value in held.items():
        if name not in declared:
            raise ValueError(f"{path}: there is no option {name!r}{closest(name, declared)}")
        wanted, allowed = declared[name].type, declared[name].allowed
        if type(value) is int and wanted is float:
            value = float(value)
        elif type(value) is int and isinstance(allowed, OneOf):  # 8 is as clear as "8"
            value = str(value)
        text_too = isinstance(allowed, ByPattern) and isinstance(value, str)
        if type(value) is not wanted and not text_too:
            expected = "true or false" if wanted is bool else _EXPECTED[wanted]
            raise ValueError(f"{path}: {name} must be {expected}, got {value!r}")
        found[name] = value
    return found
