# SPDX-License-Identifier: Apache-2.0
"""The loop: one event after the other, until the limit, or until somebody outside has to know."""

from dlcp.sim.counters import DROPS_BY_CLASS, DROPS_LINK, DROPS_ROUTE, EVENTS, HOPS_CONTROL, HOPS_DATA
from dlcp.sim.kernel.dice import draw
from dlcp.sim.kernel.events import advance, pop, push
from dlcp.sim.kernel.jit import call, entry
from dlcp.sim.kernel.lifetime import bury, finish, release, settle
from dlcp.sim.kernel.receiving import send_pull, take_ack, take_answer, take_data, take_nack, take_probe
from dlcp.sim.kernel.sending import begin, bring_smallest_forward, build, level_of, make_ready, may_send, work
from dlcp.sim.kernel.state import (
    ACK,
    ARRIVE,
    BEGIN,
    DATA,
    GROW,
    ID_BITS,
    ID_MASK,
    IDLE,
    KIND_MASK,
    LIMIT,
    NACK,
    NOTED,
    PORT_FREE,
    PROBE,
    PROBE_DUE,
    PULL,
    PULL_DUE,
    SEQUENCE_MAX,
    SPARE,
    TIMER,
    Number,
    Rows,
)
from dlcp.sim.kernel.switching import SEND_NOW, choose_port, dequeue, enqueue
from dlcp.sim.kernel.timers import probe_timer, stream_timer
from dlcp.sim.kernel.world import (
    counts_of,
    keys_of,
    messages_of,
    notes_of,
    packets_of,
    ports_of,
    queues_of,
    route_row_of,
    rules_of,
    streams_of,
    times_of,
    transports_of,
)
from dlcp.sim.plan import QUEUES, R_DISCIPLINE, SMALLEST_FIRST


@call
def interface_of(
    w: Rows,
    stream: int,
    host: int,
) -> Number:
    """Return the link by which a host at one end of a stream reaches the other end."""
    streams = streams_of(w)
    s = streams[stream]
    if host == s.source:
        return choose_port(w, host, s.target, s.hash, 0)
    return choose_port(w, host, s.source, s.hash_back, 0)


@entry
def run(
    world: Rows,
    limit: int,
) -> Number:
    """Go on to the first instant at which something is noted, at most to ``limit`` (picoseconds); return why it ended.

    `IDLE`: nothing is left to happen; `LIMIT`; `NOTED`: see ``notes``; `GROW`: an array is full, or the numbers
    of events are used up, and the next event has not been touched.
    """
    w = world[0]
    times = times_of(w)
    keys = keys_of(w)
    ports = ports_of(w)
    queues = queues_of(w)
    packets = packets_of(w)
    streams = streams_of(w)
    messages = messages_of(w)
    notes = notes_of(w)
    transports = transports_of(w)
    route_row = route_row_of(w)
    rules = rules_of(w)
    counts = counts_of(w)
    hosts = w.hosts
    while True:
        if w.heap_length == 0 and advance(w) == 0:
            return NOTED if w.noted > 0 else IDLE
        now = times[0]
        if w.noted > 0 and now > w.now:
            return NOTED
        if now > limit:
            return LIMIT
        spare = SPARE + w.flying_max
        if (
            w.free_packets < spare
            or w.free_records < SPARE
            or w.events_waiting + spare + w.followers_max > times.shape[0]
            or 2 * (w.noted + spare) > notes.shape[0]
            or w.sequence > SEQUENCE_MAX
        ):
            return GROW
        key = keys[0]
        pop(w)
        w.now = now
        counts[EVENTS] += 1
        kind = (key >> ID_BITS) & KIND_MASK
        number = key & ID_MASK
        active = -1  # a stream that may have something to send
        interface = -1  # of a host that may have something to send
        out = -1  # a port that sends ``leaving``
        leaving = -1
        gone = -1  # a packet that leaves the network
        if kind == ARRIVE:
            x = packets[number]
            node = ports[x.port].target
            if node >= hosts:
                port = choose_port(w, node, x.target, x.hash, x.sprayed)
                if port < 0:
                    counts[DROPS_ROUTE] += 1
                    gone = number
                else:
                    verdict = enqueue(w, port, number, now)
                    if verdict == SEND_NOW:
                        out = port
                        leaving = number
                    else:
                        gone = verdict
                if gone >= 0:
                    counts[DROPS_BY_CLASS + packets[gone].drop_class] += 1
            else:
                stream = messages[x.node].stream
                interface = -1 - route_row[node]
                if interface < 0:
                    interface = interface_of(w, stream, node)
                if x.kind == DATA:
                    take_data(
                        w,
                        interface,
                        number,
                        now,
                    )
                elif x.kind == PROBE:
                    take_probe(
                        w,
                        interface,
                        number,
                        now,
                    )
                else:
                    active = stream
                    gone = number
                    if x.kind == ACK:
                        take_ack(
                            w,
                            interface,
                            number,
                            now,
                        )
                    elif x.kind == NACK:
                        take_nack(w, interface, number, now)
                    elif x.kind == PULL:
                        streams[stream].credit += 1
                    else:
                        take_answer(w, number)
        elif kind == PORT_FREE:
            ports[number].pending = 0
            if ports[number].node < hosts:
                interface = number
            else:
                out = number
                leaving = dequeue(w, number)
        elif kind == BEGIN:
            if messages[number].packets == 0:
                messages[number].begin = now
                finish(w, number, now)
                settle(w, number)
            else:
                begin(w, number, now)
                active = messages[number].stream
                interface = interface_of(w, active, streams[active].source)
        elif kind == PULL_DUE:
            interface = number
            send_pull(w, number, now)
        else:
            stream = number if kind == TIMER else messages[number].stream
            interface = interface_of(w, stream, streams[stream].source)
            if kind == PROBE_DUE:
                probe_timer(
                    w,
                    interface,
                    number,
                    now,
                )
            elif stream_timer(w, interface, stream, now):
                active = stream
        if active >= 0:
            s = streams[active]
            if s.ready == 0 and may_send(s, transports[s.transport]):
                make_ready(w, interface, active, level_of(w, active))
        if interface >= 0:
            p = ports[interface]
            if p.pending == 0 and (p.control_head >= 0 or p.mask != 0):
                if p.busy > now:
                    p.pending = 1
                    push(w, p.busy, PORT_FREE, interface)
                elif p.control_head >= 0:
                    out = interface
                    leaving = p.control_head
                    p.control_head = packets[leaving].next
                else:
                    while leaving < 0 and p.control_head < 0 and p.mask != 0:
                        level = 7
                        while (p.mask >> level) & 1 == 0:
                            level -= 1
                        if rules[R_DISCIPLINE] == SMALLEST_FIRST:
                            bring_smallest_forward(w, interface, level)
                        q = queues[interface * QUEUES + level]
                        stream = q.head
                        s = streams[stream]
                        q.head = s.next
                        if s.next < 0:
                            p.mask &= ~(1 << level)
                        s.ready = 0
                        what = work(w, interface, stream, now)
                        if what != 0:
                            out = interface
                            leaving = build(
                                w,
                                stream,
                                what,
                                now,
                            )
                        if may_send(s, transports[s.transport]):
                            make_ready(
                                w,
                                interface,
                                stream,
                                level_of(w, stream),
                            )
                        else:
                            bury(w, stream)
                    if leaving < 0 and p.control_head >= 0:
                        out = interface
                        leaving = p.control_head
                        p.control_head = packets[leaving].next
        if leaving >= 0:
            p = ports[out]
            x = packets[leaving]
            p.busy = now + ((x.size * p.kib) >> 10)
            p.sent_bytes += x.size
            x.port = out
            if x.kind == DATA:
                counts[HOPS_DATA] += 1
            else:
                counts[HOPS_CONTROL] += 1
            if p.lossy != 0 and draw(p) < p.loss:
                counts[DROPS_LINK] += 1
                counts[DROPS_BY_CLASS + x.drop_class] += 1
                release(w, leaving)
            else:
                push(w, p.busy + p.delay, ARRIVE, leaving)
            if p.control_head >= 0 or p.mask != 0:
                p.pending = 1
                push(w, p.busy, PORT_FREE, out)
        if gone >= 0:
            release(w, gone)


@entry
def push_many(world: Rows, begin: Rows, nodes: Rows) -> None:
    """Let nodes begin at their times; the heap has room for them."""
    w = world[0]
    for place in range(nodes.shape[0]):
        push(w, begin[place], BEGIN, nodes[place])
