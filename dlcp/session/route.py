# SPDX-License-Identifier: Apache-2.0
"""The route of each step: DLCP, or the framework's own all-reduce where that is faster.

On a clean network that is faster than the processor, DLCP through sockets costs more processor time than the
framework's all-reduce. With ``route="auto"`` the ranks therefore time a few steps of each in turn, and take the faster
one from there on. A step goes one way as a whole, the same on all ranks.

:class:`RouteChooser` decides, from all ranks' reports on each step. It is pure computation, without input or output.
:class:`StepRouter` measures this rank's steps, exchanges the measurements with the other ranks, and asks the chooser.
"""

import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from dlcp.collectives.choice import SERVER
from dlcp.configuration import Trait
from dlcp.session.options import AUTO_ROUTE, Options

if TYPE_CHECKING:
    from dlcp.session.session import BucketTable
    from dlcp.transport import Connection

log = logging.getLogger("dlcp")


class Route(Enum):
    """What averages a step's gradients."""

    DLCP = "dlcp"
    FRAMEWORK = "framework"


WARM_UP: Final = 5
"""Steps before the first trial. DDP plans its buckets after the first step, and the first few also fault memory in: of
a model with 25 million parameters, steps were as short as later ones from the fifth on."""
LAG: Final = 2
"""The report on a step is known when the step after the next begins: it is complete when the next step begins, and
travels during that one."""
_DLCP, _FRAMEWORK = [Route.DLCP], [Route.FRAMEWORK]
TRIAL: Final = tuple(_DLCP * (4 + LAG) + _FRAMEWORK * 4 + _DLCP * 4 + _FRAMEWORK * 4)
"""The steps of a trial. Each route has two turns, so that a load that comes or goes meanwhile does not decide. The
first turn is longer by the lag: the network must have been clean for four steps before the framework has its first."""
LOOK: Final = 4
"""If packets queued on all ranks in each of the first steps of a trial, the network is the bottleneck."""
MARGIN: Final = 0.97
"""The framework must need less than this part of DLCP's step time. Medians of six steps vary by about as much."""
SLOW: Final = 1.5
"""A step of the framework that takes this many times the usual one, because all ranks wait, ends its turn."""
COLD: Final = 3.0
"""The same for the first step of a turn, in which connections and caches are cold."""
JITTER_S: Final = 0.02
"""A single slow step must exceed the usual one by this; a smaller excess counts in the second step in a row. On a busy
host a process waits for a core about as long: two ranks on two cores, with steps of 4 ms, had single ones of 10 ms."""
FIRST_PERIOD: Final = 200
"""Steps from the first trial to the second; each later distance is four times the last. A trial has eight steps of
the slower route, so trials take 1.6 % of the first thousand steps, and less later. Each costs only the difference
between the two."""
PERIOD_GROWTH: Final = 4
FIRST_BACK_OFF: Final = 16
"""Steps until the next trial if the network was not clean, or the framework became slow; twice as many each time."""
LONGEST: Final = 25_600
"""The largest distance between trials."""


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
    remote
        Whether any rank reaches another one through a network, and not through memory.
    """

    step_s: float
    waited_s: float
    lossy: bool
    queued: bool
    remote: bool

    def to_maxima(self) -> list[float]:
        """Return numbers whose maxima over all ranks are those of :meth:`from_maxima`."""
        return [self.step_s, -self.waited_s, float(self.lossy), -float(self.queued), float(self.remote)]

    @classmethod
    def from_maxima(cls, maxima: Sequence[float]) -> "StepReport":
        """Return the report of all ranks."""
        step_s, minus_waited_s, lossy, minus_queued, remote = maxima
        return cls(step_s, -minus_waited_s, bool(lossy), bool(minus_queued), bool(remote))


def usual_s(reports: Sequence[StepReport]) -> float:
    """Return the median step time, in seconds."""
    return statistics.median(report.step_s for report in reports)


class RouteChooser:
    """Chooses the route of each step. Ranks that are given the same reports choose the same routes.

    Parameters
    ----------
    framework
        What averages on the framework's route, for messages: ``gloo``.

    Attributes
    ----------
    settled
        The route outside of trials.
    since
        The step from which on it has been that.
    because
        Why; ``""`` before the first trial.
    """

    def __init__(self, framework: str) -> None:
        self.settled, self.since, self.because = Route.DLCP, 0, ""
        self._framework = framework
        self._trial_at = WARM_UP
        self._period, self._back_off = FIRST_PERIOD, FIRST_BACK_OFF
        self._reports: dict[Route, list[StepReport]] = {route: [] for route in Route}
        """Those that count of the current trial, or of the last one."""
        self._slow = self._final = False

    def begin(self, first_step: int) -> None:
        """Set the number of the first step, which is 0 otherwise."""
        self.since, self._trial_at = first_step, first_step + WARM_UP

    @property
    def decision(self) -> str:
        """The route and the reason for it, for the user."""
        if not self.because:
            return f"DLCP until it has been compared with {self._framework}"
        return f"{'DLCP' if self.settled is Route.DLCP else 'framework'} since step {self.since}: {self.because}"

    def route(self, step: int) -> Route:
        """Return the route of a step, once the reports on all steps up to :data:`LAG` steps before it were given."""
        place = self._place(step)
        return self.settled if place is None else TRIAL[place]

    def wants(self, step: int) -> bool:
        """Return whether the ranks must report on a step when the next one begins."""
        return self._place(step) is not None or (self.settled is Route.FRAMEWORK and step >= self.since)

    def observe(self, step: int, report: StepReport) -> None:
        """Take the report of all ranks on a step, when the step :data:`LAG` later begins.

        Reports must be given in order, for the steps that :meth:`wants` names.
        """
        place = self._place(step)
        if not report.remote:
            self._final = True
            self._settle(step, Route.DLCP, "all ranks exchange packets through memory")
        elif place is not None:
            self._observe_trial(step, place, report)
        elif self._is_slow(report, self._reports[Route.FRAMEWORK], SLOW):
            usually = _shown(usual_s(self._reports[Route.FRAMEWORK]))
            self._put_off(step, f"a step with {self._framework} took {_shown(report.step_s)}, usually {usually}")

    def _place(self, step: int) -> int | None:
        """Return the place of a step in the current trial; None if it is in no trial."""
        place = step - self._trial_at
        return place if 0 <= place < len(TRIAL) and not self._final else None

    def _observe_trial(self, step: int, place: int, report: StepReport) -> None:
        route = TRIAL[place]
        if place == 0:
            self._reports = {route: [] for route in Route}
        first_of_turn = place == 0 or TRIAL[place - 1] is not route
        if first_of_turn:
            self._slow = False
        else:
            self._reports[route].append(report)
        dlcp = self._reports[Route.DLCP]
        if route is Route.DLCP and report.lossy:
            self._put_off(step, "packets are lost or marked in the network")
        elif place == LOOK - 1 and all(each.queued for each in dlcp):
            self._put_off(step, "packets queue in the network")
        elif route is Route.FRAMEWORK and self._is_slow(report, dlcp, COLD if first_of_turn else SLOW):
            self._settle(
                step,
                Route.DLCP,
                f"a step took {_shown(report.step_s)} with {self._framework}, {_shown(usual_s(dlcp))} with DLCP",
            )
            self._schedule_next(step)
        elif place == len(TRIAL) - 1:
            self._conclude(step)

    def _is_slow(self, report: StepReport, usual: Sequence[StepReport], factor: float) -> bool:
        """Return whether the framework's steps take ``factor`` times the usual, and half of the excess is waiting."""
        excess_s = report.step_s - usual_s(usual)
        waited_s = report.waited_s - statistics.median(each.waited_s for each in usual)
        before, self._slow = self._slow, excess_s > (factor - 1) * usual_s(usual) and waited_s > excess_s / 2
        return self._slow and (before or excess_s > JITTER_S)

    def _conclude(self, step: int) -> None:
        dlcp_s, framework_s = (usual_s(self._reports[route]) for route in (Route.DLCP, Route.FRAMEWORK))
        if framework_s < MARGIN * dlcp_s:
            if self.settled is Route.FRAMEWORK:  # it has proved itself over a whole period
                self._back_off = FIRST_BACK_OFF
            self._settle(
                step, Route.FRAMEWORK, f"{self._framework} {_shown(framework_s)} a step, DLCP {_shown(dlcp_s)}"
            )
        else:
            self._settle(step, Route.DLCP, f"DLCP {_shown(dlcp_s)} a step, {self._framework} {_shown(framework_s)}")
        self._schedule_next(step)

    def _schedule_next(self, step: int) -> None:
        """Plan the next trial after one that measured both routes."""
        self._trial_at = step + LAG + self._period
        self._period = min(PERIOD_GROWTH * self._period, LONGEST)

    def _put_off(self, step: int, because: str) -> None:
        """Use DLCP, and plan the next trial for when the network may be clean again."""
        self._settle(step, Route.DLCP, because)
        self._trial_at = step + LAG + self._back_off
        self._back_off = min(2 * self._back_off, LONGEST)

    def _settle(self, step: int, route: Route, because: str) -> None:
        if route is not self.settled:
            self.settled, self.since = route, step + LAG
        self.because = because


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# This rank ------------------------------------------------------------------------------------------------------------


class MaxExchange(ABC):
    """How the ranks of a framework tell each other a few numbers in the background."""

    @abstractmethod
    def start(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        """Start to exchange numbers; all ranks must call it, in the same order.

        Returns
        -------
        A function that waits and returns each number's maximum over all ranks. It raises RuntimeError if a rank has
        ended, or is late by more than the session's deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True)
class FrameworkRoute:
    """What a session needs to know of a framework that can average while DLCP could, too.

    Parameters
    ----------
    name
        What averages, for messages: ``gloo``.
    open_exchange
        Opens an exchange; all ranks call it. It returns None on all ranks if they cannot have one.
    reports_end
        Whether the end of an average is known on the host. If not, waiting time cannot be told from computation.
    """

    name: str
    open_exchange: Callable[[], MaxExchange | None]
    reports_end: bool = True


class StepRouter:
    """Tells the route of each step on this rank; the same on all ranks.

    Parameters
    ----------
    framework
        The framework.
    exchange
        How ranks tell each other their reports; None if the route is fixed.
    table
        Knows when the step's latest bucket was ready, and averaged.
    connection
        Knows whether the network is clean.

    Attributes
    ----------
    step, route
        The current step, and its route.
    framework_steps
        The number of steps that the framework has averaged.
    """

    def __init__(
        self, framework: FrameworkRoute, exchange: MaxExchange | None, table: "BucketTable", connection: "Connection"
    ) -> None:
        self.step, self.route, self.framework_steps = -1, Route.DLCP, 0
        self._exchange, self._reports_end = exchange, framework.reports_end
        self._table, self._connection = table, connection
        self._chooser = RouteChooser(framework.name)
        self._began_s = 0.0
        self._reported: tuple[int, Callable[[], Sequence[float]]] | None = None
        """A step, and the function that returns the report on it."""

    @property
    def decision(self) -> str:
        """The route outside of trials, and the reason for it, for the user."""
        return self._chooser.decision if self._exchange else "framework, as the option route says"

    def begin_step(self, step: int, *, listen: bool) -> None:
        """Set :attr:`route` to that of a new step, whose first bucket is ready.

        Parameters
        ----------
        listen
            Whether all ranks still exchange reports. If not, this rank has left DLCP, or is about to: the others do not
            finish this step before they have left it, too.

        Raises
        ------
        RuntimeError
            The other ranks' reports did not come.
        """
        now_s = time.monotonic()
        if self._exchange is None:
            self.route = Route.FRAMEWORK
        elif listen:
            self._choose(self._chooser, self._exchange, step, now_s)
        else:
            self.route = Route.DLCP
        self.step, self._began_s = step, now_s
        self.framework_steps += self.route is Route.FRAMEWORK

    def _choose(self, chooser: RouteChooser, exchange: MaxExchange, step: int, now_s: float) -> None:
        if self.step < 0:
            chooser.begin(step)
        if self._reported is not None:
            settled, before = chooser.settled, chooser.because
            reported, report = self._reported
            self._reported = None
            chooser.observe(reported, StepReport.from_maxima(report()))
            if self._connection.rank == 0 and (chooser.settled is not settled or not before):
                log.info("DLCP: route: %s", chooser.decision)
        if self.step >= 0 and chooser.wants(self.step):
            self._reported = self.step, exchange.start(self._report(now_s).to_maxima())
        self.route = chooser.route(step)

    def _report(self, now_s: float) -> StepReport:
        """Return this rank's report on the step that ends now."""
        connection, table, step_s = self._connection, self._table, now_s - self._began_s
        known = self.route is Route.DLCP or self._reports_end
        remote = [peer for peer in connection.peers if peer not in connection.local_peers]
        return StepReport(
            step_s=step_s,
            waited_s=max(0.0, table.averaged_s - table.ready_s) if known else step_s,
            lossy=not all(connection.is_clear(peer) for peer in remote),
            queued=any(connection.has_queued(peer, step_s) for peer in remote),
            remote=bool(remote),
        )

    def close(self) -> None:
        """Release the exchange."""
        if self._exchange:
            self._exchange.close()


def may_choose(options: Options) -> bool:
    """Return whether the ranks choose the route: not where the framework would send something else than DLCP."""
    differs = options.given(Trait.WHOLE_STEP) or options.collective == SERVER or options.is_coarse
    return options.route == AUTO_ROUTE and not differs
