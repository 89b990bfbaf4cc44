# SPDX-License-Identifier: Apache-2.0
"""Cross-step scheduling when something happens: who waits for what, misuse, loss, exceptions and dead ranks."""

import copy
import os
import pickle
import re
import time
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.session.averager import StepAverager
from dlcp.session.training_session import Fallback, TrainingSession
from dlcp.torch.crossstep import cross_step
from dlcp.torch.state import FRAMEWORK, State
from dlcp.transport import DeadlineError, Membership, shared_memory
from dlcp.values.tags import Segment, TagPolicy, layers_in_order
from tests.group.recovery_ranks import FakeEndpoint
from tests.torch.workers import WAYS, launch, values

pytestmark = pytest.mark.timeout(110)
MEMORY = shared_memory.supported()
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


def layers(count=3, width=16):
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def make(worker, net=None, *, optimizer=None, **options):
    net = net or layers()
    options = {"loss_bound": 0.0, **options}
    plain = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, cross_step(net, plain, worker.options(**options), group_bytes=1)


def backward(net, rank, step, width=16):
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(1000 * rank + step))
    net(inputs).square().mean().backward()


def weights(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class OnDemand:
    """A reducer whose averages come when the test says so: what is sent is its own average."""

    def __init__(self):
        self.sent = []
        self.futures = {}

    def begin_step(self, step, bits=32):
        assert all(future.done() for future in self.futures.values()), "an average of the last step is still missing"
        self.futures = {}

    def start(self, step, sequence, bucket):
        self.sent.append((step, sequence))
        self.futures[sequence] = Future()
        return self.futures[sequence]

    def arrive(self, sequence):
        if not self.futures[sequence].done():
            self.futures[sequence].set_result(None)


def waits_for_its_own_layer(worker):
    net = layers(4)
    network = OnDemand()

    def enter(index):
        # Runs before the hook that waits: a layer's average comes when the forward pass is there, and not before.
        if index < 3 and network.futures:
            network.arrive(index)

    for index, layer in enumerate(net):
        layer.register_forward_pre_hook(lambda *_, index=index: enter(index))
    net, optimizer = make(worker, net, deadline_s=1.0)
    traffic = optimizer.traffic
    shared = {"ledger": traffic.ledger, "feedback": traffic.feedback, "tagger": traffic.tagger}
    traffic.session = TrainingSession(StepAverager(traffic.options, Membership(0), **shared), Fallback(FRAMEWORK))
    traffic.session.use(FakeEndpoint(), network)
    found = {}
    before = weights(net)

    backward(net, 0, 0)
    optimizer.step()
    found["sent"] = list(network.sent)
    found["updated at step"] = [not torch.equal(before[f"{i}.weight"], dict.__getitem__(net[i]._parameters, "weight"))
                                for i in range(4)]  # fmt: skip
    hidden = net[0](torch.ones(1, 16))
    found["first layer"] = [network.futures[k].done() for k in range(4)]
    net[2](net[1](hidden))
    found["pending"] = sorted(optimizer._pending.groups)
    # The last one does not come in time.
    optimizer._groups[3].due_s = time.monotonic() + 0.5
    began_s = time.monotonic()
    try:
        net(torch.ones(1, 16))
    except DeadlineError as error:
        found["error"] = str(error)
    found["seconds"] = time.monotonic() - began_s
    # Late, but there: training goes on.
    network.arrive(3)
    found["recovers"] = error_of(lambda: backward(net, 0, 1))
    return found


def test_each_layer_waits_for_its_own_average_only():
    (found,) = values(launch(1, waits_for_its_own_layer))
    assert found["sent"] == [(0, 3), (0, 2), (0, 1), (0, 0)], "as backward produces them, numbered by place"
    assert found["updated at step"] == [False] * 4
    assert found["first layer"] == [True, False, False, False]
    assert found["pending"] == [3]
    assert "step 0" in found["error"]
    assert "rank 0 has no average of 3.weight..3.bias" in found["error"]
    assert found["seconds"] > 0.4
    assert found["recovers"] == "no error"


def life_of_two(worker):
    found, rank = {}, worker.rank
    found["no fallback"] = error_of(lambda: make(worker, loss_bound=0.1 * rank, fallback=False))

    # What the serial loop makes of five steps.
    net, optimizer = make(worker)
    for step in range(5):
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.synchronize()
        optimizer.step()
    expected = weights(net)
    members = [member for group in optimizer._groups for member in group.members]
    found["read where they are"] = all(group.exported for group in optimizer._groups) == (
        MEMORY and worker.options().shared_memory
    )
    gradients = [member.parameter.grad.clone() for member in members]
    assert all(member.in_buffer for member in members)
    optimizer.close()
    taken_back = [member.in_buffer != group.exported for group in optimizer._groups for member in group.members]
    found["taken back"] = all(taken_back) and all(
        torch.equal(member.parameter.grad, gradient) for member, gradient in zip(members, gradients, strict=True)
    )

    # An exception in the middle of a forward pass, and a checkpoint in the middle of training, change nothing.
    net, optimizer = make(worker)
    halfway = None
    for step in range(5):
        optimizer.zero_grad()
        if step == 2:
            trouble = net[1].register_forward_hook(lambda *_: 1 / 0)
            found["exception"] = error_of(lambda: backward(net, rank, 2))
            trouble.remove()
        if step == 3 and rank == 0:  # one rank alone may look
            halfway = pickle.loads(pickle.dumps((net.state_dict(), optimizer.state_dict())))
        backward(net, rank, step)
        optimizer.step()
    found["after an exception"] = same(expected, weights(net))
    found["waited"] = optimizer.waited_s > 0
    optimizer.close()
    found["plain again"] = error_of(lambda: (backward(net, rank, 9), optimizer.inner.step()))
    found["closed"] = error_of(optimizer.step)

    # From that checkpoint training goes on to the same end, although rank 1 knows nothing of it but what it is sent.
    net = layers()
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    saved = [halfway]
    torch.distributed.broadcast_object_list(saved)
    net.load_state_dict(saved[0][0])
    net, optimizer = make(worker, net, optimizer=plain)
    optimizer.load_state_dict(saved[0][1])
    for step in (3, 4):
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()
    found["resumed"] = same(expected, weights(net))

    # Loading in the middle of an update is not undone by it.
    optimizer.zero_grad()
    backward(net, rank, 5)
    optimizer.step()
    net.load_state_dict(expected)
    optimizer.synchronize()
    found["loaded"] = same(expected, weights(net))

    # Nor do gradients that are zeroed in place, by the optimizer or by the model, change the update that is under way.
    state, ends = copy.deepcopy(optimizer.state_dict()), []
    for zero in (optimizer.zero_grad, partial(optimizer.zero_grad, False), partial(net.zero_grad, False)):
        net.load_state_dict(expected)
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.zero_grad()
        backward(net, rank, 5)
        optimizer.step()
        zero()
        ends.append(weights(net))
    found["zeros"] = all(same(ends[0], end) for end in ends) and not same(expected, ends[0])
    net.load_state_dict(expected)

    # A step that all ranks drop moves nothing.
    optimizer.zero_grad()
    backward(net, rank, 6)
    optimizer.zero_grad()
    found["dropped"] = same(expected, weights(net))
    # Hooks around the step see whole steps.
    seen = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(weights(net)))
    backward(net, rank, 7)
    optimizer.step()
    handle.remove()
    found["hook"] = len(seen) == 1 and same(seen[0], weights(net)) and not same(seen[0], expected)

    # Misuse is named.
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(net, rank, 7)
    backward(net, rank, 8)
    found["second backward"] = error_of(lambda: backward(net, rank, 8))
    optimizer.zero_grad()
    backward(net, rank, 9)
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    found["clipped too soon"] = error_of(optimizer.step)
    found["inner"] = error_of(optimizer.inner.step)
    found["group"] = error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    optimizer.zero_grad()
    # One rank drops a step that the other takes.
    backward(net, rank, 10)
    if rank == 1:
        optimizer.zero_grad()
    else:
        optimizer.step()
    optimizer.zero_grad()
    backward(net, rank, 11)
    optimizer.step()
    before = dict.__getitem__(net[2]._parameters, "weight").clone()
    found["disagreement"] = error_of(optimizer.synchronize)
    torch.distributed.barrier()
    found["unharmed"] = torch.equal(before, dict.__getitem__(net[2]._parameters, "weight"))
    optimizer.close("test")
    net, optimizer = make(worker)
    weight = net[0].weight
    backward(net, rank, 12)
    optimizer.step()
    weight.grad.mul_(2)  # through a reference kept from before
    found["changed after step"] = error_of(optimizer.synchronize)
    optimizer.close("test")
    return found


@pytest.fixture(scope="module", params=WAYS)
def two_ranks(request):
    return values(launch(2, life_of_two, environment=WAYS[request.param]))


@pytest.mark.parametrize(
    "what",
    [
        "read where they are", "taken back", "after an exception", "waited", "resumed", "loaded", "zeros", "dropped",
        "hook", "unharmed",
    ],
)  # fmt: skip
def test_life_goes_on(two_ranks, what):
    assert [found[what] for found in two_ranks] == [True, True]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no fallback", "NotJoinedError: .*loss_bound"),
        ("exception", "ZeroDivisionError"),
        ("plain again", "no error"),
        ("closed", "RuntimeError: this optimizer is closed"),
        ("second backward", "has a second gradient of 2.bias, but the first was already sent.*no_sync"),
        ("clipped too soon", r"changed the gradient of 0.weight after it was sent: call `synchronize\(\)`"),
        ("changed after step", r"step 0: rank . changed the gradient of 0.weight after it was sent"),
        ("inner", "RuntimeError: call step.. of the optimizer that cross_step returned"),
        ("group", "RuntimeError: add parameter groups"),
        ("disagreement", "has updated .* in other steps than its peers"),
    ],
)
def test_misuse_is_named(two_ranks, what, words):
    for found in two_ranks:
        assert re.search(words, found[what]), found[what]


def lossy(worker, precision):
    torch.manual_seed(3)
    net = layers(3, 64)
    options = {"loss_bound": 0.3, "immediate": True, "tag_policy": ALL_DROPPABLE, "payload_bytes": 64}
    net, optimizer = make(worker, net, **options, precision=precision)
    before = weights(net)
    for step in range(4):
        optimizer.zero_grad()
        backward(net, worker.rank, step, 64)
        optimizer.step()
    optimizer.synchronize()
    found_flush = flush_once(optimizer, net, worker.rank)
    identical = dlcp.torch.replicas_identical(net)
    kept = pickle.loads(pickle.dumps(optimizer.traffic))
    ledger = optimizer.traffic.ledger.summary()
    moved = not same(before, weights(net))
    optimizer.close()
    owed = sum(kept.feedback.of(name) is not None for name, _ in net.named_parameters())
    resumed, again = make(worker, net)
    assert again.traffic.step == 0
    again.close()
    optimizer = cross_step(net, torch.optim.SGD(net.parameters(), lr=0.1), worker.options(loss_bound=0.0), state=kept)
    backward(net, worker.rank, 9, 64)
    optimizer.step()
    optimizer.synchronize()
    paid = sum(optimizer.traffic.feedback.of(name) is not None for name, _ in resumed.named_parameters())
    step = optimizer.traffic.step
    optimizer.close()
    return identical, ledger, moved, owed, paid, step, found_flush


def flush_once(optimizer, net, rank):
    """A whole step between lossy ones; return the residual after each, and the error of a late flush."""
    left = []
    for step in (4, 5, 6):
        optimizer.zero_grad()
        if step == 5:
            optimizer.flush()
        backward(net, rank, step, 64)
        late = error_of(optimizer.flush)
        optimizer.step()
        optimizer.synchronize()
        left.append(optimizer.traffic.feedback.size)
    return left, late


@pytest.mark.parametrize("precision", ["32", "8"])
def test_with_loss_replicas_stay_alike_and_what_is_owed_travels_with_a_checkpoint(precision):
    results = values(launch(3, lossy, precision))
    assert sum(ledger["lost"] for _, ledger, *_ in results) > 0
    assert sum(found[3] for found in results) > 0
    for identical, ledger, moved, _, paid, step, (_, late) in results:
        assert identical
        assert moved
        assert ledger["violations"] == 0
        assert (paid, step) == (0, 8)
        assert "flush() is too late, call it before backward" in late
    left = [sum(each) for each in zip(*(found[-1][0] for found in results), strict=True)]
    assert min(left[0], left[2]) > left[1] == 0


def rounded(worker, precision):
    """Train with gradients as large as after loss scaling; only rank 1 uses the third layer, and none the last."""
    net, optimizer = make(worker, layers(4, 64), precision=precision, payload_bytes=576)
    before = weights(net)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * worker.rank + step))
        (1e6 * net[: 2 + worker.rank](inputs).square().mean()).backward()
        optimizer.step()
    optimizer.synchronize()
    encoded = optimizer.traffic.ledger.summary()["by_bits"]
    identical = dlcp.torch.replicas_identical(net)
    optimizer.close()
    return encoded, identical, [name for name, value in weights(net).items() if not torch.equal(value, before[name])]


@pytest.mark.parametrize("precision", ["16", "8", "4"])
def test_lower_precision_rounds_no_flags(precision):
    for encoded, identical, changed in values(launch(2, rounded, precision)):
        assert encoded[precision][0] > 0
        assert identical
        assert changed == [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]


def refusals(worker):
    net = layers()

    def refuse(net, optimizer=None):
        optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
        return error_of(lambda: cross_step(net, optimizer, worker.options()))

    found = {
        "ddp": refuse(DistributedDataParallel(layers())),
        "strangers": refuse(net, torch.optim.SGD(layers().parameters(), lr=0.1)),
        "complex": refuse(nn.ParameterDict({"odd": nn.Parameter(torch.ones(2, dtype=torch.complex64))})),
        "frozen": refuse(layers().requires_grad_(False), None),
    }
    net[0].requires_grad_(False)
    net, optimizer = make(worker, net)
    backward(net, 0, 0)
    optimizer.step()
    net[0].requires_grad_(True)
    backward(net, 0, 1)
    found["thawed"] = error_of(optimizer.step)
    optimizer.close()
    # Two optimizers for two parts of a model.
    net = layers()
    first = cross_step(net, torch.optim.SGD(net[0].parameters(), lr=0.1), worker.options())
    second = cross_step(net, torch.optim.SGD(net[1:].parameters(), lr=0.1), worker.options())
    before = weights(net)
    backward(net, 0, 0)
    first.step()
    second.step()
    found["parts"] = sum(not torch.equal(before[name], value) for name, value in weights(net).items())
    return found


def test_what_cannot_be_done_is_refused_and_a_group_of_one_needs_no_network():
    (found,) = values(launch(1, refusals))
    assert "the module inside DistributedDataParallel" in found["ddp"]
    assert "the optimizer has 6 parameters that are not in the model" in found["strangers"]
    assert "parameter odd is torch.complex64 on cpu" in found["complex"]
    assert "no parameter that requires a gradient" in found["frozen"]
    assert "0.weight has a gradient but did not require one" in found["thawed"]
    assert found["parts"] == 6


def loaded_with_something_to_send(worker):
    """Two states with residual: one continues without DLCP, the other alone."""
    net = layers(2, 64)
    traffic = State(worker.options(meet_s=2.0, loss_bound=(0.0, 0.1)[worker.rank % 2]))  # ranks that do not agree
    named = list(net.named_parameters())
    ordered = layers_in_order([name for name, _ in named])
    for name, parameter in named:
        segment = Segment(ordered[name], 0, parameter.numel())
        traffic.feedback.add_whole(np.full(parameter.numel(), 1.0 + worker.rank, np.float32), [segment])
    before = weights(net)
    optimizer = cross_step(net, torch.optim.SGD(net.parameters(), lr=1.0), state=traffic)
    optimizer.flush()  # without DLCP every step is whole
    (0.0 * sum(parameter.sum() for parameter in net.parameters())).backward()
    optimizer.step()
    optimizer.synchronize()
    moved = {name: [part.item() for part in (before[name] - value).aminmax()] for name, value in weights(net).items()}
    left, reason = traffic.feedback.size, optimizer.reason
    optimizer.close()
    return moved, left, reason


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_checkpoint_has_still_to_send_is_sent_where_dlcp_does_not_average(count):
    for moved, left, reason in values(launch(count, loaded_with_something_to_send)):
        assert ("loss_bound" if count == 2 else "a group of one") in reason
        assert left == 0
        for values_moved in moved.values():
            assert values_moved == pytest.approx([1.0 if count == 1 else 1.5] * 2)


SILENCE_S = 2.5


def killed(worker):
    net, optimizer = make(worker, silence_s=SILENCE_S)
    if worker.rank == 2:
        # Gradients of the last layer are out already when the first's are due.
        net[0].weight.register_hook(lambda _: os._exit(9) if optimizer.traffic.step == 2 else None)
    for step in range(6):
        began_s = time.monotonic()
        try:
            optimizer.zero_grad()
            backward(net, worker.rank, step)
            optimizer.step()
        except Exception as error:
            seconds = time.monotonic() - began_s
            again = error_of(lambda: net(torch.ones(1, 16)))
            optimizer.close()
            return step, f"{type(error).__name__}: {error}", seconds, again
    return None


def test_a_killed_rank_ends_the_others_with_rank_step_and_layer():
    outcomes = launch(3, killed, limit_s=40)
    assert outcomes[2].exit_status == 9
    for rank, (step, message, seconds, again) in enumerate(values(outcomes[:2])):
        assert step == 3, "found out in the forward pass after the step in which it died"
        # Who finds out second is told by who found out first.
        assert message.startswith(("PeerSilentError: job 0, step 2", "PeerAbortedError: job 0, step 2"))
        assert f"rank {rank} has no average of 0.weight..0.bias" in message
        assert "rank 2 has been silent" in message
        assert "0.weight..0.bias" in again, "and every further forward pass says so at once"
        assert seconds < SILENCE_S + 30
