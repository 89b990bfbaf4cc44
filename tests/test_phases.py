# SPDX-License-Identifier: Apache-2.0
"""Critical regimes, layers with bounds of their own, and batches in proportion to speed."""

import numpy as np
import pytest

from dlcp.collectives.bucket import LayerBounds
from dlcp.phases import PHASE_STEPS, Phases
from dlcp.tags import Layer, PacketTags, Segment
from dlcp.torch.balance import BalancedBatches, divide_batch
from dlcp.transport import LossBound


def regimes(norms, window=4):
    phases = Phases(window)
    found = []
    for norm in norms:
        phases.add(norm)
        found.append(phases.critical)
    return found


def test_training_begins_in_a_critical_regime_that_ends_when_the_norm_is_steady():
    found = regimes([8.0] * 4 + [3.9] * 4 + [3.0] * 4 + [2.9] * 4)
    assert found[:11] == [True] * 11, "the first window, and one that has changed by half"
    assert found[11:] == [False] * 5


@pytest.mark.parametrize("jump", [4.5, 1.5])
def test_a_norm_that_jumps_by_half_is_critical(jump):
    found = regimes([3.0] * 12 + [jump] * 4 + [jump] * 4)
    assert found[7:15] == [False] * 8
    assert found[15] is True
    assert found[-1] is False


def test_one_odd_step_is_no_regime_and_no_number_is_none():
    steady = [3.0] * 2 * PHASE_STEPS
    phases = Phases()
    for norm in [*steady, 4.5, *[float("nan"), float("inf"), 0.0], *steady]:
        phases.add(norm)
    assert not phases.critical
    assert phases.changes == 1
    with pytest.raises(ValueError, match="at least 1 step"):
        Phases(0)


PER_PACKET = 10
SEGMENTS = [
    Segment(Layer("embed.weight", 0), 0, 400),
    Segment(Layer("body.weight", 100), 400, 1405),
    Segment(Layer("body.norm.weight", 100), 1405, 1450),
    Segment(Layer("head.weight", 255), 1450, 2000),
]
BOUNDS = LayerBounds.parse("embed*=0, *.norm.*=0, head.*=0.3")
BASE = LossBound(0.1)


def tags(seed=0):
    rng = np.random.default_rng(seed)
    drop_class = rng.integers(0, 8, 200).astype(np.uint8)
    nothing = np.zeros(200, np.uint8)
    return PacketTags(nothing, drop_class, nothing, drop_class == 0)


def test_of_each_layer_no_more_is_droppable_than_it_may_lose():
    for turn in range(3):
        found, before = tags(turn), tags(turn)
        BOUNDS.protect(found, SEGMENTS, PER_PACKET, BASE, seed=turn)
        droppable = ~found.protected
        assert not droppable[:40].any()
        assert not droppable[140:145].any()
        assert 0 < droppable[145:].sum() <= 0.3 * 55
        assert 0 < droppable[40:140].sum() <= 0.1 * 100
        assert (found.drop_class[found.protected] == 0).all()
        kept = before.drop_class[40:140][droppable[40:140]]
        assert kept.min() >= np.sort(before.drop_class[40:140])[-len(kept)], "the least valuable ones stay droppable"


def test_a_message_may_lose_what_its_layers_may():
    whole = BOUNDS.bound_of(SEGMENTS, 0, 2000, PER_PACKET, BASE)
    assert whole.ratio == pytest.approx((40 * 0 + 100 * 0.1 + 5 * 0 + 55 * 0.3) / 200)
    assert BOUNDS.bound_of(SEGMENTS, 0, 400, PER_PACKET, BASE).ratio == 0
    assert BOUNDS.bound_of(SEGMENTS, 1450, 2000, PER_PACKET, BASE).ratio == pytest.approx(0.3)
    assert BOUNDS.bound_of(SEGMENTS, 0, 2000, PER_PACKET, LossBound(0.1, immediate=True)).immediate
    assert LayerBounds().bound_of(SEGMENTS, 0, 2000, PER_PACKET, BASE) == BASE


def test_over_hops_that_each_lose_some_a_layer_loses_no_more():
    found = tags()
    BOUNDS.protect(found, SEGMENTS, PER_PACKET, BASE, hops=3)
    assert 3 * (~found.protected[145:]).sum() <= 0.3 * 55


def test_the_first_rule_that_fits_counts():
    bounds = LayerBounds.parse("head.bias=0.05, head.*=0.2")
    assert [bounds.of(name) for name in ("head.bias", "head.weight", "body")] == [0.05, 0.2, None]
    assert not LayerBounds.parse(" ")
    for wrong in ("embed", "embed=x", "=0.1", "embed=1.0"):
        with pytest.raises(ValueError, match="layer's bound"):
            LayerBounds.parse(wrong)


@pytest.mark.parametrize(
    ("samples", "speeds", "sizes"),
    [
        (96, [3, 1], [72, 24]),
        (64, [3.0, 1.0, 3.0, 3.0], [19, 7, 19, 19]),
        (10, [1, 1, 1], [4, 3, 3]),
        (5, [1000, 1, 1], [3, 1, 1]),
        (3, [5, 1, 9], [1, 1, 1]),
        (7, [2], [7]),
    ],
)
def test_batches_are_in_proportion_to_speed(samples, speeds, sizes):
    assert divide_batch(samples, speeds) == sizes


def test_speeds_that_cannot_be_are_refused():
    for wrong in ([1, 0], [1, float("nan")], []):
        with pytest.raises(ValueError, match="speeds must be above 0"):
            divide_batch(8, wrong)
    with pytest.raises(ValueError, match="no sample for each"):
        divide_batch(2, [1, 1, 1])


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_each_global_batch_and_see_all_samples_once(drop_last):
    ranks = [BalancedBatches(103, [7, 2, 1], rank, seed=3, drop_last=drop_last) for rank in range(3)]
    epochs = []
    for epoch in range(2):
        for each in ranks:
            each.set_epoch(epoch)
        batches = [list(each) for each in ranks]
        assert {len(mine) for mine in batches} == {len(ranks[0])} == {10 if drop_last else 11}
        for step in range(10):
            assert [len(mine[step]) for mine in batches] == [7, 2, 1]
        seen = [index for mine in batches for batch in mine for index in batch]
        assert len(seen) == len(set(seen)) == (100 if drop_last else 103)
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    with pytest.raises(ValueError, match="needs a batch size"):
        BalancedBatches(10, [4, 4], 2)
