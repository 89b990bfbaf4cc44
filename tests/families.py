# SPDX-License-Identifier: Apache-2.0
"""The families of IP, for tests that take their sockets from either."""

import socket
from contextlib import suppress

import pytest

from dlcp.host.ip import IPV4, IPV6


def _has_ipv6():
    with suppress(OSError), IPV6.udp_socket() as sock:
        sock.bind((IPV6.loopback, 0))
        return True
    return False


def has_raw_sockets():
    """Return whether this process may open raw sockets (CAP_NET_RAW)."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP).close()
    except PermissionError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1: IPv6 is off")
FAMILIES = [pytest.param(IPV4, id="IPv4"), pytest.param(IPV6, id="IPv6", marks=needs_ipv6)]
both_families = pytest.mark.parametrize("family", FAMILIES)
