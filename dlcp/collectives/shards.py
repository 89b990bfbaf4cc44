# SPDX-License-Identifier: Apache-2.0
"""How buffers are divided into shards, and what of a bucket's run that decides in advance."""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.transport import (
    Bytes,
    LossBound,
)
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import ChunkOrder, PacketTags, packet_magnitudes

SEEN_MARGIN: Final = 1.2
"""The factor by which a port may be faster than the data through it, since senders pause."""


def shard_bounds(values: int, values_per_packet: int, weights: Mapping[int, float]) -> dict[int, tuple[int, int]]:
    """Divide a buffer in proportion to weights, at packet borders.

    Parameters
    ----------
    values
        Length of the buffer, in values.
    values_per_packet
        Shards begin at multiples of this.
    weights
        Weight of each owner. Each owns at least one packet if there are enough packets.

    Returns
    -------
    Start and end of each owner's shard, in values; in the order of ``weights``, without gaps.
    """
    shares = np.array(list(weights.values()), float)
    if (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"weights must be >= 0 and not all 0, got {dict(weights)}")
    packets = -(-values // values_per_packet)
    least = int(packets >= len(shares))
    spare = packets - least * len(shares)
    borders = np.rint(np.concatenate([[0.0], np.cumsum(shares) / shares.sum()]) * spare).astype(int)
    borders += least * np.arange(len(borders))
    cuts = np.minimum(borders * values_per_packet, values).tolist()
    return dict(zip(weights, pairwise(cuts), strict=True))


def inbound_rates(reported_bps: Mapping[int, NDArray[np.generic]], slow: Container[int] = ()) -> dict[int, float]:
    """Return each rank's receive rate, from the others' rates to it.

    Parameters
    ----------
    reported_bps
        Each rank's report: its rates to all ranks, in the order of ranks; 0 if unknown, and negative without signs of
        congestion. Its own entry is its fastest inbound rate.
    slow
        Ranks that were slow before.

    Returns
    -------
    Rates in bit/s by :func:`dlcp.policies.slow_ports.snap_to_fastest`. A rank without a congested path to it counts as
    fast: if it is slow, the reason is its processor. If shards followed that, they would change from step to step, and
    with them the order of summation and the last bit of sums.
    """
    ranks = sorted(reported_bps)
    table = np.array([reported_bps[rank] for rank in ranks], float)
    seen = table.diagonal().copy()
    np.fill_diagonal(table, 0)
    clear: NDArray[np.bool_] = np.all(table <= 0, axis=0)
    table = np.abs(table)
    # The median, since one sender's own trouble says nothing about the receiver.
    rates = np.array([np.median(column[column > 0]) if (column > 0).any() else 0.0 for column in table.T])
    rates *= len(ranks) - 1
    # Senders that take turns have the port to themselves: their rates add up to more than its capacity.
    rates = np.where(seen > 0, np.minimum(rates, SEEN_MARGIN * seen), rates)
    fastest = rates.max(initial=0.0)
    if clear.all():
        return dict.fromkeys(ranks, float(fastest))
    from dlcp.policies.slow_ports import snap_to_fastest  # needed once a port is congested

    levelled = snap_to_fastest(dict(zip(ranks, rates.tolist(), strict=True)), slow)
    return {rank: float(fastest) if clear[place] else levelled[rank] for place, rank in enumerate(ranks)}


class Branch(NamedTuple):
    """An edge of a binomial tree: to ``rank``, over 2**hop ranks."""

    rank: int
    hop: int


def binomial_tree(rank: int, root: int, ranks: int) -> tuple[Branch | None, list[Branch]]:
    """Return the parent of a rank in a broadcast of ``root``, None for the root, and its children, farthest first."""
    position = (rank - root) % ranks
    reach = position & -position if position else 1 << (ranks - 1).bit_length()
    parent = Branch((rank - reach) % ranks, reach.bit_length() - 1) if position else None
    hops = range(reach.bit_length() - 2, -1, -1)
    return parent, [Branch((rank + (1 << hop)) % ranks, hop) for hop in hops if position + (1 << hop) < ranks]


class DirectPlan:
    """The parts of a bucket's run that are the same in every step, as long as its layers and division stay the same.

    Attributes
    ----------
    bounds
        Start and end of each owner's shard, in values.
    packets
        The packets of each owner's shard.
    numbers
        Numbers of the bucket's messages, by phase and receiver.
    labels, loss_bounds, orders
        Per non-empty shard: label for error messages, loss bound, and the first part of this rank's contribution to
        send.
    bound
        The loss bound of layers without their own.
    whole
        The bucket's tags if nothing may be lost.
    layouts
        The layout of each owner's shard in encoded messages; empty if they are not encoded.
    bits
        Precision of the messages, in bits of a value.
    """

    def __init__(
        self, context: RankContext, sequence: int, bucket: Bucket, weights: Mapping[int, float], bits: int
    ) -> None:
        self._fits = self._what_it_fits(bucket, weights, bits)
        per_packet, options = context.connection.options.payload_bytes // bucket.values.itemsize, context.options
        self.bounds = shard_bounds(len(bucket.values), per_packet, weights)
        self.packets = {
            owner: slice(start // per_packet, -(-stop // per_packet)) for owner, (start, stop) in self.bounds.items()
        }
        receivers = ((REDUCE_SCATTER, self.bounds), (ALL_GATHER, context.contributors))
        self.numbers = {
            (phase, receiver): context.key(0, sequence, phase, receiver).message
            for phase, ranks in receivers
            for receiver in ranks
        }
        self.labels: dict[int, str] = {}
        self.loss_bounds: dict[int, LossBound] = {}
        self.orders: dict[int, ChunkOrder] = {}
        for owner, (start, stop) in self.bounds.items():
            if start < stop:
                self.labels[owner] = bucket.label(start, stop)
                self.loss_bounds[owner] = options.bound_within(bucket, start, stop, per_packet)
                others = [rank for rank in context.contributors if rank != owner]
                first = -others.index(context.rank) % len(others) if context.rank in others else 0
                self.orders[owner] = ChunkOrder(first, max(1, len(others)))
        payload_bytes = context.connection.options.payload_bytes
        self.layouts = {
            owner: layout
            for owner, (start, stop) in self.bounds.items()
            if (layout := PlaneLayout.of(stop - start, bucket.values.itemsize, bits, payload_bytes))
        }
        for owner, layout in self.layouts.items():
            bound = self.loss_bounds[owner]
            self.loss_bounds[owner] = replace(bound, ratio=min(bound.ratio, layout.loss_bound_max))
        self.bits = bits if self.layouts else FULL_BITS
        self.bound = options.bound_of(bucket)
        self.whole = context.tagger.tag_whole(len(bucket.values), bucket.segments, per_packet)
        self._whole_parts: dict[tuple[int, int], PacketTags] = {}
        self._whole_encoded: dict[tuple[int, int], PacketTags] = {}

    def fits(self, bucket: Bucket, weights: Mapping[int, float], bits: int) -> bool:
        """Return whether the plan fits a bucket divided by these weights, with this precision."""
        return self._fits == self._what_it_fits(bucket, weights, bits)

    @staticmethod
    def _what_it_fits(bucket: Bucket, weights: Mapping[int, float], bits: int) -> tuple[Any, ...]:
        size = len(bucket.values), bucket.value_type, bits
        return *size, bucket.whole, weights, tuple(bucket.segments)

    def tag(self, context: RankContext, bucket: Bucket, step: int) -> PacketTags:
        """Return the tags of a bucket's packets: by magnitude if any may be lost."""
        bound, per_packet = self.bound, context.connection.options.payload_bytes // bucket.values.itemsize
        layers, count = context.options.layers, len(bucket.values)
        # Magnitudes cost a tenth of a fast network's time: they wait for the first sign of possible loss.
        peers = context.connection.peers
        others = [owner for owner in self.bounds if owner != context.rank]
        at_risk = [owner for owner in others if bound.immediate or not peers[owner].is_clear]
        at_risk = [owner for owner in at_risk if owner not in self.layouts]  # these have their own classes
        if not at_risk or (not bound.ratio and (bucket.whole or not layers)):
            return self.whole
        magnitudes = bucket.magnitudes
        if magnitudes is None:  # of droppable packets; all others count as the largest
            magnitudes = np.full(-(-count // per_packet), np.inf, np.float32)
            for owner in at_risk:
                start, stop = self.bounds[owner]
                if start < stop:
                    found = packet_magnitudes(bucket.values[start:stop], bucket.value_type, per_packet)
                    magnitudes[self.packets[owner]] = found
        tags = context.tagger.tag_magnitudes(magnitudes, count, bucket.segments, per_packet)
        layers.protect(tags, bucket.segments, per_packet, bound, seed=step)
        return tags

    def encoded_tags(
        self, owner: int, per_packet: int, tail_bytes: int, code: Bytes, may_drop: NDArray[np.bool_] | None
    ) -> PacketTags:
        """Return the tags of an encoded shard's packets and of a tail; see :meth:`dlcp.values.planes.PlaneLayout.tags`.

        Parameters
        ----------
        per_packet
            Values in a packet that is not encoded.
        """
        found = self._whole_encoded.get((owner, tail_bytes)) if may_drop is None else None
        if found is not None:
            return found
        layout = self.layouts[owner]
        more = -(-(layout.bytes + tail_bytes) // layout.payload_bytes) - layout.planes * layout.packets
        tags = layout.tags(self.tags_of(owner, self.whole), per_packet, code, may_drop, more)
        if may_drop is None:
            self._whole_encoded[owner, tail_bytes] = tags
        return tags

    def tags_of(self, owner: int, tags: PacketTags, more: int = 0) -> PacketTags:
        """Return the tags of a shard's packets from those of the bucket, plus ``more`` packets like the last."""
        if tags is not self.whole:
            return tags.part(self.packets[owner], more)
        found = self._whole_parts.get((owner, more))
        if found is None:
            found = self._whole_parts[owner, more] = tags.part(self.packets[owner], more)
        return found
