# SPDX-License-Identifier: Apache-2.0
"""The ports of the built-in switch: one interface, several kinds."""

import socket
from dataclasses import dataclass, field
from typing import Final, Protocol

ETHERNET_BYTES: Final = 14
"""Destination, source and type."""
SOCKET_BUFFER_BYTES: Final = 4 << 20
"""Kernel buffer requested in each direction: over 25 ms of traffic at 1 Gbit/s, so that a late loop loses nothing."""


@dataclass(slots=True)
class PortCounters:
    """Counters of one port, in frames unless the name says otherwise."""

    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    refused: int = 0
    """Received from an unknown sender."""
    malformed: int = 0
    """Too short to be a frame."""
    oversize: int = 0
    """Longer than the port's MTU."""
    undeliverable: int = 0
    """Sent by the program to a host that would not have accepted the frame."""
    unreachable: int = 0
    """The host's socket was closed or the interface gone."""
    receive_errors: int = 0
    send_errors: int = 0
    overrun: int = 0
    """Lost in the kernel because the switch did not receive them in time."""


@dataclass(slots=True)
class ReceivedFrames:
    """Frames received together, and the ingress port of each."""

    ports: list[int] = field(default_factory=list)
    packets: list[bytearray] = field(default_factory=list)


class PortGroup(Protocol):
    """Ports that share sockets. No method raises because of received data or because the other side is gone."""

    @property
    def counters(self) -> dict[int, PortCounters]:
        """Counters by port number."""

    def describe(self, port: int) -> str:
        """Describe the destination of a port, for tables and logs."""

    def filenos(self) -> list[int]:
        """Return the file descriptors that become readable when frames wait."""

    def receive(self, fileno: int, limit: int) -> ReceivedFrames:
        """Receive about ``limit`` frames from one file descriptor without blocking."""

    def send(self, port: int, packets: list[bytearray]) -> None:
        """Send frames out of a port without blocking; those that cannot be sent are counted and dropped."""

    def refresh(self) -> None:
        """Update the counters that the kernel keeps."""

    def close(self) -> None:
        """Close the sockets."""


def enlarge_buffers(sock: socket.socket) -> None:
    """Enlarge a socket's buffers, beyond the system's maximum if the process is privileged."""
    for force, plain in ((33, socket.SO_RCVBUF), (32, socket.SO_SNDBUF)):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        try:
            sock.setsockopt(socket.SOL_SOCKET, force, SOCKET_BUFFER_BYTES)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)
