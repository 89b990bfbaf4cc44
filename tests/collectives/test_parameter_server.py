# SPDX-License-Identifier: Apache-2.0
"""All-reduce by a parameter server, which knows about each bucket only what the workers' packets contain."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.transport import TransportError, TransportOptions
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import queue_of_layer
from tests.collectives.test_direct import THREE_BUCKETS, exact_average
from tests.collectives.virtual_ranks import (
    NOTHING_PROTECTED,
    ONE_BUCKET,
    SMALL_SIZES,
    SmallRanks,
    assert_identical,
    is_contribution,
)
from tests.transport.exchanges import PacketType

WORKERS = 3


def ranks_with_server(*, workers=WORKERS, **fields):
    ranks = SmallRanks(workers, server=True, **fields)
    ranks.serve()
    return ranks


@pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
def test_without_loss_the_average_is_exact(value_type):
    ranks = ranks_with_server(value_type=value_type)
    for step in range(3):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS if step else ONE_BUCKET)
        assert_identical(averages)
        for name in SMALL_SIZES:
            assert averages[0][name].tobytes() == exact_average(gradients, value_type, name).tobytes()
    assert not ranks.server.failed.done()


@pytest.mark.parametrize("size", [1, 359, 360, 361, 5000, 77_777])
def test_the_server_learns_the_size_of_any_bucket(size):
    ranks = ranks_with_server(workers=2, bound=0.3, loss=0.1, seed=size, policy=NOTHING_PROTECTED, error_feedback=False)
    gradients = ranks.gradients(0, {"fc.weight": size})
    averages = ranks.reduce(0, gradients, [["fc.weight"]])
    assert_identical(averages)
    assert len(averages[0]["fc.weight"]) == size


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_nothing_is_lost_for_good(loss):
    check_that_nothing_is_lost_for_good(ranks_with_server(bound=0.2, loss=loss, seed=1, value_type=ValueType.FLOAT64))


def check_that_nothing_is_lost_for_good(ranks):
    given = {name: np.zeros(size) for name, size in ranks.sizes.items()}
    taken = {name: np.zeros(size) for name, size in ranks.sizes.items()}
    for step in range(4):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS, delays_s=[0.0, 0.02, 0.01])
        assert_identical(averages)
        for name in ranks.sizes:
            given[name] += sum(rank[name] for rank in gradients)
            taken[name] += ranks.count * averages[0][name]
            np.testing.assert_allclose(taken[name] + ranks.owed(name), given[name], rtol=0, atol=1e-9)
    assert ranks.lost > 10
    assert all(ledger.violations == 0 for ledger in ranks.ledgers)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_sums_are_rescaled_without_error_feedback(error_feedback):
    def lose(network, source, header):
        return (
            header.type is PacketType.DATA
            and source == 1
            and is_contribution(header, WORKERS + 1)
            and header.index == 4
        )

    ranks = ranks_with_server(bound=0.3, error_feedback=error_feedback, policy=NOTHING_PROTECTED, lose=lose,
                              value_type=ValueType.FLOAT64)  # fmt: skip
    gradients = ranks.gradients(2, {"fc.weight": 180 * 20})
    one, two, three = (rank["fc.weight"] for rank in gradients)
    got = ranks.reduce(0, gradients, [["fc.weight"]])[2]["fc.weight"]
    lost = slice(180 * 4, 180 * 5)
    np.testing.assert_allclose(got[lost], (one + three)[lost] / (3 if error_feedback else 2), rtol=1e-12)
    kept = np.delete(np.arange(len(got)), np.arange(len(got))[lost])
    np.testing.assert_allclose(got[kept], (one + two + three)[kept] / 3, rtol=1e-12)
    assert ranks.lost == 1


def test_results_are_tagged_like_the_gradients_they_are_made_of():
    ranks = ranks_with_server()
    ranks.reduce(0, ranks.gradients(3))
    shares, results = {}, {}
    for _, source, _, data in ranks.network.arrived:
        header = wire.decode(data)
        if header.type is PacketType.DATA:
            (results if source == WORKERS else shares)[header.index] = (header.layer, header.queue, header.drop_class)
    assert len({layer for layer, _, _ in shares.values()}) == 3
    for index, (layer, queue, _) in shares.items():
        assert results[index] == (layer, queue, 0)
        assert queue == queue_of_layer(np.array([layer], np.uint8))[0]


def test_the_server_enters_its_results():
    ranks = ranks_with_server(loss=0.1, seed=4)
    ranks.reduce(0, ranks.gradients(4), THREE_BUCKETS)
    ranks.network.run(lambda: ranks.network.ranks[WORKERS].settled)
    records = ranks.server.ledger.records
    assert len(records) == WORKERS * len(THREE_BUCKETS)
    assert {record.receiver for record in records} == {0, 1, 2}
    assert {record.layers for record in records} == {"part 0", "part 1", "part 2"}
    assert all(record.lost == 0 for record in records)


def test_the_server_keeps_nothing_of_steps_that_are_over():
    ranks = ranks_with_server(bound=0.1, loss=0.1, seed=5)
    for step in range(6):
        ranks.reduce(step, ranks.gradients(step), THREE_BUCKETS, delays_s=[0.0, 0.01, 0.03])
    protocol = ranks.network.ranks[WORKERS]
    assert not ranks.server._buckets
    assert protocol.first_step == 4
    assert protocol.engine.view.early_bytes == 0


def test_workers_of_different_models_are_told():
    ranks = ranks_with_server(workers=2, options=TransportOptions(deadline_s=2.0))
    small, large = ranks.gradients(6, {"fc.weight": 5000})[0], ranks.gradients(6, {"fc.weight": 6000})[0]
    for rank, gradients in enumerate((small, large)):
        ranks.count = 1
        reducer, ranks.reducers = ranks.reducers, [ranks.reducers[rank]]
        ranks.start(0, [gradients], [["fc.weight"]])
        ranks.reducers, ranks.count = reducer, 2
    ranks.network.run(ranks.server.failed.done)
    with pytest.raises(ValueError, match=r"step 0, part 0: workers sent \{0: '5000 values of float32 in 32 bits'"):
        ranks.server.failed.result()


def test_a_dead_worker_ends_the_service():
    ranks = ranks_with_server(options=TransportOptions(silence_s=1.0, deadline_s=5.0))
    started = ranks.start(0, ranks.gradients(7))
    ranks.network.run(lambda: ranks.network.now > 0.002)
    ranks.network.dead.add(1)
    ranks.network.run(ranks.server.failed.done)
    with pytest.raises(TransportError, match="rank 1"):
        ranks.server.failed.result()
    ranks.network.run(lambda: started[0][0].done())
    with pytest.raises(TransportError):
        started[0][0].result()


def test_what_is_done_is_given_back_at_once():
    assert not ranks_with_server(bound=0.1, loss=0.05, seed=2).left_behind()
