# SPDX-License-Identifier: Apache-2.0
"""Every command reports a run whose jobs did not end, and how far it came; it has no metrics."""

import json
import os
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.sim import CollectiveJob, Scenario, simulate
from dlcp.sim.engines.flows import flow_engine, fluid
from dlcp.sim.engines.kernel import arrays, kernel_engine
from dlcp.sim.engines.packet_engine import EngineCounter
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.running import run, write
from dlcp.sim.network.topology import Star
from dlcp.sim.transports.specs import DctcpTransport

STOPPED = """\
name: stop
title: A job that does not end before stop_s
question: q
setting:
  topology: {kind: star, hosts: 4}
  stop_s: 0.002
  training: [{name: job, model: 10MB, workers: 4, transport: dctcp, steps: 10}]
axes:
  - {name: steps, points: [{name: many}, {name: one, set: {training.0.steps: 1, stop_s: 1}}]}
figures: [{title: Step, metric: step_s, x: steps}]
"""
SAYS = "job 'job' finished 1 of 10 steps: the run ended at stop_s, 0.002 s; raise it, or make the job shorter"


@pytest.fixture
def stopped(tmp_path) -> Path:
    (path := tmp_path / "stop.yaml").write_text(STOPPED)
    return path


def test_run_says_how_far_the_job_came(stopped, tmp_path, capsys) -> None:
    assert main(["sim", "run", str(stopped), "--output", str(tmp_path / "a.json")]) == 1
    out, err = capsys.readouterr()
    assert SAYS in err
    assert "step_s" not in out
    assert "efficiency" not in out
    document = json.loads((tmp_path / "a.json").read_text())
    assert (document["complete"], document["ended"], document["unfinished"]) == (False, "stop_s", SAYS)
    assert set(document["metrics"]) == {"simulated_s", "dropped_packets"}
    assert len(document["jobs"][0]["step_s"]) == 1


def test_compare_says_which_side_is_incomplete(stopped, tmp_path, capsys) -> None:
    assert main(["sim", "compare", str(stopped), str(stopped), "--page", str(tmp_path / "a.html")]) == 1
    err = capsys.readouterr().err
    assert f"A is incomplete: {SAYS}" in err
    assert f"B is incomplete: {SAYS}" in err
    assert "B is incomplete: job &#39;job&#39; finished 1 of 10 steps" in (tmp_path / "a.html").read_text()


def test_sweep_report_and_all_leave_incomplete_runs_out_and_say_so(stopped, tmp_path, capsys) -> None:
    out = str(tmp_path / "out")
    assert main(["sim", "sweep", str(stopped), "--out", out, "--processes", "1"]) == 1
    err = capsys.readouterr().err
    assert f"INCOMPLETE: {SAYS}" in err
    assert "1 runs are incomplete" in err
    assert main(["sim", "report", str(stopped), "--out", out]) == 1
    assert f"stop many-seed1 is incomplete, and left out: {SAYS}" in capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Left out: many-seed1." in page
    assert "finished 1 of 10 steps" in page
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["unfinished_runs"] == {"stop": {"many-seed1": SAYS}}
    assert (tmp_path / "out" / "figures" / "stop_1.csv").read_text().count("\n") == 2, "a heading and the complete run"
    assert main(["sim", "all", str(stopped), "--out", out, "--processes", "1"]) == 1


def test_a_report_of_incomplete_runs_alone_says_why_it_is_empty(stopped, tmp_path, capsys) -> None:
    stopped.write_text(STOPPED.replace(", {name: one, set: {training.0.steps: 1, stop_s: 1}}", ""))
    out = str(tmp_path / "out")
    assert main(["sim", "all", str(stopped), "--out", out, "--processes", "1"]) == 1
    assert f"stop: no run is complete: {SAYS}" in capsys.readouterr().err


def test_a_job_behind_a_dead_link_did_not_end(tmp_path) -> None:
    dead = STOPPED.replace("stop_s: 0.002", "failures: [{nodes: [host0, switch0]}]\n  stop_s: 0.02")
    (path := tmp_path / "dead.yaml").write_text(dead)
    for engine in ("packets", "flows"):
        document = run(read(path, engine=engine).runs[0])
        assert document["unfinished"] == (
            "job 'job' finished 0 of 10 steps: the run ended at stop_s, 0.02 s; raise it, or make the job shorter, or "
            "check the failures"
        )


def test_flows_that_did_not_arrive_are_counted(tmp_path) -> None:
    flows = "patterns: [{name: p, pattern: incast, size_bytes: 10000000, transport: dctcp}]"
    text = STOPPED.replace("training: [{name: job, model: 10MB, workers: 4, transport: dctcp, steps: 10}]", flows)
    (path := tmp_path / "flows.yaml").write_text(text[: text.index("axes:")])
    document = run(read(path).runs[0])
    assert document["unfinished"].startswith("3 messages had not arrived: the run ended at stop_s, 0.002 s")


def test_a_setting_without_anything_to_simulate_is_refused(tmp_path, capsys) -> None:
    (path := tmp_path / "none.yaml").write_text("name: a\ntitle: t\nquestion: q\nsetting:\n  topology: {kind: star}\n")
    assert main(["sim", "run", str(path)]) == 2
    assert "there is nothing to simulate: add training, traces, traffic or patterns" in capsys.readouterr().err


def test_ratios_of_packets_that_nobody_sent_are_missing(tmp_path) -> None:
    flows = "patterns: [{name: p, pattern: incast, size_bytes: 1000, transport: dctcp}]"
    text = STOPPED.replace("training: [{name: job, model: 10MB, workers: 4, transport: dctcp, steps: 10}]", flows)
    (path := tmp_path / "flows.yaml").write_text(text[: text.index("axes:")])
    metrics = run(read(path).runs[0])["metrics"]
    assert "other_mean_s" in metrics
    assert "loss_ratio" not in metrics


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("training", "{name: late, model: 1MB, workers: 4, start_s: 0.5}"),
        ("traffic", "{name: late, start_s: 0.5, stop_s: 1}"),
        ("patterns", "{name: late, start_s: 0.6}"),
    ],
)
def test_what_would_begin_after_the_end_is_refused(field, spec, tmp_path, capsys) -> None:
    path = tmp_path / "late.yaml"
    setting = f"{{topology: {{kind: star, hosts: 4}}, stop_s: 0.5, {field}: [{spec}]}}"
    path.write_text(f"{{name: late, title: t, question: q, setting: {setting}}}")
    assert main(["sim", "run", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"setting.{field}[0].start_s: late begins at 0." in err
    assert "but the run ends at stop_s, 0.5 s" in err


def test_traffic_that_never_began_is_no_result(tmp_path, capsys) -> None:
    text = (
        "{name: none, title: t, question: q, setting: {topology: {kind: star, hosts: 4}, seed: %d,"
        " traffic: [{name: rare, load: 0.001, stop_s: 0.04}]}}"
    )
    path, found = tmp_path / "none.yaml", set()
    for seed in range(1, 13):  # 1.2 flows on average: none at all with a seed in three
        path.write_text(text % seed)
        found.add(main(["sim", "run", str(path)]))
    assert found == {0, 1}
    assert "the run is incomplete: no flow of the traffic began" in capsys.readouterr().err


def test_results_go_to_a_pipe_without_replacing_it(tmp_path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write({"complete": True}, pipe)
    assert json.loads(os.read(reading, 1000)) == {"complete": True}
    os.close(reading)
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["stop.yaml/a.json", "."])
def test_results_that_cannot_be_written_are_refused_before_the_run(stopped, place, monkeypatch, capsys) -> None:
    monkeypatch.setattr("dlcp.commands.sim._watched_run", lambda *_: pytest.fail("it ran"))
    assert main(["sim", "run", str(stopped), "--output", str(stopped.parent / place)]) == 2
    assert "--output: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "kind", "engine", "most", "hosts", "size_bytes"),
    [
        (kernel_engine, kernel_engine.KernelEngine, "kernel", arrays.EVENTS_PER_CALL, 8, 400_000_000),
        (flow_engine, flow_engine.FlowEngine, "flows", fluid.FLOW_EVENTS_PER_CALL, 64, 1_000_000),
    ],
)
def test_compiled_loops_return_often_enough_for_signals(
    module, kind, engine, most, hosts, size_bytes, monkeypatch
) -> None:
    engines, per_call = [], []
    begin, loop = kind.__init__, module.run

    def kept(self, *arguments):
        begin(self, *arguments)
        engines.append(self)

    def counted(*arguments):
        before = engines[0].counts[EngineCounter.EVENTS]
        done = loop(*arguments)
        per_call.append(engines[0].counts[EngineCounter.EVENTS] - before)
        return done

    monkeypatch.setattr(kind, "__init__", kept)
    monkeypatch.setattr(module, "run", counted)
    job = CollectiveJob(
        name="job", hosts=tuple(range(hosts)), size_bytes=size_bytes, collective="direct", transport="t"
    )
    scenario = Scenario(topology=Star(hosts=hosts), transports={"t": DctcpTransport()}, jobs=(job,))
    simulate(scenario, engine=engine)
    assert max(per_call) <= most < sum(per_call) / 2
