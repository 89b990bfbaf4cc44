# SPDX-License-Identifier: Apache-2.0
"""The averaging half of a session: its buckets, its pipeline, and the ranks' weights in each step.

:class:`dlcp.session.training_session.TrainingSession` decides whether DLCP averages a bucket. This module decides how:
with which collective, compression, bound and weight. If ranks have ``samples``, a step begins with a bucket of
metadata, which sets the step's weights (:mod:`dlcp.collectives.step_metadata`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.bucket import BucketRun
from dlcp.collectives.choice import DIRECT
from dlcp.collectives.reduction_rules import check_samples, weight_of
from dlcp.session.joining import Joined
from dlcp.session.options import Options
from dlcp.transport import Membership
from dlcp.transport.ledger import Ledger
from dlcp.values.tags import Segment, Tagger

if TYPE_CHECKING:  # only for jobs that somebody watches
    from dlcp.session.snapshots import StepMeter


BucketId = tuple[int, int]
"""A bucket's step, and its number within the step."""


class BucketProgress(Enum):
    """What has become of a bucket on this rank."""

    COMING = "it is being copied to the host"
    STARTING = "the averager gets it"
    AVERAGING = "the averager has it"
    WAITING = "it is on the host until the ranks have recovered"
    BY_FRAMEWORK = "the framework averages it in a step of its own, while DLCP works"
    FINISHED = "its owner has the average"


@dataclass(slots=True, eq=False)
class PendingBucket:
    """A bucket from when its step reaches it until its owner has the average, and no other rank needs this one's state.

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
    progress
        What has become of it.
    run
        Its run; None before the averager has it, and without DLCP.
    average
        With ``elastic``, and once it has been recovered, a copy of its average. The owner may change the values, and
        the rank that has computed them may end before others have got them.
    """

    step: int
    sequence: int
    segments: Sequence[Segment]
    size_bytes: int
    then: Callable[[BaseException | None], None] | None
    bucket: Bucket | None = None
    progress: BucketProgress = BucketProgress.COMING
    run: BucketRun | None = None
    average: NDArray[np.generic] | None = None
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

    @property
    def is_decided(self) -> bool:
        """Whether it is decided who averages it."""
        return self.progress not in (BucketProgress.COMING, BucketProgress.STARTING)

    def answer(self, error: BaseException | None = None) -> None:
        """Call ``then``, unless it has been called."""
        with self._answering:
            then, self.then = self.then, None
        if then is not None:
            then(error)


class BucketTable:
    """The training step in progress, and its buckets: the only place that knows either.

    A finished bucket stays until one of a later step is finished. Until then another rank may lack its average, and
    need this rank's part of it to recover: a rank contributes to a step only once it has all averages of the last one.

    The table outlives the sessions that work on it.

    Attributes
    ----------
    changed
        Guards the table and the session's situation; notified when either has changed.
    step
        The step in progress.
    buckets
        Its buckets, and until one of them is finished those of the last step.
    ready_s, averaged_s
        When the latest bucket was ready, and when the latest average had arrived (monotonic).
    meter
        Measures steps, for snapshots; None if nobody watches.
    """

    def __init__(self, step: int = 0) -> None:
        self.changed = threading.Condition()
        self.meter: StepMeter | None = None
        self.step = step
        self.ready_s = self.averaged_s = 0.0
        self.buckets: dict[BucketId, PendingBucket] = {}
        self._has_begun = False
        self._oldest = step

    # The step ---------------------------------------------------------------------------------------------------------

    def begin_session(self) -> None:
        """Forget what belonged to the last session; the step in progress begins anew."""
        self.buckets.clear()
        self._has_begun, self.meter = False, None

    def begin_epoch(self) -> None:
        """Let the step in progress begin anew, with other ranks; hold ``changed``."""
        self._has_begun = False

    def begin_step(self, step: int) -> bool:
        """Begin a step with its first bucket; return False if it has begun."""
        with self.changed:
            if step < self.step or (step == self.step and self._has_begun):
                return False
            self.step, self._has_begun = step, True
            return True

    def end_step(self) -> None:
        """Go on to the next step: all buckets of this one are here."""
        with self.changed:
            self.step, self._has_begun = self.step + 1, False

    @property
    def latest_step(self) -> int:
        """The latest step with a bucket; -1 if there is none."""
        return max((step for step, _ in list(self.buckets)), default=-1)

    # Its buckets ------------------------------------------------------------------------------------------------------

    def add(self, pending: PendingBucket) -> None:
        """Enter a bucket; hold ``changed``."""
        self.buckets[pending.id] = pending
        self.ready_s = time.monotonic()
        if self.meter is not None:
            self.meter.on_ready(pending.step, pending.segments)
        self.changed.notify_all()

    def unfinished(self) -> list[PendingBucket]:
        """Return the buckets whose owners have no average yet, in the same order on all ranks; hold ``changed``."""
        unfinished = [each for each in self.buckets.values() if each.progress is not BucketProgress.FINISHED]
        return sorted(unfinished, key=lambda pending: pending.id)

    def finish(self, pending: PendingBucket) -> None:
        """Note that a bucket is averaged, and answer its owner."""
        with self.changed:
            found = pending.id in self.buckets
            pending.progress = BucketProgress.FINISHED
            self.averaged_s = time.monotonic()
            if pending.step > self._oldest:
                self._oldest = pending.step
                for each in list(self.buckets.values()):
                    if each.step < pending.step and each.progress is BucketProgress.FINISHED:
                        self._remove(each)
        if self.meter is not None:  # before the answer, which may begin the next step
            self.meter.on_averaged(pending.step)
        if found:
            pending.answer()

    def give_up(self, pending: PendingBucket, error: BaseException) -> None:
        """Remove a bucket that cannot be averaged, and answer its owner."""
        with self.changed:
            self._remove(pending)
        pending.answer(error)

    def drain(self) -> list[PendingBucket]:
        """Remove all unfinished buckets; hold ``changed``."""
        drained = self.unfinished()
        for pending in drained:
            self._remove(pending)
        return drained

    def wait_for(self, which: BucketId, deadline_s: float) -> PendingBucket | None:
        """Return a bucket once it is here and it is decided who averages it; None if this rank has finished it.

        Raises
        ------
        TimeoutError
            It has not come within the deadline.
        """
        with self.changed:

            def came() -> bool:
                if which in self.buckets:
                    return self.buckets[which].is_decided
                return which[0] < self.latest_step

            if not self.changed.wait_for(came, deadline_s):
                raise TimeoutError
            pending = self.buckets.get(which)
            return None if pending is None or pending.progress is BucketProgress.FINISHED else pending

    def _remove(self, pending: PendingBucket) -> None:
        self.buckets.pop(pending.id, None)
        pending.run = None  # its callback refers to the bucket: they would keep each other alive


class StepAverager:
    """Averages the buckets of one rank, step after step.

    Parameters
    ----------
    options
        The options in force.
    membership
        This rank, and all ranks whose gradients are averaged.
    ledger, feedback, tagger
        The record of packets, the residual, and the tagger of packets.

    Attributes
    ----------
    samples
        Samples of each rank in this step; None before the first step's metadata, and if all ranks have equal weight.
    weight
        Factor on this rank's mean gradient in this step.
    flush_step
        The step that is sent in full; -1 for none.
    sends_metadata
        Whether each step begins with the ranks' metadata.
    metadata_number, first_sequence
        The number in a step of the bucket of metadata, and of the first one of gradients.
    reducer
        Averages single buckets; None before the ranks have joined, and without DLCP.
    """

    def __init__(
        self,
        options: Options,
        membership: Membership,
        *,
        ledger: Ledger,
        feedback: Residual,
        tagger: Tagger,
    ) -> None:
        self.options, self.membership = options, membership
        self.ledger, self.feedback, self.tagger = ledger, feedback, tagger
        self.samples: dict[int, int] | None = None
        self.weight = 1.0
        self._samples_here = options.samples
        self.sends_metadata = options.weighted and len(membership.ranks) > 1
        self.flush_step = -1
        self.reducer: Reducer | None = None
        self.number_buckets(beside_reports=False)

    # Setting up -------------------------------------------------------------------------------------------------------

    def join(self, joined: Joined) -> None:
        """Average over the endpoint of ``joined``."""
        options = self.options = joined.options
        self.membership = joined.membership
        context = RankContext(
            joined.endpoint.connection,
            joined.membership.ranks,
            options.reduction(),
            self.tagger,
            self.ledger,
            self.feedback,
        )
        alone = len(joined.membership.ranks) == 1  # until other ranks come
        self.reducer = make_reducer(
            DIRECT if alone else options.algorithm,
            context,
            topology=joined.topology,
            compression=options.compression,
            combine=options.combine,
        )

    # A step's metadata ------------------------------------------------------------------------------------------------

    def number_buckets(self, *, beside_reports: bool) -> None:
        """Give the buckets of each step their numbers.

        Parameters
        ----------
        beside_reports
            Whether ranks exchange reports on steps (:mod:`dlcp.session.choosing`), which have the first number.
        """
        self.metadata_number = int(beside_reports)
        self.first_sequence = self.metadata_number + int(self.sends_metadata)

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

    def metadata(self) -> Bucket:
        """Return the bucket with this rank's metadata of the coming step."""
        from dlcp.collectives.step_metadata import bucket_of  # most jobs do not need it

        ranks = self.membership.ranks
        return bucket_of(self._samples_here, ranks.index(self.membership.rank), len(ranks))

    def read_metadata(self, average: NDArray[np.floating]) -> None:
        """Read the metadata of all ranks."""
        from dlcp.collectives.step_metadata import read_samples  # most jobs do not need it

        self.samples = read_samples(average, self.membership.ranks)
        self.weight = weight_of(self.samples, self.membership.rank)

    # Averaging --------------------------------------------------------------------------------------------------------

    def start(self, step: int, sequence: int, bucket: Bucket) -> BucketRun:
        """Begin to average a bucket with the weights of its step, and return its run."""
        assert self.reducer
        if self.samples and not bucket.exact:
            bucket = replace(bucket, samples=self.samples)
        if step == self.flush_step and not bucket.exact:
            bucket = replace(bucket, flush=True)
        return self.reducer.start(step, sequence, bucket)

    def close(self) -> None:
        """Stop the reducer's threads; call it when the endpoint is closed."""
        if self.reducer:
            self.reducer.close()
