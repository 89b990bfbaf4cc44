# SPDX-License-Identifier: Apache-2.0
"""Compressed all-gather: for compressors whose output cannot be averaged.

Every rank sends its compressed bucket to all others, then decodes and averages all buckets in the order of ranks.
Packets may be lost, but a rank must not use values that only some ranks have, or replicas would drift apart. So once
all receivers have acknowledged a message, its sender sends a verdict, without loss: the packets that all of them have.
All ranks use only these, and the rest becomes the sender's residual. Each of the n - 1 receivers may lose 1/(n - 1) of
the bound, so that together they keep it.

Lost values count as 0 in the average: with error feedback they are sent with the next step. ``ReduceOptions.rescale``
has no effect, because positions that a rank did not send are not lost.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, RankContext
from dlcp.collectives.compressed_bucket import CompressedReducer, CompressedRun, left_out
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.reduction_rules import Rule
from dlcp.compress.compressor import Compressor, Feedback, Values
from dlcp.dtypes import ValueType
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import PacketTags, Segment, plain_tags
from dlcp.transport import RELIABLE, Arrival, Delivery, LossBound, MessageKey, ReceiveRequest, SendRequest

CONTENT, VERDICT = REDUCE_SCATTER, ALL_GATHER
"""The two phases of message numbers: the ranks' contents, and their verdicts."""


class CompressedAllGather(CompressedReducer):
    """Averages buckets by sending each rank's compressed form to all ranks.

    Parameters
    ----------
    context, compressor, work
        See :class:`CompressedReducer`.
    rule
        The rule to combine all ranks' gradients, if the compressor has none.
    """

    def __init__(self, context: RankContext, compressor: Compressor, rule: Rule, work: Executor | None = None) -> None:
        super().__init__(context, compressor, work)
        self.rule = rule

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket; the future's result is ``bucket.values``, written in place."""
        self.context.check_key(step, sequence)
        return self.run(AllGatherRun(self, step, sequence, bucket))

    def combine(self, parts: Sequence[Callable[[], Values]], segments: Sequence[Segment]) -> Values:
        """Combine all ranks' gradients."""
        combined = self.compressor.combine(part() for part in parts)
        return self.rule(parts, segments) if combined is None else combined


class AllGatherRun(CompressedRun):
    """One bucket in progress; only decoding runs outside the endpoint's thread."""

    reducer: CompressedAllGather

    def __init__(self, reducer: CompressedAllGather, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer, step, sequence, bucket)
        self.connection, self.rank, self.ranks = self.context.connection, self.context.rank, self.context.contributors
        self.peers = self.context.peers
        payload_bytes = self.connection.options.payload_bytes
        self.content = np.ascontiguousarray(self.encoded.content).view(np.uint8)
        self.units_per_packet = payload_bytes * 8 // self.encoded.unit_bits
        self.packets = -(-len(self.content) // payload_bytes)
        self.bound = self._bound()
        self.tags = self._tags()
        self.unconfirmed = set(self.peers)
        self.everywhere = np.ones(self.packets, np.bool_)
        """This rank's packets that have arrived at all receivers so far."""
        self.contents: dict[int, NDArray[np.uint8]] = {self.rank: self.content}
        self.verdicts: dict[int, NDArray[np.bool_]] = {}
        """Each rank's packets that count."""

    def begin(self) -> None:
        """Send to all peers, and post receives for their contents."""
        index = self.ranks.index(self.rank)
        # Each rank begins with another peer, so that no receiver is overrun.
        for peer in [*self.ranks[index + 1 :], *self.ranks[:index]]:
            self._receive(peer, CONTENT, len(self.content), self.bound, self._on_content)
            if self.bound.ratio:
                self._receive(peer, VERDICT, -(-self.packets // 8), RELIABLE, self._on_verdict)
            key = self._key(CONTENT, peer)
            request = SendRequest(peer, key, self.content.data, self.tags, self.bound, self.label)
            self.connection.send(request, self.guard(partial(self._on_sent, peer)))
        if not self.peers:
            self._judge()

    def residual(self) -> Values | None:
        """Return the values that coding left out or this rank's verdict excludes."""
        verdict = self.verdicts.get(self.rank)
        if verdict is None or self.compressor.feedback is Feedback.NOTHING:
            return None
        if self.compressor.feedback is Feedback.LOST and verdict.all():
            return None
        return left_out(self.compressor, self.own, self.encoded, self._decoded(self.content, verdict))

    def _bound(self) -> LossBound:
        """Return the bound of each receiver."""
        options, encoded = self.context.options, self.encoded
        if self.bucket.whole:
            return RELIABLE
        whole = options.bound_of(self.bucket)
        bound = options.layers.bound_of(encoded.segments, 0, encoded.units, self.units_per_packet, whole)
        return LossBound(bound.ratio / max(1, len(self.peers)), bound.immediate)

    def _tags(self) -> PacketTags:
        encoded, tagger, options = self.encoded, self.context.tagger, self.context.options
        if not self.bound.ratio or encoded.worth is None:
            return tagger.tag_whole(encoded.units, encoded.segments, self.units_per_packet)
        worth = packet_magnitudes(encoded.worth, ValueType.FLOAT32, self.units_per_packet)
        # A last byte may have room for more units than there are.
        tags = tagger.tag_magnitudes(worth, encoded.units, encoded.segments, self.units_per_packet)
        must = ~np.isfinite(worth)
        tags.protected[must], tags.drop_class[must] = True, 0
        bound, hops = options.bound_of(self.bucket), max(1, len(self.peers))
        options.layers.protect(tags, encoded.segments, self.units_per_packet, bound, seed=self.step, hops=hops)
        return tags

    def _on_content(self, peer: int, arrival: Arrival) -> None:
        self.contents[peer] = arrival.payload
        self._look_whether_all_is_here()

    def _on_sent(self, peer: int, delivery: Delivery) -> None:
        self.context.ledger.record(self._key(CONTENT, peer), peer, self.label, self.tags, self.bound, delivery)
        self.everywhere &= delivery.delivered
        self.unconfirmed.discard(peer)
        if not self.unconfirmed:
            self._judge()

    def _judge(self) -> None:
        """Send the verdict on this rank's packets; needless if no loss is allowed."""
        self.verdicts[self.rank] = self.everywhere
        if self.bound.ratio:
            bits = np.packbits(self.everywhere)
            tags = plain_tags(-(-len(bits) // self.connection.options.payload_bytes))
            for peer in self.peers:
                key = self._key(VERDICT, peer)
                request = SendRequest(peer, key, bits.data, tags, RELIABLE, self.label)
                self.connection.send(request, self.guard(lambda _: None))
        else:
            self.verdicts.update(dict.fromkeys(self.peers, self.everywhere))
        self._look_whether_all_is_here()

    def _on_verdict(self, peer: int, arrival: Arrival) -> None:
        self.verdicts[peer] = np.unpackbits(arrival.payload, count=self.packets).astype(np.bool_)
        self._look_whether_all_is_here()

    def _look_whether_all_is_here(self) -> None:
        if len(self.contents) < len(self.ranks) or len(self.verdicts) < len(self.ranks):
            return
        parts = [partial(self._decoded, self.contents[rank], self.verdicts[rank]) for rank in self.ranks]
        decode = partial(self.reducer.combine, parts, self.bucket.segments)
        self.aside(partial(self.finish, decode))

    def _decoded(self, content: NDArray[np.uint8], verdict: NDArray[np.bool_]) -> Values:
        present = None if verdict.all() else np.repeat(verdict, self.units_per_packet)[: self.encoded.units]
        return self.compressor.decode(self.encoded, content, present)

    def _receive(
        self, peer: int, phase: int, size: int, bound: LossBound, then: Callable[[int, Arrival], None]
    ) -> None:
        request = ReceiveRequest(peer, self._key(phase, self.rank), size, bound, self.label)
        self.connection.receive(request, self.guard(partial(then, peer)))

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return self.context.key(self.step, self.sequence, phase, receiver)
