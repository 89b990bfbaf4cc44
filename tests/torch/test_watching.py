# SPDX-License-Identifier: Apache-2.0
"""Real ranks are watched: the slow one is named with its cause, whatever averages, and averages stay the same bits."""

import os
import time

import pytest

pytest.importorskip("torch")

import torch

import dlcp.torch
from dlcp.session.slowness import Cause
from dlcp.torch import watching
from dlcp.torch.watching import GROUPS_MAX, layer_groups
from tests.torch.workers import launch, values
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
RANKS, STEPS, SLEEP_S = 3, 30, 0.1


def make(sleep_s=0.0):
    from torch import nn

    class Sleepy(nn.Linear):
        def forward(self, inputs):
            time.sleep(sleep_s)
            return super().forward(inputs)

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), Sleepy(64, 64), nn.ReLU(), nn.Linear(64, 10))


def steps(worker, model, count=STEPS, loading_s=0.0, between=lambda: None, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(worker.rank)
    for _ in range(count):
        optimizer.zero_grad()
        for part in range(accumulate):
            time.sleep(loading_s / accumulate)
            inputs = torch.randn(8, 32, generator=generator)
            model.require_backward_grad_sync = part == accumulate - 1
            between()
            model(inputs).square().mean().backward()
        optimizer.step()


def judged(worker, slow, cause, way, accumulate=1):
    """Train with a slow rank; return the verdict."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    mine = slow == worker.rank
    model = DistributedDataParallel(make(SLEEP_S if mine and cause is Cause.COMPUTING else 0.0))
    state = dlcp.torch.enable(model, worker.options()) if way == "dlcp" else None
    if way == "own hook":
        model.register_comm_hook(None, fp16_compress_hook)
    with_barrier = {"between": lambda: dist.barrier()} if way == "barrier" else {}
    watch = dlcp.torch.watch(model)
    steps(
        worker,
        model,
        loading_s=SLEEP_S if mine and cause is Cause.LOADING else 0.0,
        accumulate=accumulate,
        **with_barrier,
    )
    watch.close()
    if state:
        state.close()
    verdict = watch.overall()["verdict"]
    assert str(watch.verdict()) == verdict["text"], "training was shorter than what the latest verdict covers"
    return verdict


@pytest.mark.parametrize(
    ("slow", "cause", "way", "accumulate"),
    [
        (0, Cause.COMPUTING, "gloo", 1),
        (1, Cause.LOADING, "gloo", 1),
        (2, Cause.COMPUTING, "dlcp", 1),
        (0, Cause.LOADING, "own hook", 1),
        (1, Cause.LOADING, "barrier", 1),  # every other rank waits there, too
        (2, Cause.LOADING, "gloo", 3),
    ],
)
def test_the_slow_rank_is_named_on_all_ranks_with_its_cause(slow, cause, way, accumulate):
    found = values(launch(RANKS, judged, slow, cause, way, accumulate))
    assert found == [found[0]] * RANKS
    (verdict, *_) = found
    assert (verdict["rank"], verdict["cause"]) == (slow, cause.value), verdict["text"]
    assert SLEEP_S / 2 < verdict["lost_s"] < 2 * SLEEP_S, verdict["text"]
    if cause is Cause.COMPUTING:
        assert verdict["layers"] == "2", "the layer that sleeps"


def digests(worker, watched):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make())
    watch = dlcp.torch.watch(model) if watched else None
    steps(worker, model, count=5, accumulate=2)
    if watch:
        watch.close()
    return dlcp.torch.parameter_digest(model.module)


def test_watching_changes_no_bit():
    assert values(launch(RANKS, digests, True)) == values(launch(RANKS, digests, False))


def evaluating(worker):
    from torch.nn.parallel import DistributedDataParallel

    def evaluate():
        if worker.rank == 1:
            with torch.no_grad():
                model.module(torch.zeros(8, 32))
                time.sleep(SLEEP_S)

    model = DistributedDataParallel(make())
    watch = dlcp.torch.watch(model)
    steps(worker, model, between=evaluate)
    watch.close()
    return watch.verdict()


def test_a_rank_that_evaluates_is_not_blamed_for_its_data_loader():
    verdict, *_ = values(launch(RANKS, evaluating))
    assert (verdict.rank, verdict.cause) == (1, Cause.EVALUATION), str(verdict)


def leaving(worker):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    watching.REPORT_S = 0.1
    model = DistributedDataParallel(make())
    watch = dlcp.torch.watch(model)
    steps(worker, model, count=12)
    if worker.rank == 0:
        watch.close("out of memory")  # gives up, without a last exchange
        return None
    steps_without = model.module
    began_s = time.monotonic()
    watch._thread.join(20)
    assert not watch._thread.is_alive(), "it has noticed that another rank has left"
    steps(worker, steps_without, count=3)  # training goes on
    watch.close()
    assert dist.is_initialized()
    return time.monotonic() - began_s


def test_a_rank_that_leaves_ends_watching_and_not_training():
    (_, *seconds) = values(launch(RANKS, leaving))
    assert all(each < 20 for each in seconds)


def ending(worker, reason):
    from torch.nn.parallel import DistributedDataParallel

    watching.REPORT_S = 0.0
    exchange = watching.StepWatch._exchange

    def slowly(watch, closing):
        time.sleep(0.5)  # so that the end comes during one
        return exchange(watch, closing)

    watching.StepWatch._exchange = slowly
    model = DistributedDataParallel(make())
    before = os.listdir("/proc/self/task")
    watch = dlcp.torch.watch(model)
    assert len(os.listdir("/proc/self/task")) > len(before)
    time.sleep(0.2)  # an exchange has begun, and lasts
    watch.close(reason)
    until(lambda: not set(os.listdir("/proc/self/task")) - set(before))


@pytest.mark.parametrize("reason", [None, "the script failed"])
def test_no_thread_is_left_in_pytorch(reason):
    """Such a thread, of Python or of Gloo, may abort the process as Python ends."""
    values(launch(2, ending, reason))


def alone(worker):
    from torch.nn.parallel import DistributedDataParallel

    with pytest.raises(ValueError, match="watch needs two ranks or more"):
        dlcp.torch.watch(DistributedDataParallel(make()))
    with pytest.raises(TypeError, match="watch takes a DistributedDataParallel model, got Sequential"):
        dlcp.torch.watch(make())


def test_what_cannot_be_watched_is_refused():
    values(launch(1, alone))


def test_layers_are_grouped_by_size_and_named_by_the_outermost_module():
    from torch import nn

    assert [group.name for group in layer_groups(make())] == ["0", "2", "4"]
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(GROUPS_MAX // 2))
    model = nn.Module()
    model.blocks = blocks
    assert [group.name for group in layer_groups(model)][:3] == ["blocks.0.0", "blocks.0.1", "blocks.1.0"]
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2 * GROUPS_MAX))
    groups = layer_groups(model)
    assert len(groups) == GROUPS_MAX
    assert [group.name for group in groups][:2] == ["blocks.0 to blocks.1", "blocks.2 to blocks.3"]
    assert not any(isinstance(module, nn.ModuleList) for group in groups for module in group.begins)
