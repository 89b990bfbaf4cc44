# SPDX-License-Identifier: Apache-2.0
"""``dlcp train`` and ``dlcp doctor -- script`` as a user calls them: with torchrun, in processes of their own.

Those of the first test are started as a user's are, the others forked.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.commands import train as command
from dlcp.host.interfaces import only_way_out
from dlcp.inputs.addresses import format_host
from dlcp.train import launcher
from dlcp.train.launcher import WorkerTask
from tests.train import forked

pytest.importorskip("torch")
from torch.distributed.elastic.rendezvous import utils

pytestmark = pytest.mark.timeout(115)
REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from beside import WIDTH

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("arguments", sys.argv[1:], "backend", dist.get_backend(), flush=True)
    dist.destroy_process_group()
    if "--fail" in sys.argv and os.environ["RANK"] == "0":
        sys.exit(3)
"""

LIKE_TORCHRUNS = ["--mo", "0.9", "--log", "--m", "--n=1", "--lo", "--max", "--r", "--local", "--", "--no-python", "-m"]
"""Arguments of a script that are, or begin like, options of torchrun's."""

FAILING = """
import atexit, os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    atexit.register(time.sleep, 3)  # so that torchrun sees the others end before
    try:
        raise ValueError("label 11 is not a class")
    finally:
        dist.destroy_process_group()
dist.all_reduce(torch.ones(1000))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 5000\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def dlcp(*words, **variables):
    return forked.run(words, **variables)


def dlcp_unforked(*words, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DLCP_", "PET_"))}
    return subprocess.run(
        [sys.executable, "-m", "dlcp.cli", *map(str, words)],
        cwd=REPOSITORY,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_script_runs_with_its_arguments_and_a_summary_and_a_trace_follow(script, tmp_path):
    file, trace = tmp_path / "summary.json", tmp_path / "trace.json"
    option = ["--option", "loss_bound=0.02", "--summary", file, "--trace", trace]
    done = dlcp_unforked(
        "train", *option, "--nproc-per-node", "2", "--", script, "5", "--backend", "--mo", DLCP_LOSS_BOUND="0.5"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['5', '--backend', '--mo'] backend gloo\n", "what stands after -- is the script's"
    assert "dlcp: averages the gradients of Linear (50,010 parameters) over 2 ranks: loss bound 2%" in done.stderr
    told = done.stderr[done.stderr.index("DLCP  Linear") :]
    assert told.startswith("DLCP  Linear, 5 steps, 2 ranks\n")
    assert "bound exceeded     never" in told
    found = json.loads(file.read_text())
    assert (found["ranks"], found["ranks_here"], found["errors"], found["bound_exceeded"]) == (2, [0, 1], {}, 0)
    (model,) = found["models"]
    assert model["sent"] == model["delivered"] > 0
    assert (model["lost"], model["loss_bound"], model["steps"], model["fallback"]) == (0, 0.02, 5, None)
    steps = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "step"]
    assert {event["pid"] for event in steps} == {1, 2}
    assert {event["args"]["step"] for event in steps if event["ph"] == "b"} == {0, 1, 2, 3, 4}


def test_a_failure_passes_through_with_its_exit_status(script):
    done = dlcp("train", "--nproc-per-node", "1", "--", script, "2", "--fail")
    assert done.returncode == 3, done.stderr
    assert "rank 0 failed first, with exit status 3" in done.stderr
    assert "1 rank: nothing to exchange" in done.stderr


def test_the_rank_whose_script_raises_comes_before_those_that_lose_their_connection_to_it(tmp_path):
    (script := tmp_path / "script.py").write_text(FAILING)
    done = dlcp(
        "train", "--nproc-per-node", "3", "--summary", tmp_path / "summary.json", "--", script, TMPDIR=str(tmp_path)
    )
    assert done.returncode == 1
    first, *others = done.stderr.splitlines()[-3:]
    said, log = first.split("; its whole log: ")
    assert said == "  rank 1 failed first, with ValueError: label 11 is not a class"
    assert 'script.py", line 10, in <module>' in Path(log).read_text()
    assert any("then ended, with RuntimeError" in line for line in others), others
    assert json.loads((tmp_path / "summary.json").read_text())["first_failure"]["log"] == log


def test_a_rank_that_a_signal_ends_is_the_first(tmp_path):
    (script := tmp_path / "script.py").write_text(FAILING.replace("raise ValueError", "os.kill(os.getpid(), 9) #"))
    done = dlcp("train", "--nproc-per-node", "2", "--", script)
    assert done.returncode == 128 + 9
    assert "\n  rank 1 failed first, with SIGKILL, as when memory runs out\n" in done.stderr
    assert "the script trained no DistributedDataParallel model before it ended" in done.stderr


ENDLESS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 8))
for step in range(1000):
    model(torch.ones(4, 64)).sum().backward()
    time.sleep(0.1)  # a pace: the signal comes while it trains
    if step == 25 and dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
"""


def test_a_signal_to_the_launcher_is_said_and_the_figures_until_then(tmp_path):
    (script := tmp_path / "script.py").write_text(ENDLESS)
    done = dlcp("train", "--nproc-per-node", "2", "--summary", tmp_path / "summary.json", "--", script)
    assert done.returncode == 128 + 15
    assert "  dlcp train got SIGTERM, and so did its ranks\n" in done.stderr
    assert "  ranks 0, 1 ended with the SIGTERM of dlcp train\n" in done.stderr
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["stopped_by"], found["ranks_without_report"], found["first_failure"]) == ("SIGTERM", [0, 1], None)
    assert 10 <= found["models"][0]["steps"] <= 26


def test_head_room_is_asked_of_the_same_launcher_and_told_as_json(monkeypatch, capsys):
    seconds = {"none": [0.06] * 4, "framework": [0.1] * 4, "8 bits": [0.08] * 4}
    measured = {"model": "Net", "gradient_bytes": 8, "backend": "gloo", "seconds": seconds, "why_not": None}
    measured["steps_factors"] = {"8 bits": 1.0}
    asked = []

    def launch(torchrun, script, options, task):
        asked.append((torchrun, script, task))
        return 0, [{"rank": 0, "ranks": 1, "restarts": 0, "error": None, "models": [], "measured": measured}]

    monkeypatch.setattr(command, "launch", launch)
    words = ["--steps", "12", "--json", "--nproc-per-node", "2", "--", "script.py", "--steps", "7"]
    assert main(["doctor", *words]) == 0
    assert asked == [(["--nproc-per-node", "2"], ["script.py", "--steps", "7"], WorkerTask(measure_steps=12))]
    found = json.loads(capsys.readouterr().out)
    assert found["ways"]["8 bits"] == {"step_s": 0.08, "spread_s": 0.0, "steps": 4}
    assert found["speedup"] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no script"),
        (["script.py"], "no script"),
        (["--"], "no script"),
        (["--", "nowhere.py"], "there is no script nowhere.py"),
        (["--", "-m"], "-m without a module's name"),
        (["-m", "--nproc-per-node", "2", "json.tool"], "-m without a module's name"),
        (["--max-restarts", "--", __file__], "expected one argument"),
        (["--nproc-per-node", "many", "--", __file__], "torchrun: Unsupported nproc_per_node value: many"),
        (["--nnodes", "1:2:3", "--", __file__], "torchrun: nnodes=1:2:3 is not"),
        (["--no-python", "--", __file__], "--no-python cannot be used here"),
        (["--no_python", "--", __file__], "--no-python cannot be used here"),
        (["--option", "loss_bound", "--", __file__], "--option takes NAME=VALUE"),
        (["--option", "loss_bound=lots", "--", __file__], "--option loss_bound must be a number, or a number and then"),
        (["--option", "loss_bund=0", "--", __file__], "there is no option 'loss_bund'; did you mean loss_bound?"),
        (["--trace", "nowhere/file", "--", __file__], "--trace: there is no folder nowhere"),
        (["--measure", "--steps", "1", "--", __file__], "--steps must be at least 12"),
        (["--watch-only", "--measure", "--", __file__], "--measure averages with DLCP in turn, and with --watch-only"),
        (["--watch-only", "--backend", "--", __file__], "--backend makes DLCP carry all collectives, and with"),
        (["--watch-only", "--trace", "run.json", "--", __file__], "--trace records what DLCP sends, and with"),
        (
            ["--watch-only", "--option", "loss_bound=0", "--", __file__],
            "--option configures DLCP's averaging, and with",
        ),
    ],
)
def test_calls_that_cannot_work_are_refused_before_anything_starts(capsys, monkeypatch, words, complaint):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(["train", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_torchrun_finds_a_free_port_unless_told_how_to_meet(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    assert not launcher.has_rendezvous(["--nproc-per-node", "4", "--max-restarts=2"])
    for word in ("--nnodes=2", "--rdzv-endpoint=host:1", "--rdzv_backend", "--master-port", "--standalone"):
        assert launcher.has_rendezvous([word])
    monkeypatch.setenv("PET_NNODES", "2")
    assert launcher.has_rendezvous([])


def test_torchrun_and_gloo_are_told_the_address_that_leads_to_the_rendezvous(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def address(*words):
        return launcher.torchrun_settings(words, [__file__]).local_addr

    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    assert address(*meet, "127.0.0.1:29500") == "127.0.0.1"
    assert address(*meet, "nowhere.invalid:29500") is None
    assert address(*meet, "127.0.0.1", "--local-addr", "10.0.0.1") == "10.0.0.1", "the user has chosen"
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "not loopback"
    outward = only_way_out()
    if outward:
        assert address("--nnodes=2", f"--master-addr={outward.address}") == outward.address
        assert os.environ["GLOO_SOCKET_IFNAME"] == outward.name


def test_the_machine_with_the_address_of_the_rendezvous_serves_it(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    outward = only_way_out()
    if not outward:
        pytest.skip("needs an interface with a route out")

    monkeypatch.setattr(utils, "_matches_machine_hostname", lambda host: host == "127.0.0.1")

    def configured(address, *words):
        meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}", *words]
        return launcher.torchrun_settings(meet, [__file__]).rdzv_conf

    with socket.create_server((outward.address, 0)) as free:
        own = f"{format_host(outward.address)}:{free.getsockname()[1]}"
    assert configured(own) == "is_host=1"
    assert configured(own, "--rdzv-conf=read_timeout=9") == "read_timeout=9,is_host=1"
    assert configured(own, "--rdzv-conf=is_host=0") == "is_host=0", "the user has chosen"
    assert configured("127.0.0.1") == configured("192.0.2.1") == ""
    with socket.create_server((outward.address, 0)) as other:
        assert configured(f"{format_host(outward.address)}:{other.getsockname()[1]}") == "", "another launcher serves"
    monkeypatch.setattr(utils, "_matches_machine_hostname", lambda host: True)
    assert configured(own) == "", "torchrun finds out by itself"


@pytest.mark.parametrize(
    ("torchrun", "script", "target"),
    [
        (["--modul"], ["json.tool", "x"], ["-m", "json.tool", "x"]),
        ([], ["-m", "json.tool", "x"], ["-m", "json.tool", "x"]),
        ([], ["-m", "--", "json.tool", "--", "-m"], ["-m", "json.tool", "--", "-m"]),
        (["--nproc-per-node", "2"], [__file__, "-m"], [__file__, "-m"]),
        ([], [__file__, *LIKE_TORCHRUNS], [__file__, *LIKE_TORCHRUNS]),
        ([], ["-m", "json.tool", *LIKE_TORCHRUNS], ["-m", "json.tool", *LIKE_TORCHRUNS]),
    ],
)
def test_modules_scripts_and_their_arguments_reach_the_worker_as_they_are(torchrun, script, target):
    settings = launcher.torchrun_settings(torchrun, script)
    assert [settings.training_script, *settings.training_script_args][-len(target) :] == target
    assert (settings.no_python, settings.module) == (True, False)


SLOW = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed import barrier
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        time.sleep(0.15 * (dist.get_rank() == 1))  # more than a busy machine keeps a message waiting
        barrier()
        optimizer.zero_grad()
        model(torch.ones(4, 50)).square().mean().backward()
        optimizer.step()
    print(f"comm hooks {len(model._comm_hooks)}\\n", end="", flush=True)  # at once, for other ranks write, too
"""


def test_watching_only_names_the_slow_rank_and_leaves_averaging_alone(tmp_path):
    script, file = tmp_path / "slow.py", tmp_path / "summary.json"
    script.write_text(SLOW)
    done = dlcp("train", "--watch-only", "--summary", file, "--nproc-per-node", "3", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 3 * "comm hooks 0\n"
    assert "dlcp: watches Sequential (3,060 parameters), averaged by gloo" in done.stderr
    told = done.stderr[done.stderr.index("DLCP watched Sequential: averaged by gloo") :].splitlines()
    assert told[1].startswith("  who is slow        rank 1 makes the others wait ")
    assert told[2].split() == ["ms", "per", "step", "loading", "forward", "backward", "optimizer", "waiting"]
    assert told[3].startswith("  rank 1 "), "it waits least"
    (model,) = json.loads(file.read_text())["models"]
    assert (model["on"], model["watched"]["averages"]) == (False, "gloo")
    verdict = model["watched"]["verdict"]
    assert (verdict["rank"], verdict["cause"]) == (1, "data loading")
    assert model["watched"]["activities_s"]["1"]["loading"] > 0.15


SHARDED = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(json.dumps(losses), flush=True)
dist.destroy_process_group()
"""


def test_a_sharded_model_is_switched_on_too(tmp_path):
    script, file = tmp_path / "sharded.py", tmp_path / "summary.json"
    script.write_text(SHARDED)
    done = dlcp("train", "--summary", file, "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    assert "averages the gradients of FSDPSequential (19,210 parameters) over 2 ranks: loss bound 10%" in done.stderr
    plain = dlcp("train", "--option", "compression=topk:0.5", "--nproc-per-node", "2", script)
    assert plain.returncode == 0, plain.stderr
    assert "leaves FSDPSequential (19,210 parameters) alone: FSDP2 does not support compression" in plain.stderr
    assert json.loads(done.stdout) == pytest.approx(json.loads(plain.stdout), rel=1e-5)
    (model,) = json.loads(file.read_text())["models"]
    assert (model["on"], model["steps"], model["fallback"]) == (True, 4, None)
    assert model["delivered"] > 0
