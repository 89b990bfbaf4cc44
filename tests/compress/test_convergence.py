# SPDX-License-Identifier: Apache-2.0
"""Training with compressed gradients over a network that loses 1 % of all packets, with and without error feedback."""

import numpy as np
import pytest

from dlcp.collectives import Residual
from dlcp.compress import Occasion, make_compressor
from dlcp.values.tags import Layer, Segment
from tests.compress.digits import train

STEPS = 50
RATES = {"signsgd": 0.01}
TRIED = ["topk:0.05", "randomk:0.5", "qsgd:4", "terngrad", "signsgd", "efsignsgd", "atomo:2", "powersgd:2"]


@pytest.fixture(scope="module")
def plain():
    """The result of training without compression and without loss."""
    return train(steps=STEPS, loss=0.0)[0]


@pytest.mark.parametrize("text", TRIED)
def test_digits_are_learned_at_one_percent_loss(plain, text):
    """Bounds are kept and replicas identical, which ``train`` checks."""
    accuracy, job = train(text, steps=STEPS, rate=RATES.get(text, 0.5), bound=0.3, seed=1)
    assert accuracy > plain - 0.03
    assert job.network.dropped["loss"] > 0


@pytest.mark.parametrize(("combine", "rate"), [("adasum", 0.5), ("sum", 0.25)])
def test_digits_are_learned_with_other_rules(plain, combine, rate):
    accuracy, job = train(combine=combine, steps=STEPS, rate=rate, bound=0.3, seed=1)
    assert accuracy > plain - 0.03
    assert job.network.dropped["loss"] > 0


def descend(compression, targets, steps, rate, error_feedback=True):
    """Minimise the mean over ranks of |x - target|^2 / 2 by compressed gradients; return x."""
    size = len(targets[0])
    segments = [Segment(Layer("x", 0), 0, size)]
    compressors = [make_compressor(compression, error_feedback=error_feedback) for _ in targets]
    owed = [Residual() for _ in targets]
    place = np.zeros(size, np.float32)
    for step in range(steps):
        parts = []
        for rank, (compressor, target, residual) in enumerate(zip(compressors, targets, owed, strict=True)):
            wanted = (place - target).astype(np.float32)
            if error_feedback:
                residual.apply(wanted, segments)
            encoded = compressor.encode(wanted, segments, Occasion(step, rank))
            parts.append(compressor.decode(encoded, encoded.content))
            if error_feedback:
                residual.add_whole(wanted - parts[-1], segments)
        combined = compressors[0].combine(iter(parts))
        place = place - np.float32(rate) * (np.mean(parts, axis=0) if combined is None else combined)
    return place


def test_top_k_converges_with_error_feedback_where_it_does_not_without():
    """Each rank's largest value is what the other one takes back; the small one, on which they agree, never goes."""
    targets = [np.array([10.0, 1.0]), np.array([-10.0, 1.0])]
    assert descend("topk:0.5", targets, 300, 0.1, error_feedback=False)[1] == 0
    place = descend("topk:0.5", targets, 600, 0.02)
    assert place[1] == pytest.approx(1, abs=0.2)
    assert abs(place[0]) < 1


def test_scaled_signs_converge_with_error_feedback_where_a_vote_does_not():
    """Three ranks: two want a little of one thing, the third much of the other; the vote is two to one."""
    targets = [np.array([1.0, 1.0]), np.array([1.0, -1.0]), np.array([-5.0, 3.0])]
    assert descend("signsgd", targets, 150, 0.03)[0] > 0.9, "where most want it"
    np.testing.assert_allclose(descend("efsignsgd", targets, 600, 0.02), np.mean(targets, axis=0), atol=0.2)


def test_random_k_converges_either_way_if_the_steps_are_small_enough():
    rng = np.random.default_rng(0)
    targets = list(rng.standard_normal((2, 50)))
    for error_feedback in (True, False):
        place = descend("randomk:0.1", targets, 500, 0.02, error_feedback=error_feedback)
        np.testing.assert_allclose(place, np.mean(targets, axis=0), atol=0.2)


@pytest.mark.parametrize("compression", ["qsgd:2", "terngrad"])
def test_unbiased_ones_converge_without_error_feedback(compression):
    rng = np.random.default_rng(0)
    targets = list(rng.standard_normal((2, 50)))
    place = np.mean([descend(compression, targets, 300 + n, 0.02, error_feedback=False) for n in range(3)], axis=0)
    np.testing.assert_allclose(place, np.mean(targets, axis=0), atol=0.5)
