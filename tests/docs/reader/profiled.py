# SPDX-License-Identifier: Apache-2.0
"""A script of the reader's own that records profiles."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
os.makedirs("profiles", exist_ok=True)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
    for _ in range(3):
        model(torch.ones(8, 64)).sum().backward()
        recorded.step()
recorded.export_chrome_trace(f"profiles/rank{dist.get_rank()}.json")
dist.destroy_process_group()
