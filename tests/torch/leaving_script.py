# SPDX-License-Identifier: Apache-2.0
"""A rank that trains for some steps and ends without closing anything: ``WAY ENDING STEPS``."""

import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.session
import dlcp.torch
from dlcp.session import Options, training_session
from dlcp.torch.framework import GlooWatch
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints

Endpoint.__init__ = lossy_endpoints(0.1)
way, ending, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
rank = int(os.environ["RANK"])
data = torch.full((8, 64), 1.0 + rank)


def model():
    return nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 1))


def train(model, optimizer):
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def ask_a_late_store(watch, where):
    for _ in range(20):
        with contextlib.suppress(RuntimeError):  # it says that time is up
            watch._agreement.store.wait(["never set"], timedelta(seconds=0.1))


if ending == "watching":
    training_session.WATCH_S, GlooWatch.check_peers = 0.0, ask_a_late_store

if way == "group":
    import numpy as np

    group = dlcp.session.join(Options.from_environment())
    group.register(["weight"])
    for _ in range(steps):
        group.average({"weight": np.full(30_000, 1.0 + rank, np.float32)})
else:
    dist.init_process_group("dlcp" if way == "backend" else "gloo")
    plain = model()
    if way == "cross_step":
        optimizer = dlcp.torch.cross_step(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        train(plain, optimizer)
        optimizer.synchronize()
    elif way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(plain)
        state = dlcp.torch.enable(plain)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    elif way == "ddp":
        plain = DistributedDataParallel(plain)
        state = dlcp.torch.enable(plain)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    else:
        for _ in range(steps):
            dist.all_reduce(torch.full((30_000,), 1.0))
    if ending == "raised in finally" and rank == 2:
        try:
            raise ValueError("label 11 is not a class")
        finally:
            dist.destroy_process_group()
    if ending == "destroyed":
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)
if ending == "raised" and rank == 2:
    raise ValueError("label 11 is not a class")
