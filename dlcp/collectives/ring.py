# SPDX-License-Identifier: Apache-2.0
"""Ring all-reduce: each rank only sends to the next one, so one flow enters each port.

A bucket is divided into a block per rank. The partial sum of a block goes around once (reduce-scatter), and each rank
adds its own gradients. The last rank divides, and the average goes around once more (all-gather; Patarasuk and Yuan,
2009). Blocks are sent in pieces, so that a rank adds one while the next is in flight.

The first round may lose packets within a bound. A lost packet is a partial sum of several ranks. All of it becomes
residual of its sender, which sends it with the next step. The second round is reliable, so that replicas never drift
apart.

Rescaling needs the number of ranks in each packet's sum, or the number of samples if ranks have different weights.
These counts follow the sum in a protected trailer of two or four bytes per packet. The trailer exists only if packets
may be lost, and not on the first hop, whose sum has one rank.

**Lower precision.** Every hop decodes a partial sum, adds its own gradients, and encodes the sum again
(:mod:`dlcp.values.planes`). Its rounding error becomes residual of the sender, as lost packets do. An average is
encoded once; ranks forward its bytes unchanged. Each average carries a rate, which is negative if no packet of its
sender was lost or marked.

A packet is tagged by its sender's own gradients, not by the partial sum. For gradients of a small convolutional network
on eight ranks, the two packet orders correlate by 0.63 to 0.97, and the tenth with the smallest own gradients holds at
most 1.6 % of the partial sum's squared norm. A second classification would not pay off. Non-finite values of any rank
are protected.

Behind a slow port, a direct all-reduce is better (``docs/decisions.md``). So that all ranks can choose it, each average
carries the rate from the rank that computed it to the next one.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import RATE, Bucket, BucketRun, RankContext
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER, pieces_allowed, ring_number
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import divide
from dlcp.collectives.shards import shard_bounds
from dlcp.inputs.error_text import describe
from dlcp.transport import (
    EMPTY,
    RELIABLE,
    Arrival,
    Bytes,
    Delivery,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    Then,
)
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags, packet_magnitudes

PIECE_BYTES = 1 << 22
"""Minimum size of a piece, if a block has several: a message costs a millisecond or more of processor time on a busy
host. Over loopback on two shared cores, 25 MB among 4 ranks took 1.1 times as long in pieces of 3 MB as in whole
blocks, 1.2 times in pieces of 2 MB and 2.3 times in pieces of 0.5 MB."""
COUNT: Final = np.dtype(">u2")
"""The number of ranks in a packet's sum."""
SAMPLES: Final = np.dtype(">u4")
"""The number of samples in it, which replaces the number of ranks if these have different weights."""
HALF_BYTES: Final = 2


def bound_of_hop(bound: LossBound, ranks: int) -> LossBound:
    """Return the bound of each hop, such that a round loses at most ``bound`` of each rank's gradients."""
    return LossBound(bound.ratio / max(1, ranks - 1), bound.immediate)


class Piece(NamedTuple):
    """A part of a block that travels separately: ``start`` to ``stop``, in values of the bucket, at packet borders."""

    block: int
    number: int
    start: int
    stop: int


def cut_in_pieces(values: int, values_per_packet: int, packet_bytes: int, ranks: int, sequence: int) -> list[Piece]:
    """Divide a bucket into one block per rank, and these into pieces; the same on all ranks.

    Parameters
    ----------
    values
        Length of the bucket, in values. If it has fewer packets than ranks, some blocks are empty and have no piece.
    values_per_packet, packet_bytes
        Values and bytes per packet.

    Raises
    ------
    ValueError
        The step has too many buckets to number their messages; the message says what to do.
    """
    ring_number(sequence, 0, ALL_GATHER, ranks - 1, ranks)  # raises before anything is sent
    allowed = pieces_allowed(sequence, ranks)
    pieces = []
    for block, (start, stop) in shard_bounds(values, values_per_packet, dict.fromkeys(range(ranks), 1.0)).items():
        block_bytes = -(-(stop - start) // values_per_packet) * packet_bytes
        count = max(1, min(allowed, block_bytes // PIECE_BYTES))
        parts = shard_bounds(stop - start, values_per_packet, dict.fromkeys(range(count), 1.0))
        pieces += [Piece(block, number, start + a, start + b) for number, (a, b) in parts.items() if a < b]
    return pieces


class RingAllReduce:
    """Ring all-reduce of one rank with its peers.

    :meth:`start` may be called from any thread; everything else runs in the endpoint's.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share. Adaptive shards have no effect: every block passes every
        rank.
    order
        The contributors in ring order, the same on all ranks; by default ascending. Keep ranks of one host together, so
        that one flow enters each host.
    tells_rates
        Whether ranks report rates to each other; the same on all ranks.

    Attributes
    ----------
    rates_bps
        Each rank's receive rate from the previous one in this step, in bit/s, 0 if unknown; the same on all ranks once
        they have all averages.
    """

    def __init__(self, context: RankContext, *, order: Sequence[int] | None = None, tells_rates: bool = False) -> None:
        self.context = context
        self.bits = FULL_BITS
        self.tells_rates = tells_rates
        self.rates_bps: dict[int, float] = {}
        self._told_with: dict[int, tuple[int, int]] = {}
        """The bucket and piece with which the latest rate arrived."""
        self.order = list(context.contributors if order is None else order)
        if sorted(self.order) != context.contributors:
            raise ValueError(f"a ring of ranks {context.contributors} cannot have the order {self.order}")
        self.ranks = len(self.order)
        self.index = self.order.index(context.rank)
        self.next = self.order[(self.index + 1) % self.ranks]
        self.previous = self.order[self.index - 1]
        self._aborted = False

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """See :meth:`dlcp.collectives.Reducer.begin_step`."""
        self.bits, self.rates_bps, self._told_with = bits, {}, {}

    def received_bps(self, slow: Container[int] = ()) -> Mapping[int, float]:
        """See :class:`dlcp.collectives.stages.MeasuringReducer`."""
        from dlcp.policies.slow_ports import snap_to_fastest  # only needed for a choice by rates

        return snap_to_fastest(self.rates_bps, slow) if len(self.rates_bps) == self.ranks else {}

    def note_rate(self, receiver: int, piece: tuple[int, int], rate_bps: float) -> None:
        """Record a rank's receive rate that arrived with a piece, unless a later piece's is known."""
        if piece >= self._told_with.get(receiver, piece):
            self.rates_bps[receiver], self._told_with[receiver] = rate_bps, piece

    def start(self, step: int, sequence: int, bucket: Bucket) -> "RingRun":
        """Begin to average a bucket over the contributors, and return its run.

        Until it is done ``bucket.values`` is being sent, and must not change.

        Parameters
        ----------
        step, sequence
            Training step, and the bucket's number within it; the same on all ranks.

        Raises
        ------
        ValueError
            The bucket is not contiguous, or its number too large; the message says which.
        """
        return RingRun(self, step, sequence, bucket).start()

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def abort(self, reason: str) -> None:
        """Notify the other ranks, once.

        Most have no messages with the failed one, and would wait for their deadline.
        """
        if not self._aborted:
            self._aborted = True
            self.context.connection.liveness.abort(reason)


class RingRun(BucketRun):
    """One bucket in progress.

    A piece's distance is the number of hops before its partial sum reaches this rank: 0 if this rank begins the sum,
    ``ranks - 1`` if it ends it.
    """

    def __init__(self, reducer: RingAllReduce, step: int, sequence: int, bucket: Bucket) -> None:
        super().__init__(reducer.context, step, sequence, bucket)
        context, options = reducer.context, reducer.context.options
        self.reducer, self.connection = reducer, context.connection
        self.value_type = bucket.value_type
        self.packet_bytes = self.connection.options.payload_bytes
        self.pieces = cut_in_pieces(
            len(bucket.values), self.values_per_packet, self.packet_bytes, reducer.ranks, sequence
        )
        if options.error_feedback:
            context.residual.apply(bucket.values, bucket.segments, self.value_type)
        bits, itemsize = bucket.bits_at(reducer.bits), bucket.values.itemsize
        self.layouts = {
            piece: layout
            for piece in self.pieces
            if (layout := PlaneLayout.of(piece.stop - piece.start, itemsize, bits, self.packet_bytes))
        }
        self.bounds = {piece: self._bound_of_hop(piece) for piece in self.pieces}
        self.counted = options.rescale and any(bound.ratio for bound in self.bounds.values())
        self.count = COUNT if bucket.samples is None else SAMPLES
        self.tags = self._tag()
        if self.timeline is not None:
            bits = bits if self.layouts else FULL_BITS
            self.timeline.note("tagged", step, sequence, bits)
        self.final = np.zeros(len(self.tags.queue), np.bool_)
        """Which packets hold the average."""
        self.lost: NDArray[np.floating] | None = None
        self.under_way: set[tuple[bool, MessageKey]] = set()
        """Messages that this rank sends (True) and are not acknowledged, or receives (False) and have not arrived. The
        bucket is done when none is left."""

    def _bound_of_hop(self, piece: Piece) -> LossBound:
        """Return each hop's loss bound for a piece."""
        bound = self.context.options.bound_within(self.bucket, piece.start, piece.stop, self.values_per_packet)
        bound, layout = bound_of_hop(bound, self.reducer.ranks) if bound.ratio else RELIABLE, self.layouts.get(piece)
        return bound if layout is None else replace(bound, ratio=min(bound.ratio, layout.loss_bound_max))

    def _tag(self) -> PacketTags:
        bucket, values, per_packet = self.bucket, len(self.bucket.values), self.values_per_packet
        tagger, options = self.context.tagger, self.context.options
        hops, bound = max(1, self.reducer.ranks - 1), options.bound_of(bucket)
        following = self.connection.peers.get(self.reducer.next)  # itself, if it is alone
        is_clear = following is None or following.is_clear
        if self.layouts or bucket.whole or (is_clear and not bound.immediate):
            return tagger.tag_whole(values, bucket.segments, per_packet)
        if bucket.magnitudes is None:
            tags = tagger.tag(bucket.values, self.value_type, bucket.segments, per_packet)
        else:
            tags = tagger.tag_magnitudes(bucket.magnitudes, values, bucket.segments, per_packet)
        options.layers.protect(tags, bucket.segments, per_packet, bound, seed=self.step, hops=hops)
        return tags

    def _samples(self, rank: int) -> int:
        """Return the number of samples in a rank's contribution; 1 if all ranks have the same weight."""
        return 1 if self.bucket.samples is None else self.bucket.samples[rank]

    def begin(self) -> None:
        """Send the block that begins at this rank, and post receives for the others."""
        for piece in self.pieces if self.reducer.ranks > 1 else []:
            hop, layout = self._distance(piece) - 1, self.layouts.get(piece)
            if layout is not None:
                self._begin_encoded(piece, layout, hop)
                continue
            if hop < 0:
                self._send_partial(piece, self._bytes(piece))
                continue
            packets, size = self._packets(piece), self._value_bytes(piece)
            sum_bytes = self.connection.buffers.take(size + packets * self.count.itemsize * self.counted)
            expected = sum_bytes if hop else sum_bytes[:size]
            self._receive(piece, REDUCE_SCATTER, hop, expected, partial(self._on_partial, piece, sum_bytes))
        self._look_whether_done()

    # First round: partial sums ----------------------------------------------------------------------------------------

    def _on_partial(self, piece: Piece, sum_bytes: NDArray[np.uint8], arrival: Arrival) -> None:
        """Add this rank's part to a sum; send it on, or its average if this rank is the last."""
        distance, size = self._distance(piece), self._value_bytes(piece)
        arrived, own = sum_bytes[:size].view(self.value_type.storage), self._values(piece)
        counts = sum_bytes[size:].view(self.count) if self.counted else None
        if counts is not None and distance == 1:
            counts.fill(self._samples(self.reducer.previous))
        missing = np.flatnonzero(~arrival.delivered[: self._packets(piece)])
        clear_missing(sum_bytes[:size], missing, self.packet_bytes, counts)
        if counts is not None:
            counts += self.count.type(self._samples(self.context.rank))
        total = total_at(distance - 1, arrived, own, self.value_type)
        if distance < self.reducer.ranks - 1:
            arrived[:] = sent_over(distance, total, self.value_type)
            self._send_partial(piece, sum_bytes)
            self._receive_average(piece)  # not before: an average may only overwrite values that were added
            return
        mean = divide(total, counts, self.reducer.ranks, self.values_per_packet, self.bucket.samples)
        own[:] = self.value_type.narrow(mean)
        self.connection.buffers.give(sum_bytes)
        self._begin_average(piece, self._bytes(piece))

    def _send_partial(self, piece: Piece, sum_bytes: NDArray[np.uint8]) -> None:
        distance, size, bound = self._distance(piece), self._value_bytes(piece), self.bounds[piece]
        tags = self._tags(piece, -(-len(sum_bytes) // self.packet_bytes))
        if distance and bound.ratio:
            values = sum_bytes[:size].view(self.value_type.storage)
            magnitudes = packet_magnitudes(values, self.value_type, self.values_per_packet)
            tags.protected[: len(magnitudes)] |= ~np.isfinite(magnitudes)
        if len(sum_bytes) > size:
            tags.protected[size // self.packet_bytes :] = True
        self._send(piece, REDUCE_SCATTER, distance, sum_bytes, tags, partial(self._on_partial_sent, piece, sum_bytes))

    def _on_partial_sent(self, piece: Piece, sum_bytes: NDArray[np.uint8], delivery: Delivery) -> None:
        distance = self._distance(piece)
        if self.context.options.error_feedback and not delivery.delivered.all():
            values = sum_bytes.view(self.value_type.storage)  # no count trailer unless rescaling is on
            lost = np.repeat(~delivery.delivered, self.values_per_packet)[: len(values)]
            self._lose(piece, np.where(lost, held_by(distance, values, self.value_type), 0))
        if distance == 0:
            self._receive_average(piece)  # not before: the average overwrites what was sent
        else:
            self.connection.buffers.give(sum_bytes)

    # First round: encoded sums ----------------------------------------------------------------------------------------

    def _begin_encoded(self, piece: Piece, layout: PlaneLayout, hop: int) -> None:
        """Send an encoded contribution if this rank begins the sum, otherwise post the receive for the sum."""
        if hop < 0:
            self._send_encoded(piece, layout, self.value_type.widen(self._values(piece)))
        else:
            code = self.connection.buffers.take(layout.bytes)
            self._receive(piece, REDUCE_SCATTER, hop, code, partial(self._on_encoded, piece, layout, code))

    def _on_encoded(self, piece: Piece, layout: PlaneLayout, code: Bytes, arrival: Arrival) -> None:
        """Add this rank's part to an encoded sum; send it on, or its average if this rank is the last."""
        total = np.array(self.value_type.widen(self._values(piece)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the loss scaler handles these
            layout.add(code, total, arrival.delivered)
            self.connection.buffers.give(code)
            if self._distance(piece) < self.reducer.ranks - 1:
                self._send_encoded(piece, layout, total)
                self._receive_average(piece)
                return
            total /= np.float32(self.reducer.ranks)
            code = self.connection.buffers.take(layout.bytes)
            rest = self._new_rest(layout)
            layout.round(total, code, rest, self.reducer.ranks)  # the next contribution is divided by their number
            self._values(piece)[:] = self.value_type.narrow(total)
            if rest is not None:
                self._lose(piece, rest)
        self._begin_average(piece, code)

    def _send_encoded(self, piece: Piece, layout: PlaneLayout, total: NDArray[np.floating]) -> None:
        """Send an encoded sum, and keep its rounding errors until the receiver acknowledges which digits arrived."""
        code, rest = self.connection.buffers.take(layout.bytes), self._new_rest(layout)
        layout.encode(np.asarray(total, np.float32), code, rest)
        may_drop = self._may_drop(layout, self._within(piece)) if self.bounds[piece].ratio else None
        plain = self._tags(piece, self._packets(piece))
        tags = layout.tags(plain, self.values_per_packet, code, may_drop)
        then = partial(self._on_encoded_sent, piece, layout, code, rest)
        self._send(piece, REDUCE_SCATTER, self._distance(piece), code, tags, then)

    def _new_rest(self, layout: PlaneLayout) -> NDArray[np.float32] | None:
        """Return memory for a code's rounding errors, if they will be residual."""
        return np.empty(layout.values, np.float32) if self.context.options.error_feedback else None

    def _on_encoded_sent(
        self, piece: Piece, layout: PlaneLayout, code: Bytes, rest: NDArray[np.float32] | None, delivery: Delivery
    ) -> None:
        if rest is not None:
            if delivery.lost:
                layout.lose(code, delivery.delivered, rest)
            self._lose(piece, rest)
        self.connection.buffers.give(code)
        if self._distance(piece) == 0:
            self._receive_average(piece)

    # Second round: averages -------------------------------------------------------------------------------------------

    def _begin_average(self, piece: Piece, payload: Bytes) -> None:
        """Send an average that this rank has computed."""
        self._note_final(piece)
        rate = np.array([self.connection.peers[self.reducer.next].rate_bps], RATE).view(np.uint8)
        self._note_rate(piece, rate)
        self._send_average(piece, 0, payload, rate)

    def _receive_average(self, piece: Piece) -> None:
        rate, layout = np.zeros(RATE.itemsize, np.uint8), self.layouts.get(piece)
        into = self._bytes(piece) if layout is None else self.connection.buffers.take(layout.bytes)
        then = partial(self._on_average, piece, into, rate)
        self._receive(piece, ALL_GATHER, self._distance(piece), into, then, self._told(rate))

    def _note_final(self, piece: Piece) -> None:
        self.final[self._within(piece)] = True

    def _on_average(self, piece: Piece, payload: Bytes, rate: Bytes, _: Arrival) -> None:
        self._note_rate(piece, rate)
        behind = self._distance(piece) + 1
        if behind < self.reducer.ranks - 1:
            self._send_average(piece, behind, payload, rate)
        elif piece in self.layouts:
            self.connection.buffers.give(payload)

    def _send_average(self, piece: Piece, hop: int, payload: Bytes, rate: Bytes) -> None:
        tail, layout = self._told(rate), self.layouts.get(piece)
        packets = -(-(len(payload) + len(tail)) // self.packet_bytes)
        if layout is None:
            self._send(piece, ALL_GATHER, hop, payload, self._tags(piece, packets), lambda _: None, tail)
        else:
            plain, more = self._tags(piece, self._packets(piece)), packets - layout.planes * layout.packets
            tags = layout.tags(plain, self.values_per_packet, payload, None, more)
            self._send(piece, ALL_GATHER, hop, payload, tags, lambda _: self.connection.buffers.give(payload), tail)

    def _told(self, rate: Bytes) -> Bytes:
        return rate if self.reducer.tells_rates else EMPTY

    def _note_rate(self, piece: Piece, rate: Bytes) -> None:
        if self.reducer.tells_rates:
            # The rank that begins a block follows the one that ends its sum, which reports the rate.
            receiver = self.reducer.order[(piece.block + self.step) % self.reducer.ranks]
            self.reducer.note_rate(receiver, (self.sequence, piece.number), float(rate.view(RATE)[0]))

    # Messages ---------------------------------------------------------------------------------------------------------

    def _send(
        self,
        piece: Piece,
        phase: int,
        hop: int,
        payload: NDArray[np.uint8],
        tags: PacketTags,
        then: Callable[[Delivery], None],
        tail: Bytes = EMPTY,
    ) -> None:
        peer, key, label, bound = (
            self.reducer.next,
            self._key(piece, phase, hop),
            self._label(piece),
            self._bound(piece, phase),
        )

        layout = self.layouts.get(piece)

        def on_sent(delivery: Delivery) -> None:
            self.context.ledger.record(key, peer, label, tags, bound, delivery, layout)
            then(delivery)

        self.under_way.add((True, key))
        request = SendRequest(peer, key, payload.data, tags, bound, label, tail, layout=layout)
        self.connection.send(request, self._unless_failed((True, key), on_sent), self.fail)

    def _receive(
        self,
        piece: Piece,
        phase: int,
        hop: int,
        into: NDArray[np.uint8],
        then: Callable[[Arrival], None],
        tail: Bytes = EMPTY,
    ) -> None:
        peer, key, label = self.reducer.previous, self._key(piece, phase, hop), self._label(piece)
        self.under_way.add((False, key))
        size, bound = len(into) + len(tail), self._bound(piece, phase)
        request = ReceiveRequest(peer, key, size, bound, label, into=into, tail=tail)

        go_on = self._unless_failed((False, key), then)

        def on_arrival(arrival: Arrival) -> None:
            if phase == ALL_GATHER:  # even if the bucket has failed meanwhile
                if layout := self.layouts.get(piece):
                    layout.decode_as(self.value_type, into, self._values(piece))
                self._note_final(piece)
            go_on(arrival)

        self.connection.receive(request, on_arrival, self.fail)

    def _unless_failed(self, message: tuple[bool, MessageKey], action: Callable[[Any], None]) -> Then[Any]:
        """Return a callback for an arrived or acknowledged message."""

        def act(result: Any) -> None:
            if not self.done():
                action(result)
                self.under_way.discard(message)
                self._look_whether_done()

        return act

    def fail(self, error: Exception) -> None:
        """End with an error, on all ranks."""
        if not self.done():
            super().fail(error)
            self.reducer.abort(describe(error))

    def _look_whether_done(self) -> None:
        if self.under_way or self.done():
            return
        lost, self.lost = self.lost, None
        if lost is not None:
            keep = self.context.residual.add_whole if self.layouts else self.context.residual.add
            keep(lost, self.bucket.segments)
        self.set_result(self.bucket.values)

    def partial_result(self) -> PartialResult | None:
        """Return this rank's state: final averages, and its own values elsewhere.

        A partly received average may have overwritten some of these, but it is final at the previous rank. A bucket
        that is finished here is finished at the next rank, too.
        """
        if self.done() and not self.exception():
            return None
        return PartialResult(
            self.value_type.widen(self.bucket.values),
            self.values_per_packet,
            self.final.copy(),
            {self.context.rank: ~self.final},
            self.lost,
        )

    def _bound(self, piece: Piece, phase: int) -> LossBound:
        return self.bounds[piece] if phase == REDUCE_SCATTER else RELIABLE

    def _key(self, piece: Piece, phase: int, hop: int) -> MessageKey:
        number = ring_number(self.sequence, piece.number, phase, hop, self.reducer.ranks)
        return MessageKey(self.step, number)

    def _label(self, piece: Piece) -> str:
        return self.bucket.label(piece.start, piece.stop)

    # Parts of the bucket ----------------------------------------------------------------------------------------------

    def _distance(self, piece: Piece) -> int:
        # The rank that begins a block rotates by step: values that join a sum early are lost most often.
        return (self.reducer.index - piece.block - self.step) % self.reducer.ranks

    def _values(self, piece: Piece) -> NDArray[np.generic]:
        return self.bucket.values[piece.start : piece.stop]

    def _bytes(self, piece: Piece) -> NDArray[np.uint8]:
        return self._values(piece).view(np.uint8)

    def _value_bytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self.value_type.storage.itemsize

    def _within(self, piece: Piece) -> slice:
        """Return the piece's packets in the bucket."""
        first = piece.start // self.values_per_packet
        return slice(first, first + self._packets(piece))

    def _packets(self, piece: Piece) -> int:
        return -(-(piece.stop - piece.start) // self.values_per_packet)

    def _tags(self, piece: Piece, packets: int) -> PacketTags:
        """Return a copy of the tags of a piece's packets; packets of a trailer are tagged like the last."""
        first = piece.start // self.values_per_packet
        chosen = np.minimum(np.arange(first, first + packets), first + self._packets(piece) - 1)
        tags = self.tags
        return PacketTags(tags.queue[chosen], tags.drop_class[chosen], tags.layer[chosen], tags.protected[chosen])

    def _lose(self, piece: Piece, values: NDArray[np.floating]) -> None:
        if self.lost is None:
            self.lost = np.zeros(len(self.bucket.values), values.dtype)
        self.lost[piece.start : piece.stop] += values


# Partial sums ---------------------------------------------------------------------------------------------------------


def scale_of_hop(hop: int) -> float:
    """Return the factor on a sum in a 16-bit format before a hop: 1 / 2**ceil(log2(hop + 1)).

    A sum of many ranks may exceed the largest float16, 65504, although the average does not. Powers of two cost no
    precision.
    """
    return 1.0 / (1 << hop.bit_length())


def clear_missing(
    sum_bytes: NDArray[np.uint8],
    missing: NDArray[np.intp],
    packet_bytes: int,
    counts: NDArray[np.unsignedinteger] | None,
) -> None:
    """Set missing packets, and their counts, to zero."""
    for packet in missing.tolist():
        sum_bytes[packet * packet_bytes : (packet + 1) * packet_bytes] = 0
    if counts is not None:
        counts[missing] = 0


def total_at(
    hop: int, arrived: NDArray[np.generic], own: NDArray[np.generic], value_type: ValueType
) -> NDArray[np.floating]:
    """Return the sum of the values from a hop and a rank's own, in the wider format.

    ``arrived`` is overwritten if its format is as wide.
    """
    total = value_type.widen(arrived)
    if value_type.storage.itemsize == HALF_BYTES:
        total = total / np.float32(scale_of_hop(hop))
    np.add(total, value_type.widen(own), out=total)
    return total


def sent_over(hop: int, total: NDArray[np.floating], value_type: ValueType) -> NDArray[np.generic]:
    """Return a sum as sent over a hop: rounded to 16 bits at every hop, if that is the format."""
    if value_type.storage.itemsize > HALF_BYTES:
        return total
    return value_type.narrow(total * np.float32(scale_of_hop(hop)))


def held_by(hop: int, sent: NDArray[np.generic], value_type: ValueType) -> NDArray[np.floating]:
    """Return the sum that was sent over a hop, in the wider format; not a copy if its format is as wide."""
    held = value_type.widen(sent)
    return held / np.float32(scale_of_hop(hop)) if value_type.storage.itemsize == HALF_BYTES else held
