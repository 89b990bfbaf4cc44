# SPDX-License-Identifier: Apache-2.0
"""Inputs and answers of a switch: the steps of a recording, and the file that holds them.

A file has one JSON document a line: first the program's digest and who answered, then the steps in order, last the
registers and counters as they were in the end, without the zeros.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

Answer: TypeAlias = "tuple[int, bytes] | None"
"""Egress port and bytes of a packet that came out; None for one that did not."""


@dataclass
class Packet:
    """A packet that is sent alone: the next step waits until it came out, or certainly does not."""

    kind: str
    """The purpose of the packet; for reports only."""
    port: int
    data: bytes
    time_us: int = 0
    """The ingress time stamp; exact where the program stored it, else at most some milliseconds early."""
    answer: Answer = None


@dataclass
class Burst:
    """Packets that all wait in their queues before the first of them leaves.

    The queues are made slow for it. As a slow queue lets the first packet through at once, each gets a lead before.
    """

    leads: list[Packet]
    packets: list[Packet]
    depths: dict[int, int]
    """The ports that all this goes to, and the depth of each of their queues in packets."""


@dataclass
class Markers:
    """Four packets that show that a packet before them was dropped: one for each of simple_switch's egress threads.

    Each thread sends what it was given in order, so what did not come out before the markers does not come out.
    """

    number: int
    """Different for all markers of a recording."""
    time_us: int = 0

    ENTRIES: ClassVar = tuple(
        {
            "table": "ethernet_route",
            "match": {"ethernet_dst": f"02:ff:ff:ff:ff:{port:02x}"},
            "action": "to_port",
            "params": {"port": port},
        }
        for port in range(60, 64)
    )
    """To be in every set of entries: markers come out of ports that nothing else uses."""

    def packets(self) -> list[Packet]:
        """Return the markers, with the only answer there can be."""
        made = []
        for port in range(60, 64):
            data = bytes([2, 255, 255, 255, 255, port, 2, 0, 0, 0, 0, 1, 0x88, 0xB5]) + self.number.to_bytes(4, "big")
            made.append(Packet("marker", port, data, self.time_us, (port, data)))
        return made


@dataclass
class SetEntries:
    """Removes all entries and writes these; the form is that of `dlcp.switch.entry_files`."""

    entries: dict[str, Any]


@dataclass
class Change:
    """Inserts, modifies or deletes one entry."""

    operation: str
    entry: dict[str, Any]


@dataclass
class SetGroup:
    """Changes the members of a group."""

    profile: str
    group: int
    members: list[int]


@dataclass
class WriteRegister:
    """Writes one cell of a register."""

    register: str
    index: int
    value: int


@dataclass
class AgeSlot:
    """Writes a time stamp of ``age_us`` ago into a register, so that nobody has to wait that long."""

    register: str
    index: int
    age_us: int
    value: int = 0
    """What was written; the rest is for recording it again."""


@dataclass
class Sleep:
    """Lets time pass, for meters and for what really ages."""

    seconds: float


Step: TypeAlias = "Packet | Burst | Markers | SetEntries | Change | SetGroup | WriteRegister | AgeSlot | Sleep"
_STEPS: "dict[str, type[Any]]" = {
    kind.__name__: kind for kind in (Burst, Markers, SetEntries, Change, SetGroup, WriteRegister, AgeSlot, Sleep)
}


@dataclass
class State:
    """Registers (index to value) and counters (index to packets and bytes) by name; zeros are left out."""

    registers: dict[str, dict[int, int]]
    counters: dict[str, dict[int, tuple[int, int]]]


@dataclass
class Recording:
    """A run of a program on some switch."""

    program: str
    """SHA-256 of the program's JSON."""
    switch: str
    """Who answered."""
    steps: list[Step]
    state: State

    def packets(self) -> Iterator[Packet]:
        """Return all packets but the markers, in the order in which they were sent."""
        for step in self.steps:
            if isinstance(step, Packet):
                yield step
            elif isinstance(step, Burst):
                yield from step.leads
                yield from step.packets


def write(path: Path, recording: Recording) -> None:
    """Write a recording; the same recording always gives the same bytes."""
    lines: list[Any] = [{"program": recording.program, "switch": recording.switch}]
    lines += [_encode(step) for step in recording.steps]
    lines.append({"registers": recording.state.registers, "counters": recording.state.counters})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode("ascii"), 9, mtime=0))


def read(path: Path) -> Recording:
    """Read what `write` wrote."""
    head, *steps, tail = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    registers = {name: {int(i): value for i, value in cells.items()} for name, cells in tail["registers"].items()}
    counters = {name: {int(i): tuple(value) for i, value in cells.items()} for name, cells in tail["counters"].items()}
    return Recording(head["program"], head["switch"], [_decode(step) for step in steps], State(registers, counters))


def _encode(step: Step) -> list[Any]:
    if isinstance(step, Packet):
        out_port, out = step.answer or (-1, b"")
        return [step.kind, step.port, step.data.hex(), step.time_us, out_port, out.hex()]
    if isinstance(step, Burst):
        return ["Burst", *([_encode(packet) for packet in part] for part in (step.leads, step.packets)), step.depths]
    return [type(step).__name__, *vars(step).values()]


def _decode(line: list[Any]) -> Step:
    name, *values = line
    if name == "Burst":
        leads, packets = ([_packet(packet) for packet in part] for part in values[:2])
        return Burst(leads, packets, {int(port): depth for port, depth in values[2].items()})
    if name in _STEPS:
        step: Step = _STEPS[name](*values)
        return step
    return _packet(line)


def _packet(line: list[Any]) -> Packet:
    kind, port, data, time_us, out_port, out = line
    answer = None if out_port < 0 else (out_port, bytes.fromhex(out))
    return Packet(kind, port, bytes.fromhex(data), time_us, answer)
