# SPDX-License-Identifier: Apache-2.0
"""Allocate and free rows: packets, transmissions, graph nodes, and streams."""

from dlcp.sim.jit import call
from dlcp.sim.kernel import state as k
from dlcp.sim.kernel.events import push
from dlcp.sim.packet_engine import CompletionKind, EngineCounter
from dlcp.sim.plan import Number, Row
from dlcp.sim.rules import may_close


@call
def allocate_packet(w: Row) -> Number:
    """Return an unused packet row. The loop ensures before each event that there is one."""
    packet = w.free_packet_head
    w.free_packet_head = k.packets_of(w)[packet].next
    w.free_packets -= 1
    return packet


@call
def free_packet(w: Row, packet: int) -> None:
    """Free a packet's row."""
    k.packets_of(w)[packet].next = w.free_packet_head
    w.free_packet_head = packet
    w.free_packets += 1


@call
def remove_packet(w: Row, packet: int) -> None:
    """Remove a packet from the network. Close its message if this was the last reference."""
    message = k.packets_of(w)[packet].message
    free_packet(w, packet)
    m = k.messages_of(w)[message]
    m.refs -= 1
    if m.refs == 0 and m.done != 0:
        close_message(w, message)


@call
def free_transmission(w: Row, transmission: int) -> None:
    """Free a transmission's row. Its serial number becomes -1, so that no late acknowledgement matches it."""
    transmissions = k.transmissions_of(w)
    transmissions[transmission].serial = -1
    transmissions[transmission].next = w.free_transmission_head
    w.free_transmission_head = transmission
    w.free_transmissions += 1


@call
def take_from_flight(w: Row, s: Row, m: Row, transmission: int) -> None:
    """Remove a transmission from the packets in flight of its stream and its message."""
    transmissions = k.transmissions_of(w)
    r = transmissions[transmission]
    if r.previous >= 0:
        transmissions[r.previous].next = r.next
    else:
        s.first[r.queue] = r.next
    if r.next >= 0:
        transmissions[r.next].previous = r.previous
    else:
        s.last[r.queue] = r.previous
    s.in_flight -= 1
    m.in_flight -= 1


@call
def complete_node(w: Row, message: int, now: int) -> None:
    """Mark a node as done, report it if watched, and start the nodes that have waited for it."""
    messages = k.messages_of(w)
    followers = k.followers_of(w)
    m = messages[message]
    m.done = 1
    m.end = now
    m.missing = m.packets - m.received
    k.counts_of(w)[EngineCounter.MESSAGES_DONE] += 1
    if m.watched != 0:
        report_completion(w, CompletionKind.NODE_DONE, message)
    for position in range(m.followers, m.followers + m.follower_count):
        other = followers[position]
        n = messages[other]
        n.waits -= 1
        if n.waits == 0:
            push(w, now + n.delay, k.EventKind.BEGIN, other)
    graph = k.graphs_of(w)[m.graph]
    graph.remaining -= 1
    if graph.remaining == 0:
        report_completion(w, CompletionKind.GRAPH_DONE, m.graph)


@call
def report_completion(w: Row, kind: int, number: int) -> None:
    """Record a completion for Python. The loop ensures before each event that there is room."""
    completions = k.completions_of(w)
    completions[2 * w.completed] = kind
    completions[2 * w.completed + 1] = number
    w.completed += 1


@call
def close_message(w: Row, message: int) -> None:
    """Close a message if it is done and nothing refers to it any more."""
    streams = k.streams_of(w)
    m = k.messages_of(w)[message]
    if not may_close(m):
        return
    m.closed = 1
    if m.packets > 0 and streams[m.stream].single_use != 0:
        streams[m.stream].dead = 1
        free_stream_if_dead(w, m.stream)
    graph = k.graphs_of(w)[m.graph]
    graph.open -= 1
    if graph.open == 0:
        report_completion(w, CompletionKind.GRAPH_CLOSED, m.graph)


@call
def free_stream_if_dead(w: Row, stream: int) -> None:
    """Free the row of a dead single-use stream, unless an interface's list or a timer still refers to it."""
    s = k.streams_of(w)[stream]
    if s.dead != 0 and s.ready == 0 and s.timers == 0:
        s.next = w.free_stream
        w.free_stream = stream
        s.dead = 0
