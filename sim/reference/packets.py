# SPDX-License-Identifier: Apache-2.0
"""Packets as hosts make them."""

from dlcp.sim.arithmetic import ENTROPY_TABLE
from dlcp.sim.reference.interface import left
from dlcp.sim.reference.parts import Kind, Message, Packet, Sent, Stream


def data_packet(stream: Stream, sent: Sent, queue: int, again: bool) -> Packet:
    """Return the packet of a transmission."""
    message, transport = sent.message, stream.transport
    final = sent.index == message.packets - 1
    path_hash, entropy = stream.hash, 0
    if transport.sprayed:
        entropy = (sent.index + message.step + again) & 0xFFFFFFFF
        for place in range(4):
            path_hash ^= int(ENTROPY_TABLE[place, entropy >> (24 - 8 * place) & 255])
    drop_class = message.drop_class[sent.index] if message.bounded and not again else 0
    return Packet(
        Kind.DATA,
        message,
        stream.target,
        transport.header + (message.last_bytes if final else transport.payload),
        queue,
        path_hash,
        index=sent.index,
        sent=sent,
        rank=left(message),
        drop_class=drop_class,
        ecn=transport.ecn,
        sprayed=transport.sprayed,
        again=again,
        entropy=entropy,
    )


def control_packet(message: Message, kind: Kind, *, back: bool, answered: Packet | None = None) -> Packet:
    """Return a control packet of a message's stream, which answers ``answered``."""
    stream, transport = message.flow, message.transport
    return Packet(
        kind,
        message,
        stream.source if back else stream.target,
        transport.ack,
        transport.control_queue,
        stream.hash_back if back else stream.hash,
        index=answered.index if answered else 0,
        sent=answered.sent if answered else None,
        ecn=transport.ecn,
        back=back,
    )
