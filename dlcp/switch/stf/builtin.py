# SPDX-License-Identifier: Apache-2.0
"""The built-in switch as a target of packet tests: program and queues, with a clock that only the test moves."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from dlcp.switch.cells import MeterConfig
from dlcp.switch.entries import MeterRates, TableEntry, Value, match_value, number
from dlcp.switch.errors import EntryError
from dlcp.switch.profiles import Action, Group, Member, Target
from dlcp.switch.program import DROP_PORT, Program
from dlcp.switch.queues import DEPTH_PACKETS, PortQueueing, PortQueues

START_US: Final = 2_000_000
"""The clock at the start: budget slots that nobody used yet count as last used at 0, which must be long ago."""
PACKET_US: Final = 1_000
"""How far a packet moves the clock."""


class BuiltIn:
    """A program with a queue for each port and priority.

    Each queue has a line of its own, as in BMv2, so what one queue holds back does not hold back another.
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
        table = self._program.tables[entry.table]
        match = self._match(entry.table, entry.match)
        table.insert(match, _target(entry), entry.priority)
        if entry.meter is not None:
            table.set_meter(match, MeterConfig(*dataclasses.astuple(entry.meter)), entry.priority)

    def modify(self, entry: TableEntry) -> None:
        """Give an entry another action, member or group."""
        table = self._program.tables[entry.table]
        match = self._match(entry.table, entry.match)
        table.modify(match, _target(entry), entry.priority)

    def remove(self, table: str, match: Mapping[str, Value], priority: int) -> None:
        """Remove an entry."""
        self._program.tables[table].delete(self._match(table, match), priority)

    def remove_all(self) -> None:
        """Remove all entries, members and groups."""
        self._program.clear_entries()

    def set_default(self, table: str, action: str, params: Mapping[str, Value]) -> None:
        """Set a default action."""
        self._program.tables[table].set_default(_action(action, params))

    def add_member(self, profile: str, number: int, action: str, params: Mapping[str, Value]) -> None:
        """Add a member to an action profile."""
        self._program.profiles[profile].add_member(number, _action(action, params))

    def set_group(self, profile: str, number: int, members: tuple[int, ...]) -> None:
        """Make a group, or give it other members."""
        known = self._program.profiles[profile]
        (known.modify_group if number in known.groups() else known.add_group)(number, members)

    def set_meter(self, table: str, match: Mapping[str, Value], priority: int, rates: MeterRates) -> None:
        """Set an entry's meter; its buckets are full."""
        config = MeterConfig(*dataclasses.astuple(rates))
        self._program.tables[table].set_meter(self._match(table, match), config, priority)

    def _match(self, table: str, match: Mapping[str, Value]) -> dict[str, int | tuple[int, int]]:
        fields = {key.name: (key.match, key.width) for key in self._program.tables[table].definition.keys}
        # A field that the table has not got is for the table to refuse.
        return {name: match_value(value, *fields[name]) if name in fields else 0 for name, value in match.items()}

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
        """Return the clock that packets are stamped with."""
        return self._now_us

    def wait(self, seconds: float) -> None:
        """Move the clock."""
        self._now_us += round(seconds * 1e6)

    # ------------------------------------------------------------------------------------------------------ packets

    def slow(self, port: int, depth_packets: int) -> None:
        """Let each queue of a port send one packet, then hold up to ``depth_packets``."""
        self._slow[port], self._depths[port] = {}, depth_packets

    def release(self, port: int) -> None:
        """Let out what the queues of a port hold, the most urgent first."""
        if port not in self._slow:
            raise EntryError(f"release: port {port} is not slow")
        for _, queues in sorted(self._slow.pop(port).items(), reverse=True):
            self._drain(port, queues)

    def send(self, port: int, data: bytes) -> None:
        """Run a packet through ingress, its queue and, unless that is slow, egress."""
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
        """Return what came out since the last call."""
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


def _target(entry: TableEntry) -> Target:
    if entry.action is not None:
        return _action(entry.action, entry.params)
    if entry.member is not None:
        return Member(entry.member)
    assert entry.group is not None  # a TableEntry has one of the three
    return Group(entry.group)


def _action(name: str, params: Mapping[str, Value]) -> Action:
    return Action(name, {param: number(value) for param, value in params.items()})
