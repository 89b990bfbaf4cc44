# SPDX-License-Identifier: Apache-2.0
"""A compiled P4 program that processes packets.

One packet::

    program = Program.load("dlcp.json")
    port, priority, carry = program.ingress(packet, ingress_port, now_us)
    if port != DROP_PORT:
        ...  # the packet waits in queue `priority` of `port`
        size = program.egress(packet, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us)

``packet`` is a bytearray that both functions edit in place: it always equals the deparser's output at that point, of
which the first ``size`` bytes are to be sent. A dropped packet has unspecified bytes. ``carry`` is opaque state from
ingress to egress. ``now_us`` is a monotonic clock in microseconds, with any origin. ``ingress`` and ``egress`` are
generated functions; positional arguments are fastest.

Objects are found by p4info name, or by a unique suffix of it: ``program.tables["ipv4_route"]``,
``program.profiles``, ``program.registers``, ``program.counters``, ``program.meters`` (indirect ones; direct meters
belong to entries). `tables` and `cells` next to this module have their classes.

Use a program from one thread at a time, and change entries between packets or batches; the compiled back end releases
the GIL during a batch. Changes take effect at the next packet or batch, without recompilation.
"""

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.executor import bmv2_json
from dlcp.switch.executor.cells import TOKEN_CELLS, Counter, MeterCells, Register
from dlcp.switch.executor.codegen import ProgramText
from dlcp.switch.executor.model import Named, ProgramDef, ProgramError, visible_tables
from dlcp.switch.executor.tables import ActionProfile, Actions, Table
from dlcp.switch.queues import TOTAL_CELLS

Numbers: TypeAlias = NDArray[np.int64]


class PlainMachine:
    """Keeps the state in lists and dictionaries, which are globals of the generated functions."""

    def __init__(self, text: ProgramText) -> None:
        layout = text.layout
        self.flat: dict[str, Any] = {
            "registers": [0] * layout.register_cells,
            "packets_counted": [0] * layout.counter_cells,
            "bytes_counted": [0] * layout.counter_cells,
            "meter_rates": [[0.0, 0.0] for _ in range(layout.meter_cells)],
            "meter_tokens": [[0] * TOKEN_CELLS for _ in range(layout.meter_cells)],
        }
        self._text = text
        self._namespace = dict(self.flat)
        self.source = text.plain(self._namespace)
        self.ingress: Any = None
        self.egress: Any = None

    def attach(self, tables: Mapping[str, Table], profiles: Mapping[str, ActionProfile]) -> None:
        """Connect the generated functions to tables and profiles; later changes take effect at once."""
        for table in tables.values():
            self._namespace[table.slot.index] = table.index
            self._namespace[table.slot.rows] = table.rows
        for profile in profiles.values():
            self._namespace[profile.slot.groups] = profile.group_cells
            self._namespace[profile.slot.choices] = profile.choices
            self._namespace[profile.slot.members] = profile.rows
        name = f"<generated from {self._text.program.digest[:12]}>"
        exec(compile(self.source, name, "exec"), self._namespace)
        self.ingress, self.egress = self._namespace["ingress"], self._namespace["egress"]

    def defer(self) -> None:
        """Do nothing: every change takes effect at once, at no cost to packets."""

    def prepare(self) -> None:
        """Prepare nothing."""

    def commit(self, prepared: Numbers | None) -> None:
        """Do nothing."""


INSTALL: Final = "pip install 'dlcp[switch]'"
KEPT_PROGRAMS: Final = 16
"""Compiled programs kept on disk, about 1 MB each. Not tuned."""


class CompiledMachine:
    """Keeps the state in arrays, which are passed to the compiled functions with every batch."""

    def __init__(self, text: ProgramText) -> None:
        layout = text.layout
        self.flat: dict[str, Any] = {
            "registers": np.zeros(layout.register_cells, np.int64),
            "packets_counted": np.zeros(layout.counter_cells, np.int64),
            "bytes_counted": np.zeros(layout.counter_cells, np.int64),
            "meter_rates": np.zeros((layout.meter_cells, 2), np.float64),
            "meter_tokens": np.zeros((layout.meter_cells, TOKEN_CELLS), np.int64),
        }
        self._text = text
        self.source = text.compiled()
        self._module = load_compiled(self.source)
        self._tables: list[Table] = []
        self._profiles: list[ActionProfile] = []
        self._parts: dict[str, list[Numbers]] = {}
        self._structures = np.zeros(1, np.int64)
        self._deferred = False

    def attach(self, tables: Mapping[str, Table], profiles: Mapping[str, ActionProfile]) -> None:
        """Use these tables and profiles; their arrays are rebuilt at the first batch after a change."""
        self._tables, self._profiles = list(tables.values()), list(profiles.values())
        # An empty call compiles everything now, or loads it from disk.
        empty, rows = np.zeros((0, 1), np.int64), np.zeros((0, 64), np.uint8)
        totals = np.zeros(TOTAL_CELLS, np.int64)
        self.forward(-1, empty, 0, totals, rows, empty, empty, totals, empty, totals, empty)

    def _state(self) -> tuple[Any, ...]:
        """Return the arrays for compiled functions: all tables and profiles in one, rebuilt after a change."""
        if not self._deferred and self._changed():
            self._structures = self.prepare()
        return self._structures, *self.flat.values()

    def _changed(self) -> bool:
        return any(table.changed for table in self._tables) or any(profile.changed for profile in self._profiles)

    def defer(self) -> None:
        """Defer the effect of entry changes until :meth:`commit`."""
        self._deferred = True

    def prepare(self) -> Numbers:
        """Encode the tables and profiles for :meth:`commit`; in any thread, while nothing changes them."""
        parts: list[Numbers] = []
        for table in self._tables:
            if table.changed:
                self._parts[table.name] = [table.index.encode(), np.array(table.rows, np.int64)]
                table.changed = False
            parts += self._parts[table.name]
        for profile in self._profiles:
            cells = (profile.group_cells, profile.choices, profile.rows)
            parts += [np.array(item, np.int64) for item in cells]
            profile.changed = False
        ends = np.cumsum([len(parts) + 1, *(len(part) for part in parts)])
        return np.concatenate([ends.astype(np.int64), *parts])

    def commit(self, prepared: Numbers | None) -> None:
        """Apply prepared tables and end deferral; call it between two batches."""
        self._deferred = False
        if prepared is not None:
            self._structures = prepared

    def ingress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, ports: Numbers, now_us: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Run ingress on many packets, in order.

        Parameters
        ----------
        packets
            uint8 (n, stride), C order, edited in place.
        lengths, ports, now_us
            Bytes of each packet, its ingress port and time: int64 (n,).

        Returns
        -------
        Egress ports, priorities: int64 (n,). Carry: int64 (n, k).
        """
        out, priorities = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
        carry = np.empty((len(lengths), len(self._text.carry)), np.int64)
        self._module.ingress_batch(packets, lengths, ports, now_us, out, priorities, carry, *self._state())
        return out, priorities, carry

    def egress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, carry: Numbers, *arguments: Numbers
    ) -> Numbers:
        """Run egress on many packets, in order; ``arguments`` as `Program.egress`, int64 (n,).

        Returns
        -------
        The bytes to send of each packet, 0 for a dropped one: int64 (n,).
        """
        sizes = np.empty(len(lengths), np.int64)
        self._module.egress_batch(packets, lengths, carry, *arguments, sizes, *self._state())
        return sizes

    @property
    def carry_cells(self) -> int:
        """Number of values that ingress passes to egress."""
        return len(self._text.carry)

    def forward(self, until_ns: int, arrived: Numbers, count: int, places: Numbers, *pool: NDArray[Any]) -> None:
        """Process received packets and due departures, as in `dlcp.switch.queues.loop`."""
        self._module.forward_batch(until_ns, arrived, count, places, *pool, *self._state())

    def ingress(self, p: bytearray, ingress_port: int, now_us: int) -> tuple[int, int, tuple[int, ...]]:
        """Run ingress on one packet, as a batch of one."""
        row = np.frombuffer(p, np.uint8)[None, :]
        ports, priorities, carry = self.ingress_batch(row, _one(len(p)), _one(ingress_port), _one(now_us))
        return int(ports[0]), int(priorities[0]), tuple(carry[0].tolist())

    def egress(self, p: bytearray, carry: tuple[int, ...], *arguments: int) -> int:
        """Run egress on one packet, as a batch of one."""
        row = np.frombuffer(p, np.uint8)[None, :]
        return int(self.egress_batch(row, _one(len(p)), np.array([carry], np.int64), *map(_one, arguments))[0])


def _one(value: int) -> Numbers:
    return np.array([value], np.int64)


def load_compiled(source: str) -> ModuleType:
    """Import generated source, from the user's cache directory if that is safe, so that Numba can cache its output.

    Raises
    ------
    ProgramError
        Numba is not installed.
    """
    if importlib.util.find_spec("numba") is None:
        raise ProgramError(
            f'the back end "numba" needs Numba; install it with: {INSTALL}, or use the back end "python"'
        )
    # Numba's cache does not distinguish bounds checking or releases, so the module name does.
    import numba

    checked = os.environ.get("NUMBA_BOUNDSCHECK", "")
    text = f"# Generated; numba {numba.__version__}, bounds checking {checked or 'off'}.\n{source}"
    name = f"dlcp_program_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    directory = cache_directory()
    if directory is None:
        module = ModuleType(name)
        exec(compile(text, f"<{name}>", "exec"), module.__dict__)
        return module
    path = directory / f"{name}.py"
    text = text.replace("CACHE = False", "CACHE = True")
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        _write(path, text)
        _prune(directory)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)


def _prune(directory: Path) -> None:
    """Remove all but the latest programs, with Numba's cache files for them."""
    programs = sorted(directory.glob("dlcp_program_*.py"), key=lambda item: item.stat().st_mtime, reverse=True)
    for program in programs[KEPT_PROGRAMS:]:
        for compiled in (directory / "__pycache__").glob(f"{program.stem}.*"):
            compiled.unlink(missing_ok=True)
        program.unlink(missing_ok=True)


def cache_directory() -> Path | None:
    """Return the directory for compiled programs, or None if other users can write to it.

    Compiled code is loaded from there and run, so only this user may have write access.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        path = (Path(base) if base else Path.home() / ".cache") / "dlcp" / "switch"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.lstat()
    except (OSError, RuntimeError):
        return None
    foreign = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if foreign or not stat.S_ISDIR(status.st_mode) or not os.access(path, os.W_OK) else path


Backend = Literal["python", "numba"]
BACKENDS: Final = ("python", "numba")
Carry: TypeAlias = tuple[int, ...]


class Snapshot(NamedTuple):
    """Registers (int64, cells) and counters (int64, cells x (packets, bytes)) by name, at one point in time."""

    registers: dict[str, Numbers]
    counters: dict[str, Numbers]


class Program:
    """A program, its entries and its state.

    Attributes
    ----------
    digest
        SHA-256 of the JSON, hexadecimal.
    backend
        ``python`` or ``numba``.
    source
        The generated text.
    definition
        The program's model.
    machine
        Holds the state and runs the generated text.
    ingress
        ``ingress(packet, ingress_port, now_us)`` returns egress port (`DROP_PORT`: dropped), priority 0-7 and carry.
    egress
        ``egress(packet, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us)`` returns how many bytes of
        the packet are to be sent: 0 if it is dropped, fewer than it has if it is truncated. As in BMv2, depths are the
        packets in the queue before the packet was enqueued and after it was dequeued.
    """

    def __init__(self, definition: ProgramDef, backend: Backend = "python") -> None:
        if backend not in BACKENDS:
            raise ProgramError(f"unknown back end {backend!r}; choose {' or '.join(BACKENDS)}")
        text = ProgramText(definition)
        layout = text.layout
        self.definition, self.digest, self.backend = definition, definition.digest, backend
        if backend == "numba":
            machine: PlainMachine | CompiledMachine = CompiledMachine(text)
        else:
            machine = PlainMachine(text)
        self.machine = machine
        self.source, flat = machine.source, machine.flat
        self.registers = Named(
            "register",
            {
                item.name: Register(item.name, layout.registers[item.name], item.size, item.width, flat["registers"])
                for item in definition.registers.values()
            },
        )
        self.counters = Named(
            "counter",
            {
                name: Counter(name, layout.counters[name], item.size, flat["packets_counted"], flat["bytes_counted"])
                for name, item in definition.counters.items()
            },
        )
        cells = {
            name: MeterCells(name, layout.meters[name], item.size, flat["meter_rates"], flat["meter_tokens"])
            for name, item in definition.meters.items()
        }
        self._meters = cells
        self.meters = Named(
            "meter", {name: item for name, item in cells.items() if definition.meters[name].target is None}
        )
        tables = visible_tables(definition)
        profiles = {
            table.profile: ActionProfile(
                definition.profiles[table.profile],
                layout.profiles[table.profile],
                Actions(table.actions, f"action profile {table.profile}"),
            )
            for table in tables
            if table.profile is not None
        }
        self.profiles = Named("action profile", profiles)
        self.tables = Named(
            "table",
            {
                table.name: Table(
                    table,
                    layout.tables[table.name],
                    profiles[table.profile] if table.profile is not None else None,
                    cells[table.meter] if table.meter is not None else None,
                )
                for table in tables
            },
        )
        machine.attach(self.tables, self.profiles)
        self.ingress: Callable[[bytearray, int, int], tuple[int, int, Carry]] = machine.ingress
        self.egress: Callable[..., int] = machine.egress

    @classmethod
    def load(cls, path: str | Path, *, backend: Backend = "python") -> "Program":
        """Load a program from the JSON that ``p4c-bm2-ss`` writes.

        Parameters
        ----------
        backend
            ``python`` has no dependencies and suits single packets; ``numba`` suits batches, and compiles for some
            seconds the first time.

        Raises
        ------
        UnsupportedFeatureError
            The program uses a feature that the built-in switch does not support; the message says which and where.
        ProgramError
            The file is not a BMv2 JSON, or Numba is missing.
        """
        return cls(bmv2_json.load_definition(path), backend)

    def snapshot(self) -> Snapshot:
        """Return all registers and counters."""
        return Snapshot(
            {name: register.values() for name, register in self.registers.items()},
            {name: counter.values() for name, counter in self.counters.items()},
        )

    def reset_state(self) -> None:
        """Set registers and counters to zero and fill the meters' buckets; keep entries and configurations."""
        for register in self.registers.values():
            register.reset()
        for counter in self.counters.values():
            counter.reset()
        for meter in self._meters.values():
            meter.refill()

    def clear_entries(self) -> None:
        """Remove all entries, members and groups, and restore the program's default actions."""
        for table in self.tables.values():
            table.clear()
            if not table.definition.default_const:
                table.reset_default()
        for profile in self.profiles.values():
            profile.clear()
