# SPDX-License-Identifier: Apache-2.0
"""Messages on their way in, but for their packets: who waits for them, and how senders learn that they are done."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlcp.tags import BLOCK_PACKETS as SEND_BLOCK_PACKETS
from dlcp.transport.bound import LossBound
from dlcp.transport.engine import Bytes, Engine, Fold, Incoming, MessageKey, first_block_seed
from dlcp.transport.promise import Promise

STOP_REPEAT_S = 0.02
STOP_REPEAT_MAX_S = 0.5

Name = tuple[int, int, int]
"""Sender, step and number of a message."""
NOTHING: Bytes = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as it arrived.

    ``payload`` is where its bytes are, without the tail. Where packets are missing it is zero, if nobody gave a place
    for it, and else as it was before. Of a message that was summed it is the room that was needed for that, maybe none,
    and means nothing. ``delivered`` and ``layer``, the layer position that each packet told, have shape (packets,).
    """

    payload: Bytes
    delivered: NDArray[np.bool_]
    layer: Bytes
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether every packet is in."""
        return int(np.count_nonzero(self.delivered)) == len(self.delivered)


@dataclass(slots=True)
class Awaited:
    """Somebody waits for a message of which ``bound`` may be lost, until ``deadline_s``."""

    message_bytes: int | None
    bound: LossBound
    label: str
    deadline_s: float
    done: Promise[Arrival] = field(default_factory=Promise)


@dataclass(slots=True)
class Receiving:
    """One message from one peer: known from its first packet or from when somebody waits for it, whichever is first."""

    name: Name
    message: Incoming
    started_s: float
    stash: Bytes
    """Where it is kept until somebody waits for it; empty where somebody did from the beginning."""
    payload: Bytes = field(default_factory=lambda: NOTHING)
    awaited: Awaited | None = None
    summation: "Summation | None" = None

    placed: bool = False
    """Whether somebody gave a place for it."""

    def arrival(self, now_s: float, payload_bytes: int) -> Arrival:
        """Return the message as it arrived."""
        message = self.message
        delivered = message.bitmap()
        if not self.placed and self.summation is None:
            for index in np.flatnonzero(~delivered).tolist():
                self.payload[index * payload_bytes : (index + 1) * payload_bytes] = 0
        return Arrival(self.payload, delivered, message.layers(), now_s - self.started_s)


class Summation:
    """The average of one rank's values and what others send, formed in place and in the endpoint's thread.

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
        What the others send, if they take turns with its parts.
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
        self.fold: Fold = engine.fold(values, per_packet, members, divisor, first_block)
        self._in_turns = key is not None
        self._members = members
        self._engine = engine
        self._messages: list[Incoming] = []

    def needs_room(self, position: int) -> bool:
        """Return whether some of what the member at a position sends may come before its turn, and has to wait."""
        return self._members > 1 and (self._in_turns or position > 0)

    def join(self, message: Incoming, position: int) -> None:
        """Add a message to it, from which on it is kept."""
        self._messages.append(message)
        self._engine.join(message, self.fold, position)

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None = None) -> int:
        """Average what is incomplete, once nothing more will come; see :meth:`Fold.finish`."""
        incomplete = self.fold.finish(rescale, owed)
        self.release()
        return incomplete

    def release(self) -> None:
        """Forget the messages."""
        for message in self._messages:
            self._engine.free(message)
        self._messages.clear()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a message go: first ``into``, then ``tail``; or to a sum, as the member at ``position``."""

    into: Bytes | None
    tail: Bytes
    summation: Summation | None
    position: int

    def check(self, message_bytes: int | None, label: str) -> None:
        """Refuse places that a message does not fit: packets are written without asking again.

        Raises
        ------
        ValueError
            ``into`` and ``tail``, or the values that it is added to, are not of its size, or cannot be written.
        """
        places = [place for place in (self.into, self.tail) if place is not None and len(place)]
        for place in places:
            if place.dtype != np.uint8 or not place.flags.c_contiguous or not place.flags.writeable:
                raise ValueError(f"{label}: bytes are received into contiguous, writable uint8 arrays only")
        room = (0 if self.into is None else len(self.into)) + len(self.tail)
        if places and (
            message_bytes is None or room > message_bytes or (self.into is not None and room < message_bytes)
        ):
            raise ValueError(f"{label}: {message_bytes} bytes are to be received into a place of {room}")
        values = None if self.summation is None else self.summation.values
        if values is not None and (values.nbytes != message_bytes or places):
            raise ValueError(f"{label}: {message_bytes} bytes are to be added to {values.nbytes}, and put nowhere else")


@dataclass(slots=True)
class Stopping:
    """A message that is done here, of which the sender may not know yet."""

    bitmap: bytes
    """Most significant bit first; empty if every packet is in."""
    packets: int
    due_s: float
    give_up_s: float
    unconfirmed: set[int]
    repeat_s: float = STOP_REPEAT_S

    @classmethod
    def of(cls, delivered: NDArray[np.bool_], span: int, now_s: float, give_up_s: float) -> "Stopping":
        """Return the STOP of a message, told in parts of ``span`` packets."""
        packets = len(delivered)
        return cls(np.packbits(delivered).tobytes(), packets, now_s, give_up_s, set(range(0, packets, span)))
