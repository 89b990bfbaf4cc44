# SPDX-License-Identifier: Apache-2.0
"""Training jobs: their description, their hosts, and how long their workers compute."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dlcp.convergence import COST_OF_PRECISION, curve
from dlcp.policies.slow_ports import weights_for_rates
from dlcp.sim.graphs.collectives import WITH_SERVERS, CollectiveName
from dlcp.sim.jobs.learning import TRAINED_MODEL, LearningSpec, TestedAccuracy
from dlcp.sim.jobs.models import (
    StepProfile,
    bare_profile,
    joined_layers,
    parse_size,
    read_profile,
    step_profile,
    task_profile,
)
from dlcp.sim.jobs.stage_planner import parse_replicas
from dlcp.sim.limits import FACTOR_MAX, HOSTS_MAX, STEPS_MAX, VALUES_MAX, Bytes, BytesOrNone, HostNumber, Hosts, Seconds
from dlcp.sim.network.nodes import NetworkTopology
from dlcp.sim.scenario import Placement, choose_hosts
from dlcp.sim.simulation import Simulation, StepTimes, random_of
from dlcp.values.planes import FULL_BITS

SchedulerName = Literal["fifo", "p3", "bytescheduler", "dlcp"]
Precision = Literal["auto", "fast", 32, 16, 8, 4]
"""As in `dlcp.policies.arms.PRECISIONS`."""
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

    worker: HostNumber
    factor: Annotated[float, Meta(ge=1, le=FACTOR_MAX)] = 2.0


class TrainingJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Data-parallel training of one network on its own workers.

    Parameters
    ----------
    model
        A name in `dlcp.sim.jobs.models.MODELS`, a profile file that ``dlcp sim profile`` has written, ``trained`` for
        the network of ``learn``, or a size such as ``350MB`` for that many bytes of gradients and no computing.
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
        How gradients are cut and ordered; see `dlcp.sim.jobs.training`.
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
    precision
        Bits of each value on the wire, for ``parameter_server`` and ``direct`` over DLCP's transport. ``auto``
        and ``fast`` choose the fastest, starting with the fewest bits (`dlcp.policies.arms`).
    pipeline
        Replicas of each stage of a pipeline, such as ``7-1``, or ``planned`` for the planner's choice
        (`dlcp.sim.jobs.stage_planner`); by default, every worker has the whole model.
    optimizer
        Selects the curve of additional steps that precision costs, which is measured for each optimizer. With
        ``learn``, also trains.
    learn
        A model to train with what the messages deliver (`dlcp.sim.jobs.learning`).
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
    batch: Annotated[int, Meta(ge=1, le=VALUES_MAX)] | None = None
    workers: Annotated[int, Meta(ge=2, le=HOSTS_MAX)] = 8
    servers: Annotated[int, Meta(ge=0, le=HOSTS_MAX)] = 0
    placement: Placement = "packed"
    copies: Hosts = 1
    collective: CollectiveName = "ring"
    group: Hosts = 8
    sharding: Literal["none", "fsdp"] = "none"
    reshard_after_forward: bool = True
    unit_bytes: BytesOrNone = 0
    scheduler: SchedulerName = "fifo"
    piece_bytes: Bytes | None = None
    sharded_bytes: Bytes = SHARDED_PIECE_BYTES
    layer_queues: bool = True
    magnitude_classes: bool = True
    transport: str = "dctcp"
    flows: Literal["shared", "own"] = "shared"
    bytes_per_value: Literal[1, 2, 4] = 4
    compression: Annotated[float, Meta(ge=1, le=FACTOR_MAX)] = 1.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    precision: Precision = FULL_BITS
    pipeline: str = ""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learn: LearningSpec | None = None
    steps: Annotated[int, Meta(ge=1, le=STEPS_MAX)] = 3
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stragglers: tuple[StragglerSpec, ...] = ()
    start_s: Seconds = 0.0
    stagger_s: Seconds = 0.0

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
        if self.precision != FULL_BITS and (
            self.collective not in ("parameter_server", "direct") or self.compression > 1
        ):
            raise ValueError(
                f"precision is for parameter_server and direct without compression; got precision {self.precision}, "
                f"collective {self.collective!r} and compression {self.compression:g}"
            )
        if self.pipeline:
            self._check_pipeline()
        self._check_sharding()
        self._check_learning()
        if any(straggler.worker >= self.workers for straggler in self.stragglers):
            raise ValueError(f"a straggler's rank is beyond the workers; choose from 0 to {self.workers - 1}")
        if len({straggler.worker for straggler in self.stragglers}) < len(self.stragglers):
            raise ValueError("stragglers names a worker twice; give each worker one factor")

    @property
    def sharded_group(self) -> int:
        """Return how many neighbours exchange directly with FSDP; 1 if all workers are a ring."""
        return self.group if self.collective == "hierarchical" else 1

    def shard_weights(self, hosts: Sequence[int], topology: NetworkTopology) -> tuple[float, ...]:
        """Return each worker's share of a buffer as an owner; empty if shares are equal.

        With ``direct``, workers with slow links own less (`dlcp.policies.slow_ports`), as real ranks do.
        """
        if self.collective != "direct" or self.pipeline:
            return ()
        rates: dict[int, float] = dict.fromkeys(hosts, 0.0)
        for link in topology.links:
            if link.target in rates:
                rates[link.target] = max(rates[link.target], link.spec.rate_gbps)
        return tuple(weights_for_rates(rates).values()) if len(set(rates.values())) > 1 else ()

    def _check_pipeline(self) -> None:
        if self.servers or self.precision != FULL_BITS:
            raise ValueError("a pipeline has no servers and precision 32; leave these out, or pipeline")
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
        elif (
            self.collective not in ("ring", "hierarchical")
            or self.scheduler not in ("fifo", "dlcp")
            or self.pipeline
            or self.piece_bytes
        ):
            raise ValueError(
                f"sharding {self.sharding} is for the collectives ring and hierarchical and the schedulers fifo and "
                f"dlcp, without pipeline and piece_bytes; got collective {self.collective!r}, scheduler "
                f"{self.scheduler!r}, pipeline {self.pipeline!r} and piece_bytes {self.piece_bytes}; change these, or "
                "leave out sharding"
            )

    def _check_learning(self) -> None:
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

    def slowest_step_s(self, profile: StepProfile) -> float:
        """Return the computing time of the slowest worker's step, without jitter."""
        return profile.compute_s * max((each.factor for each in self.stragglers), default=1.0)

    def precision_steps_factor(self, bits: int) -> float:
        """Return the factor on the number of steps if values have ``bits`` bits on the wire; noise below 1 is 1."""
        share = 1 - bits / FULL_BITS if bits < 8 * self.bytes_per_value else 0.0
        return max(1.0, curve(f"{COST_OF_PRECISION}_{self.optimizer}").steps_factor(share))


@dataclass(kw_only=True)
class PlacedJob(StepTimes):
    """A copy of a job on its hosts, and how far it is. A step includes the forward pass after it.

    Parameters
    ----------
    number
        Its number among all jobs of the experiment.

    Attributes
    ----------
    skipped
        Steps that were not simulated.
    skipped_ps
        How much later a moment of the job is than the engine's time: what this job and others have skipped.
    bits
        Bits per value of each step; empty in full precision.
    minibatches
        Minibatches that all workers together compute in the simulated steps.
    pipeline
        Replicas of each stage; empty if each worker has the whole model.
    curve
        Tests of the model that a job with ``learn`` trains.
    """

    spec: TrainingJob
    number: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    start_s: float
    bits: list[int] = field(default_factory=list)
    skipped: int = 0
    skipped_ps: int = 0
    minibatches: int = 0
    pipeline: str = ""
    curve: list[TestedAccuracy] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Count a minibatch per worker and step."""
        self.steps = self.spec.steps
        self.minibatches = self.steps * len(self.workers)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Return the hosts of workers and servers."""
        return self.workers + self.servers

    @cached_property
    def profile(self) -> StepProfile:
        """The computing times of its workers; see `profile_of`."""
        return profile_of(self.spec)

    @property
    def compute_s(self) -> float:
        """Return the computing time of a step."""
        return self.profile.compute_s

    def begin(self, simulation: Simulation) -> None:
        """Note that the job begins now."""
        self.begin_ps, self.skipped_ps = simulation.now_ps, simulation.skipped_ps

    def end_step(self, simulation: Simulation) -> None:
        """Note that a step ends now."""
        self.end_ps.append(int(simulation.env.now) + self.skipped_ps)

    def skip(self, count: int, window: int) -> None:
        """Add ``count`` steps that are like the last ``window`` ones, in turn."""
        times = np.diff([self.begin_ps, *self.end_ps][-window - 1 :])
        ends = self.end_ps[-1] + np.cumsum(np.resize(times, count))
        self.skipped_ps += int(ends[-1]) - self.end_ps[-1]
        self.end_ps += ends.tolist()
        if self.bits:
            self.bits += np.resize(self.bits[-window:], count).tolist()
        self.skipped += count
        self.minibatches -= count * len(self.workers)


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
                    spec=job,
                    name=job.name if job.copies == 1 else f"{job.name}{copy}",
                    number=len(placed),
                    workers=tuple(host for index, host in enumerate(taken) if index not in at),
                    servers=tuple(host for index, host in enumerate(taken) if index in at),
                    start_s=job.start_s + copy * job.stagger_s,
                )
            )
    return placed


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
