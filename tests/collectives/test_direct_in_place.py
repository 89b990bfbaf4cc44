# SPDX-License-Identifier: Apache-2.0
"""Direct all-reduce works in the caller's buffer: when it may be changed again, and its content after a failure."""

import numpy as np
import pytest

from dlcp.collectives import direct
from dlcp.collectives.partial_result import recover
from dlcp.transport import TransportError
from dlcp.values.dtypes import ValueType
from tests.collectives.meeting_ranks import together
from tests.collectives.test_direct import THREE_BUCKETS, assert_exact
from tests.collectives.virtual_ranks import (
    NOTHING_PROTECTED,
    ONE_BUCKET,
    SMALL_SIZES,
    SmallRanks,
    assert_identical,
    is_contribution,
)
from tests.transport.exchanges import PacketType


def reduce_and_spoil(ranks, step, gradients, buckets):
    """One step in which every rank overwrites each bucket as soon as it has it; return the results."""
    started = ranks.start(step, gradients, buckets)
    kept = [[None] * len(buckets) for _ in range(ranks.count)]

    def keep(rank, number):
        def on_done(future):
            kept[rank][number] = future.result().copy()
            future.result().view(np.uint8)[:] = 0x7F

        return on_done

    for rank, row in enumerate(started):
        for number, future in enumerate(row):
            future.add_done_callback(keep(rank, number))
    ranks.network.run(lambda: all(future.done() for row in started for future in row))
    ranks.network.run(lambda: all(protocol.settled for protocol in ranks.network.ranks))
    averages = []
    for row in kept:
        mine = {}
        for names, values in zip(buckets, row, strict=True):
            ends = np.cumsum([len(gradients[0][name]) for name in names])[:-1]
            mine.update(zip(names, np.split(values, ends), strict=True))
        averages.append(mine)
    return averages


def confirms_result(header, ranks):
    """Whether a packet may confirm a result to its sender; an acknowledgement may confirm any message."""
    return header.type is PacketType.ACK or (header.type is PacketType.STOP and not is_contribution(header, ranks))


@pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.FLOAT16], ids=lambda kind: kind.value)
@pytest.mark.parametrize(("count", "loss"), [(2, 0.2), (3, 0.1), (4, 0.05)])
def test_a_bucket_that_is_done_may_be_overwritten_at_once(count, loss, value_type):
    ranks = SmallRanks(count, loss=loss, jitter_s=0.002, seed=count, value_type=value_type)
    for step in range(2):
        gradients = ranks.gradients(step)
        averages = reduce_and_spoil(ranks, step, gradients, THREE_BUCKETS)
        assert_identical(averages)
        assert_exact(averages, gradients, value_type, THREE_BUCKETS)


@pytest.mark.parametrize("patience_s", [0.002, 0.2])
def test_a_peer_that_confirms_late_gets_the_result_although_the_buffer_has_changed(monkeypatch, patience_s):
    # Rank 1 confirms soon, rank 2 hears nothing of rank 0's result for a while.
    monkeypatch.setattr(direct, "PATIENCE_S", patience_s)

    def lose(network, source, header):
        late = (
            header.type is PacketType.DATA
            and source == 0
            and header.message % 3 == 2
            and not is_contribution(header, 3)
        )
        return (late and network.now < 0.1) or (source == 1 and network.now < 0.03 and confirms_result(header, 3))

    ranks = SmallRanks(3, lose=lose)
    gradients = ranks.gradients(1)
    averages = reduce_and_spoil(ranks, 0, gradients, ONE_BUCKET)
    assert ranks.network.dropped["selected"] > 3
    assert_identical(averages)
    assert_exact(averages, gradients)


def test_a_bucket_does_not_wait_for_the_last_confirmation():
    def lose(network, source, header):
        return network.now < 0.5 and confirms_result(header, 3)

    ranks = SmallRanks(3, lose=lose)
    averages = reduce_and_spoil(ranks, 0, gradients := ranks.gradients(2), ONE_BUCKET)
    assert_exact(averages, gradients)
    ranks = SmallRanks(3, lose=lose)
    ranks.reduce(0, gradients)
    assert ranks.network.now < 0.5
    assert not any(protocol.all_confirmed for protocol in ranks.network.ranks)


def test_memory_for_what_comes_early_or_out_of_turn_is_used_again():
    ranks = SmallRanks(3, jitter_s=0.002, seed=3)
    gradients = ranks.gradients(1)
    rooms = []
    for step in range(6):
        ranks.reduce(step, gradients, delays_s=[0.0, 0.004, 0.008])
        ranks.network.run(lambda: all(protocol.settled for protocol in ranks.network.ranks))
        free = [protocol.buffers._free.values() for protocol in ranks.network.ranks]
        rooms.append([sorted(id(room) for pieces in one for room in pieces) for one in free])
    assert all(rooms[2])
    assert rooms[5] == rooms[2]


# After a failure ------------------------------------------------------------------------------------------------------


class Broken:
    """An all-reduce of small whole numbers, whose sums are exact in any order, broken off by each rank's transport."""

    def __init__(self, count, seed, *, value_type=ValueType.FLOAT32, begin_s=None, steps=0, **fields):
        rng = np.random.default_rng(seed * 10 + count)
        self.ranks = SmallRanks(count, seed=seed, jitter_s=0.001, rate_bps=50e6, value_type=value_type, **fields)
        self.gradients = [
            {
                name: value_type.narrow(rng.integers(-8, 9, size).astype(np.float32))
                for name, size in SMALL_SIZES.items()
            }
            for _ in range(count)
        ]
        self.count, self.value_type = count, value_type
        averages = [self.ranks.reduce(step, self.gradients, THREE_BUCKETS)[0] for step in range(steps)]
        self.averaged = {
            name: sum(value_type.widen(each[name]).astype(float) for each in averages) for name in SMALL_SIZES
        }
        delays_s = (rng.random(count) * 0.01).tolist()
        self.steps, self.began_s = steps, self.ranks.network.now
        self.started = self.ranks.start(steps, self.gradients, THREE_BUCKETS, delays_s)
        begin_s = 0.011 + rng.random() * 0.08 if begin_s is None else begin_s
        self._fail_at((begin_s + rng.random(count) * rng.choice([0, 0.01])).tolist())
        self.left = [
            {run.sequence: left for run in row if run is not None and (left := run.partial_result()) is not None}
            for row in self.started
        ]

    def _fail_at(self, moments_s):
        network = self.ranks.network
        for rank, when in enumerate(moments_s):
            network.at(self.began_s + when, network.ranks[rank].fail, TransportError("the path is down"))
        end = self.began_s + max(moments_s) + 0.001
        network.run(lambda: network.now > end)

    def is_finished(self, rank, number):
        future = self.started[rank][number]
        return future.done() and future.exception() is None

    def recover(self, number):
        """Complete a bucket over another channel; return what each rank has then, in the wider type."""

        def one(channel, rank):
            mine, finished = self.left[rank].get(number), self.is_finished(rank, number)
            return recover(channel, rank, range(self.count), mine, finished=finished)

        return together(self.count, one)

    def shares(self, number):
        widen = self.value_type.widen
        return [np.concatenate([widen(rank[name]) for name in THREE_BUCKETS[number]]) for rank in self.gradients]

    def averaged_and_owed(self, number):
        """Recover a bucket; return the sum of all steps' averages, times the ranks, and of what ranks owe.

        None if a rank has nothing to recover.
        """
        results = self.recover(number)
        if any(result is None for result in results):
            return None
        for result in results[1:]:
            assert result.values.tobytes() == results[0].values.tobytes()
        names = THREE_BUCKETS[number]
        before = np.concatenate([np.broadcast_to(self.averaged[name], SMALL_SIZES[name]) for name in names])
        total = self.count * (results[0].values.astype(np.float64) + before)
        for rank, result in enumerate(results):
            if self.is_finished(rank, number):
                total += self.owed(rank, number)
            elif result.residual is not None:
                total += result.residual
        return total

    def owed(self, rank, number):
        """A rank's residual of a bucket that it has finished."""
        parts = [self.ranks.reducers[rank].context.residual.of(name) for name in THREE_BUCKETS[number]]
        sizes = [SMALL_SIZES[name] for name in THREE_BUCKETS[number]]
        return np.concatenate([np.zeros(n) if part is None else part for n, part in zip(sizes, parts, strict=True)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_exact_average_can_be_formed_from_what_is_left_at_any_moment(count, seed):
    broken = Broken(count, seed, loss=0.1 * (seed % 2))
    for number in range(len(THREE_BUCKETS)):
        exact = sum(broken.shares(number)) / np.float32(count)
        for rank, recovered in enumerate(broken.recover(number)):
            if broken.is_finished(rank, number):
                assert broken.started[rank][number].result().tobytes() == exact.tobytes()
            if recovered is None:
                assert all(broken.is_finished(peer, number) for peer in range(count))
            else:
                assert recovered.values.tobytes() == exact.tobytes()
                assert recovered.residual is None


@pytest.mark.parametrize("value_type", [ValueType.FLOAT16, ValueType.FLOAT64], ids=lambda kind: kind.value)
def test_it_can_in_other_formats(value_type):
    for seed in range(4):
        broken = Broken(3, seed, value_type=value_type, loss=0.1, begin_s=0.015 + 0.02 * seed)
        for number in range(len(THREE_BUCKETS)):
            shares = broken.shares(number)
            exact = value_type.narrow(sum(shares) / shares[0].dtype.type(3))
            for recovered in broken.recover(number):
                if recovered is not None:
                    assert value_type.narrow(recovered.values).tobytes() == exact.tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_what_an_average_lacks_is_owed_and_nothing_is_lost_for_good(seed):
    broken = Broken(3, seed, loss=0.2, bound=0.3, policy=NOTHING_PROTECTED, begin_s=0.012 + 0.012 * seed)
    for number in range(len(THREE_BUCKETS)):
        total = broken.averaged_and_owed(number)
        if total is not None:
            np.testing.assert_allclose(total, sum(broken.shares(number)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.FLOAT16], ids=lambda kind: kind.value)
@pytest.mark.parametrize("precision", [8, 4])
def test_nothing_is_lost_for_good_at_lower_precision(precision, value_type, steps):
    """A packet of the code holds other values than one of a bucket that is sent in full.

    With bound 0: lower digits that an owner left out without telling the sender any more would be missing.
    """
    stages = set()
    for seed in range(8):
        fields = {"value_type": value_type, "precision": precision, "steps": steps}
        broken = Broken(3, seed, loss=0.2, begin_s=0.011 + 0.002 * seed, **fields)
        for number in range(len(THREE_BUCKETS)):
            stages |= {left[number].final.mean() for left in broken.left if number in left}
            total = broken.averaged_and_owed(number)
            if total is None:
                continue
            given = (steps + 1) * sum(broken.shares(number))
            rounding = 3 * (steps + 1) * 8 * (2.0**-11 if value_type is ValueType.FLOAT16 else 2.0**-20)
            np.testing.assert_allclose(total, given, rtol=0, atol=rounding)
    assert any(0 < final < 1 for final in stages), "some averages are final in part"


def test_failures_meet_every_stage():
    """The moments above are worth something only if they meet sums that are begun, half done, and done."""
    stages = set()
    for seed in range(9):
        broken = Broken(3, seed, loss=0.1, begin_s=0.011 + 0.01 * seed)
        for rank, by_number in enumerate(broken.left):
            stages |= {"finished"} if len(by_number) < len(THREE_BUCKETS) else set()
            for left in by_number.values():
                final = left.final.mean()
                summed = max(bits.mean() for peer, bits in left.included.items() if peer != rank)
                stages.add(
                    "begun" if not summed else "summed" if not final else "final in part" if final < 1 else "final"
                )
    assert stages >= {"finished", "begun", "summed", "final in part"}
