# SPDX-License-Identifier: Apache-2.0
"""What hosts do, once for both engines: how windows grow and shrink, when timers are due, and when a message is over.

`dlcp.sim.transports` names the sources of the formulas. ``s`` is a stream, ``t`` the rules of its transport, ``m`` a
message. They are rows of the kernel's arrays, or objects of the reference, whose fields have the same names. So these
functions may use nothing but numbers: the kernel compiles them, the reference calls them as they are. Numbers that are
true or false are compared with 0 for Numba's sake.
"""

from dlcp.sim.jit import shared
from dlcp.sim.packet_engine import FOREVER_PS
from dlcp.sim.plan import (
    CUBIC_KEEP,
    CUBIC_SCALE,
    DLCP_BACKOFF_MAX,
    DLCP_LOSS_KEEP,
    TIMEOUT_BACKOFF_MAX,
    Number,
    Row,
    TransportKind,
)
from dlcp.wire import Queue

URGENT_QUEUE, EXCESS_QUEUE = int(Queue.CONTROL), int(Queue.EXCESS)
"""The most and the least urgent queue, plain integers: Numba cannot unify a member of an Enum with another number."""


@shared
def cube_root(value: float) -> float:
    """Return the cube root of ``value`` >= 0 by Newton's method: the same bits on every machine, unlike ``pow``."""
    if value <= 0.0:
        return 0.0
    root = max(1.0, value)
    for _ in range(200):
        better = (2.0 * root + value / (root * root)) / 3.0
        if better >= root:
            break
        root = better
    return root


def first_threshold(t: Row) -> float:
    """Return where slow start ends at first: at the widest window; Swift and NDP have none."""
    return 0.0 if t.kind in (TransportKind.SWIFT, TransportKind.NDP) else float(t.window_max)


@shared
def timeout_ps(s: Row, t: Row) -> Number:
    """Return the timeout (RFC 6298), doubled for each one in a row; pFabric's stays as it is."""
    if t.kind == TransportKind.PFABRIC:
        return t.timeout_ps
    wait = s.rtt + 4 * s.rtt_var
    if wait < t.timeout_ps:
        wait = t.timeout_ps
    return wait << s.backoff


@shared
def measure_rtt(s: Row, t: Row, rtt: int) -> None:
    """Take in a round-trip time in picoseconds (RFC 6298, gains of 1/8 and 1/4)."""
    if s.rtt == 0:
        s.rtt = rtt
        s.rtt_var = rtt >> 1
        s.rtt_min = rtt
    else:
        difference = rtt - s.rtt
        s.rtt += difference >> 3
        if difference < 0:
            difference = -difference
        s.rtt_var += (difference - s.rtt_var) >> 2
        if t.kind == TransportKind.SWIFT and rtt < s.rtt_min:
            s.rtt_min = rtt


@shared
def on_ack(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
    """Take in that packet ``number`` was acknowledged; ``limited`` says whether the window held packets back."""
    kind = t.kind
    if kind == TransportKind.NDP:
        return
    if kind in (TransportKind.DCTCP, TransportKind.PIAS, TransportKind.DLCP):
        s.acked += 1
        s.marked += marked
        if number >= s.round_end:
            s.alpha = s.alpha * (1.0 - t.gain) + t.gain * (s.marked / s.acked)
            s.acked = 0
            s.marked = 0
            s.round_end = s.number
        if marked != 0:
            if number >= s.reduced:
                s.window = max(1.0, s.window * (1.0 - s.alpha / 2.0))
                s.threshold = s.window
                s.reduced = s.number
            return
    if kind == TransportKind.SWIFT:
        target = t.target_ps
        if target == 0:
            target = 2 * s.rtt_min
        if rtt < target:
            if limited != 0:
                s.window = min(t.window_max, s.window + t.additive / s.window)
        elif now - s.cut_at >= s.rtt:
            late = (rtt - target) / rtt
            s.window = max(1.0, s.window * max(1.0 - t.beta * late, 1.0 - t.decrease_max))
            s.cut_at = now
        return
    if limited == 0 or number < s.recover:
        return
    if s.window < s.threshold:
        s.window = min(t.window_max, s.window + 1.0)
        return
    if kind == TransportKind.CUBIC:
        grow_cubic(s, t, now)
    else:
        s.window = min(t.window_max, s.window + 1.0 / s.window)


@shared
def grow_cubic(s: Row, t: Row, now: int) -> None:
    """Grow in congestion avoidance as RFC 9438 has it; ``alpha`` is its K in seconds."""
    if s.epoch < 0:
        s.epoch = now
        s.reno = s.window
        s.peak = max(s.peak, s.window)
        s.alpha = cube_root((s.peak - s.window) / CUBIC_SCALE)
    since = (now - s.epoch + s.rtt) * 1e-12 - s.alpha
    target = CUBIC_SCALE * since * since * since + s.peak
    s.reno += 3.0 * (1.0 - CUBIC_KEEP) / (1.0 + CUBIC_KEEP) / s.window
    goal = max(target, s.reno)
    if goal > s.window:
        s.window = min(t.window_max, s.window + min((goal - s.window) / s.window, 0.5))


@shared
def on_loss(s: Row, t: Row, number: int, now: int) -> None:
    """Take in that packet ``number`` was lost: once for all that were in flight together."""
    kind = t.kind
    if number < s.recover or kind == TransportKind.NDP:
        return
    s.recover = s.number
    if kind == TransportKind.SWIFT:
        if now - s.cut_at >= s.rtt:
            s.window = max(1.0, s.window * (1.0 - t.decrease_max))
            s.cut_at = now
        return
    if kind == TransportKind.DLCP:
        s.window = max(1.0, s.window * DLCP_LOSS_KEEP)
        s.threshold = s.window
        return
    if kind == TransportKind.CUBIC:
        s.peak = s.window * (1.0 + CUBIC_KEEP) / 2.0 if s.window < s.peak else s.window
        s.window = max(1.0, s.window * CUBIC_KEEP)
        s.threshold = max(2.0, s.window)
        s.epoch = -1
        return
    s.window = max(2.0, s.window / 2.0)
    s.threshold = s.window


@shared
def on_timeout(s: Row, t: Row) -> None:
    """Take in that nothing arrived for a whole timeout."""
    kind = t.kind
    s.recover = s.number
    if s.backoff < (DLCP_BACKOFF_MAX if kind == TransportKind.DLCP else TIMEOUT_BACKOFF_MAX):
        s.backoff += 1
    if kind == TransportKind.NDP:
        return
    if kind == TransportKind.PFABRIC and s.backoff >= t.probe_mode_after:
        s.probe_mode = 1
    if kind == TransportKind.DLCP:
        s.window = max(1.0, s.window / 2.0)
        s.threshold = s.window
    elif kind == TransportKind.SWIFT:
        s.window = max(1.0, s.window * (1.0 - t.decrease_max))
    else:
        keep = CUBIC_KEEP if kind == TransportKind.CUBIC else 0.5
        s.threshold = max(2.0, s.window * keep)
        s.peak = s.window
        s.window = 1.0
        s.epoch = -1


@shared
def is_limited(s: Row) -> Number:
    """Return whether the window is what holds packets back.

    In slow start the link may, which must not stop the window's growth (as in Linux).
    """
    reach = 2 * s.in_flight if s.window < s.threshold else s.in_flight + 1
    return reach >= int(s.window)


@shared
def leave_probe_mode(s: Row) -> None:
    """Send data instead of probes again (pFabric): something was answered."""
    if s.probe_mode != 0:
        s.probe_mode = 0
        s.backoff = 0


@shared
def window_is_open(s: Row, t: Row) -> Number:
    """Return whether a stream may have one more packet in flight."""
    if t.kind == TransportKind.NDP:
        return s.credit > 0
    return s.in_flight < int(s.window) + s.spare and s.probe_mode == 0


@shared
def needs_reply(s: Row, t: Row) -> Number:
    """Return whether a stream that has something to send waits for a PULL, or for a reply to a probe."""
    return s.probe_mode != 0 or (t.kind == TransportKind.NDP and s.credit <= 0)


@shared
def queue_of(t: Row, m: Row, index: int) -> Number:
    """Return the queue of a packet: its message's, or with PIAS by how much of the message was sent before it."""
    queue = int(m.queue)
    if t.kind == TransportKind.PIAS and t.levels > 0:
        queue = URGENT_QUEUE
        sent = index * t.payload
        for level in range(t.levels):
            if sent >= t.demotion[level]:
                queue -= 1
    return queue


@shared
def restart_timers(s: Row, t: Row, now: int) -> None:
    """Restart the timeout and the tail probe of a stream: something arrived."""
    s.deadline = now + timeout_ps(s, t)
    restart_tail_timer(s, t, now)


@shared
def restart_tail_timer(s: Row, t: Row, now: int) -> None:
    """Restart the tail probe of a stream, where there is to be one (RFC 8985, section 7.2)."""
    s.tail_due = FOREVER_PS
    if t.tail_probe != 0 and s.rtt > 0 and s.repairing == 0 and s.tail_probing == 0:
        s.tail_due = now + 2 * s.rtt


@shared
def has_enough(m: Row) -> Number:
    """Return whether a receiver may do without what has not arrived."""
    return m.protected == 0 and m.received >= m.required


@shared
def is_complete(t: Row, m: Row) -> Number:
    """Return whether a receiver needs nothing more, or nothing more than its bound has it wait for."""
    if m.received == m.packets:
        return True
    return m.bounded != 0 and (t.immediate != 0 or m.probed != 0) and has_enough(m)


@shared
def may_probe(m: Row) -> Number:
    """Return whether a sender has to ask what the receiver needs: all is sent and answered, and only holes are left."""
    if m.holes == 0 or m.satisfied != 0 or m.probing != 0:
        return False
    return m.in_flight == 0 and m.retransmits == 0 and m.next_index >= m.packets


@shared
def may_close(m: Row) -> Number:
    """Return whether a message is done and nothing refers to it any more.

    The rows of a closed graph are freed at once, so nothing may refer to any of its messages then: no packet or timer
    (``refs``), no transmission (``in_flight``, ``retransmits``), no list of a stream (``listed``).
    """
    if m.closed != 0 or m.done == 0 or m.refs != 0 or m.in_flight != 0 or m.retransmits != 0 or m.listed != 0:
        return False
    return m.acked >= m.packets or m.satisfied != 0
