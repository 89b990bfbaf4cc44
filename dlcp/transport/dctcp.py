# SPDX-License-Identifier: Apache-2.0
"""DCTCP's window, extended by delay and loss, for its own queues and for queues that TCP fills."""

import math
from typing import NamedTuple

from dlcp.transport.congestion import INITIAL_WINDOW_PACKETS, Report
from dlcp.transport.cubic import CubicWindow
from dlcp.transport.idle_path import BASE_MEMORY_S, DELAY_MIN_S, IdlePath, Round
from dlcp.transport.random_loss import Finding, RandomLoss

SMALLEST_JOB_WINDOW_PACKETS = 9.0
SMALLEST_WINDOW_PACKETS = 3.0
"""The fewest packets that a job keeps in flight to a rank, divided among its senders; also the largest minimum of one
sender.

Packets over the job's share wait below all other traffic and occupy the window meanwhile, so a smaller window would
leave the share unused. Not tuned.
"""
ROUND_PACKETS_MIN, ROUND_PART = 4, 0.9
"""A round covers this part of a window: after growing by an eighth, the window exceeds what was in flight. Smaller
windows use rounds of four packets: of fewer, often all or none are marked."""
CALM_ROUNDS_MAX, PATIENCE_ROUNDS = 2, 5
"""Growth doubles in each of the first two rounds without congestion, and in each after the fifth. TIMELY's hyper-active
increase begins after five, too (SIGCOMM 2015)."""
LOSS_CUT = 0.25
"""A loss in a marking queue shrinks the window by this share, or by the share lost if that is more. CUBIC uses 0.3.
With a decrease proportional to losses alone, flows would lose as much as they grew, and never converge to equal
shares."""
COLLAPSE = 0.5
"""In a contested queue, this share of losses counts as congestion, regardless of its cause. Not tuned."""
GENTLE = 8
"""A window grows by at most an eighth; larger increases would overshoot."""
ROUNDS_MAX = 16
"""Growth for at most this many rounds in one report. Not tuned."""
START_GROWTH_MAX = 3
"""In slow start, a window grows at most fourfold in one report. Not tuned."""
START_MARKED = 0.25
"""Slow start ends once this share of a round is marked: its own bursts mark less."""
DELAY_BETA = 0.8
DELAY_CUT_MAX = 0.5
"""The decrease of a window with delay, and the most in one round; as in Swift (SIGCOMM 2020)."""
LATE = 1.25
"""After this many round trips, the fate of all packets in flight at a decrease is known: the last loss is found a
quarter of a round trip after its acknowledgement was expected (RACK, RFC 8985)."""
TRIAL_CUT_MIN = 0.15
"""The effect of a smaller decrease cannot be measured. Not tuned."""
OURS_MIN = 0.5
"""A queue belongs to this flow if sending less shortens it by at least this part of the effect expected without other
flows. A flow with less than half of a port loses its share to flows that fill the buffer, as Vegas does; one with more
can drain the queue. Copa (NSDI 2018) and Nimbus (SIGCOMM 2022) choose between two such modes, too."""
REGAINED_QUEUED, REGAINED_IDLE = 0.925, 1.25
"""A contested queue is tested again once the window reaches this multiple of its size before the last loss. The first
applies to a queue that may be this flow's: CUBIC has then regained three quarters of its decrease. The second applies
without a queue: CUBIC is then far beyond its plateau, so the other flows must be gone."""
PAUSE_ROUNDS, PAUSE_MIN_S = 2, 0.01
"""Time without a report after which other flows may be gone, too. The second is the usual spacing of reports."""
RESTART_PART = 1 / 4
"""After a pause, a flow begins with this part of its window if losses have shrunk it within the time for which the idle
path is remembered. Two round trips later it has the whole window again."""
PROBE_PART = 0.75
"""To measure the idle path again, a flow keeps this part of its packets in flight; BBRv2 keeps half."""


class Trial(NamedTuple):
    """A trial of sending less, to find out whether that shortens the queue: the earlier window and delays."""

    window: float
    rtt_s: float
    back_s: float
    """The part of ``rtt_s`` in which acknowledgements queued."""


class DctcpWindow:
    """Window control in proportion to marks, losses and delay; extends DCTCP's rule (RFC 8257).

    Three signs of congestion shrink the window, once a round (a window's worth of packets):

    - marks, by half the smoothed share of marked packets;
    - losses: with a standing queue, those beyond the path's random loss; without one, only if they cease at a lower
      rate (:class:`RandomLoss`), since bounded loss tolerates lost gradient packets;
    - delay of several milliseconds, but not below the window that the path is known to carry.

    While the window limits sending, it grows: at first by all delivered packets, then by ``weight`` per round, and
    faster the longer there is no congestion.

    A decrease for delay is undone if it does not shorten the queue, because other flows then fill it, and this one
    would only yield to them. From then on, and after a loss in an unmarked queue, the queue is contested: the window
    reacts to losses alone, as theirs do (:class:`CubicWindow`), until it has regained what it lost. Then delay is tried
    again.

    If losses shrank the window recently, a message after a pause starts with a part of it (:meth:`restart`). A whole
    window at once would meet a queue that other flows keep full, so flows that pause would lose their shares to flows
    that do not.

    Packets in flight at a decrease do not shrink the window again. Marks are an exception if the marking threshold
    exceeds the path's capacity: many flows that begin together then find their shares.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as, 0 to 1.
    heed_delay
        False if delay says nothing about this flow's own queue, because others keep a buffer behind the priority queues
        full.
    """

    GAIN = 1 / 8
    """Weight of the newest window in the average. RFC 8257 uses 1/16; training steps are too short for that."""
    ecn_capable = True

    def __init__(self, weight: float = 1.0, *, heed_delay: bool = True) -> None:
        self.weight = weight
        self._heed_delay = heed_delay
        self.window = self._initial
        self._fraction = 0.0
        self._starting = True
        self._calm_rounds = 0
        self._growth = 0.0
        self._former = 0.0
        self._timeouts = 0
        self._resume_at = 0.0
        self._path = IdlePath()
        self._random = RandomLoss()
        self._round = Round(0.0)
        self._round_packets = max(self.window, ROUND_PACKETS_MIN)
        self._aftermath_s = 0.0
        """Length of a round whose packets were in flight at a decrease, in seconds; 0 in other rounds."""
        self._trial: Trial | None = None
        self._probed = 0.0
        """The window to return to once the idle path has been measured; 0 if it is not being measured."""
        self._cubic: CubicWindow | None = None
        """Sets the window while the queue is contested."""
        self._regained = math.inf
        """The window before the last loss in a contested queue."""
        self._was_full = False
        self._reported_s = 0.0
        self._overflowed_s = -math.inf
        """The time when losses last shrank the window."""

    @property
    def contested(self) -> bool:
        """Whether other flows fill the queue, so that only losses count."""
        return self._cubic is not None

    @property
    def slow_start(self) -> bool:
        """See :class:`RateControl`: at first, after silence, and during a trial of losses."""
        return self._starting or self._random.trying or self.window < self._resume_at

    @property
    def _initial(self) -> float:
        return max(2.0, INITIAL_WINDOW_PACKETS * self.weight)

    @property
    def _smallest(self) -> float:
        return min(SMALLEST_WINDOW_PACKETS, SMALLEST_JOB_WINDOW_PACKETS * self.weight)

    def on_report(self, report: Report) -> None:
        """Process one report; the window shrinks at most once a round."""
        self._timeouts = 0
        if report.now_s - self._reported_s > max(PAUSE_MIN_S, report.smoothed_rtt_s) * PAUSE_ROUNDS:
            self._regained = min(self._regained, self.window)
            if self._path.base_s > DELAY_MIN_S and not self._starting:
                # A whole window leaves at once, and a short queue may overflow even on a good path.
                self._round, self._aftermath_s = Round(report.now_s), LATE * report.smoothed_rtt_s
        self._reported_s = report.now_s
        if report.limited:
            self._grow(report)
        self._round.add(report)
        if self._aftermath_s:
            over = report.now_s - self._round.began_s >= self._aftermath_s
        else:
            over = self._round.packets >= ROUND_PART * self._round_packets
        if over and self._round.packets >= ROUND_PACKETS_MIN:
            self._end_round(report)
            self._round = Round(report.now_s)
            self._round_packets = max(self.window, ROUND_PACKETS_MIN)

    def _grow(self, report: Report) -> None:
        if self._cubic:
            self._cubic.weight = self.weight
            self._cubic.grow(report)
            self.window = max(self._smallest, self._cubic.window)
            return
        self._start(report)
        rounds = min(ROUNDS_MAX, (report.delivered + report.lost) / self._round_packets)
        self.window += self._growth * rounds

    def _start(self, report: Report) -> None:
        """Grow by all delivered packets: at first, and after silence."""
        growth = min(max(0, report.delivered - 2 * report.marked), START_GROWTH_MAX * self.window)
        if self._starting and not self._random.trying:
            self.window += growth
        elif self.window < self._resume_at:
            self.window = min(self._resume_at, self.window + growth)
        else:
            self._resume_at = 0.0

    def _end_round(self, report: Report) -> None:
        finished, before = self._round, self.window
        delay_s = self._path.add(finished, report.now_s, keep=self.contested) if self._heed_delay else 0.0
        if self._aftermath_s:
            self._aftermath_s = 0.0
            if self._trial:
                self._trial = self._trial._replace(rtt_s=max(self._trial.rtt_s, report.smoothed_rtt_s))
            if not self._cubic:
                self._growth = self._next_growth(wary=True)
            return
        if self._cubic:
            self._contest(self._cubic, report, delay_s)
        elif self._trial and self._share_of_queue(self._trial, finished.rtt_s) < OURS_MIN:
            self._enter_contest(self._trial.window, self._trial.rtt_s, report)
        else:
            self._trial, self.window, self._probed = None, max(self.window, self._probed), 0.0
            self._finish_round(report, delay_s)
        if finished.lost and self.window < before and not self._random.trying:
            self._overflowed_s = report.now_s
        brief = finished.marked and self._path.base_s > DELAY_MIN_S and not self._path.queued(delay_s)
        if self.window < before and (brief or self._trial or self._cubic or not self._heed_delay):
            # Packets sent in place of many lost ones may be lost too: that is the same event.
            rounds = 2 if finished.lost > LOSS_CUT * finished.packets else 1
            self._aftermath_s = rounds * LATE * max(report.smoothed_rtt_s, report.rtt_s)

    def _finish_round(self, report: Report, delay_s: float) -> None:
        finished, before = self._round, self.window
        full = self._path.may_be_full(delay_s, report.smoothed_rtt_s)
        self._heed_marks(finished)
        unexplained = not self._random.explains(finished.packets, finished.lost)
        if finished.marked or full:
            self._starting &= not self._random.trying
            self._random.abandon()
            if unexplained and self._heed_delay and not finished.marked:
                self._enter_contest(self.window, finished.rtt_s, report)
                self._yield(report)
                return
            if unexplained:
                self._shrink(max(LOSS_CUT, finished.lost / finished.packets))
        else:
            self._heed_silent_losses(finished, report)
        if self.window == before and delay_s > self._path.allowed_s:
            self._drain(delay_s, report)
        calm = self.window >= before
        if not calm:
            self._calm_rounds = 0
            self._resume_at *= self.window / before
        wary = finished.marked > 0 or unexplained or self._path.queued(delay_s)
        self._growth = self._next_growth(wary) if calm and not self._starting and not self._random.trying else 0.0

    def _heed_marks(self, finished: Round) -> None:
        fraction = finished.marked / finished.packets
        if self._starting:
            self._fraction = fraction
        else:
            self._fraction += self.GAIN * (fraction - self._fraction)
        if fraction and not (self._starting and fraction < START_MARKED):
            self._shrink(self._fraction / 2)

    def _heed_silent_losses(self, finished: Round, report: Report) -> None:
        finding = self._random.judge(finished.packets, finished.lost, self.window, starting=self._starting)
        if finding is Finding.CONSPICUOUS:
            self._former = self.window
            self.window = max(self._smallest, self.window * (1 - self._random.cut))
        elif finding is Finding.RANDOM:
            self.window = max(self.window, self._former)
        elif finding is Finding.CONGESTION:
            self._starting, self._overflowed_s = False, report.now_s

    def _shrink(self, share: float) -> None:
        self._starting = False
        self.window = max(self._smallest, self.window * (1 - share))

    def _drain(self, delay_s: float, report: Report) -> None:
        before, allowed_s = self.window, self._path.allowed_s
        carried = self._path.carried + self._path.rate * allowed_s
        least = before * (1 - min(DELAY_CUT_MAX, DELAY_BETA * (1 - allowed_s / delay_s)))
        if self._path.fading(report.now_s):
            least, carried = 0.0, PROBE_PART * self._path.carried
            self._probed = self._path.carried + self._path.rate * allowed_s / 2
        self.window = max(self._smallest, min(before, carried), least)
        # It is not known yet how long the packets of a slow start will queue.
        if self.window < before * (1 - TRIAL_CUT_MIN) and not self._starting:
            self._trial = Trial(before, report.smoothed_rtt_s, self._path.back_s)
        self._starting = False

    def _share_of_queue(self, trial: Trial, rtt_s: float) -> float:
        """Return the decrease of the forward delay, relative to that expected without other flows."""
        before_s = trial.rtt_s - trial.back_s
        alone_s = max(self._path.base_s, before_s - trial.rtt_s * (1 - self.window / trial.window))
        return (before_s - (rtt_s - self._path.back_s)) / (before_s - alone_s) if before_s > alone_s else 1.0

    def _enter_contest(self, window: float, rtt_s: float, report: Report) -> None:
        """React to losses alone, from ``window`` or from the packets in flight per round trip if these are fewer.

        Slow start has doubled its window since then.
        """
        carried = max(self._path.rate * rtt_s, window / 2) if self._path.rate else window
        self.window = max(self._smallest, min(window, carried))
        self._starting, self._trial, self._probed = False, None, 0.0
        self._random.abandon()
        self._path.meet(report.now_s)
        self._cubic, self._regained = CubicWindow(self.weight), math.inf
        self._cubic.resume(self.window)

    def _contest(self, cubic: CubicWindow, report: Report, delay_s: float) -> None:
        finished = self._round
        full, self._was_full = self._was_full, self._path.may_be_full(delay_s, report.smoothed_rtt_s)
        queued = delay_s > self._path.allowed_s
        if not self._random.explains(finished.packets, finished.lost) and (
            full or self._was_full or finished.lost > COLLAPSE * finished.packets
        ):
            self._yield(report)
            return
        # Without a standing queue and with no more losses than usual, the losses are not due to other flows.
        idle = not self._path.queued(self._path.average_s(report.smoothed_rtt_s))
        lossy = idle and self._random.watch(finished.packets, finished.lost)
        regained = self.window >= self._regained * (REGAINED_QUEUED if queued else REGAINED_IDLE)
        if lossy or (regained and (queued or not self._was_full)):
            self._cubic, self._growth = None, self.weight

    def _yield(self, report: Report) -> None:
        assert self._cubic
        self._regained = self._cubic.window = self.window
        self._cubic.back_off(report.now_s, report.smoothed_rtt_s)
        self.window = self._cubic.window = max(self._smallest, self._cubic.window)

    def _next_growth(self, wary: bool) -> float:
        # Other flows' bursts end as suddenly as they begin: capacity that stays free is claimed faster.
        if wary:
            self._calm_rounds = 0
            return self.weight
        doublings = min(self._calm_rounds, CALM_ROUNDS_MAX) + max(0, min(self._calm_rounds, 64) - PATIENCE_ROUNDS)
        self._calm_rounds += 1
        return min(self.weight * 2.0**doublings, max(self.weight, self.window / GENTLE))

    def restart(self, now_s: float) -> bool:
        """See :meth:`RateControl.restart`: the window grows by all delivered packets until it has its old size."""
        still = self._starting or self._random.trying or self.contested
        whole = max(self.window, self._resume_at)
        part = max(self._initial, whole * RESTART_PART)
        if still or self.window <= part or now_s - self._overflowed_s > BASE_MEMORY_S:
            return False
        self._resume_at, self.window = whole, part
        return True

    def on_timeout(self) -> None:
        """Halve the window on the second timeout in a row: one probe or answer may have been lost at random."""
        self._timeouts += 1
        if self._timeouts > 1:
            self._cubic = self._trial = None
            self._resume_at = max(self._resume_at, self.window / 2)
            self.window = max(self._smallest, self.window / 2)
