# SPDX-License-Identifier: Apache-2.0
"""Results as tables: they add up to the numbers of the run, and making them changes nothing."""

import csv
import importlib.util
import math

import numpy as np
import pytest

from dlcp.cli import main
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.running import run
from dlcp.sim.tools.result_tables import TableRecorder, write_tables
from tests.sim.experiments_small import write_experiment
from tests.sim.test_goal import PING_PONG

NAMES = ["steps", "ranks", "messages", "links", "counts"]


def recorded(path, point=0, **options):
    item = read(path).runs[point]
    recorder = TableRecorder()
    document = run(item, recorder=recorder, **options)
    return item, document, recorder.tables()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return recorded(write_experiment(tmp_path_factory.mktemp("small")))


def where(table, **values):
    chosen = np.logical_and.reduce([np.asarray(table[name]) == value for name, value in values.items()])
    return {name: np.asarray(column)[chosen] for name, column in table.items()}


def test_a_recorder_changes_nothing(small):
    item, document, tables = small
    assert document == run(item)
    assert list(tables) == NAMES
    assert {len({len(column) for column in table.values()}) for table in tables.values()} == {1}


def test_tables_add_up_to_the_results(small):
    _, document, tables = small
    steps, messages = tables["steps"], where(tables["messages"], job="job")
    assert steps["step_s"].tolist() == pytest.approx(document["jobs"][0]["step_s"])
    assert steps["begin_s"].tolist()[1:] == steps["end_s"].tolist()[:-1]
    assert messages["took_s"].mean() == pytest.approx(document["metrics"]["fct_mean_s"])
    assert messages["took_s"].max() == pytest.approx(document["metrics"]["fct_max_s"])
    assert set(messages["kind"]) == {"contribution", "result"}
    assert set(messages["step"]) == {0, 1}
    others = where(tables["messages"], job="others")
    assert set(others["kind"]) == {"other"}
    assert others["slowdown_ratio"].mean() == pytest.approx(document["metrics"]["slowdown_mean"], rel=1e-6)
    assert tables["counts"]["sent"].sum() == document["counts"]["sent"]
    assert tables["messages"]["sent_packets"].sum() <= document["counts"]["sent"]


def test_ranks_compute_and_send_what_their_step_needs(small):
    _, _, tables = small
    ranks, messages = tables["ranks"], tables["messages"]
    assert ranks["rank"].tolist() == [0, 1, 2, 3] * 2
    for step in (0, 1):
        own, sent = where(ranks, step=step), where(messages, job="job", step=step)
        assert own["computing_s"].mean() == pytest.approx(9e-5, rel=0.2)  # jitter is 0.1
        assert own["sent_bytes"].sum() == own["received_bytes"].sum() == sent["size_bytes"].sum()
        assert own["end_s"].max() == pytest.approx(tables["steps"]["end_s"][step])


def test_links_carry_what_their_hosts_send(small):
    _, _, tables = small
    links, messages = tables["links"], tables["messages"]
    carried = where(links, link="host1 → leaf0")["carried_bytes"].sum()
    least = where(messages, source=1)["size_bytes"].sum()
    assert least < carried < 1.3 * least + 64 * messages["packets"].sum()
    assert 0.5 < links["utilization_ratio"].max() <= 1
    # 10 Gbit/s are 1.25 bytes in a nanosecond.
    one = where(links, link="host1 → leaf0")
    busy_s = (one["utilization_ratio"] * (one["end_s"] - one["begin_s"])).sum()
    assert busy_s == pytest.approx(carried / 1.25e9, rel=0.001)
    assert (links["end_s"] > links["begin_s"]).all()


def test_a_traced_job_has_ranks_and_steps_too(tmp_path):
    (tmp_path / "job.goal").write_text(PING_PONG)
    path = tmp_path / "traced.yaml"
    path.write_text(
        "name: traced\ntitle: A trace\nquestion: Does it run?\nsetting:\n  topology: {kind: star, hosts: 4}\n"
        f"  traces: [{{name: replayed, file: {tmp_path}/job.goal, repeat: 2}}]\n"
    )
    _, _, tables = recorded(path, engine="reference")
    assert tables["steps"]["step"].tolist() == [0, 1]
    assert set(where(tables["messages"], job="replayed")["step"]) == {0, 1}
    assert len(tables["ranks"]["rank"]) == 4
    assert tables["ranks"]["computing_s"].sum() > 0


def test_flows_have_tables(tmp_path):
    item = read(write_experiment(tmp_path), engine="flows").runs[0]
    recorder = TableRecorder()
    document = run(item, recorder=recorder)
    tables = recorder.tables()
    assert tables["steps"]["step_s"].tolist() == pytest.approx(document["jobs"][0]["step_s"])
    assert tables["links"]["queue_bytes"].max() == 0


def test_many_samples_become_fewer_and_lose_nothing(small, monkeypatch):
    item, _, tables = small
    monkeypatch.setattr("dlcp.sim.experiments.recording.SAMPLES_MAX", 64)
    recorder = TableRecorder()
    run(item, recorder=recorder)
    coarse = recorder.tables()
    assert 16 <= len(coarse["counts"]["sent"]) <= 64 < len(tables["counts"]["sent"])
    for table, name in (("counts", "sent"), ("links", "carried_bytes")):
        assert coarse[table][name].sum() == tables[table][name].sum()
    # A coarse sample keeps the largest queue of the finer ones that it is made of.
    assert coarse["links"]["queue_bytes"].max() > 0.5 * tables["links"]["queue_bytes"].max()


def test_files_are_read_as_they_were_written(small, tmp_path):
    _, _, tables = small
    files = write_tables(tables, tmp_path, "csv")
    assert [path.name for path in files] == [f"{name}.csv" for name in NAMES]
    for path, table in zip(files, tables.values(), strict=True):
        with path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert list(rows[0]) == list(table)
        assert len(rows) == len(next(iter(table.values())))
        last = {name: column[-1] for name, column in table.items()}
        for name, value in last.items():
            assert math.isclose(float(rows[-1][name]), value) if "_s" in name else rows[-1][name] == str(value)


def test_parquet_keeps_types(small, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    _, _, tables = small
    files = write_tables(tables, tmp_path, "parquet")
    for path, table in zip(files, tables.values(), strict=True):
        assert parquet.read_table(path).to_pydict() == {name: column.tolist() for name, column in table.items()}


def test_the_command_says_which_files_and_which_extra(tmp_path, capsys, monkeypatch):
    path = str(write_experiment(tmp_path))
    assert main(["sim", "run", path, "--csv", str(tmp_path / "tables")]) == 0
    assert f"{tmp_path}/tables/messages.csv" in capsys.readouterr().out
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else found(name))
    assert main(["sim", "run", path, "--parquet", str(tmp_path)]) == 2
    assert "pip install 'dlcp[parquet]'" in capsys.readouterr().err


def test_watching_ends_with_the_last_event(tmp_path):
    """A run without jobs ends when its flows do, even if somebody looks."""
    path = tmp_path / "flows.yaml"
    path.write_text(
        "name: flows\ntitle: Flows\nquestion: When do they end?\n"
        "setting:\n  topology: {kind: star, hosts: 4}\n  patterns: [{size_bytes: 20000}]\n"
    )
    (item,) = read(path).runs
    recorder, said = TableRecorder(), []
    document = run(item, recorder=recorder, on_progress=lambda *progress: said.append(progress))
    assert document == run(item)
    assert document["metrics"]["simulated_s"] < 1e-2
    assert len(recorder.tables()["messages"]["size_bytes"]) == 4
    assert len(said) <= 10
