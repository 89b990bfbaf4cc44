# SPDX-License-Identifier: Apache-2.0
"""The precision of a step, for real and simulated ranks: all bits on clear paths, fewer under congestion.

All ranks use the same precision in a step. So the choice depends only on what ranks report with the averages of the
step before, which all ranks have. Congestion anywhere lowers the precision of all messages: if only some were smaller,
the ports of other ranks would become the bottleneck.

At 8 bits, with error feedback, training takes as many steps as with bfloat16 (``python -m tests.bench convergence``).
So ``auto`` lowers the precision at the first sign of congestion: a packet that was lost or marked, or a rank whose port
is far slower than the others'. On a network so fast that encoding would take longer than it saves, it does not. It
returns to full precision once there is no sign of congestion at 8 bits, or the network turns out to be fast. If that
was wrong, it waits longer the next time.
"""

from typing import Final

from dlcp.planes import CODED_BITS, FULL_BITS

AUTO_PRECISION: Final = "auto"
PRECISIONS: Final = (AUTO_PRECISION, str(FULL_BITS), *map(str, CODED_BITS))
AUTO_BITS: Final = 8
"""The precision under congestion: the lowest that needs no more steps than bfloat16."""
RATE_MAX_BPS: Final = 2e9
"""Above this rate between two ranks, encoding takes longer than it saves if three pairs share a port. An all-reduce of
100 MB between two ranks on two cores spent 0.11 s on encoding, and sent 73 MB less in each direction."""
ENCODED_RATE_MAX_BPS: Final = 1e9
"""The same at a lower precision, where encoding between packets lowers the rate. With 1 % of packets lost, loopback
carried 6 Gbit/s in full and 1.0 to 1.8 at 8 bits. Links of 1 Gbit/s stay below it."""
CLEAR_STEPS: Final = 4
"""Steps without congestion before the first return to full precision, and again after a return that lasted. A step in
full takes four times as long where the network is the bottleneck, so each useless return doubles the number."""
CLEAR_STEPS_MAX: Final = 256
"""With it, useless returns lengthen training by about 1 %."""


class PrecisionChooser:
    """Chooses the precision of each step.

    Parameters
    ----------
    precision
        One of ``PRECISIONS``.
    error_feedback
        Whether rounding errors are sent with the next step; if not, ``auto`` is full precision.

    Attributes
    ----------
    bits
        Bits per value in the current step.
    is_auto
        Whether congestion decides.
    """

    def __init__(self, precision: str, *, error_feedback: bool) -> None:
        self.is_auto = precision == AUTO_PRECISION and error_feedback
        self.bits = FULL_BITS if precision == AUTO_PRECISION else int(precision)
        self._patience = CLEAR_STEPS
        self._clear_steps = 0
        self._rated_in_full = self.bits == FULL_BITS
        """Whether rates are those of messages in full: not yet in the first step after a lower precision."""

    def begin_step(self, congested: bool | None, slowest_bps: float = 0.0) -> None:
        """Choose the precision of the next step.

        Parameters
        ----------
        congested
            Whether a rank reported congestion in the last step; None if no rank reported anything.
        slowest_bps
            The lowest rate between two ranks in the last step, in bit/s; 0 if none is known.
        """
        if not self.is_auto or congested is None:
            return
        congested = congested and slowest_bps <= (RATE_MAX_BPS if self._rated_in_full else ENCODED_RATE_MAX_BPS)
        self._rated_in_full = self.bits == FULL_BITS
        self._clear_steps = 0 if congested else self._clear_steps + 1
        lasted = self._clear_steps >= self._patience
        if self.bits == FULL_BITS:
            if congested:
                self.bits = AUTO_BITS
            elif lasted:
                self._patience = CLEAR_STEPS
        elif lasted:
            self.bits, self._clear_steps = FULL_BITS, 0
            self._patience = min(2 * self._patience, CLEAR_STEPS_MAX)
