# SPDX-License-Identifier: Apache-2.0
"""A training session: ranks join, average buckets with DLCP, and continue without it when it fails.

A session begins by agreeing with all ranks whether to use DLCP (:mod:`dlcp.session.joining`). While it works, a
:class:`dlcp.session.averager.StepAverager` averages buckets. When it fails, every rank leaves DLCP, all ranks complete
exactly the buckets that some of them have not finished (:mod:`dlcp.session.recovery`), and later buckets take another
way, which each framework names with a :class:`Fallback`. No gradient is lost in between.

The phases of a session, and what leads from one to the next::

             agreed on DLCP              a rank fails               all open buckets complete
    JOINING ----------------> READY -----------------> RECOVERING ---------------------------> FALLBACK
       |                                                   |                                      |
       |  agreed not to use DLCP                           |  a contribution is lost, a rank      |  the framework
       +----------------------------------> FALLBACK       |  has ended or hangs, or there is     |  fails, too
                                                           |  no fallback                         |
                                                           +---------------> FAILED <-------------+

With ``elastic``, ``RECOVERING`` leads back to ``READY``: the ranks that are left complete the open buckets, and join
each other again as the next epoch of the session. New ranks get in while it is ``READY``: the next epoch begins with a
step (:mod:`dlcp.session.admission`).

:meth:`TrainingSession.close` leads from each phase to ``CLOSED``. A session keeps no more of a phase than its
:class:`Situation`. What is built for one membership (endpoint, reducers, chooser) ends with ``RECOVERING``; the step,
its buckets, the residual and the options do not.

The session is the same for all frameworks. :class:`dlcp.torch.state.State` and :class:`dlcp.session.group.Group` turn
their gradients into buckets.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, Reducer
from dlcp.collectives.choice import DIRECT
from dlcp.host.closing import ExitCallback, ending_error, exiting
from dlcp.inputs.error_text import describe
from dlcp.policies.arms import Route
from dlcp.session.admission import RankAdmission, collect_epoch
from dlcp.session.averager import BucketProgress, BucketTable, PendingBucket, StepAverager
from dlcp.session.choosing import FrameworkRoute, ReportExchange, StepChooser, arms_of
from dlcp.session.joining import Agreement, Joined, NotJoinedError, join, label_of
from dlcp.session.options import FRAMEWORK_ROUTE, Options
from dlcp.session.recovery import HangWatchdog, PeerWatch, Recovery
from dlcp.transport import (
    DeadlineError,
    Endpoint,
    Membership,
    PeerHangsError,
    PeerLeftError,
    PeerSilentError,
    RankEndedError,
    TransportError,
)
from dlcp.transport.messages import at_step
from dlcp.transport.shared_memory import EXPORT_BYTES

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.host.timeline import Timeline
    from dlcp.session.snapshots import SnapshotWriter

log = logging.getLogger("dlcp")

CALL: Final = "dlcp.session.join"
"""The function with which ranks join a group, for messages."""
LEFT: Final = "left"
"""The topic under which ranks announce that they have left DLCP."""
WEIGHTED: Final = "weighted"
"""The topic under which ranks announce that they weigh by samples: without DLCP, they still do."""
WATCH_S: Final = 0.25
"""Interval between checks whether another rank has left DLCP or ended. A dead rank delays the others by about this
much, and a check is one query of the store, under 1 ms."""
CHANGES_KEPT: Final = 32
"""Number of latest changes of the ranks that are kept: enough for people to read."""
DEADLINE_FACTOR: Final = 3
"""A bucket may take this many deadlines: one for each of its two hops, and one to recover if they fail."""


class SessionPhase(Enum):
    """Phase of a session."""

    JOINING = "joining"
    READY = "ready"
    """DLCP averages."""
    RECOVERING = "recovering"
    """DLCP has failed; the ranks complete open buckets."""
    FALLBACK = "fallback"
    """The fallback averages."""
    FAILED = "failed"
    """Nothing averages any more."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Situation:
    """A session's phase, with the data of the phase.

    Parameters
    ----------
    phase
        The phase.
    reason
        Why DLCP does not average; ``""`` while it does.
    recovery
        The thread that recovers, or has recovered; None before.
    error
        The error that ended averaging for good; None if there was none.
    is_closing
        Whether the session is about to be closed.
    """

    phase: SessionPhase = SessionPhase.JOINING
    reason: str = ""
    recovery: threading.Thread | None = None
    error: TransportError | None = None
    is_closing: bool = False


@dataclass(frozen=True, slots=True)
class Fallback:
    """How a framework averages without DLCP.

    Parameters
    ----------
    name
        The noun for messages: "training continues with ...".
    average
        Averages a bucket on the host in place, residual included, and calls its second argument with None or an error;
        called in one order on all ranks. None if every caller of :meth:`TrainingSession.admit` averages by itself.
    watch
        How ranks leave DLCP together when it fails. None if a failure concerns its own bucket only.
    route
        How to use this way while DLCP works, where it is faster. None if DLCP averages all steps.
    """

    name: str
    average: Callable[[PendingBucket, Callable[[BaseException | None], None]], None] | None = None
    watch: PeerWatch | None = None
    route: FrameworkRoute | None = None


class RankChange(TypedDict):
    """A change of the ranks that take part."""

    step: int
    """The step in progress, or the first step with new ranks."""
    ranks: list[int]
    """The ranks from then on."""
    text: str
    """What happened, for people."""
    stood_s: float
    """How long training stood still for it, in seconds."""


def _which_is_server(joined: Joined) -> str:
    """Return what to append to a reason that may name the parameter server by its rank."""
    server = joined.membership.server
    return "" if server is None else f" (rank {server} is the parameter server)"


def reason_of_exit(rank: int) -> str | None:
    """Return why this process ends, for the other ranks, if an exception ended it that nothing caught."""
    return reason_of(rank, ending_error()) if exiting() else None


def reason_of(rank: int, error: BaseException | None) -> str | None:
    """Return why this rank ends, for the other ranks, if an error ended it."""
    return f"rank {rank} gives up: {error!r}" if error else None


class TrainingSession:
    """Averages the buckets of one model or group. A step must be finished on this rank before its next one begins.

    It has more methods than most classes: those that average depend on the situation, and those that change it depend
    on the buckets in progress, under one lock.

    Parameters
    ----------
    averager
        Averages buckets while the phase is ``READY``. It has the options, the ranks and the residual.
    fallback
        How to average when DLCP does not.
    table
        The step in progress and its buckets, which outlive the session; by default a new one, whose step is 0.

    Attributes
    ----------
    situation
        Its phase and the data of that.
    table
        The buckets in progress.
    endpoint
        This rank's endpoint; None if DLCP could not be used.
    hosts
        The number of hosts that the ranks are on; 0 without DLCP.
    chooser
        Chooses each step's arm; None before the ranks have joined, and without DLCP.
    compared
        Returns the fields of a snapshot about ranks that make others wait; None if ranks are not compared.
    label
        Name of the session, the same on all its ranks, also on those that come later; ``""`` until they have joined.
    changes, stood_s
        The latest changes of the ranks, the last one at the end; how long training stood still in all of them, in
        seconds.
    on_let_in
        Called on the lowest rank, at the beginning of the first step with new ranks, to give them the state.
    """

    def __init__(self, averager: StepAverager, fallback: Fallback, table: BucketTable | None = None) -> None:
        self.averager, self.fallback = averager, fallback
        self.situation = Situation()
        self._asked = averager.options
        """The options as given, before anything was measured: ranks that come later have only these."""
        self._over = threading.Event()
        """Set once DLCP averages no more."""
        self.table = table or BucketTable()
        self.table.begin_session()
        self.endpoint: Endpoint | None = None
        self.hosts = 0
        self.chooser: StepChooser | None = None
        self._joined: Joined | None = None
        self._recoverable = False
        self._metadata: Future[NDArray[np.generic]] | None = None
        """All ranks' metadata of this step, until it has been read."""
        self._watcher: threading.Thread | None = None
        self._admission: RankAdmission | None = None
        """New ranks, until a step with them is complete."""
        self.on_let_in: Callable[[RankAdmission], None] | None = None
        self.label = ""
        self.changes: deque[RankChange] = deque(maxlen=CHANGES_KEPT)
        self.stood_s = 0.0
        self._close_lock = threading.RLock()
        """Held while closing: a second thread that closes returns after that. A signal handler may close again."""
        self._snapshots: SnapshotWriter | None = None
        self.compared: Callable[[], Mapping[str, Any]] | None = None
        self._exit = ExitCallback(self.leave_at_exit)

    @property
    def membership(self) -> Membership:
        """The ranks; once they have joined, with their addresses."""
        return self.averager.membership

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.averager.membership.rank

    @property
    def options(self) -> Options:
        """The options; once the ranks have joined, with measured and agreed values."""
        return self.averager.options

    # Joining ----------------------------------------------------------------------------------------------------------

    def join(self, agreement: Agreement, *, call: str, export_bytes: int = EXPORT_BYTES) -> None:
        """Join the other ranks; all must call it. If not all can use DLCP, all fall back, and one rank says why.

        Parameters
        ----------
        agreement, call, export_bytes
            See :func:`dlcp.session.joining.join`.

        Raises
        ------
        NotJoinedError
            Not all can use DLCP, and ``options.fallback`` is off.
        ValueError
            ``options.route`` is ``framework``, and there is none.
        """
        if self.options.route == FRAMEWORK_ROUTE and self.fallback.route is None:
            raise ValueError(f"route 'framework' needs PyTorch: {call} averages with DLCP; omit it, or set 'dlcp'")
        self.show()
        if self.options.weighted:
            agreement.publish(WEIGHTED, True)
        on_message = self.table.meter.on_message if self.table.meter else None
        joined: Joined | None = None
        while joined is None:
            try:
                options = self._options_of(agreement)
                joined = join(options, agreement, call=call, export_bytes=export_bytes, on_message=on_message)
            except NotJoinedError as problem:
                watch = self.fallback.watch
                if watch and problem.is_for_server:
                    watch.lose_server(str(problem))
                left = watch.regroup(str(problem)) if watch else None
                if left:
                    self.averager.membership = left.membership
                if left is None or (left.ranks == agreement.ranks and not problem.is_for_server):  # it would fail again
                    self._train_without(agreement, problem)
                    return
                agreement = left
        if joined.remark and self.rank == self.membership.ranks[0]:
            log.warning("DLCP: %s", joined.remark)
        self.label = label_of(joined.membership)
        self.averager.join(joined)
        self._begin(joined)

    def use(self, endpoint: Endpoint, reducer: Reducer) -> None:
        """Average over ``endpoint`` with ``reducer``."""
        self.averager.reducer = reducer
        self._begin(Joined(endpoint, self.options, "", self.membership, link=None, remote=True))

    def show(self) -> None:
        """Begin to write snapshots, if the options ask for them."""
        if self.options.live:
            from dlcp.session.snapshots import SnapshotWriter  # only for jobs that somebody watches

            self._snapshots = SnapshotWriter.open(self, self.options.live)
            self.table.meter = self._snapshots.meter if self._snapshots else None

    def enter(self, admission: RankAdmission, label: str) -> None:
        """Average with ranks that have let this one in, from the step that they have chosen; ``label`` is theirs."""
        self.label = label
        assert admission.joined
        assert admission.first_step is not None
        self.averager.join(admission.joined)
        self.table.step, self._admission, admission.has_begun = admission.first_step, admission, True
        self._begin(admission.joined)

    def _begin(self, joined: Joined) -> None:
        watch = self.fallback.watch
        self._recoverable = watch is not None and self.options.fallback and watch.open()
        self._exchange_with(joined)
        self._enter(phase=SessionPhase.READY)
        if watch is not None:
            self._begin_to_watch(watch)

    def _begin_to_watch(self, watch: PeerWatch) -> None:
        with self.table.changed:
            self._over = threading.Event()
            if self.situation.is_closing:
                self._over.set()
        arguments = watch, self._over
        self._watcher = threading.Thread(target=self._watch_peers, args=arguments, name="dlcp-watch", daemon=True)
        self._watcher.start()

    def _exchange_with(self, joined: Joined) -> None:
        self._joined, self.endpoint = joined, joined.endpoint
        self.hosts = len(joined.topology.ranks_by_host(joined.membership.ranks))
        self.chooser = self._make_chooser(joined)

    def _make_chooser(self, joined: Joined) -> StepChooser:
        framework, endpoint, ranks = self.fallback.route, joined.endpoint, joined.membership.ranks
        remote = joined.remote and len(ranks) > 1
        arms = arms_of(self.options, framework is not None, remote=remote)
        exchange = ReportExchange(endpoint, ranks, self.options, self.averager.ledger) if len(arms) > 1 else None
        # The numbers must not change with the ranks: a step in progress goes on with others.
        self.averager.number_buckets(beside_reports=exchange is not None or self.options.elastic > 0)
        return StepChooser(arms, framework, exchange, self.table, endpoint, remote=remote)

    def _train_without(self, agreement: Agreement, problem: NotJoinedError) -> None:
        """Fall back from the beginning."""
        if not self.options.fallback:
            raise problem
        if self.options.weighted and not agreement.all_publish(WEIGHTED):
            raise NotJoinedError(f"{problem}. Not all ranks set samples=..., so none can weigh by them") from None
        self._enter(phase=SessionPhase.FALLBACK, reason=str(problem))
        self._watch_in_fallback(str(problem))
        if agreement.speaker():
            log.warning("DLCP is off: %s. Training continues with %s.", problem, self.fallback.name)

    def _watch_in_fallback(self, reason: str) -> None:
        """Go on without ranks that end, which lets none in."""
        watch = self.fallback.watch if self.options.elastic else None
        if watch:
            watch.open()
            watch.let_in_no_more(reason)
            self._begin_to_watch(watch)

    def _enter(self, **changes: Any) -> None:
        """Change the situation, and wake the threads that wait for a change."""
        with self.table.changed:
            situation = self.situation = replace(self.situation, **changes)
            self.table.changed.notify_all()
        if situation.is_closing or situation.phase not in (SessionPhase.JOINING, SessionPhase.READY):
            self._over.set()

    @property
    def phase(self) -> SessionPhase:
        """The phase."""
        return self.situation.phase

    @property
    def reason(self) -> str:
        """Why DLCP does not average; ``""`` while it does."""
        return self.situation.reason

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; if not, see :attr:`reason`."""
        return self.phase is SessionPhase.READY

    @property
    def route(self) -> str:
        """What averages now and the reason for it, as one sentence; ``""`` if there is no choice."""
        return self.chooser.decision if self.chooser else ""

    @property
    def framework_steps(self) -> int:
        """Number of steps that the framework has averaged while DLCP worked."""
        return self.chooser.framework_steps if self.chooser else 0

    def described(self) -> dict[str, Any]:
        """Return its fields of a snapshot; see :class:`dlcp.session.snapshots.RankSnapshot`."""
        return {
            "phase": self.phase.value,
            "reason": self.reason,
            "fallback": self.fallback.name,
            "route": self.route,
            "framework_steps": self.framework_steps,
            "session": self.label,
            "ranks": list(self.membership.ranks),
            "changes": list(self.changes),
            "stood_s": self.stood_s,
            **(self.compared() if self.compared else {"slow": None, "activities_s": {}}),
        }

    @property
    def timeline(self) -> "Timeline | None":
        """The timeline of this rank's events, if the options ask for one."""
        return self.endpoint.connection.timeline if self.endpoint else None

    @property
    def local_peers(self) -> int:
        """The number of other ranks that this one exchanges packets with through memory."""
        return len(self.endpoint.connection.local_peers) if self.endpoint else 0

    # Averaging --------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Send this rank's metadata to all ranks, if it has ``samples``; further calls in a step do nothing."""
        if self.averager.sends_metadata and not self.has_sent_metadata(step):
            self._metadata = self.average(step, self.averager.metadata_number, self.averager.metadata())

    def has_sent_metadata(self, step: int) -> bool:
        """Return whether this rank has sent its metadata of a step."""
        return (step, self.averager.metadata_number) in self.table.buckets

    def weight(self, step: int) -> float:
        """Return the factor on this rank's gradients of a step, once all ranks' metadata is here.

        Raises
        ------
        TransportError
            The metadata did not come.
        """
        self.begin_step(step)
        if self._metadata:
            limit_s = DEADLINE_FACTOR * self.options.deadline_s
            try:
                self.averager.read_metadata(self._metadata.result(limit_s).astype(np.float32))
            except FutureTimeoutError:
                raise DeadlineError(f"step {step}: not all ranks' metadata came within {limit_s:g} s") from None
            self._metadata = None
        return self.averager.weight

    def route_of(self, step: int) -> Route:
        """Return what averages a step while DLCP works; the step begins with the first call.

        It is the same on all ranks, also on those that have left DLCP: there the step waits until all have.
        """
        begins = self.table.begin_step(step)
        if begins:
            self._reach(step)
        chooser = self.chooser
        if chooser is None:
            return Route.DLCP
        if begins:
            try:
                chooser.begin_step(step, listen=self.phase is SessionPhase.READY)
            except TransportError as error:
                where = at_step(self.options.job, step)
                self.leave(PeerSilentError(f"{where}: rank {self.rank} has no report of the others: {describe(error)}"))
                chooser.begin_step(step, listen=False)
                return Route.DLCP
            if self.phase is SessionPhase.READY and chooser.arm.route is Route.DLCP:
                assert self.averager.reducer
                self.averager.reducer.begin_step(step, chooser.arm.bits)
        return chooser.arm.route

    def flush(self, step: int) -> None:
        """Send a step in full that has not begun: nothing is lost, and all residual goes with it.

        All ranks must ask for the same step. Without DLCP every step is sent in full.
        """
        self.averager.flush_step = step

    def average(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket on the host in place; the future's result is ``bucket.values``.

        Every rank submits the same buckets, in any order within a step. Call it from one thread at a time.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        averaged: Future[NDArray[np.generic]] = Future()

        def then(error: BaseException | None) -> None:
            if error is None:
                averaged.set_result(bucket.values)
            else:
                averaged.set_exception(error)

        pending = PendingBucket(step, sequence, bucket.segments, bucket.values.nbytes, then, bucket)
        if self.admit(pending):
            self.start(pending)
        else:
            self._fall_back(pending)
        return averaged

    def admit(self, pending: PendingBucket) -> bool:
        """Enter a bucket. True: call :meth:`start` once it is on the host. False: average it without DLCP.

        If the caller averages it without DLCP, it must call :meth:`settle` afterwards.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        route = self.route_of(pending.step)
        with self.table.changed:
            self.check()
            if route is Route.FRAMEWORK:
                pending.progress = BucketProgress.BY_FRAMEWORK
            self.table.add(pending)
            by_framework = route is Route.FRAMEWORK or self.phase is SessionPhase.FALLBACK
        if self.timeline is not None:
            self.timeline.note("ready", *pending.id, pending.size_bytes, pending.label)
        return not by_framework

    def start(self, pending: PendingBucket) -> None:
        """Average an admitted bucket that is on the host, or leave it until the ranks have recovered."""
        assert pending.bucket
        # The lock is taken twice: callbacks of the averager may run before its start returns, and take the lock, too.
        with self.table.changed:
            pending.progress = BucketProgress.STARTING if self.phase is SessionPhase.READY else BucketProgress.WAITING
        if pending.progress is BucketProgress.STARTING:
            try:
                pending.run = self.averager.start(pending.step, pending.sequence, pending.bucket)
                pending.run.add_done_callback(partial(self._on_averaged, pending))
            except Exception as error:
                self._on_failure(pending, error)
        with self.table.changed:
            if pending.progress is BucketProgress.STARTING:
                pending.progress = BucketProgress.WAITING if pending.run is None else BucketProgress.AVERAGING
            self.table.changed.notify_all()
            failure = self.situation.error
        if failure:
            pending.answer(failure)

    def _on_averaged(self, pending: PendingBucket, done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            self._on_failure(pending, error)
            return
        assert pending.bucket
        timeline = self.timeline
        if timeline is not None:
            timeline.note("averaged", *pending.id)
        if self.options.elastic:
            pending.average = pending.bucket.values.copy()
        self.table.finish(pending)
        if timeline is not None:
            timeline.note("applied", *pending.id)

    def settle(self, pending: PendingBucket, error: BaseException | None = None) -> None:
        """Give an admitted bucket back that was averaged without DLCP, or could not be."""
        if error is None:
            self.table.finish(pending)
        elif self.fallback.watch is not None:
            # A rank that has ended after its own recovery makes the framework fail here, too; recovery knows the cause.
            recovery = self.situation.recovery
            if recovery and recovery is not threading.current_thread():
                recovery.join(self.options.deadline_s)
            if not self.situation.error:
                self.fail(f"step {pending.step}: {pending.label} is not averaged: {describe(error)}")
        else:
            self.table.give_up(pending, error)

    def check(self) -> None:
        """Raise the error that averaging has failed with, if it has."""
        if self.situation.error:
            raise self.situation.error

    def _fall_back(self, pending: PendingBucket) -> None:
        assert self.fallback.average
        self.fallback.average(pending, partial(self.settle, pending))

    # Leaving DLCP -----------------------------------------------------------------------------------------------------

    def _watch_peers(self, watch: PeerWatch, over: threading.Event) -> None:
        """Leave DLCP when another rank has left it or ended, even if this rank waits for nothing at the moment."""
        with HangWatchdog(self.options.silence_s) as watchdog:  # explains why this rank hangs, once the others name it
            while not over.wait(WATCH_S):
                watchdog.postpone()
                try:
                    error = watch.check_peers(self._where()) or self._overdue() or self._server_gone()
                    lets_in = self.active and not error and self.on_let_in and not self._admission
                    admission = watch.newcomers() if lets_in else None
                except RuntimeError as problem:
                    log.debug("the other ranks cannot be watched any more: %s", problem)
                    return
                if over.is_set():  # another thread watches now
                    return
                if error and self.phase is SessionPhase.FALLBACK:
                    self._regroup_in_fallback(watch, error)
                elif error:
                    self.leave(error)
                elif admission:
                    self._admission = admission
                    threading.Thread(target=self._let_in, args=(admission,), name="dlcp-let-in", daemon=True).start()

    # Letting ranks in -------------------------------------------------------------------------------------------------

    def _let_in(self, admission: RankAdmission) -> None:
        """Join new ranks, beside training, and agree on the first step with them."""
        try:
            admission.joined = self.join_aside(admission.agreement)
            if self._admission is admission:
                admission.agree(self.table)
            else:  # ranks have ended meanwhile
                admission.close()
        except NotJoinedError as problem:
            if problem.is_for_server and self.fallback.watch:
                self.fallback.watch.lose_server(str(problem))
            if admission.is_lowest:
                log.warning("DLCP: ranks %s are not let in: %s", list(admission.new), problem)
            if self._admission is admission:
                self._admission = None
        except TransportError as error:
            if self._admission is admission:
                self.leave(error)
        with self.table.changed:
            self.table.changed.notify_all()

    def join_aside(self, agreement: Agreement) -> Joined:
        """Join the ranks of another epoch, which does not average yet."""
        on_message = self.table.meter.on_message if self.table.meter else None
        return join(self._options_of(agreement), agreement, call=CALL, on_message=on_message)

    def _options_of(self, agreement: Agreement) -> Options:
        return self._asked.with_(collective=DIRECT) if agreement.without_server else self._asked

    def _reach(self, step: int) -> None:
        """Begin the next epoch, if this step is its first; before that, the lowest rank waits until all know that."""
        admission = self._admission
        if admission is None or admission.first_step is None:
            return
        if admission.must_agree(step):
            with self.table.changed:
                changed = self.table.changed.wait_for(
                    lambda: admission.is_agreed or self.phase is not SessionPhase.READY, self.options.deadline_s
                )
            if not changed:
                self.leave(DeadlineError(f"step {step}: ranks do not know that {list(admission.new)} are let in"))
        if step < admission.first_step:
            return
        if not admission.has_begun:
            self._begin_epoch(admission, step)
        elif step > admission.first_step:
            self._admission = None
            admission.complete()

    def _begin_epoch(self, admission: RankAdmission, step: int) -> None:
        """Average with the new ranks from this step on."""
        watch, reducer = self.fallback.watch, self.averager.reducer
        assert watch
        assert reducer
        assert self._joined
        with self.table.changed:
            if self.phase is not SessionPhase.READY or self._admission is not admission:
                return
            joined = admission.begin((self._joined, reducer))
            admission.first_step = step
            self.averager.join(joined)
            watch.attend(joined.membership)
            self._exchange_with(joined)
        ranks, new = (", ".join(map(str, each)) for each in (joined.membership.ranks, admission.new))
        text = f"from step {step} on, {len(joined.membership.ranks)} ranks take part: {ranks} (new: {new})"
        self._note_change(step, text, 0.0)
        if admission.is_lowest and self.on_let_in:
            self.on_let_in(admission)

    def _server_gone(self) -> BaseException | None:
        """Return an error if this rank invites the parameter server, and that has ended."""
        link = self._joined.link if self._joined and self.active and self.options.elastic else None
        if link is None or link.is_connected:
            return None
        return PeerSilentError(f"the parameter server at {self.options.server} has ended; {self._where()}")

    def _overdue(self) -> BaseException | None:
        """Return an error if the framework takes longer for a bucket than DLCP may."""
        with self.table.changed:
            overdue_s = time.monotonic() - self.table.ready_s - self.options.deadline_s
            routed = [each for each in self.table.unfinished() if each.progress is BucketProgress.BY_FRAMEWORK]
            late = routed if overdue_s > 0 else []
        if not late:
            return None
        where, limit_s = at_step(self.options.job, late[0].step), self.options.deadline_s
        return DeadlineError(f"{where}: {self.fallback.name} has not averaged {late[0].label} within {limit_s:g} s")

    def _where(self) -> str:
        """Return the step that this rank is in, and the layers it waits for, if any."""
        with self.table.changed:
            unfinished = self.table.unfinished()
        if not unfinished:
            return f"step {self.table.latest_step}"
        return f"step {unfinished[0].step}: rank {self.rank} waits for {unfinished[0].label}"

    def _on_failure(self, pending: PendingBucket, error: BaseException) -> None:
        if self.fallback.watch is not None:
            self.leave(error)
        else:
            self.table.give_up(pending, error)

    def leave(self, error: BaseException) -> None:
        """Stop using DLCP because of an error, and recover if possible; further errors change nothing."""
        failed: list[PendingBucket] = []
        with self.table.changed:
            if self.situation.is_closing:
                failed = self.table.unfinished()
            elif self.phase is SessionPhase.READY:
                recovery = threading.Thread(target=self._recover, args=(error,), name="dlcp-recovery", daemon=True)
                self._enter(phase=SessionPhase.RECOVERING, recovery=recovery)
                recovery.start()  # under the lock: close() joins the thread that it finds
        for pending in failed:
            pending.answer(error)

    def _recover(self, error: BaseException) -> None:
        if self.timeline is not None:
            self.timeline.note("left", self.table.latest_step, 0, describe(error))
        watch, link = self.fallback.watch, self._joined.link if self._joined and self.options.elastic else None
        try:
            lost = link.lost() if link and not isinstance(error, RankEndedError) else None
            self._leave_peers(describe(error))  # nothing is written into any bucket after this
            if watch and lost:
                watch.lose_server(lost)
            if self._recoverable and watch and self._go_on_without_ended(watch, error):
                return
            if not self._recoverable or watch is None or isinstance(error, RankEndedError | PeerLeftError):
                self.fail(describe(error))
                return
            watch.publish_left(describe(error))
            self._hand_over(self._complete_buckets(watch, error))
        except PeerHangsError as hanging:  # the cause of the error, whatever the error says
            self.fail(str(hanging))
        except Exception as problem:
            log.debug("recovery failed", exc_info=True)
            why, problem_text = describe(error), describe(problem)
            self.fail(f"{why}; and {self.fallback.name} cannot take over: {problem_text}")

    def _complete_buckets(self, watch: PeerWatch, error: BaseException) -> str:
        assert self.endpoint
        payload_bytes = self.endpoint.connection.options.payload_bytes
        recovery = Recovery(self.averager, self.table, payload_bytes, watch, self.membership.ranks)
        return recovery.complete_buckets(error)

    def _go_on_without_ended(self, watch: PeerWatch, error: BaseException) -> bool:
        """Complete the open buckets with the ranks that are left, and go on; return False if the options forbid it."""
        began_s, before, cause = time.monotonic(), self.membership.ranks, describe(error)
        remark = _which_is_server(self._joined) if self._joined else ""
        joined: Joined | None = None
        while joined is None:
            there = self.membership
            try:
                agreement = watch.regroup(cause)
            except RankEndedError as final:
                self.fail(describe(final))
                return True
            if agreement is None:
                return False
            members = self.averager.membership = agreement.membership
            try:
                cause = self._complete_buckets(watch, error)
                joined = self.join_aside(agreement)
            except RankEndedError as problem:
                cause = describe(problem)
            except PeerHangsError as problem:
                if problem.is_this_rank:
                    raise
                cause = describe(problem)
            except NotJoinedError as problem:
                cause = describe(problem)
                if problem.is_for_server:
                    watch.lose_server(cause)
                elif not problem.is_for_change and there.epoch and members.ranks == there.ranks:  # it would fail again
                    self._hand_over(cause)
                    if members.ranks != before:
                        self._note_end(describe(error), before, time.monotonic() - began_s)
                    return True
        self._resume(joined)
        self._note_end(cause + remark, before, time.monotonic() - began_s)
        return True

    def _regroup_in_fallback(self, watch: PeerWatch, error: BaseException) -> None:
        """Go on with the ranks that are left, among which the fallback averages the open buckets again."""
        began_s, before, cause = time.monotonic(), self.membership.ranks, describe(error)
        try:
            agreement = watch.regroup(cause)
        except TransportError as final:
            self.fail(describe(final))
            return
        assert agreement  # only with elastic do ranks watch each other then
        with self.table.changed:
            self.averager.membership = agreement.membership
            self.table.changed.notify_all()
        self._note_end(cause, before, time.monotonic() - began_s)

    def _note_end(self, cause: str, before: Sequence[int], stood_s: float) -> None:
        left, step = self.membership.ranks, self.table.step
        went_on = f"Training goes on after {stood_s:.2f} s in step {step} with {len(left)} of {len(before)} ranks"
        self._note_change(step, f"{cause}. {went_on}: {', '.join(map(str, left))}", stood_s)

    def _note_change(self, step: int, text: str, stood_s: float) -> None:
        ranks = list(self.membership.ranks)
        self.stood_s += stood_s
        self.changes.append({"step": step, "ranks": ranks, "text": text, "stood_s": stood_s})
        if self.rank == ranks[0]:
            log.warning("DLCP: %s.", text)

    def wait_for_next_epoch(self, epoch: int, error: BaseException) -> bool:
        """Let the ranks go on without one that has ended; return whether they did.

        Parameters
        ----------
        epoch
            The epoch in which the error occurred.
        error
            What says that a rank has ended.
        """
        if not self.options.elastic:
            return False
        if self.membership.epoch == epoch:
            self.leave(error)
            if self.phase is SessionPhase.FALLBACK and self.fallback.watch:
                self.fallback.watch.publish_left(describe(error))

        def is_decided() -> bool:
            waits = self.phase is SessionPhase.FALLBACK and self.membership.epoch == epoch
            return self.phase is not SessionPhase.RECOVERING and not waits

        with self.table.changed:
            decided = self.table.changed.wait_for(is_decided, DEADLINE_FACTOR * self.options.deadline_s)
            return decided and self.membership.epoch > epoch

    def _resume(self, joined: Joined) -> None:
        """Average with the ranks that have joined again, beginning with the buckets that have come meanwhile."""
        table = self.table
        self.averager.close()
        self.averager.join(joined)
        with table.changed:
            table.begin_epoch()
            waiting = [each for each in table.unfinished() if each.progress is BucketProgress.WAITING]
            self._begin(joined)
        for pending in waiting:
            self.route_of(pending.step)
            self.start(pending)
        collect_epoch()

    def _leave_peers(self, reason: str | None) -> None:
        admission, self._admission = self._admission, None
        if admission:
            admission.close(reason)
        if self._joined:
            self._joined.close(reason)

    def _hand_over(self, reason: str) -> None:
        """Fall back from here on, beginning with the buckets that have arrived meanwhile."""
        table, deadline_s = self.table, self.options.deadline_s
        if self._joined:
            reason += _which_is_server(self._joined)
        with table.changed:
            if not table.changed.wait_for(lambda: all(each.is_decided for each in table.unfinished()), deadline_s):
                raise DeadlineError(f"gradients did not come from the device in {deadline_s:g} s")
            for pending in table.unfinished():
                if pending.progress is not BucketProgress.BY_FRAMEWORK:
                    self._fall_back(pending)
            self._enter(phase=SessionPhase.FALLBACK, reason=reason)
        self._watch_in_fallback(reason)
        if self.rank == self.membership.ranks[0]:
            log.warning(
                "DLCP is off after step %d: %s. Training continues with %s, with the gradients of that step.",
                table.latest_step,
                reason,
                self.fallback.name,
            )

    def fail(self, message: str) -> None:
        """Fail for good: nothing averages from here on."""
        if self.fallback.watch is not None:
            self.fallback.watch.publish_failed(message)
        with self.table.changed:
            error = self.situation.error or TransportError(message)
            self._enter(phase=SessionPhase.FAILED, reason=message, error=error)
            failed = self.table.drain()
        for pending in failed:
            pending.answer(error)

    def leave_at_exit(self) -> None:
        """Leave the other ranks because this process ends, or its process group: they may still wait for averages.

        A script need not close its session. Without this, data that the others have not acknowledged would end with the
        process.
        """
        with self.table.changed:
            waiting = bool(self.table.unfinished()) and self.phase is SessionPhase.READY
        reason = reason_of_exit(self.rank)
        if reason is None and waiting:
            reason = (
                reason_of(self.rank, ending_error())
                or f"rank {self.rank}: its process ends in the middle of step {self.table.latest_step}"
            )
        self.close(reason)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up. Any thread may call it."""
        if self._exit.is_fork:
            return
        with self._close_lock:
            if self.phase is not SessionPhase.CLOSED:
                self._close(reason)

    def _close(self, reason: str | None) -> None:
        self._exit.cancel()
        self._enter(is_closing=True)
        if self.situation.recovery:
            self.situation.recovery.join(self.options.deadline_s)
        self._leave_peers(reason)
        if self._watcher:  # a daemon thread inside PyTorch's store when Python ends aborts the process
            self._watcher.join(self.options.silence_s)
        self.averager.close()
        if self.fallback.watch is not None:
            self.fallback.watch.close()
        ended_as = self.phase
        self._enter(phase=SessionPhase.CLOSED)
        if self._snapshots:
            self._snapshots.close(ended_as.value, reason)
