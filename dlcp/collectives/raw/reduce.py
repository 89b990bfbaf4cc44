# SPDX-License-Identifier: Apache-2.0
"""Reductions: every rank reduces one shard of all contributions, and sends the result to the ranks that need it.

Shards are divided into chunks, so that one is reduced while the next is in flight. Small all-reduces take one hop
instead of two: every rank sends its whole buffer to all, and each reduces alone.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.direct import ShardAccumulator
from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.message_numbers import COLLECTIVES_RANGE as NUMBERS
from dlcp.collectives.raw.channel import Channel, Collective, copy_bytes
from dlcp.collectives.raw.elementwise_ops import ElementwiseOp, ReduceOp
from dlcp.collectives.shards import shard_bounds
from dlcp.transport import RELIABLE, Arrival

SMALL_BYTES: Final = 16 << 10
"""A shard for every rank only pays off above this; smaller buffers are reduced by one rank."""
ONE_HOP_BYTES: Final = 64 << 10
"""The largest buffer that ranks send to all in one hop: every rank reduces it in the endpoint's thread. Not tuned."""
HOP_S: Final = 200e-6
HOST_BYTES_PER_S: Final = 1e9
"""Time of a hop, and send rate of a busy host: the order of magnitude on the machines we measured."""
_CHUNK_BYTES: Final = 8 << 20
"""The size of a chunk. Not tuned."""
ASIDE_BYTES: Final = 64 << 10
"""The most bytes reduced in the endpoint's thread: 10 us of work."""


class CollectiveReduction:
    """One reduction, in the endpoint's thread.

    Parameters
    ----------
    channel, collective
        The channel, and the collective that the reduction belongs to.
    op
        The operation on values.
    """

    def __init__(self, channel: Channel, collective: Collective, op: ElementwiseOp) -> None:
        self.channel, self.collective, self.op = channel, collective, op

    def all_reduce(self, data: memoryview) -> None:
        """Give every rank the result in place of its contribution."""
        if self.collective.loss is None and len(data) <= one_hop_bytes(self.channel.ranks):
            self._one_hop(data)
            return
        shards = self._shards(data)
        mine = shards[self.channel.rank]
        self._contribute(shards, gather=True)
        self._accumulate(mine, mine, self.channel.peers)

    def reduce(self, data: memoryview, root: int) -> None:
        """Give the root the result in place of its contribution."""
        rank = self.channel.rank
        if self._is_small(data):
            shards = [data if rank == root else data[:0] for rank in range(self.channel.ranks)]
        else:
            shards = self._shards(data)
        self._contribute(shards, gather=rank == root)
        if rank == root:
            self._accumulate(shards[rank], shards[rank], [])
        elif len(shards[rank]):
            buffers = self.channel.connection.buffers
            buffer = buffers.take(len(shards[rank]))
            self._accumulate(shards[rank], buffer.data, [root])
            # By then everything sent from there has been acknowledged or copied.
            give = partial(buffers.give, buffer)
            self.collective.operation.done.add_done_callback(lambda _: self.channel.call(give))

    def reduce_scatter(self, parts: Sequence[memoryview], result: memoryview) -> None:
        """Give every rank the result of its part. Runs in the caller's thread, which copies while packets are sent."""
        channel = self.channel
        channel.begin(self.collective, partial(self._contribute, parts, gather=False))
        for chunk in self._chunks_of(parts[channel.rank], result, []):
            chunk.prepare()
            channel.begin(self.collective, chunk.begin)

    def _is_small(self, data: memoryview) -> bool:
        return self.collective.loss is None and len(data) <= SMALL_BYTES

    def _shards(self, data: memoryview) -> list[memoryview]:
        size, ranks = self.op.storage.itemsize, self.channel.ranks
        if self._is_small(data):
            only = self.collective.number % ranks  # in turn, so that no rank is busier than the rest
            return [data if rank == only else data[:0] for rank in range(ranks)]
        per_packet = self.channel.connection.options.payload_bytes // size
        shards = shard_bounds(len(data) // size, per_packet, dict.fromkeys(range(ranks), 1.0))
        return [data[start * size : stop * size] for start, stop in shards.values()]

    def _one_hop(self, data: memoryview) -> None:
        """Send the buffer to all ranks; each rank reduces alone, in the order of ranks."""
        channel, buffers = self.channel, self.channel.connection.buffers
        own = memoryview(bytes(data))
        received = {peer: buffers.take(len(data)) for peer in channel.peers}
        missing = len(received)

        def on_contribution() -> None:
            nonlocal missing
            missing -= 1
            if missing > 0:
                return
            parts = [received[rank].data if rank in received else own for rank in range(channel.ranks)]
            self.op.reduce(parts, data, channel.ranks)
            for buffer in received.values():
                buffers.give(buffer)

        for peer in channel.peers:
            channel.send_part(self.collective, peer, ALL_GATHER, own, own=True)
        for peer in channel.peers:
            channel.receive_part(self.collective, peer, ALL_GATHER, received[peer].data, on_contribution)
        if not channel.peers:
            on_contribution()

    def _contribute(self, shards: Sequence[memoryview], *, gather: bool) -> None:
        """Send each owner its shard; with ``gather``, receive the result into the same memory."""
        channel, lossy = self.channel, self.collective.loss is not None
        for distance in range(1, channel.ranks):  # each rank begins with a different peer, so that none is overrun
            owner = (channel.rank + distance) % channel.ranks
            for number, chunk in enumerate(self._cut(shards[owner])):
                receive = partial(channel.receive_part, self.collective, owner, 2 * number + ALL_GATHER, chunk)
                # Only after its acknowledgement: the result overwrites data that may be needed for a retransmission.
                then = receive if gather else None
                phase = 2 * number + REDUCE_SCATTER
                channel.send_part(self.collective, owner, phase, chunk, lossy=lossy, then=then)

    def _cut(self, shard: memoryview) -> list[memoryview]:
        """Divide a shard into chunks at packet borders, no more than can be numbered."""
        most = max(1, NUMBERS.stop // (2 * self.channel.ranks) - 1)
        packet = self.channel.connection.options.payload_bytes
        packets = max(_CHUNK_BYTES // packet, -(-len(shard) // (packet * most)), 1)
        packets += packets % 2  # one packet need not hold whole values of 16 bytes, two do
        return [shard[start : start + packets * packet] for start in range(0, len(shard), packets * packet)]

    def _accumulate(self, mine: memoryview, result: memoryview, receivers: Sequence[int]) -> None:
        """Reduce this rank's shard into ``result``, and send it to the receivers."""
        for chunk in self._chunks_of(mine, result, receivers):
            chunk.prepare()
            chunk.begin()

    def _chunks_of(
        self, mine: memoryview, result: memoryview, receivers: Sequence[int]
    ) -> "Iterator[ChunkAccumulator]":
        for number, (own, out) in enumerate(zip(self._cut(mine), self._cut(result), strict=True)):
            then = partial(self._send_result, number, out, receivers)
            yield ChunkAccumulator(self, 2 * number + REDUCE_SCATTER, own, out, then)

    def _send_result(self, number: int, out: memoryview, receivers: Sequence[int]) -> None:
        for peer in receivers:
            self.channel.send_part(self.collective, peer, 2 * number + ALL_GATHER, out)


class ChunkAccumulator:
    """The reduction of one chunk of this rank's shard.

    Sums and means of float32 are computed as packets arrive. Other reductions start once all contributions have
    arrived; long ones run in the work thread.

    Parameters
    ----------
    reduction, phase
        The reduction, and the phase of its messages.
    own, out
        This rank's contribution, and the buffer for the result; they may be the same.
    then
        Called with the result in ``out``.
    """

    def __init__(
        self, reduction: CollectiveReduction, phase: int, own: memoryview, out: memoryview, then: Callable[[], None]
    ) -> None:
        self.channel, self.collective, self.op = reduction.channel, reduction.collective, reduction.op
        self.phase, self.own, self.out, self.then = phase, own, out, then
        self.streaming = self.op.format_name == "float32" and self.op.kind in (ReduceOp.SUM, ReduceOp.MEAN)

    def prepare(self) -> None:
        """Start a streaming sum with this rank's contribution, in any thread, before :meth:`begin`."""
        if self.streaming:
            copy_bytes(self.own, self.out)

    def begin(self) -> None:
        """Post receives for the contributions; without any, this rank's is the result."""
        channel, collective = self.channel, self.collective
        if not channel.peers:
            self.op.reduce([self.own], self.out, 1)
            self.then()
            return
        own = np.frombuffer(self.out, np.float32) if self.streaming else np.frombuffer(self.own, np.uint8)
        divisor = channel.ranks if self.op.kind is ReduceOp.MEAN else 1
        accumulator = self.accumulator = ShardAccumulator(
            channel.connection, channel.peers, own, streaming=self.streaming, divisor=divisor
        )
        bound = collective.loss.bound if collective.loss else RELIABLE
        key = channel.key(collective, self.phase, channel.rank)
        for position, peer in enumerate(channel.peers):
            request = accumulator.request(position, key, bound, collective.label)
            channel.post_receive(collective, request, partial(self._on_contribution, peer))

    def _on_contribution(self, peer: int, arrival: Arrival) -> None:
        if not self.accumulator.take(peer, arrival):
            return
        if self.streaming:
            self._finish_streaming()
        elif len(self.own) > ASIDE_BYTES:
            self.channel.aside(self.collective, self._reduce, self._over)
            return
        else:
            self._reduce()
        self._over()

    def _finish_streaming(self) -> None:
        """Scale packets that lack contributions, so that they represent all ranks."""
        accumulator = self.accumulator
        assert accumulator.reduction
        accumulator.reduction.finish(self.op.kind is ReduceOp.MEAN)
        if accumulator.whole or self.op.kind is ReduceOp.MEAN:
            return
        held, values = self._held(), np.frombuffer(self.out, np.float32)
        per_packet = self.channel.connection.options.payload_bytes // values.itemsize
        ranks = np.float32(self.channel.ranks)
        with np.errstate(all="ignore"):
            for packet in np.flatnonzero(held < self.channel.ranks).tolist():
                part = values[packet * per_packet : (packet + 1) * per_packet]
                part /= np.float32(held[packet])
                part *= ranks

    def _reduce(self) -> None:
        delivered = None
        if not self.accumulator.whole:
            size = self.op.storage.itemsize
            per_packet = self.channel.connection.options.payload_bytes // size
            delivered = np.repeat(self._held(), per_packet)[: len(self.own) // size].astype(np.float32)
        received = self.accumulator.contributions
        self.op.reduce(
            [self.own, *(received[peer].data for peer in self.channel.peers)],
            self.out,
            self.channel.ranks,
            delivered,
        )

    def _over(self) -> None:
        self.accumulator.release()
        self.then()

    def _held(self) -> NDArray[np.intp]:
        """Return the number of contributions in each packet, shape (packets,)."""
        return np.asarray(1 + np.sum(list(self.accumulator.delivered.values()), axis=0))


def one_hop_bytes(ranks: int) -> int:
    """Return the size up to which an all-reduce takes one hop: up to it, the extra bytes cost less than a second hop.

    In one hop each rank sends ``n - 1`` times the buffer; in shards, ``2 (n - 1) / n`` times.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    return ONE_HOP_BYTES if more <= 0 else min(ONE_HOP_BYTES, int(HOP_S * HOST_BYTES_PER_S / more))
