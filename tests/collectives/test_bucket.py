# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from dlcp.collectives import Bucket
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [(0, 4, "conv"), (3, 4, "conv"), (3, 5, "conv..fc"), (4, 9, "fc"), (8, 10, "fc..head"), (0, 10, "conv..head")],
)
def test_a_part_is_named_by_its_first_and_last_layer(start, stop, words):
    sizes = {"conv": 4, "empty": 0, "fc": 5, "head": 1}
    ends = np.cumsum(list(sizes.values())).tolist()
    segments = [Segment(Layer(name, 0), end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)]
    assert Bucket(np.zeros(10, np.float32), ValueType.FLOAT32, segments).label(start, stop) == words
