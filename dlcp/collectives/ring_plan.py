# SPDX-License-Identifier: Apache-2.0
"""How a bucket is cut for the ring: a block for each rank, blocks in pieces, and the numbers of their messages."""

from typing import NamedTuple

from dlcp.collectives.message_numbers import pieces_allowed, ring_number
from dlcp.collectives.shards import shard_bounds

PARTIAL = 0
RESULT = 1
PIECE_BYTES = 1 << 22
"""Size of a piece, at least, if a block has several. Chosen by us: a message costs a millisecond or more of processor
time on a busy host. Over loopback on two shared cores, 25 MB among 4 ranks took 1.1 times as long in pieces of 3 MB as
in whole blocks, 1.2 times in pieces of 2 MB and 2.3 times in pieces of 0.5 MB."""


class Piece(NamedTuple):
    """A part of a block that travels on its own: ``start`` to ``stop``, in values of the bucket, at packet borders."""

    block: int
    number: int
    start: int
    stop: int


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
        The step has more buckets than messages can be numbered for; the message says what to do.
    """
    ring_number(sequence, 0, RESULT, ranks - 1, ranks)
    allowed = pieces_allowed(sequence, ranks)
    pieces = []
    for block, (start, stop) in shard_bounds(values, values_per_packet, dict.fromkeys(range(ranks), 1.0)).items():
        block_bytes = -(-(stop - start) // values_per_packet) * packet_bytes
        count = max(1, min(allowed, block_bytes // PIECE_BYTES))
        parts = shard_bounds(stop - start, values_per_packet, dict.fromkeys(range(count), 1.0))
        pieces += [Piece(block, number, start + a, start + b) for number, (a, b) in parts.items() if a < b]
    return pieces
