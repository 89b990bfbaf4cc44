# SPDX-License-Identifier: Apache-2.0
"""Switches: path choice, admission and drops, queueing, and scheduling."""

from dlcp.sim.arithmetic import DRAW_LIMIT, PS_PER_US
from dlcp.sim.engines.kernel import arrays as k
from dlcp.sim.engines.kernel.events import push
from dlcp.sim.engines.network_tables import (
    OWN_KIND,
    SLOT_IDLE_US,
    SLOT_OWNED,
    SLOT_REGISTER_SIZE,
    TRIMMED_BYTES,
    Discipline,
    PacketKind,
    PathChoice,
)
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.engines.rules import is_full, own_admission
from dlcp.sim.jit import call, inlined
from dlcp.sim.network.disciplines import Admission
from dlcp.sim.network.nodes import cell_of
from dlcp.sim.rows import PORT_QUEUES, Row
from dlcp.sim.transports.specs import EXCESS_QUEUE, URGENT_QUEUE

SEND_NOW, WAITS = -2, -1
"""Results of `enqueue` when no packet was dropped."""
_MARK, _DROP = int(Admission.MARK), int(Admission.DROP)


@call
def choose_port(w: Row, node: int, target: int, path_hash: int, sprayed: int) -> int:
    """Return the link to take from ``node`` to host ``target``; -1 if there is none."""
    ports = k.ports_of(w)
    choices = k.choices_of(w)
    rules = k.rules_of(w)[0]
    row = k.route_row_of(w)[node]
    if row < 0:
        return -1 - row
    cell = 2 * cell_of(row, node, target, w.hosts, k.route_first_of(w), k.route_targets_of(w))
    start = k.route_cells_of(w)[cell]
    count = k.route_cells_of(w)[cell + 1]
    if count == 0:
        return -1
    if count == 1:
        return choices[start]
    switch = k.switches_of(w)[node]
    if sprayed == 0 or rules.path_choice == PathChoice.HASH:
        if rules.discipline == Discipline.DLCP:
            pick = (path_hash // switch.divisor) % count
        else:
            value = path_hash
            if sprayed != 0:
                value = k.mix(path_hash, switch.salt)  # otherwise consecutive numbers would take the ports in turn
            pick = k.mix(value, switch.salt) % count
    elif rules.path_choice == PathChoice.RANDOM:
        pick = k.draw(switch) % count
    elif rules.path_choice == PathChoice.ROUND_ROBIN:
        pick = switch.turn % count
        switch.turn = (switch.turn + 1) & 0x3FFFFFFF
    else:
        first = k.draw(switch) % count
        pick = first
        least = ports[choices[start + first]].bytes
        for step in range(1, count):
            other = (first + step) % count
            waiting = ports[choices[start + other]].bytes
            if waiting < least:
                least = waiting
                pick = other
    return choices[start + pick]


@call
def spend_drop_budget(w: Row, switch: int, owner: int, budget: int, now: int, excess: int) -> int:
    """Return whether a switch drops a packet, and charge its message's budget: SelectiveDrop of p4/v1model/drop.p4.

    A message loses no more packets than its budget, except ``excess`` packets, which are dropped in any case.

    This repeats the P4 program only for speed. The generated Numba source of the whole program takes as long per packet
    as everything else that the kernel does for a hop. `tests/sim/test_sim_agreement.py` (test_engines_agree,
    test_shared_slots_are_counted_as_the_program_does) keeps the two equal: the reference runs the compiled program, and
    every drop, every budget spent and every slot taken has to be the same.
    """
    slot = k.slots_of(w)[switch * SLOT_REGISTER_SIZE + (owner & (SLOT_REGISTER_SIZE - 1))]
    owner |= SLOT_OWNED
    now_us = (now // PS_PER_US) & 0xFFFFFFFF
    holder = int(slot.owner)
    spent = int(slot.spent)
    if holder != owner and (holder == 0 or ((now_us - int(slot.used)) & 0xFFFFFFFF) > SLOT_IDLE_US):
        holder = owner
        spent = 0
        slot.owner = owner
    if holder != owner:
        k.counts_of(w)[EngineCounter.SLOT_TAKEN] += 1 - excess
        return excess
    slot.used = now_us
    if spent >= budget:
        k.counts_of(w)[EngineCounter.BUDGET_SPENT] += 1 - excess
        slot.spent = spent
        return excess
    slot.spent = spent + 1
    return 1


@call
def least_urgent(w: Row, port: int, arriving: int) -> int:
    """Return the packet whose message has the most left: ``arriving``, or a waiting one, which is removed."""
    packets = k.packets_of(w)
    q = k.queues_of(w)[port * PORT_QUEUES]
    worst = arriving
    before_worst = -1
    previous = -1
    at = q.head
    while at >= 0:
        if packets[at].rank > packets[worst].rank or (worst != arriving and packets[at].rank == packets[worst].rank):
            worst = at
            before_worst = previous
        previous = at
        at = packets[at].next
    if worst != arriving:
        remove_from_queue(w, port, 0, worst, before_worst)
    return worst


@call
def remove_from_queue(w: Row, port: int, queue: int, packet: int, before: int) -> None:
    """Remove a packet from a queue of a switch's port; ``before`` is the one in front of it, or -1."""
    packets = k.packets_of(w)
    p = k.ports_of(w)[port]
    q = k.queues_of(w)[port * PORT_QUEUES + queue]
    following = packets[packet].next
    if before < 0:
        q.head = following
    else:
        packets[before].next = following
    if following < 0:
        q.tail = before
        if before < 0:
            p.nonempty &= ~(1 << queue)
    size = packets[packet].size
    q.packets -= 1
    q.waiting_bytes -= size
    p.bytes -= size
    k.switches_of(w)[p.node].used -= size


@call
def dequeue_smallest(w: Row, port: int) -> int:
    """Remove and return the first packet of the message with the fewest packets left. Control packets go first."""
    packets = k.packets_of(w)
    q = k.queues_of(w)[port * PORT_QUEUES]
    best = q.head
    at = packets[best].next
    while at >= 0:
        if packets[at].rank < packets[best].rank:
            best = at
        at = packets[at].next
    before = -1
    at = q.head
    if packets[best].kind == PacketKind.DATA:
        while packets[at].kind != PacketKind.DATA or packets[at].message != packets[best].message:
            before = at
            at = packets[at].next
    else:
        while at != best:
            before = at
            at = packets[at].next
    remove_from_queue(w, port, 0, at, before)
    return at


@inlined
def waiting_queue(w: Row, port: int, packet: int, discipline: int) -> int:
    """Return the queue for a packet at a port. With trimming, a full queue trims the packet, or its own last one."""
    x = k.packets_of(w)[packet]
    if discipline == Discipline.PRIORITY or discipline == Discipline.DLCP or discipline >= OWN_KIND:
        return int(x.queue)
    if discipline != Discipline.TRIM:
        return 0
    if x.kind == PacketKind.DATA and x.trimmed == 0:
        rules = k.rules_of(w)[0]
        q = k.queues_of(w)[port * PORT_QUEUES]
        if q.packets < rules.trim_packets:
            return 0
        if rules.trims_either != 0 and k.draw(k.ports_of(w)[port]) & 1 and k.packets_of(w)[q.tail].size >= x.size:
            last = q.tail
            remove_from_queue(w, port, 0, last, before_last(w, q))
            trim(w, last)
            # The header takes less room than the packet had.
            put(w, port, URGENT_QUEUE, last)
            return 0
        trim(w, packet)
    return URGENT_QUEUE


@call
def before_last(w: Row, q: Row) -> int:
    """Return the last packet but one of a queue; -1 if it has only one."""
    packets = k.packets_of(w)
    before = -1
    at = q.head
    while at != q.tail:
        before = at
        at = packets[at].next
    return before


@inlined
def trim(w: Row, packet: int) -> None:
    """Remove a packet's payload."""
    x = k.packets_of(w)[packet]
    x.trimmed = 1
    x.size = TRIMMED_BYTES
    k.counts_of(w)[EngineCounter.TRIMS] += 1


@inlined
def put(w: Row, port: int, queue: int, packet: int) -> None:
    """Append a packet to a queue of a switch's port."""
    p = k.ports_of(w)[port]
    q = k.queues_of(w)[port * PORT_QUEUES + queue]
    size = k.packets_of(w)[packet].size
    k.append(k.packets_of(w), q, packet)
    p.nonempty |= 1 << queue
    q.packets += 1
    p.bytes += size
    q.waiting_bytes += size
    if p.bytes > p.bytes_max:
        p.bytes_max = p.bytes
    k.switches_of(w)[p.node].used += size


@inlined
def is_congested(w: Row, port: int, waiting: int) -> int:
    """Return whether to mark a packet at a port where ``waiting`` packets are in its queue; it may be drawn."""
    rules = k.rules_of(w)[0]
    low = rules.ecn_min
    if waiting < low:
        return False
    high = rules.ecn_max
    return waiting >= high or k.draw(k.ports_of(w)[port]) * (high - low) < (waiting - low) * rules.ecn_probability


@call
def enqueue(w: Row, port: int, packet: int, now: int) -> int:
    """Queue a packet at a switch's port. Return `WAITS`, `SEND_NOW`, or the packet that was dropped."""
    rules = k.rules_of(w)[0]
    counts = k.counts_of(w)
    p = k.ports_of(w)[port]
    queues = k.queues_of(w)
    first = port * PORT_QUEUES
    x = k.packets_of(w)[packet]
    discipline = rules.discipline
    queue = int(x.queue)
    # The program drops packets before they are queued. It counts those that it forwards; departures correct the count.
    droppable = discipline == Discipline.DLCP and x.drop_class > 0
    if droppable and queues[first + queue].depth > rules.drop_above[x.drop_class]:
        m = k.messages_of(w)[x.message]
        if spend_drop_budget(w, p.node - w.hosts, m.owner, m.budget, now, int(queue == EXCESS_QUEUE)):
            if queue == EXCESS_QUEUE or k.transports_of(w)[m.transport].trimming == 0:
                counts[EngineCounter.DROPS_POLICY] += 1
                return packet
            trim(w, packet)
            # What is left is a control packet.
            queue = URGENT_QUEUE
            x.queue = URGENT_QUEUE
            x.drop_class = 0
            x.sprayed = 0
            x.path_hash = k.streams_of(w)[m.stream].path_hash
    if discipline == Discipline.DLCP:
        queues[first + queue].depth += 1
    if p.pending == 0 and p.busy_until <= now:
        if discipline == Discipline.DLCP:
            queues[first + queue].depth = 0
        return SEND_NOW
    queue = waiting_queue(w, port, packet, discipline)
    q = queues[first + queue]
    size = x.size
    dropped = WAITS
    if is_full(rules, q.packets, q.waiting_bytes, p.bytes, k.switches_of(w)[p.node].used, size):
        counts[EngineCounter.DROPS_TAIL] += 1
        if discipline != Discipline.PFABRIC:
            return packet
        dropped = least_urgent(w, port, packet)
        if dropped == packet:
            return packet
    waiting = q.packets
    if discipline >= OWN_KIND:
        chance = k.draw(p) / DRAW_LIMIT
        verdict = own_admission(discipline, x, rules.own, waiting, q.waiting_bytes, p.bytes, chance)
        if verdict == _DROP:
            counts[EngineCounter.DROPS_EARLY] += 1
            return packet
        if verdict == _MARK and x.ecn != 0:
            x.ecn = 3
            counts[EngineCounter.MARKS] += 1
    elif discipline != Discipline.TRIM and is_congested(w, port, waiting):
        if x.ecn != 0:
            x.ecn = 3
            counts[EngineCounter.MARKS] += 1
        elif rules.drop_incapable != 0 and x.kind == PacketKind.DATA:
            # Marks and pFabric exclude each other, so no other packet has been dropped for this one.
            counts[EngineCounter.DROPS_EARLY] += 1
            return packet
    put(w, port, queue, packet)
    if p.pending == 0:
        p.pending = 1
        push(w, p.busy_until, k.EventKind.PORT_FREE, port)
    return dropped


@call
def dequeue(w: Row, port: int) -> int:
    """Remove and return the next packet of a switch's port, which must have one."""
    rules = k.rules_of(w)[0]
    if rules.discipline == Discipline.PFABRIC:
        return dequeue_smallest(w, port)
    p = k.ports_of(w)[port]
    queue = PORT_QUEUES - 1
    while (p.nonempty >> queue) & 1 == 0:
        queue -= 1
    q = k.queues_of(w)[port * PORT_QUEUES + queue]
    packet = q.head
    remove_from_queue(w, port, queue, packet, -1)
    x = k.packets_of(w)[packet]
    if rules.discipline == Discipline.DLCP:
        q.depth = q.packets
        if x.ecn != 0 and queue != URGENT_QUEUE and q.packets > rules.mark_above:
            x.ecn = 3
            k.counts_of(w)[EngineCounter.MARKS] += 1
    elif rules.discipline == Discipline.TRIM and x.ecn != 0 and queue == 0 and is_congested(w, port, q.packets):
        # A mark at departure reflects the queue at that time (Ultra Ethernet).
        x.ecn = 3
        k.counts_of(w)[EngineCounter.MARKS] += 1
    return packet
