# SPDX-License-Identifier: Apache-2.0
"""Links and switches: queues of packets at ports, and the disciplines that fill and empty them."""

from collections import deque
from typing import TYPE_CHECKING

from dlcp.sim.arithmetic import MASK64, PS_PER_US, RATE_SHIFT, draw, mix
from dlcp.sim.packet_engine import EngineCounter
from dlcp.sim.plan import PORT_QUEUES, TRIMMED_BYTES, BufferScope, Discipline, LinkRules, PacketKind, PathChoice
from dlcp.sim.reference.parts import SimulatedPacket
from dlcp.wire import Queue

if TYPE_CHECKING:
    from dlcp.sim.reference.program import P4Pipeline
    from dlcp.sim.reference.reference_engine import ReferenceEngine


class SimulatedLink:
    """One direction of a link: carries one packet after the other, and delivers it after a delay or loses it."""

    def __init__(self, engine: "ReferenceEngine", number: int, rules: LinkRules) -> None:
        self.engine, self.number, self.rules = engine, number, rules
        self.busy_ps = 0
        self.loss = rules.loss
        self.sent_bytes = 0
        self._random = rules.random & MASK64

    def draw(self) -> int:
        """Return 31 random bits."""
        self._random, value = draw(self._random)
        return value

    def send(self, packet: SimulatedPacket) -> None:
        """Send a packet; the link has to be free."""
        engine, rules = self.engine, self.rules
        self.busy_ps = engine.now_ps + (packet.size * rules.kibibyte_ps >> RATE_SHIFT)
        self.sent_bytes += packet.size
        data = packet.kind is PacketKind.DATA
        engine.tally[EngineCounter.HOPS_DATA if data else EngineCounter.HOPS_CONTROL] += 1
        if self.loss and self.draw() < self.loss:
            engine.tally[EngineCounter.DROPS_LINK] += 1
            engine.drop(packet)
        else:
            engine.at(self.busy_ps + rules.delay_ps, lambda: engine.arrive(rules.target, packet))


class ReferenceSwitch:
    """A switch: what its ports share. With the discipline ``dlcp`` it runs the P4 program."""

    def __init__(self, engine: "ReferenceEngine", node: int) -> None:
        plan = engine.plan
        self.engine, self.node = engine, node
        self.rules = plan.switches
        self.random = int(plan.node_random[node]) & MASK64
        self.salt = int(plan.node_salt[node]) & MASK64
        self.divisor = plan.topology.divisors[node]
        self.used_bytes = 0
        self.turn = 0
        self.ports: dict[int, SwitchPort] = {}
        self.program: P4Pipeline | None = None

    def draw(self) -> int:
        """Return 31 random bits."""
        self.random, value = draw(self.random)
        return value

    def arrive(self, packet: SimulatedPacket) -> None:
        """Choose a port for a packet, and let it wait there."""
        links = self.engine.routes.links(self.node, packet.target)
        if not links:
            self.engine.tally[EngineCounter.DROPS_ROUTE] += 1
            self.engine.drop(packet)
            return
        link = links[self._choose(links, packet)]
        if self.program is not None:
            link = self.program.ingress(packet, link)
        self.ports[link].enqueue(packet)

    def _choose(self, links: list[int], packet: SimulatedPacket) -> int:
        count = len(links)
        if count == 1:
            return 0
        if not packet.sprayed or self.rules.path_choice == PathChoice.HASH:
            if self.rules.discipline == Discipline.DLCP:
                return packet.path_hash // self.divisor % count
            return mix(packet.path_hash, self.salt) % count
        if self.rules.path_choice == PathChoice.RANDOM:
            return self.draw() % count
        if self.rules.path_choice == PathChoice.ROUND_ROBIN:
            self.turn += 1
            return (self.turn - 1) % count
        first = self.draw() % count
        positions = [(first + step) % count for step in range(count)]
        return min(positions, key=lambda position: self.ports[links[position]].bytes)


class SwitchPort:
    """A switch's end of a link."""

    def __init__(self, switch: ReferenceSwitch, link: SimulatedLink) -> None:
        self.switch, self.link, self.engine = switch, link, switch.engine
        self.rules = switch.rules
        self.queues: list[deque[SimulatedPacket]] = [deque() for _ in range(PORT_QUEUES)]
        self.queue_bytes = [0] * PORT_QUEUES
        self.bytes = self.bytes_max = 0
        self.pending = False

    def enqueue(self, packet: SimulatedPacket) -> None:
        """Send a packet at once, let it wait, or drop it or another one instead."""
        rules, counts, now = self.rules, self.engine.tally, self.engine.now_ps
        program = self.switch.program
        if program is not None and program.refused:
            counts[EngineCounter.DROPS_POLICY] += 1
            self.engine.drop(packet)
            return
        if not self.pending and self.link.busy_ps <= now:
            if program is not None:
                program.egress(packet, self.link.number, 0)
            self.link.send(packet)
            return
        queue = self._queue_of(packet)
        victim = None
        if self._full(packet, queue):
            counts[EngineCounter.DROPS_TAIL] += 1
            if rules.discipline != Discipline.PFABRIC:
                self.engine.drop(packet)
                return
            victim = self._least_urgent(packet)
            if victim is packet:
                self.engine.drop(packet)
                return
            self._take(0, victim)
        if self._drops_early(packet, len(self.queues[queue])):
            counts[EngineCounter.DROPS_EARLY] += 1
            self.engine.drop(packet)
            return
        packet.enqueued_us, packet.enqueued_depth = now // PS_PER_US, len(self.queues[queue])
        self.queues[queue].append(packet)
        self.queue_bytes[queue] += packet.size
        self.bytes += packet.size
        self.bytes_max = max(self.bytes_max, self.bytes)
        self.switch.used_bytes += packet.size
        if not self.pending:
            self.pending = True
            self.engine.at(self.link.busy_ps, self.free)
        if victim is not None:
            self.engine.drop(victim)

    def _queue_of(self, packet: SimulatedPacket) -> int:
        discipline = self.rules.discipline
        if discipline in (Discipline.PRIORITY, Discipline.DLCP):
            return packet.queue
        if discipline != Discipline.TRIM:
            return 0
        if packet.kind is PacketKind.DATA and not packet.trimmed:
            if len(self.queues[0]) < self.rules.trim_packets:
                return 0
            packet.trimmed, packet.size = True, TRIMMED_BYTES
            self.engine.tally[EngineCounter.TRIMS] += 1
        return Queue.CONTROL

    def _full(self, packet: SimulatedPacket, queue: int) -> bool:
        rules, limit = self.rules, self.rules.limit_bytes
        if rules.discipline == Discipline.DLCP and not self.queues[queue]:
            return False
        if rules.discipline == Discipline.PFABRIC:
            return len(self.queues[0]) >= rules.limit_packets
        if rules.buffer == BufferScope.QUEUE:
            return self.queue_bytes[queue] + packet.size > limit
        if rules.buffer == BufferScope.PORT:
            return self.bytes + packet.size > limit
        used = self.switch.used_bytes
        room = (self.bytes + packet.size) * 1024 <= rules.alpha_1024 * (limit - used)
        return used + packet.size > limit or not room

    def _drops_early(self, packet: SimulatedPacket, waiting: int) -> bool:
        rules = self.rules
        if waiting < rules.ecn_min:
            return False
        if waiting < rules.ecn_max:
            share = (waiting - rules.ecn_min) * rules.ecn_probability
            if self.link.draw() * (rules.ecn_max - rules.ecn_min) >= share:
                return False
        if packet.ecn:
            packet.ecn = 3
            self.engine.tally[EngineCounter.MARKS] += 1
            return False
        return bool(rules.drop_incapable) and packet.kind is PacketKind.DATA

    def _least_urgent(self, arriving: SimulatedPacket) -> SimulatedPacket:
        # Of several with the most left, the last one that waits; the arriving one only if it has at least as much.
        worst = arriving
        for packet in self.queues[0]:
            if packet.rank > worst.rank or (packet.rank == worst.rank and worst is not arriving):
                worst = packet
        return worst

    def _take(self, queue: int, packet: SimulatedPacket) -> None:
        self.queues[queue].remove(packet)
        self.queue_bytes[queue] -= packet.size
        self.bytes -= packet.size
        self.switch.used_bytes -= packet.size

    def free(self) -> None:
        """Send the next packet, now that the link is free."""
        self.pending = False
        if self.rules.discipline == Discipline.PFABRIC:
            queue = 0
            best = min(self.queues[0], key=lambda packet: packet.rank)
            packet = best
            if best.kind is PacketKind.DATA:
                same = (other for other in self.queues[0] if other.kind is PacketKind.DATA)
                packet = next(other for other in same if other.message is best.message)
        else:
            queue = max(number for number, waiting in enumerate(self.queues) if waiting)
            packet = self.queues[queue][0]
        self._take(queue, packet)
        if self.switch.program is not None:
            self.switch.program.egress(packet, self.link.number, len(self.queues[queue]))
        self.link.send(packet)
        if any(self.queues):
            self.pending = True
            self.engine.at(self.link.busy_ps, self.free)
