# SPDX-License-Identifier: Apache-2.0
"""When training can bear less: its critical regimes, in which errors of gradients cannot be made good later.

The rule is Accordion's (Agarwal et al., MLSys 2021, arXiv 2010.16248): a regime is critical while the norm of the
gradient changes by half or more from one window to the next; so are the first windows. Accordion's windows are epochs,
for which it adds gradients up. Of a step, DLCP knows the norm, and no epochs: here a window is some steps, and its norm
the root of the mean of their squares, which a single odd batch moves little.
"""

import math
from typing import Final

WINDOW_STEPS: Final = 20
"""Steps of a window. Chosen by us: the norm of so many batches varies by a few percent while training goes on."""
JUMP: Final = 0.5
"""By what share the norm changes in a critical regime: Accordion's threshold."""
TIGHT_RATIO: Final = 0.006
"""The loss bound of a critical regime: the least that any of ten models was found to bear (DLCP, arXiv 2008.08445)."""


class Phases:
    """Tells by the norms of average gradients whether training is in a critical regime.

    Parameters
    ----------
    window_steps, jump
        See the module's constants.

    Attributes
    ----------
    critical
        Whether the step to come is.
    changes
        How many windows were of another kind than the one before.
    """

    def __init__(self, window_steps: int = WINDOW_STEPS, jump: float = JUMP) -> None:
        if window_steps < 1 or jump <= 0:
            raise ValueError(f"a window has at least 1 step and a jump is above 0, got {window_steps} and {jump}")
        self.critical = True
        self.changes = 0
        self._window_steps, self._jump = window_steps, jump
        self._squares = 0.0
        self._steps = 0
        self._last_norm: float | None = None

    def note(self, norm: float) -> None:
        """Take note of the norm of one step's average gradient; a step without one, 0 or not finite, is left out."""
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
