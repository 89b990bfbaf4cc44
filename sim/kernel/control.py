# SPDX-License-Identifier: Apache-2.0
"""Control packets, and packets that are given up for lost."""

from dlcp.sim.counters import DECLARED_LOST, PROBES
from dlcp.sim.kernel.congestion import timeout_ps
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.pools import give_record, take_packet, unlink
from dlcp.sim.kernel.state import CLASS_MASK, HOLE, LOST, PROBE, PROBE_DUE, STATE_MASK, Rows
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

CONTROL_RANK = -1


@call
def post(w: Rows, port: int, packet: int) -> None:
    """Put a control packet among those that a host sends before anything else."""
    ports = ports_of(w)
    packets = packets_of(w)
    p = ports[port]
    packets[packet].next = -1
    if p.control_head < 0:
        p.control_head = packet
    else:
        packets[p.control_tail].next = packet
    p.control_tail = packet


@call
def address_control(w: Rows, s: Rows, t: Rows, packet: int, kind: int, back: int) -> None:
    """Make a control packet of one that belongs to a stream, to its target or back to its source."""
    packets = packets_of(w)
    x = packets[packet]
    x.kind = kind
    x.target = s.source if back != 0 else s.target
    x.hash = s.hash_back if back != 0 else s.hash
    x.size = t.ack
    x.rank = CONTROL_RANK
    x.ecn = t.ecn
    x.flag = 0
    x.echo = 0
    x.queue = t.control_queue
    x.drop_class = 0
    x.sprayed = 0
    x.trimmed = 0
    x.again = 0


@call
def probe(
    w: Rows,
    port: int,
    node: int,
    now: int,
) -> None:
    """Ask what has arrived, if everything of a message is sent and some of it may stay lost."""
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    m = messages[node]
    if m.holes == 0 or m.flying != 0 or m.waiting != 0 or m.next < m.packets or m.stopped != 0 or m.probing != 0:
        return
    s = streams[m.stream]
    t = transports[m.transport]
    packet = take_packet(w)
    address_control(w, s, t, packet, PROBE, 0)
    x = packets[packet]
    x.node = node
    x.serial = -1
    x.record = 0
    m.refs += 1
    m.probing = 1
    counts[PROBES] += 1
    post(w, port, packet)
    m.probe_at = now + (timeout_ps(s, t) << m.probe_backoff)
    if m.probe_timer == 0:
        m.probe_timer = 1
        m.refs += 1
        push(w, m.probe_at, PROBE_DUE, node)


@call
def lose(
    w: Rows,
    record: int,
) -> None:
    """Declare a packet lost that was on the way: it is sent again, or may stay lost."""
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    seg = seg_of(w)
    counts = counts_of(w)
    r = records[record]
    m = messages[r.node]
    s = streams[m.stream]
    unlink(w, s, r.queue, record)
    s.flying -= 1
    m.flying -= 1
    counts[DECLARED_LOST] += 1
    place = m.offset + r.index
    state = seg[place]
    if m.stopped != 0 or (m.bounded != 0 and (state & CLASS_MASK) != 0):
        s.repairing -= r.again
        seg[place] = (state & ~STATE_MASK) | HOLE
        m.holes += 1
        give_record(w, record)
        return
    link_again(w, s, record)


@call
def send_again(w: Rows, s: Rows, record: int) -> None:
    """Send a packet again that is on the way, and no longer counted as that."""
    unlink(w, s, records_of(w)[record].queue, record)
    link_again(w, s, record)


@call
def link_again(w: Rows, s: Rows, record: int) -> None:
    """Put a packet that was on the way behind those that are to be sent again."""
    messages = messages_of(w)
    records = records_of(w)
    seg = seg_of(w)
    r = records[record]
    m = messages[r.node]
    place = m.offset + r.index
    seg[place] = (seg[place] & ~STATE_MASK) | LOST
    m.waiting += 1
    s.repairing += 1 - r.again
    r.again = 1
    r.serial = -1
    r.next = -1
    if s.again_head < 0:
        s.again_head = record
    else:
        records[s.again_tail].next = record
    s.again_tail = record
