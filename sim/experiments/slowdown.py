# SPDX-License-Identifier: Apache-2.0
"""Slowdown: a message's time relative to what it would take alone in the network."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.engines.network_tables import EnginePlan, as_rows


class IdealTimes:
    """The times that messages take alone, without acknowledgements or windows, on the initial routes.

    The first packet crosses every link; the others follow at the rate of the slowest.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._plan, self._transports = plan, as_rows(plan.transports)
        self._paths: dict[tuple[int, int], tuple[int, int, int]] = {}

    def of(self, nodes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the ideal times of messages, `dlcp.sim.graphs.graph.NODE_ROW` (n,), in picoseconds, int64 (n,)."""
        payload = self._transports["payload"][nodes["transport"]]
        header = self._transports["header_bytes"][nodes["transport"]]
        size = nodes["size_bytes"]
        first = np.minimum(size, payload) + header
        rest = size + -(-size // payload) * header - first
        pairs = zip(nodes["source"].tolist(), nodes["target"].tolist(), strict=True)
        delay, every, slowest = np.array([self._path(*pair) for pair in pairs], np.int64).reshape(-1, 3).T
        times: NDArray[np.int64] = delay + (first * every + rest * slowest) // 1024
        return times

    def _path(self, source: int, target: int) -> tuple[int, int, int]:
        """Return a path's delay, and the picoseconds that 1,024 bytes take on all its links, and on the slowest."""
        found = self._paths.get((source, target))
        if found is None:
            plan = self._plan
            links = [plan.links[number] for number in plan.routes.path(plan.topology.links, source, target)]
            times = [link.kibibyte_ps for link in links]
            found = self._paths[source, target] = sum(link.delay_ps for link in links), sum(times), max(times)
        return found
