# SPDX-License-Identifier: Apache-2.0
"""Two processes train the digits example with Keras over the built-in switch, whose narrow ports lose packets."""

import json

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

from tests.frameworks.framework_ranks import (
    PATIENT,
    SEEDS,
    assert_death_is_known,
    assert_learnt_alike,
    run_ranks,
    switch,
)
from tests.transport.free_ports import free_ports

pytestmark = pytest.mark.timeout(1500)
RANK = "tests.frameworks.with_tensorflow.digits_rank"
UDP_PORT = 53701  # others take other ports of DLCP's block


def test_the_digits_are_learnt_as_with_tensorflows_own_all_reduce(tmp_path):
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with switch(tmp_path, UDP_PORT, rate_bps=50_000_000, depth_packets=12) as environments:
        for index, environment in enumerate(environments):
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        ranks = run_ranks(RANK, "both", *SEEDS, environments=environments, environment=PATIENT)
    assert_learnt_alike(ranks, "tensorflow")
    for rank in ranks:
        assert {run["steps"] for run in rank.result["dlcp"] + rank.result["tensorflow"]} == {8 * 19}
    first, second = (rank.result for rank in ranks)
    for by in ("dlcp", "tensorflow"):
        assert [run["optimizer"] for run in first[by]] == [run["optimizer"] for run in second[by]]
    assert first["tensorflow"][0]["optimizer"] != first["dlcp"][0]["optimizer"]


def test_a_dead_rank_ends_the_others():
    assert_death_is_known(run_ranks(RANK, "dying", environment=PATIENT))
