# SPDX-License-Identifier: Apache-2.0
"""The averaging half of a session: its buckets, its pipeline, and the ranks' weights in each step.

:class:`dlcp.session.training_session.TrainingSession` decides whether DLCP averages a bucket. This module decides how:
with which collective, compression, bound and weight. If ranks have ``samples``, a step begins with a bucket of
metadata, which sets the step's weights (:mod:`dlcp.collectives.step_metadata`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import check_samples, weight_of
from dlcp.policies.arms import Route
from dlcp.session.joining import Joined
from dlcp.session.options import Options
from dlcp.transport.ledger import Ledger
from dlcp.values.planes import FULL_BITS
from dlcp.values.tags import Segment, Tagger

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


class StepAverager:
    """Averages the buckets of one rank, step after step.

    Parameters
    ----------
    options
        The options in force.
    rank, ranks
        This rank, and all ranks whose gradients are averaged.
    ledger, feedback, tagger
        The record of packets, the residual, and the tagger of packets.

    Attributes
    ----------
    samples
        Samples of each rank in this step; None before the first step's metadata, and if all ranks have equal weight.
    metadata_step
        The latest step whose metadata this rank has sent; -1 for none.
    flush_step
        The step that is sent in full; -1 for none.
    bits
        Bits of each value on the wire in the current step.
    exchanges_reports
        Whether ranks report on steps beside the buckets (:mod:`dlcp.session.choosing`).
    """

    def __init__(
        self,
        options: Options,
        rank: int,
        ranks: Sequence[int],
        *,
        ledger: Ledger,
        feedback: Residual,
        tagger: Tagger,
    ) -> None:
        self.options, self.rank, self.ranks = options, rank, sorted(ranks)
        self.ledger, self.feedback, self.tagger = ledger, feedback, tagger
        self.samples: dict[int, int] | None = None
        self._samples_here = options.samples
        self._sends_metadata = options.weighted and len(ranks) > 1
        self.metadata_step = self.flush_step = -1
        self.bits, self.exchanges_reports = FULL_BITS, False
        self._reducer: Reducer | None = None
        self._step = -1

    # Setting up -------------------------------------------------------------------------------------------------------

    def join(self, joined: Joined) -> None:
        """Average over the endpoint of ``joined``."""
        options = self.options = joined.options
        context = RankContext(
            joined.endpoint.connection,
            self.ranks,
            options.reduction(),
            self.tagger,
            self.ledger,
            self.feedback,
        )
        self.use(
            make_reducer(
                options.algorithm,
                context,
                topology=joined.topology,
                compression=options.compression,
                combine=options.combine,
            )
        )

    def use(self, reducer: Reducer) -> None:
        """Average with ``reducer``."""
        self._reducer = reducer

    # A step's metadata ------------------------------------------------------------------------------------------------

    @property
    def metadata_number(self) -> int:
        """The number of the bucket of metadata."""
        return int(self.exchanges_reports)

    @property
    def first_sequence(self) -> int:
        """The number of a step's first bucket of gradients: reports and metadata have the numbers before."""
        return self.metadata_number + int(self._sends_metadata)

    def set_samples(self, count: int) -> None:
        """Set how many samples this rank's gradients are the mean of, from the next step on.

        Raises
        ------
        ValueError
            It is not a whole number, or the options do not set ``samples``.
        """
        count = check_samples(count)
        if not self.options.weighted:
            raise ValueError("all ranks count the same; set Options(samples=...) on every rank to weigh by samples")
        self._samples_here = count

    def metadata_of(self, step: int) -> Bucket | None:
        """Return the bucket with this rank's metadata of a step, once; None if it was returned or is not needed."""
        if not self._sends_metadata or step <= self.metadata_step:
            return None
        from dlcp.collectives.step_metadata import bucket_of  # most jobs do not need it

        self.metadata_step = step
        return bucket_of(self._samples_here, self.ranks.index(self.rank), len(self.ranks))

    def read_metadata(self, average: NDArray[np.floating]) -> None:
        """Read the metadata of all ranks."""
        from dlcp.collectives.step_metadata import read_samples  # most jobs do not need it

        self.samples = read_samples(average, self.ranks)

    @property
    def weight(self) -> float:
        """Factor on this rank's mean gradient in this step."""
        return weight_of(self.samples, self.rank) if self.samples else 1.0

    # Averaging --------------------------------------------------------------------------------------------------------

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket with the weights of its step; the future's result is ``bucket.values``."""
        assert self._reducer
        if step > self._step:
            self._step = step
            self._reducer.begin_step(step, self.bits)
        if self.samples and not bucket.exact:
            bucket = replace(bucket, samples=self.samples)
        if step == self.flush_step and not bucket.exact:
            bucket = replace(bucket, flush=True)
        return self._reducer.start(step, sequence, bucket)

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of unfinished buckets; call it when the endpoint is closed."""
        return self._reducer.partial_results() if self._reducer else []

    def close(self) -> None:
        """Stop the reducer's threads; call it when the endpoint is closed."""
        if self._reducer:
            self._reducer.close()
