# SPDX-License-Identifier: Apache-2.0
"""Adasum, and the sum, against their definitions; over the network, exactly and with loss."""

import numpy as np
import pytest

from dlcp.collectives.reduction_rules import adasum_of, coefficients, scalar_products
from dlcp.collectives.stages import check_stages
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment
from tests.compress.compressed_ranks import SEGMENTS, SIZE, CompressedRanks, assert_identical

ONE_LAYER = [Segment(Layer("w", 0), 0, 600)]


def by_definition(gradients):
    """Formulas 1 and 2 of Maleki et al.: two by two, halves recursively; excess ranks join the first ones."""

    def two(one, other):
        between = one @ other
        return (1 - between / (2 * one @ one)) * one + (1 - between / (2 * other @ other)) * other

    even = 1 << len(gradients).bit_length() - 1
    parts = [np.asarray(values, np.float64) for values in gradients]
    parts = [two(parts[n], parts[n + even]) if n + even < len(parts) else parts[n] for n in range(even)]
    while len(parts) > 1:
        parts = [two(*parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return parts[0]


def by_layer(gradients):
    return np.concatenate([by_definition([values[s.start : s.stop] for values in gradients]) for s in SEGMENTS])


def combined(gradients):
    return adasum_of([lambda values=values: values for values in gradients], ONE_LAYER)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_it_is_the_recursion_of_its_definition(count):
    rng = np.random.default_rng(count)
    gradients = list(rng.standard_normal((count, 600)) + rng.standard_normal(600))
    np.testing.assert_allclose(combined(gradients), by_definition(gradients), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_orthogonal_gradients_add(count):
    gradients = [np.zeros(600) for _ in range(count)]
    for rank, values in enumerate(gradients):
        values[rank * 70 : rank * 70 + 70] = rank + 1.0
    np.testing.assert_allclose(combined(gradients), sum(gradients))


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_parallel_gradients_average(count):
    values = np.random.default_rng(0).standard_normal(600)
    np.testing.assert_allclose(combined([values] * count), values)
    np.testing.assert_allclose(combined([values, 3 * values]), 2 * values)


def test_a_gradient_of_zero_leaves_the_other_as_it_is():
    values = np.random.default_rng(0).standard_normal(600)
    np.testing.assert_array_equal(combined([values, np.zeros(600)]), values)
    np.testing.assert_array_equal(combined([np.zeros(600)] * 4), np.zeros(600))


def test_nan_spreads_over_its_layer():
    gradients = [np.ones(600), np.ones(600)]
    gradients[1][3] = np.nan
    assert np.isnan(combined(gradients)).all()


def test_coefficients_follow_from_scalar_products():
    np.testing.assert_allclose(coefficients(np.array([[4.0, 0.0], [0.0, 1.0]])), [1, 1])
    np.testing.assert_allclose(coefficients(np.array([[1.0, 1.0], [1.0, 1.0]])), [0.5, 0.5])
    parts = list(np.random.default_rng(0).standard_normal((3, 50)))
    np.testing.assert_allclose(
        scalar_products(parts, [0, 20, 50])[1], np.array(parts)[:, 20:] @ np.array(parts)[:, 20:].T
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_over_the_network_it_is_adasum_of_each_layer(count):
    ranks = CompressedRanks(count, combine="adasum", depth=10_000)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    np.testing.assert_allclose(results[0], by_layer(gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
def test_of_every_format(value_type):
    ranks = CompressedRanks(2, combine="adasum", value_type=value_type)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    expected = by_layer([value_type.widen(values) for values in gradients])
    tolerance = {ValueType.BFLOAT16: 0.01, ValueType.FLOAT16: 1e-3}.get(value_type, 1e-5)
    np.testing.assert_allclose(value_type.widen(results[0]), expected, rtol=tolerance, atol=tolerance)


def test_with_loss_it_is_adasum_of_what_arrived_and_the_rest_comes_later():
    """What rank r owes after the step is what it gave less what its share in Adasum was made of."""
    ranks = CompressedRanks(3, combine="adasum", bound=0.3, loss=0.2, seed=5)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    ranks.check_bounds(0.3)
    assert ranks.lost > 0
    arrived = [values.astype(np.float64) for values in gradients]
    for values, residual in zip(arrived, ranks.residuals, strict=True):
        for segment in SEGMENTS:
            owed = residual.of(segment.layer.name)
            if owed is not None:
                values[segment.start : segment.stop] -= owed
    np.testing.assert_allclose(results[0], by_layer(arrived), rtol=1e-4, atol=1e-5)


def test_one_percent_loss_for_many_steps():
    ranks = CompressedRanks(4, combine="adasum", loss=0.01, seed=1)
    for step in range(5):
        assert_identical(ranks.reduce(step, ranks.gradients(step)))
    ranks.check_bounds(0.1)


def test_it_costs_the_packets_of_an_all_reduce_and_a_few_scalar_products():
    packets = []
    for combine in ("average", "adasum"):
        ranks = CompressedRanks(4, combine=combine, depth=10_000)
        ranks.reduce(0, ranks.gradients(1))
        ranks.settle()
        packets.append(ranks.packets)
    products = 4 * 3 * -(-3 * 16 * 8 // 128)
    assert packets[1] <= packets[0] + products


@pytest.mark.parametrize("text", ["randomk:0.3", "topk:0.3", "qsgd:8"])
def test_it_combines_what_was_compressed(text):
    ranks = CompressedRanks(2, text, "adasum", error_feedback=False)
    gradients = ranks.gradients(1)
    results = ranks.reduce(0, gradients)
    assert_identical(results)
    alone = [CompressedRanks(1, text, error_feedback=False) for _ in gradients]
    if text != "qsgd:8":  # of which the draws are each rank's own
        decoded = [one.reduce(0, [values])[0] for one, values in zip(alone, gradients, strict=True)]
        np.testing.assert_allclose(results[0], by_layer(decoded), rtol=0.02, atol=0.02)
    else:
        assert np.corrcoef(results[0], by_layer(gradients))[0, 1] > 0.99


@pytest.mark.parametrize("text", ["", "topk:0.1", "powersgd:1", "qsgd:4"])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_the_sum_is_n_times_the_average(text, loss):
    results = {}
    for combine in ("average", "sum"):
        ranks = CompressedRanks(4, text, combine, loss=loss, bound=0.3, seed=3)
        gradients = ranks.gradients(1)
        found = ranks.reduce(0, gradients)
        assert_identical(found)
        results[combine] = found[0].astype(np.float64)
        ranks.check_bounds(0.3)
        if loss == 0 and not text:
            np.testing.assert_allclose(results[combine], np.sum(gradients, axis=0) / (4 if combine == "average" else 1),
                                       rtol=1e-4, atol=1e-5)  # fmt: skip
    if loss == 0:
        np.testing.assert_allclose(results["sum"], 4 * results["average"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("text", "scale"), [("topk:0.1", 1), ("randomk:0.1", 2)])
def test_sums_lose_nothing_for_good_either(text, scale):
    """What is averaged is n times the gradient, and so is what is owed of it."""
    ranks = CompressedRanks(2, text, "sum", bound=0.3, loss=0.1, seed=3)
    given, taken = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(4):
        gradients = ranks.gradients(step)
        given += np.sum(gradients, axis=0)
        taken += ranks.reduce(step, gradients)[0]
    np.testing.assert_allclose(taken + ranks.owed() / scale, given, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"combine": "median"}, "average, sum, adasum, got 'median'"),
        ({"combine": "adasum", "fallback": True}, "set fallback=False"),
        ({"combine": "sum", "fallback": True}, "set fallback=False"),
        ({"combine": "adasum", "collective": "server"}, "a parameter server can only average"),
        ({"combine": "adasum", "compression": "powersgd:2"}, "averages factors"),
        ({"combine": "adasum", "compression": "signsgd"}, "set combine='average'"),
        ({"compression": "signsgd", "fallback": True}, "set fallback=False"),
        ({"compression": "topk", "collective": "server"}, "set collective to auto, direct or ring"),
    ],
)
def test_what_does_not_go_together_is_refused(named, words):
    with pytest.raises(ValueError, match=words):
        check_stages(named.pop("compression", ""), named.pop("combine", "average"), **named)
