# SPDX-License-Identifier: Apache-2.0
"""Training jobs: what each worker computes, when gradients are ready, and in which pieces and order they are sent.

Each job gets its own hosts (`place_jobs`). A scheduler cuts its gradients into pieces (`pieces`). A step is the
backward pass of every worker, the all-reduces of its pieces, and the next forward pass, whose layers wait for the
pieces they need (`step_graph`). The process `training` submits the steps. Schedulers differ in the pieces and in their
order:

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

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.convergence import COST_OF_PRECISION, ConvergenceCurve, curve
from dlcp.phases import PHASE_STEPS, Phases
from dlcp.planes import FULL_BITS
from dlcp.precision import AUTO_PRECISION
from dlcp.sim.arithmetic import PS_PER_S
from dlcp.sim.collectives import (
    RESULT_MESSAGE,
    SHARD_MESSAGES,
    WITH_SERVERS,
    AllReduceSpec,
    CollectiveName,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from dlcp.sim.deferral import DeferralSpec, SimulatedDeferral
from dlcp.sim.graph import OWN_LANE, Graph, GraphBuilder, Nodes
from dlcp.sim.learning import (
    TRAINED_MODEL,
    GradientExchange,
    LearningSpec,
    SimulatedLearning,
    StepOutcome,
    TaskTrainer,
    TestedAccuracy,
)
from dlcp.sim.models import (
    StepProfile,
    TimedLayer,
    bare_profile,
    joined_layers,
    parse_size,
    read_profile,
    step_profile,
    task_profile,
)
from dlcp.sim.pipeline import parse_replicas
from dlcp.sim.precision import Precision, SimulatedPrecision
from dlcp.sim.scenario import Placement, choose_hosts
from dlcp.sim.simulation import Process, Simulation, SubmittedGraph, random_of
from dlcp.sim.topology import NetworkTopology
from dlcp.sim.transports import DlcpTransport
from dlcp.slow_ports import weights_for_rates
from dlcp.tags import BACK_SHARES, FRONT_SHARES, queue_of_layer
from dlcp.wire import Queue

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]
SchedulerName = Literal["fifo", "p3", "bytescheduler", "dlcp"]
LEARNED_LOSS: Final = ("direct", "parameter_server", "byteps")
"""The collectives with which a job may learn and lose packets. In others, a packet holds sums of several ranks."""
SHARDED_PIECE_BYTES: Final = 4_000_000
"""MXNet's MXNET_KVSTORE_BIGARRAY_BOUND, a million values."""
PLANNED_PIPELINE: Final = "planned"
"""The value of `TrainingJob.pipeline` that leaves stages to the planner."""


class StragglerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker that is slower than the others.

    Parameters
    ----------
    worker
        Its rank.
    factor
        Its computing time relative to the other workers'.
    """

    worker: Annotated[int, Meta(ge=0)]
    factor: Annotated[float, Meta(ge=1)] = 2.0


class TrainingJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Data-parallel training of one network on its own workers.

    Parameters
    ----------
    model
        A name in `dlcp.sim.models.MODELS`, a profile file that ``dlcp sim profile`` has written, ``trained`` for the
        network of ``learn``, or a size such as ``350MB`` for that many bytes of gradients and no computing.
    gpu, gpu_precision
        The published throughput to take computing times from. A profile file has its own times.
    batch
        Samples per worker and step; by default, the batch of the published throughput.
    workers, servers
        Number of workers, and of parameter servers on additional hosts, for ``parameter_server`` and ``byteps``.
    placement
        Which hosts: the next free ones, every n-th free one, or random ones.
    copies
        Number of such jobs that run at once, each on its own hosts.
    collective
        How gradients are reduced. ``hierarchical`` reduces within ``group`` adjacent workers first.
    sharding
        ``fsdp``: each worker keeps a shard of every layer, as with PyTorch's FSDP (ZeRO-3), for ``ring``.
    reshard_after_forward
        With FSDP, whether workers free a layer's parameters after its forward pass, and gather them again for its
        backward pass.
    unit_bytes
        With FSDP: adjacent layers are sharded together, in units of at least this many bytes, as a transformer's blocks
        usually are. By default, each layer is a unit.
    scheduler
        How gradients are cut and ordered; see `dlcp.sim.training`.
    piece_bytes
        The largest piece in bytes; by default, the scheduler's own.
    sharded_bytes
        With parameter servers, larger pieces are cut into one shard per server; by default, MXNet's bound.
    transport
        Its name in the experiment.
    bytes_per_value
        Bytes of a gradient value on the wire.
    flows
        ``shared``: messages between two hosts share a connection (one per queue with ``dlcp``) and follow the
        scheduler's order. ``own``: every message is a separate flow that begins when it is ready, in no order, as in
        simulations of flow completion.
    compression
        Factor by which a compressor shrinks gradients, as a baseline. It costs no computing time here, which favours
        it.
    loss_bound
        The share of a contribution's packets that may be lost, if the transport bounds loss. Results are always
        delivered whole.
    adaptive_shards
        Whether ``direct`` gives ranks with slow links smaller shards (`dlcp.slow_ports`), as real ranks do.
    deferral
        What may be deferred to a later step, for ``parameter_server`` and ``direct``.
    precision
        Bits of each value on the wire, for ``parameter_server`` and ``direct`` over DLCP's transport. With ``auto``,
        fewer under congestion, from the second step on.
    pipeline
        Replicas of each stage of a pipeline, such as ``7-1``, or ``planned`` for the planner's choice
        (`dlcp.sim.pipeline`); by default, every worker has the whole model.
    phases
        Whether jobs with ``learn`` lower their loss bound in critical regimes, as real ranks do (`dlcp.phases`).
    optimizer
        Selects the curves of additional steps that deferral and precision cost; these are measured by optimizer. With
        ``learn``, also trains.
    learn
        A model to train with what the messages deliver (`dlcp.sim.learning`).
    layer_queues
        Whether ``dlcp`` puts front layers into more urgent queues; otherwise all use the transport's queue.
    magnitude_classes
        Whether ``dlcp`` gives packets drop classes by layer and magnitude; otherwise all are in class 1.
    steps
        Number of training steps; most figures leave out the first.
    jitter
        Standard deviation of a worker's computing time in a step, relative to its mean; log-normal.
    stagger_s
        Delay of each copy's start after the one before.
    """

    name: str
    model: str = "resnet50"
    gpu: str = "v100"
    gpu_precision: Literal["single", "mixed"] = "mixed"
    batch: _Count | None = None
    workers: Annotated[int, Meta(ge=2)] = 8
    servers: Annotated[int, Meta(ge=0)] = 0
    placement: Placement = "packed"
    copies: _Count = 1
    collective: CollectiveName = "ring"
    group: _Count = 8
    sharding: Literal["none", "fsdp"] = "none"
    reshard_after_forward: bool = True
    unit_bytes: Annotated[int, Meta(ge=0)] = 0
    scheduler: SchedulerName = "fifo"
    piece_bytes: _Count | None = None
    sharded_bytes: _Count = SHARDED_PIECE_BYTES
    layer_queues: bool = True
    magnitude_classes: bool = True
    transport: str = "dctcp"
    flows: Literal["shared", "own"] = "shared"
    bytes_per_value: Literal[1, 2, 4] = 4
    compression: Annotated[float, Meta(ge=1)] = 1.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    adaptive_shards: bool = False
    deferral: DeferralSpec | None = None
    precision: Precision = FULL_BITS
    pipeline: str = ""
    phases: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learn: LearningSpec | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] = 3
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stragglers: tuple[StragglerSpec, ...] = ()
    start_s: _Seconds = 0.0
    stagger_s: _Seconds = 0.0

    def __post_init__(self) -> None:
        """Reject contradictory settings."""
        if (self.servers and self.collective not in WITH_SERVERS) or (
            self.collective == "parameter_server" and not self.servers
        ):
            raise ValueError(
                f"servers is {self.servers} and collective is {self.collective!r}; servers are for parameter_server, "
                "which needs at least one, and for byteps"
            )
        if self.collective == "byteps" and self.servers > self.workers:
            raise ValueError(f"byteps has at most as many servers as workers; got {self.servers} and {self.workers}")
        if self.collective == "halving_doubling" and self.workers & (self.workers - 1):
            raise ValueError(f"halving_doubling needs a power of two as the number of workers, got {self.workers}")
        if self.collective == "hierarchical" and self.workers % self.group:
            raise ValueError(
                f"hierarchical: {self.workers} workers do not fill groups of {self.group}; use a multiple of it"
            )
        if self.deferral and (self.collective not in ("parameter_server", "direct") or self.steps < 2):
            raise ValueError(
                f"deferral is for parameter_server and direct, and begins with the second step; got collective "
                f"{self.collective!r} and {self.steps} steps"
            )
        if self.adaptive_shards and (self.collective != "direct" or self.deferral or self.pipeline):
            raise ValueError(
                "adaptive_shards is for the collective direct, without deferral and pipeline; "
                f"got collective {self.collective!r}; change one of them"
            )
        if self.precision != FULL_BITS and (
            self.collective not in ("parameter_server", "direct")
            or self.compression > 1
            or (self.precision == AUTO_PRECISION and self.steps < 2)
        ):
            raise ValueError(
                f"precision is for parameter_server and direct without compression, and auto begins with the second "
                f"step; got precision {self.precision}, collective {self.collective!r}, compression "
                f"{self.compression:g} and {self.steps} steps"
            )
        if self.pipeline:
            self._check_pipeline()
        self._check_sharding()
        self._check_learning()
        if any(straggler.worker >= self.workers for straggler in self.stragglers):
            raise ValueError(f"a straggler's rank is beyond the workers; choose from 0 to {self.workers - 1}")

    def shard_weights(self, hosts: Sequence[int], topology: NetworkTopology) -> tuple[float, ...]:
        """Return each worker's share of a buffer as an owner; empty if shares are equal."""
        if not self.adaptive_shards:
            return ()
        rates: dict[int, float] = dict.fromkeys(hosts, 0.0)
        for link in topology.links:
            if link.target in rates:
                rates[link.target] = max(rates[link.target], link.spec.rate_gbps)
        return tuple(weights_for_rates(rates).values())

    def _check_pipeline(self) -> None:
        if self.servers or self.deferral or self.precision != FULL_BITS:
            raise ValueError("a pipeline has no servers, no deferral and precision 32; leave these out, or pipeline")
        if self.collective in ("halving_doubling", "hierarchical"):
            raise ValueError(f"{self.collective} needs other numbers of ranks than the replicas of a stage; use direct")
        if self.pipeline != PLANNED_PIPELINE and sum(parse_replicas(self.pipeline)) != self.workers:
            raise ValueError(f"pipeline {self.pipeline} does not add up to the {self.workers} workers")

    def _check_sharding(self) -> None:
        if self.sharding == "none":
            if self.unit_bytes or not self.reshard_after_forward:
                raise ValueError(
                    "unit_bytes and reshard_after_forward are for `sharding: fsdp`; add it, or leave them out"
                )
        elif self.collective != "ring" or self.scheduler not in ("fifo", "dlcp") or self.pipeline or self.piece_bytes:
            raise ValueError(
                f"sharding {self.sharding} is for the collective ring and the schedulers fifo and dlcp, without "
                f"pipeline and piece_bytes; got collective {self.collective!r}, scheduler {self.scheduler!r}, pipeline "
                f"{self.pipeline!r} and piece_bytes {self.piece_bytes}; change these, or leave out sharding"
            )

    def _check_learning(self) -> None:
        if self.phases and not (self.learn and self.loss_bound):
            raise ValueError(
                "phases lowers the loss bound by the gradients of a job with `learn`: add learn and loss_bound"
            )
        if self.learn is None:
            if self.model == TRAINED_MODEL:
                raise ValueError(f"model {self.model!r} is the network that `learn` trains; add `learn`")
            return
        if self.pipeline or self.compression > 1:
            raise ValueError("learn is for jobs without pipeline and without compression; leave these out, or learn")
        if self.loss_bound and self.collective not in LEARNED_LOSS:
            raise ValueError(
                f"learn with a loss bound is for {', '.join(LEARNED_LOSS)}, where each contribution goes to its owner; "
                f"got collective {self.collective!r} with loss_bound {self.loss_bound:g}: set one of these, or 0"
            )

    def deferral_curve(self) -> ConvergenceCurve | None:
        """Return the curve of additional steps that the job's deferral costs; None without deferral.

        Raises
        ------
        ValueError
            The ceiling is above the largest measured share.
        """
        if self.deferral is None:
            return None
        # Behind one rank's slow port, only contributions to that rank are deferred; otherwise, those to all owners.
        servers = "servers_" if self.servers or self.deferral.ports == "all" else ""
        found = curve(f"deferral_{servers}{self.optimizer}")
        if self.deferral.ceiling > found.reaches:
            raise ValueError(
                f"the ceiling is {self.deferral.ceiling:.0%}, but {found.name} was measured only up to "
                f"{found.reaches:.0%}; lower it, or measure more with `python -m tests.bench convergence --ceilings`"
            )
        return found

    def precision_steps_factor(self, bits: int) -> float:
        """Return the factor on the number of steps if values have ``bits`` bits on the wire; noise below 1 is 1."""
        share = 1 - bits / FULL_BITS if bits < 8 * self.bytes_per_value else 0.0
        return max(1.0, curve(f"{COST_OF_PRECISION}_{self.optimizer}").steps_factor(share))


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A copy of a job on its hosts.

    Parameters
    ----------
    name
        Name of this copy.
    number
        Its number among all jobs of the experiment.
    """

    spec: TrainingJob
    name: str
    number: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    start_s: float


def place_jobs(jobs: Sequence[TrainingJob], hosts: int, seed: int) -> list[PlacedJob]:
    """Assign hosts to every copy of every job.

    Servers are spread among the workers, so that they are not all at the same switch.

    Raises
    ------
    ValueError
        There are not enough hosts.
    """
    needed = sum((job.workers + job.servers) * job.copies for job in jobs)
    if needed > hosts:
        raise ValueError(
            f"the jobs need {needed} hosts, but the topology has {hosts}; use fewer workers, or more hosts"
        )
    free = list(range(hosts))
    placed: list[PlacedJob] = []
    for job in jobs:
        for copy in range(job.copies):
            size = job.workers + job.servers
            taken = choose_hosts(free, size, job.placement, np.random.default_rng([seed, 0x91ACE, len(placed)]))
            free = [host for host in free if host not in set(taken)]
            at = {round((index + 0.5) * size / job.servers) % size for index in range(job.servers)}
            placed.append(
                PlacedJob(
                    job,
                    job.name if job.copies == 1 else f"{job.name}{copy}",
                    len(placed),
                    tuple(host for index, host in enumerate(taken) if index not in at),
                    tuple(host for index, host in enumerate(taken) if index in at),
                    job.start_s + copy * job.stagger_s,
                )
            )
    return placed


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
        # A layer is whole and alone: it fills a bucket of any size, and nothing is cut.
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


def pieces(
    scheduler: SchedulerName,
    layers: Sequence[TimedLayer],
    bytes_per_value: float,
    most: int,
    *,
    layer_queues: bool = True,
    magnitude_classes: bool = True,
) -> list[GradientPiece]:
    """Return the pieces of a step, in the order in which backward makes them ready.

    Parameters
    ----------
    bytes_per_value
        Bytes per value after compression.
    most
        Largest piece in bytes.
    layer_queues, magnitude_classes
        See `dlcp.sim.training.TrainingJob`.
    """
    sizes = [round(layer.parameters * bytes_per_value) for layer in layers]
    if scheduler == "fifo":
        return _buckets(sizes, most)
    found: list[GradientPiece] = []
    for index in reversed(range(len(layers))):
        position = round(255 * index / max(1, len(layers) - 1))
        queue, shares = -1, -1
        if scheduler == "dlcp":
            queue = int(queue_of_layer(np.array([position], np.uint8))[0]) if layer_queues else -1
            shares = position if magnitude_classes else UNIFORM_PROFILE
        found += [GradientPiece(size, index, (index,), index, queue, shares) for size in _cut(sizes[index], most)]
    return found


def pieces_of(job: TrainingJob, layers: Sequence[TimedLayer], workers: int | None = None) -> list[GradientPiece]:
    """Return the pieces of some layers of a job; see `piece_limit` for ``workers``."""
    return pieces(
        job.scheduler,
        layers,
        job.bytes_per_value / job.compression,
        piece_limit(job, workers),
        layer_queues=job.layer_queues,
        magnitude_classes=job.magnitude_classes,
    )


def class_shares() -> tuple[tuple[float, ...], ...]:
    """Return the shares of drop classes 0 to 7: those of `dlcp.tags` by layer position, then `UNIFORM_SHARES`."""
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


STEPS_PER_GRAPH: Final = 4
"""Steps in one graph. Workers drift apart within a graph, and synchronize between graphs. Four limit the memory; the
synchronization costs little, because the fastest worker waits for the slowest in every step anyway."""
assert PHASE_STEPS % STEPS_PER_GRAPH == 0


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
    profile: StepProfile,
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
    steps = _StepBuilder(builder, job, profile, parts, transport, weights)
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
    profile: StepProfile
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
        needs: list[list[Nodes]] = [[] for _ in self.profile.layers]
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
        parameters = parameter_pieces(self.job.spec, self.profile.layers)
        count = len(parameters)

        def gather(layer: int, waits: Sequence[Nodes], first_message: int) -> Nodes:
            spec = self._spec(parameters[layer], step, _message_number(first_message + layer, 1))
            return all_gather(builder, spec, self._all_of(waits))

        back = self._backward(step, speed, previous)
        if self.job.spec.reshard_after_forward:
            gathered = [] if previous is None else [previous]
            for layer in reversed(range(count)):
                gathered = [gather(layer, [*gathered, *back[layer + 2 : layer + 3]], len(self.parts))]
                builder.follow(gathered[0], back[layer])
        needs: list[list[Nodes]] = [[] for _ in parameters]
        reduced: list[Nodes] = []
        for number, piece in enumerate(self.parts):
            spec = self._spec(piece, step, _message_number(number, 1))
            reduced = [reduce_scatter(builder, spec, self._all_of([back[piece.ready], *reduced]))]
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
        seconds = np.array([layer.backward_s for layer in reversed(self.profile.layers)])
        return self._chain(step, seconds, speed, before)[::-1]

    def _forward(self, step: int, speed: NDArray[np.float64], before: Nodes | None) -> NDArray[np.int64]:
        """Add the forward pass; return the nodes of its layers, int64 (layers, workers)."""
        return self._chain(step, np.array([layer.forward_s for layer in self.profile.layers]), speed, before)

    def _chain(
        self, step: int, seconds: NDArray[np.float64], speed: NDArray[np.float64], before: Nodes | None
    ) -> NDArray[np.int64]:
        """Add the layers of a pass in sequence for every worker; return their nodes, int64 (layers, workers)."""
        times = np.rint(np.outer(seconds, speed) * PS_PER_S).astype(np.int64)
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


@dataclass(slots=True)
class Progress:
    """Progress of a job.

    Attributes
    ----------
    step_s
        Duration of each step, including the forward pass after it.
    skipped
        Steps that were not simulated.
    bits
        Bits per value of each step; empty in full precision.
    bounds
        Loss bound of each step of a job with ``phases``.
    minibatches
        Minibatches that all workers together compute in the simulated steps.
    pipeline
        Replicas of each stage; empty if each worker has the whole model.
    curve
        Tests of the model that a job with ``learn`` trains.
    """

    job: PlacedJob
    profile: StepProfile
    step_s: list[float] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    skipped: int = 0
    minibatches: int = 0
    pipeline: str = ""
    curve: list[TestedAccuracy] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Count a minibatch per worker and step."""
        self.minibatches = self.job.spec.steps * len(self.job.workers)

    def skip(self, count: int, window: int) -> None:
        """Add ``count`` steps that are like the last ``window`` ones, in turn."""
        self.step_s += np.resize(self.step_s[-window:], count).tolist()
        if self.bits:
            self.bits += np.resize(self.bits[-window:], count).tolist()
        self.skipped += count
        self.minibatches -= count * len(self.job.workers)

    @property
    def name(self) -> str:
        """Return the name of this copy of the job."""
        return self.job.name

    @property
    def steps(self) -> int:
        """Return the number of steps that the job is to run."""
        return self.job.spec.steps

    @property
    def compute_s(self) -> float:
        """Return the computing time of a step."""
        return self.profile.compute_s


def profile_of(job: TrainingJob) -> StepProfile:
    """Return the computing times of a job's workers, layer by layer; with FSDP, units of layers are layers.

    Raises
    ------
    ValueError
        The model is unknown, its throughput on that GPU is not published, or the profile cannot be read.
    """
    profile = _whole_profile(job)
    return joined_layers(profile, job.unit_bytes // job.bytes_per_value) if job.sharding == "fsdp" else profile


def _whole_profile(job: TrainingJob) -> StepProfile:
    if job.model == TRAINED_MODEL:
        assert job.learn is not None
        return task_profile(job.learn.task, job.learn.compute_s, job.learn.batch, job.learn.scale)
    if size := parse_size(job.model):
        return bare_profile(size, job.bytes_per_value)
    if job.model.endswith((".yaml", ".yml", ".json")):
        return read_profile(Path(job.model))
    return step_profile(job.model, job.gpu, job.gpu_precision, job.batch)


def training(
    simulation: Simulation, progress: Progress, skip_steps: Callable[[Progress], None] | None = None
) -> Process:
    """Run a job's steps, and record their durations in ``progress``.

    Parameters
    ----------
    skip_steps
        Called after each graph to skip steps; see `dlcp.sim.skipping`.
    """
    env, job = simulation.env, progress.job
    spec = job.spec
    parts = pieces_of(spec, progress.profile.layers)
    factors = computing_factors(simulation.scenario.seed, job)
    weights = spec.shard_weights(job.workers, simulation.topology)
    deferral = SimulatedDeferral(spec.deferral, job.workers, job.servers) if spec.deferral else None
    precision = _precision(simulation, job)
    learning = _learning(simulation, progress) if spec.learn else None
    phases = Phases() if spec.phases else None
    yield from simulation.until(job.start_s)
    began = before = int(env.now)
    first = 0
    while first < spec.steps:
        bounded = job
        if phases:
            # Graphs end where windows do, since their steps divide those of a window.
            bounded = replace(job, spec=msgspec.structs.replace(spec, loss_bound=phases.bound(spec.loss_bound)))
            progress.bounds += [bounded.spec.loss_bound] * len(factors[first : first + STEPS_PER_GRAPH])
        steps = step_graph(
            bounded,
            progress.profile,
            parts,
            factors[first : first + STEPS_PER_GRAPH],
            first,
            simulation.transports[spec.transport],
            weights=weights,
            watch_workers=precision is not None,
        )
        running = simulation.submit(steps.graph, label=(job.name, first), keeps_outcomes=learning is not None)
        if precision:
            precision.apply(simulation, running)
        if deferral:
            deferral.apply(simulation, running)
        for step, end, worker_ends in zip(itertools.count(first), steps.ends, steps.worker_ends):
            if precision:
                progress.bits.append(precision.bits)
                yield env.any_of([running.nodes[node] for node in worker_ends.tolist()])
                precision.learn(running, simulation.records(running), step)
                precision.apply(simulation, running)
                if deferral:
                    deferral.apply(simulation, running)
            yield running.nodes[end]
            progress.step_s.append((int(env.now) - before) / 1e12)
            before = int(env.now)
            if learning:
                outcome = _step_outcome(simulation, running, step, progress.bits[-1] if progress.bits else FULL_BITS)
                nodes, seconds = running.graph.nodes, (before - began) / 1e12
                norm = learning.finish_step(nodes, outcome, step, seconds, last=step + 1 == spec.steps)
                if phases:
                    phases.add(norm)
            if deferral:
                compute_s = progress.profile.compute_s * float(factors[step].max())
                deferral.learn(running, simulation.records(running), step, compute_s)
                deferral.apply(simulation, running)
        yield running.done
        if skip_steps:
            skip_steps(progress)
        first = len(progress.step_s)
    yield running.closed


def training_graph(job: PlacedJob, topology: NetworkTopology, transport: int, seed: int) -> Graph:
    """Return all steps of a job as one graph, without deferral and in full precision.

    Parameters
    ----------
    transport
        Number of the job's transport.
    seed
        Of the simulation, for the jitter.

    Raises
    ------
    ValueError
        See `profile_of`.
    """
    profile = profile_of(job.spec)
    weights = job.spec.shard_weights(job.workers, topology)
    factors = computing_factors(seed, job)
    return step_graph(job, profile, pieces_of(job.spec, profile.layers), factors, 0, transport, weights=weights).graph


def _precision(simulation: Simulation, job: PlacedJob) -> SimulatedPrecision | None:
    """Return what chooses the precision of a job's messages; None for full precision."""
    spec, transport = job.spec, simulation.scenario.transports[job.spec.transport]
    if spec.precision == FULL_BITS or not isinstance(transport, DlcpTransport):
        return None
    return SimulatedPrecision(
        spec.precision,
        spec.bytes_per_value,
        transport.packet_bytes - transport.header_bytes,
        job.workers,
        has_servers=bool(job.servers),
        error_feedback=transport.error_feedback,
    )


def _learning(simulation: Simulation, progress: Progress) -> SimulatedLearning:
    """Return the training of a job."""
    job, spec = progress.job, progress.job.spec
    assert spec.learn is not None
    trainer = TaskTrainer(spec.learn, spec.optimizer, spec.workers, spec.steps, simulation.scenario.seed)
    transport = simulation.scenario.transports[spec.transport]
    exchange = None
    lossy = isinstance(transport, DlcpTransport) and (spec.loss_bound > 0 or spec.precision != FULL_BITS)
    if lossy or spec.deferral:
        exchange = GradientExchange(
            trainer.sizes,
            spec.workers,
            value_bytes=spec.bytes_per_value,
            payload_bytes=transport.packet_bytes - transport.header_bytes,
            error_feedback=getattr(transport, "error_feedback", True),
        )
    return SimulatedLearning(spec.learn, trainer, job.workers, exchange, progress.curve)


def _step_outcome(simulation: Simulation, running: SubmittedGraph, step: int, bits: int) -> StepOutcome:
    """Return what has become of the messages of a step with ``bits`` bits per value."""
    lacking = simulation.outcomes(running, np.flatnonzero(running.graph.nodes["step"] == step))
    return StepOutcome(running.sizes, simulation.records(running)["packets"], bits, lacking)


def computing_factors(seed: int, job: PlacedJob) -> NDArray[np.float64]:
    """Return each worker's computing time relative to the profile, float64 (steps, workers)."""
    spec = job.spec
    random = random_of(seed, 3, job.number)
    # A log-normal distribution with mean 1 and standard deviation `jitter`.
    sigma = math.sqrt(math.log1p(spec.jitter**2))
    factors = random.lognormal(-(sigma**2) / 2, sigma, (spec.steps, spec.workers))
    for straggler in spec.stragglers:
        factors[:, straggler.worker] *= straggler.factor
    return factors
