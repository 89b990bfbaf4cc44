# SPDX-License-Identifier: Apache-2.0
"""How BMv2 is made to send at a port's rate: by back-pressure from the interface, not by a rate of its own.

BMv2's own queue rate is per priority queue, so a port with k busy queues sends k times the rate and strict priority
never bites. Instead its egress interface has a token bucket (``tbf``), and its packet sockets have small send buffers.
Then a send blocks while the interface is busy, packets wait in BMv2's queues, and priority, selective dropping and
marking act as on a link of that rate.
"""

import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path
from typing import Final

from dlcp.controller.testbed.errors import TestbedError
from dlcp.controller.testbed.namespaces import NamedNamespace, run_in

BURST_BYTES: Final = 3_028
"""Two full frames: what may leave at once after a pause. Ours: less would cost rate whenever a timer is late."""
LIMIT_BYTES: Final = 262_144
"""More than a socket's send buffer holds, so that the token bucket itself never drops."""
SEND_BUFFER_BYTES: Final = 8_192
"""What a packet socket may hold, before the kernel doubles it: some seven full frames with their bookkeeping."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on every architecture."""


def limit_rate(namespace: NamedNamespace, interface: str, rate_bps: int) -> None:
    """Let an interface send ``rate_bps`` and no more, counted in Ethernet frames.

    Raises
    ------
    TestbedError
        The kernel has no token bucket filter.
    """
    run_in(
        namespace,
        *("tc", "qdisc", "replace", "dev", interface, "root", "tbf"),
        *("rate", f"{rate_bps}bit", "burst", str(BURST_BYTES), "limit", str(LIMIT_BYTES)),
    )


def shrink_packet_buffers(pid: int) -> None:
    """Make the send buffers of all packet sockets of a process small.

    The sockets are reached from outside (``pidfd_getfd``): libpcap opens them with the machine's default, and has no
    option for it; changing the default would be for every program of the machine.

    Raises
    ------
    TestbedError
        The process cannot be reached into, or has no packet socket.
    """
    pidfd = os.pidfd_open(pid)
    try:
        found = [fd for fd in _sockets(pid) if _shrink(pidfd, fd)]
    finally:
        os.close(pidfd)
    if not found:
        raise TestbedError(f"process {pid} has no packet socket: it has not opened its ports")


def _sockets(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if str(link.readlink()).startswith("socket:"):
                found.append(int(link.name))
    return found


def _shrink(pidfd: int, fd: int) -> bool:
    """Make the send buffer of one socket of a process small; say whether it is a packet socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        number = ctypes.get_errno()
        if number == errno.EBADF:  # closed since
            return False
        raise TestbedError(f"cannot reach the switch's sockets: {os.strerror(number)}; it takes root and Linux 5.6")
    with socket.socket(fileno=copy) as sock:
        if sock.family != socket.AF_PACKET:
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return True
