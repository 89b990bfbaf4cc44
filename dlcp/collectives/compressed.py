# SPDX-License-Identifier: Apache-2.0
"""Compressed buckets: all-reduce where compressed values can be added up, otherwise all-gather.

*All-reduce.* The compressed values are an ordinary, smaller bucket: tagged by their own magnitudes, with the usual loss
bound. Decoding is linear, so lost values are decoded, too, and become residual at the gradient's positions.

*All-gather.* Every rank sends its compressed bucket to all others, then decodes and averages all buckets in the order
of ranks. Packets may be lost, but a rank must not use values that only some ranks have, or replicas would drift apart.
So once all receivers have acknowledged a message, its sender sends a verdict, without loss: the packets that all of
them have. All ranks use only these, and the rest becomes the sender's residual. Each of the n - 1 receivers may lose
1/(n - 1) of the bound, so that together they keep it. Lost values count as 0 in the average: with error feedback they
are sent with the next step. ``ReduceOptions.rescale`` has no effect, because positions that a rank did not send are not
lost.

*If the path fails.* A part of a compressed bucket cannot be averaged on its own. So until a rank has the result, its
bucket holds its own contribution in full precision. A rank with the result keeps it, compressed, until no other rank
can need it. Recovery therefore yields either one rank's result, which the others copy, or the exact average of all
contributions (:mod:`dlcp.collectives.partial_result`); the latter has no residual, because nothing was left out. In an
all-reduce of three or more ranks, a failing path may lose values for good: one rank may have the result while another
does not yet know which of its packets an owner received. The owner knows this for packets of the compressed bucket, but
not for the gradient.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, BucketRun, RankContext, Strategy
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import Rule
from dlcp.collectives.residual import Residual
from dlcp.compress.compressor import Compressor, Encoded, Feedback, Occasion, Values
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
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import PacketTags, Segment, packet_magnitudes, plain_tags

SEED: Final = 0x0D1C9
"""Seeds random choices, with step, rank and layer; the same on all ranks and in every run."""
WORK_S: Final = 10.0
"""The longest wait for pending decoding when the path fails; decoding normally takes milliseconds."""

Decode = Callable[[], Values]
"""Computes the result from the received data; may be called repeatedly."""


class CompressedReducer:
    """Common part of compressed all-reduce and compressed all-gather.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share; its residual is that of gradients.
    compressor
        The compressor of buckets.
    work
        The executor for decoding, so that it does not delay the endpoint's thread.
    """

    def __init__(self, context: RankContext, compressor: Compressor, work: Executor | None = None) -> None:
        self.context, self.compressor = context, compressor
        self.work = work or ThreadPoolExecutor(1, "dlcp-decode")

    def close(self) -> None:
        """Stop the thread that decodes buckets."""
        self.work.shutdown(wait=False)

    def await_work(self) -> None:
        """Wait for pending decoding, which determines the values left out."""
        idle = threading.Event()
        self.work.submit(idle.set)
        idle.wait(WORK_S)


class CompressedRun(BucketRun):
    """One bucket in progress.

    Attributes
    ----------
    own
        This rank's contribution with its residual, widened: used for recovery if the path fails.
    encoded
        The data that it sends.
    """

    def __init__(self, reducer: CompressedReducer, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer.context, step, sequence, bucket, reducer.work)
        self.reducer, self.compressor = reducer, reducer.compressor
        self.own = self._own()
        self.decode: Decode | None = None
        """Decodes the bucket's result again, once this rank has it: another rank may need that."""
        self.encoded = self.compressor.encode(
            self.own if np.isfinite(self.own).all() else np.full_like(self.own, np.nan),
            bucket.segments,
            Occasion(step, self.context.rank, SEED),
        )

    def finish(self, decode: Decode) -> None:
        """Compute the result; the endpoint's thread, which stops with the endpoint, writes it into the bucket."""
        result = decode().astype(self.own.dtype, copy=False)
        residual = self.residual() if self.context.options.error_feedback else None
        narrow = self.bucket.value_type.narrow(result)
        try:
            self.context.connection.call(partial(self._write, narrow, residual, decode))
        except TransportError as error:
            self.fail(error)

    @abstractmethod
    def residual(self) -> Values | None:
        """Return the residual that belongs to the bucket's result; None for nothing."""

    def partial_result(self) -> PartialResult:
        """Return this rank's state of the bucket: the result, or its contribution and the residual of the result."""
        self.reducer.await_work()
        if self.decode is not None:
            values = self.decode().astype(self.own.dtype, copy=False)
            return PartialResult.averaged(self.context.contributors, values, self.values_per_packet)
        packets = -(-len(self.own) // self.values_per_packet)
        own = {self.context.rank: np.ones(packets, np.bool_)}
        residual = self.residual() if self.context.options.error_feedback else None
        if residual is not None:
            residual = residual.astype(self.own.dtype, copy=False)
        final = np.zeros(packets, np.bool_)
        return PartialResult(self.own, self.values_per_packet, final, own, residual)

    def _own(self) -> Values:
        bucket, residual = self.bucket, self.context.residual
        own = bucket.value_type.widen(bucket.values)
        if self.context.options.error_feedback:
            if own is bucket.values:
                residual.apply(bucket.values, bucket.segments, bucket.value_type)
            else:  # widened, so that small values are not rounded away
                residual.apply(own, bucket.segments)
        return own

    def _write(self, values: NDArray[np.generic], residual: Values | None, decode: Decode) -> None:
        if self.done():
            return
        np.copyto(self.bucket.values, values)
        if residual is not None:
            keep = self.context.residual
            add = keep.add_whole if self.compressor.feedback is Feedback.ALL else keep.add
            add(residual, self.bucket.segments)
        self.decode, self.own = decode, self.own[:0]  # which nobody needs any more
        self.set_result(self.bucket.values)


def left_out(compressor: Compressor, own: Values, encoded: Encoded, used: Values) -> Values | None:
    """Return the rest of a rank's contribution, after ``used`` went into the result; None if there is none.

    Non-finite values are left out: this step's loss scaler gets them, and as residual they would spoil the next step.
    """
    if compressor.feedback is Feedback.NOTHING:
        return None
    with np.errstate(invalid="ignore"):
        if compressor.feedback is Feedback.LOST:
            missing = compressor.decode(encoded, encoded.content) - used
        else:
            missing = own - used
    is_finite = np.isfinite(missing)
    if not is_finite.all():
        missing[~is_finite] = 0
    return missing


def decoded_part(
    compressor: Compressor,
    encoded: Encoded,
    units_per_packet: int,
    content: NDArray[np.uint8],
    verdict: NDArray[np.bool_],
) -> Values:
    """Decode a rank's content, laid out as in ``encoded``; only packets that the verdict includes count."""
    present = None if verdict.all() else np.repeat(verdict, units_per_packet)[: encoded.units]
    return compressor.decode(encoded, content, present)


class CompressedAllReduce(CompressedReducer):
    """Averages compressed buckets.

    Parameters
    ----------
    context, compressor, work
        See :class:`CompressedReducer`; ``compressor.reduces``.
    inner
        The strategy that averages encoded buckets; each bucket uses ``compressor.rounds`` of its bucket numbers.
    in_transit
        The residual of ``inner`` only: its positions are those of encoded buckets.
    """

    def __init__(
        self,
        context: RankContext,
        compressor: Compressor,
        inner: Strategy,
        in_transit: Residual,
        work: Executor | None = None,
    ) -> None:
        super().__init__(context, compressor, work)
        self.inner, self.in_transit = inner, in_transit

    def start(self, step: int, sequence: int, bucket: Bucket) -> "AllReduceRun":
        """Begin to average a bucket, and return its run."""
        return AllReduceRun(self, step, sequence, bucket).start()


class AllReduceRun(CompressedRun):
    """One bucket's run through one all-reduce, or several rounds of it."""

    reducer: CompressedAllReduce

    def __init__(self, reducer: CompressedAllReduce, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer, step, sequence, bucket)
        self.number = 0
        """Number of the round."""
        self.lost: Values | None = None
        """Values that the network lost in the last round, decoded."""
        self.inner: BucketRun | None = None
        """The current round's run, until it is done."""

    def start(self) -> "AllReduceRun":
        """Average the first round, from the caller's thread."""
        self.begin()
        return self

    def partial_result(self) -> PartialResult:
        """Return this rank's state of the bucket; see :meth:`CompressedRun.partial_result`."""
        self.reducer.await_work()
        sent = None if self.inner is None else self.inner.partial_result()
        if sent is not None and sent.residual is not None:
            self.note_lost(sent.residual)
        return super().partial_result()

    def begin(self) -> None:
        """Average the current round."""
        # A copy: the average overwrites the sent values, which are needed to find what was left out.
        content, kind, segments = np.array(self.encoded.content), ValueType.FLOAT32, self.encoded.segments
        sent = replace(self.bucket, values=content, value_type=kind, segments=segments, magnitudes=None, exported=False)
        number = self.sequence * self.compressor.rounds + self.number
        inner = self.inner = self.reducer.inner.start(self.step, number, sent)
        inner.add_done_callback(partial(self._on_averaged, sent))

    def _on_averaged(self, sent: Bucket, averaged: "Future[NDArray[np.generic]]") -> None:
        error = averaged.exception()
        if error is None:
            self.inner = None
            self.aside(partial(self._on_mean, sent, averaged.result()))
        else:
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def residual(self) -> Values | None:
        """Return the values that coding left out or the network lost."""
        compressor = self.compressor
        if compressor.feedback is Feedback.NOTHING:
            return None
        used = compressor.decode(self.encoded, self.encoded.content)
        if self.lost is not None:
            used = used - self.lost
        return left_out(compressor, self.own, self.encoded, used)

    def note_lost(self, lost: Values) -> None:
        """Record this round's losses in the network, at the positions of the sent values."""
        if lost.any():
            self.lost = self.compressor.decode(self.encoded, lost)

    def _on_mean(self, sent: Bucket, average: NDArray[np.generic]) -> None:
        encoded: Encoded = self.encoded
        mean = ValueType.FLOAT32.widen(average)
        # Removed in any case: losses in a round that only guides the next are not residual.
        lost: Values = np.zeros(len(average), np.float32)
        self.reducer.in_transit.apply(lost, sent.segments)
        refined = self.compressor.refine(encoded, mean)
        if refined is not None:
            self.encoded, self.number = refined, self.number + 1
            self.begin()
            return
        self.note_lost(lost)
        self.finish(partial(self.compressor.decode, encoded, mean))


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

    def start(self, step: int, sequence: int, bucket: Bucket) -> "AllGatherRun":
        """Begin to average a bucket, and return its run."""
        self.context.check_key(step, sequence)
        return AllGatherRun(self, step, sequence, bucket).start()

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
        # Each rank begins with a different peer, so that no receiver is overrun.
        for peer in [*self.ranks[index + 1 :], *self.ranks[:index]]:
            self._receive(peer, CONTENT, len(self.content), self.bound, self._on_content)
            if self.bound.ratio:
                self._receive(peer, VERDICT, -(-self.packets // 8), RELIABLE, self._on_verdict)
            key = self._key(CONTENT, peer)
            request = SendRequest(peer, key, self.content.data, self.tags, self.bound, self.label)
            self.connection.send(request, partial(self._on_sent, peer), self.fail)
        if not self.peers:
            self._judge()

    def residual(self) -> Values | None:
        """Return the values that coding left out or this rank's verdict excludes."""
        verdict = self.verdicts.get(self.rank)
        if verdict is None or self.compressor.feedback is Feedback.NOTHING:
            return None
        if self.compressor.feedback is Feedback.LOST and verdict.all():
            return None
        used = decoded_part(self.compressor, self.encoded, self.units_per_packet, self.content, verdict)
        return left_out(self.compressor, self.own, self.encoded, used)

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
        # The last byte may have room for more units than the bucket has.
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
                self.connection.send(request, lambda _: None, self.fail)
        else:
            self.verdicts.update(dict.fromkeys(self.peers, self.everywhere))
        self._look_whether_all_is_here()

    def _on_verdict(self, peer: int, arrival: Arrival) -> None:
        self.verdicts[peer] = np.unpackbits(arrival.payload, count=self.packets).astype(np.bool_)
        self._look_whether_all_is_here()

    def _look_whether_all_is_here(self) -> None:
        if len(self.contents) < len(self.ranks) or len(self.verdicts) < len(self.ranks):
            return
        # Not bound to the run, which keeps the result's decoding: they would keep each other alive.
        decoded = partial(decoded_part, self.compressor, self.encoded, self.units_per_packet)
        parts = [partial(decoded, self.contents[rank], self.verdicts[rank]) for rank in self.ranks]
        decode = partial(self.reducer.combine, parts, self.bucket.segments)
        self.aside(partial(self.finish, decode))

    def _receive(
        self, peer: int, phase: int, size: int, bound: LossBound, then: Callable[[int, Arrival], None]
    ) -> None:
        request = ReceiveRequest(peer, self._key(phase, self.rank), size, bound, self.label)
        self.connection.receive(request, partial(then, peer), self.fail)

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return self.context.key(self.step, self.sequence, phase, receiver)
