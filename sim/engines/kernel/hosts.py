# SPDX-License-Identifier: Apache-2.0
"""Hosts: messages in their streams, packets and their acknowledgements, losses and timers, and receiving.

A stream's messages with unsent packets are in a list by order. Its packets in flight are in lists by queue, in the
order of sending, because packets of one queue are not reordered unless they are sprayed. A packet is declared lost when
a packet of its queue that was sent ``reorder`` transmissions later is acknowledged, or when nothing arrives for a whole
timeout. It then goes to the retransmission queue, or becomes a hole if its message may do without it.

Only the earliest timer of a stream has a valid event (``timer_at``). Acknowledgements postpone timers: an event that
fires before a timer is due is scheduled again, and a replaced event does nothing.
"""

from typing import Final

from dlcp.sim.arithmetic import RATE_SHIFT
from dlcp.sim.engines import rules
from dlcp.sim.engines.kernel import arrays as k
from dlcp.sim.engines.kernel.events import push
from dlcp.sim.engines.network_tables import (
    PROFILE_CELLS,
    PROTECTED_BLOCK_PACKETS,
    PacketKind,
)
from dlcp.sim.engines.packet_engine import CompletionKind, EngineCounter
from dlcp.sim.jit import call
from dlcp.sim.rows import PORT_QUEUES, Row
from dlcp.sim.transports.specs import PULL_QUEUED

NOTHING_TO_SEND, RETRANSMISSION, NEXT_PACKET = range(3)
"""Which packet a stream sends next."""
CONTROL_RANK: Final = -1
"""Rank of control packets, below that of all data, so that pFabric's switches send them first."""


# ------------------------------------------------------------------------------------- packets, graph nodes and streams


@call
def allocate_packet(w: Row) -> int:
    """Return an unused packet row. The loop ensures before each event that there is one."""
    packet = w.free_packet_head
    w.free_packet_head = k.packets_of(w)[packet].next
    w.free_packets -= 1
    return packet


@call
def remove_packet(w: Row, packet: int) -> None:
    """Remove a packet from the network. Close its message if this was the last reference."""
    message = k.packets_of(w)[packet].message
    k.packets_of(w)[packet].next = w.free_packet_head
    w.free_packet_head = packet
    w.free_packets += 1
    m = k.messages_of(w)[message]
    m.refs -= 1
    if m.refs == 0 and m.done != 0:
        close_message(w, message)


@call
def free_transmission(w: Row, transmission: int) -> None:
    """Free a transmission's row. Its serial number becomes -1, so that no late acknowledgement matches it."""
    k.transmissions_of(w)[transmission].serial = -1
    k.transmissions_of(w)[transmission].next = w.free_transmission_head
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
    k.completions_of(w)[2 * w.completed] = kind
    k.completions_of(w)[2 * w.completed + 1] = number
    w.completed += 1


@call
def close_message(w: Row, message: int) -> None:
    """Close a message if it is done and nothing refers to it any more."""
    m = k.messages_of(w)[message]
    if not rules.may_close(m):
        return
    m.closed = 1
    if m.packets > 0 and k.streams_of(w)[m.stream].single_use != 0:
        k.streams_of(w)[m.stream].dead = 1
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


# -------------------------------------------------------------------------------------------------------------- sending


@call
def begin_message(w: Row, message: int, now: int) -> None:
    """Assign drop classes to a message's packets, and put the message into its stream."""
    states = k.states_of(w)
    profiles = k.profiles_of(w)
    m = k.messages_of(w)[message]
    m.begin = now
    if m.bounded != 0:
        first = m.profile * PROFILE_CELLS
        zeros = 0
        while zeros < PROFILE_CELLS and profiles[first + zeros] == 0:
            zeros += 1
        for index in range(m.packets):
            # In each block the packets of class 0 come first, as DLCP's hosts send them (dlcp/native/tags.c).
            start = index & ~(PROTECTED_BLOCK_PACKETS - 1)
            keep = rules.protected_packets(zeros, min(PROTECTED_BLOCK_PACKETS, m.packets - start))
            if index < m.upper or index - start < keep:
                m.protected += 1
            else:
                states[m.offset + index] = profiles[first + zeros + k.mix(index, m.salt) % (PROFILE_CELLS - zeros)]
    rules.on_begin(k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], m)
    enqueue_message(w, m.stream, message)


@call
def enqueue_message(w: Row, stream: int, message: int) -> None:
    """Insert a message into its stream's list by order, but never before one that is being sent."""
    messages = k.messages_of(w)
    s = k.streams_of(w)[stream]
    m = messages[message]
    m.listed = 1
    m.next_in_stream = -1
    if s.head < 0:
        s.head = message
        s.tail = message
        return
    if messages[s.tail].order <= m.order:
        messages[s.tail].next_in_stream = message
        s.tail = message
        return
    at = s.head
    if messages[at].next_index == 0 and messages[at].order > m.order:
        m.next_in_stream = at
        s.head = message
        return
    while messages[at].next_in_stream >= 0 and messages[messages[at].next_in_stream].order <= m.order:
        at = messages[at].next_in_stream
    m.next_in_stream = messages[at].next_in_stream
    messages[at].next_in_stream = message
    if m.next_in_stream < 0:
        s.tail = message


@call
def may_send(s: Row, t: Row) -> int:
    """Return whether a stream's window is open and its lists are not empty."""
    return (s.retransmissions.head >= 0 or s.head >= 0) and rules.window_is_open(s, t)


@call
def next_transmission(w: Row, port: int, stream: int, now: int) -> int:
    """Return what a stream sends next: nothing, a retransmission, or the next packet of its first message.

    Entries that need not be sent any more are removed. That may trigger a probe of a receiver through ``port``, which
    has no control packet waiting. The probe then goes first, and the result is `NOTHING_TO_SEND`.
    """
    messages = k.messages_of(w)
    transmissions = k.transmissions_of(w)
    states = k.states_of(w)
    s = k.streams_of(w)[stream]
    if not may_send(s, k.transports_of(w)[s.transport]):
        return NOTHING_TO_SEND
    found = NOTHING_TO_SEND
    while s.retransmissions.head >= 0 and found == NOTHING_TO_SEND:
        transmission = s.retransmissions.head
        message = transmissions[transmission].message
        m = messages[message]
        cell = m.offset + transmissions[transmission].index
        lost = (states[cell] & k.STATE_MASK) == k.STATE_LOST
        if lost and m.satisfied == 0:
            found = RETRANSMISSION
        else:
            if lost:
                states[cell] = (states[cell] & ~k.STATE_MASK) | k.STATE_HOLE
                m.holes += 1
            m.retransmits -= 1
            s.repairing -= 1
            rules.add_backlog(s, k.transports_of(w)[s.transport], -1)
            s.retransmissions.head = transmissions[transmission].next
            free_transmission(w, transmission)
            # It was acknowledged late, or the receiver needs no more. It may have been the last to delay a probe.
            probe_receiver(w, port, message, now)
            close_message(w, message)
            if k.ports_of(w)[port].control.head >= 0:
                return NOTHING_TO_SEND
    while s.head >= 0 and found == NOTHING_TO_SEND:
        message = s.head
        m = messages[message]
        if m.satisfied == 0:
            if m.filling_holes != 0:
                # The next hole that the receiver still lacks.
                lacks = k.STATE_MASK | k.STATE_RECEIVED
                while m.next_index < m.packets and states[m.offset + m.next_index] & lacks != k.STATE_HOLE:
                    m.next_index += 1
            if m.next_index < m.packets:
                found = NEXT_PACKET
        if found == NOTHING_TO_SEND:
            s.head = m.next_in_stream
            m.listed = 0
            close_message(w, message)
    return found


@call
def next_queue(w: Row, stream: int) -> int:
    """Return the queue of the packet at the head of a stream's lists."""
    s = k.streams_of(w)[stream]
    if s.retransmissions.head >= 0:
        r = k.transmissions_of(w)[s.retransmissions.head]
        return rules.queue_of(s, k.transports_of(w)[s.transport], k.messages_of(w)[r.message], r.index)
    m = k.messages_of(w)[s.head]
    return rules.queue_of(s, k.transports_of(w)[s.transport], m, m.next_index)


@call
def make_ready(w: Row, port: int, stream: int, queue: int) -> None:
    """Append a stream to an interface's list of ready streams."""
    k.streams_of(w)[stream].ready = 1
    k.append(k.streams_of(w), k.queues_of(w)[port * PORT_QUEUES + queue], stream)
    k.ports_of(w)[port].nonempty |= 1 << queue


@call
def move_smallest_first(w: Row, port: int, queue: int) -> None:
    """Move the pFabric stream whose message has the fewest packets left to the front."""
    streams = k.streams_of(w)
    messages = k.messages_of(w)
    q = k.queues_of(w)[port * PORT_QUEUES + queue]
    best = -1
    before_best = -1
    least = 1 << 40
    before = -1
    at = q.head
    if k.transports_of(w)[streams[at].transport].smallest_first == 0:
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
def transmit(w: Row, stream: int, what: int, now: int) -> int:
    """Build and return the packet that `next_transmission` has found, and put it in flight."""
    transmissions = k.transmissions_of(w)
    s = k.streams_of(w)[stream]
    t = k.transports_of(w)[s.transport]
    retransmission = 0
    if what == RETRANSMISSION:
        transmission = s.retransmissions.head
        r = transmissions[transmission]
        s.retransmissions.head = r.next
        message = r.message
        index = r.index
        m = k.messages_of(w)[message]
        m.retransmits -= 1
        retransmission = 1
    else:
        message = s.head
        m = k.messages_of(w)[message]
        index = m.next_index
        m.next_index = index + 1
        transmission = w.free_transmission_head
        r = transmissions[transmission]
        w.free_transmission_head = r.next
        w.free_transmissions -= 1
        r.message = message
        r.index = index
        r.repeated = 0
        if m.filling_holes != 0:
            m.holes -= 1
            retransmission = 1
        elif m.next_index == m.packets:
            s.head = m.next_in_stream
            m.listed = 0
    queue = rules.queue_of(s, t, m, index)
    cell = m.offset + index
    state = k.states_of(w)[cell]
    k.states_of(w)[cell] = (state & ~k.STATE_MASK) | k.STATE_IN_FLIGHT
    # Transmission rows are reused, so an acknowledgement is valid only with this packet's serial number.
    serial = w.serial
    w.serial = serial + 1
    r.serial = serial
    r.queue = queue
    r.number = s.number
    r.sent_at = now
    r.next = -1
    r.previous = s.last[queue]
    if r.previous >= 0:
        transmissions[r.previous].next = transmission
    else:
        s.first[queue] = transmission
    s.last[queue] = transmission
    rules.on_send(s, t, m, now)
    arm_timer(w, s, stream)
    if s.in_flight > w.in_flight_max:
        w.in_flight_max = s.in_flight
    k.counts_of(w)[EngineCounter.SENT] += 1
    k.counts_of(w)[EngineCounter.RETRANSMITTED] += retransmission
    packet = allocate_packet(w)
    x = k.packets_of(w)[packet]
    x.serial = serial
    x.message = message
    x.index = index
    x.transmission = transmission
    x.target = s.target
    x.size = rules.packet_bytes(t, m, index)
    x.rank = m.packets - m.acked
    x.kind = PacketKind.DATA
    x.queue = queue
    # A retransmitted packet is needed, so no policy may drop it again.
    x.drop_class = (state & k.CLASS_MASK) if retransmission == 0 else 0
    x.ecn = t.ecn
    x.sprayed = t.sprayed
    x.satisfied = 0
    x.retransmission = retransmission
    x.trimmed = 0
    x.credit = rules.wanted_credit(s, t)
    x.path_hash = rules.packet_hash(s, t, m, index, r.number, retransmission)
    return packet


# ------------------------------------------------------------------------------------------------------ control packets


@call
def send_control(w: Row, port: int, packet: int) -> None:
    """Append a packet to an interface's control queue, which is sent before everything else."""
    k.append(k.packets_of(w), k.ports_of(w)[port].control, packet)


@call
def make_control(w: Row, s: Row, t: Row, packet: int, kind: int, back: int) -> None:
    """Turn a packet's row into a control packet to the stream's target, or with ``back`` to its source."""
    x = k.packets_of(w)[packet]
    x.kind = kind
    x.target = s.source if back != 0 else s.target
    x.path_hash = s.reverse_path_hash if back != 0 else s.path_hash
    x.size = t.ack_bytes
    x.rank = CONTROL_RANK
    x.ecn = t.ecn
    x.satisfied = 0
    x.ecn_echo = 0
    x.queue = t.control_queue
    x.drop_class = 0
    x.sprayed = 0
    x.trimmed = 0
    x.retransmission = 0


@call
def new_control(w: Row, message: int, kind: int, back: int) -> int:
    """Return a new control packet of a message's stream."""
    m = k.messages_of(w)[message]
    packet = allocate_packet(w)
    make_control(w, k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], packet, kind, back)
    x = k.packets_of(w)[packet]
    x.message = message
    x.serial = -1
    x.transmission = 0
    m.refs += 1
    return packet


@call
def probe_receiver(w: Row, port: int, message: int, now: int) -> None:
    """Ask a receiver whether it needs the holes, once every packet is sent and answered."""
    m = k.messages_of(w)[message]
    if not rules.may_probe(m):
        return
    rules.on_probe(k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], m, now)
    k.counts_of(w)[EngineCounter.PROBES] += 1
    send_control(w, port, new_control(w, message, PacketKind.PROBE, 0))
    if m.probe_timer == 0:
        m.probe_timer = 1
        m.refs += 1
        push(w, m.probe_at, k.EventKind.PROBE_DUE, message)


@call
def probe_timer(w: Row, port: int, message: int, now: int) -> None:
    """Probe again, unless the message is complete."""
    m = k.messages_of(w)[message]
    if m.satisfied != 0 or m.acked == m.packets:
        m.probe_timer = 0
        m.refs -= 1
        close_message(w, message)
        return
    if now >= m.probe_at:
        rules.on_probe_timeout(k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], m, now)
        probe_receiver(w, port, message, now)
    push(w, m.probe_at, k.EventKind.PROBE_DUE, message)


# ------------------------------------------------------------------------------------ acknowledgements and lost packets


@call
def receive_ack(w: Row, port: int, packet: int, now: int) -> None:
    """Handle an ACK at the sender, whose interface is ``port``; it may show that earlier packets are lost."""
    transmissions = k.transmissions_of(w)
    states = k.states_of(w)
    x = k.packets_of(w)[packet]
    message = x.message
    m = k.messages_of(w)[message]
    s = k.streams_of(w)[m.stream]
    t = k.transports_of(w)[m.transport]
    if x.satisfied != 0:
        m.satisfied = 1
    cell = m.offset + x.index
    state = states[cell]
    r = transmissions[x.transmission]
    rules.leave_probe_mode(s)
    if r.serial == x.serial:
        limited = rules.is_limited(s)
        queue = r.queue
        number = r.number
        rtt = now - r.sent_at
        s.repairing -= r.repeated
        take_from_flight(w, s, m, x.transmission)
        states[cell] = (state & ~k.STATE_MASK) | k.STATE_ACKED
        m.acked += 1
        free_transmission(w, x.transmission)
        rules.measure_rtt(s, t, rtt)
        s.backoff = 0
        if x.ecn_echo != 0:
            m.congested = 1
        rules.on_ack(s, t, x.ecn_echo, rtt, number, now, limited)
        # If the tail probe has been answered, every unacknowledged packet sent before it is lost.
        before = -1
        if s.tail_probing != 0 and number >= s.tail_number:
            before = s.tail_number
            s.tail_probing = 0
            if number == before and s.tail_message >= 0:
                rules.on_loss(s, t, number, now)  # the repeated packet was lost, and the probe has replaced it
        first = s.first[queue]
        while first >= 0:
            sent = transmissions[first].number
            if sent + t.reorder_packets > number and sent >= before:
                break
            rules.on_loss(s, t, sent, now)
            lose(w, port, first, now)
            first = s.first[queue]
        rules.restart_timers(s, t, now)
        arm_timer(w, s, m.stream)
    else:
        k.counts_of(w)[EngineCounter.LATE_ACKS] += 1
        known = state & k.STATE_MASK
        if known in (k.STATE_LOST, k.STATE_HOLE):
            states[cell] = (state & ~k.STATE_MASK) | k.STATE_ACKED
            m.acked += 1
            if known == k.STATE_HOLE:
                m.holes -= 1
        if s.tail_probing != 0 and message == s.tail_message and x.index == s.tail_index:
            s.tail_message = -1  # the repeated packet was not lost
    if m.bounded != 0:
        probe_receiver(w, port, message, now)


@call
def receive_nack(w: Row, port: int, packet: int, now: int) -> None:
    """Handle a NACK at the sender, whose interface is ``port``: a packet arrived without its payload."""
    x = k.packets_of(w)[packet]
    m = k.messages_of(w)[x.message]
    s = k.streams_of(w)[m.stream]
    t = k.transports_of(w)[m.transport]
    r = k.transmissions_of(w)[x.transmission]
    if x.satisfied != 0:
        m.satisfied = 1
    if r.serial == x.serial:
        s.backoff = 0
        rules.on_nack(s, t, r.number, now - r.sent_at, now)
        rules.restart_timers(s, t, now)
        arm_timer(w, s, m.stream)
        declare_lost(w, x.transmission, 1)
        probe_receiver(w, port, x.message, now)


@call
def declare_lost(w: Row, transmission: int, trimmed: int) -> None:
    """Declare a packet in flight lost: queue its retransmission, or make it a hole if the message may do without it."""
    r = k.transmissions_of(w)[transmission]
    m = k.messages_of(w)[r.message]
    s = k.streams_of(w)[m.stream]
    take_from_flight(w, s, m, transmission)
    m.congested = 1
    k.counts_of(w)[EngineCounter.DECLARED_LOST] += 1
    cell = m.offset + r.index
    state = k.states_of(w)[cell]
    if rules.may_stay_lost(m, state & k.CLASS_MASK, trimmed):
        s.repairing -= r.repeated
        k.states_of(w)[cell] = (state & ~k.STATE_MASK) | k.STATE_HOLE
        m.holes += 1
        free_transmission(w, transmission)
        return
    queue_retransmission(w, s, transmission)


@call
def lose(w: Row, port: int, transmission: int, now: int) -> None:
    """Declare a packet in flight lost; then probe the receiver or close the message, if this was all it waited for."""
    message = k.transmissions_of(w)[transmission].message
    declare_lost(w, transmission, 0)
    probe_receiver(w, port, message, now)
    close_message(w, message)


@call
def queue_retransmission(w: Row, s: Row, transmission: int) -> None:
    """Append a packet that was in flight to its stream's retransmission queue."""
    r = k.transmissions_of(w)[transmission]
    m = k.messages_of(w)[r.message]
    cell = m.offset + r.index
    k.states_of(w)[cell] = (k.states_of(w)[cell] & ~k.STATE_MASK) | k.STATE_LOST
    m.retransmits += 1
    rules.add_backlog(s, k.transports_of(w)[s.transport], 1)
    s.repairing += 1 - r.repeated
    r.repeated = 1
    r.serial = -1
    k.append(k.transmissions_of(w), s.retransmissions, transmission)


# --------------------------------------------------------------------------------------------------------------- timers


@call
def arm_timer(w: Row, s: Row, stream: int) -> None:
    """Ensure that an event is scheduled at the stream's earliest timer."""
    due = min(s.deadline, s.tail_due)
    if s.timer_at < 0 or due < s.timer_at:
        s.timer_at = due
        s.timers += 1
        push(w, due, k.EventKind.STREAM_TIMER, stream)


@call
def awaits_reply(s: Row, t: Row) -> int:
    """Return whether a stream with nothing in flight waits for a PULL, or for a reply to a probe."""
    return (s.retransmissions.head >= 0 or s.head >= 0) and rules.needs_reply(s, t)


@call
def stream_timer(w: Row, port: int, stream: int, now: int) -> int:
    """Handle the timers that are due; return whether the stream may have something to send."""
    s = k.streams_of(w)[stream]
    t = k.transports_of(w)[s.transport]
    s.timers -= 1
    if now == s.timer_at:
        s.timer_at = -1
        if s.in_flight != 0 or awaits_reply(s, t):
            if now >= s.deadline:
                time_out_stream(w, port, stream, now)
            else:
                if now >= s.tail_due:
                    probe_tail(w, stream, now)
                arm_timer(w, s, stream)
            return True
    free_stream_if_dead(w, stream)
    return False


@call
def time_out_stream(w: Row, port: int, stream: int, now: int) -> None:
    """Declare all packets in flight lost."""
    s = k.streams_of(w)[stream]
    t = k.transports_of(w)[s.transport]
    k.counts_of(w)[EngineCounter.TIMEOUTS] += 1
    rules.on_timeout(s, t)
    for queue in range(PORT_QUEUES):
        while s.first[queue] >= 0:
            lose(w, port, s.first[queue], now)
    if s.probe_mode != 0 and awaits_reply(s, t):
        # A pFabric flow's probe has the priority of its data.
        message = k.transmissions_of(w)[s.retransmissions.head].message if s.retransmissions.head >= 0 else s.head
        packet = new_control(w, message, PacketKind.PROBE, 0)
        k.packets_of(w)[packet].rank = k.messages_of(w)[message].packets - k.messages_of(w)[message].acked
        k.counts_of(w)[EngineCounter.PROBES] += 1
        send_control(w, port, packet)
        rules.restart_timers(s, t, now)
        arm_timer(w, s, stream)


@call
def probe_tail(w: Row, stream: int, now: int) -> None:
    """Send a tail probe: allow one more packet, unless the stream has one ready at its interface anyway."""
    transmissions = k.transmissions_of(w)
    s = k.streams_of(w)[stream]
    t = k.transports_of(w)[s.transport]
    if s.ready != 0:
        rules.restart_tail_timer(s, t, now)
        return
    k.counts_of(w)[EngineCounter.TAIL_PROBES] += 1
    s.tail_message = -1
    rules.begin_tail_probe(s, t, now)
    if s.retransmissions.head < 0 and s.head < 0:
        latest = -1
        for queue in range(PORT_QUEUES):
            transmission = s.last[queue]
            if transmission >= 0 and (latest < 0 or transmissions[transmission].number > transmissions[latest].number):
                latest = transmission
        s.tail_message = transmissions[latest].message
        s.tail_index = transmissions[latest].index
        take_from_flight(w, s, k.messages_of(w)[s.tail_message], latest)
        queue_retransmission(w, s, latest)


# ------------------------------------------------------------------------------------------------------------ receiving


@call
def receive_data(w: Row, port: int, packet: int, now: int) -> None:
    """Receive a packet at its target, and return its row through ``port`` as the acknowledgement."""
    x = k.packets_of(w)[packet]
    m = k.messages_of(w)[x.message]
    t = k.transports_of(w)[m.transport]
    kind = PacketKind.ACK
    cell = m.offset + x.index
    state = k.states_of(w)[cell]
    known = state & (k.STATE_RECEIVED | k.STATE_DELIVERED)
    if x.trimmed != 0:
        kind = PacketKind.NACK
        m.trims += 1
        if known == 0:
            k.states_of(w)[cell] = state | k.STATE_DELIVERED
            m.given_up += 1
    elif known & k.STATE_RECEIVED != 0:
        k.counts_of(w)[EngineCounter.DUPLICATES] += 1
    else:
        m.given_up -= 1 if known != 0 else 0
        delivered = k.STATE_DELIVERED if m.done == 0 else 0
        k.states_of(w)[cell] = (state & ~k.STATE_DELIVERED) | k.STATE_RECEIVED | delivered
        k.counts_of(w)[EngineCounter.ARRIVED] += 1
        m.received += 1
        if m.bounded != 0 and state & k.CLASS_MASK == 0:
            m.protected -= 1
    if m.done == 0 and rules.is_complete(t, m):
        complete_node(w, x.message, now)
    # The row becomes the acknowledgement, so read its mark before it is overwritten.
    marked = x.ecn == 3
    s = k.streams_of(w)[m.stream]
    make_control(w, s, t, packet, kind, 1)
    x.ecn_echo = 1 if marked else 0
    x.satisfied = 1 if m.done != 0 and m.missing > 0 else 0
    send_control(w, port, packet)
    if rules.may_pull(s, t, m, x.credit, kind == PacketKind.NACK):
        p = k.ports_of(w)[port]
        k.append(k.packets_of(w), p.pulls, new_control(w, x.message, PacketKind.PULL, 1))
        if p.pulling == 0:
            p.pulling = 1
            push(w, max(now, p.pull_next), k.EventKind.PULL_DUE, port)


@call
def receive_probe(w: Row, port: int, packet: int, now: int) -> None:
    """Answer a sender's probe: whether the message is complete within its loss bound."""
    x = k.packets_of(w)[packet]
    m = k.messages_of(w)[x.message]
    m.probed = 1
    if m.done == 0 and rules.has_enough(m):
        complete_node(w, x.message, now)
    make_control(w, k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], packet, PacketKind.PROBE_REPLY, 1)
    x.satisfied = m.done
    send_control(w, port, packet)


@call
def send_pull(w: Row, port: int, now: int) -> None:
    """Send the first waiting PULL. The next one follows after the serialization time of the requested packets.

    Spare ones wait for all others, and are not sent for messages that are done.
    """
    packets = k.packets_of(w)
    p = k.ports_of(w)[port]
    while p.pulls.head < 0 and p.spare_pulls.head >= 0:
        packet = p.spare_pulls.head
        m = k.messages_of(w)[packets[packet].message]
        if m.done == 0:
            break
        p.spare_pulls.head = packets[packet].next
        k.streams_of(w)[m.stream].pulling &= PULL_QUEUED
        remove_packet(w, packet)
    spare = 1 if p.pulls.head < 0 else 0
    waiting = p.spare_pulls if spare else p.pulls
    if waiting.head < 0:
        p.pulling = 0
        return
    packet = waiting.head
    x = packets[packet]
    waiting.head = x.next
    m = k.messages_of(w)[x.message]
    s = k.streams_of(w)[m.stream]
    t = k.transports_of(w)[m.transport]
    credit = rules.give_credit(s, t, spare)
    x.credit = s.granted
    packet_ps = ((t.header_bytes + t.payload) * p.kibibyte_ps) >> RATE_SHIFT
    p.pull_next = now + rules.credit_ps(s, t, credit, packet_ps)
    send_control(w, port, packet)
    queue = rules.queue_after_pull(s, t, spare)
    if queue >= 0:
        k.append(packets, p.spare_pulls if queue else p.pulls, new_control(w, x.message, PacketKind.PULL, 1))
    if p.pulls.head >= 0 or p.spare_pulls.head >= 0:
        push(w, p.pull_next, k.EventKind.PULL_DUE, port)
    else:
        p.pulling = 0
