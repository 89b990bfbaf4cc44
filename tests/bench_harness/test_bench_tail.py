# SPDX-License-Identifier: Apache-2.0
"""Disturbances of all-reduces in benchmarks: bursts of other traffic, and links that fail for a while."""

import contextlib
import socket
import time
from itertools import pairwise

import pytest

from tests.bench.allreduce import length_for, ratio_of
from tests.bench.disturbances import BackgroundBursts, LinkOutages, bursts
from tests.bench.harness import mean_against, percentile
from tests.bench.paths import RoutedPath
from tests.waiting import until

RATE_BPS = 20_000_000


def test_bursts_follow_from_the_seed_and_are_as_long_as_wanted():
    found = bursts(4, 0.05, 400.0, seed=1)
    assert found == bursts(4, 0.05, 400.0, seed=1) != bursts(4, 0.05, 400.0, seed=2)
    assert found == sorted(found)
    for rank in range(4):
        own = [burst for burst in found if burst.rank == rank]
        assert all(one.stop_s < other.start_s for one, other in pairwise(own)), "one after the other"
        assert sum(burst.stop_s - burst.start_s for burst in own) / len(own) == pytest.approx(0.05, rel=0.2)
        assert len(own) == pytest.approx(400 / 0.25, rel=0.2)


@pytest.mark.parametrize(
    ("ratio", "length_s"), [(1.0, 0.0), (1.1, 0.0), (1.5, 0.03), (2.0, 0.04), (3.0, 0.06), (9.0, 0.08)]
)
def test_lengths_are_interpolated_between_those_that_were_tried(ratio, length_s):
    tried = [(0.0, 1.1), (0.02, 1.0), (0.04, 2.0), (0.08, 4.0)]
    assert length_for(ratio, tried) == pytest.approx(length_s)


def test_a_ratio_is_of_the_99th_percentile_to_the_median():
    times = [1.0] * 95 + [3.0] * 5
    assert ratio_of(times) == 3
    assert percentile(range(101), 99) == 99
    assert percentile([7.0], 99) == 7


def test_rare_runs_count_in_a_comparison_of_means():
    entry = mean_against("x", "ms", {"ours": [1.0, 1.0, 4.0], "peer": [2.0, 2.0, 8.0]}, "ours", "peer", {"more": 1})
    assert (entry.value, entry.peer, entry.ratio, entry.runs) == (2, 4, 2, 3)
    assert entry.details == {"peer": "peer", "means": {"ours": 2, "peer": 4}, "p99": {"ours": 3.94, "peer": 7.88},
                             "more": 1}  # fmt: skip


@contextlib.contextmanager
def probing(path):
    """Yield a function that sends a datagram from the first host to the second, and returns whether it arrives."""
    sender, receiver = (host.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in path.hosts)
    with sender, receiver:
        receiver.bind((path.address(1), 0))
        receiver.settimeout(0.01)

        def arrives():
            sender.sendto(b"x", receiver.getsockname())
            with contextlib.suppress(TimeoutError):
                return bool(receiver.recv(10))
            return False

        yield arrives


@pytest.mark.usefixtures("bench_namespaces")
def test_links_are_gone_now_and_then_and_come_back():
    with RoutedPath(2) as path, probing(path) as arrives:
        until(arrives)
        assert path.dropped()[1] == 0
        with LinkOutages(path, seed=1) as outages:
            until(lambda: not arrives() and path.dropped()[1] > 0)
            until(arrives)
        assert outages.seconds > 0
        until(arrives)


@pytest.mark.usefixtures("bench_namespaces")
def test_bursts_fill_the_ports_of_hosts():
    with RoutedPath(2, rate_bps=RATE_BPS) as path:

        def received():
            shown = path.hosts[1].run(["ip", "-s", "link", "show", "eth0"], capture_output=True, text=True).stdout
            return int(shown.splitlines()[3].split()[1])

        with BackgroundBursts(path, path.router, 5.0, seed=1):
            until(lambda: received() > 200)
        after = received()
        time.sleep(0.1)  # the passing of time is tested: the bursts are over
        assert received() - after < 200
        with BackgroundBursts(path, path.router, 0.0, seed=1):
            time.sleep(0.1)  # nothing comes: that is what is tested
        assert received() - after < 200
