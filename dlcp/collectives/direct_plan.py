# SPDX-License-Identifier: Apache-2.0
"""What stays the same between the steps of a bucket in a direct all-reduce."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.shards import shard_bounds
from dlcp.magnitudes import packet_magnitudes
from dlcp.planes import FULL_BITS, PlaneLayout
from dlcp.tags import ChunkOrder, PacketTags
from dlcp.transport import Bytes, LossBound


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
        self._rest = np.empty(len(bucket.values) if self.layouts else 0, np.float32)
        self._whole_parts: dict[tuple[int, int], PacketTags] = {}
        self._whole_encoded: dict[tuple[int, int], PacketTags] = {}

    def fits(self, bucket: Bucket, weights: Mapping[int, float], bits: int) -> bool:
        """Return whether the plan fits a bucket divided by these weights, with this precision."""
        return self._fits == self._what_it_fits(bucket, weights, bits)

    @staticmethod
    def _what_it_fits(bucket: Bucket, weights: Mapping[int, float], bits: int) -> tuple[Any, ...]:
        size = len(bucket.values), bucket.value_type, bits
        return *size, bucket.whole, weights, tuple(bucket.segments)

    def memory_for_rest(self) -> NDArray[np.float32]:
        """Return memory for what the codes of a bucket lack: an earlier step's, if its residual has been added.

        The pages of fresh memory cost more than a pass over it.
        """
        if sys.getrefcount(self._rest) > 2:  # it is that of a run, or of parts of the residual
            self._rest = np.empty(len(self._rest), np.float32)
        return self._rest

    def tag(self, context: RankContext, bucket: Bucket, step: int) -> PacketTags:
        """Return the tags of a bucket's packets: by magnitude if any may be lost."""
        bound, per_packet = self.bound, context.connection.options.payload_bytes // bucket.values.itemsize
        layers, count = context.options.layers, len(bucket.values)
        # Magnitudes cost a tenth of a fast network's time: they wait for the first sign of possible loss.
        clear = context.connection.is_clear
        at_risk = [owner for owner in self.bounds if owner != context.rank and (bound.immediate or not clear(owner))]
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
        """Return the tags of an encoded shard's packets and of a tail; see :meth:`dlcp.planes.PlaneLayout.tags`.

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
