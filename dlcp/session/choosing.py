# SPDX-License-Identifier: Apache-2.0
"""The choice of each step's arm (:mod:`dlcp.policies.arms`): measure steps, report them, and ask the chooser."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.choice import AUTO, RING
from dlcp.collectives.message_numbers import ALL_GATHER, two_hop_number
from dlcp.collectives.stages import has_own_format
from dlcp.inputs.configuration import Trait
from dlcp.policies.arms import Arm, ArmChooser, Route, StepReport, arms_over_dlcp
from dlcp.session.averager import BucketTable
from dlcp.session.options import AUTO_ROUTE, FRAMEWORK_ROUTE, Options
from dlcp.transport import RELIABLE, Arrival, Endpoint, MessageKey, ReceiveRequest, SendRequest, TransportError
from dlcp.transport.ledger import Ledger
from dlcp.values.planes import FULL_BITS
from dlcp.values.tags import plain_tags

log = logging.getLogger("dlcp")

REPORT_BUCKET: Final = 0
"""The bucket number of reports within a step, where ranks choose."""
LABEL: Final = "the report on the last step"
REPORT_MESSAGE_S: Final = 100e-6
"""Processor time of a report's message on one of its ends: four ranks on two cores needed 70 to
150 us for each message."""


@dataclass(frozen=True, slots=True)
class FrameworkRoute:
    """A framework that can average while DLCP works, as a session sees it.

    Parameters
    ----------
    name
        The name of its averager, for messages: ``gloo``.
    reports_end
        Whether the end of an average is known on the host. If not, waiting time cannot be distinguished from
        computation.
    """

    name: str
    reports_end: bool = True


def arms_of(options: Options, framework: bool, *, remote: bool) -> tuple[Arm, ...]:
    """Return the arms that ranks choose from, the preferred ones first.

    Parameters
    ----------
    framework
        Whether there is a framework that can average.
    remote
        Whether any rank reaches another one through a network, and not through memory.
    """
    if options.route == FRAMEWORK_ROUTE:
        return (Arm(Route.FRAMEWORK),)
    differs = options.given(Trait.WHOLE_STEP) or options.server or options.is_coarse
    may_leave = framework and remote and options.route == AUTO_ROUTE and not differs
    first, *coarse = arms_over_dlcp(
        str(FULL_BITS) if has_own_format(options.compression, options.combine) else options.precision,
        error_feedback=options.error_feedback,
        has_server=bool(options.server),
    )
    return first, *([Arm(Route.FRAMEWORK)] if may_leave else []), *(coarse if remote else [])


class ReportExchange:
    """The exchange of a few numbers alongside a step's buckets; all ranks must do it in the same steps.

    Parameters
    ----------
    endpoint, ranks
        This rank's endpoint, and all ranks.
    options, ledger
        The session's.
    """

    def __init__(self, endpoint: Endpoint, ranks: Sequence[int], options: Options, ledger: Ledger) -> None:
        self._connection, self._deadline_s, self._ledger = endpoint.connection, options.deadline_s, ledger
        self._rank, self._peers = endpoint.connection.rank, [each for each in ranks if each != endpoint.connection.rank]
        self._ranks, self._shared = max(ranks) + 1, options.collective in (AUTO, RING)

    @property
    def cost_s(self) -> float:
        """Approximate processor time of an exchange."""
        return 2 * len(self._peers) * REPORT_MESSAGE_S

    def start(self, step: int, values: Sequence[float]) -> Callable[[], list[float]]:
        """Send this rank's numbers in a step.

        Returns
        -------
        A function that waits and returns each number's maximum over all ranks. It raises a TransportError if a rank has
        ended, or is late by more than the session's deadline.
        """
        mine = np.array(values, np.float64)
        theirs = {peer: np.zeros_like(mine) for peer in self._peers}
        done: Future[None] = Future()
        self._connection.call(partial(self._begin, step, mine, theirs, done))

        def maxima() -> list[float]:
            try:
                done.result(self._deadline_s)
            except FutureTimeoutError:
                raise TransportError(f"it did not come within {self._deadline_s:g} s") from None
            found: list[float] = np.max([mine, *theirs.values()], axis=0).tolist()
            return found

        return maxima

    def _begin(
        self, step: int, mine: NDArray[np.float64], theirs: dict[int, NDArray[np.float64]], done: "Future[None]"
    ) -> None:
        connection, awaited = self._connection, set(self._peers)

        def arrived(peer: int, _: Arrival) -> None:
            awaited.discard(peer)
            if not awaited and not done.done():
                done.set_result(None)

        def fail(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        try:
            connection.begin_step(step)  # no reducer does this in a step that the framework averages
            tags = plain_tags(-(-mine.nbytes // connection.options.payload_bytes))
            for peer in self._peers:
                into = theirs[peer].view(np.uint8)
                receive = ReceiveRequest(peer, self._key(step, self._rank), len(into), RELIABLE, LABEL, into=into)
                connection.receive(receive, partial(arrived, peer), fail)
                payload = mine.view(np.uint8).data
                request = SendRequest(peer, self._key(step, peer), payload, tags, RELIABLE, LABEL)
                connection.send(request, self._ledger.note_report, fail)
        except TransportError as error:
            fail(error)

    def _key(self, step: int, receiver: int) -> MessageKey:
        number = two_hop_number(REPORT_BUCKET, ALL_GATHER, receiver, self._ranks, shared=self._shared)
        return MessageKey(step, number)


class StepChooser:
    """Determines the arm of each step, which is the same on all ranks.

    Parameters
    ----------
    arms
        The arms that the ranks choose from (:func:`arms_of`).
    framework
        The framework, if it is among them.
    exchange
        The exchange of the ranks' reports; None if there is no choice.
    remote
        See :func:`arms_of`.
    table
        Knows when the step's latest bucket was ready, and averaged.
    endpoint
        Knows the paths to the other ranks.

    Attributes
    ----------
    arms
        The arms that the ranks choose from.
    arm
        The arm of the step in progress.
    framework_steps
        The number of steps that the framework has averaged.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        framework: FrameworkRoute | None,
        exchange: ReportExchange | None,
        table: BucketTable,
        endpoint: Endpoint,
        *,
        remote: bool = True,
    ) -> None:
        self.framework_steps = 0
        self.arm = arms[-1]
        self.arms, self._framework, self._exchange = tuple(arms), framework, exchange
        self._table, self._connection = table, endpoint.connection
        self._chooser: ArmChooser | None = None
        self._remote = remote
        self._measured: tuple[int, float] | None = None
        """The step that is being measured, and when it began (monotonic)."""
        self._reported: tuple[int, Callable[[], list[float]]] | None = None
        """A step, and the function that returns the report on it."""

    @property
    def decision(self) -> str:
        """The arm outside of trials, and the reason for it, for the user; ``""`` if the options fix it."""
        if self._chooser is not None:
            return self._chooser.decision
        if self.arm.route is Route.FRAMEWORK:
            return "framework, as the option route says"
        return "" if self._remote else f"{self.arm.bits} bits: all ranks exchange packets through memory"

    def fix(self, arm: Arm) -> None:
        """Use this arm from the next step on, and do not choose any more; all ranks must call it before that step."""
        self._exchange, self.arm = None, arm

    def begin_step(self, step: int, *, listen: bool) -> None:
        """Set :attr:`arm` to that of a new step, whose first bucket is ready.

        Parameters
        ----------
        listen
            Whether all ranks still exchange reports. If not, this rank has left DLCP, or is about to: the others do not
            finish this step before they have left it, too.

        Raises
        ------
        TransportError
            The other ranks' reports did not come.
        """
        now_s = time.monotonic()
        if self._exchange is not None:
            if listen:
                self._choose(self._exchange, step, now_s)
            else:
                self.arm = self.arms[0]
        self._measured = step, now_s
        self.framework_steps += self.arm.route is Route.FRAMEWORK

    def _choose(self, exchange: ReportExchange, step: int, now_s: float) -> None:
        chooser = self._chooser
        if chooser is None:
            name = self._framework.name if self._framework else ""
            chooser = self._chooser = ArmChooser(self.arms, name, report_s=exchange.cost_s, first_step=step)
        if self._reported is not None:
            before = chooser.decision
            reported, report = self._reported
            self._reported = None
            chooser.observe(reported, StepReport.from_maxima(report()))
            if self._connection.rank == 0 and chooser.decision != before:
                log.info("DLCP: %s", chooser.decision)
        if self._measured is not None and chooser.wants(self._measured[0]):
            last, began_s = self._measured
            self._reported = last, exchange.start(step, self._report(now_s - began_s).to_maxima())
        self.arm = chooser.choose(step)

    def _report(self, step_s: float) -> StepReport:
        """Return this rank's report on the step that ends now, after ``step_s`` seconds."""
        connection, table = self._connection, self._table
        known = self.arm.route is Route.DLCP or (self._framework is not None and self._framework.reports_end)
        remote = [peer for peer in connection.peers.values() if not peer.local]
        return StepReport(
            step_s=step_s,
            waited_s=max(0.0, table.averaged_s - table.ready_s) if known else step_s,
            lossy=not all(peer.is_clear for peer in remote),
            # Of ranks that share hosts, only those that reach others through a network see its queues.
            queued=not remote or any(peer.has_queued(step_s) for peer in remote),
        )
