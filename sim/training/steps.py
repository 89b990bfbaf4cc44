# SPDX-License-Identifier: Apache-2.0
"""A training job that runs: steps as graphs of computing and all-reduces, and the process that submits them.

A step is the backward pass of every worker, the all-reduces of its gradient pieces, and the next forward pass, whose
layers wait for the pieces that they need.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.arithmetic import PS_PER_S, seconds_to_ps
from dlcp.sim.collectives import RESULT_MESSAGE, SHARD_MESSAGES, AllReduceSpec, all_reduce
from dlcp.sim.graph import OWN_LANE, Graph, GraphBuilder, Nodes
from dlcp.sim.models.profiles import StepProfile, read_profile, step_profile
from dlcp.sim.simulation import Process, Simulation
from dlcp.sim.training.job import PlacedJob, TrainingJob
from dlcp.sim.training.schedulers import GradientPiece, piece_limit, pieces

STEPS_PER_GRAPH: Final = 4
"""Steps of one graph, in which workers drift apart freely; between graphs they synchronize. Chosen by us: memory holds
only these steps, and synchronizing costs little, since in every step the fastest worker waits for the slowest."""

SHARDED_PIECE_BYTES: Final = 4_000_000
"""Larger pieces are cut into a shard per server: MXNet's MXNET_KVSTORE_BIGARRAY_BOUND, a million values."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A graph of some steps.

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
    parts: list[GradientPiece],
    factors: NDArray[np.float64],
    first_step: int,
    transport: int,
) -> StepGraph:
    """Return the backward passes, all-reduces and forward passes of some steps.

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
            spec = AllReduceSpec(
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
            done = all_reduce(
                builder, job.spec.collective, spec, back[piece.ready], servers=servers, group=job.spec.group
            )
            for layer in piece.layers:
                needs[layer].append(done)
        ahead = _chain(builder, forward, speed, back[0], needs)
        previous = ahead[-1]
        ends.append(builder.barrier(previous, watched=True))
    return StepGraph(builder.build(), tuple(ends))


def _message_number(number: int, shards: int) -> int:
    """Return the first message number of a piece; those of its shards follow in steps of `SHARD_MESSAGES`."""
    return (number % SHARD_MESSAGES + number // SHARD_MESSAGES * SHARD_MESSAGES * shards) & (RESULT_MESSAGE - 1)


def _servers(servers: tuple[int, ...], size_bytes: int, number: int) -> tuple[int, ...]:
    """Return the servers of a piece: all of them for a large one, which is sharded; else one of them in turn."""
    return servers if size_bytes > SHARDED_PIECE_BYTES or not servers else (servers[number % len(servers)],)


def _chain(
    builder: GraphBuilder,
    seconds: NDArray[np.float64],
    speed: NDArray[np.float64],
    before: Nodes | None,
    needs: list[list[Nodes]] | None = None,
) -> NDArray[np.int64]:
    """Add layers one after the other for every worker; return their nodes, int64 (layers, workers)."""
    times = np.rint(np.outer(seconds, speed) * PS_PER_S).astype(np.int64)
    nodes = builder.delays(times.ravel()).reshape(times.shape)
    if before is not None:
        builder.follow(before, nodes[0])
    builder.follow(nodes[:-1], nodes[1:])
    for layer, waits in enumerate(needs or []):
        for done in waits:
            builder.follow(done, nodes[layer])
    return nodes


@dataclass(slots=True)
class Progress:
    """How far a job has come.

    Attributes
    ----------
    compute_s
        What a step would take without communication.
    step_s
        How long each step took, the forward pass after it included.
    """

    job: PlacedJob
    profile: StepProfile
    step_s: list[float] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Return how long a step of one worker computes."""
        return self.profile.compute_s


def profile_of(job: TrainingJob) -> StepProfile:
    """Return how long a worker of a job computes, layer by layer.

    Raises
    ------
    ValueError
        There is no such model, nothing is published of it on that GPU, or the profile cannot be read.
    """
    if job.model.endswith((".yaml", ".yml", ".json")):
        return read_profile(Path(job.model))
    return step_profile(job.model, job.gpu, job.precision, job.batch)


def training(simulation: Simulation, progress: Progress) -> Process:
    """Train step by step."""
    env, job = simulation.env, progress.job
    spec = job.spec
    parts = pieces(
        spec.scheduler,
        progress.profile.layers,
        spec.bytes_per_value / spec.compression,
        piece_limit(spec),
        layer_queues=spec.layer_queues,
        magnitude_classes=spec.magnitude_classes,
    )
    factors = _factors(simulation, job)
    yield env.timeout(seconds_to_ps(job.start_s))
    before = int(env.now)
    for first in range(0, spec.steps, STEPS_PER_GRAPH):
        steps = step_graph(
            job,
            progress.profile,
            parts,
            factors[first : first + STEPS_PER_GRAPH],
            first,
            simulation.transports[spec.transport],
        )
        running = simulation.submit(steps.graph, label=(job.name, first))
        for end in steps.ends:
            yield running.nodes[end]
            progress.step_s.append((int(env.now) - before) / 1e12)
            before = int(env.now)
        yield running.closed if first + STEPS_PER_GRAPH >= spec.steps else running.done


def _factors(simulation: Simulation, job: PlacedJob) -> NDArray[np.float64]:
    """Return how many times as long as in the profile each worker computes, float64 (steps, workers)."""
    spec = job.spec
    random = simulation.random(3, job.number)
    # A log-normal of mean 1 whose deviation is `jitter`.
    sigma = math.sqrt(math.log1p(spec.jitter**2))
    factors = random.lognormal(-(sigma**2) / 2, sigma, (spec.steps, spec.workers))
    for straggler in spec.stragglers:
        factors[:, straggler.worker] *= straggler.factor
    return factors
