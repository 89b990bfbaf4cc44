# SPDX-License-Identifier: Apache-2.0
"""Background traffic: random flows whose sizes have the distribution of a published data-centre workload."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

FlowSizes: TypeAlias = tuple[tuple[float, float], ...]
"""A cumulative distribution: (bytes, probability that a flow is no larger), ascending; the last probability is 1.
Values in between are interpolated."""

_PACKET_BYTES: Final = 1460
_WEB_SEARCH: Final = (
    (6, 0.0),
    (6, 0.15),
    (13, 0.2),
    (19, 0.3),
    (33, 0.4),
    (53, 0.53),
    (133, 0.6),
    (667, 0.7),
    (1333, 0.8),
    (3333, 0.9),
    (6667, 0.97),
    (20000, 1.0),
)
_DATA_MINING: Final = (
    (1, 0.5),
    (2, 0.6),
    (3, 0.7),
    (7, 0.8),
    (267, 0.9),
    (2107, 0.95),
    (66667, 0.99),
    (666667, 1.0),
)
WORKLOADS: Final = {
    name: tuple((float(packets * _PACKET_BYTES), share) for packets, share in table)
    for name, table in (("web_search", _WEB_SEARCH), ("data_mining", _DATA_MINING))
}
"""(bytes, share of flows no larger). Web search: DCTCP (SIGCOMM 2010); data mining: VL2 (SIGCOMM 2009); both in packets
of 1,460 bytes as PIAS' public simulations tabulate them (PIAS-NS2, ``scripts/CDF_dctcp.tcl`` and ``CDF_vl2.tcl``)."""


class TrafficSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flows of other applications between random hosts, arriving as a Poisson process.

    Parameters
    ----------
    load
        Offered load of the flows, as a share of the sum of the hosts' link rates.
    sizes
        A workload in `WORKLOADS`, or a distribution of flow sizes.
    most_bytes
        Larger flows are cut to this size; 0 means no limit. More flows make up for it, so the load stays the same. Use
        it to exclude flows that would take longer than the run.
    """

    name: str = "background"
    load: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    sizes: Literal["web_search", "data_mining"] | FlowSizes = "web_search"
    most_bytes: Annotated[int, Meta(ge=0)] = 0
    transport: str = "dctcp"
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    stop_s: Annotated[float, Meta(gt=0)] = 0.01

    @property
    def flow_sizes(self) -> FlowSizes:
        """Return the distribution of flow sizes."""
        table = WORKLOADS[self.sizes] if isinstance(self.sizes, str) else self.sizes
        return tuple((min(size, float(self.most_bytes)), share) for size, share in table) if self.most_bytes else table


def draw_sizes(sizes: FlowSizes, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return flow sizes in bytes for numbers between 0 and 1, by the inverse of the distribution."""
    values, probabilities = np.array(sizes, float).T
    drawn: NDArray[np.int64] = np.maximum(1, np.interp(uniform, probabilities, values)).astype(np.int64)
    return drawn


def mean_size(sizes: FlowSizes) -> float:
    """Return the mean of a distribution in bytes."""
    values, probabilities = np.array(sizes, float).T
    middle = (values[1:] + values[:-1]) / 2
    return float(values[0] * probabilities[0] + (middle * np.diff(probabilities)).sum())
