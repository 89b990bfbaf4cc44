# SPDX-License-Identifier: Apache-2.0
"""DDP with DLCP's hook, in real processes over 127.0.0.1, against DDP without."""

import copy
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from workers import free_udp_ports, launch, values  # noqa: E402

import dlcp.torch  # noqa: E402
from dlcp.tags import TagPolicy  # noqa: E402
from dlcp.torch.hook import State  # noqa: E402

pytestmark = pytest.mark.timeout(110)
BUCKET_MB = 0.05
ALL_DROPPABLE = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)


class Net(nn.Module):
    """A convolution, a norm and two linear layers: large and small parameters, 43,470 in all."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 36, 140)
        self.head = nn.Linear(140, 10)

    def forward(self, images):
        return self.head(torch.relu(self.hidden(torch.relu(self.norm(self.conv(images))).flatten(1))))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def make(dtype=torch.float32, freeze=()):
    torch.manual_seed(7)
    net = Net().to(dtype)
    for name, parameter in net.named_parameters():
        parameter.requires_grad = not name.startswith(freeze) if freeze else True
    return net


def batch(rank, step, dtype=torch.float32):
    rng = np.random.default_rng([rank, step])
    images = torch.from_numpy(rng.standard_normal((12, 1, 8, 8))).to(dtype)
    return images, torch.from_numpy(rng.integers(0, 10, 12))


def train(model, optimizer, rank, steps, *, dtype=torch.float32, accumulate=1):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            images, labels = batch(rank, step * accumulate + part, dtype)
            if part < accumulate - 1:
                with model.no_sync():
                    nn.functional.cross_entropy(model(images), labels).backward()
            else:
                nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def train_both(worker, *, optimizer="sgd", steps=4, dtype=torch.float32, freeze=(), accumulate=1, **options):
    """Train the same model with and without DLCP; return both sets of parameters, and what the state counted."""
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


def assert_same_bits(plain, ours):
    for name in plain:
        assert torch.equal(plain[name], ours[name]), f"{name} differs by {(plain[name] - ours[name]).abs().max()}"


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


@pytest.fixture(scope="module")
def two_ranks():
    return values(launch(2, parity_of_two))


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
    lossy = train_both(worker, loss_bound=0.2, immediate=True, steps=6, tag_policy=ALL_DROPPABLE)
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


class Linear(nn.Module):
    """A model whose gradients are whatever one likes: the loss is the sum of parameter times wanted gradient."""

    def __init__(self, size=60_000):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size))
        self.last = nn.Parameter(torch.zeros(size // 2))

    def forward(self, first, last):
        return (self.first * first).sum() + (self.last * last).sum()


def gradients_of(rank):
    rng = np.random.default_rng(rank)
    return [torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for size in (60_000, 30_000)]


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
    owed = state.feedback.values

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


class Overflowing:
    """Gradients of which one value, on one rank, is not finite in some steps."""

    BAD = {1: (1, float("inf")), 2: (0, float("nan")), 4: (1, -float("inf"))}  # noqa: RUF012

    @classmethod
    def of(cls, rank, step, dtype):
        wanted = [part.to(dtype) for part in gradients_of(rank)]
        culprit, value = cls.BAD.get(step, (None, 0.0))
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
        assert "the state has been closed" in found["closed"]


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


def by_server(worker):
    net = make()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, dlcp.torch.Options.from_environment().with_(bind=f"127.0.0.1:{worker.port}"))
    train(model, OPTIMIZERS["sgd"](net.parameters()), worker.rank, 3)
    model = DistributedDataParallel(plain, bucket_cap_mb=BUCKET_MB)
    train(model, OPTIMIZERS["sgd"](plain.parameters()), worker.rank, 3)
    identical = dlcp.torch.replicas_identical(net)
    state.close()
    return dict(plain.named_parameters()), dict(net.named_parameters()), identical


def test_a_parameter_server_averages_as_well():
    *ports, server_port = free_udp_ports(3)
    server = subprocess.Popen(
        [sys.executable, "-m", "dlcp.cli", "server", "--bind", f"127.0.0.1:{server_port}", "--token", "99",
         "--loss-bound", "0", "--workers", *(f"127.0.0.1:{port}" for port in ports)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert "server ready" in server.stdout.readline()
        environment = {
            "DLCP_COLLECTIVE": "server",
            "DLCP_SERVER": f"127.0.0.1:{server_port}",
            "DLCP_TOKEN": "99",
            "DLCP_LOSS_BOUND": "0",
        }
        for plain, ours, identical in values(launch(2, by_server, ports=ports, environment=environment)):
            assert identical
            assert_same_bits(plain, ours)
    finally:
        server.terminate()
        assert server.wait(10) == 0


SILENCE_S = 1.5


def killed_in_the_middle(worker):
    net = make()
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state = dlcp.torch.enable(model, worker.options(silence_s=SILENCE_S))
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


def test_a_killed_worker_ends_the_others_with_its_name():
    outcomes = launch(3, killed_in_the_middle, limit_s=40)
    assert outcomes[2].exit_status == 9
    for rank, (step, message, seconds) in enumerate(values(outcomes[:2])):
        assert step == 2
        assert "rank 2" in message, f"rank {rank}: {message}"
        assert "step 2" in message
        assert "silent" in message
        assert seconds < SILENCE_S + 5


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
        state.average(NoBucket())


class Wrapped:
    """What enable() looks at before it talks to anybody."""

    def __init__(self, **parameters):
        self.process_group = None
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
