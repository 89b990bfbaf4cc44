# SPDX-License-Identifier: Apache-2.0
"""Control-plane access to registers, counters and meters: windows on the flat arrays of a running program."""

import operator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.executor.model import CellError, EntryError, MeterConfig

Store: TypeAlias = Any
"""Lists or arrays of numbers (rows of numbers for meters); the generated text works with both."""

MICROSECONDS: Final = 1_000_000.0
TOKEN_CELLS: Final = 7
"""Cells in a meter's row of tokens: 1 if it is configured; then, for the peak and for the committed bucket, tokens now,
tokens gained since time 0, and burst. A row of rates has the peak and committed tokens per microsecond."""


class _Window:
    """A window of ``size`` cells from ``base`` on."""

    kind = "cell"

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base, self.size = name, base, size

    def __len__(self) -> int:
        return self.size

    def _place(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < self.size:
            raise CellError(f"{self.kind} {self.name} has no cell {index}; the last is {self.size - 1}")
        return self.base + index


class Register(_Window):
    """A register array; cells are ``width`` bits wide."""

    kind = "register"

    def __init__(self, name: str, base: int, size: int, width: int, store: Store) -> None:
        super().__init__(name, base, size)
        self.width, self._store = width, store

    def __getitem__(self, index: int) -> int:
        return int(self._store[self._place(index)])

    def __setitem__(self, index: int, value: int) -> None:
        value = operator.index(value)
        if not 0 <= value < 1 << self.width:
            raise EntryError(f"register {self.name} has cells of {self.width} bits; {value} does not fit")
        self._store[self._place(index)] = value

    def values(self) -> NDArray[np.int64]:
        """Return a copy of all cells."""
        return np.array(self._store[self.base : self.base + self.size], np.int64)

    def reset(self) -> None:
        """Set every cell to zero."""
        self._store[self.base : self.base + self.size] = [0] * self.size


class CounterCell(NamedTuple):
    """The value of one cell of a counter."""

    packets: int
    bytes: int


class Counter(_Window):
    """A counter array; every cell counts packets and bytes, as BMv2's do."""

    kind = "counter"

    def __init__(self, name: str, base: int, size: int, packets: Store, octets: Store) -> None:
        super().__init__(name, base, size)
        self._packets, self._bytes = packets, octets

    def __getitem__(self, index: int) -> CounterCell:
        place = self._place(index)
        return CounterCell(int(self._packets[place]), int(self._bytes[place]))

    def __setitem__(self, index: int, value: tuple[int, int]) -> None:
        place = self._place(index)
        self._packets[place], self._bytes[place] = value

    def values(self) -> NDArray[np.int64]:
        """Return a copy of all cells: (size, 2), packets and bytes."""
        cells = slice(self.base, self.base + self.size)
        return np.column_stack([np.array(self._packets[cells], np.int64), np.array(self._bytes[cells], np.int64)])

    def fill(self, packets: int, octets: int) -> None:
        """Set every cell to the same values."""
        cells = slice(self.base, self.base + self.size)
        self._packets[cells] = [packets] * self.size
        self._bytes[cells] = [octets] * self.size

    def reset(self) -> None:
        """Set every cell to zero."""
        self.fill(0, 0)


def run_meter(rates: Any, tokens: Any, cell: int, amount: int, now_us: int) -> int:
    """Return the colour (0 green, 1 yellow, 2 red) of ``amount`` bytes or packets at time ``now_us``.

    The arithmetic of BMv2's Meter::execute: two buckets, peak first, colour-blind. A bucket's gain is computed from
    time 0, so that rounding errors do not accumulate. A red packet takes no tokens.
    """
    row = tokens[cell]
    if row[0] == 0:
        return 0
    rate = rates[cell]
    gained = int(now_us * rate[0])
    have = row[1] + gained - row[2]
    row[2] = gained
    if have > row[3]:
        have = row[3]
    if have < amount:
        row[1] = have
        return 2
    row[1] = have - amount
    gained = int(now_us * rate[1])
    have = row[4] + gained - row[5]
    row[5] = gained
    if have > row[6]:
        have = row[6]
    if have < amount:
        row[4] = have
        return 1
    row[4] = have - amount
    return 0


class MeterCells(_Window):
    """A meter array. Every packet is green to an unconfigured meter."""

    kind = "meter"

    def __init__(self, name: str, base: int, size: int, rates: Store, tokens: Store) -> None:
        super().__init__(name, base, size)
        self._rates, self._tokens = rates, tokens
        self._configs: dict[int, MeterConfig] = {}

    def __getitem__(self, index: int) -> MeterConfig | None:
        self._place(index)
        return self._configs.get(index)

    def __setitem__(self, index: int, config: MeterConfig | None) -> None:
        place = self._place(index)
        if config is None:
            self._configs.pop(index, None)
            self._tokens[place][0] = 0
            return
        self._configs[index] = config
        self._fill(place, config)

    def _fill(self, place: int, config: MeterConfig) -> None:
        self._rates[place][0] = config.pir / MICROSECONDS
        self._rates[place][1] = config.cir / MICROSECONDS
        # Like BMv2's set_rate: full buckets, and no gain since time 0.
        row = self._tokens[place]
        for number, value in enumerate((1, config.pburst, 0, config.pburst, config.cburst, 0, config.cburst)):
            row[number] = value

    def values(self) -> list[MeterConfig | None]:
        """Return the configuration of every meter; None if unconfigured."""
        return [self._configs.get(index) for index in range(self.size)]

    def refill(self) -> None:
        """Fill every bucket, as if the configuration had just been written."""
        for index, config in self._configs.items():
            self._fill(self.base + index, config)

    def reset(self) -> None:
        """Remove every configuration."""
        for index in list(self._configs):
            self[index] = None
