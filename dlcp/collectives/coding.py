# SPDX-License-Identifier: Apache-2.0
"""Averaging buckets in compressed form: what is common to sending it through an all-reduce and to all ranks.

When the path fails, nobody can use half of a compressed bucket. So until a rank has the result, its bucket holds the
rank's own contribution, whole and in full precision; and a rank that has the result keeps it, compressed, until no
other can need it. What is salvaged is therefore one rank's result, which the others copy, or else the exact average of
all contributions (:mod:`dlcp.collectives.salvage`); in the latter case nothing is owed, for nothing was left out.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.reducer import Course, Reducer, Salvageable
from dlcp.collectives.salvage import Salvage
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion, Values
from dlcp.transport import Endpoint, TransportError

SEED: Final = 0x0D1C9
"""What random choices follow from, beside step, rank and layer; the same on all ranks and in every run."""

WORK_S: Final = 10.0
"""What is being decoded when the path fails is waited for no longer than this. Chosen by us: it takes milliseconds."""

Again = Callable[[], Values]
"""Forms the result once more, of what was received."""


@dataclass(eq=False, repr=False)
class CodingReducer(ABC):
    """A reducer that compresses. It decodes in a thread of its own, for the endpoint's has packets to wait for.

    Parameters
    ----------
    plain
        What averages buckets that may not be compressed, or what is made of those that may.
    endpoint, ranks
        This rank's endpoint, and the ranks that contribute.
    compressor
        What makes buckets smaller.
    options, feedback
        What may be lost, and what is owed from before.
    work
        Where decoding is done.
    """

    plain: Reducer
    endpoint: Endpoint
    ranks: Sequence[int]
    compressor: Compressor
    options: ReduceOptions = field(default_factory=ReduceOptions, kw_only=True)
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback, kw_only=True)
    work: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "dlcp-decode"), kw_only=True)

    def __post_init__(self) -> None:
        self.ranks = sorted(self.ranks)
        self.runs: dict[tuple[int, int], CodedRun] = {}
        self._kept: dict[tuple[int, int], tuple[Again, np.dtype[np.floating], int]] = {}
        """Results that another rank may still need, their type, and how many values of each fill a packet."""
        self._exact: dict[tuple[int, int], int] = {}
        """Numbers of buckets that are not compressed, by step and the number that ``plain`` knows them by."""

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self._exact = {name: sequence for name, sequence in self._exact.items() if name[0] >= step - 1}
        self.plain.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place.

        Parameters
        ----------
        step, sequence
            Training step, and number of the bucket within it; the same on all ranks.
        """
        if bucket.exact:
            number = sequence * self.compressor.rounds
            self._exact[step, number] = sequence
            return self.plain.start(step, number, bucket)
        run = self.make_run(step, sequence, bucket)
        self.runs[step, sequence] = run
        run.start()
        return run.done

    @abstractmethod
    def make_run(self, step: int, sequence: int, bucket: Bucket) -> "CodedRun":
        """Return what takes a bucket through."""

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that it, or a peer for all it knows, has not finished.

        Call it when the endpoint is closed, so that nothing is written into a bucket any more.
        """
        self.await_work()
        held = self.plain.salvage() if isinstance(self.plain, Salvageable) else []
        exact = [
            replace(salvage, sequence=self._exact[salvage.step, salvage.sequence])
            for salvage in held
            if (salvage.step, salvage.sequence) in self._exact
        ]
        finished = [self._finished(name) for name in sorted(self._kept)]
        return exact + finished + [run.salvage() for _, run in sorted(self.runs.items())]

    def await_work(self) -> None:
        """Wait until what was being decoded is: what is owed is known only then."""
        idle = threading.Event()
        self.work.submit(idle.set)
        idle.wait(WORK_S)

    def ended(self, run: "CodedRun", again: Again) -> None:
        """Note that a bucket is done; with it are all buckets of earlier steps, on all ranks.

        For each rank contributed to this one, and does so only when it has all results of the step before.
        """
        del self.runs[run.step, run.sequence]
        for name in [name for name in self._kept if name[0] < run.step]:
            del self._kept[name]
        self._kept[run.step, run.sequence] = again, run.own.dtype, run.values_per_packet

    def _finished(self, name: tuple[int, int]) -> Salvage:
        again, dtype, values_per_packet = self._kept[name]
        values = again().astype(dtype, copy=False)
        packets = -(-len(values) // values_per_packet)
        whole = {rank: np.ones(packets, np.bool_) for rank in self.ranks}
        return Salvage(*name, values, values_per_packet, np.ones(packets, np.bool_), whole)


class CodedRun(Course, ABC):
    """One bucket on its way.

    Attributes
    ----------
    own
        This rank's contribution with what was owed, widened: what it gives if the path fails.
    encoded
        What it sends.
    """

    def __init__(self, reducer: CodingReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(step, sequence, bucket, reducer.work)
        self.reducer, self.compressor = reducer, reducer.compressor
        self.values_per_packet = reducer.endpoint.options.payload_bytes // bucket.values.itemsize
        self.own = self._own()
        self.encoded = self.compressor.encode(
            self.own if np.isfinite(self.own).all() else np.full_like(self.own, np.nan),
            bucket.segments,
            Occasion(step, reducer.endpoint.rank, SEED),
        )

    @abstractmethod
    def start(self) -> None:
        """Send the bucket on its way."""

    def finish(self, again: Again) -> None:
        """Form the result, and let the endpoint's thread, which ends with the endpoint, write it into the bucket."""
        result = again()
        if result.dtype != self.own.dtype:
            result = result.astype(self.own.dtype)
        owed = self.owed() if self.reducer.options.error_feedback else None
        narrow = self.bucket.value_type.narrow(result)
        try:
            self.reducer.endpoint.call(partial(self._write, narrow, owed, again))
        except TransportError as error:
            self.fail(error)

    @abstractmethod
    def owed(self) -> Values | None:
        """Return what is owed of this bucket, if its result is formed as this rank knows; None: nothing."""

    def salvage(self) -> Salvage:
        """Return what this rank holds of the bucket: all of its own, and what it owes if another has the result."""
        packets = -(-len(self.own) // self.values_per_packet)
        own = {self.reducer.endpoint.rank: np.ones(packets, np.bool_)}
        owed = self.owed() if self.reducer.options.error_feedback else None
        final = np.zeros(packets, np.bool_)
        if owed is not None:
            owed = owed.astype(self.own.dtype, copy=False)
        return Salvage(self.step, self.sequence, self.own, self.values_per_packet, final, own, owed)

    def _own(self) -> Values:
        bucket, feedback = self.bucket, self.reducer.feedback
        own = bucket.value_type.widen(bucket.values)
        if self.reducer.options.error_feedback:
            if own is bucket.values:
                feedback.repay(bucket.values, bucket.value_type, bucket.segments)
            else:  # widened, so that what is small is not rounded away
                feedback.add_to(own, bucket.segments)
        return own

    def _write(self, values: NDArray[np.generic], owed: Values | None, again: Again) -> None:
        if self.done.done():
            return
        np.copyto(self.bucket.values, values)
        if owed is not None:
            self._owe(owed)
        self.reducer.ended(self, again)
        self.done.set_result(self.bucket.values)

    def _owe(self, owed: Values) -> None:
        if self.compressor.feedback is Feedback.ALL:
            self.reducer.feedback.owe_all(owed, self.bucket.segments)
        else:
            self.reducer.feedback.owe(owed, self.bucket.segments)


def left_out(compressor: Compressor, own: Values, encoded: Encoded, used: Values) -> Values | None:
    """Return what error feedback owes where ``used`` is what became of a rank's contribution; None: nothing.

    Values that are not finite are for this step's loss scaler; owed, they would spoil the next one.
    """
    if compressor.feedback is Feedback.NOTHING:
        return None
    with np.errstate(invalid="ignore"):
        if compressor.feedback is Feedback.LOST:
            missing = compressor.decode(encoded, encoded.content) - used
        else:
            missing = own - used
    return np.where(np.isfinite(missing), missing, missing.dtype.type(0))
