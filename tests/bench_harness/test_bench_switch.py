# SPDX-License-Identifier: Apache-2.0
"""The tools of the switch's benchmark: frames that are counted and checked, and the search for a rate."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from dlcp.host.netlab import StarNetwork
from dlcp.switch import PacketPort, PortQueueing, Switch
from tests.bench import switch as bench
from tests.bench.switch import BISECTIONS, FASTEST_PPS, SLOWEST_PPS, best_paced, processor_s
from tests.waiting import until


class Wire:
    """A program that sends everything to port 2, and may spoil it."""

    def __init__(self, spoil=lambda packet, number: None):
        self._spoil = spoil
        self._count = 0

    def ingress(self, packet, port, now_us):
        return 2, 0, None

    def egress(self, packet, *arguments):
        self._count += 1
        self._spoil(packet, self._count)
        return len(packet)


@pytest.fixture
def through(bench_namespaces):
    """Return a function that runs frames through a switch."""

    def run(program, use, **queueing):
        with StarNetwork(2) as network:
            ports = network.switch.call(
                lambda: [PacketPort(host.port, host.switch_interface) for host in network.hosts]
            )
            switch = Switch(program, ports, {2: PortQueueing(depth_packets=1000, **queueing)})
            with bench.Traffic(network) as traffic, switch.running():
                found = use(traffic)
            switch.close()
        return found

    return run


def test_frames_are_counted_and_timed(through):
    def use(traffic):
        return traffic.run(0.2, 2000), traffic.latency_s(5, 0.001)

    run, latencies_s = through(Wire(), use)
    assert run.lossless
    assert 64 <= run.sent <= 448
    assert run.sent_pps <= 2000 * 1.2  # the last burst is whole
    assert len(latencies_s) == 5
    assert all(0 < latency_s < 1 for latency_s in latencies_s)


def test_losses_are_seen(through):
    run = through(Wire(), lambda traffic: traffic.run(0.2, 2000), loss=0.3)
    assert 0 < run.received < run.sent
    assert not run.lossless


def test_frames_of_an_earlier_run_do_not_count(through):
    def make_old(packet, number):
        if number % 10 == 0:
            packet[42 + 8 : 42 + 12] = bytes(4)

    run = through(Wire(make_old), lambda traffic: traffic.run(0.1, 2000))
    assert run.received == run.sent - run.sent // 10


def test_damage_is_seen(through):
    def spoil(packet, number):
        if number % 10 == 5:  # so that no loss hides it
            packet[500] ^= 1

    with pytest.raises(bench.TrafficError, match="damaged"):
        through(Wire(spoil), lambda traffic: traffic.run(0.1, 2000))


def test_doubles_are_seen(through):
    def spoil(packet, number):
        if number % 10 == 5:  # so that no loss hides it
            packet[bench._INDEX] = (3).to_bytes(4, "big")

    with pytest.raises(bench.TrafficError, match="twice"):
        through(Wire(spoil), lambda traffic: traffic.run(0.1, 2000))


@pytest.mark.parametrize("limit_pps", [5_000, 30_000, 77_000, 239_000])
def test_search_finds_the_highest_rate_without_loss(limit_pps):
    tried = []

    def run(seconds, rate_pps):
        tried.append(rate_pps)
        return SimpleNamespace(lossless=rate_pps <= limit_pps, sent_pps=rate_pps)

    best = best_paced(SimpleNamespace(run=run))
    if limit_pps < SLOWEST_PPS:
        assert best == 0
        return
    assert best == max(rate for rate in tried if rate <= limit_pps)
    assert limit_pps / (FASTEST_PPS / SLOWEST_PPS) ** (1 / 2 ** (BISECTIONS - 1)) < best <= limit_pps


def test_processor_time_is_that_of_all_threads():
    def compute():
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass

    stop = threading.Event()
    before_s = processor_s(os.getpid())
    worker = threading.Thread(target=lambda: (compute(), stop.wait(10)))  # a thread's time goes with it
    worker.start()
    compute()
    until(lambda: processor_s(os.getpid()) - before_s >= 0.19, "the other thread's time is not counted")
    spent_s = processor_s(os.getpid()) - before_s
    stop.set()
    worker.join()
    assert spent_s >= 0.19
