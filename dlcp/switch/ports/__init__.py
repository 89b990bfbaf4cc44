# SPDX-License-Identifier: Apache-2.0
"""How frames get in and out of the built-in switch: one interface, several kinds of port."""

import socket
from dataclasses import dataclass, field
from typing import Final, Protocol

ETHERNET_BYTES: Final = 14
"""Destination, source and type."""
SOCKET_BUFFER_BYTES: Final = 4 << 20
"""Kernel buffer asked for, each way: 25 ms of traffic at 1 Gbit/s, so that a late loop loses nothing. Chosen by us."""


@dataclass(slots=True)
class PortCounters:
    """What happened between one port and the outside; frames, unless the name says otherwise."""

    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    refused: int = 0
    """Came from nobody that this port knows, or carried a VLAN tag."""
    malformed: int = 0
    """Too short to be a frame."""
    oversize: int = 0
    """Longer than the port's MTU allows."""
    undeliverable: int = 0
    """The program sent it out here, but the host here would not have taken it."""
    unreachable: int = 0
    """The host's socket was not there."""
    receive_errors: int = 0
    send_errors: int = 0
    overrun: int = 0
    """Lost because the switch was too late to fetch them."""


@dataclass(slots=True)
class ReceivedFrames:
    """Frames that came in together, and the port each came in on."""

    ports: list[int] = field(default_factory=list)
    packets: list[bytearray] = field(default_factory=list)


class PortGroup(Protocol):
    """Ports that share sockets. Nothing here raises because of what comes in, or because the other side is gone."""

    @property
    def counters(self) -> dict[int, PortCounters]:
        """What happened so far, by port number."""

    def describe(self, port: int) -> str:
        """Return where a port leads, in words, for tables and logs."""

    def filenos(self) -> list[int]:
        """Return the file descriptors that turn readable when frames wait."""

    def receive(self, fileno: int, limit: int) -> ReceivedFrames:
        """Fetch about ``limit`` frames from one file descriptor without blocking."""

    def send(self, port: int, packets: list[bytearray]) -> None:
        """Send frames out of a port without blocking; those that cannot leave are counted and gone."""

    def refresh(self) -> None:
        """Bring those counters up to date that the kernel keeps."""

    def close(self) -> None:
        """Close the sockets."""


def enlarge_buffers(sock: socket.socket) -> None:
    """Give a socket large buffers; past the system's maximum where the process may, up to it otherwise."""
    for force, plain in ((33, socket.SO_RCVBUF), (32, socket.SO_SNDBUF)):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        try:
            sock.setsockopt(socket.SOL_SOCKET, force, SOCKET_BUFFER_BYTES)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)
