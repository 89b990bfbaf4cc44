# SPDX-License-Identifier: Apache-2.0
"""Whether packets are lost because too many are on the way, or at random: found out by sending fewer for a while.

A failing cable loses the same share of fewer packets; a full buffer loses none of them.
"""

import math
from enum import Enum

TOLERATED = 0.02
"""Losses without a standing queue that nobody needs to look into, as BBR has it (BBRLossThresh)."""
BASELINE_MAX = 0.38
"""More than this is never taken for random. Chosen by us: above the 30 % that a path may lose in our tests."""
_BLOCK_PACKETS = 32
"""Losses are judged over this many packets at least. Chosen by us."""
CALM_BLOCK_PACKETS = 256
"""After this many packets without conspicuous losses a new block begins. Chosen by us."""
DEVIATIONS = 3.0
"""Losses are conspicuous if they exceed what is expected by this many standard deviations. Chosen by us: a block is
looked at every round."""
DWELL_PACKETS = 128
"""A trial gives others this many packets' time to begin theirs before it looks, and looks as long. Chosen by us."""
CUT_MIN = 0.3
"""A trial sends less by this share at least: what CUBIC gives way by (RFC 9438), so that others take note."""
QUICK_LOSSES, THOROUGH_LOSSES = 8, 32
"""A trial lasts until this many losses would have been expected; the first while the window is still being found."""
QUICK_REMAINDER, THOROUGH_REMAINDER = 0.5, 0.75
"""Losses are random if at least this part of them remains. Of a true 8, fewer than half come once in 25 times; of a
true 32, fewer than three quarters once in 13 times. With n flows at the port one that gives way changes little: 0.75
tells congestion from chance up to 8 flows and 10 % loss. Chosen by us."""


class Finding(Enum):
    """What the losses of a round say."""

    NOTHING = 0
    CONSPICUOUS = 1
    """There are more than usual: shrink the window by ``cut`` and see; a trial begins."""
    CONGESTION = 2
    """They became fewer as less was sent."""
    RANDOM = 3
    """They did not: the window may be what it was."""


class RandomLoss:
    """The share of packets that a path loses however few are sent.

    Attributes
    ----------
    baseline
        That share, 0 to 1, as far as a trial has shown it.
    cut
        By what share of the window less is sent in a trial.
    trying
        Whether a trial is on: the window must keep still.
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
        """Return whether ``lost`` of ``packets`` are no more than the path loses without a queue."""
        expected = packets * max(self.baseline, min(self._usual, TOLERATED))
        return lost <= expected + DEVIATIONS * math.sqrt(expected)

    def judge(self, packets: int, lost: int, window: float, *, starting: bool) -> Finding:
        """Take in what became of a round of packets in which no queue stood.

        Parameters
        ----------
        packets, lost
            Packets confirmed or lost, and of these lost.
        window
            The present window.
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
            # What is lost at any time includes the path's own losses, so these cannot be more.
            self.baseline = min(self.baseline, (self._lost + DEVIATIONS * math.sqrt(self._lost + 1)) / self._packets)
            self._packets = self._lost = 0
        return Finding.NOTHING

    def watch(self, packets: int, lost: int) -> bool:
        """Take in packets that met no queue while others fill it; return whether that many losses are not tolerated."""
        self._packets += packets
        self._lost += lost
        if self._packets >= CALM_BLOCK_PACKETS:
            self._usual = self._lost / self._packets
            self._packets = self._lost = 0
        return self._usual > TOLERATED

    def abandon(self) -> None:
        """Forget the block and end any trial: a queue stands, so losses say nothing about the path now."""
        self._packets = self._lost = 0
        self._settling = 0.0
        self.trying = False

    def _begin(self, window: float, starting: bool) -> Finding:
        self._before = self._lost / self._packets
        self.abandon()
        self.trying = True
        # The window has grown since losses began: less must be sent than then.
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
