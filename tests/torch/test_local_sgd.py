# SPDX-License-Identifier: Apache-2.0
"""Model averaging in real processes, against the same training in one process."""

import copy
import functools
import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from tests.torch.ddp_models import ALL_DROPPABLE
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)
EXACT = {"loss_bound": 0.0, "precision": "32"}
LOSSY = {"loss_bound": 0.3, "immediate": True, "tag_policy": ALL_DROPPABLE}
UNREACHABLE = {"advertise": "127.0.0.1:9", "meet_s": 2.0}
DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def make_model():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 20))
    model[0].bias.requires_grad_(False)
    return model


def make_optimizer(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.5)


def train_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    optimizer.zero_grad()
    model(torch.randn(6, 40, generator=generator)).pow(2).mean().backward()
    optimizer.step()


def parameters_of(model):
    return [each.detach().clone() for each in model.parameters()]


def in_one_process(ranks, steps, turns, outer=None):
    """Return the parameters after the last average."""
    models = [make_model() for _ in range(ranks)]
    optimizers = [make_optimizer(model) for model in models]
    anchor = make_model()
    outer = outer(anchor.parameters()) if outer else torch.optim.SGD(anchor.parameters(), lr=1.0)
    for step in range(steps):
        for rank in range(ranks):
            train_step(models[rank], optimizers[rank], rank, step)
        if step + 1 in turns:
            for whole, *parts in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
                whole.grad = whole.detach() - torch.stack([part.detach() for part in parts]).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return parameters_of(anchor)


def train(worker, steps, options, **arguments):
    model = make_model()
    if worker.rank:  # replaced by those of the first rank
        torch.nn.init.zeros_(model[2].weight)
    optimizer = make_optimizer(model)
    averager = dlcp.torch.LocalSGD(model, options=worker.options(**options), **arguments)
    averaged, same = [], []
    for step in range(steps):
        train_step(model, optimizer, worker.rank, step)
        if averager.step():
            averaged.append(step + 1)
            same.append(dlcp.torch.parameter_digest(model))
    owed, active = averager.traffic.feedback.size, averager.traffic.active
    averager.close()
    return parameters_of(model), averaged, same, owed, active


@pytest.mark.parametrize("options", [EXACT, UNREACHABLE], ids=["dlcp", "fallback"])
@pytest.mark.parametrize("ways", [{"outer": None}, {"outer": DILOCO}], ids=["averages", "diloco"])
def test_ranks_train_as_one_process_would(options, ways):
    turns = [1, 2, 5, 8]
    results = values(launch(3, functools.partial(train, period=3, warmup_steps=2, **ways), 8, options))
    expected = in_one_process(3, 8, turns, **ways)
    for got, averaged, same, owed, active in results:
        assert averaged == turns
        assert same == results[0][2]
        assert owed == 0
        assert active == (options is EXACT)
        for mine, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def lossy(worker, precision):
    """Change parameters by amounts that do not depend on them; return what should be and what is."""
    model = torch.nn.Linear(300, 100)
    torch.nn.init.zeros_(model.weight)
    averager = dlcp.torch.LocalSGD(model, 2, worker.options(precision=precision, **LOSSY))
    generator = torch.Generator().manual_seed(worker.rank)
    total, owed = torch.zeros(100, 300), []
    for step in range(9):
        change = torch.randn(100, 300, generator=generator)
        total += change
        with torch.no_grad():
            model.weight += change
        if step < 8:
            averager.step()
            owed.append(averager.traffic.feedback.size)
    averager.flush()
    averager.close()
    return total, model.weight.detach(), owed, averager.traffic.feedback.size


@pytest.mark.parametrize("precision", ["32", "8"])
def test_no_change_is_lost(precision):
    results = values(launch(2, lossy, precision))
    mean = torch.stack([total for total, *_ in results]).mean(0)
    assert any(any(owed) for _, _, owed, _ in results)
    for _, weight, _, owed in results:
        torch.testing.assert_close(weight, mean, rtol=1e-4, atol=1e-4)
        assert torch.equal(weight, results[0][1])
        assert owed == 0


def resumed(worker):
    options = worker.options(**LOSSY)
    model = make_model()
    optimizer = make_optimizer(model)
    averager = dlcp.torch.LocalSGD(model, 2, options)
    for step in range(4):
        train_step(model, optimizer, worker.rank, step)
        averager.step()
    kept, owed = pickle.dumps(averager.traffic), averager.traffic.feedback.size
    averager.close()
    again = copy.deepcopy(model)
    averager = dlcp.torch.LocalSGD(again, 2, state=pickle.loads(kept))
    found = averager.traffic.step, averager.traffic.feedback.size
    averager.flush()
    averager.close()
    return owed, found, averager.traffic.feedback.size, dlcp.torch.parameter_digest(again)


def test_a_checkpoint_continues_with_what_is_still_to_be_sent():
    results = values(launch(2, resumed))
    for owed, found, left, digest in results:
        assert found == (2, owed)
        assert left == 0
        assert digest == results[0][3]


def error_of(action):
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(worker):
    make, model = dlcp.torch.LocalSGD, make_model()
    odd = torch.nn.Linear(2, 2)
    odd.weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    found = [
        error_of(lambda: make(DistributedDataParallel(make_model()), 4)),
        error_of(lambda: make(model, 0)),
        error_of(lambda: make(model, 4, warmup_steps=-1)),
        error_of(lambda: make(model, 4, worker.options(compression="topk:0.1"))),
        error_of(lambda: make(odd, 4)),
        error_of(lambda: make(frozen, 4)),
        error_of(lambda: make(model, 4 + worker.rank, worker.options())),
    ]
    averager = make(model, 4, worker.options())
    averager.close()
    return [*found, error_of(averager.average)]


def test_what_cannot_work_is_refused():
    expected = [
        "ValueError: LocalSGD takes a plain model",
        "ValueError: period must be at least 1",
        "ValueError: period must be at least 1, and warmup_steps 0, got 4 and -1",
        "ValueError: LocalSGD does not support compression=...",
        "ValueError: parameter weight is torch.complex64",
        "ValueError: the model needs parameters that require gradients",
        "ValueError: period must be the same on all ranks, got [4, 5]",
        "RuntimeError: this averager is closed",
    ]
    for found in values(launch(2, mistakes)):
        for error, wanted in zip(found, expected, strict=True):
            assert error.startswith(wanted)
