# SPDX-License-Identifier: Apache-2.0
"""The UDP sockets of an endpoint."""

import contextlib
import socket
from collections.abc import Iterable
from typing import Final

from dlcp.host.ip import IpFamily, family_of, resolve
from dlcp.wire import HEADER_BYTES

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


def bind_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """Bind a UDP socket to the first free port of ``ports``, with as large a receive buffer as the kernel allows.

    It is of the family of ``host``, a numeric address or a name.

    Raises
    ------
    OSError
        No port can be bound, and the message names them; or the host is unknown.
    """
    host = resolve(host)[0]
    family = family_of(host)
    sock = family.udp_socket()
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
        raise OSError(f"{ports_tried}; end the job that holds it, or choose another address")
    sock.setsockopt(family.level, family.receive_tos, 1)
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
            further.append(IpFamily.of(sock).udp_socket())
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
