# SPDX-License-Identifier: Apache-2.0
"""How buckets are cut for the ring, and which are refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.collectives.message_numbers import pieces_allowed
from dlcp.collectives.ring import PIECE_BYTES, cut_in_pieces


@settings(max_examples=200)
@given(values=st.integers(0, 3_000_000), item=st.sampled_from([2, 4, 8]), ranks=st.integers(1, 40), late=st.booleans())
def test_pieces_cover_a_bucket_without_gaps(values, item, ranks, late):
    sequence = 150 if late else 0
    pieces = cut_in_pieces(values, 1440 // item, 1440, ranks, sequence)
    ends = [(piece.start, piece.stop) for piece in pieces]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends)][: len(ends)]
    assert (ends[-1][1] if ends else 0) == values
    assert all(piece.start % (1440 // item) == 0 and piece.start < piece.stop for piece in pieces)
    assert [piece[:2] for piece in pieces] == sorted({piece[:2] for piece in pieces})
    for block, own in itertools.groupby(pieces, key=lambda piece: piece.block):
        numbers = [piece.number for piece in own]
        assert block < ranks
        assert numbers == list(range(len(numbers)))
        assert len(numbers) <= pieces_allowed(sequence, ranks)


def test_large_blocks_have_several_pieces_and_small_ones_one():
    assert len(cut_in_pieces(PIECE_BYTES // 4 * 9, 360, 1440, 2, 0)) == 2 * 4
    assert len(cut_in_pieces(PIECE_BYTES // 4 * 2, 360, 1440, 2, 0)) == 2
    assert len(cut_in_pieces(1 << 28, 360, 1440, 4, 0)) == 4 * 16
    assert pieces_allowed(0, 8) == 8
    assert pieces_allowed(0, 64) == 2
    assert pieces_allowed(10_000, 8) == 1


def test_a_step_of_too_many_buckets_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match=r"bucket 900 around a ring of 16 ranks needs .* larger buckets"):
        cut_in_pieces(1000, 360, 1440, 16, 900)
