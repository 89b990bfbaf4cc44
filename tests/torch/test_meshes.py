# SPDX-License-Identifier: Apache-2.0
"""Meshes of two dimensions, over four ranks: tensor parallelism with DDP and FSDP2, and replicated shards."""

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints
from tests.torch.ddp_models import ALL_DROPPABLE
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
STEPS = 4
LOSSY = {"loss_bound": 0.3, "immediate": True, "tag_policy": ALL_DROPPABLE}
UNDIVIDED = ["2.bias", "3.weight", "3.bias", "4.weight", "4.bias"]
"""The bias of a row-wise layer, and the layers without a plan."""


def make(mesh=None):
    """A model with two layers that tensor parallelism divides over a mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 64), nn.LayerNorm(64), nn.Linear(64, 300))
    if mesh:
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net


def shard(net, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def model_of(kind, mesh):
    if kind == "hsdp":
        return shard(make(), mesh)
    net = make(mesh["other"])
    return shard(net, mesh["data"]) if kind == "fsdp" else DistributedDataParallel(net, device_mesh=mesh["data"])


def train(model, share):
    """Return the parameters: of FSDP2 whole, of DDP this rank's parts."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = dict(net.named_parameters())  # before a forward pass: DDP then has DTensors in place of its parts
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, foreach=False)
    for step in range(STEPS):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + share))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in parameters.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def trained(worker, kind, way, fields=None):
    """Train over Gloo, with ``enable``, or with the backend for one dimension; return parameters and the ledger."""
    given = {"backend_override": {"data": "dlcp"}} if way == "backend" else {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"), **given)
    model = model_of(kind, mesh)
    state = dlcp.torch.enable(model, worker.options(**fields or {})) if way == "enable" else None
    ledger = state.ledger if state else None
    if way == "backend":
        ledger = dlcp.torch.allow_loss(mesh["data"].get_group(), dlcp.torch.Options(loss_bound=0.1))
    found = train(model, worker.rank if kind == "hsdp" else mesh.get_local_rank("data"))
    if state:
        state.close()
    return found, ledger and ledger.summary(), list(state.group_ranks) if state else None


def in_every_way(worker, kind):
    return [trained(worker, kind, way) for way in ("gloo", "enable", "backend")]


@pytest.mark.parametrize("kind", ["hsdp", "ddp", "fsdp"])
def test_a_model_trains_to_the_same_bits_over_dlcp(kind):
    for rank, found in enumerate(values(launch(4, in_every_way, kind))):
        (theirs, *_), (enabled, by_hook, ranks), (backed, by_backend, _) = found
        assert by_hook["delivered"] > 0
        assert by_backend["delivered"] > 0
        # The one dimension in which FSDP2 has its shards, or that of the data.
        assert ranks == ([rank & 2, rank | 1] if kind == "hsdp" else [rank & 1, rank | 2])
        for name in theirs:
            assert torch.equal(theirs[name], enabled[name]), name
            assert torch.equal(theirs[name], backed[name]), name


def lossy(worker, kind):
    Endpoint.__init__ = lossy_endpoints(0.1)
    found, summary, _ = trained(worker, kind, "enable", LOSSY)
    return found, summary


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_copies_of_undivided_parameters_stay_equal_with_losses(kind):
    found = values(launch(4, lossy, kind))
    assert sum(summary["lost"] for _, summary in found) > 0
    first, _ = found[0]
    for name in UNDIVIDED:
        assert all(torch.equal(first[name], theirs[name]) for theirs, _ in found), name


def refused(worker, fields):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    with pytest.raises(ValueError, match=r"5 parameters, such as 2\.bias, whose copies would drift apart") as error:
        dlcp.torch.enable(model_of("fsdp", mesh), worker.options(**fields))
    dist.barrier()
    return str(error.value)


def test_options_with_which_copies_drift_apart_are_refused():
    for message in values(launch(4, refused, {"precision": 8, "compression": "powersgd:2"})):
        assert "with compression, precision 8: leave that out" in message
