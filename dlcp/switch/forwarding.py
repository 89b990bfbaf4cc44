# SPDX-License-Identifier: Apache-2.0
"""Forwarding between ports: packet by packet in plain Python, or batch by batch under Numba.

Both process a burst in order of arrival: packets due before an arrival depart before the program sees it. Packets of
the same instant compete for the line, `SERVE_EVERY_PACKETS` of them at a time. Packets that have reached the far end
of their line go to the ports after the whole burst has been processed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.switch.executor.program import CompiledMachine
from dlcp.switch.executor.source import DROP_PORT
from dlcp.switch.ports import PortGroup, ReceivedFrames
from dlcp.switch.ports.packet import Numbers, PacketPort, Rows
from dlcp.switch.ports.queues import NEVER_NS, SERVE_EVERY_PACKETS, PortQueueing, PortQueues, QueueCounters
from dlcp.switch.ports.scheduler import (
    ARRIVED_CELLS,
    BYTES,
    CAME_NS,
    INGRESS_DROPS,
    LATE_NS,
    LENGTH,
    NO_PORT,
    OUT,
    PLACE,
    READY_COUNT,
    SLOT,
    SLOT_CELLS,
    TOTAL_CELLS,
    WAKE_NS,
    PortColumns,
    new_port,
)

BURST_PACKETS: Final = 32
"""Frames taken from a socket before the next one is served: a burst takes less than 1 ms."""


class PacketProgram(Protocol):
    """The interface of a program that the switch runs; ``dlcp.switch.Program`` implements it."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Return egress port, queue (priority), and state for egress; the packet is not changed."""

    def egress(
        self,
        packet: bytearray,
        carry: Any,
        port: int,
        enq_us: int,
        deq_delta_us: int,
        enq_depth: int,
        deq_depth: int,
        now_us: int,
    ) -> bool:
        """Edit the packet in place; return False to drop it."""


class Forwarding(Protocol):
    """Receives packets from ports, queues them, and sends them out of ports when due."""

    @property
    def queues(self) -> Mapping[int, QueueCounters]:
        """The queues of each port."""

    @property
    def ingress_drops(self) -> Mapping[int, int]:
        """Packets that the program dropped in ingress, by the port they came in on."""

    @property
    def no_port(self) -> int:
        """Packets that the program sent to a port that does not exist."""

    @property
    def wake_ns(self) -> int:
        """Time of the next departure or arrival; NEVER_NS if there is none."""

    @property
    def late_max_ns(self) -> int:
        """Maximum lateness of the caller, in nanoseconds after `wake_ns`."""

    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""

    def serve(self, now_ns: int) -> None:
        """Process all departures and arrivals due by ``now_ns``."""

    def finish(self) -> None:
        """Drop queued packets, counted as egress drops, and deliver the packets on a line."""

    def adopt(self, before: "Forwarding") -> None:
        """Continue the counts of another forwarding."""


class EmptyProgram:
    """Drops every packet: the program of a switch until a controller sends one."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Drop a packet."""
        return DROP_PORT, 0, ()

    def egress(self, packet: bytearray, carry: Any, *columns: int) -> bool:
        """Drop a packet; ingress lets none reach egress."""
        return False


class PlainForwarding:
    """Forwards one packet at a time.

    Parameters
    ----------
    program
        Decides what happens to a packet.
    group_of
        The ports, by number.
    queueing
        How each port queues and sends.
    now_ns
        The switch's clock.
    """

    def __init__(
        self,
        program: PacketProgram,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
    ) -> None:
        self._ingress, self._egress = program.ingress, program.egress
        self._group_of = group_of
        self._group_of_fileno = {fileno: group for group in group_of.values() for fileno in group.filenos()}
        self._now_ns = now_ns
        self.queues = {port: PortQueues(queueing.get(port)) for port in group_of}
        self.ingress_drops = dict.fromkeys(group_of, 0)
        self.no_port = 0
        self.wake_ns = NEVER_NS
        """Time of the next departure or arrival."""
        self.late_max_ns = 0
        self._active: set[int] = set()
        """Ports with a packet in a queue or on the line."""
        self._arrived: dict[int, list[bytearray]] = {}

    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""
        count = 0
        for fileno in filenos:
            burst = self._group_of_fileno[fileno].receive(fileno, BURST_PACKETS)
            for port, packet in zip(burst.ports, burst.packets, strict=True):
                now_ns = self._now_ns()
                if self.wake_ns <= now_ns and (self.wake_ns < now_ns or count % SERVE_EVERY_PACKETS == 0):
                    self._depart(now_ns)
                self._take(port, packet, now_ns)
                count += 1
        self.serve(self._now_ns())

    def serve(self, now_ns: int) -> None:
        """Process all departures and arrivals due by ``now_ns``."""
        if self.wake_ns <= now_ns:
            self._depart(now_ns)
        if self._arrived:
            arrived, self._arrived = self._arrived, {}
            for port, packets in arrived.items():
                self._group_of[port].send(port, packets)

    def finish(self) -> None:
        """Drop queued packets, counted as egress drops, and deliver the packets on a line."""
        for queues in self.queues.values():
            queues.clear()
        self.serve(NEVER_NS)

    def adopt(self, before: Forwarding) -> None:
        """Continue the counts of another forwarding."""
        self.ingress_drops = dict(before.ingress_drops)
        self.no_port, self.late_max_ns = before.no_port, before.late_max_ns
        for port, queues in self.queues.items():
            queues.adopt(before.queues[port])

    def _take(self, port: int, packet: bytearray, now_ns: int) -> None:
        """Run ingress on a packet, and enqueue it if it is forwarded."""
        arrived_at = self.queues[port]
        if arrived_at.queueing.loss and arrived_at.loses_arriving():
            return
        egress_port, queue, carry = self._ingress(packet, port, now_ns // 1000)
        if egress_port == DROP_PORT:
            self.ingress_drops[port] += 1
            return
        queues = self.queues.get(egress_port)
        if queues is None:
            self.no_port += 1
        elif queues.enqueue(packet, carry, queue, now_ns):
            self._active.add(egress_port)
            wake_ns = queues.wake_ns()
            if wake_ns < self.wake_ns:
                self.wake_ns = wake_ns

    def _depart(self, now_ns: int) -> None:
        """Process due departures, collect arrived packets, and update `wake_ns`."""
        if now_ns - self.wake_ns > self.late_max_ns:
            self.late_max_ns = now_ns - self.wake_ns
        egress = self._egress
        next_ns = NEVER_NS
        for port in sorted(self._active):
            queues = self.queues[port]
            while departure := queues.dequeue(now_ns):
                packet, carry, queue, start_ns, enqueued_ns, enq_depth, deq_depth = departure
                start_us, enq_us = start_ns // 1000, enqueued_ns // 1000
                delta_us = start_us - enq_us
                if egress(packet, carry, port, enq_us, delta_us, enq_depth, deq_depth, start_us):
                    queues.transmit(packet, queue)
                else:
                    queues.discard(packet, queue)
            arrived = queues.arrivals(now_ns)
            if arrived:
                self._arrived.setdefault(port, []).extend(arrived)
            wake_ns = queues.wake_ns()
            if wake_ns == NEVER_NS:
                self._active.discard(port)
            elif wake_ns < next_ns:
                next_ns = wake_ns
        self.wake_ns = next_ns


BATCH_PACKETS: Final = 256
"""Frames taken from a port at once: a batch takes less than 2 ms, and larger ones gain nothing."""
SLOTS: Final = 1024
"""Initial packet slots; the pool grows as queues fill."""
PORTS_MAX: Final = 512
_ROW_BYTES_MIN: Final = 1514
_LINE_BYTES: Final = 64


class BatchForwarding:
    """Forwards all waiting packets as one batch; arguments as for `dlcp.switch.forwarding.PlainForwarding`."""

    def __init__(
        self,
        machine: CompiledMachine,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
    ) -> None:
        self._machine = machine
        self._group_of = group_of
        self._group_of_fileno = {fileno: group for group in group_of.values() for fileno in group.filenos()}
        self._now_ns = now_ns
        numbers = sorted(group_of)
        self._ports: Numbers = np.stack([new_port(port, queueing.get(port, PortQueueing())) for port in numbers])
        self.queues = {
            port: PortColumns(row, queueing.get(port, PortQueueing()))
            for port, row in zip(numbers, self._ports, strict=True)
        }
        self._numbers = numbers
        self._place_of = {port: place for place, port in enumerate(numbers)}
        self._places: Numbers = np.full(PORTS_MAX, -1)
        self._places[numbers] = np.arange(len(numbers))
        self._totals: Numbers = np.zeros(TOTAL_CELLS + len(numbers), np.int64)
        self._totals[WAKE_NS] = NEVER_NS
        longest = [group.frame_max_bytes for group in group_of.values() if isinstance(group, PacketPort)]
        self._rows: Rows = np.empty((0, _row_bytes(max(longest, default=0))), np.uint8)
        self._slots: Numbers = np.empty((0, SLOT_CELLS), np.int64)
        self._carry: Numbers = np.empty((0, machine.carry_cells), np.int64)
        self._spare: Numbers = np.zeros(1, np.int64)
        self._out: Numbers = np.empty((len(numbers), 0), np.int64)
        self._grow(SLOTS)
        self._arrived: Numbers = np.empty((2 * BATCH_PACKETS, ARRIVED_CELLS), np.int64)
        self._lengths: Numbers = np.empty(BATCH_PACKETS, np.int64)
        self._stamps_ns: Numbers = np.empty(BATCH_PACKETS, np.int64)

    @property
    def wake_ns(self) -> int:
        """Time of the next departure or arrival; NEVER_NS if there is none."""
        return int(self._totals[WAKE_NS])

    @property
    def no_port(self) -> int:
        """Packets that the program sent to a port that does not exist."""
        return int(self._totals[NO_PORT])

    @property
    def late_max_ns(self) -> int:
        """Maximum lateness of the caller, in nanoseconds after `wake_ns`."""
        return int(self._totals[LATE_NS])

    @property
    def ingress_drops(self) -> dict[int, int]:
        """Packets that the program dropped in ingress, by the port they came in on."""
        return dict(zip(self._numbers, self._ports[:, INGRESS_DROPS].tolist(), strict=True))

    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""
        count = 0
        for fileno in filenos:
            group = self._group_of_fileno[fileno]
            if isinstance(group, PacketPort):
                count += self._fetch(group, count)
            else:
                count += self._copy_in(group.receive(fileno, BATCH_PACKETS), count)
        if len(filenos) > 1:
            order = np.argsort(self._arrived[:count, CAME_NS], kind="stable")
            self._arrived[:count] = self._arrived[:count][order]
        self._run(self._now_ns(), count)

    def serve(self, now_ns: int) -> None:
        """Process all departures and arrivals due by ``now_ns``."""
        self._run(now_ns, 0)

    def finish(self) -> None:
        """Drop queued packets, counted as egress drops, and deliver the packets on a line.

        The object cannot be used afterwards: the slots of the dropped packets are not freed.
        """
        for queues in self.queues.values():
            queues.clear()
        self._run(NEVER_NS - 1, 0)

    def adopt(self, before: Forwarding) -> None:
        """Continue the counts of another forwarding."""
        for port, dropped in before.ingress_drops.items():
            self._ports[self._place_of[port], INGRESS_DROPS] = dropped
        self._totals[NO_PORT], self._totals[LATE_NS] = before.no_port, before.late_max_ns
        for port, queues in self.queues.items():
            queues.adopt(before.queues[port])

    def _fetch(self, port: PacketPort, count: int) -> int:
        """Add frames from a ring to a batch of ``count`` packets; return the number added."""
        slots = self._free_slots(BATCH_PACKETS)
        taken = port.take(self._rows, slots, self._lengths, self._stamps_ns)
        if taken:
            # Convert the kernel's real-time stamps to the switch's monotonic clock. In this order, a pause between the
            # two reads makes packets later, never earlier.
            real_ns = time.time_ns()
            now_ns = self._now_ns()
            came_ns = self._stamps_ns[:taken] + (now_ns - real_ns)
            self._note(slots[:taken], self._place_of[port.port], came_ns, self._lengths[:taken], count)
        return taken

    def _copy_in(self, burst: ReceivedFrames, count: int) -> int:
        """Add packets to a batch of ``count`` packets; return the number added."""
        packets = burst.packets
        if not packets:
            return 0
        lengths = [len(packet) for packet in packets]
        if max(lengths) > self._rows.shape[1]:
            self._widen(_row_bytes(max(lengths)))
        slots = self._free_slots(len(packets))
        for slot, packet, length in zip(slots.tolist(), packets, lengths, strict=True):
            self._rows[slot, :length] = np.frombuffer(packet, np.uint8)
        self._note(slots, [self._place_of[port] for port in burst.ports], self._now_ns(), lengths, count)
        return len(packets)

    def _note(self, slots: Numbers, places: ArrayLike, came_ns: ArrayLike, lengths: ArrayLike, count: int) -> None:
        """Add rows for received packets to a batch of ``count`` packets, and take their slots off the stack."""
        end = count + len(slots)
        if end > len(self._arrived):
            self._arrived = np.concatenate([self._arrived[:count], np.empty((2 * end, ARRIVED_CELLS), np.int64)])
        rows = self._arrived[count:end]
        rows[:, SLOT], rows[:, PLACE], rows[:, CAME_NS], rows[:, BYTES] = slots, places, came_ns, lengths
        self._spare[0] -= len(slots)

    def _run(self, now_ns: int, count: int) -> None:
        """Process ``count`` received packets and everything due by ``now_ns``; send the packets that have arrived."""
        totals = self._totals
        pool: tuple[NDArray[np.uint8] | Numbers, ...]
        pool = (self._rows, self._slots, self._carry, self._spare, self._ports, totals, self._out)
        self._machine.forward(now_ns, self._arrived, count, self._places, *pool)
        ready = int(totals[READY_COUNT])
        if ready:
            for place in totals[READY_COUNT + 1 : READY_COUNT + 1 + ready].tolist():
                self._send(place)
            totals[READY_COUNT] = 0

    def _send(self, place: int) -> None:
        """Send the packets that have reached the far end of a port's line, and free their slots."""
        number = self._numbers[place]
        group = self._group_of[number]
        count = int(self._ports[place, OUT])
        slots = self._out[place, :count]
        lengths = self._slots[slots, LENGTH]
        if isinstance(group, PacketPort):
            group.send_rows(number, self._rows, slots, lengths)
        else:
            rows = self._rows
            pairs = zip(slots.tolist(), lengths.tolist(), strict=True)
            group.send(number, [bytearray(rows[slot, :length].data) for slot, length in pairs])
        top = int(self._spare[0]) + 1
        self._spare[top : top + count] = slots
        self._spare[0] += count
        self._ports[place, OUT] = 0

    def _free_slots(self, count: int) -> Numbers:
        """Return free slots in order of use; they stay on the stack until used."""
        if self._spare[0] < count:
            self._grow(max(len(self._rows), count))
        top = int(self._spare[0])
        free: Numbers = self._spare[top - count + 1 : top + 1][::-1].copy()
        return free

    def _grow(self, count: int) -> None:
        """Add ``count`` packet slots."""
        before = len(self._rows)
        self._rows = np.concatenate([self._rows, np.zeros((count, self._rows.shape[1]), np.uint8)])
        self._slots = np.concatenate([self._slots, np.zeros((count, SLOT_CELLS), np.int64)])
        self._carry = np.concatenate([self._carry, np.zeros((count, self._carry.shape[1]), np.int64)])
        self._out = np.zeros((len(self._out), before + count), np.int64)
        self._spare = np.concatenate([self._spare, np.zeros(count, np.int64)])
        top = int(self._spare[0]) + 1
        self._spare[top : top + count] = np.arange(before + count - 1, before - 1, -1)
        self._spare[0] += count

    def _widen(self, row_bytes: int) -> None:
        """Widen all rows to ``row_bytes``."""
        rows = np.zeros((len(self._rows), row_bytes), np.uint8)
        rows[:, : self._rows.shape[1]] = self._rows
        self._rows = rows


def _row_bytes(frame_bytes: int) -> int:
    """Return a row size in whole cache lines; an odd number of them, so that rows spread over a cache's sets."""
    return (-(-max(frame_bytes, _ROW_BYTES_MIN) // _LINE_BYTES) | 1) * _LINE_BYTES
