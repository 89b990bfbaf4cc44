# SPDX-License-Identifier: Apache-2.0
"""Estimate the size of a run's graphs before any of them is built."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlcp.sim.graphs.collectives import AllReduceSpec, all_gather, all_reduce, reduce_scatter
from dlcp.sim.graphs.graph import GraphBuilder, Nodes
from dlcp.sim.jobs.step_graph import GradientPiece, pieces_of
from dlcp.sim.jobs.training import PlacedJob
from dlcp.sim.limits import SimulatorError, available_bytes
from dlcp.sim.scenario import FlowPattern

log = logging.getLogger("dlcp")

STEPS_PER_GRAPH: Final = 4
"""Steps in one graph. Workers drift apart within a graph, and synchronize between graphs. Four limit the memory; the
synchronization costs little, because the fastest worker waits for the slowest in every step anyway."""
GRAPH_NODES: Final = 4_000_000
"""Nodes above which graphs have fewer steps: 2 GB by `NODE_BYTES`."""
NODE_BYTES: Final = 480
"""Memory of a node with its edges: FSDP over rings of 256 ranks took 1.85 GB for 3.96 million nodes, less 0.1 GB."""
WRITTEN_NODE_BYTES: Final = 1_500
"""The same, of a job that is written as a trace: rings of 128 and 256 ranks took 0.21 and 0.50 GB for 65,000 and
261,000 messages."""
FLOW_BYTES: Final = 1_200
"""The same, of a flow of a pattern: all to all of 100 and of 400 hosts took 0.26 and 0.45 GB for 9,900 and 160,000."""
MESSAGE_S: Final = 15e-6
"""Least computing time of a message, as a flow: the same ring took 50 s for 3.9 million. With packets it is longer."""
LONG_S: Final = 3600.0
"""Computing time above which a run begins with a warning; not tuned."""


class RunSizeError(SimulatorError):
    """A run needs more memory than there is; the message says what fits."""


class GraphCounter(GraphBuilder):
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


def step_nodes(job: PlacedJob, parts: Sequence[GradientPiece]) -> int:
    """Return the number of nodes in the graph of one step; a pipeline's counts as that of the whole model."""
    spec, workers = job.spec, job.workers
    ready: NDArray[np.int64] = np.arange(len(workers))

    def count(add: Callable[[GraphBuilder, AllReduceSpec], object], size_bytes: int) -> int:
        counter = GraphCounter()
        add(counter, AllReduceSpec(workers, size_bytes, 0))
        return len(counter)

    compute = 2 * len(job.profile.layers) * len(workers)
    if spec.sharding == "fsdp":
        group = spec.sharded_group
        gathers = (1 + spec.reshard_after_forward) * len(job.profile.layers)
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


@dataclass(frozen=True, slots=True)
class PartSize:
    """The size of a part of a run.

    Parameters
    ----------
    name
        Of the job or pattern.
    what
        Its unit, for messages: "a step has", and so on.
    ways
        Ways to make it smaller.
    nodes
        Messages and computations of one step, turn or burst.
    held, total
        How many of them are in memory at once, and how many there are.
    node_bytes
        Memory of a node.
    """

    name: str
    what: str
    ways: str
    nodes: int
    held: int
    total: int
    node_bytes: int = NODE_BYTES


def training_size(job: PlacedJob, *, at_once: bool = False) -> PartSize:
    """Return the size of a training job; ``at_once`` if all of its steps are one graph, which is written."""
    nodes = step_nodes(job, pieces_of(job.spec, job.profile.layers))
    steps = job.spec.steps
    held = steps if at_once else min(steps, steps_per_graph(nodes))
    ways = "`collective: hierarchical`, fewer workers, or larger pieces (`piece_bytes`, with FSDP `unit_bytes`)"
    node_bytes = WRITTEN_NODE_BYTES if at_once else NODE_BYTES
    return PartSize(job.name, "a step", f"fewer steps, {ways}" if at_once else ways, nodes, held, steps, node_bytes)


def pattern_size(pattern: FlowPattern, hosts: int) -> PartSize:
    """Return the size of a pattern of flows in a network with a number of hosts."""
    count = pattern.hosts or hosts
    flows = {"permutation": count, "incast": count - 1, "all_to_all": count * (count - 1)}[pattern.pattern]
    return PartSize(pattern.name, "the pattern", "fewer `hosts`", flows, 1, pattern.times, FLOW_BYTES)


def check_run_size(parts: Iterable[PartSize]) -> None:
    """Refuse parts that do not fit into memory, before they are built; warn of those that take long.

    Raises
    ------
    RunSizeError
        The message has the estimate, what is free, and what would fit.
    """
    known = list(parts)
    memory = sum(part.nodes * part.held * part.node_bytes for part in known)
    seconds = sum(part.nodes * part.total * MESSAGE_S for part in known)
    largest = max(known, key=lambda part: part.nodes * part.held * part.node_bytes, default=None)
    if largest is None:
        return
    free = available_bytes()
    if memory > free:
        raise RunSizeError(
            f"{largest.name}: {largest.what} has {largest.nodes:,} messages and computations, and the run needs about "
            f"{memory / 1e9:.0f} GB and at least {_duration(seconds)}; {free / 1e9:.0f} GB are free: use {largest.ways}"
        )
    if seconds > LONG_S:
        log.warning("%s takes at least %s to simulate; %s take less", largest.name, _duration(seconds), largest.ways)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds > 2 * 3600 else f"{max(1, round(seconds / 60))} minutes"
