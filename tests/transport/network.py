# SPDX-License-Identifier: Apache-2.0
"""A network in virtual time for testing connections: links with a rate and queues, loss, delay and disorder."""

import heapq
import math
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from dlcp.transport import Membership
from dlcp.transport.connection import Connection, Links
from dlcp.transport.settings import TransportOptions
from dlcp.values.tags import PacketTags

TOKEN = 0x1122334455667788


class Network:
    """Ranks joined by one switch: each receiver has a link of ``rate_bps`` behind eight strict-priority queues."""

    def __init__(self, ranks, *, rate_bps=100e6, depth=64, routes=None, delay_s=0.0002, loss=0.0, duplicate=0.0,
                 jitter_s=0.0, ecn_depth=16, seed=0, options=None, mangle=None, clear_after_s=math.inf):  # fmt: skip
        self.now = 0.0
        self.random = random.Random(seed)
        self.rate_bps, self.depth, self.delay_s = rate_bps, depth, delay_s
        self.loss, self.duplicate, self.jitter_s, self.ecn_depth = loss, duplicate, jitter_s, ecn_depth
        self.mangle = mangle
        self.routes = routes
        self.ports = list(range(40000, 40000 + (options or TransportOptions()).paths - 1)) if routes else []
        self.events: list = []
        self.serial = 0
        self.queues = [[[] for _ in range(8)] for _ in range(ranks)]
        self.busy = [False] * ranks
        self.dead: set[int] = set()
        self.dropped: Counter = Counter()
        self.arrived: list = []
        self.sent: list = []
        self.ranks = [
            Connection(
                Membership(
                    rank,
                    {peer: (f"10.0.0.{peer}", 53696) for peer in range(ranks) if peer != rank},
                    job=1,
                    token=TOKEN,
                ),
                replace(options or TransportOptions(), clear_after_s=clear_after_s),
                Links(
                    4096,
                    emit=lambda peer, datagram, tos, path, rank=rank: self.leave(rank, peer, datagram, tos, path),
                    ports=self.ports,
                ),
                clock=lambda: self.now,
            )
            for rank in range(ranks)
        ]

    def at(self, when, action, *arguments):
        self.serial += 1
        heapq.heappush(self.events, (when, self.serial, action, arguments))

    def leave(self, source, target, datagram, tos, path):
        if not self.routes:
            return self.send(source, target, datagram, tos)
        self.sent.append((self.now, source, target, datagram, path))
        self.take_route(source, target, datagram, tos, path)
        return True

    def send(self, source, target, datagram, tos):
        if source in self.dead:
            return True
        self.sent.append((self.now, source, target, datagram))
        queue = datagram[2] >> 5
        if self.random.random() < self.loss:
            self.dropped["loss"] += 1
            return True
        copies = 2 if self.random.random() < self.duplicate else 1
        for _ in range(copies):
            self.at(self.now + self.delay_s + self.random.random() * self.jitter_s, self.enqueue, target, queue,
                    (source, datagram, tos))  # fmt: skip
        return True

    def take_route(self, source, target, datagram, tos, path):
        """Let a packet take the route of its path, all of whose packets wait in one queue."""
        route = self.routes[path % len(self.routes)]
        free, bits = route.setdefault(("free", source, target), 0.0), (len(datagram) + 42) * 8
        waiting_s = max(0.0, free - self.now)
        limit_s = self.depth * 1514 * 8 / route["rate_bps"]
        route["packets"] = route.get("packets", 0) + 1
        if waiting_s > limit_s or self.random.random() < route.get("loss", 0.0):
            self.dropped["tail" if waiting_s > limit_s else "loss"] += 1
            return
        if waiting_s > limit_s * self.ecn_depth / self.depth and tos & 3:
            tos |= 3
        route["free", source, target] = self.now + waiting_s + bits / route["rate_bps"]
        port = self.ports[path - 1] if path else 53696
        delay_s = waiting_s + bits / route["rate_bps"] + self.delay_s
        self.at(self.now + delay_s, self.arrive, source, target, datagram, tos, port)

    def arrive(self, source, target, datagram, tos, port):
        self.ranks[target].on_datagram(memoryview(datagram), tos, (f"10.0.0.{source}", port), self.now)

    def enqueue(self, target, queue, packet):
        waiting = self.queues[target][queue]
        if len(waiting) >= self.depth:
            self.dropped["tail", queue] += 1
            return
        source, datagram, tos = packet
        if len(waiting) >= self.ecn_depth and tos & 3:
            packet = source, datagram, tos | 3
        waiting.append(packet)
        if not self.busy[target]:
            self.transmit(target)

    def transmit(self, target):
        for waiting in reversed(self.queues[target]):
            if waiting:
                packet = waiting.pop(0)
                self.busy[target] = True
                self.at(self.now + (len(packet[1]) + 42) * 8 / self.rate_bps, self.deliver, target, packet)
                return
        self.busy[target] = False

    def deliver(self, target, packet):
        source, datagram, tos = packet
        if target not in self.dead:
            if self.mangle:
                datagram = self.mangle(datagram)
            self.arrived.append((self.now, source, target, datagram))
            self.ranks[target].on_datagram(memoryview(datagram), tos, (f"10.0.0.{source}", 53696), self.now)
        self.transmit(target)

    def run(self, until, step_s=0.0005, limit_s=60.0):
        """Advance virtual time until ``until()``; each rank gets its turn every ``step_s`` at the latest."""
        end = self.now + limit_s
        while not until() and self.now < end:
            turn = self.now + step_s
            while self.events and self.events[0][0] <= turn:
                self.now, _, action, arguments = heapq.heappop(self.events)
                action(*arguments)
            self.now = turn
            for rank, connection in enumerate(self.ranks):
                if rank not in self.dead:
                    self.take_turn(connection)
        assert until(), f"not done after {self.now:.2f} s of virtual time"

    def take_turn(self, connection):
        """Run a rank's due timers, and the work of its endpoint's thread."""
        connection.engine.tick(self.now)
        connection.take_events()
        if self.now >= connection.due_s:
            connection.on_time(self.now)
            connection.take_events()
        while connection.pump(self.now):
            pass


def endpoint_of(connection):
    """Return what stands for an endpoint in virtual time, where functions run at once."""
    return SimpleNamespace(connection=connection, call=connection.call, close=lambda reason=None: None)


def outcome_of(question, request) -> Future:
    """Send or receive a message: ``question`` is a connection's method. Return what becomes of it."""
    future: Future = Future()

    question(request, future.set_result, future.set_exception)
    return future


def plain_tags(packets, *, queue=4, drop_class=7, protected=0, layer=100):
    """Tags that are the same for all packets but the first ``protected`` ones."""
    shield = np.arange(packets) < protected
    return PacketTags(
        np.full(packets, queue, np.uint8),
        np.where(shield, 0, drop_class).astype(np.uint8),
        np.full(packets, layer, np.uint8),
        shield,
    )


def packets_of(size, options=None):
    return -(-size // (options or TransportOptions()).payload_bytes)


def all_done(*futures: Future):
    return lambda: all(future.done() for future in futures)
