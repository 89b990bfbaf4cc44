# SPDX-License-Identifier: Apache-2.0
"""Switches: queues of packets at ports, and the disciplines that fill and empty them."""

from collections import deque
from typing import TYPE_CHECKING

from dlcp.sim import counters as c
from dlcp.sim.arithmetic import PS_PER_US, draw, mix
from dlcp.sim.plan import (
    AT_RANDOM,
    BY_HASH,
    CONTROL_QUEUE,
    IN_TURNS,
    PER_PORT,
    PER_QUEUE,
    PRIORITY,
    QUEUES,
    SELECTIVE,
    SMALLEST_FIRST,
    TRIM,
)
from dlcp.sim.reference.link import Link
from dlcp.sim.reference.parts import Kind, Packet

if TYPE_CHECKING:
    from dlcp.sim.reference.engine import ReferenceEngine
    from dlcp.sim.reference.program import ProgramSwitch

SLOT_IDLE_US = 1_000_000
TRIMMED_BYTES = 64


class Switch:
    """A switch: what its ports share."""

    def __init__(self, engine: "ReferenceEngine", node: int) -> None:
        plan = engine.plan
        self.engine, self.node = engine, node
        self.rules = plan.rules
        self.random = int(plan.node_random[node]) & ((1 << 64) - 1)
        self.salt = int(plan.node_salt[node]) & ((1 << 64) - 1)
        self.divisor = int(plan.divisors[node])
        self.used_bytes = 0
        self.turn = 0
        self.ports: dict[int, Port] = {}
        self.slots: dict[int, list[int]] = {}
        self.program: ProgramSwitch | None = None

    def draw(self) -> int:
        """Return 31 random bits."""
        self.random, value = draw(self.random)
        return value

    def arrive(self, packet: Packet) -> None:
        """Choose a port for a packet, and let it wait there."""
        links = self.engine.routes.links(self.node, packet.target)
        if not links:
            self.engine.tally[c.DROPS_ROUTE] += 1
            self.engine.drop(packet)
            return
        if self.program is not None:
            self.ports[self.program.ingress(packet, links)].enqueue(packet)
        else:
            self.ports[links[self._choose(links, packet)]].enqueue(packet)

    def _choose(self, links: list[int], packet: Packet) -> int:
        count = len(links)
        if count == 1:
            return 0
        if not packet.sprayed or self.rules.spraying == BY_HASH:
            if self.rules.discipline == SELECTIVE:
                return packet.hash // self.divisor % count
            return mix(packet.hash, self.salt) % count
        if self.rules.spraying == AT_RANDOM:
            return self.draw() % count
        if self.rules.spraying == IN_TURNS:
            self.turn += 1
            return (self.turn - 1) % count
        first = self.draw() % count
        places = [(first + step) % count for step in range(count)]
        return min(places, key=lambda place: self.ports[links[place]].bytes)

    def may_drop(self, packet: Packet) -> bool:
        """Spend one of the message's drops here, if it has one left: SelectiveDrop of p4/v1model/drop.p4."""
        message = packet.message
        owner = message.owner | 0x80000000
        now_us = self.engine.now_ps // PS_PER_US & 0xFFFFFFFF
        slot = self.slots.setdefault(message.owner & 0xFFFF, [0, 0, 0])
        if slot[0] != owner and (slot[0] == 0 or (now_us - slot[1]) & 0xFFFFFFFF > SLOT_IDLE_US):
            slot[0], slot[2] = owner, 0
        if slot[0] != owner:
            self.engine.tally[c.SLOT_TAKEN] += 1
            return False
        slot[1] = now_us
        if slot[2] >= message.budget:
            self.engine.tally[c.BUDGET_SPENT] += 1
            return False
        slot[2] += 1
        return True


class Port:
    """A switch's end of a link."""

    def __init__(self, switch: Switch, link: Link) -> None:
        self.switch, self.link, self.engine = switch, link, switch.engine
        self.rules = switch.rules
        self.queues: list[deque[Packet]] = [deque() for _ in range(QUEUES)]
        self.queue_bytes = [0] * QUEUES
        self.bytes = self.bytes_max = 0
        self.depth = [0] * QUEUES
        self.pending = False

    def enqueue(self, packet: Packet) -> None:
        """Send a packet at once, let it wait, or drop it or another one instead."""
        rules, counts, now = self.rules, self.engine.tally, self.engine.now_ps
        program = self.switch.program
        if rules.discipline == SELECTIVE:
            if program is not None:
                refused = program.refused
            else:
                above = self.depth[packet.queue] > rules.drop_above[packet.drop_class]
                refused = packet.drop_class > 0 and above and self.switch.may_drop(packet)
            if refused:
                counts[c.DROPS_POLICY] += 1
                self.engine.drop(packet)
                return
        if not self.pending and self.link.busy_ps <= now:
            if rules.discipline == SELECTIVE:
                self._leave(packet, 0)
            self.link.send(packet)
            return
        queue = self._queue_of(packet)
        victim = None
        if self._full(packet, queue):
            counts[c.DROPS_TAIL] += 1
            if rules.discipline != SMALLEST_FIRST:
                self.engine.drop(packet)
                return
            victim = self._least_urgent(packet)
            if victim is packet:
                self.engine.drop(packet)
                return
            self._take(0, victim)
        if self._mark_or_refuse(packet, len(self.queues[queue])):
            counts[c.DROPS_EARLY] += 1
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

    def _queue_of(self, packet: Packet) -> int:
        discipline = self.rules.discipline
        if discipline in (PRIORITY, SELECTIVE):
            return packet.queue
        if discipline != TRIM:
            return 0
        if packet.kind is Kind.DATA and not packet.trimmed:
            if len(self.queues[0]) < self.rules.trim_packets:
                return 0
            packet.trimmed, packet.size = True, TRIMMED_BYTES
            self.engine.tally[c.TRIMS] += 1
        return CONTROL_QUEUE

    def _full(self, packet: Packet, queue: int) -> bool:
        rules, limit = self.rules, self.rules.limit_bytes
        if rules.discipline == SMALLEST_FIRST:
            return len(self.queues[0]) >= rules.limit_packets
        if rules.buffer == PER_QUEUE:
            return self.queue_bytes[queue] + packet.size > limit
        if rules.buffer == PER_PORT:
            return self.bytes + packet.size > limit
        used = self.switch.used_bytes
        room = (self.bytes + packet.size) * 1024 <= rules.alpha_1024 * (limit - used)
        return used + packet.size > limit or not room

    def _mark_or_refuse(self, packet: Packet, waiting: int) -> bool:
        rules = self.rules
        if waiting < rules.ecn_min:
            return False
        if waiting < rules.ecn_max:
            share = (waiting - rules.ecn_min) * rules.ecn_probability
            if self.link.draw() * (rules.ecn_max - rules.ecn_min) >= share:
                return False
        if packet.ecn:
            packet.ecn = 3
            self.engine.tally[c.MARKS] += 1
            return False
        return bool(rules.drop_incapable) and packet.kind is Kind.DATA

    def _least_urgent(self, arriving: Packet) -> Packet:
        # Of several the last one that waits; but rather one that waits than none only if it has more left.
        worst = arriving
        for packet in self.queues[0]:
            if packet.rank > worst.rank or (packet.rank == worst.rank and worst is not arriving):
                worst = packet
        return worst

    def _take(self, queue: int, packet: Packet) -> None:
        self.queues[queue].remove(packet)
        self.queue_bytes[queue] -= packet.size
        self.bytes -= packet.size
        self.switch.used_bytes -= packet.size

    def free(self) -> None:
        """Send the next packet: the link is free."""
        self.pending = False
        if self.rules.discipline == SMALLEST_FIRST:
            queue = 0
            best = min(self.queues[0], key=lambda packet: packet.rank)
            packet = best
            if best.kind is Kind.DATA:
                same = (other for other in self.queues[0] if other.kind is Kind.DATA)
                packet = next(other for other in same if other.message is best.message)
        else:
            queue = max(number for number, waiting in enumerate(self.queues) if waiting)
            packet = self.queues[queue][0]
        self._take(queue, packet)
        if self.rules.discipline == SELECTIVE:
            self._leave(packet, len(self.queues[queue]))
        self.link.send(packet)
        if any(self.queues):
            self.pending = True
            self.engine.at(self.link.busy_ps, self.free)

    def _leave(self, packet: Packet, depth: int) -> None:
        """Run egress of the P4 program."""
        if self.switch.program is not None:
            self.switch.program.egress(packet, self.link.number, depth)
            return
        self.depth[packet.queue] = depth
        if packet.ecn and packet.queue != CONTROL_QUEUE and depth > self.rules.mark_above:
            packet.ecn = 3
            self.engine.tally[c.MARKS] += 1
