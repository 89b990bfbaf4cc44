# SPDX-License-Identifier: Apache-2.0
"""What ranks have seen of the network, put together to the figures that settings follow from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from dlcp.collectives.shards import inbound_rates
from dlcp.ledger import Ledger
from dlcp.transport import Endpoint
from dlcp.tuning.rules import Figures

WORST_QUANTILE: Final = 0.99
"""The quantile of messages that counts as the worst: else a single odd one would decide."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one rank has seen of its messages and its paths; see :class:`dlcp.tuning.rules.Figures`.

    Parameters
    ----------
    worst
        What share of each message did not arrive at first: the 99th percentile.
    rates_bps
        At which each contributor takes in what this rank sends; 0 for itself and where nothing had to wait.
    """

    rank: int
    packets: int
    wanting: int
    lost: int
    worst: float
    protected: float
    rtt_s: float
    rates_bps: tuple[float, ...]

    @classmethod
    def of(cls, rank: int, ranks: int, ledger: Ledger, endpoint: Endpoint) -> "Survey":
        """Look at a rank's ledger and paths."""
        records = list(ledger.records)
        shares = [min(record.packets, record.recovered + record.lost) / record.packets for record in records]
        by_class = ledger.loss_by_class()[:, 0]
        return cls(
            rank,
            sum(record.packets for record in records),
            sum(record.recovered + record.lost for record in records),
            sum(record.lost for record in records),
            float(np.quantile(shares, WORST_QUANTILE)) if shares else 0.0,
            float(by_class[0] / by_class.sum()) if by_class.sum() else 0.0,
            max(map(endpoint.rtt_to, range(ranks)), default=0.0),
            tuple(map(endpoint.rate_to, range(ranks))),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the survey as plain values."""
        return asdict(self)


def figures_of_surveys(
    surveys: Sequence[Survey], hosts: int, *, gradient_bytes: int, step_s: float, waited_s: float
) -> Figures:
    """Return what the surveys of all ranks come to, of steps of ``step_s`` with ``waited_s`` of waiting in them."""
    packets, wanting, lost = (sum(getattr(each, name) for each in surveys) for name in ("packets", "wanting", "lost"))
    rates = inbound_rates({each.rank: np.array(each.rates_bps) for each in surveys})
    return Figures(
        ranks=len(surveys),
        hosts=hosts,
        gradient_bytes=gradient_bytes,
        step_s=step_s,
        waited_s=max(0.0, min(waited_s, step_s)),
        packets=packets,
        wanting=wanting / packets if packets else 0.0,
        worst=max(each.worst for each in surveys),
        spared=lost / wanting if wanting else 0.0,
        protected=median(each.protected for each in surveys),
        rtt_s=max(each.rtt_s for each in surveys),
        rates_bps={rank: rate for rank, rate in rates.items() if rate > 0},
    )
