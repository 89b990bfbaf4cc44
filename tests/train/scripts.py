# SPDX-License-Identifier: Apache-2.0
"""Training scripts for tests, like a user's, run by :mod:`dlcp.train.worker` in real ranks."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from dlcp.train.launcher import WorkerTask, read_reports

STEPS = 4


def make(seed=0, width=64):
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def batches(steps=STEPS):
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        yield torch.randn(8, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def train(model, steps=STEPS):
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def digest(model):
    import dlcp.torch

    return dlcp.torch.parameter_digest(model)


def in_session(worker, script, task=None, folder=None, **environment):
    """Run a script in a session; return what it returned or raised, and this rank's report."""
    from dlcp.train.worker import ScriptSession

    os.environ.update(
        {"RANK": str(worker.rank), "WORLD_SIZE": str(worker.count), "DLCP_BIND": f"127.0.0.1:{worker.port}"},
        **environment,
    )
    with tempfile.TemporaryDirectory() as own:
        path = Path(folder or own)
        try:
            with ScriptSession(replace(task or WorkerTask(), reports=str(path))):
                value = script(worker)
        except BaseException as error:
            value = error
        (report,) = [report for report in read_reports(path) if report["rank"] == worker.rank]
    return value, report


def plain_script(worker):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make())
    train(model)
    return digest(model.module)
