# SPDX-License-Identifier: Apache-2.0
"""The state behind DLCP's hook: what it keeps and refuses, and its handling of non-finite values."""

import contextlib
import io
import logging
import os
import pickle
import re

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.torch.state import State
from dlcp.values.tags import TagPolicy
from tests.torch.ddp_models import ALL_DROPPABLE, BUCKET_MB, Linear, gradients_of, make
from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(110)


def checkpoint_and_resume(worker):
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(loss_bound=0.3, immediate=True, tag_policy=ALL_DROPPABLE))
    for _ in range(2):
        model.zero_grad()
        model(*wanted).backward()
        taken = [parameter.grad.clone() for parameter in model.module.parameters()]
        if state.step == 1:
            first = taken
    state.close()
    saved = pickle.dumps(state)
    owed = state.feedback.size

    loaded = pickle.loads(saved)
    again = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    resumed = dlcp.torch.enable(again, worker.options(loss_bound=0.0), state=loaded)
    again(*[torch.zeros_like(part) for part in wanted]).backward()
    paid = [parameter.grad.clone() for parameter in again.module.parameters()]
    step, bound = resumed.step, resumed.options.loss_bound
    resumed.close()
    return first, taken, paid, owed, step, bound


def test_training_resumes_from_a_pickled_state_with_what_it_owes():
    results = values(launch(2, checkpoint_and_resume))
    total = [sum(parts) for parts in zip(*(gradients_of(rank) for rank in range(2)), strict=True)]
    assert sum(owed for *_, owed, _, _ in results) > 1000, "immediate mode leaves something to owe"
    for first, second, paid, _, step, bound in results:
        assert (step, bound) == (3, 0.0)
        for part, given in enumerate(total):
            torch.testing.assert_close(2 * (first[part] + second[part] + paid[part]), 2 * given, rtol=0, atol=2e-5)


def announcing(worker):
    said, handler = io.StringIO(), logging.StreamHandler(logged := io.StringIO())
    with contextlib.redirect_stderr(said):
        dlcp.torch.enable(DistributedDataParallel(Linear()), worker.options()).close()
        logging.getLogger("dlcp").addHandler(handler)
        logging.getLogger("dlcp").setLevel(logging.INFO)
        dlcp.torch.enable(DistributedDataParallel(Linear()), worker.options(loss_bound=0.0)).close()
    return said.getvalue(), logged.getvalue()


def test_the_first_rank_says_how_dlcp_averages_or_logs_it_if_the_script_logs():
    (said, logged), others = values(launch(2, announcing))
    assert re.fullmatch(r"dlcp: averages the gradients of Linear .* over 2 ranks: loss bound 10%, precision .*\n", said)
    assert re.match(r"DLCP averages the gradients of Linear .* over 2 ranks: loss bound 0%, precision .*\n", logged)
    assert "averages" not in "".join(others)


def flushing(worker):
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    options = worker.options(loss_bound=0.3, immediate=True, tag_policy=ALL_DROPPABLE, precision="8")
    state = dlcp.torch.enable(model, options)
    taken, sizes, encoded = [0.0, 0.0], [], []
    for step in range(8):
        if step in (5, 7):
            state.flush()
        model.zero_grad()
        model(*wanted).backward()
        taken = [total + p.grad for total, p in zip(taken, model.module.parameters(), strict=True)]
        sizes.append(state.feedback.size)
        encoded.append(any(record.bits == 8 for record in state.ledger.of_step(step)))

    def flush_too_late(gradient):
        with pytest.raises(RuntimeError, match="flush\\(\\) is too late for step 8: call it before backward"):
            state.flush()
        return gradient

    model.module.first.register_hook(flush_too_late)  # the last bucket is on its way already
    model(*wanted).backward()
    state.close()
    with pytest.raises(RuntimeError, match="a state in use"):
        state.flush()
    return taken, sizes, encoded


def test_after_a_flush_all_gradients_are_in_the_averages_and_nothing_is_left():
    results = values(launch(2, flushing))
    total = [8 * sum(parts) for parts in zip(*(gradients_of(rank) for rank in range(2)), strict=True)]
    for taken, sizes, encoded in results:
        assert min(sizes[4], sizes[6]) > 1000, "rounding leaves something to send"
        assert (sizes[5], sizes[7]) == (0, 0)
        assert encoded == [True] * 5 + [False, True, False]
        for got, given in zip(taken, total, strict=True):
            torch.testing.assert_close(2 * got, given, rtol=0, atol=2e-4)


def beside_a_stranger(worker):
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    store = dist.distributed_c10d._get_default_store()
    if worker.rank == 0:
        for key in ("verdict", "here/1", "entry/0", "entry/1", "left", "left/1"):
            store.set(f"dlcp/world/0/{key}", '{"token": 1}')
    dist.barrier()
    state = dlcp.torch.enable(model, worker.options(meet_s=2.0))
    model(*wanted).backward()
    active, reason = state.active, state.reason
    state.close()
    return active, reason, [parameter.grad.clone() for parameter in model.module.parameters()]


@pytest.mark.parametrize("secrets", [("s" * 32, "s" * 32), ("s" * 32, "other " * 6)])
def test_ranks_with_a_secret_train_on_whatever_a_stranger_has_written_or_a_rank_has_wrong(secrets):
    total = [sum(parts) for parts in zip(*(gradients_of(rank) for rank in range(2)), strict=True)]
    right = len(set(secrets)) == 1
    found = values(launch(2, with_secret, beside_a_stranger, secrets))
    for rank, (active, reason, gradients) in enumerate(found):
        assert active == right, reason
        assert right or f"rank {1 - rank} has not joined with the job's secret" in reason
        for given, summed in zip(gradients, total, strict=True):
            torch.testing.assert_close(2 * given, summed, rtol=0, atol=2e-5)


def with_secret(worker, function, secrets):
    os.environ["DLCP_SECRET"] = secrets[worker.rank]
    return function(worker)


BAD = {1: (1, float("inf")), 2: (0, float("nan")), 4: (1, -float("inf"))}


class Overflowing:
    """Gradients of which one value, on one rank, is not finite in some steps."""

    @classmethod
    def of(cls, rank, step, dtype):
        wanted = [part.to(dtype) for part in gradients_of(rank)]
        culprit, value = BAD.get(step, (None, 0.0))
        if rank == culprit:
            wanted[0][41_234] = value
        return wanted


def mixed_precision(worker):
    found = {}
    options = worker.options(loss_bound=0.3, immediate=True, tag_policy=ALL_DROPPABLE, payload_bytes=1440)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["moved"], found["scales"] = [], []
    for step in range(5):
        before = dlcp.torch.parameter_digest(model)
        optimizer.zero_grad()
        scaler.scale(model(*Overflowing.of(worker.rank, step, torch.float32))).backward()
        scaler.step(optimizer)
        scaler.update()
        found["moved"].append(dlcp.torch.parameter_digest(model) != before)
        found["scales"].append(scaler.get_scale())
    found["identical"] = dlcp.torch.replicas_identical(model)
    found["finite"] = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    found["lost"] = state.ledger.summary()["lost"]
    state.close()

    for dtype in (torch.float16, torch.bfloat16):
        model = DistributedDataParallel(Linear().to(dtype), bucket_cap_mb=BUCKET_MB)
        state = dlcp.torch.enable(model, options)
        seen = []
        for step in range(5):
            model.zero_grad()
            model(*Overflowing.of(worker.rank, step, dtype)).backward()
            seen.append(not all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()))
        found[dtype] = seen
        state.close()
    return found


def test_what_overflows_on_one_rank_is_seen_by_all_so_that_all_skip_the_step():
    results = values(launch(2, mixed_precision))
    assert sum(found["lost"] for found in results) > 0, "packets were lost, but none with what is not finite"
    for found in results:
        assert found["moved"] == [True, False, False, True, False]
        assert found["scales"] == [1024.0, 512.0, 256.0, 256.0, 128.0]
        assert found["identical"]
        assert found["finite"]
        assert found[torch.float16] == found[torch.bfloat16] == [False, True, True, False, True]


def odds_and_ends(worker):
    found = {}
    # The hook that communicates nothing leaves each rank its own gradients.
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear())
    model.register_comm_hook(None, dlcp.torch.noop_hook)
    model(*wanted).backward()
    found["noop"] = all(
        torch.equal(parameter.grad, mine) for parameter, mine in zip(model.module.parameters(), wanted, strict=True)
    )

    # A changed bit is found.
    net = make()
    found["same"] = dlcp.torch.replicas_identical(net)
    if worker.rank == 1:
        with torch.no_grad():
            net.head.bias.view(torch.int32)[3] ^= 1
    found["changed"] = dlcp.torch.replicas_identical(net)

    # What has been closed averages nothing in silence.
    model = DistributedDataParallel(Linear())
    state = dlcp.torch.enable(model, worker.options())
    model(*wanted).backward()
    found["layers"] = sorted(state.layer_seconds())
    found["times"] = [len(seconds) for seconds in state.layer_seconds().values()]
    state.close()
    try:
        model(*wanted).backward()
        found["closed"] = "nothing happened"
    except RuntimeError as error:
        found["closed"] = str(error)
    return found


def test_odds_and_ends_of_two_ranks():
    for found in values(launch(2, odds_and_ends)):
        assert found["noop"]
        assert found["same"]
        assert not found["changed"]
        assert found["layers"] == ["0", "255"]
        assert found["times"] == [1, 1]
        assert "the state is closed" in found["closed"]


def alone(worker):
    wanted = gradients_of(0)
    model = DistributedDataParallel(Linear())
    state = dlcp.torch.enable(model, worker.options())
    model(*wanted).backward()
    same = all(torch.equal(p.grad, mine) for p, mine in zip(model.module.parameters(), wanted, strict=True))
    identical = dlcp.torch.replicas_identical(model.module)
    endpoint = state.endpoint
    state.close()
    return same, identical, endpoint


def test_a_group_of_one_needs_no_network():
    assert values(launch(1, alone)) == [(True, True, None)]


def test_options_given_with_a_loaded_state_replace_its_own():
    kept = dlcp.torch.Options(job=3, tag_policy=TagPolicy(memory=0.1))
    state = pickle.loads(pickle.dumps(State(kept)))
    assert (state.options, state.tagger.policy.memory) == (kept, 0.1)
    chosen = dlcp.torch.Options(job=4, tag_policy=TagPolicy(memory=0.9))
    with pytest.raises((ValueError, RuntimeError), match="process group"):
        dlcp.torch.enable(Wrapped(fine=nn.Parameter(torch.zeros(3))), chosen, state=state)
    assert (state.options.job, state.ledger.job, state.tagger.policy.memory) == (4, 4, 0.9)


def test_a_state_that_was_loaded_but_not_attached_says_so():
    state = pickle.loads(pickle.dumps(State(dlcp.torch.Options(loss_bound=0.05))))
    assert state.options.loss_bound == 0.05

    class NoBucket:
        def buffer(self):
            return torch.zeros(4)

    with pytest.raises(RuntimeError, match=r"call state\.attach\(model\)"):
        state.average_bucket(NoBucket())


class Wrapped(DistributedDataParallel):
    """Checks of enable() before it contacts other ranks."""

    def __init__(self, **parameters):
        nn.Module.__init__(self)
        self.process_group = None
        self._comm_hooks = []
        self.module = nn.Module()
        for name, parameter in parameters.items():
            self.module.register_parameter(name, parameter)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "torch.complex64 on cpu"),
        (nn.Parameter(torch.zeros(3, device="meta")), "torch.float32 on meta"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_named(parameter, words):
    model = Wrapped(fine=nn.Parameter(torch.zeros(3)), odd=parameter)
    with pytest.raises(ValueError, match="parameter odd is") as caught:
        dlcp.torch.enable(model, dlcp.torch.Options())
    assert words in str(caught.value)
    assert "bfloat16" in str(caught.value)


def test_a_digest_tells_a_changed_bit():
    net = make()
    before = dlcp.torch.parameter_digest(net)
    assert before == dlcp.torch.parameter_digest(make())
    with torch.no_grad():
        net.conv.weight.view(torch.int32)[0, 0, 0, 0] ^= 1
    assert dlcp.torch.parameter_digest(net) != before


def test_the_process_group_of_this_process_is_left_alone():
    assert not dist.is_initialized()


def leave_something_to_send(worker):
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(loss_bound=0.3, immediate=True, tag_policy=ALL_DROPPABLE))
    model(*gradients_of(worker.rank)).backward()
    taken = [parameter.grad.clone() for parameter in model.module.parameters()]
    state.close()
    return taken, pickle.dumps(state), state.feedback.size


def go_on_from(worker, saved):
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    former = State.redistributed([pickle.loads(each) for each in saved], worker.rank, worker.count)
    state = dlcp.torch.enable(model, worker.options(loss_bound=0.0), state=former)
    model(*[torch.zeros_like(part) for part in gradients_of(0)]).backward()
    paid = [parameter.grad.clone() for parameter in model.module.parameters()]
    state.close()
    return paid, state.step


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_ranks_sends_what_the_former_ones_had_still_to_send(before, after):
    """What a step did without and what comes with the next one is what the former ranks' average would have been."""
    first = values(launch(before, leave_something_to_send))
    assert sum(size for *_, size in first) > 1000
    found = values(launch(after, go_on_from, [saved for _, saved, _ in first]))
    wanted = [sum(parts) / before for parts in zip(*(gradients_of(rank) for rank in range(before)), strict=True)]
    for paid, step in found:
        assert step == 2
        for part, exact in enumerate(wanted):
            torch.testing.assert_close(first[0][0][part] + paid[part], exact, rtol=0, atol=2e-5)


def test_states_of_no_ranks_or_for_none_are_refused():
    with pytest.raises(ValueError, match="rank 0 of 2 cannot continue from 0 states"):
        State.redistributed([], 0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2 cannot continue from 1 states"):
        State.redistributed([State(dlcp.torch.Options())], 2, 2)
