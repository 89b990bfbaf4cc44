# SPDX-License-Identifier: Apache-2.0
"""The event loop: runs until the limit, or until Python has to act."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import RATE_SHIFT
from dlcp.sim.engines import rules
from dlcp.sim.engines.kernel import arrays as k
from dlcp.sim.engines.kernel import hosts
from dlcp.sim.engines.kernel.events import advance, heap_pop, push
from dlcp.sim.engines.kernel.switching import SEND_NOW, choose_port, dequeue, enqueue
from dlcp.sim.engines.network_tables import Discipline, PacketKind
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.jit import call, entry, inlined
from dlcp.sim.rows import PORT_QUEUES, Row


@call
def interface_of(w: Row, stream: int, host: int) -> int:
    """Return the link by which a host at one end of a stream reaches the other end."""
    s = k.streams_of(w)[stream]
    if host == s.source:
        return choose_port(w, host, s.target, s.path_hash, 0)
    return choose_port(w, host, s.source, s.reverse_path_hash, 0)


@inlined
def next_at_interface(w: Row, interface: int, now: int) -> int:
    """Return the next packet to leave a host through an idle interface; -1 if there is none.

    Control packets go first, then streams in turn, the most urgent queue first. The search for a stream's next packet
    may trigger a probe, which then goes first.
    """
    streams = k.streams_of(w)
    transports = k.transports_of(w)
    p = k.ports_of(w)[interface]
    leaving = -1
    while leaving < 0 and p.control.head < 0 and p.nonempty != 0:
        queue = PORT_QUEUES - 1
        while (p.nonempty >> queue) & 1 == 0:
            queue -= 1
        if k.rules_of(w)[0].discipline == Discipline.PFABRIC:
            hosts.move_smallest_first(w, interface, queue)
        q = k.queues_of(w)[interface * PORT_QUEUES + queue]
        stream = q.head
        s = streams[stream]
        q.head = s.next
        if s.next < 0:
            p.nonempty &= ~(1 << queue)
        s.ready = 0
        what = hosts.next_transmission(w, interface, stream, now)
        if what != hosts.NOTHING_TO_SEND:
            leaving = hosts.transmit(w, stream, what, now)
        if hosts.may_send(s, transports[s.transport]):
            hosts.make_ready(w, interface, stream, hosts.next_queue(w, stream))
        else:
            hosts.free_stream_if_dead(w, stream)
    if leaving < 0 and p.control.head >= 0:
        leaving = p.control.head
        p.control.head = k.packets_of(w)[leaving].next
    return leaving


@inlined
def send_packet(w: Row, port: int, packet: int, now: int) -> None:
    """Send a packet over an idle link; it arrives or is lost."""
    counts = k.counts_of(w)
    p = k.ports_of(w)[port]
    x = k.packets_of(w)[packet]
    p.busy_until = now + ((x.size * p.kibibyte_ps) >> RATE_SHIFT)
    p.sent_bytes += x.size
    x.port = port
    if x.kind == PacketKind.DATA:
        counts[EngineCounter.HOPS_DATA] += 1
    else:
        counts[EngineCounter.HOPS_CONTROL] += 1
    if p.lossy != 0 and k.draw(p) < p.loss:
        counts[EngineCounter.DROPS_LINK] += 1
        counts[EngineCounter.DROPS_BY_CLASS + x.drop_class] += 1
        hosts.remove_packet(w, packet)
    else:
        push(w, p.busy_until + p.delay, k.EventKind.ARRIVE, packet)
    if p.control.head >= 0 or p.nonempty != 0:
        p.pending = 1
        push(w, p.busy_until, k.EventKind.PORT_FREE, port)


@entry
def run(world: NDArray[Any], limit: int) -> int:  # noqa: C901  # one branch for each kind of event, compiled as one
    """Run to the end of the first instant with a completion, at most to ``limit``.

    Returns True when that is reached. Otherwise an array is full, the event numbers are used up, or many events have
    passed: Python has to make room, and call again. The next event has not begun then.
    """
    w = world[0]
    times = k.times_of(w)
    keys = k.keys_of(w)
    ports = k.ports_of(w)
    packets = k.packets_of(w)
    streams = k.streams_of(w)
    messages = k.messages_of(w)
    completions = k.completions_of(w)
    transports = k.transports_of(w)
    route_row = k.route_row_of(w)
    counts = k.counts_of(w)
    host_count = w.hosts
    left = k.EVENTS_PER_CALL
    while True:
        if w.heap_length == 0 and advance(w) == 0:
            return True
        now = times[0]
        if now > limit or (w.completed > 0 and now > w.now):
            return True
        # The functions below allocate rows without checks, so there has to be room for all that one event may need: a
        # timeout may probe for every packet in flight of a stream, and a node may start all of its followers.
        spare = k.SPARE_ROWS + w.in_flight_max
        if (
            left == 0
            or w.free_packets < spare
            or w.free_transmissions < k.SPARE_ROWS
            or w.events_waiting + spare + w.followers_max > times.shape[0]
            or 2 * (w.completed + spare) > completions.shape[0]
            or w.sequence > k.SEQUENCE_MAX
        ):
            return False
        left -= 1
        key = keys[0]
        w.events_waiting -= 1
        w.heap_length -= 1
        heap_pop(times, keys, w.heap_length)
        w.now = now
        counts[EngineCounter.EVENTS] += 1
        kind = (key >> k.ID_BITS) & k.KIND_MASK
        number = key & k.ID_MASK
        active = -1  # a stream that may have something to send
        interface = -1  # of a host that may have something to send
        out = -1  # a port that sends ``leaving``
        leaving = -1
        gone = -1  # a packet that leaves the network
        if kind == k.EventKind.ARRIVE:
            x = packets[number]
            node = ports[x.port].target
            if node >= host_count:
                port = choose_port(w, node, x.target, x.path_hash, x.sprayed)
                if port < 0:
                    counts[EngineCounter.DROPS_ROUTE] += 1
                    gone = number
                else:
                    verdict = enqueue(w, port, number, now)
                    if verdict == SEND_NOW:
                        out = port
                        leaving = number
                    else:
                        gone = verdict
                if gone >= 0:
                    counts[EngineCounter.DROPS_BY_CLASS + packets[gone].drop_class] += 1
            else:
                stream = messages[x.message].stream
                interface = -1 - route_row[node]
                if interface < 0:
                    interface = interface_of(w, stream, node)
                if x.kind == PacketKind.DATA:
                    hosts.receive_data(w, interface, number, now)
                elif x.kind == PacketKind.PROBE:
                    hosts.receive_probe(w, interface, number, now)
                else:
                    active = stream
                    gone = number
                    if x.kind == PacketKind.ACK:
                        hosts.receive_ack(w, interface, number, now)
                    elif x.kind == PacketKind.NACK:
                        hosts.receive_nack(w, interface, number, now)
                    else:
                        s = streams[stream]
                        t = transports[s.transport]
                        if x.kind == PacketKind.PULL:
                            rules.on_pull(s, t, x.credit)
                        elif rules.on_probe_reply(s, t, messages[x.message], x.satisfied):
                            hosts.enqueue_message(w, stream, x.message)
        elif kind == k.EventKind.PORT_FREE:
            ports[number].pending = 0
            if ports[number].node < host_count:
                interface = number
            else:
                out = number
                leaving = dequeue(w, number)
        elif kind == k.EventKind.BEGIN:
            if messages[number].packets == 0:
                messages[number].begin = now
                hosts.complete_node(w, number, now)
                hosts.close_message(w, number)
            else:
                hosts.begin_message(w, number, now)
                active = messages[number].stream
                interface = interface_of(w, active, streams[active].source)
        elif kind == k.EventKind.PULL_DUE:
            interface = number
            hosts.send_pull(w, number, now)
        else:
            stream = number if kind == k.EventKind.STREAM_TIMER else messages[number].stream
            interface = interface_of(w, stream, streams[stream].source)
            if kind == k.EventKind.PROBE_DUE:
                hosts.probe_timer(w, interface, number, now)
            elif hosts.stream_timer(w, interface, stream, now):
                active = stream
        if active >= 0:
            s = streams[active]
            if s.ready == 0 and hosts.may_send(s, transports[s.transport]):
                hosts.make_ready(w, interface, active, hosts.next_queue(w, active))
        if interface >= 0:
            p = ports[interface]
            if p.pending == 0 and (p.control.head >= 0 or p.nonempty != 0):
                if p.busy_until > now:
                    p.pending = 1
                    push(w, p.busy_until, k.EventKind.PORT_FREE, interface)
                else:
                    out = interface
                    leaving = next_at_interface(w, interface, now)
        if leaving >= 0:
            send_packet(w, out, leaving, now)
        # Do this last: it may close the graph, and nothing above may use freed rows.
        if gone >= 0:
            hosts.remove_packet(w, gone)


@entry
def begin_nodes(world: NDArray[Any], times: NDArray[np.int64], nodes: NDArray[np.int64]) -> None:
    """Schedule the beginning of nodes at their times. The event queue must have room for them."""
    w = world[0]
    for position in range(nodes.shape[0]):
        push(w, times[position], k.EventKind.BEGIN, nodes[position])
