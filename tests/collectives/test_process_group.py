# SPDX-License-Identifier: Apache-2.0
"""Collectives on bytes, over a network in virtual time that loses, repeats and reorders packets."""

from itertools import combinations

import numpy as np
import pytest

from dlcp.collectives.raw import point_to_point, reduce
from dlcp.collectives.raw.channel import AllowedLoss
from dlcp.collectives.raw.elementwise_ops import ElementwiseOp, ReduceOp
from dlcp.collectives.raw.group import Collectives
from dlcp.transport import LossBound, TransportError
from dlcp.values.tags import Tagger, TagPolicy
from tests.collectives.cycles import cycles
from tests.transport.network import Network, endpoint_of

NOTHING_PROTECTED = TagPolicy((0, 0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1), small_layer_values=0)
SUM = ElementwiseOp(ReduceOp.SUM, "float32")


@pytest.fixture(autouse=True)
def _in_one_thread(monkeypatch):
    monkeypatch.setattr(reduce, "ASIDE_BYTES", 1 << 40)  # virtual time has no other threads
    monkeypatch.setattr(reduce, "_CHUNK_BYTES", 20_000)


class Group:
    """An exchange for each rank of a bad network."""

    def __init__(self, count, **network):
        self.network = Network(count, **network)
        endpoints = map(endpoint_of, self.network.ranks)
        self.exchanges = [Collectives(endpoint, count, "test") for endpoint in endpoints]

    def run(self, start):
        """Start a collective on every rank and let time pass until all are done."""
        return self.wait([start(rank, exchange) for rank, exchange in enumerate(self.exchanges)])

    def wait(self, futures):
        self.network.run(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]


def view(array):
    return memoryview(array).cast("B")


def values_of(rank, size, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [5, 30_000])
def test_an_all_reduce_survives_any_loss(count, size):
    group = Group(count, loss=0.05, duplicate=0.05, jitter_s=0.002, seed=count)
    data = [values_of(rank, size) for rank in range(count)]
    wanted = np.sum([part.astype(np.float64) for part in data], axis=0)
    group.run(lambda rank, exchange: exchange.all_reduce(view(data[rank]), SUM))
    for part in data:
        np.testing.assert_allclose(part, wanted, rtol=1e-4, atol=1e-5)
        assert part.tobytes() == data[0].tobytes()


def test_a_sum_does_not_depend_on_who_comes_first():
    results = []
    for seed in range(3):
        group = Group(4, jitter_s=0.01, loss=0.05, seed=seed)
        data = [values_of(rank, 20_000) * 10.0 ** (3 * rank) for rank in range(4)]
        data = [part.astype(np.float32) for part in data]
        group.run(lambda rank, exchange, data=data: exchange.all_reduce(view(data[rank]), SUM))
        results.append(data[0].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("size", [3, 200_000])
def test_a_broadcast_reaches_everybody(root, size):
    group = Group(5, loss=0.02, jitter_s=0.001)
    data = [values_of(rank, size, np.float64) for rank in range(5)]
    wanted = data[root].copy()
    group.run(lambda rank, exchange: exchange.broadcast(view(data[rank]), root))
    for part in data:
        np.testing.assert_array_equal(part, wanted)


def test_many_collectives_are_under_way_at_once():
    group = Group(3, loss=0.03)
    data = [[values_of(10 * rank + i, 3_000) for i in range(12)] for rank in range(3)]
    wanted = [data[0][i] + data[1][i] + data[2][i] for i in range(12)]
    futures = [group.exchanges[0].all_reduce(view(data[0][i]), SUM) for i in range(12)]
    group.network.run(lambda: group.network.now > 0.1)
    assert not any(future.done() for future in futures), "the others have not come yet"
    for rank in (2, 1):
        futures += [group.exchanges[rank].all_reduce(view(data[rank][i]), SUM) for i in range(12)]
    group.wait(futures)
    for rank in range(3):
        for i in range(12):
            np.testing.assert_allclose(data[rank][i], wanted[i], rtol=1e-4, atol=1e-5)


def lossy(bound, seed):
    group = Group(4, loss=0.08, seed=seed)
    allowed = [
        AllowedLoss(LossBound(bound, immediate=True), Tagger(NOTHING_PROTECTED), least_values=64) for _ in range(4)
    ]
    # Packets of different magnitudes, so that there are classes; powers of two, so that nothing is rounded.
    scale = 2.0 ** np.random.default_rng(seed).integers(-8, 8, 40_000)
    data = [((rank + 1) * scale).astype(np.float32) for rank in range(4)]
    group.run(lambda rank, exchange: exchange.all_reduce(view(data[rank]), SUM, allowed[rank]))
    return [(part / scale).astype(np.float32) for part in data], [one.ledger.summary() for one in allowed]


def test_a_sum_that_may_lose_packets_stands_for_all_ranks():
    data, summaries = lossy(0.3, seed=1)
    assert sum(summary["lost"] for summary in summaries) > 0
    for summary in summaries:
        assert summary["violations"] == 0
        assert summary["max_message_ratio"] <= 0.3
    for part in data:
        assert part.tobytes() == data[0].tobytes(), "ranks must not differ although packets were lost"
    # The mean of those that arrived, times four: which of them does not matter, the owner's own is always there.
    held = [ranks for size in range(1, 5) for ranks in combinations((1, 2, 3, 4), size)]
    possible = {float(np.float32(sum(ranks)) / np.float32(len(ranks)) * np.float32(4)) for ranks in held}
    assert set(np.unique(data[0]).tolist()) <= possible
    assert 10.0 in data[0]
    assert len(np.unique(data[0])) > 1


def test_a_bound_of_zero_loses_nothing():
    data, summaries = lossy(0.0, seed=2)
    assert all(summary["lost"] == 0 for summary in summaries)
    assert (data[0] == 10.0).all()


def test_only_sums_and_averages_of_floats_may_lose():
    for op, name in ((ReduceOp.MAX, "float32"), (ReduceOp.SUM, "int32"), (ReduceOp.SUM, "complex64")):
        assert not ElementwiseOp(op, name).bears_loss
    assert ElementwiseOp(ReduceOp.MEAN, "bfloat16").bears_loss
    group = Group(2, loss=0.3, seed=3)
    allowed = AllowedLoss(LossBound(0.5, immediate=True), Tagger(NOTHING_PROTECTED), least_values=64)
    data = [np.full(20_000, rank + 1, np.int32) for rank in range(2)]
    arithmetic = ElementwiseOp(ReduceOp.SUM, "int32")
    group.run(lambda rank, exchange: exchange.all_reduce(view(data[rank]), arithmetic, allowed))
    assert (data[0] == 3).all()
    assert allowed.ledger.summary()["sent"] == 0


@pytest.mark.parametrize("size", [20, 500])
def test_messages_are_found_by_tag_and_keep_their_order(size):
    group = Group(3, loss=0.1, jitter_s=0.01, duplicate=0.1, seed=4)
    sent = [np.full(size, number, np.int32) for number in range(8)]
    futures = [group.exchanges[1].send(view(data), 0, number % 2) for number, data in enumerate(sent)]
    other = np.full(size, 99, np.int32)
    futures.append(group.exchanges[2].send(view(other), 0, 0))
    group.network.run(lambda: group.network.now > 0.2)
    got = []
    for source, tag in ((1, 1), (1, 1), (1, 0), (2, 0), (1, 0), (1, 1), (None, 0), (None, 0), (1, 1)):
        room = np.zeros(size, np.int32)
        (found,) = group.wait([group.exchanges[0].receive(view(room), source, tag)])
        got.append((found, int(room[0])))
    assert got == [(1, 1), (1, 3), (1, 0), (2, 99), (1, 2), (1, 5), (1, 4), (1, 6), (1, 7)]
    group.wait(futures)


def test_messages_that_have_been_taken_are_not_known_for_ever(monkeypatch):
    monkeypatch.setattr(point_to_point, "FORGET_AFTER_S", -1.0)
    group = Group(2)
    engine, forgotten = group.network.ranks[1].engine, []
    monkeypatch.setattr(engine, "forget", lambda peer, key: forgotten.append(key))
    for number in range(50):
        data, room = np.full(500, number, np.int32), np.zeros(500, np.int32)
        group.wait([group.exchanges[0].send(view(data), 1, 0), group.exchanges[1].receive(view(room), 0, 0)])
        assert (room == number).all()
    assert len(set(forgotten)) >= 97, "each message has two parts"


@pytest.mark.parametrize("size", [2_000, 60_000])
def test_who_is_done_may_change_what_is_still_on_its_way(size):
    group = Group(3, loss=0.1, jitter_s=0.004, seed=5)
    mine = [values_of(rank, size) for rank in range(3)]
    total, results = mine[0] + mine[1] + mine[2], {}
    starts = {
        "all_reduce": lambda rank, exchange, data: exchange.all_reduce(view(data), SUM),
        "broadcast": lambda rank, exchange, data: exchange.broadcast(view(data), 1),
        "reduce": lambda rank, exchange, data: exchange.reduce(view(data), SUM, 2),
    }

    def begin(name, rank):
        data = mine[rank].copy()
        future = starts[name](rank, group.exchanges[rank], data)

        def spoil(_):
            results[name, rank] = data.copy()
            data[:] = np.nan

        future.add_done_callback(spoil)
        return future

    group.wait([begin(name, rank) for name in starts for rank in range(3)])
    for rank in range(3):
        np.testing.assert_allclose(results["all_reduce", rank], total, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(results["broadcast", rank], mine[1])
        np.testing.assert_allclose(results["reduce", rank], total if rank == 2 else mine[rank], rtol=1e-5, atol=1e-5)


def test_a_reduce_scatter_leaves_its_input_as_it_was():
    group = Group(3)
    inputs = [values_of(rank, 60_000) for rank in range(3)]
    kept = [data.copy() for data in inputs]
    results = [np.zeros(20_000, np.float32) for _ in range(3)]
    mean = ElementwiseOp(ReduceOp.MEAN, "float32")
    group.run(
        lambda rank, exchange: exchange.reduce_scatter(
            [view(part) for part in np.split(inputs[rank], 3)], view(results[rank]), mean
        )
    )
    wanted = np.split(np.mean(kept, axis=0), 3)
    for rank in range(3):
        np.testing.assert_array_equal(inputs[rank], kept[rank])
        np.testing.assert_allclose(results[rank], wanted[rank], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("size", [500, 60_000])
def test_memory_for_what_arrives_is_used_again(name, size):
    group = Group(3)
    sizes = []
    for _ in range(6):
        data = [values_of(rank, size, name) for rank in range(3)]
        group.run(
            lambda rank, exchange, data=data: exchange.all_reduce(view(data[rank]), ElementwiseOp(ReduceOp.SUM, name))
        )
        free = [protocol.buffers._free for protocol in group.network.ranks]
        sizes.append([sum(length * len(rooms) for length, rooms in one.items()) for one in free])
    assert min(sizes[2]) > 0
    assert sizes[5] == sizes[2]


def test_a_failure_names_what_failed_and_ends_what_is_under_way():
    group = Group(3)
    data = [np.zeros(10_000, np.float32) for _ in range(3)]
    group.network.dead.add(2)
    futures = [group.exchanges[rank].all_reduce(view(data[rank]), SUM) for rank in range(2)]
    futures += [group.exchanges[rank].barrier() for rank in range(2)]
    group.network.run(lambda: all(future.done() for future in futures), limit_s=30)
    for future in futures:
        with pytest.raises(TransportError, match=r"group test, rank [01]: (all_reduce number 0|barrier number 1) fail"):
            future.result()
    with pytest.raises(TransportError, match="barrier number 2 failed"):
        group.exchanges[0].barrier().result(0)


def test_a_group_that_cannot_be_numbered_is_refused():
    with pytest.raises(ValueError, match="messages can be numbered for 2048"):
        Collectives(Network(2).ranks[0], 3000, "large")


@pytest.mark.parametrize(
    ("op", "name"),
    [(ReduceOp.MEAN, "int64"), (ReduceOp.BITWISE_AND, "float32"), (ReduceOp.MAX, "complex64")],
)
def test_operations_that_make_no_sense_are_refused(op, name):
    with pytest.raises(TypeError, match=f"{op.value} is not supported for {name}"):
        ElementwiseOp(op, name)


def test_half_precision_is_rounded_once():
    arithmetic = ElementwiseOp(ReduceOp.SUM, "float16")
    parts = [np.array([2048.0], np.float16)] + [np.array([1.0], np.float16)] * 3
    out = np.zeros(1, np.float16)
    arithmetic.reduce([view(part) for part in parts], view(out), 4)
    assert out[0] == 2052.0, "2051 to the nearest even; adding ones to 2048 in half precision gives 2048"


@pytest.mark.parametrize("size", [5, 30_000])
def test_what_is_done_is_given_back_at_once(size):
    group = Group(3, loss=0.05, jitter_s=0.002, seed=4)
    data = [values_of(rank, size) for rank in range(3)]
    with cycles() as left:
        for _ in range(3):
            group.run(lambda rank, exchange: exchange.all_reduce(view(data[rank]), SUM))
            group.run(lambda rank, exchange: exchange.broadcast(view(data[rank]), 0))
    assert not left
