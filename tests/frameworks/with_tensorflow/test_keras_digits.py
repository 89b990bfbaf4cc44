# SPDX-License-Identifier: Apache-2.0
"""Two processes train the digits example with Keras over the built-in switch, whose narrow ports lose packets."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

from framework_ranks import free_ports, run_ranks, switch

from dlcp.group import Options

pytestmark = pytest.mark.timeout(600)
RANK = Path(__file__).parent / "digits_rank.py"
UDP_PORT = 53701  # others take other ports of DLCP's block
HALF_A_POINT = 0.005
PATIENT = {"DLCP_SILENCE_S": "60", "DLCP_DEADLINE_S": "240", "DLCP_MEET_S": "240"}
"""A busy machine is no dead one."""


def test_the_digits_are_learnt_as_with_tensorflows_own_all_reduce(tmp_path):
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with switch(tmp_path, UDP_PORT, rate_bps=50_000_000, depth_packets=12) as environments:
        for index, environment in enumerate(environments):
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        ranks = run_ranks(RANK, "both", environments=environments, environment=PATIENT)
    for rank in ranks:
        assert rank.status == 0, rank.output
        own, ours = rank.result["tensorflow"], rank.result["dlcp"]
        assert ours["active"]
        assert ours["steps"] == own["steps"] == 8 * 19
        assert ours["lost"] > 0, "without loss there is nothing to show"
        assert ours["violations"] == 0
        assert ours["max_message_ratio"] <= Options().loss_bound
        assert own["accuracy"] > 0.95
        assert ours["accuracy"] == pytest.approx(own["accuracy"], abs=HALF_A_POINT)
    first, second = (rank.result for rank in ranks)
    for what in ("weights", "optimizer"):
        assert first["dlcp"][what] == second["dlcp"][what], "replicas are the same bit by bit"
        assert first["tensorflow"][what] == second["tensorflow"][what] != first["dlcp"][what]


def test_a_dead_rank_ends_the_others():
    first, second = run_ranks(RANK, "dying", environment=PATIENT)
    assert second.status == -9
    assert first.status == 1, first.output
    assert "rank 1 has ended" in first.output
    assert "step 6" in first.output
