# SPDX-License-Identifier: Apache-2.0
"""A secret that is set anywhere holds at every way in: ranks of which one lacks it, or has another, never meet."""

import os
import pickle
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.session import job
from dlcp.session.joining import NotJoinedError
from dlcp.session.store import StoreError
from dlcp.torch import Options
from tests.torch.workers import launch, values
from tests.transport.free_ports import free_ports

OURS, OTHER = "the secret of this job, 1", "the secret of another job"
REMEDY = "give all ranks the same DLCP_SECRET_FILE"
REFUSE_S = 0.5
"""Ranks that do not know each other's secret wait that long."""


def end(state):
    """Whether the ranks have met. If not, the reason must say what to do."""
    assert state.active or REMEDY in state.reason
    met = state.active
    state.close()
    return met


def by_hook(options, _):
    state = dlcp.torch.enable(DistributedDataParallel(torch.nn.Linear(8, 4)), options)
    return end(state)


def by_sharding(options, _):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 4)
    fully_shard(model)
    state = dlcp.torch.enable(model, options)
    return end(state)


def by_cross_step(options, _):
    model = torch.nn.Linear(8, 4)
    optimizer = dlcp.torch.cross_step(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    found = end(optimizer.traffic)
    optimizer.close()
    return found


def by_local_sgd(options, _):
    averager = dlcp.torch.LocalSGD(torch.nn.Linear(8, 4), 2, options)
    found = end(averager.traffic)
    averager.close()
    return found


def by_backend(options, _):
    try:
        group = dist.new_group(timeout=timedelta(seconds=5), backend="dlcp", pg_options=options)
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)
    except NotJoinedError as error:
        return REMEDY not in str(error)  # "met", which fails the test
    return True


def by_group(options, where):
    """Without its fallback: that is rank 0's store, and would wait for the other."""
    try:
        with job.join(
            options.with_(fallback=False), rank=dist.get_rank(), size=2, master=f"127.0.0.1:{where}"
        ) as group:
            return group.active
    except (NotJoinedError, StoreError):
        return False


WAYS = {each.__name__: each for each in (by_hook, by_sharding, by_cross_step, by_local_sgd, by_backend, by_group)}


def options_with(secret, layer, folder, **fields):
    """This rank's options, with the secret in a layer; the empty argument above it must not hide it."""
    for name in ("DLCP_SECRET", "DLCP_SECRET_FILE"):
        os.environ.pop(name, None)
    Path("dlcp.toml").unlink(missing_ok=True)
    if secret is None:
        return Options(**fields)
    path = Path(folder, f"secret-{dist.get_rank()}")
    path.write_text(secret)
    path.chmod(0o600)
    match layer:
        case "argument":
            return Options(secret_file=str(path), **fields)
        case "pickled":
            kept = pickle.dumps(Options(loss_bound=0.05, **fields))
            os.environ["DLCP_SECRET_FILE"] = str(path)
            return pickle.loads(kept).with_(loss_bound=0.1)
        case "variable":
            os.environ["DLCP_SECRET_FILE"] = str(path)
        case "content":
            os.environ["DLCP_SECRET"] = secret
        case "file":
            Path("dlcp.toml").write_text(f"secret_file = '{path}'\n")
            os.environ["DLCP_SECRET_FILE"] = ""
    return Options(secret_file="", **fields)


LAYERS = ("argument", "pickled", "variable", "content", "file")
THEIRS = {"equal": OURS, "different": OTHER, "missing": None}


def meet(worker, way, folder, ports):
    own = Path(folder, str(worker.rank))
    own.mkdir()
    os.chdir(own)
    met = {}
    for layer in LAYERS:
        for what, theirs in THEIRS.items():
            if what == "different" and layer != "variable":
                continue  # they would be compared in the same way, and take a second each
            own = {"bind": "127.0.0.1:0", "meet_s": 20.0 if what == "equal" else REFUSE_S}
            options = options_with(OURS if worker.rank == 0 else theirs, layer, folder, **own)
            dist.barrier()
            met[layer, what] = WAYS[way](options, ports[layer, what])
            dist.barrier()
    return met


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(110)
def test_ranks_meet_only_with_the_same_secret(way, tmp_path):
    meetings = list(product(LAYERS, THEIRS))
    ports = dict(zip(meetings, free_ports(len(meetings)), strict=True))  # drawn one by one, two may be the same
    for found in values(launch(2, meet, way, str(tmp_path), ports, limit_s=100)):
        assert found == {which: which[1] == "equal" for which in found}
        assert len(found) == 2 * len(LAYERS) + 1
