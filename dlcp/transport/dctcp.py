# SPDX-License-Identifier: Apache-2.0
"""DCTCP's window, extended by delay and loss, for its own queues and for queues that TCP fills.

:class:`IdlePath` finds the delay of the path without queues. :class:`RandomLoss` tells random loss from congestion.
:class:`DctcpWindow` sets the window from both and from marks.
"""

import math
from collections import deque
from enum import Enum
from typing import NamedTuple

from dlcp.transport.congestion import INITIAL_WINDOW_PACKETS, CubicWindow, Report

# The idle path -------------------------------------------------------------------------------------------------------

QUEUE_MIN_S, QUEUE_PART = 0.0012, 1 / 16
"""A round has met a standing queue if its minimum round trip exceeds the idle path's by both of these. The first is
slightly more than the delay of an acknowledgement: less is indistinguishable from wake-up times of a busy host. The
second is well below the shallowest sensible buffer of a long path, a fifth of its bandwidth-delay product."""
FULL_PART = 0.5
"""If packets have queued for at least this part of the longest recent delay, a buffer may have been full, so a loss is
congestion. Below it, the buffer has held more packets without a loss. Loss differentiation by round trips (Spike,
mBiaz; Cen et al., ToN 2003) has such thresholds."""
DELAY_MIN_S, DELAY_PART = 0.005, 1 / 4
"""More delay than both of these is congestion, even without losses or marks: CoDel's target (RFC 8289), and on long
paths room for bursts (LEDBAT++ allows 60 ms on any path)."""
BASE_MEMORY_S, BASE_MEMORY_ROUNDS = 10.0, 50
"""The minimum time for which the minimum round-trip time is remembered: BBR's window, or this many round trips if a
deep queue makes them long."""
RATE_MEMORY_ROUNDS = 10
"""Rounds for which the highest rate is remembered; BBR's window."""


class Round:
    """Feedback on about a window of packets."""

    __slots__ = ("began_s", "delivered", "lost", "marked", "one_way_s", "rtt_s")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.delivered = self.marked = self.lost = 0
        self.rtt_s, self.one_way_s = 0.0, math.inf

    @property
    def packets(self) -> int:
        """Packets acknowledged or lost."""
        return self.delivered + self.lost

    def add(self, report: Report) -> None:
        """Add one report."""
        self.delivered += report.delivered
        self.marked += report.marked
        self.lost += report.lost
        if report.rtt_s and (not self.rtt_s or report.rtt_s < self.rtt_s):
            self.rtt_s = report.rtt_s
        self.one_way_s = min(self.one_way_s, report.one_way_s)


class IdlePath:
    """A path's round-trip time without queues, and its recent throughput.

    Attributes
    ----------
    rate
        Highest rate in packets/s of the last ``RATE_MEMORY_ROUNDS`` rounds, as BBR estimates bandwidth.
    back_s
        The queueing time of acknowledgements in the last round, if one-way delays are known.
    """

    def __init__(self) -> None:
        self._shortest_s = [math.inf, math.inf]
        self._quickest_s = [math.inf, math.inf]
        """Minimum one-way delay in the older and in the newer half of the memory."""
        self._longest_s = [0.0, 0.0]
        """Longest round-trip time without queueing on the way back, in the same order."""
        self._memory_s = BASE_MEMORY_S
        self._renewed_s = self._met_s = 0.0
        self._rates: deque[float] = deque(maxlen=RATE_MEMORY_ROUNDS)
        self.back_s = 0.0

    @property
    def base_s(self) -> float:
        """Minimum RTT over the last one to two windows, in seconds; 0 if there was none."""
        base_s = min(self._shortest_s)
        return 0.0 if base_s == math.inf else base_s

    @property
    def rate(self) -> float:
        """Return the rate in packets/s; 0 before the first round."""
        return max(self._rates, default=0.0)

    @property
    def carried(self) -> float:
        """Packets in flight at that rate with empty queues."""
        return self.rate * (self.base_s + self.back_s)

    @property
    def allowed_s(self) -> float:
        """The largest acceptable delay."""
        return max(DELAY_MIN_S, self.base_s * DELAY_PART)

    def add(self, finished: Round, now_s: float, *, keep: bool) -> float:
        """Add a round; return the excess of its minimum forward delay over the idle path's.

        Without one-way delays, this includes the way back.

        With ``keep``, nothing is forgotten, because other flows never let the queue become empty.
        """
        if now_s > finished.began_s:
            self._rates.append(finished.delivered / (now_s - finished.began_s))
        if keep:
            self._renewed_s += now_s - finished.began_s
            self._met_s += now_s - finished.began_s
        if not finished.rtt_s:
            return 0.0
        self._memory_s = max(BASE_MEMORY_S, BASE_MEMORY_ROUNDS * finished.rtt_s)
        if now_s - self._renewed_s > self._memory_s:
            self._shortest_s = [self._shortest_s[1], math.inf]
            self._quickest_s = [self._quickest_s[1], math.inf]
            self._longest_s = [self._longest_s[1], 0.0]
            self._renewed_s = now_s
        self._shortest_s[1] = min(self._shortest_s[1], finished.rtt_s)
        delay_s, self.back_s = finished.rtt_s - self.base_s, 0.0
        if finished.one_way_s < math.inf:
            self._quickest_s[1] = min(self._quickest_s[1], finished.one_way_s)
            self.back_s = max(0.0, delay_s - (finished.one_way_s - min(self._quickest_s)))
            delay_s -= self.back_s
        self._longest_s[1] = max(self._longest_s[1], finished.rtt_s - self.back_s)
        if delay_s < QUEUE_PART * self.base_s:
            self._met_s = now_s
        return delay_s

    def meet(self, now_s: float) -> None:
        """Restart the memory of the idle path's round-trip time."""
        self._met_s = now_s

    def average_s(self, smoothed_rtt_s: float) -> float:
        """Return the excess of the average forward delay over the idle path's."""
        return smoothed_rtt_s - self.base_s - self.back_s

    def queued(self, delay_s: float) -> bool:
        """Return whether a round with this delay has met a standing queue."""
        return delay_s > max(QUEUE_MIN_S, self.base_s * QUEUE_PART)

    def may_be_full(self, delay_s: float, smoothed_rtt_s: float) -> bool:
        """Return whether that queue may have filled its buffer.

        On a long path a queue fills and drains within a round, so the average counts, too.
        """
        if self.base_s > DELAY_MIN_S:
            delay_s = max(delay_s, self.average_s(smoothed_rtt_s))
        return self.queued(delay_s) and delay_s > (max(self._longest_s) - self.base_s) * FULL_PART

    def fading(self, now_s: float) -> bool:
        """Return whether the idle path's round-trip time will soon be forgotten."""
        return now_s - self._met_s > self._memory_s / 2


# Random loss ---------------------------------------------------------------------------------------------------------

TOLERATED = 0.02
"""The share of losses without a standing queue that is ignored, as in BBR (BBRLossThresh)."""
BASELINE_MAX = 0.38
"""A larger share is never considered random. The lossiest path in our tests loses 30 %."""
_BLOCK_PACKETS = 32
"""The fewest packets over which losses are judged. Not tuned."""
CALM_BLOCK_PACKETS = 256
"""Packets without conspicuous losses after which a new block begins. Not tuned."""
DEVIATIONS = 3.0
"""Losses are conspicuous if they exceed the expected number by this many standard deviations. It is high because a
block is tested every round."""
DWELL_PACKETS = 128
"""Packets that pass before and during a trial, so that other flows can begin theirs. Not tuned."""
CUT_MIN = 0.3
"""The smallest reduction of the send rate in a trial: CUBIC's decrease (RFC 9438), so that others notice."""
QUICK_LOSSES, THOROUGH_LOSSES = 8, 32
"""A trial lasts until this many losses would be expected; the first value while the window is still being found."""
QUICK_REMAINDER, THOROUGH_REMAINDER = 0.5, 0.75
"""Losses are random if at least this part of them remains. With 8 expected, fewer than half occur in one of 25 trials;
with 32 expected, fewer than three quarters in one of 13. With many flows at the port, one flow's decrease changes
little: 0.75 distinguishes congestion from chance with up to 8 flows and 10 % loss."""


class Finding(Enum):
    """Verdict on the losses of a round."""

    NOTHING = 0
    CONSPICUOUS = 1
    """More than usual: shrink the window by ``cut`` for a trial."""
    CONGESTION = 2
    """They decreased with the sending rate."""
    RANDOM = 3
    """They did not: restore the window."""


class RandomLoss:
    """The share of packets that a path loses at any send rate.

    Attributes
    ----------
    baseline
        The share, 0 to 1, as measured by a trial.
    cut
        Share by which a trial shrinks the window.
    trying
        Whether a trial is running: the window must not change.
    """

    def __init__(self) -> None:
        self.baseline = 0.0
        self.cut = 0.0
        self.trying = False
        self._usual = 0.0
        self._packets = 0
        self._lost = 0
        self._settling = 0.0
        self._before = 0.0
        self._window = 0.0

    def explains(self, packets: int, lost: int) -> bool:
        """Return whether the path's random loss explains ``lost`` of ``packets``."""
        expected = packets * max(self.baseline, min(self._usual, TOLERATED))
        return lost <= expected + DEVIATIONS * math.sqrt(expected)

    def judge(self, packets: int, lost: int, window: float, *, starting: bool) -> Finding:
        """Judge a round of packets without a standing queue.

        Parameters
        ----------
        packets, lost
            Packets acknowledged or lost, and the lost ones of them.
        window
            The current window.
        """
        if self._settling > 0:
            self._settling -= packets
            return Finding.NOTHING
        if lost and not self._lost:
            self._window = window
        self._packets += packets
        self._lost += lost
        if self.trying:
            return self._try(window, starting)
        if self._packets < _BLOCK_PACKETS:
            return Finding.NOTHING
        expected = self._packets * (self.baseline + TOLERATED)
        if self._lost > expected + DEVIATIONS * math.sqrt(expected):
            return self._begin(window, starting)
        if self._packets >= CALM_BLOCK_PACKETS:
            self._usual = self._lost / self._packets
            # Losses at any time include the path's random ones, so these cannot be more.
            self.baseline = min(self.baseline, (self._lost + DEVIATIONS * math.sqrt(self._lost + 1)) / self._packets)
            self._packets = self._lost = 0
        return Finding.NOTHING

    def watch(self, packets: int, lost: int) -> bool:
        """Add packets that met no queue although it is contested; return whether too many of them are lost."""
        self._packets += packets
        self._lost += lost
        if self._packets >= CALM_BLOCK_PACKETS:
            self._usual = self._lost / self._packets
            self._packets = self._lost = 0
        return self._usual > TOLERATED

    def abandon(self) -> None:
        """Forget the block and end any trial: with a standing queue, losses say nothing about the path."""
        self._packets = self._lost = 0
        self._settling = 0.0
        self.trying = False

    def _begin(self, window: float, starting: bool) -> Finding:
        self._before = self._lost / self._packets
        self.abandon()
        self.trying = True
        # The window has grown since the first loss: the trial must send less than then.
        self.cut = 1 - (1 - max(CUT_MIN, self._before - self.baseline)) * min(1.0, self._window / window)
        self._settling = window if starting else max(window, DWELL_PACKETS)
        return Finding.CONSPICUOUS

    def _try(self, window: float, starting: bool) -> Finding:
        least, losses, part = (
            (_BLOCK_PACKETS, QUICK_LOSSES, QUICK_REMAINDER)
            if starting
            else (DWELL_PACKETS, THOROUGH_LOSSES, THOROUGH_REMAINDER)
        )
        if self._packets < max(least, window, losses / self._before):
            return Finding.NOTHING
        loss = self._lost / self._packets
        before = self._before - self.baseline
        remainder = loss - self.baseline
        self.abandon()
        if part * before <= remainder <= before / part and loss < BASELINE_MAX:
            self.baseline = loss
            return Finding.RANDOM
        self.baseline = min(self.baseline, loss) if loss < BASELINE_MAX else 0.0
        return Finding.CONGESTION


# The window ----------------------------------------------------------------------------------------------------------

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


class Rounds:
    """The division of feedback into rounds.

    Attributes
    ----------
    current
        The round in progress.
    packets
        The window when it began.
    aftermath_s
        Its length in seconds, if its packets were in flight at a decrease; 0 in other rounds, which last for a window.
    """

    def __init__(self, window: float) -> None:
        self.aftermath_s = 0.0
        self.begin(0.0, window)

    def begin(self, now_s: float, window: float) -> None:
        """Begin a round."""
        self.current, self.packets = Round(now_s), max(window, ROUND_PACKETS_MIN)

    def is_over(self, now_s: float) -> bool:
        """Return whether the current round has all its packets."""
        if self.aftermath_s:
            over = now_s - self.current.began_s >= self.aftermath_s
        else:
            over = self.current.packets >= ROUND_PART * self.packets
        return over and self.current.packets >= ROUND_PACKETS_MIN


class Growth:
    """Growth of the window while there is no congestion.

    Attributes
    ----------
    per_round
        Packets.
    """

    def __init__(self) -> None:
        self.per_round = 0.0
        self._calm_rounds = 0

    def restart(self) -> None:
        """Note congestion."""
        self._calm_rounds = 0

    def accelerate(self, weight: float, window: float) -> None:
        """Grow faster after each round without congestion: capacity that stays free is claimed faster.

        Other flows' bursts end as suddenly as they begin.
        """
        doublings = min(self._calm_rounds, CALM_ROUNDS_MAX) + max(0, min(self._calm_rounds, 64) - PATIENCE_ROUNDS)
        self._calm_rounds += 1
        self.per_round = min(weight * 2.0**doublings, max(weight, window / GENTLE))


class Drain:
    """Decreases of the window that let the queue drain, and trials that show whether they do.

    Attributes
    ----------
    trial
        The trial in progress.
    probed
        The window to return to once the idle path has been measured; 0 if it is not being measured.
    """

    def __init__(self) -> None:
        self.trial: Trial | None = None
        self.probed = 0.0

    def end(self) -> None:
        """End the trial and the measurement."""
        self.trial, self.probed = None, 0.0

    def lowered(self, window: float, delay_s: float, path: IdlePath, report: Report) -> float:
        """Return a smaller window: no less than the path carries, unless its idle round trip has to be measured."""
        allowed_s = path.allowed_s
        carried = path.carried + path.rate * allowed_s
        least = window * (1 - min(DELAY_CUT_MAX, DELAY_BETA * (1 - allowed_s / delay_s)))
        if path.fading(report.now_s):
            least, carried = 0.0, PROBE_PART * path.carried
            self.probed = path.carried + path.rate * allowed_s / 2
        return max(min(window, carried), least)

    def begin_trial(self, before: float, window: float, path: IdlePath, report: Report) -> None:
        """Try whether a decrease from ``before`` shortens the queue, if it is large enough to be measured."""
        if window < before * (1 - TRIAL_CUT_MIN):
            self.trial = Trial(before, report.smoothed_rtt_s, path.back_s)

    def is_in_vain(self, window: float, rtt_s: float, path: IdlePath) -> bool:
        """Return whether the trial's decrease has shortened the queue by too little: others fill it."""
        trial = self.trial
        if trial is None:
            return False
        before_s = trial.rtt_s - trial.back_s
        alone_s = max(path.base_s, before_s - trial.rtt_s * (1 - window / trial.window))
        # The decrease of the forward delay, relative to that expected without other flows.
        share = (before_s - (rtt_s - path.back_s)) / (before_s - alone_s) if before_s > alone_s else 1.0
        return share < OURS_MIN


class Contest:
    """A queue that other flows fill: losses alone set the window, as they set theirs (:class:`CubicWindow`)."""

    def __init__(self) -> None:
        self._cubic: CubicWindow | None = None
        """Sets the window while the queue is contested."""
        self._regained = math.inf
        """The window before the last loss."""
        self._was_full = False

    @property
    def active(self) -> bool:
        """Whether the queue is contested."""
        return self._cubic is not None

    def enter(self, weight: float, window: float) -> None:
        """Begin with a window."""
        self._cubic, self._regained = CubicWindow(weight), math.inf
        self._cubic.resume(window)

    def leave(self) -> None:
        """Let delay count again."""
        self._cubic = None

    def note_pause(self, window: float) -> None:
        """Test the queue again at a smaller window: the other flows may be gone."""
        self._regained = min(self._regained, window)

    def grown(self, weight: float, report: Report) -> float:
        """Return the window after deliveries."""
        assert self._cubic
        self._cubic.weight = weight
        self._cubic.grow(report)
        return self._cubic.window

    def shrunk(self, window: float, smallest: float, report: Report) -> float:
        """Return the window after a loss."""
        assert self._cubic
        self._regained = self._cubic.window = window
        self._cubic.back_off(report.now_s, report.smoothed_rtt_s)
        self._cubic.window = max(smallest, self._cubic.window)
        return self._cubic.window

    def loses(self, finished: Round, path: IdlePath, random: RandomLoss, delay_s: float, report: Report) -> bool:
        """Return whether a round's losses are congestion."""
        full, self._was_full = self._was_full, path.may_be_full(delay_s, report.smoothed_rtt_s)
        if random.explains(finished.packets, finished.lost):
            return False
        return full or self._was_full or finished.lost > COLLAPSE * finished.packets

    def is_over(
        self,
        window: float,
        finished: Round,
        path: IdlePath,
        random: RandomLoss,
        delay_s: float,
        report: Report,
    ) -> bool:
        """Return whether to react to delay again, after a round without congestion."""
        queued = delay_s > path.allowed_s
        # Without a standing queue and with no more losses than usual, the losses are not due to other flows.
        idle = not path.queued(path.average_s(report.smoothed_rtt_s))
        if idle and random.watch(finished.packets, finished.lost):
            return True
        regained = window >= self._regained * (REGAINED_QUEUED if queued else REGAINED_IDLE)
        return regained and (queued or not self._was_full)


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

    :class:`IdlePath`, :class:`RandomLoss`, :class:`Rounds`, :class:`Growth`, :class:`Drain` and :class:`Contest` hold
    the state of these rules. While the queue is contested, there is no slow start and no trial.

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
        self._path, self._random = IdlePath(), RandomLoss()
        self._rounds, self._growth = Rounds(self.window), Growth()
        self._drain, self._contest = Drain(), Contest()
        self._fraction = 0.0
        """Smoothed share of marked packets."""
        self._starting = True
        self._former = 0.0
        """The window before a trial of losses."""
        self._timeouts = 0
        self._resume_at = 0.0
        """The window up to which it grows by all delivered packets."""
        self._reported_s = 0.0
        self._overflowed_s = -math.inf
        """The time when losses last shrank the window."""

    @property
    def contested(self) -> bool:
        """Whether other flows fill the queue, so that only losses count."""
        return self._contest.active

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
        self._timeouts, rounds = 0, self._rounds
        if report.now_s - self._reported_s > max(PAUSE_MIN_S, report.smoothed_rtt_s) * PAUSE_ROUNDS:
            self._contest.note_pause(self.window)
            if self._path.base_s > DELAY_MIN_S and not self._starting:
                # A whole window leaves at once, and a short queue may overflow even on a good path.
                rounds.current, rounds.aftermath_s = Round(report.now_s), LATE * report.smoothed_rtt_s
        self._reported_s = report.now_s
        if report.limited:
            self._grow(report)
        rounds.current.add(report)
        if rounds.is_over(report.now_s):
            self._end_round(report)
            rounds.begin(report.now_s, self.window)

    def _grow(self, report: Report) -> None:
        if self.contested:
            self.window = max(self._smallest, self._contest.grown(self.weight, report))
            return
        self._start(report)
        count = min(ROUNDS_MAX, (report.delivered + report.lost) / self._rounds.packets)
        self.window += self._growth.per_round * count

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
        rounds, drain, before = self._rounds, self._drain, self.window
        finished = rounds.current
        delay_s = self._path.add(finished, report.now_s, keep=self.contested) if self._heed_delay else 0.0
        if rounds.aftermath_s:
            rounds.aftermath_s = 0.0
            if drain.trial:
                drain.trial = drain.trial._replace(rtt_s=max(drain.trial.rtt_s, report.smoothed_rtt_s))
            if not self.contested:
                self._set_growth(wary=True)
            return
        if self.contested:
            self._end_contested_round(finished, report, delay_s)
        elif drain.trial and drain.is_in_vain(self.window, finished.rtt_s, self._path):
            self._enter_contest(drain.trial.window, drain.trial.rtt_s, report)
        else:
            self.window = max(self.window, drain.probed)
            drain.end()
            self._finish_round(finished, report, delay_s)
        if finished.lost and self.window < before and not self._random.trying:
            self._overflowed_s = report.now_s
        brief = finished.marked and self._path.base_s > DELAY_MIN_S and not self._path.queued(delay_s)
        if self.window < before and (brief or drain.trial or self.contested or not self._heed_delay):
            # Packets sent in place of many lost ones may be lost too: that is the same event.
            count = 2 if finished.lost > LOSS_CUT * finished.packets else 1
            rounds.aftermath_s = count * LATE * max(report.smoothed_rtt_s, report.rtt_s)

    def _end_contested_round(self, finished: Round, report: Report, delay_s: float) -> None:
        contest, context = self._contest, (self._path, self._random, delay_s, report)
        if contest.loses(finished, *context):
            self.window = contest.shrunk(self.window, self._smallest, report)
        elif contest.is_over(self.window, finished, *context):
            contest.leave()
            self._growth.per_round = self.weight

    def _finish_round(self, finished: Round, report: Report, delay_s: float) -> None:
        before, full = self.window, self._path.may_be_full(delay_s, report.smoothed_rtt_s)
        self._heed_marks(finished)
        unexplained = not self._random.explains(finished.packets, finished.lost)
        if finished.marked or full:
            self._starting &= not self._random.trying
            self._random.abandon()
            if unexplained and self._heed_delay and not finished.marked:
                self._enter_contest(self.window, finished.rtt_s, report)
                self.window = self._contest.shrunk(self.window, self._smallest, report)
                return
            if unexplained:
                self._shrink(max(LOSS_CUT, finished.lost / finished.packets))
        else:
            self._heed_silent_losses(finished, report)
        if self.window == before and delay_s > self._path.allowed_s:
            self._let_drain(delay_s, report)
        calm = self.window >= before
        if not calm:
            self._growth.restart()
            self._resume_at *= self.window / before
        if calm and not self._starting and not self._random.trying:
            self._set_growth(wary=finished.marked > 0 or unexplained or self._path.queued(delay_s))
        else:
            self._growth.per_round = 0.0

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

    def _let_drain(self, delay_s: float, report: Report) -> None:
        before = self.window
        self.window = max(self._smallest, self._drain.lowered(before, delay_s, self._path, report))
        if not self._starting:  # otherwise it is not known yet how long the packets of slow start will queue
            self._drain.begin_trial(before, self.window, self._path, report)
        self._starting = False

    def _enter_contest(self, window: float, rtt_s: float, report: Report) -> None:
        """React to losses alone, from ``window`` or from the packets in flight per round trip if these are fewer.

        Slow start has doubled its window since then.
        """
        carried = max(self._path.rate * rtt_s, window / 2) if self._path.rate else window
        self.window = max(self._smallest, min(window, carried))
        self._starting = False
        self._drain.end()
        self._random.abandon()
        self._path.meet(report.now_s)
        self._contest.enter(self.weight, self.window)

    def _set_growth(self, *, wary: bool) -> None:
        if wary:
            self._growth.restart()
            self._growth.per_round = self.weight
        else:
            self._growth.accelerate(self.weight, self.window)

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
            self._contest.leave()
            self._drain.trial = None
            self._resume_at = max(self._resume_at, self.window / 2)
            self.window = max(self._smallest, self.window / 2)
