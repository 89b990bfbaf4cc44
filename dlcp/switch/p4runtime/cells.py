# SPDX-License-Identifier: Apache-2.0
"""Counters, meters and registers: arrays whose cells have numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from finsy.proto import p4r

from dlcp.switch.cells import Counter, MeterCells, Register
from dlcp.switch.p4runtime.meters import read_config, write_config
from dlcp.switch.p4runtime.refusal import INVALID_ARGUMENT, OUT_OF_RANGE, UNIMPLEMENTED, Refused
from dlcp.switch.p4runtime.schema import Schema
from dlcp.switch.p4runtime.tables import MODIFY, Change
from dlcp.switch.p4runtime.values import encode

T = TypeVar("T")


class Ask(Protocol):
    """Has the packet loop call a function, and returns what that returned."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Raise what the function raises."""


class _Window(Protocol):
    name: str

    def __len__(self) -> int: ...


WindowT = TypeVar("WindowT", bound=_Window)


class Counters:
    """Counter arrays, as ``counter_entry``. Each cell counts packets and bytes, whatever p4info says, as in BMv2."""

    def __init__(self, schema: Schema) -> None:
        self._counters: Mapping[int, Counter] = schema.counters

    def change(self, kind: int, item: p4r.CounterEntry) -> Change:
        """Return the change that sets one cell, or all without an index; raises Refused."""
        counter = _chosen(self._counters, item.counter_id, "counter")
        _only_modify(kind, counter.name)
        packets, octets = item.data.packet_count, item.data.byte_count
        if min(packets, octets) < 0:
            raise Refused(INVALID_ARGUMENT, f"counter {counter.name} counts from 0 up; got {packets}, {octets}")
        index = _index(item, counter)
        if not item.HasField("data"):
            return _nothing
        if index is None:
            return lambda: counter.fill(packets, octets)
        return partial(counter.__setitem__, index, (packets, octets))

    def read(self, wanted: p4r.CounterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, all as they were at one moment; raises Refused."""
        for number, counter in _selected(self._counters, wanted.counter_id, "counter"):
            index = _index(wanted, counter)
            found: Iterable[tuple[int, Sequence[int]]]
            if index is None:
                found = enumerate(ask(counter.values).tolist())
            else:
                found = [(index, ask(partial(counter.__getitem__, index)))]
            for cell, (packets, octets) in found:
                entity = p4r.Entity()
                message = entity.counter_entry
                message.counter_id = number
                message.index.index = cell
                message.data.packet_count, message.data.byte_count = packets, octets
                yield entity


class Meters:
    """Meter arrays, as ``meter_entry``."""

    def __init__(self, schema: Schema) -> None:
        self._meters: Mapping[int, MeterCells] = schema.meters

    def change(self, kind: int, item: p4r.MeterEntry) -> Change:
        """Return the change that configures one meter, or all without an index; raises Refused."""
        meters = _chosen(self._meters, item.meter_id, "meter")
        _only_modify(kind, meters.name)
        if item.HasField("counter_data"):
            raise Refused(UNIMPLEMENTED, f"meter {meters.name} does not count by colour")
        config = read_config(item.config, f"meter {meters.name}") if item.HasField("config") else None
        index = _index(item, meters)

        def change() -> None:
            for cell in range(len(meters)) if index is None else (index,):
                meters[cell] = config

        return change

    def read(self, wanted: p4r.MeterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the meters that a request selects; raises Refused."""
        for number, meters in _selected(self._meters, wanted.meter_id, "meter"):
            index = _index(wanted, meters)
            for cell in range(len(meters)) if index is None else (index,):
                entity = p4r.Entity()
                message = entity.meter_entry
                message.meter_id = number
                message.index.index = cell
                config = meters[cell]
                if config is not None:
                    write_config(config, message.config)
                yield entity


class Registers:
    """Register arrays, as ``register_entry``. They can be read only: BMv2 refuses both, and the data path owns them."""

    def __init__(self, schema: Schema) -> None:
        self._registers: Mapping[int, Register] = schema.registers

    def change(self, kind: int, item: p4r.RegisterEntry) -> Change:
        """Refuse to write, as BMv2 does."""
        register = _chosen(self._registers, item.register_id, "register")
        raise Refused(UNIMPLEMENTED, f"register {register.name} cannot be written over P4Runtime")

    def read(self, wanted: p4r.RegisterEntry, ask: Ask) -> Iterator[p4r.Entity]:
        """Return the cells that a request selects, all as they were at one moment; raises Refused."""
        for number, register in _selected(self._registers, wanted.register_id, "register"):
            index = _index(wanted, register)
            found: Iterable[tuple[int, int]]
            if index is None:
                found = enumerate(ask(register.values).tolist())
            else:
                found = [(index, ask(partial(register.__getitem__, index)))]
            for cell, value in found:
                entity = p4r.Entity()
                message = entity.register_entry
                message.register_id = number
                message.index.index = cell
                message.data.bitstring = encode(value)
                yield entity


def _chosen(arrays: Mapping[int, WindowT], number: int, kind: str) -> WindowT:
    found = arrays.get(number)
    if found is None:
        known = ", ".join(f"{key} ({array.name})" for key, array in arrays.items())
        raise Refused(INVALID_ARGUMENT, f"no {kind} {number}; there are {known or 'none'}")
    return found


def _selected(arrays: Mapping[int, WindowT], number: int, kind: str) -> list[tuple[int, WindowT]]:
    return [(number, _chosen(arrays, number, kind))] if number else list(arrays.items())


def _index(item: p4r.CounterEntry | p4r.MeterEntry | p4r.RegisterEntry, array: _Window) -> int | None:
    """Return which cell is meant; None for all."""
    if not item.HasField("index"):
        return None
    index = item.index.index
    if index < 0:
        raise Refused(INVALID_ARGUMENT, f"{array.name} has no cell {index}; cells are numbered from 0")
    if index >= len(array):
        raise Refused(OUT_OF_RANGE, f"{array.name} has no cell {index}; the last is {len(array) - 1}")
    return index


def _only_modify(kind: int, name: str) -> None:
    if kind != MODIFY:
        raise Refused(INVALID_ARGUMENT, f"the cells of {name} are always there; use MODIFY")


def _nothing() -> None:
    """Change nothing."""
