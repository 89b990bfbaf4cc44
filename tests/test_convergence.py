# SPDX-License-Identifier: Apache-2.0
"""Curves of steps to accuracy: requirements on their files."""

import json

import pytest

from dlcp.convergence import ConvergenceCurve, curve, read, write

ONE = {"name": "one", "measured": True, "source": "here", "points": [[0.0, 1.0], [0.5, 1.2]], "reached": 0.5}


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[0.1, 1.0]], r"a curve must begin with \[0, 1\]"),
        ([[0.0, 1.0], [0.5, 1.1], [0.5, 1.2]], "point 2: shares must ascend"),
        ([[0.0, 1.0], [0.5, -1.1]], "factors must be above 0"),
        ([[0.0, 1.0], [1.5, 1.1]], "below 1"),
        (7, "not iterable"),
    ],
)
def test_curves_that_are_none_are_refused(tmp_path, points, message):
    path = tmp_path / "curves.json"
    write(path, [ONE, ONE | {"name": "two", "points": points}])
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, curve 1: ")


def test_what_is_no_field_of_a_curve_and_two_curves_of_a_name_are_refused(tmp_path):
    path = tmp_path / "curves.json"
    write(path, [ONE, ONE])
    with pytest.raises(ValueError, match="curve 1: duplicate name 'one'"):
        read(path)
    write(path, [{**ONE, "reach": 1.0}])
    with pytest.raises(ValueError, match=r"curve 0: .*'reach'"):
        read(path)


def test_curves_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "curves.json"
    write(path, [ONE, ONE | {"name": "two"}])
    assert read(path)["one"] == ConvergenceCurve(**ONE | {"points": ((0.0, 1.0), (0.5, 1.2))})
    assert len(path.read_text().splitlines()) == 4, "a curve in a line"
    assert set(json.loads(path.read_text())) == {"curves"}


def test_a_curve_that_is_not_there_is_suggested_by_its_like():
    assert curve("published").steps_factor(0.15) == pytest.approx(1.06)
    with pytest.raises(ValueError, match="unknown convergence curve 'publisched'; did you mean published"):
        curve("publisched")
