# SPDX-License-Identifier: Apache-2.0
"""Averages by samples: as if all samples had been one rank's, whatever is lost, and whichever way they go."""

import numpy as np
import pytest

from dlcp.collectives import Bucket
from dlcp.collectives.reduction_rules import (
    MOST_SAMPLES,
    average,
    check_samples,
    divisors,
    held_samples,
    weigh,
    weight_of,
)
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment
from dlcp.wire import Flag, PacketType
from tests.collectives.virtual_ranks import LAYERS, NOTHING_PROTECTED, SMALL_SIZES, Ranks, assert_identical
from tests.collectives.virtual_ring import RingRanks

SAMPLES = [{0: 32, 1: 96, 2: 10}, {0: 32, 1: 96, 2: 10}, {0: 5, 1: 0, 2: 70}, {0: 1, 1: 1, 2: 1}]


class Weighing:
    """Ranks that have different numbers of samples: their gradients come weighted, and their buckets say so."""

    sizes = SMALL_SIZES
    samples = SAMPLES[0]

    def weighted(self, gradients):
        found = [{name: values.copy() for name, values in rank.items()} for rank in gradients]
        for rank, mine in enumerate(found):
            for name, values in mine.items():
                wide = self.value_type.widen(values)
                weigh(wide, weight_of(self.samples, rank))
                mine[name] = self.value_type.narrow(wide)
        return found

    def start(self, step, gradients, buckets=None, delays_s=None):
        started = []
        for rank in range(self.count):
            names = list(gradients[rank])
            stops = np.cumsum([len(gradients[rank][name]) for name in names]).tolist()
            segments = [Segment(LAYERS[n], a, b) for n, a, b in zip(names, [0, *stops[:-1]], stops, strict=True)]
            values = np.concatenate([gradients[rank][name] for name in names])
            self.reducers[rank].begin_step(step)
            bucket = Bucket(values, self.value_type, segments, samples=self.samples)
            started.append([self.reducers[rank].start(step, 1, bucket)])
        return started


class WeighingDirect(Weighing, Ranks):
    pass


class WeighingRing(Weighing, RingRanks):
    pass


class WeighingServer(Weighing, Ranks):
    """The server learns the samples from the step's first bucket, as in training."""

    def __init__(self, count, *, error_feedback=False, **fields):
        super().__init__(count, server=True, error_feedback=error_feedback, **fields)
        self.serve(weighted=True)

    def start(self, step, gradients, buckets=None, delays_s=None):
        from dlcp.collectives.step_metadata import bucket_of

        told = []
        for rank in range(self.count):
            self.reducers[rank].begin_step(step)
            told.append(self.reducers[rank].start(step, 0, bucket_of(self.samples[rank], rank, self.count)))
        self.network.run(lambda: all(each.done() for each in told))
        return super().start(step, gradients)


def some_for_good(_, source, header):
    """Lose some of what may be lost, however often it is sent, and others of each sender."""
    droppable = header.type is PacketType.DATA and header.drop_class and not header.flags & Flag.PROTECTED
    return bool(droppable) and header.index % 4 == (source + header.step) % 4 and header.index < header.count - 2


def some_shapes(seed):
    """Values that are not 0, packets of different magnitudes: of equals none is worth less than another."""
    rng = np.random.default_rng(seed)
    return {name: np.repeat(rng.lognormal(0, 1, -(-size // 90)), 90)[:size].astype(np.float32)
            for name, size in SMALL_SIZES.items()}  # fmt: skip


EVERY_WAY = pytest.mark.parametrize(
    "kind", [WeighingDirect, WeighingRing, WeighingServer], ids=["direct", "ring", "server"]
)


def wanted(gradients, samples, name):
    total = sum(samples[rank] * np.asarray(gradients[rank][name], np.float64) for rank in samples if samples[rank])
    return total / sum(samples.values())


@EVERY_WAY
def test_without_loss_every_sample_counts_the_same(kind):
    ranks = kind(3)
    for step, samples in enumerate(SAMPLES):
        ranks.samples = samples
        gradients = ranks.gradients(step)
        if not samples[1]:
            gradients[1]["fc.weight"][:] = np.nan  # what the mean over no samples looks like
        averages = ranks.reduce(step, ranks.weighted(gradients))
        assert_identical(averages)
        for name in SMALL_SIZES:
            np.testing.assert_allclose(averages[0][name], wanted(gradients, samples, name), rtol=2e-5, atol=2e-6)


@EVERY_WAY
def test_with_loss_each_packet_is_the_mean_of_those_samples_that_came(kind):
    fields = {"policy": NOTHING_PROTECTED, "error_feedback": False, "lose": some_for_good}
    ranks = kind(3, bound=0.7, **fields)
    missing = 0
    for step in range(3):
        shapes = some_shapes(step)  # ranks are told apart by their values: 1, 10 and 100 times the same
        gradients = [{name: shape * np.float32(10**rank) for name, shape in shapes.items()} for rank in range(3)]
        averages = ranks.reduce(step, ranks.weighted(gradients))
        assert_identical(averages)
        possible = [
            sum(ranks.samples[rank] * 10.0**rank for rank in held) / sum(ranks.samples[rank] for rank in held)
            for held in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2])
        ]
        for name, values in averages[0].items():
            values = (values / shapes[name])[values != 0]  # 0 in a packet that nobody delivered
            nearest = np.min(np.abs(values[:, None] / np.array(possible) - 1), axis=1)
            assert nearest.max() < 1e-5
            missing += np.count_nonzero(np.abs(values / possible[0] - 1) > 1e-5)
    assert ranks.lost > 3
    assert missing > 700


@EVERY_WAY
def test_nothing_is_lost_for_good(kind):
    """The sum over steps of n * average, plus the residual, is the sum of all weighted gradients."""
    ranks = kind(3, bound=0.3, loss=0.2, seed=5, error_feedback=True, value_type=ValueType.FLOAT32)
    given = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    owed_at_times = 0
    for step in range(5):
        ranks.samples = SAMPLES[step % len(SAMPLES)]
        gradients = ranks.weighted(ranks.gradients(step))
        averages = ranks.reduce(step, gradients)
        assert_identical(averages)
        for name in SMALL_SIZES:
            given[name] += sum(rank[name].astype(np.float64) for rank in gradients)
            taken[name] += 3 * averages[0][name].astype(np.float64)
            owed = ranks.owed(name)
            owed_at_times += np.count_nonzero(owed)
            scale = np.abs(given[name]).max()
            np.testing.assert_allclose(taken[name] + owed, given[name], rtol=0, atol=1e-5 * scale)
    assert ranks.lost > 10
    assert owed_at_times > 0
    assert all(ledger.violations == 0 for ledger in ranks.ledgers)


@pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
@pytest.mark.parametrize("kind", [WeighingDirect, WeighingRing], ids=["direct", "ring"])
def test_every_format_weighs(kind, value_type):
    fields = {"policy": NOTHING_PROTECTED, "error_feedback": False, "lose": some_for_good}
    ranks = kind(3, bound=0.7, value_type=value_type, **fields)
    shapes = some_shapes(0)
    gradients = [{name: value_type.narrow(shape) for name, shape in shapes.items()}] * 3
    for step in range(2):
        averages = ranks.reduce(step, ranks.weighted(gradients))
        assert_identical(averages)
        got = np.concatenate([value_type.widen(values) / shapes[name] for name, values in averages[0].items()])
        np.testing.assert_allclose(got[got != 0], 1.0, rtol=0.02)  # whoever came, the mean of equals is that
    assert ranks.lost > 0


def test_a_packet_of_ranks_without_samples_is_nothing():
    shares = {0: np.zeros(4, np.float32), 1: np.array([3, 3, 0, 0], np.float32)}
    delivered = {0: np.array([True, True]), 1: np.array([True, False])}
    mean = average(shares, delivered, ValueType.FLOAT32, 2, rescale=True, samples={0: 0, 1: 8})
    np.testing.assert_array_equal(mean, [1.5, 1.5, 0, 0])
    assert weight_of({0: 0, 1: 0}, 1) == 0
    assert divisors(held_samples(delivered, {0: 0, 1: 0}), 2, {0: 0, 1: 0}).tolist() == [2, 2]


def test_weights_average_to_one():
    assert [weight_of({0: 16, 3: 48}, rank) for rank in (0, 3)] == [0.5, 1.5]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8", None, MOST_SAMPLES + 1, float("nan")])
def test_samples_are_whole_numbers(wrong):
    with pytest.raises(ValueError, match="samples must be a whole number"):
        check_samples(wrong)
    assert check_samples(8.0) == 8
    assert check_samples(np.int64(8)) == 8
