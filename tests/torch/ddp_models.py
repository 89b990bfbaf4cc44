# SPDX-License-Identifier: Apache-2.0
"""Models to train with DistributedDataParallel, and their data."""

import numpy as np
import torch
from torch import nn

from dlcp.values.tags import TagPolicy

BUCKET_MB = 0.05
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


class Net(nn.Module):
    """A convolution, a norm and two linear layers: large and small parameters, 43,470 in all."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 36, 140)
        self.head = nn.Linear(140, 10)

    def forward(self, images):
        return self.head(torch.relu(self.hidden(torch.relu(self.norm(self.conv(images))).flatten(1))))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def make(dtype=torch.float32, freeze=()):
    torch.manual_seed(7)
    net = Net().to(dtype)
    for name, parameter in net.named_parameters():
        parameter.requires_grad = not name.startswith(freeze) if freeze else True
    return net


def batch(rank, step, dtype=torch.float32):
    rng = np.random.default_rng([rank, step])
    images = torch.from_numpy(rng.standard_normal((12, 1, 8, 8))).to(dtype)
    return images, torch.from_numpy(rng.integers(0, 10, 12))


def train(model, optimizer, rank, steps, *, dtype=torch.float32, accumulate=1):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            images, labels = batch(rank, step * accumulate + part, dtype)
            if part < accumulate - 1:
                with model.no_sync():
                    nn.functional.cross_entropy(model(images), labels).backward()
            else:
                nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def assert_same_bits(plain, ours):
    for name in plain:
        assert torch.equal(plain[name], ours[name]), f"{name} differs by {(plain[name] - ours[name]).abs().max()}"


class Linear(nn.Module):
    """A model whose gradients are whatever one likes: the loss is the sum of parameter times wanted gradient."""

    def __init__(self, size=60_000):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size))
        self.last = nn.Parameter(torch.zeros(size // 2))

    def forward(self, first, last):
        return (self.first * first).sum() + (self.last * last).sum()


def gradients_of(rank):
    rng = np.random.default_rng(rank)
    return [torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for size in (60_000, 30_000)]
