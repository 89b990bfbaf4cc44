# SPDX-License-Identifier: Apache-2.0
"""Train a model for some steps over whatever processes torchrun has started; a script for ``trace_replay``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 1024, 3, 128
STEPS = 30
BUCKET_MB = 4


def train() -> None:
    """Train: 3.4 million parameters in four buckets."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    hidden = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    network = nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))
    model = DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, 256)
    for _ in range(int(os.environ.get("STEPS", STEPS))):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
