# SPDX-License-Identifier: Apache-2.0
"""Batches for ranks of unequal speed: measured, agreed upon by all ranks, and drawn from a data set."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from dlcp.tuning.batches import BalancedBatches, divide_batch

__all__ = ["BalancedBatches", "balanced_batches", "samples_per_s"]

TIMINGS = 5
"""How often work is timed. Chosen by us: the median of so many passes over a hiccup or two."""


def samples_per_s(work: Callable[[], object], samples: int) -> float:
    """Return how many samples a second this rank takes: the median of some passes, after one that does not count.

    Parameters
    ----------
    work
        A forward and backward pass on one batch, on the plain module: a DistributedDataParallel would wait for others.
    samples
        Of that batch. It should be about as large as those to come, for small ones are slower by the sample.

    Raises
    ------
    ValueError
        There are no samples.
    """
    if samples < 1:
        raise ValueError(f"a batch to measure with needs samples, got {samples}")
    seconds = [_time_s(work) for _ in range(1 + TIMINGS)]
    return samples / median(seconds[1:])


def balanced_batches(samples: int, speed: float, group: dist.ProcessGroup | None = None) -> list[int]:
    """Divide a global batch among ranks in proportion to their speeds; all ranks call it, and get the same list.

    Parameters
    ----------
    samples
        Of all ranks in a step; the same on all.
    speed
        Of this rank, as :func:`samples_per_s` tells it.

    Returns
    -------
    Each rank's batch size, by its rank in the group: for ``Options(samples=...)`` and :class:`BalancedBatches`.

    Raises
    ------
    ValueError
        A rank's speed is not above 0, or there are fewer samples than ranks; on all ranks.
    """
    speeds: list[float | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(speeds, speed, group=group)
    return divide_batch(samples, [float(each or 0.0) for each in speeds])


def _time_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
