# SPDX-License-Identifier: Apache-2.0
"""Free ports of the loopback address, for processes that a test starts."""

import os
import random
import socket
from contextlib import ExitStack, suppress

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections (``ip_local_port_range``): they may be gone when used."""
PARTS = 9
"""Each worker of pytest-xdist draws from a part of its own, or another worker could take a port before it is used. The
last part is for runs without workers, such as those of the frameworks."""


def free_port() -> int:
    """Return a TCP port."""
    return free_ports(1)[0]


def free_udp_ports(count: int) -> list[int]:
    """Return this many UDP ports."""
    return free_ports(count, socket.SOCK_DGRAM)


def free_ports(count: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[int]:
    """Return this many ports, of TCP by default."""
    draw, found = random.SystemRandom(), []  # not seeded: tests that run beside each other must not try the same ones
    part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw8").removeprefix("gw")) % PARTS
    with ExitStack() as stack:
        while len(found) < count:
            sock, port = stack.enter_context(socket.socket(socket.AF_INET, kind)), draw.choice(PORTS[part::PARTS])
            with suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found
