# SPDX-License-Identifier: Apache-2.0
"""Compressed buckets between ranks: what their definition says, the same on all ranks, and nothing lost for good."""

import pickle

import numpy as np
import pytest

from dlcp.collectives import Bucket
from dlcp.collectives.compressed import SEED, AllGatherRun
from dlcp.compress import COMPRESSORS, Feedback, Occasion, make_compressor
from dlcp.compress.compressor import average
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Segment, TagPolicy
from tests.compress.compressed_ranks import (
    EVERY,
    LAYERS,
    PAYLOAD_BYTES,
    SEGMENTS,
    SIZE,
    CompressedRanks,
    assert_identical,
)

GATHERED = [text for text in EVERY if not COMPRESSORS[text.partition(":")[0]].reduces]
FED_BACK = [text for text in EVERY if make_compressor(text).feedback is Feedback.ALL]
TENTH, FACTORS = 384 + 5 + 384, 2 * (48 + 80 + 60 + 64) + 50
CODED_BYTES = {
    "topk:0.1": 8 * TENTH, "randomk:0.1": 4 * TENTH, "qsgd:4": SIZE / 2 + 4 * 17,
    "terngrad": SIZE / 4 + 12, "signsgd": SIZE / 8 + 12, "efsignsgd": SIZE / 8 + 12, "atomo:2": 4 * FACTORS,
    "powersgd:2": 4 * FACTORS,
}  # fmt: skip
"""The bytes of a rank's bucket, from the definitions."""


def by_definition(text, gradients, step=0):
    """What each rank's gradients become with every rank's compressor in one place."""
    compressors = [make_compressor(text) for _ in gradients]
    encoded = [
        compressor.encode(values, SEGMENTS, Occasion(step, rank, SEED))
        for rank, (compressor, values) in enumerate(zip(compressors, gradients, strict=True))
    ]
    if not compressors[0].reduces:
        parts = [compressors[0].decode(one, one.content) for one in encoded]
        combined = compressors[0].combine(iter(parts))
        return average(parts) if combined is None else combined
    while True:
        mean = sum(one.content for one in encoded) / np.float32(len(encoded))
        refined = [compressor.refine(one, mean) for compressor, one in zip(compressors, encoded, strict=True)]
        if refined[0] is None:
            return compressors[0].decode(encoded[0], mean)
        encoded = refined


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("text", EVERY)
def test_without_loss_it_is_what_the_definition_says(text, count):
    ranks = CompressedRanks(count, text, depth=10_000)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    assert ranks.lost == 0
    np.testing.assert_allclose(results[0], by_definition(text, gradients), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("collective", ["ring", "auto"])
@pytest.mark.parametrize("text", ["randomk:0.1", "powersgd:2"])
def test_what_adds_up_goes_any_way(text, collective):
    ranks = CompressedRanks(3, text, collective=collective, depth=10_000)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    np.testing.assert_allclose(results[0], by_definition(text, gradients), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", EVERY)
def test_under_loss_bounds_are_kept_and_replicas_identical(text):
    ranks = CompressedRanks(3, text, loss=0.01, seed=2)
    for step in range(6):
        assert_identical(ranks.reduce(step, ranks.gradients(step)))
    ranks.check_bounds(0.1)
    assert ranks.network.dropped["loss"] > 0


@pytest.mark.parametrize("text", EVERY)
def test_a_lossy_network_does_cost_packets(text):
    ranks = CompressedRanks(2, text, bound=0.3, loss=0.2, seed=4)
    for step in range(4):
        assert_identical(ranks.reduce(step, ranks.gradients(step)))
    ranks.check_bounds(0.3)
    assert ranks.lost > 0, "or nothing was tried"


@pytest.mark.parametrize(("count", "loss"), [(2, 0.0), (3, 0.2)])
@pytest.mark.parametrize("text", FED_BACK)
def test_nothing_is_lost_for_good(text, count, loss):
    """The sum over steps of n times the result, plus the residual, is the sum of all gradients."""
    ranks = CompressedRanks(count, text, bound=0.3, loss=loss, seed=5)
    given, taken = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(4):
        gradients = ranks.gradients(step)
        results = ranks.reduce(step, gradients)
        assert_identical(results)
        given += np.sum(gradients, axis=0, dtype=np.float64)
        taken += count * results[0].astype(np.float64)
    np.testing.assert_allclose(taken + ranks.owed(), given, rtol=1e-4, atol=1e-3)
    assert np.abs(ranks.owed()).sum() > 0
    assert (ranks.lost > 0) == (loss > 0)


@pytest.mark.parametrize(("text", "combine"), [(text, "average") for text in FED_BACK] + [("randomk:0.1", "sum")])
def test_a_flush_sends_what_compression_has_left_out(text, combine):
    ranks = CompressedRanks(2, text, combine, bound=0.3, loss=0.1, seed=5)
    given, taken = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(4):
        gradients = ranks.gradients(step)
        results = ranks.reduce(step, gradients, flush=step == 3)
        assert_identical(results)
        given += np.sum(gradients, axis=0, dtype=np.float64)
        taken += results[0] * (2.0 if combine == "average" else 1.0)
    assert not ranks.owed().any()
    np.testing.assert_allclose(taken, given, rtol=1e-4, atol=1e-2)
    ranks.reduce(4, ranks.gradients(4))
    assert ranks.owed().any(), "one step is whole, and no other"


@pytest.mark.parametrize(("text", "combine"), [("topk:0.1", "adasum"), ("topk:0.1", "sum"), ("signsgd", "average")])
def test_a_flush_loses_nothing_on_the_way_where_only_compressed_gradients_can_be_combined(text, combine):
    ranks = CompressedRanks(2, text, combine, bound=0.3, loss=0.2, seed=5)
    ranks.reduce(0, ranks.gradients(0))
    ranks.settle()
    lost = ranks.lost
    assert lost > 0
    assert_identical(ranks.reduce(1, ranks.gradients(1), flush=True))
    ranks.settle()
    assert ranks.lost == lost


@pytest.mark.parametrize("text", ["qsgd:4", "terngrad", "atomo:2"])
def test_of_what_is_unbiased_the_lost_part_is_owed_and_nothing_else(text):
    ranks = CompressedRanks(2, text, bound=0.3, loss=0.2, seed=6)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert ranks.lost > 0
    np.testing.assert_allclose(2 * results[0] + ranks.owed(), 2 * by_definition(text, gradients), rtol=1e-4, atol=1e-3)


def test_a_vote_owes_nothing():
    ranks = CompressedRanks(3, "signsgd", bound=0.3, loss=0.2, seed=7)
    results = ranks.reduce(0, ranks.gradients(1))
    assert set(np.unique(results[0])) <= {-1, 0, 1}
    assert not ranks.owed().any()


@pytest.mark.parametrize("text", EVERY)
def test_without_error_feedback_nothing_is_owed(text):
    ranks = CompressedRanks(2, text, bound=0.3, loss=0.2, error_feedback=False, seed=8)
    assert_identical(ranks.reduce(0, ranks.gradients(1)))
    assert not ranks.owed().any()


@pytest.mark.parametrize("text", EVERY)
def test_bytes_on_the_wire_are_those_of_the_definition(text):
    """A reducing one sends a share to each owner and its result to each; a gathered one everything to everyone."""
    count = 3
    ranks = CompressedRanks(count, text, depth=10_000)
    ranks.reduce(0, ranks.gradients(1))
    ranks.settle()
    packets = CODED_BYTES[text] / PAYLOAD_BYTES
    copies = 2 * (count - 1) if COMPRESSORS[text.partition(":")[0]].reduces else count * (count - 1)
    # Shares end in packets that are not full, and results are followed by rates.
    assert copies * packets <= ranks.packets <= copies * (packets + 4) + 24
    plain = CompressedRanks(count, depth=10_000)
    plain.reduce(0, plain.gradients(1))
    plain.settle()
    assert ranks.packets < 0.6 * plain.packets


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("value_type", [ValueType.FLOAT64, ValueType.FLOAT16, ValueType.BFLOAT16])
def test_buckets_of_every_format(text, value_type):
    ranks = CompressedRanks(2, text, value_type=value_type, loss=0.05, seed=9)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    assert results[0].dtype == value_type.storage
    if text in FED_BACK:
        wide = [value_type.widen(values).astype(np.float64) for values in gradients]
        taken = 2 * value_type.widen(results[0]).astype(np.float64)
        tolerance = 1.0 if ValueType.BFLOAT16 is value_type else 0.1
        np.testing.assert_allclose(taken + ranks.owed(), sum(wide), rtol=1e-2, atol=tolerance)


@pytest.mark.parametrize("text", EVERY)
def test_one_ranks_infinity_reaches_all_and_is_over_with_the_step(text):
    ranks = CompressedRanks(2, text)
    ranks.reduce(0, ranks.gradients(0))
    gradients = ranks.gradients(1)
    gradients[1][7] = np.inf
    results = ranks.reduce(1, gradients)
    assert_identical(results)
    assert not np.isfinite(results[0]).all()
    assert np.isfinite(ranks.owed()).all()
    assert np.isfinite(ranks.reduce(2, ranks.gradients(2))[0]).all()


@pytest.mark.parametrize("text", ["topk:0.1", "randomk:0.1", "powersgd:2"])
def test_what_must_be_exact_is_not_compressed(text):
    ranks = CompressedRanks(2, text, loss=0.1, bound=0.3, seed=3)
    gradients = ranks.gradients(1)
    started = ranks.start(0, gradients), ranks.start(0, gradients, sequence=1, exact=True)
    ranks.network.run(lambda: all(future.done() for row in started for future in row.values()))
    np.testing.assert_array_equal(started[1][0].result(), (gradients[0] + gradients[1]) / np.float32(2))


@pytest.mark.parametrize("text", GATHERED)
def test_a_gathered_message_may_lose_to_all_receivers_together_what_the_bound_says(text):
    ranks = CompressedRanks(4, text, bound=0.3)
    ranks.reduce(0, ranks.gradients(1))
    (bound,) = {record.bound for ledger in ranks.ledgers for record in ledger.records}
    assert bound == pytest.approx(0.1)


def test_the_least_of_what_is_gathered_is_dropped_first():
    """Tags follow the content: the largest pairs are protected, the smallest are of the highest class."""
    ranks = CompressedRanks(2, "topk:0.2", policy=TagPolicy(small_layer_values=0))
    run = AllGatherRun(ranks.reducers[0].gradients, 0, 0, Bucket(ranks.gradients(1)[0], ValueType.FLOAT32, SEGMENTS))
    tags, encoded, per_packet = run.tags, run.encoded, run.units_per_packet
    worth = [encoded.worth[start : start + per_packet].mean() for start in range(0, encoded.units, per_packet)]
    fc = np.flatnonzero(tags.layer == LAYERS["fc.weight"].position)
    worth_of = {number: np.array(worth)[fc][tags.drop_class[fc] == number] for number in (0, 7)}
    assert worth_of[0].min() > worth_of[7].max()
    assert tags.protected[fc][0]
    assert not tags.protected[fc].all()
    assert (tags.queue[0] > tags.queue[fc]).all(), "front layers go first"


def test_scales_must_arrive():
    ranks = CompressedRanks(2, "qsgd:4", bound=0.5, loss=0.3, seed=11)
    for step in range(3):
        ranks.reduce(step, ranks.gradients(step))
    assert ranks.lost > 0
    ranks.check_bounds(0.5)
    run = AllGatherRun(ranks.reducers[0].gradients, 9, 0, Bucket(ranks.gradients(3)[0], ValueType.FLOAT32, SEGMENTS))
    header = -(-17 * 4 // PAYLOAD_BYTES)
    assert run.tags.protected[:header].all()
    assert run.tags.protected[header:].mean() < 0.5


@pytest.mark.parametrize("text", ["topk:0.1", "randomk:0.1"])
def test_buckets_may_be_regrouped_between_steps(text):
    """The residual is kept by layer, because DDP regroups its buckets after the first step."""
    ranks = CompressedRanks(2, text)
    gradients = ranks.gradients(1)
    ranks.reduce(0, gradients)
    owed = ranks.owed()
    zeros = [np.zeros(60 * 64, np.float32)] * 2
    segments = [Segment(LAYERS["fc.weight"], 0, 60 * 64)]
    started = ranks.start(1, zeros, segments=segments)
    ranks.network.run(lambda: all(future.done() for future in started.values()))
    after = ranks.owed()
    fc = slice(SEGMENTS[2].start, SEGMENTS[2].stop)
    np.testing.assert_allclose(2 * started[0].result() + after[fc], owed[fc], atol=1e-4)
    np.testing.assert_array_equal(after[: fc.start], owed[: fc.start])


@pytest.mark.parametrize("text", ["topk:0.1", "qsgd:4"])
def test_what_is_owed_travels_with_a_checkpoint(text):
    ranks = CompressedRanks(2, text, bound=0.3, loss=0.2, seed=6)
    ranks.reduce(0, ranks.gradients(0))
    owed = ranks.owed()
    ranks.residuals = [pickle.loads(pickle.dumps(residual)) for residual in ranks.residuals]
    np.testing.assert_array_equal(ranks.owed(), owed)
    assert sum(residual.size for residual in ranks.residuals) >= np.count_nonzero(owed) > 0
