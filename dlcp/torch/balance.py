# SPDX-License-Identifier: Apache-2.0
"""Batches for ranks of unequal speed: measured, agreed by all ranks, and drawn from a data set."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

TIMINGS = 5
"""Timed passes: the median of five ignores two outliers."""


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


def divide_batch(samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide a global batch among ranks in proportion to their speeds.

    Each rank gets at least one sample. After rounding down, the rest goes to the largest remainders, ties to lower
    ranks. The result depends on the arguments only, so all ranks can compute it by themselves.

    Parameters
    ----------
    samples
        Samples of all ranks in a step.
    speeds
        Speed of each rank, in samples per second or any other unit.

    Raises
    ------
    ValueError
        A speed is not above 0, or there are fewer samples than ranks.
    """
    rates = np.array(speeds, float)
    if not len(rates) or not np.isfinite(rates).all() or (rates <= 0).any():
        raise ValueError(f"speeds must be above 0, got {list(speeds)}")
    if samples < len(rates):
        raise ValueError(f"a batch of {samples} has no sample for each of {len(rates)} ranks")
    wanted = samples * rates / rates.sum()
    sizes = np.floor(wanted).astype(int)
    for rank in np.argsort(sizes - wanted, kind="stable")[: samples - sizes.sum()]:
        sizes[rank] += 1
    while (sizes == 0).any():
        sizes[np.argmax(sizes)] -= 1
        sizes[np.argmin(sizes)] += 1
    return [int(size) for size in sizes]


class BalancedBatches:
    """A batch sampler for PyTorch with a different batch size on each rank; yields the indices of one rank's batches.

    All ranks have the same number of batches. Each epoch shuffles the data anew and cuts it into global batches, of
    which each rank takes its part. A smaller rest at the end is divided in the same proportions.

    Parameters
    ----------
    size
        Number of samples in the data.
    sizes
        Each rank's batch size, the same list on all ranks, as :func:`divide_batch` returns it.
    rank
        This rank.
    seed
        Seed of the order, the same on all ranks.
    drop_last
        Leave out the rest that is less than a global batch. A rest with fewer samples than ranks is always left out,
        because some rank's batch would be empty.
    """

    def __init__(self, size: int, sizes: Sequence[int], rank: int, *, seed: int = 0, drop_last: bool = False) -> None:
        if not 0 <= rank < len(sizes) or min(sizes) < 1 or size < len(sizes):
            raise ValueError(
                f"rank {rank}, batches {list(sizes)}, {size} samples: the rank needs a batch size, all sizes must be "
                "at least 1, and there must be a sample per rank"
            )
        self.size, self.sizes, self.rank, self.seed, self.drop_last = size, list(sizes), rank, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order, as with PyTorch's ``DistributedSampler``."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        whole, left = divmod(self.size, sum(self.sizes))
        return whole + (left >= len(self.sizes) and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each of this rank's batches."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        total = sum(self.sizes)
        for first in range(0, len(self) * total, total):
            batch = order[first : first + total]
            sizes = self.sizes if len(batch) == total else divide_batch(len(batch), self.sizes)
            start = sum(sizes[: self.rank])
            yield [int(index) for index in batch[start : start + sizes[self.rank]]]
