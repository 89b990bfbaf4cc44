# SPDX-License-Identifier: Apache-2.0
"""Gives the built-in switch the inputs of simple_switch, and reports where its answers differ."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dlcp.switch import (
    DEPTH_PACKETS,
    DROP_PORT,
    PortQueueing,
    Program,
    TableEntry,
    apply_entries,
    parse_entries,
)
from tests.conformance.recording import (
    AgeSlot,
    Answer,
    Burst,
    Change,
    Markers,
    Packet,
    Recording,
    SetEntries,
    SetGroup,
    Sleep,
    State,
    Step,
    WriteRegister,
)
from tests.switch import batches
from tests.switch.object_switch import ObjectQueues

START_US, PACKET_US = 2_000_000, 1_000
"""The clock of `answered`: when it starts, and how far a packet moves it."""


def answered(steps: Sequence[Step], program: Program) -> Recording:
    """Return the steps with the answers of the built-in switch in the place of simple_switch's."""
    program.clear_entries()
    program.reset_state()
    pipeline, now_us = _Single(program), START_US
    done: list[Step] = []
    for step in steps:
        now_us += PACKET_US
        match step:
            case Packet():
                stamped = dataclasses.replace(step, time_us=now_us)
                done.append(dataclasses.replace(stamped, answer=pipeline.one_by_one([stamped])[0]))
            case Burst(leads, packets, depths):
                leads, packets = ([dataclasses.replace(p, time_us=now_us) for p in part] for part in (leads, packets))
                answers = pipeline.one_by_one(leads), pipeline.at_once(packets, depths)
                leads, packets = (
                    [dataclasses.replace(packet, answer=answer) for packet, answer in zip(part, own, strict=True)]
                    for part, own in zip((leads, packets), answers, strict=True)
                )
                done.append(Burst(leads, packets, depths))
            case Markers():
                pass
            case _:
                if isinstance(step, AgeSlot):
                    step = dataclasses.replace(step, value=(now_us - step.age_us) % (1 << 32))
                if isinstance(step, Sleep):
                    now_us += round(step.seconds * 1e6)
                _prepare(step, program)
                done.append(step)
    return Recording(program.digest, f"built-in switch, {program.backend}", done, _state(program))


def differences(recording: Recording, program: Program, *, batches: bool = False) -> Iterator[str]:
    """Run a recording and describe every packet, register and counter that is not as recorded.

    Parameters
    ----------
    batches
        Use the batch functions of the program instead of those for one packet, with batches as large as may be.
    """
    program.clear_entries()
    program.reset_state()
    pipeline = _Batches(program) if batches else _Single(program)
    together = batches and not any(_has_thresholds(step) for step in recording.steps)
    alone: list[Packet] = []
    for number, step in enumerate(recording.steps):
        if isinstance(step, Packet | Markers):
            alone += step.packets() if isinstance(step, Markers) else [step]
            following = recording.steps[number + 1 : number + 2]
            if together and isinstance(following and following[0], Packet | Markers):
                continue
            yield from _compared(number, alone, pipeline.one_by_one(alone))
            alone = []
        elif isinstance(step, Burst):
            yield from _compared(number, step.leads, pipeline.one_by_one(step.leads))
            yield from _compared(number, step.packets, pipeline.at_once(step.packets, step.depths))
        else:
            _prepare(step, program)
    yield from _state_differences(recording, program)


def _has_thresholds(step: Step) -> bool:
    """Say whether a step brings the drop rule into play: what egress writes then decides what ingress does next."""
    return isinstance(step, SetEntries) and any(
        item["table"].endswith("drop_threshold") for item in step.entries["entries"]
    )


def _compared(number: int, packets: Sequence[Packet], answers: Sequence[Answer]) -> Iterator[str]:
    for packet, answer in zip(packets, answers, strict=True):
        if answer != packet.answer:
            yield f"step {number}: {packet.kind}: {_describe(packet, answer)}"


class _Single:
    """The functions for one packet."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def one_by_one(self, packets: Sequence[Packet]) -> list[Answer]:
        """Return the answers to packets that each leave before the next comes."""
        return [self.at_once([packet], {})[0] for packet in packets]

    def at_once(self, packets: Sequence[Packet], depths: Mapping[int, int]) -> list[Answer]:
        """Return the answers to packets that all come before the first one leaves."""
        queues = _Queues(depths)
        answers: list[Answer] = [None] * len(packets)
        waiting: list[tuple[bytearray, Any]] = []
        for number, packet in enumerate(packets):
            data = bytearray(packet.data)
            port, queue, carry = self._program.ingress(data, packet.port, packet.time_us)
            waiting.append((data, carry))
            queues.enqueue(number, port, queue)
        for number, port, enq_depth, deq_depth in queues.departures():
            data, carry = waiting[number]
            time_us = packets[number].time_us
            size = self._program.egress(data, carry, port, time_us, 0, enq_depth, deq_depth, time_us)
            if size:
                answers[number] = port, bytes(data[:size])
        return answers


class _Batches:
    """The functions for many packets."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def one_by_one(self, packets: Sequence[Packet]) -> list[Answer]:
        """Return the answers to packets that each leave before the next comes, or might as well."""
        return self._switch(packets, None)

    def at_once(self, packets: Sequence[Packet], depths: Mapping[int, int]) -> list[Answer]:
        """Return the answers to packets that all come before the first one leaves."""
        return self._switch(packets, _Queues(depths))

    def _switch(self, packets: Sequence[Packet], queues: "_Queues | None") -> list[Answer]:
        answers: list[Answer] = [None] * len(packets)
        if not packets:
            return answers
        lengths = np.array([len(packet.data) for packet in packets])
        rows = np.zeros((len(packets), max(64, lengths.max())), np.uint8)
        for row, packet in zip(rows, packets, strict=True):
            row[: len(packet.data)] = np.frombuffer(packet.data, np.uint8)
        times = np.array([packet.time_us for packet in packets])
        arrived_at = np.array([packet.port for packet in packets])
        ports, priorities, carry = batches.ingress(self._program, rows, lengths, arrived_at, times)
        if queues is None:
            leaving = [(int(number), 0, 0) for number in np.flatnonzero(ports != DROP_PORT)]
        else:
            for number, (port, queue) in enumerate(zip(ports.tolist(), priorities.tolist(), strict=True)):
                queues.enqueue(number, port, queue)
            leaving = [(number, enq, deq) for number, _, enq, deq in queues.departures()]
        if not leaving:
            return answers
        order, enq_depths, deq_depths = (list(column) for column in zip(*leaving, strict=True))
        left = rows[order]
        sizes = batches.egress(
            self._program,
            left,
            lengths[order],
            carry[order],
            ports[order],
            times[order],
            0,
            enq_depths,
            deq_depths,
            times[order],
        )
        for number, row, size in zip(order, left, sizes.tolist(), strict=True):
            if size:
                answers[number] = int(ports[number]), row[:size].tobytes()
        return answers


class _Queues:
    """The queues of all ports; packets are known by their numbers."""

    def __init__(self, depths: Mapping[int, int]) -> None:
        self._depths = depths
        self._ports: dict[int, ObjectQueues] = {}

    def enqueue(self, number: int, port: int, queue: int) -> None:
        """Let a packet wait, unless it is dropped or finds no place."""
        if port == DROP_PORT:
            return
        if port not in self._ports:
            self._ports[port] = ObjectQueues(PortQueueing(depth_packets=self._depths.get(port, DEPTH_PACKETS)))
        self._ports[port].enqueue(bytearray(), number, queue, 0)

    def departures(self) -> Iterator[tuple[int, int, int, int]]:
        """Return number, port and depths (when it came and when it left) of every packet in the order of service."""
        for port, waiting in self._ports.items():
            while departure := waiting.dequeue(0):
                yield departure.carry, port, departure.enq_depth, departure.deq_depth
                waiting.transmit(departure.packet, departure.queue)


def _prepare(step: Step, program: Program) -> None:
    match step:
        case SetEntries(document):
            apply_entries(parse_entries(document, program.definition), program)
        case Change("delete", document):  # it may lack a target
            place = {name: document[name] for name in ("table", "match", "priority") if name in document}
            (entry,) = parse_entries({"entries": [{**place, "member": 0}]}, program.definition).entries
            program.tables[entry.table].delete(entry.match, entry.priority)
        case Change(operation, document):
            (entry,) = parse_entries({"entries": [document]}, program.definition).entries
            _change(operation, entry, program)
        case SetGroup(profile, group, members):
            program.profiles[profile].modify_group(group, members)
        case WriteRegister(register, index, value) | AgeSlot(register, index, _, value):
            program.registers[register][index] = value
        case _:
            assert isinstance(step, Sleep)  # the time that passed is in the time stamps


def _change(operation: str, entry: TableEntry, program: Program) -> None:
    table = program.tables[entry.table]
    (table.insert if operation == "insert" else table.modify)(entry.match, entry.target, entry.priority)
    if entry.meter is not None:
        table.set_meter(entry.match, entry.meter, entry.priority)


def _describe(packet: Packet, answer: Answer) -> str:
    def shown(one: Answer) -> str:
        return "dropped" if one is None else f"port {one[0]} {one[1].hex()}"

    return f"port {packet.port} {packet.data.hex()}: recorded {shown(packet.answer)}, got {shown(answer)}"


def _state_differences(recording: Recording, program: Program) -> Iterator[str]:
    here = _state(program)
    for name, recorded in recording.state.registers.items():
        yield from _cell_differences(f"register {name}", recorded, here.registers[name], 0)
    for name, counted in recording.state.counters.items():
        yield from _cell_differences(f"counter {name}", counted, here.counters[name], (0, 0))


def _state(program: Program) -> State:
    snapshot = program.snapshot()
    registers = {name: {int(i): int(v[i]) for i in np.flatnonzero(v)} for name, v in snapshot.registers.items()}
    counters = {
        name: {int(i): (int(v[i, 0]), int(v[i, 1])) for i in np.flatnonzero(v.any(axis=1))}
        for name, v in snapshot.counters.items()
    }
    return State(registers, counters)


def _cell_differences(what: str, recorded: dict[int, Any], found: dict[int, Any], zero: Any) -> Iterator[str]:
    for index in sorted(recorded.keys() | found.keys()):
        before, after = recorded.get(index, zero), found.get(index, zero)
        if before != after:
            yield f"{what}[{index}]: recorded {before}, got {after}"
