# SPDX-License-Identifier: Apache-2.0
"""Adasum in two hops and an exchange between them: every rank combines one shard of all contributions.

Contributions go to their shard's owner within the loss bound, as in a direct all-reduce; lost values count as 0 and
become residual. Owners exchange the scalar products of their shards, layer by layer. The sums of these determine the
factor of each rank's gradient (:mod:`dlcp.collectives.reduction_rules`), and the results go to all ranks in full. This
costs the bytes of an all-reduce and one more hop; the authors' recursive halving exchanges scalar products at every
hop.

Adasum has no fallback: if the path fails, training ends with an error.
"""

from concurrent.futures import Executor, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, BucketRun, RankContext
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import coefficients, combine_with, scalar_products
from dlcp.collectives.shards import shard_bounds
from dlcp.compress.compressor import Values
from dlcp.transport import RELIABLE, Arrival, Delivery, LossBound, MessageKey, ReceiveRequest, SendRequest
from dlcp.values.tags import PacketTags, plain_tags

PRODUCT: Final = np.dtype("<f8")
NUMBERS_PER_BUCKET: Final = 2
"""A bucket uses the message numbers of two; the second set is for scalar products."""


class Kind(Enum):
    """A message's kind: its number among those of the bucket, and its phase."""

    CONTRIBUTION = (0, REDUCE_SCATTER)
    RESULT = (0, ALL_GATHER)
    PRODUCTS = (1, REDUCE_SCATTER)


class Adasum:
    """Adasum of one rank with its peers.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share.
    work
        The executor that combines shards.
    """

    def __init__(self, context: RankContext, *, work: Executor | None = None) -> None:
        self.context = context
        self.work = work or ThreadPoolExecutor(1, f"dlcp-rank{context.rank}-adasum")

    def start(self, step: int, sequence: int, bucket: Bucket) -> "AdasumRun":
        """Begin to combine a bucket, and return its run."""
        self.context.check_key(step, NUMBERS_PER_BUCKET * sequence + 1)
        return AdasumRun(self, step, sequence, bucket).start()

    def close(self) -> None:
        """Stop the thread that combines shards."""
        self.work.shutdown(wait=False)


class AdasumRun(BucketRun):
    """One bucket in progress. Only arithmetic runs outside the endpoint's thread; values are written at the end."""

    def __init__(self, reducer: Adasum, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer.context, step, sequence, bucket, reducer.work)
        self.connection, self.rank, self.ranks = self.context.connection, self.context.rank, self.context.contributors
        options, per_packet = self.context.options, self.values_per_packet
        self.values, self.value_type = bucket.values, bucket.value_type
        if options.error_feedback:
            self.context.residual.apply(self.values, bucket.segments, self.value_type)
        self.shards = shard_bounds(len(self.values), per_packet, dict.fromkeys(self.ranks, 1.0))
        self.tags = self.context.tagger.tag(self.values, self.value_type, bucket.segments, per_packet)
        options.layers.protect(self.tags, bucket.segments, per_packet, options.bound_of(bucket), seed=step)
        start, stop = self.shards[self.rank]
        self.contributions: dict[int, NDArray[np.generic]] = {self.rank: self.values[start:stop]}
        self.products: dict[int, NDArray[np.float64]] = {}
        self.results: dict[int, NDArray[np.generic]] = {}
        self.unconfirmed: set[tuple[Kind, int]] = set()
        """Messages that their receivers have not acknowledged."""
        self.lost: list[tuple[int, int]] = []
        """Ranges of lost values: start and end."""

    def partial_result(self) -> PartialResult | None:
        """Return nothing: an average of partial results would not be Adasum."""
        return None

    def begin(self) -> None:
        """Send each owner its shard, and post all receives."""
        ranks, size = len(self.ranks), self.values.itemsize
        product_bytes = len(self.bucket.segments) * ranks * ranks * PRODUCT.itemsize
        start, stop = self.shards[self.rank]
        for peer in self.context.peers:
            first, last = self.shards[peer]
            if start < stop:
                bound = self._bound_of(start, stop)
                self._receive(
                    peer, Kind.CONTRIBUTION, (stop - start) * size, bound, partial(self._on_contribution, peer)
                )
            if first < last:
                self._receive(peer, Kind.RESULT, (last - first) * size, RELIABLE, partial(self._on_result, peer))
            self._receive(peer, Kind.PRODUCTS, product_bytes, RELIABLE, partial(self._on_products, peer))
        for peer in self.context.peers:
            first, last = self.shards[peer]
            if first < last:
                tags, bound = self._tags(first, last), self._bound_of(first, last)
                content = self.values[first:last].view(np.uint8)
                self._send(
                    peer, Kind.CONTRIBUTION, content, tags, bound, partial(self._on_contribution_sent, first, last)
                )
        self._on_all_contributions()

    def _on_contribution(self, peer: int, arrival: Arrival) -> None:
        self.contributions[peer] = arrival.payload.view(self.values.dtype)
        self._on_all_contributions()

    def _on_all_contributions(self) -> None:
        start, stop = self.shards[self.rank]
        if start == stop or len(self.contributions) == len(self.ranks):
            self.aside(self._multiply)

    def _multiply(self) -> None:
        """Compute the scalar products within this rank's shard."""
        products = np.zeros((len(self.bucket.segments), *[len(self.ranks)] * 2))
        if len(self.contributions) == len(self.ranks):
            products = scalar_products(self._parts(), self._borders())
        self.connection.call(partial(self._send_products, products.astype(PRODUCT)))

    def _send_products(self, products: NDArray[np.float64]) -> None:
        content = products.ravel().view(np.uint8)
        tags = plain_tags(-(-len(content) // self.connection.options.payload_bytes))
        for peer in self.context.peers:
            self._send(peer, Kind.PRODUCTS, content, tags, RELIABLE)
        self.products[self.rank] = products.ravel()
        self._on_all_products()

    def _on_products(self, peer: int, arrival: Arrival) -> None:
        self.products[peer] = arrival.payload.view(PRODUCT)
        self._on_all_products()

    def _on_all_products(self) -> None:
        if len(self.products) == len(self.ranks):
            self.aside(self._combine)

    def _combine(self) -> None:
        """Combine this rank's shard, once the scalar products of whole layers are known."""
        ranks = len(self.ranks)
        total = np.sum([self.products[rank] for rank in self.ranks], axis=0).reshape(-1, ranks, ranks)
        start, stop = self.shards[self.rank]
        result: NDArray[np.generic] = self.values[:0]
        if start < stop:
            factors = np.array([coefficients(products) for products in total])
            combined = combine_with(self._parts(), self._borders(), factors)
            result = np.ascontiguousarray(self.value_type.narrow(combined))
        self.connection.call(partial(self._send_result, result))

    def _send_result(self, result: NDArray[np.generic]) -> None:
        start, stop = self.shards[self.rank]
        if start < stop:
            for peer in self.context.peers:
                self._send(peer, Kind.RESULT, result.view(np.uint8), self._tags(start, stop), RELIABLE)
        self.results[self.rank] = result
        self._look_whether_done()

    def _on_result(self, peer: int, arrival: Arrival) -> None:
        self.results[peer] = arrival.payload.view(self.values.dtype)
        self._look_whether_done()

    def _on_contribution_sent(self, first: int, last: int, delivery: Delivery) -> None:
        for packet in np.flatnonzero(~delivery.delivered).tolist():
            start = first + packet * self.values_per_packet
            self.lost.append((start, min(start + self.values_per_packet, last)))

    def _look_whether_done(self) -> None:
        owners = {owner for owner, (start, stop) in self.shards.items() if start < stop}
        if self.unconfirmed or self.done() or not owners <= set(self.results) or self.rank not in self.results:
            return
        if self.lost and self.context.options.error_feedback:
            positions = np.concatenate([np.arange(start, stop) for start, stop in sorted(self.lost)])
            lost = self.value_type.widen(self.values[positions])
            self.context.residual.add_at(positions, np.where(np.isfinite(lost), lost, 0), self.bucket.segments)
        for owner in owners:
            start, stop = self.shards[owner]
            self.values[start:stop] = self.results[owner]
        self.set_result(self.values)

    def _parts(self) -> list[Values]:
        return [self.value_type.widen(self.contributions[rank]) for rank in self.ranks]

    def _borders(self) -> list[int]:
        """Return the boundaries of the bucket's layers within this rank's shard."""
        start, stop = self.shards[self.rank]
        ends = [segment.start for segment in self.bucket.segments] + [self.bucket.segments[-1].stop]
        return [min(max(end, start), stop) - start for end in ends]

    def _bound_of(self, start: int, stop: int) -> LossBound:
        return self.context.options.bound_within(self.bucket, start, stop, self.values_per_packet)

    def _tags(self, start: int, stop: int) -> PacketTags:
        return self.tags.part(slice(start // self.values_per_packet, -(-stop // self.values_per_packet)))

    def _send(
        self,
        peer: int,
        kind: Kind,
        content: NDArray[np.uint8],
        tags: PacketTags,
        bound: LossBound,
        then: "partial[None] | None" = None,
    ) -> None:
        key = self._key(kind, peer)
        self.unconfirmed.add((kind, peer))

        def on_sent(delivery: Delivery) -> None:
            self.context.ledger.record(key, peer, self.label, tags, bound, delivery)
            self.unconfirmed.discard((kind, peer))
            if then:
                then(delivery)
            self._look_whether_done()

        request = SendRequest(peer, key, content.data, tags, bound, self.label)
        self.connection.send(request, on_sent, self.fail)

    def _receive(self, peer: int, kind: Kind, size: int, bound: LossBound, then: "partial[None]") -> None:
        request = ReceiveRequest(peer, self._key(kind, self.rank), size, bound, self.label)
        self.connection.receive(request, then, self.fail)

    def _key(self, kind: Kind, receiver: int) -> MessageKey:
        number, phase = kind.value
        return self.context.key(self.step, NUMBERS_PER_BUCKET * self.sequence + number, phase, receiver)
