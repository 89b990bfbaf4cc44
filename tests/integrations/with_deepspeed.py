# SPDX-License-Identifier: Apache-2.0
"""A training script for DeepSpeed: ``script.py FILE STAGE``, with that stage of ZeRO; it names no backend of DLCP's."""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import dlcp.torch

deepspeed.init_distributed(dist_backend="gloo")
ledger = (
    dlcp.torch.allow_loss(None, dlcp.torch.Options(loss_bound=0.1))
    if dist.get_backend() == dlcp.torch.BACKEND
    else None
)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 4))
config = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": int(sys.argv[2])},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
ledger = None
if dist.get_backend() == dlcp.torch.BACKEND:  # nothing is lost through memory, and the ledger counts packets
    group = None if sys.argv[2] == "3" else engine.data_parallel_group
    ledger = dlcp.torch.allow_loss(group, dlcp.torch.Options(loss_bound=0.1))
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(9):
    inputs = torch.randn(64, 20)
    loss = nn.functional.cross_entropy(engine(inputs), inputs[:, :4].argmax(1))
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    losses.append(mean.item())
same = dlcp.torch.replicas_identical(net)
if dist.get_rank() == 0:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        found = {"losses": losses, "same": same, "ranks": dist.get_world_size()}
        if ledger:
            found["delivered"] = ledger.summary()["delivered"]
        json.dump(found, file)
dist.destroy_process_group()
