# SPDX-License-Identifier: Apache-2.0
"""The loop: nodes begin, messages leave their hosts as fluid except for their last two packets, and these arrive.

Nothing happens between these events. Rates are computed once for all changes within a short time (`RATES_DELAY`). In
between, a flow that begins has the rate of others on its path, or what they leave.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import DRAW_LIMIT
from dlcp.sim.engines.flows import rates as r
from dlcp.sim.engines.kernel.arrays import mix
from dlcp.sim.engines.kernel.events import heap_pop, heap_push
from dlcp.sim.engines.packet_engine import CompletionKind, EngineCounter
from dlcp.sim.jit import call, entry
from dlcp.sim.limits import FOREVER_PS

RATES_DELAY: Final = 1 / 128
"""Longest time from a change to new rates, relative to the duration of a message."""
SHARE_SPREAD: Final = 0.12
"""Standard deviation of a message's share of a port, relative to an equal share. When 4 to 32 senders send 1 or 4 MB to
one, the packets of DCTCP and of DLCP without loss spread by 0.05 to 0.17, in the median by 0.11."""
FLOW_EVENTS_PER_CALL: Final = 1 << 12
"""Events after which `run` returns to Python, which only then handles signals such as Ctrl-C; with rates for thousands
of flows, an event may take a fraction of a millisecond."""
BEGIN, ARRIVE = 0, 1


@call
def push_event(w: r.FlowState, time: int, kind: int, node: int) -> None:
    """Schedule the beginning of a node, or the arrival of its message; of events at one time, nodes break ties."""
    n = w.numbers[0]
    heap_push(w.event_times, w.event_nodes, n.events, time, 2 * node + kind)
    n.events += 1


@call
def pop_event(w: r.FlowState) -> int:
    """Remove the first event; return its node and kind."""
    n = w.numbers[0]
    first = w.event_nodes[0]
    n.events -= 1
    heap_pop(w.event_times, w.event_nodes, n.events)
    return first


@call
def schedule(w: r.FlowState, node: int, time: int) -> None:
    """Have a node begin at a time, which may be now."""
    n = w.numbers[0]
    if time > n.now:
        push_event(w, time, BEGIN, node)
        return
    at = n.due_first + n.due_count
    if at >= len(w.due):
        at -= len(w.due)
    w.due[at] = node
    n.due_count += 1


@call
def take_due(w: r.FlowState) -> int:
    """Return the next node that begins now."""
    n = w.numbers[0]
    node = w.due[n.due_first]
    n.due_first += 1
    if n.due_first == len(w.due):
        n.due_first = 0
    n.due_count -= 1
    return node


@call
def report(w: r.FlowState, kind: int, number: int) -> None:
    """Record a completion for Python."""
    n = w.numbers[0]
    w.completions[2 * n.completed] = kind
    w.completions[2 * n.completed + 1] = number
    n.completed += 1


@call
def expect_rates(w: r.FlowState) -> None:
    """Have rates computed soon, compared with the time that messages take."""
    n = w.numbers[0]
    n.rates_at = min(n.rates_at, n.now + max(r.RATES_EVERY_PS, int(n.pace * RATES_DELAY)))


@call
def follow_pace(w: r.FlowState, duration: int, size_bytes: float) -> None:
    """Average the duration of messages, by size, over about the last thousand of them."""
    n = w.numbers[0]
    n.pace_bytes += int(size_bytes) - (n.pace_bytes >> 10)
    n.pace += int((duration - n.pace) * min(1.0, size_bytes / n.pace_bytes))


@call
def complete_node(w: r.FlowState, node: int) -> None:
    """Mark a node as done, report it if watched, and start the nodes that have waited for it."""
    m = w.messages[node]
    n = w.numbers[0]
    m.end = n.now
    w.counts[EngineCounter.MESSAGES_DONE] += 1
    if m.watched != 0:
        report(w, CompletionKind.NODE_DONE, node)
    for position in range(m.followers, m.followers + m.follower_count):
        other = w.followers[position]
        w.messages[other].waits -= 1
        if w.messages[other].waits == 0:
            schedule(w, other, n.now + w.messages[other].delay)
    graph = w.graphs[m.graph]
    graph.remaining -= 1
    if graph.remaining == 0:
        report(w, CompletionKind.GRAPH_DONE, m.graph)
    release(w, m.graph)


@call
def release(w: r.FlowState, graph: int) -> None:
    """Count a node that is done or a message that has been sent; report a graph without any others as closed."""
    w.graphs[graph].open -= 1
    if w.graphs[graph].open == 0:
        report(w, CompletionKind.GRAPH_CLOSED, graph)


@call
def begin_node(w: r.FlowState, node: int) -> None:
    """Begin a node: put its message into its stream, by order, but never before the one that is being sent."""
    m = w.messages[node]
    m.begin = w.numbers[0].now
    m.next = -1
    if m.packets == 0:
        complete_node(w, node)
        return
    f = w.flows[m.stream]
    if f.head < 0:
        f.head = node
        f.tail = node
        f.active = 1
        f.rate = 0.0
        f.finish = FOREVER_PS
        r.add_to_heap(w, m.stream)
        start_sending(w, m.stream)
        join_ports(w, m.stream)
    elif w.messages[f.tail].order <= m.order:
        w.messages[f.tail].next = node
        f.tail = node
    else:
        at = f.head
        while w.messages[at].next >= 0 and w.messages[w.messages[at].next].order <= m.order:
            at = w.messages[at].next
        m.next = w.messages[at].next
        w.messages[at].next = node
        if m.next < 0:
            f.tail = node


@call
def start_sending(w: r.FlowState, flow: int) -> None:
    """Send a flow's first message from now on."""
    f = w.flows[flow]
    m = w.messages[f.head]
    t = w.transports[f.transport]
    # Losses beyond the allowed ones are sent again, and some of these are lost again.
    lost = int(m.packets * (1.0 - f.delivery))
    m.missing = min(m.allowed, lost)
    m.sent = m.packets + int((lost - m.missing) / f.delivery)
    m.dropped = 0
    whole = t.header_bytes + t.payload
    f.left = float(m.sent) * whole - (t.payload - m.last_bytes)
    f.began = w.numbers[0].now
    f.since = f.began
    f.congested = 0
    f.queueing = 0
    f.apart = min(2, m.sent)
    f.limit = f.loss_limit
    if f.forward > 0:
        f.limit = min(f.limit, window_limit(w, flow))


@call
def window_limit(w: r.FlowState, flow: int) -> float:
    """Return the mean rate that a stream's window lets its message have, and grow the window.

    A window that does not fill the path is sent at once, and the next one a round trip later.
    """
    f = w.flows[flow]
    m = w.messages[f.head]
    t = w.transports[f.transport]
    whole = t.header_bytes + t.payload
    packet_ps = whole * w.ports[w.entries[f.entries].port].ps_per_byte
    slow_start = t.slow_start != 0
    # Packets of earlier messages whose acknowledgements are pending, and when the last one will arrive.
    unacked_ps = max(0.0, float(f.sent_at + f.round_trip - w.numbers[0].now))
    unacked = min(f.burst, unacked_ps / packet_ps)
    took = 0.0
    if unacked > 0.0 and m.sent + unacked > f.window:
        took = max(0.0, unacked_ps - f.window * packet_ps)
    if slow_start and f.window * packet_ps < f.round_trip:
        # It grows by each acknowledgement that comes while half of it is in flight
        # (`dlcp.sim.engines.rules.is_limited`).
        f.window += min(f.burst - unacked, max(0.0, (2.0 * f.burst - f.window) / 3.0))
        if 2.0 * (unacked + m.sent) >= f.window:
            f.window += unacked
        f.window = min(t.max_window_packets, f.window)
    sent = 0.0
    while sent + f.window < m.sent and f.window * packet_ps < f.round_trip:
        before = f.window
        rounds = 1.0
        f.window = min(t.max_window_packets, 2.0 * f.window if slow_start else f.window + t.additive_packets)
        if f.window <= before:
            rounds = math.ceil((m.sent - sent) / f.window) - 1.0
        sent += rounds * before
        took += rounds * f.round_trip
        unacked = 0.0
    left = m.sent - sent
    f.burst = min(f.window, unacked + left)
    if took == 0.0:
        return r.UNLIMITED
    return m.sent * whole / (took + left * packet_ps)


@call
def join_ports(w: r.FlowState, flow: int) -> None:
    """Draw a flow's weight, and add it to the levels of its path."""
    f = w.flows[flow]
    # Two uniform draws with a mean of 1/2: the stream's, since a stream keeps its window, and the message's.
    seed = w.numbers[0].seed
    drawn = (mix(flow, seed) + mix(f.head, ~seed)) / DRAW_LIMIT
    f.weight = 1.0
    if w.messages[f.head].sent > w.transports[f.transport].initial_window_packets:  # otherwise it is sent at once
        f.weight += SHARE_SPREAD * math.sqrt(6.0) * (drawn - 1.0)
    if f.single_use != 0:
        # Its window begins small. Next to others that fill the path, it grows by a packet in a round trip; this is its
        # mean while the message is sent.
        first = w.transports[f.transport].initial_window_packets
        mean = (first + math.sqrt(first * first + 2.0 * w.messages[f.head].packets)) / 2.0
        f.weight *= min(1.0, mean / f.path_packets)
    r.list_flow(w, flow, w.messages[f.head].queue)
    f.rate = f.goal
    r.set_finish(w, flow)
    expect_rates(w)


@call
def send_apart(w: r.FlowState, flow: int) -> None:
    """Send one of the last two packets of a message through each port of its path; the last one arrives.

    The packets before these are fluid. These two are packets, which wait in line at each port. So messages of few
    packets meet those that are sent at the same time, and a short last packet waits for the full one before it.
    """
    n = w.numbers[0]
    f = w.flows[flow]
    size = r.apart_bytes(w, flow)
    time = float(n.now)
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        p = w.ports[e.port]
        if e.share > 1.0 - r.UNNOTICED_CHANGE:  # it takes one of several ports otherwise
            time = wait_in_line(w, e.level, time, size / p.capacity)
        time += e.share * (size * p.ps_per_byte + p.delay)
    f.left -= f.rate * (n.now - f.since)
    f.since = n.now
    f.apart -= 1
    if f.apart == 0:
        m = w.messages[f.head]
        arrival = int(time + 0.5)
        if m.missing > 0:
            # A tail probe finds the last losses after two round trips (RFC 8985, section 7.2). Then the sender asks the
            # receiver whether it needs what is missing.
            arrival += 2 * (f.round_trip + f.queueing) + f.round_trip
        push_event(w, arrival, ARRIVE, f.head)
        f.sent_at = n.now
        m.congested = f.congested
        count_message(w, flow)
    r.set_finish(w, flow)


@call
def wait_in_line(w: r.FlowState, level: int, time: float, took: float) -> float:
    """Return when a packet that reaches a port at ``time`` is sent, in turn with others that are there."""
    q = w.levels[level]
    if time < q.busy_from:
        return time  # it is sent before the packets seen so far
    if time > q.busy_until:
        q.busy_from = int(time)
    begin = max(time, float(q.busy_until))
    q.busy_until = int(begin + took + 0.5)
    return begin


@call
def finish_sending(w: r.FlowState, flow: int) -> None:
    """Continue with the next message of a stream."""
    n = w.numbers[0]
    f = w.flows[flow]
    m = w.messages[f.head]
    follow_pace(w, n.now - f.began, float(m.sent) * w.transports[f.transport].payload)
    f.head = m.next
    if f.head >= 0 and w.messages[f.head].queue == f.queue:
        before = f.limit
        start_sending(w, flow)
        r.set_finish(w, flow)
        if f.limit != before:
            r.follow_limit(w, flow)
            expect_rates(w)
        release(w, m.graph)
        return
    r.unlist_flow(w, flow)
    expect_rates(w)
    f.rate = 0.0
    if f.head >= 0:
        start_sending(w, flow)
        f.finish = FOREVER_PS
        r.reorder(w, flow)
        join_ports(w, flow)
    else:
        f.active = 0
        r.remove_from_heap(w, flow)
    release(w, m.graph)


@call
def count_message(w: r.FlowState, flow: int) -> None:
    """Count the packets and bytes of a message."""
    f = w.flows[flow]
    m = w.messages[f.head]
    t = w.transports[f.transport]
    wire_bytes = m.sent * (t.header_bytes + t.payload) - (t.payload - m.last_bytes)
    hops = 0.0
    for at in range(f.entries, f.entries + f.forward):
        hops += w.entries[at].share
        w.ports[w.entries[at].port].sent_bytes += w.entries[at].share * wire_bytes
    back = 0.0
    for at in range(f.entries + f.forward, f.entries + f.forward + f.backward):
        back += w.entries[at].share
        w.ports[w.entries[at].port].sent_bytes += w.entries[at].share * m.packets * t.ack_bytes
    w.counts[EngineCounter.HOPS_DATA] += int(m.sent * hops + 0.5)
    w.counts[EngineCounter.HOPS_CONTROL] += int(m.packets * back + 0.5)
    w.counts[EngineCounter.SENT] += m.sent
    w.counts[EngineCounter.RETRANSMITTED] += m.sent - m.packets
    w.counts[EngineCounter.ARRIVED] += m.packets - m.missing
    w.counts[EngineCounter.DROPS_POLICY] += m.dropped
    w.counts[EngineCounter.DROPS_LINK] += m.sent - (m.packets - m.missing) - m.dropped


@entry
def run(w: r.FlowState, limit: int) -> bool:
    """Run to the end of the first instant with a completion, at most to ``limit``.

    Returns True when that is reached, otherwise False after `FLOW_EVENTS_PER_CALL`: Python has to call again.
    """
    n = w.numbers[0]
    for _ in range(FLOW_EVENTS_PER_CALL):
        if n.due_count > 0:
            w.counts[EngineCounter.EVENTS] += 1
            begin_node(w, take_due(w))
            continue
        arriving = w.event_times[0] if n.events > 0 else FOREVER_PS
        finishing = w.flows[w.finishing[0]].finish if n.finishing > 0 else FOREVER_PS
        time = min(arriving, finishing, n.rates_at)
        if time > limit or time == FOREVER_PS or (n.completed > 0 and time > n.now):
            return True
        n.now = max(n.now, time)
        if time == arriving:
            w.counts[EngineCounter.EVENTS] += 1
            code = pop_event(w)
            if code & 1 == ARRIVE:
                complete_node(w, code >> 1)
            else:
                begin_node(w, code >> 1)
        elif time == finishing:
            flow = w.finishing[0]
            w.counts[EngineCounter.EVENTS] += 1
            if w.flows[flow].apart > 0:
                send_apart(w, flow)
            else:
                finish_sending(w, flow)
        else:
            r.compute_rates(w)
    return False


@entry
def begin_nodes(w: r.FlowState, times: NDArray[np.int64], nodes: NDArray[np.int64]) -> None:
    """Schedule the first nodes of a graph."""
    for position in range(len(nodes)):
        push_event(w, times[position], BEGIN, nodes[position])


@entry
def relist(w: r.FlowState, flow: int, add: int) -> None:
    """Remove an active flow from the levels of its path, or add it, when its path changes."""
    if add:
        w.flows[flow].limit = w.flows[flow].loss_limit
        r.list_flow(w, flow, w.flows[flow].queue)
    else:
        r.unlist_flow(w, flow)
