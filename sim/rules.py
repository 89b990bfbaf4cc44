# SPDX-License-Identifier: Apache-2.0
"""Host behaviour shared by both engines: congestion windows, timers, queues, and when a message is complete.

`dlcp.sim.transports` names the sources of the formulas. ``s`` is a stream, ``t`` the rules of its transport, ``m`` a
message: rows of the kernel's arrays, or objects of the reference with the same field names. The kernel compiles these
functions and the reference calls them as Python, so they may use nothing but numbers. Flags are compared with 0 because
Numba needs it.
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
"""The most and the least urgent queue, as plain integers: Numba cannot unify an Enum member with another number."""


@shared
def cube_root(value: float) -> float:
    """Return the cube root of ``value`` >= 0 by Newton's method. Unlike ``pow``, it is bit-exact on every machine."""
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
    """Return the initial slow-start threshold: the largest window; 0 for Swift and NDP, which have no slow start."""
    return 0.0 if t.kind in (TransportKind.SWIFT, TransportKind.NDP) else float(t.window_max)


@shared
def timeout_ps(s: Row, t: Row) -> Number:
    """Return the timeout (RFC 6298) in picoseconds, doubled after each timeout in a row; pFabric's is constant."""
    if t.kind == TransportKind.PFABRIC:
        return t.timeout_ps
    wait = s.rtt + 4 * s.rtt_var
    if wait < t.timeout_ps:
        wait = t.timeout_ps
    return wait << s.backoff


@shared
def measure_rtt(s: Row, t: Row, rtt: int) -> None:
    """Update the estimates with a round-trip time in picoseconds (RFC 6298, gains of 1/8 and 1/4)."""
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
    """Update the window after an acknowledgement of packet ``number``; ``limited``: the window was the limit."""
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
    """Grow the window in congestion avoidance (RFC 9438); ``alpha`` is its K in seconds."""
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
    """Shrink the window after the loss of packet ``number``: once for all packets that were in flight together."""
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
    """Shrink the window and back off after a timeout."""
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
    """Return whether the window limits the sender.

    In slow start, using half of the window counts: the link may be the limit, and growth must not stop (as in Linux).
    """
    reach = 2 * s.in_flight if s.window < s.threshold else s.in_flight + 1
    return reach >= int(s.window)


@shared
def leave_probe_mode(s: Row) -> None:
    """Send data instead of probes again (pFabric), after any answer."""
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
    """Return whether a stream with data to send has to wait for a PULL or for a reply to a probe."""
    return s.probe_mode != 0 or (t.kind == TransportKind.NDP and s.credit <= 0)


@shared
def queue_of(t: Row, m: Row, index: int) -> Number:
    """Return a packet's queue: its message's, or for PIAS by the bytes of the message before it."""
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
    """Restart the timeout and the tail probe timer of a stream, after something arrived."""
    s.deadline = now + timeout_ps(s, t)
    restart_tail_timer(s, t, now)


@shared
def restart_tail_timer(s: Row, t: Row, now: int) -> None:
    """Restart the tail probe timer of a stream, or stop it where no probe is allowed (RFC 8985, section 7.2)."""
    s.tail_due = FOREVER_PS
    if t.tail_probe != 0 and s.rtt > 0 and s.repairing == 0 and s.tail_probing == 0:
        s.tail_due = now + 2 * s.rtt


@shared
def has_enough(m: Row) -> Number:
    """Return whether a receiver's loss bound is met: it may do without the missing packets."""
    return m.protected == 0 and m.received >= m.required


@shared
def is_complete(t: Row, m: Row) -> Number:
    """Return whether a receiver needs no more packets: all have arrived, or the loss bound lets it stop now."""
    if m.received == m.packets:
        return True
    return m.bounded != 0 and (t.immediate != 0 or m.probed != 0) and has_enough(m)


@shared
def may_probe(m: Row) -> Number:
    """Return whether a sender has to probe the receiver: every packet is sent and answered, and holes remain."""
    if m.holes == 0 or m.satisfied != 0 or m.probing != 0:
        return False
    return m.in_flight == 0 and m.retransmits == 0 and m.next_index >= m.packets


@shared
def may_close(m: Row) -> Number:
    """Return whether a message is done and nothing refers to it any more.

    The rows of a closed graph are freed at once. So before that no packet or timer (``refs``), no transmission
    (``in_flight``, ``retransmits``) and no stream's list (``listed``) may refer to any of its messages.
    """
    if m.closed != 0 or m.done == 0 or m.refs != 0 or m.in_flight != 0 or m.retransmits != 0 or m.listed != 0:
        return False
    return m.acked >= m.packets or m.satisfied != 0
