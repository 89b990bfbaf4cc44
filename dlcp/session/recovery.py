# SPDX-License-Identifier: Apache-2.0
"""Buckets are averaged with DLCP while that works, and in another way ever after; no gradient is lost in between.

When an exchange fails, every rank leaves DLCP. The ranks tell each other which buckets some of them have not finished;
each of those is completed exactly (:mod:`dlcp.collectives.salvage`), in order, waiting for ranks that have not come so
far. What comes later goes the other way. Which way that is, and where ranks tell each other, a subclass says.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.collectives.choice import Reducer, Salvageable
from dlcp.collectives.salvage import Channel, Salvage, UnsalvageableError, recover
from dlcp.session.channel import RankEndedError
from dlcp.tags import Segment
from dlcp.transport import DeadlineError, Endpoint, MessageMismatchError, PeerAbortedError, TransportError

log = logging.getLogger("dlcp")

LEFT: Final = "left"
"""Where ranks tell that they have left DLCP."""
WATCH_S: Final = 0.25
"""How often a rank looks whether another has left DLCP or ended: it may wait for that one elsewhere. Chosen by us."""

_Which = tuple[int, int]
"""A bucket: its step, and its number within it."""


class Mode(Enum):
    """Who averages."""

    DLCP = "DLCP"
    RECOVERING = "nobody yet: ranks are on the way to what they fall back to"
    FALLBACK = "what is fallen back to"
    FAILED = "nobody"


@dataclass(slots=True, eq=False)
class Handed(ABC):
    """A bucket that somebody has handed over and waits for.

    Attributes
    ----------
    bucket
        Its values on the host; nothing before they are there.
    started
        Whether DLCP has got it, once ``here`` tells that this is decided.
    """

    step: int
    sequence: int
    segments: Sequence[Segment]
    bucket: Bucket | None = None
    started: bool = False
    here: threading.Event = field(default_factory=threading.Event)

    @property
    def which(self) -> _Which:
        """Its name among all ranks."""
        return self.step, self.sequence

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        names = [self.segments[0].layer.name, self.segments[-1].layer.name]
        return "..".join(dict.fromkeys(names))

    @abstractmethod
    def give_back(self) -> None:
        """Tell whoever waits that the average is in ``bucket``."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell whoever waits, and has not been told anything yet, that there is none."""


H = TypeVar("H", bound=Handed)


class RecoveringExchange(ABC, Generic[H]):
    """Averages the buckets of one model or group. A step must be finished on this rank before its next one begins.

    Parameters
    ----------
    rank, ranks
        This rank, and all whose gradients are averaged.
    deadline_s
        How long a rank that has failed waits for another.
    feedback
        What is owed from before.

    Attributes
    ----------
    mode, reason
        Who averages, and why not DLCP.
    step
        The latest of which a bucket has been handed over.
    """

    INSTEAD: ClassVar[str]
    """What is fallen back to, for messages."""

    def __init__(self, rank: int, ranks: Sequence[int], deadline_s: float, feedback: ErrorFeedback) -> None:
        self.rank, self.ranks, self.deadline_s = rank, sorted(ranks), deadline_s
        self.feedback = feedback
        self.mode = Mode.FALLBACK
        self.reason = ""
        self.step = -1
        self._begun = -1
        """The latest step that the reducer has been told of."""
        self._finished: set[int] = set()
        """Numbers of the buckets of this step that are finished."""
        self._open: dict[_Which, H] = {}
        self._endpoint: Endpoint | None = None
        self._reducer: Reducer | None = None
        self._salvageable: Salvageable | None = None
        self._changed = threading.Condition()
        self._error: TransportError | None = None
        self._recovery: threading.Thread | None = None
        self._closed = threading.Event()

    def use(self, endpoint: Endpoint, reducer: Reducer, *, may_recover: bool) -> None:
        """Average with DLCP from now on; a failure is an error unless ``may_recover`` and it is Salvageable."""
        self._endpoint, self._reducer = endpoint, reducer
        self._salvageable = reducer if may_recover and isinstance(reducer, Salvageable) else None
        self.mode = Mode.DLCP
        threading.Thread(target=self._watch, name="dlcp-watch", daemon=True).start()

    def do_without(self, reason: str) -> None:
        """Do not average with DLCP, because of ``reason``."""
        self.mode, self.reason = Mode.FALLBACK, reason

    def check(self) -> None:
        """Raise what averaging has failed with, if it has."""
        if self._error:
            raise self._error

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        with self._changed:
            self._closed.set()
            recovery = self._recovery
        if recovery:
            recovery.join(self.deadline_s)
        if self._endpoint:
            self._endpoint.close(reason)

    def give_up(self, message: str) -> None:
        """Fail for good."""
        with self._changed:
            error = self._error = self._error or TransportError(message)
            self.mode, self.reason = Mode.FAILED, message
            failed = list(self._open.values())
            self._open.clear()
            self._changed.notify_all()
        for handed in failed:
            handed.fail(error)

    # What subclasses differ in ----------------------------------------------------------------------------------------

    @abstractmethod
    def _look(self) -> BaseException | None:
        """Return why this rank should leave DLCP, if others have done or ended; RuntimeError: it cannot be known."""

    @abstractmethod
    def _tell_left(self, reason: str) -> None:
        """Tell the other ranks that this one has left DLCP, for :meth:`_look` to see."""

    @abstractmethod
    def _channel(self) -> Channel:
        """Return a way between the ranks to recover over."""

    @abstractmethod
    def _fall_back(self, handed: H) -> None:
        """Average a bucket that is on the host without DLCP, with what is owed; called under the lock, in order."""

    # While DLCP averages ----------------------------------------------------------------------------------------------

    def _enter(self, handed: H) -> None:
        """Take a bucket in; to be called under the lock."""
        if handed.step > self.step:
            self.step = handed.step
            self._finished.clear()
        self._open[handed.which] = handed
        self._changed.notify_all()

    def _begin(self, handed: H) -> None:
        """Give DLCP a bucket that has been taken in and is on the host; or leave it until the ranks have recovered."""
        with self._changed:
            handed.started = self.mode is Mode.DLCP
        if handed.started:
            assert self._reducer
            assert handed.bucket
            try:
                if handed.step > self._begun:
                    self._begun = handed.step
                    self._reducer.begin_step(handed.step)
                averaged = self._reducer.start(handed.step, handed.sequence, handed.bucket)
                averaged.add_done_callback(partial(self._on_averaged, handed))
            except Exception as error:
                handed.started = False
                self._leave(error)
        with self._changed:
            handed.here.set()
            self._changed.notify_all()
            failure = self._error
        if failure:
            handed.fail(failure)

    def _on_averaged(self, handed: H, done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            self._finish(handed)
        else:
            self._leave(error)

    def _finish(self, handed: H) -> None:
        with self._changed:
            waited_for = self._open.pop(handed.which, None)
            self._finished.add(handed.sequence)
        if waited_for:
            waited_for.give_back()

    def _watch(self) -> None:
        """Leave DLCP when another rank has, or has ended, even if this one waits for nothing just now."""
        while self.mode is Mode.DLCP and not self._closed.wait(WATCH_S):
            try:
                error = self._look()
            except RuntimeError as problem:
                log.debug("the other ranks cannot be watched any more: %s", problem)
                return
            if error:
                self._leave(error)

    # When DLCP fails --------------------------------------------------------------------------------------------------

    def _leave(self, error: BaseException) -> None:
        failed: list[H] = []
        with self._changed:
            if self._closed.is_set():
                failed = list(self._open.values())
            elif self.mode is Mode.DLCP:
                self.mode = Mode.RECOVERING
                self._recovery = threading.Thread(
                    target=self._recover, args=(error,), name="dlcp-recovery", daemon=True
                )
                self._recovery.start()  # under the lock, for close joins what it finds
        for handed in failed:
            handed.fail(error)

    def _recover(self, error: BaseException) -> None:
        assert self._endpoint
        try:
            self._endpoint.close(str(error))  # nothing is written into any bucket after this
            if self._salvageable is None or isinstance(error, RankEndedError):
                self.give_up(str(error))
            else:
                self._recover_together(self._salvageable, error)
        except Exception as problem:
            log.debug("recovery failed", exc_info=True)
            self.give_up(f"{error}; and {self.INSTEAD} cannot take over: {problem}")

    def _recover_together(self, reducer: Salvageable, error: BaseException) -> None:
        self._tell_left(str(error))
        channel = self._channel()
        with self._changed:
            started = {which: handed for which, handed in self._open.items() if handed.started}
        for handed in started.values():
            handed.here.wait(self.deadline_s)
        held = {(salvage.step, salvage.sequence): salvage for salvage in reducer.salvage()}
        hopeless, heard = isinstance(error, MessageMismatchError), isinstance(error, PeerAbortedError)
        told = channel.gather((sorted(started), hopeless, heard, str(error)))
        for _, hopeless, _, text in told.values():
            if hopeless:
                raise UnsalvageableError(text)
        for which in sorted({tuple(which) for unfinished, *_ in told.values() for which in unfinished}):
            self._complete(channel, which, held)
        # Whoever only heard that another gave up knows less.
        self._hand_over(min((heard, rank, text) for rank, (_, _, heard, text) in told.items())[2])

    def _complete(self, channel: Channel, which: _Which, held: dict[_Which, Salvage]) -> None:
        handed, mine = self._wait_for(which), held.get(which)
        if handed and not handed.started:
            mine = self._untouched(handed)
        recovered = recover(channel, self.rank, self.ranks, mine, finished=handed is None)
        if handed and handed.bucket and recovered:
            handed.bucket.values[:] = handed.bucket.value_type.narrow(recovered.values)
            if recovered.owed is not None:
                self.feedback.owe(recovered.owed, handed.segments)
            self._finish(handed)

    def _untouched(self, handed: H) -> Salvage:
        """Return what this rank holds of a bucket that DLCP has not got: all of its own, with what is owed."""
        assert handed.bucket
        assert self._endpoint
        bucket = handed.bucket
        values = bucket.value_type.widen(bucket.values).copy()
        self.feedback.add_to(values, handed.segments)
        per_packet = self._endpoint.options.payload_bytes // bucket.values.itemsize
        return Salvage.untouched(self.rank, *handed.which, values, per_packet)

    def _wait_for(self, which: _Which) -> H | None:
        """Return a bucket, once it has been handed over and is on the host; None if this rank has finished it."""
        step, sequence = which

        def came() -> bool:
            if which in self._open:
                return self._open[which].here.is_set()
            return step < self.step or (step == self.step and sequence in self._finished)

        with self._changed:
            if not self._changed.wait_for(came, self.deadline_s):
                raise DeadlineError(
                    f"step {step}: rank {self.rank} did not come to bucket {sequence}, as another has, in "
                    f"{self.deadline_s:g} s"
                )
            return self._open.get(which)

    def _hand_over(self, reason: str) -> None:
        """Let what is fallen back to average from here on, first what has been handed over since."""
        with self._changed:
            all_here = self._changed.wait_for(
                lambda: all(handed.here.is_set() for handed in self._open.values()), self.deadline_s
            )
            if not all_here:
                raise DeadlineError(f"gradients did not come from the device in {self.deadline_s:g} s")
            for which in sorted(self._open):
                self._fall_back(self._open[which])
            self.mode, self.reason = Mode.FALLBACK, reason
        if self.rank == self.ranks[0]:
            log.warning(
                "DLCP is off after step %d: %s. Training goes on over %s, with the gradients of that step.",
                self.step,
                reason,
                self.INSTEAD,
            )
