# SPDX-License-Identifier: Apache-2.0
"""Reductions: every rank adds up a shard of what all contribute, and gives the result to those who want it."""

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.channel import Channel, Run
from dlcp.collectives.mailbox import FIRST_NUMBER as MAILBOX_FIRST_NUMBER
from dlcp.collectives.reduction import Arithmetic
from dlcp.collectives.shards import shard_bounds
from dlcp.transport import RELIABLE, Arrival

SMALL_BYTES = 16 << 10
"""Up to this size a collective is as short as can be; above it, it moves as few bytes as can be. Chosen by us."""
SMALL_RANKS = 8
"""Up to this many ranks, all send small contributions to all. Chosen by us."""
PIECE_BYTES = 2 << 20
"""A reduction is cut into pieces, so that one is added up while the next is on its way. Chosen by us."""
ADD_ASIDE_BYTES = 64 << 10
"""Additions of more than this are no business of the endpoint's thread. Chosen by us: 10 us of work."""
SCATTER, GATHER = 0, 1
"""Phases: to those who add up or pass on, and from them."""


class Summing:
    """One reduction.

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
        channel = self.channel
        if self._is_small(data) and channel.ranks <= SMALL_RANKS:
            self._everywhere(data)
            return
        shards = self._shards(data)
        self._push(shards)
        for owner in channel.peers:
            self._await_result(owner, shards[owner])
        self._add_up(shards[channel.rank], shards[channel.rank], channel.peers)

    def for_one(self, data: memoryview, root: int) -> None:
        """Let the root have the result in place of its contribution."""
        channel = self.channel
        if self._is_small(data):
            shards = [data if rank == root else data[:0] for rank in range(channel.ranks)]
        else:
            shards = self._shards(data)
        mine = shards[channel.rank]
        self._push(shards)
        if channel.rank == root:
            for owner in channel.peers:
                self._await_result(owner, shards[owner])
            self._add_up(mine, mine, [])
        else:
            self._add_up(mine, memoryview(bytearray(len(mine))), [root])

    def for_each(self, parts: Sequence[memoryview], result: memoryview) -> None:
        """Let every rank have the result of its part."""
        self._push(parts)
        self._add_up(parts[self.channel.rank], result, [])

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
        channel, arithmetic = self.channel, self.arithmetic
        shares = {peer: memoryview(bytearray(len(data))) for peer in channel.peers}
        shares[channel.rank] = memoryview(bytes(data))
        missing = len(shares)
        lock = threading.Lock()

        def on_share() -> None:
            nonlocal missing
            with lock:
                missing -= 1
                if missing:
                    return
            total = arithmetic.begin(shares[0], data)
            for rank in range(1, channel.ranks):
                arithmetic.add(total, shares[rank])
            arithmetic.finish(total, data, channel.ranks)

        for peer in channel.peers:
            channel.receive_part(self.run, peer, GATHER, shares[peer], on_share)
            channel.send_part(self.run, peer, GATHER, shares[channel.rank])
        on_share()

    def _push(self, shards: Sequence[memoryview]) -> None:
        channel = self.channel
        for distance in range(1, channel.ranks):  # each begins with another, so that none is overrun
            owner = (channel.rank + distance) % channel.ranks
            for number, piece in enumerate(self._pieces(shards[owner])):
                lossy = self.run.loss is not None
                channel.send_part(self.run, owner, 2 * number + SCATTER, piece, lossy=lossy)

    def _await_result(self, owner: int, shard: memoryview) -> None:
        for number, piece in enumerate(self._pieces(shard)):
            # What this overwrites is with the owner already, else there would be no result.
            self.channel.receive_part(self.run, owner, 2 * number + GATHER, piece)

    def _pieces(self, shard: memoryview) -> list[memoryview]:
        """Cut a shard at packet borders, into no more pieces than can be numbered."""
        most = max(1, MAILBOX_FIRST_NUMBER // (2 * self.channel.ranks) - 1)
        packet = self.channel.endpoint.options.payload_bytes
        packets = max(PIECE_BYTES // packet, -(-len(shard) // (packet * most)), 1)
        packets += packets % 2  # a packet need not hold whole values of 16 bytes, two do
        return [shard[start : start + packets * packet] for start in range(0, len(shard), packets * packet)]

    def _add_up(self, mine: memoryview, result: memoryview, receivers: Sequence[int]) -> None:
        pieces = zip(self._pieces(mine), self._pieces(result), strict=True)
        for number, (own, out) in enumerate(pieces):
            _Piece(self, number, own, out, receivers).begin()


class _Piece:
    """One piece of this rank's shard, to which the others' contributions are added by ascending rank.

    The order does not depend on who comes first, so neither does the result.
    """

    def __init__(
        self, summing: Summing, number: int, own: memoryview, out: memoryview, receivers: Sequence[int]
    ) -> None:
        self.channel, self.run, self.arithmetic = summing.channel, summing.run, summing.arithmetic
        self.number, self.own, self.out, self.receivers = number, own, out, receivers
        self.due = list(reversed(self.channel.peers))
        self.arrived: dict[int, Arrival] = {}
        self.counts: list[NDArray[np.bool_]] = []
        self.lock = threading.Lock()

    def begin(self) -> None:
        """Wait for the contributions; with none to come, this rank's is the result."""
        self.total = self.arithmetic.begin(self.own, self.out)
        if not self.due:
            self.finish()
        bound = self.run.loss.bound if self.run.loss else RELIABLE
        for peer in self.channel.peers:
            self.channel.receive_arrival(
                self.run, peer, 2 * self.number + SCATTER, len(self.own), bound, partial(self.on_share, peer)
            )

    def on_share(self, peer: int, arrival: Arrival) -> None:
        """Take in a contribution, and add up what can be."""
        self.arrived[peer] = arrival
        if len(self.own) > ADD_ASIDE_BYTES:
            self.run.operation.wait_for(self.channel.aside(self.add_ready))
        else:
            self.add_ready()

    def add_ready(self) -> None:
        """Add what has arrived, as far as no lower rank is missing."""
        with self.lock:
            while self.due and self.due[-1] in self.arrived:
                arrival = self.arrived.pop(self.due.pop())
                self.arithmetic.add(self.total, arrival.payload.data)
                if self.run.loss:
                    self.counts.append(arrival.delivered)
                if not self.due:
                    self.finish()

    def finish(self) -> None:
        """Write the result, and send it to those who want it."""
        delivered = None
        if self.counts and not all(count.all() for count in self.counts):
            size = self.arithmetic.storage.itemsize
            per_packet = self.channel.endpoint.options.payload_bytes // size
            held = 1 + np.sum(self.counts, axis=0)
            delivered = np.repeat(held, per_packet)[: len(self.own) // size].astype(self.total.dtype)
        self.arithmetic.finish(self.total, self.out, self.channel.ranks, delivered)
        for peer in self.receivers:
            self.channel.send_part(self.run, peer, 2 * self.number + GATHER, self.out)
