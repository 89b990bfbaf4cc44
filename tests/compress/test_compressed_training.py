# SPDX-License-Identifier: Apache-2.0
"""Real processes train with compressed gradients: over a path that loses packets, and over one that breaks."""

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlcp.torch import backend
from dlcp.values.tags import TagPolicy
from tests.faults.bad_network import BadNetwork, Weather, place_of, set_weather
from tests.faults.fault_training import Said, train
from tests.torch.workers import launch, values
from tests.transport.free_ports import free_udp_ports

pytestmark = pytest.mark.timeout(110)
RANKS = 2
LIMIT_S = 100
QUICK = {"silence_s": 1.2, "deadline_s": 2.5, "meet_s": 5.0, "payload_bytes": 1440}
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)
LOSSY = ["fp16", "topk:0.05"]
BROKEN = ["topk:0.05"]


def options_of(worker, **changes):
    chosen = {**QUICK, "tag_policy": ALL_DROPPABLE, "loss_bound": 0.1, **changes}
    return worker.options(advertise=place_of(worker.rank), **chosen)


def change(worker, weather):
    dist.barrier()
    if worker.rank == 0:
        set_weather(weather)
    dist.barrier()


def matrices():
    """A model of which the layers are matrices."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def fit(model, worker, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        rng = np.random.default_rng([worker.rank, step])
        images = torch.from_numpy(rng.standard_normal((16, 64)).astype(np.float32))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.from_numpy(rng.integers(0, 10, 16))).backward()
        optimizer.step()


def over_bad_paths(worker):
    import dlcp.torch

    said, results = Said(), {}
    change(worker, Weather(loss=0.01))
    for text in LOSSY:
        results["lossy", text] = train(worker, options_of(worker, compression=text), 3, said=said)
    results["adasum"] = train(worker, options_of(worker, combine="adasum", fallback=False), 3, said=said)
    model = DistributedDataParallel(matrices(), bucket_cap_mb=0.01)
    state = dlcp.torch.enable(model, options_of(worker, compression="powersgd:2"))
    fit(model, worker)
    results["matrices"] = dlcp.torch.replicas_identical(model), state.ledger.summary(), state.active
    state.close()
    for text in BROKEN:
        change(worker, Weather())

        def break_at_one(step, state):
            if step == 1:
                change(worker, Weather(blocked=True))

        results["broken", text] = train(
            worker, options_of(worker, compression=text), 4, before_step=break_at_one, said=said
        )
    change(worker, Weather())
    return results


@pytest.fixture(scope="module")
def trained():
    ports = free_udp_ports(RANKS)
    with BadNetwork(ports, seed=5) as network:
        results = values(launch(RANKS, over_bad_paths, ports=ports, environment=network.environment(), limit_s=LIMIT_S))
        assert network.seen["lost"] > 20
    return results


@pytest.mark.parametrize("text", LOSSY)
def test_at_one_percent_loss_bounds_are_kept_replicas_identical_and_nothing_gone(trained, text):
    for results in trained:
        result = results["lossy", text]
        assert result.active == [True] * 3, result.said
        assert result.same_on_all
        assert result.summary["violations"] == 0
        assert result.summary["max_message_ratio"] <= 0.1
        assert result.missing < 1e-4


def test_fewer_packets_are_sent(trained):
    sent = {text: trained[0]["lossy", text].summary["sent"] for text in LOSSY}
    assert sent["topk:0.05"] < 0.5 * sent["fp16"]


def test_adasum_trains_and_keeps_the_bound(trained):
    for results in trained:
        assert results["adasum"].same_on_all
        assert results["adasum"].summary["violations"] == 0
        assert results["adasum"].active == [True] * 3


def test_layers_of_a_model_are_the_matrices_that_they_are(trained):
    """64 x 96 values are sent as (64 + 96) x 2, and not as they are."""
    for results in trained:
        identical, summary, active = results["matrices"]
        assert identical
        assert active
        assert summary["violations"] == 0
        by_layer = summary["by_layer"]["0"][0]
        assert 0 < by_layer <= 4 * 2 * 2, "packets of the first layer: two rounds, there and back"


@pytest.mark.parametrize("text", BROKEN)
def test_where_the_path_breaks_training_goes_on_with_all_gradients(trained, text):
    """Values that compression left out are added to the framework's average: nothing is lost."""
    for rank, results in enumerate(trained):
        result = results["broken", text]
        assert result.active[0]
        assert not result.active[-1]
        assert result.same_on_all
        assert result.missing < 1e-4
        assert sum("DLCP is off" in message for message in result.said) == (rank == 0)


def power_sgd_over_the_backend(worker):
    """PyTorch's own hook, whose all-reduces run over a group of the backend dlcp."""
    found = {}
    for name, group in (("gloo", dist.group.WORLD), ("dlcp", dist.new_group(backend="dlcp"))):
        if name == "dlcp":
            ledger = backend.allow_loss(group, worker.options(loss_bound=0.1))
        model = DistributedDataParallel(matrices(), process_group=group)
        state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook)
        fit(model, worker, 6)
        found[name] = [parameter.detach().clone() for parameter in model.parameters()]
    return found, ledger.summary()


def test_pytorchs_own_power_sgd_runs_over_the_backend():
    results = values(launch(RANKS, power_sgd_over_the_backend, limit_s=LIMIT_S))
    for found, summary in results:
        for plain, ours, other in zip(found["gloo"], found["dlcp"], results[0][0]["dlcp"], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
            assert torch.equal(ours, other)
        assert summary["violations"] == 0
