# SPDX-License-Identifier: Apache-2.0
"""How long a rank may be silent before the store takes it for dead."""

import pytest

from dlcp.session.store import BEAT_S, LEASE_S_MIN, Leases


def beaten(*longest, beats=100):
    """Return leases of one rank for each given interval, which is its longest; the last beat was at time 0."""
    leases = Leases()
    for rank, interval_s in enumerate(longest):
        now_s = -interval_s - BEAT_S * beats
        for _ in range(beats):
            leases.renew(bytes([rank]), now_s)
            now_s += BEAT_S
        leases.renew(bytes([rank]), now_s)
        leases.renew(bytes([rank]), 0.0)
    return leases


def test_a_rank_that_beats_regularly_is_missed_in_well_under_a_second():
    leases = beaten(BEAT_S, BEAT_S)
    leases.renew(b"\x01", BEAT_S)
    assert leases.expired(10, LEASE_S_MIN) == {}
    assert leases.expired(10, LEASE_S_MIN + 0.01) == {b"\x00": pytest.approx(LEASE_S_MIN + 0.01)}


def test_what_one_rank_survived_is_allowed_to_all():
    leases = beaten(BEAT_S, 0.7)
    assert leases.expired(10, 2.0) == {}
    assert len(leases.expired(10, 2.2)) == 2


def test_a_limit_is_not_learned_from_few_intervals_and_is_never_longer_than_the_option():
    leases = beaten(BEAT_S, beats=3)
    assert leases.expired(10, 9.9) == {}
    assert len(leases.expired(10, 10.1)) == 1
    assert len(beaten(5.0).expired(4, 4.1)) == 1


def test_time_in_which_nobody_could_be_heard_does_not_count():
    leases = beaten(BEAT_S)
    leases.forgive(30.0)
    assert leases.expired(10, 30.5) == {}
    leases.end(b"\x00")
    assert leases.expired(10, 100.0) == {}
