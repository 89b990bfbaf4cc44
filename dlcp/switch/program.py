# SPDX-License-Identifier: Apache-2.0
"""A compiled P4 program that can be run: packets in, decisions out.

One packet::

    program = Program.load("dlcp.json")
    port, priority, carry = program.ingress(packet, ingress_port, now_us)
    if port != DROP_PORT:
        ...  # the packet waits in queue `priority` of `port`
        sent = program.egress(packet, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us)

``packet`` is a bytearray and is edited in place by both halves: it always is what the deparser would send at that
point. What is dropped has unspecified bytes. ``carry`` is what egress needs from ingress and means nothing to others.
``now_us`` counts microseconds from any fixed origin and never goes back. ``ingress`` and ``egress`` are functions made
for the program; arguments by position are the fastest.

Everything has its p4info name, or the end of it where that is enough: ``program.tables["ipv4_route"]``,
``program.profiles``, ``program.registers``, ``program.counters``, ``program.meters`` (indirect ones; direct meters
belong to entries). See `dlcp.switch.tables`, `dlcp.switch.profiles` and `dlcp.switch.cells`.

A program is used by one thread at a time, and entries are changed between packets or batches; the compiled back end
lets go of the interpreter lock during a batch. Both back ends see changes at the next packet or batch, without
compiling again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.switch import bmv2_json
from dlcp.switch.cells import Counter, MeterCells, Register
from dlcp.switch.codegen import DROP_PORT, generate
from dlcp.switch.codegen.layout import visible_tables
from dlcp.switch.compiled import CompiledMachine
from dlcp.switch.errors import Named, ProgramError
from dlcp.switch.model import ProgramDef
from dlcp.switch.plain import PlainMachine
from dlcp.switch.profiles import ActionProfile, Actions
from dlcp.switch.tables import Table

Backend = Literal["python", "numba"]
BACKENDS: Final = ("python", "numba")
Carry: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = NDArray[np.int64]
Packets: TypeAlias = NDArray[np.uint8]

__all__ = ["BACKENDS", "DROP_PORT", "Backend", "Carry", "Program", "Snapshot"]


class Snapshot(NamedTuple):
    """Registers (int64, cells) and counters (int64, cells x (packets, bytes)) by name, at one moment."""

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
        The program as read.
    ingress
        ``ingress(packet, ingress_port, now_us)`` returns egress port (`DROP_PORT`: dropped), priority 0-7 and carry.
    egress
        ``egress(packet, carry, port, enq_us, deq_delta_us, enq_depth, deq_depth, now_us)`` returns whether the packet
        is to be sent. Depths are in packets, as BMv2 tells them: of the queue when the packet came, without it, and
        when it left, without it.
    """

    def __init__(self, definition: ProgramDef, backend: Backend = "python") -> None:
        if backend not in BACKENDS:
            raise ProgramError(f"no back end {backend!r}; there are {' and '.join(BACKENDS)}")
        generated = generate(definition)
        layout = generated.layout
        self.definition, self.digest, self.backend = definition, definition.digest, backend
        if backend == "numba":
            machine: PlainMachine | CompiledMachine = CompiledMachine(generated)
        else:
            machine = PlainMachine(generated)
        self._machine = machine
        self.source = machine.source
        self.registers = Named(
            "register",
            {
                item.name: Register(item.name, layout.registers[item.name], item.size, item.width, machine.registers)
                for item in definition.registers.values()
            },
        )
        self.counters = Named(
            "counter",
            {
                name: Counter(name, layout.counters[name], item.size, machine.packets_counted, machine.bytes_counted)
                for name, item in definition.counters.items()
            },
        )
        cells = {
            name: MeterCells(name, layout.meters[name], item.size, machine.meter_rates, machine.meter_tokens)
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
        self.egress: Callable[..., bool] = machine.egress

    @property
    def machine(self) -> PlainMachine | CompiledMachine:
        """What holds the state and runs the text."""
        return self._machine

    @classmethod
    def load(cls, path: str | Path, *, backend: Backend = "python") -> "Program":
        """Read the JSON that ``p4c-bm2-ss`` writes and make it run.

        Parameters
        ----------
        backend
            ``python`` needs nothing and is made for one packet at a time; ``numba`` is made for batches, and compiles
            for some seconds the first time.

        Raises
        ------
        UnsupportedFeature
            If the program uses what the built-in switch does not run; the message says what and where.
        ProgramError
            If the file is no BMv2 JSON, or Numba is missing.
        """
        return cls(bmv2_json.load(path), backend)

    def ingress_batch(
        self, packets: Packets, lengths: ArrayLike, ingress_ports: ArrayLike, now_us: ArrayLike
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Run ingress on many packets, in order.

        Parameters
        ----------
        packets
            uint8 (n, stride), C order, edited in place.
        lengths
            Bytes of each packet, int (n,).
        ingress_ports, now_us
            int (n,) or one number for all.

        Returns
        -------
        Egress ports, priorities: int64 (n,). Carry: int64 (n, k).
        """
        sizes = self._sizes(packets, lengths)
        return self._machine.ingress_batch(packets, sizes, _column(ingress_ports, sizes), _column(now_us, sizes))

    def egress_batch(
        self,
        packets: Packets,
        lengths: ArrayLike,
        carry: Numbers,
        ports: ArrayLike,
        enq_us: ArrayLike,
        deq_delta_us: ArrayLike,
        enq_depth: ArrayLike,
        deq_depth: ArrayLike,
        now_us: ArrayLike,
    ) -> NDArray[np.bool_]:
        """Run egress on many packets, in order; arguments as `egress`, int (n,).

        Returns
        -------
        Which are to be sent: bool (n,).
        """
        sizes = self._sizes(packets, lengths)
        columns = (ports, enq_us, deq_delta_us, enq_depth, deq_depth, now_us)
        carried = np.ascontiguousarray(carry, np.int64)
        if len(carried) != len(sizes):
            raise ValueError(f"carry of {len(carried)} packets for {len(sizes)}")
        return self._machine.egress_batch(packets, sizes, carried, *(_column(column, sizes) for column in columns))

    @staticmethod
    def _sizes(packets: Packets, lengths: ArrayLike) -> Numbers:
        sizes = np.ascontiguousarray(lengths, np.int64)
        if packets.ndim != 2 or packets.dtype != np.uint8 or not packets.flags.c_contiguous:
            raise ValueError(f"packets must be uint8 (n, stride) in C order, not {packets.dtype} {packets.shape}")
        if sizes.shape != (len(packets),):
            raise ValueError(f"{sizes.shape} lengths for {len(packets)} packets")
        if sizes.size and (sizes.min() < 0 or sizes.max() > packets.shape[1]):
            raise ValueError(f"lengths {sizes.min()}..{sizes.max()} do not fit rows of {packets.shape[1]} bytes")
        return sizes

    def snapshot(self) -> Snapshot:
        """Return all registers and counters."""
        return Snapshot(
            {name: register.values() for name, register in self.registers.items()},
            {name: counter.values() for name, counter in self.counters.items()},
        )

    def reset_state(self) -> None:
        """Set registers and counters to zero and fill the meters' buckets; entries and configurations stay."""
        for register in self.registers.values():
            register.reset()
        for counter in self.counters.values():
            counter.reset()
        for meter in self._meters.values():
            meter.refill()

    def clear_entries(self) -> None:
        """Remove all entries, members and groups, and go back to the program's default actions."""
        for table in self.tables.values():
            table.clear()
            if not table.definition.default_const:
                table.reset_default()
        for profile in self.profiles.values():
            profile.clear()


def _column(values: ArrayLike, sizes: Numbers) -> Numbers:
    """Return ``values`` as a column that can be written to, for compiled functions know no other."""
    column = np.ascontiguousarray(values, np.int64)
    if column.shape != sizes.shape or not column.flags.writeable:
        column = np.array(
            np.broadcast_to(column if column.ndim and column.size != 1 else column.reshape(()), sizes.shape)
        )
    return column
