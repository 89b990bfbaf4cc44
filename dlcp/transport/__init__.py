# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks of which a bounded share may be lost."""

from dlcp.transport.bound import RELIABLE, LossBound
from dlcp.transport.endpoint import Endpoint, bind_socket, parse_address
from dlcp.transport.engine import Address, MessageKey
from dlcp.transport.errors import (
    BoundExceededError,
    DeadlineError,
    MessageMismatchError,
    PeerAbortedError,
    PeerSilentError,
    TransportError,
)
from dlcp.transport.options import TransportOptions
from dlcp.transport.receiving import Arrival, Summation
from dlcp.transport.sending import Delivery

__all__ = [
    "RELIABLE",
    "Address",
    "Arrival",
    "BoundExceededError",
    "DeadlineError",
    "Delivery",
    "Endpoint",
    "LossBound",
    "MessageKey",
    "MessageMismatchError",
    "PeerAbortedError",
    "PeerSilentError",
    "Summation",
    "TransportError",
    "TransportOptions",
    "bind_socket",
    "parse_address",
]
