# SPDX-License-Identifier: Apache-2.0
"""How a group's steps follow its pilot: each begins with a notice to all ranks, and gradients are weighed by it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives import Bucket, ErrorFeedback, Reducer, make_reducer
from dlcp.collectives.notice import bucket_of
from dlcp.collectives.samples import weigh
from dlcp.ledger import Ledger
from dlcp.session.agreement import POLL_MAX_S, Agreement
from dlcp.session.exchange import Exchange
from dlcp.session.joining import Joined
from dlcp.tags import Tagger
from dlcp.transport import DeadlineError
from dlcp.tuning.autotuner import Pilot, PilotedReducer
from dlcp.tuning.rules import Settings

WEIGHS = "weighs"
"""The topic on which ranks tell that they weigh by samples: if DLCP cannot be used, they go on so without it."""


def all_weigh(agreement: Agreement) -> bool:
    """Tell whether all ranks have told that they weigh by samples, once they have or time is up."""
    while agreement.left_s and not agreement.told(WEIGHS, range(agreement.size)):
        time.sleep(min(POLL_MAX_S, agreement.left_s))
    return agreement.told(WEIGHS, range(agreement.size))


def piloted(
    pilot: Pilot, joined: Joined, ranks: Sequence[int], *, tagger: Tagger, ledger: Ledger, feedback: ErrorFeedback
) -> PilotedReducer:
    """Return what averages as a pilot says, among ranks that have joined; the others are as of ``make_reducer``."""

    def make(settings: Settings) -> Reducer:
        options = joined.options.with_(protected_share=settings.protected_share, collective=settings.collective)
        tagger.policy = options.classes()
        weight = options.transport(len(ranks), joined.topology).flow_weight
        joined.endpoint.call(partial(joined.endpoint.set_flow_weight, weight))
        return make_reducer(
            settings.collective,
            joined.endpoint,
            ranks,
            options=options.reduction(),
            tagger=tagger,
            ledger=ledger,
            feedback=feedback,
            topology=joined.topology,
            compression=settings.compression,
            combine=options.combine,
        )

    return PilotedReducer(pilot, make)


class Steering:
    """Sends a step's notice before its gradients. Not for several threads at a time.

    Parameters
    ----------
    pilot
        What the ranks know of each other.
    exchange
        What averages.
    deadline_s
        How long a notice may take.
    """

    def __init__(self, pilot: Pilot, exchange: Exchange, deadline_s: float) -> None:
        self.pilot = pilot
        self._exchange = exchange
        self._deadline_s = deadline_s
        self._told: Future[NDArray[np.generic]] | None = None
        self._step = -1

    @property
    def first_sequence(self) -> int:
        """The number of a step's first bucket of gradients."""
        return int(self.pilot.tells)

    def begin(self, step: int) -> None:
        """Tell the other ranks what this one has to tell in a step; once, however often it is asked for."""
        if step > self._step:
            self._step = step
            if self.pilot.tells:
                self._told = self._exchange.start(step, 0, bucket_of(self.pilot.table(step)))

    def weigh(self, step: int, bucket: Bucket) -> None:
        """Multiply a bucket by this rank's weight, in place, as soon as the step's notices are in.

        Raises
        ------
        TransportError
            They did not come.
        """
        self.begin(step)
        if self._told:
            self.pilot.heard(self._heard(step, self._told).astype(np.float32))
            self._told = None
        weight = self.pilot.weight
        if weight != 1:
            values = bucket.value_type.widen(bucket.values).copy()
            weigh(values, weight)
            bucket.values[:] = bucket.value_type.narrow(values)

    def _heard(self, step: int, told: "Future[Any]") -> NDArray[Any]:
        try:
            values: NDArray[Any] = told.result(self._deadline_s)
        except FutureTimeoutError:
            raise DeadlineError(f"step {step}: no notice of all ranks in {self._deadline_s:g} s") from None
        return values
