# SPDX-License-Identifier: Apache-2.0
"""A compressed bucket's run: encode, exchange and decode; and its state if the path fails.

A part of a compressed bucket cannot be averaged on its own. So until a rank has the result, its bucket holds its own
contribution in full precision. A rank with the result keeps it, compressed, until no other rank can need it. Recovery
therefore yields either one rank's result, which the others copy, or the exact average of all contributions
(:mod:`dlcp.collectives.partial_result`); the latter has no residual, because nothing was left out.
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
"""Seeds random choices, with step, rank and layer; the same on all ranks and in every run."""
WORK_S: Final = 10.0
"""The longest wait for pending decoding when the path fails; decoding normally takes milliseconds."""

Decode = Callable[[], Values]
"""Computes the result from the received data; may be called repeatedly."""


class CompressedReducer:
    """Common part of compressed all-reduce and compressed all-gather.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share; its residual is that of gradients.
    compressor
        The compressor of buckets.
    work
        The executor for decoding, so that it does not delay the endpoint's thread.
    """

    recoverable = True

    def __init__(self, context: RankContext, compressor: Compressor, work: Executor | None = None) -> None:
        self.context, self.compressor = context, compressor
        self.work = work or ThreadPoolExecutor(1, "dlcp-decode")
        self.runs: dict[tuple[int, int], CompressedRun] = {}
        self._finished: dict[tuple[int, int], tuple[Decode, np.dtype[np.floating], int]] = {}
        """Results that another rank may still need, their type, and their values per packet."""

    def run(self, run: "CompressedRun") -> "Future[NDArray[np.generic]]":
        """Start a bucket."""
        self.runs[run.step, run.sequence] = run
        return run.start()

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of buckets that it, or possibly a peer, has not finished.

        Call it when the endpoint is closed, so that no bucket changes any more.
        """
        self.await_work()
        finished = [self._finished_result(name) for name in sorted(self._finished)]
        return finished + [run.partial_result() for _, run in sorted(self.runs.items())]

    def close(self) -> None:
        """Stop the thread that decodes buckets."""
        self.work.shutdown(wait=False)

    def await_work(self) -> None:
        """Wait for pending decoding, which determines the values left out."""
        idle = threading.Event()
        self.work.submit(idle.set)
        idle.wait(WORK_S)

    def end(self, run: "CompressedRun", decode: Decode) -> None:
        """Record that a bucket is done. All buckets of earlier steps are then done on all ranks.

        Each rank contributed to this bucket, which it does only once it has all results of the step before.
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
    """One bucket in progress.

    Attributes
    ----------
    own
        This rank's contribution with its residual, widened: used for recovery if the path fails.
    encoded
        The data that it sends.
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
        """Compute the result; the endpoint's thread, which stops with the endpoint, writes it into the bucket."""
        result = decode().astype(self.own.dtype, copy=False)
        residual = self.residual() if self.context.options.error_feedback else None
        narrow = self.bucket.value_type.narrow(result)
        try:
            self.context.connection.call(partial(self._write, narrow, residual, decode))
        except TransportError as error:
            self.fail(error)

    @abstractmethod
    def residual(self) -> Values | None:
        """Return the residual that belongs to the bucket's result; None for nothing."""

    def partial_result(self) -> PartialResult:
        """Return this rank's state of the bucket: its contribution, and the residual if another has the result."""
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
            else:  # widened, so that small values are not rounded away
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
    """Return the rest of a rank's contribution, after ``used`` went into the result; None if there is none.

    Non-finite values are left out: this step's loss scaler gets them, and as residual they would spoil the next step.
    """
    if compressor.feedback is Feedback.NOTHING:
        return None
    with np.errstate(invalid="ignore"):
        if compressor.feedback is Feedback.LOST:
            missing = compressor.decode(encoded, encoded.content) - used
        else:
            missing = own - used
    return np.where(np.isfinite(missing), missing, missing.dtype.type(0))
