# SPDX-License-Identifier: Apache-2.0
"""Options of DistributedDataParallel: with each, DLCP averages as Gloo does, or refuses it by name."""

import contextlib
import io
import logging

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
STEPS = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8), nn.Linear(8, 4))


def frozen(inner, step):
    inner[0].requires_grad_(step > 0)


def added(inner, step):
    if step == 1:
        inner.append(nn.Linear(4, 2))


def replaced(inner, step):
    if step == -1:
        inner[2] = nn.Linear(8, 4)


CASES = {
    "plain": {},
    "static_graph": {"wrapping": lambda _: {"static_graph": True}},
    "bucket view": {"wrapping": lambda _: {"gradient_as_bucket_view": True}},
    "ignored": {"ignored": ["0.weight"]},
    "frozen": {"change": frozen},
    "added": {"change": added},
    "replaced": {"change": replaced, "wrapping": lambda _: {"find_unused_parameters": True}},
    "join": {"join": {}},
    "join and throw": {"join": {"throw_on_early_termination": True, "divide_by_initial_world_size": False}},
}
IN_NO_BUCKET = {"frozen": "0.weight, 0.bias", "added": "3.weight, 3.bias", "replaced": "2.weight, 2.bias"}


def trained(worker, enable, *, wrapping=lambda _: {}, change=lambda *_: None, ignored=(), join=None):
    """Train a model, and return its parameters."""
    inner = net()
    inner._ddp_params_and_buffers_to_ignore = list(ignored)
    change(inner, 0 if change is frozen else -2)
    model = DistributedDataParallel(inner, **wrapping(inner))
    change(inner, -1)
    state = enable(model)
    generator = torch.Generator().manual_seed(worker.rank)
    uneven = join is not None and not join
    with contextlib.nullcontext() if join is None else model.join(**join):
        for step in range(STEPS + 2 * worker.rank * uneven):
            change(inner, step)
            model.zero_grad()
            model(torch.randn(4, 16, generator=generator)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
    if state is not None:
        assert state.step == STEPS + 2 * uneven
        state.close()
    return [parameter.detach().clone() for parameter in inner.parameters()]


def every_case(worker):
    found = {}
    for name, case in CASES.items():
        handler = logging.StreamHandler(said := io.StringIO())
        logging.getLogger("dlcp").addHandler(handler)
        ours = trained(worker, lambda model: dlcp.torch.enable(model, worker.options(loss_bound=0.0)), **case)
        logging.getLogger("dlcp").removeHandler(handler)
        found[name] = ours, trained(worker, lambda _: None, **case), said.getvalue()
    return found


def test_what_ddp_gives_its_hook_is_averaged_as_by_gloo_and_what_it_does_not_is_named_once():
    for rank, found in enumerate(values(launch(2, every_case))):
        for name, (ours, gloo, said) in found.items():
            for parameter, right in zip(ours, gloo, strict=True):
                torch.testing.assert_close(parameter, right, msg=lambda text, name=name: f"{name}: {text}")
            expected = IN_NO_BUCKET.get(name) if rank == 0 else None
            assert said.count("in no bucket") == (expected is not None), name
            assert (expected or "") in said, name


def enabled(worker, model):
    """Enable DLCP and train a step; return the error's text."""
    state = None
    try:
        state = dlcp.torch.enable(model, worker.options())
        with model.join(divide_by_initial_world_size=False):
            model(torch.ones(4, 16)).sum().backward()
    except ValueError as error:
        return str(error)
    finally:
        if state:
            state.close()


def refused(worker):
    found = []
    torch._dynamo.config.optimize_ddp = "python_reducer"
    found.append(enabled(worker, DistributedDataParallel(net())))
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    in_backward = net()
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    found.append(enabled(worker, DistributedDataParallel(in_backward)))
    model = DistributedDataParallel(net())
    model.mixed_precision = object()  # DDP's own set-up needs a GPU
    found.append(enabled(worker, model))
    for name in "_delay_all_reduce_all_params", "skip_all_reduce_unused_params":
        setattr(model := DistributedDataParallel(net()), name, True)
        found.append(enabled(worker, model))
    found.append(enabled(worker, DistributedDataParallel(net())))
    return found


def test_what_no_hook_can_follow_is_refused_by_name():
    options = (
        'optimize_ddp="python_reducer"',
        "_apply_optimizer_in_backward",
        "mixed_precision=",
        "delay_all_reduce_named_params=",
        "skip_all_reduce_unused_params=",
        "join(divide_by_initial_world_size=False)",
    )
    for found in values(launch(2, refused)):
        for option, error in zip(options, found, strict=True):
            assert option in (error or ""), (option, error)


@pytest.mark.parametrize(
    "given", [(torch.zeros(3),), ((torch.zeros(3), torch.zeros(3)),), (torch.zeros(3), torch.zeros(1))]
)
def test_a_hook_that_something_else_calls_says_so(given):
    with pytest.raises(TypeError, match=r"buckets of DistributedDataParallel, and was called with"):
        dlcp.torch.hook(None, *given)
