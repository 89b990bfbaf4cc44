# SPDX-License-Identifier: Apache-2.0
"""The generated text in plain Python: nothing to compile, one packet at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.switch.codegen import Generated
from dlcp.switch.codegen.source import functions
from dlcp.switch.kernels import TOKEN_CELLS
from dlcp.switch.profiles import ActionProfile
from dlcp.switch.tables import Table

Numbers = NDArray[np.int64]


class PlainMachine:
    """State in lists and dictionaries, read by the generated functions as their globals."""

    def __init__(self, generated: Generated) -> None:
        layout = generated.layout
        self.registers = [0] * layout.register_cells
        self.packets_counted = [0] * layout.counter_cells
        self.bytes_counted = [0] * layout.counter_cells
        self.meter_rates = [[0.0, 0.0] for _ in range(layout.meter_cells)]
        self.meter_tokens = [[0] * TOKEN_CELLS for _ in range(layout.meter_cells)]
        self._generated = generated
        self._namespace: dict[str, Any] = {
            "registers": self.registers,
            "packets_counted": self.packets_counted,
            "bytes_counted": self.bytes_counted,
            "meter_rates": self.meter_rates,
            "meter_tokens": self.meter_tokens,
        }
        self.source = generated.plain(self._namespace)
        self.ingress: Any = None
        self.egress: Any = None

    def attach(self, tables: Mapping[str, Table], profiles: Mapping[str, ActionProfile]) -> None:
        """Let the text read these tables and profiles; it sees later changes as they are made."""
        for table in tables.values():
            self._namespace[table.slot.index] = table.index
            self._namespace[table.slot.rows] = table.rows
        for profile in profiles.values():
            self._namespace[profile.slot.groups] = profile.group_cells
            self._namespace[profile.slot.choices] = profile.choices
            self._namespace[profile.slot.members] = profile.rows
        name = f"<generated from {self._generated.program.digest[:12]}>"
        self.ingress, self.egress = functions(self.source, self._namespace, name)

    def defer(self) -> None:
        """Do nothing: packets see every change at once, and none costs them time."""

    def prepare(self) -> None:
        """Prepare nothing."""

    def commit(self, prepared: Numbers | None) -> None:
        """Do nothing."""

    def ingress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, ports: Numbers, now_us: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Run ingress on every row; see `dlcp.switch.program.Program.ingress_batch`."""
        out = np.empty((len(lengths), 2), np.int64)
        carried = np.empty((len(lengths), len(self._generated.carry)), np.int64)
        arguments = zip(packets, lengths.tolist(), ports.tolist(), now_us.tolist(), strict=True)
        for i, (row, length, port, now) in enumerate(arguments):
            packet = bytearray(row[:length])
            out[i, 0], out[i, 1], carried[i] = self.ingress(packet, port, now)
            row[:length] = packet
        return out[:, 0].copy(), out[:, 1].copy(), carried

    def egress_batch(
        self, packets: NDArray[np.uint8], lengths: Numbers, carry: Numbers, *arguments: Numbers
    ) -> NDArray[np.bool_]:
        """Run egress on every row; see `dlcp.switch.program.Program.egress_batch`."""
        sent = np.empty(len(lengths), np.bool_)
        columns = zip(*(column.tolist() for column in arguments), strict=True)
        rows = zip(packets, lengths.tolist(), carry.tolist(), columns, strict=True)
        for i, (row, length, carried, values) in enumerate(rows):
            packet = bytearray(row[:length])
            sent[i] = self.egress(packet, carried, *values)
            row[:length] = packet
        return sent
