# SPDX-License-Identifier: Apache-2.0
"""Without loss, DLCP trains to the weights that Gloo trains to: 50 steps of SGD, with momentum, and of AdamW.

Between two ranks a sum has one order, so the weights have to be the same to the bit. Among four, Gloo adds up in the
order of its ring and DLCP in one of its own: weights differ by rounding, and are the same to the bit on all ranks.
"""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.torch.crossstep import cross_step
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
STEPS = 50
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}
WAYS = ("gloo", "hook", "cross_step")


def make():
    """A model of 11,594 parameters: small layers and such as take several packets."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 90), nn.ReLU(), nn.Linear(90, 4))


def train(worker, way, optimizer_name):
    """Train in one way and return the weights, and what was lost on the way."""
    net = model = make()
    optimizer, ledger, finish = OPTIMIZERS[optimizer_name](net.parameters()), None, []
    options = worker.options(loss_bound=0.0, fallback=False)
    if way == "cross_step":
        optimizer = cross_step(net, optimizer, options)
        ledger, finish = optimizer.traffic.ledger, [optimizer.synchronize, optimizer.close]
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    if way == "hook":
        state = dlcp.torch.enable(model, options)
        ledger, finish = state.ledger, [state.close]
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(1000 * step + worker.rank)
        inputs = torch.randn(16, 24, generator=draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :4] * inputs[:, 4:8]).backward()
        optimizer.step()
    for action in finish:
        action()
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).clone()
    return weights, ledger.summary() if ledger else None


def train_in_all_ways(worker, ways):
    return {(way, name): train(worker, way, name) for name in OPTIMIZERS for way in ways}


@pytest.fixture(scope="module")
def two_ranks():
    return values(launch(2, train_in_all_ways, WAYS))


@pytest.fixture(scope="module")
def four_ranks():
    return values(launch(4, train_in_all_ways, ("gloo", "hook"), limit_s=90))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["hook", "cross_step"])
def test_two_ranks_reach_gloos_weights_to_the_bit(two_ranks, way, optimizer):
    for rank in two_ranks:
        plain, _ = rank["gloo", optimizer]
        ours, summary = rank[way, optimizer]
        assert not torch.equal(plain, torch.cat([parameter.flatten() for parameter in make().parameters()]))
        assert torch.equal(plain, ours), f"differ by up to {(plain - ours).abs().max()}"
        assert summary["sent"] == summary["delivered"] > STEPS
        assert summary["lost"] == summary["violations"] == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_reach_gloos_weights_up_to_rounding_and_all_the_same(four_ranks, optimizer):
    first = four_ranks[0]["hook", optimizer][0]
    for rank in four_ranks:
        plain, _ = rank["gloo", optimizer]
        ours, summary = rank["hook", optimizer]
        start = torch.cat([parameter.detach().flatten() for parameter in make().parameters()])
        assert (plain - ours).norm() <= 1e-4 * (plain - start).norm(), "more than rounding"
        assert torch.equal(ours, first), "replicas have drifted apart"
        assert summary["sent"] == summary["delivered"] > STEPS
        assert summary["lost"] == summary["violations"] == 0
