# SPDX-License-Identifier: Apache-2.0
"""How fast gradients have been coming in: what the network lets this rank have when everybody sends to it."""

from collections import deque

BIN_S = 0.01
WINDOW_BINS = 10


class InboundRate:
    """The fastest 0.1 s since :meth:`restart`. An average would also count the time in which nobody sent."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, int]] = deque()
        self._sum = 0
        self._peak = 0

    def restart(self) -> None:
        """Forget what came so far."""
        self._bins.clear()
        self._sum = self._peak = 0

    def count(self, now_s: float, size: int) -> None:
        """Note that ``size`` bytes arrived."""
        now = int(now_s / BIN_S)
        if self._bins and self._bins[-1][0] == now:
            self._bins[-1] = now, self._bins[-1][1] + size
        else:
            self._bins.append((now, size))
            while self._bins[0][0] <= now - WINDOW_BINS:
                self._sum -= self._bins.popleft()[1]
        self._sum += size
        self._peak = max(self._peak, self._sum)

    @property
    def peak_bps(self) -> float:
        """Bits per second in the fastest window."""
        return self._peak * 8 / (BIN_S * WINDOW_BINS)
