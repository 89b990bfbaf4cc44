# SPDX-License-Identifier: Apache-2.0
"""Reductions: every rank adds up a shard of what all contribute, and gives the result to those who want it.

Small ones take one hop instead of two: all send everything to all, and each adds up by itself.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from dlcp.backend.arithmetic import Arithmetic
from dlcp.backend.process_group import Channel, Run
from dlcp.backend.totals import FoldedTotal, Total
from dlcp.collectives.message_numbers import COLLECTIVES
from dlcp.collectives.shards import shard_bounds

SMALL_BYTES: Final = 16 << 10
"""What is as small as this is added up by one rank, for those that are too many to send everything to all."""
ONE_HOP_BYTES: Final = 64 << 10
"""The most that all send to all. Chosen by us: all add it up in the endpoint's thread."""
HOP_S: Final = 200e-6
HOST_BYTES_PER_S: Final = 1e9
"""What a hop takes, and how fast bytes leave a busy host: the order of magnitude on the machines we know."""
PIECE_BYTES: Final = 8 << 20
"""A reduction is cut into pieces, so that one is added up while the next is on its way. Chosen by us."""
SCATTER, GATHER = 0, 1
"""Phases: to those who add up or pass on, and from them."""


class Summing:
    """One reduction, in the endpoint's thread.

    Parameters
    ----------
    channel, run
        Where it happens, and which collective it is.
    arithmetic
        What is done with the values.
    """

    def __init__(self, channel: Channel, run: Run, arithmetic: Arithmetic) -> None:
        self.channel, self.run, self.arithmetic = channel, run, arithmetic

    def for_all(self, data: memoryview) -> None:
        """Let every rank have the result in place of its contribution."""
        if self.run.loss is None and len(data) <= one_hop_bytes(self.channel.ranks):
            self._everywhere(data)
            return
        shards = self._shards(data)
        mine = shards[self.channel.rank]
        self._push(shards, results=True)
        self._add_up(mine, mine, self.channel.peers)

    def for_one(self, data: memoryview, root: int) -> None:
        """Let the root have the result in place of its contribution."""
        rank = self.channel.rank
        if self._is_small(data):
            shards = [data if rank == root else data[:0] for rank in range(self.channel.ranks)]
        else:
            shards = self._shards(data)
        self._push(shards, results=rank == root)
        if rank == root:
            self._add_up(shards[rank], shards[rank], [])
        elif len(shards[rank]):
            scratch = self.channel.endpoint.buffers
            room = scratch.take(len(shards[rank]))
            self._add_up(shards[rank], room.data, [root])
            # By then all that was sent from there is confirmed, or has been copied.
            give = partial(scratch.give, room)
            self.run.operation.done.add_done_callback(lambda _: self.channel.call(give))

    def for_each(self, parts: Sequence[memoryview], result: memoryview) -> None:
        """Let every rank have the result of its part. For the caller's thread, which copies while packets leave."""
        channel = self.channel
        channel.begin(self.run, partial(self._push, parts, results=False))
        for phase, total in self._totals(parts[channel.rank], result, []):
            total.prepare()
            channel.begin(self.run, partial(total.begin, phase))

    def _is_small(self, data: memoryview) -> bool:
        return self.run.loss is None and len(data) <= SMALL_BYTES

    def _shards(self, data: memoryview) -> list[memoryview]:
        size, ranks = self.arithmetic.storage.itemsize, self.channel.ranks
        if self._is_small(data):
            only = self.run.number % ranks  # one after the other, so that none is busier than the rest
            return [data if rank == only else data[:0] for rank in range(ranks)]
        per_packet = self.channel.endpoint.options.payload_bytes // size
        shards = shard_bounds(len(data) // size, per_packet, dict.fromkeys(range(ranks), 1.0))
        return [data[start * size : stop * size] for start, stop in shards.values()]

    def _everywhere(self, data: memoryview) -> None:
        """Send everything to everybody; each adds up by itself, in the order of ranks."""
        channel, scratch = self.channel, self.channel.endpoint.buffers
        own = memoryview(bytes(data))
        rooms = {peer: scratch.take(len(data)) for peer in channel.peers}
        missing = len(rooms)

        def on_share() -> None:
            nonlocal missing
            missing -= 1
            if missing > 0:
                return
            shares = [rooms[rank].data if rank in rooms else own for rank in range(channel.ranks)]
            self.arithmetic.reduce(shares, data, channel.ranks)
            for room in rooms.values():
                scratch.give(room)

        for peer in channel.peers:
            channel.send_part(self.run, peer, GATHER, own, own=True)
        for peer in channel.peers:
            channel.receive_part(self.run, peer, GATHER, rooms[peer].data, on_share)
        if not channel.peers:
            on_share()

    def _push(self, shards: Sequence[memoryview], *, results: bool) -> None:
        """Send each owner its shard; with ``results``, let what it makes of that come back to the same place."""
        channel, lossy = self.channel, self.run.loss is not None
        for distance in range(1, channel.ranks):  # each begins with another, so that none is overrun
            owner = (channel.rank + distance) % channel.ranks
            for number, piece in enumerate(self._pieces(shards[owner])):
                # Only then, for the result overwrites what may still have to be sent.
                then = partial(channel.receive_part, self.run, owner, 2 * number + GATHER, piece) if results else None
                channel.send_part(self.run, owner, 2 * number + SCATTER, piece, lossy=lossy, then=then)

    def _pieces(self, shard: memoryview) -> list[memoryview]:
        """Cut a shard at packet borders, into no more pieces than can be numbered."""
        most = max(1, COLLECTIVES.stop // (2 * self.channel.ranks) - 1)
        packet = self.channel.endpoint.options.payload_bytes
        packets = max(PIECE_BYTES // packet, -(-len(shard) // (packet * most)), 1)
        packets += packets % 2  # a packet need not hold whole values of 16 bytes, two do
        return [shard[start : start + packets * packet] for start in range(0, len(shard), packets * packet)]

    def _add_up(self, mine: memoryview, result: memoryview, receivers: Sequence[int]) -> None:
        """Add up this rank's shard into ``result``, and send it to those who want it."""
        for phase, total in self._totals(mine, result, receivers):
            total.prepare()
            total.begin(phase)

    def _totals(self, mine: memoryview, result: memoryview, receivers: Sequence[int]) -> Iterator[tuple[int, Total]]:
        kind = FoldedTotal if FoldedTotal.serves(self.arithmetic) else Total
        for number, (own, out) in enumerate(zip(self._pieces(mine), self._pieces(result), strict=True)):
            then = partial(self._send_result, number, out, receivers)
            yield 2 * number + SCATTER, kind(self.channel, self.run, self.arithmetic, own, out, then)

    def _send_result(self, number: int, out: memoryview, receivers: Sequence[int]) -> None:
        for peer in receivers:
            self.channel.send_part(self.run, peer, 2 * number + GATHER, out)


def one_hop_bytes(ranks: int) -> int:
    """Return up to which size an all-reduce takes one hop: what that costs in bytes is less than what a hop takes.

    Everything to all moves ``n - 1`` times the buffer out of each rank, in shards it is ``2 (n - 1) / n`` times.
    """
    more = (ranks - 1) * (1 - 2 / ranks)
    return ONE_HOP_BYTES if more <= 0 else min(ONE_HOP_BYTES, int(HOP_S * HOST_BYTES_PER_S / more))
