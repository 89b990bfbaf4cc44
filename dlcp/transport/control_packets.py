# SPDX-License-Identifier: Apache-2.0
"""Control packets: questions, answers, greetings. Each carries its own state and may be lost, repeated or late."""

from collections import Counter
from typing import Final

from dlcp import wire
from dlcp.transport.engine import Engine
from dlcp.transport.messages import MessageKey
from dlcp.wire import Header, PacketType, Queue

NO_MESSAGE: Final = MessageKey(0, 0)
"""What a packet says that is about no message."""
MORE = b"\1"
"""Payload of a PROBE whose sender still has packets to send: what is missing is no reason yet to do without."""


class ControlPackets:
    """Sends the control packets of one rank.

    Parameters
    ----------
    engine
        What they leave through.
    rank, job, token
        As in :class:`dlcp.transport.protocol.Protocol`.
    payload_bytes, tagged
        As in :class:`dlcp.transport.TransportOptions`.
    counted
        Where those are counted that the socket had no room for.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        *,
        job: int,
        token: int,
        payload_bytes: int,
        tagged: bool,
        counted: Counter[str],
    ) -> None:
        self._engine, self._rank, self._job, self._token = engine, rank, job, token
        self._payload_bytes, self._counted = payload_bytes, counted
        self._queue = Queue.CONTROL if tagged else Queue.ORDINARY
        self._tos = wire.dscp(Queue.CONTROL, False) << 2 if tagged else 0

    @property
    def bitmap_packets(self) -> int:
        """How many packets one BITMAP or STOP tells of."""
        return self._payload_bytes * 8

    def header(self, kind: PacketType, key: MessageKey, *, index: int = 0, count: int = 0) -> Header:
        """Return a header as this rank sends it."""
        return Header(kind, 0, self._queue, 0, 0, self._job, 0, *key, self._rank, index, count, self._token)

    def send(
        self,
        peer: int,
        kind: PacketType,
        key: MessageKey = NO_MESSAGE,
        *,
        index: int = 0,
        count: int = 0,
        payload: bytes = b"",
    ) -> None:
        """Send one packet, if the socket has room for it."""
        datagram = self.header(kind, key, index=index, count=count).encode() + payload
        # A control packet that the socket cannot take now is as good as lost, and repeated as such.
        if not self._engine.send_control(peer, datagram, self._tos):
            self._counted["control_unsent"] += 1

    def send_bitmap(
        self, peer: int, kind: PacketType, key: MessageKey, bitmap: bytes, first: int, packets: int
    ) -> None:
        """Send the part of a message's ``bitmap`` that begins at packet ``first``; it has ``packets`` in all."""
        part = bitmap[first // 8 : first // 8 + self._payload_bytes]
        self.send(peer, kind, key, index=first, count=packets, payload=part)
