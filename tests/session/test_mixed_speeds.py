# SPDX-License-Identifier: Apache-2.0
"""Ranks of unequal speed with batches in proportion: half the work for the slowest one, and the same model."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from tests.torch.workers import launch, values

pytestmark = pytest.mark.timeout(120)
EPOCHS = 2


def training(worker, divisions):
    """Train with each division of the batches; return what came of it, and how many images this rank has worked on."""
    import dlcp.torch
    from dlcp.examples import mixed_speeds
    from dlcp.examples.image_classifier import Net

    torch.set_num_threads(1)
    worked = 0
    forward = Net.forward

    def counted(self, images):
        nonlocal worked
        worked += len(images)
        return forward(self, images)

    found = []
    for sizes in divisions:
        worked = 0
        Net.forward = counted
        outcome = mixed_speeds.train(mixed_speeds.TrainingSetup(epochs=EPOCHS), sizes, worker.options())
        Net.forward = forward
        found.append((outcome, worked))
    speed = dlcp.torch.samples_per_s(lambda: None, 8)
    return found, dlcp.torch.balanced_batches(96, 3.0 if worker.rank == 0 else 1.0), speed > 0


def test_batches_in_proportion_halve_the_slowest_ranks_work_at_the_same_accuracy():
    ranks = values(launch(2, training, [[48, 48], [72, 24]], limit_s=110))
    (fast_equal, fast_work), (fast, fast_balanced_work) = ranks[0][0]
    (slow_equal, slow_work), (slow, slow_balanced_work) = ranks[1][0]
    tested = 360  # images after training
    assert slow_work - tested == pytest.approx(3 * (fast_work - tested), rel=0.01)
    assert max(fast_balanced_work, slow_balanced_work) - tested == pytest.approx((slow_work - tested) / 2, rel=0.02)
    assert fast_equal.digest == slow_equal.digest
    assert fast.digest == slow.digest
    assert (fast.steps, fast.lost) == (fast_equal.steps, 0)
    assert fast_equal.accuracy > 0.5
    assert fast.accuracy == pytest.approx(fast_equal.accuracy, abs=0.005)
    for _, sizes, speed_known in ranks:
        assert sizes == [72, 24]
        assert speed_known
