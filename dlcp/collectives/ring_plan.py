# SPDX-License-Identifier: Apache-2.0
"""How a bucket is cut for the ring: a block for each rank, blocks in pieces, and the numbers of their messages."""

from typing import NamedTuple

from dlcp.collectives.bucket import MESSAGES_PER_STEP
from dlcp.collectives.shards import shard_bounds

PARTIAL = 0
RESULT = 1
PIECE_BYTES = 1 << 22
"""Size of a piece, at least, if a block has several. Chosen by us: a message costs a millisecond or more of processor
time on a busy host. Over loopback on two shared cores, 25 MB among 4 ranks took 1.1 times as long in pieces of 3 MB as
in whole blocks, 1.2 times in pieces of 2 MB and 2.3 times in pieces of 0.5 MB."""
PIECES_MAX = 16
PIECES_PER_RING = 64
"""Of a bucket, in all its blocks together: more pieces than this neither hide latency nor leave numbers for buckets."""
FIRST_NUMBER = MESSAGES_PER_STEP // 2
"""Messages of the ring have the upper half of a step's numbers, so that other collectives can share the step."""


class Piece(NamedTuple):
    """A part of a block that travels on its own: ``start`` to ``stop``, in values of the bucket, at packet borders."""

    block: int
    number: int
    start: int
    stop: int


def pieces_allowed(sequence: int, ranks: int) -> int:
    """Return how many pieces the blocks of a bucket may have: late buckets of a step with very many go in one.

    Half of the numbers are for buckets in pieces, the rest for those that come after.
    """
    most = max(2, min(PIECES_MAX, PIECES_PER_RING // ranks))
    return most if sequence < _buckets_in_pieces(ranks, most) else 1


def buckets_allowed(ranks: int) -> int:
    """Return how many buckets a step may have: with these sequence numbers and no larger ones."""
    most = max(2, min(PIECES_MAX, PIECES_PER_RING // ranks))
    cut = _buckets_in_pieces(ranks, most)
    return (MESSAGES_PER_STEP - FIRST_NUMBER) // (2 * ranks) - cut * (most - 1)


def ring_message_number(sequence: int, piece: int, phase: int, hop: int, ranks: int) -> int:
    """Return the number of a message within its step.

    Parameters
    ----------
    sequence, piece
        Number of the bucket within the step, and of the piece within its block.
    phase, hop
        ``PARTIAL`` or ``RESULT``, and how many hops that phase of the piece has behind it.

    Raises
    ------
    ValueError
        The step has more messages than the header can number.
    """
    most = max(2, min(PIECES_MAX, PIECES_PER_RING // ranks))
    cut = _buckets_in_pieces(ranks, most)
    place = sequence * most + piece if sequence < cut else cut * most + sequence - cut
    number = FIRST_NUMBER + (place * 2 + phase) * ranks + hop
    if number >= MESSAGES_PER_STEP:
        raise ValueError(
            f"bucket {sequence} around a ring of {ranks} ranks needs message number {number}, the header has "
            f"{MESSAGES_PER_STEP}; use larger buckets, or the collective 'direct'"
        )
    return number


def cut_in_pieces(values: int, values_per_packet: int, packet_bytes: int, ranks: int, sequence: int) -> list[Piece]:
    """Cut a bucket into blocks, as many as ranks, and these into pieces; the same on all ranks.

    Parameters
    ----------
    values
        Length of the bucket, in values. Of a bucket of fewer packets than ranks, some blocks are empty and have no
        piece.
    values_per_packet, packet_bytes
        How many values a packet carries, and bytes.

    Raises
    ------
    ValueError
        See :func:`ring_message_number`.
    """
    ring_message_number(sequence, 0, RESULT, ranks - 1, ranks)
    allowed = pieces_allowed(sequence, ranks)
    pieces = []
    for block, (start, stop) in shard_bounds(values, values_per_packet, dict.fromkeys(range(ranks), 1.0)).items():
        block_bytes = -(-(stop - start) // values_per_packet) * packet_bytes
        count = max(1, min(allowed, block_bytes // PIECE_BYTES))
        parts = shard_bounds(stop - start, values_per_packet, dict.fromkeys(range(count), 1.0))
        pieces += [Piece(block, number, start + a, start + b) for number, (a, b) in parts.items() if a < b]
    return pieces


def _buckets_in_pieces(ranks: int, most: int) -> int:
    return (MESSAGES_PER_STEP - FIRST_NUMBER) // (2 * ranks) // (2 * most)
