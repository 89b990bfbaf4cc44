# SPDX-License-Identifier: Apache-2.0
"""Lower precision: replicas equal, sums conserved, and fewer bytes."""

import numpy as np
import pytest

from dlcp.policies.arms import bits_allowed
from dlcp.values.dtypes import ValueType
from tests.collectives.test_reduce_scatter import ScatteringRanks
from tests.collectives.virtual_ranks import ONE_BUCKET, SIZES, SMALL_SIZES, Ranks, SmallRanks, assert_identical
from tests.collectives.virtual_ring import RingRanks

THREE_BUCKETS = [["fc.weight"], ["conv2.bias", "conv2.weight"], ["conv1.bias", "conv1.weight"]]
FORMATS = pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.FLOAT16, ValueType.BFLOAT16])
PRECISION = pytest.mark.parametrize("precision", ["16", "8", "4"])


def sums(ranks, steps, **fields):
    """Run steps; return by parameter the sum of all gradients, and n times the sum of all averages."""
    widen = ranks.value_type.widen
    given = {name: np.zeros(size) for name, size in SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SIZES.items()}
    for step in range(steps):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, ONE_BUCKET, **fields)
        assert_identical(averages)
        for name in SIZES:
            given[name] += sum(widen(rank[name]).astype(float) for rank in gradients)
            taken[name] += ranks.count * widen(averages[0][name]).astype(float)
    return given, taken


@PRECISION
@pytest.mark.parametrize(("count", "loss"), [(2, 0.0), (3, 0.05), (5, 0.2)])
def test_what_is_rounded_is_not_lost(count, loss, precision):
    ranks = Ranks(count, bound=0.3, loss=loss, jitter_s=0.001, seed=5, precision=precision)
    given, taken = sums(ranks, 6)
    for name in SIZES:
        scale = np.abs(given[name]).max()
        np.testing.assert_allclose(taken[name] + ranks.owed(name), given[name], rtol=0, atol=1e-5 * scale)
    assert all(reducer.context.residual.size > 1000 for reducer in ranks.reducers), "nothing was rounded"
    if loss and precision != "4":
        assert ranks.lost > 0, "packets of the lower plane may be lost"
    for ledger in ranks.ledgers:
        assert ledger.violations == 0


@PRECISION
@pytest.mark.parametrize(("count", "loss"), [(2, 0.0), (3, 0.05), (5, 0.2)])
def test_a_ring_loses_nothing_by_rounding(count, loss, precision):
    ranks = RingRanks(count, bound=0.3, loss=loss, jitter_s=0.001, seed=5, precision=precision)
    given, taken = sums(ranks, 6)
    for name in SIZES:
        scale = np.abs(given[name]).max()
        np.testing.assert_allclose(taken[name] + ranks.owed(name), given[name], rtol=0, atol=2e-5 * scale)
    assert all(reducer.context.residual.size > 1000 for reducer in ranks.reducers), "nothing was rounded"


@FORMATS
@PRECISION
def test_a_ring_is_close_in_every_format(value_type, precision):
    ranks = RingRanks(4, seed=6, value_type=value_type, precision=precision)
    gradients = ranks.gradients(1)
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    for name in SIZES:
        exact = np.mean([value_type.widen(rank[name]) for rank in gradients], axis=0)
        error = np.linalg.norm(value_type.widen(averages[0][name]) - exact) / np.linalg.norm(exact)
        assert error <= {"16": 0.006, "8": 0.04, "4": 0.6}[precision], name


@FORMATS
@pytest.mark.parametrize(("precision", "loss"), [("8", 0.05), ("4", 0.0)])
def test_through_a_server_nothing_is_lost_either(precision, loss, value_type):
    ranks = Ranks(3, server=True, bound=0.3, loss=loss, seed=5, precision=precision, value_type=value_type)
    ranks.serve()
    given, taken = sums(ranks, 8)
    (rounded,) = ranks.server._rounded.values()
    stops = np.cumsum(list(SIZES.values()))
    coarse = 1e-5 if value_type is ValueType.FLOAT32 else 0.02  # 16-bit formats round each average
    for name, kept in zip(SIZES, np.split(rounded, stops[:-1]), strict=True):
        scale = np.abs(given[name]).max()
        total = taken[name] + ranks.owed(name) + 3 * kept
        np.testing.assert_allclose(total, given[name], rtol=0, atol=coarse * scale)
    gradients, owed = ranks.gradients(20), {name: ranks.owed(name) for name in SIZES}
    averages = ranks.reduce(20, gradients, flush=True)
    assert not ranks.server._rounded
    for name, kept in zip(SIZES, np.split(rounded, stops[:-1]), strict=True):
        total = sum(value_type.widen(rank[name]).astype(float) for rank in gradients) + owed[name] + 3 * kept
        found = 3 * value_type.widen(averages[0][name]).astype(float)
        np.testing.assert_allclose(found, total, rtol=0, atol=coarse * np.abs(total).max())


@FORMATS
@PRECISION
def test_averages_are_close_in_every_format(value_type, precision):
    ranks = SmallRanks(3, seed=6, value_type=value_type, precision=precision)
    gradients = ranks.gradients(1)
    averages = ranks.reduce(0, gradients, THREE_BUCKETS)
    assert_identical(averages)
    tolerance = {"16": 1e-3, "8": 0.02, "4": 0.35}[precision]
    for name in SMALL_SIZES:
        exact = np.mean([value_type.widen(rank[name]) for rank in gradients], axis=0)
        found = value_type.widen(averages[0][name])
        assert np.linalg.norm(found - exact) <= max(tolerance, 0.005) * np.linalg.norm(exact), name


@PRECISION
def test_fewer_bits_are_fewer_packets(precision):
    plain, coded = (SmallRanks(4, seed=7, precision=each) for each in ("32", precision))
    for ranks in (plain, coded):
        ranks.reduce(0, ranks.gradients(1), [list(SMALL_SIZES)])
    packets = [sum(ledger.summary()["sent"] for ledger in ranks.ledgers) for ranks in (plain, coded)]
    assert packets[1] < 1.5 * packets[0] * int(precision) / 32


@pytest.mark.parametrize("flags", [{"exact": True}, {"flush": True}])
def test_exact_data_and_a_flush_keep_all_bits(flags):
    ranks = SmallRanks(3, seed=8, precision="8")
    ranks.reduce(0, ranks.gradients(0))
    owed = {name: ranks.owed(name) for name in SMALL_SIZES}
    gradients = ranks.gradients(1)
    averages = ranks.reduce(1, gradients, **flags)
    for name in SMALL_SIZES:
        total = sum(rank[name].astype(float) for rank in gradients) + owed[name]
        np.testing.assert_allclose(3 * averages[0][name].astype(float), total, rtol=1e-4, atol=1e-4)
        assert not np.any(ranks.owed(name)), "nothing may be owed after it"


@PRECISION
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_rank_sees_what_is_not_finite(value, precision):
    ranks = SmallRanks(3, seed=9, precision=precision)
    gradients = ranks.gradients(1)
    gradients[1]["conv2.weight"][4321] = value
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    assert not np.isfinite(averages[0]["conv2.weight"][4321])
    assert np.isfinite(averages[0]["fc.weight"]).all()
    for rank in range(3):
        later = ranks.reduce(1 + rank, ranks.gradients(2))
        assert all(np.isfinite(each).all() for each in later[0].values()), "it must not return as residual"


@pytest.mark.parametrize("kind", [SmallRanks, RingRanks])
def test_the_precision_may_change_with_every_step(kind):
    ranks = kind(3, bound=0.3, loss=0.05, jitter_s=0.001, seed=5)
    given = taken = 0.0
    for step, bits in enumerate((8, 32, 4, 16, 8, 8)):
        ranks.bits = bits
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients)
        assert_identical(averages)
        given = given + sum(rank["fc.weight"].astype(float) for rank in gradients)
        taken = taken + 3 * averages[0]["fc.weight"].astype(float)
    np.testing.assert_allclose(taken + ranks.owed("fc.weight"), given, rtol=0, atol=2e-5 * np.abs(given).max())


@pytest.mark.parametrize(
    ("precision", "error_feedback", "bits"),
    [
        ("exact", True, (32,)),
        ("auto", True, (32, 8)),
        ("fast", True, (32, 8, 4)),
        ("fast", False, (32,)),
        ("auto", False, (32,)),
        ("16", False, (16,)),
    ],
)
def test_nothing_is_rounded_without_being_sent_later_unless_told(precision, error_feedback, bits):
    assert bits_allowed(precision, error_feedback=error_feedback) == bits


@pytest.mark.parametrize(("precision", "loss"), [("16", 0.0), ("8", 0.1), ("4", 0.0)])
def test_scattered_sums_are_kept(precision, loss):
    ranks = ScatteringRanks(3, bound=0.3, loss=loss, seed=3, precision=precision)
    gradients = [ranks.gradients(step) for step in range(6)]
    averages = [ranks.scatter(step, each) for step, each in enumerate(gradients)]
    largest = max(np.abs(each).max() for rank in gradients[0] for each in rank.values())
    ranks.assert_sums_kept(gradients, averages, 1e-5 * largest)
