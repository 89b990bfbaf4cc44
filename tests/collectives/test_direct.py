# SPDX-License-Identifier: Apache-2.0
"""Direct all-reduce: exact where nothing is lost, the same on all ranks whatever is, and nothing lost for good."""

import itertools

import numpy as np
import pytest

from dlcp.collectives import Bucket, shards
from dlcp.collectives.direct import DirectRun
from dlcp.collectives.reduction_rules import average
from dlcp.collectives.shards import shard_bounds
from dlcp.transport import PeerSilentError, TransportOptions
from dlcp.transport.congestion import Report
from dlcp.transport.engine import Reported
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment
from tests.collectives.virtual_ranks import (
    NOTHING_PROTECTED,
    ONE_BUCKET,
    SMALL_SIZES,
    SmallRanks,
    assert_identical,
    is_contribution,
)
from tests.transport.exchanges import PacketType

EVERY_FORMAT = pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
VALUES_PER_PACKET = 360
THREE_BUCKETS = [["fc.weight"], ["conv2.bias", "conv2.weight"], ["conv1.bias", "conv1.weight"]]


def exact_average(gradients, value_type, name):
    """The sum in the order of ranks, in the wider format, divided by how many there are."""
    return averaged([rank[name] for rank in gradients], value_type)


def averaged(shares, value_type):
    total = value_type.widen(shares[0]).copy()
    for share in shares[1:]:
        total += value_type.widen(share)
    return value_type.narrow(total / total.dtype.type(len(shares)))


def assert_exact(averages, gradients, value_type=ValueType.FLOAT32, buckets=ONE_BUCKET):
    """float32 is summed by its shard's owner, its own first, then the others; the rest in the order of ranks."""
    for names in buckets:
        shares = [np.concatenate([rank[name] for name in names]) for rank in gradients]
        if value_type is ValueType.FLOAT32:
            shards = shard_bounds(len(shares[0]), VALUES_PER_PACKET, dict.fromkeys(range(len(shares)), 1.0))
            expected = np.concatenate(
                [
                    averaged(
                        [shares[owner][first:last], *(s[first:last] for s in np.delete(shares, owner, 0))], value_type
                    )
                    for owner, (first, last) in shards.items()
                ]
            )
        else:
            expected = averaged(shares, value_type)
        got = np.concatenate([averages[0][name] for name in names])
        assert got.tobytes() == expected.tobytes()


@EVERY_FORMAT
@pytest.mark.parametrize("count", [2, 3, 5])
def test_without_loss_the_average_is_exact(count, value_type):
    ranks = SmallRanks(count, value_type=value_type)
    gradients = ranks.gradients(1)
    averages = ranks.reduce(0, gradients, THREE_BUCKETS)
    assert_identical(averages)
    assert_exact(averages, gradients, value_type, THREE_BUCKETS)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_average_does_not_depend_on_who_comes_first(order):
    ranks = SmallRanks(3, jitter_s=0.003, seed=sum(order))
    gradients = ranks.gradients(2)
    averages = ranks.reduce(0, gradients, delays_s=[0.05 * place for place in order])
    assert_identical(averages)
    assert_exact(averages, gradients)


@pytest.mark.parametrize("loss", [0.02, 0.2])
def test_a_bound_of_zero_is_exact_on_any_network(loss):
    ranks = SmallRanks(3, loss=loss, duplicate=0.1, jitter_s=0.002, seed=3)
    for step in range(3):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS)
        assert_identical(averages)
        assert_exact(averages, gradients, buckets=THREE_BUCKETS)
    assert ranks.lost == 0


def test_an_idle_network_loses_nothing_although_it_might():
    ranks = SmallRanks(4, bound=0.2, depth=100_000)
    gradients = ranks.gradients(4)
    averages = ranks.reduce(0, gradients)
    assert ranks.lost == 0
    assert_exact(averages[3:], gradients)


@pytest.mark.parametrize(("count", "loss", "bound"), [(2, 0.05, 0.1), (3, 0.2, 0.3), (4, 0.1, 0.1)])
def test_nothing_is_lost_for_good(count, loss, bound):
    """The sum over steps of n * average, plus the residual, is the sum of all gradients."""
    ranks = SmallRanks(count, bound=bound, loss=loss, seed=5, value_type=ValueType.FLOAT64)
    given = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    owed_at_times = 0
    for step in range(8):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS)
        assert_identical(averages)
        for name in SMALL_SIZES:
            given[name] += sum(rank[name] for rank in gradients)
            taken[name] += count * averages[0][name]
            owed = ranks.owed(name)
            owed_at_times += np.count_nonzero(owed)
            np.testing.assert_allclose(taken[name] + owed, given[name], rtol=0, atol=1e-9)
    assert ranks.lost > 10
    assert owed_at_times > 0
    for ledger in ranks.ledgers:
        assert ledger.violations == 0
        assert ledger.max_message_ratio <= bound


def test_what_is_owed_is_paid_when_the_network_recovers():
    ranks = SmallRanks(3, bound=0.2, loss=0.2, seed=6, value_type=ValueType.FLOAT64)
    first = ranks.gradients(0)
    averages = ranks.reduce(0, first)
    assert ranks.lost > 0
    ranks.network.loss = 0.0
    nothing = [{name: np.zeros(size) for name, size in SMALL_SIZES.items()} for _ in range(3)]
    paid = ranks.reduce(1, nothing)
    for name in SMALL_SIZES:
        total = 3 * (averages[0][name] + paid[0][name])
        np.testing.assert_allclose(total, sum(rank[name] for rank in first), rtol=0, atol=1e-9)
        assert np.count_nonzero(ranks.owed(name)) == 0


def test_buckets_may_be_regrouped_between_steps():
    # DDP has one bucket in the first step, in order of definition, and others later.
    regrouped = [
        ONE_BUCKET,
        THREE_BUCKETS,
        [["conv1.weight", "fc.weight"], ["conv2.weight", "conv1.bias", "conv2.bias"]],
        [list(reversed(SMALL_SIZES))],
    ]
    ranks = SmallRanks(3, bound=0.3, loss=0.2, seed=7, value_type=ValueType.FLOAT64)
    given = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    for step in range(5):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, regrouped[step % len(regrouped)])
        for name in SMALL_SIZES:
            given[name] += sum(rank[name] for rank in gradients)
            taken[name] += 3 * averages[0][name]
    assert ranks.lost > 20
    for name in SMALL_SIZES:
        np.testing.assert_allclose(taken[name] + ranks.owed(name), given[name], rtol=0, atol=1e-9)


LOST_PACKETS = (2, 5)


def lossy_ranks(value_type, *, error_feedback):
    """Three ranks, of which rank 1 loses two packets to rank 0 in step 0, whatever it does; and its gradients."""

    def lose(network, source, header):
        return (
            header.type is PacketType.DATA
            and source == 1
            and header.step == 0
            and is_contribution(header, 3)
            and header.message % 3 == 0
            and header.index in LOST_PACKETS
        )

    ranks = SmallRanks(3, bound=0.3, error_feedback=error_feedback, policy=NOTHING_PROTECTED,
                       lose=lose, value_type=value_type)  # fmt: skip
    sizes = {"conv1.weight": 1440 // value_type.storage.itemsize * 30}
    return ranks, ranks.gradients(8, sizes)


def lost_values(value_type):
    return np.repeat([packet in LOST_PACKETS for packet in range(30)], 1440 // value_type.storage.itemsize)


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(
    ("value_type", "tolerance"), [(ValueType.FLOAT32, 1e-5), (ValueType.FLOAT64, 1e-12)], ids=["float32", "float64"]
)
def test_sums_are_rescaled_without_error_feedback(value_type, tolerance, error_feedback):
    ranks, gradients = lossy_ranks(value_type, error_feedback=error_feedback)
    one, lossy, three = (rank["conv1.weight"] for rank in gradients)
    averages = ranks.reduce(0, gradients, [["conv1.weight"]])
    assert_identical(averages)
    assert ranks.lost == len(LOST_PACKETS)
    lost = lost_values(value_type)
    expected = np.where(lost, (one + three) / (3 if error_feedback else 2), (one + lossy + three) / 3)
    np.testing.assert_allclose(averages[0]["conv1.weight"], expected, rtol=tolerance, atol=tolerance)

    owed = [reducer.context.residual.of("conv1.weight") for reducer in ranks.reducers]
    if not error_feedback:
        assert owed == [None, None, None]
    else:
        np.testing.assert_allclose(owed[1], np.where(lost, lossy, 0))
        assert owed[0] is None
        assert owed[2] is None

    nothing = [{"conv1.weight": np.zeros_like(one)} for _ in range(3)]
    after = ranks.reduce(1, nothing, [["conv1.weight"]])[2]["conv1.weight"]
    if not error_feedback:
        np.testing.assert_array_equal(after, 0)
    else:
        taken = 3 * (averages[0]["conv1.weight"] + after)
        np.testing.assert_allclose(taken, one + lossy + three, rtol=tolerance, atol=tolerance)
        assert after[lost].any()
        assert not after[~lost].any()


def test_immediate_mode_loses_up_to_the_bound_and_owes_it():
    ranks = SmallRanks(2, bound=0.2, immediate=True, policy=NOTHING_PROTECTED, value_type=ValueType.FLOAT64)
    gradients = ranks.gradients(9)
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    assert ranks.lost > 0.1 * sum(SMALL_SIZES.values()) / 180 / 2
    for name in SMALL_SIZES:
        np.testing.assert_allclose(
            2 * averages[0][name] + ranks.owed(name), sum(rank[name] for rank in gradients), rtol=0, atol=1e-9
        )


@EVERY_FORMAT
def test_replicas_stay_identical_under_loss_in_every_format(value_type):
    ranks = SmallRanks(3, bound=0.3, loss=0.25, duplicate=0.1, jitter_s=0.002, seed=10, value_type=value_type)
    for step in range(3):
        assert_identical(ranks.reduce(step, ranks.gradients(step), THREE_BUCKETS))
    assert ranks.lost > 0


def test_results_are_delivered_whole_and_shares_within_the_bound():
    ranks = SmallRanks(3, bound=0.3, loss=0.2, seed=11)
    ranks.reduce(0, ranks.gradients(0))
    ranks.network.run(lambda: all(protocol.settled for protocol in ranks.network.ranks))
    records = [record for ledger in ranks.ledgers for record in ledger.records]
    shares = [record for record in records if is_contribution(record, 3)]
    results = [record for record in records if not is_contribution(record, 3)]
    assert len(shares) == len(results) == 6
    assert all(record.lost == 0 and record.bound == 0 for record in results)
    assert all(record.bound == 0.3 for record in shares)
    assert any(record.lost for record in shares)


@pytest.mark.parametrize("sizes", [{"fc.weight": 1}, {"fc.weight": 361}, {"fc.weight": 720}, {"fc.weight": 1081}])
def test_buffers_with_fewer_packets_than_ranks(sizes):
    ranks = SmallRanks(5)
    gradients = ranks.gradients(12, sizes)
    averages = ranks.reduce(0, gradients, [["fc.weight"]])
    assert_identical(averages)
    assert_exact(averages, gradients, buckets=[["fc.weight"]])


def test_not_a_number_reaches_every_rank():
    # A loss scaler has to see it on all ranks.
    ranks = SmallRanks(3, bound=0.3, loss=0.2, seed=14)
    gradients = ranks.gradients(14)
    gradients[1]["conv2.weight"][777] = np.nan
    gradients[2]["fc.weight"][5] = np.inf
    averages = ranks.reduce(0, gradients)
    for rank in averages:
        assert np.isnan(rank["conv2.weight"][777])
        assert np.isposinf(rank["fc.weight"][5])
        assert np.isfinite(rank["conv1.weight"]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_stays_one_where_contributions_are_missing(value):
    # A loss scaler has to see it.
    shares = {rank: np.ones(300, np.float32) for rank in range(3)}
    shares[0][7] = value
    delivered = {rank: np.ones(3, np.bool_) for rank in range(3)}
    delivered[2][0] = False
    shares[2][:100] = 0
    mean = average(shares, delivered, ValueType.FLOAT32, 100, rescale=True)
    assert not np.isfinite(mean[7])
    np.testing.assert_array_equal(np.delete(mean, 7), 1)


def test_a_dead_rank_ends_the_step_on_all_others():
    ranks = SmallRanks(3, options=TransportOptions(silence_s=1.0))
    ranks.network.dead.add(2)
    gradients = ranks.gradients(15)
    started = ranks.start(6, gradients)
    ranks.network.run(lambda: all(started[rank][0].done() for rank in (0, 1)))
    for rank in (0, 1):
        with pytest.raises(PeerSilentError, match=r"step 6: rank 2 has been silent .*conv"):
            started[rank][0].result()


def test_averages_sum_in_the_order_of_ranks_whatever_the_order_of_arrival():
    rng = np.random.default_rng(0)
    shares = {rank: (rng.standard_normal(1000) * 10.0**rank).astype(np.float32) for rank in (4, 2, 0, 3)}
    delivered = {rank: np.ones(10, np.bool_) for rank in shares}
    results = set()
    for order in itertools.permutations(shares):
        mean = average({rank: shares[rank] for rank in order}, delivered, ValueType.FLOAT32, 100, rescale=True)
        results.add(mean.tobytes())
    assert len(results) == 1


def test_only_what_goes_through_a_network_may_be_lost():
    """Rank 0 shares memory with rank 1, not with rank 2: of its tags only those for rank 2 let a switch drop."""
    ranks = SmallRanks(3, bound=0.5, policy=NOTHING_PROTECTED)
    values = np.random.default_rng(1).standard_normal(60_000).astype(np.float32)
    bucket = Bucket(values, ValueType.FLOAT32, [Segment(Layer("layer", 0), 0, len(values))])
    droppable = {}
    for neighbours in (set(), {1}, {1, 2}):
        for rank, peer in ranks.connections[0].peers.items():
            peer.local = rank in neighbours
        run = DirectRun(ranks.reducers[0], 0, 0, bucket)
        found = (run.tags.drop_class > 0) & ~run.tags.protected
        droppable[len(neighbours)] = [
            int(found[start // run.values_per_packet : -(-stop // run.values_per_packet)].sum())
            for _, (start, stop) in sorted(run.bounds.items())
        ]
    own, first, second = droppable[0]
    assert own == 0 < min(first, second)
    assert droppable[1][:2] == [0, 0]
    assert droppable[1][2] > 0
    assert droppable[2] == [0, 0, 0]


def test_magnitudes_are_found_only_where_something_was_lost_or_marked_lately(monkeypatch):
    """Until then, and a minute later, nothing that rank 0 sends may be dropped."""
    ranks = SmallRanks(3, bound=0.5, policy=NOTHING_PROTECTED, clear_after_s=60.0)
    peers = ranks.network.ranks[0].peers
    find, found = shards.packet_magnitudes, []
    monkeypatch.setattr(shards, "packet_magnitudes", lambda *given: found.append(given) or find(*given))

    def tagged(at_s):
        ranks.network.now = at_s
        found.clear()
        values = np.random.default_rng(1).standard_normal(60_000).astype(np.float32)
        bucket = Bucket(values, ValueType.FLOAT32, [Segment(Layer("layer", 0), 0, len(values))])
        run = DirectRun(ranks.reducers[0], 0, 0, bucket)
        assert run.tags.protected[run._packets(0)].all()
        return [bool((~run.tags.protected[run._packets(rank)]).any()) for rank in (1, 2)]

    report = Report(10.0, delivered=10, marked=0, lost=1, rtt_s=0.001, smoothed_rtt_s=0.001, limited=False)
    assert tagged(5.0) == [False, False]
    assert not found
    peers[1].on_report(Reported(1, report, waiting=False))
    assert tagged(10.0) == [True, False]
    assert len(found) == 1
    peers[2].on_report(Reported(2, report._replace(now_s=30.0, lost=0, marked=1), waiting=False))
    assert tagged(69.0) == [True, True]
    assert tagged(71.0) == [False, True]
    assert tagged(91.0) == [False, False]
