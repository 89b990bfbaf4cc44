# SPDX-License-Identifier: Apache-2.0
"""Sixteen ranks send to one at the same time, through a port of the built-in switch that holds few packets.

What is measured is the time until the receiver has all sixteen messages, over the time that the port needs for their
frames alone. The port runs at 20 Mbit/s: 1,650 data packets a second of the 25 thousand that the switch carries in
plain Python, and 0.6 ms a packet, so that its 32 packets (two for each sender) last longer than a host takes to wake
up. So the figure is the protocol's and not the processor's, if the machine is not overloaded.
"""

import argparse
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np

from dlcp.bench import BenchResult, result, say
from dlcp.controller.fabric import star
from dlcp.switch import LoopbackHost, PortQueueing, SwitchProcess
from dlcp.transport import (
    RELIABLE,
    Endpoint,
    LossBound,
    Membership,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportOptions,
    bind_socket,
)
from dlcp.values.tags import PacketTags
from dlcp.wire import HEADER_BYTES, UDP_PORT_BASE
from tests.bench.harness import Benchmark, Turns, int_option, rate_option

SENDERS = 16
FRAME_OVERHEAD_BYTES = 14 + 20 + 8 + HEADER_BYTES
"""Bytes that the port's line carries in addition to the payload: Ethernet, IPv4, UDP, DLCP."""
QUEUE = 4
DEADLINE_S = 60.0
REST_S = 0.02
"""Between rounds, so that one does not begin in the other's queue."""


@dataclass(frozen=True)
class Incast:
    """One setting of the measurement; ``loss_bound`` 0 delivers everything."""

    rate_bps: int = 20_000_000
    depth_packets: int = 32
    message_packets: int = 50
    loss_bound: float = 0.0

    @property
    def bound(self) -> LossBound:
        """How much of a message may be lost."""
        return LossBound(self.loss_bound) if self.loss_bound else RELIABLE

    def line_rate_s(self, payload_bytes: int) -> float:
        """Return how long the port needs for the frames that have to arrive."""
        packets = SENDERS * self.bound.required(self.message_packets)
        return packets * (payload_bytes + FRAME_OVERHEAD_BYTES) * 8 / self.rate_bps


@contextmanager
def endpoints(setting: Incast) -> Iterator[list[Endpoint]]:
    """Start a switch and the ranks around it; rank 16 is the receiver."""
    queueing = PortQueueing(rate_bps=setting.rate_bps, depth_packets=setting.depth_packets)
    fabric = star(SENDERS + 1, queueing=queueing)
    hosts = [LoopbackHost.numbered(rank) for rank in range(SENDERS + 1)]
    token = secrets.randbits(63) | 1
    with ExitStack() as stack:
        stack.enter_context(SwitchProcess(documents={"--fabric": asdict(fabric)}, counters_every_s=5.0))
        ranks = []
        for rank, host in enumerate(hosts):
            peers = {peer: (other.alias, UDP_PORT_BASE) for peer, other in enumerate(hosts) if peer != rank}
            sock = bind_socket(host.real, [UDP_PORT_BASE])
            options = TransportOptions(deadline_s=DEADLINE_S)
            ranks.append(Endpoint(Membership(rank, peers, token=token), sock, options=options))
            stack.callback(ranks[-1].close)
        for endpoint in ranks:
            endpoint.greet(DEADLINE_S)
        yield ranks


def tags(packets: int) -> PacketTags:
    """Return tags of packets of one layer, an eighth of them in each drop class and the last eighth protected."""
    drop_class = np.arange(packets) * 8 // packets
    return PacketTags(
        np.full(packets, QUEUE, np.uint8), drop_class.astype(np.uint8), np.zeros(packets, np.uint8), drop_class == 0
    )


def once(ranks: list[Endpoint], setting: Incast, step: int, payload: memoryview) -> float:
    """Return how many seconds one incast takes, from the first send to the last message's arrival."""
    *senders, receiver = ranks
    key = MessageKey(step, 0)
    arrivals = [
        receiver.receive(ReceiveRequest(rank, key, len(payload), setting.bound, "incast")) for rank in range(SENDERS)
    ]
    labels = tags(setting.message_packets)
    began_s = time.monotonic()
    deliveries = [
        sender.send(SendRequest(SENDERS, key, payload, labels, setting.bound, "incast")) for sender in senders
    ]
    for arrival in arrivals:
        arrival.result(DEADLINE_S)
    took_s = time.monotonic() - began_s
    for delivery in deliveries:
        delivery.result(DEADLINE_S)
    time.sleep(REST_S)
    return took_s


def measure(name: str, setting: Incast, turns: Turns) -> list[BenchResult]:
    """Return the median and the 99th percentile over the rounds."""
    payload_bytes = TransportOptions().payload_bytes
    payload = memoryview(np.random.default_rng(0).bytes(setting.message_packets * payload_bytes))
    bound_s = setting.line_rate_s(payload_bytes)
    rounds, times = turns.rounds, []
    with endpoints(setting) as ranks:
        for step in range(1, turns.warm_up + rounds + 1):
            took_s = once(ranks, setting, step, payload)
            if step > turns.warm_up:
                times.append(took_s / bound_s)
    say(f"{name}: median {np.median(times):.3f}, worst {max(times):.3f} of {rounds}, bound {1e3 * bound_s:.1f} ms")
    details = {**asdict(setting), "bound_ms": 1e3 * bound_s, "first_round": times[0], "worst_round": max(times)}
    worst = float(np.percentile(times, 99))
    unit = "times the line-rate bound"
    return [
        result(name, unit, times, [1.0] * rounds, details=details),
        BenchResult(f"{name}.p99", worst, unit, 1.0, 1 / worst, rounds, 0.0, details),
    ]


def _incast(arguments: argparse.Namespace) -> list[BenchResult]:
    reliable = Incast(int(arguments.rate_mbps * 1e6), arguments.depth, arguments.packets)
    return [
        *measure(f"incast.{SENDERS}", reliable, arguments.turns),
        *measure(f"incast.{SENDERS}.bounded", replace(reliable, loss_bound=0.02), arguments.turns),
    ]


BENCHMARK = Benchmark(
    _incast,
    {
        "--rate-mbps": rate_option(20.0),
        "--depth": int_option(32, "packets that each queue of the port holds"),
        "--packets": int_option(50, "of a message"),
    },
    rounds=50,
    warm_up=3,
)
