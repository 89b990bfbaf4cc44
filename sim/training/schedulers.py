# SPDX-License-Identifier: Apache-2.0
"""In which pieces gradients are sent, when each may go, and which goes first.

``fifo``
    PyTorch's DistributedDataParallel: buckets of 25 MB, filled from the output layer on, sent as they are ready; the
    next forward pass waits for all of them.
``p3``
    Jayarajan et al., MLSys 2019: slices of 50,000 values, those of front layers first; each layer of the next forward
    pass waits for its own slices only.
``bytescheduler``
    Peng et al., SOSP 2019: the same. They search for the size of partitions at run time; 0.5 MB here, the best of four
    in `sim/experiments/tuning.yaml`.
``dlcp``
    The same order at hosts, and in switches too: front layers in more urgent queues. Pieces are of 1 MB, chosen by us:
    a message of some hundred packets, so that a share of it can be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from dlcp.sim.models.profile import TimedLayer
from dlcp.sim.training.job import SchedulerName, TrainingJob

from dlcp.tags import BACK_SHARES, FRONT_SHARES, queue_of_layer

BUCKET_BYTES: Final = 25 * 2**20
"""``bucket_cap_mb`` of DistributedDataParallel."""
PIECE_BYTES: Final[dict[SchedulerName, int]] = {
    "fifo": BUCKET_BYTES,
    "p3": 200_000,
    "bytescheduler": 500_000,
    "dlcp": 1_000_000,
}
UNBOUNDED_CLASS: Final = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Shares of drop classes where magnitude does not matter: everything is dropped alike, at the highest threshold."""
ALIKE: Final = 256
"""Number of that distribution; below it are those of layers, by position."""
_SHARDED: Final = ("ring", "direct", "halving_doubling", "hierarchical")


def piece_limit(job: TrainingJob) -> int:
    """Return the most bytes of a job's pieces.

    Where a piece is cut into a shard per worker it may be as many times larger, up to a bucket of ``fifo``.
    """
    if job.piece_bytes is not None:
        return job.piece_bytes
    most = PIECE_BYTES[job.scheduler]
    return min(BUCKET_BYTES, most * job.workers) if job.collective in _SHARDED else most


@dataclass(frozen=True, slots=True)
class Piece:
    """Gradients that travel as one message per pair of hosts.

    Parameters
    ----------
    ready
        The layer whose backward pass has to be over: the front-most of the piece.
    layers
        Layers of the next forward pass that wait for it.
    order
        Smaller goes first at a host.
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
) -> list[Piece]:
    """Return the pieces of a step, in the order in which backward makes them ready.

    Parameters
    ----------
    bytes_per_value
        After compression.
    most
        The most bytes of a piece.
    layer_queues, magnitude_classes
        What ``dlcp`` tells switches; see `dlcp.sim.training.job.TrainingJob`.
    """
    sizes = [round(layer.parameters * bytes_per_value) for layer in layers]
    if scheduler == "fifo":
        return _buckets(sizes, most)
    found: list[Piece] = []
    for index in reversed(range(len(layers))):
        position = round(255 * index / max(1, len(layers) - 1))
        queue, shares = -1, -1
        if scheduler == "dlcp":
            queue = int(queue_of_layer(np.array([position], np.uint8))[0]) if layer_queues else -1
            shares = position if magnitude_classes else ALIKE
        found += [Piece(size, index, (index,), index, queue, shares) for size in _cut(sizes[index], most)]
    return found


def class_shares() -> tuple[tuple[float, ...], ...]:
    """Return the shares of drop classes 0 to 7 by layer position, 0 first, as `dlcp.tags` has them; then `ALIKE`'s."""
    return (
        *(
            tuple(
                (1 - at / 255) * front + at / 255 * back for front, back in zip(FRONT_SHARES, BACK_SHARES, strict=True)
            )
            for at in range(ALIKE)
        ),
        UNBOUNDED_CLASS,
    )


def _buckets(sizes: Sequence[int], most: int) -> list[Piece]:
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
        Piece(sum(sizes[layer] for layer in bucket), bucket[-1], every[:1], 0, -1, -1) for bucket in buckets if bucket
    ]


def _cut(size: int, most: int) -> list[int]:
    """Return ``size`` in as few pieces as can be, as equal as can be."""
    count = -(-size // most)
    return [size // count + (index < size % count) for index in range(count)]
