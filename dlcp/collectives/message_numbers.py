# SPDX-License-Identifier: Apache-2.0
"""Allocation of message numbers within a step to the algorithms that share it.

A switch identifies a message by job, step, number and sender. So one sender's messages in a step need different
numbers, even for different receivers. The header holds 16 bits. :data:`STEPS` lists the ranges that share a step; this
module checks at import that they do not overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

REDUCE_SCATTER: Final = 0
"""The phase in which contributions go to the ranks that reduce them."""
ALL_GATHER: Final = 1
"""The phase in which averaged shards go to all."""
MESSAGES_PER_STEP: Final = 1 << 16
"""The number of messages in a step that the header can number."""
HALF: Final = MESSAGES_PER_STEP // 2

PARTS_MAX: Final = 16
"""The most parts of a server's bucket. More parts overlap little more, and each costs processor time on every rank."""
RING_PIECES_MAX: Final = 16
"""The most pieces of a block of the ring."""
RING_PIECES: Final = 64
"""Pieces of a bucket, over all its blocks. More would hide no more latency, and leave too few numbers for buckets."""


class MessageNumbersExhaustedError(ValueError):
    """A step has more messages than its header can number. The text names the message and a remedy."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers from ``first`` up to ``stop``, excluded, which belong to ``user``."""

    user: str
    first: int
    stop: int

    def __contains__(self, number: int) -> bool:
        return self.first <= number < self.stop

    def exhausted(self, number: int, what: str, remedy: str) -> MessageNumbersExhaustedError:
        """Return the error that ``what`` needs a number outside the range."""
        return MessageNumbersExhaustedError(
            f"{what} needs message number {number}, but {self.user} has the numbers {self.first} to {self.stop - 1} of "
            f"a step; {remedy}"
        )


TWO_HOPS_ALONE: Final = NumberRange("two hops", 0, MESSAGES_PER_STEP)
TWO_HOPS: Final = NumberRange("two hops beside a ring", 0, HALF)
RING_RANGE: Final = NumberRange("ring", HALF, MESSAGES_PER_STEP)
COLLECTIVES_RANGE: Final = NumberRange("collectives", 0, HALF - 1)
HORIZON: Final = NumberRange("horizon", HALF - 1, HALF)
POINT_TO_POINT: Final = NumberRange("point to point", HALF, MESSAGES_PER_STEP)
BROADCAST: Final = NumberRange("broadcast", 0, MESSAGES_PER_STEP)

STEPS: Final[Mapping[str, Sequence[NumberRange]]] = {
    "gradients, without a ring": (TWO_HOPS_ALONE,),
    "gradients, with a ring": (TWO_HOPS, RING_RANGE),
    "collectives of a process group": (COLLECTIVES_RANGE, HORIZON, POINT_TO_POINT),
    "a session's broadcast": (BROADCAST,),
}
"""Ranges that share a step. Direct all-reduce, parameter server, Adasum and compressed all-gather use *two hops*. Its
numbers depend on the bucket, so the buckets of a step may use different collectives."""


def check_ranges(steps: Mapping[str, Sequence[NumberRange]]) -> None:
    """Raise AssertionError if two ranges of a kind of step overlap, or one does not fit the header."""
    for step, ranges in steps.items():
        for each in ranges:
            if not 0 <= each.first < each.stop <= MESSAGES_PER_STEP:
                raise AssertionError(f"{step}: the header cannot number {each}")
        for one, other in pairwise(sorted(ranges, key=lambda each: each.first)):
            if other.first < one.stop:
                raise AssertionError(f"{step}: the ranges of {one.user} and {other.user} overlap")


check_ranges(STEPS)


def two_hop_number(bucket: int, phase: int, receiver: int, ranks: int, *, shared: bool = False) -> int:
    """Return the number of a message in two hops: reduce-scatter (phase 0) or all-gather (phase 1).

    Parameters
    ----------
    bucket
        The bucket's number within the step.
    ranks
        One more than the highest rank that takes part in any bucket of the step.
    shared
        Whether a ring may take buckets of the same step.

    Raises
    ------
    MessageNumbersExhaustedError
        No number is left; the functions below raise it, too.
    """
    numbers = TWO_HOPS if shared else TWO_HOPS_ALONE
    number = numbers.first + (bucket * 2 + phase) * ranks + receiver
    if number not in numbers:
        remedy = "use larger buckets" + (", or the collective 'direct'" if shared else "")
        raise numbers.exhausted(number, f"bucket {bucket} among {ranks} ranks", remedy)
    return number


def part_number(bucket: int, part: int, ranks: int) -> int:
    """Return the number to use for a part of a bucket in :func:`two_hop_number`.

    :func:`parts_allowed` limits the parts.
    """
    return _number_of_piece(bucket, part, PARTS_MAX, _buckets_in_parts(ranks))


def parts_allowed(bucket: int, ranks: int) -> int:
    """Return the most parts that a bucket may have; 1 for late buckets of a step with very many.

    Half of the numbers are for divided buckets, the rest for later ones.
    """
    return PARTS_MAX if bucket < _buckets_in_parts(ranks) else 1


def ring_number(bucket: int, piece: int, phase: int, hop: int, ranks: int) -> int:
    """Return the number of a message around a ring.

    Parameters
    ----------
    bucket, piece
        The bucket's number within the step, and the piece's within its block, see :func:`pieces_allowed`.
    phase, hop
        Reduce-scatter (0) or all-gather (1), and the number of completed hops in that phase.
    """
    most = _ring_pieces(ranks)
    cut = _ring_buckets_in_pieces(ranks)
    index = _number_of_piece(bucket, piece, most, cut)
    number = RING_RANGE.first + (index * 2 + phase) * ranks + hop
    if number not in RING_RANGE:
        remedy = "use larger buckets, or the collective 'direct'"
        raise RING_RANGE.exhausted(number, f"bucket {bucket} around a ring of {ranks} ranks", remedy)
    return number


def pieces_allowed(bucket: int, ranks: int) -> int:
    """Return the most pieces in each block of a ring's bucket; 1 for late buckets of a step with very many.

    Half of the numbers are for divided buckets, the rest for later ones.
    """
    return _ring_pieces(ranks) if bucket < _ring_buckets_in_pieces(ranks) else 1


def ring_buckets(ranks: int) -> int:
    """Return the number of buckets in a step that may use a ring; higher bucket numbers may not."""
    buckets = (RING_RANGE.stop - RING_RANGE.first) // (2 * ranks)
    return buckets - _ring_buckets_in_pieces(ranks) * (_ring_pieces(ranks) - 1)


def collective_number(phase: int, receiver: int, ranks: int) -> int:
    """Return the number of a message in a process group's collective, which is a step of its own."""
    number = COLLECTIVES_RANGE.first + phase * ranks + receiver
    if number not in COLLECTIVES_RANGE:
        what = f"phase {phase} of a collective among {ranks} ranks"
        raise COLLECTIVES_RANGE.exhausted(number, what, "use smaller tensors")
    return number


def horizon_number() -> int:
    """Return the number of the messages that announce a process group's finished steps."""
    return HORIZON.first


def point_to_point_number(slot: int, part: int) -> int:
    """Return the number of a point-to-point message: part 0 is its header, part 1 its content."""
    number = POINT_TO_POINT.first + 2 * slot + part
    if number not in POINT_TO_POINT:
        raise POINT_TO_POINT.exhausted(number, f"point-to-point message {slot}", "send it in another step")
    return number


POINT_TO_POINT_SLOTS: Final = (POINT_TO_POINT.stop - POINT_TO_POINT.first) // 2
"""The number of point-to-point messages in a step."""


def broadcast_number(part: int, hop: int, ranks: int) -> int:
    """Return the message number of a broadcast's part in the binomial tree, on an edge that spans 2**hop ranks."""
    number = BROADCAST.first + part * max(1, (ranks - 1).bit_length()) + hop
    if number not in BROADCAST:
        what = f"part {part} of a broadcast to {ranks} ranks"
        raise BROADCAST.exhausted(number, what, "divide the array among several broadcasts")
    return number


def _number_of_piece(bucket: int, piece: int, most: int, cut: int) -> int:
    """Return a piece's number, if the first ``cut`` buckets have up to ``most`` pieces each, and all others one."""
    return bucket * most + piece if bucket < cut else cut * most + bucket - cut


def _buckets_in_parts(ranks: int) -> int:
    return (TWO_HOPS_ALONE.stop - TWO_HOPS_ALONE.first) // (2 * ranks) // (2 * PARTS_MAX)


def _ring_pieces(ranks: int) -> int:
    return max(2, min(RING_PIECES_MAX, RING_PIECES // ranks))


def _ring_buckets_in_pieces(ranks: int) -> int:
    return (RING_RANGE.stop - RING_RANGE.first) // (2 * ranks) // (2 * _ring_pieces(ranks))
