# SPDX-License-Identifier: Apache-2.0
"""Two processes train the digits example with DDP over the built-in switch, whose narrow ports lose packets."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("msgspec", reason="the switch needs it")

from tests.frameworks.framework_ranks import PATIENT, SEEDS, assert_learnt_alike, run_ranks, switch
from tests.train.preloaded import Preloaded

pytestmark = pytest.mark.timeout(1500)
RANK = "tests.frameworks.torch_digits_rank"
UDP_PORT = 53698  # others take other ports of DLCP's block


def test_the_digits_are_learnt_as_with_ddps_own_all_reduce(tmp_path):
    behind_switch = switch(tmp_path, UDP_PORT, rate_bps=50_000_000, depth_packets=12)
    with behind_switch as environments, Preloaded() as python:
        environment = {**PATIENT, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = run_ranks(RANK, *SEEDS, environments=environments, environment=environment, python=python)
    assert_learnt_alike(ranks, "gloo")
    assert all(run["steps"] == 8 * 18 for rank in ranks for run in rank.result["dlcp"])
