# SPDX-License-Identifier: Apache-2.0
"""Layers that no rank uses in some steps, and gradients that are thrown away: nothing else vanishes with them.

Gradients do not depend on parameters here, so it is known beforehand what their sum must be.
"""

import pickle

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints
from tests.torch.test_ddp import parameter_server
from tests.torch.workers import launch, values

STEPS, IN, OUT = 14, 32, 512
HEADS = "abc"
LOSSY = {"loss_bound": 0.5, "precision": 32}
SETTINGS = {
    "8 bits": {"loss_bound": 0.0, "precision": 8},
    "4 bits": {"loss_bound": 0.0, "precision": 4},
    "losses": LOSSY,
    "losses at 8 bits": LOSSY | {"precision": 8},
    "losses at once": LOSSY | {"immediate": True},
}
REDUCERS = {
    "ring": LOSSY | {"collective": "ring"},
    "top-k": {"loss_bound": 0.0, "compression": "topk:0.1"},
    "low rank": {"loss_bound": 0.0, "compression": "powersgd:2"},
}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        for head in HEADS:
            setattr(self, head, nn.Linear(IN, OUT, bias=False))

    def forward(self, inputs, targets, heads):
        return sum((getattr(self, head)(inputs) * targets).sum() for head in heads)


def used_in(step, rank, alike):
    """Which heads a rank uses: at random, ``a`` on no rank in the third to last step, and all in the last two."""
    if step >= STEPS - 2:
        return HEADS
    chosen = np.random.default_rng([step, 0 if alike else rank]).choice(["", "a", "b", "c", "ab"])
    return chosen.replace("a", "") if step == STEPS - 3 else str(chosen)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, IN, generator=generator), torch.randn(4, OUT, generator=generator)


def expected(ranks, alike):
    total = {head: torch.zeros(OUT, IN, dtype=torch.float64) for head in HEADS}
    for step in range(STEPS):
        for rank in range(ranks):
            inputs, targets = batch(step, rank)
            for head in used_in(step, rank, alike):
                total[head] += targets.double().T @ inputs.double() / ranks
    return total


def errors(found, ranks, alike=False):
    return {
        head: ((found[head] - total).norm() / total.norm()).item() for head, total in expected(ranks, alike).items()
    }


def flushes(step):
    """The third to last step, which skips a layer, and the last."""
    return step in (STEPS - 3, STEPS - 1)


def by_hook(options, rank, ranks, *, closes_after=(), in_buckets=False):
    model = DistributedDataParallel(
        Heads(), find_unused_parameters=True, bucket_cap_mb=0.1, gradient_as_bucket_view=in_buckets
    )
    state = dlcp.torch.enable(model, options)
    applied = {head: torch.zeros(OUT, IN, dtype=torch.float64) for head in HEADS}
    for step in range(STEPS):
        model.zero_grad(set_to_none=not in_buckets)
        if flushes(step):
            state.flush()
        loss = model(*batch(step, rank), used_in(step, rank, False))
        if torch.is_tensor(loss):
            loss.backward()
        else:  # DDP wants a backward of all ranks
            (0 * model(*batch(step, rank), "c")).backward()
        anywhere = {head for each in range(ranks) for head in used_in(step, each, False) or "c"}
        for head in HEADS:
            gradient = getattr(model.module, head).weight.grad
            assert in_buckets or (gradient is not None) == (head in anywhere), "DDP over Gloo leaves it alone"
            if gradient is not None:
                applied[head] += gradient.double()
        if step in closes_after:
            state.close()
            state.attach(model)
    assert state.active
    assert not state.feedback.size, "the last step was flushed, and had all layers"
    state.close()
    return errors(applied, ranks)


def by_join(options, rank, ranks):
    """Ranks run out of data in different steps of two epochs; they then accompany the steps of the others."""
    model = DistributedDataParallel(Heads(), find_unused_parameters=True, bucket_cap_mb=0.1)
    state = dlcp.torch.enable(model, options)
    optimizer, start = torch.optim.SGD(model.parameters(), lr=1.0), start_of(model.module)
    total = {head: torch.zeros(OUT, IN, dtype=torch.float64) for head in HEADS}
    for epoch in range(2):
        counts = [3 + (each + epoch) % ranks for each in range(ranks)]
        with model.join():
            for step in range(counts[rank]):
                optimizer.zero_grad()
                model(*batch(10 * epoch + step, rank), HEADS[step % 3]).backward()
                optimizer.step()
        for each, count in enumerate(counts):
            for step in range(count):
                inputs, targets = batch(10 * epoch + step, each)
                total[HEADS[step % 3]] += targets.double().T @ inputs.double() / ranks
    optimizer.zero_grad()
    state.flush()
    model(torch.zeros(1, IN), torch.zeros(1, OUT), HEADS).backward()
    optimizer.step()
    found = moved(model.module, start)
    assert state.active
    assert not state.feedback.size
    state.close()
    return {head: ((found[head] - total[head]).norm() / total[head].norm()).item() for head in HEADS}


def by_attaching_again(options, rank, ranks):
    return by_hook(options, rank, ranks, closes_after=(3, 7, 8))


def by_gradients_in_buckets(options, rank, ranks):
    """Gradients that are zeros, not None, where no rank has used a layer: then DDP applies what is in the bucket."""
    return by_hook(options, rank, ranks, in_buckets=True)


def moved(model, start):
    return {head: start[head] - getattr(model, head).weight.detach().double() for head in HEADS}


def start_of(model):
    return {head: getattr(model, head).weight.detach().double().clone() for head in HEADS}


def by_cross_step(options, rank, ranks, *, restores_after=()):
    model = Heads()
    optimizer = dlcp.torch.cross_step(model, torch.optim.SGD(model.parameters(), lr=1.0), options, group_bytes=1)
    start = start_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 5 in (2, 3):  # a gradient that is thrown away: a closure's, or one that a gradient scaler refuses
            model(*batch(step, rank), "ab").backward()
            if step % 5 == 3:
                optimizer.synchronize()
            optimizer.zero_grad()
        if flushes(step):
            optimizer.flush()
        loss = model(*batch(step, rank), used_in(step, rank, False))
        if torch.is_tensor(loss):
            loss.backward()
        optimizer.step()
        if step in restores_after:  # from a checkpoint made while averages are on their way
            state = pickle.loads(pickle.dumps(optimizer.traffic))
            optimizer.close()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = dlcp.torch.cross_step(model, inner, group_bytes=1, state=state)
    optimizer.synchronize()
    found = errors(moved(model, start), ranks)
    assert not optimizer.traffic.feedback.size
    optimizer.close()
    return found


def by_restored_cross_step(options, rank, ranks):
    return by_cross_step(options, rank, ranks, restores_after=(1, 5, 6))


def by_local_sgd(options, rank, ranks):
    model = Heads()
    averager = dlcp.torch.LocalSGD(model, 2, options)
    optimizer, start = torch.optim.SGD(model.parameters(), lr=1.0), start_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step, rank), used_in(step, rank, False))
        if torch.is_tensor(loss):
            loss.backward()
        optimizer.step()
        averager.step()
    averager.flush()
    averager.close()
    return errors(moved(model, start), ranks)


def by_sharding(options, rank, ranks):
    from torch.distributed.fsdp import fully_shard

    model = Heads()
    start = start_of(model)
    for head in "ab":
        fully_shard(getattr(model, head))
    fully_shard(model)
    state = dlcp.torch.enable(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        if flushes(step):
            state.flush()
        loss = model(*batch(step, rank), used_in(step, rank, True))
        if torch.is_tensor(loss):
            loss.backward()
            optimizer.step()
    found = {head: start[head] - getattr(model, head).weight.full_tensor().detach().double() for head in HEADS}
    assert not state.feedback.size
    state.close()
    return errors(found, ranks, alike=True)


WAYS = {each.__name__: each for each in (by_hook, by_join, by_cross_step, by_local_sgd, by_sharding)}
HOOK_WAYS = {each.__name__: each for each in (by_attaching_again, by_gradients_in_buckets, by_restored_cross_step)}


def conserve(worker, way, settings):
    found = {}
    original = Endpoint.__init__
    for name, fields in settings.items():
        Endpoint.__init__ = lossy_endpoints(0.1) if "loss" in name else original
        torch.manual_seed(0)
        found[name] = (WAYS | HOOK_WAYS)[way](worker.options(**fields), worker.rank, worker.count)
        Endpoint.__init__ = original
    return found


def check(ranks):
    for found in values(ranks):
        wrong = {name: errors for name, errors in found.items() if max(errors.values()) > 1e-6}
        assert not wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(110)
def test_sums_are_conserved_whatever_layers_a_step_has(way):
    few = {name: SETTINGS[name] for name in ("8 bits", "losses")}
    settings = few if way in ("by_sharding", "by_join") else SETTINGS
    check(launch(3, conserve, way, settings | (REDUCERS if way == "by_hook" else {}), limit_s=100))


def test_two_ranks_conserve_sums_in_one_hop():
    check(launch(2, conserve, "by_hook", SETTINGS))


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_sums_are_conserved_however_the_hook_is_used(way):
    check(launch(2, conserve, way, {name: SETTINGS[name] for name in ("8 bits", "losses")}))


def test_workers_of_a_parameter_server_conserve_sums():
    with parameter_server() as (_, environment):
        server = {"collective": environment["DLCP_COLLECTIVE"]}
        settings = {name: SETTINGS[name] | server for name in ("8 bits", "4 bits", "losses at 8 bits")}
        for way in ("by_hook", "by_cross_step"):
            check(launch(2, conserve, way, settings))
