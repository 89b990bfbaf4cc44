# SPDX-License-Identifier: Apache-2.0
"""How fast a path delivers, judged only while there is something to send: else one would measure one's own idleness."""

import math

MEMORY_S = 0.3
"""Time constant of the average, in seconds of sending. Chosen by us: a part of a training step on a slow network."""
ENOUGH_S = 0.03
"""How long one must have been sending, in the average, before the rate means something."""
STALE_S = 3.0


class DeliveryRate:
    """Rate of one flow, from acknowledgements that arrive while packets wait (as BBR samples it, but averaged)."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._packets = 0.0
        self._last_s = 0.0
        self._waiting = False

    def on_feedback(self, now_s: float, delivered: int, waiting: bool) -> None:
        """Take in that ``delivered`` packets arrived; ``waiting`` says whether more wait to be sent."""
        if self._waiting:
            elapsed_s = now_s - self._last_s
            keep = math.exp(-elapsed_s / MEMORY_S)
            self._seconds = keep * self._seconds + elapsed_s
            self._packets = keep * self._packets + delivered
        self._last_s, self._waiting = now_s, waiting

    def packets_per_s(self, now_s: float) -> float:
        """Return the rate, or 0 if it is not known."""
        if self._seconds < ENOUGH_S or now_s - self._last_s > STALE_S:
            return 0.0
        return self._packets / self._seconds
