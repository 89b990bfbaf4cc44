# SPDX-License-Identifier: Apache-2.0
"""A training script for Ray Train: ``script.py FILE WHERE``, over Gloo or DLCP."""

import json
import sys
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def training(config):
    import ray.train.torch
    import torch
    import torch.distributed as dist
    from torch import nn

    import dlcp.torch

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
    model = ray.train.torch.prepare_model(net)
    state = dlcp.torch.enable(model) if config["where"] == "dlcp" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(9):
        inputs = torch.randn(64, 20)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    found = {"losses": losses, "ranks": dist.get_world_size(), "same": dlcp.torch.replicas_identical(net)}
    if state:
        found |= {"steps": state.step, "delivered": state.ledger.summary()["delivered"]}
        state.close()
    if dist.get_rank() == 0:
        with open(config["file"], "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            training,
            train_loop_config={"file": sys.argv[1], "where": sys.argv[2]},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    ray.shutdown()
