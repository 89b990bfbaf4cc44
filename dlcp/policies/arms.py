# SPDX-License-Identifier: Apache-2.0
"""The choice of how each step is averaged, by measured step times: over DLCP with some precision, or by the framework.

Such a way is an *arm*, as in the multi-armed bandit: only steps that use it show how long it takes. All ranks use the
same arm in a step, because their choice depends only on reports that all of them have. Real and simulated ranks choose
alike.

Training begins with the fewest bits. If the network turns out to be fast, that costs a few percent of a few steps; the
opposite mistake costs several times a step. After some steps the ranks ask which other arms could be faster:

- More bits are not tried where all ranks wait for a network in which packets queue: they would queue for longer.
- Fewer bits are not tried where no rank waits for averages, because there communication hides behind computing.
- The framework is not tried while packets are lost, which stalls TCP.

Steps with the others are timed in turns, so that a load that comes or goes does not decide. An arm is given up as soon
as its steps are clearly longer than those of another one. Arms that differ less take more turns, which cost little. At
the end, the fastest arm stays in force; a less exact one must be faster by more than the variation of steps. Its steps
are still timed. If they become longer or shorter, the ranks compare again soon; otherwise ever more rarely.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Final, NamedTuple, TypeVar

from dlcp.values.planes import CODED_BITS, FULL_BITS

# Allowed precisions and arms ------------------------------------------------------------------------------------------

EXACT: Final = "exact"
AUTO_PRECISION: Final = "auto"
FAST: Final = "fast"
PRECISIONS: Final = (EXACT, AUTO_PRECISION, FAST, str(FULL_BITS), *map(str, CODED_BITS))
HALF_PRECISION: Final = "16"
HALF_NAMES: Final = ("fp16", "bf16")
"""Names of 16 bits in the option ``compression``, after the compressors of Horovod and the hooks of PyTorch."""
AUTO_BITS: Final = 8
"""The fewest bits that need no more steps than bfloat16 (``python -m tests.bench convergence``), with error feedback.
16 are left out of the choice: where the network is the bottleneck they take longer than 8, and elsewhere 32 do as well.
"""
FAST_BITS: Final = 4


def bits_allowed(precision: str, *, error_feedback: bool) -> tuple[int, ...]:
    """Return the precisions that a step may have, the most exact first.

    Parameters
    ----------
    precision
        One of ``PRECISIONS``.
    error_feedback
        Whether rounding errors are sent with the next step; if not, nothing is rounded unless ``precision`` says so.
    """
    chosen = {
        EXACT: (FULL_BITS,),
        AUTO_PRECISION: (FULL_BITS, AUTO_BITS),
        FAST: (FULL_BITS, AUTO_BITS, FAST_BITS),
    }
    if precision not in chosen:
        return (int(precision),)
    return chosen[precision] if error_feedback else (FULL_BITS,)


def is_coarse(precision: str) -> bool:
    """Return whether all steps have fewer bits."""
    return bits_allowed(precision, error_feedback=True)[0] < FULL_BITS


def steps_factor_of(bits: int) -> float:
    """Return the number of steps to the same loss that a precision takes, relative to 32 bits."""
    if bits >= AUTO_BITS:
        return 1.0
    from dlcp.convergence import COST_OF_PRECISION, curve  # for those who allow it

    share = 1 - bits / FULL_BITS
    return max(1.0, *(curve(f"{COST_OF_PRECISION}_{name}").steps_factor(share) for name in ("sgd", "adamw")))


class Route(Enum):
    """The system that averages a step's gradients."""

    DLCP = "dlcp"
    FRAMEWORK = "framework"


class Arm(NamedTuple):
    """A way to average a step.

    Parameters
    ----------
    route
        What averages.
    bits
        Bits of each value on the wire.
    steps_factor
        The number of steps to the same loss, relative to full precision.
    """

    route: Route
    bits: int = FULL_BITS
    steps_factor: float = 1.0


def arms_over_dlcp(precision: str, *, error_feedback: bool, has_server: bool = False) -> tuple[Arm, ...]:
    """Return the ways to average over DLCP, the most exact first; see :func:`bits_allowed`.

    With a server there is only the one with the fewest bits: all gradients pass its port, and workers do not report to
    each other.
    """
    bits = bits_allowed(precision, error_feedback=error_feedback)
    return tuple(Arm(Route.DLCP, each, steps_factor_of(each)) for each in (bits[-1:] if has_server else bits))


# The choice -----------------------------------------------------------------------------------------------------------

WARM_UP: Final = 5
"""Steps before the first trial. DDP plans its buckets after the first step, and the first few also fault memory in:
with 25 million parameters, steps were as short as later ones from the fifth on."""
LAG: Final = 2
"""The report on a step is known when the step after the next begins: it is complete when the next step begins, and
travels during that one."""
TURN: Final = 4
"""Steps of a turn. The first one does not count, because connections and caches are cold."""
TURNS: Final = 6
"""The most turns of each arm in a trial, with 18 steps that count. When four ranks shared two cores, steps varied by
12 %; the median of 18 such steps varies by 4 %."""
CLEARLY: Final = 1.96
"""Standard normal deviate of the Mann-Whitney test at which an arm is given up. Three steps that are all longer than
each of three others reach it."""
LOOK: Final = 3
"""Reports that must agree before a sign of the network counts: all that exist at the end of the warm-up."""
RECENT: Final = 8
"""Reports whose median is an arm's usual step."""
MARGIN: Final = 0.97
"""A less exact arm must need less than this part of a more exact one's time: medians vary by about as much."""
SLOW: Final = 1.5
"""Two steps in a row that take this many times the usual one, because all ranks wait, end an arm's turn, or its time in
force. A single one may be noise: where processors are the bottleneck, one in 300 takes so long."""
VERY_SLOW: Final = 2.0
"""So does a single step that takes this many times the usual one."""
JITTER_S: Final = 0.02
"""A single slow step must also exceed the usual one by this. On a busy host a process waits for a core for about this
long: two ranks on two cores, with steps of 4 ms, had single ones of 10 ms."""
SPREAD: Final = 1.2
"""The usual step has changed if its median is longer or shorter by this factor than when the arm was chosen."""
FIRST_PERIOD: Final = 200
"""Steps from the first trial to the second; each later distance is four times the last. An arm that is a third slower
has about eight steps in a trial, so trials cost 2 % of the first thousand steps, and less later."""
PERIOD_GROWTH: Final = 4
FIRST_BACK_OFF: Final = 16
"""Steps until the ranks ask again after the arm in force has become slow, or has changed; twice as many each time."""
LONGEST: Final = 25_600
"""The largest distance between trials."""
REPORTS_SHARE: Final = 0.005
"""Reports outside of trials may take this share of training; if steps are short, not every step is reported."""


def trial_steps(arms: int) -> int:
    """Return the most steps that a trial of some arms takes."""
    return TURN * TURNS * arms + (1 + LAG) * (arms - 1)


_Way = TypeVar("_Way")


def fastest(costs: Mapping[_Way, float]) -> _Way:
    """Return the way with the least cost; each must cost clearly less than those before it."""
    chosen, *others = costs
    for way in others:
        if costs[way] < MARGIN * costs[chosen]:
            chosen = way
    return chosen


class StepReport(NamedTuple):
    """A step, as seen by one rank or by all of them.

    Attributes
    ----------
    step_s
        Time from the step's first bucket to that of the next step, in seconds; of all ranks, the longest.
    waited_s
        Time from the step's last bucket until all averages were there, in seconds; of all ranks, the shortest. If one
        rank computes for longer than usual, the others wait for it, but it does not wait itself. So all ranks wait
        only for the network.
    lossy
        Whether a packet of any rank was lost or marked recently.
    queued
        Whether packets queued on every rank.
    """

    step_s: float
    waited_s: float
    lossy: bool
    queued: bool

    def to_maxima(self) -> list[float]:
        """Return numbers whose maxima over all ranks are those of :meth:`from_maxima`."""
        return [self.step_s, -self.waited_s, float(self.lossy), -float(self.queued)]

    @classmethod
    def from_maxima(cls, maxima: Sequence[float]) -> "StepReport":
        """Return the report of all ranks."""
        step_s, minus_waited_s, lossy, minus_queued = maxima
        return cls(step_s, -minus_waited_s, bool(lossy), bool(minus_queued))


def usual_s(reports: Sequence[StepReport]) -> float:
    """Return the median step time, in seconds."""
    return median(report.step_s for report in reports)


def are_longer(these: Sequence[float], those: Sequence[float]) -> bool:
    """Return whether some times are longer than others, by the test of Mann and Whitney (1947)."""
    n, m = len(these), len(those)
    longer = sum((each > other) + (each == other) / 2 for each in these for other in those)
    return longer - n * m / 2 >= CLEARLY * math.sqrt(n * m * (n + m + 1) / 12)


@dataclass(slots=True)
class _SlowSteps:
    """Detects steps that take far longer than usual because all ranks wait for the network."""

    before: bool = False
    """Whether the previous step was slow."""

    def met(self, report: StepReport, usual: Sequence[StepReport]) -> bool:
        """Return whether a step was very slow, or slow like the last, and all ranks waited for half of the excess."""
        excess_s = report.step_s - usual_s(usual)
        waited_s = report.waited_s - median(each.waited_s for each in usual)
        before, self.before = self.before, excess_s > (SLOW - 1) * usual_s(usual) and waited_s > excess_s / 2
        very_slow = excess_s > max(JITTER_S, (VERY_SLOW - 1) * usual_s(usual))
        return self.before and (before or very_slow)


class ArmTrial:
    """Turns of steps with each of some arms. First each gets a single step, so that a bad one costs no more.

    Attributes
    ----------
    reports
        Reports on each arm that is still in the trial; without those on the first steps of turns.
    refused
        The time of the step that ended an arm's trial, in seconds.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.reports: dict[Arm, list[StepReport]] = {arm: [] for arm in arms}
        self.refused: dict[Arm, float] = {}
        in_force, *others = arms
        turns = [(in_force, TURN)]
        for arm in others:
            turns += [(arm, 1), (in_force, LAG), (arm, TURN)]
        turns += [(arm, TURN) for arm in arms] * (TURNS - 1)
        self._plan: Iterator[tuple[Arm, int]] = iter([(arm, place) for arm, steps in turns for place in range(steps)])
        self._steps: dict[int, tuple[Arm, int]] = {}
        """Arm and place in its turn of steps that are not reported yet."""
        self._slow = _SlowSteps()

    def choose(self, step: int) -> Arm | None:
        """Return a step's arm; None once all turns are over."""
        for arm, place in self._plan:
            if arm in self.reports and len(self.reports) > 1:
                self._steps[step] = arm, place
                return arm
        return None

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    @property
    def is_over(self) -> bool:
        """Whether no report is missing after the last turn."""
        return not self._steps

    def costs(self) -> dict[Arm, list[float]]:
        """Return step times, times the number of steps to the same loss, of all arms with at least one turn."""
        timed = {arm: taken for arm, taken in self.reports.items() if len(taken) >= TURN - 1}
        return {arm: [arm.steps_factor * each.step_s for each in taken] for arm, taken in timed.items()}

    def observe(self, step: int, report: StepReport) -> None:
        """Take the report on a step of the trial; give up arms whose steps are clearly longer."""
        arm, place = self._steps.pop(step)
        if arm not in self.reports:
            return
        first, compared = next(iter(self.reports)), [each for each in self.reports.values() if len(each) >= TURN - 1]
        if place == 0:
            self._slow = _SlowSteps()
        else:
            self.reports[arm].append(report)
        if arm is not first and compared:
            usual = min(compared, key=usual_s)
            if self._slow.met(report, usual):
                self._refuse(arm, report.step_s)
                return
        costs = self.costs()
        least = min(costs.values(), key=median, default=[])
        for each, taken in costs.items():
            if taken is not least and are_longer([MARGIN * cost for cost in taken], least):
                self._refuse(each, usual_s(self.reports[each]))

    def _refuse(self, arm: Arm, step_s: float) -> None:
        """Give up an arm, and those that send as much and have not been tried."""
        self.refused[arm] = step_s
        del self.reports[arm]
        if min(self.reports, key=lambda each: each.bits).bits < arm.bits:
            for other in [other for other, taken in self.reports.items() if not taken and other.bits >= arm.bits]:
                del self.reports[other]


class ArmChooser:
    """Chooses the arm of each step. Ranks that are given the same reports choose the same arms.

    Parameters
    ----------
    arms
        The arms to choose from, in order of preference if they take the same time: more bits first.
    framework
        The framework's own averager, for messages: ``gloo``.
    report_s
        Processor time that a report on a step takes, in seconds.
    first_step
        The number of the first step.

    Attributes
    ----------
    settled
        The arm in force, apart from trials.
    since
        The first step of its time in force.
    because
        The reason for it; ``""`` before the first comparison.
    """

    def __init__(self, arms: Sequence[Arm], framework: str = "", *, report_s: float = 0.0, first_step: int = 0) -> None:
        self.arms = tuple(arms)
        self._fewest = min((arm for arm in arms if arm.route is Route.DLCP), key=lambda arm: arm.bits)
        self.settled, self.since, self.because = self._fewest, first_step, ""
        self._framework, self._report_s = framework, report_s
        self._first_step, self._trial_at = first_step, first_step + WARM_UP
        self._period, self._back_off = FIRST_PERIOD, FIRST_BACK_OFF
        self._trial: ArmTrial | None = None
        self._recent: deque[StepReport] = deque(maxlen=RECENT)
        """The latest reports on the arm in force."""
        self._counted_from = first_step + 1
        """The first step whose report is on the arm in force: not the first one with it, which is cold."""
        self._chosen_s = 0.0
        """The usual step when the arm was chosen; 0 without a comparison."""
        self._slow = _SlowSteps()

    @property
    def decision(self) -> str:
        """The arm in force and the reason for it, for the user."""
        if not self.because:
            return f"{self.name(self.settled)} until compared with {', '.join(map(self.name, self._others))}"
        return f"{self.name(self.settled)} since step {self.since}: {self.because}"

    def name(self, arm: Arm) -> str:
        """Return an arm's name, for the user."""
        return self._framework if arm.route is Route.FRAMEWORK else f"{arm.bits} bits"

    @property
    def _others(self) -> list[Arm]:
        return [arm for arm in self.arms if arm is not self.settled]

    def choose(self, step: int) -> Arm:
        """Return the arm of the next step, given the reports on all steps up to :data:`LAG` before it."""
        if self._trial is None and step >= self._trial_at and len(self._recent) >= LOOK:
            contenders = self._contenders()
            if contenders:
                self._trial = ArmTrial([self.settled, *contenders])
        return (self._trial.choose(step) if self._trial else None) or self.settled

    def wants(self, step: int) -> bool:
        """Return whether the ranks must report on a step when the next one begins."""
        if step == self._first_step:
            return False
        if self._trial is not None or len(self._recent) < LOOK:
            return True
        return step % max(1, math.ceil(self._report_s / REPORTS_SHARE / max(usual_s(self._recent), 1e-9))) == 0

    def observe(self, step: int, report: StepReport) -> None:
        """Take the report of all ranks on a step, when the step :data:`LAG` later begins.

        Reports must be given in order, for the steps that :meth:`wants` names.
        """
        trial = self._trial
        if trial is not None and step in trial:
            trial.observe(step, report)
            if trial.is_over:
                self._conclude(step, trial)
        elif trial is None and step >= self._counted_from:
            self._watch(step, report)

    def _contenders(self) -> list[Arm]:
        """Return the arms that may be faster than the one in force, or as fast and more exact."""
        latest = list(self._recent)[-LOOK:]
        waits = median(each.waited_s / max(each.step_s, 1e-9) for each in self._recent) > 1 - MARGIN
        is_full = waits and all(each.queued for each in latest)
        is_lossy = any(each.lossy for each in latest)

        def may_gain(arm: Arm) -> bool:
            if arm.route is Route.FRAMEWORK and is_lossy:
                return False
            return not is_full if arm.bits > self.settled.bits else waits

        found = [arm for arm in self._others if may_gain(arm)]
        if not found and not self.because:
            signs = "packets queue in the network" if is_full else "packets are lost or marked in the network"
            self.because = signs if waits else "averages arrive while ranks compute"
        return found

    def _watch(self, step: int, report: StepReport) -> None:
        """Take a report on the arm in force, outside of trials."""
        recent = self._recent
        if len(recent) >= LOOK and self._slow.met(report, recent) and self.settled is not self._fewest:
            usually, slow = _shown(usual_s(recent)), _shown(report.step_s)
            self._settle(step, self._fewest, f"a step with {self.name(self.settled)} took {slow}, usually {usually}")
            self._ask_again(step)
            return
        recent.append(report)
        if self._chosen_s and len(recent) == RECENT and not 1 / SPREAD < usual_s(recent) / self._chosen_s < SPREAD:
            self._chosen_s = usual_s(recent)
            self._ask_again(step)

    def _ask_again(self, step: int) -> None:
        """Plan a trial for soon, because something has changed."""
        self._trial_at = step + LAG + self._back_off
        self._back_off = min(2 * self._back_off, LONGEST)

    def _conclude(self, step: int, trial: ArmTrial) -> None:
        costs = {arm: median(taken) for arm, taken in trial.costs().items()}
        chosen = fastest({arm: costs[arm] for arm in self.arms if arm in costs})
        taken = {arm: usual_s(reports) for arm, reports in trial.reports.items()} | trial.refused
        if chosen is not self.settled or chosen is not self._fewest:  # it has won, or proved itself over a period
            self._back_off = FIRST_BACK_OFF
        self._settle(step, chosen, self._compared(chosen, taken))
        self._recent.extend(trial.reports[chosen])
        self._chosen_s, self._trial = usual_s(trial.reports[chosen]), None
        self._trial_at = step + LAG + self._period
        self._period = min(PERIOD_GROWTH * self._period, LONGEST)

    def _compared(self, chosen: Arm, taken: Mapping[Arm, float]) -> str:
        others = [f"{self.name(arm)} {_shown(step_s)}" for arm, step_s in taken.items() if arm is not chosen]
        return f"{_shown(taken[chosen])} a step; {', '.join(others)}"

    def _settle(self, step: int, arm: Arm, because: str) -> None:
        if arm is not self.settled:
            self.settled, self.since = arm, step + LAG
        self.because, self._counted_from, self._slow, self._chosen_s = because, step + LAG + 1, _SlowSteps(), 0.0
        self._recent.clear()


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
