# SPDX-License-Identifier: Apache-2.0
"""Batches in proportion to speed: ranks that are unequally fast are done at the same time."""

from collections.abc import Iterator, Sequence

import numpy as np


def divide_batch(samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide a global batch among ranks in proportion to their speeds.

    Each rank has at least one sample. What is left after rounding down goes to those who lose most by it (the method of
    the largest remainders), of equals to the first. So all ranks that know the same speeds divide alike.

    Parameters
    ----------
    samples
        Samples of all ranks in a step.
    speeds
        Of each rank, in samples a second or any other unit.

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
    """The indices of one rank's batches where ranks have batches of different sizes: a batch sampler of PyTorch's kind.

    All ranks have the same number of batches. Each epoch goes through the data in an order of its own, in global
    batches of which each rank takes its part; what is left in the end, less than a global batch, is divided likewise.

    Parameters
    ----------
    size
        How many samples there are.
    sizes
        Each rank's batch size, the same list on all ranks, as :func:`divide_batch` returns it.
    rank
        This rank.
    seed
        Of the order, the same on all ranks.
    drop_last
        Leave out what is less than a global batch. Else a rank may have an empty batch in the last step, if there are
        fewer samples than ranks left; then those are left out anyway.
    """

    def __init__(self, size: int, sizes: Sequence[int], rank: int, *, seed: int = 0, drop_last: bool = False) -> None:
        if not 0 <= rank < len(sizes) or min(sizes) < 1 or size < len(sizes):
            raise ValueError(f"rank {rank} of batches {list(sizes)} of {size} samples: not possible")
        self.size, self.sizes, self.rank, self.seed, self.drop_last = size, list(sizes), rank, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch to come, as with PyTorch's ``DistributedSampler``."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
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
