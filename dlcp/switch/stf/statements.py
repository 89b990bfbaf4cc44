# SPDX-License-Identifier: Apache-2.0
"""What a packet test says, one statement after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from dlcp.switch.entries import MeterRates, TableEntry, Value
from dlcp.switch.stf.frames import Pattern


class StfError(ValueError):
    """A test that cannot be run; the message names file, line and what is wrong."""


@dataclass(frozen=True)
class Write:
    """Add or modify a table entry."""

    line: int
    operation: str
    """``add`` or ``modify``."""
    entry: TableEntry


@dataclass(frozen=True)
class Remove:
    """Remove an entry."""

    line: int
    table: str
    match: Mapping[str, Value]
    priority: int


@dataclass(frozen=True)
class RemoveAll:
    """Remove all entries, members and groups."""

    line: int


@dataclass(frozen=True)
class SetDefault:
    """Set a table's default action."""

    line: int
    table: str
    action: str
    params: Mapping[str, Value]


@dataclass(frozen=True)
class AddMember:
    """Add a member to an action profile."""

    line: int
    profile: str
    id: int
    action: str
    params: Mapping[str, Value]


@dataclass(frozen=True)
class SetGroup:
    """Give a group these members; a new group if there is none of this number."""

    line: int
    profile: str
    id: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class SetMeter:
    """Set the direct meter of an entry."""

    line: int
    table: str
    match: Mapping[str, Value]
    priority: int
    rates: MeterRates


@dataclass(frozen=True)
class WriteRegister:
    """Write a cell of a register."""

    line: int
    register: str
    index: int
    value: int
    ago: bool = False
    """The value is what the clock showed ``value`` microseconds ago."""


@dataclass(frozen=True)
class CheckRegister:
    """Compare a cell of a register."""

    line: int
    register: str
    index: int
    comparison: str
    value: int


@dataclass(frozen=True)
class CheckCounter:
    """Compare a cell of a counter."""

    line: int
    counter: str
    index: int
    unit: str
    """``packets`` or ``bytes``."""
    comparison: str
    value: int


@dataclass(frozen=True)
class Packet:
    """A packet comes in."""

    line: int
    port: int
    data: bytes


@dataclass(frozen=True)
class Expect:
    """A packet comes out."""

    line: int
    port: int
    pattern: Pattern | None
    """None: any packet."""
    longer: bool = False


@dataclass(frozen=True)
class NoPacket:
    """Nothing comes out; without an ``expect`` this is so anyway, said or not."""

    line: int


@dataclass(frozen=True)
class Wait:
    """Let time pass, for meters and whatever else ages."""

    line: int
    seconds: float


@dataclass(frozen=True)
class Slow:
    """Make the queues of a port slow: each lets one packet out and then none until ``release``."""

    line: int
    port: int
    depth_packets: int


@dataclass(frozen=True)
class Release:
    """Let out what waits in the queues of a port."""

    line: int
    port: int


Statement: TypeAlias = (
    Write
    | Remove
    | RemoveAll
    | SetDefault
    | AddMember
    | SetGroup
    | SetMeter
    | WriteRegister
    | CheckRegister
    | CheckCounter
    | Packet
    | Expect
    | NoPacket
    | Wait
    | Slow
    | Release
)


@dataclass(frozen=True)
class Script:
    """A file of statements."""

    path: Path
    statements: tuple[Statement, ...] = field(default=())

    def packets(self) -> int:
        """Return how many packets are sent."""
        return sum(isinstance(statement, Packet) for statement in self.statements)
