# SPDX-License-Identifier: Apache-2.0
"""Forwarding between ports: in plain Python, or in batches under Numba.

Both process a burst in order of arrival: packets due before an arrival depart before the program sees it. Packets of
the same instant compete for the line, `SERVE_EVERY_PACKETS` of them at a time. Packets that have reached the far end
of their line go to the ports after the whole burst has been processed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike

from dlcp.switch import queues
from dlcp.switch.executor.program import CompiledMachine
from dlcp.switch.ports import PortGroup, ReceivedFrames
from dlcp.switch.ports.packet import Numbers, PacketPort, Rows
from dlcp.switch.queues import DROP_PORT, NEVER_NS, PortQueueing, PortQueues


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
    ) -> int:
        """Edit the packet in place; return how many bytes of it to send, 0 to drop it."""


class EmptyProgram:
    """Drops every packet: the program of a switch until a controller sends one."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Drop a packet."""
        return DROP_PORT, 0, ()

    def egress(self, packet: bytearray, carry: Any, *columns: int) -> int:
        """Drop a packet; ingress lets none reach egress."""
        return 0


PORTS_MAX: Final = 512


class Forwarding(ABC):
    """Receives packets from ports, queues them, and sends them out of ports when due.

    Parameters
    ----------
    group_of
        The ports, by number.
    queueing
        How each port queues and sends.
    now_ns
        The switch's clock.
    table
        Returns a table of numbers as the loop takes it: a list, or an array.

    Attributes
    ----------
    queues
        The queues of each port.
    """

    def __init__(
        self,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
        table: Callable[[list[Any]], Any],
    ) -> None:
        self._group_of, self._now_ns = group_of, now_ns
        self._group_of_fileno = {fileno: group for group in group_of.values() for fileno in group.filenos()}
        self._numbers = sorted(group_of)
        self._place_of = {port: place for place, port in enumerate(self._numbers)}
        self._places = table([self._place_of.get(port, -1) for port in range(PORTS_MAX)])
        self._ports = table([queues.new_port(port, queueing.get(port, PortQueueing())) for port in self._numbers])
        self._totals = table([0] * (queues.TOTAL_CELLS + len(self._numbers)))
        self._totals[queues.WAKE_NS] = NEVER_NS
        self.queues = {
            port: PortQueues(row, queueing.get(port, PortQueueing()))
            for port, row in zip(self._numbers, self._ports, strict=True)
        }

    @property
    def wake_ns(self) -> int:
        """Time of the next departure or arrival; NEVER_NS if there is none."""
        return int(self._totals[queues.WAKE_NS])

    @property
    def no_port(self) -> int:
        """Packets that the program sent to a port that does not exist."""
        return int(self._totals[queues.NO_PORT])

    @property
    def late_max_ns(self) -> int:
        """Maximum lateness of the caller, in nanoseconds after `wake_ns`."""
        return int(self._totals[queues.LATE_NS])

    @property
    def ingress_drops(self) -> dict[int, int]:
        """Packets that the program dropped in ingress, by the port they came in on."""
        return {port: int(row[queues.INGRESS_DROPS]) for port, row in zip(self._numbers, self._ports, strict=True)}

    @abstractmethod
    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""

    @abstractmethod
    def _forward(self, now_ns: int, count: int) -> None:
        """Process ``count`` received packets and everything due by ``now_ns``."""

    @abstractmethod
    def _send(self, place: int) -> None:
        """Send the packets that have reached the far end of a port's line, and free their slots."""

    def serve(self, now_ns: int) -> None:
        """Process all departures and arrivals due by ``now_ns``."""
        self._run(now_ns, 0)

    def finish(self) -> None:
        """Drop queued packets, counted as egress drops, and deliver the packets on a line.

        The object cannot be used afterwards: the slots of the dropped packets are not freed.
        """
        for waiting in self.queues.values():
            waiting.clear()
        self._run(NEVER_NS - 1, 0)

    def adopt(self, before: "Forwarding") -> None:
        """Continue the counts of another forwarding."""
        for port, dropped in before.ingress_drops.items():
            self._ports[self._place_of[port]][queues.INGRESS_DROPS] = dropped
        self._totals[queues.NO_PORT], self._totals[queues.LATE_NS] = before.no_port, before.late_max_ns
        for port, own in self.queues.items():
            own.adopt(before.queues[port])

    def _run(self, now_ns: int, count: int) -> None:
        """Process ``count`` received packets and everything due by ``now_ns``; send the packets that have arrived."""
        self._forward(now_ns, count)
        totals = self._totals
        for ready in range(int(totals[queues.READY_COUNT])):
            self._send(int(totals[queues.READY_COUNT + 1 + ready]))
        totals[queues.READY_COUNT] = 0


BURST_PACKETS: Final = 32
"""Frames taken from a socket before the next one is served: a burst takes less than 1 ms."""


class PlainForwarding(Forwarding):
    """Forwards packets in plain Python; arguments as for `Forwarding`."""

    def __init__(
        self,
        program: PacketProgram,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(group_of, queueing, now_ns, list)
        self._arrived: list[tuple[int, int, int, int]] = []
        self._rows: list[bytearray] = []
        self._slots: list[list[int]] = []
        self._carry: list[Any] = []
        self._spare = [0]
        self._out: list[list[int]] = [[] for _ in self._numbers]
        run_ingress, run_egress = program.ingress, program.egress

        def ingress(
            packet: Any, _: int, carry: list[Any], slot: int, state: None, port: int, us: int
        ) -> tuple[int, int]:
            egress_port, queue, carry[slot] = run_ingress(packet, port, us)
            return egress_port, queue

        # Passing the six arguments on as *arguments would make the whole loop slower by a tenth.
        self._loop = queues.loop(
            ingress,
            lambda packet, _, carry, slot, state, a, b, c, d, e, f: run_egress(packet, carry[slot], a, b, c, d, e, f),
        )

    def take_in(self, filenos: Sequence[int]) -> None:
        """Receive from file descriptors and process the packets, and all departures and arrivals due meanwhile."""
        arrived = self._arrived = []
        for fileno in filenos:
            burst = self._group_of_fileno[fileno].receive(fileno, BURST_PACKETS)
            came_ns = self._now_ns()
            for port, packet in zip(burst.ports, burst.packets, strict=True):
                arrived.append((self._hold(packet), self._place_of[port], came_ns, len(packet)))
        self._run(self._now_ns(), len(arrived))

    def _hold(self, packet: bytearray) -> int:
        """Put a packet into a free slot, or into a new one; return its number."""
        spare = self._spare
        if spare[0]:
            slot = spare[spare[0]]
            spare[0] -= 1
            self._rows[slot] = packet
            return slot
        self._rows.append(packet)
        self._slots.append([0] * queues.SLOT_CELLS)
        for numbers in (self._carry, spare, *self._out):
            numbers.append(0)
        return len(self._rows) - 1

    def _forward(self, now_ns: int, count: int) -> None:
        pool = (self._rows, self._slots, self._carry, self._spare, self._ports, self._totals, self._out)
        self._loop(now_ns, self._arrived, count, self._places, pool, None, None)

    def _send(self, place: int) -> None:
        number, port = self._numbers[place], self._ports[place]
        slots = self._out[place][: port[queues.OUT]]
        for slot in slots:
            del self._rows[slot][self._slots[slot][queues.LENGTH] :]  # egress may have truncated it
        self._group_of[number].send(number, [self._rows[slot] for slot in slots])
        for slot in slots:
            queues.give_back(self._spare, slot)
        port[queues.OUT] = 0


BATCH_PACKETS: Final = 256
"""Frames taken from a port at once: a batch takes less than 2 ms, and larger ones gain nothing."""
SLOTS: Final = 1024
"""Initial packet slots; the pool grows as queues fill."""
_ROW_BYTES_MIN: Final = 1514
_LINE_BYTES: Final = 64


class BatchForwarding(Forwarding):
    """Forwards all waiting packets as one batch; arguments as for `Forwarding`."""

    def __init__(
        self,
        machine: CompiledMachine,
        group_of: Mapping[int, PortGroup],
        queueing: Mapping[int, PortQueueing],
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(group_of, queueing, now_ns, lambda numbers: np.array(numbers, np.int64))
        self._machine = machine
        longest = [group.frame_max_bytes for group in group_of.values() if isinstance(group, PacketPort)]
        self._rows: Rows = np.empty((0, _row_bytes(max(longest, default=0))), np.uint8)
        self._slots: Numbers = np.empty((0, queues.SLOT_CELLS), np.int64)
        self._carry: Numbers = np.empty((0, machine.carry_cells), np.int64)
        self._spare: Numbers = np.zeros(1, np.int64)
        self._out: Numbers = np.empty((len(self._numbers), 0), np.int64)
        self._grow(SLOTS)
        self._arrived: Numbers = np.empty((2 * BATCH_PACKETS, queues.ARRIVED_CELLS), np.int64)
        self._lengths: Numbers = np.empty(BATCH_PACKETS, np.int64)
        self._stamps_ns: Numbers = np.empty(BATCH_PACKETS, np.int64)

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
            order = np.argsort(self._arrived[:count, queues.CAME_NS], kind="stable")
            self._arrived[:count] = self._arrived[:count][order]
        self._run(self._now_ns(), count)

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
            self._arrived = np.concatenate([self._arrived[:count], np.empty((2 * end, queues.ARRIVED_CELLS), np.int64)])
        rows = self._arrived[count:end]
        rows[:, queues.SLOT], rows[:, queues.PLACE], rows[:, queues.CAME_NS], rows[:, queues.BYTES] = (
            slots,
            places,
            came_ns,
            lengths,
        )
        self._spare[0] -= len(slots)

    def _forward(self, now_ns: int, count: int) -> None:
        pool = (self._rows, self._slots, self._carry, self._spare, self._ports, self._totals, self._out)
        self._machine.forward(now_ns, self._arrived, count, self._places, *pool)

    def _send(self, place: int) -> None:
        number = self._numbers[place]
        group = self._group_of[number]
        count = int(self._ports[place, queues.OUT])
        slots = self._out[place, :count]
        lengths = self._slots[slots, queues.LENGTH]
        if isinstance(group, PacketPort):
            group.send_rows(self._rows, slots, lengths)
        else:
            rows = self._rows
            pairs = zip(slots.tolist(), lengths.tolist(), strict=True)
            group.send(number, [bytearray(rows[slot, :length].data) for slot, length in pairs])
        top = int(self._spare[0]) + 1
        self._spare[top : top + count] = slots
        self._spare[0] += count
        self._ports[place, queues.OUT] = 0

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
        self._slots = np.concatenate([self._slots, np.zeros((count, queues.SLOT_CELLS), np.int64)])
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
