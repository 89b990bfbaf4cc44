# SPDX-License-Identifier: Apache-2.0
"""The digits example in four frameworks; see README.md beside this file. Here are its data and common options."""

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_TEST_IMAGES = 600


@dataclass(frozen=True, slots=True)
class Digits:
    """Grey images, float32 of shape (n, 8, 8, 1) in 0..1, with their labels, int32 of shape (n,)."""

    images: NDArray[np.float32]
    labels: NDArray[np.int32]

    def shard(self, rank: int, size: int) -> "Digits":
        """Return a rank's part; all parts have the same size."""
        count = len(self.labels) // size * size
        return Digits(self.images[rank:count:size], self.labels[rank:count:size])


def load() -> tuple[Digits, Digits]:
    """Return 1,197 digits for training and 600 for testing, the same in every process."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, np.newaxis] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return Digits(images[_TEST_IMAGES:], labels[_TEST_IMAGES:]), Digits(images[:_TEST_IMAGES], labels[:_TEST_IMAGES])


def parser(framework: str, rate: float) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have; ``rate`` is the default learning rate."""
    parser = argparse.ArgumentParser(description=f"Handwritten digits with {framework}")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=rate, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    return parser
