# SPDX-License-Identifier: Apache-2.0
"""Runs packet tests on a switch: every packet that comes out must be expected, and every expected one must come.

After each packet the switch settles, so what the following ``expect`` statements name is the answer to that packet; on
a slow port it is what ``release`` let out. Nothing is skipped: a statement that a switch cannot carry out is an error.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from dlcp.switch.entries import MeterRates, TableEntry, Value
from dlcp.switch.stf.statements import (
    AddMember,
    CheckCounter,
    CheckRegister,
    Expect,
    NoPacket,
    Packet,
    Release,
    Remove,
    RemoveAll,
    Script,
    SetDefault,
    SetGroup,
    SetMeter,
    Slow,
    Statement,
    Wait,
    Write,
    WriteRegister,
)

_COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Target(Protocol):
    """A switch under test."""

    def restart(self) -> None:
        """Remove all entries, and set registers and counters to zero."""

    def insert(self, entry: TableEntry) -> None:
        """Add an entry."""

    def modify(self, entry: TableEntry) -> None:
        """Give an entry another action, member or group."""

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a default action."""

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Make a group, or give it other members."""

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterRates) -> None:
        """Set an entry's meter; its buckets are full."""

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write a cell."""

    def read_register(self, name: str, index: int) -> int:
        """Read a cell."""

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of a cell."""

    def now_us(self) -> int:
        """Return the clock that packets are stamped with."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets``."""

    def release(self, port: int) -> None:
        """Let out what the queues of a port hold."""

    def send(self, port: int, data: bytes) -> None:
        """Give the switch a packet."""

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what came out since the last call, once the switch has settled."""


@dataclass
class Outcome:
    """What came of a test."""

    packets: int = 0
    """Sent."""
    expected: int = 0
    """Came out as expected."""
    failures: list[str] = field(default_factory=list)
    """What was wrong, each with file and line; empty if the test passed."""

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures


def run(script: Script, target: Target) -> Outcome:
    """Run a test from a fresh start.

    Raises
    ------
    EntryError, EntriesError
        An entry, name or index that does not fit the program.
    """
    return _Run(script, target).outcome


class _Run:
    def __init__(self, script: Script, target: Target) -> None:
        self._script, self._target = script, target
        self.outcome = Outcome()
        self._sent: Packet | Release | None = None
        self._awaited: list[Expect] = []
        target.restart()
        for statement in script.statements:
            if not isinstance(statement, Expect | NoPacket):
                self._settle()
            self._do(statement)
        self._settle()

    def _do(self, statement: Statement) -> None:
        match statement:
            case Packet(_, port, data):
                self.outcome.packets += 1
                self._sent = statement
                self._target.send(port, data)
            case Expect():
                self._awaited.append(statement)
            case NoPacket(line):
                if self._awaited:
                    self._fail(line, "no_packet, but a packet is expected as well")
            case CheckRegister(line, register, index, comparison, value):
                found = self._target.read_register(register, index)
                self._compare(line, f"register {register}({index})", found, comparison, value)
            case CheckCounter(line, counter, index, unit, comparison, value):
                found = self._target.read_counter(counter, index)[unit == "bytes"]
                self._compare(line, f"counter {counter}({index}) {unit}", found, comparison, value)
            case Release(_, port):
                self._sent = statement
                self._target.release(port)
            case _:
                prepare(statement, self._target)

    def _settle(self) -> None:
        """Compare what came out with what was expected since the last packet."""
        came = self._target.receive()
        for expect in self._awaited:
            found = next((one for one in came if _fits(expect, *one)), None)
            if found is None:
                self._missing(expect, came)
            else:
                came.remove(found)
                self.outcome.expected += 1
        line = self._sent.line if self._sent else 0
        for port, data in came:
            self._fail(line, f"a packet at port {port} that no expect names: {data.hex()}")
        self._awaited, self._sent = [], None

    def _missing(self, expect: Expect, came: list[tuple[int, bytes]]) -> None:
        pattern = expect.pattern
        what = "a packet" if pattern is None else pattern.value.hex()
        line = f"expected at port {expect.port}: {what}"
        near = [data for port, data in came if port == expect.port]
        if near and pattern is not None:
            places = [
                i for i, (a, b, m) in enumerate(zip(near[0], pattern.value, pattern.mask, strict=False)) if (a ^ b) & m
            ]
            at = f"bytes {', '.join(map(str, places[:8]))}" if places else "the length"
            line += f"; {near[0].hex()} came, which differs in {at}"
        self._fail(expect.line, line)

    def _compare(self, line: int, what: str, found: int, comparison: str, value: int) -> None:
        if not _COMPARISONS[comparison](found, value):
            self._fail(line, f"{what} is {found}, expected {comparison} {value}")

    def _fail(self, line: int, message: str) -> None:
        self.outcome.failures.append(f"{self._script.path}:{line}: {message}")


def _fits(expect: Expect, port: int, data: bytes) -> bool:
    return port == expect.port and (expect.pattern is None or expect.pattern.matches(data, longer=expect.longer))


def prepare(statement: Statement, target: Target) -> None:
    """Carry out a statement that neither sends nor compares anything."""
    match statement:
        case Write(_, "add", entry):
            target.insert(entry)
        case Write(_, _, entry):
            target.modify(entry)
        case Remove(_, table, match_, priority):
            target.remove(table, match_, priority)
        case RemoveAll():
            target.remove_all()
        case SetDefault(_, table, action, params):
            target.set_default(table, action, params)
        case AddMember(_, profile, number, action, params):
            target.add_member(profile, number, action, params)
        case SetGroup(_, profile, number, members):
            target.set_group(profile, number, members)
        case SetMeter(_, table, match_, priority, rates):
            target.set_meter(table, match_, priority, rates)
        case WriteRegister(_, register, index, value, ago):
            target.write_register(register, index, (target.now_us() - value) % (1 << 32) if ago else value)
        case Wait(_, seconds):
            target.wait(seconds)
        case Slow(_, port, depth_packets):
            target.slow(port, depth_packets)
        case _:
            raise AssertionError(f"{statement} is no preparation")
