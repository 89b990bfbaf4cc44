# SPDX-License-Identifier: Apache-2.0
"""One bucket on its way through the all-reduce in two hops: shares to the owners of shards, results to all."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dlcp.backend.operation import COPY_BYTES_PER_S, PATIENCE_S
from dlcp.collectives.bucket import Bucket
from dlcp.collectives.layer_bounds import protect_all_but
from dlcp.collectives.message_numbers import two_hop_number
from dlcp.collectives.push_pull import PULL, PUSH, RATE, average
from dlcp.collectives.salvage import Salvage
from dlcp.collectives.samples import divisors, held_samples
from dlcp.collectives.shards import shard_bounds
from dlcp.dtypes import ValueType
from dlcp.magnitudes import packet_magnitudes
from dlcp.tags import ChunkOrder, PacketTags, Tagger
from dlcp.transport import (
    RELIABLE,
    Arrival,
    BufferPool,
    Delivery,
    ExportedMemory,
    LossBound,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    StreamingReduction,
)

if TYPE_CHECKING:
    from dlcp.collectives.direct import DirectAllReduce


class DirectRun:
    """One bucket on its way through the all-reduce."""

    def __init__(self, reducer: "DirectAllReduce", step: int, sequence: int, bucket: Bucket) -> None:
        self.reducer, self.step, self.sequence, self.bucket = reducer, step, sequence, bucket
        self.rank = reducer.endpoint.rank
        self.done: Future[NDArray[np.generic]] = Future()
        self.values = bucket.values
        self.values_per_packet = reducer.endpoint.options.payload_bytes // self.values.itemsize
        self.shards = shard_bounds(len(self.values), self.values_per_packet, reducer.weights)
        self.bound = reducer.options.bound_of(bucket)
        if reducer.options.error_feedback:
            reducer.feedback.repay(self.values, bucket.value_type, bucket.segments)
        self.tags = self._tag(reducer.tagger)
        self.owed: list[tuple[NDArray[np.int64], NDArray[np.floating]]] = []
        """What error feedback will owe: places in the bucket, and values."""
        self.reduction: StreamingReduction | None = None
        self.arrived: dict[int, NDArray[np.uint8]] = {}
        self.delivered: dict[int, NDArray[np.bool_]] = {}
        self.averaged = False
        self.result: tuple[NDArray[np.uint8], PacketTags] | None = None
        """What follows the own result, and its tags, once it is ready."""
        self.pushing = {owner for owner, (start, stop) in self.shards.items() if owner != self.rank and start < stop}
        """Owners who have not told what they got of this rank."""
        self.received: set[int] = set()
        """Owners whose result is here."""
        self.copy: NDArray[np.generic] | None = None
        """The own result apart from the bucket: from the beginning for ranks of this host to read, else once the
        framework has the bucket back although some have not confirmed it."""
        self.copy_from: ExportedMemory | BufferPool = reducer.endpoint.exported
        """Whence the room for it comes."""
        self.unconfirmed: set[int] = set()
        """Who has not confirmed this rank's result."""
        self.waiting = 0
        self.impatient = False
        """Whether confirmations have been waited for long enough."""

    def _tag(self, tagger: Tagger) -> PacketTags:
        bucket, layers = self.bucket, self.reducer.options.layers
        neighbours = self.reducer.endpoint.local_peers
        by_network = [owner for owner in self.shards if owner != self.rank and owner not in neighbours]
        if not by_network or (not self.bound.ratio and (bucket.exact or not layers)):
            return tagger.tag_whole(len(self.values), bucket.segments, self.values_per_packet)
        magnitudes = self._magnitudes(by_network) if bucket.magnitudes is None else bucket.magnitudes
        tags = tagger.tag_magnitudes(magnitudes, len(self.values), bucket.segments, self.values_per_packet)
        layers.protect(tags, bucket.segments, self.values_per_packet, self.bound, turn=self.step)
        return tags

    def _bound_of(self, start: int, stop: int) -> LossBound:
        """Return what a shard may lose."""
        if self.bucket.exact:
            return RELIABLE
        layers = self.reducer.options.layers
        return layers.bound_of(self.bucket.segments, start, stop, self.values_per_packet, self.bound)

    def _magnitudes(self, owners: Sequence[int]) -> NDArray[np.float32]:
        """Return the packets' magnitudes in some owners' shards, and infinity for all others, which cannot be lost."""
        found = np.full(-(-len(self.values) // self.values_per_packet), np.inf, np.float32)
        for first, last in map(self.shards.__getitem__, owners):
            if first < last:
                packets = self._packets(first, last)
                found[packets] = packet_magnitudes(
                    self.values[first:last], self.bucket.value_type, self.values_per_packet
                )
        return found

    def begin(self) -> None:
        """Send the shards of others, and wait for what others send."""
        reducer = self.reducer
        others = [rank for rank in reducer.contributors if rank != self.rank]
        start, stop = self.shards.get(self.rank, (0, 0))
        self.waiting = 1
        if start < stop:
            self.waiting += 1
            self._gather(others, start, stop)
        for owner, (first, last) in self.shards.items():
            if owner != self.rank and first < last:
                self.waiting += 1
                self._push(owner, first, last)
        self._one_done()

    # Own shard --------------------------------------------------------------------------------------------------------

    def _gather(self, others: Sequence[int], start: int, stop: int) -> None:
        endpoint, bound = self.reducer.endpoint, self._bound_of(start, stop)
        size, label = (stop - start) * self.values.itemsize, self._label(self.rank)
        key = self._key(PUSH, self.rank)
        self.delivered[self.rank] = np.ones(-(-(stop - start) // self.values_per_packet), np.bool_)
        if self.bucket.value_type is ValueType.FLOAT32:
            own = cast(NDArray[np.float32], self.values[start:stop])
            self.reduction = endpoint.reduction(own, len(others), key=key)
            room = self._room_for_copy(size)
            if room is not None:
                self.copy = copy = room.view(np.float32)
                self.reduction.copy_into(copy)
        for position, peer in enumerate(others):
            arrival = endpoint.receive(
                ReceiveRequest(peer, key, size, bound, label, reduction=self.reduction, position=position)
            )
            arrival.add_done_callback(self._guard(partial(self._on_share, peer)))
        if not others:
            self._average(start, stop)

    def _room_for_copy(self, size: int) -> NDArray[np.uint8] | None:
        """Return where neighbours may read the own result: one copy for all, made while it is in the caches."""
        endpoint = self.reducer.endpoint
        readers = endpoint.local_peers.intersection(self.reducer.contributors)
        return endpoint.exported.take(size) if readers and not self.bucket.lent else None

    def _on_share(self, peer: int, arrival: Arrival) -> None:
        self.delivered[peer] = arrival.delivered
        self.arrived[peer] = arrival.payload
        if len(self.delivered) == len(self.reducer.contributors):
            self._average(*self.shards[self.rank])

    def _average(self, start: int, stop: int) -> None:
        options = self.reducer.options
        if self.reduction is not None:
            self._finish_sum(self.reduction, start, stop)
        else:
            dtype = self.values.dtype
            shares = {peer: payload.view(dtype) for peer, payload in self.arrived.items()}
            shares[self.rank] = self.values[start:stop]
            mean, error = average(
                shares,
                self.delivered,
                self.bucket.value_type,
                self.values_per_packet,
                rescale=options.rescale,
                samples=self.bucket.samples,
            )
            if len(error):
                self._owe(start, np.flatnonzero(error), error)
            self.values[start:stop] = self.bucket.value_type.narrow(mean)
        self.arrived.clear()
        self.averaged = True
        self._send_result(start, stop)
        self._one_done()

    def _finish_sum(self, summation: StreamingReduction, start: int, stop: int) -> None:
        options = self.reducer.options
        whole = all(delivered.all() for delivered in self.delivered.values())
        owing = options.error_feedback and options.rescale and not whole
        error = np.zeros(stop - start, np.float32) if owing else None
        if self.bucket.samples is None or whole:
            summation.finish(options.rescale, error)
        else:
            summation.finish(False)
            if options.rescale:
                self._divide_by_samples(self.values[start:stop], error)
        if self.copy is not None and not whole:
            self.copy[:] = self.values[start:stop]
        for room in self.arrived.values():
            self.reducer.endpoint.buffers.give(room)
        if error is not None:
            missing = ~np.logical_and.reduce(list(self.delivered.values()))
            self._owe(start, self._values_of(missing, stop - start), error)

    def _divide_by_samples(self, values: NDArray[np.generic], error: NDArray[np.float32] | None) -> None:
        """Let incomplete packets, which have been divided by the number of ranks, be the mean of their own samples."""
        ranks = len(self.reducer.contributors)
        by_packet = divisors(held_samples(self.delivered, self.bucket.samples), ranks, self.bucket.samples)
        for packet in np.flatnonzero(by_packet != ranks).tolist():
            first = packet * self.values_per_packet
            part = cast(NDArray[np.float32], values[first : first + self.values_per_packet])
            with np.errstate(invalid="ignore", over="ignore"):
                mean = part * np.float32(ranks / by_packet[packet])
                left = (part - mean) * np.float32(ranks)
            part[:] = mean
            if error is not None:
                error[first : first + len(part)] = np.where(np.isfinite(left), left, 0)

    def _send_result(self, start: int, stop: int) -> None:
        rates_bps = self.reducer.rates()
        self._note_rates(self.rank, rates_bps)
        tail = rates_bps.view(np.uint8)
        self.unconfirmed = {peer for peer in self.reducer.contributors if peer != self.rank}
        self.result = tail, self._tags(start, stop, (stop - start) * self.values.itemsize + len(tail))
        for peer in self.unconfirmed - self.pushing:
            self._send_result_to(peer)

    def _send_result_to(self, peer: int) -> None:
        """Send the own result to a rank.

        It goes when that rank has this one's share: its result needs that, and only then has it a place for ours.
        """
        assert self.result
        start, stop = self.shards[self.rank]
        key, (tail, tags) = self._key(PULL, peer), self.result
        payload = self._bytes(start, stop) if self.copy is None else memoryview(self.copy.view(np.uint8).data)
        sending = self.reducer.endpoint.send(
            SendRequest(peer, key, payload, tags, RELIABLE, self._label(self.rank), tail)
        )
        sending.add_done_callback(self._guard(partial(self._on_result_sent, key, peer, tags)))

    def _on_result_sent(self, key: MessageKey, peer: int, tags: PacketTags, delivery: Delivery) -> None:
        self.reducer.ledger.record(key, peer, self._label(self.rank), tags, RELIABLE, delivery)
        self.unconfirmed.discard(peer)
        if self.impatient:
            self._detach()
        if self.waiting or self.unconfirmed:
            return
        if self.done.done():
            self._end()
        else:
            self._finish()

    def _end(self) -> None:
        """Be done with what peers have confirmed."""
        self.reducer.ended(self)
        if self.copy is not None:
            self.copy_from.give(self.copy.view(np.uint8))
            self.copy = None

    # Shards of others -------------------------------------------------------------------------------------------------

    def _push(self, owner: int, start: int, stop: int) -> None:
        reducer = self.reducer
        tags, bound = self._tags(start, stop), self._bound_of(start, stop)
        if owner not in reducer.contributors:
            if bound.ratio < reducer.options.bound.ratio:  # which is all that a parameter server knows of
                protect_all_but(tags, np.arange(len(tags.queue)), bound.ratio, self.step)
            tags.protected[-1] = True  # tells it the size
        sending = reducer.endpoint.send(
            SendRequest(
                owner,
                self._key(PUSH, owner),
                self._bytes(start, stop),
                tags,
                bound,
                self._label(owner),
                order=self._chunk_order(owner),
            )
        )
        sending.add_done_callback(self._guard(partial(self._on_pushed, owner, tags)))

    def _chunk_order(self, owner: int) -> ChunkOrder:
        """Return which part of its shard an owner gets first from this rank: from each of the others another one."""
        others = [rank for rank in self.reducer.contributors if rank != owner]
        return ChunkOrder(-others.index(self.rank) % len(others), len(others))

    def _on_pushed(self, owner: int, tags: PacketTags, delivery: Delivery) -> None:
        start, stop = self.shards[owner]
        label = self._label(owner)
        self.reducer.ledger.record(self._key(PUSH, owner), owner, label, tags, self._bound_of(start, stop), delivery)
        if delivery.lost:
            places = self._values_of(~delivery.delivered, stop - start)
            self._owe(start, places, self.bucket.value_type.widen(self.values[start:stop]))
        # Only now, for the result takes the place of what may still have been sent or is owed.
        tail = np.zeros(len(self.reducer.contributors) * RATE.itemsize, np.uint8)
        into = np.frombuffer(self._bytes(start, stop), np.uint8)
        result = self.reducer.endpoint.receive(
            ReceiveRequest(
                owner, self._key(PULL, self.rank), len(into) + len(tail), RELIABLE, label, into=into, tail=tail
            )
        )
        result.add_done_callback(self._guard(partial(self._on_result, owner, tail)))
        self.pushing.discard(owner)
        if self.result and owner in self.unconfirmed:
            self._send_result_to(owner)

    def _on_result(self, owner: int, tail: NDArray[np.uint8], arrival: Arrival) -> None:
        self.received.add(owner)
        self._note_rates(owner, tail.view(RATE))
        self._one_done()

    # All --------------------------------------------------------------------------------------------------------------

    def salvage(self) -> Salvage:
        """Return what this rank holds of the bucket."""
        values = self.bucket.value_type.widen(self.values)
        packets = len(self.tags.queue)
        final, unsettled = np.zeros(packets, np.bool_), np.zeros(packets, np.bool_)
        included = {rank: np.zeros(packets, np.bool_) for rank in self.reducer.contributors}
        start, stop = self.shards.get(self.rank, (0, 0))
        mine = self._packets(start, stop)
        for rank, bits in self._included(mine).items():
            included[rank][mine] = bits
        # A sum is divided as soon as it is complete, packet by packet.
        final[mine] = self.averaged or np.all([bits[mine] for bits in included.values()], axis=0)
        if self.copy is not None and self.done.done() and not self.done.exception():
            # The framework has the bucket back; what is left is this rank's own result.
            values = np.zeros_like(values)
            values[start:stop] = self.bucket.value_type.widen(self.copy)
            return Salvage(self.step, self.sequence, values, self.values_per_packet, final, included)
        for owner, shard in self.shards.items():
            if owner != self.rank:
                part = self._packets(*shard)
                final[part] = owner in self.received
                included[self.rank][part] = owner not in self.received
                unsettled[part] = owner in self.pushing
        owed = np.zeros(len(values), values.dtype) if self.owed else None
        for places, lost in self.owed:
            assert owed is not None
            owed[places] += lost
        return Salvage(self.step, self.sequence, values, self.values_per_packet, final, included, owed, unsettled)

    def _included(self, mine: slice) -> Mapping[int, NDArray[np.bool_]]:
        """Return whose contributions the own shard holds, by its packets."""
        if self.averaged:
            return self.delivered
        whole = np.ones(mine.stop - mine.start, np.bool_)
        if self.reduction is None:
            return {self.rank: whole}
        others = [rank for rank in self.reducer.contributors if rank != self.rank]
        folded = {peer: self.reduction.included(position) for position, peer in enumerate(others)}
        return {self.rank: whole, **folded}

    def _packets(self, start: int, stop: int) -> slice:
        return slice(start // self.values_per_packet, -(-stop // self.values_per_packet))

    def _note_rates(self, owner: int, rates_bps: NDArray[np.generic]) -> None:
        if self.sequence >= self.reducer.rated_by.get(owner, -1):
            self.reducer.rates_bps[owner] = rates_bps
            self.reducer.rated_by[owner] = self.sequence

    def _values_of(self, packets: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        """Return the places of values in some of a shard's packets, where the shard has ``count`` values."""
        first = np.flatnonzero(packets)[:, None] * self.values_per_packet
        places = (first + np.arange(self.values_per_packet)).ravel()
        return places[places < count]

    def _owe(self, start: int, places: NDArray[np.int64], values: NDArray[np.floating]) -> None:
        """Owe those of a shard's ``values`` that stand at ``places`` in it; ``start`` is where it begins."""
        self.owed.append((places + start, values[places]))

    def _one_done(self) -> None:
        self.waiting -= 1
        if self.waiting:
            return
        if self.unconfirmed and self.copy is None:
            start, stop = self.shards[self.rank]
            copying_s = (stop - start) * self.values.itemsize / COPY_BYTES_PER_S
            self.reducer.endpoint.call_later(PATIENCE_S + copying_s, self._detach)
        else:
            self._finish()

    def _detach(self) -> None:
        """Be done although some have not confirmed the result: what is left to send is sent from a copy.

        Not while a rank may be reading the result where it is.
        """
        self.impatient = True
        endpoint = self.reducer.endpoint
        if self.done.done() or not self.unconfirmed or (self.bucket.lent and self.unconfirmed & endpoint.local_peers):
            return
        start, stop = self.shards[self.rank]
        self.copy_from = endpoint.buffers
        room = endpoint.buffers.take((stop - start) * self.values.itemsize)
        self.copy = room.view(self.values.dtype)
        self.copy[:] = self.values[start:stop]
        for peer in self.unconfirmed:
            endpoint.detach(peer, self._key(PULL, peer), room)
        self._finish()

    def _finish(self) -> None:
        if self.done.done():
            return
        if not self.unconfirmed:
            self._end()
        if self.reducer.options.error_feedback:
            for places, values in self.owed:
                self.reducer.feedback.owe_at(places, values, self.bucket.segments)
        self.done.set_result(self.values)

    def _guard(self, action: Callable[[Any], None]) -> Callable[["Future[Any]"], None]:
        def on_done(future: "Future[Any]") -> None:
            try:
                action(future.result())
            except Exception as error:
                if not self.done.done():
                    self.done.set_exception(error)

        return on_done

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return MessageKey(self.step, two_hop_number(self.sequence, phase, receiver, self.reducer.ranks))

    def _tags(self, start: int, stop: int, size: int = 0) -> PacketTags:
        """Return the tags of a shard's packets; of one more, like the last, if ``size`` bytes need it."""
        first, last = start // self.values_per_packet, -(-stop // self.values_per_packet)
        more = -(-size // self.reducer.endpoint.options.payload_bytes) - (last - first)
        part = PacketTags(*(each[first:last] for each in self._each_tag()))
        if more <= 0:
            return part
        return PacketTags(
            *(np.append(each[first:last], each[last - 1 : last].repeat(more)) for each in self._each_tag())
        )

    def _each_tag(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.tags.queue, self.tags.drop_class, self.tags.layer, self.tags.protected

    def _label(self, owner: int) -> str:
        return self.bucket.label(*self.shards[owner])

    def _bytes(self, start: int, stop: int) -> memoryview:
        return memoryview(self.values[start:stop].view(np.uint8).data)
