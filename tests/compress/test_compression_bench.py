# SPDX-License-Identifier: Apache-2.0
"""The benchmark of compressors reports sizes that follow from their definitions."""

import pytest

from tests.bench import compression
from tests.bench.harness import Turns


def test_sizes_are_those_of_the_definitions(monkeypatch):
    sizes = {"topk:0.01": 50, "randomk:0.01": 100, "signsgd": 32, "powersgd:2": 128}
    monkeypatch.setattr(compression, "TRIED", tuple(sizes))
    found = compression.measure(Turns(1, 0))
    assert [result.name for result in found] == [f"compression.{name}" for name in sizes]
    for result, factor in zip(found, sizes.values(), strict=True):
        assert result.ratio == pytest.approx(factor, rel=0.01)
        assert result.details["encode_and_decode_ms"] > 0
    assert 0 < found[0].details["squared_error"] < found[1].details["squared_error"] < 1
