# SPDX-License-Identifier: Apache-2.0
"""The averaging half of a session: its pipeline, and each step's metadata.

:class:`dlcp.session.session.TrainingSession` decides whether DLCP averages a bucket. This module decides how: with
which collective, compression, bound and weight. If options ask for it, a step begins with a bucket of metadata, which
sets the step's weights and bound (:mod:`dlcp.session.step_exchange`).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import check_samples
from dlcp.ledger import Ledger
from dlcp.planes import FULL_BITS
from dlcp.session.joining import Joined
from dlcp.session.options import Options
from dlcp.tags import Tagger

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.session.step_exchange import StepExchange


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
    exchange
        Weighs ranks and sets the bound of each step; None if the options ask for neither.
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
        self.exchange: StepExchange | None = None
        self.metadata_step = self.flush_step = -1
        self.bits, self.exchanges_reports = FULL_BITS, False
        self._reducer: Reducer | None = None
        self._step = -1

    # Setting up -------------------------------------------------------------------------------------------------------

    def join(self, joined: Joined) -> None:
        """Average over the endpoint of ``joined``."""
        options = self.options = joined.options
        self._exchange_metadata(phases=options.phases)
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
                options.collective,
                context,
                topology=joined.topology,
                compression=options.compression,
                combine=options.combine,
            )
        )

    def weigh_only(self) -> None:
        """Exchange samples although DLCP is off, if the options ask for weights."""
        self._exchange_metadata(phases=False)

    def use(self, reducer: Reducer) -> None:
        """Average with ``reducer``."""
        self._reducer = reducer

    def _exchange_metadata(self, *, phases: bool) -> None:
        options = self.options
        if options.weighted or phases:
            from dlcp.session.step_exchange import StepExchange  # most jobs do not need it

            self.exchange = StepExchange(options.bound(), self.rank, self.ranks, samples=options.samples, phases=phases)

    # A step's metadata ------------------------------------------------------------------------------------------------

    @property
    def metadata_number(self) -> int:
        """The number of the bucket of metadata."""
        return int(self.exchanges_reports)

    @property
    def first_sequence(self) -> int:
        """The number of a step's first bucket of gradients: reports and metadata have the numbers before."""
        return self.metadata_number + int(self.exchange is not None and self.exchange.sends)

    def set_samples(self, count: int) -> None:
        """Set how many samples this rank's gradients are the mean of, from the next step on.

        Raises
        ------
        ValueError
            It is not a whole number, or the options do not set ``samples``.
        """
        check_samples(count)
        if not self.options.weighted:
            raise ValueError("all ranks count the same; set Options(samples=...) on every rank to weigh by samples")
        assert self.exchange
        self.exchange.samples_here = count

    def metadata_of(self, step: int) -> Bucket | None:
        """Return the bucket with this rank's metadata of a step, once; None if it was returned or is not needed."""
        if self.exchange is None or not self.exchange.sends or step <= self.metadata_step:
            return None
        from dlcp.collectives.step_metadata import bucket_of  # most jobs do not need it

        self.metadata_step = step
        return bucket_of(self.exchange.table())

    # Averaging --------------------------------------------------------------------------------------------------------

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket with the weights and bound of its step; the future's result is ``bucket.values``."""
        assert self._reducer
        if step > self._step:
            self._step = step
            self._reducer.begin_step(step, self.bits)
        if self.exchange and not bucket.exact:
            bucket = replace(bucket, bound=self.exchange.bound, samples=self.exchange.samples)
        if step == self.flush_step and not bucket.exact:
            bucket = replace(bucket, flush=True)
        return self._reducer.start(step, sequence, bucket)

    def on_averaged(self, bucket: Bucket) -> None:
        """Record a bucket's average, whose norm the next step's metadata tells."""
        if self.exchange and not bucket.exact:
            self.exchange.on_averaged(bucket)

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of unfinished buckets; call it when the endpoint is closed."""
        return self._reducer.partial_results() if self._reducer else []

    def close(self) -> None:
        """Stop the reducer's threads; call it when the endpoint is closed."""
        if self._reducer:
            self._reducer.close()
