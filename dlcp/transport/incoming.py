# SPDX-License-Identifier: Apache-2.0
"""A message on its way in: what has arrived of it, and when that is enough."""

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.bound import LossBound


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as it arrived.

    ``payload`` has zeros where packets are missing; ``delivered`` and ``layer``, the layer position that each packet
    told, have shape (packets,).
    """

    payload: NDArray[np.uint8]
    delivered: NDArray[np.bool_]
    layer: NDArray[np.uint8]
    seconds: float


class IncomingMessage:
    """The receiver's view of one message; made by its first packet, or by whoever waits for it, whichever comes first.

    Parameters
    ----------
    packets
        How many packets it has.
    payload_bytes
        Bytes per packet; the last may be shorter.
    now_s
        Time on the transport's clock.
    """

    def __init__(self, packets: int, payload_bytes: int, now_s: float) -> None:
        self.packets = packets
        self.payload_bytes = payload_bytes
        self.buffer = np.zeros(packets * payload_bytes, np.uint8)
        self._view = self.buffer.data
        self.delivered = bytearray(packets)
        self.layer = bytearray(packets)
        self.arrived = 0
        self.arrived_protected = 0
        self.protected_packets: int | None = None
        self.asked = False
        self.last_packet_bytes: int | None = None
        self.started_s = now_s
        self.awaited: Awaited | None = None

    def wait(self, awaited: "Awaited") -> bool:
        """Register who waits for it; return False if the sizes disagree."""
        if awaited.message_bytes is not None:
            last = awaited.message_bytes - (self.packets - 1) * self.payload_bytes
            if not 0 < last <= self.payload_bytes or self.last_packet_bytes not in (None, last):
                return False
            self.last_packet_bytes = last
        self.awaited = awaited
        return True

    def fits(self, index: int, payload: memoryview) -> bool:
        """Tell whether a fragment has the size its place asks for."""
        size = len(payload)
        if index < self.packets - 1:
            return size == self.payload_bytes
        if self.last_packet_bytes is None:
            return 0 < size <= self.payload_bytes
        return size == self.last_packet_bytes

    def store(self, index: int, payload: memoryview, layer: int, protected: bool) -> None:
        """Store a fragment that fits and has not come before."""
        start = index * self.payload_bytes
        self._view[start : start + len(payload)] = payload
        self.delivered[index] = 1
        self.layer[index] = layer
        self.arrived += 1
        self.arrived_protected += protected
        if index == self.packets - 1:
            self.last_packet_bytes = len(payload)

    @property
    def complete(self) -> bool:
        """Whether every packet is in."""
        return self.arrived == self.packets

    @property
    def enough(self) -> bool:
        """Whether the bound is met: all protected packets and the required share of all."""
        if self.awaited is None or self.protected_packets is None:
            return False
        return (
            self.arrived >= self.awaited.bound.required(self.packets)
            and self.arrived_protected >= self.protected_packets
        )

    def arrival(self, now_s: float) -> Arrival:
        """Return the message as it arrived."""
        size = (self.packets - 1) * self.payload_bytes + (self.last_packet_bytes or 0)
        return Arrival(
            self.buffer[:size], self.bitmap(), np.frombuffer(bytes(self.layer), np.uint8), now_s - self.started_s
        )

    def bitmap(self) -> NDArray[np.bool_]:
        """Return which packets are in, shape (packets,)."""
        return np.frombuffer(bytes(self.delivered), np.bool_)


@dataclass(slots=True)
class Awaited:
    """Somebody waits for a message of which ``bound`` may be lost, until ``deadline_s``.

    Without ``message_bytes`` its size is what the sender says; the sender must then protect the last packet.
    """

    message_bytes: int | None
    bound: LossBound
    label: str
    deadline_s: float
    done: Future[Arrival]
