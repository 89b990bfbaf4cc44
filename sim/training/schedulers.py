# SPDX-License-Identifier: Apache-2.0
"""Schedulers: in which pieces gradients are sent, when each may go, and which goes first.

``fifo``
    PyTorch's DistributedDataParallel: buckets of 25 MB, filled from the output layer on and sent as they become ready;
    the next forward pass waits for all of them.
``p3``
    Jayarajan et al., MLSys 2019: slices of 50,000 values, those of front layers first; each layer of the next forward
    pass waits only for its own slices.
``bytescheduler``
    Peng et al., SOSP 2019: the same order. Its authors search for the size of partitions at run time; here they are of
    0.5 MB, the best of four in `sim/experiments/tuning.yaml`.
``dlcp``
    The same order at hosts, and in switches too, where front layers have more urgent queues. Pieces are of 1 MB, chosen
    by us: messages of some hundred packets, so that a share of each can be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dlcp.sim.models.profiles import TimedLayer
from dlcp.sim.training.job import SchedulerName, TrainingJob
from dlcp.tags import BACK_SHARES, FRONT_SHARES, queue_of_layer

DDP_BUCKET_BYTES: Final = 25 * 2**20
"""``bucket_cap_mb`` of DistributedDataParallel."""
SCHEDULER_PIECE_BYTES: Final[dict[SchedulerName, int]] = {
    "fifo": DDP_BUCKET_BYTES,
    "p3": 200_000,
    "bytescheduler": 500_000,
    "dlcp": 1_000_000,
}
UNIFORM_SHARES: Final = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Shares of drop classes where magnitude does not matter: all packets are in the class with the highest threshold."""
UNIFORM_PROFILE: Final = 256
"""Number of that distribution in `class_shares`; below it are those of layers, by position."""
_SHARDED: Final = ("ring", "direct", "halving_doubling", "hierarchical")


def piece_limit(job: TrainingJob) -> int:
    """Return the most bytes of a job's pieces.

    A piece that is cut into a shard per worker may be as many times larger, up to a bucket of ``fifo``.
    """
    if job.piece_bytes is not None:
        return job.piece_bytes
    most = SCHEDULER_PIECE_BYTES[job.scheduler]
    return min(DDP_BUCKET_BYTES, most * job.workers) if job.collective in _SHARDED else most


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """Gradients that are reduced together.

    Parameters
    ----------
    ready
        The layer whose backward pass has to be over: the front-most of the piece.
    layers
        Layers of the next forward pass that wait for the piece.
    order
        Hosts send pieces of a smaller order first.
    queue
        In switches, 7 the most urgent; -1 takes the transport's.
    shares
        Number of the distribution of drop classes in `class_shares`, or -1.
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
        After compression.
    most
        The most bytes of a piece.
    layer_queues, magnitude_classes
        See `dlcp.sim.training.job.TrainingJob`.
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


def class_shares() -> tuple[tuple[float, ...], ...]:
    """Return the shares of drop classes 0 to 7: those of `dlcp.tags` by layer position, then `UNIFORM_SHARES`."""
    return (
        *(
            tuple(
                (1 - at / 255) * front + at / 255 * back for front, back in zip(FRONT_SHARES, BACK_SHARES, strict=True)
            )
            for at in range(UNIFORM_PROFILE)
        ),
        UNIFORM_SHARES,
    )


def _buckets(sizes: Sequence[int], most: int) -> list[GradientPiece]:
    """Collect layers from the last one on, and begin a new bucket when one is full."""
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
    """Return ``size`` in as few pieces as can be, as equal as can be."""
    count = -(-size // most)
    return [size // count + (index < size % count) for index in range(count)]
