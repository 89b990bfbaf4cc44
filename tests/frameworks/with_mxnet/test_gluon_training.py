# SPDX-License-Identifier: Apache-2.0
"""The digits example over the built-in switch: as accurate as over MXNet's own parameter server, replicas identical."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("mxnet")

from tests.frameworks.framework_ranks import LEARNT, PATIENT, SEEDS, assert_as_accurate, run_ranks, switch
from tests.transport.free_ports import free_ports

pytestmark = pytest.mark.timeout(1500)
RANK = "tests.frameworks.with_mxnet.gluon_rank"
UDP_PORT = 53699
RATE_BPS, DEPTH_PACKETS = 120e6, 32
"""Narrow enough that the ports overflow."""
EPOCHS = 16
TRIES = 3
"""Runs of MXNet's own training at most, until one is better than that."""


@contextmanager
def parameter_server(workers):
    """MXNet's scheduler and server; gives the environment of each worker."""
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_ports(1)[0]),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(workers),
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", "import mxnet"], env={**os.environ, **common, "DMLC_ROLE": role})
        for role in ("scheduler", "server")
    ]
    try:
        yield [{**common, "DMLC_ROLE": "worker"}] * workers
    finally:
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def results(ended):
    """Return what came of each seed at the workers, in lists, worker 0 first."""
    for rank in ended:
        assert rank.status == 0, rank.output
    return [
        sorted(of_one_seed, key=lambda result: result["rank"])
        for of_one_seed in zip(*(rank.result["runs"] for rank in ended), strict=True)
    ]


def trained_by_mxnet(workers, seed):
    """Return the results of MXNet's own training from a seed: the best of up to ``TRIES`` runs.

    Most runs end with the same weights, to the bit, but now and then one ends points worse (0.937 for 0.973): MXNet's
    parameter server does not always give the same sums. DLCP has to be compared with a run that learnt.
    """
    runs = []
    for _ in range(TRIES):
        with parameter_server(workers) as environments:
            ranks = run_ranks(RANK, "dist_sync", EPOCHS, seed, count=workers, environments=environments)
        runs += results(ranks)
        if runs[-1][0]["accuracy"] > LEARNT:
            break
    return max(runs, key=lambda run: run[0]["accuracy"])


@pytest.mark.parametrize(("workers", "seeds"), [(2, SEEDS), (4, SEEDS[:1])])
def test_digits_are_learnt_as_with_mxnets_own_sums(workers, seeds, tmp_path):
    theirs = [trained_by_mxnet(workers, seed) for seed in seeds]
    with switch(tmp_path, UDP_PORT, hosts=workers, rate_bps=RATE_BPS, depth_packets=DEPTH_PACKETS) as environments:
        ours = results(
            run_ranks(RANK, "dist_dlcp", EPOCHS, *seeds, count=workers, environments=environments, environment=PATIENT)
        )
    for replicas in ours:
        assert len({result["weights"] for result in replicas}) == 1, "replicas are identical"
        for result in replicas:
            assert result["active"], result["reason"]
            assert result["violations"] == 0
            assert 0 <= result["max_message_ratio"] <= 0.1
    for results_of_seed in ours + theirs:
        assert [result["workers"] for result in results_of_seed] == [workers] * workers
    assert sum(result["lost"] + result["retransmitted"] for result in ours[-1]) > 0, "the network was congested"
    assert_as_accurate([replicas[0] for replicas in ours], [replicas[0] for replicas in theirs])


def test_a_worker_that_dies_ends_the_others_with_its_number():
    first, second, dead = run_ranks(RANK, "die", count=3, environment=PATIENT)
    assert dead.status == -signal.SIGKILL
    for rank in (first, second):
        assert rank.status == 1
        assert "rank 2" in rank.output
        assert "parameter 0" in rank.output
