# SPDX-License-Identifier: Apache-2.0
"""Lower the loss bound while training is in a critical regime, which the norms of gradients show.

Training tolerates less loss in critical regimes, in which gradient errors cannot be made up for later. The rule is
Accordion's (Agarwal et al., MLSys 2021, arXiv 2010.16248): a regime is critical while the norm of the gradient changes
by half or more from one window to the next; so are the first windows. Accordion's windows are epochs, over which it
adds up gradients. DLCP sees norms of steps but no epochs, so its window is a number of steps, and the window's norm is
the root mean square of theirs, which a single outlier moves little.
"""

import math
from typing import Final

PHASE_STEPS: Final = 20
"""Steps in a window of norms: over 20 batches the norm varies by only a few percent in steady training."""
JUMP: Final = 0.5
"""Relative change of the norm that makes a regime critical: Accordion's threshold."""
TIGHT_RATIO: Final = 0.006
"""Loss bound in a critical regime: the lowest tolerance found among ten models (DLCP, arXiv 2008.08445)."""


class Phases:
    """Detects critical regimes of training from the norms of average gradients.

    Parameters
    ----------
    window_steps, jump
        See :data:`PHASE_STEPS` and :data:`JUMP`.

    Attributes
    ----------
    critical
        Whether the next step is in a critical regime.
    changes
        Number of changes between critical and not critical so far.
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

    def bound(self, ratio: float) -> float:
        """Return the loss bound of the next step, at most ``ratio``."""
        return min(ratio, TIGHT_RATIO) if self.critical else ratio

    def add(self, norm: float) -> None:
        """Add the norm of a step's average gradient. Norms that are 0 or not finite are ignored."""
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
