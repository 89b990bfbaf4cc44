# SPDX-License-Identifier: Apache-2.0
"""Compressed buckets through an all-reduce: for compressors of which the averages mean something.

What travels is a bucket like any other, only smaller: it is tagged by its own magnitudes, may lose what the bound
allows, and what it lost is decoded, for that is linear, and owed in the gradient's own places.

Of three ranks or more, if the path fails when one has the result and another has not yet been told what an owner got of
its share, that little is lost for good: what others know of it, they know in packets of what was sent, and not of the
gradient.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.coding import CodedRun, CodingReducer, left_out
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.reducer import Salvageable
from dlcp.collectives.salvage import Salvage
from dlcp.compress.compressor import Encoded, Feedback, Values


@dataclass(eq=False, repr=False)
class CompressedReducer(CodingReducer):
    """Averages what a compressor makes of buckets.

    Parameters
    ----------
    plain
        What averages that.
    endpoint, ranks, compressor, options, feedback, work
        See :class:`CodingReducer`; ``compressor.reduces``.
    transit
        The feedback of ``plain``, and of nobody else: what it owes belongs into other places.
    """

    transit: ErrorFeedback = field(kw_only=True)

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that it, or a peer for all it knows, has not finished.

        Call it when the endpoint is closed, so that nothing is written into a bucket any more.
        """
        self.await_work()
        for sent in self.plain.salvage() if isinstance(self.plain, Salvageable) else []:
            sequence, number = divmod(sent.sequence, self.compressor.rounds)
            run = self.runs.get((sent.step, sequence))
            if isinstance(run, _Run) and run.number == number and sent.owed is not None:
                run.note_lost(sent.owed)
        return super().salvage()

    def make_run(self, step: int, sequence: int, bucket: Bucket) -> "_Run":
        """Return what takes a bucket through."""
        return _Run(self, step, sequence, bucket)


class _Run(CodedRun):
    """One bucket on its way through one all-reduce, or several."""

    reducer: CompressedReducer

    def __init__(self, reducer: CompressedReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer, step, sequence, bucket)
        self.number = 0
        """Which round it is."""
        self.lost: Values | None = None
        """What the network lost of the last round, decoded."""

    def start(self) -> None:
        """Average what is sent first."""
        self.next_round(self.encoded, 0)

    def next_round(self, encoded: Encoded, number: int) -> None:
        """Average what is sent now."""
        assert encoded.value_type
        bucket = self.bucket
        # The average is written over what is sent, of which it will be asked what it has left out.
        content = np.array(encoded.content)
        sent = Bucket(content, encoded.value_type, encoded.segments, bound=bucket.bound, samples=bucket.samples)
        sequence = self.sequence * self.compressor.rounds + number
        averaged = self.reducer.plain.start(self.step, sequence, sent)
        averaged.add_done_callback(
            self.guard(lambda mean: self.aside(lambda: self._on_mean(encoded, number, sent, mean)))
        )

    def owed(self) -> Values | None:
        """Return what coding has left out, and what the network has lost."""
        compressor = self.compressor
        if compressor.feedback is Feedback.NOTHING:
            return None
        used = compressor.decode(self.encoded, self.encoded.content)
        if self.lost is not None:
            used = used - self.lost
        return left_out(compressor, self.own, self.encoded, used)

    def note_lost(self, lost: Values) -> None:
        """Note what the network has lost of this round, in the places of what was sent."""
        if lost.any():
            self.lost = self.compressor.decode(self.encoded, lost)

    def _on_mean(self, encoded: Encoded, number: int, sent: Bucket, average: NDArray[np.generic]) -> None:
        assert encoded.value_type
        mean = encoded.value_type.widen(average)
        # Drained in any case: what is owed of a round that only guides the next is owed to nobody.
        owed: Values = np.zeros(len(average), np.float32)
        self.reducer.transit.add_to(owed, sent.segments)
        then = self.compressor.refine(encoded, mean)
        if then is not None:
            self.encoded, self.number = then, number + 1
            self.next_round(then, number + 1)
            return
        self.note_lost(owed)
        self.finish(lambda: self.compressor.decode(encoded, mean))
