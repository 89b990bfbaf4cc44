# SPDX-License-Identifier: Apache-2.0
"""Gives the built-in switch what simple_switch was given, and tells where it answers otherwise."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from dlcp.switch import entries
from dlcp.switch.cells import MeterConfig
from dlcp.switch.profiles import Action, Group, Member, Target
from dlcp.switch.program import DROP_PORT, Program
from dlcp.switch.queues import PortQueueing, PortQueues
from recording import AgeSlot, Answer, Burst, Change, Markers, Packet, Recording, SetEntries, SetGroup, Sleep, Step, WriteRegister


def differences(recording: Recording, program: Program, *, batches: bool = False) -> Iterator[str]:
    """Run a recording and describe every packet, register and counter that is not as recorded.

    Parameters
    ----------
    batches
        Use the batch functions of the program instead of those for one packet.
    """
    program.clear_entries()
    program.reset_state()
    pipeline = _Batches(program) if batches else _Single(program)
    for number, step in enumerate(recording.steps):
        for packets, depths in _together(step):
            for packet, answer in zip(packets, pipeline.switch(packets, depths), strict=True):
                if answer != packet.answer:
                    yield f"step {number}: {packet.kind}: {_describe(packet, answer)}"
        _prepare(step, program)
    yield from _state_differences(recording, program)


def _together(step: Step) -> Iterator[tuple[list[Packet], dict[int, int]]]:
    """Return packets that are switched before the next ones come, and the depths of ports."""
    if isinstance(step, Packet):
        yield [step], {}
    elif isinstance(step, Markers):
        for marker in step.packets():
            yield [marker], {}
    elif isinstance(step, Burst):
        for lead in step.leads:
            yield [lead], {}
        yield step.packets, step.depths


class _Single:
    """The functions for one packet."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def switch(self, packets: Sequence[Packet], depths: dict[int, int]) -> list[Answer]:
        """Return the answers to packets that all come before the first one leaves."""
        queues: dict[int, PortQueues] = {}
        answers: list[Answer] = [None] * len(packets)
        for number, packet in enumerate(packets):
            data = bytearray(packet.data)
            port, queue, carry = self._program.ingress(data, packet.port, packet.time_us)
            if port != DROP_PORT:
                _queues(queues, port, depths).enqueue(data, (number, packet.time_us, carry), queue, 0)
        for port, waiting in queues.items():
            while departure := waiting.dequeue(0):
                number, time_us, carry = departure.carry
                data, depth = departure.packet, departure.deq_depth
                if self._program.egress(data, carry, port, time_us, 0, departure.enq_depth, depth, time_us):
                    answers[number] = port, bytes(data)
                waiting.transmit(data, departure.queue)
        return answers


class _Batches:
    """The functions for many packets."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def switch(self, packets: Sequence[Packet], depths: dict[int, int]) -> list[Answer]:
        """Return the answers to packets that all come before the first one leaves."""
        lengths = np.array([len(packet.data) for packet in packets])
        rows = np.zeros((len(packets), max(64, lengths.max())), np.uint8)
        for row, packet in zip(rows, packets, strict=True):
            row[: len(packet.data)] = np.frombuffer(packet.data, np.uint8)
        times = np.array([packet.time_us for packet in packets])
        arrived_at = np.array([packet.port for packet in packets])
        ports, priorities, carry = self._program.ingress_batch(rows, lengths, arrived_at, times)
        queues: dict[int, PortQueues] = {}
        for number, (port, queue) in enumerate(zip(ports.tolist(), priorities.tolist(), strict=True)):
            if port != DROP_PORT:
                _queues(queues, port, depths).enqueue(bytearray(), number, queue, 0)
        order, enq_depths, deq_depths = [], [], []
        for waiting in queues.values():
            while departure := waiting.dequeue(0):
                order.append(departure.carry)
                enq_depths.append(departure.enq_depth)
                deq_depths.append(departure.deq_depth)
                waiting.transmit(departure.packet, departure.queue)
        answers: list[Answer] = [None] * len(packets)
        if not order:
            return answers
        left = rows[order]
        sent = self._program.egress_batch(
            left, lengths[order], carry[order], ports[order], times[order], 0, enq_depths, deq_depths, times[order]
        )
        for number, row, forwarded in zip(order, left, sent.tolist(), strict=True):
            if forwarded:
                answers[number] = int(ports[number]), row[: lengths[number]].tobytes()
        return answers


def _queues(queues: dict[int, PortQueues], port: int, depths: dict[int, int]) -> PortQueues:
    if port not in queues:
        queues[port] = PortQueues(PortQueueing(depth_packets=depths[port]) if port in depths else None)
    return queues[port]


def _prepare(step: Step, program: Program) -> None:
    match step:
        case SetEntries(document):
            entries.apply(msgspec.convert(document, entries.Entries), program)
        case Change(operation, document):
            _change(operation, msgspec.convert(document, entries.TableEntry), program)
        case SetGroup(profile, group, members):
            program.profiles[profile].modify_group(group, members)
        case WriteRegister(register, index, value) | AgeSlot(register, index, _, value):
            program.registers[register][index] = value
        case Packet() | Burst() | Markers() | Sleep():
            pass


def _change(operation: str, entry: entries.TableEntry, program: Program) -> None:
    table = program.tables[entry.table]
    fields = {key.name: (key.match, key.width) for key in table.definition.keys}
    match = {name: entries.match_value(value, *fields[name]) for name, value in entry.match.items()}
    if operation == "delete":
        table.delete(match, entry.priority)
        return
    (table.insert if operation == "insert" else table.modify)(match, _target(entry), entry.priority)
    if entry.meter is not None:
        table.set_meter(match, MeterConfig(**dataclasses.asdict(entry.meter)), entry.priority)


def _target(entry: entries.TableEntry) -> Target:
    if entry.action is not None:
        return Action(entry.action, {name: entries.number(value) for name, value in entry.params.items()})
    return Member(entry.member) if entry.member is not None else Group(entry.group or 0)


def _describe(packet: Packet, answer: Answer) -> str:
    def shown(one: Answer) -> str:
        return "dropped" if one is None else f"port {one[0]} {one[1].hex()}"

    return f"port {packet.port} {packet.data.hex()}: recorded {shown(packet.answer)}, got {shown(answer)}"


def _state_differences(recording: Recording, program: Program) -> Iterator[str]:
    snapshot = program.snapshot()
    for name, recorded in recording.state.registers.items():
        values = snapshot.registers[name]
        found = {int(i): int(values[i]) for i in np.flatnonzero(values)}
        yield from _cell_differences(f"register {name}", recorded, found, 0)
    for name, counted in recording.state.counters.items():
        cells = snapshot.counters[name]
        here = {int(i): (int(cells[i, 0]), int(cells[i, 1])) for i in np.flatnonzero(cells.any(axis=1))}
        yield from _cell_differences(f"counter {name}", counted, here, (0, 0))


def _cell_differences(what: str, recorded: dict[int, Any], found: dict[int, Any], zero: Any) -> Iterator[str]:
    for index in sorted(recorded.keys() | found.keys()):
        before, after = recorded.get(index, zero), found.get(index, zero)
        if before != after:
            yield f"{what}[{index}]: recorded {before}, got {after}"
