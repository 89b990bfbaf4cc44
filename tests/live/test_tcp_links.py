# SPDX-License-Identifier: Apache-2.0
"""The kernel's figures on this process's TCP connections, whichever library opened them."""

import socket
import sys

import pytest

from dlcp.host.ip import IPV6
from dlcp.inputs.addresses import format_address
from dlcp.session.tcp_links import TcpEnds, tcp_connections
from tests.families import both_families

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@both_families
@pytest.mark.parametrize("dual", [False, True])
def test_both_ends_of_a_connection_are_found_with_what_they_have_sent(family, dual):
    """A server for both families, as PyTorch's is, shows addresses of IPv4 as such of IPv6."""
    listens = IPV6 if dual and socket.has_dualstack_ipv6() else family
    host = listens.any_address if listens is not family or dual else family.loopback
    with (
        socket.create_server((host, 0), family=listens.number, dualstack_ipv6=dual and listens is IPV6) as server,
        socket.create_connection((family.loopback, server.getsockname()[1])) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            ends = TcpEnds(format_address(client.getsockname()), format_address(client.getpeername()))
            before = tcp_connections()[ends]
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(accepted.recv(left))
            found = tcp_connections()
            assert found[ends].since(before).acked_bytes >= 50_000  # the last bytes may be confirmed later
            assert found[ends].since(None) == found[ends]
            assert found[TcpEnds(ends.peer, ends.own)].received_bytes == 100_000
            assert found[ends].busy_s >= 0
            assert client.fileno() >= 0
            client.sendall(b"still open")


def test_other_sockets_are_left_out():
    before = set(tcp_connections())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, socket.create_server(("127.0.0.1", 0)):
        datagrams.connect(("127.0.0.1", 9))
        assert set(tcp_connections()) == before
