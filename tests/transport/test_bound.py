# SPDX-License-Identifier: Apache-2.0
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.transport import RELIABLE, LossBound


@settings(max_examples=500)
@given(millionths=st.integers(0, 999_999), packets=st.integers(1, 1 << 22))
def test_the_least_that_must_arrive_is_the_documented_share(millionths, packets):
    ratio = Fraction(millionths, 1_000_000)
    bound = LossBound(float(ratio))
    assert bound.required(packets) == math.ceil((1 - ratio) * packets)
    assert bound.allowed(packets) + bound.required(packets) == packets


@pytest.mark.parametrize(
    ("ratio", "packets", "required"),
    [(0.1, 10, 9), (0.1, 9, 9), (0.1, 11, 10), (0.29, 100, 71), (0.07, 100, 93), (0.3, 1, 1), (0.999, 1000, 1)],
)
def test_decimal_bounds_are_meant_as_written(ratio, packets, required):
    assert LossBound(ratio).required(packets) == required


def test_reliable_allows_nothing():
    assert RELIABLE.required(1 << 20) == 1 << 20
    assert not RELIABLE.immediate


@pytest.mark.parametrize("ratio", [-0.01, 1.0, 2.0, math.nan])
def test_a_bound_outside_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
        LossBound(ratio)
