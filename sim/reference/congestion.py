# SPDX-License-Identifier: Apache-2.0
"""How windows grow and shrink, a class for each kind. `dlcp.sim.transports` names the sources of the formulas."""

from collections.abc import Callable

from dlcp.sim.arithmetic import cube_root
from dlcp.sim.plan import (
    CUBIC_KEEP,
    CUBIC_SCALE,
    DLCP_BACKOFF_MAX,
    DLCP_LOSS_KEEP,
    TIMEOUT_BACKOFF_MAX,
    TransportKind,
    TransportRules,
)


class StreamWindow:
    """A window that never changes, and the round-trip times of a stream."""

    backoff_max = TIMEOUT_BACKOFF_MAX

    def __init__(self, transport: TransportRules) -> None:
        self.transport = transport
        self.packets = transport.window
        self.rtt_ps = self.variation_ps = self.rtt_min_ps = 0
        self.backoff = 0
        self.recover = 0
        self.probe_mode = False

    def timeout_ps(self) -> int:
        """Return the timeout (RFC 6298), doubled for each one in a row."""
        return max(self.rtt_ps + 4 * self.variation_ps, self.transport.timeout_ps) << self.backoff

    def measure_rtt(self, rtt_ps: int) -> None:
        """Take in a round-trip time (RFC 6298)."""
        if not self.rtt_ps:
            self.rtt_ps = self.rtt_min_ps = rtt_ps
            self.variation_ps = rtt_ps // 2
            return
        difference = rtt_ps - self.rtt_ps
        self.rtt_ps += difference // 8
        self.variation_ps += (abs(difference) - self.variation_ps) // 4
        self.rtt_min_ps = min(self.rtt_min_ps, rtt_ps)

    def is_limit(self, in_flight: int) -> bool:
        """Return whether the window is what holds packets back, with so many in flight."""
        return in_flight + 1 >= int(self.packets)

    def on_ack(self, number: int, marked: bool, rtt_ps: int, now_ps: int, limited: bool, sent: int) -> None:
        """Packet ``number`` of the ``sent`` ones was acknowledged."""

    def on_loss(self, number: int, now_ps: int, sent: int) -> None:
        """Packet ``number`` was lost."""

    def leave_probe_mode(self) -> None:
        """Send data instead of probes again."""
        if self.probe_mode:
            self.probe_mode, self.backoff = False, 0

    def on_timeout(self, sent: int) -> None:
        """Take in that nothing arrived for a whole timeout."""
        self.recover = sent
        self.backoff = min(self.backoff_max, self.backoff + 1)


class NewRenoStreamWindow(StreamWindow):
    """NewReno."""

    keep = 0.5

    def __init__(self, transport: TransportRules) -> None:
        super().__init__(transport)
        self.threshold = transport.window_max

    def is_limit(self, in_flight: int) -> bool:
        """Return whether the window holds packets back. In slow start the link may, which must not stop the growth."""
        return (2 * in_flight if self.packets < self.threshold else in_flight + 1) >= int(self.packets)

    def on_ack(self, number: int, marked: bool, rtt_ps: int, now_ps: int, limited: bool, sent: int) -> None:
        """Grow, but not while packets are acknowledged that were in flight together with a lost one."""
        if not limited or number < self.recover:
            return
        if self.packets < self.threshold:
            self.packets = min(self.transport.window_max, self.packets + 1.0)
        else:
            self.avoid(now_ps)

    def avoid(self, now_ps: int) -> None:
        """Grow in congestion avoidance."""
        self.packets = min(self.transport.window_max, self.packets + 1.0 / self.packets)

    def on_loss(self, number: int, now_ps: int, sent: int) -> None:
        """Shrink once for all packets that were in flight together."""
        if number >= self.recover:
            self.recover = sent
            self.cut(now_ps)

    def cut(self, now_ps: int) -> None:
        """Halve."""
        self.packets = max(2.0, self.packets / 2.0)
        self.threshold = self.packets

    def on_timeout(self, sent: int) -> None:
        """Start over."""
        super().on_timeout(sent)
        self.threshold = max(2.0, self.packets * self.keep)
        self.packets = 1.0


class CubicStreamWindow(NewRenoStreamWindow):
    """CUBIC."""

    keep = CUBIC_KEEP

    def __init__(self, transport: TransportRules) -> None:
        super().__init__(transport)
        self.peak = self.reno = self.inflection_s = 0.0
        self.epoch_ps: int | None = None

    def avoid(self, now_ps: int) -> None:
        """Grow along the cubic, or as Reno where that is more."""
        if self.epoch_ps is None:
            self.epoch_ps, self.reno = now_ps, self.packets
            self.peak = max(self.peak, self.packets)
            self.inflection_s = cube_root((self.peak - self.packets) / CUBIC_SCALE)
        since_s = (now_ps - self.epoch_ps + self.rtt_ps) * 1e-12 - self.inflection_s
        target = CUBIC_SCALE * since_s * since_s * since_s + self.peak
        self.reno += 3.0 * (1.0 - self.keep) / (1.0 + self.keep) / self.packets
        goal = max(target, self.reno)
        if goal > self.packets:
            step = min((goal - self.packets) / self.packets, 0.5)
            self.packets = min(self.transport.window_max, self.packets + step)

    def cut(self, now_ps: int) -> None:
        """Shrink, and leave room for new flows if the window had not come back to its last peak."""
        self.peak = self.packets * (1.0 + self.keep) / 2.0 if self.packets < self.peak else self.packets
        self.packets = max(1.0, self.packets * self.keep)
        self.threshold = max(2.0, self.packets)
        self.epoch_ps = None

    def on_timeout(self, sent: int) -> None:
        """Start over."""
        self.peak = self.packets
        super().on_timeout(sent)
        self.epoch_ps = None


class DctcpStreamWindow(NewRenoStreamWindow):
    """DCTCP."""

    def __init__(self, transport: TransportRules) -> None:
        super().__init__(transport)
        self.alpha = 1.0
        self.acked = self.marked = 0
        self.round_end = self.reduced = 0

    def on_ack(self, number: int, marked: bool, rtt_ps: int, now_ps: int, limited: bool, sent: int) -> None:
        """Average the marked share over rounds, and shrink by half of it once a round."""
        self.acked += 1
        self.marked += marked
        if number >= self.round_end:
            gain = self.transport.gain
            self.alpha = self.alpha * (1.0 - gain) + gain * (self.marked / self.acked)
            self.acked = self.marked = 0
            self.round_end = sent
        if not marked:
            super().on_ack(number, marked, rtt_ps, now_ps, limited, sent)
        elif number >= self.reduced:
            self.packets = max(1.0, self.packets * (1.0 - self.alpha / 2.0))
            self.threshold = self.packets
            self.reduced = sent


class DlcpStreamWindow(DctcpStreamWindow):
    """DLCP: a lost packet is a signal of congestion, not a fault, and a silence may be a wait in a lower queue."""

    backoff_max = DLCP_BACKOFF_MAX

    def cut(self, now_ps: int) -> None:
        """Shrink by a quarter."""
        self.packets = max(1.0, self.packets * DLCP_LOSS_KEEP)
        self.threshold = self.packets

    def on_timeout(self, sent: int) -> None:
        """Halve."""
        StreamWindow.on_timeout(self, sent)
        self.packets = max(1.0, self.packets / 2.0)
        self.threshold = self.packets


class PFabricStreamWindow(NewRenoStreamWindow):
    """pFabric: as TCP, with a timeout that stays as it is, and probes instead of data after several of them."""

    def timeout_ps(self) -> int:
        """Return the timeout, which never backs off."""
        return self.transport.timeout_ps

    def on_timeout(self, sent: int) -> None:
        """Start over, or go into probe mode."""
        super().on_timeout(sent)
        self.probe_mode = self.probe_mode or self.backoff >= self.transport.probe_mode_after


class SwiftStreamWindow(StreamWindow):
    """Swift."""

    def __init__(self, transport: TransportRules) -> None:
        super().__init__(transport)
        self.cut_at_ps = 0

    def on_ack(self, number: int, marked: bool, rtt_ps: int, now_ps: int, limited: bool, sent: int) -> None:
        """Grow below the target delay, shrink above it in proportion, once a round trip."""
        t = self.transport
        target = t.target_ps or 2 * self.rtt_min_ps
        if rtt_ps < target:
            if limited:
                self.packets = min(t.window_max, self.packets + t.additive / self.packets)
        elif now_ps - self.cut_at_ps >= self.rtt_ps:
            late = (rtt_ps - target) / rtt_ps
            self.packets = max(1.0, self.packets * max(1.0 - t.beta * late, 1.0 - t.decrease_max))
            self.cut_at_ps = now_ps

    def on_loss(self, number: int, now_ps: int, sent: int) -> None:
        """Shrink as far as one step may."""
        if number < self.recover:
            return
        self.recover = sent
        if now_ps - self.cut_at_ps >= self.rtt_ps:
            self.packets = max(1.0, self.packets * (1.0 - self.transport.decrease_max))
            self.cut_at_ps = now_ps

    def on_timeout(self, sent: int) -> None:
        """Shrink as far as one step may."""
        super().on_timeout(sent)
        self.packets = max(1.0, self.packets * (1.0 - self.transport.decrease_max))


WINDOWS: dict[TransportKind, Callable[[TransportRules], StreamWindow]] = {
    TransportKind.NEW_RENO: NewRenoStreamWindow,
    TransportKind.CUBIC: CubicStreamWindow,
    TransportKind.DCTCP: DctcpStreamWindow,
    TransportKind.SWIFT: SwiftStreamWindow,
    TransportKind.PIAS: DctcpStreamWindow,
    TransportKind.PFABRIC: PFabricStreamWindow,
    TransportKind.NDP: StreamWindow,
    TransportKind.DLCP: DlcpStreamWindow,
}
