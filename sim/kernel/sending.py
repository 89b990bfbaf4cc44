# SPDX-License-Identifier: Apache-2.0
"""Hosts as senders: messages in their streams, streams that are ready, and the next packet of a network interface."""

from dlcp.sim.arithmetic import ENTROPY_TABLE
from dlcp.sim.counters import RESENT, SENT
from dlcp.sim.kernel.control import probe
from dlcp.sim.kernel.dice import mix
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.lifetime import settle
from dlcp.sim.kernel.pools import give_record, take_packet
from dlcp.sim.kernel.state import CLASS_MASK, DATA, FLYING, HOLE, LOST, RECEIVED, STATE_MASK, Number, Rows
from dlcp.sim.kernel.timers import arm, put_off, put_tail_off
from dlcp.sim.kernel.world import (
    counts_of,
    messages_of,
    packets_of,
    ports_of,
    profiles_of,
    queues_of,
    records_of,
    seg_of,
    streams_of,
    transports_of,
)
from dlcp.sim.plan import BLOCK_PACKETS, CONTROL_QUEUE, NDP, PFABRIC, PIAS, PROFILE_CELLS, QUEUES


@call
def begin(w: Rows, node: int, now: int) -> None:
    """Classify the packets of a message whose turn has come, and put it among those of its stream."""
    streams = streams_of(w)
    messages = messages_of(w)
    seg = seg_of(w)
    transports = transports_of(w)
    profiles = profiles_of(w)
    m = messages[node]
    m.begin = now
    if m.bounded != 0:
        first = m.profile * PROFILE_CELLS
        zeros = 0
        while zeros < PROFILE_CELLS and profiles[first + zeros] == 0:
            zeros += 1
        for index in range(m.packets):
            # In each block those go first that may not be dropped: dlcp.tags.send_order.
            start = index & ~(BLOCK_PACKETS - 1)
            keep = (zeros * min(BLOCK_PACKETS, m.packets - start) + PROFILE_CELLS // 2) // PROFILE_CELLS
            if index - start < keep or zeros == PROFILE_CELLS:
                m.protected += 1
            else:
                seg[m.offset + index] = profiles[first + zeros + mix(index, m.salt) % (PROFILE_CELLS - zeros)]
    s = streams[m.stream]
    t = transports[m.transport]
    if t.kind == NDP:
        s.credit += min(int(t.window), m.packets)
        m.pulls = min(int(t.window), m.packets)
    enlist(w, m.stream, node)


@call
def enlist(w: Rows, stream: int, node: int) -> None:
    """Put a message among those of its stream that have something to send, by order, behind one that has begun."""
    streams = streams_of(w)
    messages = messages_of(w)
    s = streams[stream]
    m = messages[node]
    m.listed = 1
    m.link = -1
    if s.head < 0:
        s.head = node
        s.tail = node
        return
    if messages[s.tail].order <= m.order:
        messages[s.tail].link = node
        s.tail = node
        return
    at = s.head
    if messages[at].next == 0 and messages[at].order > m.order:
        m.link = at
        s.head = node
        return
    while messages[at].link >= 0 and messages[messages[at].link].order <= m.order:
        at = messages[at].link
    m.link = messages[at].link
    messages[at].link = node
    if m.link < 0:
        s.tail = node


@call
def may_send(s: Rows, t: Rows) -> Number:
    """Return whether a stream's window is open, and something seems to wait behind it."""
    if s.again_head < 0 and s.head < 0:
        return False
    if t.kind == NDP:
        return s.credit > 0
    return s.flying < int(s.window) + s.spare and s.asking == 0


@call
def work(
    w: Rows,
    port: int,
    stream: int,
    now: int,
) -> Number:
    """Return what a stream has to send: 0 nothing, 1 a packet again, 2 the next one of its first message.

    What need not be sent any more is removed on the way. If ``port``, which has no control packet waiting, has to ask
    after a message for it, that goes first, and the answer is 0.
    """
    ports = ports_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    seg = seg_of(w)
    transports = transports_of(w)
    s = streams[stream]
    if not may_send(s, transports[s.transport]):
        return 0
    found = 0
    while s.again_head >= 0 and found == 0:
        record = s.again_head
        node = records[record].node
        m = messages[node]
        place = m.offset + records[record].index
        lost = (seg[place] & STATE_MASK) == LOST
        if lost and m.stopped == 0:
            found = 1
        else:
            if lost:
                seg[place] = (seg[place] & ~STATE_MASK) | HOLE
                m.holes += 1
            m.waiting -= 1
            s.repairing -= 1
            s.again_head = records[record].next
            give_record(w, record)
            # Its acknowledgement came late, when this still waited: nobody has asked yet for what else is missing.
            probe(w, port, node, now)
            settle(w, node)
            if ports[port].control_head >= 0:
                return 0
    while s.head >= 0 and found == 0:
        node = s.head
        m = messages[node]
        if m.stopped == 0:
            if m.resending != 0:
                while m.next < m.packets and (seg[m.offset + m.next] & (STATE_MASK | RECEIVED)) != HOLE:
                    m.next += 1
            if m.next < m.packets:
                found = 2
        if found == 0:
            s.head = m.link
            m.listed = 0
            settle(w, node)
    return found


@call
def queue_of(t: Rows, m: Rows, index: int) -> Number:
    """Return the queue of a packet: its message's, or by how much of the message was sent before it (PIAS)."""
    queue = int(m.queue)
    if t.kind == PIAS and t.levels > 0:
        queue = CONTROL_QUEUE
        sent = index * t.payload
        for level in range(t.levels):
            if sent >= t.demotion[level]:
                queue -= 1
    return queue


@call
def level_of(w: Rows, stream: int) -> Number:
    """Return the queue of what a stream seems to have next."""
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    transports = transports_of(w)
    s = streams[stream]
    if s.again_head >= 0:
        r = records[s.again_head]
        return queue_of(transports[s.transport], messages[r.node], r.index)
    m = messages[s.head]
    return queue_of(transports[s.transport], m, m.next)


@call
def make_ready(w: Rows, port: int, stream: int, queue: int) -> None:
    """Put a stream behind those that are ready to send at a network interface."""
    ports = ports_of(w)
    streams = streams_of(w)
    q = queues_of(w)[port * QUEUES + queue]
    p = ports[port]
    s = streams[stream]
    s.ready = 1
    s.next = -1
    if q.head < 0:
        q.head = stream
    else:
        streams[q.tail].next = stream
    q.tail = stream
    p.mask |= 1 << queue


@call
def bring_smallest_forward(w: Rows, port: int, queue: int) -> None:
    """Put the pFabric stream whose message has the least left in front of the others."""
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    q = queues_of(w)[port * QUEUES + queue]
    best = -1
    before_best = -1
    least = 1 << 40
    before = -1
    at = q.head
    if transports[streams[at].transport].kind != PFABRIC:
        return
    while at >= 0:
        head = streams[at].head
        left = messages[head].packets - messages[head].acked if head >= 0 else 0
        if left < least:
            least = left
            best = at
            before_best = before
        before = at
        at = streams[at].next
    if before_best >= 0:
        streams[before_best].next = streams[best].next
        if streams[best].next < 0:
            q.tail = before_best
        streams[best].next = q.head
        q.head = best


@call
def build(
    w: Rows,
    stream: int,
    what: int,
    now: int,
) -> Number:
    """Return the packet that `work` found, as it leaves its host."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    seg = seg_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    s = streams[stream]
    t = transports[s.transport]
    again = 0
    if what == 1:
        record = s.again_head
        r = records[record]
        s.again_head = r.next
        node = r.node
        index = r.index
        m = messages[node]
        m.waiting -= 1
        again = 1
    else:
        node = s.head
        m = messages[node]
        index = m.next
        m.next = index + 1
        record = w.free_record
        r = records[record]
        w.free_record = r.next
        w.free_records -= 1
        r.node = node
        r.index = index
        r.again = 0
        if m.resending != 0:
            m.holes -= 1
            again = 1
        elif m.next == m.packets:
            s.head = m.link
            m.listed = 0
    queue = queue_of(t, m, index)
    place = m.offset + index
    state = seg[place]
    seg[place] = (state & ~STATE_MASK) | FLYING
    serial = w.serial
    w.serial = serial + 1
    r.serial = serial
    r.queue = queue
    r.number = s.number
    s.number += 1
    r.sent = now
    r.next = -1
    r.previous = s.last[queue]
    if r.previous >= 0:
        records[r.previous].next = record
    else:
        s.first[queue] = record
    s.last[queue] = record
    s.spare = 0
    if s.flying == 0:
        put_off(s, t, now)
    else:
        put_tail_off(s, t, now)
    arm(w, s, stream)
    s.flying += 1
    if s.flying > w.flying_max:
        w.flying_max = s.flying
    if t.kind == NDP:
        s.credit -= 1
    m.flying += 1
    m.sent += 1
    m.refs += 1
    counts[SENT] += 1
    counts[RESENT] += again
    packet = take_packet(w)
    x = packets[packet]
    x.serial = serial
    x.node = node
    x.index = index
    x.record = record
    x.target = s.target
    x.size = t.header + (m.last_bytes if index == m.packets - 1 else t.payload)
    x.rank = m.packets - m.acked
    x.kind = DATA
    x.queue = queue
    x.drop_class = (state & CLASS_MASK) if again == 0 else 0
    x.ecn = t.ecn
    x.sprayed = t.sprayed
    x.flag = 0
    x.again = again
    x.trimmed = 0
    path_hash = s.hash
    if t.sprayed != 0:
        entropy = (index + m.step + again) & 0xFFFFFFFF
        path_hash ^= ENTROPY_TABLE[0, entropy >> 24] ^ ENTROPY_TABLE[1, (entropy >> 16) & 255]
        path_hash ^= ENTROPY_TABLE[2, (entropy >> 8) & 255] ^ ENTROPY_TABLE[3, entropy & 255]
    x.hash = path_hash
    return packet
