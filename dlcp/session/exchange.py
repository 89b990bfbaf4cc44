# SPDX-License-Identifier: Apache-2.0
"""The exchange of a group: where DLCP fails, rank 0 adds up over the ranks' store, slowly, but to the end."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, ErrorFeedback
from dlcp.session.channel import RankEndedError, StoreChannel, ended_key
from dlcp.session.recovery import LEFT, Handed, Mode, RecoveringExchange
from dlcp.session.store import Store, StoreError
from dlcp.transport import PeerAbortedError

CLOSED: Final = "it has left the group"
"""Why a rank has ended that has closed its group in order."""


@dataclass(slots=True, eq=False)
class _Waiting(Handed):
    """A bucket with the future that its average resolves."""

    answer: "Future[NDArray[np.generic]]" = field(default_factory=Future)

    def give_back(self) -> None:
        assert self.bucket
        self.answer.set_result(self.bucket.values)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Exchange(RecoveringExchange[_Waiting]):
    """Averages the buckets of one group.

    Parameters
    ----------
    store
        The group's store.
    rank, ranks, deadline_s, feedback
        See :class:`dlcp.session.recovery.RecoveringExchange`.
    """

    INSTEAD = "the store, which is slow"

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], deadline_s: float, feedback: ErrorFeedback
    ) -> None:
        super().__init__(rank, ranks, deadline_s, feedback)
        self._store = store
        self._others = [ended_key(other) for other in self.ranks if other != rank]
        self._channels: dict[int, StoreChannel] = {}

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over all ranks, in place; every rank hands in the same ones, in any order within a step.

        To be called by one thread at a time.

        Raises
        ------
        TransportError
            Averaging has failed before.
        """
        handed = _Waiting(step, sequence, bucket.segments, bucket)
        with self._changed:
            self.check()
            self._enter(handed)
            if self.mode is Mode.FALLBACK:
                self._fall_back(handed)
                return handed.answer
        self._begin(handed)
        return handed.answer

    def give_up(self, message: str) -> None:
        """Fail for good, and tell the others, who may wait for this rank."""
        with contextlib.suppress(StoreError):
            self._store.set(ended_key(self.rank), message)
            self._store.compare_set(LEFT, "", message)
        super().give_up(message)

    def _look(self) -> BaseException | None:
        try:
            found = self._store.first([LEFT, *self._others], 0)
        except StoreError as error:
            return RankEndedError(f"{error}{self._where()}")
        if found is None:
            return None
        key, text = found[0], found[1].decode()
        if key == LEFT:
            return PeerAbortedError(f"another rank has left DLCP: {text}")
        if text == CLOSED:
            self._others.remove(key)
            return None
        return RankEndedError(f"rank {key.rpartition('/')[2]} has ended: {text}{self._where()}")

    def _where(self) -> str:
        """Say what this rank waits for."""
        with self._changed:
            waiting = [self._open[which] for which in sorted(self._open)]
        if not waiting:
            return f"; step {self.step}"
        return f"; step {waiting[0].step}: rank {self.rank} waits for {waiting[0].label}"

    def _tell_left(self, reason: str) -> None:
        self._store.compare_set(LEFT, "", reason)

    def _channel(self) -> StoreChannel:
        return StoreChannel(self._store, "recovery", self.rank, self.ranks, self.deadline_s)

    def _fall_back(self, handed: _Waiting) -> None:
        """Let rank 0 add up, in a thread of its own, for the ranks need not come to buckets in the same order."""
        threading.Thread(target=self._add_up, args=(handed,), name="dlcp-store-add", daemon=True).start()

    def _add_up(self, handed: _Waiting) -> None:
        assert handed.bucket
        bucket, sequence = handed.bucket, handed.sequence
        if sequence not in self._channels:
            topic = f"average of bucket {sequence}"
            self._channels[sequence] = StoreChannel(self._store, topic, self.rank, self.ranks, self.deadline_s)
        try:
            values: NDArray[Any] = bucket.value_type.widen(bucket.values).copy()
            self.feedback.add_to(values, bucket.segments)  # nothing is lost here, so this is the last time
            total = self._channels[sequence].add(values)
            bucket.values[:] = bucket.value_type.narrow(total / total.dtype.type(len(self.ranks)))
        except Exception as problem:
            self.give_up(f"step {handed.step}: {handed.label} is not averaged: {problem}")
        else:
            self._finish(handed)
