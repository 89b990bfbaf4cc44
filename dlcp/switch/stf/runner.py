# SPDX-License-Identifier: Apache-2.0
"""Runs packet tests, and provides the built-in switch as a target whose clock only the test advances."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dlcp.switch.entries import TableEntry, Value, insert_entry, parse_action, parse_matches
from dlcp.switch.executor.cells import MeterConfig
from dlcp.switch.executor.model import COMPARISONS, EntryError
from dlcp.switch.executor.program import DROP_PORT, Program
from dlcp.switch.ports.queues import DEPTH_PACKETS, PortQueueing, PortQueues
from dlcp.switch.stf.script import (
    CheckCounter,
    CheckRegister,
    Expect,
    NoPacket,
    Preparation,
    Release,
    Script,
    SendPacket,
    Statement,
    StfTarget,
)


@dataclass
class StfOutcome:
    """The outcome of a test."""

    packets: int = 0
    """Packets sent."""
    expected: int = 0
    """Packets received as expected."""
    failures: list[str] = field(default_factory=list)
    """Failures, each with file and line; empty if the test passed."""

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return not self.failures


def run(script: Script, target: StfTarget) -> StfOutcome:
    """Restart the target and run a test.

    Raises
    ------
    EntryError
        An entry, name or index does not fit the program.
    """
    return _Run(script, target).outcome


class _Run:
    def __init__(self, script: Script, target: StfTarget) -> None:
        self._script, self._target = script, target
        self.outcome = StfOutcome()
        self._sent: SendPacket | Release | None = None
        self._awaited: list[Expect] = []
        target.restart()
        for statement in script.statements:
            if not isinstance(statement, Expect | NoPacket):
                self._settle()
            self._do(statement)
        self._settle()

    def _do(self, statement: Statement) -> None:
        match statement:
            case SendPacket(_, port, data):
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
            case Preparation():
                if isinstance(statement, Release):
                    self._sent = statement
                statement.carry_out(self._target)

    def _settle(self) -> None:
        """Compare the packets received since the last one sent with those expected."""
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
            self._fail(line, f"unexpected packet at port {port}: {data.hex()}")
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
            line += f"; received {near[0].hex()}, which differs in {at}"
        self._fail(expect.line, line)

    def _compare(self, line: int, what: str, found: int, comparison: str, value: int) -> None:
        if not COMPARISONS[comparison](found, value):
            self._fail(line, f"{what} is {found}, expected {comparison} {value}")

    def _fail(self, line: int, message: str) -> None:
        self.outcome.failures.append(f"{self._script.path}:{line}: {message}")


def _fits(expect: Expect, port: int, data: bytes) -> bool:
    return port == expect.port and (expect.pattern is None or expect.pattern.matches(data, longer=expect.longer))


START_US: Final = 2_000_000
"""Initial clock: unused budget slots count as last used at 0, which must be long ago."""
PACKET_US: Final = 1_000
"""Clock advance per packet sent."""


class BuiltIn:
    """A program with a queue for each port and priority.

    Each queue has its own line, as in BMv2, so a slow queue does not block another.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._now_us = START_US
        self._slow: dict[int, dict[int, PortQueues]] = {}
        self._depths: dict[int, int] = {}
        self._out: list[tuple[int, bytes]] = []

    def restart(self) -> None:
        """Remove all entries, and set registers and counters to zero."""
        self._program.clear_entries()
        self._program.reset_state()
        self._now_us = START_US
        self._slow.clear()
        self._out.clear()

    # ------------------------------------------------------------------------------------------------------ entries

    def insert(self, entry: TableEntry) -> None:
        """Add an entry."""
        insert_entry(entry, self._program)

    def modify(self, entry: TableEntry) -> None:
        """Change an entry's action, member or group."""
        table = self._program.tables[entry.table]
        table.modify(parse_matches(table, entry.match), entry.target, entry.priority)

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""
        known = self._program.tables[table]
        known.delete(parse_matches(known, match), priority)

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""
        self._program.clear_entries()

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a default action."""
        self._program.tables[table].set_default(parse_action(action, params))

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""
        self._program.profiles[profile].add_member(number, parse_action(action, params))

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Create a group, or replace its members."""
        known = self._program.profiles[profile]
        (known.modify_group if known.has_group(number) else known.add_group)(number, members)

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterConfig) -> None:
        """Set an entry's meter and fill its buckets."""
        known = self._program.tables[table]
        known.set_meter(parse_matches(known, match), rates, priority)

    # -------------------------------------------------------------------------------------------------------- state

    def write_register(self, name: str, index: int, value: int) -> None:
        """Write a cell."""
        self._program.registers[name][index] = value

    def read_register(self, name: str, index: int) -> int:
        """Read a cell."""
        return self._program.registers[name][index]

    def read_counter(self, name: str, index: int) -> tuple[int, int]:
        """Return packets and bytes of a cell."""
        return self._program.counters[name][index]

    def now_us(self) -> int:
        """Return the clock of the packets' time stamps."""
        return self._now_us

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_us += round(seconds * 1e6)

    # ------------------------------------------------------------------------------------------------------ packets

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets``."""
        self._slow[port], self._depths[port] = {}, depth_packets

    def release(self, port: int) -> None:
        """Release the packets in a port's queues, most urgent queue first."""
        if port not in self._slow:
            raise EntryError(f"release: port {port} is not slow")
        for _, queues in sorted(self._slow.pop(port).items(), reverse=True):
            self._drain(port, queues)

    def send(self, port: int, data: bytes) -> None:
        """Run a packet through ingress, its queue and, unless the queue holds it, egress."""
        self._now_us += PACKET_US
        packet = bytearray(data)
        out_port, queue, carry = self._program.ingress(packet, port, self._now_us)
        if out_port == DROP_PORT:
            return
        waiting = self._slow.get(out_port)
        if waiting is None:
            queues = PortQueues(PortQueueing(depth_packets=DEPTH_PACKETS))
        else:
            queues = waiting.get(queue) or PortQueues(PortQueueing(depth_packets=self._depths[out_port]))
        queues.enqueue(packet, carry, queue, self._now_us * 1000)
        if waiting is None or queue not in waiting:
            self._drain(out_port, queues)
        if waiting is not None:
            waiting[queue] = queues

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the packets received since the last call."""
        came, self._out = self._out, []
        return came

    def _drain(self, port: int, queues: PortQueues) -> None:
        while departure := queues.dequeue(self._now_us * 1000):
            carry: Any = departure.carry
            enqueued_us = departure.enqueued_ns // 1000
            waited_us = self._now_us - enqueued_us
            depths = departure.enq_depth, departure.deq_depth
            if self._program.egress(departure.packet, carry, port, enqueued_us, waited_us, *depths, self._now_us):
                self._out.append((port, bytes(departure.packet)))
            queues.transmit(departure.packet, departure.queue)
