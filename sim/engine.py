# SPDX-License-Identifier: Apache-2.0
"""What an engine is: it takes graphs, moves packets, and tells what is done. There are two, which agree exactly."""

import importlib.util
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from dlcp.sim.plan import Plan
from dlcp.sim.submission import Submission
from dlcp.sim.topology.network import Routes
from numpy.typing import NDArray

NODE_DONE, GRAPH_DONE, GRAPH_CLOSED = range(3)
FOREVER_PS: Final = 1 << 62
EngineName = Literal["auto", "kernel", "reference"]


class Note(NamedTuple):
    """Something that an engine tells: a watched ``node`` of a graph is done; all are; nothing refers to it any more."""

    kind: int
    graph: int
    node: int


class Engine(Protocol):
    """Moves packets."""

    plan: Plan

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return what was counted, in the cells of `dlcp.sim.counters`."""

    @property
    def now_ps(self) -> int:
        """Return the time of the latest event."""

    def submit(self, submission: Submission) -> None:
        """Take in a graph; what waits for nothing begins after its delay."""

    def run(self, limit_ps: int) -> list[Note]:
        """Go on to the end of the first instant at which something is to be told, at most to ``limit_ps``."""

    def has_events(self) -> bool:
        """Return whether anything is left to happen."""

    def records(self, number: int) -> NDArray[Any]:
        """Return what became of the nodes of a graph that has not been forgotten: `dlcp.sim.graph.RECORD` (n,)."""

    def forget(self, number: int) -> None:
        """Give the room of a closed graph back."""

    def set_loss(self, links: Sequence[int], loss: int) -> None:
        """Let links lose packets from now on, ``loss`` of `dlcp.sim.arithmetic.DRAW_LIMIT`."""

    def set_routes(self, routes: Routes) -> None:
        """Let packets go other ways from now on."""

    def link_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each link has carried, int64 (links,)."""

    def queue_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that wait for each link at a switch now, int64 (links,)."""

    def queue_bytes_max(self) -> NDArray[np.int64]:
        """Return the most bytes that ever waited for each link at a switch, int64 (links,)."""


def make_engine(plan: Plan, name: EngineName = "auto") -> Engine:
    """Return an engine: ``kernel`` (Numba), ``reference`` (SimPy alone), or whichever can run, the faster first."""
    if name == "kernel" or (name == "auto" and importlib.util.find_spec("numba") is not None):
        from dlcp.sim.kernel.engine import KernelEngine

        return KernelEngine(plan)
    from dlcp.sim.reference.engine import ReferenceEngine

    return ReferenceEngine(plan)
