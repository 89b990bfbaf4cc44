# SPDX-License-Identifier: Apache-2.0
"""Batches for ranks of unequal speed: measured, agreed by all ranks, and drawn from a data set."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from dlcp.tuning.batches import BalancedBatches, divide_batch

__all__ = ["BalancedBatches", "balanced_batches", "samples_per_s"]

TIMINGS = 5
"""How often work is timed: the median of this many passes ignores a hiccup or two."""


def samples_per_s(work: Callable[[], object], samples: int) -> float:
    """Measure how many samples per second this rank processes: the median of several passes after a warm-up.

    Parameters
    ----------
    work
        A forward and backward pass on one batch, on the plain module: DistributedDataParallel would wait for others.
    samples
        Number of samples in that batch. Use about the later batch size: small batches are slower per sample.

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
        Samples of all ranks in a step; the same on all.
    speed
        This rank's speed, from :func:`samples_per_s`.

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
