# SPDX-License-Identifier: Apache-2.0
import pickle

import numpy as np

from dlcp.collectives import Residual
from dlcp.values.tags import Layer, Segment

ONE, OTHER = Layer("one", 0), Layer("other", 255)


def test_what_was_lost_follows_the_parameter_wherever_it_lies():
    residual = Residual()
    residual.add(np.array([1.0, 2, 0, 0, 5]), [Segment(ONE, 0, 3), Segment(OTHER, 3, 5)])
    values = np.full(5, 10.0)
    residual.apply(values, [Segment(OTHER, 0, 2), Segment(ONE, 2, 5)])
    assert values.tolist() == [10, 15, 11, 12, 10]


def test_what_was_lost_of_a_shard_finds_its_place_in_other_shards():
    """Of six values among three ranks, with one that fills up a packet in each shard, and then among two."""
    residual = Residual()
    of_three = [Segment(ONE, 3 * rank, 3 * rank + 3, 2 * rank) for rank in range(3)]
    residual.add_at(np.array([1, 2, 3, 7]), np.array([1.0, 0, 2, 3]), of_three)
    assert residual.of("one")[:6].tolist() == [0, 1, 2, 0, 0, 3]
    loaded = pickle.loads(pickle.dumps(residual))
    values = np.full(9, 10.0)
    residual.apply(values, of_three)
    assert values.tolist() == [10, 11, 10, 12, 10, 10, 10, 13, 10]
    values = np.full(8, 10.0)
    loaded.apply(values, [Segment(ONE, 0, 4), Segment(ONE, 4, 8, 3)])
    assert values.tolist() == [10, 11, 12, 10, 10, 10, 13, 10]
    assert loaded.size == 0


def test_whole_residuals_of_shards_find_their_place():
    residual = Residual()
    shards = [Segment(ONE, 0, 2), Segment(OTHER, 2, 3), Segment(ONE, 3, 5, 2)]
    residual.add_whole(np.arange(5.0), shards)
    assert residual.of("one").tolist() == [0, 1, 3, 4]
    values = np.zeros(5)
    residual.apply(values, shards)
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_nothing_is_kept_of_what_belongs_to_no_layer():
    residual = Residual()
    segments = [Segment(ONE, 0, 2), Segment(Layer("one", 0, (2,)), 2, 5, 2), Segment(Layer("one", 0, (0,)), 5, 6)]
    residual.add_whole(np.arange(1.0, 7), segments)
    residual.add_at(np.arange(6), np.arange(1.0, 7), segments)
    assert residual.of("one").tolist() == [2, 4]
    values = np.zeros(6)
    residual.apply(values, segments)
    assert values.tolist() == [2, 4, 0, 0, 0, 0]


def test_a_residual_is_applied_once():
    residual = Residual()
    residual.add(np.array([1.0, 2]), [Segment(ONE, 0, 2)])
    for expected in ([1, 2], [0, 0]):
        values = np.zeros(2)
        residual.apply(values, [Segment(ONE, 0, 2)])
        assert values.tolist() == expected
    assert residual.of("one") is None


def test_nothing_is_kept_of_what_arrived():
    residual = Residual()
    values = np.array([0.0, 0, 3])
    residual.add(values, [Segment(ONE, 0, 2), Segment(OTHER, 2, 3)])
    values[:] = 99
    assert residual.of("one") is None
    assert residual.of("other").tolist() == [3], "a residual must not change with the buffer"


def test_a_residual_travels_with_a_checkpoint():
    residual = Residual()
    residual.add(np.array([1.5, 2], np.float32), [Segment(ONE, 0, 2)])
    loaded = pickle.loads(pickle.dumps(residual))
    assert loaded.of("one").tolist() == [1.5, 2]
    assert loaded.of("one").dtype == np.float32
