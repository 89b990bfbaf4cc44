# SPDX-License-Identifier: Apache-2.0
"""From the values that an entry gives for a table's fields to what the combined key of a packet is compared with."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from dlcp.switch.codegen.layout import TableSlot
from dlcp.switch.errors import EntryError, Named, UnknownName
from dlcp.switch.model import Key, TableDef

Match: TypeAlias = Mapping[str, int | tuple[int, int]]
"""A value for each field: a number (exact), (value, prefix length), (value, mask) or (low, high)."""


class Pattern(NamedTuple):
    """What the combined key of a packet is compared with.

    ``key & mask == value``, and for each of ``ranges`` (shift, field mask, low, high) the field is within bounds.
    """

    value: int
    mask: int
    ranges: tuple[tuple[int, int, int, int], ...] = ()

    def matches(self, key: int) -> bool:
        """Whether a combined key fits."""
        return key & self.mask == self.value and all(
            low <= (key >> shift & full) <= high for shift, full, low, high in self.ranges
        )


class Fields:
    """The fields of a table's key.

    Parameters
    ----------
    definition, slot
        The table, and where its fields stand in the combined key.
    where
        For messages.
    """

    def __init__(self, definition: TableDef, slot: TableSlot, where: str) -> None:
        self._keys, self._where = definition.keys, where
        self._by_name: Named[Key] = Named("field", {key.name: key for key in definition.keys}, where)
        self._shifts = {key.name: shift for key, shift in slot.shifts(definition)}

    @property
    def width(self) -> int:
        """Bits of the combined key."""
        return sum(key.width for key in self._keys)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where each range field stands in the combined key, and its mask there."""
        return [(self._shifts[key.name], (1 << key.width) - 1) for key in self._keys if key.match == "range"]

    def named(self, match: Match) -> dict[str, int | tuple[int, int]]:
        """Return a match with the fields' full names."""
        return {self._by_name[name].name: item for name, item in match.items()}

    def pattern(self, match: Match) -> Pattern:
        """Return what keys a match fits.

        Raises
        ------
        EntryError
            A field does not exist, has no value but needs one, or has one that it cannot have.
        """
        value = mask = 0
        ranges = []
        for name in match:
            if name not in self._by_name:
                raise UnknownName("field", name, self._by_name, self._where)
        given = {id(self._by_name[name]): item for name, item in match.items()}
        for key in self._keys:
            shift = self._shifts[key.name]
            full = (1 << key.width) - 1
            item = given.get(id(key))
            if key.match == "range":
                low, high = (0, full) if item is None else self._pair(key, item, "(low, high)")
                self._fits(key, low)
                self._fits(key, high)
                if low > high:
                    raise EntryError(f"{self._where}: field {key.name} has an empty range {low}..{high}")
                if (low, high) != (0, full):
                    ranges.append((shift, full, low, high))
                continue
            part, bits = self._part(key, item, full)
            if key.mask is not None:
                part, bits = part & key.mask, bits & (key.mask | ~full)
            value |= part << shift
            mask |= bits << shift
        return Pattern(value, mask, tuple(ranges))

    def _part(self, key: Key, item: Any, full: int) -> tuple[int, int]:
        """Return value and mask of one field that is not a range."""
        if key.match == "exact":
            if item is None:
                raise EntryError(f"{self._where}: no value for field {key.name}")
            if isinstance(item, tuple):
                raise EntryError(f"{self._where}: field {key.name} is exact; give a number, not {item}")
            return self._fits(key, item), full
        if item is None:
            return 0, 0
        if key.match == "lpm":
            part, length = self._pair(key, item, "(value, prefix length)")
            if not 0 <= length <= key.width:
                raise EntryError(f"{self._where}: field {key.name} has {key.width} bits, not a prefix of {length}")
            bits = full ^ (full >> length)
        else:
            part, bits = self._pair(key, item, "(value, mask)")
            self._fits(key, bits)
        if self._fits(key, part) & ~bits:
            raise EntryError(
                f"{self._where}: field {key.name} has bits in its value {part:#x} outside {bits:#x}; set them to 0"
            )
        return part, bits

    def _pair(self, key: Key, item: Any, shape: str) -> tuple[int, int]:
        if not isinstance(item, tuple) or len(item) != 2:
            raise EntryError(f"{self._where}: field {key.name} is {key.match}; give {shape}, not {item!r}")
        return operator.index(item[0]), operator.index(item[1])

    def _fits(self, key: Key, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise EntryError(f"{self._where}: field {key.name} takes a number, not {value!r}") from None
        if not 0 <= number < 1 << key.width:
            raise EntryError(f"{self._where}: field {key.name} has {key.width} bits; {number:#x} does not fit")
        return number
