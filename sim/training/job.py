# SPDX-License-Identifier: Apache-2.0
"""A training job as somebody describes it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]

Collective = Literal["parameter_server", "ring", "direct", "halving_doubling", "tree", "hierarchical"]
SchedulerName = Literal["fifo", "p3", "bytescheduler", "dlcp"]
Placement = Literal["packed", "spread", "random"]


class StragglerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker that computes more slowly.

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
        A name in `dlcp.sim.models.throughput.NETWORKS`, or the file of a profile that ``dlcp sim profile`` has written.
    gpu, precision
        Whose published throughput gives the computing time; a profile of one's own has times of its own.
    batch
        Samples of a worker in a step; the published one if it is not given.
    workers, servers
        How many hosts compute, and how many more hold parameters; ``servers`` is for ``parameter_server`` alone.
    placement
        Which hosts: the next free ones, every n-th of the free ones, or at random.
    copies
        How many such jobs run side by side, each on hosts of its own.
    collective
        How gradients are summed and results come back. ``hierarchical`` sums within ``group`` neighbours first.
    scheduler
        In which pieces and in which order gradients are sent; see `dlcp.sim.training.schedulers`.
    piece_bytes
        The most bytes of a piece; the scheduler's own if it is not given.
    transport
        By the experiment's name for it.
    bytes_per_value
        Of a gradient on the wire.
    flows
        ``shared``: messages between two hosts share a connection (one per queue with ``dlcp``) and go in the
        scheduler's order. ``own``: every message is a flow of its own that begins when it is ready, as in simulations
        of flow completion; then hosts have no order.
    compression
        How many times smaller a compressor makes gradients, as a baseline. It costs no computing time here, which
        flatters it.
    loss_bound
        The share of a message's packets on its way to be summed that may be lost, with a transport that bounds loss.
        What comes back is always delivered whole.
    layer_queues
        Whether ``dlcp`` puts front layers into more urgent queues of switches; otherwise all go in the transport's.
    magnitude_classes
        Whether ``dlcp`` gives packets drop classes by layer and magnitude; otherwise all are of class 1.
    jitter
        Standard deviation of a worker's computing time in a step over its mean, log-normal.
    stagger_s
        Every copy starts this much after the one before.
    """

    name: str
    model: str = "resnet50"
    gpu: str = "v100"
    precision: Literal["single", "mixed"] = "mixed"
    batch: Count | None = None
    workers: Annotated[int, Meta(ge=2)] = 8
    servers: Annotated[int, Meta(ge=0)] = 0
    placement: Placement = "packed"
    copies: Count = 1
    collective: Collective = "ring"
    group: Count = 8
    scheduler: SchedulerName = "fifo"
    piece_bytes: Count | None = None
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
    start_s: Seconds = 0.0
    stagger_s: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
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
