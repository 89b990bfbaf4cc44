# SPDX-License-Identifier: Apache-2.0
"""How much of a message may be lost."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossBound:
    """The loss that a message may suffer.

    A message of n packets is done when all its protected packets and at least ceil((1 - ratio) n) of all are in.

    Parameters
    ----------
    ratio
        The largest share of packets that may be lost, 0 to 1. It is a ceiling: used when packets were lost or are late,
        never on an idle network.
    immediate
        Stop at the bound even while the rest is on its way, as the DLCP paper does (arXiv 2008.08445). That throws away
        up to ``ratio`` of every message.
    """

    ratio: float = 0.0
    immediate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"a loss bound must lie in [0, 1), got {self.ratio}")

    def allowed(self, packets: int) -> int:
        """Return how many of ``packets`` may be lost."""
        return math.floor(self.ratio * packets + 1e-9)

    def required(self, packets: int) -> int:
        """Return how many of ``packets`` must be delivered: ceil((1 - ratio) packets)."""
        return packets - self.allowed(packets)


RELIABLE = LossBound()
