# SPDX-License-Identifier: Apache-2.0
"""How windows grow and shrink. `dlcp.sim.transports` names the sources of the formulas."""

from dlcp.sim.arithmetic import cube_root as _cube_root
from dlcp.sim.kernel.jit import call
from dlcp.sim.kernel.state import Number, Row
from dlcp.sim.plan import (
    CUBIC_KEEP,
    CUBIC_SCALE,
    DLCP_BACKOFF_MAX,
    DLCP_LOSS_KEEP,
    TIMEOUT_BACKOFF_MAX,
    TransportKind,
)

cube_root = call(_cube_root)


@call
def timeout_ps(s: Row, t: Row) -> Number:
    """Return the timeout (RFC 6298), doubled for each one in a row; pFabric's stays as it is."""
    if t.kind == TransportKind.PFABRIC:
        return t.timeout_ps
    wait = s.rtt + 4 * s.rtt_var
    if wait < t.timeout_ps:
        wait = t.timeout_ps
    return wait << s.backoff


@call
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


@call
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


@call
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


@call
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


@call
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
