# SPDX-License-Identifier: Apache-2.0
"""Curves of steps to accuracy: what a file of them must be, and what is charged for what was not measured."""

import json

import pytest

from dlcp import convergence
from dlcp.convergence import (
    COST_OF_DEFERRAL,
    COST_OF_DEFERRAL_TO_ALL,
    COST_OF_LOSS,
    COST_OF_PRECISION,
    ConvergenceCurve,
    curve,
    curves,
    read,
    steps_factor,
    write,
)

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


@pytest.mark.parametrize("what", [COST_OF_DEFERRAL, COST_OF_DEFERRAL_TO_ALL, COST_OF_PRECISION])
def test_the_optimizer_that_takes_more_steps_decides(what):
    both = [curve(f"{what}_{by}").steps_factor(0.5) for by in convergence.MEASURED_OPTIMIZERS]
    assert steps_factor(what, 0.5) == max(both) > 1
    assert steps_factor(what, 0.0) == 1


@pytest.mark.parametrize("bits", [16, 8])
def test_bits_left_out_cost_fewer_steps_than_as_many_bytes_deferred(bits):
    share = 1 - bits / 32
    assert 1 <= steps_factor(COST_OF_PRECISION, share) < steps_factor(COST_OF_DEFERRAL, share)


def test_what_was_not_measured_or_did_not_end_well_has_no_factor(monkeypatch):
    assert steps_factor(COST_OF_DEFERRAL, 0.99) is None
    assert steps_factor("fiction", 0.1) is None
    ended = {f"deferral_{by}": ConvergenceCurve("", ((0.0, 1.0), (0.9, 1.1)), True, "", 0.4) for by in ("sgd", "adamw")}
    monkeypatch.setattr(convergence, "curves", lambda: ended)
    assert steps_factor(COST_OF_DEFERRAL, 0.4) > 1
    assert steps_factor(COST_OF_DEFERRAL, 0.41) is None


def test_papers_count_for_loss_until_something_is_measured_and_noise_saves_nothing(monkeypatch):
    published, measured = curves()["published"], ConvergenceCurve("", ((0.0, 1.0), (0.2, 0.9)), True, "")
    monkeypatch.setattr(convergence, "curves", lambda: {"published": published})
    assert steps_factor(COST_OF_LOSS, 0.1) == pytest.approx(1.02)
    monkeypatch.setattr(convergence, "curves", lambda: {"published": published, "loss_sgd": measured})
    assert steps_factor(COST_OF_LOSS, 0.1) == 1
