# SPDX-License-Identifier: Apache-2.0
"""Sweeps: which cells there are, what their results are called, what is reported, and a tiny real one."""

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dlcp.bench import BenchError, BenchResult
from tests.bench import allreduce, harness, reduction, sweep
from tests.bench.__main__ import benchmark, main, parser_of
from tests.bench.harness import FailedError, Turns
from tests.bench.paths import BenchPath, DelayedPath, RoutedPath
from tests.bench.ranks import RankError
from tests.bench.sweep import SweepCell

pytestmark = pytest.mark.timeout(110)
ROOT = Path(__file__).parents[2]


def entry(name, ratio=2.0, peer=20.0, **details):
    return BenchResult(name, peer / ratio, "ms", peer, ratio, 5, 0.1, {"peer": "gloo, cubic", **details})


def parsed(name, *words):
    arguments = parser_of(name).parse_args(words)
    arguments.turns = benchmark(name).turns(arguments)
    return arguments


def results_of(name, *words):
    return benchmark(name).measure(parsed(name, *words))


@pytest.fixture
def measured(monkeypatch):
    """Measure nothing; return the turns and sizes with which each cell would be measured, by name of its result."""
    calls = {}

    def measure(row, name, ranks, megabytes, turns):
        calls[name] = turns, megabytes
        return [entry(name, ours="dlcp")]

    monkeypatch.setattr(sweep, "measure_cell", measure)
    monkeypatch.setattr(sweep, "say", lambda words: None)
    return calls


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("allreduce", ["allreduce.n2", "allreduce.n4"]),
        ("allreduce --megabytes 1", ["allreduce.n2", "allreduce.n4"]),
        ("loss --percent 0 1 --outages 3", ["allreduce.loss0", "allreduce.loss1", "allreduce.outages.loss3"]),
        ("loss --percent 1 --outages --ranks 4 --mtu 9000", ["allreduce.loss1.mtu9000"]),
        ("slow-path", ["slow_path.n2", "slow_path.n4"]),
        ("tail", ["tail"]),
        ("delay --rtt-ms 20 --buffers 1 5", ["delay.rtt20.buffer1", "delay.rtt20.buffer5"]),
    ],
)
def test_without_a_list_names_are_those_of_one_size(measured, words, names):
    found = results_of(*words.split())
    assert [each.name for each in found] == list(measured) == names
    assert all("cell" not in each.details for each in found)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            "loss --percent 1 --outages 3 --megabytes 0.6 100 --ranks 2 4",
            [
                "allreduce.loss1.mb0.6",
                "allreduce.loss1.n4.mb0.6",
                "allreduce.loss1",
                "allreduce.loss1.n4",
                "allreduce.outages.loss3.mb0.6",
                "allreduce.outages.loss3.n4.mb0.6",
                "allreduce.outages.loss3",
                "allreduce.outages.loss3.n4",
            ],
        ),
        ("loss --percent 1 --megabytes 0.6 4 --rtt-ms 9", ["allreduce.loss1.mb0.6.rtt9", "allreduce.loss1.mb4.rtt9"]),
        ("allreduce --megabytes 1 100 --ranks 8", ["allreduce.n8.mb1", "allreduce.n8"]),
        ("slow-path --megabytes 0.06 8 --ranks 2", ["slow_path.n2.mb0.06", "slow_path.n2"]),
        ("tail --ranks 2 4", ["tail.n2", "tail"]),
        (
            "delay --megabytes 0.004 4 --rtt-ms 1 --buffers 1",
            ["delay.rtt1.buffer1.mb0.004", "delay.rtt1.buffer1.mb4"],
        ),
    ],
)  # fmt: skip
def test_of_a_list_each_cell_has_a_name_of_its_own(measured, words, names, capsys):
    found = results_of(*words.split())
    assert [each.name for each in found] == list(measured) == names
    assert len({tuple(each.details["cell"].items()) for each in found}) == len(names)
    assert capsys.readouterr().out == "", "standard output belongs to the document"


def test_a_sweep_covers_small_sizes_many_ranks_and_losses(measured):
    cells = [each.details["cell"] for each in results_of("loss", "--sweep")]
    assert {cell["megabytes"] for cell in cells} == set(sweep.SWEPT_SIZES_MB)
    assert {cell["ranks"] for cell in cells} == {2, 4, 8}
    assert {cell["loss_percent"] for cell in cells} == {0, 0.1, 1, 3, 5}
    assert max(cell["ranks"] * cell["megabytes"] for cell in cells) == 200
    assert {(turns.warm_up, turns.budget_s) for turns, _ in measured.values()} == {(1, sweep.CELL_S)}
    measured.clear()
    results_of("loss")
    assert {(turns.warm_up, turns.budget_s) for turns, _ in measured.values()} == {(2, None)}


@pytest.mark.parametrize(("name", "largest_mb"), [("slow-path", 4), ("tail", 4), ("delay", 4)])
def test_a_sweep_leaves_out_what_a_slow_port_has_no_time_for(measured, name, largest_mb):
    sizes = {each.details["cell"]["megabytes"] for each in results_of(name, "--sweep")}
    assert sizes == {size for size in sweep.SWEPT_SIZES_MB if size <= largest_mb}


def test_a_size_takes_a_port_its_time():
    assert allreduce.seconds_for(allreduce.megabytes_in(3.0, 40_000_000), 40_000_000) == pytest.approx(3.0)


@pytest.mark.parametrize("words", ["--rtt-ms 5 --mtu 9000", "--rtt-ms 5 --outages 1"])
def test_what_a_round_trip_cannot_be_combined_with_is_refused(measured, words):
    with pytest.raises(BenchError, match=r"with a round trip|at the router alone"):
        results_of("loss", *words.split())
    assert not measured


def test_a_cell_that_fails_is_named_and_the_others_are_measured(measured, monkeypatch, capsys):
    right = sweep.measure_cell

    def measure(row, name, *others):
        if "n4" in name:
            raise RankError("rank 3 failed in run")
        return right(row, name, *others)

    monkeypatch.setattr(sweep, "measure_cell", measure)
    words = ["allreduce", "--ranks", "2", "4", "--megabytes", "1"]
    assert main(words) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [each["name"] for each in document["results"]] == ["allreduce.n2.mb1"]
    assert document["failed"] == {"allreduce.n4.mb1": "rank 3 failed in run"}
    assert "failed: allreduce.n4.mb1" in printed.err
    with pytest.raises(FailedError):
        results_of(*words)


def swept(setting, ranks, megabytes, *entries):
    cell = {"setting": setting, "ranks": ranks, "megabytes": megabytes, "loss_percent": 0.0, "rtt_ms": 0.0}
    return [{**each.as_json(), "details": {**each.details, "cell": cell}} for each in entries]


def test_a_ratio_is_to_the_better_of_all_of_gloos_settings():
    found = sweep.ratios(
        [
            *swept(
                "x", 2, 1.0,
                entry("a.cubic", 4.0, 40.0, ours="dlcp", ratio_of_means=5.0),
                entry("a.cubic.reliable", 9.0, 10.0, ours="dlcp, bound 0"),
                entry("a.bbr", 2.0, 20.0, ours="dlcp", ratio_of_means=8.0),
            ),
            *swept("y", 2, 1.0, entry("b", 0.5, 5.0), BenchResult("b.beside", 1, "fair shares", 1, 1, 1, 0)),
            *swept("z", 2, 1.0, entry("c", 2.0, 20.0, gloo_best="g", means={"g": 15.0})),
            entry("of no cell").as_json(),
        ]
    )  # fmt: skip
    assert [(each.name, each.ratio, each.mean_ratio, each.gloo_ms) for each in found] == [
        ("a.bbr", 2, 5, 20), ("b", 0.5, 0.5, 5), ("c", 1.5, 1.5, 15)
    ]  # fmt: skip


def test_the_table_marks_the_best_and_the_worst():
    ratios = {(2, 0.004): 0.5, (4, 0.004): 1.0, (2, 25.0): 1.0, (4, 25.0): 8.0}
    written = io.StringIO()
    found = [
        sweep.SweptRatio(f"{ranks} {size}", SweepCell("1 % lost", ranks, size), ratio, 2 * ratio, 10.0, 12.34)
        for (ranks, size), ratio in ratios.items()
    ]
    sweep.print_table(found, written)
    page = written.getvalue()
    assert "0.50 / 1.00 worst, 12.3 ms" in page
    assert "8.00 / 16.00 best, 12.3 ms" in page
    assert page.count("worst,") == page.count("best,") == 1
    assert "4 kB" in page
    assert "25 MB" in page
    assert (
        "ratios of medians: geometric mean 1.41x, median 1.00x, worst 0.50x, best 8.00x, slower than Gloo in 1" in page
    )


def test_a_budget_ends_rounds_but_leaves_five(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])

    def taking(seconds):
        def run():
            now[0] += seconds
            return seconds

        return run

    def rounds(budget_s, **contenders):
        ways = {name: taking(seconds) for name, seconds in contenders.items()}
        samples = Turns(50, 1, budget_s=budget_s).take(ways, may_leave=["gloo", "slow"])
        return {name: len(times) for name, times in samples.items()}

    assert rounds(None, ours=1) == {"ours": 50}
    assert rounds(20, ours=1) == {"ours": 19}
    assert rounds(2, ours=1, gloo=1) == {"ours": 5, "gloo": 5}
    assert rounds(2, ours=9, gloo=1, slow=4) == {"ours": 5, "gloo": 5, "slow": 1}, "ours stays however slow"
    left = harness.against_best("x", "ms", {"ours": [1.0, 9.0, 9.0], "slow": [4.0]}, "ours", ["slow"])
    assert (left.ratio, left.runs) == (4, 1)


def test_one_setting_is_hopeless_only_where_another_is_three_times_as_fast_for_sure():
    assert harness.hopeless({"a": [1, 2], "b": [6, 9], "c": [5.9, 99], "d": [99]}) == {"b"}
    assert harness.hopeless({}) == set()


def test_a_tiny_sweep_over_loopback(capsys, monkeypatch):
    monkeypatch.setattr(allreduce, "loopback", BenchPath)
    words = ["allreduce", "--megabytes", "0.004", "0.06", "--ranks", "2", "--rounds", "1", "--warm-up", "0"]
    assert main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["results"]
    assert {each["name"].partition(".mb")[2][:4] for each in found} >= {"0.06"}
    assert found[0]["name"] == "allreduce.n2.mb0.004"
    for each in found:
        assert each["ratio"] > 0
        assert each["details"]["gradients_changed"] == 0
    assert "2 cells" in printed.err


@pytest.mark.usefixtures("bench_namespaces")
def test_a_switch_delays_and_loses_for_more_than_two_hosts():
    ways = [reduction.AllReduceContender(reduction.LOSSLESS, 1, bound=0.0)]
    with DelayedPath(50_000_000, 0.02, 2.0, 3, loss=0.1) as path:
        assert path.words.endswith("10.0% random loss")
        found = reduction.measure(path, 100_000, Turns(1, 0), ways=ways)
    assert found.inexact[reduction.LOSSLESS] == 0
    assert 0.05 < found.path_loss < 0.15
    assert found.samples[reduction.LOSSLESS][0] > 40, "two halves, each a round trip at least"
    with pytest.raises(ValueError, match="loss must lie in"):
        DelayedPath(50_000_000, 0.02, 2.0, 2, loss=1.0)


@pytest.mark.usefixtures("bench_namespaces")
def test_a_path_of_loss_is_a_router_without_a_round_trip_and_a_switch_with_one():
    with allreduce.lossy_path(parsed("loss"), 0.01, 3) as path:
        assert isinstance(path, RoutedPath)
    with allreduce.lossy_path(parsed("loss", "--rtt-ms", "4"), 0.01, 3) as path:
        assert isinstance(path, DelayedPath)
        assert len(path.hosts) == 3


def test_the_plot_and_the_text_are_of_the_same_cells():
    pytest.importorskip("matplotlib")
    from tests.bench import plots

    entries = [
        each
        for loss in (0, 5)
        for ranks in (2, 4)
        for size in (0.004, 25.0)
        for each in swept(
            f"{loss} % lost", ranks, size,
            entry(f"allreduce.loss{loss}.n{ranks}.mb{size:g}.cubic", 1.5 + loss * ranks - size / 25, ours="dlcp",
                  ratio_quartiles=[0.4, 30.0], ratio_of_means=0.9),
        )
    ]  # fmt: skip
    for each in entries:
        each["details"]["cell"]["loss_percent"] = float(each["name"].split(".")[1][4:])
    failed = {"allreduce.loss5.n8.mb25": "rank 3 ended"}
    kept = plots.keep([{"machine": {"cores": 2, "processor": "P"}, "results": entries, "failed": failed}])
    assert len(kept["cells"]) == 8
    words = plots.sentences(kept)
    assert "In 8 combinations" in words
    assert "**0.50** (25 MB, 2 ranks, no loss) and 21.50 times (4 kB, 4 ranks, 5 % loss)" in words
    assert "slower in 2 of them" in words
    assert "Not measured because a run failed: `allreduce.loss5.n8.mb25`" in words
    picture = plots.draw(kept["cells"])
    assert "worst: 0.50x" in picture
    assert "best: 21.50x" in picture
    assert picture == plots.draw(kept["cells"]), "the same each time"
    whole = plots.block(kept)
    assert "| 5 % | 4 kB | 11.50x (0.90x): 1.74 ms, 20 ms | 21.50x" in whole
