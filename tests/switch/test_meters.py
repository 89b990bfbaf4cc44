# SPDX-License-Identifier: Apache-2.0
"""Meters: BMv2's arithmetic, worked out by hand."""

import numpy as np
import pytest

from dlcp.switch import MeterConfig
from dlcp.switch.executor.cells import TOKEN_CELLS, MeterCells, run_meter


@pytest.fixture(params=["lists", "arrays"])
def meter(request):
    if request.param == "lists":
        rates, tokens = [[0.0, 0.0] for _ in range(3)], [[0] * TOKEN_CELLS for _ in range(3)]
    else:
        rates, tokens = np.zeros((3, 2)), np.zeros((3, TOKEN_CELLS), np.int64)
    cells = MeterCells("m", 1, 2, rates, tokens)
    return cells, lambda index, amount, now: run_meter(rates, tokens, 1 + index, amount, now)


def test_an_unconfigured_meter_is_green(meter):
    _, run = meter
    assert [run(0, 10**6, now) for now in (0, 1, 2)] == [0, 0, 0]


def test_colours_by_hand(meter):
    """Committed 1 byte/us and 1000 bytes, peak 2 bytes/us and 1500 bytes; packets of 600 bytes."""
    cells, run = meter
    cells[0] = MeterConfig(cir=1_000_000, cburst=1000, pir=2_000_000, pburst=1500)
    colours = [
        run(0, 600, 10_000),  # full: peak 1500 -> 900, committed 1000 -> 400
        run(0, 600, 10_000),  # peak 300, committed 400 < 600: yellow
        run(0, 600, 10_000),  # peak 300 < 600: red, takes nothing
        run(0, 600, 10_150),  # peak 300 + 300 = 600 -> 0; committed 400 + 150 = 550 < 600: yellow
        run(0, 600, 10_300),  # peak 300: red; committed is not even looked at
        run(0, 600, 10_450),  # peak 600 -> 0; committed 550 + 300 = 850 -> 250: green
        run(0, 250, 10_575),  # peak 250 -> 0; committed 375 -> 125: green
        run(0, 1501, 10**9),  # full again, but it never fits the peak burst
        run(0, 1001, 10**9),  # fits the peak burst only: 1500 -> 499
        run(0, 499, 10**9),  # peak 0, committed 501
        run(0, 1, 10**9),
    ]
    assert colours == [0, 1, 2, 1, 2, 0, 0, 2, 1, 0, 2]


def test_what_is_gained_is_reckoned_from_the_origin(meter):
    """A third of a byte a microsecond, asked every microsecond: nothing is lost by rounding down each time."""
    cells, run = meter
    cells[0] = MeterConfig(cir=333_333, cburst=10, pir=333_333, pburst=10)
    assert run(0, 10, 0) == 0
    colours = [run(0, 1, now) for now in range(1, 31)]
    assert colours.count(0) == int(30 * 0.333333) == 9
    assert colours[:7] == [2, 2, 2, 0, 2, 2, 0]  # 0.333333 * 3 is just below 1


def test_cells_do_not_touch_each_other(meter):
    cells, run = meter
    cells[0] = MeterConfig(0, 1, 0, 1)
    cells[1] = MeterConfig(0, 2, 0, 2)
    assert [run(0, 1, 1), run(0, 1, 1), run(1, 1, 1), run(1, 1, 1), run(1, 1, 1)] == [0, 2, 0, 0, 2]
    cells.refill()
    assert [run(0, 1, 1), run(1, 2, 1)] == [0, 0]
    assert cells[1] == MeterConfig(0, 2, 0, 2)
    cells.reset()
    assert cells[1] is None
    assert run(1, 10, 1) == 0
