# SPDX-License-Identifier: Apache-2.0
"""Decisions that both engines share: congestion windows, timers, queues, and when a message is complete.

`dlcp.sim.transports.specs` names the sources of the formulas. ``s`` is a stream, ``t`` the rules of its transport,
``m`` a message: rows of the kernel's arrays, or objects of the reference with the same field names. The kernel compiles
these functions and the reference calls them as Python, so they may use nothing but numbers. Flags are compared with 0
because Numba needs it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from dlcp.sim.engines.jit import shared
from dlcp.sim.engines.plan import OWN_KIND, PROFILE_CELLS, BufferScope, Discipline, TransportKind
from dlcp.sim.engines.rows import Row
from dlcp.sim.limits import FOREVER_PS, TIMER_MAX_PS
from dlcp.sim.transports.plugins import OWN_DISCIPLINES, OWN_TRANSPORTS
from dlcp.wire import Queue

TIMEOUT_BACKOFF_MAX: Final = 6
"""Most doublings of a timeout; not tuned."""
DLCP_BACKOFF_MAX: Final = 1
"""The same for DLCP, where no answer may only mean that a stream waits in a lower queue. With six doublings, some steps
took 20 ms longer; see `sim/experiments/README.md`."""
CUBIC_SCALE: Final = 0.4
"""C of RFC 9438, packets per second cubed."""
CUBIC_KEEP: Final = 0.7
"""beta of RFC 9438: the share of the window that remains after a loss."""
DLCP_LOSS_KEEP: Final = 0.75
"""The share of DLCP's window that remains after a loss: 1 - `dlcp.transport.dctcp.LOSS_CUT`."""
RCCC_PULL_PERCENT: Final = 99
"""The share of a link's rate for which RCCC's receiver gives credit."""
# Constants of NSCC, `NsccTransport`; those in packets are for the reference network and grow with the product of a
# network's rate and base round trip.
NSCC_REFERENCE_RTT_PS: Final = 12_000_000
NSCC_FAIR_PACKETS: Final = 5.0
"""Growth in packets for each acknowledged window when the delay is above the target and nothing is marked."""
NSCC_PROPORTIONAL_PACKETS: Final = 4.0
"""The same for a delay that is 12 us below the target."""
NSCC_FAST_SHARE: Final = 0.25
"""Growth for each acknowledged packet after a window without delay."""
NSCC_FAST_DELAY_PS: Final = 1_000_000
"""A shorter delay counts as none."""
NSCC_STEADY_PACKETS: Final = 0.15
"""Growth in each base round trip."""
NSCC_ADJUST_PACKETS: Final = 8
"""Growth is applied after more packets than this, or after a base round trip."""
NSCC_ADAPT_DELAY: Final = 4
"""Quick adapt needs a trimmed packet, or a delay above this multiple of the target."""
NSCC_ADAPT_SHARE: Final = 8
"""Quick adapt needs fewer arrivals than the largest window divided by this."""
URGENT_QUEUE, EXCESS_QUEUE = int(Queue.CONTROL), int(Queue.EXCESS)
"""The most and the least urgent queue, as plain integers: Numba cannot unify an Enum member with another number."""

PULL_QUEUED, SPARE_PULL_QUEUED = 1, 2
"""Bits of a stream's ``pulling``: the queues of PULLs at its receiver that it waits in (RCCC)."""


# ------------------------------------------------------------------------------------------- what other packages bring


def by_kind(rules: Iterable[Callable[..., Any] | None]) -> Callable[..., Any]:
    """Return a function of a kind and more values, which calls the rule of the kind, or returns 0 if it has none."""
    chosen: Callable[..., Any] = _no_rule
    for kind, rule in enumerate(rules, OWN_KIND):
        if rule is not None:
            chosen = _either(kind, shared(rule), chosen)
    return chosen


@shared
def _no_rule(_kind: int, *_values: int) -> int:
    return 0


def _either(kind: int, rule: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @shared
    def decide(number: int, *values: int) -> int:
        return rule(*values) if number == kind else other(number, *values)

    return decide


def own_rules(name: str) -> Callable[..., Any]:
    """Return `by_kind` for the rules of this name of other packages' transports: it returns 1 if there was one."""

    def handled(rule: Callable[..., Any]) -> Callable[..., Any]:
        compiled = shared(rule)

        @shared
        def handle(*values: int) -> int:
            compiled(*values)
            return 1

        return handle

    found = (getattr(transport, name) for transport in OWN_TRANSPORTS)
    return by_kind(rule and handled(rule) for rule in found)


own_on_ack, own_on_loss, own_on_timeout = map(own_rules, ("on_ack", "on_loss", "on_timeout"))
own_admission = by_kind(discipline.admit for discipline in OWN_DISCIPLINES.values())


# -------------------------------------------------------------------------------------------------- congestion windows


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


@shared
def first_threshold(t: Row) -> float:
    """Return the initial slow-start threshold: the largest window; 0 for transports that have no slow start."""
    steady = (TransportKind.SWIFT, TransportKind.NDP, TransportKind.NSCC, TransportKind.RCCC)
    return 0.0 if t.kind in steady else float(t.max_window_packets)


@shared
def timeout_ps(s: Row, t: Row) -> int:
    """Return the timeout (RFC 6298) in picoseconds, doubled after each timeout in a row; pFabric's is constant.

    With nothing in flight, an RCCC sender waits for credit, which takes longer.
    """
    if t.kind == TransportKind.PFABRIC:
        return t.min_timeout_ps
    if t.kind == TransportKind.RCCC and s.in_flight == 0:
        return t.credit_timeout_ps << s.backoff
    wait = s.rtt + 4 * s.rtt_var
    if wait < t.min_timeout_ps:
        wait = t.min_timeout_ps
    if wait > TIMER_MAX_PS:
        wait = TIMER_MAX_PS
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
        if (t.kind == TransportKind.SWIFT or t.kind >= OWN_KIND) and rtt < s.rtt_min:
            s.rtt_min = rtt


@shared
def on_ack(s: Row, t: Row, marked: int, rtt: int, number: int, now: int, limited: int) -> None:
    """Update the window after an acknowledgement of packet ``number``; ``limited``: the window was the limit.

    ``marked`` is whether the packet was marked, ``rtt`` its round-trip time and ``now`` the time, in picoseconds.
    """
    if t.kind == TransportKind.NDP or (
        t.kind >= OWN_KIND and own_on_ack(t.kind, s, t, marked, rtt, number, now, limited) != 0
    ):
        return
    if t.kind == TransportKind.RCCC:
        stop_speculating(s)
        return
    if t.step_gap_ps != 0:
        follow_step(s, t, now)
    if t.kind == TransportKind.SWIFT:
        follow_delay(s, t, rtt, now, limited)
        return
    if t.kind == TransportKind.NSCC:
        follow_signals(s, t, marked, rtt, now)
        return
    if t.ecn != 0:
        follow_marks(s, t, marked, number)
        if marked != 0:
            return
    if limited == 0 or number < s.recover:
        return
    if s.window < s.threshold:
        s.window = min(t.max_window_packets, s.window + 1.0)
    elif t.kind == TransportKind.CUBIC:
        grow_cubic(s, t, now)
    else:
        s.window = min(t.max_window_packets, s.window + eagerness(s, t) / s.window)


@shared
def follow_step(s: Row, t: Row, now: int) -> None:
    """Count the packets of a training step, which begins after a pause (MLTCP)."""
    if s.step_acked != 0 and now - s.acked_at >= t.step_gap_ps:
        s.step_packets = s.step_acked
        s.step_acked = 0
    s.step_acked += 1
    s.acked_at = now


@shared
def eagerness(s: Row, t: Row) -> int:
    """Return the factor on the window's growth: for MLTCP, it grows with the share of the step that has been sent.

    A stream's first step counts its packets, so it has the factor 1.
    """
    if s.step_packets == 0:
        return 1.0
    return t.slope * min(1.0, s.step_acked / s.step_packets) + t.intercept


@shared
def follow_marks(s: Row, t: Row, marked: int, number: int) -> None:
    """Average the share of marked packets, and shrink the window by it once per round trip with marks (RFC 8257)."""
    s.acked += 1
    s.marked += marked
    if number >= s.round_end:
        s.alpha = s.alpha * (1.0 - t.gain) + t.gain * (s.marked / s.acked)
        s.acked = 0
        s.marked = 0
        s.round_end = s.number
    if marked != 0 and number >= s.reduced:
        s.window = max(1.0, s.window * (1.0 - s.alpha / 2.0))
        s.threshold = s.window
        s.reduced = s.number


@shared
def follow_delay(s: Row, t: Row, rtt: int, now: int, limited: int) -> None:
    """Grow the window below Swift's target delay; above it, shrink it in proportion, once per round trip."""
    target = t.target_ps
    if target == 0:
        target = 2 * s.rtt_min
    if rtt < target:
        if limited != 0:
            s.window = min(t.max_window_packets, s.window + t.additive_packets / s.window)
    elif now - s.cut_at >= s.rtt:
        late = (rtt - target) / rtt
        s.window = max(1.0, s.window * max(1.0 - t.beta * late, 1.0 - t.max_decrease))
        s.cut_at = now


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
        s.window = min(t.max_window_packets, s.window + min((goal - s.window) / s.window, 0.5))


@shared
def follow_signals(s: Row, t: Row, marked: int, rtt: int, now: int) -> None:
    """Follow the delay and the mark of an acknowledged packet, by their four combinations (NSCC).

    Without a mark the window grows: in proportion to the room below the target delay, or fairly above it. A mark alone
    only means that its path is busy. A mark and a delay above the target shrink the window, once per round trip.
    """
    update_base_rtt(s, t, rtt)
    delay = rtt - s.base_rtt
    late = delay >= t.target_ps
    # A late packet without a mark has left a queue that has drained since.
    average_delay(s, t, 0.25 * s.base_rtt if marked == 0 and delay > t.target_ps else delay)
    s.arrived += 1
    s.arrived_since += 1
    s.ignoring = max(0, s.ignoring - 1)
    if adapt_quickly(s, t, marked, delay > NSCC_ADAPT_DELAY * t.target_ps, now):
        return
    scale = t.scale * t.payload / (t.payload + t.header_bytes)  # the constants are packets without headers
    if marked == 0 and late:
        s.growth += NSCC_FAIR_PACKETS * scale
    elif marked == 0 and not grow_fast(s, t, delay):
        s.growth += NSCC_PROPORTIONAL_PACKETS * scale * (t.target_ps - delay) / NSCC_REFERENCE_RTT_PS
    elif marked != 0 and late:
        shrink_late(s, t, now)
    bound_window(s, t)
    since = now - s.grown_at
    if s.arrived_since > NSCC_ADJUST_PACKETS or since > t.base_rtt_ps:
        s.window += s.growth / s.window
        if since >= t.base_rtt_ps:
            s.window += NSCC_STEADY_PACKETS * scale
            s.grown_at = now
        s.growth = 0.0
        s.arrived_since = 0
    bound_window(s, t)


@shared
def shrink_late(s: Row, t: Row, now: int) -> None:
    """Shrink the window by the average delay's share above the target, once per round trip (NSCC)."""
    s.fast = 0
    s.undelayed = 0
    if s.mean_delay > t.target_ps and now - s.cut_at > s.base_rtt:
        above = (s.mean_delay - t.target_ps) / s.mean_delay
        s.window *= max(1.0 - t.beta * above, t.max_decrease)
        s.cut_at = now


@shared
def update_base_rtt(s: Row, t: Row, rtt: int) -> None:
    """Keep a stream's shortest round trip (NSCC)."""
    if s.base_rtt == 0:
        s.base_rtt = t.base_rtt_ps
    s.base_rtt = min(s.base_rtt, rtt)


@shared
def average_delay(s: Row, t: Row, delay: int) -> None:
    """Add a delay to the average (NSCC)."""
    s.mean_delay += t.gain * (delay - s.mean_delay)


@shared
def bound_window(s: Row, t: Row) -> None:
    """Keep the window between one packet and the largest, which is smaller on a shorter path (NSCC)."""
    s.window = max(1.0, min(s.window, largest_window(s, t)))


@shared
def largest_window(s: Row, t: Row) -> int:
    """Return a stream's largest window: its path's share of the longest path's (NSCC)."""
    return t.max_window_packets * s.base_rtt / t.base_rtt_ps


@shared
def grow_fast(s: Row, t: Row, delay: int) -> int:
    """Grow by a share of every packet once a whole window has met no delay; return whether that is so (NSCC)."""
    if delay >= NSCC_FAST_DELAY_PS:
        s.fast = 0
        s.undelayed = 0
        return False
    s.undelayed += 1
    s.fast = 1 if s.fast != 0 or s.undelayed > s.window else 0
    if s.fast != 0:
        s.window += NSCC_FAST_SHARE * t.scale
    return s.fast != 0


@shared
def adapt_quickly(s: Row, t: Row, marked: int, severe: bool, now: int) -> int:
    """Set the window to what has arrived in a round trip, if that is little and delays are severe (NSCC).

    Returns whether that was done, or whether a mark is to be ignored because its packet was sent before.
    """
    if marked != 0 and s.ignoring > 0:
        done = True
    else:
        done = False
        if now > s.adapt_at:
            few = s.arrived < largest_window(s, t) / NSCC_ADAPT_SHARE
            if s.adapt_at != 0 and (s.trimmed != 0 or severe) and few:
                s.window = max(1.0, float(s.arrived))
                s.ignoring = s.in_flight
                s.trimmed = 0
                done = True
            s.arrived = 0
            s.adapt_at = now + s.base_rtt + t.target_ps
    if done:
        s.growth = 0.0
        s.arrived_since = 0
    return done


@shared
def on_nack(s: Row, t: Row, rtt: int, now: int) -> None:
    """Shrink NSCC's window by a trimmed packet, whose NACK came after ``rtt``, unless quick adapt already has."""
    if t.kind == TransportKind.RCCC:
        stop_speculating(s)
    if t.kind != TransportKind.NSCC:
        return
    update_base_rtt(s, t, rtt)
    average_delay(s, t, t.base_rtt_ps)  # the queue was full, about a bandwidth-delay product
    s.ignoring = max(0, s.ignoring - 1)
    s.trimmed = 1
    if not adapt_quickly(s, t, 1, True, now):
        s.window -= 1.0
        bound_window(s, t)


@shared
def on_loss(s: Row, t: Row, number: int, now: int) -> None:
    """Shrink the window after the loss of packet ``number``: once for all packets that were in flight together."""
    kind = t.kind
    if kind == TransportKind.NSCC:
        s.window = max(1.0, s.window - 1.0)
        return
    if number < s.recover or is_credited(t):
        return
    s.recover = s.number
    if kind >= OWN_KIND and own_on_loss(kind, s, t, number, now) != 0:
        return
    if kind == TransportKind.SWIFT:
        if now - s.cut_at >= s.rtt:
            s.window = max(1.0, s.window * (1.0 - t.max_decrease))
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
    """Shrink the window and back off after a timeout.

    An NDP sender may send as much as it had in flight; an RCCC sender one packet, which asks for credit.
    """
    kind = t.kind
    s.recover = s.number
    s.tail_probing = 0
    s.spare = 0
    if s.backoff < (DLCP_BACKOFF_MAX if kind == TransportKind.DLCP else TIMEOUT_BACKOFF_MAX):
        s.backoff += 1
    if kind == TransportKind.NDP:
        s.credit += max(1, s.in_flight)
        return
    if kind == TransportKind.RCCC:
        s.credit = max(1, s.credit)
        return
    if kind >= OWN_KIND and own_on_timeout(kind, s, t) != 0:
        return
    if kind == TransportKind.PFABRIC and s.backoff >= t.probe_after_timeouts:
        s.probe_mode = 1
    if kind == TransportKind.DLCP:
        s.window = max(1.0, s.window / 2.0)
        s.threshold = s.window
    elif kind == TransportKind.SWIFT:
        s.window = max(1.0, s.window * (1.0 - t.max_decrease))
    elif kind == TransportKind.NSCC:
        s.window = max(1.0, s.window - s.in_flight)
    else:
        keep = CUBIC_KEEP if kind == TransportKind.CUBIC else 0.5
        s.threshold = max(2.0, s.window * keep)
        s.peak = s.window
        s.window = 1.0
        s.epoch = -1


@shared
def is_limited(s: Row) -> int:
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
def window_is_open(s: Row, t: Row) -> int:
    """Return whether a stream may have one more packet in flight."""
    if is_credited(t):
        return s.credit > 0
    return s.in_flight < int(s.window) + s.spare and s.probe_mode == 0


@shared
def needs_reply(s: Row, t: Row) -> int:
    """Return whether a stream with data to send has to wait for a PULL or for a reply to a probe."""
    return s.probe_mode != 0 or (is_credited(t) and s.credit <= 0)


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
def begin_tail_probe(s: Row, t: Row, now: int) -> None:
    """Allow one packet beyond the window. Its acknowledgement will show what was lost before it."""
    s.tail_probing = 1
    s.tail_number = s.number
    s.spare = 1
    restart_timers(s, t, now)


# -------------------------------------------------------------------------------------------------------------- packets


@shared
def protected_packets(zeros: int, count: int) -> int:
    """Return how many of ``count`` packets are in class 0, which has ``zeros`` cells of the drop-class profile."""
    return (zeros * count + PROFILE_CELLS // 2) // PROFILE_CELLS


@shared
def packet_bytes(t: Row, m: Row, index: int) -> int:
    """Return the size of a message's packet, headers included."""
    return t.header_bytes + (m.last_bytes if index == m.packets - 1 else t.payload)


@shared
def queue_of(t: Row, m: Row, index: int) -> int:
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
def packet_hash(s: Row, t: Row, m: Row, index: int, number: int, retransmission: int) -> int:
    """Return the path hash of a stream's packet ``number``. A retransmission gets another path than before.

    Ultra Ethernet's entropies take turns, in an order that changes each time: all of them, exclusive-or one that is
    drawn by Fibonacci hashing.
    """
    if t.sprayed == 0:
        return s.path_hash
    if t.entropies == 0:
        return sprayed_hash(s.path_hash, index + m.step + retransmission)
    order = (((s.path_hash + number // t.entropies) * 40503) & 0xFFFF) * t.entropies >> 16
    return sprayed_hash(s.path_hash, (number ^ order) & (t.entropies - 1))


@shared
def sprayed_hash(path_hash: int, number: int) -> int:
    """Return the hash that chooses a sprayed packet's path: its flow's plus its number, as in p4/v1model/route.p4."""
    return (path_hash + number) & 0xFFFFFFFF


@shared
def on_send(s: Row, t: Row, m: Row, now: int) -> None:
    """Count a packet as in flight, and restart the stream's timers.

    The timeout starts with the oldest packet in flight. Acknowledgements restart it; further packets do not.
    """
    s.number += 1
    s.spare = 0
    s.in_flight += 1
    if s.in_flight == 1:
        restart_timers(s, t, now)
    else:
        restart_tail_timer(s, t, now)
    if is_credited(t):
        s.credit -= 1
    add_backlog(s, t, -1)
    m.in_flight += 1
    m.sent += 1
    m.refs += 1


@shared
def is_credited(t: Row) -> int:
    """Return whether a receiver's PULLs, not a window, let senders send."""
    return t.kind in (TransportKind.NDP, TransportKind.RCCC)


@shared
def grant_first_window(s: Row, t: Row, m: Row) -> None:
    """Let a sender send the first window without PULLs: of a message with NDP, after a pause with RCCC."""
    if t.kind == TransportKind.NDP:
        m.pulls = min(int(t.initial_window_packets), m.packets)
        s.credit += m.pulls
    elif t.kind == TransportKind.RCCC:
        if s.backlog == 0 and s.in_flight == 0:
            s.credit = int(t.initial_window_packets)
            s.speculating = 1
        elif s.backlog == 0:
            s.credit = max(1, s.credit)  # for a packet that asks for more
        add_backlog(s, t, m.packets)


@shared
def add_backlog(s: Row, t: Row, packets: int) -> None:
    """Add packets to those that a sender needs credit for (RCCC)."""
    if t.kind == TransportKind.RCCC:
        s.backlog += packets


@shared
def stop_speculating(s: Row) -> None:
    """Give up credit that the receiver has not given: it has answered (RCCC)."""
    if s.speculating != 0:
        s.speculating = 0
        s.credit = 0


@shared
def wanted_credit(s: Row, t: Row) -> int:
    """Return the pull target that a packet carries: how many packets of credit its sender wants in total (RCCC)."""
    wanted = min(s.backlog, int(t.max_window_packets)) - s.credit
    if s.speculating != 0 and s.backlog > 0:
        wanted = max(1, wanted)
    return s.pulled + wanted


@shared
def may_pull(s: Row, t: Row, m: Row, wanted: int, trimmed: int) -> int:
    """Return whether a receiver has to queue a PULL, after a packet with the pull target ``wanted``.

    NDP needs a PULL for each packet of a message. An RCCC stream has one PULL in the queue as long as it needs credit,
    which it also does for a packet that was trimmed.
    """
    if t.kind == TransportKind.NDP:
        if m.pulls >= m.packets + m.trims:
            return False
        m.pulls += 1
        return True
    if t.kind != TransportKind.RCCC:
        return False
    s.asked = max(s.asked, wanted) + trimmed
    if s.pulling & PULL_QUEUED or s.asked <= s.granted:
        return False
    s.pulling |= PULL_QUEUED
    return True


@shared
def give_credit(s: Row, t: Row, spare: int) -> int:
    """Count the credit of a PULL that leaves, and return it in packets.

    A ``spare`` one gives an RCCC sender credit that it has not asked for, because nobody asks.
    """
    if t.kind == TransportKind.NDP:
        return 1
    credit = t.credit_packets if spare != 0 else min(t.credit_packets, s.asked - s.granted)
    s.granted += credit
    return credit


@shared
def queue_after_pull(s: Row, t: Row, spare: int) -> int:
    """Return the queue for a stream's next PULL after one left the queue ``spare``, or -1.

    An RCCC receiver queues another as long as credit is wanted. Then it queues spare ones, for a window more.
    """
    if t.kind == TransportKind.NDP:
        return -1
    s.pulling &= SPARE_PULL_QUEUED if spare == 0 else PULL_QUEUED
    if s.asked > s.granted:
        wanted = PULL_QUEUED
    elif s.granted - s.asked < int(t.max_window_packets):
        wanted = SPARE_PULL_QUEUED
    else:
        return -1
    if s.pulling & wanted:
        return -1
    s.pulling |= wanted
    return wanted - 1


@shared
def credit_ps(t: Row, credit: int, packet_ps: int) -> int:
    """Return the time from a PULL with ``credit`` to the next one; ``packet_ps`` is a packet's time on the link."""
    if t.kind == TransportKind.NDP:
        return packet_ps
    return credit * packet_ps * 100 // RCCC_PULL_PERCENT


@shared
def on_pull(s: Row, t: Row, granted: int) -> None:
    """Take the credit of a PULL; RCCC's have all that was ``granted`` so far, so that a lost one does no harm."""
    if t.kind == TransportKind.NDP:
        s.credit += 1
        return
    stop_speculating(s)
    if granted > s.pulled:
        s.credit = min(s.credit + granted - s.pulled, int(t.max_window_packets))
        s.pulled = granted


# ------------------------------------------------------------------------------------------------------------- messages


@shared
def has_enough(m: Row) -> int:
    """Return whether a receiver's loss bound is met: it may do without the missing packets."""
    return m.protected == 0 and m.received >= m.required


@shared
def is_complete(t: Row, m: Row) -> int:
    """Return whether a receiver needs no more packets: all have arrived, or the loss bound lets it stop now."""
    if m.received == m.packets:
        return True
    return m.bounded != 0 and (t.immediate != 0 or m.probed != 0) and has_enough(m)


@shared
def may_probe(m: Row) -> int:
    """Return whether a sender has to probe the receiver: every packet is sent and answered, and holes remain."""
    if m.holes == 0 or m.satisfied != 0 or m.probing != 0:
        return False
    return m.in_flight == 0 and m.retransmits == 0 and m.next_index >= m.packets


@shared
def on_probe(s: Row, t: Row, m: Row, now: int) -> None:
    """Wait for a receiver's reply to a probe, and schedule the next probe in case none comes."""
    m.probing = 1
    m.probe_at = now + (timeout_ps(s, t) << m.probe_backoff)


@shared
def on_probe_timeout(s: Row, t: Row, m: Row, now: int) -> None:
    """Back off if no reply has come, and allow another probe."""
    if m.probing != 0 and m.probe_backoff < TIMEOUT_BACKOFF_MAX:
        m.probe_backoff += 1
    m.probing = 0
    m.probe_at = now + timeout_ps(s, t)


@shared
def on_probe_reply(s: Row, t: Row, m: Row, satisfied: int) -> int:
    """Stop if the receiver needs no more, otherwise send the holes again. A pFabric flow leaves probe mode.

    Returns whether the message has to be put into its stream's list again.
    """
    m.probing = 0
    m.probe_backoff = 0
    if satisfied != 0:
        m.satisfied = 1
    if t.kind == TransportKind.PFABRIC:
        leave_probe_mode(s)
        return False
    if m.satisfied != 0:
        return False
    m.filling_holes = 1
    m.next_index = 0
    return m.listed == 0


@shared
def may_close(m: Row) -> int:
    """Return whether a message is done and nothing refers to it any more.

    The rows of a closed graph are freed at once. So before that no packet or timer (``refs``), no transmission
    (``in_flight``, ``retransmits``) and no stream's list (``listed``) may refer to any of its messages.
    """
    if m.closed != 0 or m.done == 0 or m.refs != 0 or m.in_flight != 0 or m.retransmits != 0 or m.listed != 0:
        return False
    return m.acked >= m.packets or m.satisfied != 0


# ------------------------------------------------------------------------------------------------------------- switches


@shared
def is_full(rules: Row, queue_packets: int, queue_bytes: int, port_bytes: int, switch_bytes: int, size: int) -> int:
    """Return whether a queue has no room for ``size`` bytes, given what waits in it, at its port, and in its switch.

    With DLCP an empty queue always has room: the program assumes that a tail-dropped packet has others before it.
    """
    if rules.discipline == Discipline.DLCP and queue_packets == 0:
        return False
    if rules.discipline == Discipline.PFABRIC:
        return queue_packets >= rules.limit_packets
    limit = rules.limit_bytes
    if rules.buffer == BufferScope.QUEUE:
        return queue_bytes + size > limit
    if rules.buffer == BufferScope.PORT:
        return port_bytes + size > limit
    free = limit - switch_bytes
    return size > free or (port_bytes + size) * 1024 > rules.alpha_1024 * free
