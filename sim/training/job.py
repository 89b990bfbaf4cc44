# SPDX-License-Identifier: Apache-2.0
"""Training jobs as an experiment describes them, and the hosts that each gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from dlcp.sim.collectives import CollectiveName

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]
SchedulerName = Literal["fifo", "p3", "bytescheduler", "dlcp"]


class StragglerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker that is slower than the others.

    Parameters
    ----------
    worker
        Its rank.
    factor
        How many times as long it computes.
    """

    worker: Annotated[int, Meta(ge=0)]
    factor: Annotated[float, Meta(ge=1)] = 2.0


class TrainingJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Data-parallel training of one network on workers of their own.

    Parameters
    ----------
    model
        A name in `dlcp.sim.models.architectures.MODELS`, or a profile that ``dlcp sim profile`` has written.
    gpu, precision
        Whose published throughput gives the computing time. A profile has times of its own.
    batch
        Samples of a worker in a step; by default that of the published throughput.
    workers, servers
        How many hosts compute, and how many more hold parameters, for ``parameter_server``.
    placement
        Which hosts: the next free ones, every n-th free one, or random ones.
    copies
        How many such jobs run at once, each on hosts of its own.
    collective
        How gradients are reduced. ``hierarchical`` reduces within ``group`` adjacent workers first.
    scheduler
        In which pieces and in which order gradients are sent; see `dlcp.sim.training.schedulers`.
    piece_bytes
        The most bytes of a piece; by default the scheduler's own.
    transport
        Its name in the experiment.
    bytes_per_value
        Of a gradient on the wire.
    flows
        ``shared``: messages between two hosts share a connection (one per queue with ``dlcp``) and go in the
        scheduler's order. ``own``: every message is a flow of its own that begins when it is ready, in no order, as in
        simulations of flow completion.
    compression
        How many times smaller a compressor makes gradients, as a baseline. It costs no computing time here, which
        favours it.
    loss_bound
        The share of a contribution's packets that may be lost, with a transport that bounds loss. Results are always
        delivered whole.
    layer_queues
        Whether ``dlcp`` puts front layers into more urgent queues; otherwise all go into the transport's.
    magnitude_classes
        Whether ``dlcp`` gives packets drop classes by layer and magnitude; otherwise all are of class 1.
    jitter
        Standard deviation of a worker's computing time in a step, relative to its mean; log-normal.
    stagger_s
        Each copy starts so much after the one before.
    """

    name: str
    model: str = "resnet50"
    gpu: str = "v100"
    precision: Literal["single", "mixed"] = "mixed"
    batch: _Count | None = None
    workers: Annotated[int, Meta(ge=2)] = 8
    servers: Annotated[int, Meta(ge=0)] = 0
    placement: Literal["packed", "spread", "random"] = "packed"
    copies: _Count = 1
    collective: CollectiveName = "ring"
    group: _Count = 8
    scheduler: SchedulerName = "fifo"
    piece_bytes: _Count | None = None
    layer_queues: bool = True
    magnitude_classes: bool = True
    transport: str = "dctcp"
    flows: Literal["shared", "own"] = "shared"
    bytes_per_value: Literal[1, 2, 4] = 4
    compression: Annotated[float, Meta(ge=1)] = 1.0
    loss_bound: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    steps: Annotated[int, Meta(ge=1, le=1000)] = 3
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stragglers: tuple[StragglerSpec, ...] = ()
    start_s: _Seconds = 0.0
    stagger_s: _Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if (self.collective == "parameter_server") != bool(self.servers):
            raise ValueError(
                f"servers is {self.servers} and collective is {self.collective!r}: servers are for parameter_server, "
                "which needs at least one"
            )
        if self.collective == "halving_doubling" and self.workers & (self.workers - 1):
            raise ValueError(f"halving_doubling needs a power of two of workers, got {self.workers}")
        if self.collective == "hierarchical" and self.workers % self.group:
            raise ValueError(f"hierarchical: {self.workers} workers do not fill groups of {self.group}")
        if any(straggler.worker >= self.workers for straggler in self.stragglers):
            raise ValueError(f"a straggler's rank lies beyond the {self.workers} workers, 0 to {self.workers - 1}")


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A copy of a job with its hosts.

    Parameters
    ----------
    name
        Of this copy.
    number
        Among all jobs of the experiment.
    """

    spec: TrainingJob
    name: str
    number: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    start_s: float


def place_jobs(jobs: Sequence[TrainingJob], hosts: int, seed: int) -> list[PlacedJob]:
    """Give every copy of every job hosts of its own.

    Servers are spread among the workers, so that they are not all at the same switch.

    Raises
    ------
    ValueError
        There are not enough hosts.
    """
    needed = sum((job.workers + job.servers) * job.copies for job in jobs)
    if needed > hosts:
        raise ValueError(f"the jobs need {needed} hosts and the topology has {hosts}")
    free = list(range(hosts))
    placed: list[PlacedJob] = []
    for job in jobs:
        for copy in range(job.copies):
            size = job.workers + job.servers
            taken = _choose(free, size, job, np.random.default_rng([seed, 0x91ACE, len(placed)]))
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


def _choose(free: list[int], size: int, job: TrainingJob, random: np.random.Generator) -> list[int]:
    if job.placement == "packed":
        return free[:size]
    if job.placement == "spread":
        return [free[index * len(free) // size] for index in range(size)]
    return [free[int(index)] for index in random.permutation(len(free))[:size]]
