# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: what is sent, what is received, and how much of it may be lost."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.configuration import Range
from dlcp.tags import AS_SEEDED, ChunkOrder, PacketTags

if TYPE_CHECKING:
    from dlcp.transport.native_engine import StreamingReduction

Address = tuple[str, int]
Bytes = NDArray[np.uint8]
EMPTY: Final[Bytes] = np.zeros(0, np.uint8)
SHARE: Final = Range(0, 1, below=True)
"""The shares of a message that may be lost, or deferred: something of it has to arrive."""
Share = Annotated[float, SHARE]


class MessageKey(NamedTuple):
    """What tells the messages between two ranks apart: training step (generation) and number within it."""

    step: int
    message: int


@dataclass(frozen=True, slots=True)
class LossBound:
    """The loss that a message may suffer.

    A message of n packets is complete when all its protected packets and at least ceil((1 - ratio) n) of all are in.

    Parameters
    ----------
    ratio
        The largest share of packets that may be lost, 0 to 1. It is a ceiling: used when packets were lost or are late,
        never on an idle network.
    immediate
        Stop at the bound even while the rest is on its way, as the DLCP paper does (arXiv 2008.08445). That throws away
        up to ``ratio`` of every message.
    deferral
        The largest share of packets that the sender may defer, that is, keep for a later step, 0 to 1. Whoever sends
        decides which; they are not lost.
    """

    ratio: float = 0.0
    immediate: bool = False
    deferral: float = 0.0

    def __post_init__(self) -> None:
        SHARE.check("a loss bound", self.ratio)
        SHARE.check("a deferral bound", self.deferral)

    def allowed(self, packets: int) -> int:
        """Return how many of ``packets`` may be lost."""
        return math.floor(self.ratio * packets + 1e-9)

    def deferrable(self, packets: int) -> int:
        """Return how many of ``packets`` may be deferred."""
        return math.floor(self.deferral * packets + 1e-9)

    def required(self, packets: int) -> int:
        """Return how many of ``packets`` must be delivered: ceil((1 - ratio) packets)."""
        return packets - self.allowed(packets)


RELIABLE: Final = LossBound()


class SendRequest(NamedTuple):
    """A message to send.

    Attributes
    ----------
    peer, key
        The receiver, and what tells the message from others to it.
    payload, tail
        Its bytes: those of ``tail`` follow those of ``payload``. They must not change until the message is delivered.
    tags
        Its packets' tags.
    bound
        How much of it may be lost.
    label
        What error messages call it, such as the layers that it holds.
    order
        Which part of it leaves first.
    deferred
        Which of its packets are kept for a later step and not sent, shape (packets,); None: all are sent. Neither
        protected packets nor the last one, which tells the size, can be deferred.
    """

    peer: int
    key: MessageKey
    payload: memoryview
    tags: PacketTags
    bound: LossBound
    label: str
    tail: Bytes = EMPTY
    order: ChunkOrder = AS_SEEDED
    deferred: NDArray[np.bool_] | None = None

    def check_deferred(self, deferred: NDArray[np.bool_]) -> None:
        """Check what is to be deferred.

        Raises
        ------
        ValueError
            It has another shape than the message, is more than the bound admits, or must be sent.
        """
        packets = len(self.tags.queue)
        if deferred.shape != (packets,) or deferred.dtype != np.bool_ or not deferred.flags.c_contiguous:
            raise ValueError(f"{self.label}: `deferred` must be {packets} bools, is {deferred.dtype} {deferred.shape}")
        count, ceiling = int(np.count_nonzero(deferred)), self.bound.deferrable(packets)
        if count > ceiling:
            raise ValueError(f"{self.label}: {count} of {packets} packets are deferred, the bound admits {ceiling}")
        if deferred[-1] or (deferred & self.tags.protected).any():
            raise ValueError(f"{self.label}: protected packets and the last one cannot be deferred")


class ReceiveRequest(NamedTuple):
    """A message to receive: a posted receive.

    Attributes
    ----------
    peer, key
        The sender, and what tells the message from others of it.
    message_bytes
        Its size with its tail. None: what the sender says; then something of the message must have arrived
        (``Endpoint.on_unexpected``), and its sender must protect the last packet.
    bound, label
        As in :class:`SendRequest`.
    into, tail
        Where its bytes go: first ``into``, then ``tail``. Without ``into`` the transport allocates memory.
    reduction, position
        Add the message to a reduction instead, as the contribution at ``position``. The arrival's ``payload`` is then a
        buffer of ``Endpoint.buffers`` in which packets waited for their turn; whoever finishes the reduction returns
        it.
    """

    peer: int
    key: MessageKey
    message_bytes: int | None
    bound: LossBound
    label: str
    into: Bytes | memoryview | None = None
    tail: Bytes = EMPTY
    reduction: "StreamingReduction | None" = None
    position: int = 0

    def checked_into(self) -> Bytes | None:
        """Return ``into`` as an array, once all places fit the message: packets are written without another check.

        Raises
        ------
        ValueError
            ``into`` and ``tail``, or the values of ``reduction``, are not of the message's size or not writable.
        """
        into, size, reduction = self.into, self.message_bytes, self.reduction
        if into is None and self.tail is EMPTY and (reduction is None or reduction.values.nbytes == size):
            return None
        into = np.frombuffer(into, np.uint8) if isinstance(into, memoryview) else into
        places = [place for place in (into, self.tail) if place is not None and len(place)]
        for place in places:
            if place.dtype != np.uint8 or not place.flags.c_contiguous or not place.flags.writeable:
                raise ValueError(f"{self.label}: bytes are received into contiguous, writable uint8 arrays only")
        room = (0 if into is None else len(into)) + len(self.tail)
        if places and (size is None or room > size or (into is not None and room < size)):
            raise ValueError(f"{self.label}: a message of {size} bytes cannot be received into {room} bytes")
        if reduction is not None and (reduction.values.nbytes != size or places):
            raise ValueError(
                f"{self.label}: a message of {size} bytes cannot be added to {reduction.values.nbytes} bytes, or "
                "is to be stored elsewhere as well"
            )
        return into


class Delivery(NamedTuple):
    """What became of a message that was sent, as its receiver confirmed it.

    ``delivered`` has shape (packets,), as ``deferred``, which tells the packets that were kept for a later step (None:
    none); ``sent`` counts every transmission, ``resent`` those after a packet's first.
    """

    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    seconds: float
    deferred: NDArray[np.bool_] | None = None

    @property
    def arrived(self) -> int:
        """Packets that arrived."""
        return int(np.count_nonzero(self.delivered))

    @property
    def put_off(self) -> int:
        """Packets that were deferred."""
        return 0 if self.deferred is None else int(np.count_nonzero(self.deferred))

    @property
    def lost(self) -> int:
        """Packets that were sent and never arrived."""
        return len(self.delivered) - self.arrived - self.put_off

    @property
    def recovered(self) -> int:
        """Packets that were lost and arrived when sent again; at most ``resent``."""
        return min(self.resent, self.arrived) if self.resent else 0


class Arrival(NamedTuple):
    """A message as it arrived.

    ``payload`` is where its bytes are, without the tail. Missing packets read as zeros where the transport allocated
    the memory; elsewhere the memory keeps what it held. For a message that was added to a reduction, ``payload`` is the
    buffer that its packets waited in, possibly empty, and its content means nothing. ``delivered`` and ``layer``, the
    layer position in each packet's header, have shape (packets,). Of those that are missing the sender deferred
    ``deferred``.
    """

    payload: Bytes
    delivered: NDArray[np.bool_]
    layer: Bytes
    seconds: float
    deferred: int = 0

    @property
    def whole(self) -> bool:
        """Whether every packet arrived."""
        return int(np.count_nonzero(self.delivered)) == len(self.delivered)
