# SPDX-License-Identifier: Apache-2.0
"""How buffers are divided: without gaps, at packet borders, in proportion; and so that the slowest rank is soonest."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.collectives import shard_bounds
from dlcp.collectives.bucket import RATE
from dlcp.collectives.shards import SEEN_MARGIN, inbound_rates
from dlcp.policies.slow_ports import weights_for_rates
from tests.collectives.virtual_ranks import Ranks, assert_identical
from tests.transport.exchanges import Selective

WEIGHTS = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 0)


@settings(max_examples=300)
@given(values=st.integers(0, 200_000), per_packet=st.integers(1, 1000), weights=WEIGHTS)
def test_shards_cover_a_buffer_without_gaps(values, per_packet, weights):
    owners = {10 + 3 * number: weight for number, weight in enumerate(weights)}
    shards = shard_bounds(values, per_packet, owners)
    assert list(shards) == list(owners)
    ends = list(shards.values())
    assert ends[0][0] == 0
    assert ends[-1][1] == values
    for (start, stop), (following, _) in itertools.pairwise([*ends, (values, values)]):
        assert start <= stop == following
        assert start % per_packet == 0 or start == values
    packets = -(-values // per_packet)
    counts = [-(-(stop - start) // per_packet) for start, stop in ends]
    if packets >= len(weights):
        assert min(counts) >= 1, "each owner has something, if there is enough"
        spare = packets - len(weights)
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - 1 - spare * weight / sum(weights)) <= 1 + 1e-6


@pytest.mark.parametrize("weights", [{0: -1.0, 1: 2.0}, {0: 0.0, 1: 0.0}])
def test_weights_that_divide_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be >= 0 and not all 0"):
        shard_bounds(100, 10, weights)


def seconds(weights, rates):
    """How long the slowest rank takes for its part of a buffer of one bit."""
    return max((1 + (len(rates) - 2) * weights[rank]) / rates[rank] for rank in rates)


def best_on_a_grid(rates, steps):
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(steps + 1), len(rates) - 1):
        parts = np.diff([0, *cuts, steps]) / steps
        best = min(best, seconds(dict(zip(rates, parts, strict=True)), rates))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_division_is_faster(seed):
    rng = np.random.default_rng(seed)
    count = 3 + seed % 2
    rates = dict(enumerate((10 ** rng.uniform(0, 1.5, count)).tolist()))
    weights = weights_for_rates(rates)
    assert sum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) >= 0
    grid = best_on_a_grid(rates, 60 if count == 3 else 30)
    assert seconds(weights, rates) <= grid * (1 + 1e-9)
    assert seconds(weights, rates) > grid * 0.9, "the grid is fine enough to tell"


@settings(max_examples=100)
@given(st.lists(st.floats(0.001, 1000), min_size=3, max_size=12), st.randoms(use_true_random=False))
def test_moving_weight_between_two_ranks_never_helps(rates, random):
    rates = dict(enumerate(rates))
    weights = weights_for_rates(rates)
    assert sum(weights.values()) == pytest.approx(1)
    least = seconds(weights, rates)
    for _ in range(10):
        giver, taker = random.sample(list(rates), 2)
        moved = dict(weights)
        part = moved[giver] * random.random()
        moved[giver] -= part
        moved[taker] += part
        assert seconds(moved, rates) >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    "rates",
    [{0: 1.0, 1: 9.0}, {0: 0.0, 1: 0.0, 2: 0.0}, {0: 5.0, 1: 5.0, 2: 5.0}, {0: np.inf, 1: 1.0, 2: 1.0}, {3: 1.0}],
)
def test_where_nothing_is_to_gain_all_own_the_same(rates):
    assert list(weights_for_rates(rates).values()) == pytest.approx([1 / len(rates)] * len(rates))


def test_a_rank_that_receives_nothing_owns_nothing():
    weights = weights_for_rates({0: 10.0, 1: 0.0, 2: 10.0, 3: 10.0})
    assert weights[1] == 0
    assert weights[0] == weights[2] == weights[3]


def test_how_fast_a_rank_receives_is_what_the_others_say():
    told = {
        0: np.array([0, 10, 40], ">f4"),
        1: np.array([100, 0, 50], ">f4"),
        2: np.array([120, 20, 0], ">f4"),
    }
    rates = inbound_rates(told)
    assert rates[0] == pytest.approx(220)
    assert rates[1] == pytest.approx(30)
    assert rates[2] == pytest.approx(90)


def test_a_port_is_hardly_faster_than_data_has_come_through_it():
    told = {
        0: np.array([100, 30, 20, 90], ">f4"),
        1: np.array([40, 100, 90, 30], ">f4"),
        2: np.array([40, 30, 30, 30], ">f4"),
        3: np.array([40, 30, 90, 0], ">f4"),
    }
    rates = inbound_rates(told)
    assert rates[0] == rates[1] == rates[3] == pytest.approx(120), "what 3 has seen is not known"
    assert rates[2] == pytest.approx(SEEN_MARGIN * 30)


def test_rates_that_are_alike_or_unknown_count_as_equal():
    told = {rank: np.array([100.0, 95.0, 0.0, 20.0]) * (np.arange(4) != rank) for rank in range(4)}
    rates = inbound_rates(told)
    assert rates[0] == rates[1] == rates[2]
    assert rates[3] < rates[0] / 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_rates_of_the_last_bucket_count_in_whatever_order_results_come(order):
    reducer = Ranks(2).reducers[0]
    for sequence in order:
        reducer.note_rates(1, sequence, np.array([sequence], RATE))
    assert reducer.rates_bps[1] == [2.0]


class Uneven(Selective):
    """A network whose ports differ: rank 0 has a tenth of the others' rate."""

    def transmit(self, target):
        self.rate_bps = 8e6 if target == 0 else 80e6
        super().transmit(target)


def test_a_rank_behind_a_slow_port_owns_less_and_all_ranks_agree():
    ranks = Ranks(4, network=Uneven, depth=200)
    sizes = {"conv1.weight": 120_000, "fc.weight": 40_000}
    weights, began_s, took_s = [], 0.0, []
    for step in range(4):
        gradients = ranks.gradients(step, sizes)
        averages = ranks.reduce(step, gradients, [["fc.weight"], ["conv1.weight"]])
        assert_identical(averages)
        np.testing.assert_allclose(
            averages[0]["fc.weight"], sum(rank["fc.weight"] for rank in gradients) / 4, rtol=1e-4, atol=1e-5
        )
        weights.append([reducer.weights for reducer in ranks.reducers])
        took_s.append(ranks.network.now - began_s)
        began_s = ranks.network.now
    for step in weights:
        assert all(rank == step[0] for rank in step), "ranks that divide differently would wait for ever"
    # Rates are measured while ranks are in each other's way, so a single step may err.
    assert np.mean([step[0][0] / sum(step[0].values()) for step in weights[1:]]) < 0.2
    assert np.mean(took_s[1:]) < took_s[0], "the first step has equal shards"


def test_a_rank_is_slow_only_if_a_path_to_it_is_congested():
    slow_by_half = np.array([100.0, 100.0, 20.0])
    told = {rank: np.where(np.arange(3) == rank, 0.0, slow_by_half) for rank in range(3)}
    assert inbound_rates(told)[2] < inbound_rates(told)[0]
    clear = {rank: -rates for rank, rates in told.items()}
    assert len(set(inbound_rates(clear).values())) == 1, "its processor is slow, or it was busy just then"
    one_says_so = {**clear, 0: told[0]}
    assert inbound_rates(one_says_so)[2] < inbound_rates(one_says_so)[0]
