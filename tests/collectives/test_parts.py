# SPDX-License-Identifier: Apache-2.0
"""Large buckets go to a parameter server in parts: sooner done, and otherwise as if they were whole."""

from types import SimpleNamespace

import numpy as np
import pytest

from dlcp.collectives import parameter_server
from dlcp.collectives.message_numbers import PARTS_MAX, part_number, parts_allowed, two_hop_number
from dlcp.collectives.parameter_server import AllReduceInParts
from dlcp.collectives.partial_result import recover
from dlcp.transport import TransportError
from dlcp.values.dtypes import ValueType
from tests.collectives.meeting_ranks import together
from tests.collectives.test_direct import THREE_BUCKETS, exact_average
from tests.collectives.test_message_numbers import until_refused
from tests.collectives.test_parameter_server import check_that_nothing_is_lost_for_good
from tests.collectives.virtual_ranks import ONE_BUCKET, SIZES, Ranks, assert_identical

WORKERS = 3
MBIT = 1e6
EVENTS = ("tagged", "gathered")


class RanksWithServer(Ranks):
    def __init__(self, *, in_parts=True, **fields):
        super().__init__(WORKERS, server=True, **fields)
        self.serve()
        if in_parts:
            self.reducers = [AllReduceInParts(reducer.context, WORKERS) for reducer in self.reducers]

    def owed(self, name):
        """A residual is as long as the part of the layer up to its last value that was ever lost."""
        owed = np.zeros(self.sizes[name])
        for reducer in self.reducers:
            residual = reducer.plain.context.residual.of(name)
            if residual is not None:
                owed[: len(residual)] += residual
        return owed


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parameter_server, "PART_BYTES_MIN", 10_000)


@pytest.mark.parametrize("value_type", [ValueType.FLOAT32, ValueType.BFLOAT16], ids=lambda kind: kind.value)
def test_averages_are_exact(value_type):
    ranks = RanksWithServer(value_type=value_type)
    for step in range(3):
        gradients = ranks.gradients(step)
        averages = ranks.reduce(step, gradients, THREE_BUCKETS if step else ONE_BUCKET)
        assert_identical(averages)
        for name in SIZES:
            assert averages[0][name].tobytes() == exact_average(gradients, value_type, name).tobytes()
    sent = {record.message for record in ranks.ledgers[0].records if record.step == 0}
    itemsize = gradients[0]["fc.weight"].itemsize
    assert len(sent) == min(16, sum(SIZES.values()) * itemsize // 10_000)


def test_nothing_is_lost_for_good():
    check_that_nothing_is_lost_for_good(RanksWithServer(bound=0.2, loss=0.2, seed=1, value_type=ValueType.FLOAT64))


def test_a_step_is_shorter():
    seconds = []
    for in_parts in (True, False):
        ranks = RanksWithServer(in_parts=in_parts, rate_bps=32 * MBIT, depth=96)
        for step in range(3):
            before = ranks.network.now
            ranks.reduce(step, ranks.gradients(step))
        seconds.append(ranks.network.now - before)
    assert seconds[1] / seconds[0] > 1.2


def test_a_bucket_that_broke_off_is_completed_from_its_parts():
    ranks = RanksWithServer(rate_bps=32 * MBIT, depth=96)
    ranks.reduce(0, ranks.gradients(0), THREE_BUCKETS)
    gradients = ranks.gradients(1)
    started = ranks.start(1, gradients, THREE_BUCKETS)
    runs = [run for bucket in started[0] for run in bucket.runs]
    ranks.network.run(lambda: 0 < sum(run.done() for run in runs) < len(runs))
    assert not all(future.done() for row in started for future in row)
    held = [{run.sequence: run.partial_result() for run in row} for row in started]
    open_buckets = sorted({sequence for mine in held for sequence in mine})
    assert any((~each.final).any() and each.final.any() for mine in held for each in mine.values())

    def complete(channel, rank):
        found = {}
        for sequence in open_buckets:
            finished = started[rank][sequence].done()
            found[sequence] = recover(channel, rank, range(WORKERS), held[rank].get(sequence), finished=finished)
        return found

    for found in together(WORKERS, complete):
        for sequence in open_buckets:
            names = THREE_BUCKETS[sequence]
            expected = np.concatenate([exact_average(gradients, ValueType.FLOAT32, name) for name in names])
            np.testing.assert_allclose(found[sequence].values, expected, rtol=1e-5, atol=1e-6)


def test_averages_are_kept_until_all_workers_have_them():
    """The server may end before it has sent an average to another worker; step numbers may have gaps."""
    ranks = RanksWithServer()
    started = ranks.start(3, ranks.gradients(0), THREE_BUCKETS)
    ranks.network.run(lambda: all(run.done() for row in started for run in row))
    for reducer, row in zip(ranks.reducers, started, strict=True):
        reducer.begin_step(9)
        for run in row:
            averaged = run.result().copy()
            run.result()[:] = 0  # the caller's, who has it back
            assert run.partial_result().final.all()
            np.testing.assert_array_equal(run.partial_result().values, averaged)


def test_timelines_show_buckets_and_not_their_parts():
    ranks = RanksWithServer()
    noted = []
    for connection in ranks.connections[:WORKERS]:
        connection.timeline = SimpleNamespace(
            note=lambda *values: noted.append(values), note_message=lambda *values: None
        )
    ranks.reduce(0, ranks.gradients(0), THREE_BUCKETS)
    tagged, gathered = ([(step, number) for name, step, number, *_ in noted if name == event] for event in EVENTS)
    assert sorted(tagged) == sorted(gathered) == sorted([(0, 0), (0, 1), (0, 2)] * WORKERS)
    assert {(name, *values) for name, _, _, *values in noted} == {("tagged", 32), ("gathered", WORKERS)}


def test_a_part_that_fails_fails_its_bucket():
    ranks = RanksWithServer()
    started = ranks.start(0, ranks.gradients(0))
    for connection in ranks.connections:
        connection.fail(TransportError("the path is gone"))
    for (averaged,) in started:
        with pytest.raises(TransportError, match="the path is gone"):
            averaged.result(0)


@pytest.mark.parametrize("ranks", [2, 5, 65, 1024])
def test_parts_have_numbers_of_their_own(ranks):
    found = until_refused(
        lambda bucket: [
            two_hop_number(part_number(bucket, part, ranks), 1, ranks - 1, ranks)
            for part in range(parts_allowed(bucket, ranks))
        ]
    )
    assert len(set(found)) == len(found)
    assert found == sorted(found)
    assert parts_allowed(0, ranks) == PARTS_MAX
    assert parts_allowed(len(found), ranks) == 1
