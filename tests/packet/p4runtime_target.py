# SPDX-License-Identifier: Apache-2.0
"""Both switches as targets of packet tests whose entries, meters and counters go through P4Runtime.

What P4Runtime cannot do goes the switch's own way: packets, the rate of queues, and writing a register; BMv2 does not
read registers by it, either.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finsy.proto import p4r

from dlcp.controller.compiled_program import CompiledProgram, difference
from dlcp.switch import (
    PROGRAM_PATH,
    Backend,
    EntryError,
    MeterConfig,
    load_definition,
    parse_entries,
)
from dlcp.switch.entry_files import Value
from dlcp.switch.p4runtime.device import P4RuntimeDevice
from dlcp.switch.p4runtime.service import P4RuntimeServer
from tests.conformance.recording import Markers
from tests.conformance.simple_switch import SimpleSwitch
from tests.conformance.sites import GREEN
from tests.p4runtime.control import DELETE, INSERT, MODIFY, Control, config
from tests.p4runtime.loops import Loop
from tests.p4runtime.targets import DEVICE_ID
from tests.packet.bmv2_target import Bmv2
from tests.packet.stf import BuiltIn

PIPELINE = CompiledProgram()
DEFINITION = load_definition(PROGRAM_PATH)


class ByP4Runtime:
    """The P4Runtime part of a target, on both switches; a base class before the switch's own target."""

    control: Control
    _written: dict[tuple[str, str, int], Mapping[str, Any]]
    _groups: set[tuple[str, int]]

    def connect(self, address: str) -> None:
        """Become the primary controller, and install the program."""
        self.control = Control(address)
        self.control.arbitrate(1)
        self.control.set_pipeline(config())
        self._written, self._groups = {}, set()

    def insert(self, entry: Mapping[str, Any]) -> None:
        self._write(INSERT, entries=[_aliased(entry)])
        self._written[_identity(entry["table"], entry["match"], entry.get("priority", 0))] = entry

    def modify(self, entry: Mapping[str, Any]) -> None:
        identity = _identity(entry["table"], entry["match"], entry.get("priority", 0))
        meter = entry.get("meter") or self._written[identity].get("meter")
        entry = {**entry, **({"meter": meter} if meter else {})}
        self._write(MODIFY, entries=[_aliased(entry)])
        self._written[identity] = entry

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        entry = self._written.pop(_identity(table, match, priority))
        plain = {name: value for name, value in _aliased(entry).items() if name != "meter"}
        (bare,) = PIPELINE.encode(parse_entries({"entries": [plain]}, DEFINITION))
        bare.table_entry.ClearField("action")
        self.control.write(DELETE, bare)

    def remove_all(self) -> None:
        """Remove all that the switch says it has."""
        member, group = p4r.ActionProfileMember(), p4r.ActionProfileGroup()
        found = self.control.read(
            p4r.Entity(table_entry=p4r.TableEntry()),
            p4r.Entity(action_profile_member=member),
            p4r.Entity(action_profile_group=group),
        )
        for batch in difference([], found).batches():
            self.control.write(DELETE, *(change.entity for change in batch))
        self._written.clear()
        self._groups.clear()

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        raise EntryError(f"set default of {table}: all default actions of the program are constant")

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        member = {"id": number, "action": _alias(action), "params": params}
        self._write(INSERT, profiles=[{"profile": _alias(profile), "members": [member]}])

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        kind = MODIFY if (profile, number) in self._groups else INSERT
        group = {"id": number, "members": list(members)}
        self._write(kind, profiles=[{"profile": _alias(profile), "groups": [group]}])
        self._groups.add((profile, number))

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        self.modify({**self._written[_identity(table, match, priority)], "meter": dataclasses.asdict(rates)})

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        (cell,) = self.control.read(self.control.words.cell("counter", name, index))
        data = cell.counter_entry.data
        return data.packet_count, data.byte_count

    def _write(self, kind: int, **content: Any) -> None:
        self.control.write(kind, *PIPELINE.encode(parse_entries(content, DEFINITION)))


class BuiltInByP4Runtime(ByP4Runtime, BuiltIn):
    """The P4Runtime server of a built-in switch."""

    def __init__(self, backend: Backend) -> None:
        device = P4RuntimeDevice(Loop(), backend)
        self._server = P4RuntimeServer(device, ("127.0.0.1", 0), DEVICE_ID)
        self.connect(self._server.address)
        assert device.program is not None
        super().__init__(device.program)

    def close(self) -> None:
        self.control.close()
        self._server.close()

    def restart(self) -> None:
        self.remove_all()
        super().restart()

    def read_register(self, name: str, index: int) -> int:
        (cell,) = self.control.read(self.control.words.cell("register", name, index))
        return int.from_bytes(cell.register_entry.data.bitstring, "big")


class Bmv2ByP4Runtime(ByP4Runtime, Bmv2):
    """simple_switch_grpc."""

    def __init__(self, program: Path) -> None:
        switch = SimpleSwitch(program, device_id=DEVICE_ID)
        try:
            self.connect(switch.grpc_address)
            super().__init__(switch)
        except BaseException:
            switch.close()
            raise

    def close(self) -> None:
        self.control.close()
        super().close()

    def remove_all(self) -> None:
        super().remove_all()
        for entry in Markers.ENTRIES:
            self.insert(entry)

    def insert(self, entry: Mapping[str, Any]) -> None:
        # BMv2 leaves the meter of an entry that is gone to the next one of its handle.
        super().insert({"meter": GREEN, **entry} if self.switch.metered(entry["table"]) else entry)


def _aliased(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the names of P4Runtime."""
    return {name: _alias(value) if name in ("table", "action") else value for name, value in entry.items()}


def _alias(name: str) -> str:
    return name.rpartition(".")[2]


def _identity(table: str, match: Mapping[str, Value], priority: int) -> tuple[str, str, int]:
    return table, repr(sorted(match.items())), priority
