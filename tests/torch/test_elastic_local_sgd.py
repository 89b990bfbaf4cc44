# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo among ranks that come and go."""

import functools

import pytest
import torch
from torch import nn

import dlcp.torch
from dlcp.session import Options
from tests.group.elastic_jobs import jobs
from tests.group.group_ranks import together

TRAINING = """
import functools, hashlib, json, logging, sys, time
import torch
import dlcp.session, dlcp.torch
logging.basicConfig()
wanted, size, pause_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
torch.manual_seed(0)
history = []
with dlcp.session.join(dlcp.session.Options(elastic=1)) as group:
    torch.manual_seed(group.rank)
    model = torch.nn.Linear(size, 3)
    averager = dlcp.torch.LocalSGD(model, 3, group=group, outer=outer)
    first = group.step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while history[-5:] != 5 * [wanted]:
        optimizer.zero_grad()
        model(torch.randn(4, size)).pow(2).mean().backward()
        optimizer.step()
        ranks = list(group.ranks)
        if averager.step():
            if history[-1:] != [ranks]:
                print("step", group.step, *ranks, flush=True)
            history.append(ranks)
        time.sleep(pause_s)
    digest = dlcp.torch.parameter_digest(model)
    print("end", digest, first, json.dumps(history[-5:]), flush=True)
"""


def trained(group, **how):
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = dlcp.torch.LocalSGD(model, 2, group=group, **how)
    first = group.step
    start = [each.detach().clone() for each in model.parameters()]
    rounds = []
    for batch in torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(group.rank)):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        before = [each.detach().clone() for each in model.parameters()]
        if averager.step():
            rounds.append((before, [each.detach().clone() for each in model.parameters()]))
    averager.flush()
    assert group.step == first + 4
    return start, rounds


@pytest.mark.parametrize("outer", [None, functools.partial(torch.optim.SGD, lr=0.5)])
def test_the_ranks_of_a_group_average_their_changes(outer):
    (start, mine), (same, theirs) = together(2, lambda group: trained(group, outer=outer), Options(precision="32"))
    assert all(map(torch.equal, start, same))
    for (here, average), (there, equal) in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, average, equal))
        for anchor, one, other, common in zip(start, here, there, average, strict=True):
            step = (one + other) / 2 - anchor
            torch.testing.assert_close(common, anchor + (step if outer is None else 0.5 * step))
        start = average


def test_what_a_group_has_itself_is_refused():
    group = dlcp.session.join(rank=0, size=1)
    for extra in ({"options": Options()}, {"warmup_steps": 3}):
        with pytest.raises(ValueError, match=r"with a group of dlcp\.session: omit options"):
            dlcp.torch.LocalSGD(nn.Linear(1, 1), 2, group=group, **extra)
    averager = dlcp.torch.LocalSGD(nn.Linear(1, 1), 2, group=group)
    with pytest.raises(AttributeError, match="use the group's ledger"):
        _ = averager.traffic.step


def test_a_model_can_be_trained_on_when_its_averager_is_closed():
    model = nn.Linear(1, 1)
    with dlcp.session.join(rank=0, size=1) as group:
        dlcp.torch.LocalSGD(model, 2, group=group).close()
    model(torch.ones(1)).backward()


def test_a_killed_rank_loses_a_round_and_comes_back():
    with jobs() as start:
        job = start(3, [0, 2, 3], 100, codes=dict.fromkeys(range(3), TRAINING))
        job.wait_for(job.processes[0], ["0", "1", "2"])
        job.processes[1].kill()
        job.wait_for(job.processes[0], ["0", "2"])
        job.ends([job.processes[0], job.processes[2], job.start(1, TRAINING)])
