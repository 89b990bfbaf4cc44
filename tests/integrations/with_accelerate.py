# SPDX-License-Identifier: Apache-2.0
"""A training script for Hugging Face Accelerate, with gradient accumulation: ``script.py FILE PRECISION``."""

import json
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlcp.torch

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=sys.argv[2])
torch.manual_seed(3)
inputs = torch.randn(96, 20)
targets = inputs[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for _ in range(3):
    for batch, wanted in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
same = dlcp.torch.replicas_identical(accelerator.unwrap_model(model))
if accelerator.is_main_process:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"losses": losses, "same": same, "ranks": accelerator.num_processes}, file)
accelerator.end_training()
