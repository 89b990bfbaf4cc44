# SPDX-License-Identifier: Apache-2.0
"""Training by ranks with batches of different sizes, and the same by one process with the whole batches."""

import contextlib

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from tests.torch.ddp_models import BUCKET_MB, Net

SIZES = [(6, 18), (6, 18), (12, 12), (0, 24), (5, 3), (6, 18)]
"""Samples of each rank in each step."""


def net():
    torch.manual_seed(7)
    return Net()


def global_batch(step):
    rng = np.random.default_rng(step)
    count = sum(SIZES[step])
    images = torch.from_numpy(rng.standard_normal((count, 1, 8, 8)).astype(np.float32))
    return images, torch.from_numpy(rng.integers(0, 10, count))


def part_of(step, rank):
    images, labels = global_batch(step)
    start = sum(SIZES[step][:rank])
    mine = slice(start, start + SIZES[step][rank])
    return images[mine], labels[mine]


def by_one():
    """Return the parameters after training with whole batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(len(SIZES)):
        optimizer.zero_grad()
        images, labels = global_batch(step)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def by_ranks(worker, fields, tell, broken_at):
    """Train on this rank; return its parameters, and who averaged in the end."""
    model = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    fields = {name: worker.rank if value == "rank" else value for name, value in fields.items()}
    options = worker.options(**{"precision": 32} | fields, samples=SIZES[0][worker.rank])
    state = dlcp.torch.enable(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(len(SIZES)):
        optimizer.zero_grad()
        images, labels = part_of(step, worker.rank)
        if broken_at == step and worker.rank == 1:
            state.endpoint.close("broken on purpose")
        if tell and SIZES[step] != SIZES[step - 1]:
            state.samples(len(images))
        with np.errstate(invalid="ignore"), contextlib.suppress(UserWarning):
            nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    active, reason, lost = state.active, state.reason, state.ledger.summary()["lost"]
    state.close()
    return [parameter.detach().numpy() for parameter in model.module.parameters()], active, reason, lost
