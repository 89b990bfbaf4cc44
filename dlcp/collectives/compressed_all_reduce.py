# SPDX-License-Identifier: Apache-2.0
"""Compressed all-reduce: for compressors whose output can be averaged.

The compressed values are an ordinary, smaller bucket: tagged by their own magnitudes, with the usual loss bound.
Decoding is linear, so lost values are decoded, too, and become residual at the gradient's positions.

With three or more ranks, a failing path may lose values for good: one rank may have the result while another does not
yet know which of its packets an owner received. The owner knows this for packets of the compressed bucket, but not for
the gradient.
"""

from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext, Strategy
from dlcp.collectives.compressed_bucket import CompressedReducer, CompressedRun, left_out
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.residual import Residual
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Values


class CompressedAllReduce(CompressedReducer):
    """Averages compressed buckets.

    Parameters
    ----------
    context, compressor, work
        See :class:`CompressedReducer`; ``compressor.reduces``.
    inner
        The strategy that averages encoded buckets; each bucket uses ``compressor.rounds`` of its bucket numbers.
    in_transit
        The residual of ``inner`` only: its positions are those of encoded buckets.
    """

    def __init__(
        self,
        context: RankContext,
        compressor: Compressor,
        inner: Strategy,
        in_transit: Residual,
        work: Executor | None = None,
    ) -> None:
        super().__init__(context, compressor, work)
        self.inner, self.in_transit = inner, in_transit

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place."""
        return self.run(AllReduceRun(self, step, sequence, bucket))

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of buckets that it, or possibly a peer, has not finished."""
        self.await_work()
        for sent in self.inner.partial_results():
            sequence, number = divmod(sent.sequence, self.compressor.rounds)
            run = self.runs.get((sent.step, sequence))
            if isinstance(run, AllReduceRun) and run.number == number and sent.residual is not None:
                run.note_lost(sent.residual)
        return super().partial_results()


class AllReduceRun(CompressedRun):
    """One bucket's run through one all-reduce, or several rounds of it."""

    reducer: CompressedAllReduce

    def __init__(self, reducer: CompressedAllReduce, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer, step, sequence, bucket)
        self.number = 0
        """Number of the round."""
        self.lost: Values | None = None
        """Values that the network lost in the last round, decoded."""

    def start(self) -> "Future[NDArray[np.generic]]":
        """Average the first round, from the caller's thread."""
        self.begin()
        return self.done

    def begin(self) -> None:
        """Average the current round."""
        encoded, bucket = self.encoded, self.bucket
        assert encoded.value_type
        # A copy: the average overwrites the sent values, which are needed to find what was left out.
        content = np.array(encoded.content)
        kind, segments = encoded.value_type, encoded.segments
        sent = replace(bucket, values=content, value_type=kind, segments=segments, magnitudes=None, exported=False)
        averaged = self.reducer.inner.start(self.step, self.sequence * self.compressor.rounds + self.number, sent)
        then = self.guard(lambda mean: self.aside(lambda: self._on_mean(sent, mean)))
        averaged.add_done_callback(lambda done: then(done.exception() or done.result()))

    def residual(self) -> Values | None:
        """Return the values that coding left out or the network lost."""
        compressor = self.compressor
        if compressor.feedback is Feedback.NOTHING:
            return None
        used = compressor.decode(self.encoded, self.encoded.content)
        if self.lost is not None:
            used = used - self.lost
        return left_out(compressor, self.own, self.encoded, used)

    def note_lost(self, lost: Values) -> None:
        """Record this round's losses in the network, at the positions of the sent values."""
        if lost.any():
            self.lost = self.compressor.decode(self.encoded, lost)

    def _on_mean(self, sent: Bucket, average: NDArray[np.generic]) -> None:
        encoded: Encoded = self.encoded
        assert encoded.value_type
        mean = encoded.value_type.widen(average)
        # Removed in any case: losses in a round that only guides the next are not residual.
        lost: Values = np.zeros(len(average), np.float32)
        self.reducer.in_transit.apply(lost, sent.segments)
        refined = self.compressor.refine(encoded, mean)
        if refined is not None:
            self.encoded, self.number = refined, self.number + 1
            self.begin()
            return
        self.note_lost(lost)
        self.finish(lambda: self.compressor.decode(encoded, mean))
