# SPDX-License-Identifier: Apache-2.0
"""Each compressor against its definition."""

import numpy as np
import pytest

from dlcp.compress import COMPRESSORS, Feedback, Occasion, make_compressor
from dlcp.compress.low_rank import folded_sum, orthonormal, probabilities, product, shape_of, systematic
from dlcp.compress.quantized import pack, unpack
from dlcp.values.tags import Layer, Segment
from tests.compress.compressed_gradients import EVERY, LAYERS, SEGMENTS, SHAPES, SIZE, alone, gradient, made, matrix_of


def unit_mask(encoded, fraction, seed):
    """Units that arrived, in runs as packets have them; those that must arrive are there."""
    present = np.repeat(np.random.default_rng(seed).random(encoded.units // 20 + 1) > fraction, 20)[: encoded.units]
    return present if encoded.worth is None else present | np.isinf(encoded.worth)


def test_there_is_one_of_each_name_and_the_tests_have_all():
    assert {text.partition(":")[0] for text in EVERY} == set(COMPRESSORS)


@pytest.mark.parametrize("text", EVERY)
def test_draws_are_the_same_again_and_layouts_are_the_same_everywhere(text):
    first, again = (made(text).encode(gradient(1), SEGMENTS, Occasion(3, 1)) for _ in range(2))
    other = made(text).encode(gradient(2), SEGMENTS, Occasion(3, 0))
    assert first.content.tobytes() == again.content.tobytes()
    assert (first.segments, len(first.content)) == (other.segments, len(other.content))


@pytest.mark.parametrize("text", EVERY)
def test_units_fill_the_content_and_belong_to_layers(text):
    encoded = made(text).encode(gradient(1), SEGMENTS, Occasion(0, 0))
    assert encoded.content.nbytes == -(-encoded.units * encoded.unit_bits // 8)
    starts = [segment.start for segment in encoded.segments]
    assert starts == [0, *(segment.stop for segment in encoded.segments[:-1])]
    if encoded.worth is not None:
        assert encoded.worth.shape == (encoded.units,)


@pytest.mark.parametrize("text", EVERY)
def test_a_rank_with_nan_makes_everybodys_result_nan(text):
    """So that every rank's loss scaler sees it; what the compressor remembers must not be spoiled."""
    compressor = made(text)
    decoded, _ = alone(compressor, np.full(SIZE, np.nan, np.float32))
    touched = decoded if text.partition(":")[0] not in ("topk", "randomk") else decoded[decoded != 0]
    assert len(touched)
    assert np.isnan(touched).all()
    assert np.isfinite(alone(compressor, gradient(1), Occasion(1, 0))[0]).all()


@pytest.mark.parametrize("text", [text for text in EVERY if not COMPRESSORS[text.partition(":")[0]].reduces])
def test_what_is_missing_counts_as_nothing(text):
    compressor = made(text)
    encoded = compressor.encode(gradient(1), SEGMENTS, Occasion(0, 0))
    present = unit_mask(encoded, 0.3, 5)
    whole, part = compressor.decode(encoded, encoded.content), compressor.decode(encoded, encoded.content, present)
    zeroed = np.unpackbits(encoded.content, bitorder="little")
    zeroed[~np.repeat(present, encoded.unit_bits)] = 0  # as the transport delivers it
    arrived = np.packbits(zeroed, bitorder="little")
    np.testing.assert_array_equal(compressor.decode(encoded, arrived, present), part)
    assert (part != whole).any()
    nothing = compressor.decode(encoded, encoded.content, np.zeros(encoded.units, np.bool_))
    assert not nothing.any()


def test_the_average_of_contents_decodes_to_the_average_of_gradients():
    compressor = made("randomk:0.1")
    ranks = [compressor.encode(gradient(seed), SEGMENTS, Occasion(4, seed)) for seed in range(3)]
    mean = sum(encoded.content for encoded in ranks) / np.float32(3)
    each = [compressor.decode(encoded, encoded.content) for encoded in ranks]
    np.testing.assert_allclose(compressor.decode(ranks[2], mean), sum(each) / 3, rtol=1e-6)


def test_top_k_sends_the_largest_of_each_layer_first():
    values = gradient(1)
    decoded, encoded = alone(made("topk:0.1"), values)
    for segment in SEGMENTS:
        part, left = values[segment.start : segment.stop], decoded[segment.start : segment.stop]
        kept = np.flatnonzero(left)
        assert len(kept) == np.ceil(0.1 * len(part))
        assert np.abs(part[kept]).min() >= np.abs(np.delete(part, kept)).max()
        np.testing.assert_array_equal(left[kept], part[kept])
    for segment in encoded.segments:
        assert (np.diff(encoded.worth[segment.start : segment.stop]) <= 0).all()
    assert np.sum((values - decoded) ** 2) <= 0.9 * np.sum(values**2), "a k-contraction"


@pytest.mark.parametrize("text", ["topk:0.1", "randomk:0.1"])
def test_small_layers_are_sent_whole(text):
    values = gradient(1)
    decoded, _ = alone(made(text, whole_below=41), values)
    np.testing.assert_array_equal(matrix_of(decoded, "conv.bias"), matrix_of(values, "conv.bias"))


def test_random_k_draws_alike_on_all_ranks_and_anew_at_each_step():
    drawn = {
        (step, rank): made("randomk:0.1").encode(gradient(rank), SEGMENTS, Occasion(step, rank)).memory[1].tolist()
        for step in range(2)
        for rank in range(2)
    }
    assert drawn[0, 0] == drawn[0, 1]
    assert drawn[0, 0] != drawn[1, 0]
    assert len(set(drawn[0, 0])) == len(drawn[0, 0])


UNBIASED = ["randomk:0.1", "qsgd:2", "qsgd:4", "terngrad", "atomo:2"]


@pytest.mark.parametrize("text", UNBIASED)
def test_what_says_that_it_is_unbiased_is(text):
    """The mean of N draws of a variance v and at most m off lies within 6 sqrt(v / N) + 12 m / N (Bernstein).

    A value that is sent once in a thousand times may not have come at all; all together they may not be missed.
    """
    compressor = made(text, error_feedback=False)
    assert compressor.feedback is Feedback.LOST
    values, draws = gradient(1), 200
    errors = np.array([alone(compressor, values, Occasion(step, 0))[0] - values for step in range(draws)], np.float64)
    mean = errors.mean(axis=0)
    seen = np.ptp(errors, axis=0) > 0
    allowed = 6 * np.sqrt(errors.var(axis=0) / draws) + 12 * np.abs(errors).max(axis=0) / draws
    assert (np.abs(mean) <= allowed)[seen].all()
    spread = np.sqrt(errors.var(axis=0).sum())
    assert np.linalg.norm(mean) < 1.2 * spread / np.sqrt(draws), "averaging helps, as without a bias"
    assert np.abs(values @ mean) <= 6 * (errors @ values).std() / np.sqrt(draws), "nor along the gradient"


@pytest.mark.parametrize(("bits", "top"), [(2, 1), (4, 7), (8, 127)])
def test_qsgd_has_levels_of_the_groups_norm_and_keeps_its_variance_bound(bits, top):
    values = gradient(1)[:512]
    segments = [Segment(Layer("w", 0), 0, 512)]
    norm = np.float32(np.linalg.norm(values.astype(np.float64)))
    errors = []
    for step in range(50):
        decoded, encoded = alone(made(f"qsgd:{bits}"), values, Occasion(step, 0), segments)
        levels = decoded / norm * top
        np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
        assert (np.abs(decoded - values) <= norm / top * 1.0001).all(), "one of the two levels next to it"
        assert (np.sign(decoded) * np.sign(values) >= 0).all()
        errors.append(np.sum((decoded - values) ** 2, dtype=np.float64))
    assert np.mean(errors) <= min(512 / top**2, np.sqrt(512) / top) * norm**2
    assert encoded.content.nbytes == 4 + 512 * bits // 8


def test_qsgd_never_lets_layers_share_a_norm():
    values = np.concatenate([np.full(1200, 1e-6), np.full(SIZE - 1200, 1e3)]).astype(np.float32)
    decoded, _ = alone(made("qsgd:8"), values)
    assert decoded[:1200].max() < 1e-4


def test_terngrad_is_ternary_by_layer():
    values = gradient(1)
    decoded, encoded = alone(made("terngrad"), values)
    for segment in SEGMENTS:
        scale = np.abs(values[segment.start : segment.stop]).max()
        assert set(np.unique(decoded[segment.start : segment.stop])) <= {-scale, 0, scale}
    assert encoded.content.nbytes == 4 * 3 + -(-SIZE * 2 // 8)


def test_sign_sgd_is_a_majority_vote():
    compressor, ranks = made("signsgd"), [gradient(seed) for seed in range(5)]
    parts = [alone(compressor, values, Occasion(0, rank))[0] for rank, values in enumerate(ranks)]
    np.testing.assert_array_equal(compressor.combine(iter(parts)), np.sign(np.sum(np.sign(ranks), axis=0)))
    assert (compressor.combine(iter([parts[0], -parts[0]])) == 0).all(), "a tie"
    assert compressor.feedback is Feedback.NOTHING


def test_sign_sgd_has_no_opinion_about_zeros():
    decoded, encoded = alone(made("signsgd"), np.zeros(SIZE, np.float32))
    assert abs(decoded.mean()) < 0.1
    assert encoded.content.nbytes == 4 * 3 + SIZE // 8


def test_scaled_signs_have_their_layers_mean_size():
    values = gradient(1)
    decoded, _ = alone(made("efsignsgd"), values)
    for segment in SEGMENTS:
        part = values[segment.start : segment.stop]
        expected = np.sign(part) * np.float32(np.abs(part, dtype=np.float64).mean())
        np.testing.assert_allclose(decoded[segment.start : segment.stop], expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_come_back(bits):
    codes = np.random.default_rng(0).integers(0, 1 << bits, 77).astype(np.uint8)
    packed = pack(codes, bits)
    assert len(packed) == -(-77 * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits)[:77], codes)


@pytest.mark.parametrize("atoms", [1, 2, 5])
def test_atomo_has_the_probabilities_of_least_variance(atoms):
    sizes = np.array([9.0, 3.0, 1.0, 0.5, 0.25, 0.25])
    chances = probabilities(sizes, atoms)
    assert chances.sum() == pytest.approx(atoms)
    assert (chances <= 1).all()
    least = np.sum(sizes**2 / chances)
    rng = np.random.default_rng(0)
    for _ in range(300):  # no others that add up to as much are better
        other = np.clip(chances + 0.05 * rng.standard_normal(6), 1e-3, 1)
        other *= atoms / other.sum()
        if (other <= 1).all():
            assert np.sum(sizes**2 / other) >= least - 1e-9


def test_systematic_draws_are_as_many_as_wanted_and_as_likely_as_wanted():
    chances = probabilities(np.array([9.0, 3.0, 1.0, 0.5, 0.25, 0.25]), 3)
    starts = (np.arange(2000) + 0.5) / 2000
    drawn = [systematic(chances, start) for start in starts]
    assert {len(one) for one in drawn} == {3}
    counts = np.bincount(np.concatenate(drawn), minlength=6) / 2000
    np.testing.assert_allclose(counts, chances, atol=2e-3)


def test_atomo_variance_is_that_of_the_definition():
    values = gradient(1)
    sizes = np.linalg.svd(matrix_of(values, "fc.weight"), compute_uv=False).astype(np.float64)
    expected = np.sum(sizes**2 * (1 / probabilities(sizes, 2) - 1))
    errors = [
        np.sum((matrix_of(alone(made("atomo:2"), values, Occasion(step, 0))[0] - values, "fc.weight")) ** 2)
        for step in range(150)
    ]
    assert np.mean(errors) == pytest.approx(expected, rel=0.25)


def test_atomo_is_exact_where_there_are_no_more_atoms():
    values = gradient(1)
    fc = matrix_of(values, "fc.weight")
    fc[:] = np.outer(np.arange(60) - 20.0, np.cos(np.arange(30.0)))
    decoded, _ = alone(made("atomo:1"), values)
    np.testing.assert_allclose(matrix_of(decoded, "fc.weight"), fc, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_power_sgd_is_exact_on_matrices_of_its_rank(rank):
    rng = np.random.default_rng(3)
    values = gradient(1)
    for name in ("conv.weight", "fc.weight"):
        rows, columns = SHAPES[name]
        matrix_of(values, name)[:] = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
    decoded, _ = alone(made(f"powersgd:{rank}"), values)
    np.testing.assert_allclose(decoded, values, atol=1e-4)


def test_power_sgd_finds_the_best_approximation_of_what_stays_the_same():
    """A power iteration from step to step converges to the largest singular vectors."""
    values, compressor = gradient(1), made("powersgd:2")
    sizes = np.linalg.svd(matrix_of(values, "fc.weight"), compute_uv=False)
    best = np.linalg.norm(sizes[2:])
    errors = []
    for step in range(60):
        decoded, _ = alone(compressor, values, Occasion(step, 0))
        errors.append(np.linalg.norm(matrix_of(decoded - values, "fc.weight")))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.01 * best


def test_power_sgd_averages_what_ranks_have_together():
    """The average of gradients of rank 1 that share their rows has rank 1: it is found exactly, of no rank alone."""
    right = np.cos(np.arange(30.0))
    ranks = [gradient(seed) for seed in range(3)]
    for seed, values in enumerate(ranks):
        matrix_of(values, "conv.weight")[:] = 0
        matrix_of(values, "fc.weight")[:] = np.outer(np.random.default_rng(seed).standard_normal(60), right)
    compressors = [made("powersgd:1") for _ in ranks]
    encoded = [c.encode(v, SEGMENTS, Occasion(0, n)) for n, (c, v) in enumerate(zip(compressors, ranks, strict=True))]
    first = sum(one.content for one in encoded) / 3
    encoded = [c.refine(one, first) for c, one in zip(compressors, encoded, strict=True)]
    second = sum(one.content for one in encoded) / 3
    for compressor, one in zip(compressors, encoded, strict=True):
        np.testing.assert_allclose(compressor.decode(one, second), sum(ranks) / 3, atol=1e-4)


def test_orthonormal_columns_span_the_same_and_dependent_ones_vanish():
    matrix = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    matrix[:, 2] = 2 * matrix[:, 0] - matrix[:, 1]
    found = orthonormal(matrix)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 1, 0, 1]), atol=1e-6)
    np.testing.assert_allclose(found @ (found.T @ matrix), matrix, atol=1e-5)


def test_products_and_sums_are_what_they_should_be():
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((7, 3)), rng.standard_normal((5, 3))
    np.testing.assert_allclose(product(left, right), left @ right.T)
    for count in (1, 2, 3, 8, 13):
        np.testing.assert_allclose(folded_sum(left[:count] if count < 8 else np.resize(left, (count, 3))).sum(),
                                   np.resize(left, (count, 3)).sum() if count >= 8 else left[:count].sum())  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [((8, 3, 3, 3), 216, (8, 27)), ((40,), 40, None), ((1, 9), 9, None), ((), 100, (10, 10)), ((), 103, (11, 10))],
)
def test_layers_are_matrices_by_their_first_dimension(shape, size, expected):
    found = shape_of(Segment(Layer("w", 0, shape), 5, 5 + size))
    assert (found and (found.rows, found.columns)) == expected
    if found:
        values = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(found.matrix(values).ravel()[:size], values)


def test_matrices_of_unknown_shape_come_back_too():
    segments = [Segment(Layer("w", 0), 0, 1003)]
    values = gradient(1)[:1003]
    assert made("powersgd:1").encode(values, segments, Occasion(0, 0)).units < 100
    for text in ("powersgd:1", "atomo:1"):
        decoded, _ = alone(made(text), values, segments=segments)
        assert len(decoded) == 1003
        assert np.corrcoef(decoded, values)[0, 1] > 0


def test_layers_get_their_shapes_by_name():
    assert LAYERS["fc.weight"].shape == (60, 30)
    assert LAYERS["fc.weight"].position == 255


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topq", "compression must be one of fp16, bf16, topk, .*did you mean topk"),
        ("topk:0", "share of values, more than 0 and at most 1, got 0"),
        ("topk:many", "takes a share of values, as in topk:0.01, got 'topk:many'"),
        ("terngrad:3", "takes no argument"),
        ("fp16:3", "fp16 means precision 16 and takes no argument, got 'fp16:3'"),
        ("qsgd:3", "2, 4 or 8 bits"),
        ("qsgd:1", "2, 4 or 8 bits"),
        ("powersgd:0", "1 or more"),
        ("atomo:0", "1 or more"),
        ("atomo:1.5", "a number of atoms, as in atomo:3"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        make_compressor(text)
