# SPDX-License-Identifier: Apache-2.0
"""Steps of a job as a graph: backward passes, exchanges and the next forward pass of every worker."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from dlcp.sim.arithmetic import PS_PER_S
from dlcp.sim.collectives import PULL_MESSAGE, Exchange
from dlcp.sim.graph import OWN_LANE, Graph, GraphBuilder, Nodes
from dlcp.sim.models.profile import StepProfile
from dlcp.sim.training.exchanges import all_reduce
from dlcp.sim.training.placement import PlacedJob
from dlcp.sim.training.schedulers import Piece
from numpy.typing import NDArray

STEPS_PER_GRAPH: Final = 4
"""Steps of one graph, in which workers drift apart freely; between graphs they meet. Chosen by us: memory holds no more
steps than these, and the meeting costs little, for in every step the fastest has to wait for the slowest."""

SHARED_BYTES: Final = 4_000_000
"""Pieces above this are cut into a shard per server: MXNet's MXNET_KVSTORE_BIGARRAY_BOUND, a million values."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """Some steps.

    Parameters
    ----------
    ends
        One watched node per step: all workers have finished the forward pass after it.
    """

    graph: Graph
    ends: tuple[int, ...]


def step_graph(
    job: PlacedJob,
    profile: StepProfile,
    parts: list[Piece],
    factors: NDArray[np.float64],
    first_step: int,
    transport: int,
) -> StepGraph:
    """Return backward, exchange and forward of some steps.

    Parameters
    ----------
    parts
        Pieces in the order in which they become ready.
    factors
        float64 (steps, workers): how many times as long as the profile each worker computes.
    first_step
        Number of the first of them.
    """
    builder = GraphBuilder()
    forward = np.array([layer.forward_s for layer in profile.layers])
    backward = np.array([layer.backward_s for layer in profile.layers])
    ends: list[int] = []
    previous: Nodes | None = None
    shards = max(len(job.servers), len(job.workers) if job.spec.collective == "direct" else 1)
    for offset, speed in enumerate(factors):
        back = _chain(builder, backward[::-1], speed, previous)[::-1]
        needs: list[list[Nodes]] = [[] for _ in profile.layers]
        for number, piece in enumerate(parts):
            exchange = Exchange(
                job.workers,
                piece.size_bytes,
                transport,
                queue=piece.queue,
                lane=OWN_LANE if job.spec.flows == "own" else max(piece.queue, 0),
                order=piece.order,
                loss_bound=job.spec.loss_bound,
                class_shares=piece.shares,
                layer=min(max(piece.shares, 0), 255),
                job=job.number,
                step=first_step + offset,
                message=_message_number(number, shards),
            )
            servers = _servers(job.servers, piece.size_bytes, number)
            done = all_reduce(builder, job.spec.collective, exchange, servers, job.spec.group, back[piece.ready])
            for layer in piece.layers:
                needs[layer].append(done)
        ahead = _chain(builder, forward, speed, back[0], needs)
        previous = ahead[-1]
        ends.append(builder.barrier(previous, watched=True))
    return StepGraph(builder.build(), tuple(ends))


def _message_number(number: int, shards: int) -> int:
    """Return where the numbers of a piece's messages begin; those of its shards follow in steps of 64."""
    return (number % 64 + number // 64 * 64 * shards) & (PULL_MESSAGE - 1)


def _servers(servers: tuple[int, ...], size_bytes: int, number: int) -> tuple[int, ...]:
    """Return who holds a piece: large ones are cut into a shard per server, others go to the servers in turn."""
    return servers if size_bytes > SHARED_BYTES or not servers else (servers[number % len(servers)],)


def _chain(
    builder: GraphBuilder,
    seconds: NDArray[np.float64],
    speed: NDArray[np.float64],
    before: Nodes | None,
    needs: list[list[Nodes]] | None = None,
) -> NDArray[np.int64]:
    """Add layers one after the other on every worker; return their nodes, int64 (layers, workers)."""
    times = np.rint(np.outer(seconds, speed) * PS_PER_S).astype(np.int64)
    nodes = builder.delays(times.ravel()).reshape(times.shape)
    if before is not None:
        builder.follow(before, nodes[0])
    builder.follow(nodes[:-1], nodes[1:])
    for layer, waits in enumerate(needs or []):
        for done in waits:
            builder.follow(done, nodes[layer])
    return nodes
