# SPDX-License-Identifier: Apache-2.0
"""What happens to a stream when nothing is heard: a probe of its tail, a timeout, a question for what is missing.

Of all that a stream waits for, only the earliest has an event that counts (``timer_at``). Answers put it off; so an
event that comes before anything is due is put in again, and one that another has replaced does nothing.
"""

from dlcp.sim.counters import PROBES, TAIL_PROBES, TIMEOUTS
from dlcp.sim.kernel.congestion import time_out, timeout_ps
from dlcp.sim.kernel.control import address_control, lose, post, probe, send_again
from dlcp.sim.kernel.events import push
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.lifetime import bury, settle
from dlcp.sim.kernel.pools import take_packet
from dlcp.sim.kernel.state import PROBE, PROBE_DUE, TIMER, Number, Rows
from dlcp.sim.kernel.world import counts_of, messages_of, packets_of, records_of, streams_of, transports_of
from dlcp.sim.plan import NDP, QUEUES

PROBE_BACKOFF_MAX = 6
NEVER = 1 << 62


@call
def lacks_answer(s: Rows, t: Rows) -> Number:
    """Return whether a stream with nothing on its way waits for what may have been lost: a PULL, or leave to go on."""
    if s.again_head < 0 and s.head < 0:
        return False
    return s.asking != 0 or (t.kind == NDP and s.credit <= 0)


@call
def put_off(s: Rows, t: Rows, now: int) -> None:
    """Let the timeout and the tail probe of a stream begin anew, for something was heard."""
    s.deadline = now + timeout_ps(s, t)
    put_tail_off(s, t, now)


@call
def put_tail_off(s: Rows, t: Rows, now: int) -> None:
    """Let the tail probe of a stream begin anew, where there is to be one (RFC 8985, section 7.2)."""
    s.tail_at = NEVER
    if t.tail_probe != 0 and s.rtt > 0 and s.repairing == 0 and s.tail_open == 0:
        s.tail_at = now + 2 * s.rtt


@call
def arm(w: Rows, s: Rows, stream: int) -> None:
    """See to it that there is an event when something is due."""
    due = min(s.deadline, s.tail_at)
    if s.timer_at < 0 or due < s.timer_at:
        s.timer_at = due
        s.timers += 1
        push(w, due, TIMER, stream)


@call
def stream_timer(w: Rows, port: int, stream: int, now: int) -> Number:
    """Act if something is due; return whether the stream may have something to send."""
    streams = streams_of(w)
    transports = transports_of(w)
    s = streams[stream]
    t = transports[s.transport]
    s.timers -= 1
    if now == s.timer_at:
        s.timer_at = -1
        if s.flying != 0 or lacks_answer(s, t):
            if now >= s.deadline:
                give_up(w, port, stream, now)
            elif now >= s.tail_at:
                probe_tail(w, stream, now)
                arm(w, s, stream)
            else:
                arm(w, s, stream)
            return True
    bury(w, stream)
    return False


@call
def give_up(w: Rows, port: int, stream: int, now: int) -> None:
    """Declare everything lost that is on its way."""
    streams = streams_of(w)
    records = records_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    s = streams[stream]
    t = transports[s.transport]
    counts[TIMEOUTS] += 1
    time_out(s, t)
    s.tail_open = 0
    s.spare = 0
    if t.kind == NDP:
        s.credit += max(1, s.flying)
    for queue in range(QUEUES):
        while s.first[queue] >= 0:
            other = records[s.first[queue]].node
            lose(w, s.first[queue])
            probe(w, port, other, now)
            settle(w, other)
    if s.asking != 0 and lacks_answer(s, t):
        ask_to_go_on(w, port, stream)
        put_off(s, t, now)
        arm(w, s, stream)


@call
def ask_to_go_on(w: Rows, port: int, stream: int) -> None:
    """Send a pFabric flow's packet without data, of the priority that its data has."""
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    packets = packets_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    s = streams[stream]
    node = records[s.again_head].node if s.again_head >= 0 else s.head
    m = messages[node]
    packet = take_packet(w)
    address_control(w, s, transports[s.transport], packet, PROBE, 0)
    x = packets[packet]
    x.node = node
    x.serial = -1
    x.record = 0
    x.rank = m.packets - m.acked
    m.refs += 1
    counts[PROBES] += 1
    post(w, port, packet)


@call
def probe_tail(w: Rows, stream: int, now: int) -> None:
    """Let one more packet go, if none waits for its turn at the interface anyway."""
    streams = streams_of(w)
    messages = messages_of(w)
    records = records_of(w)
    transports = transports_of(w)
    counts = counts_of(w)
    s = streams[stream]
    t = transports[s.transport]
    if s.ready != 0:
        put_tail_off(s, t, now)
        return
    counts[TAIL_PROBES] += 1
    s.tail_open = 1
    s.tail_number = s.number
    s.tail_node = -1
    s.tail_at = NEVER
    s.spare = 1
    s.deadline = now + timeout_ps(s, t)
    if s.again_head < 0 and s.head < 0:
        latest = -1
        for queue in range(QUEUES):
            record = s.last[queue]
            if record >= 0 and (latest < 0 or records[record].number > records[latest].number):
                latest = record
        s.tail_node = records[latest].node
        s.tail_index = records[latest].index
        s.flying -= 1
        messages[s.tail_node].flying -= 1
        send_again(w, s, latest)


@call
def probe_timer(
    w: Rows,
    port: int,
    node: int,
    now: int,
) -> None:
    """Ask again, unless all is well."""
    streams = streams_of(w)
    messages = messages_of(w)
    transports = transports_of(w)
    m = messages[node]
    if m.stopped != 0 or m.acked == m.packets:
        m.probe_timer = 0
        m.refs -= 1
        settle(w, node)
        return
    if now >= m.probe_at:
        if m.probing != 0 and m.probe_backoff < PROBE_BACKOFF_MAX:
            m.probe_backoff += 1
        m.probing = 0
        s = streams[m.stream]
        m.probe_at = now + timeout_ps(s, transports[m.transport])
        probe(w, port, node, now)
    push(w, m.probe_at, PROBE_DUE, node)
