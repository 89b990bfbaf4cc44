# SPDX-License-Identifier: Apache-2.0
"""What happens to packets between ports: packet by packet in plain Python, or batch by batch under Numba.

Both treat what comes in together one packet after the other: what was due before a packet came departs before it is
looked at. Packets of the same instant compete for the line, `SERVE_EVERY_PACKETS` of them at a time. What has reached
the far end of its line is handed to the ports when all that came in has been looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from dlcp.switch.codegen import DROP_PORT
from dlcp.switch.ports import PortGroup
from dlcp.switch.queues import NEVER_NS, SERVE_EVERY_PACKETS, PortQueueing, PortQueues, QueueCounters

BURST_PACKETS: Final = 32
"""Frames taken from a socket before the others have their turn. Chosen by us: a burst takes less than 1 ms."""


class Pipeline(Protocol):
    """What the switch asks of a program; ``dlcp.switch.program.Program`` is one."""

    def ingress(self, packet: bytearray, port: int, now_us: int) -> tuple[int, int, Any]:
        """Return egress port, queue (priority), and what egress needs to know; the packet stays as it is."""

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
        """Edit the packet in place; False when it is to be dropped."""


class Forwarding(Protocol):
    """Takes packets from ports, and gives them to ports when their time has come."""

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
        """When there is something to do; NEVER_NS when all is empty."""

    @property
    def late_max_ns(self) -> int:
        """How late the caller has come at worst."""

    def take_in(self, filenos: Sequence[int]) -> None:
        """Fetch what waits at file descriptors and treat it, and whatever is due meanwhile."""

    def serve(self, now_ns: int) -> None:
        """Let everything depart and arrive that is due."""

    def finish(self) -> None:
        """Drop what waits, which counts as dropped in egress, and hand over what is on a line."""

    def adopt(self, before: "Forwarding") -> None:
        """Go on counting where another one has stopped."""


class PlainForwarding:
    """One packet at a time.

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
        program: Pipeline,
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
        """When there is something to do."""
        self.late_max_ns = 0
        self._active: set[int] = set()
        """Ports that have a packet in a queue or on the line."""
        self._arrived: dict[int, list[bytearray]] = {}

    def take_in(self, filenos: Sequence[int]) -> None:
        """Fetch what waits at file descriptors and treat it, and whatever is due meanwhile."""
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
        """Let everything depart and arrive that is due."""
        if self.wake_ns <= now_ns:
            self._depart(now_ns)
        if self._arrived:
            arrived, self._arrived = self._arrived, {}
            for port, packets in arrived.items():
                self._group_of[port].send(port, packets)

    def finish(self) -> None:
        """Drop what waits, which counts as dropped in egress, and hand over what is on a line."""
        for queues in self.queues.values():
            queues.clear()
        self.serve(NEVER_NS)

    def adopt(self, before: Forwarding) -> None:
        """Go on counting where another one has stopped."""
        self.ingress_drops = dict(before.ingress_drops)
        self.no_port, self.late_max_ns = before.no_port, before.late_max_ns
        for port, queues in self.queues.items():
            queues.adopt(before.queues[port])

    def _take(self, port: int, packet: bytearray, now_ns: int) -> None:
        """Run ingress over a packet, and queue it if it is forwarded."""
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
        """Let everything depart that is due, collect what has arrived, and find out when the next thing is."""
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
