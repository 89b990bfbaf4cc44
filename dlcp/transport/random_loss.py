# SPDX-License-Identifier: Apache-2.0
"""Tells congestion from random loss by sending fewer packets for a while.

A failing cable loses the same share of fewer packets; a full buffer loses none of them.
"""

import math
from enum import Enum

TOLERATED = 0.02
"""The share of losses without a standing queue that is ignored, as in BBR (BBRLossThresh)."""
BASELINE_MAX = 0.38
"""A larger share is never considered random. The lossiest path in our tests loses 30 %."""
_BLOCK_PACKETS = 32
"""The fewest packets over which losses are judged. Not tuned."""
CALM_BLOCK_PACKETS = 256
"""Packets without conspicuous losses after which a new block begins. Not tuned."""
DEVIATIONS = 3.0
"""Losses are conspicuous if they exceed the expected number by this many standard deviations. It is high because a
block is tested every round."""
DWELL_PACKETS = 128
"""Packets that pass before and during a trial, so that other flows can begin theirs. Not tuned."""
CUT_MIN = 0.3
"""The smallest reduction of the send rate in a trial: CUBIC's decrease (RFC 9438), so that others notice."""
QUICK_LOSSES, THOROUGH_LOSSES = 8, 32
"""A trial lasts until this many losses would be expected; the first value while the window is still being found."""
QUICK_REMAINDER, THOROUGH_REMAINDER = 0.5, 0.75
"""Losses are random if at least this part of them remains. With 8 expected, fewer than half occur in one of 25 trials;
with 32 expected, fewer than three quarters in one of 13. With many flows at the port, one flow's decrease changes
little: 0.75 distinguishes congestion from chance with up to 8 flows and 10 % loss."""


class Finding(Enum):
    """Verdict on the losses of a round."""

    NOTHING = 0
    CONSPICUOUS = 1
    """More than usual: shrink the window by ``cut`` for a trial."""
    CONGESTION = 2
    """They decreased with the sending rate."""
    RANDOM = 3
    """They did not: restore the window."""


class RandomLoss:
    """The share of packets that a path loses at any send rate.

    Attributes
    ----------
    baseline
        The share, 0 to 1, as measured by a trial.
    cut
        Share by which a trial shrinks the window.
    trying
        Whether a trial is running: the window must not change.
    """

    def __init__(self) -> None:
        self.baseline = 0.0
        self.cut = 0.0
        self.trying = False
        self._usual = 0.0
        self._packets = 0
        self._lost = 0
        self._settling = 0.0
        self._before = 0.0
        self._window = 0.0

    def explains(self, packets: int, lost: int) -> bool:
        """Return whether the path's random loss explains ``lost`` of ``packets``."""
        expected = packets * max(self.baseline, min(self._usual, TOLERATED))
        return lost <= expected + DEVIATIONS * math.sqrt(expected)

    def judge(self, packets: int, lost: int, window: float, *, starting: bool) -> Finding:
        """Judge a round of packets without a standing queue.

        Parameters
        ----------
        packets, lost
            Packets acknowledged or lost, and the lost ones of them.
        window
            The current window.
        """
        if self._settling > 0:
            self._settling -= packets
            return Finding.NOTHING
        if lost and not self._lost:
            self._window = window
        self._packets += packets
        self._lost += lost
        if self.trying:
            return self._try(window, starting)
        if self._packets < _BLOCK_PACKETS:
            return Finding.NOTHING
        expected = self._packets * (self.baseline + TOLERATED)
        if self._lost > expected + DEVIATIONS * math.sqrt(expected):
            return self._begin(window, starting)
        if self._packets >= CALM_BLOCK_PACKETS:
            self._usual = self._lost / self._packets
            # Losses at any time include the path's random ones, so these cannot be more.
            self.baseline = min(self.baseline, (self._lost + DEVIATIONS * math.sqrt(self._lost + 1)) / self._packets)
            self._packets = self._lost = 0
        return Finding.NOTHING

    def watch(self, packets: int, lost: int) -> bool:
        """Add packets that met no queue although it is contested; return whether too many of them are lost."""
        self._packets += packets
        self._lost += lost
        if self._packets >= CALM_BLOCK_PACKETS:
            self._usual = self._lost / self._packets
            self._packets = self._lost = 0
        return self._usual > TOLERATED

    def abandon(self) -> None:
        """Forget the block and end any trial: with a standing queue, losses say nothing about the path."""
        self._packets = self._lost = 0
        self._settling = 0.0
        self.trying = False

    def _begin(self, window: float, starting: bool) -> Finding:
        self._before = self._lost / self._packets
        self.abandon()
        self.trying = True
        # The window has grown since the first loss: the trial must send less than then.
        self.cut = 1 - (1 - max(CUT_MIN, self._before - self.baseline)) * min(1.0, self._window / window)
        self._settling = window if starting else max(window, DWELL_PACKETS)
        return Finding.CONSPICUOUS

    def _try(self, window: float, starting: bool) -> Finding:
        least, losses, part = (
            (_BLOCK_PACKETS, QUICK_LOSSES, QUICK_REMAINDER)
            if starting
            else (DWELL_PACKETS, THOROUGH_LOSSES, THOROUGH_REMAINDER)
        )
        if self._packets < max(least, window, losses / self._before):
            return Finding.NOTHING
        loss = self._lost / self._packets
        before = self._before - self.baseline
        remainder = loss - self.baseline
        self.abandon()
        if part * before <= remainder <= before / part and loss < BASELINE_MAX:
            self.baseline = loss
            return Finding.RANDOM
        self.baseline = min(self.baseline, loss) if loss < BASELINE_MAX else 0.0
        return Finding.CONGESTION
