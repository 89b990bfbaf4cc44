# SPDX-License-Identifier: Apache-2.0
"""A training session: ranks join, average buckets with DLCP, and go on without it when it fails.

A session begins by agreeing with all ranks whether to use DLCP (:mod:`dlcp.session.joining`). A bucket of gradients
goes to a reducer while that works. When it fails, every rank leaves DLCP, all complete exactly what some of them have
not finished (:mod:`dlcp.session.recovery`), and later buckets go another way: which one, each framework says with a
:class:`Fallback`. No gradient is lost in between. Where options ask for it, steps begin with a bucket of metadata, and
an autotuner (:mod:`dlcp.tuning`) chooses by it.

The session is the same for all frameworks. What turns their gradients into buckets is :mod:`dlcp.torch.hook`,
:mod:`dlcp.torch.cross_step` and :mod:`dlcp.session.group`.
"""

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.closing import ExitCallback
from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.partial_result import PartialResult, RecoveryChannel
from dlcp.collectives.reduction_rules import check_samples
from dlcp.error_text import describe
from dlcp.ledger import Ledger
from dlcp.session.joining import Agreement, Joined, NotJoinedError, join, label_of
from dlcp.session.options import Options
from dlcp.tags import Segment, Tagger
from dlcp.transport import DeadlineError, Endpoint, PeerHangsError, PeerLeftError, RankEndedError, TransportError
from dlcp.transport.shared_memory import EXPORT_BYTES

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.session.snapshots import SnapshotWriter, StepMeter
    from dlcp.timeline import Timeline
    from dlcp.tuning.autotuner import Autotuner
    from dlcp.tuning.rules import Settings

log = logging.getLogger("dlcp")

LEFT: Final = "left"
"""Where ranks say that they have left DLCP."""
WEIGHTED: Final = "weighted"
"""Where ranks say that they weigh by samples: if DLCP cannot be used, they do so without it."""
WATCH_S: Final = 0.25
"""How often a rank looks whether another has left DLCP or ended: it may wait for that one elsewhere. Chosen by us."""
PATIENCE: Final = 3
"""So many deadlines a bucket may take: for its messages, and, should they fail, to recover. Chosen by us."""

BucketId = tuple[int, int]
"""A bucket, by its step and its number within the step."""


class SessionPhase(Enum):
    """What a session is at."""

    JOINING = "joining"
    READY = "ready"
    """DLCP averages."""
    RECOVERING = "recovering"
    """DLCP has failed; the ranks complete what is open."""
    FALLBACK = "fallback"
    """Averages come from what is fallen back to."""
    FAILED = "failed"
    """There are no averages any more."""
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class PendingBucket(ABC):
    """A bucket that is to be averaged, from when its step reaches it until whoever waits has the average.

    Attributes
    ----------
    bucket
        Its values on the host; None until they are there.
    reducing
        Whether the reducer has got it. It counts once ``decided`` is set.
    """

    step: int
    sequence: int
    segments: Sequence[Segment]
    bucket: Bucket | None = None
    reducing: bool = False
    decided: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> BucketId:
        """What all ranks know it by."""
        return self.step, self.sequence

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        names = [self.segments[0].layer.name, self.segments[-1].layer.name]
        return "..".join(dict.fromkeys(names))

    @abstractmethod
    def resolve(self) -> None:
        """Give the average, which is in ``bucket``, to whoever waits."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Give an error to whoever waits, unless they have an answer."""


@dataclass(slots=True, eq=False)
class HostBucket(PendingBucket):
    """A bucket on the host from the beginning; ``answer`` resolves with its averaged values."""

    answer: "Future[NDArray[np.generic]]" = field(default_factory=Future)

    @classmethod
    def of(cls, step: int, sequence: int, bucket: Bucket) -> "HostBucket":
        """Return a pending bucket that is ready to be averaged."""
        return cls(step, sequence, bucket.segments, bucket)

    def resolve(self) -> None:
        """Resolve ``answer``."""
        assert self.bucket
        self.answer.set_result(self.bucket.values)

    def fail(self, error: BaseException) -> None:
        """Resolve ``answer`` with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class BucketTable:
    """The buckets that are not averaged yet, and which of the present step are.

    Attributes
    ----------
    changed
        Guards the table and the session's phase; notified when either has changed.
    step
        The latest step of which a bucket has come.
    meter
        What is told when buckets come and are averaged; None: nothing.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meter: StepMeter | None = None
        self.step = -1
        self.pending: dict[BucketId, PendingBucket] = {}
        self._finished: set[int] = set()

    def add(self, pending: PendingBucket) -> None:
        """Enter a bucket; hold ``changed``."""
        if pending.step > self.step:
            self.step = pending.step
            self._finished.clear()
        self.pending[pending.id] = pending
        if self.meter is not None:
            self.meter.on_ready(pending.step, pending.segments)
        self.changed.notify_all()

    def finish(self, pending: PendingBucket) -> None:
        """Take a bucket out that is averaged, and give the average to whoever waits."""
        with self.changed:
            found = self.pending.pop(pending.id, None)
            self._finished.add(pending.sequence)
        if self.meter is not None:  # first: whoever waits may begin the next step
            self.meter.on_averaged(pending.step)
        if found:
            found.resolve()

    def drain(self) -> list[PendingBucket]:
        """Take all buckets out; hold ``changed``."""
        drained = list(self.pending.values())
        self.pending.clear()
        return drained

    def wait_for(self, which: BucketId, deadline_s: float) -> PendingBucket | None:
        """Return a bucket once it has come and it is decided who averages it; None if this rank has finished it.

        Raises
        ------
        TimeoutError
            It has not come within the deadline.
        """
        step, sequence = which

        def came() -> bool:
            if which in self.pending:
                return self.pending[which].decided.is_set()
            return step < self.step or (step == self.step and sequence in self._finished)

        with self.changed:
            if not self.changed.wait_for(came, deadline_s):
                raise TimeoutError
            return self.pending.get(which)


class Fallback(ABC):
    """How a framework averages without DLCP, and how its ranks reach each other when they leave DLCP."""

    name: ClassVar[str]
    """For messages: what training goes on over."""
    recovers: ClassVar[bool] = True
    """Whether ranks leave DLCP together when it fails. Otherwise a failure concerns its own bucket only."""

    @abstractmethod
    def average(self, session: "TrainingSession", pending: PendingBucket) -> None:
        """Average a bucket that is on the host without DLCP, residual included; called in the order of buckets.

        The session's table is locked. ``session.table.finish`` or ``session.fail`` is due in the end.
        """

    def prepare(self) -> bool:
        """Open what :meth:`channel` returns; all ranks call it. False: a failure has to be an error."""
        return True

    def channel(self) -> RecoveryChannel:
        """Return what the ranks recover over."""
        raise NotImplementedError

    def why_leave(self, session: "TrainingSession") -> BaseException | None:
        """Return why this rank should leave DLCP, if others have left it or have ended.

        Raises
        ------
        RuntimeError
            The others cannot be watched any more.
        """
        return None

    def publish_left(self, reason: str) -> None:  # noqa: B027 - not every fallback has others to let know
        """Let the other ranks know, by their :meth:`why_leave`, that this one has left DLCP."""

    def publish_failed(self, reason: str) -> None:  # noqa: B027
        """Let the other ranks know that this one has failed for good."""

    def close(self) -> None:  # noqa: B027
        """Release what it holds."""


def reason_of_exit(rank: int) -> str | None:
    """Return what to tell the other ranks when this process ends by an exception that nobody has caught."""
    return reason_of(rank, getattr(sys, "last_value", None))


def reason_of(rank: int, error: BaseException | None) -> str | None:
    """Return what to tell the other ranks when this one ends by an error; None without one."""
    return f"rank {rank} gives up: {error!r}" if error else None


class TrainingSession:
    """Averages the buckets of one model or group. A step must be finished on this rank before its next one begins.

    Parameters
    ----------
    options
        The options; after :meth:`join` with what was found out.
    rank, ranks
        This rank, and all whose gradients are averaged.
    fallback
        What takes over.
    ledger, feedback, tagger
        What was sent and lost, what was lost and is still to be sent, and what tags packets.
    gradient_bytes
        What a rank contributes in a step, for the autotuner; 0 if that is not known yet.

    Attributes
    ----------
    phase, reason
        What the session is at, and why DLCP does not average, if it does not.
    table
        The buckets under way.
    endpoint
        This rank's endpoint; None if DLCP could not be used.
    autotuner
        What chooses settings and weighs ranks; None if the options ask for neither.
    metadata_step
        The latest step whose metadata this rank has sent.
    """

    def __init__(
        self,
        options: Options,
        rank: int,
        ranks: Sequence[int],
        fallback: Fallback,
        *,
        ledger: Ledger,
        feedback: Residual,
        tagger: Tagger,
        gradient_bytes: int = 0,
    ) -> None:
        self.options, self.rank, self.ranks = options, rank, sorted(ranks)
        self.fallback = fallback
        self.ledger, self.feedback, self.tagger = ledger, feedback, tagger
        self.gradient_bytes = gradient_bytes
        self.phase, self.reason = SessionPhase.JOINING, ""
        self.table = BucketTable()
        self.endpoint: Endpoint | None = None
        self.autotuner: Autotuner | None = None
        self.hosts = 0
        self._make: Callable[[Settings | None], Reducer] = self._make_reducer
        self._inbound_rates_bps: dict[int, float] = {}
        self._joined: Joined | None = None
        self._reducer: Reducer | None = None
        self._replaced: Reducer | None = None
        """What averaged before the settings changed, as long as it may still hold buckets of this step or the last."""
        self._reducer_step = -1
        self._recoverable = False
        self._metadata: Future[NDArray[np.generic]] | None = None
        """All ranks' metadata of this step, until it has been read."""
        self.metadata_step = -1
        self._flush_step = -1
        self._error: TransportError | None = None
        self._recovery: threading.Thread | None = None
        self._closing = threading.Event()
        self._snapshots: SnapshotWriter | None = None
        self._exit = ExitCallback(self.leave_at_exit)

    # Joining ----------------------------------------------------------------------------------------------------------

    def join(self, agreement: Agreement, *, call: str, export_bytes: int = EXPORT_BYTES) -> None:
        """Join the other ranks; all must call it. If they cannot all use DLCP, all fall back, and one rank says why.

        Parameters
        ----------
        agreement, call, export_bytes
            See :func:`dlcp.session.joining.join`.

        Raises
        ------
        NotJoinedError
            They cannot, and ``options.fallback`` is off.
        """
        if self.options.live:
            self._watch_steps(self.options.live)
        if self.options.weighted:
            agreement.publish(WEIGHTED, True)
        try:
            joined = join(self.options, agreement, call=call, export_bytes=export_bytes)
        except NotJoinedError as problem:
            self._do_without(agreement, problem)
            return
        if joined.remark and self.rank == self.ranks[0]:
            log.warning("DLCP: %s", joined.remark)
        self.options, self._joined = joined.options, joined
        self.hosts = len(joined.topology.ranks_by_host(self.ranks))
        if self._snapshots:
            self._snapshots.label = label_of(joined.options.job, joined.endpoint.connection.token)
        self.autotuner = self._make_autotuner(joined.endpoint)
        self.use(joined.endpoint, self._make_reducer)

    def use(self, endpoint: Endpoint, make: "Callable[[Settings | None], Reducer]") -> None:
        """Average with DLCP from now on, by what ``make`` returns for an autotuner's settings, or None without one."""
        self.endpoint, self._make = endpoint, make
        if self.table.meter is not None:
            endpoint.connection.on_message = self.table.meter.on_message
        self._reducer = make(self.autotuner.settings if self.autotuner else None)
        self._recoverable = self.fallback.recovers and self.options.fallback and self.fallback.prepare()
        self.phase = SessionPhase.READY
        if self.fallback.recovers:
            threading.Thread(target=self._watch, name="dlcp-watch", daemon=True).start()

    def _do_without(self, agreement: Agreement, problem: NotJoinedError) -> None:
        if not self.options.fallback:
            raise problem
        if self.options.weighted and not agreement.all_publish(WEIGHTED):
            raise NotJoinedError(f"{problem}. Nor do all ranks say samples=..., so none can weigh by them") from None
        self.phase, self.reason = SessionPhase.FALLBACK, str(problem)
        if self.options.weighted:
            self.autotuner = self._make_autotuner(None)
        if agreement.speaker():
            log.warning("DLCP is off: %s. Training continues with %s.", problem, self.fallback.name)

    def _watch_steps(self, folder: str) -> None:
        """Leave snapshots in a folder, if there is writing there."""
        from dlcp.session.snapshots import SnapshotWriter

        self._snapshots = SnapshotWriter.open(self, folder)
        self.table.meter = self._snapshots.meter if self._snapshots else None

    def _make_autotuner(self, endpoint: Endpoint | None) -> "Autotuner | None":
        options = self.options
        if not (options.weighted or options.adapt or options.phases):
            return None
        from dlcp.tuning.autotuner import Autotuner
        from dlcp.tuning.rules import Settings

        tuner = Autotuner(Settings.of(options), options.bound(), self.rank, self.ranks, samples=options.samples)
        if endpoint is not None:
            tuner.measure(
                self.ledger,
                endpoint.connection,
                adapt=options.adapt,
                phases=options.phases,
                hosts=self.hosts,
                gradient_bytes=self.gradient_bytes,
                inbound_rates_bps=self._inbound_rates_bps,
            )
        return tuner

    def _make_reducer(self, settings: "Settings | None") -> Reducer:
        joined, options = self._joined, self.options
        assert joined
        compression = options.compression
        if settings is not None:
            chosen = "protected_share", "collective", "deferral_bound"
            options = options.with_(**{name: getattr(settings, name) for name in chosen})
            compression = settings.compression
            self.tagger.policy = options.classes()
            weight = options.transport(len(self.ranks), joined.topology).flow_weight
            joined.endpoint.call(partial(joined.endpoint.connection.set_flow_weight, weight))
        return make_reducer(
            options.collective,
            RankContext(
                joined.endpoint.connection,
                self.ranks,
                options.reduction(),
                self.tagger,
                self.ledger,
                self.feedback,
                inbound_rates_bps=self._inbound_rates_bps,
            ),
            topology=joined.topology,
            compression=compression,
            combine=options.combine,
        )

    @property
    def active(self) -> bool:
        """Whether DLCP averages gradients; if not, see :attr:`reason`."""
        return self.phase is SessionPhase.READY

    @property
    def timeline(self) -> "Timeline | None":
        """Where this rank notes what it does, if anywhere."""
        return self.endpoint.connection.timeline if self.endpoint else None

    @property
    def local_peers(self) -> int:
        """With how many other ranks this one exchanges packets through memory."""
        return len(self.endpoint.connection.local_peers) if self.endpoint else 0

    # A step's metadata ------------------------------------------------------------------------------------------------

    @property
    def first_sequence(self) -> int:
        """The number of a step's first bucket of gradients."""
        return int(self.autotuner is not None and self.autotuner.sends)

    def set_samples(self, count: int) -> None:
        """Say how many samples this rank's gradients are the mean of, from the next step on.

        Raises
        ------
        ValueError
            It is no whole number, or the options do not say ``samples``.
        """
        check_samples(count)
        if not self.options.weighted:
            raise ValueError("all ranks count the same; say Options(samples=...) on every rank to weigh by samples")
        assert self.autotuner
        self.autotuner.samples_here = count

    def begin_step(self, step: int) -> None:
        """Send this rank's metadata to all ranks, if options ask for it; once a step, however often it is called."""
        tuner = self.autotuner
        if tuner and tuner.sends and step > self.metadata_step:
            from dlcp.collectives.step_metadata import bucket_of

            self.metadata_step = step
            pending = HostBucket.of(step, 0, bucket_of(tuner.table(step)))
            self._metadata = pending.answer
            self.submit(pending)

    def weight(self, step: int) -> float:
        """Return what this rank's gradients of a step are to be multiplied by, once all ranks' metadata is in.

        Raises
        ------
        TransportError
            The metadata did not come.
        """
        tuner = self.autotuner
        if tuner is None:
            return 1.0
        self.begin_step(step)
        if self._metadata:
            limit_s = PATIENCE * self.options.deadline_s
            try:
                tuner.read(self._metadata.result(limit_s).astype(np.float32))
            except FutureTimeoutError:
                raise DeadlineError(f"step {step}: no metadata of all ranks in {limit_s:g} s") from None
            self._metadata = None
        return tuner.weight

    # Averaging --------------------------------------------------------------------------------------------------------

    def flush(self, step: int) -> None:
        """Let a step that has not begun be whole: all ranks' residual goes with it, and nothing is lost or put off.

        All ranks must ask for the same step. Without DLCP every step is whole.
        """
        self._flush_step = step

    def submit(self, pending: PendingBucket) -> None:
        """Average a bucket that is on the host; every rank submits the same ones, in any order within a step.

        To be called by one thread at a time.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        with self.table.changed:
            self.check()
            self.table.add(pending)
            if self.phase is SessionPhase.FALLBACK:
                self.fallback.average(self, pending)
                return
        self._note_ready(pending)
        self.start(pending)

    def admit(self, pending: PendingBucket) -> bool:
        """Take in a bucket that is on its way to the host, for :meth:`start`; False if the framework is to average it.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        with self.table.changed:
            self.check()
            if self.phase is SessionPhase.FALLBACK:
                return False
            self.table.add(pending)
        self._note_ready(pending)
        return True

    def start(self, pending: PendingBucket) -> None:
        """Average a bucket that was admitted and is on the host, or leave it until the ranks have recovered."""
        assert pending.bucket
        # Two holds of the lock: callbacks of the reducer may run before its start returns, and take the lock, too. In
        # between `reducing` may still change, so recovery reads it only once `decided` is set.
        with self.table.changed:
            pending.reducing = self.phase is SessionPhase.READY
        if pending.reducing:
            try:
                averaged = self._reducer_for(pending).start(pending.step, pending.sequence, self._bucket_of(pending))
                averaged.add_done_callback(partial(self._on_averaged, pending))
            except Exception as error:
                pending.reducing = False
                self._on_failure(pending, error)
        with self.table.changed:
            pending.decided.set()
            self.table.changed.notify_all()
            failure = self._error
        if failure:
            pending.fail(failure)

    def _reducer_for(self, pending: PendingBucket) -> Reducer:
        """Return what reduces a bucket, once it knows that the bucket's step has begun."""
        assert self._reducer
        if pending.step > self._reducer_step:
            self._reducer_step = pending.step
            if self._replaced:
                self._replaced.close()
                self._replaced = None
            self._reducer.begin_step(pending.step)
        tuner = self._tuner_of(pending)
        if tuner and tuner.reducer_changed():
            self._replaced, self._reducer = self._reducer, self._make(tuner.settings)
            self._reducer.begin_step(pending.step)
        return self._reducer

    def _tuner_of(self, pending: PendingBucket) -> "Autotuner | None":
        """Return the autotuner, if it has a say in a bucket."""
        return None if pending.bucket is None or pending.bucket.exact else self.autotuner

    def _bucket_of(self, pending: PendingBucket) -> Bucket:
        """Return a bucket as the options of its step have it."""
        assert pending.bucket
        bucket, tuner = pending.bucket, self._tuner_of(pending)
        if tuner:
            bucket = replace(bucket, bound=tuner.bound, samples=tuner.samples)
        if pending.step == self._flush_step and not bucket.exact:
            bucket = replace(bucket, flush=True)
        return bucket

    def _on_averaged(self, pending: PendingBucket, done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            self._on_failure(pending, error)
            return
        if pending.bucket and (tuner := self._tuner_of(pending)):
            tuner.on_averaged(pending.bucket)
        timeline = self.timeline
        if timeline is not None:
            timeline.note("averaged", *pending.id)
        self.table.finish(pending)
        if timeline is not None:
            timeline.note("applied", *pending.id)

    def _note_ready(self, pending: PendingBucket) -> None:
        if self.timeline is not None:
            self.timeline.note("ready", *pending.id, pending.label)

    def check(self) -> None:
        """Raise what averaging has failed with, if it has."""
        if self._error:
            raise self._error

    # Leaving DLCP -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Leave DLCP when another rank has, or has ended, even if this one waits for nothing just now."""
        from dlcp.session.stacks import StandstillAlarm

        with StandstillAlarm(self.options.silence_s) as alarm:  # when the others name this rank, it says why
            while self.phase is SessionPhase.READY and not self._closing.wait(WATCH_S):
                alarm.postpone()
                try:
                    error = self.fallback.why_leave(self)
                except RuntimeError as problem:
                    log.debug("the other ranks cannot be watched any more: %s", problem)
                    return
                if error:
                    self.leave(error)

    def _on_failure(self, pending: PendingBucket, error: BaseException) -> None:
        if self.fallback.recovers:
            self.leave(error)
            return
        with self.table.changed:
            self.table.pending.pop(pending.id, None)
        pending.fail(error)

    def leave(self, error: BaseException) -> None:
        """Stop using DLCP because of an error, and recover if that can be; once, however many errors there are."""
        failed: list[PendingBucket] = []
        with self.table.changed:
            if self._closing.is_set():
                failed = list(self.table.pending.values())
            elif self.phase is SessionPhase.READY:
                self.phase = SessionPhase.RECOVERING
                self._recovery = threading.Thread(
                    target=self._recover, args=(error,), name="dlcp-recovery", daemon=True
                )
                self._recovery.start()  # under the lock, for close joins what it finds
        for pending in failed:
            pending.fail(error)

    def _recover(self, error: BaseException) -> None:
        assert self.endpoint
        if self.timeline is not None:
            self.timeline.note("left", self.table.step, 0, describe(error))
        try:
            self._leave_peers(describe(error))  # nothing is written into any bucket after this
            if not self._recoverable or isinstance(error, RankEndedError | PeerLeftError):
                self.fail(describe(error))
                return
            from dlcp.session.recovery import Recovery

            self._hand_over(Recovery(self).complete_buckets(error))
        except PeerHangsError as hanging:  # which is what the error was about, whatever that says
            self.fail(str(hanging))
        except Exception as problem:
            log.debug("recovery failed", exc_info=True)
            why, problem_text = describe(error), describe(problem)
            self.fail(f"{why}; and {self.fallback.name} cannot take over: {problem_text}")

    def _leave_peers(self, reason: str | None) -> None:
        leaving = self._joined or self.endpoint
        if leaving:
            leaving.close(reason)

    def partial_results(self) -> list[PartialResult]:
        """Return what this rank holds of buckets that the reducer has not finished."""
        reducers = [reducer for reducer in (self._replaced, self._reducer) if reducer]
        return [result for reducer in reducers for result in reducer.partial_results()]

    def _hand_over(self, reason: str) -> None:
        """Fall back from here on, beginning with the buckets that have come meanwhile."""
        table, deadline_s, joined = self.table, self.options.deadline_s, self._joined
        if joined and joined.topology.server is not None:
            reason += f" (rank {joined.topology.server} is the parameter server)"
        with table.changed:
            if not table.changed.wait_for(lambda: all(p.decided.is_set() for p in table.pending.values()), deadline_s):
                raise DeadlineError(f"gradients did not come from the device in {deadline_s:g} s")
            for which in sorted(table.pending):
                self.fallback.average(self, table.pending[which])
            self.phase, self.reason = SessionPhase.FALLBACK, reason
        if self.rank == self.ranks[0]:
            log.warning(
                "DLCP is off after step %d: %s. Training continues with %s, with the gradients of that step.",
                table.step,
                reason,
                self.fallback.name,
            )

    def fail(self, message: str) -> None:
        """Fail for good: there are no averages from here on."""
        self.fallback.publish_failed(message)
        with self.table.changed:
            error = self._error = self._error or TransportError(message)
            self.phase, self.reason = SessionPhase.FAILED, message
            failed = self.table.drain()
            self.table.changed.notify_all()
        for pending in failed:
            pending.fail(error)

    def leave_at_exit(self) -> None:
        """Leave the other ranks because this process ends, or its process group: they may still wait for averages.

        A script need not close its session. Without this, what they have not confirmed would end with the process.
        """
        with self.table.changed:
            waiting = bool(self.table.pending) and self.phase is SessionPhase.READY
        reason = reason_of_exit(self.rank)
        if reason is None and waiting:
            reason = f"rank {self.rank}: its process ends in the middle of step {self.table.step}"
        self.close(reason)

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        if self.phase is SessionPhase.CLOSED or self._exit.is_fork:
            return
        self._exit.cancel()
        with self.table.changed:
            self._closing.set()
            recovery = self._recovery
        if recovery:
            recovery.join(self.options.deadline_s)
        self._leave_peers(reason)
        for reducer in (self._replaced, self._reducer):
            if reducer:
                reducer.close()
        self.fallback.close()
        ended_as, self.phase = self.phase, SessionPhase.CLOSED
        if self._snapshots:
            self._snapshots.close(ended_as.value, reason)
