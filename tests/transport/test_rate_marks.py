# SPDX-License-Identifier: Apache-2.0
"""Rate control by marks and losses alone, for paths whose delay is other people's."""

import pytest

from dlcp.transport.congestion import Report
from dlcp.transport.settings import CONGESTION, TransportOptions


def after(congestion, *, marked_share=0.0, rounds=100):
    """Return the window after rounds over a path that is 50 ms longer than at first, by no queue of this flow."""
    control = TransportOptions(congestion=congestion).rate_control(1)
    now_s = 0.0
    for number in range(rounds):
        rtt_s = 0.001 if number < 10 else 0.051
        packets = max(4, round(control.window))
        marked = round(marked_share * packets) if number >= 10 else number == 9
        control.on_report(Report(now_s, packets, marked, 0, rtt_s, rtt_s, True))
        now_s += rtt_s
    return control.window


def test_delay_that_others_make_does_not_hold_it_back():
    assert after("ecn") > 4 * after("dctcp")


def test_marks_do():
    assert after("ecn", marked_share=0.5) < after("ecn") / 4


def test_what_was_on_the_way_when_the_window_shrank_does_not_shrink_it_again():
    control = TransportOptions(congestion="ecn").rate_control(1)
    windows = []
    for number, marked_share in enumerate((0, 0, 0, 1, 1, 0, 0, 1)):
        on_the_way = round(windows[-2] if number == 4 else control.window)  # those sent before the cut come after it
        control.on_report(Report(0.05 * number, on_the_way, round(marked_share * on_the_way), 0, 0.05, 0.05, False))
        windows.append(control.window)
    assert windows[3] < windows[2]
    assert windows[4] == windows[3]
    assert windows[7] < windows[6]


def test_another_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="dctcp, ecn, cubic"):
        TransportOptions(congestion="reno")
    assert "ecn" in CONGESTION
