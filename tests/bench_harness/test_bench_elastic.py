# SPDX-License-Identifier: Apache-2.0
"""Small runs of the benchmark ``elastic``: a rank is killed and comes back, and a schedule of faults."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("grpc")

pytestmark = pytest.mark.timeout(110)
SMALL = ["-m", "tests.bench", "elastic", "--ranks", "3", "--tries", "1", "--megabytes", "0.1", "--pause-ms", "5"]


def results_of(*words):
    """Measure in a process of its own: the thread that serves stores stays in a namespace."""
    done = subprocess.run([sys.executable, *SMALL, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {entry["name"]: entry for entry in json.loads(done.stdout)["results"]}


def test_a_rank_that_is_killed_comes_back():
    found = results_of("--loopback", "--fault", "back")
    assert found["elastic.back.n3.notice"]["value"] < found["elastic.back.n3.step"]["value"]
    assert found["elastic.back.n3.python"]["value"] < found["elastic.back.n3.back"]["value"]


def test_torchft_goes_on_without_a_replica_that_is_killed():
    pytest.importorskip("torchft")
    found = results_of("--loopback", "--fault", "kill", "--torchft", "3")
    assert 0 < found["elastic.kill.n3.notice"]["value"] <= found["elastic.kill.n3.step"]["value"]
    assert found["elastic.kill.n3.discarded"]["unit"] == "steps"


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--loopback"], "the loopback has no links"), (["--torchft", "1", "--fault", "back"], "--torchft goes with")],
)
@pytest.mark.usefixtures("bench_namespaces")
def test_options_that_do_not_go_together_are_refused(words, why):
    done = subprocess.run([sys.executable, *SMALL, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert why in done.stderr


@pytest.mark.usefixtures("bench_namespaces")
def test_a_schedule_of_faults_costs_some_throughput():
    (found,) = results_of("--schedule", "3", "--every", "2").values()
    assert 0 < found["value"] < 200
    assert sum(found["details"]["faults"].values()) >= 1
