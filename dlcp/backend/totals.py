# SPDX-License-Identifier: Apache-2.0
"""Totals over all ranks of one piece of a buffer.

The others' contributions are added to this rank's by ascending rank: the order does not depend on who comes first, so
neither does the result. Everything but additions that take long happens in the endpoint's thread. What arrives goes
into memory that is used again and again, for memory that is touched for the first time is slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.backend.arithmetic import Arithmetic, ReduceOp
from dlcp.backend.process_group import Channel, Run, copy_bytes
from dlcp.transport import RELIABLE, Arrival, StreamingReduction

ADD_ASIDE_BYTES = 64 << 10
"""Additions of more than this are no business of the endpoint's thread. Chosen by us: 10 us of work."""

Room = NDArray[np.uint8]


class Total:
    """A total of any values, added up once all contributions are there.

    Parameters
    ----------
    channel, run, arithmetic
        Where it happens, which collective it is, and what is done with the values.
    own, out
        This rank's contribution, and where the result is to be; they may be the same.
    then
        Called with the result in ``out``.
    """

    def __init__(
        self,
        channel: Channel,
        run: Run,
        arithmetic: Arithmetic,
        own: memoryview,
        out: memoryview,
        then: Callable[[], None],
    ) -> None:
        self.channel, self.run, self.arithmetic = channel, run, arithmetic
        self.own, self.out, self.then = own, out, then
        self.scratch = channel.endpoint.buffers
        self.delivered: dict[int, NDArray[np.bool_]] = {}
        self._rooms: dict[int, Room] = {}

    def prepare(self) -> None:
        """Do what may be done in any thread, before :meth:`begin`."""

    def begin(self, phase: int) -> None:
        """Wait for the contributions; with none to come, this rank's is the result."""
        bound = self.run.loss.bound if self.run.loss else RELIABLE
        for position, peer in enumerate(self.channel.peers):
            on_share, place = partial(self._on_share, peer), self._place(position)
            self.channel.receive_arrival(self.run, peer, phase, len(self.own), bound, on_share, **place)
        if not self.channel.peers:
            self._reduce()
            self.then()

    def _place(self, position: int) -> dict[str, Any]:
        """Return where the contribution of the peer at a position goes."""
        room = self.scratch.take(len(self.own))
        if self.run.loss:
            room.fill(0)
        return {"into": room}

    def _on_share(self, peer: int, arrival: Arrival) -> None:
        self.delivered[peer], self._rooms[peer] = arrival.delivered, arrival.payload
        if len(self.delivered) == len(self.channel.peers):
            self._complete()

    def _complete(self) -> None:
        """Form the result, now that all contributions are there."""
        if len(self.own) > ADD_ASIDE_BYTES:
            self.channel.aside(self.run, self._reduce, self._over)
        else:
            self._reduce()
            self._over()

    def _reduce(self) -> None:
        held = self._held()
        delivered = None
        if held is not None:
            size = self.arithmetic.storage.itemsize
            per_packet = self.channel.endpoint.options.payload_bytes // size
            delivered = np.repeat(held, per_packet)[: len(self.own) // size].astype(np.float32)
        parts = [self.own, *(room.data for _, room in sorted(self._rooms.items()))]
        self.arithmetic.reduce(parts, self.out, self.channel.ranks, delivered)

    def _over(self) -> None:
        for room in self._rooms.values():
            self.scratch.give(room)
        self.then()

    def _held(self) -> NDArray[np.intp] | None:
        """Return how many ranks each packet holds, shape (packets,); None if all."""
        if all(delivered.all() for delivered in self.delivered.values()):
            return None
        return np.asarray(1 + np.sum(list(self.delivered.values()), axis=0))


class FoldedTotal(Total):
    """A total of float32 values that the engine forms while their packets arrive."""

    @staticmethod
    def serves(arithmetic: Arithmetic) -> bool:
        """Return whether that is what the engine can do."""
        return arithmetic.format_name == "float32" and arithmetic.op in (ReduceOp.SUM, ReduceOp.MEAN)

    def prepare(self) -> None:
        """Let the result begin with this rank's contribution."""
        copy_bytes(self.own, self.out)
        self._values: NDArray[np.float32] = np.frombuffer(self.out, np.float32)

    def begin(self, phase: int) -> None:
        """Wait for the contributions; with none to come, this rank's is the result."""
        divisor = self.channel.ranks if self.arithmetic.op is ReduceOp.MEAN else 1
        if self.channel.peers:
            self._reduction: StreamingReduction = self.channel.endpoint.reduction(
                self._values, len(self.channel.peers), divisor
            )
        super().begin(phase)

    def _place(self, position: int) -> dict[str, Any]:
        return {"reduction": self._reduction, "position": position}

    def _complete(self) -> None:
        self._reduction.finish(self.arithmetic.op is ReduceOp.MEAN)
        held = self._held()
        if held is not None and self.arithmetic.op is ReduceOp.SUM:
            self._stand_for_all(held)
        self._over()

    def _stand_for_all(self, held: NDArray[np.intp]) -> None:
        """Scale the packets that lack contributions."""
        per_packet = self.channel.endpoint.options.payload_bytes // self._values.itemsize
        ranks = np.float32(self.channel.ranks)
        with np.errstate(all="ignore"):
            for packet in np.flatnonzero(held < self.channel.ranks).tolist():
                values = self._values[packet * per_packet : (packet + 1) * per_packet]
                values /= np.float32(held[packet])
                values *= ranks
