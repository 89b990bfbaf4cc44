# SPDX-License-Identifier: Apache-2.0
import pickle

import numpy as np

from dlcp.collectives import ErrorFeedback
from dlcp.tags import Layer, Segment

ONE, OTHER = Layer("one", 0), Layer("other", 255)


def test_what_is_owed_follows_the_parameter_wherever_it_lies():
    feedback = ErrorFeedback()
    feedback.owe(np.array([1.0, 2, 0, 0, 5]), [Segment(ONE, 0, 3), Segment(OTHER, 3, 5)])
    values = np.full(5, 10.0)
    feedback.add_to(values, [Segment(OTHER, 0, 2), Segment(ONE, 2, 5)])
    assert values.tolist() == [10, 15, 11, 12, 10]


def test_a_debt_is_paid_once():
    feedback = ErrorFeedback()
    feedback.owe(np.array([1.0, 2]), [Segment(ONE, 0, 2)])
    for expected in ([1, 2], [0, 0]):
        values = np.zeros(2)
        feedback.add_to(values, [Segment(ONE, 0, 2)])
        assert values.tolist() == expected
    assert feedback.owed("one") is None


def test_nothing_is_kept_of_what_arrived():
    feedback = ErrorFeedback()
    values = np.array([0.0, 0, 3])
    feedback.owe(values, [Segment(ONE, 0, 2), Segment(OTHER, 2, 3)])
    values[:] = 99
    assert feedback.owed("one") is None
    assert feedback.owed("other").tolist() == [3], "what is owed must not change with the buffer"


def test_debts_travel_with_a_checkpoint():
    feedback = ErrorFeedback()
    feedback.owe(np.array([1.5, 2], np.float32), [Segment(ONE, 0, 2)])
    loaded = pickle.loads(pickle.dumps(feedback))
    assert loaded.owed("one").tolist() == [1.5, 2]
    assert loaded.owed("one").dtype == np.float32
