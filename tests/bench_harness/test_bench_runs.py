# SPDX-License-Identifier: Apache-2.0
"""Small runs of the real benchmarks: their output, and that enabling DLCP on a clean path changes nothing."""

import json
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("torch")

from dlcp.transport import shared_memory
from tests.bench import allreduce, reduction, step
from tests.bench.__main__ import main
from tests.bench.harness import Turns
from tests.bench.paths import BenchPath, DelayedPath, RoutedPath
from tests.bench.reduction import DIVIDED, LOSSLESS, LOSSY, MEMORY, MEMORY_DIVIDED, AllReduceContender, RankOutcome

pytestmark = pytest.mark.timeout(110)
MEGABYTE = 250_000
NO_PACKETS = {"sent": 0, "delivered": 0, "lost": 0, "retransmitted": 0, "encoded": 0}


def names_of(name):
    memory = [name, f"{name}.buckets"] if shared_memory.supported() else []
    sockets = f"{name}.sockets" if memory else name
    return [*memory, sockets, f"{sockets}.reliable", f"{sockets}.buckets"]


def test_on_a_clean_path_nothing_is_lost_and_no_gradient_changes():
    with BenchPath(2) as path:
        found = reduction.measure(path, MEGABYTE, Turns(2, 1))
    gloo = [contender.name for contender in found.contenders if contender.control]
    assert len(gloo) == 2 * len(path.controls)
    through_memory = [MEMORY, MEMORY_DIVIDED] if shared_memory.supported() else []
    assert set(found.samples) == {LOSSY, LOSSLESS, DIVIDED, *through_memory, *gloo}
    assert all(len(times) == 2 and min(times) > 0 for times in found.samples.values())
    for name in (LOSSY, LOSSLESS, DIVIDED, *through_memory):
        packets = found.ledgers[name]
        # Three runs, two ranks, half a megabyte each way, and the rates that follow a result.
        assert packets["sent"] >= 3 * 2 * 2 * (MEGABYTE // 2 * 4 / 1440)
        assert packets["delivered"] == packets["sent"]
        assert packets["lost"] == 0
        assert found.inexact[name] == 0
    results = found.results("some.name")
    assert [each.name for each in results] == names_of("some.name")
    for result, way in zip(results, [*through_memory, LOSSY, LOSSLESS, DIVIDED], strict=True):
        assert result.value == pytest.approx(np.median(found.samples[way]), rel=0.01)
        assert result.details["packets"] == found.ledgers[way]
        assert result.details["through"] == ("memory" if way in through_memory else "sockets")
        assert result.details["gradients_changed"] == 0
        assert result.details["peer"] in gloo


@pytest.mark.usefixtures("bench_namespaces")
def test_over_a_lossy_path_results_stay_within_the_bound_and_are_exact_without_one():
    ways = [AllReduceContender(LOSSY, 2, bound=0.3, bits=8), AllReduceContender(LOSSLESS, 1, bound=0.0)]
    with RoutedPath(2, 0.05) as path:
        found = reduction.measure(path, MEGABYTE, Turns(2, 0), ways=ways)
    assert 0.03 < found.path_loss < 0.07
    assert found.inexact[LOSSLESS] == found.ledgers[LOSSLESS]["lost"] == 0
    packets = found.ledgers[LOSSY]
    assert packets["delivered"] + packets["lost"] == packets["sent"] - packets["retransmitted"]
    assert packets["encoded"] > 0


def test_wrong_results_are_noticed():
    right, off = RankOutcome(0, 5, NO_PACKETS), RankOutcome(10, 5, NO_PACKETS)
    assert reduction.check("x", [right, right], 0) == 0
    assert reduction.check("x", [right, off], 10) == 10
    with pytest.raises(reduction.WrongResultError, match=r"x: 10 values are inexact, .* excuse 9"):
        reduction.check("x", [right, off], 9)
    with pytest.raises(reduction.WrongResultError, match=r"x: the ranks have different results.* \[5, 6\]"):
        reduction.check("x", [right, RankOutcome(0, 6, NO_PACKETS)], 0)


def test_the_command_prints_one_document(capsys):
    words = ["allreduce", "--megabytes", "0.2", "--ranks", "2", "--rounds", "1", "--warm-up", "0"]
    assert main(words) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    names = [entry["name"] for entry in document["results"]]
    assert names == names_of("allreduce.n2")
    for entry in document["results"]:
        assert entry["unit"] == "ms"
        assert entry["ratio"] == pytest.approx(entry["peer"] / entry["value"], rel=0.01)
    assert "round 1 of 1" in printed.err


def test_what_cannot_be_measured_is_said_and_leaves_a_document_without_results(capsys):
    assert main(["allreduce", "--over", "veth", "--ranks", "3"]) == 1
    printed = capsys.readouterr()
    assert "a veth pair joins 2 ranks, not [3]" in printed.err
    assert json.loads(printed.out)["results"] == []


def test_a_step_is_measured_in_all_ways():
    results = {entry.name: entry for entry in step.measure(Turns(1, 1), ranks=2, width=32, depth=1, precision="8")}
    ways = ["compute", "ddp", "auto", "crossstep", "precision8", "precision8.bf16"]
    assert list(results) == [f"step.{way}.n2" for way in ways]
    assert results["step.precision8.bf16.n2"].details["peer"] == "gloo, bf16"
    assert results["step.compute.n2"].peer is None
    for name in ("step.ddp.n2", "step.crossstep.n2"):
        packets = results[name].details["packets"]
        assert packets["sent"] == packets["delivered"] > 0
        assert results[name].value > 0
    assert results["step.ddp.n2"].details["peer"] == "gloo"
    assert set(results["step.crossstep.n2"].details["peers_tried"]) == {"gloo", "dlcp"}


def test_the_model_has_25_million_parameters():
    assert 25e6 < sum(parameter.numel() for parameter in step.LanguageModel().parameters()) < 26e6


def test_processor_time_is_that_of_all_ranks_beside_gloo_and_the_floor():
    with BenchPath(2) as path:
        results = allreduce.processor_time(path, "cpu.n2", 1.0, Turns(2, 1))
    assert [each.name for each in results] == [
        f"cpu.n2{suffix}" for suffix in ("", ".reliable", ".buckets", ".encoded", ".small")
    ]
    *large, small = results
    for result in results:
        assert result.value > 0 < result.peer
        assert result.details["peer"].startswith("gloo")
    for result in large:
        assert len(result.details["seconds_by"]) == len(result.details["milliseconds"])
    assert len(small.details["microseconds_by"]) == 1 + len(small.details["peers_tried"])
    if shutil.which("cc"):
        assert results[0].details["floor"] > 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("ranks", "values"), [(2, 2), (2, 361), (3, 100_000), (5, 123_457)])
def test_the_floor_averages_rightly_whatever_the_sizes(tmp_path, ranks, values):
    """It checks each of its results itself."""
    program = allreduce.compiled_floor(tmp_path)
    done = subprocess.run([program, str(ranks), str(values), "1440", "3"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert subprocess.run([program, "1", "5", "1440", "1"], timeout=60).returncode == 2


@pytest.mark.usefixtures("bench_namespaces")
def test_long_paths_are_measured_alone_and_beside_others():
    megabytes = allreduce.megabytes_in(0.3, 20_000_000)
    with DelayedPath(20_000_000, 0.005, 2.0) as path:
        alone, beside = allreduce.alone_and_beside(path, "delay.rtt5.buffer2", megabytes, Turns(1, 0))
    assert (alone.name, beside.name) == ("delay.rtt5.buffer2", "delay.rtt5.buffer2.beside")
    assert "queue of 17 packets" in path.words
    assert alone.value > 300, "an all-reduce cannot take less than its frames"
    assert 0 < beside.value <= 3, "nor have more than the whole rate, which is three fair shares"
    assert all(rate > 0 for rate in beside.details["rivals_mbps"])
