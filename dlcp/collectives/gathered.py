# SPDX-License-Identifier: Apache-2.0
"""Compressed buckets from all ranks to all ranks: for compressors of which the averages mean nothing.

Every rank sends what it has made of a bucket to all others, and each decodes and averages all of them, in the order of
ranks. On the way packets may be lost; but what only some ranks have got, none may use, or replicas would drift apart.
So who has sent a message, and been told what each receiver has of it, gives a verdict, whole: the packets that all
have. Only these count, on all ranks, and of the rest the sender owes what they stood for. So that no more than the
bound is lost of a message to n - 1 receivers together, each may lose 1/(n - 1) of that.

What was lost counts as 0 in the average: with error feedback it comes with the next step. ``ReduceOptions.rescale``
changes nothing, for a place of which one rank has sent nothing is not a place that one rank has lost.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket
from dlcp.collectives.coding import CodedRun, CodingReducer, left_out
from dlcp.collectives.message_numbers import two_hop_number
from dlcp.collectives.push_pull import PULL, PUSH
from dlcp.compress.compressor import Feedback, Values, average
from dlcp.dtypes import ValueType
from dlcp.ledger import Ledger
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import PacketTags, Segment, Tagger, plain_tags
from dlcp.transport import (
    RELIABLE,
    Arrival,
    Delivery,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportError,
)

Combine = Callable[[Sequence[Callable[[], Values]], Sequence[Segment]], Values]
"""Makes one of what all ranks' decode to, in the order of ranks; each can be decoded as often as it is needed."""


def average_of(parts: Sequence[Callable[[], Values]], segments: Sequence[Segment]) -> Values:
    """Return the average; only one part is there at a time."""
    return average(part() for part in parts)


@dataclass(eq=False, repr=False)
class GatheredReducer(CodingReducer):
    """Averages buckets of which all ranks get all ranks' compressed form.

    Parameters
    ----------
    plain, endpoint, ranks, compressor, options, feedback, work
        See :class:`CodingReducer`.
    tagger, ledger
        How packets are tagged, and where messages are entered.
    rule
        What becomes of all ranks' gradients, if the compressor does not say.
    """

    tagger: Tagger = field(default_factory=Tagger, kw_only=True)
    ledger: Ledger = field(default_factory=Ledger, kw_only=True)
    rule: Combine = field(default=average_of, kw_only=True)

    def make_run(self, step: int, sequence: int, bucket: Bucket) -> "_Run":
        """Return what takes a bucket through."""
        return _Run(self, step, sequence, bucket)

    def combine(self, parts: Sequence[Callable[[], Values]], segments: Sequence[Segment]) -> Values:
        """Return what all ranks' gradients become."""
        combined = self.compressor.combine(_each(parts))
        return self.rule(parts, segments) if combined is None else combined


class _Run(CodedRun):
    """One bucket on its way to all ranks; but for decoding, in the endpoint's thread."""

    reducer: GatheredReducer

    def __init__(self, reducer: GatheredReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer, step, sequence, bucket)
        self.rank = reducer.endpoint.rank
        self.peers = [rank for rank in reducer.ranks if rank != self.rank]
        self.content = np.ascontiguousarray(self.encoded.content).view(np.uint8)
        self.per_packet = reducer.endpoint.options.payload_bytes * 8 // self.encoded.unit_bits
        self.packets = -(-len(self.content) // reducer.endpoint.options.payload_bytes)
        self.bound = self._bound()
        self.tags = self._tags()
        self.unconfirmed = set(self.peers)
        self.everywhere = np.ones(self.packets, np.bool_)
        """Which packets of this rank's all receivers have, as far as they have told."""
        self.contents: dict[int, NDArray[np.uint8]] = {self.rank: self.content}
        self.verdicts: dict[int, NDArray[np.bool_]] = {}
        """Which packets of each rank count."""

    def start(self) -> None:
        """Let the endpoint's thread begin."""
        try:
            self.reducer.endpoint.call(self.begin)
        except TransportError as error:
            self.fail(error)

    def begin(self) -> None:
        """Send to all, and wait for what all send."""
        reducer = self.reducer
        place = reducer.ranks.index(self.rank)
        # Each rank begins with another peer, to overrun nobody.
        for peer in [*reducer.ranks[place + 1 :], *reducer.ranks[:place]]:
            arriving = reducer.endpoint.receive(
                ReceiveRequest(peer, self._key(PUSH, self.rank), len(self.content), self.bound, self.label)
            )
            arriving.add_done_callback(self.guard(partial(self._on_content, peer)))
            if self.bound.ratio:
                hearing = reducer.endpoint.receive(
                    ReceiveRequest(peer, self._key(PULL, self.rank), -(-self.packets // 8), RELIABLE, self.label)
                )
                hearing.add_done_callback(self.guard(partial(self._on_verdict, peer)))
            sending = reducer.endpoint.send(
                SendRequest(peer, self._key(PUSH, peer), self.content.data, self.tags, self.bound, self.label)
            )
            sending.add_done_callback(self.guard(partial(self._on_sent, peer)))
        if not self.peers:
            self._judge()

    def owed(self) -> Values | None:
        """Return what coding has left out, and what this rank's verdict says is lost."""
        verdict = self.verdicts.get(self.rank)
        if verdict is None or self.compressor.feedback is Feedback.NOTHING:
            return None
        if self.compressor.feedback is Feedback.LOST and verdict.all():
            return None
        return left_out(self.compressor, self.own, self.encoded, self._decoded(self.content, verdict))

    def _bound(self) -> LossBound:
        """Return what each receiver may lose."""
        whole = self.reducer.options.bound_of(self.bucket)
        layers = self.reducer.options.layers
        bound = layers.bound_of(self.encoded.segments, 0, self.encoded.units, self.per_packet, whole)
        return LossBound(bound.ratio / max(1, len(self.peers)), bound.immediate)

    def _tags(self) -> PacketTags:
        encoded, tagger = self.encoded, self.reducer.tagger
        if not self.bound.ratio or encoded.worth is None:
            return tagger.tag_whole(encoded.units, encoded.segments, self.per_packet)
        worth = packet_magnitudes(encoded.worth, ValueType.FLOAT32, self.per_packet)
        # A last byte may have room for more units than there are.
        tags = tagger.tag_magnitudes(worth, encoded.units, encoded.segments, self.per_packet)
        must = ~np.isfinite(worth)
        tags.protected[must], tags.drop_class[must] = True, 0
        self.reducer.options.layers.protect(
            tags,
            encoded.segments,
            self.per_packet,
            self.reducer.options.bound_of(self.bucket),
            turn=self.step,
            hops=max(1, len(self.peers)),
        )
        return tags

    def _on_content(self, peer: int, arrival: Arrival) -> None:
        self.contents[peer] = arrival.payload
        self._one_more()

    def _on_sent(self, peer: int, delivery: Delivery) -> None:
        self.reducer.ledger.record(self._key(PUSH, peer), peer, self.label, self.tags, self.bound, delivery)
        self.everywhere &= delivery.delivered
        self.unconfirmed.discard(peer)
        if not self.unconfirmed:
            self._judge()

    def _judge(self) -> None:
        """Say which of the own packets count; where none may be lost, all know."""
        self.verdicts[self.rank] = self.everywhere
        if self.bound.ratio:
            endpoint, bits = self.reducer.endpoint, np.packbits(self.everywhere)
            tags = plain_tags(-(-len(bits) // endpoint.options.payload_bytes))
            for peer in self.peers:
                verdict = SendRequest(peer, self._key(PULL, peer), bits.data, tags, RELIABLE, self.label)
                telling = endpoint.send(verdict)
                telling.add_done_callback(self.guard(lambda _: None))
        else:
            self.verdicts.update(dict.fromkeys(self.peers, self.everywhere))
        self._one_more()

    def _on_verdict(self, peer: int, arrival: Arrival) -> None:
        self.verdicts[peer] = np.unpackbits(arrival.payload, count=self.packets).astype(np.bool_)
        self._one_more()

    def _one_more(self) -> None:
        if len(self.contents) < len(self.reducer.ranks) or len(self.verdicts) < len(self.reducer.ranks):
            return
        parts = [
            partial(self._decoded, self.contents[rank], self.verdicts[rank]) for rank in sorted(self.reducer.ranks)
        ]
        again = partial(self.reducer.combine, parts, self.bucket.segments)
        self.aside(partial(self.finish, again))

    def _decoded(self, content: NDArray[np.uint8], verdict: NDArray[np.bool_]) -> Values:
        present = None if verdict.all() else np.repeat(verdict, self.per_packet)[: self.encoded.units]
        return self.compressor.decode(self.encoded, content, present)

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return MessageKey(self.step, two_hop_number(self.sequence, phase, receiver, max(self.reducer.ranks) + 1))


def _each(parts: Iterable[Callable[[], Values]]) -> Iterator[Values]:
    for part in parts:
        yield part()
