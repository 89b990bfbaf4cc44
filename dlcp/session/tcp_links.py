# SPDX-License-Identifier: Apache-2.0
"""The kernel's figures on this process's own TCP connections: bytes sent, and for how long data was under way.

The figures are those of ``ss -ti``. They need no privilege and no traffic of their own, and it does not matter which
library has opened a connection: Gloo, NCCL over sockets, or MPI. Linux only; elsewhere there are no connections.
"""

import ipaddress
import os
import socket
import stat
import struct
from contextlib import suppress
from operator import sub
from pathlib import Path
from typing import Final, NamedTuple

from dlcp.inputs.addresses import Address, format_address

_INFO_BYTES: Final = 192
"""``struct tcp_info`` of linux/tcp.h up to ``tcpi_sndbuf_limited``, which Linux 4.10 and later have."""
_FIELDS: Final = struct.Struct("=120xQQ32xQQ")
"""``tcpi_bytes_acked`` and ``tcpi_bytes_received``; ``tcpi_busy_time`` and ``tcpi_rwnd_limited``, in microseconds."""


class TcpEnds(NamedTuple):
    """The two addresses of a connection, as ``HOST:PORT``; the other end has them in the opposite order."""

    own: str
    peer: str


class TcpUse(NamedTuple):
    """Use of a connection by one of its ends, since it was opened.

    Attributes
    ----------
    acked_bytes
        Bytes sent that the other end has confirmed.
    received_bytes
        Bytes received.
    busy_s
        Time with unconfirmed data, without that in which the other end's program did not read, in seconds.
    """

    acked_bytes: int
    received_bytes: int
    busy_s: float

    def since(self, earlier: "TcpUse | None") -> "TcpUse":
        """Return the use since an earlier reading."""
        return self if earlier is None else TcpUse(*map(sub, self, earlier))


def tcp_connections() -> dict[TcpEnds, TcpUse]:
    """Return this process's TCP connections, and the use of each."""
    found = {}
    folder = Path("/proc/self/fd")
    for descriptor in [int(each.name) for each in folder.iterdir()] if folder.is_dir() else ():
        with suppress(OSError):  # closed meanwhile, or no connection
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found[_ends(connection)] = _use(connection)
    return found


def _ends(connection: socket.socket) -> TcpEnds:
    return TcpEnds(*(format_address(_as_ipv4(end)) for end in (connection.getsockname(), connection.getpeername())))


def _as_ipv4(end: Address) -> Address:
    """Return an address as the other end sees it: a socket for both families shows IPv4 addresses as IPv6."""
    mapped = ipaddress.IPv6Address(end[0]).ipv4_mapped if ":" in end[0] else None
    return (str(mapped), end[1]) if mapped else end


def _use(connection: socket.socket) -> TcpUse:
    """Raise OSError if it is not TCP, or the kernel lacks these figures."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        raise OSError("this kernel does not tell for how long a connection was busy")
    acked_bytes, received_bytes, busy_us, unread_us = _FIELDS.unpack_from(info)
    return TcpUse(acked_bytes, received_bytes, 1e-6 * max(0, busy_us - unread_us))
