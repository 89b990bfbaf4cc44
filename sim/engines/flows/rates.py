# SPDX-License-Identifier: Apache-2.0
"""Max-min rates of the flows in progress, by priority; updated where something changes, not everywhere.

A flow is a stream with a message to send. Every port has a level for each queue: the highest rate, relative to its
weight, that a flow of this queue may have there. A flow's rate follows from the least level on its path. A level
follows from the rates that flows have elsewhere, so each change of a level makes the levels that depend on it stale,
until none is. That is the distributed computation of max-min rates (Bertsekas and Gallager, Data Networks, section
6.5.2). It ends at the same rates whatever it begins from, because the smallest level is right after its first update,
then the next, and so on.

Acknowledgements use the way back at a fixed ratio of the flow's rate. They come before data.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.graphs.graph import row_type
from dlcp.sim.jit import call, entry
from dlcp.sim.limits import FOREVER_PS
from dlcp.sim.rows import PORT_QUEUES

i1, i4, i8, f8 = np.int8, np.int32, np.int64, np.float64

UNLIMITED: Final = 1e30
"""The level of a port that limits no flow."""
RATES_EVERY_PS: Final = 20_000
"""Shortest time between two computations of rates: a sixth of a packet's at 100 Gbit/s."""
UNNOTICED_CHANGE: Final = 1e-2
"""A change of a rate by a smaller share is not passed on. In a direct all-reduce over 32 hosts in oversubscribed racks,
the mean step time with 1e-4 differs by 0.4 %, and takes four times as many updates."""
OVERLOADED: Final = 1 - 4 * UNNOTICED_CHANGE
"""A port is overloaded if it gives a flow a smaller share of what the flow's other ports give it: both are known within
`UNNOTICED_CHANGE`, and as much again if acknowledgements have changed."""
UPDATES_PER_LEVEL_MAX: Final = 20
"""Most updates of levels in one computation, per level. Levels of flows with other weights at other ports can follow
each other in a circle. Where they settle, they do so within a few updates."""
WEIGHTS_CHANGED: Final = 2
"""Value of a level's ``stale`` if weights have changed, and not only rates: 1 then."""

FLUID_MESSAGE_ROW: Final = row_type(
    (i4, "stream packets last_bytes next waits graph follower_count allowed droppable"),
    (i8, "followers begin end delay order sent"),
    (i4, "missing dropped"),
    (i1, "queue watched congested"),
)
"""A node of a graph. ``stream`` is its stream's row, -1 for a node that sends nothing. ``next`` waits after it in its
stream. ``allowed`` packets may stay lost; ``droppable`` of these are in classes that a congested switch drops, and
``dropped`` is how many it has dropped."""

FLOW_ROW: Final = row_type(
    (f8, "rate goal least second left limit loss_limit weight window burst path_packets"),
    (i8, "began since finish sent_at entries round_trip queueing"),
    (i4, "forward backward head tail heap_at bottleneck"),
    (i1, "single_use active touched queue congested apart"),
    (i4, "transport"),
    (f8, "ack_ratio delivery"),
    (i8, "source target path_hash reverse_path_hash"),
)
"""A stream. Rates are in bytes on the wire per picosecond.

Its message began to be sent at ``began``. ``rate`` is in force since ``since``, with ``left`` bytes to send; ``goal``
replaces it when all levels are right. ``least`` and ``second`` are the two smallest of its levels and its ``limit``;
``bottleneck`` is the level with ``least``, -1 for its limit. ``weight`` is its share of a port, relative to an equal
share. ``window`` is its window in packets, which limits its message to ``limit``, as losses do to ``loss_limit``.

``apart`` counts the message's last packets, at most two, that are still to be sent by themselves. ``finish`` is when
the turn of the next one comes, or if there is none, when the stream's next message begins. ``burst`` packets were
unacknowledged at ``sent_at``, when the turn of the last one came.

Its path has ``forward`` rows of entries from ``entries`` on, and then ``backward`` rows for its acknowledgements.
``path_packets`` is the number of packets in flight that fills the path. ``delivery`` is the share of packets that links
do not lose. ``queueing`` is the wait in a queue that has just been marked, at the bottleneck."""

ENTRY_ROW: Final = row_type((f8, "share weight"), (i4, "port level flow next previous"))
"""A port on a flow's path, with the share of the flow that takes it; in the list of its level while the flow is active.
``weight`` is its share of the port, relative to an equal share."""

FLUID_PORT_ROW: Final = row_type(
    (f8, "capacity control control_seen sent_bytes ps_per_byte delay"), (i4, "queues ordered")
)
"""A link, or a bundle of links between which flows are divided evenly; a packet takes ``ps_per_byte`` and ``delay``.
``control`` is the rate of acknowledgements, ``control_seen`` that which its levels were last updated for. ``queues`` is
the set of queues with flows; ``ordered``: it serves them by priority."""

LEVEL_ROW: Final = row_type((f8, "level used"), (i8, "busy_from busy_until"), (i4, "head count"), (i1, "stale"))
"""The level of a port's queue, the rate of the flows in it, and when the last packets of messages keep it busy."""

FLUID_GRAPH_ROW: Final = row_type((i8, "remaining open"))
"""The number of nodes that are not done, and the number of these and of messages that are still being sent."""

NUMBERS: Final = row_type(
    (i8, "pace pace_bytes seed now rates_at stale_first stale_count touched finishing events due_first due_count"),
    (i8, "completed mark_above"),
)
"""``pace`` is the mean duration of messages, over the last ``pace_bytes``. Rates are next computed at ``rates_at``. The
others after it are the numbers of rows in use: of the ring of stale levels, of touched flows, of both heaps, of the
ring of nodes that begin now, and of completions. Switches mark above ``mark_above`` packets."""


class FlowState(NamedTuple):
    """All arrays of the engine."""

    numbers: NDArray[Any]
    messages: NDArray[Any]
    followers: NDArray[np.int32]
    graphs: NDArray[Any]
    flows: NDArray[Any]
    entries: NDArray[Any]
    ports: NDArray[Any]
    levels: NDArray[Any]
    stale: NDArray[np.int32]
    touched: NDArray[np.int32]
    finishing: NDArray[np.int32]
    event_times: NDArray[np.int64]
    event_nodes: NDArray[np.int64]
    due: NDArray[np.int32]
    completions: NDArray[np.int64]
    transports: NDArray[Any]
    counts: NDArray[np.int64]


# ----------------------------------------------------------------------------------------- flows, by when they finish


@call
def place(w: FlowState, at: int, flow: int) -> None:
    """Put a flow at a position of the heap."""
    w.finishing[at] = flow
    w.flows[flow].heap_at = at


@call
def is_later(w: FlowState, one: int, other: int) -> int:
    """Return whether a flow finishes later than another; messages that began together keep their order."""
    if w.flows[one].finish != w.flows[other].finish:
        return w.flows[one].finish > w.flows[other].finish
    return w.flows[one].head > w.flows[other].head


@call
def reorder(w: FlowState, flow: int) -> None:
    """Move a flow to its place in the heap, after its finish has changed."""
    n = w.numbers[0]
    at = w.flows[flow].heap_at
    while at > 0:
        parent = (at - 1) >> 1
        other = w.finishing[parent]
        if not is_later(w, other, flow):
            break
        place(w, at, other)
        at = parent
    while True:
        child = 2 * at + 1
        if child >= n.finishing:
            break
        if child + 1 < n.finishing and is_later(w, w.finishing[child], w.finishing[child + 1]):
            child += 1
        other = w.finishing[child]
        if is_later(w, other, flow):
            break
        place(w, at, other)
        at = child
    place(w, at, flow)


@call
def add_to_heap(w: FlowState, flow: int) -> None:
    """Add a flow to the heap."""
    n = w.numbers[0]
    place(w, n.finishing, flow)
    n.finishing += 1
    reorder(w, flow)


@call
def remove_from_heap(w: FlowState, flow: int) -> None:
    """Remove a flow from the heap."""
    n = w.numbers[0]
    at = w.flows[flow].heap_at
    n.finishing -= 1
    last = w.finishing[n.finishing]
    w.flows[flow].heap_at = -1
    if last != flow:
        place(w, at, last)
        reorder(w, last)


# --------------------------------------------------------------------------------------------------------------- levels


@call
def mark_stale(w: FlowState, level: int) -> None:
    """Have a level updated."""
    n = w.numbers[0]
    if w.levels[level].stale == 0:
        w.levels[level].stale = 1
        at = n.stale_first + n.stale_count
        if at >= len(w.stale):
            at -= len(w.stale)
        w.stale[at] = level
        n.stale_count += 1


@call
def is_overloaded(w: FlowState, port: int) -> int:
    """Return whether flows have more than a port's capacity."""
    p = w.ports[port]
    total = p.control
    for queue in range(PORT_QUEUES):
        if p.queues & (1 << queue):
            total += w.levels[port * PORT_QUEUES + queue].used
    return total > p.capacity * (1 + UNNOTICED_CHANGE / 2)


@call
def check_port(w: FlowState, port: int, queue: int) -> None:
    """Have the levels of a port updated that depend on a changed rate in ``queue``."""
    below = w.ports[port].queues & ((2 << queue) - 1)
    if below == 0:
        return
    overloaded = is_overloaded(w, port)
    for other in range(queue + 1):
        level = port * PORT_QUEUES + other
        if below & (1 << other) and (overloaded or w.levels[level].level < UNLIMITED):
            mark_stale(w, level)


@call
def set_goal(w: FlowState, flow: int, rate: float) -> None:
    """Change a flow's goal, and have the levels updated that depend on it."""
    f = w.flows[flow]
    change = rate - f.goal
    f.goal = rate
    if f.touched == 0:
        n = w.numbers[0]
        f.touched = 1
        w.touched[n.touched] = flow
        n.touched += 1
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        w.levels[e.level].used += change * e.share
        check_port(w, e.port, e.level - e.port * PORT_QUEUES)
    for at in range(f.entries + f.forward, f.entries + f.forward + f.backward):
        e = w.entries[at]
        p = w.ports[e.port]
        p.control += change * e.share * f.ack_ratio
        if abs(p.control - p.control_seen) > UNNOTICED_CHANGE * p.capacity:
            p.control_seen = p.control
            check_port(w, e.port, PORT_QUEUES - 1)


@call
def follow_levels(w: FlowState, flow: int) -> None:
    """Find a flow's bottleneck, and change its goal if that differs noticeably."""
    f = w.flows[flow]
    least = f.limit
    second = UNLIMITED
    bottleneck = -1
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        own = w.levels[e.level].level
        if own < UNLIMITED:
            own *= e.weight
        if own < least:
            second = least
            least = own
            bottleneck = e.level
        elif own < second:
            second = own
    f.least = least
    f.second = second
    f.bottleneck = bottleneck
    if least < UNLIMITED and abs(least - f.goal) > UNNOTICED_CHANGE * max(least, f.goal):
        set_goal(w, flow, least)


@call
def follow_limit(w: FlowState, flow: int) -> None:
    """Have the levels of a flow's path updated after its limit has changed."""
    f = w.flows[flow]
    for at in range(f.entries, f.entries + f.forward):
        mark_stale(w, w.entries[at].level)
    follow_levels(w, flow)


@call
def level_of(w: FlowState, level: int) -> float:
    """Return the level at which a queue's flows fill what the queues before it leave of the port."""
    port = level // PORT_QUEUES
    p = w.ports[port]
    room = p.capacity - p.control
    for queue in range(level % PORT_QUEUES + 1, PORT_QUEUES):
        if p.queues & (1 << queue):
            room -= w.levels[port * PORT_QUEUES + queue].used
    # Leave at least a hundredth of a percent, so that every flow ends. No result depends on it.
    room = max(room, p.capacity * 1e-4)
    found = 0.0
    while True:
        wanted = 0.0
        shares = 0.0
        at = w.levels[level].head
        while at >= 0:
            e = w.entries[at]
            f = w.flows[e.flow]
            elsewhere = f.second if f.bottleneck == level else f.least
            if elsewhere <= found * e.weight:
                wanted += e.share * elsewhere
            else:
                shares += e.share * e.weight
            at = e.next
        if shares == 0.0:
            return UNLIMITED
        better = (room - wanted) / shares
        if better <= found * (1 + 1e-12):
            return found
        found = better


@call
def update_level(w: FlowState, level: int) -> None:
    """Update a level, and the goals of its flows."""
    q = w.levels[level]
    if q.count == 0:
        q.level = UNLIMITED
        q.used = 0.0
        q.stale = 0
        return
    found = level_of(w, level)
    if q.stale == WEIGHTS_CHANGED or abs(found - q.level) > UNNOTICED_CHANGE * q.level:
        q.level = found
        used = 0.0
        at = q.head
        while at >= 0:
            e = w.entries[at]
            follow_levels(w, e.flow)
            used += e.share * w.flows[e.flow].goal
            at = e.next
        q.used = used  # instead of the sum of all changes, whose rounding errors would add up
    q.stale = 0


@entry
def compute_rates(w: FlowState) -> None:
    """Update all stale levels, then put the goals of all touched flows in force."""
    n = w.numbers[0]
    left = UPDATES_PER_LEVEL_MAX * len(w.levels)
    while n.stale_count > 0:
        level = w.stale[n.stale_first]
        n.stale_first += 1
        if n.stale_first == len(w.stale):
            n.stale_first = 0
        n.stale_count -= 1
        if left > 0:
            left -= 1
            update_level(w, level)
        else:  # they do not settle, and stay as they are until something changes
            w.levels[level].stale = 0
    for position in range(n.touched):
        flow = w.touched[position]
        f = w.flows[flow]
        f.touched = 0
        if f.active == 0:
            continue
        f.left -= f.rate * (n.now - f.since)
        f.since = n.now
        f.rate = f.goal
        elsewhere = f.bottleneck >= 0 and f.bottleneck != w.entries[f.entries].level
        elsewhere = elsewhere and f.least < OVERLOADED * f.second
        if elsewhere and f.congested == 0 and f.apart > 0 and w.levels[f.bottleneck].count > 1:
            meet_congestion(w, flow)
        set_finish(w, flow)
    n.touched = 0
    n.rates_at = n.now + RATES_EVERY_PS if n.stale_count > 0 else FOREVER_PS


@call
def whole_bytes(w: FlowState, flow: int) -> int:
    """Return the size of a flow's full packets on the wire."""
    t = w.transports[w.flows[flow].transport]
    return t.header_bytes + t.payload


@call
def meet_congestion(w: FlowState, flow: int) -> None:
    """Mark a message, and drop of the rest what switches may drop of it: that does not take the bottleneck's time."""
    f = w.flows[flow]
    f.congested = 1
    # Windows follow the queue of a port that cannot keep up, and they differ. A host serves its streams in turn.
    for at in range(f.entries + 1, f.entries + f.forward):
        w.entries[at].weight = f.weight
        mark_stale(w, w.entries[at].level)
        w.levels[w.entries[at].level].stale = WEIGHTS_CHANGED
    f.queueing = int(w.numbers[0].mark_above * whole_bytes(w, flow) / w.ports[f.bottleneck // PORT_QUEUES].capacity)
    m = w.messages[f.head]
    whole = whole_bytes(w, flow)
    dropped = int((m.droppable - m.missing) * f.left / (m.sent * whole))
    if dropped > 0:
        m.dropped = dropped
        m.missing += dropped
        f.left -= dropped * whole


@call
def set_finish(w: FlowState, flow: int) -> None:
    """Set when the turn of a message's next packet by itself comes at the present rate, or when all have left."""
    f = w.flows[flow]
    f.finish = FOREVER_PS
    if f.left < f.rate * FOREVER_PS:
        left = f.left
        if f.apart == 2:
            left -= w.transports[f.transport].header_bytes + w.messages[f.head].last_bytes
        wait = left / f.rate
        if f.apart > 0:
            wait -= turn_of(w, flow)
        f.finish = f.since + max(0, int(min(wait, float(FOREVER_PS - f.since)) + 0.5))
    reorder(w, flow)


@call
def apart_bytes(w: FlowState, flow: int) -> int:
    """Return the size on the wire of the next packet that is sent by itself."""
    f = w.flows[flow]
    t = w.transports[f.transport]
    return t.header_bytes + (t.payload if f.apart == 2 else w.messages[f.head].last_bytes)


@call
def turn_of(w: FlowState, flow: int) -> float:
    """Return the time in which each flow at the bottleneck sends a packet like the next one of this flow.

    In that time this flow's packet is sent, in its turn. A flow that others do not limit sends it at the end.
    """
    f = w.flows[flow]
    size = apart_bytes(w, flow)
    if f.bottleneck < 0:
        return size * w.ports[w.entries[f.entries].port].ps_per_byte
    port = w.ports[f.bottleneck // PORT_QUEUES]
    return size * min(1.0 / f.rate, w.levels[f.bottleneck].count / port.capacity)


# ---------------------------------------------------------------------------------------- flows that begin and end


@call
def list_flow(w: FlowState, flow: int, queue: int) -> None:
    """Add a flow to the levels of its path."""
    f = w.flows[flow]
    f.queue = queue
    f.goal = 0.0
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        p = w.ports[e.port]
        own = queue if p.ordered != 0 else 0
        e.level = e.port * PORT_QUEUES + own
        e.weight = 1.0
        q = w.levels[e.level]
        e.previous = -1
        e.next = q.head
        if q.head >= 0:
            w.entries[q.head].previous = at
        q.head = at
        q.count += 1
        p.queues |= 1 << own
        mark_stale(w, e.level)
    room = room_on_path(w, flow)
    follow_levels(w, flow)
    set_goal(w, flow, min(f.least, room))


@call
def room_on_path(w: FlowState, flow: int) -> float:
    """Return the rate that flows of the same queue or a more urgent one leave where no level limits a flow yet."""
    f = w.flows[flow]
    least = UNLIMITED
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        if w.levels[e.level].level >= UNLIMITED:
            p = w.ports[e.port]
            room = p.capacity - p.control
            for level in range(e.level, (e.port + 1) * PORT_QUEUES):
                room -= w.levels[level].used
            least = min(least, max(0.0, room) / e.share)
    return least


@call
def unlist_flow(w: FlowState, flow: int) -> None:
    """Remove a flow from the levels of its path."""
    f = w.flows[flow]
    set_goal(w, flow, 0.0)
    for at in range(f.entries, f.entries + f.forward):
        e = w.entries[at]
        q = w.levels[e.level]
        if e.previous >= 0:
            w.entries[e.previous].next = e.next
        else:
            q.head = e.next
        if e.next >= 0:
            w.entries[e.next].previous = e.previous
        q.count -= 1
        if q.count == 0:
            w.ports[e.port].queues &= ~(1 << (e.level - e.port * PORT_QUEUES))
            q.level = UNLIMITED
            q.used = 0.0
