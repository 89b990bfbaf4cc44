# SPDX-License-Identifier: Apache-2.0
"""What ranks have measured, put together to the figures that settings follow from."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from dlcp.collectives.shards import inbound_rates
from dlcp.collectives.step_metadata import StepMetadata
from dlcp.ledger import Ledger, MessageRecord
from dlcp.transport import Endpoint
from dlcp.tuning.rules import Figures

WORST_QUANTILE: Final = 0.99
"""The quantile of messages that counts as the worst: else a single odd one would decide."""


def losses(records: Iterable[MessageRecord], ledger: Ledger, worst_quantile: float = 1.0) -> dict[str, float]:
    """Return what some records of a ledger come to: ``packets``, ``wanting``, ``lost``, ``worst`` and ``protected``."""
    found = list(records)
    shares = [min(record.packets, record.recovered + record.lost) / record.packets for record in found]
    by_class = ledger.loss_by_class()[:, 0]
    return {
        "packets": sum(record.packets for record in found),
        "wanting": sum(record.recovered + record.lost for record in found),
        "lost": sum(record.lost for record in found),
        "worst": float(np.quantile(shares, worst_quantile)) if shares else 0.0,
        "protected": float(by_class[0] / by_class.sum()) if by_class.sum() else 0.0,
    }


@dataclass(frozen=True, slots=True)
class Survey:
    """What one rank has measured of its messages and its paths; see :class:`dlcp.tuning.rules.Figures`.

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
        """Return what a rank's ledger and paths show."""
        rtt_s = max(map(endpoint.rtt_to, range(ranks)), default=0.0)
        rates_bps = tuple(map(endpoint.rate_to, range(ranks)))
        found: dict[str, Any] = losses(ledger.records, ledger, WORST_QUANTILE)
        return cls(rank, **found, rtt_s=rtt_s, rates_bps=rates_bps)

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


def figures_of_steps(steps: Sequence[dict[int, StepMetadata]], hosts: int, gradient_bytes: int) -> Figures:
    """Return what all ranks' metadata of some steps comes to."""
    by_step = [list(metadata.values()) for metadata in steps]
    every = [one for step in by_step for one in step]
    packets, wanting, lost = (int(sum(getattr(one, name) for one in every)) for name in ("packets", "wanting", "lost"))
    step_s = max(median(max(one.step_s for one in step) for step in by_step), 1e-9)
    # The rank that waits least is the one that the others wait for: what it waits for is the network.
    waited_s = min(step_s, median(min(one.waited_s for one in step) for step in by_step))
    known = [one.rate_bps for one in every if one.rate_bps]
    # Each rank takes in from all others at once; the metadata does not say which of them is the slow one.
    rates = dict.fromkeys(steps[0], (len(steps[0]) - 1) * median(known)) if known else {}
    return Figures(
        ranks=len(steps[0]),
        hosts=hosts,
        gradient_bytes=gradient_bytes,
        step_s=step_s,
        waited_s=waited_s,
        packets=packets,
        wanting=wanting / packets if packets else 0.0,
        worst=float(np.quantile([one.worst for one in every], WORST_QUANTILE)),
        spared=lost / wanting if wanting else 0.0,
        protected=median(one.protected for one in every),
        rtt_s=median(one.rtt_s for one in every),
        rates_bps=rates,
    )
