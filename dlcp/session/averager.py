# SPDX-License-Identifier: Apache-2.0
"""The averaging half of a session: the current pipeline, each step's metadata, and settings that an autotuner changes.

:class:`dlcp.session.session.TrainingSession` decides whether DLCP averages a bucket. This module decides how: with
which collective, compression, bound and weight. If options ask for it, a step begins with a bucket of metadata, and an
autotuner (:mod:`dlcp.tuning`) chooses the settings of the step from it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, RankContext, Reducer, Residual, make_reducer
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import check_samples
from dlcp.ledger import Ledger
from dlcp.session.joining import Joined
from dlcp.session.options import Options
from dlcp.tags import Tagger

if TYPE_CHECKING:  # loaded when options ask for it
    from dlcp.tuning.autotuner import Autotuner
    from dlcp.tuning.rules import Settings


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
    gradient_bytes
        How much a rank contributes per step, in bytes, for the autotuner; 0 if unknown.

    Attributes
    ----------
    autotuner
        Chooses settings and weighs ranks; None if the options ask for neither.
    metadata_step
        The latest step whose metadata this rank has sent; -1 for none.
    flush_step
        The step that is sent in full; -1 for none.
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
        gradient_bytes: int = 0,
    ) -> None:
        self.options, self.rank, self.ranks = options, rank, sorted(ranks)
        self.ledger, self.feedback, self.tagger = ledger, feedback, tagger
        self.autotuner: Autotuner | None = None
        self.metadata_step = self.flush_step = -1
        self._gradient_bytes = gradient_bytes
        self._inbound_rates_bps: dict[int, float] = {}
        self._joined: Joined | None = None
        self._make: Callable[[Settings | None], Reducer] = self._make_reducer
        self._reducer: Reducer | None = None
        self._replaced: Reducer | None = None
        """The reducer before the last change of settings, while it may still hold buckets of this step or the last."""
        self._step = -1

    # Setting up -------------------------------------------------------------------------------------------------------

    def join(self, joined: Joined) -> None:
        """Average over the endpoint of ``joined``."""
        self.options, self._joined = joined.options, joined
        self.autotuner = self._make_autotuner()
        self.use(self._make_reducer)

    def weigh_only(self) -> None:
        """Exchange samples although DLCP is off, if the options ask for weights."""
        if self.options.weighted:
            self.autotuner = self._make_autotuner()

    def use(self, make: "Callable[[Settings | None], Reducer]") -> None:
        """Average with the reducer that ``make`` returns for an autotuner's settings, or for None without one."""
        self._make = make
        self._reducer = make(self.autotuner.settings if self.autotuner else None)

    def _make_autotuner(self) -> "Autotuner | None":
        options, joined = self.options, self._joined
        if not (options.weighted or options.adapt or options.phases):
            return None
        from dlcp.tuning.autotuner import Autotuner  # most jobs do not need it
        from dlcp.tuning.rules import Settings

        tuner = Autotuner(Settings.of(options), options.bound(), self.rank, self.ranks, samples=options.samples)
        if joined is not None:
            tuner.measure(
                self.ledger,
                joined.endpoint.connection,
                adapt=options.adapt,
                phases=options.phases,
                hosts=len(joined.topology.ranks_by_host(self.ranks)),
                gradient_bytes=self._gradient_bytes,
                inbound_rates_bps=self._inbound_rates_bps,
            )
        return tuner

    def _make_reducer(self, settings: "Settings | None") -> Reducer:
        joined, options = self._joined, self.options
        assert joined
        compression = options.compression
        if settings is not None:
            chosen = "protected_share", "collective", "deferral_bound"
            options = options.with_(**{name: getattr(settings, name) for name in chosen})
            compression = settings.compression
            self.tagger.policy = options.classes()
            weight = options.transport(len(self.ranks), joined.topology).flow_weight
            joined.endpoint.call(partial(joined.endpoint.connection.set_flow_weight, weight))
        return make_reducer(
            options.collective,
            RankContext(
                joined.endpoint.connection,
                self.ranks,
                options.reduction(),
                self.tagger,
                self.ledger,
                self.feedback,
                inbound_rates_bps=self._inbound_rates_bps,
            ),
            topology=joined.topology,
            compression=compression,
            combine=options.combine,
        )

    # A step's metadata ------------------------------------------------------------------------------------------------

    @property
    def first_sequence(self) -> int:
        """The number of a step's first bucket of gradients: metadata has number 0."""
        return int(self.autotuner is not None and self.autotuner.sends)

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
        assert self.autotuner
        self.autotuner.samples_here = count

    def metadata_of(self, step: int) -> Bucket | None:
        """Return the bucket with this rank's metadata of a step, once; None if it was returned or is not needed."""
        tuner = self.autotuner
        if tuner is None or not tuner.sends or step <= self.metadata_step:
            return None
        from dlcp.collectives.step_metadata import bucket_of  # most jobs do not need it

        self.metadata_step = step
        return bucket_of(tuner.table(step))

    # Averaging --------------------------------------------------------------------------------------------------------

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket with the settings of its step; the future's result is ``bucket.values``."""
        reducer = self._reducer_for(step, bucket)
        if tuner := self._tuner_of(bucket):
            bucket = replace(bucket, bound=tuner.bound, samples=tuner.samples)
        if step == self.flush_step and not bucket.exact:
            bucket = replace(bucket, flush=True)
        return reducer.start(step, sequence, bucket)

    def on_averaged(self, bucket: Bucket) -> None:
        """Let the autotuner see a bucket's average."""
        if tuner := self._tuner_of(bucket):
            tuner.on_averaged(bucket)

    def _reducer_for(self, step: int, bucket: Bucket) -> Reducer:
        """Return the reducer of a bucket; the first bucket of a step begins the step."""
        assert self._reducer
        if step > self._step:
            self._step = step
            if self._replaced:
                self._replaced.close()
                self._replaced = None
            self._reducer.begin_step(step)
        tuner = self._tuner_of(bucket)
        if tuner and tuner.reducer_changed():
            self._replaced, self._reducer = self._reducer, self._make(tuner.settings)
            self._reducer.begin_step(step)
        return self._reducer

    def _tuner_of(self, bucket: Bucket) -> "Autotuner | None":
        """Return the autotuner for a bucket of gradients; None for metadata."""
        return None if bucket.exact else self.autotuner

    def partial_results(self) -> list[PartialResult]:
        """Return this rank's state of unfinished buckets; call it when the endpoint is closed."""
        return [result for reducer in self._reducers() for result in reducer.partial_results()]

    def close(self) -> None:
        """Stop the reducers' threads; call it when the endpoint is closed."""
        for reducer in self._reducers():
            reducer.close()

    def _reducers(self) -> list[Reducer]:
        return [reducer for reducer in (self._replaced, self._reducer) if reducer]
