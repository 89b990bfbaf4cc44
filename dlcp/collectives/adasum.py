# SPDX-License-Identifier: Apache-2.0
"""Adasum in two hops and a word between: every rank combines a shard of what all contribute.

Shares go to their shard's owner within the loss bound, as in a direct all-reduce; what is lost is a gradient of 0, and
owed. Owners tell each other the scalar products of their shards, layer by layer. Their sums say what each rank's
gradient is multiplied by (:mod:`dlcp.collectives.combining`), and the results go to all, whole. So it costs the bytes
of an all-reduce, and one hop more; the authors' recursive halving exchanges scalar products at each of its hops.

If the path fails there is no Adasum to go on with: that is an error, and never an average that looks like it.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.combining import coefficients, combine_with, scalar_products
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.message_numbers import two_hop_number
from dlcp.collectives.push_pull import PULL, PUSH
from dlcp.collectives.reducer import Course, Reducer
from dlcp.collectives.shards import shard_bounds
from dlcp.compress.compressor import Values
from dlcp.ledger import Ledger
from dlcp.tags import PacketTags, Tagger, plain_tags
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Delivery,
    Endpoint,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportError,
)

PRODUCT = np.dtype("<f8")
SHARES, RESULTS, PRODUCTS = (0, PUSH), (0, PULL), (1, PUSH)
"""Kinds of messages: of a bucket's two numbers which one, and which phase of it."""
NUMBERS = 2


class AdasumReducer:
    """Adasum of one rank with its peers.

    Parameters
    ----------
    plain
        What averages buckets that are no gradients.
    endpoint, ranks
        This rank's endpoint, and the ranks that contribute.
    options, tagger, ledger, feedback
        See :class:`dlcp.collectives.DirectAllReduce`.
    work
        Where shards are combined.
    """

    def __init__(
        self,
        plain: Reducer,
        endpoint: Endpoint,
        ranks: Sequence[int],
        *,
        options: ReduceOptions | None = None,
        tagger: Tagger | None = None,
        ledger: Ledger | None = None,
        feedback: ErrorFeedback | None = None,
        work: Executor | None = None,
    ) -> None:
        self.plain, self.endpoint, self.ranks = plain, endpoint, sorted(ranks)
        self.options = options or ReduceOptions()
        self.tagger, self.ledger = tagger or Tagger(), ledger or Ledger()
        self.feedback = feedback or ErrorFeedback()
        self.work = work or ThreadPoolExecutor(1, f"dlcp-rank{endpoint.rank}-adasum")

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self.plain.begin_step(step)

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Combine a bucket; the future's result is ``bucket.values``, written in place."""
        if bucket.exact:
            return self.plain.start(step, NUMBERS * sequence, bucket)
        run = _Run(self, step, sequence, bucket)
        try:
            self.endpoint.call(run.begin)
        except TransportError as error:
            run.fail(error)
        return run.done


class _Run(Course):
    """One bucket on its way; but for arithmetic, in the endpoint's thread. It is written into at the very end."""

    def __init__(self, reducer: AdasumReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(step, sequence, bucket, reducer.work)
        self.reducer, self.rank = reducer, reducer.endpoint.rank
        self.values, self.value_type = bucket.values, bucket.value_type
        if reducer.options.error_feedback:
            reducer.feedback.repay(self.values, self.value_type, bucket.segments)
        self.per_packet = reducer.endpoint.options.payload_bytes // self.values.itemsize
        self.shards = shard_bounds(len(self.values), self.per_packet, dict.fromkeys(reducer.ranks, 1.0))
        self.bound = reducer.options.bound_of(bucket)
        self.tags = reducer.tagger.tag(self.values, self.value_type, bucket.segments, self.per_packet)
        reducer.options.layers.protect(self.tags, bucket.segments, self.per_packet, self.bound, turn=step)
        self.others = [rank for rank in reducer.ranks if rank != self.rank]
        start, stop = self.shards[self.rank]
        self.shares: dict[int, NDArray[np.generic]] = {self.rank: self.values[start:stop]}
        self.products: dict[int, NDArray[np.float64]] = {}
        self.results: dict[int, NDArray[np.generic]] = {}
        self.unconfirmed: set[tuple[int, int, int]] = set()
        """Messages that their receivers have not confirmed: number, phase and receiver."""
        self.lost: list[tuple[int, int]] = []
        """From where to where values were lost."""

    def begin(self) -> None:
        """Send each owner its shard, and wait for all that will come."""
        ranks, size = len(self.reducer.ranks), self.values.itemsize
        product_bytes = len(self.bucket.segments) * ranks * ranks * PRODUCT.itemsize
        start, stop = self.shards[self.rank]
        for peer in self.others:
            first, last = self.shards[peer]
            if start < stop:
                bound = self._bound_of(start, stop)
                self._receive(peer, SHARES, (stop - start) * size, bound, partial(self._on_share, peer))
            if first < last:
                self._receive(peer, RESULTS, (last - first) * size, RELIABLE, partial(self._on_result, peer))
            self._receive(peer, PRODUCTS, product_bytes, RELIABLE, partial(self._on_products, peer))
        for peer in self.others:
            first, last = self.shards[peer]
            if first < last:
                tags, bound = self._tags(first, last), self._bound_of(first, last)
                content = self.values[first:last].view(np.uint8)
                self._send(peer, SHARES, content, tags, bound, partial(self._on_share_sent, first, last))
        self._on_shares()

    def _on_share(self, peer: int, arrival: Arrival) -> None:
        self.shares[peer] = arrival.payload.view(self.values.dtype)
        self._on_shares()

    def _on_shares(self) -> None:
        start, stop = self.shards[self.rank]
        if start == stop or len(self.shares) == len(self.reducer.ranks):
            self.aside(self._multiply)

    def _multiply(self) -> None:
        """Find the scalar products within the own shard."""
        products = np.zeros((len(self.bucket.segments), *[len(self.reducer.ranks)] * 2))
        if len(self.shares) == len(self.reducer.ranks):
            products = scalar_products(self._parts(), self._borders())
        self.reducer.endpoint.call(partial(self._tell, products.astype(PRODUCT)))

    def _tell(self, products: NDArray[np.float64]) -> None:
        content = products.ravel().view(np.uint8)
        tags = plain_tags(-(-len(content) // self.reducer.endpoint.options.payload_bytes))
        for peer in self.others:
            self._send(peer, PRODUCTS, content, tags, RELIABLE)
        self.products[self.rank] = products.ravel()
        self._on_all_products()

    def _on_products(self, peer: int, arrival: Arrival) -> None:
        self.products[peer] = arrival.payload.view(PRODUCT)
        self._on_all_products()

    def _on_all_products(self) -> None:
        if len(self.products) == len(self.reducer.ranks):
            self.aside(self._combine)

    def _combine(self) -> None:
        """Combine the own shard, now that the scalar products of whole layers are known."""
        ranks = len(self.reducer.ranks)
        total = np.sum([self.products[rank] for rank in self.reducer.ranks], axis=0).reshape(-1, ranks, ranks)
        start, stop = self.shards[self.rank]
        result: NDArray[np.generic] = self.values[:0]
        if start < stop:
            factors = np.array([coefficients(products) for products in total])
            combined = combine_with(self._parts(), self._borders(), factors)
            result = np.ascontiguousarray(self.value_type.narrow(combined))
        self.reducer.endpoint.call(partial(self._spread, result))

    def _spread(self, result: NDArray[np.generic]) -> None:
        start, stop = self.shards[self.rank]
        if start < stop:
            for peer in self.others:
                self._send(peer, RESULTS, result.view(np.uint8), self._tags(start, stop), RELIABLE)
        self.results[self.rank] = result
        self._look_whether_done()

    def _on_result(self, peer: int, arrival: Arrival) -> None:
        self.results[peer] = arrival.payload.view(self.values.dtype)
        self._look_whether_done()

    def _on_share_sent(self, first: int, last: int, delivery: Delivery) -> None:
        for packet in np.flatnonzero(~delivery.delivered).tolist():
            start = first + packet * self.per_packet
            self.lost.append((start, min(start + self.per_packet, last)))

    def _look_whether_done(self) -> None:
        owners = {owner for owner, (start, stop) in self.shards.items() if start < stop}
        if self.unconfirmed or self.done.done() or not owners <= set(self.results) or self.rank not in self.results:
            return
        if self.lost and self.reducer.options.error_feedback:
            places = np.concatenate([np.arange(start, stop) for start, stop in sorted(self.lost)])
            owed = self.value_type.widen(self.values[places])
            self.reducer.feedback.owe_at(places, np.where(np.isfinite(owed), owed, 0), self.bucket.segments)
        for owner in owners:
            start, stop = self.shards[owner]
            self.values[start:stop] = self.results[owner]
        self.done.set_result(self.values)

    def _parts(self) -> list[Values]:
        return [self.value_type.widen(self.shares[rank]) for rank in self.reducer.ranks]

    def _borders(self) -> list[int]:
        """Return where the bucket's layers begin and end within the own shard."""
        start, stop = self.shards[self.rank]
        ends = [segment.start for segment in self.bucket.segments] + [self.bucket.segments[-1].stop]
        return [min(max(end, start), stop) - start for end in ends]

    def _bound_of(self, start: int, stop: int) -> LossBound:
        layers = self.reducer.options.layers
        return layers.bound_of(self.bucket.segments, start, stop, self.per_packet, self.bound)

    def _tags(self, start: int, stop: int) -> PacketTags:
        packets = slice(start // self.per_packet, -(-stop // self.per_packet))
        tags = self.tags
        return PacketTags(tags.queue[packets], tags.drop_class[packets], tags.layer[packets], tags.protected[packets])

    def _send(
        self,
        peer: int,
        kind: tuple[int, int],
        content: NDArray[np.uint8],
        tags: PacketTags,
        bound: LossBound,
        then: "partial[None] | None" = None,
    ) -> None:
        name = (*kind, peer)
        self.unconfirmed.add(name)

        def on_sent(delivery: Delivery) -> None:
            self.reducer.ledger.record(self._key(*name), peer, self.label, tags, bound, delivery)
            self.unconfirmed.discard(name)
            if then:
                then(delivery)
            self._look_whether_done()

        sending = self.reducer.endpoint.send(SendRequest(peer, self._key(*name), content.data, tags, bound, self.label))
        sending.add_done_callback(self.guard(on_sent))

    def _receive(self, peer: int, kind: tuple[int, int], size: int, bound: LossBound, then: "partial[None]") -> None:
        request = ReceiveRequest(peer, self._key(*kind, self.rank), size, bound, self.label)
        arriving = self.reducer.endpoint.receive(request)
        arriving.add_done_callback(self.guard(then))

    def _key(self, number: int, phase: int, receiver: int) -> MessageKey:
        ranks = max(self.reducer.ranks) + 1
        return MessageKey(self.step, two_hop_number(NUMBERS * self.sequence + number, phase, receiver, ranks))
