# SPDX-License-Identifier: Apache-2.0
"""Averages that are formed while the contributions arrive."""

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS
from dlcp.transport.engine import Engine, Fold, Incoming, first_block_seed
from dlcp.transport.messages import MessageKey


class StreamingReduction:
    """The average of this rank's values and what others send, formed in place while packets arrive.

    Own values come first, then those of the others in a fixed order, whoever arrives first: so the result is the same
    every time. Packets that arrive out of order wait in a buffer. Use it in the endpoint's thread.

    Parameters
    ----------
    engine
        What forms it.
    values
        Own values, shape (m,); the average in the end.
    per_packet
        Values per packet.
    members
        How many others contribute.
    divisor
        What the sum is divided by: the number of ranks, for their average.
    key
        The key of the messages that the others send, if each begins with another chunk (:class:`dlcp.tags.ChunkOrder`).
    """

    def __init__(
        self,
        engine: Engine,
        values: NDArray[np.float32],
        per_packet: int,
        members: int,
        divisor: float,
        key: MessageKey | None = None,
    ) -> None:
        self.values = values
        blocks = -(-len(values) // (per_packet * SEND_BLOCK_PACKETS))
        first_block = -1 if key is None else first_block_seed(key) % max(1, blocks)
        self._fold: Fold = engine.fold(values, per_packet, members, divisor, first_block)
        self._by_chunks = key is not None
        self._members = members
        self._engine = engine
        self._messages: list[Incoming] = []

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may arrive before their turn, and have to wait."""
        return self._members > 1 and (self._by_chunks or position > 0)

    def join(self, message: Incoming, position: int) -> None:
        """Add a message from now on; the reduction frees it."""
        self._messages.append(message)
        self._engine.join(message, self._fold, position)

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """Have each packet's average in ``copy``, too, as soon as it is complete; call it before anything arrives.

        What :meth:`finish` averages is not written there.
        """
        self._fold.copy_into(copy)

    def included(self, position: int) -> NDArray[np.bool_]:
        """Return which packets of a contribution are in the sum, shape (packets,); call it before :meth:`finish`."""
        return self._fold.included(position)

    def finish(self, rescale: bool, residual: NDArray[np.float32] | None = None) -> int:
        """Average the packets that lack a contribution which will never arrive; return how many there were.

        Complete packets have been averaged before.

        Parameters
        ----------
        rescale
            Divide by how many ranks contributed, else by the divisor.
        residual
            Gets, for these packets, the sum less the divisor times the average, where that is finite; shape (m,).
        """
        incomplete = self._fold.finish(rescale, residual)
        self.release()
        return incomplete

    def release(self) -> None:
        """Forget the messages."""
        for message in self._messages:
            self._engine.free(message)
        self._messages.clear()
