# SPDX-License-Identifier: Apache-2.0
"""Buckets are averaged with DLCP while that works, and over the ranks' store ever after: slowly, but to the end.

When an exchange fails, every rank leaves DLCP. The ranks tell each other which buckets some of them have not finished;
each of those is completed exactly (:mod:`dlcp.collectives.salvage`). What comes later is added up by rank 0.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.collectives.choice import Reducer, Salvageable
from dlcp.collectives.salvage import Salvage, recover
from dlcp.group.channel import RankEndedError, StoreChannel, ended_key
from dlcp.group.store import Store, StoreError
from dlcp.transport import (
    DeadlineError,
    Endpoint,
    MessageMismatchError,
    PeerAbortedError,
    TransportError,
)

log = logging.getLogger("dlcp")

LEFT: Final = "left"
"""The key of the store that tells that some rank has left DLCP."""
CLOSED: Final = "it has left the group"
"""Why a rank has ended that has closed its group in order."""
WATCH_S: Final = 0.25
"""How often a rank looks whether another has left DLCP or ended: it may wait for that one elsewhere. Chosen by us."""

_Which = tuple[int, int]
"""A bucket: its step, and its number within it."""


class Mode(Enum):
    """Who averages."""

    DLCP = "DLCP"
    RECOVERING = "on the way to the store"
    STORE = "rank 0, over the store"
    FAILED = "nobody"


@dataclass(slots=True, eq=False)
class _Handed:
    """A bucket that has been handed over; ``started`` if DLCP has got it, once ``here`` tells that that is decided."""

    bucket: Bucket
    answer: "Future[NDArray[np.generic]]" = field(default_factory=Future)
    started: bool = False
    here: threading.Event = field(default_factory=threading.Event)

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        names = [segment.layer.name for segment in self.bucket.segments]
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


class Exchange:
    """Averages the buckets of one group.

    A step must be finished on this rank before its next one begins.

    Parameters
    ----------
    store
        The group's store.
    rank, ranks
        This rank, and all whose gradients are averaged.
    deadline_s
        How long a rank that has failed waits for another.
    feedback
        What is owed from before.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], deadline_s: float, feedback: ErrorFeedback
    ) -> None:
        self.rank, self.ranks, self.deadline_s = rank, sorted(ranks), deadline_s
        self.feedback = feedback
        self.mode = Mode.STORE
        self.reason = ""
        self.step = -1
        self._store = store
        self._endpoint: Endpoint | None = None
        self._reducer: Reducer | None = None
        self._salvageable: Salvageable | None = None
        self._channels: dict[int, StoreChannel] = {}
        self._changed = threading.Condition()
        self._open: dict[_Which, _Handed] = {}
        self._finished: set[int] = set()
        """Numbers of the buckets of this step that are finished."""
        self._error: TransportError | None = None
        self._recovery: threading.Thread | None = None
        self._closed = threading.Event()

    def use(self, endpoint: Endpoint, reducer: Reducer, *, may_recover: bool) -> None:
        """Average with DLCP from now on; a failure is an error unless ``may_recover``."""
        self._endpoint, self._reducer = endpoint, reducer
        self._salvageable = reducer if may_recover and isinstance(reducer, Salvageable) else None
        self.mode = Mode.DLCP
        threading.Thread(target=self._watch, name="dlcp-watch", daemon=True).start()

    def do_without(self, reason: str) -> None:
        """Average over the store, because of ``reason``."""
        self.mode, self.reason = Mode.STORE, reason

    def check(self) -> None:
        """Raise what averaging has failed with, if it has."""
        if self._error:
            raise self._error

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over all ranks, in place; every rank hands in the same ones, in any order within a step.

        To be called by one thread at a time.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        handed = _Handed(bucket)
        with self._changed:
            self.check()
            if begins := step > self.step:
                self.step = step
                self._finished.clear()
            self._open[step, sequence] = handed
            mode = self.mode
            handed.started = mode is Mode.DLCP
            self._changed.notify_all()
        if mode is Mode.DLCP:
            self._over_dlcp(step, sequence, handed, begins=begins)
        handed.here.set()
        if mode is Mode.STORE:
            self._over_store((step, sequence), handed)
        return handed.answer

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        with self._changed:
            self._closed.set()
            recovery = self._recovery
        if recovery:
            recovery.join(self.deadline_s)
        if self._endpoint:
            self._endpoint.close(reason)

    def _over_dlcp(self, step: int, sequence: int, handed: _Handed, *, begins: bool) -> None:
        assert self._reducer
        try:
            if begins:
                self._reducer.begin_step(step)
            averaged = self._reducer.start(step, sequence, handed.bucket)
        except Exception as error:
            handed.started = False
            self._leave(error)
            return
        averaged.add_done_callback(partial(self._on_averaged, (step, sequence)))

    def _on_averaged(self, which: _Which, done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            self._leave(error)
            return
        self._finish(which)

    def _finish(self, which: _Which) -> None:
        with self._changed:
            handed = self._open.pop(which, None)
            self._finished.add(which[1])
        if handed:
            handed.answer.set_result(handed.bucket.values)

    def _over_store(self, which: _Which, handed: _Handed) -> None:
        """Let rank 0 add up, in a thread of its own, for the ranks need not come to buckets in the same order."""
        threading.Thread(target=self._add_up, args=(which, handed), name="dlcp-store-add", daemon=True).start()

    def _add_up(self, which: _Which, handed: _Handed) -> None:
        step, sequence = which
        bucket = handed.bucket
        if sequence not in self._channels:
            topic = f"average of bucket {sequence}"
            self._channels[sequence] = StoreChannel(self._store, topic, self.rank, self.ranks, self.deadline_s)
        try:
            values = bucket.value_type.widen(bucket.values).copy()
            self.feedback.add_to(values, bucket.segments)  # nothing is lost here, so this is the last time
            total = self._channels[sequence].add(values)
            bucket.values[:] = bucket.value_type.narrow(total / total.dtype.type(len(self.ranks)))
        except Exception as problem:
            self.give_up(f"step {step}: {handed.label} is not averaged: {problem}")
        else:
            self._finish(which)

    # When DLCP fails --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Leave DLCP when another rank has, or has ended, even if this one waits for nothing just now."""
        others = [ended_key(rank) for rank in self.ranks if rank != self.rank]
        while self.mode is Mode.DLCP and not self._closed.wait(WATCH_S):
            try:
                found = self._store.first([LEFT, *others], 0)
                if found and found[0] == LEFT:
                    self._leave(PeerAbortedError(f"another rank has left DLCP: {found[1].decode()}"))
                elif found and found[1] == CLOSED.encode():
                    others.remove(found[0])
                elif found:
                    rank = found[0].rpartition("/")[2]
                    self._leave(RankEndedError(f"rank {rank} has ended: {found[1].decode()}{self._where()}"))
            except StoreError as error:
                if not self._closed.is_set():
                    self._leave(RankEndedError(f"{error}{self._where()}"))

    def _where(self) -> str:
        """Say what this rank waits for."""
        with self._changed:
            waiting = sorted(self._open.items(), key=lambda item: item[0])
        if not waiting:
            return f"; step {self.step}"
        (step, _), handed = waiting[0]
        return f"; step {step}: rank {self.rank} waits for {handed.label}"

    def _leave(self, error: BaseException) -> None:
        with self._changed:
            if self.mode is not Mode.DLCP or self._closed.is_set():
                failed = list(self._open.values()) if self._closed.is_set() else []
            else:
                self.mode, failed = Mode.RECOVERING, []
                self._recovery = threading.Thread(
                    target=self._recover, args=(error,), name="dlcp-recovery", daemon=True
                )
                self._recovery.start()  # under the lock, for close joins what it finds
        for handed in failed:
            if not handed.answer.done():
                handed.answer.set_exception(error)

    def _recover(self, error: BaseException) -> None:
        assert self._endpoint
        try:
            self._endpoint.close(str(error))  # nothing is written into any bucket after this
            if self._salvageable is None or isinstance(error, RankEndedError | MessageMismatchError):
                self.give_up(str(error))
            else:
                self._recover_over_store(self._salvageable, error)
        except Exception as problem:
            log.debug("recovery failed", exc_info=True)
            self.give_up(f"{error}; and the store cannot take over: {problem}")

    def _recover_over_store(self, reducer: Salvageable, error: BaseException) -> None:
        self._store.compare_set(LEFT, "", str(error))
        channel = StoreChannel(self._store, "recovery", self.rank, self.ranks, self.deadline_s)
        with self._changed:
            started = {which: handed for which, handed in self._open.items() if handed.started}
        for handed in started.values():
            handed.here.wait(self.deadline_s)
        held = {(salvage.step, salvage.sequence): salvage for salvage in reducer.salvage()}
        unfinished = sorted(started)
        told = channel.gather((unfinished, str(error), isinstance(error, PeerAbortedError)))
        for which in sorted({tuple(which) for listed, _, _ in told.values() for which in listed}):
            self._complete(channel, which, held)
        # Whoever only heard that another gave up knows less.
        reason = min((aborted, rank, text) for rank, (_, text, aborted) in told.items())[2]
        self._hand_over(reason)

    def _complete(self, channel: StoreChannel, which: _Which, held: dict[_Which, Salvage]) -> None:
        handed = self._wait_for(which)
        mine = held.get(which)
        if handed and not (handed.started and mine):
            values = handed.bucket.value_type.widen(handed.bucket.values).copy()
            self.feedback.add_to(values, handed.bucket.segments)
            assert self._endpoint
            per_packet = self._endpoint.options.payload_bytes // handed.bucket.values.itemsize
            mine = Salvage.untouched(self.rank, *which, values, per_packet)
        recovered = recover(channel, self.rank, self.ranks, mine, finished=handed is None)
        if handed and recovered:
            handed.bucket.values[:] = handed.bucket.value_type.narrow(recovered.values)
            if recovered.owed is not None:
                self.feedback.owe(recovered.owed, handed.bucket.segments)
            self._finish(which)

    def _wait_for(self, which: _Which) -> _Handed | None:
        """Return a bucket, once it has been handed over; None if this rank has finished it."""
        step, sequence = which
        with self._changed:
            came = self._changed.wait_for(
                lambda: which in self._open or step < self.step or (step == self.step and sequence in self._finished),
                self.deadline_s,
            )
            handed = self._open.get(which)
        if not came:
            raise DeadlineError(
                f"step {step}: rank {self.rank} did not come to bucket {sequence}, as another has, in "
                f"{self.deadline_s:g} s"
            )
        if handed:
            handed.here.wait(self.deadline_s)
        return handed

    def _hand_over(self, reason: str) -> None:
        """Let rank 0 add up from here on, first what has been handed over since."""
        with self._changed:
            self.mode, self.reason = Mode.STORE, reason
            waiting = sorted(self._open.items(), key=lambda item: item[0])
        if self.rank == min(self.ranks):
            log.warning(
                "DLCP is off after step %d: %s. Training goes on over the store, with the gradients of that step; that "
                "is slow.",
                self.step,
                reason,
            )
        for which, handed in waiting:
            self._over_store(which, handed)

    def give_up(self, message: str) -> None:
        """Fail for good, and tell the others, who may wait for this rank."""
        with contextlib.suppress(StoreError):
            self._store.set(ended_key(self.rank), message)
            self._store.compare_set(LEFT, "", message)
        with self._changed:
            self._error = self._error or TransportError(message)
            self.mode, self.reason = Mode.FAILED, message
            failed = list(self._open.values())
            self._open.clear()
            self._changed.notify_all()
        for handed in failed:
            handed.answer.set_exception(self._error)
