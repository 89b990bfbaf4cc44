# SPDX-License-Identifier: Apache-2.0
"""Experiments from files: which are refused and where, which runs are made and kept, and that results do not depend on
who runs them.
"""

import io
import json
import re
from pathlib import Path

import pytest

from dlcp.cli import main
from dlcp.commands.sim import experiment_files
from dlcp.inputs.document import DocumentError
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.results import Spread, findings, load, series_of
from dlcp.sim.experiments.running import digest, write
from dlcp.sim.experiments.sweep import SweepError, existing, result_file, sweep
from dlcp.sim.tools.comparison import MetricDifference
from dlcp.sim.tools.report import draw
from tests.report.phones import PHONE_COLUMN_PX, readable_px
from tests.sim.experiments_small import EXPERIMENT, write_experiment


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The experiment with its results, run one after the other."""
    folder = tmp_path_factory.mktemp("swept")
    described = read(write_experiment(folder))
    assert sweep(described.runs, folder / "out" / "small", processes=1, progress=io.StringIO()) == 4
    return folder, described


@pytest.mark.parametrize("path", experiment_files([]), ids=lambda path: path.stem)
def test_what_comes_with_dlcp_can_be_read(path) -> None:
    full, quick = read(path), read(path, quick=True)
    assert full.experiment.name == path.stem
    assert 1 <= len(quick.runs) <= len(full.runs)
    assert full.experiment.figures
    assert full.experiment.claims or full.experiment.quick.skip


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("discipline", "disciplin", 17, "there is no field 'disciplin'; did you mean discipline"),
        ("steps: 2", "stps: 2", 10, "there is no field 'stps'; did you mean steps"),
        ("kind: leaf_spine", "kind: leaf_spin", 5, "there is no kind 'leaf_spin'; did you mean leaf_spine"),
        ("scheduler: fifo", "scheduler: p4", 10, "there is no scheduler 'p4'; it has fifo, p3"),
        ("collective: ring", "collective: rnig", 10, "there is no collective 'rnig'; did you mean ring"),
        ("transport: tcp, steps", "transport: tpc, steps", 10, "there is no transport 'tpc'; did you mean tcp"),
        (
            "tcp: {kind: cubic}",
            "tcp: {kind: ndp}",
            10,
            "'tcp' is ndp, made for switches with the discipline trim, not fifo",
        ),
        ("workers: 4", "workers: 9", 9, "the jobs need 9 hosts, but the topology has 8"),
        ("x: rate, series: scheduler}", "x: rat, series: scheduler}", 25, "there is no axis 'rat'; did you mean rate"),
        ("rate: [slow]", "rate: [slw]", 23, "axis rate has no point 'slw'; did you mean slow"),
        ("topology.host_link", "topology.2.x", 22, "the setting has no place"),
        ("load: 0.2", "load: 2", 12, "must be less than 1, got 2"),
    ],
)
def test_mistakes_are_reported_with_their_line(tmp_path, old, new, line, message) -> None:
    assert old in EXPERIMENT
    path = write_experiment(tmp_path, EXPERIMENT.replace(old, new, 1))
    with pytest.raises(DocumentError) as error:
        read(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("ecn", "marks"), [("", "mark from 65 packets, where only 8 wait"), (", ecn: null", "never mark")]
)
def test_nscc_without_marks_is_refused(tmp_path, ecn, marks) -> None:
    switches = f"  switches: {{discipline: trim{ecn}}}\n  transports:"
    text = EXPERIMENT.replace("  transports:", switches).replace("kind: cubic", "kind: nscc")
    text = text.replace("switches.discipline: dlcp", "switches.discipline: trim")
    with pytest.raises(DocumentError, match=f"'tcp' is nscc, which needs marks, but switches {marks}"):
        read(write_experiment(tmp_path, text))


def test_an_unknown_model_names_what_there_is(tmp_path) -> None:
    path = write_experiment(tmp_path, EXPERIMENT.replace("model: PROFILE", "model: vgg61"))
    with pytest.raises(DocumentError, match=r"small.yaml:10: .*there is no model 'vgg61'; did you mean vgg16"):
        read(path)


def test_results_hold_what_is_needed(swept) -> None:
    folder, described = swept
    for item in described.runs:
        document = existing(folder / "out" / "small", item)
        assert document is not None
        assert document["point"] == dict(item.point)
        assert len(document["jobs"][0]["step_s"]) == 2
        metrics = document["metrics"]
        assert metrics["step_s"] > metrics["compute_s"] == pytest.approx(9e-5)
        assert metrics["fct_mean_s"] <= metrics["fct_p99_s"] * 1.01 <= metrics["fct_max_s"] * 1.02
        assert document["times"]["other"]["count"] > 0
        assert "wall" not in json.dumps(document)


def test_a_sweep_goes_on_where_it_was(swept, tmp_path) -> None:
    folder, described = swept
    out = tmp_path / "again"
    out.mkdir()
    first, second, third = described.runs[:3]
    result_file(out, first).write_bytes(result_file(folder / "out" / "small", first).read_bytes())
    result_file(out, second).write_text('{"complete": tr')  # cut off
    old = json.loads(result_file(folder / "out" / "small", third).read_text())
    result_file(out, third).write_text(json.dumps(old | {"digest": "of another version"}))
    stamp = result_file(out, first).stat().st_mtime_ns
    assert sweep(described.runs[:3], out, processes=1, progress=io.StringIO()) == 2
    assert result_file(out, first).stat().st_mtime_ns == stamp
    for item in described.runs[:3]:
        assert result_file(out, item).read_bytes() == result_file(folder / "out" / "small", item).read_bytes()


def test_an_interrupted_sweep_keeps_what_it_has(swept, tmp_path, monkeypatch) -> None:
    _, described = swept
    import dlcp.sim.experiments.sweep as module

    calls = []

    def interrupted(item):
        calls.append(item.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"complete": True, "metrics": {}, "point": dict(item.point)}

    monkeypatch.setattr(module, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(described.runs, tmp_path, processes=1, progress=io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == [f"{described.runs[0].name}.json"]


def test_results_of_another_simulator_are_run_again(swept, monkeypatch) -> None:
    folder, described = swept
    out = folder / "out" / "small"
    assert existing(out, described.runs[0]) is not None
    import dlcp.sim.experiments.running as module

    monkeypatch.setattr(module, "sources_digest", lambda: "of another simulator")
    assert existing(out, described.runs[0]) is None


def test_results_with_a_failure_without_end_are_found_again(tmp_path) -> None:
    failing = EXPERIMENT.replace("  traffic:", "  failures: [{nodes: [host0, leaf0], loss_ratio: 0.01}]\n  traffic:")
    described = read(write_experiment(tmp_path, failing))
    assert sweep(described.runs[:1], tmp_path, processes=1, progress=io.StringIO()) == 1
    assert existing(tmp_path, described.runs[0]) is not None


def test_a_change_of_the_simulator_changes_the_digest_and_one_of_the_report_does_not(tmp_path, monkeypatch) -> None:
    import dlcp.sim.experiments.running as module

    copied = [
        ("sim", module._SIMULATOR, name) for name in ("engines/kernel/loop.py", "tools/report.py", "jobs/models.yaml")
    ]
    copied += [("dlcp", module._DLCP, name) for name in module._SHARED]
    for folder, source, name in copied:
        (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_bytes((source / name).read_bytes())
    monkeypatch.setattr(module, "_SIMULATOR", tmp_path / "sim")
    monkeypatch.setattr(module, "_DLCP", tmp_path / "dlcp")

    def changed(name: str) -> bool:
        before = module.sources_digest.__wrapped__()
        with (tmp_path / name).open("a", encoding="utf-8") as stream:
            stream.write("# changed\n")
        return module.sources_digest.__wrapped__() != before

    assert changed("sim/engines/kernel/loop.py")
    assert changed("dlcp/values/tags.py")
    assert not changed("sim/tools/report.py")
    program = tmp_path / "dlcp.json"
    program.write_text("{}")
    before = module.sources_digest.__wrapped__()
    monkeypatch.setattr(module, "PROGRAM_PATH", program)
    assert module.sources_digest.__wrapped__() != before


def test_another_seed_gives_other_results(swept, tmp_path) -> None:
    folder, described = swept
    again = read(folder / "small.yaml", seeds=[2])
    sweep(again.runs[:1], tmp_path, processes=1, progress=io.StringIO())
    one = json.loads(result_file(folder / "out" / "small", described.runs[0]).read_text())
    other = json.loads(result_file(tmp_path, again.runs[0]).read_text())
    assert one["metrics"]["step_s"] != other["metrics"]["step_s"]


def test_two_processes_give_the_same_files(swept, tmp_path) -> None:
    folder, described = swept
    sweep(described.runs, tmp_path, processes=2, progress=io.StringIO())
    for item in described.runs:
        assert result_file(tmp_path, item).read_bytes() == result_file(folder / "out" / "small", item).read_bytes()


def test_two_dask_workers_give_the_same_files(swept, tmp_path) -> None:
    distributed = pytest.importorskip("distributed")
    folder, described = swept
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        sweep(described.runs, tmp_path, dask=cluster.scheduler_address, progress=io.StringIO())
    for item in described.runs:
        assert result_file(tmp_path, item).read_bytes() == result_file(folder / "out" / "small", item).read_bytes()


def test_a_missing_scheduler_is_reported(swept, tmp_path, monkeypatch) -> None:
    pytest.importorskip("distributed")
    _, described = swept
    import dlcp.sim.experiments.sweep as module

    monkeypatch.setattr(module, "DASK_TIMEOUT_S", 1.0)
    with pytest.raises(SweepError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9"):
        sweep(described.runs[:1], tmp_path, dask="tcp://127.0.0.1:9", progress=io.StringIO())


def test_the_report_holds_every_figure(swept, capsys) -> None:
    folder, _ = swept
    out = folder / "out"
    assert main(["sim", "report", str(folder / "small.yaml"), "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    faster, best = summary["figures"]
    assert set(faster) >= {"name", "paper", "measured", "unit", "source", "deviation"}
    one, other = (json.loads((out / "small" / f"{name}-slow-seed1.json").read_text()) for name in ("fifo", "dlcp"))
    slow = 100 * (one["metrics"]["step_s"] / other["metrics"]["step_s"] - 1)
    assert best["measured"] >= slow - 1e-3
    assert best["measured"] >= faster["measured"]
    assert "missing_runs" not in summary or not summary["missing_runs"]
    page = (out / "report.html").read_text()
    assert readable_px(page, plots=2) <= PHONE_COLUMN_PX
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page
    rows = (out / "figures" / "small_1.csv").read_text().splitlines()
    assert rows[0] == "scheduler,rate,value,least,most,seeds"
    assert len(rows) == 5
    assert (out / "figures" / "small_2.svg").read_text().startswith("<svg")


def test_claims_are_judged_seed_by_seed_and_figures_show_the_range(tmp_path) -> None:
    path = write_experiment(tmp_path, EXPERIMENT.replace("setting:", "seeds: [5, 6, 7]\nsetting:", 1))
    described = read(path, quick=True)
    assert [item.setting.seed for item in described.runs] == [5, 6, 7] * 2
    steps = {"FIFO": (2.0, 3.0, 4.0), "DLCP": (1.0, 2.0, 2.0)}
    for item in described.runs:
        step_s = steps[item.point["scheduler"]][item.setting.seed - 5]
        document = {"complete": True, "digest": digest(item), "seed": item.setting.seed, "version": "0", "jobs": []}
        write(document | {"metrics": {"step_s": step_s}}, result_file(tmp_path / "small", item))
    results = load(described, tmp_path)
    for finding in findings(results):
        assert finding.measured == Spread(250 / 3, 50.0, 100.0, 3)
    assert findings(results)[0].as_json()["spread"] == [50.0, 100.0]
    figure = results.experiment.figures[1]
    assert series_of(results, figure)["DLCP"]["slow"] == Spread(5.5 / 3, 1.5, 2.0, 3)
    assert "2, 3 seeds)" in draw(figure, series_of(results, figure), "plot", "").inline


def test_results_are_compared(swept, tmp_path, capsys) -> None:
    folder, described = swept
    one = folder / "out" / "small"
    assert main(["sim", "compare", str(one), str(one)]) == 0
    changed = json.loads(result_file(one, described.runs[0]).read_text())
    changed["metrics"]["step_s"] *= 1.5
    (tmp_path / result_file(one, described.runs[0]).name).write_text(json.dumps(changed))
    assert main(["sim", "compare", str(one), str(tmp_path)]) == 1
    assert "+50.00%" in capsys.readouterr().out


def test_two_runs_are_compared_with_their_steps_and_which_is_better(swept, tmp_path, capsys) -> None:
    folder, described = swept
    slow, fast = (str(result_file(folder / "out" / "small", described.runs[number])) for number in (0, 1))
    page = tmp_path / "page.html"
    assert main(["sim", "compare", slow, fast, "--page", str(page)]) == 1
    lines = {line[:20].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    steps = [json.loads(Path(file).read_text())["jobs"][0]["step_s"][1] for file in (slow, fast)]
    assert float(lines["job step 1"][-3]) == pytest.approx(steps[1] / steps[0], abs=1e-3)
    assert [lines[name][-1] for name in ("step_s", "fct_p99_s", "samples_per_s", "job step 1")] == ["B"] * 4
    text = page.read_text()
    assert readable_px(text, plots=2) <= PHONE_COLUMN_PX
    assert "<td>fct_p99_s</td>" in text
    assert main(["sim", "compare", fast, slow]) == 1
    assert "samples_per_s" in (out := capsys.readouterr().out)
    assert {line.split()[-1] for line in out.splitlines() if "step" in line and "_s" in line} == {"A"}


def test_two_experiments_are_simulated_and_compared(tmp_path, capsys) -> None:
    one = write_experiment(tmp_path)
    other = tmp_path / "faster.yaml"
    other.write_text(one.read_text().replace("rate_gbps: 10}", "rate_gbps: 20}"))
    assert main(["sim", "compare", str(one), str(other)]) == 0, "that they differ is no failure"
    out = capsys.readouterr().out
    assert re.search(r"step_s .* B$", out, re.MULTILINE)
    assert main(["sim", "compare", str(one), str(one)]) == 0
    assert "2 runs compared, 0 numbers differ" in capsys.readouterr().out
    assert main(["sim", "compare", str(one), "slow_prt"]) == 2
    assert "did you mean slow_port" in capsys.readouterr().err


def test_what_is_no_goal_is_not_better() -> None:
    better = {name: MetricDifference(name, 1.0, 2.0).better for name in ("step_s", "speedup", "compute_s")}
    assert better == {"step_s": "A", "speedup": "B", "compute_s": ""}
    assert MetricDifference("step_s", None, 1.0).better == ""
    assert MetricDifference("dropped_packets", 0.0, 5.0).ratio is None
    assert MetricDifference("dropped_packets", 0.0, 5.0).exceeds(0.005)


def test_one_point_is_run_and_printed(swept, capsys) -> None:
    folder, _ = swept
    assert main(["sim", "run", str(folder / "small.yaml"), "--point", "rate=fast"]) == 0
    printed = capsys.readouterr().out
    assert "scheduler FIFO, rate fast" in printed
    assert "step_s" in printed
    assert main(["sim", "run", str(folder / "small.yaml"), "--point", "rat=fast"]) == 2
    assert "did you mean rate" in capsys.readouterr().err
