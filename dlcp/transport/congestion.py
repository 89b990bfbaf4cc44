# SPDX-License-Identifier: Apache-2.0
"""How many packets a rank may have on the way to another.

A job should count as one flow on a port, however many ranks send to it, so each of its flows grows by its weight only.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dlcp.transport.random_loss import Finding, RandomLoss

INITIAL_WINDOW_PACKETS = 10.0
"""RFC 6928, shared by the flows of a job in proportion to their weight."""
SMALLEST_JOB_WINDOW_PACKETS = 9.0
SMALLEST_WINDOW_PACKETS = 3.0
"""What a job keeps on the way to a rank at least, divided among its senders, and the most that one of them keeps.

Packets over the job's share wait below all other traffic and hold their place in the window meanwhile, so a smaller
window would leave the share unused. Chosen by us.
"""
ROUND_PACKETS_MIN = 4
"""A smaller window is judged over this many packets: of fewer, none or all are marked. Chosen by us."""
CALM_ROUNDS_MAX, PATIENCE_ROUNDS = 2, 5
"""Each round without congestion doubles the growth: the first two, and all after the fifth, as TIMELY's
hyper-active increase begins after five (SIGCOMM 2015)."""
LOSS_CUT = 0.25
"""A loss beside a standing queue shrinks the window by this share, or by the share lost if that is more. Chosen by us:
CUBIC has 0.3. In proportion to the losses alone, flows would lose as much as they grew, and never become equal."""
GENTLE = 8
"""A window grows by an eighth at most, else each increase would overshoot. Chosen by us."""
ROUNDS_MAX = 16
"""Growth for at most this many rounds in one report. Chosen by us."""
START_GROWTH_MAX = 3
"""While starting, a window grows to four times at most in one report, however much was delivered. Chosen by us."""
START_MARKED = 0.25
"""The start is over once this share of a round is marked: less comes of a start's own bursts. Chosen by us."""
QUEUE_MIN_S = 0.0012
"""A round whose shortest round trip is longer by this has met a standing queue. Chosen by us: a little more than an
acknowledgement may be delayed; less cannot be told from the wake-up times of a busy host."""
DELAY_MIN_S = 0.005
"""More delay than this is too much in itself, even without losses or marks; CoDel's target (RFC 8289)."""
DELAY_BETA = 0.8
DELAY_CUT_MAX = 0.5
"""How a window shrinks with delay, and by how much at most in one round; as in Swift (SIGCOMM 2020)."""
BASE_MEMORY_S = 10.0
"""How long the shortest round-trip time is remembered at least; BBR's window."""
RATE_MEMORY_ROUNDS = 10
"""How many rounds the highest rate is remembered; BBR's window."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of packets since the last report; it may cover one acknowledgement, or several windows.

    Parameters
    ----------
    now_s
        Time on the clock of the transport.
    delivered, marked, lost
        Packets newly confirmed, how many of these were marked congested (ECN), and packets found lost.
    rtt_s
        The smallest round-trip time that was sampled, without the receiver's delay; 0 if none was.
    smoothed_rtt_s
        The average round-trip time, 0 if it is not known.
    limited
        Whether the window held packets back.
    """

    now_s: float
    delivered: int
    marked: int
    lost: int
    rtt_s: float
    smoothed_rtt_s: float
    limited: bool


class RateControl(Protocol):
    """A window in packets, driven by reports; one of less than a packet admits a packet now and then.

    Attributes
    ----------
    weight
        The share of a flow that this flow counts as; it may be changed at any time.
    """

    window: float
    weight: float
    ecn_capable: bool

    @property
    def slow_start(self) -> bool:
        """Whether the window grows by all that is delivered while it holds packets back: then each report counts."""

    def on_report(self, report: Report) -> None:
        """Take in one report."""

    def on_timeout(self) -> None:
        """Nothing was heard for a whole probe timeout."""


class Round:
    """What became of about a window's worth of packets."""

    __slots__ = ("began_s", "delivered", "lost", "marked", "rtt_s")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.delivered = self.marked = self.lost = 0
        self.rtt_s = 0.0

    @property
    def packets(self) -> int:
        """Packets confirmed or lost."""
        return self.delivered + self.lost

    def add(self, report: Report) -> None:
        """Take in one report."""
        self.delivered += report.delivered
        self.marked += report.marked
        self.lost += report.lost
        if report.rtt_s and (not self.rtt_s or report.rtt_s < self.rtt_s):
            self.rtt_s = report.rtt_s


class Path:
    """What a path is like when it is idle, and what it has carried lately.

    Attributes
    ----------
    base_s
        The shortest round-trip time of the last ``BASE_MEMORY_S`` to twice that; 0 if there was none.
    rate
        The most packets a second in any of the last ``RATE_MEMORY_ROUNDS`` rounds, as BBR estimates bandwidth.
    """

    def __init__(self) -> None:
        self._older_s = self._newer_s = math.inf
        self._renewed_s = 0.0
        self._rates: deque[float] = deque(maxlen=RATE_MEMORY_ROUNDS)

    @property
    def base_s(self) -> float:
        """Return the round-trip time of the idle path in seconds."""
        base_s = min(self._older_s, self._newer_s)
        return 0.0 if base_s == math.inf else base_s

    @property
    def rate(self) -> float:
        """Return the rate in packets a second; 0 if there was no round yet."""
        return max(self._rates, default=0.0)

    def allowance_s(self, least_s: float) -> float:
        """Return the delay that counts as none: a quarter of the round-trip time of the idle path, or ``least_s``."""
        return max(least_s, self.base_s / 4)

    def delay_s(self, finished: Round, now_s: float) -> float:
        """Take in a round, return by how much its shortest round trip was longer than the idle path's."""
        if now_s > finished.began_s:
            self._rates.append(finished.delivered / (now_s - finished.began_s))
        if not finished.rtt_s:
            return 0.0
        if now_s - self._renewed_s > BASE_MEMORY_S:
            self._older_s, self._newer_s = self._newer_s, finished.rtt_s
            self._renewed_s = now_s
        self._newer_s = min(self._newer_s, finished.rtt_s)
        return finished.rtt_s - self.base_s


class DctcpWindow:
    """Window control in proportion to what is marked, lost or late; DCTCP's rule (RFC 8257), extended.

    Three signs of congestion shrink the window, once a round (a window's worth of packets):

    - marks, by half the marked share, averaged;
    - losses: while a queue stands, what the path does not lose anyway; else only if they cease when less is sent
      (:class:`RandomLoss`), for to bounded loss a lost gradient packet is a signal rather than a fault;
    - delay of several milliseconds, but not below what the path has been seen to carry.

    It grows while it holds packets back: by what is delivered at first, then by ``weight`` a round, and faster the
    longer nothing is congested.

    Without regard for delay, what was on the way when a window shrank does not shrink it again, as with DCTCP. Where
    delay counts, queues are short, and it may: that is how many flows that begin at once find their shares.

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
        self.window = max(2.0, INITIAL_WINDOW_PACKETS * weight)
        self._fraction = 0.0
        self._starting = True
        self._calm_rounds = 0
        self._growth = 0.0
        self._former = 0.0
        self._timeouts = 0
        self._resume_at = 0.0
        self._path = Path()
        self._random = RandomLoss()
        self._round = Round(0.0)
        self._round_packets = max(self.window, ROUND_PACKETS_MIN)
        self._aftermath = False
        """Whether this round is of packets that were on the way when the window shrank."""

    @property
    def slow_start(self) -> bool:
        """See :class:`RateControl`: at first, after a silence, and while losses are tried out."""
        return self._starting or self._random.trying or self.window < self._resume_at

    @property
    def _smallest(self) -> float:
        return min(SMALLEST_WINDOW_PACKETS, SMALLEST_JOB_WINDOW_PACKETS * self.weight)

    def on_report(self, report: Report) -> None:
        """Take in one report; the window shrinks at most once a round."""
        self._timeouts = 0
        if report.limited:
            self._start(report)
            rounds = min(ROUNDS_MAX, (report.delivered + report.lost) / self._round_packets)
            self.window += self._growth * rounds
        self._round.add(report)
        if self._round.packets >= self._round_packets:
            on_the_way = self.window
            if self._aftermath:
                self._aftermath, self._growth = False, self._next_growth(wary=True)
            else:
                self._finish_round(report.now_s)
                self._aftermath = self.window < on_the_way and not self._heed_delay
            self._round = Round(report.now_s)
            self._round_packets = max(on_the_way if self._aftermath else self.window, ROUND_PACKETS_MIN)

    def _start(self, report: Report) -> None:
        """Grow by what is delivered: at first, and after a silence."""
        growth = min(max(0, report.delivered - 2 * report.marked), START_GROWTH_MAX * self.window)
        if self._starting and not self._random.trying:
            self.window += growth
        elif self.window < self._resume_at:
            self.window = min(self._resume_at, self.window + growth)
        else:
            self._resume_at = 0.0

    def _finish_round(self, now_s: float) -> None:
        finished = self._round
        delay_s = self._path.delay_s(finished, now_s) if self._heed_delay else 0.0
        queued = finished.marked > 0 or delay_s > self._path.allowance_s(QUEUE_MIN_S)
        before = self.window
        self._heed_marks(finished)
        unexplained = not self._random.explains(finished.packets, finished.lost)
        if queued:
            self._random.abandon()
            if unexplained:
                self._shrink(max(LOSS_CUT, finished.lost / finished.packets))
        else:
            self._heed_silent_losses(finished)
        if self.window == before and delay_s > self._path.allowance_s(DELAY_MIN_S):
            self._drain(delay_s)
        calm = self.window >= before
        if not calm:
            self._calm_rounds = 0
            self._resume_at = 0.0
        wary = queued or unexplained
        self._growth = self._next_growth(wary) if calm and not self._starting and not self._random.trying else 0.0

    def _heed_marks(self, finished: Round) -> None:
        fraction = finished.marked / finished.packets
        if self._starting:
            self._fraction = fraction
        else:
            self._fraction += self.GAIN * (fraction - self._fraction)
        if fraction and not (self._starting and fraction < START_MARKED):
            self._shrink(self._fraction / 2)

    def _heed_silent_losses(self, finished: Round) -> None:
        finding = self._random.judge(finished.packets, finished.lost, self.window, starting=self._starting)
        if finding is Finding.CONSPICUOUS:
            self._former = self.window
            self.window = max(self._smallest, self.window * (1 - self._random.cut))
        elif finding is Finding.RANDOM:
            self.window = max(self.window, self._former)
        elif finding is Finding.CONGESTION:
            self._starting = False

    def _shrink(self, share: float) -> None:
        self._starting = False
        self.window = max(self._smallest, self.window * (1 - share))

    def _drain(self, delay_s: float) -> None:
        short_s = self._path.allowance_s(DELAY_MIN_S)
        carried = self._path.rate * (self._path.base_s + short_s)
        share = min(DELAY_CUT_MAX, DELAY_BETA * (1 - short_s / delay_s))
        self._starting = False
        self.window = max(self._smallest, min(self.window, carried), self.window * (1 - share))

    def _next_growth(self, wary: bool) -> float:
        # Bursts of others end as suddenly as they begin: what is free for longer is taken faster.
        if wary:
            self._calm_rounds = 0
            return self.weight
        doublings = min(self._calm_rounds, CALM_ROUNDS_MAX) + max(0, min(self._calm_rounds, 64) - PATIENCE_ROUNDS)
        self._calm_rounds += 1
        return min(self.weight * 2.0**doublings, max(self.weight, self.window / GENTLE))

    def on_timeout(self) -> None:
        """Halve the window if this is the second time in a row: one question or answer may have been lost at random."""
        self._timeouts += 1
        if self._timeouts > 1:
            self._resume_at = max(self._resume_at, self.window / 2)
            self.window = max(self._smallest, self.window / 2)


class NoWindow:
    """No window: there is no network in between that could be congested."""

    ecn_capable = False
    slow_start = False

    def __init__(self) -> None:
        self.window, self.weight = math.inf, 1.0

    def on_report(self, report: Report) -> None:
        """See :meth:`RateControl.on_report`."""

    def on_timeout(self) -> None:
        """See :meth:`RateControl.on_timeout`."""


class CubicWindow:
    """CUBIC (RFC 9438), for traffic that shares a drop-tail queue with TCP; reacts to loss, once a round trip.

    Parameters
    ----------
    weight
        The share of a flow that this flow counts as. k flows of weight 1/k together should behave as one. Where each
        packet is as likely lost as any other, the throughput of an AIMD flow goes with the square root of its increase,
        hence the square. Where a flow loses the packets that it grew by, throughput goes with the inverse of the
        decrease instead, so a light flow decreases by more, too; the root is a compromise of ours between the two.
    """

    SCALE = 0.4
    DECREASE = 0.3
    DECREASE_MAX = 0.7
    ecn_capable = False

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.window = max(2.0, INITIAL_WINDOW_PACKETS * weight)
        self._threshold = math.inf
        self._peak = 0.0
        self._epoch_s = -1.0
        self._reno = 0.0
        self._recovery_until_s = -1.0

    @property
    def slow_start(self) -> bool:
        """See :class:`RateControl`: in slow start."""
        return self.window < self._threshold

    @property
    def _keep(self) -> float:
        return 1 - min(self.DECREASE_MAX, self.DECREASE / math.sqrt(self.weight))

    def on_report(self, report: Report) -> None:
        """Take in one report."""
        now_s, delivered, rtt_s = report.now_s, report.delivered, report.smoothed_rtt_s
        if report.lost:
            if now_s >= self._recovery_until_s:
                self._back_off(now_s, rtt_s)
            return
        if self.window < self._threshold:
            self.window += delivered
            return
        if self._epoch_s < 0:
            self._epoch_s, self._reno = now_s, self.window
            self._peak = max(self._peak, self.window)
        increase = self.weight**2
        since_s = now_s - self._epoch_s + rtt_s
        inflection_s = (self._peak * (1 - self._keep) / (self.SCALE * increase)) ** (1 / 3)
        target = self.SCALE * increase * (since_s - inflection_s) ** 3 + self._peak
        self._reno += increase * 3 * (1 - self._keep) / (1 + self._keep) * delivered / self.window
        goal = max(target, self._reno)
        if goal > self.window:
            self.window += min((goal - self.window) / self.window * delivered, delivered / 2)

    def _back_off(self, now_s: float, rtt_s: float) -> None:
        # Fast convergence: a flow that has less than it had gives room to newcomers.
        self._peak = self.window * (1 + self._keep) / 2 if self.window < self._peak else self.window
        self.window = max(1.0, self.window * self._keep)
        self._threshold = max(2.0, self.window)
        self._epoch_s = -1.0
        self._recovery_until_s = now_s + rtt_s

    def on_timeout(self) -> None:
        """Start over from one packet, as RFC 5681 has it."""
        self._threshold = max(2.0, self.window * self._keep)
        self._peak = self.window
        self.window = 1.0
        self._epoch_s = -1.0
