# SPDX-License-Identifier: Apache-2.0
"""The task of the demo and of the simulator's convergence measurement: a convolutional network on handwritten digits.

The digits ship with scikit-learn.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

_TEST_IMAGES: Final = 360
BATCH_PER_WORKER: Final = 64


@dataclass(frozen=True, slots=True)
class DigitTensors:
    """Images of shape (n, 1, 8, 8), normalised to mean 0 and deviation 1, with labels, for training and for testing."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(seed: int) -> DigitTensors:
    """Return the 1,797 digits; the seed chooses 360 of them for testing."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = torch.tensor(data.images[order], dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(data.target[order])
    return DigitTensors(images[_TEST_IMAGES:], labels[_TEST_IMAGES:], images[:_TEST_IMAGES], labels[:_TEST_IMAGES])


def network(seed: int) -> nn.Module:
    """Return a network of 514,314 parameters, initialised from the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    inputs = 1
    for number, outputs in enumerate((32, 64, 128, 192), 1):
        model.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1))
        model.add_module(f"norm{number}", nn.GroupNorm(8, outputs))
        model.add_module(f"relu{number}", nn.ReLU())
        if number % 2 == 0:
            model.add_module(f"pool{number}", nn.MaxPool2d(2))
        inputs = outputs
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc1", nn.Linear(768, 256))
    model.add_module("relu5", nn.ReLU())
    model.add_module("fc2", nn.Linear(256, 10))
    return model


def batches(digits: DigitTensors, steps: int, rank: int, workers: int, seed: int) -> list[torch.Tensor]:
    """Return the indices of each step's batch on one rank. Batches of different ranks do not overlap in an epoch."""
    generator = np.random.default_rng([seed, 1])
    per_step = BATCH_PER_WORKER * workers
    chosen: list[torch.Tensor] = []
    while len(chosen) < steps:
        order = generator.permutation(len(digits.train_labels))
        for start in range(0, len(order) - per_step + 1, per_step):
            mine = start + rank * BATCH_PER_WORKER
            chosen.append(torch.from_numpy(order[mine : mine + BATCH_PER_WORKER]))
    return chosen[:steps]


def accuracy(model: nn.Module, digits: DigitTensors) -> tuple[float, float]:
    """Return the share of test images that ``model`` classifies correctly, and its loss on them."""
    with torch.no_grad():
        scores = model(digits.test_images)
        right = (scores.argmax(1) == digits.test_labels).float().mean()
        return right.item(), nn.functional.cross_entropy(scores, digits.test_labels).item()
