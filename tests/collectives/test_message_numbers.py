# SPDX-License-Identifier: Apache-2.0
"""Message numbers: no two users of a step share one, and what does not fit is refused in words."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from dlcp.collectives import message_numbers as numbers
from dlcp.collectives.message_numbers import (
    STEPS,
    MessageNumbersExhaustedError,
    NumberRange,
    broadcast_number,
    check_ranges,
    collective_number,
    horizon_number,
    point_to_point_number,
    ring_number,
    two_hop_number,
)
from dlcp.session import group as whole
from dlcp.transport import TransportOptions

RANKS = [1, 2, 3, 7, 8, 33, 200, 1023, 1024, 2048]


def until_refused(number_of):
    found = []
    for index in itertools.count():
        try:
            found += number_of(index)
        except MessageNumbersExhaustedError:
            return found
    return None


def users(ranks):
    """Every user's numbers among so many ranks, as long as there are any."""

    def two_hops(shared):
        return until_refused(
            lambda bucket: [two_hop_number(bucket, p, r, ranks, shared=shared) for p in range(2) for r in range(ranks)]
        )

    return {
        "two hops": two_hops(shared=False),
        "two hops beside a ring": two_hops(shared=True),
        "ring": until_refused(
            lambda bucket: [
                ring_number(bucket, piece, phase, hop, ranks)
                for piece in range(numbers.pieces_allowed(bucket, ranks))
                for phase in range(2)
                for hop in range(ranks)
            ]
        ),
        "collectives": until_refused(lambda phase: [collective_number(phase, peer, ranks) for peer in range(ranks)]),
        "horizon": [horizon_number()],
        "point to point": until_refused(lambda slot: [point_to_point_number(slot, part) for part in range(2)]),
        "broadcast": until_refused(
            lambda part: [broadcast_number(part, hop, ranks) for hop in range(max(1, (ranks - 1).bit_length()))]
        ),
    }


@pytest.mark.parametrize("ranks", RANKS)
def test_no_user_gives_a_number_twice_and_none_leaves_its_range(ranks):
    found = users(ranks)
    ranges = {each.user: each for table in STEPS.values() for each in table}
    assert set(found) == set(ranges)
    for user, given in found.items():
        assert len(set(given)) == len(given), user
        assert given, user
        assert ranges[user].first <= min(given) <= max(given) < ranges[user].stop <= numbers.MESSAGES_PER_STEP


@pytest.mark.parametrize("ranks", [2, 8, 200])
def test_users_of_one_step_never_meet(ranks):
    found = users(ranks)
    for step, table in STEPS.items():
        for one, other in itertools.combinations(table, 2):
            assert not set(found[one.user]) & set(found[other.user]), f"{one.user} and {other.user} in {step}"


def test_ranges_that_meet_are_found():
    with pytest.raises(AssertionError, match="one and other"):
        check_ranges({"a step": (NumberRange("one", 0, 10), NumberRange("other", 9, 12))})
    with pytest.raises(AssertionError, match="one"):
        check_ranges({"a step": (NumberRange("one", 0, numbers.MESSAGES_PER_STEP + 1),)})


@pytest.mark.parametrize(
    ("number_of", "words"),
    [
        (lambda: two_hop_number(32, 1, 1023, 1024), r"bucket 32 among 1024 ranks .* use larger buckets"),
        (lambda: two_hop_number(16, 1, 1023, 1024, shared=True), r"bucket 16 among 1024 ranks .* 'direct'"),
        (lambda: ring_number(900, 0, 0, 0, 16), r"bucket 900 around a ring of 16 ranks .* larger buckets"),
        (lambda: broadcast_number(65536, 9, 1024), r"part 65536 .* 1024 ranks .* several broadcasts"),
    ],
)
def test_what_does_not_fit_is_refused_with_bucket_ranks_and_what_to_do(number_of, words):
    with pytest.raises(ValueError, match=words):
        number_of()


def test_a_gigabyte_reaches_a_thousand_ranks_and_what_does_not_fit_is_refused_in_words(monkeypatch):
    """The number used to be part times ranks, which no header holds from 1 GB among 1,024 ranks on."""
    keys = []

    class Endpoint:
        connection = SimpleNamespace(rank=0, options=TransportOptions())

        def send(self, *given):
            request = given[0]
            keys.append(getattr(request, "key", None) or given[1])
            sent = Future()
            sent.set_result(None)
            return sent

    monkeypatch.setattr(whole, "PART_BYTES", 1)
    parts, ranks = 64, 1024
    whole.broadcast(Endpoint(), range(ranks), 3, np.zeros(parts, np.uint8), 0, 1.0)
    assert len({key.message for key in keys}) == len(keys) == parts * 10
    assert max(key.message for key in keys) < numbers.MESSAGES_PER_STEP
    with pytest.raises(ValueError, match="1024 ranks"):
        whole.broadcast(Endpoint(), range(ranks), 4, np.zeros(7000, np.uint8), 0, 1.0)
