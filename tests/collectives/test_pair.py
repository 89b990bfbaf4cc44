# SPDX-License-Identifier: Apache-2.0
"""Small buckets of two ranks, in one hop: replicas stay equal, and nothing is lost for good."""

import numpy as np
import pytest

from dlcp import wire
from dlcp.values.dtypes import ValueType
from dlcp.wire import PacketType
from tests.collectives.virtual_ranks import (
    NOTHING_PROTECTED,
    SMALL_SIZES,
    SmallRanks,
    assert_identical,
)

EVERY_FORMAT = pytest.mark.parametrize(
    "value_type",
    [ValueType.FLOAT32, ValueType.FLOAT16, ValueType.BFLOAT16, ValueType.FLOAT64],
    ids=lambda kind: kind.value,
)


def data_messages(network):
    """Sender and number of each message of which data was sent."""
    headers = [(source, wire.decode(datagram)) for _, source, _, datagram in network.sent]
    return {(source, header.message) for source, header in headers if header.type is PacketType.DATA}


@pytest.mark.parametrize(("bytes_max", "each_way"), [(1 << 20, 1), (1 << 10, 2)])
def test_a_small_bucket_takes_one_message_each_way_and_a_larger_one_two(monkeypatch, bytes_max, each_way):
    monkeypatch.setattr("dlcp.collectives.direct.ONE_HOP_BYTES_MAX", bytes_max)
    ranks = SmallRanks(2)
    gradients = ranks.gradients(1)
    averages = ranks.reduce(0, gradients)
    assert_identical(averages)
    for name in SMALL_SIZES:
        np.testing.assert_array_equal(averages[0][name], (gradients[0][name] + gradients[1][name]) / np.float32(2))
    assert len(data_messages(ranks.network)) == 2 * each_way


@EVERY_FORMAT
@pytest.mark.parametrize("seed", range(4))
def test_replicas_stay_equal_and_what_is_lost_is_owed(value_type, seed):
    ranks = SmallRanks(2, bound=0.3, loss=0.25, duplicate=0.1, jitter_s=0.002, seed=seed, value_type=value_type,
                       policy=NOTHING_PROTECTED)  # fmt: skip
    given = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    taken = {name: np.zeros(size) for name, size in SMALL_SIZES.items()}
    for step in range(4):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients)
        assert_identical(averages)
        for name in SMALL_SIZES:
            given[name] += sum(value_type.widen(rank[name]) for rank in gradients)
            taken[name] += 2.0 * value_type.widen(averages[0][name])
    assert ranks.lost > 10
    tolerance = {"float64": 1e-9, "float32": 1e-4, "float16": 0.5, "bfloat16": 4}[value_type.value]
    for name in SMALL_SIZES:
        scale = max(1.0, np.abs(given[name]).max()) if value_type.storage.itemsize == 2 else 1.0
        np.testing.assert_allclose(taken[name] + ranks.owed(name), given[name], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_sums_are_rescaled_without_error_feedback(error_feedback):
    def lose(network, source, header):
        return header.type is PacketType.DATA and source == 1 and header.step == 0 and header.index in (2, 5)

    ranks = SmallRanks(2, bound=0.3, error_feedback=error_feedback, policy=NOTHING_PROTECTED, lose=lose)
    gradients = ranks.gradients(8, {"conv1.weight": 360 * 30})
    one, lossy = (rank["conv1.weight"] for rank in gradients)
    averages = ranks.reduce(0, gradients, [["conv1.weight"]])
    assert_identical(averages)
    lost = np.repeat([packet in (2, 5) for packet in range(30)], 360)
    expected = np.where(lost, one / (2 if error_feedback else 1), (one + lossy) / 2)
    np.testing.assert_allclose(averages[0]["conv1.weight"], expected, rtol=1e-6)
    owed = [reducer.context.residual.of("conv1.weight") for reducer in ranks.reducers]
    assert owed[0] is None
    if error_feedback:
        np.testing.assert_array_equal(owed[1], np.where(lost, lossy, 0))
    else:
        assert owed[1] is None


def test_an_average_is_kept_until_the_peer_is_known_to_have_it():
    ranks = SmallRanks(2)
    runs = [run for (run,) in ranks.start(0, ranks.gradients(0))]
    ranks.network.run(lambda: all(run.done() for run in runs))
    for run in runs:
        averaged = run.result().copy()
        run.result()[:] = 0  # the caller's, who has it back
        assert run.partial_result().final.all()
        assert run.partial_result().values.tobytes() == averaged.tobytes()
