# SPDX-License-Identifier: Apache-2.0
"""DCTCP's window, extended by delay and by losses, for queues of its own and for those that TCP fills."""

import math
from typing import NamedTuple

from dlcp.transport.congestion import INITIAL_WINDOW_PACKETS, Report
from dlcp.transport.cubic import CubicWindow
from dlcp.transport.idle_path import BASE_MEMORY_S, DELAY_MIN_S, IdlePath, Round
from dlcp.transport.random_loss import Finding, RandomLoss

SMALLEST_JOB_WINDOW_PACKETS = 9.0
SMALLEST_WINDOW_PACKETS = 3.0
"""What a job keeps on the way to a rank at least, divided among its senders, and the most that one of them keeps.

Packets over the job's share wait below all other traffic and hold their place in the window meanwhile, so a smaller
window would leave the share unused. Chosen by us.
"""
ROUND_PACKETS_MIN, ROUND_PART = 4, 0.9
"""A round is of this part of a window: growing by an eighth, it is larger than what was on the way. A smaller window is
judged over four packets: of fewer, none or all are marked. Chosen by us."""
CALM_ROUNDS_MAX, PATIENCE_ROUNDS = 2, 5
"""Each round without congestion doubles the growth: the first two, and all after the fifth, as TIMELY's
hyper-active increase begins after five (SIGCOMM 2015)."""
LOSS_CUT = 0.25
"""A loss beside marks shrinks the window by this share, or by the share lost if that is more. Chosen by us:
CUBIC has 0.3. In proportion to the losses alone, flows would lose as much as they grew, and never become equal."""
COLLAPSE = 0.5
"""So many losses are congestion wherever they come from, once the queue is contested. Chosen by us."""
GENTLE = 8
"""A window grows by an eighth at most, else each increase would overshoot. Chosen by us."""
ROUNDS_MAX = 16
"""Growth for at most this many rounds in one report. Chosen by us."""
START_GROWTH_MAX = 3
"""While starting, a window grows to four times at most in one report, however much was delivered. Chosen by us."""
START_MARKED = 0.25
"""The start is over once this share of a round is marked: less comes of a start's own bursts. Chosen by us."""
DELAY_BETA = 0.8
DELAY_CUT_MAX = 0.5
"""How a window shrinks with delay, and by how much at most in one round; as in Swift (SIGCOMM 2020)."""
LATE = 1.25
"""What was on the way when a window shrank is known so many round trips later: the last loss of it is found a quarter
of a round trip after its acknowledgement would have come (RACK, RFC 8985)."""
TRIAL_CUT_MIN = 0.15
"""A smaller decrease shows nothing. Chosen by us."""
OURS_MIN = 0.5
"""A queue is this flow's if sending less shortens it by this part at least of what it would if no others sent. Chosen
by us: a flow that has less than half of a port loses its share to those that fill the buffer, as Vegas does; one that
has more can drain it. Copa (NSDI 2018) and Nimbus (SIGCOMM 2022) choose between two such modes, too."""
REGAINED_QUEUED, REGAINED_IDLE = 0.925, 1.25
"""A contested queue is tried again once the window is so large, in terms of what it was before the last loss: with a
queue that could be this flow's, when three quarters of what CUBIC gave way by are regained; without one, when CUBIC is
far beyond its plateau, which says that others are gone. Chosen by us."""
PAUSE_ROUNDS, PAUSE_MIN_S = 2, 0.01
"""After so long without a report, others may be gone, too. The second is how far apart reports are without hurry."""
RESTART_PART = 1 / 4
"""A flow begins with this part of its window after a pause if losses have shrunk the window lately, that is, within the
time for which the idle path is remembered. Chosen by us: two round trips later it has the whole window again."""
PROBE_PART = 0.75
"""To see the idle path again, a flow keeps this part of what it holds on the way; BBRv2 keeps half."""


class Trial(NamedTuple):
    """Less is sent, to see whether that shortens the queue: the window, and times, that were before."""

    window: float
    rtt_s: float
    back_s: float
    """How much of it acknowledgements have waited."""


class DctcpWindow:
    """Window control in proportion to what is marked, lost or late; DCTCP's rule (RFC 8257), extended.

    Three signs of congestion shrink the window, once a round (a window's worth of packets):

    - marks, by half the marked share, averaged;
    - losses: where a queue stands, what the path does not lose anyway; else only if they cease when less is sent
      (:class:`RandomLoss`), for to bounded loss a lost gradient packet is a signal rather than a fault;
    - delay of several milliseconds, but not below what the path has been seen to carry.

    It grows while it holds packets back: by what is delivered at first, then by ``weight`` a round, and faster the
    longer nothing is congested.

    A decrease for delay is undone if it does not shorten the queue: then others fill it, whom it would only give way
    to. From then on, and from a loss in an unmarked queue on, the queue is contested, and the window goes by losses
    alone as theirs does (:class:`CubicWindow`), until it has regained what it lost; then delay is tried again.

    Where losses shrank it lately it begins again with a part whenever a message begins after a pause (:meth:`restart`).
    A whole window at once would find the queue full of what others keep there, packet by packet: flows that pause would
    lose their shares to those that do not.

    What was on the way when a window shrank does not shrink it again. Where marks keep queues short that are longer
    than the path, it may: that is how many flows that begin at once find their shares.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as, 0 to 1.
    heed_delay
        False where delay says nothing of this flow's own queue, because others keep a buffer behind the priority
        queues full.
    """

    GAIN = 1 / 8
    """Weight of the newest window in the average; RFC 8257 has 1/16. Chosen by us: training steps are short."""
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
        """How long this round is of packets that were on the way when the window shrank; 0: it is not."""
        self._trial: Trial | None = None
        self._probed = 0.0
        """The window after the idle path was looked at, 0 if it is not."""
        self._cubic: CubicWindow | None = None
        """Moves the window while the queue is contested."""
        self._regained = math.inf
        """The window before the last loss in a contested queue."""
        self._was_full = False
        self._reported_s = 0.0
        self._overflowed_s = -math.inf
        """When losses last shrank the window."""

    @property
    def contested(self) -> bool:
        """Whether the queue is filled by others, so that only losses count."""
        return self._cubic is not None

    @property
    def slow_start(self) -> bool:
        """See :class:`RateControl`: at first, after a silence, and while losses are tried out."""
        return self._starting or self._random.trying or self.window < self._resume_at

    @property
    def _initial(self) -> float:
        return max(2.0, INITIAL_WINDOW_PACKETS * self.weight)

    @property
    def _smallest(self) -> float:
        return min(SMALLEST_WINDOW_PACKETS, SMALLEST_JOB_WINDOW_PACKETS * self.weight)

    def on_report(self, report: Report) -> None:
        """Take in one report; the window shrinks at most once a round."""
        self._timeouts = 0
        if report.now_s - self._reported_s > max(PAUSE_MIN_S, report.smoothed_rtt_s) * PAUSE_ROUNDS:
            self._regained = min(self._regained, self.window)
            if self._path.base_s > DELAY_MIN_S and not self._starting:
                # A whole window leaves at once, which a short queue may not hold, however well the path does.
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
        """Grow by what is delivered: at first, and after a silence."""
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
            # Losses of packets that were sent into the place of many lost ones belong to the same event.
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
        # The packets that a start has on the way have not shown yet how long they wait.
        if self.window < before * (1 - TRIAL_CUT_MIN) and not self._starting:
            self._trial = Trial(before, report.smoothed_rtt_s, self._path.back_s)
        self._starting = False

    def _share_of_queue(self, trial: Trial, rtt_s: float) -> float:
        """Return by how much the way there became shorter, where 1 is by what it would have if no others sent."""
        before_s = trial.rtt_s - trial.back_s
        alone_s = max(self._path.base_s, before_s - trial.rtt_s * (1 - self.window / trial.window))
        return (before_s - (rtt_s - self._path.back_s)) / (before_s - alone_s) if before_s > alone_s else 1.0

    def _enter_contest(self, window: float, rtt_s: float, report: Report) -> None:
        """Go by losses alone, from a window, or from what was on the way in a round trip if that is less.

        A start has doubled its window since then.
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
        # Where no queue stands, and as much is lost as ever, losses are not the others' doing.
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
        # Bursts of others end as suddenly as they begin: what is free for longer is taken faster.
        if wary:
            self._calm_rounds = 0
            return self.weight
        doublings = min(self._calm_rounds, CALM_ROUNDS_MAX) + max(0, min(self._calm_rounds, 64) - PATIENCE_ROUNDS)
        self._calm_rounds += 1
        return min(self.weight * 2.0**doublings, max(self.weight, self.window / GENTLE))

    def restart(self, now_s: float) -> bool:
        """See :meth:`RateControl.restart`: it grows by what is delivered until it is what it was."""
        still = self._starting or self._random.trying or self.contested
        whole = max(self.window, self._resume_at)
        part = max(self._initial, whole * RESTART_PART)
        if still or self.window <= part or now_s - self._overflowed_s > BASE_MEMORY_S:
            return False
        self._resume_at, self.window = whole, part
        return True

    def on_timeout(self) -> None:
        """Halve the window if this is the second time in a row: one question or answer may have been lost at random."""
        self._timeouts += 1
        if self._timeouts > 1:
            self._cubic = self._trial = None
            self._resume_at = max(self._resume_at, self.window / 2)
            self.window = max(self._smallest, self.window / 2)
