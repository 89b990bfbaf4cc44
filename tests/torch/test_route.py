# SPDX-License-Identifier: Apache-2.0
"""Training with one arm after the other, in real processes: nothing is lost on the way, and failures are noticed."""

import os
import re
import signal
import threading
import time

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.policies.arms import LAG, WARM_UP, Arm, ArmChooser, Route, trial_steps
from dlcp.session.recovery import Recovery
from dlcp.torch.crossstep import cross_step
from dlcp.transport import DeadlineError
from tests.torch.ddp_models import ALL_DROPPABLE, BUCKET_MB, OPTIMIZERS, Linear, gradients_of, make, train
from tests.torch.test_fsdp import shard
from tests.torch.workers import launch, values
from tests.waiting import until

pytestmark = pytest.mark.timeout(110)
STEPS = WARM_UP + trial_steps(3) + LAG + 3
"""Until all arms have been compared, and some more."""
LOSSY = {"loss_bound": 0.3, "immediate": True, "tag_policy": ALL_DROPPABLE}
FASTER = {"dlcp 8": 0.1, "dlcp 32": 0.09, "framework 32": 0.05}


def take_turns(session, by_framework):
    """Let the framework average these steps."""

    def begin_step(step, *, listen):
        chooser.arm = Arm(Route.FRAMEWORK if step in by_framework else Route.DLCP)
        chooser.step, chooser.framework_steps = step, chooser.framework_steps + (step in by_framework)

    chooser = session.chooser
    chooser.begin_step = begin_step


def lossy_turns(worker, options, by_framework, steps):
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(route="auto", **options))
    take_turns(state.session, by_framework)
    taken, owed, same = [0.0, 0.0], [], []
    for step in range(steps):
        if step == steps - 1:
            state.flush()
        model.zero_grad()
        model(*wanted).backward()
        taken = [total + p.grad for total, p in zip(taken, model.module.parameters(), strict=True)]
        owed.append(state.feedback.size)
        same.append([p.grad.sum().item() for p in model.module.parameters()])
    counts, active = state.session.chooser.framework_steps, state.active
    state.close()
    return taken, owed, same, counts, active


TURNS = {
    "into the framework": {5, 6, 7},
    "every other step": {1, 3, 5, 7},
    "only the first": {0},
    "all but the first": set(range(1, 8)),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("turns", TURNS)
def test_sums_are_exact_although_steps_lose_gradients_and_change_routes(turns, ranks):
    results = values(launch(ranks, lossy_turns, LOSSY, TURNS[turns], 8))
    total = [8 * sum(parts) for parts in zip(*(gradients_of(rank) for rank in range(ranks)), strict=True)]
    assert len({str(same) for _, _, same, _, _ in results}) == 1, "replicas are identical"
    for taken, owed, _, count, active in results:
        assert (count, active) == (len(TURNS[turns]), True)
        assert not any(owed[step] for step in TURNS[turns]), "the framework's steps leave nothing behind"
        assert owed[-1] == 0
        for got, given in zip(taken, total, strict=True):
            torch.testing.assert_close(ranks * got, given, rtol=0, atol=3e-4)
    if 0 not in TURNS[turns]:
        assert sum(owed[0] for _, owed, *_ in results) > 1000


def name_of(arm):
    return f"{arm.route.value} {arm.bits}"


def choosing(worker, way, fastest):
    """Train in a way until the ranks have chosen, with step times of our own: the machine's are not reproducible."""
    seconds = FASTER | {fastest: 0.05}
    chosen, choose, observe = {}, ArmChooser.choose, ArmChooser.observe

    def choose_and_note(self, step):
        chosen[step] = choose(self, step)
        return chosen[step]

    def observe_ours(self, step, report):
        ours = report._replace(step_s=seconds[name_of(chosen[step])], waited_s=0.02, lossy=False, queued=False)
        observe(self, step, ours)

    ArmChooser.choose, ArmChooser.observe = choose_and_note, observe_ours
    wanted = gradients_of(worker.rank)
    options = worker.options(route="auto", precision="auto", fallback=way != "ddp", **LOSSY | {"immediate": False})
    if way == "cross_step":
        model = Linear()
        optimizer = cross_step(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
        state, step = optimizer.traffic, optimizer.step
    else:
        model = shard(Linear()) if way == "fsdp" else DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
        state = dlcp.torch.enable(model, options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = optimizer.step
    arms = []
    for number in range(STEPS):
        if number == STEPS - 1:
            (optimizer if way == "cross_step" else state).flush()
        optimizer.zero_grad()
        model(*wanted).backward()
        step()
        arms.append(name_of(state.session.chooser.arm))
    if way == "cross_step":
        optimizer.synchronize()
    trained = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    said, count = state.route, state.session.chooser.framework_steps
    (optimizer if way == "cross_step" else state).close()
    return arms, said, count, trained


@pytest.mark.parametrize("fastest", FASTER)
@pytest.mark.parametrize("way", ["ddp", "cross_step", "fsdp"])
def test_ranks_take_the_fastest_arm_together_and_lose_nothing(way, fastest):
    results = values(launch(2, choosing, way, fastest))
    total = [STEPS * sum(parts) / 2 for parts in zip(*(gradients_of(rank) for rank in range(2)), strict=True)]
    for arms, said, count, trained in results:
        assert arms == results[0][0]
        assert set(arms[:WARM_UP]) == {"dlcp 8"}
        assert arms[-1] == fastest
        assert count == arms.count("framework 32")
        assert re.match(r"(gloo|\d+ bits) since step \d+: 50 ms a step; ", said)
        for got, given in zip(trained, total, strict=True):
            torch.testing.assert_close(-got, given, rtol=0, atol=2e-3)


def in_memory(worker):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(route="auto", precision="auto"))
    train(model, OPTIMIZERS["sgd"](net.parameters()), worker.rank, 3)
    found = state.route, state.session.chooser.arm.bits, state.session.chooser.framework_steps
    state.close()
    return found


def test_through_memory_all_steps_go_over_dlcp_in_full():
    for found in values(launch(2, in_memory, environment={"DLCP_SHARED_MEMORY": "1"})):
        assert found == ("32 bits: all ranks exchange packets through memory", 32, 0)


def leaving_dlcp(worker, fallback, chosen):
    """DLCP fails while the framework averages, or while ranks report on steps."""
    wanted = gradients_of(worker.rank)
    model = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(**chosen, fallback=fallback))
    taken = [0.0, 0.0]
    for step in range(6):
        if step == 2 and worker.rank == 1:
            model.module.first.register_hook(lambda gradient: state.session.leave(DeadlineError("a test")) or gradient)
        if step == 4:
            until(lambda: state.reason)
        model.zero_grad()
        try:
            model(*wanted).backward()
        except RuntimeError as error:
            return str(error)
        taken = [total + p.grad for total, p in zip(taken, model.module.parameters(), strict=True)]
    reason = state.reason
    state.close()
    return taken, reason


@pytest.mark.parametrize("chosen", [{"route": "framework"}, {"route": "auto", "precision": "auto"}])
def test_dlcp_that_fails_while_the_framework_averages_or_ranks_choose_does_no_harm(chosen):
    total = [6 * sum(parts) for parts in zip(*(gradients_of(rank) for rank in range(3)), strict=True)]
    for taken, reason in values(launch(3, leaving_dlcp, True, chosen)):
        assert reason == "a test"
        for got, given in zip(taken, total, strict=True):
            torch.testing.assert_close(3 * got, given, rtol=0, atol=3e-4)


def test_without_fallback_it_is_an_error():
    first, second = values(launch(2, leaving_dlcp, False, {"route": "framework"}))
    assert "a test" in second
    assert isinstance(first, str), "that of Gloo, or that another rank has left"


DEADLINE_S = 3.0


def waits_for_ever():
    threading.Event().wait()


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def dead():
    os._exit(9)


def while_gloo_fails(complete, session):
    """Return a recovery at whose end Gloo reports that a rank has ended: one whose recovery was faster."""

    def called(recovery, why):
        try:
            return complete(recovery, why)
        finally:
            error = RuntimeError("Connection closed by peer")
            for pending in session.table.unfinished():
                threading.Thread(target=session.settle, args=(pending, error)).start()
            time.sleep(0.5)  # holds the moment open that is tested

    return called


def failing_in_the_middle(worker, fail):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(route="framework", deadline_s=DEADLINE_S))
    if worker.rank == 0:
        Recovery.complete_buckets = while_gloo_fails(Recovery.complete_buckets, state.session)
    if worker.rank == 2:
        net.conv.weight.register_hook(lambda _: fail() if state.step == 2 else None)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(model, optimizer, worker.rank, 2)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizer, worker.rank, 1)
    return str(caught.value), time.monotonic() - began_s


FAILURES = {
    dead: "step 2: ",
    waits_for_ever: "step 2: rank 2 answers but has not reached bucket",
    stopped: "(not there: rank 2)",
}


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_a_rank_that_dies_or_hangs_while_the_framework_averages_ends_the_others(fail):
    outcomes = launch(3, failing_in_the_middle, fail, limit_s=60, lost=[2])
    for message, seconds in values(outcomes[:2]):
        assert FAILURES[fail] in message, message
        assert seconds < 5 * DEADLINE_S
