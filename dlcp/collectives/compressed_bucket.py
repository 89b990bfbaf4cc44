# SPDX-License-Identifier: Apache-2.0
"""A compressed bucket on its way: encode, exchange, decode; and what is left of it if the path fails.

Nobody can use half of a compressed bucket. So until a rank has the result, its bucket holds the rank's own
contribution, whole and in full precision; and a rank that has the result keeps it, compressed, until no other can need
it. What is recovered is therefore one rank's result, which the others copy, or else the exact average of all
contributions (:mod:`dlcp.collectives.partial_result`); in the latter case there is no residual, for nothing was left
out.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, BucketRun, RankContext
from dlcp.collectives.partial_result import PartialResult
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion, Values
from dlcp.transport import TransportError

SEED: Final = 0x0D1C9
"""What random choices follow from, beside step, rank and layer; the same on all ranks and in every run."""
WORK_S: Final = 10.0
"""The longest wait for what is being decoded when the path fails. Chosen by us: it takes milliseconds."""

Decode = Callable[[], Values]
"""Forms the result of what was received, as often as it is needed."""


class CompressedReducer:
    """What a compressed all-reduce and a compressed all-gather have in common.

    Parameters
    ----------
    context
        This rank, and what its algorithms share; its residual is that of gradients.
    compressor
        What makes buckets smaller.
    work
        Where decoding is done: the endpoint's thread has packets to wait for.
    """

    recoverable = True

    def __init__(self, context: RankContext, compressor: Compressor, work: Executor | None = None) -> None:
        self.context, self.compressor = context, compressor
        self.work = work or ThreadPoolExecutor(1, "dlcp-decode")
        self.runs: dict[tuple[int, int], CompressedRun] = {}
        self._finished: dict[tuple[int, int], tuple[Decode, np.dtype[np.floating], int]] = {}
        """Results that another rank may still need, their type, and how many values of each fill a packet."""

    def run(self, run: "CompressedRun") -> "Future[NDArray[np.generic]]":
        """Start a bucket."""
        self.runs[run.step, run.sequence] = run
        return run.start()

    def partial_results(self) -> list[PartialResult]:
        """Return what this rank holds of buckets that it, or a peer for all it knows, has not finished.

        Call it when the endpoint is closed, so that nothing is written into a bucket any more.
        """
        self.await_work()
        finished = [self._finished_result(name) for name in sorted(self._finished)]
        return finished + [run.partial_result() for _, run in sorted(self.runs.items())]

    def close(self) -> None:
        """End the thread in which buckets are decoded."""
        self.work.shutdown(wait=False)

    def await_work(self) -> None:
        """Wait until what was being decoded is: only then is it known what was left out."""
        idle = threading.Event()
        self.work.submit(idle.set)
        idle.wait(WORK_S)

    def end(self, run: "CompressedRun", decode: Decode) -> None:
        """Note that a bucket is done; with it are all buckets of earlier steps, on all ranks.

        For each rank contributed to this one, and does so only when it has all results of the step before.
        """
        del self.runs[run.step, run.sequence]
        for name in [name for name in self._finished if name[0] < run.step]:
            del self._finished[name]
        self._finished[run.step, run.sequence] = decode, run.own.dtype, run.values_per_packet

    def _finished_result(self, name: tuple[int, int]) -> PartialResult:
        decode, dtype, values_per_packet = self._finished[name]
        values = decode().astype(dtype, copy=False)
        packets = -(-len(values) // values_per_packet)
        whole = {rank: np.ones(packets, np.bool_) for rank in self.context.contributors}
        return PartialResult(*name, values, values_per_packet, np.ones(packets, np.bool_), whole)


class CompressedRun(BucketRun):
    """One bucket on its way.

    Attributes
    ----------
    own
        This rank's contribution with its residual, widened: what it gives if the path fails.
    encoded
        What it sends.
    """

    def __init__(self, reducer: CompressedReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer.context, step, sequence, bucket, reducer.work)
        self.reducer, self.compressor = reducer, reducer.compressor
        self.own = self._own()
        self.encoded = self.compressor.encode(
            self.own if np.isfinite(self.own).all() else np.full_like(self.own, np.nan),
            bucket.segments,
            Occasion(step, self.context.rank, SEED),
        )

    def finish(self, decode: Decode) -> None:
        """Form the result, and let the endpoint's thread, which ends with the endpoint, write it into the bucket."""
        result = decode().astype(self.own.dtype, copy=False)
        residual = self.residual() if self.context.options.error_feedback else None
        narrow = self.bucket.value_type.narrow(result)
        try:
            self.context.connection.call(partial(self._write, narrow, residual, decode))
        except TransportError as error:
            self.fail(error)

    @abstractmethod
    def residual(self) -> Values | None:
        """Return this bucket's residual, if its result is formed as this rank knows; None: nothing."""

    def partial_result(self) -> PartialResult:
        """Return what this rank holds of the bucket: all of its own, and the residual if another has the result."""
        packets = -(-len(self.own) // self.values_per_packet)
        own = {self.context.rank: np.ones(packets, np.bool_)}
        residual = self.residual() if self.context.options.error_feedback else None
        if residual is not None:
            residual = residual.astype(self.own.dtype, copy=False)
        final = np.zeros(packets, np.bool_)
        return PartialResult(self.step, self.sequence, self.own, self.values_per_packet, final, own, residual)

    def _own(self) -> Values:
        bucket, residual = self.bucket, self.context.residual
        own = bucket.value_type.widen(bucket.values)
        if self.context.options.error_feedback:
            if own is bucket.values:
                residual.apply(bucket.values, bucket.segments, bucket.value_type)
            else:  # widened, so that what is small is not rounded away
                residual.apply(own, bucket.segments)
        return own

    def _write(self, values: NDArray[np.generic], residual: Values | None, decode: Decode) -> None:
        if self.done.done():
            return
        np.copyto(self.bucket.values, values)
        if residual is not None:
            keep = self.context.residual
            add = keep.add_whole if self.compressor.feedback is Feedback.ALL else keep.add
            add(residual, self.bucket.segments)
        self.reducer.end(self, decode)
        self.done.set_result(self.bucket.values)


def left_out(compressor: Compressor, own: Values, encoded: Encoded, used: Values) -> Values | None:
    """Return the residual where ``used`` is what became of a rank's contribution; None: nothing.

    Values that are not finite are for this step's loss scaler; as residual they would spoil the next step.
    """
    if compressor.feedback is Feedback.NOTHING:
        return None
    with np.errstate(invalid="ignore"):
        if compressor.feedback is Feedback.LOST:
            missing = compressor.decode(encoded, encoded.content) - used
        else:
            missing = own - used
    return np.where(np.isfinite(missing), missing, missing.dtype.type(0))
