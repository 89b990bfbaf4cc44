# SPDX-License-Identifier: Apache-2.0
"""Choose a rank's settings during training, from the ranks' sample counts and measurements.

A step begins with a bucket of metadata (:mod:`dlcp.collectives.step_metadata`). After it all ranks have the same data
and make the same choice from the same step on. The training session sends that bucket, and applies the choices.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.reduction_rules import check_samples, weight_of
from dlcp.collectives.step_metadata import StepMetadata, read_table, samples_of, table_of
from dlcp.ledger import Ledger
from dlcp.phases import Phases
from dlcp.transport import Connection, LossBound
from dlcp.tuning.rules import Advice, Settings, decide, figures_of_steps, losses

WARM_UP_STEPS: Final = 5
"""Steps that are ignored: frameworks still rearrange their buckets, and rate control has yet to find its rate."""
WINDOW_STEPS: Final = 10
"""Steps per choice: the median over ten is stable, and training has thousands."""
NORM_VALUES: Final = 1 << 16
"""Values sampled from a bucket, in evenly spaced runs, to estimate its norm to about 1 %."""
_RUN_VALUES: Final = 1 << 10


class Autotuner:
    """Makes a rank's metadata and chooses its settings. For one thread, except :meth:`on_averaged`.

    Parameters
    ----------
    given
        The user's settings, the same on all ranks.
    bound
        The user's loss bound; its ``immediate`` is kept.
    rank, contributors
        This rank, and all ranks whose gradients are averaged.
    samples
        This rank's samples per step; 0 gives all ranks equal weight.

    Attributes
    ----------
    settings
        The settings in force.
    advice
        The latest choice; None before the first one.
    metadata
        Metadata that each rank published at the beginning of this step.
    samples_here
        This rank's samples per step, from the next step on.
    gradient_bytes
        Size of a rank's gradients in a step.
    """

    def __init__(
        self, given: Settings, bound: LossBound, rank: int, contributors: Sequence[int], *, samples: int = 0
    ) -> None:
        self.given = self.settings = self._in_force = given
        self.advice: Advice | None = None
        self.metadata: dict[int, StepMetadata] = {}
        self.weighted = samples > 0
        self.samples_here = check_samples(samples)
        self.phases: Phases | None = None
        self.gradient_bytes = 0
        self._bound, self._rank, self._contributors = bound, rank, sorted(contributors)
        self._adapt = False
        self._hosts = 1
        self._ledger: Ledger | None = None
        self._connection: Connection | None = None
        self._steps = 0
        self._inbound_rates_bps: Mapping[int, float] = {}
        self._window: list[tuple[dict[int, StepMetadata], dict[int, float]]] = []
        self._began_s = self._ready_s = math.nan
        self._backward_s = self._waited_s = 0.0
        self._squares = 0.0

    def measure(
        self,
        ledger: Ledger,
        connection: Connection,
        *,
        adapt: bool = False,
        phases: bool = False,
        hosts: int = 1,
        gradient_bytes: int = 0,
        inbound_rates_bps: Mapping[int, float] | None = None,
    ) -> None:
        """Start measuring, and choosing by the measurements.

        Parameters
        ----------
        ledger, connection
            Sources of the measurements.
        adapt
            Adapt the settings to the measurements.
        phases
            Tighten the bound in critical regimes.
        hosts, gradient_bytes
            Number of hosts, and size of a rank's gradients in a step.
        inbound_rates_bps
            Each rank's receive rate in the last step, the same on all ranks. The caller updates the mapping.
        """
        self._inbound_rates_bps = {} if inbound_rates_bps is None else inbound_rates_bps
        self._ledger, self._connection = ledger, connection
        self._adapt, self._hosts, self.gradient_bytes = adapt, hosts, gradient_bytes
        self.phases = Phases() if phases else None

    @property
    def sends(self) -> bool:
        """Whether steps begin with metadata."""
        return len(self._contributors) > 1 and (self.weighted or self._adapt or self.phases is not None)

    # Choices, the same on all ranks -----------------------------------------------------------------------------------

    def table(self, step: int) -> NDArray[np.float32]:
        """Return this rank's metadata for the step's first bucket, which is averaged over all ranks."""
        now_s = time.monotonic()
        found: dict[str, float] = {}
        if self._ledger:
            found = losses(self._ledger.of_step(step - 1), self._ledger)
        if self._connection and self._adapt:
            found |= self._paths(self._connection)
        own = StepMetadata(
            samples=self.samples_here if self.weighted else 1,
            step_s=now_s - self._began_s if math.isfinite(self._began_s) else 0.0,
            backward_s=self._backward_s,
            waited_s=self._waited_s,
            norm=math.sqrt(self._squares),
            **found,
        )
        self._began_s, self._squares = now_s, 0.0
        return table_of(own, self._contributors.index(self._rank), len(self._contributors))

    def read(self, average: NDArray[np.floating]) -> None:
        """Read the metadata of all ranks, and choose settings by it."""
        self.metadata = read_table(average, self._contributors)
        self._steps += 1
        if self.phases and self._steps > 1:
            self.phases.add(self.metadata[self._contributors[0]].norm)
        if not self._adapt or self._steps <= WARM_UP_STEPS:
            return
        self._window.append((self.metadata, dict(self._inbound_rates_bps)))
        if len(self._window) >= WINDOW_STEPS:
            metadata, rates = zip(*self._window, strict=True)
            figures = figures_of_steps(metadata, self._hosts, self.gradient_bytes, rates)
            self.advice = decide(figures, self.given, self.settings, most_deferred=self.given.deferral_bound)
            self.settings = self.advice.settings
            self._window.clear()

    @property
    def weight(self) -> float:
        """Factor for this rank's mean gradient in this step."""
        return weight_of(samples_of(self.metadata), self._rank) if self.weighted else 1.0

    @property
    def samples(self) -> dict[int, int] | None:
        """Samples of each rank in this step; None if all ranks have equal weight."""
        return samples_of(self.metadata) if self.weighted else None

    @property
    def bound(self) -> LossBound:
        """The loss bound for this step's buckets."""
        ratio = self.settings.loss_bound
        return LossBound(self.phases.bound(ratio) if self.phases else ratio, self._bound.immediate)

    def reducer_changed(self) -> bool:
        """Return whether the settings have changed since the last call in a way that needs another reducer."""
        before, self._in_force = self._in_force, self.settings
        names = ("collective", "compression", "protected_share", "deferral_bound")
        return any(getattr(before, name) != getattr(self.settings, name) for name in names)

    # Measurements -----------------------------------------------------------------------------------------------------

    def on_gradients_ready(self) -> None:
        """Record that the last gradients of the step are ready."""
        self._ready_s = time.monotonic()
        self._backward_s = self._ready_s - self._began_s
        self._waited_s = 0.0

    def on_averaged(self, bucket: Bucket) -> None:
        """Record that a bucket has been averaged; from any thread."""
        if math.isfinite(self._ready_s) and self._ready_s >= self._began_s:
            self._waited_s = time.monotonic() - self._ready_s
        if self.phases:
            self._squares += squares_of(bucket)

    def _paths(self, connection: Connection) -> dict[str, float]:
        peers = [peer for peer in self._contributors if peer != self._rank]
        rates_bps = [rate for rate in map(connection.rate_to, peers) if rate > 0]
        return {
            "rtt_s": max(map(connection.rtt_to, peers), default=0.0),
            "rate_bps": min(rates_bps, default=0.0),
        }


def squares_of(bucket: Bucket) -> float:
    """Return a bucket's sum of squares, estimated from a sample if it has more than :data:`NORM_VALUES` values."""
    values, count = bucket.values, len(bucket.values)
    if count > NORM_VALUES:
        starts = np.linspace(0, count - _RUN_VALUES, NORM_VALUES // _RUN_VALUES).astype(np.int64)
        values = np.concatenate([values[start : start + _RUN_VALUES] for start in starts.tolist()])
    part = bucket.value_type.widen(values).astype(np.float64)
    return float(part @ part) * count / max(1, len(part))
