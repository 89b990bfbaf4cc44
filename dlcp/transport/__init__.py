# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks that may lose a bounded share of their packets."""

from dlcp.transport.buffers import BufferPool, ExportedMemory
from dlcp.transport.connection import Connection
from dlcp.transport.endpoint import Endpoint
from dlcp.transport.engine import EncodedReduction, Reduction, StreamingReduction
from dlcp.transport.messages import (
    EMPTY,
    RELIABLE,
    Address,
    Arrival,
    BoundExceededError,
    Bytes,
    DeadlineError,
    Delivery,
    LossBound,
    MessageKey,
    MessageMismatchError,
    PeerAbortedError,
    PeerHangsError,
    PeerLeftError,
    PeerSilentError,
    RankEndedError,
    ReceiveRequest,
    SendRequest,
    TransportError,
)
from dlcp.transport.peer import Fail, Then
from dlcp.transport.settings import Membership, TransportOptions
from dlcp.transport.sockets import bind_socket

__all__ = [
    "EMPTY",
    "RELIABLE",
    "Address",
    "Arrival",
    "BoundExceededError",
    "BufferPool",
    "Bytes",
    "Connection",
    "DeadlineError",
    "Delivery",
    "EncodedReduction",
    "Endpoint",
    "ExportedMemory",
    "Fail",
    "LossBound",
    "Membership",
    "MessageKey",
    "MessageMismatchError",
    "PeerAbortedError",
    "PeerHangsError",
    "PeerLeftError",
    "PeerSilentError",
    "RankEndedError",
    "ReceiveRequest",
    "Reduction",
    "SendRequest",
    "StreamingReduction",
    "Then",
    "TransportError",
    "TransportOptions",
    "bind_socket",
]
