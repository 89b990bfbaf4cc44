# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: requests, results, and loss bounds."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlcp.configuration import Range
from dlcp.tags import AS_SEEDED, ChunkOrder, PacketTags

if TYPE_CHECKING:
    from dlcp.transport.engine import StreamingReduction

Address = tuple[str, int]
Bytes = NDArray[np.uint8]
EMPTY: Final[Bytes] = np.zeros(0, np.uint8)
SHARE: Final = Range(0, 1, below=True)
"""Shares of a message that may be lost or deferred: some of it has to arrive."""
Share = Annotated[float, SHARE]


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
        The largest share of packets that may be lost, 0 to 1. It is a ceiling: used only when packets are lost or late,
        never on an idle network.
    immediate
        Stop at the bound even while the rest is in flight, as the DLCP paper does (arXiv 2008.08445). That discards up
        to ``ratio`` of every message.
    deferral
        The largest share of packets that the sender may defer to a later step, 0 to 1. The sender chooses them; they do
        not count as lost.
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
        The receiver, and the message's identity among those to it.
    payload, tail
        Its bytes: those of ``payload``, then those of ``tail``. They must not change until the message is delivered.
    tags
        Its packets' tags.
    bound
        How much of it may be lost.
    label
        Its name in error messages, such as the layers that it holds.
    order
        Which part of it is sent first.
    deferred
        Which of its packets are deferred and not sent, shape (packets,); None: none. Neither protected packets nor the
        last one, which tells the size, can be deferred.
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
        """Check the deferred packets.

        Raises
        ------
        ValueError
            Wrong shape, more than the bound admits, or packets that must be sent.
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
        The sender, and the message's identity among those from it.
    message_bytes
        Its size with its tail. None: the size that the sender gives; then a packet of the message must have arrived
        (``Endpoint.on_unexpected``), and its sender must protect the last packet.
    bound, label
        As in :class:`SendRequest`.
    into, tail
        Where its bytes go: first ``into``, then ``tail``. Without ``into`` the transport allocates memory.
    reduction, position
        Add the message to a reduction instead, as the contribution at ``position``. The arrival's ``payload`` is then a
        buffer of ``Endpoint.buffers`` in which packets waited for their turn; the caller that finishes the reduction
        returns it.
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
        """Return ``into`` as an array after checking all destinations: the engine writes without another check.

        Raises
        ------
        ValueError
            ``into`` and ``tail``, or the values of ``reduction``, do not match the message's size or are not writable.
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
                "has a second destination; give either a reduction or a buffer of the same size"
            )
        return into


class Delivery(NamedTuple):
    """Outcome of a sent message, as its receiver acknowledged it.

    ``delivered`` and ``deferred``, the packets left for a later step (None: none), have shape (packets,); ``sent``
    counts every transmission, ``resent`` all but the first of each packet.
    """

    delivered: NDArray[np.bool_]
    sent: int
    resent: int
    seconds: float
    deferred: NDArray[np.bool_] | None = None

    @property
    def arrived(self) -> int:
        """Number of packets that arrived."""
        return int(np.count_nonzero(self.delivered))

    @property
    def deferred_count(self) -> int:
        """Number of packets that were deferred."""
        return 0 if self.deferred is None else int(np.count_nonzero(self.deferred))

    @property
    def lost(self) -> int:
        """Number of packets that were sent and never arrived."""
        return len(self.delivered) - self.arrived - self.deferred_count

    @property
    def recovered(self) -> int:
        """Number of packets that arrived after a loss and retransmission; at most ``resent``."""
        return min(self.resent, self.arrived) if self.resent else 0


class Arrival(NamedTuple):
    """A received message.

    ``payload`` holds its bytes, without the tail. Missing packets read as zeros if the transport allocated the memory;
    otherwise the memory keeps what it held. For a message that was added to a reduction, ``payload`` is the buffer that
    its packets waited in, possibly empty, and its content is meaningless. ``delivered`` and ``layer``, the layer
    position in each packet's header, have shape (packets,). ``deferred`` is the number of missing packets that the
    sender deferred.
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
