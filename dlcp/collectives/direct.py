# SPDX-License-Identifier: Apache-2.0
"""All-reduce in two hops: every rank sends each shard to its owner, which averages and sends the result to all.

The first hop may lose packets within the bound. The result is delivered whole, so that replicas never drift apart.
A parameter server is the case of one owner that contributes nothing itself (see :mod:`dlcp.collectives.server`).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.direct_run import DirectRun
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.push_pull import RATE
from dlcp.collectives.salvage import Salvage
from dlcp.collectives.shards import inbound_rates, weights_for_rates
from dlcp.ledger import Ledger
from dlcp.tags import Tagger
from dlcp.transport import Endpoint, TransportError


class DirectAllReduce:
    """All-reduce of one rank with its peers.

    :meth:`start` may be called from any thread; everything else runs in the endpoint's.

    Parameters
    ----------
    endpoint
        This rank's endpoint.
    contributors
        The ranks that contribute and get the result, this one among them.
    weights
        Each owner's weight in the division into shards; by default the contributors own shards, equal ones or such as
        suit the rates at which they receive.
    options, tagger, ledger, feedback
        What may be lost, how packets are tagged, where messages are entered, and what is owed from before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        contributors: Sequence[int],
        *,
        weights: Mapping[int, float] | None = None,
        options: ReduceOptions | None = None,
        tagger: Tagger | None = None,
        ledger: Ledger | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.contributors = sorted(contributors)
        self.options = options or ReduceOptions()
        self.weights = dict(weights or dict.fromkeys(self.contributors, 1.0))
        self.adaptive = self.options.adaptive_shards and weights is None
        self.rates_bps: dict[int, NDArray[np.generic]] = {}
        """What each rank told with the step's last bucket, and by which bucket."""
        self.rated_by: dict[int, int] = {}
        self.tagger = tagger or Tagger()
        self.ledger = ledger or Ledger()
        self.feedback = feedback or ErrorFeedback()
        self.ranks = max([*self.contributors, *self.weights]) + 1
        self._runs: dict[tuple[int, int], DirectRun] = {}

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over the contributors; the future's result is ``bucket.values``, written in place.

        Parameters
        ----------
        step
            Training step; the same on all ranks.
        sequence
            Number of the bucket within the step; the same on all ranks.
        """
        if not bucket.values.flags.c_contiguous or not bucket.values.flags.writeable:
            raise ValueError(f"step {step}, bucket {sequence}: values must be contiguous and writable")
        run = self._runs[step, sequence] = DirectRun(self, step, sequence, bucket)
        try:
            self.endpoint.call(run.begin)
        except TransportError as error:
            run.done.set_exception(error)
        return run.done

    def ended(self, run: DirectRun) -> None:
        """Note that a bucket is done."""
        self._runs.pop((run.step, run.sequence), None)

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that it, or a peer for all it knows, has not finished.

        Call it when the endpoint is closed, so that nothing is written into a bucket any more.
        """
        return [run.salvage() for _, run in sorted(self._runs.items())]

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on, and divide buckets as the last step has taught.

        All results of the last step are in on every rank, so that all divide alike.
        """
        if self.adaptive and len(self.rates_bps) == len(self.weights):
            self.weights = weights_for_rates(inbound_rates(self.rates_bps))
        self.rates_bps, self.rated_by = {}, {}
        self.endpoint.call(partial(self.endpoint.begin_step, step))

    def rates(self) -> NDArray[np.generic]:
        """Return the rates at which this rank reaches each contributor, in bit/s; 0 where it does not know."""
        rank, rate_to = self.endpoint.rank, self.endpoint.rate_to
        return np.array([0 if peer == rank else rate_to(peer) for peer in self.contributors], RATE)
