# SPDX-License-Identifier: Apache-2.0
"""The Tofino program in the place of the built-in switch's: what runs packet tests on that runs them on this, too.

Ports have the fabric's numbers, which are the device's here. Depths are in packets as in v1model: each is ``CELLS``
cells, as ``set_up.py`` has it, so that a report is sent whenever a queue has become deeper or shallower by one. The
traffic manager drops whatever is coloured for it: its queue is as deep as was reported. Queue 0 is as deep as the last
report says, too, and what is coloured there is dropped above the lowest of its thresholds.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from set_up import tofino_action

from dlcp.switch import DROP_PORT, Action, MemberRef, MeterConfig, Program
from dlcp.wire import VERSION, Queue
from tests.tna.p4externs import Bucket, Counter, Hash, PacketIn, PacketOut, Register, TooShortError
from tests.tna.p4machine import Entry, Machine
from tests.tna.p4values import Struct, Value

SOURCE = Path(__file__).parents[2] / "p4" / "tna" / "dlcp.p4"
CELLS: Final = 20
"""Of 80 bytes, in a frame of 1,518 and what a Tofino keeps with it."""
DEPTH_MAX: Final = (1 << 19) - 1
PORTS: Final = 64
RECIRCULATION: Final = 68
OWNED: Final = 0x80000000
"""SLOT_OWNED, which v1model sets in every owner: set here too, so that owners that a test writes are owners."""
TICK_US: Final = 65.536
RED: Final = 3
INGRESS: Final = (
    "headers_t",
    "metadata_t",
    "ingress_intrinsic_metadata_t",
    "ingress_intrinsic_metadata_from_parser_t",
    "ingress_intrinsic_metadata_for_deparser_t",
    "ingress_intrinsic_metadata_for_tm_t",
)
EGRESS: Final = (
    "headers_t",
    "egress_metadata_t",
    "egress_intrinsic_metadata_t",
    "egress_intrinsic_metadata_from_parser_t",
    "egress_intrinsic_metadata_for_deparser_t",
    "egress_intrinsic_metadata_for_output_port_t",
)


class TnaProgram:
    """The program, its entries and its state, with the members of :class:`dlcp.switch.Program` that tests use.

    Parameters
    ----------
    beside
        The program for v1model; what it refuses is refused here.

    Attributes
    ----------
    now_us
        The clock, as it was for the last packet.
    """

    backend = "p4/tna"

    def __init__(self, beside: Program, source: Path = SOURCE) -> None:
        self._beside, self.definition = beside, beside.definition
        self.machine = Machine(source)
        blocks = self.machine.source.blocks.values()
        self._asks_for_parser_errors = any(_mentions(block.body, "parser_err") for block in blocks)
        owner_hash = self.machine.parts["owner_hash"]
        assert isinstance(owner_hash, Hash)
        owner_hash.always = OWNED
        self.tables = {name: _Table(self, beside.tables[name], name) for name in _short_names(beside.tables)}
        self.profiles = _Names({"route_selector": _Profile(self, beside.profiles["route_selector"])})
        self.tables = _Names(self.tables)
        self.registers = _Names(
            {name: _Cells(self, name) for name in ("queue_depth", "slot_owner", "slot_used_us", "slot_spent")}
        )
        self.counters = _Names({name: _Counts(self, name) for name in ("ingress_events", "egress_events")})
        self.now_us = 0
        self.clear_entries()

    def clear_entries(self) -> None:
        """Remove all entries, members and groups."""
        self._beside.clear_entries()
        self.machine.tables.clear()
        self.machine.members.clear()
        self.machine.groups.clear()
        for port in range(PORTS):
            self.know_port(port)

    def know_port(self, port: int) -> None:
        """Let a port be one that the device has."""
        entry = Entry({"eg_port": (port, 511)}, 0, ("action", ("to_device_port", [port])))
        ports = self.machine.tables["device_port"].entries
        if port != DROP_PORT and entry not in ports:
            ports.append(entry)

    def reset_state(self) -> None:
        """Set registers and counters to zero."""
        for part in (*self.machine.parts.values(), self.machine.top.find("queue_depth")):
            if isinstance(part, Register | Counter):
                part.cells.clear()

    # ------------------------------------------------------------------------------------------------------ packets

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Return egress port, queue, and what goes with the packet to egress."""
        done = self._ingress(bytes(packet), port, now_us, {"ingress_port": port % PORTS})
        if done is None:
            return DROP_PORT, 0, None
        to_port, queue, color, data = done
        dropped = color == RED and (queue != Queue.EXCESS or self._excess_is_deep(to_port))
        return (DROP_PORT if dropped else to_port), queue, data

    def _excess_is_deep(self, port: int) -> bool:
        entries = self.machine.tables["drop_threshold"].entries
        named = [entry.target[1] for entry in entries if entry.match["queue"][0] == Queue.EXCESS]
        lowest = min(numbers[0] for _, numbers in named)
        return bool(CELLS * self.registers["queue_depth"][port % PORTS << 3 | Queue.EXCESS] > lowest)

    def _ingress(
        self, data: bytes, port: int, now_us: int, intrinsic: dict[str, int]
    ) -> tuple[int, int, int, bytes] | None:
        machine = self.machine
        machine.accessed.clear()
        machine.frame_bytes, machine.now_ns = len(data), now_us * 1000
        headers, meta, ig, from_parser, to_deparser, tm = _structs(machine, *INGRESS)
        source = PacketIn(data, intrinsic | {"ingress_mac_tstamp": now_us * 1000}, port)
        parser, control, deparser = machine.stages[:3]
        tm.put("ucast_egress_port", Value(DROP_PORT))  # as the manual has it, a packet that gets no port is dropped
        self.now_us = now_us
        try:
            machine.call_stage(parser, [source, headers, meta, ig])
        except TooShortError:
            if not self._asks_for_parser_errors:
                return None  # the parser of a Tofino drops it
            from_parser.put("parser_err", machine.top.find("PARSER_ERROR_PARTIAL_HDR"))
        machine.call_stage(control, [headers, meta, ig, from_parser, to_deparser, tm])
        if to_deparser.fields["drop_ctl"].number:
            return None
        out = PacketOut()
        machine.call_stage(deparser, [out, headers, meta])
        found = (tm.fields[name].number for name in ("ucast_egress_port", "qid", "packet_color"))
        return (*found, out.data + source.data[source.at :])  # type: ignore[return-value]

    def differs(self, data: bytes) -> str:
        """Return which of the differences in ``p4/tna/README.md`` a packet meets; empty if none."""
        machine = self.machine
        names = ("headers_t", "metadata_t", "ingress_intrinsic_metadata_t")
        headers, meta, ig = _structs(machine, *names)
        with suppress(TooShortError):
            machine.call_stage(machine.stages[0], [PacketIn(data, {}, 0), headers, meta, ig])
        dlcp = headers.fields["dlcp"]
        if not dlcp.valid or dlcp.fields["version"].number != VERSION:
            return ""
        if dlcp.fields["retransmission"].number:
            return "sent again"
        trimmed = (entry.match["job"][0] for entry in self.machine.tables["trimming"].entries)
        return "of a job that is trimmed" if dlcp.fields["job"].number in trimmed else ""

    def egress(
        self, packet: bytearray, carry: bytes, port: int, enq_us: int, waited_us: int, enq: int, deq: int, now_us: int
    ) -> int:
        """Finish a packet, and let what it reports go round to ingress; return its bytes."""
        machine = self.machine
        machine.mirrored.clear()
        packet[:] = self._egress(carry, len(packet), deq * CELLS, now_us)
        for _, report in list(machine.mirrored):
            again = self._egress(report, len(report), 0, now_us)
            self._ingress(again, RECIRCULATION, now_us, {"ingress_port": RECIRCULATION})
        return len(packet)

    def _egress(self, data: bytes, frame_bytes: int, depth_cells: int, now_us: int) -> bytes:
        machine = self.machine
        machine.accessed.clear()
        machine.frame_bytes, machine.now_ns = frame_bytes, now_us * 1000
        headers, meta, eg, from_parser, to_deparser, to_port = _structs(machine, *EGRESS)
        source = PacketIn(data, {"deq_qdepth": min(DEPTH_MAX, depth_cells)}, 0)
        parser, control, deparser = machine.stages[3:]
        machine.call_stage(parser, [source, headers, meta, eg])
        machine.call_stage(control, [headers, meta, eg, from_parser, to_deparser, to_port])
        out = PacketOut()
        machine.call_stage(deparser, [out, headers, meta, to_deparser])
        return out.data + source.data[source.at :]


def _mentions(tree: Any, word: str) -> bool:
    """Return whether a word is anywhere in a piece of a program."""
    return tree == word or (isinstance(tree, list | tuple) and any(_mentions(part, word) for part in tree))


def _structs(machine: Machine, *names: str) -> Iterator[Struct]:
    return (Struct(machine, name) for name in names)


class _Names(dict[str, Any]):
    """By short names, whatever stands before them."""

    def __missing__(self, name: str) -> Any:
        short = name.rpartition(".")[2]
        if short == name:
            raise KeyError(name)
        return self[short]


def _short_names(tables: Mapping[str, Any]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in tables})


class _Table:
    """A table as the control plane sees it."""

    def __init__(self, program: TnaProgram, beside: Any, name: str) -> None:
        self._program, self._beside, self._name = program, beside, name
        self.definition = beside.definition

    @property
    def _entries(self) -> list[Entry]:
        return self._program.machine.tables[self._name].entries

    def insert(self, match: dict[str, Any], target: Any, priority: int = 0, meter: MeterConfig | None = None) -> None:
        self._beside.insert(match, target, priority, meter)
        self._entries.append(Entry(self._masks(match), priority, self._target(target)))
        if meter is not None:
            self.set_meter(match, meter, priority)

    def modify(self, match: dict[str, Any], target: Any, priority: int = 0) -> None:
        self._beside.modify(match, target, priority)
        self._find(match, priority).target = self._target(target)

    def delete(self, match: dict[str, Any], priority: int = 0) -> None:
        self._beside.delete(match, priority)
        self._entries.remove(self._find(match, priority))

    def set_default(self, action: Action) -> None:
        self._beside.set_default(action)
        self._program.machine.tables[self._name].default = _numbers(self._program, action)

    def set_meter(self, match: dict[str, Any], config: MeterConfig | None, priority: int = 0) -> None:
        self._find(match, priority).bucket = Bucket(dataclasses.astuple(config)) if config else None

    def _find(self, match: dict[str, Any], priority: int) -> Entry:
        masks = self._masks(match)
        return next(entry for entry in self._entries if entry.match == masks and entry.priority == priority)

    def _masks(self, match: dict[str, Any]) -> dict[str, tuple[int, int]]:
        found = {}
        for key in self.definition.keys:
            whole = (1 << key.width) - 1
            given = match.get(key.name)
            if given is None:
                found[key.name] = 0, 0
            elif key.match == "exact":
                found[key.name] = given, whole
            elif key.match == "lpm":
                mask = whole ^ whole >> given[1]
                found[key.name] = given[0] & mask, mask
            else:
                found[key.name] = given[0] & given[1], given[1]
        return found

    def _target(self, target: Any) -> tuple[str, Any]:
        if isinstance(target, Action):
            return "action", _numbers(self._program, target)
        return ("member" if isinstance(target, MemberRef) else "group"), target.id


def _numbers(program: TnaProgram, action: Action) -> tuple[str, list[int]]:
    """Return an action's short name and its parameters in order; depths in cells, as ``set_up.py`` has them."""
    name = action.name.rpartition(".")[2]
    if name in ("NoAction", "trim"):
        return name, []
    action = tofino_action(Action(name, action.params))
    name = action.name
    blocks = program.machine.source.blocks.values()
    parameters = next(block.actions[name][0] for block in blocks if name in block.actions)
    numbers = [action.params[parameter] for parameter in parameters]
    if "port" in action.params:
        program.know_port(action.params["port"])
    return name, [min(DEPTH_MAX, CELLS * depth) for depth in numbers] if parameters == ["depth"] else numbers


class _Profile:
    """Members and groups; as on BMv2, members stand in groups in the order of their handles."""

    def __init__(self, program: TnaProgram, beside: Any) -> None:
        self._program, self._beside = program, beside
        self._handles: dict[int, int] = {}

    def groups(self) -> dict[int, dict[int, int]]:
        return self._beside.groups()

    def add_member(self, number: int, action: Action) -> None:
        self._beside.add_member(number, action)
        known = self._program.machine.members
        self._handles = {member: handle for member, handle in self._handles.items() if member in known}
        self._handles[number] = next(
            free for free in range(len(self._handles) + 1) if free not in self._handles.values()
        )
        known[number] = _numbers(self._program, action)

    def add_group(self, number: int, members: tuple[int, ...]) -> None:
        self._beside.add_group(number, members)
        self._program.machine.groups[number] = sorted(members, key=lambda member: self._handles[member])

    def modify_group(self, number: int, members: tuple[int, ...]) -> None:
        self._beside.modify_group(number, members)
        self._program.machine.groups[number] = sorted(members, key=lambda member: self._handles[member])


class _Cells:
    """A register of v1model, from those that hold the same here."""

    def __init__(self, program: TnaProgram, name: str) -> None:
        self._program, self._machine, self._name = program, program.machine, name

    def __getitem__(self, index: int) -> int:
        parts, queue_depth = self._machine.parts, self._machine.top.find("queue_depth")
        if self._name == "queue_depth":
            return int(queue_depth.cell(index).number) // CELLS
        if self._name == "slot_spent":
            return int(parts["slot_spent"].cell(index).number)
        slot = parts["slot_owner"].cell(index)
        if self._name == "slot_owner":
            return int(slot.fields["owner"].number & 0xFFFFFFFF)
        return round(slot.fields["used_ticks"].number * TICK_US)

    def __setitem__(self, index: int, value: int) -> None:
        parts = self._machine.parts
        if self._name == "queue_depth":
            # Egress has reported it, and knows that it has.
            cells = Value(min(DEPTH_MAX, value * CELLS))
            for register in (self._machine.top.find("queue_depth"), parts["reported_depth"]):
                register.cells[index] = cells.to(register.cell(index).width)
        elif self._name == "slot_spent":
            parts["slot_spent"].cells[index] = Value(value, (16, False))
        else:
            slot = parts["slot_owner"].cell(index)
            if self._name == "slot_owner":
                slot.put("owner", Value(value))
            elif slot.fields["owner"].number:  # in v1model too a slot without an owner is free, whenever it was used
                age_us = (self._program.now_us - value) % (1 << 32)
                slot.put("used_ticks", Value(math.floor((self._program.now_us - age_us) / TICK_US)))


class _Counts:
    """A counter of v1model, from those that count the same here."""

    EVENTS = 8
    UNTRUSTED, OVER_SHARE, FORWARDED, MARKED = 2, 3, 0, 1

    def __init__(self, program: TnaProgram, name: str) -> None:
        self._machine, self._name = program.machine, name

    def __getitem__(self, index: int) -> tuple[int, int]:
        parts = self._machine.parts
        where, event = divmod(index, self.EVENTS)
        if self._name == "egress_events":
            both = [parts["egress_events"].cells[where * self.EVENTS + bits] for bits in range(4)]
            packets, octets = map(sum, zip(*(both if event == self.FORWARDED else (both[1], both[3])), strict=True))
            packets, octets = (packets, octets) if event in (self.FORWARDED, self.MARKED) else (0, 0)
        elif event in (self.UNTRUSTED, self.OVER_SHARE):
            packets, octets = parts["untrusted_events" if event == self.UNTRUSTED else "share_events"].cells[where]
        else:
            packets, octets = parts["ingress_events"].cells[index]
        return packets, octets
