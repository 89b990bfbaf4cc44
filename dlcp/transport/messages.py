# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: requests, results, loss bounds, and errors.

Every error names the rank, the step and the layers concerned.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dlcp.inputs.addresses import Address as Address
from dlcp.inputs.configuration import Range
from dlcp.values.planes import PlaneLayout
from dlcp.values.tags import AS_SEEDED, ChunkOrder, PacketTags

Bytes = NDArray[np.uint8]
EMPTY: Final[Bytes] = np.zeros(0, np.uint8)
SHARE: Final = Range(0, 1, below=True)
"""Valid loss ratios of a message; a part of it must arrive."""


class MessageKey(NamedTuple):
    """Identifies a message between two ranks: training step (generation) and number within it."""

    step: int
    message: int


@dataclass(frozen=True, slots=True)
class LossBound:
    """The loss that a message may suffer.

    A message of n packets is complete when all protected packets and at least ceil((1 - ratio) n) packets have arrived.

    Parameters
    ----------
    ratio
        The largest share of packets that may be lost, 0 to 1. It is a ceiling, which applies only if packets are lost
        or late.
    immediate
        Complete a message at the bound, even while the rest is in flight, as in the DLCP paper (arXiv 2008.08445). This
        discards up to ``ratio`` of every message.
    """

    ratio: float = 0.0
    immediate: bool = False

    def __post_init__(self) -> None:
        SHARE.check("a loss bound", self.ratio)

    def allowed(self, packets: int) -> int:
        """Return the number of ``packets`` that may be lost."""
        return math.floor(self.ratio * packets + 1e-9)

    def required(self, packets: int) -> int:
        """Return the number of ``packets`` that must be delivered: ceil((1 - ratio) packets)."""
        return packets - self.allowed(packets)


RELIABLE: Final = LossBound()


class SendRequest(NamedTuple):
    """A message to send.

    Attributes
    ----------
    peer, key
        The receiver, and the message's identity among those to it.
    payload, tail
        Its bytes: ``payload``, then ``tail``. They must not change until the message is delivered.
    tags
        Its packets' tags.
    bound
        Its loss bound.
    label
        Its name in error messages, such as its layers.
    order
        The order in which its packets are sent.
    layout
        The layout of its values if they are encoded.
    """

    peer: int
    key: MessageKey
    payload: memoryview
    tags: PacketTags
    bound: LossBound
    label: str
    tail: Bytes = EMPTY
    order: ChunkOrder = AS_SEEDED
    layout: PlaneLayout | None = None


class Reducing(Protocol):
    """A sum to which messages are added as they arrive; see :class:`dlcp.transport.engine.Reduction`."""

    message_bytes: int
    kept: list[Bytes | None]
    pointer: Any

    @property
    def takes_tail(self) -> bool:
        """Whether contributions may have a tail."""

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of a contribution may have to wait in a buffer."""


class ReceiveRequest(NamedTuple):
    """A message to receive: a posted receive.

    Attributes
    ----------
    peer, key
        The sender, and the message's identity among those from it.
    message_bytes
        Its size, including its tail. None for the sender's size; a packet of the message must then have arrived
        (``Endpoint.listen``), and its sender must protect the last packet.
    bound, label
        As in :class:`SendRequest`.
    into, tail
        Destinations of its bytes: first ``into``, then ``tail``. Without ``into`` the transport allocates memory.
    reduction, position
        Add the message to a reduction instead, as the contribution at ``position``. The arrival's ``payload`` is then a
        buffer of ``Endpoint.buffers`` for packets that had to wait; the caller that finishes the reduction returns it.
    """

    peer: int
    key: MessageKey
    message_bytes: int | None
    bound: LossBound
    label: str
    into: Bytes | memoryview | None = None
    tail: Bytes = EMPTY
    reduction: Reducing | None = None
    position: int = 0

    def checked_into(self) -> Bytes | None:
        """Return ``into`` as an array, after checking all destinations, which the engine does not check.

        Raises
        ------
        ValueError
            ``into`` and ``tail``, or the values of ``reduction``, do not match the message's size or are not writable.
        """
        into, size, reduction = self.into, self.message_bytes, self.reduction
        if into is None and self.tail is EMPTY and (reduction is None or reduction.message_bytes == size):
            return None
        into = np.frombuffer(into, np.uint8) if isinstance(into, memoryview) else into
        places = [place for place in (into, self.tail) if place is not None and len(place)]
        for place in places:
            if place.dtype != np.uint8 or not place.flags.c_contiguous or not place.flags.writeable:
                raise ValueError(f"{self.label}: bytes are received into contiguous, writable uint8 arrays only")
        if reduction is not None:
            tail_fits = reduction.takes_tail or self.tail is EMPTY
            if into is not None or not tail_fits or reduction.message_bytes + len(self.tail) != size:
                raise ValueError(
                    f"{self.label}: a message of {size} bytes cannot be added to {reduction.message_bytes} bytes, or "
                    "has a second destination; give either a reduction or a buffer of the same size"
                )
            return None
        room = (0 if into is None else len(into)) + len(self.tail)
        if places and (size is None or room > size or (into is not None and room < size)):
            raise ValueError(f"{self.label}: a message of {size} bytes cannot be received into {room} bytes")
        return into


class Delivery(NamedTuple):
    """Outcome of a sent message, as its receiver acknowledged it.

    ``delivered`` is a mask of packets, shape (packets,). ``sent`` counts all transmissions, ``resent`` those after each
    packet's first, and ``probes`` the probes for missing packets that took the packets' own queue.
    """

    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    seconds: float
    probes: int = 0

    @property
    def lost(self) -> int:
        """Number of packets that were sent but never arrived."""
        return int(len(self.delivered) - np.count_nonzero(self.delivered))


class Arrival(NamedTuple):
    """A received message.

    ``payload`` holds its bytes, without the tail. Missing packets read as zeros if the transport allocated the memory;
    otherwise the memory keeps its content there. For a message that was added to a reduction, ``payload`` is the buffer
    for packets out of turn, possibly empty, with meaningless content. ``delivered`` and ``layer``, the layer position
    in each packet's header, have shape (packets,).
    """

    payload: Bytes
    delivered: NDArray[np.bool_]
    layer: Bytes
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether every packet arrived."""
        return int(np.count_nonzero(self.delivered)) == len(self.delivered)


class TransportError(RuntimeError):
    """A message cannot be delivered."""


class PeerSilentError(TransportError):
    """A rank has not answered for longer than allowed: its process or its path is dead."""


class DeadlineError(TransportError):
    """A rank answers, but a message is not complete within its deadline."""


class PeerHangsError(TransportError):
    """A rank answers but does not reach the point that others wait for: its script hangs or is much slower.

    Parameters
    ----------
    text
        What happened.
    is_this_rank
        Whether it is this one.
    """

    def __init__(self, text: str, *, is_this_rank: bool = False) -> None:
        super().__init__(text)
        self.is_this_rank = is_this_rank


class PeerAbortedError(TransportError):
    """A rank gave up, with a reason."""


class RankEndedError(PeerSilentError):
    """A rank's process has ended, or has left the group."""


class PeerLeftError(TransportError):
    """A rank has left normally while this one still waits for a message from it."""


class MessageMismatchError(TransportError):
    """Two ranks disagree about the size of a message."""


class BoundExceededError(TransportError):
    """More of a message was lost than its bound allows."""


def at_step(job: int, step: int) -> str:
    """Return the beginning of an error message about a step."""
    return f"job {job}, step {step}"
