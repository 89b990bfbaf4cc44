# SPDX-License-Identifier: Apache-2.0
"""Hosts as receivers, of data and of answers."""

from dlcp.sim.counters import ARRIVED, DUPLICATES, LATE_ANSWERS
from dlcp.sim.kernel.congestion import grow, measure, shrink
from dlcp.sim.kernel.control import address_control, lose, post, probe
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.lifetime import finish, settle
from dlcp.sim.kernel.pools import give_record, take_packet, unlink
from dlcp.sim.kernel.sending import enlist
from dlcp.sim.kernel.state import (
    ACK,
    ACKED,
    ANSWER,
    CLASS_MASK,
    HOLE,
    LOST,
    NACK,
    PULL,
    PULL_DUE,
    RECEIVED,
    STATE_MASK,
    Rows,
)
from dlcp.sim.kernel.timers import arm, put_off
from dlcp.sim.kernel.world import (
    counts_of,
    messages_of,
    packets_of,
    ports_of,
    records_of,
    seg_of,
    streams_of,
    transports_of,
)
from dlcp.sim.plan import NDP, PFABRIC


@call
def take_data(
    w: Rows,
    port: int,
    packet: int,
    now: int,
) -> None:
    """Note a packet at its target, and let it go back as its own answer through ``port``."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    seg = seg_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    x = packets[packet]
    m = messages[x.node]
    t = transports[m.transport]
    kind = ACK
    if x.trimmed != 0:
        kind = NACK
        m.trims += 1
    else:
        place = m.offset + x.index
        state = seg[place]
        if state & RECEIVED != 0:
            counts[DUPLICATES] += 1
        else:
            seg[place] = state | RECEIVED
            counts[ARRIVED] += 1
            m.received += 1
            if m.bounded != 0 and state & CLASS_MASK == 0:
                m.protected -= 1
            if m.done == 0:
                enough = m.received == m.packets
                if not enough and m.bounded != 0 and (t.immediate != 0 or m.asked != 0):
                    enough = m.protected == 0 and m.received >= m.required
                if enough:
                    finish(w, x.node, now)
    marked = x.ecn == 3
    s = streams[m.stream]
    address_control(w, s, t, packet, kind, 1)
    x.echo = 1 if marked else 0
    x.flag = 1 if m.done != 0 and m.missing > 0 else 0
    post(w, port, packet)
    if t.kind == NDP:
        pull(w, port, x.node, now)


@call
def pull(
    w: Rows,
    port: int,
    node: int,
    now: int,
) -> None:
    """Ask for one more packet, if one is missing that was not asked for, when the interface's turn has come."""
    ports = ports_of(w)
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    m = messages[node]
    if m.pulls >= m.packets + m.trims:
        return
    m.pulls += 1
    m.refs += 1
    packet = take_packet(w)
    address_control(w, streams[m.stream], transports[m.transport], packet, PULL, 1)
    x = packets[packet]
    x.node = node
    x.serial = -1
    x.record = 0
    x.next = -1
    p = ports[port]
    if p.pull_head < 0:
        p.pull_head = packet
    else:
        packets[p.pull_tail].next = packet
    p.pull_tail = packet
    if p.pulling == 0:
        p.pulling = 1
        push(w, max(now, p.pull_next), PULL_DUE, port)


@call
def send_pull(w: Rows, port: int, now: int) -> None:
    """Send the first PULL that waits; the next one follows when the packet that it asks for could have come."""
    ports = ports_of(w)
    packets = packets_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    p = ports[port]
    packet = p.pull_head
    p.pull_head = packets[packet].next
    t = transports[messages[packets[packet].node].transport]
    p.pull_next = now + (((t.header + t.payload) * p.kib) >> 10)
    post(w, port, packet)
    if p.pull_head >= 0:
        push(w, p.pull_next, PULL_DUE, port)
    else:
        p.pulling = 0


@call
def take_ack(
    w: Rows,
    port: int,
    packet: int,
    now: int,
) -> None:
    """Note at the sender, whose interface is ``port``, that a packet has arrived, and which ones then have not."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    seg = seg_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    x = packets[packet]
    node = x.node
    m = messages[node]
    s = streams[m.stream]
    t = transports[m.transport]
    if x.flag != 0:
        m.stopped = 1
    place = m.offset + x.index
    state = seg[place]
    r = records[x.record]
    if s.asking != 0:
        s.asking = 0
        s.backoff = 0
    if r.serial == x.serial:
        # In slow start a sender may be held back by its link, which must not stop the growth (as in Linux).
        reach = 2 * s.flying if s.window < s.threshold else s.flying + 1
        limited = 1 if reach >= int(s.window) else 0
        queue = r.queue
        number = r.number
        rtt = now - r.sent
        s.repairing -= r.again
        unlink(w, s, queue, x.record)
        s.flying -= 1
        m.flying -= 1
        seg[place] = (state & ~STATE_MASK) | ACKED
        m.acked += 1
        give_record(w, x.record)
        measure(s, t, rtt)
        s.backoff = 0
        grow(s, t, x.echo, rtt, number, now, limited)
        # What was sent before the probe of a tail and has not arrived is lost.
        before = -1
        if s.tail_open != 0 and number >= s.tail_number:
            before = s.tail_number
            s.tail_open = 0
            if number == before and s.tail_node >= 0:
                shrink(s, t, number, now)  # the probe has repaired what it repeated
        first = s.first[queue]
        while first >= 0 and (records[first].number + t.reorder <= number or records[first].number < before):
            shrink(s, t, records[first].number, now)
            other = records[first].node
            lose(w, first)
            probe(w, port, other, now)
            settle(w, other)
            first = s.first[queue]
        put_off(s, t, now)
        arm(w, s, m.stream)
    else:
        counts[LATE_ANSWERS] += 1
        known = state & STATE_MASK
        if known in (LOST, HOLE):
            seg[place] = (state & ~STATE_MASK) | ACKED
            m.acked += 1
            if known == HOLE:
                m.holes -= 1
        if s.tail_open != 0 and node == s.tail_node and x.index == s.tail_index:
            s.tail_node = -1  # it had not been lost
    if m.bounded != 0:
        probe(w, port, node, now)


@call
def take_nack(
    w: Rows,
    port: int,
    packet: int,
    now: int,
) -> None:
    """Note at the sender, whose interface is ``port``, that the header of a packet has come to its target alone."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    transports = transports_of(w)
    x = packets[packet]
    m = messages[x.node]
    s = streams[m.stream]
    if records[x.record].serial == x.serial:
        s.backoff = 0
        put_off(s, transports[m.transport], now)
        arm(w, s, m.stream)
        lose(w, x.record)
        probe(w, port, x.node, now)


@call
def take_probe(
    w: Rows,
    port: int,
    packet: int,
    now: int,
) -> None:
    """Tell a sender whether more is needed."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    x = packets[packet]
    m = messages[x.node]
    m.asked = 1
    if m.done == 0 and m.protected == 0 and m.received >= m.required:
        finish(w, x.node, now)
    address_control(w, streams[m.stream], transports[m.transport], packet, ANSWER, 1)
    x.flag = m.done
    post(w, port, packet)


@call
def take_answer(w: Rows, packet: int) -> None:
    """Stop, or send again what may have been lost; a pFabric flow goes on."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    x = packets[packet]
    m = messages[x.node]
    m.probing = 0
    m.probe_backoff = 0
    if x.flag != 0:
        m.stopped = 1
    if transports[m.transport].kind == PFABRIC:
        s = streams[m.stream]
        if s.asking != 0:
            s.asking = 0
            s.backoff = 0
    elif m.stopped == 0:
        m.resending = 1
        m.next = 0
        if m.listed == 0:
            enlist(w, m.stream, x.node)
