# SPDX-License-Identifier: Apache-2.0
"""Partial-result recovery: the exact average of a bucket whose all-reduce failed, from the data that ranks hold.

At any moment a packet of a bucket is, on each rank, either final (the average, as its owner computed it) or a sum of
contributions: the rank's own, or at an owner those that have arrived. Only final packets are sent on. So while a packet
is final nowhere, every contribution still exists: at its rank, in an owner's sum, or both. Adding the right parts over
all ranks completes the average.

If ranks have ended, the others complete what is left: a packet that is final at one of them is that. Any other becomes
the average of the contributions that the survivors hold: their own, and those of the ended ranks that had arrived.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1


class UnrecoverableError(RuntimeError):
    """A rank's contribution is lost: no rank holds it, and no average includes it."""


class RecoveryChannel(Protocol):
    """A working, reliable, slower channel between the same ranks; all make the same calls in the same order."""

    def gather(self, item: Any) -> dict[int, Any]:
        """Return every rank's item, by rank."""

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over all ranks, bitwise equal on all; float32, float64, int32 or int64."""


@dataclass(slots=True)
class PartialResult:
    """One rank's state of a bucket.

    Parameters
    ----------
    values
        Shape (m,), in the type for sums (``ValueType.widen``).
    values_per_packet
        Values per packet, the unit of the fields below; there are ceil(m / values_per_packet) packets. Ranks may differ
        in it.
    final
        Mask of packets in which ``values`` holds the average, shape (packets,).
    included
        Contributions that ``values`` holds, alone or in a sum: by rank, a mask of packets, shape (packets,). For a
        packet that is final *because this rank computed the average*: the ranks in that average. Empty if this rank
        holds nothing of use.
    residual
        The residual that finishing this bucket would leave, shape (m,); None for nothing. It counts only for packets
        that are final on some rank, since otherwise nothing is lost.
    unconfirmed
        Packets with this rank's own contribution for which it does not know whether the owner received it, shape
        (packets,). None: all packets with its own contribution.
    """

    values: NDArray[np.floating]
    values_per_packet: int
    final: NDArray[np.bool_]
    included: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    residual: NDArray[np.floating] | None = None
    unconfirmed: NDArray[np.bool_] | None = None

    @classmethod
    def averaged(
        cls, contributors: Iterable[int], values: NDArray[np.floating], values_per_packet: int
    ) -> "PartialResult":
        """Return the state of a rank that has the whole average."""
        whole = np.ones(-(-len(values) // values_per_packet), np.bool_)
        return cls(values, values_per_packet, whole, dict.fromkeys(contributors, whole))

    @classmethod
    def untouched(cls, rank: int, values: NDArray[np.floating], values_per_packet: int) -> "PartialResult":
        """Return a rank's state of a bucket before any exchange: its own contribution."""
        packets = -(-len(values) // values_per_packet)
        own = {rank: np.ones(packets, np.bool_)}
        return cls(values, values_per_packet, np.zeros(packets, np.bool_), own)

    @classmethod
    def of_average(cls, values: NDArray[np.floating]) -> "PartialResult":
        """Return the state of a rank that has the whole average."""
        return cls(values, max(1, len(values)), np.ones(min(1, len(values)), np.bool_))


class ContributionMap(NamedTuple):
    """A :class:`PartialResult` without its values, for the other ranks. Bitmaps are packed."""

    values: int
    kind: str
    values_per_packet: int
    final: bytes
    included: dict[int, bytes]

    def unpack(self, bits: bytes, unit: int) -> NDArray[np.bool_]:
        """Return a mask of packets of ``unit`` values, which divides its own."""
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=-(-self.values // self.values_per_packet))
        return _in_units(mask.astype(np.bool_), self.values, self.values_per_packet, unit)


class RecoveryPlan(NamedTuple):
    """The sources of each packet of ``values_per_packet`` values: the largest that divides the packets of all ranks.

    ``source`` is the rank whose average is used, or ``NOWHERE``. ``gives`` has the ranks whose sums are added if there
    is none, and ``contributions`` the number of ranks whose gradients these hold. ``left_out`` has the ranks whose
    contribution an average lacks. Shapes (packets,).
    """

    values_per_packet: int
    source: NDArray[np.int32]
    gives: dict[int, NDArray[np.bool_]]
    contributions: NDArray[np.int32]
    left_out: dict[int, NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The average of a bucket, shape (m,), and its residual, or None."""

    values: NDArray[np.floating]
    residual: NDArray[np.floating] | None


def plan(maps: Mapping[int, ContributionMap], contributors: Sequence[int]) -> RecoveryPlan:
    """Choose the sources of each packet; every rank computes the same plan.

    Parameters
    ----------
    maps
        The state of all ranks that hold a part of the bucket.
    contributors
        The ranks that the average must include. Those of ended ranks are in it where a sum holds them.

    Raises
    ------
    UnrecoverableError
        A contribution is lost, or the ranks disagree about the size of the bucket; the message names the rank.
    """
    if not maps:
        raise UnrecoverableError("no rank holds anything of this bucket")
    first = min(maps)
    for rank, found in sorted(maps.items()):
        if found[:2] != maps[first][:2]:
            raise UnrecoverableError(
                f"rank {rank} has {found.values} values of {found.kind}, rank {first} {maps[first].values} of "
                f"{maps[first].kind}; do all ranks run the same model?"
            )
    unit = math.gcd(*(found.values_per_packet for found in maps.values()))
    packets = -(-maps[first].values // unit)
    included = {
        rank: {peer: found.unpack(bits, unit) for peer, bits in found.included.items()} for rank, found in maps.items()
    }
    final = {rank: found.unpack(found.final, unit) for rank, found in maps.items()}
    source = np.full(packets, NOWHERE, np.int32)
    for rank in sorted(maps, reverse=True):
        source[final[rank]] = rank
    gives, contributions = _cover(included, source == NOWHERE, contributors)
    return RecoveryPlan(unit, source, gives, contributions, _left_out(included, final, contributors, packets))


def _cover(
    included: Mapping[int, Mapping[int, NDArray[np.bool_]]], wanted: NDArray[np.bool_], contributors: Sequence[int]
) -> tuple[dict[int, NDArray[np.bool_]], NDArray[np.int32]]:
    """Choose sums that hold each contribution exactly once: the largest first, then others that do not overlap.

    Returns
    -------
    By rank, the packets whose sum it gives; and how many contributions each packet has then.
    """
    packets = len(wanted)
    covered = {rank: np.zeros(packets, np.bool_) for rank in _named(included, contributors)}
    sizes = {rank: sum((bits.astype(np.int32) for bits in parts.values()), start=np.zeros(packets, np.int32))
             for rank, parts in included.items()}  # fmt: skip
    gives = {rank: np.zeros(packets, np.bool_) for rank in included}
    for size in sorted({int(s) for counts in sizes.values() for s in np.unique(counts[wanted])} - {0}, reverse=True):
        for rank in sorted(included):
            chosen = wanted & (sizes[rank] == size)
            for peer, bits in included[rank].items():
                chosen &= ~(bits & covered[peer])
            for peer, bits in included[rank].items():
                covered[peer] |= bits & chosen
            gives[rank] |= chosen
    for rank in contributors:
        lost = wanted & ~covered[rank]
        if lost.any():
            raise UnrecoverableError(f"the contribution of rank {rank} to {int(lost.sum())} packets is lost")
    return gives, sum((bits.astype(np.int32) for bits in covered.values()), start=np.zeros(packets, np.int32))


def _named(included: Mapping[int, Mapping[int, NDArray[np.bool_]]], contributors: Sequence[int]) -> set[int]:
    """Return the contributors, and the ended ranks whose contributions they may hold."""
    return {*contributors, *(peer for parts in included.values() for peer in parts)}


def _left_out(
    included: Mapping[int, Mapping[int, NDArray[np.bool_]]],
    final: Mapping[int, NDArray[np.bool_]],
    contributors: Sequence[int],
    packets: int,
) -> dict[int, NDArray[np.bool_]]:
    """Return the contributions that averages lack, as reported by the ranks that computed them."""
    known = np.zeros(packets, np.bool_)
    folded = {rank: np.zeros(packets, np.bool_) for rank in _named(included, contributors)}
    for rank, parts in included.items():
        for peer, bits in parts.items():
            folded[peer] |= bits & final[rank]
            known |= bits & final[rank]
    return {rank: known & ~bits for rank, bits in folded.items()}


def recover(
    channel: RecoveryChannel,
    rank: int,
    contributors: Sequence[int],
    mine: PartialResult | None,
    *,
    finished: bool = False,
) -> Recovered | None:
    """Complete a bucket's average over another channel; all ranks call it for the same buckets in the same order.

    Parameters
    ----------
    mine
        This rank's state; None if it holds no part of this bucket.
    finished
        Whether this rank needs no part of it, either.

    Returns
    -------
    The average, the same on all ranks; None if all have finished and no rank needs it.

    Raises
    ------
    UnrecoverableError
        See :func:`plan`. All ranks raise it.
    """
    gathered: dict[int, tuple[bool, ContributionMap | None]] = channel.gather((finished, _map_of(mine)))
    if all(has_finished for has_finished, _ in gathered.values()):
        return None
    maps = {peer: ContributionMap(*found) for peer, (_, found) in gathered.items() if found is not None}
    decided = plan(maps, contributors)
    some = next(iter(maps.values()))
    count, kind = some.values, np.dtype(some.kind)
    values = np.zeros(count, kind) if mine is None else mine.values
    nothing: NDArray[np.bool_] = np.zeros(len(decided.source), np.bool_)

    def by_value(packets: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(packets, decided.values_per_packet)[:count]

    result = np.zeros(count, kind)
    summed, copied = by_value(decided.source == NOWHERE), by_value(decided.source != NOWHERE)
    if summed.any():
        given = by_value(decided.gives.get(rank, nothing))
        total = channel.add(np.where(given, values, 0).astype(kind)[summed])
        result[summed] = total / by_value(decided.contributions)[summed].astype(kind)
    if copied.any():
        # Added as integers: one rank gives the average, the others 0, so the sum has exactly its bits.
        given = by_value(decided.source == rank)
        bits = np.where(given, values, 0).astype(kind)[copied].view(f"i{kind.itemsize}")
        result[copied] = channel.add(bits).view(kind)
    return Recovered(result, _residual(mine, rank, decided, by_value))


def _residual(
    mine: PartialResult | None, rank: int, decided: RecoveryPlan, by_value: Any
) -> NDArray[np.floating] | None:
    """Return the residual if there is an average: known losses, and contributions that the average lacks."""
    if mine is None:
        return None
    unconfirmed = mine.unconfirmed
    if unconfirmed is None:
        unconfirmed = mine.included.get(rank, np.zeros(len(mine.final), np.bool_)) & ~mine.final
    unconfirmed = _in_units(unconfirmed, len(mine.values), mine.values_per_packet, decided.values_per_packet)
    residual = np.where(by_value(unconfirmed & decided.left_out[rank]), mine.values, 0).astype(mine.values.dtype)
    if mine.residual is not None:
        residual += np.where(by_value(decided.source != NOWHERE), mine.residual, 0).astype(residual.dtype)
    return residual if residual.any() else None


def _map_of(mine: PartialResult | None) -> ContributionMap | None:
    if mine is None:
        return None
    packed = {peer: np.packbits(bits).tobytes() for peer, bits in mine.included.items() if bits.any()}
    kind = mine.values.dtype.name
    return ContributionMap(len(mine.values), kind, mine.values_per_packet, np.packbits(mine.final).tobytes(), packed)


def _in_units(mask: NDArray[np.bool_], values: int, values_per_packet: int, unit: int) -> NDArray[np.bool_]:
    """Return a mask of packets as one of packets of ``unit`` values."""
    found: NDArray[np.bool_] = np.repeat(mask, values_per_packet // unit)[: -(-values // unit)]
    return found
