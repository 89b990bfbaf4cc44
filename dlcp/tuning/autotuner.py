# SPDX-License-Identifier: Apache-2.0
"""Steers the averaging of one rank: by how many samples ranks have, and by what they have measured and told each other.

Each step begins with a notice to all (:mod:`dlcp.collectives.notice`). Whoever averages gradients, a framework's hook
or a group, hands it over like a bucket, before those of the gradients, and passes on what comes back. Then all ranks
know the same, and what follows from it holds on all of them from the same step on.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.notice import Notice, is_notice, read_notices, samples_of, table_of
from dlcp.collectives.reducer import Reducer, Salvageable
from dlcp.collectives.salvage import Salvage
from dlcp.collectives.samples import check_samples, weight_of
from dlcp.ledger import Ledger
from dlcp.transport import Endpoint, LossBound
from dlcp.tuning.phases import TIGHT_RATIO, Phases
from dlcp.tuning.rules import Advice, Figures, Settings, decide

if TYPE_CHECKING:
    from dlcp.session.joining import Joined
    from dlcp.session.options import Options

WARM_UP_STEPS: Final = 5
"""Steps that say little: frameworks arrange their buckets anew, rate control finds its rate. Chosen by us."""
WINDOW_STEPS: Final = 10
"""Steps that a choice rests on. Chosen by us: the median of so many is steady, and training has thousands."""
NORM_VALUES: Final = 1 << 16
"""So many values of a bucket give its norm, in evenly spaced runs: their share in it is known to about 1 %."""
_RUN_VALUES: Final = 1 << 10


class Pilot:
    """What one rank knows and tells; not for several threads, but for what averages report.

    Parameters
    ----------
    settings
        What is in force in the beginning, the same on all ranks.
    bound
        The bound that goes with it; its ``immediate`` is kept.
    rank, contributors
        This rank, and all whose gradients are averaged.
    samples
        How many samples this rank has in a step; 0: all ranks count the same.
    adapt
        Choose settings anew by what is measured.
    phases
        Hold the bound down in critical regimes.
    hosts, gradient_bytes
        On how many hosts the ranks are, and what a rank contributes in a step.
    ledger, endpoint
        What to report of; without, times only.

    Attributes
    ----------
    settings
        What is in force.
    advice
        The latest choice; None before.
    notices
        What each rank told at the beginning of this step.
    """

    def __init__(
        self,
        settings: Settings,
        bound: LossBound,
        rank: int,
        contributors: Sequence[int],
        *,
        samples: int = 0,
        adapt: bool = False,
        phases: bool = False,
        hosts: int = 1,
        gradient_bytes: int = 0,
        ledger: Ledger | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.given = self.settings = settings
        self.advice: Advice | None = None
        self.notices: dict[int, Notice] = {}
        self.weighted = samples > 0
        self.phases = Phases() if phases else None
        self._bound, self._rank, self._contributors = bound, rank, sorted(contributors)
        self._samples = check_samples(samples)
        self._adapt = adapt
        self._hosts, self.gradient_bytes = hosts, gradient_bytes
        self._ledger, self._endpoint = ledger, endpoint
        self._steps = 0
        self._window: list[dict[int, Notice]] = []
        self._began_s = self._handed_s = self._averaged_s = math.nan
        self._backward_s = self._waited_s = 0.0
        self._squares = 0.0

    @classmethod
    def of(
        cls,
        options: "Options",
        rank: int,
        contributors: Sequence[int],
        *,
        gradient_bytes: int = 0,
        ledger: Ledger | None = None,
        joined: "Joined | None" = None,
    ) -> "Pilot":
        """Return the pilot that options ask for; where ranks have not joined, one that weighs and nothing else."""
        settings = Settings(options.loss_bound, options.protected_share, options.compression, options.collective)
        bound, samples = options.bound(), options.samples
        if joined is None:
            return cls(settings, bound, rank, contributors, samples=samples)
        return cls(
            settings,
            bound,
            rank,
            contributors,
            samples=samples,
            adapt=options.adapt,
            phases=options.phases,
            hosts=len(joined.topology.ranks_by_host(contributors)),
            gradient_bytes=gradient_bytes,
            ledger=ledger,
            endpoint=joined.endpoint,
        )

    @property
    def tells(self) -> bool:
        """Whether steps begin with a notice."""
        return len(self._contributors) > 1 and (self.weighted or self._adapt or self.phases is not None)

    def set_samples(self, count: int) -> None:
        """Say how many samples this rank has from the next notice on.

        Raises
        ------
        ValueError
            It is no whole number, or ranks do not weigh by samples.
        """
        samples = check_samples(count)
        if not self.weighted:
            raise ValueError("all ranks count the same; say Options(samples=...) on every rank to weigh by samples")
        self._samples = samples

    # A step -----------------------------------------------------------------------------------------------------------

    def table(self, step: int) -> NDArray[np.float32]:
        """Return this rank's notice, to be averaged over all ranks: it begins the step."""
        now_s = time.monotonic()
        last_s = now_s - self._began_s if math.isfinite(self._began_s) else 0.0
        notice = Notice(
            samples=self._samples if self.weighted else 1,
            step_s=last_s,
            backward_s=self._backward_s,
            waited_s=self._waited_s,
            norm=math.sqrt(self._squares),
            **self._of_ledger(step - 1),
            **self._of_paths(),
        )
        self._began_s, self._squares = now_s, 0.0
        return table_of(notice, self._contributors.index(self._rank), len(self._contributors))

    def heard(self, average: NDArray[np.floating]) -> None:
        """Take in what all ranks told, and choose by it."""
        self.notices = read_notices(average, self._contributors)
        self._steps += 1
        if self.phases and self._steps > 1:
            self.phases.note(self.notices[self._contributors[0]].norm)
        if not self._adapt or self._steps <= WARM_UP_STEPS:
            return
        self._window.append(self.notices)
        if len(self._window) >= WINDOW_STEPS:
            figures = figures_of(self._window, self._hosts, self.gradient_bytes)
            self.advice = decide(figures, self.given, self.settings)
            self.settings = self.advice.settings
            self._window.clear()

    @property
    def weight(self) -> float:
        """By what this rank's mean gradient is to be multiplied in this step."""
        return weight_of(samples_of(self.notices), self._rank) if self.weighted else 1.0

    @property
    def samples(self) -> dict[int, int] | None:
        """How many samples each rank has in this step; None where all count the same."""
        return samples_of(self.notices) if self.weighted else None

    @property
    def bound(self) -> LossBound:
        """What a bucket of this step may lose."""
        ratio = self.settings.loss_bound
        if self.phases and self.phases.critical:
            ratio = min(ratio, TIGHT_RATIO)
        return LossBound(ratio, self._bound.immediate)

    # What is measured -------------------------------------------------------------------------------------------------

    def on_handed(self) -> None:
        """Note that the last gradients of the step are ready."""
        self._handed_s = time.monotonic()
        self._backward_s = self._handed_s - self._began_s
        self._waited_s = 0.0

    def on_averaged(self, bucket: Bucket) -> None:
        """Note that a bucket has been averaged; from any thread."""
        if math.isfinite(self._handed_s) and self._handed_s >= self._began_s:
            self._waited_s = time.monotonic() - self._handed_s
        if self.phases:
            self._squares += squares_of(bucket)

    def _of_ledger(self, step: int) -> dict[str, float]:
        if self._ledger is None:
            return {}
        records = self._ledger.of_step(step)
        shares = [min(record.packets, record.recovered + record.lost) / record.packets for record in records]
        return {
            "packets": sum(record.packets for record in records),
            "wanting": sum(record.recovered + record.lost for record in records),
            "lost": sum(record.lost for record in records),
            "worst": max(shares, default=0.0),
            "protected": self._protected(self._ledger),
        }

    def _of_paths(self) -> dict[str, float]:
        if self._endpoint is None or not self._adapt:
            return {}
        peers = [peer for peer in self._contributors if peer != self._rank]
        rtts_s = [self._endpoint.rtt_to(peer) for peer in peers]
        rates_bps = [rate for rate in map(self._endpoint.rate_to, peers) if rate > 0]
        return {"rtt_s": max(rtts_s, default=0.0), "rate_bps": min(rates_bps, default=0.0)}

    @staticmethod
    def _protected(ledger: Ledger) -> float:
        by_class = ledger.loss_by_class()[:, 0]
        return float(by_class[0] / by_class.sum()) if by_class.sum() else 0.0


def figures_of(window: Sequence[dict[int, Notice]], hosts: int, gradient_bytes: int) -> Figures:
    """Return what the notices of some steps come to."""
    steps = [list(notices.values()) for notices in window]
    every = [notice for step in steps for notice in step]
    packets, wanting, lost = (int(sum(getattr(n, name) for n in every)) for name in ("packets", "wanting", "lost"))
    step_s = max(median(max(notice.step_s for notice in step) for step in steps), 1e-9)
    # Whoever waits least has been waited for: what he waits for is the network.
    waited_s = min(step_s, median(min(notice.waited_s for notice in step) for step in steps))
    known = [notice.rate_bps for notice in every if notice.rate_bps]
    # Each rank takes in from all others at once; which of them is the slow one the notices do not say.
    rates = dict.fromkeys(window[0], (len(window[0]) - 1) * median(known)) if known else {}
    return Figures(
        len(window[0]),
        hosts,
        gradient_bytes,
        step_s,
        waited_s,
        packets,
        wanting / packets if packets else 0.0,
        float(np.quantile([notice.worst for notice in every], 0.99)),
        lost / wanting if wanting else 0.0,
        median(notice.protected for notice in every),
        median(notice.rtt_s for notice in every),
        rates,
    )


def squares_of(bucket: Bucket) -> float:
    """Return the sum of the squares of a bucket, reckoned from :data:`NORM_VALUES` of it where it has more."""
    values, count = bucket.values, len(bucket.values)
    if count > NORM_VALUES:
        starts = np.linspace(0, count - _RUN_VALUES, NORM_VALUES // _RUN_VALUES).astype(np.int64)
        values = np.concatenate([values[start : start + _RUN_VALUES] for start in starts.tolist()])
    part = bucket.value_type.widen(values).astype(np.float64)
    return float(part @ part) * count / max(1, len(part))


MakeReducer = Callable[[Settings], Reducer]


class PilotedReducer:
    """Averages as a pilot says: what may be lost, whose samples count how much, and by which reducer.

    Parameters
    ----------
    pilot
        What all ranks have decided for this step.
    make
        Makes what averages by some settings. It is asked again when their collective or compression has changed.
    """

    def __init__(self, pilot: Pilot, make: MakeReducer) -> None:
        self._pilot, self._make = pilot, make
        self._inner = make(pilot.settings)
        self._in_force = self._way(pilot.settings)
        self._before: Reducer | None = None
        """What averaged before, as long as it may still hold something of this step or the last."""

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self._before = None
        self._inner.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place."""
        if is_notice(bucket.segments):
            bucket.exact = True
            return self._inner.start(step, sequence, bucket)
        if self._way(self._pilot.settings) != self._in_force:
            self._before, self._inner = self._inner, self._make(self._pilot.settings)
            self._in_force = self._way(self._pilot.settings)
            self._inner.begin_step(step)
        bucket.bound, bucket.samples = self._pilot.bound, self._pilot.samples
        averaged = self._inner.start(step, sequence, bucket)
        averaged.add_done_callback(partial(self._on_averaged, bucket))
        return averaged

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that are not finished."""
        reducers = [self._inner] if self._before is None else [self._before, self._inner]
        return [held for reducer in reducers if isinstance(reducer, Salvageable) for held in reducer.salvage()]

    def _on_averaged(self, bucket: Bucket, done: "Future[Any]") -> None:
        if done.exception() is None:
            self._pilot.on_averaged(bucket)

    @staticmethod
    def _way(settings: Settings) -> tuple[str, str, float]:
        return settings.collective, settings.compression, settings.protected_share
