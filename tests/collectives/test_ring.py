# SPDX-License-Identifier: Apache-2.0
"""All-reduce around a ring: exact if nothing is lost, the same on all ranks if something is, and nothing for good."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.collectives import Bucket, ring
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.message_numbers import RING_RANGE as RING_NUMBERS
from dlcp.collectives.ring import RingAllReduce, bound_of_hop
from dlcp.collectives.shards import shard_bounds
from dlcp.transport import LossBound, PeerAbortedError, PeerSilentError, TransportError, TransportOptions
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment
from tests.collectives.test_direct import THREE_BUCKETS
from tests.collectives.virtual_ranks import (
    LAYERS,
    NOTHING_PROTECTED,
    ONE_BUCKET,
    SIZES,
    assert_identical,
)
from tests.collectives.virtual_ring import RingRanks
from tests.transport.exchanges import PacketType

EVERY_FORMAT = pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
WIDE = pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.FLOAT64], ids=lambda kind: kind.value)
RELATIVE_STEP = {ValueType.FLOAT16: 2.0**-11, ValueType.BFLOAT16: 2.0**-8}


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of four packets, so that test buffers have many."""
    monkeypatch.setattr(ring, "PIECE_BYTES", 4 * 1440)


def sum_in_order_of_the_ring(gradients, value_type, step, order=None):
    """Each block's sum begins at one rank and goes around; divided by how many there are."""
    count = len(gradients)
    order = order or list(range(count))
    values = [value_type.widen(rank) for rank in gradients]
    result = np.zeros_like(values[0])
    per_packet = 1440 // value_type.storage.itemsize
    for block, (start, stop) in shard_bounds(len(result), per_packet, dict.fromkeys(range(count), 1.0)).items():
        total = values[order[(block + step) % count]][start:stop].copy()
        for hop in range(1, count):
            total += values[order[(block + step + hop) % count]][start:stop]
        result[start:stop] = total / total.dtype.type(count)
    return value_type.narrow(result)


def joined(gradients, names):
    return [np.concatenate([rank[name] for name in names]) for rank in gradients]


def assert_exact(averages, gradients, value_type, step, buckets, order=None):
    for names in buckets:
        expected = sum_in_order_of_the_ring(joined(gradients, names), value_type, step, order)
        assert np.concatenate([averages[0][name] for name in names]).tobytes() == expected.tobytes()


@WIDE
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("tells_rates", [False, True], ids=["alone", "with rates"])
def test_without_loss_the_average_is_exact(count, value_type, small_pieces, tells_rates):
    ranks = RingRanks(count, value_type=value_type, tells_rates=tells_rates)
    for step in range(2):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS)
        assert_identical(averages)
        assert_exact(averages, gradients, value_type, step, THREE_BUCKETS)
        rates = [reducer.received_bps() for reducer in ranks.reducers]
        assert rates == [rates[0]] * count
        assert set(rates[0]) == (set(range(count)) if tells_rates else set())


@pytest.mark.parametrize("value_type", list(RELATIVE_STEP), ids=lambda kind: kind.value)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_sums_of_short_formats_are_rounded_once_a_hop(count, value_type, small_pieces):
    ranks = RingRanks(count, value_type=value_type)
    gradients = ranks.gradients(1)
    averages = ranks.reduce(0, gradients, THREE_BUCKETS)
    assert_identical(averages)
    for name in SIZES:
        wide = [value_type.widen(rank[name]) for rank in gradients]
        # Each of count - 2 sums and the result is rounded, by half a step of the largest magnitude in it.
        tolerance = (count - 1) * RELATIVE_STEP[value_type] * sum(map(np.abs, wide)) / count + 1e-7
        error = np.abs(value_type.widen(averages[0][name]) - sum(wide) / count)
        assert (error <= tolerance).all()
        if count == 2:
            assert averages[0][name].tobytes() == value_type.narrow(sum(wide) / np.float32(2)).tobytes()


def test_sums_that_exceed_the_largest_float16_have_an_average():
    ranks = RingRanks(7, value_type=ValueType.FLOAT16, bound=0.3)
    gradients = [{"fc.weight": np.full(5000, 60_000, np.float16)} for _ in range(7)]
    averages = ranks.reduce(0, gradients, [["fc.weight"]])
    np.testing.assert_allclose(averages[0]["fc.weight"].astype(float), 60_000, rtol=0.01)


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [0, 2, 1, 3]])
def test_the_ring_may_have_any_order(order, small_pieces):
    ranks = RingRanks(4, order=order)
    gradients = ranks.gradients(2)
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    assert_exact(averages, gradients, ValueType.FLOAT32, 0, ONE_BUCKET, order)
    places = {rank: order.index(rank) for rank in range(4)}
    pairs = {(s, t) for _, s, t, data in ranks.network.arrived if wire.decode(data).type is PacketType.DATA}
    assert pairs == {(a, b) for a in range(4) for b in range(4) if (places[a] + 1) % 4 == places[b]}


def test_an_order_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match=r"a ring of ranks \[0, 1, 2\] cannot have the order \[0, 1, 1\]"):
        RingAllReduce(RingRanks(3).reducers[0].context, order=[0, 1, 1])


@pytest.mark.parametrize("loss", [0.02, 0.3])
def test_a_bound_of_zero_is_exact_on_any_network(loss, small_pieces):
    ranks = RingRanks(4, loss=loss, duplicate=0.1, jitter_s=0.002, seed=3)
    for step in range(3):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS, delays_s=[0.0, 0.02, 0.05, 0.01])
        assert_identical(averages)
        assert_exact(averages, gradients, ValueType.FLOAT32, step, THREE_BUCKETS)
    assert ranks.lost == 0


def test_an_idle_network_loses_nothing_although_it_might(small_pieces):
    ranks = RingRanks(4, bound=0.3, depth=100_000)
    gradients = ranks.gradients(4)
    averages = ranks.reduce(0, gradients)
    assert ranks.lost == 0
    assert_exact(averages, gradients, ValueType.FLOAT32, 0, ONE_BUCKET)


@pytest.mark.parametrize(
    ("count", "loss", "bound"), [(2, 0.05, 0.1), (3, 0.2, 0.3), (4, 0.1, 0.5), (5, 0.3, 0.9), (8, 0.05, 0.9)]
)
def test_nothing_is_lost_for_good(count, loss, bound):
    """The sum over steps of n * average, plus the residual, is the sum of all gradients."""
    ranks = RingRanks(count, bound=bound, loss=loss, seed=5, value_type=ValueType.FLOAT64,
                      duplicate=0.05, jitter_s=0.001, policy=NOTHING_PROTECTED)  # fmt: skip
    given = {name: np.zeros(size) for name, size in SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SIZES.items()}
    owed_at_times = 0
    buckets = ONE_BUCKET if count > 4 else THREE_BUCKETS
    for step in range(2 if count > 4 else 4):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, buckets)
        assert_identical(averages)
        for name in SIZES:
            given[name] += sum(rank[name] for rank in gradients)
            taken[name] += count * averages[0][name]
            owed = ranks.owed(name)
            owed_at_times += np.count_nonzero(owed)
            np.testing.assert_allclose(taken[name] + owed, given[name], rtol=0, atol=1e-9)
    assert ranks.lost > 10
    assert owed_at_times > 0
    for ledger in ranks.ledgers:
        assert ledger.violations == 0


def test_a_flush_pays_what_is_owed_while_the_network_goes_on_losing():
    ranks = RingRanks(3, bound=0.3, loss=0.2, seed=3)
    for step in range(3):
        ranks.reduce(step, ranks.gradients(step))
    assert ranks.lost > 0
    assert sum(reducer.context.residual.size for reducer in ranks.reducers) > 0
    assert_identical(ranks.reduce(3, ranks.gradients(3), flush=True))
    ranks.records()
    assert [reducer.context.residual.size for reducer in ranks.reducers] == [0, 0, 0]
    assert not any(record.lost for ledger in ranks.ledgers for record in ledger.of_step(3))


def test_what_is_owed_is_paid_when_the_network_recovers():
    ranks = RingRanks(3, bound=0.4, loss=0.2, seed=6, value_type=ValueType.FLOAT64, policy=NOTHING_PROTECTED)
    first = ranks.gradients(0)
    averages = ranks.reduce(0, first)
    assert ranks.lost > 0
    ranks.network.loss = 0.0
    nothing = [{name: np.zeros(size) for name, size in SIZES.items()} for _ in range(3)]
    paid = ranks.reduce(1, nothing)
    for name in SIZES:
        total = 3 * (averages[0][name] + paid[0][name])
        np.testing.assert_allclose(total, sum(rank[name] for rank in first), rtol=0, atol=1e-9)
        assert np.count_nonzero(ranks.owed(name)) == 0


@pytest.mark.parametrize("loss", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("count", [2, 4, 7])
def test_each_hop_keeps_its_bound_and_results_are_delivered_whole(count, loss):
    ranks = RingRanks(count, bound=0.3, loss=loss, seed=count, policy=NOTHING_PROTECTED)
    ranks.reduce(0, ranks.gradients(11), [["conv2.weight", "fc.weight"]])
    records = ranks.records()
    sums = [(hop, record) for _, phase, hop, record in records if phase == REDUCE_SCATTER]
    results = [record for _, phase, _, record in records if phase == ALL_GATHER]
    pieces = len(ring.cut_in_pieces(32_345, 360, 1440, count, 0))
    assert len(sums) == len(results) == pieces * (count - 1)
    assert {hop for hop, _ in sums} == set(range(count - 1))
    for _, record in sums:
        assert record.bound == 0.3 / (count - 1)
        assert record.lost <= LossBound(record.bound).allowed(record.packets)
    assert all(record.lost == 0 and record.bound == 0 for record in results)
    # Whatever the hops lose together, no rank loses more of its gradients than the bound.
    lost = sum(record.lost for _, record in sums)
    assert lost <= 0.3 * sum(record.packets for hop, record in sums if hop == 0)
    assert lost > 0 or count == 7


def lose_partial_sum(hop_lost, packets, source_lost):
    """Lose packets of the partial sum that rank ``source_lost`` sends on one hop of step 0, whatever it does."""

    def lose(network, source, header):
        count = len(network.ranks)
        if header.type is not PacketType.DATA or header.message < RING_NUMBERS.first or header.step != 0:
            return False
        phase, hop = divmod((header.message - RING_NUMBERS.first) % (2 * count), count)
        return source == source_lost and phase == REDUCE_SCATTER and hop == hop_lost and header.index in packets

    return lose


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("hop", [0, 1, 2])
def test_sums_are_rescaled_without_error_feedback(hop, error_feedback):
    """Packets 2 and 5 of one hop are lost, and with them the sum of ``hop + 1`` ranks."""
    source = 1
    ranks = RingRanks(4, bound=0.9, error_feedback=error_feedback, policy=NOTHING_PROTECTED,
                      lose=lose_partial_sum(hop, (2, 5), source), value_type=ValueType.FLOAT64)  # fmt: skip
    gradients = ranks.gradients(8, {"conv1.weight": 180 * 40})
    parts = [rank["conv1.weight"] for rank in gradients]
    averages = ranks.reduce(0, gradients, [["conv1.weight"]])
    assert_identical(averages)
    assert ranks.lost == 2
    # The block that rank 1 sends on this hop began at rank 1 - hop.
    block = (source - hop) % 4
    lost = np.zeros(len(parts[0]), bool)
    for packet in (2, 5):
        start = 180 * (10 * block + packet)
        lost[start : start + 180] = True
    dropped = sum(parts[(block + place) % 4] for place in range(hop + 1))
    rest = sum(parts) - dropped
    expected = np.where(lost, rest / (4 if error_feedback else 3 - hop), sum(parts) / 4)
    np.testing.assert_allclose(averages[0]["conv1.weight"], expected, rtol=1e-9, atol=1e-12)

    owed = [reducer.context.residual.of("conv1.weight") for reducer in ranks.reducers]
    if not error_feedback:
        assert owed == [None] * 4
        return
    np.testing.assert_allclose(owed[source], np.where(lost, dropped, 0), atol=1e-12)
    assert all(owed[rank] is None for rank in range(4) if rank != source)
    nothing = [{"conv1.weight": np.zeros_like(parts[0])} for _ in range(4)]
    after = ranks.reduce(1, nothing, [["conv1.weight"]])[2]["conv1.weight"]
    np.testing.assert_allclose(4 * (averages[0]["conv1.weight"] + after), sum(parts), atol=1e-12)
    assert not after[~lost].any()


def test_rescaled_averages_are_neither_shrunk_nor_drawn_to_any_rank():
    """Which ranks a packet's average is of depends on their places in the ring, which change with the step."""
    count, steps = 4, 12
    ranks = RingRanks(count, bound=0.9, loss=0.25, error_feedback=False, policy=NOTHING_PROTECTED, seed=12,
                      value_type=ValueType.FLOAT64, rate_bps=1e9)  # fmt: skip
    values = np.repeat(np.random.default_rng(0).lognormal(0, 1, 128), 180)
    same = [{"fc.weight": values.copy()} for _ in range(count)]
    np.testing.assert_allclose(ranks.reduce(0, same, [["fc.weight"]])[0]["fc.weight"], values, rtol=1e-12)
    assert ranks.lost > 0
    means = {np.mean([8.0**rank for rank in group]): group for group in groups(count)}
    weights = np.zeros(count)
    for step in range(1, steps + 1):
        scaled = [{"fc.weight": values * 8.0**rank} for rank in range(count)]
        average = ranks.reduce(step, scaled, [["fc.weight"]])[0]["fc.weight"]
        for mean in (average / values)[::180]:
            held = next(group for expected, group in means.items() if abs(mean / expected - 1) < 1e-9)
            weights[held] += 1 / len(held)
    weights /= weights.sum()
    assert ranks.lost > 250
    np.testing.assert_allclose(weights, 1 / count, atol=0.015)


def groups(count):
    return [[rank for rank in range(count) if chosen >> rank & 1] for chosen in range(1, 1 << count)]


def test_immediate_mode_loses_up_to_the_bound_and_owes_it():
    ranks = RingRanks(3, bound=0.4, immediate=True, policy=NOTHING_PROTECTED, value_type=ValueType.FLOAT64)
    gradients = ranks.gradients(9)
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    assert ranks.lost > 0.1 * sum(SIZES.values()) / 180
    for name in SIZES:
        np.testing.assert_allclose(
            3 * averages[0][name] + ranks.owed(name), sum(rank[name] for rank in gradients), rtol=0, atol=1e-9
        )


@EVERY_FORMAT
def test_replicas_stay_identical_under_loss_in_every_format(value_type):
    ranks = RingRanks(4, bound=0.9, loss=0.2, duplicate=0.1, jitter_s=0.002, seed=10, value_type=value_type,
                      policy=NOTHING_PROTECTED)  # fmt: skip
    for step in range(3):
        assert_identical(ranks.reduce(step, ranks.gradients(step), THREE_BUCKETS))
    assert ranks.lost > 0


@pytest.mark.parametrize("value_type", list(RELATIVE_STEP), ids=lambda kind: kind.value)
def test_short_formats_owe_what_they_lose(value_type):
    ranks = RingRanks(4, bound=0.6, loss=0.2, seed=15, value_type=value_type, policy=NOTHING_PROTECTED)
    given, taken, size = 0.0, 0.0, {"fc.weight": 12_345}
    for step in range(4):
        gradients = ranks.gradients(step, size)
        average = ranks.reduce(step, gradients, [["fc.weight"]])[0]["fc.weight"]
        given = given + sum(value_type.widen(rank["fc.weight"]).astype(float) for rank in gradients)
        taken = taken + 4 * value_type.widen(average).astype(float)
    assert ranks.lost > 10
    error = taken + ranks.owed("fc.weight") - given
    assert np.sqrt(np.mean(error**2)) < 8 * RELATIVE_STEP[value_type] * np.sqrt(np.mean(given**2))


@pytest.mark.parametrize("size", [1, 361, 720, 1081, 1440 * 5 + 7])
@EVERY_FORMAT
def test_buffers_that_do_not_divide(size, value_type):
    ranks = RingRanks(5, value_type=value_type, bound=0.5, loss=0.1, seed=size, error_feedback=False)
    gradients = ranks.gradients(12, {"fc.weight": size})
    averages = ranks.reduce(0, gradients, [["fc.weight"]])
    assert_identical(averages)
    whole = RingRanks(5, value_type=value_type)
    exact = whole.reduce(0, gradients, [["fc.weight"]])[0]["fc.weight"]
    if value_type.storage.itemsize > 2:
        assert (
            exact.tobytes()
            == sum_in_order_of_the_ring([rank["fc.weight"] for rank in gradients], value_type, 0).tobytes()
        )
    if not ranks.lost:
        assert averages[0]["fc.weight"].tobytes() == exact.tobytes()


def test_buckets_of_one_step_go_at_once_and_come_in_any_order(small_pieces):
    ranks = RingRanks(3, jitter_s=0.003, loss=0.05, bound=0.0, seed=2)
    for step in range(3):
        gradients = ranks.gradients(step)
        buckets = [[name] for name in SIZES]
        averages = ranks.reduce(step, gradients, buckets, delays_s=[0.03, 0.0, 0.01])
        assert_identical(averages)
        assert_exact(averages, gradients, ValueType.FLOAT32, step, buckets)


@pytest.mark.parametrize("seed", range(3))
def test_not_a_number_reaches_every_rank(seed):
    # A loss scaler has to see it on all ranks. The partial sum has it, though the rank that sends it on may not.
    ranks = RingRanks(5, bound=0.9, loss=0.3, seed=seed, policy=NOTHING_PROTECTED)
    gradients = ranks.gradients(14)
    gradients[1]["conv2.weight"][777] = np.nan
    gradients[2]["fc.weight"][5] = np.inf
    # A policy that protects nothing leaves the first hop to chance; from there on it must arrive.
    for reducer in ranks.reducers:
        reducer.context.tagger.policy = type(NOTHING_PROTECTED)()
    averages = ranks.reduce(0, gradients)
    assert ranks.lost > 0
    for rank in averages:
        assert np.isnan(rank["conv2.weight"][777])
        assert np.isposinf(rank["fc.weight"][5])
        assert np.isfinite(rank["conv1.weight"]).all()
    for name in SIZES:
        assert np.isfinite(ranks.owed(name)).all()


def test_a_dead_rank_ends_the_step_on_all_others_and_is_named():
    ranks = RingRanks(5, options=TransportOptions(silence_s=1.0))
    ranks.network.dead.add(2)
    started = ranks.start(6, ranks.gradients(15))
    alive = [0, 1, 3, 4]
    ranks.network.run(lambda: all(started[rank][0].done() for rank in alive), limit_s=5.0)
    for rank in alive:
        with pytest.raises((PeerSilentError, PeerAbortedError), match=r"step 6: rank 2 has been silent .*conv"):
            started[rank][0].result()


def test_ranks_of_different_models_are_told():
    ranks = RingRanks(3, options=TransportOptions(deadline_s=2.0))
    sizes = [5000, 5000, 9000]
    started = []
    for rank, size in enumerate(sizes):
        segments = [Segment(LAYERS["fc.weight"], 0, size)]
        started.append(ranks.reducers[rank].start(0, 0, Bucket(np.ones(size, np.float32), ValueType.FLOAT32, segments)))
    ranks.network.run(lambda: all(future.done() for future in started))
    for future in started:
        with pytest.raises(TransportError, match="same model"):
            future.result()


def test_what_the_hops_lose_together_is_within_the_bound():
    assert bound_of_hop(LossBound(0.3, True), 4) == LossBound(0.3 / 3, True)
    assert bound_of_hop(LossBound(0.3), 2).ratio == 0.3
    assert bound_of_hop(LossBound(0.3), 1).ratio == 0.3
