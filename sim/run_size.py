# SPDX-License-Identifier: Apache-2.0
"""How large the graph of a training step is, known before anything of it is built."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.collectives import AllReduceSpec, all_gather, all_reduce, reduce_scatter
from dlcp.sim.graph import GraphBuilder, Nodes
from dlcp.sim.memory import available_bytes
from dlcp.sim.models import StepProfile
from dlcp.sim.step_graph import GradientPiece, pieces_of
from dlcp.sim.training import PlacedJob

log = logging.getLogger("dlcp")

STEPS_PER_GRAPH: Final = 4
"""Steps in one graph. Workers drift apart within a graph, and synchronize between graphs. Four limit the memory; the
synchronization costs little, because the fastest worker waits for the slowest in every step anyway."""
GRAPH_NODES: Final = 4_000_000
"""Nodes above which graphs have fewer steps: 2 GB by `NODE_BYTES`."""
NODE_BYTES: Final = 480
"""Memory of a node with its edges: FSDP over rings of 256 ranks took 1.85 GB for 3.96 million nodes, less 0.1 GB."""
MESSAGE_S: Final = 15e-6
"""Least computing time of a message, as a flow: the same ring took 50 s for 3.9 million. With packets it is longer."""
LONG_S: Final = 3600.0
"""Computing time above which a run begins with a warning; not tuned."""


class RunSizeError(ValueError):
    """A run needs more memory than there is; the message says what fits."""


class _Counter(GraphBuilder):
    """Counts nodes, and keeps none."""

    def messages(
        self, source: ArrayLike, target: ArrayLike, size_bytes: ArrayLike, *, transport: int, **columns: ArrayLike
    ) -> Nodes:
        """Count messages."""
        return self._number(max(np.size(source), np.size(target), np.size(size_bytes)))

    def delays(self, delay_ps: ArrayLike, **columns: Any) -> Nodes:
        """Count nodes without bytes."""
        return self._number(np.size(delay_ps))

    def follow(self, before: ArrayLike, after: ArrayLike) -> None:
        """Leave out edges."""

    def _number(self, count: int) -> Nodes:
        self._count += count
        return np.arange(self._count - count, self._count)


def step_nodes(job: PlacedJob, profile: StepProfile, parts: Sequence[GradientPiece]) -> int:
    """Return the number of nodes in the graph of one step; a pipeline's counts as that of the whole model."""
    spec, workers = job.spec, job.workers
    ready: NDArray[np.int64] = np.arange(len(workers))

    def count(add: Callable[[GraphBuilder, AllReduceSpec], object], size_bytes: int) -> int:
        counter = _Counter()
        add(counter, AllReduceSpec(workers, size_bytes, 0))
        return len(counter)

    compute = 2 * len(profile.layers) * len(workers)
    if spec.sharding == "fsdp":
        group = spec.sharded_group
        gathers = (1 + spec.reshard_after_forward) * len(profile.layers)
        return (
            compute
            + gathers * count(lambda builder, exchange: all_gather(builder, exchange, ready, group), 1)
            + len(parts) * count(lambda builder, exchange: reduce_scatter(builder, exchange, ready, group), 1)
        )
    largest = max((piece.size_bytes for piece in parts), default=0)

    def reduce(builder: GraphBuilder, exchange: AllReduceSpec) -> object:
        group = spec.group if spec.collective == "hierarchical" else 1
        return all_reduce(builder, spec.collective, exchange, ready, servers=job.servers, group=group)

    return compute + (len(parts) * count(reduce, largest) if parts else 0)


def steps_per_graph(nodes: int) -> int:
    """Return how many steps of so many nodes a graph has: 4, 2 or 1."""
    steps = STEPS_PER_GRAPH
    while steps > 1 and steps * nodes > GRAPH_NODES:
        steps //= 2
    return steps


def check_run_size(jobs: Sequence[tuple[PlacedJob, StepProfile]]) -> None:
    """Refuse jobs whose graphs do not fit into memory; warn of those that take long.

    Raises
    ------
    RunSizeError
        The message has the estimate, what is free, and what would fit.
    """
    memory, seconds, largest, most = 0.0, 0.0, "", 0
    for job, profile in jobs:
        parts = pieces_of(job.spec, profile.layers)
        nodes = step_nodes(job, profile, parts)
        steps = min(job.spec.steps, steps_per_graph(nodes))
        memory += nodes * steps * NODE_BYTES
        seconds += nodes * job.spec.steps * MESSAGE_S
        if nodes > most:
            largest, most = job.name, nodes
    free = available_bytes()
    ways = "`collective: hierarchical`, fewer workers, or larger pieces (`piece_bytes`, with FSDP `unit_bytes`)"
    if memory > free:
        raise RunSizeError(
            f"{largest}: a step has {most:,} messages and computations, and the run needs about {memory / 1e9:.0f} GB "
            f"and at least {_duration(seconds)}; {free / 1e9:.0f} GB are free: use {ways}"
        )
    if seconds > LONG_S:
        log.warning("%s takes at least %s to simulate; %s take less", largest, _duration(seconds), ways)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds > 2 * 3600 else f"{max(1, round(seconds / 60))} minutes"
