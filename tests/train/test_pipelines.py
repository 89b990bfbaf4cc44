# SPDX-License-Identifier: Apache-2.0
"""Pipelines with replicated stages under ``dlcp train``: their losses are those of the same model in one process."""

import json

import pytest

from tests.train.test_train_command import dlcp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(115)
STEPS = 6
LOSSY = """
from dlcp.examples import pipeline
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints

if __name__ == "__main__":
    Endpoint.__init__ = lossy_endpoints(0.1)
    pipeline.main()
"""
PYTORCHS = """
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from dlcp.examples import pipeline
from dlcp.transport import Endpoint
from tests.faults.lossy_sockets import lossy_endpoints

if __name__ == "__main__":
    Endpoint.__init__ = lossy_endpoints(0.1)
    dist.init_process_group("dlcp")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    number, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
    layers = pipeline.divided(pipeline.TASK.network(1), ["conv4"])[number]
    model = DistributedDataParallel(layers, process_group=mesh["replica"].get_group())
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, 6, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    data, order = pipeline.TASK.data(1), torch.Generator().manual_seed(1)
    means = []
    for _ in range(6):
        own = torch.randperm(len(data.train_labels), generator=order)[:192].chunk(2)[replica]
        optimizer.zero_grad()
        losses = []
        if number == 0:
            schedule.step(data.train_inputs[own])
        else:
            schedule.step(target=data.train_labels[own], losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
    every = [None] * 4
    dist.all_gather_object(every, means)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": [sum(pair) / 2 for pair in zip(*every[2:])]}), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def alone():
    """The losses of one process."""
    from dlcp.examples import pipeline

    return pipeline.train([1], [], STEPS, seed=1)["losses"]


def pipelined(tmp_path, text, *arguments, **variables):
    """Train in four processes; return the losses and the summary's models."""
    script, summary = tmp_path / "script.py", tmp_path / "summary.json"
    script.write_text(text)
    exact = ["--option", "loss_bound=0", "--option", "precision=32"]
    words = ["train", "--summary", summary, *exact, "--nproc-per-node", "4", "--", script, *arguments]
    done = dlcp(*words, PYTHONPATH=".", OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["losses"], json.loads(summary.read_text())["models"]


OWN = ["--replicas", "3-1", "--steps", STEPS, "--backend", "dlcp"]


@pytest.mark.parametrize(
    ("text", "arguments", "groups"), [(LOSSY, OWN, [[0, 1, 2]]), (PYTORCHS, [], [[0, 1], [2, 3]])], ids=["3-1", "2-2"]
)
def test_replicated_stages_train_as_one_process_although_packets_are_lost(tmp_path, alone, text, arguments, groups):
    losses, models = pipelined(tmp_path, text, *arguments, DLCP_SHARED_MEMORY="0")
    assert losses == pytest.approx(alone, rel=1e-4)
    assert [model["group_ranks"] for model in models] == groups
    assert all(model["on"] and model["steps"] >= STEPS and model["lost"] == 0 for model in models)
    assert sum(model["retransmitted"] for model in models) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "5-1"], "each number has to divide 12"),
        (["--replicas", "three"], "write the processes of each stage as 3-1"),
        (["--replicas", "2-1-1"], "--cut names 1 layers; 3 stages need 2"),
        (["--replicas", "3-1"], "these stages need 4 processes: torchrun --nproc-per-node 4"),
        (["--replicas", "1-1", "--cut", "conv9"], "invalid choice: 'conv9'"),
    ],
)
def test_a_pipeline_says_what_does_not_fit(options, message, capsys, monkeypatch):
    from dlcp.examples import pipeline

    monkeypatch.setattr("sys.argv", ["pipeline", *options])
    with pytest.raises(SystemExit):
        pipeline.main()
    assert message in capsys.readouterr().err
