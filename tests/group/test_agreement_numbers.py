# SPDX-License-Identifier: Apache-2.0
"""Which agreement of a store a rank opens: the same as its peers, also after some failed on one side."""

import pytest

from dlcp.session import joining
from dlcp.session.joining import Agreement, NotJoinedError, next_number
from tests.group.test_secret import SECRET, OpenStore


class Processes:
    """Opens agreements as processes that are a rank in turn."""

    def __init__(self, monkeypatch):
        self.store, self._monkeypatch = OpenStore(), monkeypatch

    def opens(self, rank, process):
        self._monkeypatch.setattr(joining, "_PROCESS", process)
        return next_number(self.store, rank)


@pytest.fixture
def processes(monkeypatch):
    return Processes(monkeypatch)


def test_each_call_opens_the_next(processes):
    assert [processes.opens(rank, f"p{rank}") for rank in (0, 1, 1, 0, 0, 1)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("deaths", [1, 3])
def test_what_only_ended_processes_opened_is_skipped(processes, deaths):
    for death in range(deaths):
        processes.opens(1, f"ended-{death}")
    assert processes.opens(1, "new") == processes.opens(0, "p0") == deaths
    assert processes.opens(0, "p0") == processes.opens(1, "new") == deaths + 1


def test_a_survivor_that_waits_first_meets_the_new_process(processes):
    assert processes.opens(0, "survivor") == processes.opens(1, "old") == 0
    assert processes.opens(0, "survivor") == processes.opens(1, "new") == 1
    assert processes.opens(0, "survivor") == processes.opens(1, "newer") == 2


def test_a_survivor_whose_peer_was_replaced_while_it_waited_meets_it_next(processes):
    assert processes.opens(1, "old") == processes.opens(0, "survivor") == 0
    assert processes.opens(1, "new") == 1
    assert processes.opens(0, "survivor") == 1


def test_a_late_rank_takes_part_in_failures_that_a_living_one_has_left(processes):
    """Else its first model would meet the other rank's second."""
    assert [processes.opens(0, "early") for _ in range(2)] == [0, 1]
    assert [processes.opens(1, "late") for _ in range(3)] == [0, 1, 2]


def test_a_rank_that_others_gave_up_on_learns_it_at_once_also_with_a_secret():
    store = OpenStore()
    with pytest.raises(NotJoinedError, match="rank 1 has not joined"):
        Agreement(store, 0, 2, 0.05, SECRET).meet("enable")
    late = Agreement(store, 1, 2, 60.0, SECRET)
    with pytest.raises(NotJoinedError, match="rank 0 has given up waiting for rank 1"):
        late.meet("enable")
    assert late.left_s > 30
