# SPDX-License-Identifier: Apache-2.0
"""Collectives of a group of ranks over one endpoint, on raw bytes: everything arrives in full unless loss is allowed.

Collectives are numbered in the order of issue, which must be the same on all ranks; the number is the step of their
messages. So any number of collectives can be in progress independently.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from dlcp.collectives.message_numbers import ALL_GATHER, REDUCE_SCATTER
from dlcp.collectives.raw.channel import EAGER_BYTES, AllowedLoss, Channel, Collective, copy_bytes
from dlcp.collectives.raw.elementwise_ops import ElementwiseOp
from dlcp.collectives.raw.reduce import CollectiveReduction
from dlcp.collectives.shards import binomial_tree, shard_bounds


class Collectives(Channel):
    """All collectives of one rank within its group. Thread-safe; methods return at once.

    Buffers are contiguous memoryviews of bytes; input buffers must not change, and output buffers must not be read,
    until the operation's future is done. By then this rank has received everything, and the others have its data, or a
    copy is being sent. So if a peer fails, only a later collective may report it.
    """

    # Moving bytes -----------------------------------------------------------------------------------------------------

    def barrier(self) -> "Future[None]":
        """Complete when all ranks have called this. After round k, each has heard from 2**k more ranks."""
        collective = self.start("barrier")
        token = memoryview(bytearray(1))
        rounds = (self.ranks - 1).bit_length()

        def confirmed() -> None:
            pass

        def enter(number: int) -> None:
            if number == rounds:
                return
            distance = 1 << number
            # A rank may end right after a barrier and send nothing more, so the others must know of it before.
            self.send_part(collective, (self.rank + distance) % self.ranks, number, token, then=confirmed)
            arrived = memoryview(bytearray(1))
            self.receive_part(
                collective, (self.rank - distance) % self.ranks, number, arrived, partial(enter, number + 1)
            )

        return self._run(collective, partial(enter, 0))

    def broadcast(self, data: memoryview, root: int) -> "Future[None]":
        """Send the root's ``data`` to all ranks: in a binomial tree, or in parts that ranks exchange."""
        collective = self.start("broadcast")
        small = self.ranks == 2 or len(data) <= EAGER_BYTES * self.ranks
        way = self._broadcast_by_tree if small else self._broadcast_in_parts
        return self._run(collective, partial(way, collective, data, root))

    def _broadcast_by_tree(self, collective: Collective, data: memoryview, root: int) -> None:
        parent, children = binomial_tree(self.rank, root, self.ranks)

        def pass_on() -> None:
            for child in children:
                self.send_part(collective, child.rank, REDUCE_SCATTER, data)

        if parent:
            self.receive_part(collective, parent.rank, REDUCE_SCATTER, data, pass_on)
        else:
            pass_on()

    def _broadcast_in_parts(self, collective: Collective, data: memoryview, root: int) -> None:
        shards = shard_bounds(len(data), self.connection.options.payload_bytes, dict.fromkeys(range(self.ranks), 1.0))
        parts = {rank: data[start:stop] for rank, (start, stop) in shards.items()}

        def pass_on() -> None:
            for peer in self.peers:
                if peer != root:
                    self.send_part(collective, peer, ALL_GATHER, parts[self.rank])

        if self.rank == root:
            for peer in self.peers:
                self.send_part(collective, peer, REDUCE_SCATTER, parts[peer])
            pass_on()
        else:
            self.receive_part(collective, root, REDUCE_SCATTER, parts[self.rank], pass_on)
            for peer in self.peers:
                if peer != root:
                    self.receive_part(collective, peer, ALL_GATHER, parts[peer])
            self.receive_part(collective, root, ALL_GATHER, parts[root])

    def all_gather(self, mine: memoryview, parts: Sequence[memoryview]) -> "Future[None]":
        """Fill ``parts`` with each rank's ``mine``; sizes may differ between ranks."""
        return self._all_to_all("all_gather", [mine] * self.ranks, parts)

    def gather(self, mine: memoryview, parts: Sequence[memoryview] | None, root: int) -> "Future[None]":
        """Fill the root's ``parts`` with each rank's ``mine``."""
        collective = self.start("gather")
        if self.rank != root:
            return self._run(collective, partial(self.send_part, collective, root, ALL_GATHER, mine))
        assert parts is not None

        def receive() -> None:
            for peer in self.peers:
                self.receive_part(collective, peer, ALL_GATHER, parts[peer])

        return self._run(collective, receive, partial(copy_bytes, mine, parts[root]))

    def scatter(self, mine: memoryview, parts: Sequence[memoryview] | None, root: int) -> "Future[None]":
        """Fill each rank's ``mine`` with its part of the root's ``parts``."""
        collective = self.start("scatter")
        if self.rank != root:
            return self._run(collective, partial(self.receive_part, collective, root, REDUCE_SCATTER, mine))
        assert parts is not None

        def send() -> None:
            for peer in self.peers:
                self.send_part(collective, peer, REDUCE_SCATTER, parts[peer])

        return self._run(collective, send, partial(copy_bytes, parts[root], mine))

    def all_to_all(self, given: Sequence[memoryview], parts: Sequence[memoryview]) -> "Future[None]":
        """Fill ``parts`` with each rank's ``given`` for this one; any of them may be empty."""
        return self._all_to_all("all_to_all", given, parts)

    def _all_to_all(self, what: str, given: Sequence[memoryview], parts: Sequence[memoryview]) -> "Future[None]":
        collective = self.start(what)

        def swap() -> None:
            for distance in range(1, self.ranks):  # each rank begins with a different peer, so that none is overrun
                source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
                self.receive_part(collective, source, ALL_GATHER, parts[source])
                self.send_part(collective, target, ALL_GATHER, given[target])

        return self._run(collective, swap, partial(copy_bytes, given[self.rank], parts[self.rank]))

    def _run(
        self, collective: Collective, begin: Callable[[], None], meanwhile: Callable[[], None] | None = None
    ) -> "Future[None]":
        """Start a collective; ``meanwhile`` is work for the caller's thread."""
        with collective.operation:
            self.begin(collective, begin)
            if meanwhile:
                meanwhile()
        return collective.operation.done

    # Reductions -------------------------------------------------------------------------------------------------------

    def all_reduce(self, data: memoryview, op: ElementwiseOp, loss: AllowedLoss | None = None) -> "Future[None]":
        """Reduce ``data`` over all ranks, in place and bitwise equal everywhere."""
        collective = self.start("all_reduce", loss, op, len(data))
        return self._run(collective, partial(CollectiveReduction(self, collective, op).all_reduce, data))

    def reduce(self, data: memoryview, op: ElementwiseOp, root: int, loss: AllowedLoss | None = None) -> "Future[None]":
        """Reduce ``data`` over all ranks, into the root's buffer; the others keep theirs."""
        collective = self.start("reduce", loss, op, len(data))
        return self._run(collective, partial(CollectiveReduction(self, collective, op).reduce, data, root))

    def reduce_scatter(
        self,
        parts: Sequence[memoryview],
        result: memoryview,
        op: ElementwiseOp,
        loss: AllowedLoss | None = None,
    ) -> "Future[None]":
        """Reduce each rank's part over all ranks into its ``result``, which may be its own part."""
        collective = self.start("reduce_scatter", loss, op, sum(map(len, parts)))
        with collective.operation:
            CollectiveReduction(self, collective, op).reduce_scatter(parts, result)
        return collective.operation.done

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, data: memoryview, peer: int, tag: int) -> "Future[None]":
        """Send ``data`` to one rank; done when that rank has received it."""
        return self.point_to_point.send(data, peer, tag)

    def receive(self, data: memoryview, peer: int | None, tag: int) -> "Future[int]":
        """Receive a tag's oldest message into ``data``, from one rank or from any (None); the result is the sender."""
        return self.point_to_point.receive(data, peer, tag)
