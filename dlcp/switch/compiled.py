# SPDX-License-Identifier: Apache-2.0
"""The generated text under Numba: batches of packets, compiled once and kept on disk."""

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.codegen import Generated
from dlcp.switch.codegen.forwarding import forwarding
from dlcp.switch.errors import ProgramError
from dlcp.switch.kernels import TOKEN_CELLS
from dlcp.switch.profiles import ActionProfile
from dlcp.switch.scheduler import TOTAL_CELLS
from dlcp.switch.tables import Table

Numbers = NDArray[np.int64]
INSTALL: Final = "pip install 'dlcp[switch]'"
KEPT_PROGRAMS: Final = 16
"""Programs whose compiled form stays on disk, about 1 MB each. Chosen by us."""


class CompiledMachine:
    """State in arrays that are handed to compiled functions with every batch."""

    def __init__(self, generated: Generated) -> None:
        layout = generated.layout
        self.registers = np.zeros(layout.register_cells, np.int64)
        self.packets_counted = np.zeros(layout.counter_cells, np.int64)
        self.bytes_counted = np.zeros(layout.counter_cells, np.int64)
        self.meter_rates = np.zeros((layout.meter_cells, 2), np.float64)
        self.meter_tokens = np.zeros((layout.meter_cells, TOKEN_CELLS), np.int64)
        self._generated = generated
        self.source = generated.compiled() + forwarding(generated)
        self._module = load_compiled(self.source)
        self._tables: list[Table] = []
        self._profiles: list[ActionProfile] = []
        self._parts: dict[str, list[Numbers]] = {}
        self._structures = np.zeros(1, np.int64)
        self._deferred = False

    def attach(self, tables: Mapping[str, Table], profiles: Mapping[str, ActionProfile]) -> None:
        """Use these tables and profiles; their arrays are made anew at the first batch after a change."""
        self._tables, self._profiles = list(tables.values()), list(profiles.values())
        # A switch without packets compiles everything that it needs now, or takes it from disk.
        empty, rows = np.zeros((0, 1), np.int64), np.zeros((0, 64), np.uint8)
        totals = np.zeros(TOTAL_CELLS, np.int64)
        self.forward(-1, empty, 0, totals, rows, empty, empty, totals, empty, totals, empty)

    def _state(self) -> tuple[Any, ...]:
        """Return the arrays for compiled functions: all tables and profiles in one, made anew after a change."""
        if not self._deferred and self._changed():
            self._structures = self.prepare()
        return (
            self._structures,
            self.registers,
            self.packets_counted,
            self.bytes_counted,
            self.meter_rates,
            self.meter_tokens,
        )

    def _changed(self) -> bool:
        return any(table.changed for table in self._tables) or any(profile.changed for profile in self._profiles)

    def defer(self) -> None:
        """Keep changes of entries from packets until :meth:`commit`."""
        self._deferred = True

    def prepare(self) -> Numbers:
        """Return the tables and profiles as packets are to see them; in any thread, while nobody changes them."""
        parts: list[Numbers] = []
        for table in self._tables:
            if table.changed:
                self._parts[table.name] = [table.encode(), np.array(table.rows, np.int64)]
                table.changed = False
            parts += self._parts[table.name]
        for profile in self._profiles:
            cells = (profile.group_cells, profile.choices, profile.rows)
            parts += [np.array(item, np.int64) for item in cells]
            profile.changed = False
        ends = np.cumsum([len(parts) + 1, *(len(part) for part in parts)])
        return np.concatenate([ends.astype(np.int64), *parts])

    def commit(self, prepared: Numbers | None) -> None:
        """Let packets see what was prepared, and changes at once again; between two batches."""
        self._deferred = False
        if prepared is not None:
            self._structures = prepared

    def ingress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, ports: Numbers, now_us: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Run ingress on every row; see `dlcp.switch.program.Program.ingress_batch`."""
        out, priorities = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
        carry = np.empty((len(lengths), len(self._generated.carry)), np.int64)
        self._module.ingress_batch(packets, lengths, ports, now_us, out, priorities, carry, *self._state())
        return out, priorities, carry

    def egress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, carry: Numbers, *arguments: Numbers
    ) -> NDArray[np.bool_]:
        """Run egress on every row; see `dlcp.switch.program.Program.egress_batch`."""
        sent = np.empty(len(lengths), np.bool_)
        self._module.egress_batch(packets, lengths, carry, *arguments, sent, *self._state())
        return sent

    @property
    def carry_cells(self) -> int:
        """How many numbers egress needs from ingress."""
        return len(self._generated.carry)

    def forward(self, until_ns: int, arrived: Numbers, count: int, places: Numbers, *pool: NDArray[Any]) -> None:
        """Take packets in and let depart what is due; see `dlcp.switch.codegen.forwarding`.

        Parameters
        ----------
        pool
            Rows of packets, columns of slots, carries, stack of free slots, columns of ports, numbers of the switch,
            and lists of what has arrived; see `dlcp.switch.batches`.
        """
        self._module.forward(until_ns, arrived, count, places, *pool, *self._state())

    def ingress(self, p: bytearray, ingress_port: int, now_us: int) -> tuple[int, int, tuple[int, ...]]:
        """Run ingress on one packet, at the price of a batch."""
        row = np.frombuffer(p, np.uint8)[None, :]
        ports, priorities, carry = self.ingress_batch(row, _one(len(p)), _one(ingress_port), _one(now_us))
        return int(ports[0]), int(priorities[0]), tuple(carry[0].tolist())

    def egress(
        self,
        p: bytearray,
        carry: tuple[int, ...],
        port: int,
        enq_us: int,
        deq_delta_us: int,
        enq_depth: int,
        deq_depth: int,
        now_us: int,
    ) -> bool:
        """Run egress on one packet, at the price of a batch."""
        row = np.frombuffer(p, np.uint8)[None, :]
        columns = (_one(value) for value in (port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us))
        return bool(self.egress_batch(row, _one(len(p)), np.array([carry], np.int64), *columns)[0])


def _one(value: int) -> Numbers:
    return np.array([value], np.int64)


def load_compiled(source: str) -> ModuleType:
    """Import generated source, from the user's cache directory if that is safe, for Numba to keep what it compiles.

    Raises
    ------
    ProgramError
        If Numba is not installed.
    """
    if importlib.util.find_spec("numba") is None:
        raise ProgramError(
            f'the back end "numba" needs Numba; install it with: {INSTALL}, or use the back end "python"'
        )
    # What Numba keeps does not tell bounds checking on from off, nor one release from another, so the name does.
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
    """Remove all but the latest programs, and what Numba compiled from them."""
    programs = sorted(directory.glob("dlcp_program_*.py"), key=lambda item: item.stat().st_mtime, reverse=True)
    for program in programs[KEPT_PROGRAMS:]:
        for compiled in (directory / "__pycache__").glob(f"{program.stem}.*"):
            compiled.unlink(missing_ok=True)
        program.unlink(missing_ok=True)


def cache_directory() -> Path | None:
    """Return the directory for compiled programs, or None if it is not this user's alone.

    Compiled code is loaded from there and run, so nobody else may be able to write to it.
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
