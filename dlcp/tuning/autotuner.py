# SPDX-License-Identifier: Apache-2.0
"""Chooses one rank's settings while it trains: by how many samples ranks have, and by what they have measured.

A step begins with a bucket of metadata (:mod:`dlcp.collectives.step_metadata`): after it all ranks know what each has
published, and choose alike from the same step on. The training session sends that bucket, and follows the choices.

Training can bear less loss in its critical regimes, in which errors of gradients cannot be made good later. The rule is
Accordion's (Agarwal et al., MLSys 2021, arXiv 2010.16248): a regime is critical while the norm of the gradient changes
by half or more from one window to the next; so are the first windows. Accordion's windows are epochs, for which it adds
gradients up. DLCP knows the norm of a step, and no epochs: here a window is some steps, and its norm the root of the
mean of their squares, which a single odd batch moves little.
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
from dlcp.transport import Endpoint, LossBound
from dlcp.tuning.rules import Advice, Settings, decide, figures_of_steps, losses

WARM_UP_STEPS: Final = 5
"""Steps that say little: frameworks arrange their buckets anew, rate control finds its rate. Chosen by us."""
WINDOW_STEPS: Final = 10
"""Steps that a choice rests on. Chosen by us: the median of so many is steady, and training has thousands."""
NORM_VALUES: Final = 1 << 16
"""So many values of a bucket give its norm, in evenly spaced runs: their share in it is known to about 1 %."""
_RUN_VALUES: Final = 1 << 10
PHASE_STEPS: Final = 20
"""Steps of a window of norms. Chosen by us: the norm of so many batches varies by a few percent as training goes on."""
JUMP: Final = 0.5
"""By what share the norm changes in a critical regime: Accordion's threshold."""
TIGHT_RATIO: Final = 0.006
"""The loss bound of a critical regime: the least that any of ten models was found to bear (DLCP, arXiv 2008.08445)."""


class Phases:
    """Tells by the norms of average gradients whether training is in a critical regime.

    Parameters
    ----------
    window_steps, jump
        See :data:`PHASE_STEPS` and :data:`JUMP`.

    Attributes
    ----------
    critical
        Whether the step to come is.
    changes
        How many windows were of another kind than the one before.
    """

    def __init__(self, window_steps: int = PHASE_STEPS, jump: float = JUMP) -> None:
        if window_steps < 1 or jump <= 0:
            raise ValueError(f"a window has at least 1 step and a jump is above 0, got {window_steps} and {jump}")
        self.critical = True
        self.changes = 0
        self._window_steps, self._jump = window_steps, jump
        self._squares = 0.0
        self._steps = 0
        self._last_norm: float | None = None

    def add(self, norm: float) -> None:
        """Take in the norm of one step's average gradient; a step without one, 0 or not finite, is left out."""
        if not math.isfinite(norm) or norm <= 0:
            return
        self._squares += norm * norm
        self._steps += 1
        if self._steps < self._window_steps:
            return
        now = math.sqrt(self._squares / self._steps)
        self._squares, self._steps = 0.0, 0
        if self._last_norm is not None:
            critical = abs(self._last_norm - now) >= self._jump * self._last_norm
            self.changes += critical is not self.critical
            self.critical = critical
        self._last_norm = now


class Autotuner:
    """What one rank publishes and what it chooses. For one thread, but for :meth:`on_averaged`.

    Parameters
    ----------
    given
        The settings that the user has set, the same on all ranks.
    bound
        The bound that goes with them; its ``immediate`` is kept.
    rank, contributors
        This rank, and all whose gradients are averaged.
    samples
        How many samples this rank has in a step; 0: all ranks count the same.

    Attributes
    ----------
    settings
        The settings in force.
    advice
        The latest choice; None before the first one.
    metadata
        What each rank published at the beginning of this step.
    samples_here
        How many samples this rank has from the next step on.
    gradient_bytes
        What a rank contributes in a step.
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
        self._endpoint: Endpoint | None = None
        self._steps = 0
        self._inbound_rates_bps: Mapping[int, float] = {}
        self._window: list[tuple[dict[int, StepMetadata], dict[int, float]]] = []
        self._began_s = self._ready_s = math.nan
        self._backward_s = self._waited_s = 0.0
        self._squares = 0.0

    def measure(
        self,
        ledger: Ledger,
        endpoint: Endpoint,
        *,
        adapt: bool = False,
        phases: bool = False,
        hosts: int = 1,
        gradient_bytes: int = 0,
        inbound_rates_bps: Mapping[int, float] | None = None,
    ) -> None:
        """Measure from now on, and choose by it.

        Parameters
        ----------
        ledger, endpoint
            What to report of.
        adapt
            Choose settings anew by what is measured.
        phases
            Hold the bound down in critical regimes.
        hosts, gradient_bytes
            On how many hosts the ranks are, and what a rank contributes in a step.
        inbound_rates_bps
            How fast each rank received in the last step, wherever that is kept up to date, the same on all ranks.
        """
        self._inbound_rates_bps = {} if inbound_rates_bps is None else inbound_rates_bps
        self._ledger, self._endpoint = ledger, endpoint
        self._adapt, self._hosts, self.gradient_bytes = adapt, hosts, gradient_bytes
        self.phases = Phases() if phases else None

    @property
    def sends(self) -> bool:
        """Whether steps begin with metadata."""
        return len(self._contributors) > 1 and (self.weighted or self._adapt or self.phases is not None)

    # What all ranks choose --------------------------------------------------------------------------------------------

    def table(self, step: int) -> NDArray[np.float32]:
        """Return this rank's metadata, to be averaged over all ranks: it begins the step."""
        now_s = time.monotonic()
        found: dict[str, float] = {}
        if self._ledger:
            found = losses(self._ledger.of_step(step - 1), self._ledger)
        if self._endpoint and self._adapt:
            found |= self._paths(self._endpoint)
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
        """Take in what all ranks have published, and choose by it."""
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
        """What this rank's mean gradient is to be multiplied by in this step."""
        return weight_of(samples_of(self.metadata), self._rank) if self.weighted else 1.0

    @property
    def samples(self) -> dict[int, int] | None:
        """How many samples each rank has in this step; None if all ranks count the same."""
        return samples_of(self.metadata) if self.weighted else None

    @property
    def bound(self) -> LossBound:
        """What a bucket of this step may lose."""
        ratio = self.settings.loss_bound
        if self.phases and self.phases.critical:
            ratio = min(ratio, TIGHT_RATIO)
        return LossBound(ratio, self._bound.immediate)

    def reducer_changed(self) -> bool:
        """Tell, once for each change, whether the settings in force ask for another reducer."""
        before, self._in_force = self._in_force, self.settings
        names = ("collective", "compression", "protected_share", "deferral_bound")
        return any(getattr(before, name) != getattr(self.settings, name) for name in names)

    # What is measured -------------------------------------------------------------------------------------------------

    def on_gradients_ready(self) -> None:
        """Note that the last gradients of the step are ready."""
        self._ready_s = time.monotonic()
        self._backward_s = self._ready_s - self._began_s
        self._waited_s = 0.0

    def on_averaged(self, bucket: Bucket) -> None:
        """Note that a bucket has been averaged; from any thread."""
        if math.isfinite(self._ready_s) and self._ready_s >= self._began_s:
            self._waited_s = time.monotonic() - self._ready_s
        if self.phases:
            self._squares += squares_of(bucket)

    def _paths(self, endpoint: Endpoint) -> dict[str, float]:
        peers = [peer for peer in self._contributors if peer != self._rank]
        rates_bps = [rate for rate in map(endpoint.rate_to, peers) if rate > 0]
        return {"rtt_s": max(map(endpoint.rtt_to, peers), default=0.0), "rate_bps": min(rates_bps, default=0.0)}


def squares_of(bucket: Bucket) -> float:
    """Return the sum of the squares of a bucket, estimated from :data:`NORM_VALUES` of it if it has more."""
    values, count = bucket.values, len(bucket.values)
    if count > NORM_VALUES:
        starts = np.linspace(0, count - _RUN_VALUES, NORM_VALUES // _RUN_VALUES).astype(np.int64)
        values = np.concatenate([values[start : start + _RUN_VALUES] for start in starts.tolist()])
    part = bucket.value_type.widen(values).astype(np.float64)
    return float(part @ part) * count / max(1, len(part))
