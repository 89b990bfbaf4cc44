# SPDX-License-Identifier: Apache-2.0
"""Direct all-reduce: reduce-scatter and all-gather in one hop each.

Every owner of a shard receives all ranks' contributions to it, averages them, and sends the averaged shard to all, with
the owner's rates to each rank. The first hop may lose packets within the bound. Averaged shards arrive in full, so that
replicas never drift apart. A parameter server is the case of a single owner that contributes nothing
(:mod:`dlcp.collectives.parameter_server`). A scattered bucket ends after the first hop.

All work is done in the caller's buffer. The averaged shard overwrites a rank's contribution, so the rank posts that
receive only once the owner has acknowledged the contribution. An owner sends its averaged shard to a peer only after it
has acknowledged that peer's contribution, because the peer then has posted the receive.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.bucket import RATE, Bucket, BucketRun, ContributionTail, RankContext, protect_all_but
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.partial_result import PartialResult
from dlcp.collectives.reduction_rules import average, divide_by_samples, held_samples
from dlcp.collectives.shards import DirectPlan, inbound_rates
from dlcp.transport import (
    EMPTY,
    RELIABLE,
    Arrival,
    BufferPool,
    Bytes,
    Connection,
    Delivery,
    EncodedReduction,
    ExportedMemory,
    LossBound,
    MessageKey,
    ReceiveRequest,
    Reduction,
    SendRequest,
    StreamingReduction,
)
from dlcp.values.dtypes import ValueType
from dlcp.values.planes import FULL_BITS, PlaneLayout
from dlcp.values.tags import PacketTags

if TYPE_CHECKING:
    from dlcp.collectives.pair import PairRun


ONE_HOP_BYTES_MAX: Final = 1 << 20
"""Larger buckets of two ranks are added up as they arrive, in two hops: one pass over memory less then outweighs a hop.
"""
PATIENCE_S: Final = 0.002
"""The wait for the last acknowledgements, before data that peers may still read is copied. Not tuned."""
COPY_BYTES_PER_S: Final = 1e9
"""Approximate speed of copying memory. The time of a copy extends the wait."""
SERVER_WHOLE_STEPS: Final = 2
"""With a parameter server, the first steps in full precision."""


class DirectAllReduce:
    """Direct all-reduce of one rank with its peers.

    :meth:`start` may be called from any thread; everything else runs in the endpoint's.

    Parameters
    ----------
    context
        This rank, and the state that its algorithms share.
    weights
        Each owner's weight in the division into shards. By default all contributors own shards, of equal size or
        adapted to their receive rates.
    one_hop
        Whether two ranks may exchange small buckets in one hop (:mod:`dlcp.collectives.pair`).
    """

    def __init__(
        self, context: RankContext, *, weights: Mapping[int, float] | None = None, one_hop: bool = True
    ) -> None:
        self.context = context
        self.weights = dict(weights or dict.fromkeys(context.contributors, 1.0))
        self.between_ranks = weights is None
        self._one_hop = one_hop and self.between_ranks and len(context.contributors) == 2
        self.bits = FULL_BITS
        self._has_server = weights is not None
        self._steps = 0
        self._slow: set[int] = set()
        self.rates_bps: dict[int, NDArray[np.generic]] = {}
        """Each rank's rates, from the latest bucket of the step."""
        self._reported_with: dict[int, int] = {}
        """The bucket of each report, since results may arrive out of order."""
        self._plans: dict[int, DirectPlan] = {}
        """By the bucket's number."""

    def begin_step(self, step: int, bits: int = FULL_BITS) -> None:
        """Begin a step, and divide its buckets by the rates of the last one.

        All averages of the last step have arrived, so all ranks divide alike.
        """
        rates = self.received_bps(self._slow)
        if len(set(rates.values())) > 1 or (rates and self._slow):
            from dlcp.policies.slow_ports import weights_for_rates  # needed once a rank is slow

            self._slow = {rank for rank, rate in rates.items() if rate < max(rates.values())}
            self.weights = weights_for_rates(rates)
        self.bits = bits
        self.rates_bps, self._reported_with = {}, {}
        self._steps += 1

    def received_bps(self, slow: Container[int] = ()) -> Mapping[int, float]:
        """See :class:`dlcp.collectives.stages.MeasuringReducer`."""
        known = self.between_ranks and len(self.rates_bps) == len(self.weights)
        return inbound_rates(self.rates_bps, slow) if known else {}

    def start(self, step: int, sequence: int, bucket: Bucket) -> "DirectRun | PairRun":
        """Begin to average a bucket over the contributors, and return its run.

        Parameters
        ----------
        step, sequence
            Training step, and the bucket's number within it; the same on all ranks.

        Raises
        ------
        ValueError
            The values are not contiguous, or the number is too large; the message says which.
        """
        return self.prepare(step, sequence, bucket).start()

    def prepare(self, step: int, sequence: int, bucket: Bucket) -> "DirectRun | PairRun":
        """Return a bucket's run, with residual added, tagged and ready to start."""
        bits = self._bits_of(bucket)
        if self._goes_in_one_hop(bucket, bits):
            from dlcp.collectives.pair import PairRun  # most jobs have more than two ranks

            plan = self.plan_of(sequence, bucket, dict.fromkeys(self.context.peers, 1.0))
            return PairRun(self.context, plan, step, sequence, bucket)
        return DirectRun(self, step, sequence, bucket, bits)

    def _bits_of(self, bucket: Bucket) -> int:
        bits = self.bits
        # A server keeps rounding errors by bucket, so it waits until DDP has rebuilt its buckets.
        if bits == FULL_BITS or (self._has_server and self._steps <= SERVER_WHOLE_STEPS):
            return FULL_BITS
        return bucket.bits_at(bits)

    def _goes_in_one_hop(self, bucket: Bucket, bits: int) -> bool:
        allowed = self._one_hop and not bucket.scattered and bits == FULL_BITS
        return allowed and bucket.values.nbytes <= ONE_HOP_BYTES_MAX

    def plan_of(self, sequence: int, bucket: Bucket, weights: Mapping[int, float], bits: int = FULL_BITS) -> DirectPlan:
        """Return a bucket's plan: that of the last step, if bucket, division and precision are unchanged."""
        plan = self._plans.get(sequence)
        if plan is None or not plan.fits(bucket, weights, bits):
            plan = self._plans[sequence] = DirectPlan(self.context, sequence, bucket, weights, bits)
        return plan

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def rates_to_tell(self) -> NDArray[np.generic]:
        """Return this rank's rates to all contributors, as in :func:`dlcp.collectives.shards.inbound_rates`."""
        connection = self.context.connection
        signed = {rank: connection.peers[rank].signed_rate_bps for rank in self.context.peers}
        signed[self.context.rank] = connection.inbound_bps
        return np.array([signed[rank] for rank in self.context.contributors], RATE)

    def note_rates(self, rank: int, sequence: int, rates_bps: NDArray[np.generic]) -> None:
        """Record the rates that a rank reported with a bucket, unless a later bucket's are known."""
        if sequence >= self._reported_with.get(rank, -1):
            self.rates_bps[rank], self._reported_with[rank] = rates_bps, sequence


class ShardAccumulator:
    """Receives the contributions of all ranks to one shard, or to a chunk of it, and counts their packets.

    A *streaming* sum of float32 values is computed in place as packets arrive: first this rank's values, then the
    peers' by ascending rank. Otherwise contributions are kept until the last one arrives. Either way the result does
    not depend on arrival order. Contributions are received into reused memory, since the first access to fresh memory
    is slow.

    Parameters
    ----------
    connection, peers
        This rank's connection, and the other contributors, ascending.
    own
        This rank's contribution, flat; with ``streaming`` it becomes the result.
    streaming
        Compute the sum as packets arrive; ``own`` is float32.
    divisor
        Divisor of a streaming sum; None for the number of ranks.
    key
        The key of the messages if every sender begins with a different chunk (:class:`dlcp.values.tags.ChunkOrder`).
    encoded
        The sum of ``own`` and of contributions that are encoded; None if they are not.

    Attributes
    ----------
    delivered
        Masks of the packets that arrived, shape (packets,), by rank, for complete messages.
    whole
        Whether all their packets arrived.
    """

    def __init__(
        self,
        connection: Connection,
        peers: Sequence[int],
        own: NDArray[np.generic],
        *,
        streaming: bool,
        divisor: float | None = None,
        key: MessageKey | None = None,
        encoded: EncodedReduction | None = None,
    ) -> None:
        self.connection, self.peers, self.own, self.encoded = connection, peers, own, encoded
        self.delivered: dict[int, NDArray[np.bool_]] = {}
        self.whole = True
        self.streaming = (
            connection.reduction(cast("NDArray[np.float32]", own), len(peers), divisor, key)
            if streaming and peers and encoded is None
            else None
        )
        self._received: dict[int, NDArray[np.uint8]] = {}

    def request(self, position: int, key: MessageKey, bound: LossBound, label: str) -> ReceiveRequest:
        """Return the request for the contribution of the peer at this position of ``peers``."""
        peer, size, reduction = self.peers[position], self.own.nbytes, self.reduction
        if reduction is not None:
            size = reduction.message_bytes
            return ReceiveRequest(peer, key, size, bound, label, reduction=reduction, position=position)
        return ReceiveRequest(peer, key, size, bound, label, into=self.connection.buffers.take(size))

    @property
    def reduction(self) -> Reduction | None:
        """The sum that is computed as packets arrive, if there is one."""
        return self.streaming or self.encoded

    def take(self, peer: int, arrival: Arrival) -> bool:
        """Accept a contribution; return whether it was the last."""
        if self.reduction is None:  # missing packets count as zeros
            packet_bytes = self.connection.options.payload_bytes
            for index in np.flatnonzero(~arrival.delivered).tolist():
                arrival.payload[index * packet_bytes : (index + 1) * packet_bytes] = 0
        self.delivered[peer], self._received[peer] = arrival.delivered, arrival.payload
        self.whole &= arrival.whole
        return len(self.delivered) == len(self.peers)

    @property
    def contributions(self) -> dict[int, NDArray[np.generic]]:
        """The peers' contributions by rank, if they are kept and not encoded."""
        return {peer: self._received[peer].view(self.own.dtype) for peer in self.peers}

    def included(self) -> dict[int, NDArray[np.bool_]]:
        """Return the packets of each peer that the streaming sum holds so far; empty without one."""
        if self.reduction is None:
            return {}
        return {peer: self.reduction.included(position) for position, peer in enumerate(self.peers)}

    def release(self) -> None:
        """Release the memory of the contributions."""
        for buffer in self._received.values():
            if len(buffer):  # a streaming sum has one for each contribution that came early
                self.connection.buffers.give(buffer)
        self._received.clear()


class AveragedShard:
    """An owner's averaged shard, until every peer has acknowledged it.

    It is sent from the caller's buffer, or from a copy. A copy has two uses: local peers read it in place, in which
    case it is made while values are summed; and peers that have not acknowledged the shard get it once the caller has
    the buffer back.

    Parameters
    ----------
    connection
        The owner's connection.
    values
        The shard in the caller's buffer, flat.

    Attributes
    ----------
    copy
        The copy, flat; None without one.
    code
        The encoded shard, which is sent in place of the values; None if it is not encoded.
    layout
        The layout of the encoded shard.
    is_kept
        Whether it can be sent without the caller's buffer, because there is a copy or a code.
    tags, trailer
        The tags of its packets, and the bytes that follow its values in a message.
    unconfirmed
        Peers that have not acknowledged it.
    """

    def __init__(self, connection: Connection, values: NDArray[np.generic]) -> None:
        self.values = values
        self.copy: NDArray[np.generic] | None = None
        self.tags: PacketTags | None = None
        self.trailer: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.code: NDArray[np.uint8] | None = None
        self.layout: PlaneLayout | None = None
        self.is_kept = False
        self.unconfirmed: set[int] = set()
        self._connection = connection
        self._copy_owner: ExportedMemory | BufferPool = connection.exported

    def copy_while_summed(self, reduction: StreamingReduction) -> None:
        """Let a streaming sum write its results into exported memory, too, if there is room."""
        memory = self._connection.exported.take(self.values.nbytes)
        if memory is not None:  # one copy for all local peers, made while the data is cached
            self.copy = copy = memory.view(np.float32)
            self.is_kept = True
            reduction.copy_into(copy)

    def request(self, peer: int, key: MessageKey, label: str) -> SendRequest:
        """Return the request that sends the shard to a peer."""
        assert self.tags is not None
        sent = self.code if self.code is not None else self.values if self.copy is None else self.copy
        payload = sent.view(np.uint8).data
        return SendRequest(peer, key, payload, self.tags, RELIABLE, label, self.trailer, layout=self.layout)

    def kept(self, value_type: ValueType) -> NDArray[np.floating]:
        """Return the values as ranks have them, widened, without the caller's buffer; it must be kept."""
        if self.code is None:
            assert self.copy is not None
            return value_type.widen(self.copy)
        assert self.layout
        values = np.empty(self.layout.values, np.float32)
        self.layout.decode(self.code, values)
        return value_type.widen(value_type.narrow(values))

    def encode_as(self, layout: PlaneLayout) -> NDArray[np.uint8]:
        """Return memory for the encoded shard, which is sent in place of the values."""
        self.layout, self.code, self.is_kept = layout, self._connection.buffers.take(layout.bytes), True
        return self.code

    def detach(self, key_of: Callable[[int], MessageKey]) -> None:
        """Continue sending from a copy, so that the caller gets the buffer back.

        Parameters
        ----------
        key_of
            Returns the key of the message to a peer.
        """
        connection, values = self._connection, self.values
        self._copy_owner, buffer = connection.buffers, connection.buffers.take(values.nbytes)
        self.copy, self.is_kept = buffer.view(values.dtype), True
        self.copy[:] = values
        for peer in self.unconfirmed:
            connection.detach(peer, key_of(peer), buffer)

    def release(self) -> None:
        """Release the copy's memory."""
        if self.copy is not None:
            self._copy_owner.give(self.copy.view(np.uint8))
            self.copy, self.is_kept = None, False
        if self.code is not None:
            self._connection.buffers.give(self.code)
            self.code, self.is_kept = None, False


class BucketPhase(Enum):
    """Phase of a bucket on this rank."""

    EXCHANGING = "contributions and averaged shards are in flight"
    CONFIRMING = "everything has arrived; some peers have not acknowledged this rank's averaged shard"
    OVERDUE = "acknowledgements are overdue; the shard will be copied once no local peer reads it in the bucket"
    RETURNED = "the caller has the bucket back; unacknowledged data is sent from a copy"
    ENDED = "all peers have acknowledged"


class Shard(Enum):
    """State of a shard on this rank."""

    ACCUMULATING = "own shard: contributions are missing"
    CONTRIBUTING = "another owner's shard: the owner has not acknowledged this rank's contribution"
    DELIVERED = "another owner's scattered shard: the owner has this rank's contribution, and keeps the average"
    AWAITED = "another owner's shard: the average is missing"
    AVERAGED = "the average has arrived"


class DirectRun(BucketRun):
    """One bucket in progress.

    It has more methods than most classes: each belongs to one of the bucket's two hops, and all change what
    :meth:`partial_result` tells of them.
    """

    def __init__(
        self, reducer: DirectAllReduce, step: int, sequence: int, bucket: Bucket, bits: int = FULL_BITS
    ) -> None:
        super().__init__(reducer.context, step, sequence, bucket)
        self.reducer, self.rank, self.values = reducer, reducer.context.rank, bucket.values
        # The caller of a scattered bucket has assigned the shards.
        weights = dict.fromkeys(self.context.contributors, 1.0) if bucket.scattered else reducer.weights
        plan = self.plan = reducer.plan_of(sequence, bucket, weights, bits)
        self.bounds = plan.bounds
        self.own = AveragedShard(self.context.connection, self.values[slice(*self.bounds.get(self.rank, (0, 0)))])
        """This rank's shard, once averaged."""
        self.rest: NDArray[np.float32] | None = None
        """Future residual of encoded shards: the rounding error of each value of the bucket."""
        if self.context.options.error_feedback:
            self.context.residual.apply(self.values, bucket.segments, bucket.value_type)
            if plan.layouts:
                self.rest = np.empty(len(self.values), np.float32)
        self.tags = plan.tag(self.context, bucket, step)
        self._note("tagged", plan.bits)
        self.phase = BucketPhase.EXCHANGING
        self.shards = {owner: Shard.ACCUMULATING if owner == self.rank else Shard.CONTRIBUTING for owner in plan.labels}
        self.awaited = len(self.shards)
        """Number of unfinished shards."""
        self.accumulator: ShardAccumulator | None = None
        self.latest = self.rank
        """The rank whose average arrived last."""
        self.lost: list[tuple[NDArray[np.int64], NDArray[np.floating]]] = []
        """Future residual: positions in the bucket, and values."""
        self.averaged: NDArray[np.generic] | None = None
        """With a parameter server, a copy of the average until all workers are known to have it."""
        self.codes: dict[int, Bytes] = {}
        """Encoded contributions by owner, until they are acknowledged."""
        for owner, layout in plan.layouts.items():
            if owner != self.rank:  # in this thread, since the endpoint's must keep up with packets
                code = self.codes[owner] = self.context.connection.buffers.take(layout.bytes)
                layout.encode(self._wide(owner), code, self._rest(owner))

    def begin(self) -> None:
        """Post receives for contributions to this rank's shard, and contribute to the others'."""
        if self.rank in self.shards:
            self._accumulate()
        for owner in self.shards:
            if owner != self.rank:
                self._contribute(owner)
        self._advance()

    # Reduce-scatter: contributions to the own shard -------------------------------------------------------------------

    def _accumulate(self) -> None:
        connection, peers, plan = self.context.connection, self.context.peers, self.plan
        key, bound, label = self._key(REDUCE_SCATTER, self.rank), plan.loss_bounds[self.rank], plan.labels[self.rank]
        streaming, layout = self.bucket.value_type is ValueType.FLOAT32, plan.layouts.get(self.rank)
        own = self.own.values if layout is None else self._wide(self.rank)
        encoded = None if layout is None else self._sum_of_encoded(layout, cast("NDArray[np.float32]", own))
        accumulator = self.accumulator = ShardAccumulator(
            connection, peers, own, streaming=streaming, key=key, encoded=encoded
        )
        readers = connection.local_peers.intersection(peers)
        if readers and accumulator.streaming is not None and not self.bucket.exported:
            self.own.copy_while_summed(accumulator.streaming)
        for position, peer in enumerate(peers):
            request = accumulator.request(position, key, bound, label)
            connection.receive(request, partial(self._on_contribution, peer), self.fail)
        if not peers:
            self._average(accumulator)

    def _sum_of_encoded(self, layout: PlaneLayout, own: NDArray[np.float32]) -> EncodedReduction:
        """Return the average of contributions to this rank's shard; unless it stays here, it is encoded for the others.

        The shard becomes what all ranks decode.
        """
        ranks, code, rest = len(self.context.contributors), None, None
        if not self.bucket.scattered:
            code, rest = self.own.encode_as(layout), self._rest(self.rank)
        factor = float(np.float32(self.bucket.factor / ranks))
        # The next contribution is divided by the number of ranks.
        how = {"has_own": True, "factor": factor, "code": code, "rest": rest, "weight": ranks}
        return EncodedReduction(layout, own, len(self.context.peers), **how)

    def _on_contribution(self, peer: int, arrival: Arrival) -> None:
        assert self.accumulator
        if self.accumulator.take(peer, arrival):
            self._note("contributed", peer)
            self._average(self.accumulator)

    def _average(self, accumulator: ShardAccumulator) -> None:
        """Average this rank's shard, and send it to all."""
        own, bucket = accumulator.own, self.bucket
        if accumulator.streaming is not None:
            self._finish_streaming(accumulator, accumulator.streaming)
            if bucket.factor != 1:
                np.multiply(own, np.float32(bucket.factor), out=own)
        elif accumulator.encoded is not None:
            accumulator.encoded.finish()
            if bucket.value_type is not ValueType.FLOAT32:
                self.own.values[:] = bucket.value_type.narrow(cast("NDArray[np.float32]", own))
        elif accumulator.peers:
            mean = average(
                {**accumulator.contributions, self.rank: own},
                self._delivered(accumulator),
                bucket.value_type,
                self.values_per_packet,
                rescale=self.context.options.rescale,
                samples=bucket.samples,
            )
            with np.errstate(over="ignore", invalid="ignore"):  # the loss scaler handles these
                own[:] = bucket.value_type.narrow(mean if bucket.factor == 1 else mean * mean.dtype.type(bucket.factor))
        accumulator.release()
        self._have(self.rank)
        self._note("summed")
        if bucket.scattered:
            self._advance()
        else:
            self._offer_average(accumulator)

    def _offer_average(self, accumulator: ShardAccumulator) -> None:
        """Send this rank's averaged shard to all peers whose contributions have been acknowledged."""
        rates_bps = self.reducer.rates_to_tell()
        self.reducer.note_rates(self.rank, self.sequence, rates_bps)
        own = self.own
        own.trailer, own.unconfirmed = rates_bps.view(np.uint8), set(accumulator.peers)
        if own.code is None:
            own.tags = self._tags(self.rank, len(own.trailer))
        else:
            own.tags = self._encoded_tags(self.rank, own.code, len(own.trailer))
        for peer in accumulator.peers:
            if self.shards.get(peer) is not Shard.CONTRIBUTING:
                self._send_average(peer)
        self._advance()

    def _finish_streaming(self, accumulator: ShardAccumulator, reduction: StreamingReduction) -> None:
        """Average packets that lack contributions; complete packets are averaged already."""
        rescale, samples = self.context.options.rescale, self.bucket.samples
        own = cast("NDArray[np.float32]", accumulator.own)
        if accumulator.whole or samples is None or not rescale:
            reduction.finish(rescale)
        else:
            reduction.finish(False)
            held = held_samples(self._delivered(accumulator), samples)
            divide_by_samples(own, held, len(self.context.contributors), self.values_per_packet, samples)
        if not accumulator.whole and self.own.copy is not None:
            self.own.copy[:] = own

    def _delivered(self, accumulator: ShardAccumulator) -> dict[int, NDArray[np.bool_]]:
        """Return the contributed packets in this rank's shard: a mask for each rank, including this one."""
        if accumulator.encoded is not None:  # none of their values is missing
            every = np.ones(-(-len(accumulator.own) // self.values_per_packet), np.bool_)
            return dict.fromkeys(self.context.contributors, every)
        return {**accumulator.delivered, self.rank: np.ones(-(-len(accumulator.own) // self.values_per_packet), bool)}

    # Reduce-scatter: contributions to others' shards ------------------------------------------------------------------

    def _contribute(self, owner: int) -> None:
        context, plan = self.context, self.plan
        bound, tail, layout = plan.loss_bounds[owner], EMPTY, plan.layouts.get(owner)
        if owner not in context.contributors:
            tail = self._tail_for_server().encode()
        if layout is not None:
            tags = self._encoded_tags(owner, self.codes[owner], len(tail), droppable=bound.ratio > 0)
        else:
            tags = self._tags(owner, len(tail))
        if owner not in context.contributors:
            known = context.options.bound.ratio  # it does not know layers' own bounds
            if bound.ratio < known:
                protect_all_but(tags, np.arange(len(tags.queue)), bound.ratio, self.step)
            bound = replace(bound, ratio=min(bound.ratio, known))
            # All packets with a part of the tail must arrive. These tags may be views of shared ones; but then nothing
            # may be lost, and every packet is protected already.
            content = len(self._bytes(owner) if layout is None else self.codes[owner])
            tags.protected[content // context.connection.options.payload_bytes :] = True
        key, label, order = self._key(REDUCE_SCATTER, owner), plan.labels[owner], plan.orders[owner]
        payload = self._bytes(owner) if layout is None else self.codes[owner]
        request = SendRequest(owner, key, payload.data, tags, bound, label, tail, order, layout)
        context.connection.send(request, partial(self._on_contributed, owner, tags), self.fail)

    def _tail_for_server(self) -> ContributionTail:
        bucket, residual = self.bucket, self.context.residual
        ranges: list[tuple[int, int]] = []
        for each in bucket.segments:
            if each.layer.name in residual.revoked and not each.is_beyond:
                start = ranges.pop()[0] if ranges and ranges[-1][1] == each.start else each.start
                ranges.append((start, each.stop))
        return ContributionTail(
            bucket.value_type,
            self.plan.bits,
            len(bucket.values),
            not bucket.exact,
            residual.revocable,
            tuple(ranges),
        )

    def _on_contributed(self, owner: int, tags: PacketTags, delivery: Delivery) -> None:
        start, stop = self.bounds[owner]
        context, label, loss_bound = self.context, self.plan.labels[owner], self.plan.loss_bounds[owner]
        layout = self.plan.layouts.get(owner)
        context.ledger.record(self._key(REDUCE_SCATTER, owner), owner, label, tags, loss_bound, delivery, layout)
        if layout is not None:
            code, rest = self.codes.pop(owner), self._rest(owner)
            if rest is not None and delivery.lost:
                layout.lose(code, delivery.delivered, rest)
            context.connection.buffers.give(code)
        elif delivery.lost:
            positions = self._positions(~delivery.delivered, stop - start)
            self._lose(owner, positions, self.bucket.value_type.widen(self.values[start:stop]))
        if self.bucket.scattered:
            self._have(owner, Shard.DELIVERED)
            self._advance()
            return
        self.shards[owner] = Shard.AWAITED  # before the receive, which an early message completes at once
        # Only now: the average overwrites data that may have been needed for a retransmission, or is lost.
        rates = len(context.contributors) if self.reducer.between_ranks else 0  # a server reports none
        tail = np.zeros(rates * RATE.itemsize, np.uint8)
        key = self._key(ALL_GATHER, self.rank)
        if layout is None:
            into = self._bytes(owner)
            request = ReceiveRequest(owner, key, len(into) + len(tail), RELIABLE, label, into=into, tail=tail)
            then = partial(self._on_average, owner, tail)
        else:
            decoded = self._wide(owner)
            reduction = EncodedReduction(layout, decoded, members=1)
            size = layout.bytes + len(tail)
            request = ReceiveRequest(owner, key, size, RELIABLE, label, tail=tail, reduction=reduction)
            then = partial(self._on_encoded_average, owner, tail, decoded, reduction)
        context.connection.receive(request, then, self.fail)
        if self.shards.get(self.rank) is Shard.AVERAGED and owner in self.own.unconfirmed:
            self._send_average(owner)

    # All-gather -------------------------------------------------------------------------------------------------------

    def _on_encoded_average(
        self,
        owner: int,
        tail: NDArray[np.uint8],
        decoded: NDArray[np.float32],
        reduction: EncodedReduction,
        arrival: Arrival,
    ) -> None:
        reduction.finish()
        self.context.connection.buffers.give(arrival.payload)
        value_type = self.bucket.value_type
        if value_type is not ValueType.FLOAT32:
            self.values[slice(*self.bounds[owner])] = value_type.narrow(decoded)
        self._on_average(owner, tail, arrival)

    def _on_average(self, owner: int, tail: NDArray[np.uint8], _: Arrival) -> None:
        self._have(owner)
        if len(tail):
            self.reducer.note_rates(owner, self.sequence, tail.view(RATE))
        self._advance()

    def _have(self, owner: int, state: Shard = Shard.AVERAGED) -> None:
        self.shards[owner], self.latest = state, owner
        self.awaited -= 1

    def _send_average(self, peer: int) -> None:
        """Send this rank's averaged shard to a peer whose contribution has been acknowledged."""
        request = self.own.request(peer, self._key(ALL_GATHER, peer), self.plan.labels[self.rank])
        self.context.connection.send(request, partial(self._on_average_sent, request), self.fail)

    def _on_average_sent(self, request: SendRequest, delivery: Delivery) -> None:
        peer = request.peer
        sent = request.label, request.tags, request.bound
        self.context.ledger.record(request.key, peer, *sent, delivery, request.layout)
        self.own.unconfirmed.discard(peer)
        self._advance()

    # Completion -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Enter the next phases that arrivals and acknowledgements allow."""
        if self.awaited or (self.done() and self.phase is not BucketPhase.RETURNED):  # the latter: it has failed
            return
        if self.phase is BucketPhase.EXCHANGING:
            self.phase = BucketPhase.CONFIRMING
            self._note("gathered", self.latest)
            if self.own.unconfirmed and not self.own.is_kept:
                copying_s = len(self._bytes(self.rank)) / COPY_BYTES_PER_S
                self.context.connection.call_later(PATIENCE_S + copying_s, self._on_overdue)
        if self.phase is BucketPhase.OVERDUE and self.own.unconfirmed and not self._local_peers_read():
            self.own.detach(partial(self._key, ALL_GATHER))
        confirmed = not self.own.unconfirmed or self.own.is_kept
        if self.phase in (BucketPhase.CONFIRMING, BucketPhase.OVERDUE) and confirmed:
            self._return()
        if self.phase is BucketPhase.RETURNED and not self.own.unconfirmed:
            self._end()

    def _on_overdue(self) -> None:
        if self.phase is BucketPhase.CONFIRMING:
            self.phase = BucketPhase.OVERDUE
            self._advance()

    def _local_peers_read(self) -> bool:
        """Return whether a local peer may be reading this rank's averaged shard in the bucket."""
        return self.bucket.exported and bool(self.own.unconfirmed & self.context.connection.local_peers)

    def _return(self) -> None:
        """Return the bucket to the caller."""
        self.phase = BucketPhase.RETURNED
        if not self.own.unconfirmed:
            self._end()
        if self.context.options.error_feedback:
            for positions, values in self.lost:
                self.context.residual.add_at(positions, values, self.bucket.segments)
            self._keep_rest()
        self.set_result(self.values)

    def _keep_rest(self) -> None:
        """Turn rounding errors into residual: as one array, if it covers the whole bucket, for one pass later."""
        rest, self.rest = self.rest, None
        if rest is None:
            return
        rounded = self._rounded()
        if len(rounded) == len(self.shards):
            self.context.residual.add_whole(rest, self.bucket.segments)
            return
        for owner in rounded:
            start, stop = self.bounds[owner]
            self.context.residual.add_range(start, rest[start:stop], self.bucket.segments)

    def _rounded(self) -> list[int]:
        """Return the owners of shards that were rounded: of a scattered bucket, this rank keeps its own in full."""
        return [owner for owner in self.plan.layouts if owner != self.rank or not self.bucket.scattered]

    def _end(self) -> None:
        self.phase = BucketPhase.ENDED
        if not self.reducer.between_ranks:  # the server may end before it has sent the average to another worker
            self.averaged = self.values.copy()
        self.own.release()

    # Partial result ---------------------------------------------------------------------------------------------------

    def partial_result(self) -> PartialResult | None:
        """Return this rank's state of the bucket; None if all peers have it."""
        widen = self.bucket.value_type.widen
        if self.averaged is not None:
            return PartialResult.averaged(self.context.contributors, widen(self.averaged), self.values_per_packet)
        if self.phase is BucketPhase.ENDED:
            return None
        unit, accumulator = self.values_per_packet, self.accumulator
        encoded = (
            self.plan.layouts.get(self.rank) if accumulator and self.shards[self.rank] is Shard.ACCUMULATING else None
        )
        if encoded is not None:  # its packets have other borders than those of other shards
            unit = math.gcd(unit, encoded.per_packet)
        count = -(-len(self.values) // unit)
        final, unconfirmed = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        included = {rank: np.zeros(count, np.bool_) for rank in self.context.contributors}
        start, stop = self.bounds.get(self.rank, (0, 0))
        mine = slice(start // unit, -(-stop // unit))
        for rank, bits in self._included().items():
            each = self.values_per_packet if encoded is None or rank == self.rank else encoded.per_packet
            included[rank][mine] = np.repeat(bits, each // unit)[: mine.stop - mine.start]
        # A sum is divided as soon as it is complete, packet by packet.
        averaged = self.shards.get(self.rank) is Shard.AVERAGED
        final[mine] = averaged or np.all([bits[mine] for bits in included.values()], axis=0)
        if self.own.is_kept and self.done() and not self.exception():
            # The caller has the bucket back; only this rank's averaged shard is left.
            values = np.zeros(len(self.values), widen(self.values[:0]).dtype)
            values[start:stop] = self.own.kept(self.bucket.value_type)
            return PartialResult(values, unit, final, included)
        values = widen(self.values)
        missing = ~np.repeat(final, unit)[start:stop]  # values of this rank's shard that are not averaged
        if encoded is not None and accumulator is not None:
            values[start:stop] = cast("NDArray[np.float32]", accumulator.own)
        for owner, state in self.shards.items():
            if owner != self.rank:
                first, last = self.bounds[owner]
                part = slice(first // unit, -(-last // unit))
                final[part] = state is Shard.AVERAGED
                included[self.rank][part] = state is not Shard.AVERAGED
                unconfirmed[part] = state is Shard.CONTRIBUTING
        residual = np.zeros(len(values), values.dtype) if self.lost or self.rest is not None else None
        if residual is not None:
            for positions, lost in self.lost:
                residual[positions] += lost
            for owner in self._rounded() if self.rest is not None else ():
                residual[slice(*self.bounds[owner])] = self._rest(owner)
            residual[start:stop][missing] = 0  # not rounded so far
        return PartialResult(values, unit, final, included, residual, unconfirmed)

    def _included(self) -> Mapping[int, NDArray[np.bool_]]:
        """Return the contributions that this rank's shard holds: a mask of packets by rank."""
        accumulator = self.accumulator
        if accumulator is None:
            start, stop = self.bounds.get(self.rank, (0, 0))
            return {self.rank: np.ones(-(-stop // self.values_per_packet) - start // self.values_per_packet, np.bool_)}
        if self.shards[self.rank] is Shard.AVERAGED:
            return self._delivered(accumulator)
        return {self.rank: self._delivered(accumulator)[self.rank], **accumulator.included()}

    # Parts of the bucket ----------------------------------------------------------------------------------------------

    def _tags(self, owner: int, tail_bytes: int = 0) -> PacketTags:
        """Return the tags of a shard's packets; packets of a tail are tagged like the last."""
        more = 0
        if tail_bytes:
            (start, stop), packets = self.bounds[owner], self.plan.packets[owner]
            size = (stop - start) * self.values.itemsize + tail_bytes
            more = -(-size // self.context.connection.options.payload_bytes) - (packets.stop - packets.start)
        return self.plan.tags_of(owner, self.tags, more)

    def _encoded_tags(self, owner: int, code: Bytes, tail_bytes: int = 0, *, droppable: bool = False) -> PacketTags:
        """Return the tags of a shard's packets in an encoded message; see :meth:`_tags`."""
        # As in DirectPlan.tag, drop classes wait for the first sign of possible loss.
        at_risk = droppable and (self.plan.bound.immediate or not self.context.connection.peers[owner].is_clear)
        may_drop = self._may_drop(self.plan.layouts[owner], self._packets(owner)) if at_risk else None
        return self.plan.encoded_tags(owner, self.values_per_packet, tail_bytes, code, may_drop)

    def _wide(self, owner: int) -> NDArray[np.float32]:
        """Return a shard's values as float32; not a copy if they are."""
        return cast(
            "NDArray[np.float32]", self.bucket.value_type.widen(self.values[slice(*self.bounds.get(owner, (0, 0)))])
        )

    def _rest(self, owner: int) -> NDArray[np.float32] | None:
        """Return a shard's rounding errors, if they will be residual."""
        return None if self.rest is None else self.rest[slice(*self.bounds[owner])]

    def _lose(self, owner: int, positions: NDArray[np.int64], values: NDArray[np.floating]) -> None:
        """Record a shard's ``values`` at ``positions`` as lost."""
        if len(positions):
            self.lost.append((positions + self.bounds[owner][0], values[positions]))

    def _packets(self, owner: int) -> slice:
        return self.plan.packets.get(owner, slice(0, 0))

    def _key(self, phase: int, receiver: int) -> MessageKey:
        return MessageKey(self.step, self.plan.numbers[phase, receiver])

    def _bytes(self, owner: int) -> Bytes:
        start, stop = self.bounds[owner]
        return self.values[start:stop].view(np.uint8)
