# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a program and with its entries."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from dlcp.suggestion import nearest

T = TypeVar("T")


class ProgramError(ValueError):
    """A program that cannot be loaded or run; the message says what is wrong, where, and what to do."""


class UnsupportedFeature(ProgramError):  # noqa: N818 - the name says what it is
    """A feature of the program that the built-in switch does not run.

    Attributes
    ----------
    feature
        What it is, in the words of the P4 language or of the JSON format.
    where
        Where the program uses it.
    """

    def __init__(self, feature: str, where: str) -> None:
        super().__init__(
            f"{where}: the built-in switch does not run {feature}; use BMv2 for this program, or do without"
        )
        self.feature = feature
        self.where = where


class EntryError(ValueError):
    """An entry, member, group, name or index that does not fit the program; the message says which and what would."""


class DuplicateError(EntryError):
    """What was to be added is there already."""


class MissingError(EntryError):
    """An entry, member or group that is not there."""


class FullError(EntryError):
    """A table or an action profile has no room for one more."""


class InUseError(EntryError):
    """A member or a group that something else still refers to."""


class ConstantError(EntryError):
    """What the program itself made constant."""


class CellError(EntryError, IndexError):
    """A register, counter or meter has no cell of that number."""


class UnknownName(EntryError, KeyError):  # noqa: N818 - the name says what it is
    """A name that the program does not have."""

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str = "the program") -> None:
        super().__init__(f"{where} has no {kind} {name!r}{nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class Named(Mapping[str, T]):
    """Objects by their p4info name, or by the end of it if only one object's name ends so (p4info calls it alias)."""

    def __init__(self, kind: str, items: Mapping[str, T], where: str = "the program") -> None:
        self._kind, self._items, self._where = kind, dict(items), where
        self._aliases: dict[str, str | None] = {}
        for name in self._items:
            parts = name.split(".")
            for start in range(1, len(parts)):
                alias = ".".join(parts[start:])
                self._aliases[alias] = None if alias in self._aliases else name

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        full = self._aliases.get(name)
        if full is None:
            raise UnknownName(self._kind, name, self._items, self._where)
        return self._items[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
