# SPDX-License-Identifier: Apache-2.0
import pickle

import numpy as np

from dlcp.collectives import Residual
from dlcp.tags import Layer, Segment

ONE, OTHER = Layer("one", 0), Layer("other", 255)


def test_what_was_lost_follows_the_parameter_wherever_it_lies():
    residual = Residual()
    residual.add(np.array([1.0, 2, 0, 0, 5]), [Segment(ONE, 0, 3), Segment(OTHER, 3, 5)])
    values = np.full(5, 10.0)
    residual.apply(values, [Segment(OTHER, 0, 2), Segment(ONE, 2, 5)])
    assert values.tolist() == [10, 15, 11, 12, 10]


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
