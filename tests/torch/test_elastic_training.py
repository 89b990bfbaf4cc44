# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules that ranks train which come and go, and the division of their data."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import chain, islice

import pytest
import torch
from torch import nn

import dlcp.torch
from dlcp.session import Options
from dlcp.session.division import Division
from tests.group.group_ranks import together

LIMIT_S = 100
EXAMPLE = ["dlcp/examples/elastic.py", "--epochs", "400", "--pause", "0.01"]


@pytest.mark.parametrize("ahead", [0, 3])
def test_each_sample_is_drawn_once_while_ranks_come_and_go(ahead):
    """Ranks 0, 1, 2; rank 1 ends in step 5, ranks 3 and 4 come in step 12: all draw each sample of an epoch once."""
    samples, batch, now = 400, 4, [0]
    samplers = {rank: dlcp.torch.ElasticSampler(samples, batch, seed=3) for rank in range(5)}
    divisions = {rank: Division((0, 1, 2)) for rank in samplers}
    for rank, sampler in samplers.items():
        sampler.divide(divisions[rank], rank, lambda: now[0])
    iterators = {rank: iter(samplers[rank]) for rank in (0, 1, 2)}
    taken = {rank: [] for rank in samplers}
    for step in range(100):
        now[0] = step
        if step == 5:
            del iterators[1]
            first = max(divisions[rank].drawn for rank in iterators)
            for rank in iterators:
                divisions[rank].change(first, (0, 2))
        if step == 8:  # nobody has drawn data for step 12 yet
            for rank in (0, 2, 3, 4):
                divisions[rank].change(12, (0, 2, 3, 4))
        if step == 12:
            for rank in (3, 4):
                samplers[rank].load_state_dict(samplers[0].state_of(12))
                iterators[rank] = iter(samplers[rank])
                taken[rank] = [None] * 12
        for rank, iterator in iterators.items():
            taken[rank].extend(islice(iterator, step + ahead + 1 - len(taken[rank])))
        if all(len(taken[rank]) <= step for rank in iterators):
            break
    lost, taken[1] = taken[1][5:], taken[1][:5]
    seen = Counter(chain(*filter(None, chain(*taken.values()))))
    assert {samplers[rank].epoch for rank in iterators} == {1}
    assert set(seen.values()) == {1}
    assert len(lost) == ahead
    assert not seen.keys() & set(chain(*lost))
    assert samples - len(seen) - ahead * batch < 4 * batch  # too few for another step


def test_a_sampler_draws_another_order_in_each_epoch_and_resumes():
    now = [0]
    sampler = dlcp.torch.ElasticSampler(10, 2)
    with pytest.raises(RuntimeError, match="give this sampler to Elastic"):
        next(iter(sampler))
    sampler.divide(Division((0,)), 0, lambda: now[0])
    assert len(sampler) == 5
    first = list(sampler)
    now[0] = 5
    second = list(sampler)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    other = dlcp.torch.ElasticSampler(10, 2)
    other.divide(Division((0,)), 0, lambda: 7)
    other.load_state_dict(sampler.state_of(7))
    assert list(other) == second[2:]
    for samples, batch in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="need samples"):
            dlcp.torch.ElasticSampler(samples, batch)


def test_a_sampler_draws_all_batches_of_a_step_before_the_next_rank_s():
    now, samplers = [0], {rank: dlcp.torch.ElasticSampler(26, 2, batches_per_step=3, shuffle=False) for rank in (0, 1)}
    for rank, sampler in samplers.items():
        sampler.divide(Division((0, 1)), rank, lambda: now[0])
    assert len(samplers[0]) == 6
    iterators = [iter(samplers[rank]) for rank in (0, 1)]
    assert list(islice(iterators[0], 3)) == [[0, 1], [2, 3], [4, 5]]
    assert list(islice(iterators[1], 3)) == [[6, 7], [8, 9], [10, 11]]
    assert samplers[0].state_of(1) == {"epoch": 0, "position": 12, "step": 1}
    now[0] = 1
    assert list(iterators[0]) == [[12, 13], [14, 15], [16, 17]]
    assert samplers[0].state_of(2) == {"epoch": 1, "position": 0, "step": 2}


def trained_in_part(group):
    """Train three heads: rank 1 uses the second one only at first, and the third one is used only under ``no_sync``."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 1) for name in "abc"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    training = dlcp.torch.Elastic(model, optimizer, group=group)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.full((1, 3), (1.0 + step) * (-1) ** group.rank)
        with training.no_sync():
            model["c"](inputs).sum().backward()
        outputs = model["a"](inputs).sum()
        if step == 0 or group.rank == 0:
            outputs = outputs + model["b"](inputs).sum()
        outputs.backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def test_parameters_that_only_some_ranks_use_stay_equal():
    mine, theirs = together(2, trained_in_part, Options(precision="32", elastic=1))
    assert all(map(torch.equal, mine, theirs))


def trained(group, steps=6, **how):
    torch.manual_seed(group.rank)  # the lowest rank's parameters count
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = dlcp.torch.Elastic(model, optimizer, group=group, **how)
    inputs = torch.randn(steps, 4, 5, generator=torch.Generator().manual_seed(10 + group.rank))
    for batch in inputs:
        optimizer.zero_grad()
        with training.no_sync():
            model(batch[:2]).pow(2).mean().div(2).backward()
        model(batch[2:]).pow(2).mean().div(2).backward()
        optimizer.step()
    assert group.step == steps
    return [each.detach().clone() for each in model.parameters()], inputs


def test_two_ranks_train_as_one_with_their_samples():
    """The averages of two ranks' gradients are the gradients of all their samples."""
    (mine, inputs), (theirs, more) = together(2, trained, Options(precision="32", loss_bound=0, elastic=1))
    assert all(map(torch.equal, mine, theirs))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.cat([inputs, more], 1):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    for averaged, whole in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(averaged, whole.detach())


def test_models_that_it_does_not_take_are_refused_by_name():
    embedding = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="sparse=True"):
        dlcp.torch.Elastic(embedding, torch.optim.SGD(embedding.parameters(), lr=1))
    cube = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(ValueError, match="complex64"):
        dlcp.torch.Elastic(cube, torch.optim.SGD(cube.parameters(), lr=1))


def test_a_second_backward_pass_of_a_step_is_refused():
    model = nn.Linear(2, 1)
    with dlcp.torch.Elastic(model, torch.optim.SGD(model.parameters(), lr=1)):
        model(torch.ones(2)).backward()
        with pytest.raises(RuntimeError, match="under no_sync"):
            model(torch.ones(2)).backward()


class Launched:
    """``dlcp train --elastic`` of the example, whose lines are read as they come."""

    def __init__(self, *words):
        self.lines, self.arrived = [], threading.Condition()
        command = [sys.executable, "-m", "dlcp.cli", "train", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self.arrived:
                self.lines.append(line)
                self.arrived.notify_all()

    def wait_for(self, pattern, count=1):
        """Wait until lines contain a pattern ``count`` times; return what it matched."""

        def found():
            return re.findall(pattern, "".join(self.lines))

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(found()) >= count, LIMIT_S), "".join(self.lines)
            return found()


def test_a_killed_and_a_preempted_process_come_back():
    job = Launched("--elastic", "1:2", "--option", "precision=32", *EXAMPLE)
    try:
        pids = dict(job.wait_for(r"rank (\d) \(process (\d+)\) begins with step 0", 2))
        os.kill(int(pids["0"]), signal.SIGKILL)
        job.wait_for("Training goes on")
        pids |= dict(job.wait_for(r"rank (\d) \(process (\d+)\) begins with step [1-9]\d*"))
        assert sorted(pids) == ["0", "1", "2"]
        os.kill(int(pids["1"]), signal.SIGTERM)
        job.wait_for("DLCP: rank 1 leaves after step")
        job.wait_for(r"rank (\d) \(process (\d+)\) begins with step [1-9]\d*", 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        job.process.terminate()
        job.process.wait()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--elastic", "2"], "--elastic takes MIN:MAX, such as 2:4, got '2'"),
        (["--elastic", "3:2"], "--elastic takes MIN:MAX"),
        (["--elastic", "1:2", "--backend"], "does not know --backend: omit that"),
        (["--elastic", "1:2", "--nnodes", "2"], "does not know --nnodes 2"),
    ],
)
def test_what_makes_no_sense_is_refused(words, problem):
    done = subprocess.run(
        [sys.executable, "-m", "dlcp.cli", "train", *words, *EXAMPLE], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert problem in done.stderr
