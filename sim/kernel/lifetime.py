# SPDX-License-Identifier: Apache-2.0
"""When nodes of a graph are done, and when nothing refers to them any more."""

from dlcp.sim.counters import MESSAGES_DONE
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.pools import give_packet
from dlcp.sim.kernel.state import BEGIN, GRAPH_CLOSED, GRAPH_DONE, NODE_DONE, Rows
from dlcp.sim.kernel.world import counts_of, followers_of, graphs_of, messages_of, notes_of, packets_of, streams_of


@call
def finish(
    w: Rows,
    node: int,
    now: int,
) -> None:
    """Note that a node is done, and let those begin that waited for it."""
    messages = messages_of(w)
    graphs = graphs_of(w)
    followers = followers_of(w)
    notes = notes_of(w)
    counts = counts_of(w)
    m = messages[node]
    m.done = 1
    m.end = now
    m.missing = m.packets - m.received
    counts[MESSAGES_DONE] += 1
    if m.watched != 0:
        notes[2 * w.noted] = NODE_DONE
        notes[2 * w.noted + 1] = node
        w.noted += 1
    for place in range(m.followers, m.followers + m.follower_count):
        other = followers[place]
        n = messages[other]
        n.waits -= 1
        if n.waits == 0:
            push(w, now + n.delay, BEGIN, other)
    graph = graphs[m.graph]
    graph.remaining -= 1
    if graph.remaining == 0:
        notes[2 * w.noted] = GRAPH_DONE
        notes[2 * w.noted + 1] = m.graph
        w.noted += 1


@call
def settle(w: Rows, node: int) -> None:
    """Close a message that is done once nothing refers to it any more."""
    streams = streams_of(w)
    messages = messages_of(w)
    graphs = graphs_of(w)
    notes = notes_of(w)
    m = messages[node]
    if m.closed != 0 or m.done == 0 or m.refs != 0 or m.flying != 0 or m.waiting != 0 or m.listed != 0:
        return
    if m.acked < m.packets and m.stopped == 0:
        return
    m.closed = 1
    if m.packets > 0 and streams[m.stream].own != 0:
        streams[m.stream].dead = 1
        bury(w, m.stream)
    graph = graphs[m.graph]
    graph.open -= 1
    if graph.open == 0:
        notes[2 * w.noted] = GRAPH_CLOSED
        notes[2 * w.noted + 1] = m.graph
        w.noted += 1


@call
def bury(w: Rows, stream: int) -> None:
    """Give a stream back that nobody will use again, unless a list or a timer still names it."""
    streams = streams_of(w)
    s = streams[stream]
    if s.dead != 0 and s.ready == 0 and s.timers == 0:
        s.next = w.free_stream
        w.free_stream = stream
        s.dead = 0


@call
def release(w: Rows, packet: int) -> None:
    """Remove a packet from the network."""
    packets = packets_of(w)
    messages = messages_of(w)
    node = packets[packet].node
    give_packet(w, packet)
    m = messages[node]
    m.refs -= 1
    if m.refs == 0 and m.done != 0:
        settle(w, node)
