# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over DLCP: the same training as without, nothing lost for good, and unsupported options refused."""

import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dlcp.torch
from dlcp.torch.fsdp import groups_of
from dlcp.transport.ledger import coded
from tests.torch.ddp_models import ALL_DROPPABLE, OPTIMIZERS, Linear, gradients_of, make
from tests.torch.ddp_models import train as train_replicated
from tests.torch.test_hook import with_secret
from tests.torch.workers import WAYS, launch, values

pytestmark = pytest.mark.timeout(110)
STEPS = 4


def shard(net, **fields):
    """Shard a model, its large layers apart."""
    from torch.distributed.fsdp import fully_shard

    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **fields)
    return fully_shard(net, **fields)


def whole(net):
    return {name: parameter.full_tensor().detach().clone() for name, parameter in net.named_parameters()}


def trained(rank, options=None, *, steps=STEPS, optimizer="adamw", dtype=torch.float32, accumulate=1, **fields):
    """Train a sharded model; return its parameters, and DLCP's state if there are options."""
    net = shard(make(dtype), **fields)
    state = dlcp.torch.enable(net, options) if options else None
    step_of = OPTIMIZERS[optimizer](net.parameters())
    net.no_sync = net.requires_no_sync = lambda: _Unsynchronised(net)
    train_replicated(net, step_of, rank, steps, dtype=dtype, accumulate=accumulate)
    if state:
        state.close()
    return whole(net), state


class _Unsynchronised:
    """FSDP2's counterpart of ``no_sync``."""

    def __init__(self, net):
        self.net = net

    def __enter__(self):
        self.net.set_requires_gradient_sync(False)

    def __exit__(self, *_):
        self.net.set_requires_gradient_sync(True)


CLEAN = ["fp32", "bf16", "fp16", "float64", "accumulate", "offload"]


def all_clean(worker):
    return [clean(worker, case) for case in CLEAN]


def clean(worker, case):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    reduce_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case)
    fields = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)} if reduce_dtype else {}
    if case == "accumulate":
        fields["accumulate"] = 2
    if case == "float64":
        fields["dtype"] = torch.float64
    if case == "offload":
        fields["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    theirs, _ = trained(worker.rank, **fields)
    ours, state = trained(worker.rank, worker.options(), **fields)
    assert state.reason == ""
    return theirs, ours, state.step, state.ledger.summary()


@pytest.fixture(scope="module", params=WAYS)
def clean_runs(request):
    """What each of two ranks found in all cases."""
    return values(launch(2, all_clean, environment=WAYS[request.param]))


@pytest.mark.parametrize("case", CLEAN)
def test_on_a_clean_network_training_is_the_same_to_the_bit(case, clean_runs):
    for theirs, ours, steps, summary in (found[CLEAN.index(case)] for found in clean_runs):
        assert steps == STEPS
        assert summary["delivered"] > 0
        assert summary["lost"] == 0
        for name in theirs:
            assert torch.equal(theirs[name], ours[name]), name


LOSSY = {"loss_bound": 0.3, "immediate": True, "tag_policy": ALL_DROPPABLE}


ROUNDED = {"loss_bound": 0.0, "precision": "8"}


def checkpoint_and_resume(worker, fields):
    """Two steps that leave something out, and one of gradients that are 0 and whole, from a state that was saved."""
    from torch.distributed.fsdp import fully_shard

    wanted, nothing = gradients_of(worker.rank), [torch.zeros_like(part) for part in gradients_of(worker.rank)]
    options = worker.options(**fields)
    taken, state, summaries, steps = [], None, [], []
    whole_steps = {"loss_bound": 0.0, "precision": "32"}
    for changes, gradients, count in (({}, wanted, 2), (whole_steps, nothing, 1)):
        model = fully_shard(Linear())
        state = dlcp.torch.enable(model, options.with_(**changes), state=state)
        for _ in range(count):
            model.zero_grad()
            model(*gradients).backward()
            taken.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        state.close()
        steps.append(state.step)
        summaries.append(state.ledger.summary())
        owed, state = state.feedback.size, pickle.loads(pickle.dumps(state))
    return taken, steps, owed, summaries


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fields", [LOSSY, ROUNDED], ids=["lost", "rounded"])
def test_what_is_left_out_comes_in_a_later_step_also_from_a_checkpoint(count, fields):
    given = [sum(parts) for parts in zip(*map(gradients_of, range(count)), strict=True)]
    results = values(launch(count, checkpoint_and_resume, fields))
    assert sum(first["lost"] + len(coded(first["by_bits"])) for *_, (first, _) in results) > 0
    for taken, steps, owed, (first, last) in results:
        assert steps == [2, 3]
        assert owed == 0
        assert first["violations"] == last["lost"] == 0
        assert any(part.abs().max() > 0 for part in taken[-1]), "something was left to send"
        for part, total in enumerate(given):
            torch.testing.assert_close(count * sum(step[part] for step in taken), 2 * total, rtol=0, atol=5e-5)


def flushed(worker, fields):
    """Return how much is left to send after a step that leaves something out, and after a flushed one."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Linear())
    state = dlcp.torch.enable(model, worker.options(**fields))
    owed = []
    for _ in range(2):
        model(*gradients_of(worker.rank)).backward()
        owed.append(state.feedback.size)
        state.flush()
    state.close()
    return owed


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [(LOSSY, 1), (LOSSY | {"compression": "bf16"}, 1), (ROUNDED, 2)],
    ids=["lost", "lost at 16 bits", "rounded"],
)
def test_a_flushed_step_takes_along_what_is_left(fields, ranks):
    before, after_flush = zip(*values(launch(2, flushed, fields)), strict=True)
    assert np.count_nonzero(before) >= ranks, "which ranks immediate mode leaves something to send is a matter of time"
    assert after_flush == (0, 0)


def saved(worker):
    """Two steps with losses; return the gradients and the state."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Linear())
    state = dlcp.torch.enable(model, worker.options(**LOSSY))
    for _ in range(2):
        model(*gradients_of(worker.rank)).backward()
    state.close()
    return [parameter.grad.full_tensor() for parameter in model.parameters()], pickle.dumps(state)


def resumed(worker, states):
    """A step without losses of gradients that are 0."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Linear())
    state = dlcp.torch.State.redistributed(list(map(pickle.loads, states)), worker.rank, worker.count)
    dlcp.torch.enable(model, worker.options(loss_bound=0.0), state=state)
    model(*[torch.zeros_like(part) for part in gradients_of(worker.rank)]).backward()
    state.close()
    return [parameter.grad.full_tensor() for parameter in model.parameters()], state.feedback.size


@pytest.mark.parametrize("counts", [(3, 2), (2, 3)])
def test_another_number_of_ranks_sends_what_is_still_to_be_sent(counts):
    first, second = counts
    given = [sum(parts) for parts in zip(*map(gradients_of, range(first)), strict=True)]
    before = values(launch(first, saved))
    after = values(launch(second, resumed, [state for _, state in before]))
    for gradients, owed in after:
        assert owed == 0
        assert any(part.abs().max() > 0 for part in gradients)
        for part, total in enumerate(given):  # of ranks that are fewer or more, each weighs as much as before
            torch.testing.assert_close(first * (before[0][0][part] + gradients[part]), 2 * total, rtol=0, atol=5e-5)


def divided(worker):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Linear())
    model.set_gradient_divide_factor(8.0)
    state = dlcp.torch.enable(model, worker.options())
    model(*gradients_of(worker.rank)).backward()
    state.close()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_gradients_may_be_divided_by_something_else():
    given = [sum(parts) for parts in zip(*map(gradients_of, range(2)), strict=True)]
    for gradients in values(launch(2, divided)):
        for part, total in enumerate(given):
            torch.testing.assert_close(8 * gradients[part], total, rtol=1e-6, atol=1e-6)


def lossy(worker):
    exact, _ = trained(worker.rank, optimizer="sgd", steps=60)
    found, state = trained(worker.rank, worker.options(**LOSSY), optimizer="sgd", steps=60)
    return exact, found, loss_of(exact), loss_of(found), state.ledger.summary()


def at_16_bits(worker, fields):
    exact, _ = trained(worker.rank, optimizer="sgd", steps=20)
    found, state = trained(worker.rank, worker.options(**{"loss_bound": 0.0} | fields), optimizer="sgd", steps=20)
    return exact, found, loss_of(exact), loss_of(found), state.ledger.summary()


@pytest.mark.parametrize(
    ("fields", "lossy"),
    [
        ({"compression": "fp16"}, False),
        ({"compression": "bf16"} | LOSSY, True),
    ],
    ids=["fp16", "bf16 with losses"],
)
def test_gradients_may_be_sent_at_16_bits(fields, lossy):
    (exact, first, before, after, summary), (_, second, *_, others) = values(launch(2, at_16_bits, fields))
    assert coded(summary["by_bits"]).keys() == {"16"}
    assert (summary["lost"] + others["lost"] > 0) is lossy
    assert summary["violations"] == 0
    for name in exact:
        assert torch.equal(first[name], second[name]), name
    assert any(not torch.equal(first[name], exact[name]) for name in exact), "what is sent is rounded"
    assert after == pytest.approx(before, rel=1e-2 if lossy else 1e-4)


def loss_of(parameters):
    """The loss of a model with these parameters on the batches of all steps."""
    from tests.torch.ddp_models import batch

    net = make()
    net.load_state_dict(parameters)
    with torch.no_grad():
        given = [batch(rank, step) for rank in range(2) for step in range(60)]
        return float(np.mean([nn.functional.cross_entropy(net(images), labels) for images, labels in given]))


def test_a_model_trains_with_losses_to_the_same_loss():
    (exact, first, before, after, summary), (_, second, *_) = values(launch(2, lossy))
    assert summary["lost"] > 0
    assert summary["violations"] == 0
    assert summary["max_message_ratio"] <= LOSSY["loss_bound"]
    for name in exact:
        assert torch.equal(first[name], second[name]), "each rank's shard is what the others gather"
    assert any(not torch.equal(first[name], exact[name]) for name in exact)
    assert before < 2.25, "which is learning: guessing has log(10)"
    assert after == pytest.approx(before, rel=0.01)


def hybrid(worker):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs, _ = trained(worker.rank, mesh=mesh)
    ours, state = trained(worker.rank, worker.options(), mesh=mesh)
    return theirs, ours, state.ledger.summary()["delivered"]


def test_shards_may_be_replicated():
    for theirs, ours, delivered in values(launch(4, hybrid)):
        assert delivered > 0
        for name in theirs:
            assert torch.equal(theirs[name], ours[name]), name


class Alternating(nn.Module):
    """A model of which a step leaves a layer out."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 300), nn.Linear(64, 300)

    def forward(self, given, step):
        found = self.one(given)
        return (found if step == 1 else found + self.other(given)).sum()


def leaving_a_layer_out(worker):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(worker.rank)
    given = torch.randn(5, 64)
    totals = []
    for options in (None, worker.options(**LOSSY)):
        model = fully_shard(Alternating())
        state = dlcp.torch.enable(model, options) if options else None
        totals.append({})
        for step in range(3):
            model.zero_grad()
            model(given, step).backward()
            for name, parameter in model.named_parameters():
                got = parameter.grad.full_tensor() if parameter.grad is not None else 0
                assert step != 1 or name.startswith("one") or not options or parameter.grad is None
                totals[-1][name] = totals[-1].get(name, 0) + got
        if state:
            owed = {name: state.feedback.of(name) for name in totals[-1]}
            lost = state.ledger.summary()["lost"]
            state.close()
    return totals, owed, lost


def test_a_step_may_leave_parameters_out():
    found = values(launch(2, leaving_a_layer_out))
    (exact, ours), *_ = found[0]
    assert sum(lost for *_, lost in found) > 0
    for name, total in exact.items():
        owed = torch.zeros(total.numel())
        for _, residuals, _ in found:
            if residuals[name] is not None:  # which may end early, or with what fills up a packet
                owed += torch.from_numpy(np.pad(residuals[name], (0, len(owed)))[: len(owed)])
        torch.testing.assert_close(2 * ours[name] + owed.view(total.shape), 2 * total, rtol=0, atol=2e-3)


def refused_at_the_start(worker):
    """Two ranks that cannot join, of which each has something to send from a checkpoint."""
    from torch.distributed.fsdp import fully_shard

    theirs, _ = trained(worker.rank)
    ours, state = trained(worker.rank, worker.options(meet_s=2.0))
    reason = state.reason
    kept = dlcp.torch.State(worker.options(meet_s=2.0))
    segments = [dlcp.values.tags.Segment(dlcp.values.tags.Layer("first", 0), 0, 60_000)]
    kept.feedback.add(np.arange(60_000, dtype=np.float32), segments)
    model = fully_shard(Linear())
    dlcp.torch.enable(model, state=kept)
    model(*gradients_of(worker.rank)).backward()
    kept.close()
    return theirs, ours, reason, state.step, model.first.grad.full_tensor()


def test_ranks_that_cannot_join_train_on_as_without():
    total = sum(gradients_of(rank)[0] for rank in range(2))
    found = values(launch(2, with_secret, refused_at_the_start, ("s" * 32, "other " * 6)))
    for theirs, ours, reason, steps, first in found:
        assert "has not joined with the job's secret" in reason
        assert steps == STEPS
        for name in theirs:
            assert torch.equal(theirs[name], ours[name]), name
        torch.testing.assert_close(2 * first, total + 2 * torch.arange(60_000.0), rtol=1e-6, atol=1e-2)


def refusals(worker):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def sideways():
        return fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda p: Shard(p.ndim - 1))

    messages = []
    for make_model, fields in (
        (lambda: nn.Linear(4, 4), {}),
        (lambda: shard(make()), {"compression": "topk:0.1", "samples": 3}),
        (lambda: shard(make()), {"collective": "ring"}),
        (sideways, {}),
    ):
        try:
            dlcp.torch.enable(make_model(), worker.options(**fields))
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    net = shard(make())
    state = dlcp.torch.enable(net, worker.options())
    state.close()
    try:
        train_replicated(net, OPTIMIZERS["sgd"](net.parameters()), worker.rank, 1)
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_what_cannot_be_done_is_refused():
    for messages in values(launch(2, refusals)):
        assert [message.partition(":")[0] for message in messages[:4]] == ["TypeError", *["ValueError"] * 3]
        for said, wanted in zip(
            messages,
            ("got Linear", "samples, compression", "not support collective", "along dimension 1", "is closed"),
            strict=True,
        ):
            assert wanted in said


@pytest.mark.parametrize("group", [None, object()])
def test_a_module_before_pytorch_2_13_has_one_group_or_none(group):
    module = SimpleNamespace(
        set_custom_reduce_scatter=None, _get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=group)
    )
    assert groups_of(module) == [group][: group is not None]


def with_a_rank_that_ends(worker):
    net = shard(make(), reshard_after_forward=False)  # so that backward has nothing to gather
    dlcp.torch.enable(net, worker.options(silence_s=1.5))
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train_replicated(net, optimizer, worker.rank, 1)
    if worker.rank == 1:
        net.register_forward_hook(lambda *given: given[-1].register_hook(lambda _: os._exit(9)) and None)
    try:
        train_replicated(net, optimizer, worker.rank, 1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_ends_is_an_error_of_the_others():
    outcomes = launch(2, with_a_rank_that_ends, limit_s=60)
    assert outcomes[1].exit_status == 9
    (message,) = values(outcomes[:1])
    assert "rank 1 has been silent" in message
    assert "head.weight" in message
