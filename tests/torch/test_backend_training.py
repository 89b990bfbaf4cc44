# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 over the backend ``dlcp``, against the same training over Gloo; and how a group is made and ended."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.torch import backend
from dlcp.transport import Endpoint
from dlcp.values.tags import TagPolicy
from tests.faults.lossy_sockets import lossy_endpoints
from tests.torch.workers import LIMIT_S, WAYS, launch, values
from tests.train import forked

pytestmark = pytest.mark.timeout(110)
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


def make():
    torch.manual_seed(7)
    features = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(8 * 36, 64), nn.ReLU(), nn.Linear(64, 8))


def train(model, rank, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        rng = np.random.default_rng([rank, step])
        images = torch.from_numpy(rng.standard_normal((8, 1, 8, 8)).astype(np.float32))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.from_numpy(rng.integers(0, 8, 8))).backward()
        optimizer.step()


def ddp(group, rank, hook_options=None):
    net = make()
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.05)
    state = dlcp.torch.enable(model, hook_options) if hook_options else None
    train(model, rank)
    if state:
        state.close()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def sharded(group, rank, allowed=None):
    from torch.distributed.fsdp import fully_shard

    net = make()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    ledger = backend.allow_loss(group, allowed) if allowed else None
    train(net, rank)
    whole = {name: value.full_tensor().detach().clone() for name, value in net.named_parameters()}
    return (whole, ledger.summary()) if ledger else whole


def training(worker):
    group = dist.new_group(backend="dlcp")
    found = {
        "ddp": (ddp(None, worker.rank), ddp(group, worker.rank)),
        "fsdp": (sharded(dist.group.WORLD, worker.rank), sharded(group, worker.rank)),
        "hook": (ddp(None, worker.rank), ddp(group, worker.rank, worker.options(loss_bound=0.0))),
    }
    dist.destroy_process_group(group)
    return found


@pytest.fixture(scope="module", params=WAYS)
def trained(request):
    return values(launch(2, training, environment=WAYS[request.param]))


@pytest.mark.parametrize("case", ["ddp", "fsdp", "hook"])
def test_training_equals_gloos_to_the_bit(trained, case):
    for rank, found in enumerate(trained):
        theirs, ours = found[case]
        for name in theirs:
            assert torch.equal(theirs[name], ours[name]), f"rank {rank}, {name}"


def lossy_training(worker):
    Endpoint.__init__ = lossy_endpoints(0.05)
    group = dist.new_group(backend="dlcp")
    allowed = dlcp.torch.Options(loss_bound=0.2, immediate=True, tag_policy=ALL_DROPPABLE)
    found = sharded(dist.group.WORLD, worker.rank), sharded(group, worker.rank, allowed)
    with pytest.raises(TypeError, match="got gloo"):
        backend.allow_loss(dist.group.WORLD, allowed)
    dist.destroy_process_group(group)
    return found


def test_sharded_gradients_may_be_lossy_within_the_bound_if_the_user_says_so():
    environment = {"DLCP_PAYLOAD_BYTES": "576"}  # some hundred packets
    found = values(launch(2, lossy_training, environment=environment))
    (exact, (first, summary)), (_, (second, theirs)) = found
    assert summary["lost"] + theirs["lost"] > 0
    assert summary["violations"] == 0
    assert summary["max_message_ratio"] <= 0.2
    for name in exact:
        assert torch.equal(first[name], second[name]), "what each rank holds is what the others see"
        assert torch.isfinite(first[name]).all()
    assert any(not torch.equal(first[name], exact[name]) for name in exact)


def four_in_groups(worker):
    ours = dist.new_group(backend="dlcp")
    pairs = [dist.new_group([0, 1], backend="dlcp"), dist.new_group([2, 3], backend="dlcp")]
    mine = pairs[worker.rank // 2]
    tensors = [torch.full((2_000,), float(worker.rank + i)) for i in range(6)]
    works = [dist.all_reduce(t, group=ours if i % 2 else mine, async_op=True) for i, t in enumerate(tensors)]
    for work in works:
        work.wait()
    sums = [t[0].item() for t in tensors]
    partner = worker.rank ^ 1
    got = torch.zeros(3)
    works = [dist.isend(torch.full((3,), float(worker.rank)), partner, mine), dist.irecv(got, partner, mine)]
    for work in works:
        work.wait()
    dist.destroy_process_group(mine)
    after = torch.ones(1)
    dist.all_reduce(after, group=ours)  # the group that is left goes on
    return sums, got[0].item(), after.item()


def test_groups_work_beside_each_other():
    for rank, (sums, got, after) in enumerate(values(launch(4, four_in_groups))):
        pair = 2 * (rank // 2) + 2 * (rank // 2) + 1
        assert sums == [6 + 4 * i if i % 2 else pair + 2 * i for i in range(6)]
        assert got == rank ^ 1
        assert after == 4


def world(worker, path):
    dist.barrier()  # nobody leaves Gloo while another still connects
    dist.destroy_process_group()
    store = dist.FileStore(str(path), worker.count)
    for _ in range(2):  # over one store, in which the first one's traces remain
        dist.init_process_group("dlcp", store=store, rank=worker.rank, world_size=worker.count)
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("dlcp", store=store, rank=worker.rank, world_size=worker.count)
    assert dist.get_backend() == "dlcp"
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    mesh = init_device_mesh("cpu", (1, worker.count), mesh_dim_names=("outer", "inner"))
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    net = ddp(None, worker.rank)
    endpoint = dist.group.WORLD.collectives.endpoint
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist(), sorted(net), not endpoint._thread.is_alive()


@pytest.mark.parametrize("count", [1, 2])
def test_the_world_can_be_of_dlcp_and_ends_with_its_threads(tmp_path, count):
    for tensor, names, dead in values(launch(count, world, tmp_path / "store")):
        assert tensor == [count**2] * 3
        assert "0.weight" in names
        assert dead


SCRIPT = """
import torch, torch.distributed as dist
import dlcp.torch
dist.init_process_group("dlcp")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(f"sum {total.item()}\\n", end="", flush=True)  # in one write: ranks share the pipe
if dist.get_rank():
    dist.destroy_process_group()  # who forgets it leaves the group in order all the same
"""


def test_torchrun_starts_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forked.run([*forked.TORCHRUN, "--nproc-per-node", "2", script], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3") == 2


SILENCE_S = 1.5


def killed(worker, what):
    options = dlcp.torch.Options(silence_s=SILENCE_S)
    group = dist.new_group(backend="dlcp", pg_options=options, timeout=timedelta(seconds=20))
    dist.barrier(group)
    if worker.rank == 2:
        os._exit(9)
    began_s = time.monotonic()
    pending = [dist.all_reduce(torch.ones(size), group=group, async_op=True) for size in (3, 20_000)]
    if what == "recv":
        pending = [dist.irecv(torch.zeros(3), 2, group)]
    errors = []
    for work in pending:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))
        assert not work.is_success()
        try:
            work.get_future().wait()
        except RuntimeError as error:
            errors.append(str(error))
    seconds = time.monotonic() - began_s
    try:
        dist.barrier(group)
    except RuntimeError as error:
        errors.append(str(error))
    dist.destroy_process_group(group)
    return errors, len(pending), seconds


@pytest.mark.parametrize("what", ["all_reduce", "recv"])
def test_a_killed_rank_ends_everything_under_way(what):
    outcomes = launch(3, killed, what, limit_s=40)
    assert outcomes[2].exit_status == 9
    for rank, (errors, pending, seconds) in enumerate(values(outcomes[:2])):
        assert len(errors) == 2 * pending + 1
        assert seconds < SILENCE_S + 30
        for error in errors:
            assert f"rank {rank}: " in error
            assert "rank 2 has been silent" in error or "gave up" in error, error
        assert {"all_reduce": "all_reduce number", "recv": "message from rank 2 with tag 0"}[what] in errors[0]
        assert "barrier number" in errors[-1]


def disagreeing(worker):
    group = dist.new_group(backend="dlcp", timeout=timedelta(seconds=10 * LIMIT_S))
    messages = []
    for start in (lambda: dist.broadcast(torch.ones(3 + worker.rank), 0, group=group), lambda: dist.barrier(group)):
        try:
            start()
        except RuntimeError as error:
            messages.append(str(error))
    dist.destroy_process_group(group)
    return messages


def test_ranks_that_disagree_about_a_size_are_told_at_once():
    giver, taker = values(launch(2, disagreeing))
    assert "broadcast number 0 of group" in taker[0]
    assert len(taker) == 2
    for message in (*giver, *taker):  # who only gives, and little, may hear of it with the next collective
        assert "were expected" in message
    assert "barrier number 1" in giver[-1]


def too_late(worker):
    group = dist.new_group(backend="dlcp", timeout=timedelta(seconds=0.5))
    message = ""
    if worker.rank == 0:
        try:
            dist.recv(torch.zeros(1), 1, group)
        except RuntimeError as error:
            message = str(error)
    else:
        time.sleep(1.0)  # longer than the group's timeout
    dist.destroy_process_group(group)
    return message


def test_waiting_ends_with_the_groups_timeout():
    assert "nothing arrived in 0.5 s" in values(launch(2, too_late))[0]


def asked_for_what_a_group_does_not_know(worker):
    messages = []
    backend.log.warning = lambda text, *told: messages.append(text % told)
    for _ in range(2):
        group = dist.new_group(backend="dlcp")
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        backend.allow_loss(group)
        dist.destroy_process_group(group)
    errors = []
    group = dist.new_group(backend="dlcp")
    for make in (
        lambda: dist.new_group(backend="dlcp", pg_options=dlcp.torch.Options(samples=8, compression="")),
        lambda: backend.allow_loss(group, dlcp.torch.Options(compression="bf16", samples=0)),
    ):
        try:
            make()
        except ValueError as error:
            errors.append(str(error))
    dist.destroy_process_group(group)
    return total.tolist(), messages, errors


def test_what_a_group_does_not_support_is_said_once_or_refused():
    environment = {"DLCP_COMPRESSION": "topk:0.1", "DLCP_SAMPLES": "4"}
    for rank, (total, messages, errors) in enumerate(
        values(launch(2, asked_for_what_a_group_does_not_know, environment=environment))
    ):
        assert total == [2.0] * 3
        assert len(messages) == (rank == 0)
        assert all("samples, compression" in message and "dlcp.torch.enable" in message for message in messages)
        assert ["not support samples:" in errors[0], "not support precision:" in errors[1]] == [True, True]
