# SPDX-License-Identifier: Apache-2.0
"""A model with gradients of one's choosing, trained in a worker; the exact averages are known on every rank."""

import hashlib
import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES = (40_000, 20_000, 3_000)
BUCKET_MB = 0.08


class Wanted(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, sizes=SIZES, dtype=torch.float32):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes)

    def forward(self, wanted):
        return sum((part * values).sum() for part, values in zip(self.parts, wanted, strict=True))


def gradient(rank, step, sizes=SIZES):
    rng = np.random.default_rng([rank, step])
    return [torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for size in sizes]


def exact_average(ranks, step):
    return [sum(parts) / ranks for parts in zip(*(gradient(rank, step) for rank in range(ranks)), strict=True)]


class Said(logging.Handler):
    """DLCP's log lines in this process."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logging.getLogger("dlcp").addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())

    def take(self):
        messages, self.messages = self.messages, []
        return messages


@dataclass
class Training:
    """The outcome on one rank."""

    error_max: float = 0.0
    same_on_all: bool = True
    active: list = field(default_factory=list)
    said: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    missing: float = 0.0
    summary: dict = field(default_factory=dict)
    reason: str = ""
    payload_bytes: int = 0


def digest(gradients):
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in gradients)).hexdigest()


def train(worker, options, steps, *, before_step=lambda step, state: None, enable=True, said=None):
    """Train, and compare every step's gradients with the exact average and with those of the other ranks."""
    import dlcp.torch

    said = said or Said()
    said.take()
    ranks = worker.count
    model = DistributedDataParallel(Wanted(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, options) if enable else None
    result = Training()
    if state and state.endpoint:
        result.payload_bytes = state.endpoint.connection.options.payload_bytes
    taken, given = [0.0] * len(SIZES), [0.0] * len(SIZES)
    for step in range(steps):
        before_step(step, state)
        model.zero_grad()
        began_s = time.monotonic()
        model(gradient(worker.rank, step)).backward()
        result.seconds.append(round(time.monotonic() - began_s, 3))
        got = [part.grad.clone() for part in model.module.parts]
        exact = exact_average(ranks, step)
        result.error_max = max(
            [result.error_max, *(float((a - b).abs().max()) for a, b in zip(got, exact, strict=True))]
        )
        taken = [a + b for a, b in zip(taken, got, strict=True)]
        given = [a + b for a, b in zip(given, exact, strict=True)]
        digests = [None] * ranks
        dist.all_gather_object(digests, digest(got))
        result.same_on_all &= len(set(digests)) == 1
        result.active.append(bool(state and state.active))
    if state:
        if state.endpoint:
            result.missing = missing(ranks, state, taken, given)
        result.summary = state.ledger.summary()
        result.reason = state.reason
        state.close()
    result.said = said.take()
    return result


def missing(ranks, state, taken, given):
    """How much of the gradients is neither in what was taken nor owed by any rank: nothing, up to rounding."""
    owed = [np.zeros(size) for size in SIZES]
    for index in range(len(SIZES)):
        mine = state.feedback.of(f"parts.{index}")
        if mine is not None:
            owed[index] += mine
    everyone = [None] * ranks
    dist.all_gather_object(everyone, owed)
    return max(
        float(np.abs(taken[i].numpy() * ranks + sum(owed[i] for owed in everyone) - given[i].numpy() * ranks).max())
        for i in range(len(SIZES))
    )
