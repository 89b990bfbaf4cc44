# SPDX-License-Identifier: Apache-2.0
"""Hosts as receivers: data, probes, and the PULLs of NDP."""

from dlcp.sim.arithmetic import RATE_SHIFT
from dlcp.sim.jit import call
from dlcp.sim.kernel import state as k
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.messages import complete_node
from dlcp.sim.kernel.sender import make_control, new_control, send_control
from dlcp.sim.packet_engine import EngineCounter
from dlcp.sim.plan import PacketKind, Row, TransportKind
from dlcp.sim.rules import has_enough, is_complete


@call
def receive_data(w: Row, port: int, packet: int, now: int) -> None:
    """Receive a packet at its target, and return its row through ``port`` as the acknowledgement."""
    states = k.states_of(w)
    counts = k.counts_of(w)
    x = k.packets_of(w)[packet]
    m = k.messages_of(w)[x.message]
    t = k.transports_of(w)[m.transport]
    kind = PacketKind.ACK
    if x.trimmed != 0:
        kind = PacketKind.NACK
        m.trims += 1
    else:
        cell = m.offset + x.index
        state = states[cell]
        if state & k.STATE_RECEIVED != 0:
            counts[EngineCounter.DUPLICATES] += 1
        else:
            states[cell] = state | k.STATE_RECEIVED
            counts[EngineCounter.ARRIVED] += 1
            m.received += 1
            if m.bounded != 0 and state & k.CLASS_MASK == 0:
                m.protected -= 1
            if m.done == 0 and is_complete(t, m):
                complete_node(w, x.message, now)
    # The row becomes the acknowledgement, so read its mark before it is overwritten.
    marked = x.ecn == 3
    make_control(w, k.streams_of(w)[m.stream], t, packet, kind, 1)
    x.ecn_echo = 1 if marked else 0
    x.satisfied = 1 if m.done != 0 and m.missing > 0 else 0
    send_control(w, port, packet)
    if t.kind == TransportKind.NDP:
        request_packet(w, port, x.message, now)


@call
def receive_probe(w: Row, port: int, packet: int, now: int) -> None:
    """Answer a sender's probe: whether the message is complete within its loss bound."""
    x = k.packets_of(w)[packet]
    m = k.messages_of(w)[x.message]
    m.probed = 1
    if m.done == 0 and has_enough(m):
        complete_node(w, x.message, now)
    make_control(w, k.streams_of(w)[m.stream], k.transports_of(w)[m.transport], packet, PacketKind.PROBE_REPLY, 1)
    x.satisfied = m.done
    send_control(w, port, packet)


@call
def request_packet(w: Row, port: int, message: int, now: int) -> None:
    """Queue a PULL for one more packet, unless all missing packets have been requested."""
    packets = k.packets_of(w)
    m = k.messages_of(w)[message]
    if m.pulls >= m.packets + m.trims:
        return
    m.pulls += 1
    packet = new_control(w, message, PacketKind.PULL, 1)
    packets[packet].next = -1
    p = k.ports_of(w)[port]
    if p.pull_head < 0:
        p.pull_head = packet
    else:
        packets[p.pull_tail].next = packet
    p.pull_tail = packet
    if p.pulling == 0:
        p.pulling = 1
        push(w, max(now, p.pull_next), k.EventKind.PULL_DUE, port)


@call
def send_pull(w: Row, port: int, now: int) -> None:
    """Send the first waiting PULL. The next one follows after the serialization time of the requested packet."""
    packets = k.packets_of(w)
    p = k.ports_of(w)[port]
    packet = p.pull_head
    p.pull_head = packets[packet].next
    t = k.transports_of(w)[k.messages_of(w)[packets[packet].message].transport]
    p.pull_next = now + (((t.header + t.payload) * p.kibibyte_ps) >> RATE_SHIFT)
    send_control(w, port, packet)
    if p.pull_head >= 0:
        push(w, p.pull_next, k.EventKind.PULL_DUE, port)
    else:
        p.pulling = 0
