# SPDX-License-Identifier: Apache-2.0
"""``dlcp bench allreduce``: on this machine, as ranks of a job, and with a rank that dies."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from dlcp.bench import BenchResult, median
from dlcp.bench.allreduce import operations, table_head, table_row
from dlcp.cli import main, parse
from dlcp.commands import bench as command
from dlcp.host.processes import JobLayout
from tests.cluster.nodes import Nodes, finished
from tests.train import forked
from tests.train.preloaded import Preloaded
from tests.waiting import until

pytestmark = pytest.mark.timeout(110)
COMMAND = ["-m", "dlcp.cli", "bench", "allreduce"]


@pytest.fixture(scope="module")
def python():
    """Words that stand for ``python``: ranks import PyTorch."""
    with Preloaded() as words:
        yield words


def test_ranks_of_this_machine_measure_every_size(python, capfd, monkeypatch):
    monkeypatch.setattr(command, "python_command", lambda module, *words: [*python, "-m", module, *words])
    words = ["--sizes", "8", "60KB", "--ranks", "2", "3", "--iterations", "3", "--warm-up", "1", "--seed", "5"]
    assert main(["bench", "allreduce", *words]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["seed"] == 5
    assert document["machine"]["host"]
    names = [entry["name"] for entry in document["results"]]
    assert names == ["allreduce.n2.8B", "allreduce.n2.60000B", "allreduce.n3.8B", "allreduce.n3.60000B"]
    for entry in document["results"]:
        details, ranks = entry["details"], entry["details"]["ranks"]
        assert entry["runs"] == 3
        assert details["peer"] == "gloo"
        assert details["gradients_changed"] == details["packets"]["lost"] == 0
        assert details["packets"]["delivered"] > 0
        for prefix, milliseconds in (("", entry["value"]), ("peer_", entry["peer"])):
            bandwidth = details["bytes"] / milliseconds / 1e6
            assert details[f"{prefix}algbw_gb_per_s"] == pytest.approx(bandwidth, rel=0.01)
            assert details[f"{prefix}busbw_gb_per_s"] == pytest.approx(bandwidth * 2 * (ranks - 1) / ranks, rel=0.01)


def test_under_a_launcher_every_rank_is_a_member_of_its_job(python, tmp_path):
    file = tmp_path / "found.json"
    words = ["--sizes", "40KB", "--iterations", "2", "--option", "shared_memory=0", "--json", str(file)]
    launch = [sys.executable, "-m", "dlcp.cli", "launch", "-n", "2", "--"]
    done = subprocess.run([*launch, *python, *COMMAND, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(file.read_text())["results"]
    assert (entry["name"], entry["details"]["through"]) == ("allreduce.n2.40000B", "sockets")
    assert "2 ranks on 1 host, tensors on cpu, DLCP through sockets" in done.stderr
    assert done.stderr.count("40 kB") == 1, "rank 0 alone prints"


def test_rounded_values_are_not_wrong(capfd, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    words = ["--sizes", "8", "400KB", "--ranks", "2", "--iterations", "2", "--option", "precision=8"]
    assert main(["bench", "allreduce", *words]) == 0
    out, err = capfd.readouterr()
    small, large = (entry["details"] for entry in json.loads(out)["results"])
    assert (small["packets"]["encoded"], small["gradients_changed"]) == (0, 0)
    assert large["packets"]["encoded"] == large["packets"]["delivered"]
    assert large["gradients_changed"] > 0
    assert err.count("100% of DLCP's packets rounded") == 1


def test_ranks_of_two_hosts_meet_over_their_network(python, tmp_path):
    addresses = {"node0": "10.7.0.1", "node1": "10.7.0.2"}
    interfaces = {name: {"eth0": address} for name, address in addresses.items()}
    launch = [sys.executable, "-m", "dlcp.cli", "launch", "-n", "2", "--nodes", "2", "--master", "10.7.0.1:29717"]
    words = [*python, *COMMAND, "--sizes", "40KB", "--iterations", "2"]
    with Nodes(tmp_path, interfaces, lambda name: f"{addresses[name]} {name}\n") as nodes:
        agents = [nodes.popen(f"node{number}", [*launch, "--node", number, "--", *words]) for number in range(2)]
        first, second = finished(agents)
    (entry,) = json.loads(first[first.index("{\n") : first.rindex("}") + 1])["results"]
    details = entry["details"]
    assert (details["ranks"], details["hosts"], details["through"]) == (4, 2, "memory and sockets")
    assert "results" not in second


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stalls_ends_the_others_with_an_error(number):
    layout = JobLayout.local(2)
    limits = ["--option", "deadline_s=5", "--option", "silence_s=3"]
    words = [*COMMAND, "--sizes", "8", "40MB", "--iterations", "60", *limits, "--json"]
    with (
        forked.Launcher(words, **layout.environment(0)) as survivor,
        forked.Launcher(words, **layout.environment(1)) as victim,
    ):
        until(lambda: "\n     8 B" in survivor.errors.read_text(), "the ranks do not meet")
        victim.send_signal(number)
        done = survivor.finish(60)
    assert done.returncode == 1
    assert "dlcp bench: rank 0: " in done.stderr
    assert "check that every rank is still running" in done.stderr


def test_a_job_of_one_rank_is_refused():
    done = forked.run([*COMMAND, "--sizes", "8"], **JobLayout.local(1).environment(0))
    assert done.returncode == 1
    assert "a job of one rank has nothing to exchange" in done.stderr


@pytest.mark.parametrize("name", command._ELSEWHERE)
def test_a_measurement_that_has_moved_says_where_it_is(name, capsys):
    from tests.bench.__main__ import TABLE

    assert name in TABLE
    with pytest.raises(SystemExit):
        parse(["bench", name, "--percent", "1"])
    assert f"measured in a checkout of DLCP: python -m tests.bench {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--begin 8 --end 1KB --factor 4", [8, 32, 128, 512]),
        ("--begin 1MiB --end 1GB --factor 32", [1 << 20, 1 << 25]),
        ("--sizes 1GiB 10 4K", [8, 4000, 1 << 30]),
        ("--megabytes 0.004 25", [4000, 25_000_000]),
        ("--sweep", [4_000, 60_000, 600_000, 4_000_000, 25_000_000, 100_000_000]),
    ],
)
def test_sizes_are_those_asked_for_in_whole_values(words, sizes):
    assert command._sizes(parse(["bench", "allreduce", *words.split()])) == sizes


def test_small_all_reduces_are_timed_together():
    assert [operations(size) for size in (8, 100_000, 1_000_000, 1 << 30)] == [20, 10, 1, 1]


def test_a_row_stands_below_its_head():
    times = [1.5, 1.6, 1.7]
    details = {"bytes": 4_000_000, "peer_spread": 0.1, "algbw_gb_per_s": 2.5, "busbw_gb_per_s": 3.75}
    details |= {"peer_algbw_gb_per_s": 1.25, "peer_busbw_gb_per_s": 1.875}
    details["packets"] = {"delivered": 8, "lost": 2, "encoded": 0}
    found = BenchResult("x", median(times), "ms", 3.2, 2.0, 3, 0.05, details)
    row = table_row(found)
    assert row.split() == ["4", "MB", "1.6", "ms", "5%", "2.50", "3.75", "3.2", "ms", "10%", "1.25", "1.88", "2.00x"]
    assert len(row) == len(table_head("gloo").splitlines()[-1])
    details["packets"]["encoded"] = 5
    assert table_row(found) == f"{row}, 50% of DLCP's packets rounded"
