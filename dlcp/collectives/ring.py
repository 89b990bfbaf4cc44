# SPDX-License-Identifier: Apache-2.0
"""All-reduce around a ring: each rank sends to the next one only, so that one flow enters each port.

A bucket is cut into a block for each rank. The partial sum of a block goes once around, each rank adding its own
gradients; the last one divides, and the result goes once around again (Patarasuk and Yuan, 2009). Blocks travel in
pieces, so that a rank adds up one while the next is on its way.

The first way around may lose packets within a bound. A lost packet is a partial sum, of several ranks: who sent it owes
all of it, and it comes again with the next step. The second way around is reliable, so that replicas never drift apart.

How many ranks a packet's sum holds is what rescaling needs, or how many samples where ranks weigh differently. It
follows the sum in a trailer of two bytes a packet, or four, that is protected; only where something may be lost, and
not on the first hop, where it is the first rank's.

A packet is tagged by the own gradients of the rank that sends it, not by the partial sum. Of gradients of a small
convolutional network on eight ranks, the order of packets by either correlates by 0.63 to 0.97, and the tenth that is
least by own gradients holds at most 1.6 % of the partial sum's squared norm: not worth a second classification. What
is not finite is protected whoever contributed it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import Bucket, ReduceOptions
from dlcp.collectives.feedback import ErrorFeedback
from dlcp.collectives.message_numbers import ring_number
from dlcp.collectives.ring_plan import PARTIAL, RESULT, Piece, cut_in_pieces
from dlcp.collectives.ring_sums import COUNT, SAMPLES, clear_missing, held_by, mean_of, sent_over, total_at
from dlcp.collectives.salvage import Salvage
from dlcp.ledger import Ledger
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import PacketTags, Tagger
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


def bound_of_hop(bound: LossBound, ranks: int) -> LossBound:
    """Return what each hop may lose so that at most ``bound`` of each rank's gradients is lost on the way around."""
    return LossBound(bound.ratio / max(1, ranks - 1), bound.immediate)


class RingAllReduce:
    """All-reduce of one rank with its peers, around a ring.

    :meth:`start` may be called from any thread; everything else runs in the endpoint's.

    Parameters
    ----------
    endpoint
        This rank's endpoint.
    contributors
        The ranks that contribute and get the result, this one among them.
    order
        The contributors in their order around the ring, the same on all ranks; by default ascending. Ranks of one host
        belong together: then one flow enters each host.
    options, tagger, ledger, feedback
        What may be lost, how packets are tagged, where messages are entered, and what is owed from before. Adaptive
        shards make no difference: every block passes every rank.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        contributors: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        options: ReduceOptions | None = None,
        tagger: Tagger | None = None,
        ledger: Ledger | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.order = list(sorted(contributors) if order is None else order)
        if sorted(self.order) != sorted(contributors):
            raise ValueError(f"a ring of ranks {sorted(contributors)} cannot have the order {self.order}")
        self.options = options or ReduceOptions()
        self.tagger = tagger or Tagger()
        self.ledger = ledger or Ledger()
        self.feedback = feedback or ErrorFeedback()
        self.ranks = len(self.order)
        self.place = self.order.index(endpoint.rank)
        self.next = self.order[(self.place + 1) % self.ranks]
        self.previous = self.order[self.place - 1]
        self.running: dict[tuple[int, int], _Run] = {}
        self._gave_up = False

    def begin_step(self, step: int) -> None:
        """Refuse packets of steps before ``step`` from now on."""
        self.endpoint.call(partial(self.endpoint.begin_step, step))

    def start(self, step: int, sequence: int, bucket: Bucket) -> "Future[NDArray[np.generic]]":
        """Average a bucket over the contributors; the future's result is ``bucket.values``, written in place.

        Until then ``bucket.values`` is sent from, and must not change.

        Parameters
        ----------
        step
            Training step; the same on all ranks.
        sequence
            Number of the bucket within the step; the same on all ranks.

        Raises
        ------
        ValueError
            The bucket is not contiguous, or its number too large; the message says which.
        """
        run = self.running[step, sequence] = _Run(self, step, sequence, bucket)
        try:
            self.endpoint.call(run.begin)
        except TransportError as error:
            run.done.set_exception(error)
        return run.done

    def salvage(self) -> list[Salvage]:
        """Return what this rank holds of buckets that are not finished; call it when the endpoint is closed.

        What is finished here is so at the next rank too.
        """
        return [run.salvage() for _, run in sorted(self.running.items())]

    def give_up(self, reason: str) -> None:
        """Tell the other ranks, once: most are not next to whoever failed, and would wait out their deadline."""
        if not self._gave_up:
            self._gave_up = True
            self.endpoint.abort(reason)


class _Run:
    """One bucket on its way around.

    A piece's distance is how many hops it has behind it when its partial sum is at this rank: 0 where this rank begins
    the sum, ``ranks - 1`` where it ends it.
    """

    def __init__(self, reducer: RingAllReduce, step: int, sequence: int, bucket: Bucket) -> None:
        if not bucket.values.flags.c_contiguous or not bucket.values.flags.writeable:
            raise ValueError(f"step {step}, bucket {sequence}: values must be contiguous and writable")
        self.reducer, self.step, self.sequence, self.bucket = reducer, step, sequence, bucket
        self.done: Future[NDArray[np.generic]] = Future()
        self.value_type = bucket.value_type
        self.packet_bytes = reducer.endpoint.options.payload_bytes
        self.values_per_packet = self.packet_bytes // self.value_type.storage.itemsize
        self.pieces = cut_in_pieces(
            len(bucket.values), self.values_per_packet, self.packet_bytes, reducer.ranks, sequence
        )
        if reducer.options.error_feedback:
            reducer.feedback.repay(bucket.values, self.value_type, bucket.segments)
        self.bound = reducer.options.bound_of(bucket)
        self.bounds = {piece: self._bound_of_hop(piece) for piece in self.pieces}
        self.counted = reducer.options.rescale and any(bound.ratio for bound in self.bounds.values())
        self.count = COUNT if bucket.samples is None else SAMPLES
        self.tags = self._tag(reducer.tagger)
        self.final = np.zeros(len(self.tags.queue), np.bool_)
        self.owed: NDArray[np.floating] | None = None
        self.waiting = 0

    def _bound_of_hop(self, piece: Piece) -> LossBound:
        """Return what each hop may lose of a piece."""
        bucket, layers = self.bucket, self.reducer.options.layers
        if bucket.exact:
            return RELIABLE
        bound = layers.bound_of(bucket.segments, piece.start, piece.stop, self.values_per_packet, self.bound)
        return bound_of_hop(bound, self.reducer.ranks)

    def _tag(self, tagger: Tagger) -> PacketTags:
        bucket, values, per_packet = self.bucket, len(self.bucket.values), self.values_per_packet
        if bucket.exact or self.reducer.next in self.reducer.endpoint.local_peers:
            return tagger.tag_whole(values, bucket.segments, per_packet)
        if bucket.magnitudes is None:
            tags = tagger.tag(bucket.values, self.value_type, bucket.segments, per_packet)
        else:
            tags = tagger.tag_magnitudes(bucket.magnitudes, values, bucket.segments, per_packet)
        hops = max(1, self.reducer.ranks - 1)
        self.reducer.options.layers.protect(tags, bucket.segments, per_packet, self.bound, turn=self.step, hops=hops)
        return tags

    def _samples(self, rank: int) -> int:
        """Return how many samples a rank's contribution is of; 1 where all weigh the same."""
        return 1 if self.bucket.samples is None else self.bucket.samples[rank]

    def begin(self) -> None:
        """Send the block that begins here, and wait for those that come past."""
        self.waiting = 1
        self._guard(lambda _: self._begin())(None)

    def _begin(self) -> None:
        for piece in self.pieces if self.reducer.ranks > 1 else []:
            hop = self._distance(piece) - 1
            if hop < 0:
                self._send_partial(piece, self._bytes(piece))
                continue
            packets, size = self._packets(piece), self._value_bytes(piece)
            sum_bytes = self.reducer.endpoint.buffers.take(size + packets * self.count.itemsize * self.counted)
            expected = sum_bytes if hop else sum_bytes[:size]
            self._receive(piece, PARTIAL, hop, expected, partial(self._on_partial, piece, sum_bytes))

    # The first way around: partial sums -------------------------------------------------------------------------------

    def _on_partial(self, piece: Piece, sum_bytes: NDArray[np.uint8], arrival: Arrival) -> None:
        """Add this rank's part to a sum; send it on, or the average of it if this rank is the last."""
        distance, size = self._distance(piece), self._value_bytes(piece)
        arrived, own = sum_bytes[:size].view(self.value_type.storage), self._values(piece)
        counts = sum_bytes[size:].view(self.count) if self.counted else None
        if counts is not None and distance == 1:
            counts.fill(self._samples(self.reducer.previous))
        missing = np.flatnonzero(~arrival.delivered[: self._packets(piece)])
        clear_missing(sum_bytes[:size], missing, self.packet_bytes, counts)
        if counts is not None:
            counts += self.count.type(self._samples(self.reducer.endpoint.rank))
        total = total_at(distance - 1, arrived, own, self.value_type)
        if distance < self.reducer.ranks - 1:
            arrived[:] = sent_over(distance, total, self.value_type)
            self._send_partial(piece, sum_bytes)
            self._receive_result(piece)  # not before: a result may overwrite only what has been added
            return
        mean, error = mean_of(total, self.reducer.ranks, counts, self.values_per_packet, self.bucket.samples)
        if error is not None:
            self._owe(piece, error)
        own[:] = self.value_type.narrow(mean)
        self.reducer.endpoint.buffers.give(sum_bytes)
        self._note_final(piece)
        self._send_result(piece, 0)

    def _send_partial(self, piece: Piece, sum_bytes: NDArray[np.uint8]) -> None:
        distance, size, bound = self._distance(piece), self._value_bytes(piece), self.bounds[piece]
        tags = self._tags(piece, -(-len(sum_bytes) // self.packet_bytes))
        if distance and bound.ratio:
            values = sum_bytes[:size].view(self.value_type.storage)
            magnitudes = packet_magnitudes(values, self.value_type, self.values_per_packet)
            tags.protected[: len(magnitudes)] |= ~np.isfinite(magnitudes)
        if len(sum_bytes) > size:
            tags.protected[size // self.packet_bytes :] = True
        self._send(piece, PARTIAL, distance, sum_bytes, tags, partial(self._on_partial_sent, piece, sum_bytes))

    def _on_partial_sent(self, piece: Piece, sum_bytes: NDArray[np.uint8], delivery: Delivery) -> None:
        distance = self._distance(piece)
        delivered = delivery.delivered[: self._packets(piece)]
        if not delivered.all():
            values = sum_bytes[: self._value_bytes(piece)].view(self.value_type.storage)
            lost = np.repeat(~delivered, self.values_per_packet)[: len(values)]
            self._owe(piece, np.where(lost, held_by(distance, values, self.value_type), 0))
        if distance == 0:
            self._receive_result(piece)  # not before: what was sent lay where the result goes
        else:
            self.reducer.endpoint.buffers.give(sum_bytes)

    # The second way around: results -----------------------------------------------------------------------------------

    def _receive_result(self, piece: Piece) -> None:
        self._receive(piece, RESULT, self._distance(piece), self._bytes(piece), partial(self._on_result, piece))

    def _note_final(self, piece: Piece, arriving: "Future[Arrival] | None" = None) -> None:
        if arriving is None or not arriving.exception():
            first = piece.start // self.values_per_packet
            self.final[first : first + self._packets(piece)] = True

    def _on_result(self, piece: Piece, _: Arrival) -> None:
        behind = self._distance(piece) + 1
        if behind < self.reducer.ranks - 1:
            self._send_result(piece, behind)

    def _send_result(self, piece: Piece, hop: int) -> None:
        tags = self._tags(piece, self._packets(piece))
        self._send(piece, RESULT, hop, self._bytes(piece), tags, lambda _: None)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _send(
        self,
        piece: Piece,
        phase: int,
        hop: int,
        payload: NDArray[np.uint8],
        tags: PacketTags,
        then: Callable[[Delivery], None],
    ) -> None:
        reducer, key, label = self.reducer, self._key(piece, phase, hop), self._label(piece)
        bound = self._bound(piece, phase)

        def on_sent(delivery: Delivery) -> None:
            reducer.ledger.record(key, reducer.next, label, tags, bound, delivery)
            then(delivery)

        self.waiting += 1
        sending = reducer.endpoint.send(SendRequest(reducer.next, key, payload.data, tags, bound, label))
        sending.add_done_callback(self._guard(on_sent))

    def _receive(
        self, piece: Piece, phase: int, hop: int, into: NDArray[np.uint8], then: Callable[[Arrival], None]
    ) -> None:
        reducer, key, label = self.reducer, self._key(piece, phase, hop), self._label(piece)
        bound = self._bound(piece, phase)
        self.waiting += 1
        arriving = reducer.endpoint.receive(ReceiveRequest(reducer.previous, key, len(into), bound, label, into=into))
        if phase == RESULT:
            arriving.add_done_callback(partial(self._note_final, piece))  # even if all is in vain by now
        arriving.add_done_callback(self._guard(then))

    def _guard(self, action: Callable[[Any], None]) -> Callable[["Future[Any] | None"], None]:
        """Return what to do when something waited for is there: ``action``, or end with the error."""

        def on_done(future: "Future[Any] | None") -> None:
            if self.done.done():
                return
            try:
                action(future.result() if future else None)
                self._one_done()
            except Exception as error:
                self.done.set_exception(error)
                self.reducer.give_up(str(error))

        return on_done

    def _one_done(self) -> None:
        self.waiting -= 1
        if self.waiting:
            return
        if self.owed is not None:
            self.reducer.feedback.owe(self.owed, self.bucket.segments)
        self.reducer.running.pop((self.step, self.sequence), None)
        self.done.set_result(self.bucket.values)

    def salvage(self) -> Salvage:
        """Return what is here: averages where they are final, and else this rank's own values.

        A result that has come in part has overwritten some of these. But then it is final at the rank before this one.
        """
        return Salvage(
            self.step,
            self.sequence,
            self.value_type.widen(self.bucket.values),
            self.values_per_packet,
            self.final.copy(),
            {self.reducer.endpoint.rank: ~self.final},
            self.owed,
        )

    def _bound(self, piece: Piece, phase: int) -> LossBound:
        return self.bounds[piece] if phase == PARTIAL else RELIABLE

    def _key(self, piece: Piece, phase: int, hop: int) -> MessageKey:
        number = ring_number(self.sequence, piece.number, phase, hop, self.reducer.ranks)
        return MessageKey(self.step, number)

    def _label(self, piece: Piece) -> str:
        return self.bucket.label(piece.start, piece.stop)

    # Parts of the bucket ----------------------------------------------------------------------------------------------

    def _distance(self, piece: Piece) -> int:
        # Who begins a block changes from step to step: what joins a sum early is lost most often.
        return (self.reducer.place - piece.block - self.step) % self.reducer.ranks

    def _values(self, piece: Piece) -> NDArray[np.generic]:
        return self.bucket.values[piece.start : piece.stop]

    def _bytes(self, piece: Piece) -> NDArray[np.uint8]:
        return self._values(piece).view(np.uint8)

    def _value_bytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self.value_type.storage.itemsize

    def _packets(self, piece: Piece) -> int:
        return -(-(piece.stop - piece.start) // self.values_per_packet)

    def _tags(self, piece: Piece, packets: int) -> PacketTags:
        """Return a copy of the tags of a piece's packets; those of a trailer are like the last."""
        first = piece.start // self.values_per_packet
        chosen = np.minimum(np.arange(first, first + packets), first + self._packets(piece) - 1)
        tags = self.tags
        return PacketTags(tags.queue[chosen], tags.drop_class[chosen], tags.layer[chosen], tags.protected[chosen])

    def _owe(self, piece: Piece, values: NDArray[np.floating]) -> None:
        if not self.reducer.options.error_feedback:
            return
        if self.owed is None:
            self.owed = np.zeros(len(self.bucket.values), values.dtype)
        self.owed[piece.start : piece.stop] += values
