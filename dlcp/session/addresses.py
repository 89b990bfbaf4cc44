# SPDX-License-Identifier: Apache-2.0
"""Where others reach this rank: its host and its UDP port."""

import os
import socket
import warnings
from functools import cache

from dlcp.session.options import Options
from dlcp.transport import Address, bind_socket, parse_address
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT


def own_host(toward: str | None = None) -> str:
    """Return this host's address on the way to another, by default to the master (``MASTER_ADDR``)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            (toward or os.environ.get("MASTER_ADDR", "127.0.0.1"), 9)
        )  # sends nothing; asks the routing table
        return str(probe.getsockname()[0])


def bind(options: Options, toward: str | None = None) -> socket.socket:
    """Bind the port that the options name; else the first free one of DLCP's; else, and that is said once, any.

    Without a host in the options it is the one that leads ``toward`` another, see :func:`own_host`.

    Raises
    ------
    OSError
        The named port is in use, or the address is not this host's.
    """
    host, port = parse_address(options.bind) if options.bind else (own_host(toward), 0)
    if port:
        return bind_socket(host, [port])
    try:
        return bind_socket(host, range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT))
    except OSError:
        sock = bind_socket(host, [0])
    _say_ports_are_taken(host)
    return sock


def advertised(options: Options, sock: socket.socket) -> Address:
    """Return where others reach a socket: what the options say, with its own port if they name none."""
    host, port = sock.getsockname()
    if options.advertise:
        host, _, told_port = options.advertise.partition(":")
        port = int(told_port) if told_port else port
    return host, port


@cache
def _say_ports_are_taken(host: str) -> None:
    warnings.warn(
        f"DLCP's UDP ports {UDP_PORT_BASE}-{UDP_PORT_BASE + UDP_PORT_COUNT - 1} on {host} are all in use: some groups "
        "use other ports, and switches treat their packets as ordinary traffic",
        RuntimeWarning,
        stacklevel=2,
    )
