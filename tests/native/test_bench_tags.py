# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tagging measures what it claims, on a small buffer; tests do not judge speed."""

import os

from tests.bench import tags
from tests.bench.harness import Turns


def test_each_way_is_measured_beside_a_copy_and_the_cores_are_given_back():
    cores = os.sched_getaffinity(0)
    told = []
    results = tags.measure(Turns(3, 1, progress=told.append), values=100_003)
    assert [entry.name for entry in results] == ["tags.100MB", "tags.100MB.by_layer"]
    for entry in results:
        assert entry.unit == "ms"
        assert entry.runs == 3
        assert entry.value > 0
        assert entry.peer > 0
        assert entry.details["packets"] == 278
    assert len(told) == 4
    assert os.sched_getaffinity(0) == cores
