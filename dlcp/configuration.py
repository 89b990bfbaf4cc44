# SPDX-License-Identifier: Apache-2.0
"""Where a choice comes from: an argument beats the environment (``DLCP_*``), that a file, and that the default.

The file is the one that ``DLCP_CONFIG`` names, else ``dlcp.toml`` in the working directory, if there is one. It is
TOML, one line an option: ``loss_bound = 0.05``.
"""

import contextlib
import importlib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

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
    """One option: its value, and where that came from (``default``, a variable's name, a file's, or ``argument``)."""

    name: str
    value: object
    origin: str

    @property
    def is_default(self) -> bool:
        """Whether nobody chose it."""
        return self.origin == DEFAULT_ORIGIN


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an option holds: a simple type, and whether None is a value of it."""

    type: type[_Simple]
    optional: bool


def simple_options(cls: type) -> dict[str, object]:
    """Return name and default of those fields of a dataclass that the environment and a file can set."""
    return {name: default for name, (_, default) in _declared(cls).items()}


def settings(
    cls: type, environment: Mapping[str, str] | None = None, arguments: Mapping[str, object] | None = None
) -> list[Setting]:
    """Return every simple option of a dataclass, with its value in force and where that came from.

    Parameters
    ----------
    cls
        A dataclass, such as ``dlcp.torch.Options``.
    environment
        By default that of this process.
    arguments
        What the caller chose; beats everything.

    Raises
    ------
    ValueError
        A variable or a line of the file does not hold what it should, the file has an option that does not exist, or
        the file cannot be read; the message names it.
    """
    environment = os.environ if environment is None else environment
    declared = _declared(cls)
    path = file_in_force(environment)
    from_file = _check_file(path, read_file(path), declared) if path else {}
    found = []
    for name, (kind, default) in declared.items():
        variable = PREFIX + name.upper()
        if arguments and name in arguments:
            found.append(Setting(name, arguments[name], "argument"))
        elif variable in environment:
            found.append(Setting(name, _parse(variable, environment[variable], kind), variable))
        elif name in from_file:
            found.append(Setting(name, from_file[name], str(path)))
        else:
            found.append(Setting(name, default, DEFAULT_ORIGIN))
    return found


def build(cls: type[_Options], environment: Mapping[str, str] | None = None) -> _Options:
    """Return an instance of a dataclass of options, as the environment and the file have it.

    Raises
    ------
    ValueError
        See :func:`settings`; or the options do not fit together.
    """
    return cls(**{setting.name: setting.value for setting in settings(cls, environment) if not setting.is_default})


def file_in_force(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the file that holds options; None if there is none.

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
        raise ValueError(f"{FILE_VARIABLE} names {named}, and there is no such file")
    return None


def read_file(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises
    ------
    ValueError
        It is no TOML, cannot be read, or this Python cannot read TOML.
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
    """Return the module that reads TOML: ``tomllib``, before Python 3.11 ``tomli``; None where there is neither."""
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _declared(cls: type) -> dict[str, tuple[_Kind, object]]:
    """Return kind and default of each simple option, by name."""
    hints = typing.get_type_hints(cls)
    found = {}
    for entry in fields(cls):
        kind = _kind_of(hints[entry.name])
        if kind and entry.default is not MISSING:
            found[entry.name] = (kind, entry.default)
    return found


def _kind_of(hint: Any) -> _Kind | None:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        others = [part for part in typing.get_args(hint) if part is not types.NoneType]
        inner = _kind_of(others[0]) if len(others) == 1 else None
        return inner and _Kind(inner.type, optional=True)
    return _Kind(hint, optional=False) if hint in _EXPECTED else None


def _parse(name: str, text: str, kind: _Kind) -> object:
    """Return what a variable's text says."""
    if kind.optional and text.lower() in ("", "none"):
        return None
    try:
        if kind.type is bool:
            return _TRUTHS[text.lower()]
        return int(text, 0) if kind.type is int else kind.type(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {_EXPECTED[kind.type]}, got {text!r}") from None


def _check_file(path: Path, held: Mapping[str, Any], declared: Mapping[str, tuple[_Kind, object]]) -> dict[str, object]:
    """Return a file's options with their types made right."""
    found: dict[str, object] = {}
    for name, value in held.items():
        if name not in declared:
            from dlcp.suggestion import closest  # hardly any file needs it

            raise ValueError(f"{path}: there is no option {name!r}{closest(name, declared)}")
        wanted = declared[name][0].type
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            expected = "true or false" if wanted is bool else _EXPECTED[wanted]
            raise ValueError(f"{path}: {name} must be {expected}, got {value!r}")
        found[name] = value
    return found
