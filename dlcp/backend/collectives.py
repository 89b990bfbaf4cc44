# SPDX-License-Identifier: Apache-2.0
"""Collectives of a group of ranks over one endpoint, on raw bytes: everything arrives whole unless a loss is allowed.

Collectives are numbered in the order in which they are issued, which must be the same on all ranks; the number is the
step of their messages. So any number of them can be under way, and none waits for another.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from dlcp.backend.arithmetic import Arithmetic
from dlcp.backend.process_group import EAGER_BYTES, AllowedLoss, Channel, Run, copy_bytes
from dlcp.backend.reduce import GATHER, SCATTER, Summing
from dlcp.collectives.shards import binomial_tree, shard_bounds


class Exchange(Channel):
    """All collectives of one rank with its group. Its methods may be called from any thread, and return at once.

    Buffers are contiguous memoryviews of bytes; those given to be sent must not change, and those given to be written
    not be read, until the operation's future is done. That is when what this rank waits for has come, and what it gives
    is with the others or has been copied: of their troubles it may hear with a later collective.
    """

    # Moving bytes -----------------------------------------------------------------------------------------------------

    def barrier(self) -> "Future[None]":
        """Be done when all ranks have come this far: in round k each hears of 2**k ranks more."""
        run = self.start("barrier")
        token = memoryview(bytearray(1))
        rounds = (self.ranks - 1).bit_length()

        def heard_of() -> None:
            pass

        def enter(number: int) -> None:
            if number == rounds:
                return
            distance = 1 << number
            # Who has left a barrier may end without another word: so the others must have heard of it before.
            self.send_part(run, (self.rank + distance) % self.ranks, number, token, then=heard_of)
            heard = memoryview(bytearray(1))
            self.receive_part(run, (self.rank - distance) % self.ranks, number, heard, partial(enter, number + 1))

        return self._run(run, partial(enter, 0))

    def broadcast(self, data: memoryview, root: int) -> "Future[None]":
        """Give all ranks the root's ``data``: by a binomial tree, or in parts that the ranks pass to each other."""
        run = self.start("broadcast")
        small = self.ranks == 2 or len(data) <= EAGER_BYTES * self.ranks
        way = self._broadcast_by_tree if small else self._broadcast_in_parts
        return self._run(run, partial(way, run, data, root))

    def _broadcast_by_tree(self, run: Run, data: memoryview, root: int) -> None:
        parent, children = binomial_tree(self.rank, root, self.ranks)

        def pass_on() -> None:
            for child in children:
                self.send_part(run, child.rank, SCATTER, data)

        if parent:
            self.receive_part(run, parent.rank, SCATTER, data, pass_on)
        else:
            pass_on()

    def _broadcast_in_parts(self, run: Run, data: memoryview, root: int) -> None:
        shards = shard_bounds(len(data), self.endpoint.options.payload_bytes, dict.fromkeys(range(self.ranks), 1.0))
        parts = {rank: data[start:stop] for rank, (start, stop) in shards.items()}

        def pass_on() -> None:
            for peer in self.peers:
                if peer != root:
                    self.send_part(run, peer, GATHER, parts[self.rank])

        if self.rank == root:
            for peer in self.peers:
                self.send_part(run, peer, SCATTER, parts[peer])
            pass_on()
        else:
            self.receive_part(run, root, SCATTER, parts[self.rank], pass_on)
            for peer in self.peers:
                if peer != root:
                    self.receive_part(run, peer, GATHER, parts[peer])
            self.receive_part(run, root, GATHER, parts[root])

    def all_gather(self, mine: memoryview, parts: Sequence[memoryview]) -> "Future[None]":
        """Fill ``parts`` with what each rank gives as ``mine``; sizes may differ between ranks."""
        return self._all_to_all("all_gather", [mine] * self.ranks, parts)

    def gather(self, mine: memoryview, parts: Sequence[memoryview] | None, root: int) -> "Future[None]":
        """Fill the root's ``parts`` with what each rank gives as ``mine``."""
        run = self.start("gather")
        if self.rank != root:
            return self._run(run, partial(self.send_part, run, root, GATHER, mine))
        assert parts is not None

        def receive() -> None:
            for peer in self.peers:
                self.receive_part(run, peer, GATHER, parts[peer])

        return self._run(run, receive, partial(copy_bytes, mine, parts[root]))

    def scatter(self, mine: memoryview, parts: Sequence[memoryview] | None, root: int) -> "Future[None]":
        """Fill each rank's ``mine`` with its part of the root's ``parts``."""
        run = self.start("scatter")
        if self.rank != root:
            return self._run(run, partial(self.receive_part, run, root, SCATTER, mine))
        assert parts is not None

        def send() -> None:
            for peer in self.peers:
                self.send_part(run, peer, SCATTER, parts[peer])

        return self._run(run, send, partial(copy_bytes, parts[root], mine))

    def all_to_all(self, gifts: Sequence[memoryview], parts: Sequence[memoryview]) -> "Future[None]":
        """Fill ``parts`` with what each rank has in its ``gifts`` for this one; any of them may be empty."""
        return self._all_to_all("all_to_all", gifts, parts)

    def _all_to_all(self, what: str, gifts: Sequence[memoryview], parts: Sequence[memoryview]) -> "Future[None]":
        run = self.start(what)

        def swap() -> None:
            for distance in range(1, self.ranks):  # each begins with another, so that none is overrun
                source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
                self.receive_part(run, source, GATHER, parts[source])
                self.send_part(run, target, GATHER, gifts[target])

        return self._run(run, swap, partial(copy_bytes, gifts[self.rank], parts[self.rank]))

    def _run(self, run: Run, begin: Callable[[], None], meanwhile: Callable[[], None] | None = None) -> "Future[None]":
        """Start a collective; ``meanwhile`` is what the caller's thread has to do for it."""
        with run.operation:
            self.begin(run, begin)
            if meanwhile:
                meanwhile()
        return run.operation.done

    # Adding up --------------------------------------------------------------------------------------------------------

    def all_reduce(self, data: memoryview, arithmetic: Arithmetic, loss: AllowedLoss | None = None) -> "Future[None]":
        """Reduce ``data`` over all ranks, in place and to the same bits everywhere."""
        run = self.start("all_reduce", loss, arithmetic, len(data))
        return self._run(run, partial(Summing(self, run, arithmetic).for_all, data))

    def reduce(
        self, data: memoryview, arithmetic: Arithmetic, root: int, loss: AllowedLoss | None = None
    ) -> "Future[None]":
        """Reduce ``data`` over all ranks, into the root's; that of the others stays."""
        run = self.start("reduce", loss, arithmetic, len(data))
        return self._run(run, partial(Summing(self, run, arithmetic).for_one, data, root))

    def reduce_scatter(
        self,
        parts: Sequence[memoryview],
        result: memoryview,
        arithmetic: Arithmetic,
        loss: AllowedLoss | None = None,
    ) -> "Future[None]":
        """Reduce each rank's part over all ranks into its ``result``, which may be its own part."""
        run = self.start("reduce_scatter", loss, arithmetic, sum(map(len, parts)))
        with run.operation:
            Summing(self, run, arithmetic).for_each(parts, result)
        return run.operation.done

    # Point to point ---------------------------------------------------------------------------------------------------

    def send(self, data: memoryview, peer: int, tag: int) -> "Future[None]":
        """Send ``data`` to one rank; done when that rank has taken it."""
        return self.mailbox.send(data, peer, tag)

    def receive(self, data: memoryview, peer: int | None, tag: int) -> "Future[int]":
        """Fill ``data`` with the oldest message of that tag, from one rank or, with None, from any; tell from which."""
        return self.mailbox.receive(data, peer, tag)
