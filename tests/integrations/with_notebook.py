# SPDX-License-Identifier: Apache-2.0
"""The cells of a notebook that trains with Accelerate: ``script.py FILE WHERE``, over Gloo or DLCP."""

import json
import socket
import sys

import torch
from accelerate import Accelerator, notebook_launcher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlcp.torch


def training(file, where):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    inputs = torch.randn(96, 20)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = dlcp.torch.enable(model) if where == "dlcp" else None
    losses = []
    for _ in range(3):
        for batch, wanted in loader:
            loss = nn.functional.cross_entropy(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    found = {"losses": losses, "ranks": accelerator.num_processes}
    found["same"] = dlcp.torch.replicas_identical(accelerator.unwrap_model(model))
    if state:
        found |= {"steps": state.step, "delivered": state.ledger.summary()["delivered"]}
        state.close()
    if accelerator.is_main_process:
        with open(file, "w", encoding="utf-8") as results:
            json.dump(found, results)
    accelerator.end_training()


with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
notebook_launcher(training, tuple(sys.argv[1:]), num_processes=2, use_port=str(port))
