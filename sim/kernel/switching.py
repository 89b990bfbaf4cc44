# SPDX-License-Identifier: Apache-2.0
"""Switches: which way a packet goes, whether it is let in, where it waits, and which one leaves next."""

from dlcp.sim.arithmetic import PS_PER_US
from dlcp.sim.counters import BUDGET_SPENT, DROPS_EARLY, DROPS_POLICY, DROPS_TAIL, MARKS, SLOT_TAKEN, TRIMS
from dlcp.sim.kernel.dice import draw, mix
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.state import DATA, PORT_FREE, SLOT_IDLE_US, SLOT_OWNED, SLOTS, Number, Rows
from dlcp.sim.kernel.world import (
    choices_of,
    counts_of,
    messages_of,
    packets_of,
    ports_of,
    queues_of,
    route_row_of,
    route_table_of,
    rules_of,
    slots_of,
    switches_of,
)
from dlcp.sim.plan import (
    AT_RANDOM,
    BY_HASH,
    CONTROL_QUEUE,
    IN_TURNS,
    PER_PORT,
    PER_QUEUE,
    PRIORITY,
    QUEUES,
    R_ALPHA,
    R_BUFFER,
    R_DISCIPLINE,
    R_DROP_ABOVE,
    R_DROP_INCAPABLE,
    R_ECN_MAX,
    R_ECN_MIN,
    R_ECN_PROBABILITY,
    R_LIMIT_BYTES,
    R_LIMIT_PACKETS,
    R_MARK_ABOVE,
    R_SPRAYING,
    R_TRIM_PACKETS,
    SELECTIVE,
    SMALLEST_FIRST,
    TRIM,
)

SEND_NOW, WAITING = -2, -1


@call
def choose_port(
    w: Rows,
    node: int,
    target: int,
    path_hash: int,
    sprayed: int,
) -> Number:
    """Return the link to take from ``node`` to host ``target``; -1 if there is none."""
    ports = ports_of(w)
    route_row = route_row_of(w)
    route_table = route_table_of(w)
    choices = choices_of(w)
    switches = switches_of(w)
    rules = rules_of(w)
    row = route_row[node]
    if row < 0:
        return -1 - row
    cell = (row * w.hosts + target) * 2
    start = route_table[cell]
    count = route_table[cell + 1]
    if count == 0:
        return -1
    if count == 1:
        return choices[start]
    switch = switches[node]
    if sprayed == 0 or rules[R_SPRAYING] == BY_HASH:
        if rules[R_DISCIPLINE] == SELECTIVE:
            pick = (path_hash // switch.divisor) % count
        else:
            pick = mix(path_hash, switch.salt) % count
    elif rules[R_SPRAYING] == AT_RANDOM:
        pick = draw(switch) % count
    elif rules[R_SPRAYING] == IN_TURNS:
        pick = switch.turn % count
        switch.turn = (switch.turn + 1) & 0x3FFFFFFF
    else:
        first = draw(switch) % count
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
def spend(w: Rows, switch: int, owner: int, budget: int, now: int) -> Number:
    """Return whether a message has a drop left at a switch, and take it: SelectiveDrop of p4/v1model/drop.p4."""
    slots = slots_of(w)
    counts = counts_of(w)
    slot = slots[switch * SLOTS + (owner & (SLOTS - 1))]
    owner |= SLOT_OWNED
    now_us = (now // PS_PER_US) & 0xFFFFFFFF
    holder = int(slot.owner)
    spent = int(slot.spent)
    if holder != owner and (holder == 0 or ((now_us - int(slot.used)) & 0xFFFFFFFF) > SLOT_IDLE_US):
        holder = owner
        spent = 0
        slot.owner = owner
    if holder != owner:
        counts[SLOT_TAKEN] += 1
        return False
    slot.used = now_us
    if spent >= budget:
        counts[BUDGET_SPENT] += 1
        slot.spent = spent
        return False
    slot.spent = spent + 1
    return True


@call
def least_urgent(w: Rows, port: int, arriving: int) -> Number:
    """Return the packet with the most left behind it, ``arriving`` or one that waits; that one is taken out."""
    packets = packets_of(w)
    q = queues_of(w)[port * QUEUES]
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
        take_out(w, port, worst, before_worst)
    return worst


@call
def take_out(w: Rows, port: int, packet: int, before: int) -> None:
    """Take a packet out of queue 0; ``before`` stands in front of it, or -1."""
    ports = ports_of(w)
    packets = packets_of(w)
    p = ports[port]
    q = queues_of(w)[port * QUEUES]
    following = packets[packet].next
    if before < 0:
        q.head = following
    else:
        packets[before].next = following
    if following < 0:
        q.tail = before
        if before < 0:
            p.mask &= ~1
    q.packets -= 1
    p.bytes -= packets[packet].size
    q.waiting_bytes -= packets[packet].size


@call
def take_smallest(w: Rows, port: int) -> Number:
    """Take the first packet of the message that has the least left; packets without a message go first."""
    packets = packets_of(w)
    q = queues_of(w)[port * QUEUES]
    best = q.head
    at = packets[best].next
    while at >= 0:
        if packets[at].rank < packets[best].rank:
            best = at
        at = packets[at].next
    before = -1
    at = q.head
    if packets[best].kind == DATA:
        while packets[at].kind != DATA or packets[at].node != packets[best].node:
            before = at
            at = packets[at].next
    else:
        while at != best:
            before = at
            at = packets[at].next
    take_out(w, port, at, before)
    return at


@call
def enqueue(
    w: Rows,
    port: int,
    packet: int,
    now: int,
) -> Number:
    """Let a packet wait at a switch's port; return `WAITING`, `SEND_NOW`, or the packet that was dropped instead."""
    ports = ports_of(w)
    packets = packets_of(w)
    messages = messages_of(w)
    switches = switches_of(w)
    rules = rules_of(w)
    counts = counts_of(w)
    p = ports[port]
    queues = queues_of(w)
    first = port * QUEUES
    x = packets[packet]
    discipline = rules[R_DISCIPLINE]
    queue = int(x.queue)
    if (
        discipline == SELECTIVE
        and x.drop_class > 0
        and queues[first + queue].depth > rules[R_DROP_ABOVE + x.drop_class]
    ):
        message = messages[x.node]
        if spend(w, p.node - w.hosts, message.owner, message.budget, now):
            counts[DROPS_POLICY] += 1
            return packet
    if p.pending == 0 and p.busy <= now:
        if discipline == SELECTIVE:
            queues[first + queue].depth = 0
        return SEND_NOW
    if discipline == TRIM:
        if x.kind != DATA or x.trimmed != 0:
            queue = CONTROL_QUEUE
        elif queues[first].packets >= rules[R_TRIM_PACKETS]:
            x.trimmed = 1
            x.size = 64
            counts[TRIMS] += 1
            queue = CONTROL_QUEUE
        else:
            queue = 0
    elif discipline != PRIORITY and discipline != SELECTIVE:
        queue = 0
    q = queues[first + queue]
    size = x.size
    limit = rules[R_LIMIT_BYTES]
    full = False
    if discipline == SMALLEST_FIRST:
        full = q.packets >= rules[R_LIMIT_PACKETS]
    elif rules[R_BUFFER] == PER_QUEUE:
        full = q.waiting_bytes + size > limit
    elif rules[R_BUFFER] == PER_PORT:
        full = p.bytes + size > limit
    else:
        used = switches[p.node].used
        full = used + size > limit or (p.bytes + size) * 1024 > rules[R_ALPHA] * (limit - used)
    dropped = -1
    if full:
        counts[DROPS_TAIL] += 1
        if discipline != SMALLEST_FIRST:
            return packet
        dropped = least_urgent(w, port, packet)
        if dropped == packet:
            return packet
        switches[p.node].used -= packets[dropped].size
    waiting = q.packets
    if waiting >= rules[R_ECN_MIN]:
        low = rules[R_ECN_MIN]
        high = rules[R_ECN_MAX]
        if waiting >= high or draw(p) * (high - low) < (waiting - low) * rules[R_ECN_PROBABILITY]:
            if x.ecn != 0:
                x.ecn = 3
                counts[MARKS] += 1
            elif rules[R_DROP_INCAPABLE] != 0 and x.kind == DATA:
                counts[DROPS_EARLY] += 1
                return packet
    x.next = -1
    if q.head < 0:
        q.head = packet
    else:
        packets[q.tail].next = packet
    q.tail = packet
    p.mask |= 1 << queue
    q.packets = waiting + 1
    p.bytes += size
    q.waiting_bytes += size
    if p.bytes > p.bytes_max:
        p.bytes_max = p.bytes
    switches[p.node].used += size
    if p.pending == 0:
        p.pending = 1
        push(w, p.busy, PORT_FREE, port)
    return dropped


@call
def dequeue(w: Rows, port: int) -> Number:
    """Take the next packet of a switch's port, which has one."""
    ports = ports_of(w)
    packets = packets_of(w)
    switches = switches_of(w)
    rules = rules_of(w)
    counts = counts_of(w)
    p = ports[port]
    if rules[R_DISCIPLINE] == SMALLEST_FIRST:
        packet = take_smallest(w, port)
        switches[p.node].used -= packets[packet].size
        return packet
    queue = 7
    while (p.mask >> queue) & 1 == 0:
        queue -= 1
    q = queues_of(w)[port * QUEUES + queue]
    packet = q.head
    x = packets[packet]
    q.head = x.next
    if x.next < 0:
        p.mask &= ~(1 << queue)
    depth = q.packets - 1
    q.packets = depth
    p.bytes -= x.size
    q.waiting_bytes -= x.size
    switches[p.node].used -= x.size
    if rules[R_DISCIPLINE] == SELECTIVE:
        q.depth = depth
        if x.ecn != 0 and queue != CONTROL_QUEUE and depth > rules[R_MARK_ABOVE]:
            x.ecn = 3
            counts[MARKS] += 1
    return packet
