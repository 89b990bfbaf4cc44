# SPDX-License-Identifier: Apache-2.0
"""The UDP sockets of an endpoint, and parsing of addresses."""

import contextlib
import socket
from collections.abc import Iterable
from typing import Final

from dlcp.inputs.configuration import host_and_port
from dlcp.inputs.error_text import ipv4_only
from dlcp.transport.messages import Address
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE

RECEIVE_BUFFER_BYTES: Final = 8 << 20
SKB_OVERHEAD_BYTES: Final = 832
"""Linux's memory overhead per datagram, rounded up (sk_buff and data alignment)."""
# Linux socket options that Python does not define, or not everywhere.
UDP_SEGMENT: Final = 103
"""One send carries several datagrams."""
UDP_GRO: Final = 104
"""One read returns several datagrams."""
SO_RCVBUFFORCE: Final = 33
SO_TIMESTAMPNS: Final = 35
"""The kernel reports when a datagram arrived."""
IP_RECVTOS: Final = getattr(socket, "IP_RECVTOS", 13)


def bind_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """Bind a UDP socket to the first free port of ``ports``, with as large a receive buffer as the kernel allows.

    Raises
    ------
    OSError
        No port can be bound; the message names them.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    tried = []
    for port in ports:
        try:
            sock.bind((host, port))
            break
        except OSError as error:
            tried.append(f"{port} ({error.strerror})")
    else:
        sock.close()
        ports_tried = f"cannot bind UDP at {host}, port {', '.join(tried)}"
        raise OSError(ipv4_only(host) or f"{ports_tried}; end the job that holds it, or choose another address")
    sock.setsockopt(socket.IPPROTO_IP, IP_RECVTOS, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def bind_further(sock: socket.socket, count: int) -> list[socket.socket]:
    """Return more send-only sockets at a socket's address; fewer than ``count`` if the system allows no more."""
    further: list[socket.socket] = []
    with contextlib.suppress(OSError):  # fewer paths work, too
        while len(further) < count:
            further.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            further[-1].setblocking(False)
            further[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # the kernel's minimum
            further[-1].bind((sock.getsockname()[0], 0))
        return further
    further.pop().close()
    return further


def packets_held(sock: socket.socket, payload_bytes: int) -> int:
    """Return the number of full packets that the receive buffer holds; the kernel may allow less than requested."""
    granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return max(8, int(granted // (payload_bytes + HEADER_BYTES + SKB_OVERHEAD_BYTES)))


def parse_address(text: str) -> Address:
    """Parse ``host:port`` into host and port; the port is optional.

    Raises
    ------
    ValueError
        There is no host, or the port is not a number from 0 to 65535.
    """
    return host_and_port(text, UDP_PORT_BASE)
