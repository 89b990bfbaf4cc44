# SPDX-License-Identifier: Apache-2.0
"""Steps of training as graphs: when gradients are ready, and in which pieces and order they are sent.

A scheduler cuts a job's gradients into pieces (`pieces_of`). A step is the backward pass of every worker, the
all-reduces of its pieces, and the next forward pass, whose layers wait for the pieces that they need:

``fifo``
    PyTorch's DistributedDataParallel: buckets of 25 MB, filled from the output layer on and sent as they become ready;
    the next forward pass waits for all of them.
``p3``
    Jayarajan et al., MLSys 2019: slices of 50,000 values, front layers first. Each layer of the next forward pass waits
    only for its own slices.
``bytescheduler``
    Peng et al., SOSP 2019: the same order. Its authors search for the partition size at run time; here it is 0.5 MB,
    the best of four in `sim/experiments/tuning.yaml`.
``dlcp``
    The same order at hosts, and in switches too, where front layers have more urgent queues. Pieces of 1 MB give
    messages of about a hundred packets, so that a share of each can be lost.

With ``sharding: fsdp``, each worker owns a shard of every layer, and layers are gathered before they compute
(`_StepBuilder`). A layer's gradients are one piece, whatever the scheduler: several rings at once hold each other up
when workers are not equally fast. With ``fifo``, parameters and gradients share a queue, as with PyTorch's FSDP. With
``dlcp``, parameters are in the most urgent queue and are never lost, as with MLT (NSDI 2024); gradients are in the
queues of their layers, and may be lost within the bound.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.sim.graphs.collectives import (
    RESULT_MESSAGE,
    SHARD_MESSAGES,
    AllReduceSpec,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from dlcp.sim.graphs.graph import OWN_LANE, Graph, GraphBuilder, Nodes
from dlcp.sim.jobs.models import TimedLayer
from dlcp.sim.jobs.training import PlacedJob, SchedulerName, TrainingJob, computing_factors
from dlcp.sim.limits import PACKETS_PER_MESSAGE_MAX, PIECES_MAX, check_packets, check_within, picoseconds
from dlcp.sim.network.nodes import NetworkTopology
from dlcp.sim.transports.specs import TransportSpec
from dlcp.values.tags import BACK_SHARES, FRONT_SHARES, queue_of_layer
from dlcp.wire import Queue

DDP_BUCKET_BYTES: Final = 25 * 2**20
"""``bucket_cap_mb`` of DistributedDataParallel."""
SCHEDULER_PIECE_BYTES: Final[dict[SchedulerName, int]] = {
    "fifo": DDP_BUCKET_BYTES,
    "p3": 200_000,
    "bytescheduler": 500_000,
    "dlcp": 1_000_000,
}
UNIFORM_SHARES: Final = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Shares of drop classes if magnitude does not count: all packets are in the class with the highest threshold."""
UNIFORM_PROFILE: Final = 256
"""Number of that distribution in `class_shares`; smaller numbers are layer positions."""
_SHARDED: Final = ("ring", "direct", "byteps", "halving_doubling", "hierarchical")


def piece_limit(job: TrainingJob, workers: int | None = None) -> int:
    """Return the largest size of a job's pieces, in bytes.

    Pieces that are cut into one shard per worker may be larger by the number of workers, up to a ``fifo`` bucket. All
    of the job's workers share them, or as many as ``workers``. With FSDP, each layer is a piece.
    """
    if job.piece_bytes is not None:
        return job.piece_bytes
    if job.sharding == "fsdp":
        # With FSDP each layer is a piece of its own: nothing is joined or cut.
        return 1 if job.scheduler == "fifo" else sys.maxsize
    most = SCHEDULER_PIECE_BYTES[job.scheduler]
    return min(DDP_BUCKET_BYTES, most * (workers or job.workers)) if job.collective in _SHARDED else most


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """Gradients that are reduced together.

    Parameters
    ----------
    ready
        The layer whose backward pass completes the piece: its front-most layer.
    layers
        Layers of the next forward pass that wait for the piece.
    order
        Hosts send pieces with a smaller order first.
    queue
        Queue in switches, 7 the most urgent; -1 takes the transport's.
    shares
        Number of the distribution of drop classes in `class_shares`; -1 takes the transport's.
    """

    size_bytes: int
    ready: int
    layers: tuple[int, ...]
    order: int
    queue: int
    shares: int


def pieces_of(job: TrainingJob, layers: Sequence[TimedLayer], workers: int | None = None) -> list[GradientPiece]:
    """Return the pieces of some layers of a job, in the order in which backward makes them ready.

    Parameters
    ----------
    workers
        See `piece_limit`.

    Raises
    ------
    dlcp.sim.limits.LimitError
        There are too many of them.
    """
    most, bytes_per_value = piece_limit(job, workers), job.bytes_per_value / job.compression
    sizes = [max(1, round(layer.parameters * bytes_per_value)) if layer.parameters else 0 for layer in layers]
    count = sum(-(-size // most) for size in sizes) if job.scheduler != "fifo" else len(sizes)
    check_within("the number of pieces of the gradients", count, PIECES_MAX, "set a larger piece_bytes")
    if job.scheduler == "fifo":
        return _buckets(sizes, most)
    found: list[GradientPiece] = []
    for index in reversed(range(len(layers))):
        position = round(255 * index / max(1, len(layers) - 1))
        queue, shares = -1, -1
        if job.scheduler == "dlcp":
            queue = int(queue_of_layer(np.array([position], np.uint8))[0]) if job.layer_queues else -1
            shares = position if job.magnitude_classes else UNIFORM_PROFILE
        found += [GradientPiece(size, index, (index,), index, queue, shares) for size in _cut(sizes[index], most)]
    return found


def check_messages(job: PlacedJob, transport: TransportSpec) -> None:
    """Reject a job whose messages have more packets than engines can count.

    Raises
    ------
    dlcp.sim.limits.LimitError
        It has such a message, or too many pieces.
    """
    payload = transport.packet_bytes - transport.header_bytes
    parts = pieces_of(job.spec, job.profile.layers)
    largest = max((piece.size_bytes for piece in parts), default=0)
    if largest > PACKETS_PER_MESSAGE_MAX * payload and not job.spec.pipeline:
        # Most collectives cut a piece into shards, whose sizes are in the graph. Few jobs are so large that it is
        # needed.
        factors = np.ones((1, len(job.workers)))
        largest = int(step_graph(job, parts, factors, 0, 0).graph.nodes["size_bytes"].max())
    check_packets(largest, payload)


def class_shares() -> tuple[tuple[float, ...], ...]:
    """Return the shares of drop classes 0 to 7: those of `dlcp.values.tags` by layer, then `UNIFORM_SHARES`."""
    positions = (at / 255 for at in range(UNIFORM_PROFILE))
    ends = list(zip(FRONT_SHARES, BACK_SHARES, strict=True))
    return (*(tuple((1 - at) * front + at * back for front, back in ends) for at in positions), UNIFORM_SHARES)


def _buckets(sizes: Sequence[int], most: int) -> list[GradientPiece]:
    """Collect layers into buckets from the last layer on; begin a new bucket when one is full."""
    buckets: list[list[int]] = [[]]
    for index in reversed(range(len(sizes))):
        if not sizes[index]:
            continue
        if buckets[-1] and sum(sizes[layer] for layer in buckets[-1]) + sizes[index] > most:
            buckets.append([])
        buckets[-1].append(index)
    every = tuple(range(len(sizes)))
    return [
        GradientPiece(sum(sizes[layer] for layer in bucket), bucket[-1], every[:1], 0, -1, -1)
        for bucket in buckets
        if bucket
    ]


def _cut(size: int, most: int) -> list[int]:
    """Cut ``size`` into as few and as equal pieces as possible, each at most ``most``."""
    count = -(-size // most)
    return [size // count + (index < size % count) for index in range(count)]


def parameter_pieces(job: TrainingJob, layers: Sequence[TimedLayer]) -> list[GradientPiece]:
    """Return the parameters of each layer as a piece, which workers gather with FSDP.

    With ``dlcp``, they come before all gradients, front layers first.
    """
    first = job.scheduler == "dlcp"
    queue = int(Queue.LAST_GRADIENT) if first and job.layer_queues else -1
    return [
        GradientPiece(
            layer.parameters * job.bytes_per_value, index, (index,), index - len(layers) if first else 0, queue, -1
        )
        for index, layer in enumerate(layers)
    ]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A graph of some steps.

    Parameters
    ----------
    ends
        One watched node per step, done when all workers have finished the forward pass after the step.
    worker_ends
        Per step, the nodes at which each worker has finished. They are watched if asked for.
    """

    graph: Graph
    ends: tuple[int, ...]
    worker_ends: tuple[Nodes, ...]


def step_graph(
    job: PlacedJob,
    parts: list[GradientPiece],
    factors: NDArray[np.float64],
    first_step: int,
    transport: int,
    *,
    weights: Sequence[float] = (),
    watch_workers: bool = False,
) -> StepGraph:
    """Return the backward passes, all-reduces and forward passes of some steps.

    Parameters
    ----------
    parts
        Pieces in the order in which they become ready.
    factors
        float64 (steps, workers): each worker's computing time relative to the profile.
    first_step
        Number of the first step.
    weights
        Each worker's share of a piece as an owner; by default, shares are equal.
    watch_workers
        Whether a process can wait for each worker's end of a step.
    """
    builder = GraphBuilder()
    ends: list[int] = []
    worker_ends: list[Nodes] = []
    previous: Nodes | None = None
    steps = _StepBuilder(builder, job, parts, transport, weights)
    for step, speed in enumerate(factors, first_step):
        previous = steps.add(step, speed, previous)
        worker_ends.append(previous)
        ends.append(builder.barrier(previous, watched=True))
    graph = builder.build()
    if watch_workers:
        graph.nodes["watched"][np.concatenate(worker_ends)] = True
    return StepGraph(graph, tuple(ends), tuple(worker_ends))


@dataclass(frozen=True, slots=True)
class _StepBuilder:
    """Adds the steps of a job to a graph; parameters as for `step_graph`."""

    builder: GraphBuilder
    job: PlacedJob
    parts: Sequence[GradientPiece]
    transport: int
    weights: Sequence[float]

    def add(self, step: int, speed: NDArray[np.float64], previous: Nodes | None) -> Nodes:
        """Add a step; return the nodes at which workers have finished it.

        Parameters
        ----------
        speed
            Each worker's computing time relative to the profile.
        previous
            The nodes at which workers have finished the step before.
        """
        return (self._sharded if self.job.spec.sharding == "fsdp" else self._replicated)(step, speed, previous)

    def _replicated(self, step: int, speed: NDArray[np.float64], previous: Nodes | None) -> Nodes:
        """Add a step of workers with the whole model."""
        job = self.job
        by_ranks = job.spec.collective in ("direct", "byteps")
        shards = max(1, len(job.servers) + (len(job.workers) if by_ranks else 0))
        back = self._backward(step, speed, previous)
        needs: list[list[Nodes]] = [[] for _ in self.job.profile.layers]
        for number, piece in enumerate(self.parts):
            done = all_reduce(
                self.builder,
                job.spec.collective,
                self._spec(piece, step, _message_number(number, shards)),
                back[piece.ready],
                servers=job.servers if by_ranks else _servers(job, piece.size_bytes, number),
                group=job.spec.group,
                weights=self.weights,
            )
            for layer in piece.layers:
                needs[layer].append(done)
        ahead = self._forward(step, speed, back[0])
        for layer, waits in enumerate(needs):
            for done in waits:
                self.builder.follow(done, ahead[layer])
        last: Nodes = ahead[-1]
        return last

    def _sharded(self, step: int, speed: NDArray[np.float64], previous: Nodes | None) -> Nodes:
        """Add a step of FSDP.

        A layer's parameters are gathered while the layer before it computes: from when that layer's own parameters are
        there and the one before that has computed. So at most two layers are whole at a time. One layer's gradients are
        reduced at a time, and the layer after next waits for them, because their memory is needed again. This is the
        order of streams and events in PyTorch's FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py,
        version 2.13), whose forward pass may gather one layer more.
        """
        builder = self.builder
        group = self.job.spec.sharded_group
        shards = group + 1 if group > 1 else 1
        parameters = parameter_pieces(self.job.spec, self.job.profile.layers)
        count = len(parameters)

        def gather(layer: int, waits: Sequence[Nodes], first_message: int) -> Nodes:
            spec = self._spec(parameters[layer], step, _message_number(first_message + layer, shards))
            return all_gather(builder, spec, self._all_of(waits), group)

        back = self._backward(step, speed, previous)
        if self.job.spec.reshard_after_forward:
            gathered = [] if previous is None else [previous]
            for layer in reversed(range(count)):
                gathered = [gather(layer, [*gathered, *back[layer + 2 : layer + 3]], len(self.parts))]
                builder.follow(gathered[0], back[layer])
        needs: list[list[Nodes]] = [[] for _ in parameters]
        reduced: list[Nodes] = []
        for number, piece in enumerate(self.parts):
            spec = self._spec(piece, step, _message_number(number, shards))
            reduced = [reduce_scatter(builder, spec, self._all_of([back[piece.ready], *reduced]), group)]
            if piece.ready >= 2:
                builder.follow(reduced[0], back[piece.ready - 2])
            for layer in piece.layers:
                needs[layer] += reduced
        ahead = self._forward(step, speed, back[0])
        gathered = [back[0]]
        for layer in range(count):
            waits = [*gathered, *ahead[max(0, layer - 2) : max(0, layer - 1)], *needs[layer]]
            gathered = [gather(layer, waits, len(self.parts) + count)]
            builder.follow(gathered[0], ahead[layer])
        last: Nodes = ahead[-1]
        return last

    def _spec(self, piece: GradientPiece, step: int, message: int) -> AllReduceSpec:
        return piece_spec(self.job, self.job.workers, piece, self.transport, step, message)

    def _all_of(self, waits: Sequence[Nodes]) -> Nodes:
        """Return a node per worker that is done when all of the worker's nodes in ``waits`` are."""
        if len(waits) == 1:
            return waits[0]
        nodes = self.builder.delays(np.zeros(len(self.job.workers), np.int64))
        for each in waits:
            self.builder.follow(each, nodes)
        return nodes

    def _backward(self, step: int, speed: NDArray[np.float64], before: Nodes | None) -> NDArray[np.int64]:
        """Add the backward pass; return the nodes of its layers, from the front on, int64 (layers, workers)."""
        seconds = np.array([layer.backward_s for layer in reversed(self.job.profile.layers)])
        return self._chain(step, seconds, speed, before)[::-1]

    def _forward(self, step: int, speed: NDArray[np.float64], before: Nodes | None) -> NDArray[np.int64]:
        """Add the forward pass; return the nodes of its layers, int64 (layers, workers)."""
        return self._chain(step, np.array([layer.forward_s for layer in self.job.profile.layers]), speed, before)

    def _chain(
        self, step: int, seconds: NDArray[np.float64], speed: NDArray[np.float64], before: Nodes | None
    ) -> NDArray[np.int64]:
        """Add the layers of a pass in sequence for every worker; return their nodes, int64 (layers, workers)."""
        times = picoseconds(np.outer(seconds, speed))
        hosts = np.broadcast_to(self.job.workers, times.shape)
        nodes = self.builder.delays(times.ravel(), host=hosts.ravel(), step=step).reshape(times.shape)
        if before is not None:
            self.builder.follow(before, nodes[0])
        self.builder.follow(nodes[:-1], nodes[1:])
        return nodes


def piece_spec(
    job: PlacedJob, hosts: Sequence[int], piece: GradientPiece, transport: int, step: int, message: int
) -> AllReduceSpec:
    """Return the all-reduce of a piece over some of a job's hosts."""
    return AllReduceSpec(
        hosts,
        piece.size_bytes,
        transport,
        queue=piece.queue,
        lane=OWN_LANE if job.spec.flows == "own" else max(piece.queue, 0),
        order=piece.order,
        loss_bound=job.spec.loss_bound,
        class_shares=piece.shares,
        job=job.number,
        step=step,
        message=message,
    )


def _message_number(number: int, shards: int) -> int:
    """Return the first message number of a piece; its shards' numbers follow at intervals of `SHARD_MESSAGES`."""
    return (number % SHARD_MESSAGES + number // SHARD_MESSAGES * SHARD_MESSAGES * shards) & (RESULT_MESSAGE - 1)


def _servers(job: PlacedJob, size_bytes: int, number: int) -> tuple[int, ...]:
    """Return the servers of a piece: all for a large piece, which is sharded; otherwise one, in rotation."""
    sharded = size_bytes > job.spec.sharded_bytes or not job.servers
    return job.servers if sharded else (job.servers[number % len(job.servers)],)


def training_graph(job: PlacedJob, topology: NetworkTopology, transport: int, seed: int) -> Graph:
    """Return all steps of a job as one graph, in full precision.

    Parameters
    ----------
    transport
        Number of the job's transport.
    seed
        Of the simulation, for the jitter.

    Raises
    ------
    ValueError
        See `dlcp.sim.jobs.training.profile_of`.
    """
    weights = job.spec.shard_weights(job.workers, topology)
    factors = computing_factors(seed, job)
    return step_graph(job, pieces_of(job.spec, job.profile.layers), factors, 0, transport, weights=weights).graph
