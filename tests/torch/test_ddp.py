# SPDX-License-Identifier: Apache-2.0
"""DDP with DLCP's hook, in real processes over 127.0.0.1, against DDP without."""

import contextlib
import copy
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints
from tests.torch.ddp_models import ALL_DROPPABLE, BUCKET_MB, OPTIMIZERS, assert_same_bits, batch, make, train
from tests.torch.workers import WAYS, launch, values
from tests.transport.free_ports import free_port

pytestmark = pytest.mark.timeout(110)


def train_both(worker, *, optimizer="sgd", steps=4, dtype=torch.float32, freeze=(), accumulate=1, **options):
    """Train the same model with and without DLCP; return both sets of parameters, and the state's counts."""
    results = []
    for with_dlcp in (False, True):
        net = make(dtype, freeze)
        model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
        state = dlcp.torch.enable(model, worker.options(**options)) if with_dlcp else None
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        train(model, OPTIMIZERS[optimizer](trained), worker.rank, steps, dtype=dtype, accumulate=accumulate)
        results.append({name: parameter.detach().clone() for name, parameter in net.named_parameters()})
    identical = dlcp.torch.replicas_identical(net)
    summary = state.ledger.summary()
    state.close()
    return *results, identical, summary, state.step


def parity_of_two(worker):
    checks = {}
    for name, arguments in {
        "sgd": {},
        "adamw": {"optimizer": "adamw"},
        "no_sync": {"accumulate": 3, "steps": 2},
        "frozen": {"freeze": ("conv", "norm")},
        "float64": {"dtype": torch.float64, "steps": 2},
        "bfloat16": {"dtype": torch.bfloat16, "steps": 2},
        "float16": {"dtype": torch.float16, "steps": 1},
        "small packets": {"payload_bytes": 64, "steps": 1},
        "untagged": {"tagged": False, "congestion": "cubic", "steps": 1},
    }.items():
        checks[name] = train_both(worker, loss_bound=0.0, **arguments)
    return checks


@pytest.fixture(scope="module", params=WAYS)
def two_ranks(request):
    return values(launch(2, parity_of_two, environment=WAYS[request.param]))


@pytest.mark.parametrize(
    "case", ["sgd", "adamw", "no_sync", "frozen", "float64", "bfloat16", "small packets", "untagged"]
)
def test_two_ranks_without_loss_train_as_plain_ddp_does_to_the_bit(two_ranks, case):
    for rank in two_ranks:
        plain, ours, identical, summary, _ = rank[case]
        assert identical
        assert_same_bits(plain, ours)
        assert summary["sent"] > 0
        assert summary["lost"] == summary["violations"] == 0


def test_half_precision_is_averaged_at_least_as_well(two_ranks):
    # Gloo halves subnormal gradients before it adds them; DLCP adds first.
    for rank in two_ranks:
        plain, ours, identical, _, _ = rank["float16"]
        assert identical
        for name in plain:
            assert torch.allclose(plain[name], ours[name], rtol=2e-3, atol=1e-4)


def test_every_step_counts_once(two_ranks):
    assert two_ranks[0]["sgd"][4] == 4
    assert two_ranks[0]["no_sync"][4] == 2, "only the synchronised backward is a step"


def test_frozen_parameters_stay(two_ranks):
    before = dict(make().named_parameters())
    _, ours, *_ = two_ranks[1]["frozen"]
    for name, parameter in ours.items():
        assert torch.equal(parameter, before[name]) == name.startswith(("conv", "norm"))


def three_ranks(worker):
    whole = train_both(worker, loss_bound=0.0, optimizer="sgd")
    Endpoint.__init__ = lossy_endpoints(0.05)
    lossy = train_both(worker, loss_bound=0.2, immediate=True, steps=6, tag_policy=ALL_DROPPABLE, payload_bytes=576)
    return whole, lossy


def test_three_ranks_agree_with_plain_ddp_up_to_rounding_and_with_each_other_to_the_bit():
    results = values(launch(3, three_ranks))
    assert sum(lossy[3]["lost"] for _, lossy in results) > 0
    for whole, lossy in results:
        plain, ours, identical, summary, _ = whole
        assert identical
        assert summary["lost"] == 0
        for name in plain:
            assert torch.allclose(plain[name], ours[name], rtol=1e-4, atol=1e-6)
        plain, ours, identical, summary, _ = lossy
        assert identical, "replicas must not drift although shares were lost"
        assert summary["violations"] == 0
        assert summary["max_message_ratio"] <= 0.2


def on_cuda(worker):
    device = torch.device("cuda", worker.rank % torch.cuda.device_count())
    results = []
    for with_dlcp in (False, True):
        net = make().to(device)
        model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
        state = dlcp.torch.enable(model, worker.options(loss_bound=0.0)) if with_dlcp else None
        optimizer = OPTIMIZERS["sgd"](net.parameters())
        for step in range(4):
            optimizer.zero_grad()
            images, labels = batch(worker.rank, step)
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        results.append({name: parameter.detach().cpu() for name, parameter in net.named_parameters()})
    identical = dlcp.torch.replicas_identical(net)
    state.close()
    return *results, identical


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_on_cuda_train_as_with_plain_ddp():
    for plain, ours, identical in values(launch(2, on_cuda)):
        assert identical
        for name in plain:
            assert torch.allclose(plain[name], ours[name], rtol=1e-4, atol=1e-6)


def by_server(worker):
    net = make()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, dlcp.torch.Options.from_environment())
    assert state.active, state.reason
    train(model, OPTIMIZERS["sgd"](net.parameters()), worker.rank, 3)
    model = DistributedDataParallel(plain, bucket_cap_mb=BUCKET_MB)
    train(model, OPTIMIZERS["sgd"](plain.parameters()), worker.rank, 3)
    identical = dlcp.torch.replicas_identical(net)
    state.close()
    return dict(plain.named_parameters()), dict(net.named_parameters()), identical


def without_its_server(worker, server):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, dlcp.torch.Options.from_environment())
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(model, optimizer, worker.rank, 2)
    before = state.reason
    if worker.rank == 0:
        os.kill(server, signal.SIGKILL)
    train(model, optimizer, worker.rank, 3)
    reason, identical = state.reason, dlcp.torch.replicas_identical(net)
    state.close()
    return before, reason, identical


@contextlib.contextmanager
def parameter_server():
    """A server as a process, and the environment of its workers."""
    address = f"127.0.0.1:{free_port()}"
    server = subprocess.Popen(
        [sys.executable, "-m", "dlcp.cli", "server", "--bind", address], stdout=subprocess.PIPE, text=True
    )
    try:
        assert "server ready" in server.stdout.readline()
        yield server, {"DLCP_COLLECTIVE": f"server:{address}", "DLCP_LOSS_BOUND": "0"}
    finally:
        server.terminate()
        server.wait(10)


def test_a_parameter_server_averages_as_well():
    with parameter_server() as (server, environment):
        for plain, ours, identical in values(launch(2, by_server, environment=environment)):
            assert identical
            assert_same_bits(plain, ours)
    assert server.returncode == 0


def test_training_goes_on_without_its_server_and_says_why():
    with parameter_server() as (server, environment):
        environment |= {"DLCP_SILENCE_S": "1.5", "DLCP_DEADLINE_S": "10"}
        for before, reason, identical in values(launch(2, without_its_server, server.pid, environment=environment)):
            assert before == ""
            assert "rank 2 has been silent" in reason
            assert reason.endswith("(rank 2 is the parameter server)")
            assert identical


SILENCE_S = 1.5
KILLED_DEADLINE_S = 600.0


def killed_in_the_middle(worker):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    # Longer than a busy machine leaves a rank that lives without the processor, far shorter than a message's deadline.
    state = dlcp.torch.enable(model, worker.options(silence_s=4 * SILENCE_S, deadline_s=KILLED_DEADLINE_S))
    if worker.rank == 2:
        # Gradients of the head are on their way already when the convolution's are due.
        net.conv.weight.register_hook(lambda _: os._exit(9) if state.step == 2 else None)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    for step in range(5):
        began_s = time.monotonic()
        try:
            train(model, optimizer, worker.rank, 1)
        except Exception as error:
            return step, str(error), time.monotonic() - began_s
    return None


def waits_for_ever():
    threading.Event().wait()


def holds_the_lock():
    ctypes.PyDLL(None).sleep(100)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


DEADLINE_S = 3.0
HANGS = {
    waits_for_ever: ("answers but has not reached bucket", "Its threads:\nthread MainThread:"),
    holds_the_lock: ("silent", "Timeout (0:00:01.5"),
    stopped: ("silent", ""),
}
"""How a worker may hang, the others' messages about it, and its own message if it can write one."""


def hanging_in_the_middle(worker, hang, log):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    if worker.rank == 2:
        os.dup2(os.open(log, os.O_WRONLY), 2)
        faulthandler.enable()  # as dlcp train does
    state = dlcp.torch.enable(model, worker.options(silence_s=SILENCE_S, deadline_s=DEADLINE_S))
    if worker.rank == 2:
        net.conv.weight.register_hook(lambda _: hang() if state.step == 2 else None)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(model, optimizer, worker.rank, 2)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizer, worker.rank, 1)
    return str(caught.value), time.monotonic() - began_s


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_a_worker_that_hangs_ends_the_others_with_its_name_and_says_where_it_is(hang, tmp_path):
    others_say, it_says = HANGS[hang]
    log = tmp_path / "log"
    log.touch()
    outcomes = launch(3, hanging_in_the_middle, hang, log, limit_s=40, lost=[2])
    for message, seconds in values(outcomes[:2]):
        assert "step 2: rank 2" in message
        assert others_say in message
        assert seconds < 10 * DEADLINE_S
    said = log.read_text()
    assert it_says in said
    assert not it_says or f"in {hang.__name__}" in said


def test_a_killed_worker_ends_the_others_with_its_name():
    outcomes = launch(3, killed_in_the_middle, limit_s=120)
    assert outcomes[2].exit_status == 9
    for rank, (step, message, seconds) in enumerate(values(outcomes[:2])):
        assert step == 2
        assert "rank 2" in message, f"rank {rank}: {message}"
        assert "step 2" in message
        assert "silent" in message
        assert seconds < KILLED_DEADLINE_S / 5, "they waited for something else than the silence"
