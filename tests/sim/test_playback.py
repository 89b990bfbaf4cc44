# SPDX-License-Identifier: Apache-2.0
"""The page that plays a step shows what was simulated, and names the rank that others wait for."""

import json
import re
from itertools import pairwise

import pytest

from dlcp.cli import main
from dlcp.sim.experiments.experiment import read
from dlcp.sim.experiments.running import run
from dlcp.sim.tools.playback import LANE_POINTS, StepRecorder, playback_page, step_playback
from tests.sim.experiments_small import EXPERIMENT, write_experiment

STRAGGLER = EXPERIMENT.replace("jitter: 0.1", "stragglers: [{worker: 2, factor: 20}]").replace("steps: 2", "steps: 3")
FIFO, DLCP = 0, 2
"""Numbers of the experiment's runs with a rate of 10 Gbit/s."""


def played(path, *, job=None, step=None, point=FIFO, **options):
    item = read(path, **options).runs[point]
    recorder = StepRecorder(job, step)
    run(item, recorder=recorder)
    return step_playback(recorder)


@pytest.fixture(scope="module")
def straggler(tmp_path_factory):
    return write_experiment(tmp_path_factory.mktemp("straggler"), STRAGGLER)


@pytest.mark.parametrize("point", [FIFO, DLCP])
def test_a_lane_is_the_step_from_end_to_end(straggler, point):
    document = run(read(straggler).runs[point])
    for step in range(3):
        found = played(straggler, step=step, point=point)
        assert found.span_us == pytest.approx(document["jobs"][0]["step_s"][step] * 1e6)
        assert [lane.name for lane in found.ranks] == [f"rank {number}" for number in range(4)]
        for lane in found.ranks:
            assert lane.segments[0].begin_us == 0
            assert lane.segments[-1].end_us <= found.span_us + 1e-6
            assert all(one.end_us == other.begin_us for one, other in pairwise(lane.segments))
            assert len(lane.outgoing) == len(lane.incoming) == LANE_POINTS
            assert lane.outgoing.min() >= 0
            assert lane.outgoing.max() > 0


@pytest.mark.parametrize("point", [FIFO, DLCP])
def test_the_others_wait_for_the_slow_rank_to_compute(straggler, point):
    found = played(straggler, step=1, point=point)
    assert next(iter(found.waits)) == "rank 2"
    computing = {
        lane.name: sum(each.end_us - each.begin_us for each in lane.segments if each.kind == "computing")
        for lane in found.ranks
    }
    assert computing["rank 2"] == pytest.approx(20 * 90, rel=0.01)
    for name in ("rank 0", "rank 1", "rank 3"):
        assert computing[name] == pytest.approx(90, rel=0.05)
    (first, *_) = [each for each in found.ranks[0].segments if each.kind == "waiting" and each.computes]
    assert first.peer == "rank 2"
    assert not [each for each in found.ranks[2].segments if each.computes and each.end_us - each.begin_us > 100]


def test_the_run_ends_with_the_step(straggler):
    item = read(straggler).runs[FIFO]
    whole, first = run(item), run(item, recorder=StepRecorder(step=0))
    assert first["metrics"]["simulated_s"] < 0.5 * whole["metrics"]["simulated_s"]
    assert first["jobs"][0]["step_s"][0] == whole["jobs"][0]["step_s"][0]


def test_links_and_counts_are_those_of_the_step(straggler):
    found = played(straggler, step=2)
    assert found.times_us[0] > 0
    assert (found.times_us[1:] > found.times_us[:-1]).all()
    assert found.times_us[-1] == pytest.approx(found.span_us)
    queues = [int(link.queue_bytes.max()) for link in found.links]
    assert queues == sorted(queues, reverse=True)
    assert queues[0] > 0
    assert "leaf0 → rank 1" in [link.name for link in found.links]


def test_the_page_holds_all_that_it_shows(tmp_path, straggler, capsys):
    page = tmp_path / "step.html"
    assert main(["sim", "play", str(straggler), "--step", "1", "--output", str(page)]) == 0
    assert f"{page}: step 1 of job" in capsys.readouterr().out
    text = page.read_text()
    assert not re.search(r"https?:|src=|@import|url\(", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(data)
    assert sorted({each[2] for each in data["ranks"][0]["segments"] if each[2].endswith("compute")}) == [
        "waits for rank 2 to compute"
    ]
    assert len(data["links"][0]["queue"]) == len(data["links"][0]["busy"]) == len(data["times"])
    assert "They wait longest for rank 2" in text
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:\s*(?:\w+ )?([\d.]+)px", text)]
    assert min(sizes) >= 11


def test_flows_have_busy_links_and_no_queues(straggler):
    found = played(straggler, engine="flows")
    text = playback_page(found, "title <b>")
    assert "Busiest links" in text
    assert "title &lt;b&gt;" in text
    assert max(link.busy.max() for link in found.links) > 0


def test_of_many_ranks_those_are_shown_that_others_wait_for(straggler, monkeypatch):
    monkeypatch.setattr("dlcp.sim.tools.playback.SHOWN_RANKS", 2)
    found = played(straggler, step=1)
    assert found.hidden_ranks == 2
    assert len(found.ranks) == 2
    assert "rank 2" in [lane.name for lane in found.ranks]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "3"], "--step: job has steps 0 to 2, got 3"),
        (["--job", "jbo"], "--job: there is no job 'jbo'; did you mean job?"),
    ],
)
def test_what_is_not_there_is_refused(straggler, tmp_path, capsys, options, message):
    page = tmp_path / "step.html"
    assert main(["sim", "play", str(straggler), "--output", str(page), *options]) == 2
    assert message in capsys.readouterr().err
    assert not page.exists()


def test_a_step_that_never_ends_is_an_error(tmp_path, capsys):
    path = write_experiment(tmp_path, STRAGGLER.replace("setting:", "setting:\n  stop_s: 0.003", 1))
    assert main(["sim", "play", str(path), "--output", str(tmp_path / "a.html")]) == 1
    assert "the run is incomplete: job 'job' finished 0 of 3 steps" in capsys.readouterr().err
