# SPDX-License-Identifier: Apache-2.0
"""An all-reduce that failed at any moment is completed exactly, from the data that the ranks hold together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.collectives.partial_result import PartialResult, UnrecoverableError, recover
from dlcp.collectives.shards import shard_bounds
from tests.collectives.meeting_ranks import together

VALUES_PER_PACKET = 5


class Broken:
    """A direct all-reduce among ``ranks``, stopped at a random moment; small integers, so that sums are exact."""

    def __init__(self, ranks, values, seed, *, kind=np.float32, loss=0.0):
        self.rng = rng = np.random.default_rng(seed)
        self.ranks, self.count = ranks, values
        self.packets = -(-values // VALUES_PER_PACKET)
        self.given = {rank: rng.integers(-8, 9, values).astype(kind) for rank in range(ranks)}
        bounds = shard_bounds(values, VALUES_PER_PACKET, dict.fromkeys(range(ranks), 1.0))
        self.owner = np.zeros(self.packets, int)
        for rank, (start, stop) in bounds.items():
            self.owner[-(-start // VALUES_PER_PACKET) : -(-stop // VALUES_PER_PACKET)] = rank
        folded = rng.random((ranks, self.packets)) < rng.random()
        folded[self.owner, np.arange(self.packets)] = True
        self.formed = rng.random(self.packets) < rng.random()
        self.lost = self.formed & (rng.random((ranks, self.packets)) < loss)
        self.lost[self.owner, np.arange(self.packets)] = False
        folded = np.where(self.formed, ~self.lost, folded)
        self.folded = folded
        self.arrived = self.formed & (rng.random((ranks, self.packets)) < rng.random())
        self.arrived[self.owner, np.arange(self.packets)] = self.formed

    def by_value(self, packets):
        return np.repeat(packets, VALUES_PER_PACKET)[: self.count]

    @property
    def exact(self):
        """The average: of all contributions if it was not formed yet, otherwise of those that the owner had."""
        total = sum(np.where(self.by_value(~self.lost[rank]), self.given[rank], 0) for rank in range(self.ranks))
        return (total / self.by_value((~self.lost).sum(axis=0))).astype(total.dtype)

    def held_by(self, rank):
        values = self.given[rank].copy()
        mine = self.owner == rank
        summed = sum(np.where(self.by_value(self.folded[r]), self.given[r], 0) for r in range(self.ranks))
        values = np.where(self.by_value(mine), summed, values)
        values = np.where(self.by_value(self.arrived[rank]), self.exact, values).astype(self.given[rank].dtype)
        included = {peer: self.folded[peer] & mine for peer in range(self.ranks)}
        included[rank] = included[rank] | ~mine & ~self.arrived[rank]
        return PartialResult(values, VALUES_PER_PACKET, self.arrived[rank].copy(), included)


@settings(max_examples=60)
@given(st.integers(2, 5), st.integers(1, 90), st.integers(0, 10**6), st.sampled_from([np.float32, np.float64]))
def test_whatever_the_moment_every_rank_gets_the_exact_average(ranks, values, seed, kind):
    broken = Broken(ranks, values, seed, kind=kind)
    results = together(ranks, lambda channel, rank: recover(channel, rank, range(ranks), broken.held_by(rank)))
    for recovered in results:
        assert recovered.values.dtype == kind
        np.testing.assert_array_equal(recovered.values, broken.exact)
        assert recovered.residual is None


@settings(max_examples=40)
@given(st.integers(2, 4), st.integers(1, 90), st.integers(0, 10**6))
def test_what_an_average_lacks_is_owed_by_those_who_still_have_it(ranks, values, seed):
    broken = Broken(ranks, values, seed, loss=0.4)
    results = together(ranks, lambda channel, rank: recover(channel, rank, range(ranks), broken.held_by(rank)))
    for rank, recovered in enumerate(results):
        np.testing.assert_array_equal(recovered.values, broken.exact)
        lacking = broken.by_value(broken.lost[rank] & ~broken.arrived[rank])
        owed = np.zeros(values) if recovered.residual is None else recovered.residual
        np.testing.assert_array_equal(owed, np.where(lacking, broken.given[rank], 0))


@settings(max_examples=60)
@given(st.integers(2, 5), st.integers(1, 90), st.integers(0, 10**6), st.data())
def test_without_an_ended_rank_the_others_agree_on_the_average_of_what_they_hold(ranks, values, seed, data):
    broken = Broken(ranks, values, seed)
    ended = data.draw(st.integers(0, ranks - 1))
    left = [rank for rank in range(ranks) if rank != ended]
    results = together(
        len(left), lambda channel, place: recover(channel, place, range(len(left)), renamed(broken, left, place))
    )
    known = broken.arrived[left].any(axis=0)
    has_ended_one = (broken.owner != ended) & broken.folded[ended]
    total = sum(broken.given[rank] for rank in left) + np.where(broken.by_value(has_ended_one), broken.given[ended], 0)
    of_survivors = total / (len(left) + broken.by_value(has_ended_one)).astype(np.float32)
    for recovered in results:
        np.testing.assert_array_equal(recovered.values, np.where(broken.by_value(known), broken.exact, of_survivors))
        np.testing.assert_array_equal(recovered.values.view(np.uint32), results[0].values.view(np.uint32))


def renamed(broken, left, place):
    """What a survivor holds, with ranks numbered so that the survivors are the first ones."""
    partial = broken.held_by(left[place])
    places = [*left, *(rank for rank in range(broken.ranks) if rank not in left)]
    partial.included = {places.index(rank): bits for rank, bits in partial.included.items()}
    return partial


def test_a_rank_that_has_finished_takes_part_with_nothing():
    given = [np.full(12, 1.0, np.float32), np.full(12, 4.0, np.float32), np.full(12, 7.0, np.float32)]
    average = np.full(12, 4.0, np.float32)

    def held(rank):
        if rank == 0:
            return None  # finished: all confirmed that they have its results
        whole = PartialResult.untouched(rank, given[rank].copy(), VALUES_PER_PACKET)
        whole.final[:] = [True, rank == 1, rank == 2]
        whole.values[np.repeat(whole.final, VALUES_PER_PACKET)[:12]] = 4.0
        whole.included = {rank: ~whole.final}
        return whole

    for recovered in together(
        3, lambda channel, rank: recover(channel, rank, range(3), held(rank), finished=rank == 0)
    ):
        np.testing.assert_array_equal(recovered.values, average)


def test_finished_everywhere_is_nothing_to_do():
    assert together(2, lambda channel, rank: recover(channel, rank, range(2), None, finished=True)) == [None, None]


def test_finished_everywhere_is_nothing_to_do_although_a_confirmation_is_missing():
    def held(rank):
        if rank:
            return None
        partial = PartialResult.untouched(rank, np.ones(12, np.float32), VALUES_PER_PACKET)
        partial.final[:], partial.included = [True, False, False], {}
        return partial

    results = together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank), finished=True))
    assert results == [None, None]


def test_a_bucket_that_nobody_holds_but_somebody_needs_is_refused():
    with pytest.raises(UnrecoverableError, match="no rank holds anything"):
        together(2, lambda channel, rank: recover(channel, rank, range(2), None, finished=rank == 0))


def test_averages_come_over_bit_by_bit():
    odd = np.array([-0.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)

    def held(rank):
        partial = PartialResult.untouched(rank, odd.copy() if rank else np.ones(5, np.float32), VALUES_PER_PACKET)
        if rank:
            partial.final[:], partial.included = True, {}
        return partial

    for recovered in together(3, lambda channel, rank: recover(channel, rank, range(3), held(rank))):
        np.testing.assert_array_equal(recovered.values.view(np.uint32), odd.view(np.uint32))


def test_infinities_of_one_rank_reach_all():
    def held(rank):
        values = np.ones(7, np.float32)
        values[2] = np.inf if rank == 1 else 1
        values[6] = np.nan if rank == 0 else 1
        return PartialResult.untouched(rank, values, VALUES_PER_PACKET)

    for recovered in together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank))):
        np.testing.assert_array_equal(recovered.values, [1, 1, np.inf, 1, 1, 1, np.nan])


def test_nested_sums_of_a_ring_are_counted_once():
    # Each rank has added what came from the one before it: rank 2 holds all three, rank 1 two of them.
    sums = [1.0, 3.0, 6.0, 4.0]
    holds = [{0}, {0, 1}, {0, 1, 2}, {3}]

    def held(rank):
        partial = PartialResult.untouched(rank, np.full(5, sums[rank], np.float32), VALUES_PER_PACKET)
        partial.included = {peer: np.ones(1, np.bool_) for peer in holds[rank]}
        return partial

    for recovered in together(4, lambda channel, rank: recover(channel, rank, range(4), held(rank))):
        np.testing.assert_array_equal(recovered.values, np.full(5, 2.5))


def test_a_lost_contribution_is_refused_by_all():
    def held(rank):
        return PartialResult.untouched(rank, np.ones(12, np.float32), VALUES_PER_PACKET) if rank else None

    with pytest.raises(UnrecoverableError, match="contribution of rank 0 to 3 packets is lost"):
        together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank)))


def test_buckets_that_differ_are_refused_by_name():
    def held(rank):
        return PartialResult.untouched(rank, np.ones(12 + rank, np.float32), VALUES_PER_PACKET)

    with pytest.raises(UnrecoverableError, match="rank 1 has 13 values of float32, rank 0 12"):
        together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank)))


def test_what_was_owed_anyway_is_owed_where_an_average_was_formed():
    def held(rank):
        partial = PartialResult.untouched(rank, np.ones(10, np.float32), VALUES_PER_PACKET)
        partial.residual = np.full(10, rank + 1, np.float32)
        if rank == 1:
            partial.final[0] = True
            partial.included[0] = np.array([True, False])
        return partial

    for rank, recovered in enumerate(together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank)))):
        np.testing.assert_array_equal(recovered.residual[:5], rank + 1)
        np.testing.assert_array_equal(recovered.residual[5:], 0)


@pytest.mark.parametrize("settled", [False, True])
def test_what_the_owner_confirmed_as_lost_is_owed_once(settled):
    def held(rank):
        partial = PartialResult.untouched(rank, np.full(5, 3.0, np.float32), VALUES_PER_PACKET)
        if rank == 0:
            partial.final[:] = True  # formed without rank 1
        elif settled:
            partial.unconfirmed = np.zeros(1, np.bool_)
            partial.residual = np.full(5, 3.0, np.float32)
            partial.values[:2] = -7.0  # a part of the average is here already
        return partial

    owner, other = together(2, lambda channel, rank: recover(channel, rank, range(2), held(rank)))
    assert owner.residual is None
    np.testing.assert_array_equal(other.residual, np.full(5, 3.0))
