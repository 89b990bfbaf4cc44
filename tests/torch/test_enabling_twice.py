# SPDX-License-Identifier: Apache-2.0
"""DLCP does not take over a model twice, and the model's state reports that it is in use."""

import pytest

from tests.torch.workers import launch, values

torch = pytest.importorskip("torch")


def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))


def step(model):
    model(torch.ones(4, 16)).sum().backward()


def refused(act):
    """What is said against it; the endpoints that there are must not become more."""
    import threading

    before = sum(thread.name.startswith("dlcp-rank") for thread in threading.enumerate())
    try:
        act()
    except RuntimeError as error:
        after = sum(thread.name.startswith("dlcp-rank") for thread in threading.enumerate())
        return str(error) if after == before else f"{after - before} endpoints are left open"
    return "not refused"


def twice(worker):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import dlcp.torch

    options, found = worker.options(bind="127.0.0.1:0"), {}
    replicated = DistributedDataParallel(make())
    state = dlcp.torch.enable(replicated, options)
    step(replicated)
    found["ddp"] = refused(lambda: dlcp.torch.enable(replicated, options))
    found["attach"] = refused(lambda: state.attach(replicated))
    step(replicated)
    state.close()
    found["closed"] = refused(lambda: dlcp.torch.enable(replicated, options))
    state.attach(replicated)
    step(replicated)
    state.close()

    sharded = fully_shard(make())
    state = dlcp.torch.enable(sharded, options)
    step(sharded)
    found["fsdp"] = refused(lambda: dlcp.torch.enable(sharded, options))
    state.close()
    state = dlcp.torch.enable(sharded, options)
    step(sharded)
    assert state.active
    state.close()

    model = make()
    optimizer = dlcp.torch.cross_step(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    assert optimizer.traffic.active, optimizer.traffic.reason
    assert optimizer.traffic.endpoint
    found["cross_step"] = refused(lambda: dlcp.torch.cross_step(model, optimizer.inner, options))
    step(model)
    optimizer.step()
    optimizer.close()
    assert not optimizer.traffic.active
    again = dlcp.torch.cross_step(model, optimizer.inner, options, state=optimizer.traffic)
    assert again.traffic.active
    again.close()
    return found


def test_a_model_is_not_taken_over_twice():
    for found in values(launch(2, twice)):
        assert "already averages the gradients of this model" in found["ddp"]
        assert "already attached to a model" in found["attach"]
        assert "call attach(model) of that state" in found["closed"]
        assert "already reduces the gradients of this model" in found["fsdp"]
        assert "has already taken over these parameters" in found["cross_step"]
