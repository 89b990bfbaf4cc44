# SPDX-License-Identifier: Apache-2.0
"""Flow sizes of published data-centre workloads, for traffic beside the training."""

from typing import Annotated, Final, Literal

import msgspec
from dlcp.sim.jobs import mean_size
from dlcp.sim.scenario import BackgroundSpec
from msgspec import Meta

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
SIZES: Final = {
    name: tuple((float(packets * _PACKET_BYTES), share) for packets, share in table)
    for name, table in (("web_search", _WEB_SEARCH), ("data_mining", _DATA_MINING))
}
"""(bytes, share of flows no larger). Web search: DCTCP (SIGCOMM 2010); data mining: VL2 (SIGCOMM 2009); both in packets
of 1,460 bytes as PIAS' public simulations tabulate them (PIAS-NS2, ``scripts/CDF_dctcp.tcl`` and ``CDF_vl2.tcl``)."""


class TrafficSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flows of others between random hosts, arriving as a Poisson process.

    Parameters
    ----------
    load
        Share of the hosts' link rates that they ask for together.
    sizes
        Whose flow sizes.
    most_bytes
        Larger flows are cut to this size; the load stays, with more flows. 0 leaves them. A run that is shorter than
        its largest flow tells nothing of it.
    """

    name: str = "background"
    load: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    sizes: Literal["web_search", "data_mining"] = "web_search"
    most_bytes: Annotated[int, Meta(ge=0)] = 0
    transport: str = "dctcp"
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    stop_s: Annotated[float, Meta(gt=0)] = 0.01

    def background(self) -> BackgroundSpec:
        """Return it as the engine's record."""
        table = SIZES[self.sizes]
        if self.most_bytes:
            table = tuple((min(size, float(self.most_bytes)), share) for size, share in table)
        return BackgroundSpec(
            name=self.name,
            load=self.load,
            sizes=table,
            transport=self.transport,
            start_s=self.start_s,
            stop_s=self.stop_s,
        )

    @property
    def mean_bytes(self) -> float:
        """Return the mean size of a flow."""
        return mean_size(self.background().sizes)
