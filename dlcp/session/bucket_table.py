# SPDX-License-Identifier: Apache-2.0
"""The buckets of a session's current step, and what becomes of each."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcp.arms import Route
from dlcp.collectives import Bucket
from dlcp.tags import Segment

if TYPE_CHECKING:  # only for jobs that somebody watches
    from dlcp.session.snapshots import StepMeter

BucketId = tuple[int, int]
"""A bucket's step, and its number within the step."""


@dataclass(slots=True, eq=False)
class PendingBucket:
    """A bucket from when its step reaches it until its owner has the average.

    Parameters
    ----------
    step, sequence
        Training step, and the bucket's number within it; the same on all ranks.
    segments
        Its layers.
    size_bytes
        Size of its values.
    then
        Called once, from any thread: with None when ``bucket.values`` hold the average, otherwise with the error.
    bucket
        Its values on the host; None until they are there.

    Attributes
    ----------
    reducing
        Whether the averager has it. Valid once ``decided`` is set.
    route
        The route of its step while DLCP works.
    """

    step: int
    sequence: int
    segments: Sequence[Segment]
    size_bytes: int
    then: Callable[[BaseException | None], None] | None
    bucket: Bucket | None = None
    reducing: bool = False
    route: Route = Route.DLCP
    decided: threading.Event = field(default_factory=threading.Event)
    _answering: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> BucketId:
        """Its name, the same on all ranks."""
        return self.step, self.sequence

    @property
    def label(self) -> str:
        """Its layers, for error messages."""
        names = [self.segments[0].layer.name, self.segments[-1].layer.name]
        return "..".join(dict.fromkeys(names))

    def answer(self, error: BaseException | None = None) -> None:
        """Call ``then``, unless it has been called."""
        with self._answering:
            then, self.then = self.then, None
        if then is not None:
            then(error)


class BucketTable:
    """The buckets that are not averaged yet, and those of the current step that are.

    Attributes
    ----------
    changed
        Guards the table and the session's phase; notified when either has changed.
    step
        The latest step with a bucket; -1 before the first.
    ready_s, averaged_s
        When the latest bucket was ready, and when the latest average was there (monotonic).
    meter
        Measures steps, for snapshots; None if nobody watches.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meter: StepMeter | None = None
        self.step = -1
        self.ready_s = self.averaged_s = 0.0
        self.pending: dict[BucketId, PendingBucket] = {}
        self._finished: set[int] = set()

    def add(self, pending: PendingBucket) -> None:
        """Enter a bucket; hold ``changed``."""
        if pending.step > self.step:
            self.step = pending.step
            self._finished.clear()
        self.pending[pending.id] = pending
        self.ready_s = time.monotonic()
        if self.meter is not None:
            self.meter.on_ready(pending.step, pending.segments)
        self.changed.notify_all()

    def finish(self, pending: PendingBucket) -> None:
        """Remove an averaged bucket, and answer its owner."""
        with self.changed:
            found = self.pending.pop(pending.id, None)
            self._finished.add(pending.sequence)
            self.averaged_s = time.monotonic()
        if self.meter is not None:  # before the answer, with which the next step may begin
            self.meter.on_averaged(pending.step)
        if found:
            found.answer()

    def drain(self) -> list[PendingBucket]:
        """Remove all buckets; hold ``changed``."""
        drained = list(self.pending.values())
        self.pending.clear()
        return drained

    def wait_for(self, which: BucketId, deadline_s: float) -> PendingBucket | None:
        """Return a bucket once it is here and it is decided who averages it; None if this rank has finished it.

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
