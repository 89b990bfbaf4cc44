# SPDX-License-Identifier: Apache-2.0
"""How much of the machine's time was idle."""

import pytest

from dlcp.controller.testbed.accounts import ProcessorTime


def stat(tmp_path, *ticks):
    path = tmp_path / "stat"
    path.write_text("cpu  " + " ".join(map(str, ticks)) + "\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    return ProcessorTime.now(path)


def test_idle_is_what_nobody_used_and_what_waited_for_a_disk(tmp_path):
    before = stat(tmp_path, 100, 0, 50, 1000, 10, 0, 0, 0, 7, 0)
    after = stat(tmp_path, 160, 0, 80, 1005, 15, 0, 0, 0, 9, 0)
    assert after.idle_share_since(before) == pytest.approx(0.1), "a guest's time is part of the user's"
    assert before.idle_share_since(before) == 1.0


def test_the_machine_tells_it():
    now = ProcessorTime.now()
    assert 0 <= now.idle <= now.total
