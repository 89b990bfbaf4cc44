# SPDX-License-Identifier: Apache-2.0
"""The averaging half of a session: its pipeline, and the ranks' weights in each step.

:class:`dlcp.session.session.TrainingSession` decides whether DLCP averages a bucket. This module decides how: with
which collective, compression, bound and weight. If ranks have ``samples``, a step begins with a bucket of metadata,
which sets the step's weights (:mod:`dlcp.collectives.step_metadata`).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import check_samples, weight_of
from dlcp.ledger import Ledger
from dlcp.planes import FULL_BITS
from dlcp.session.joining import Joined
from dlcp.session.options import Options
from dlcp.tags import Tagger


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
