# SPDX-License-Identifier: Apache-2.0
"""A training script that compiles its model with Inductor, before DDP wraps it or after: ``script.py FILE WHERE``."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))
if sys.argv[2] == "inside":
    model = DistributedDataParallel(torch.compile(net))
else:
    model = torch.compile(DistributedDataParallel(net))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(9):
    inputs = torch.randn(16, 20)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    losses.append(mean.item())
same = dlcp.torch.replicas_identical(net)
if dist.get_rank() == 0:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"losses": losses, "same": same, "ranks": dist.get_world_size()}, file)
dist.destroy_process_group()
