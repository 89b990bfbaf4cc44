# SPDX-License-Identifier: Apache-2.0
"""The planner finds the best stages, PipeDream's among them, and a simulated pipeline runs as planned."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.cli import main
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.running import run
from dlcp.sim.jobs.models import StepProfile, TimedLayer, step_profile, write_profile
from dlcp.sim.jobs.stage_planner import NetworkLevel, StagesError, parse_replicas, plan_pipeline
from dlcp.sim.jobs.training import TrainingJob

BYTES_PER_S = {"A": 25e9 / 8, "B": 10e9 / 8}
BATCHES = {"A": ("p100", 32), "B": ("v100", 64)}


def planned(model, cluster, workers, replicas=None):
    gpu, batch = BATCHES[cluster]
    profile = step_profile(model, gpu, "single", batch)
    return plan_pipeline(profile, [NetworkLevel(workers, BYTES_PER_S[cluster])], replicas)


@pytest.mark.parametrize(
    ("model", "cluster", "replicas"),
    [
        ("vgg16", "A", "7-1"),
        ("vgg16", "B", "7-1"),
        ("inception_v3_auxiliary", "A", "8"),
        ("inception_v3_auxiliary", "B", "7-1"),
    ],
)
def test_the_planner_finds_pipedreams_stages(model, cluster, replicas):
    assert planned(model, cluster, 8).replicas == replicas


def test_published_speeds_over_data_parallelism_follow_from_the_formula():
    """PipeDream's table 1: 5.12 and 2.99 times data parallelism, 6.98 and 7.04 times one worker."""
    for cluster, over_data, over_one in (("B", 5.12, 6.98), ("A", 2.99, 7.04)):
        ours, data = planned("vgg16", cluster, 8), planned("vgg16", cluster, 8, [8])
        assert ours.speedup / data.speedup == pytest.approx(over_data, rel=0.05)
        assert ours.speedup == pytest.approx(over_one, rel=0.11)


def minibatch_s(profile, bytes_per_s, cuts, replicas):
    """Return the time per minibatch of stages between cuts, by the published formula."""
    ends = [0, *cuts, len(profile.layers)]
    times = []
    for (begin, end), count in zip(itertools.pairwise(ends), replicas, strict=True):
        layers = profile.layers[begin:end]
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        sync_s = 4 * (count - 1) / count * sum(4 * layer.parameters for layer in layers) / bytes_per_s
        times.append(max(compute_s, sync_s) / count)
    return max(times + [2 * profile.layers[cut - 1].output_bytes / bytes_per_s for cut in cuts])


def divisions(layers, workers):
    """Return all cuts and replicas of a pipeline."""
    for stages in range(1, min(layers, workers) + 1):
        for replicas in itertools.product(range(1, workers + 1), repeat=stages):
            if sum(replicas) == workers:
                for cuts in itertools.combinations(range(1, layers), stages - 1):
                    yield cuts, replicas


LAYER = st.builds(
    TimedLayer,
    name=st.just("layer"),
    parameters=st.integers(0, 2_000_000),
    forward_s=st.floats(0.0001, 0.01),
    backward_s=st.floats(0.0001, 0.01),
    output_bytes=st.integers(1, 4_000_000),
)


@settings(max_examples=40)
@given(st.lists(LAYER, min_size=1, max_size=5), st.integers(1, 5), st.floats(1e7, 1e10))
def test_no_other_stages_are_faster(layers, workers, bytes_per_s):
    profile = StepProfile("model", tuple(layers), 8, "made up")
    plan = plan_pipeline(profile, [NetworkLevel(workers, bytes_per_s)])
    every = {
        (cuts, counts): minibatch_s(profile, bytes_per_s, cuts, counts)
        for cuts, counts in divisions(len(layers), workers)
    }
    assert plan.minibatch_s == pytest.approx(min(every.values()))
    own = tuple(stage.end for stage in plan.stages[:-1]), tuple(stage.replicas for stage in plan.stages)
    assert every[own] == pytest.approx(plan.minibatch_s)
    again = plan_pipeline(profile, [NetworkLevel(workers, bytes_per_s)], own[1])
    assert again.minibatch_s == pytest.approx(plan.minibatch_s)


def test_a_network_is_planned_level_by_level():
    profile = step_profile("vgg16", "v100", "single", 64)
    flat = plan_pipeline(profile, [NetworkLevel(4, 1e9)])
    for levels in ([NetworkLevel(1, 1e9), NetworkLevel(4, 1e9)], [NetworkLevel(4, 1e9), NetworkLevel(1, 1e9)]):
        assert plan_pipeline(profile, levels) == flat
    servers = plan_pipeline(profile, [NetworkLevel(4, 1e10), NetworkLevel(4, 1e9)])
    assert servers.replicas == "12-3-1", "3 servers of 4 replicas, and one server with stages of 3 and 1"
    assert servers.stages[0].end == servers.stages[1].begin


def test_stages_keep_as_many_versions_as_minibatches_are_under_way():
    plan = planned("vgg16", "A", 4, [2, 1, 1])
    assert [stage.in_flight for stage in plan.stages] == [2, 2, 1]
    assert [stage.in_flight for stage in planned("vgg16", "A", 4, [1, 1, 1, 1]).stages] == [4, 3, 2, 1]


def test_what_cannot_be_cut_is_refused():
    for text in ("", "7-", "7-0", "seven", "7--1"):
        with pytest.raises(StagesError, match="write them as 7-1"):
            parse_replicas(text)
    with pytest.raises(StagesError, match=r"vgg16 cannot be cut into the stages 1-1-.*15 places to cut"):
        planned("vgg16", "A", 17, [1] * 17)
    with pytest.raises(StagesError, match="resnet50 cannot be cut"):
        plan_pipeline(step_profile("resnet50", "v100"), [NetworkLevel(2, 1e9)], [1, 1])


EXPERIMENT = """\
name: small
title: A pipeline
question: Does it run as planned?
setting:
  topology: {kind: star, hosts: 4, host_link: {rate_gbps: 25}}
  transports: {dctcp: {kind: dctcp, packet_bytes: 9000}}
  training:
    - {name: job, model: vgg16, gpu: p100, gpu_precision: single, batch: 32, workers: 4, steps: 4, collective: direct,
       transport: dctcp, pipeline: planned}
"""


def described(folder: Path, pipeline: str):
    path = folder / "small.yaml"
    path.write_text(EXPERIMENT.replace("pipeline: planned", f"pipeline: {pipeline}"), encoding="utf-8")
    return read(path).runs[0]


@pytest.mark.parametrize("pipeline", ["planned", "2-1-1"])
def test_a_simulated_pipeline_runs_as_planned(tmp_path, pipeline):
    document = run(described(tmp_path, pipeline), engine="kernel")
    wanted = planned("vgg16", "A", 4, None if pipeline == "planned" else parse_replicas(pipeline))
    assert document["jobs"][0]["pipeline"] == wanted.replicas
    assert document["metrics"]["speedup"] == pytest.approx(wanted.speedup, rel=0.05)
    size = 9000 - 60
    assert document["metrics"]["packets_per_sample"] * 32 * size == pytest.approx(wanted.bytes_per_minibatch, rel=0.1)


def test_wrong_pipelines_name_their_place(tmp_path):
    for pipeline, message in (
        ("2-1", "yaml:8: .*pipeline 2-1 does not add up to the 4 workers"),
        ("two", "yaml:8: .*write them as 7-1"),
        ("planned, precision: 8", "yaml:8: .*a pipeline has no servers"),
    ):
        with pytest.raises(ValueError, match=message):
            described(tmp_path, pipeline)


def plan(capsys, *words):
    status = main(["plan", *words])
    return status, capsys.readouterr()


def test_a_command_plans_a_published_model(capsys):
    words = ["vgg16", "--workers", "8", "--rate-mbps", "10000", "--batch", "64"]
    status, said = plan(capsys, *words)
    assert status == 0
    assert "7-1: 7.06 times the speed of one worker" in said.out
    assert "later stages begin with the layers fc14" in said.out
    found = json.loads(plan(capsys, *words, "--json")[1].out)
    assert [stage["replicas"] for stage in found["stages"]] == [7, 1]
    assert found["stages"][0]["sends_bytes"] == 64 * 512 * 7 * 7 * 4
    assert found["speedup"] / found["data_parallel"]["speedup"] == pytest.approx(5.32, abs=0.01)


def test_a_command_plans_a_model_of_ones_own(capsys):
    pytest.importorskip("torch")
    words = ["tests.sim.test_pipeline:residual", "--input", "8", "--workers", "2", "--rate-mbps", "1"]
    status, said = plan(capsys, *words, "--replicas", "1-1", "--batch", "3", "--json")
    assert status == 0
    first, second = json.loads(said.out)["stages"]
    sizes = {"inside": 2 * 16 * 3 * 4, "outside": 16 * 3 * 4, "norm": 16 * 3 * 4}
    assert first["sends_bytes"] == sizes[first["last_layer"]]
    assert [first["first_layer"], second["last_layer"]] == ["outside", "last"]


def residual():
    """Return a model whose layers are called in another order than they are defined."""
    import torch

    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = torch.nn.LayerNorm(16), torch.nn.Linear(16, 2)
            self.outside, self.inside = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16)

        def forward(self, values):
            values = torch.relu(self.outside(values))
            return self.last(values + self.norm(self.inside(values)))

    return Residual()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vgg17"], "did you mean vgg16"),
        (["vgg16", "--replicas", "2-1"], "does not add up to the 4 workers"),
        (["vgg16", "--replicas", "x"], "write them as 7-1"),
        (["resnet50", "--replicas", "2-2"], "resnet50 cannot be cut into the stages 2-2: it has 0 places to cut"),
        (["vgg16", "--per-server", "2"], "belong together"),
        (["vgg16", "--per-server", "3", "--server-rate-mbps", "9"], "servers have to be full"),
        (["tests.sim.test_pipeline:residual"], "--input"),
        (["tests.sim.test_pipeline:nothing", "--input", "8"], "no attribute 'nothing'"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["nowhere.yaml", "--batch", "3"], "a profile has its batch"),
    ],
)
def test_a_command_says_what_is_wrong(capsys, words, message):
    status, said = plan(capsys, *words, "--workers", "4", "--rate-mbps", "1000")
    assert status == 2
    assert message in said.err


def test_a_shape_that_is_none(capsys):
    with pytest.raises(SystemExit):
        plan(capsys, "tests.sim.test_pipeline:residual", "--input", "8,x", "--workers", "4", "--rate-mbps", "1000")
    assert "takes a shape such as 3,224,224, got '8,x'" in capsys.readouterr().err


def test_stages_need_an_all_reduce_for_any_number_of_ranks():
    for collective in ("halving_doubling", "hierarchical"):
        with pytest.raises(ValueError, match=f"{collective} needs other numbers of ranks"):
            TrainingJob(name="j", workers=8, pipeline="planned", collective=collective)


@pytest.mark.parametrize("collective", ["ring", "direct", "byteps", "tree"])
@pytest.mark.parametrize("flows", ["shared", "own"])
def test_stages_average_with_every_other_all_reduce(tmp_path, collective, flows):
    item = described(tmp_path, f"3-1, flows: {flows}, scheduler: p3")
    job = msgspec.structs.replace(item.setting.training[0], collective=collective, model=str(small_profile(tmp_path)))
    item = msgspec.structs.replace(item, setting=msgspec.structs.replace(item.setting, training=(job,)))
    document = run(item, engine="kernel")
    assert document["complete"]
    assert len(document["jobs"][0]["step_s"]) == 4


def small_profile(folder: Path) -> Path:
    """Write the profile of a small model, and return its file."""
    layers = tuple(TimedLayer(f"layer{number}", 50_000, 1e-4, 2e-4, 10_000) for number in range(4))
    write_profile(StepProfile("small", layers, 8, "made up"), folder / "small_model.yaml")
    return folder / "small_model.yaml"


def test_a_model_that_computes_nothing_is_not_planned(tmp_path, capsys):
    path = tmp_path / "idle.yaml"
    write_profile(StepProfile("idle", (TimedLayer("one", 1000, 0.0, 0.0, 8),), 4, "test"), path)
    assert main(["plan", str(path), "--workers", "4", "--rate-mbps", "1000"]) == 2
    assert "no layer computes" in capsys.readouterr().err
