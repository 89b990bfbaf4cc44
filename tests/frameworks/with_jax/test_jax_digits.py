# SPDX-License-Identifier: Apache-2.0
"""Two processes train the digits example with JAX over the built-in switch, whose narrow ports lose packets."""

import pytest

pytest.importorskip("jax")
pytest.importorskip("sklearn")

from tests.frameworks.framework_ranks import (
    PATIENT,
    SEEDS,
    assert_death_is_known,
    assert_learnt_alike,
    run_ranks,
    switch,
)

pytestmark = pytest.mark.timeout(1500)
RANK = "tests.frameworks.with_jax.jax_digits_rank"
UDP_PORT = 53700  # others take other ports of DLCP's block


def test_the_digits_are_learnt_as_with_exact_means(tmp_path):
    with switch(tmp_path, UDP_PORT, rate_bps=50_000_000, depth_packets=12) as environments:
        ranks = run_ranks(RANK, "both", *SEEDS, environments=environments, environment=PATIENT)
    assert_learnt_alike(ranks, "exact")


def test_a_dead_rank_ends_the_others():
    assert_death_is_known(run_ranks(RANK, "dying", environment=PATIENT))
