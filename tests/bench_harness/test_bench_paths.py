# SPDX-License-Identifier: Apache-2.0
"""The paths that benchmarks run over: addresses that lead where they should, and loss of single packets at random."""

import contextlib
import os
import socket
import struct
import subprocess
import time
from itertools import pairwise

import pytest

from tests.bench.disturbances import left_after_s
from tests.bench.paths import (
    LINK_BURST_BYTES,
    BenchPath,
    NamespaceLoopback,
    RoutedPath,
    SpineFabric,
    VethPair,
    known_controls,
)
from tests.bench.ranks import Ranks
from tests.bench_harness.bench_rank import Rank

UDP_SEGMENT, UDP_GRO = 103, 104
DATAGRAM_BYTES, BURST, SENT = 1400, 40, 4000


def links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def controls_in_force(path, here, there):
    """Connect from one host to another at every address, and return both ends' congestion control."""
    found = {}
    for control in path.controls:
        address = path.tcp_address(1, control)
        listener = there(lambda: socket.create_server((address, 0)))  # noqa: B023 - called at once
        mine = (path.tcp_address(0, control), 0)
        dialled = here(lambda: socket.create_connection(listener.getsockname(), 5, mine))  # noqa: B023 - likewise
        accepted, _ = listener.accept()
        ends = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for end in (dialled, accepted)]
        found[control] = [name.rstrip(b"\0").decode() for name in ends]
        for end in (dialled, accepted, listener):
            end.close()
    return found


def expected_controls():
    return {control: [control, control] for control in known_controls()}


@pytest.mark.usefixtures("bench_namespaces")
@pytest.mark.parametrize("kind", [VethPair, lambda: RoutedPath(2), lambda: RoutedPath(2, offloads=True)])
def test_hosts_reach_each_other_with_the_congestion_control_of_the_address(kind):
    before, fds = links(), set(os.listdir("/proc/self/fd"))
    with kind() as path:
        first, second = (host.call for host in path.hosts)
        assert controls_in_force(path, first, second) == expected_controls()
        assert links() == before, "the machine's own network is left alone"
    assert links() == before
    assert set(os.listdir("/proc/self/fd")) == fds


@pytest.mark.usefixtures("bench_namespaces")
def test_a_loopback_of_its_own_lets_congestion_control_be_chosen():
    with NamespaceLoopback(3) as path:
        inside = path.namespace.call
        assert controls_in_force(path, inside, inside) == expected_controls()
        assert len(path.namespaces) == 3
        with Ranks(Rank, [""], path.namespaces) as ranks:
            assert ranks.call("interfaces") == [["lo"]] * 3


def test_the_machines_own_loopback_needs_nothing():
    with BenchPath(2) as path:
        assert path.namespaces == [None, None]
        assert path.address(1) == path.tcp_address(0, path.controls[0]) == "127.0.0.1"
        assert path.dropped() == (0, 0)


@contextlib.contextmanager
def datagram_sockets(path):
    """Yield a socket of the first host, and one of the second that is bound."""
    sender, receiver = (host.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in path.hosts)
    with sender, receiver:
        receiver.bind((path.address(1), 0))
        yield sender, receiver


def send_burst(sock, target, first):
    """Send numbered datagrams as one burst, which the kernel divides, as an endpoint does."""
    numbered = b"".join(struct.pack(f">I{DATAGRAM_BYTES - 4}x", first + place) for place in range(BURST))
    segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", DATAGRAM_BYTES))]
    sock.sendmsg([numbered], segment, 0, target)


def receive_until(sock, last):
    """Return the numbers that arrive, up to the last one or until nothing comes any more."""
    numbers = []
    with contextlib.suppress(TimeoutError):
        while not numbers or numbers[-1] != last:
            numbers += struct.unpack_from(">I", sock.recv(2048))
    return numbers


@pytest.mark.usefixtures("bench_namespaces")
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_router_loses_single_packets_at_random(loss):
    with RoutedPath(2, loss) as path:
        with datagram_sockets(path) as (sender, receiver):
            receiver.settimeout(0.1)
            got = []
            for first in range(0, SENT, BURST):
                send_burst(sender, receiver.getsockname(), first)
                got += receive_until(receiver, first + BURST - 1)
        passed, dropped = path.dropped()
    assert got == sorted(got)
    missing = sorted(set(range(SENT)) - set(got))
    if loss == 0:
        assert (missing, dropped) == ([], 0)
        assert passed >= SENT
        return
    assert len(missing) == dropped
    assert 0.07 < dropped / SENT < 0.13
    runs = 1 + sum(after - before > 1 for before, after in pairwise(missing))
    assert dropped / runs < 1.3, "packets are lost one by one, not by bursts"


@pytest.mark.usefixtures("bench_namespaces")
@pytest.mark.parametrize("offloads", [False, True])
def test_bursts_pass_a_link_whole_where_it_has_offloads(offloads):
    with RoutedPath(2, rate_bps=100_000_000, offloads=offloads) as path:
        with datagram_sockets(path) as (sender, receiver):
            receiver.settimeout(5)
            receiver.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
            send_burst(sender, receiver.getsockname(), 0)
            got = len(receiver.recv(1 << 16))
        assert path.words.endswith(f"offloads {'on' if offloads else 'off'}")
    assert got == (BURST if offloads else 1) * DATAGRAM_BYTES


@pytest.mark.usefixtures("bench_namespaces")
@pytest.mark.parametrize("offloads", [False, True])
def test_a_link_has_the_rate_that_was_asked_for(offloads):
    with RoutedPath(2, rate_bps=20_000_000, offloads=offloads) as path:
        with datagram_sockets(path) as (sender, receiver):
            receiver.setblocking(False)
            sent = received = 0
            began_s = time.monotonic()
            while time.monotonic() < began_s + 1.0:
                for _ in range(10):
                    sent += sender.sendto(bytes(DATAGRAM_BYTES), receiver.getsockname()) > 0
                time.sleep(0.0002)  # no faster than the link could be wrong by: a pace, not a wait
                with contextlib.suppress(BlockingIOError):
                    while receiver.recv(2048):
                        received += 1
            took_s = time.monotonic() - began_s
        assert path.dropped()[1] == 0, "a full queue is no random loss"
    # Beside the rate, the first burst passes at once.
    limit_bits = 20e6 * took_s + 8 * LINK_BURST_BYTES
    assert 0 < received * (DATAGRAM_BYTES + 42) * 8 < 1.05 * limit_bits
    assert sent > 2 * received, "more was sent than the link carries"


@pytest.mark.parametrize("loss", [-0.1, 1.0])
def test_an_impossible_loss_is_refused(loss):
    with pytest.raises(ValueError, match="loss must lie in"):
        RoutedPath(2, loss)


def test_bursts_are_not_to_be_lost_whole():
    with pytest.raises(ValueError, match="random loss drops whole bursts"):
        RoutedPath(2, 0.01, offloads=True)


@pytest.mark.usefixtures("bench_namespaces")
def test_a_spine_fabric_leads_ports_over_all_spines():
    with SpineFabric(50_000_000, lossy=True) as fabric:
        first, second = (host.call for host in fabric.hosts)
        assert controls_in_force(fabric, first, second) == expected_controls()
        before = fabric.carried()
        receiver = second(lambda: bound_to(fabric.address(1)))
        for _ in range(64):
            with first(lambda: bound_to(fabric.address(0))) as sender:
                sender.sendto(bytes(100), receiver.getsockname())
        assert all(now > then for now, then in zip(fabric.carried(), before, strict=True))
        receiver.close()


def bound_to(host):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((host, 0))
    return sock


def test_a_spine_is_left_when_it_carries_much_less_than_its_share():
    fair = [(0.1 * n, [100 * n] * 4) for n in range(20)]
    assert left_after_s(fair) is None
    then = [(2 + 0.1 * n, [2000 + 100 * n] * 3 + [1900 + n]) for n in range(20)]
    assert left_after_s(fair + then) == pytest.approx(1.9, abs=0.15)
    idle = [(5 + 0.1 * n, then[-1][1]) for n in range(20)]
    assert left_after_s(fair + then + idle) == pytest.approx(1.9, abs=0.15)
