# SPDX-License-Identifier: Apache-2.0
"""Background traffic: flows of other jobs that send bursts into one worker's port at a time.

With network namespaces it is real TCP. TCP cannot cross the switch on loopback; there DLCP's transport stands in for
it, in reliable mode and with the window of one TCP flow. :func:`sink` and :func:`source` are the two ends; each runs in
its own process.
"""

import contextlib
import select
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait  # select.select fails on descriptors above 1023
from typing import Final

import numpy as np

from dlcp.host.ip import family_of
from dlcp.host.processes import send_fact
from dlcp.transport import (
    RELIABLE,
    Address,
    Delivery,
    Endpoint,
    Membership,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportOptions,
    bind_socket,
)
from dlcp.values.tags import PacketTags

SINK_PORT: Final = 53711
BURST_S: Final = 8.0
"""Default mean length of a burst."""
SAMPLE_S: Final = 0.1
"""Interval over which a sink adds up the bytes that arrive."""
_MESSAGES_IN_FLIGHT: Final = 4
_TOKEN: Final = 0x6261636B67726F75
_CHUNK: Final = bytes(1 << 16)
_SEND_BUFFER_BYTES: Final = 1 << 16
"""Small, so that little is left to drain when a burst ends."""
_Count = Callable[[int], None]
"""Called with the number of bytes that have arrived."""


@dataclass(frozen=True, slots=True)
class BackgroundBurst:
    """All background flows send to the worker ``target`` from ``start_s`` to ``stop_s``, in seconds of the run."""

    start_s: float
    stop_s: float
    target: int


def schedule(
    seed: int, workers: int, seconds: float, *, on_s: float = BURST_S, off_s: float = 0.5
) -> list[BackgroundBurst]:
    """Return bursts of about ``on_s`` seconds with pauses of about ``off_s``; no two in a row hit the same port."""
    generator = np.random.default_rng([seed, 2])
    bursts: list[BackgroundBurst] = []
    now_s = 0.0
    while now_s < seconds:
        length_s = float(generator.uniform(0.75, 1.25)) * on_s
        others = [worker for worker in range(workers) if not bursts or worker != bursts[-1].target]
        bursts.append(BackgroundBurst(now_s, now_s + length_s, int(generator.choice(others))))
        now_s += length_s + float(generator.uniform(0.5, 1.5)) * off_s
    return bursts


def delivered_bps(samples: Sequence[tuple[float, float]], bursts: Sequence[BackgroundBurst], stop_s: float) -> float:
    """Return the mean rate of arrivals during bursts, in bits per second, up to ``stop_s``.

    Parameters
    ----------
    samples
        Pairs of a time and the bytes that arrived in the :data:`SAMPLE_S` before it.
    """
    on_s = sum(max(0.0, min(burst.stop_s, stop_s) - burst.start_s) for burst in bursts)
    return 8 * sum(count for when_s, count in samples if when_s <= stop_s) / on_s if on_s else 0.0


@dataclass(frozen=True, slots=True)
class BackgroundEnd:
    """One end of the background traffic.

    Parameters
    ----------
    over
        ``tcp`` for the kernel's TCP, ``udp`` for DLCP's transport.
    rank, bind
        Number of this host, and the address it binds to.
    peers
        Addresses of the other ends, by host.
    """

    over: str
    rank: int
    bind: Address
    peers: dict[int, Address]

    def endpoint(self) -> Endpoint:
        """Open this end with DLCP's transport."""
        options = TransportOptions(tagged=False, congestion="cubic", flow_weight=1.0)
        members = Membership(self.rank, self.peers, token=_TOKEN)
        return Endpoint(members, bind_socket(self.bind[0], [self.bind[1]]), options=options)


def sink(channel: Connection, end: BackgroundEnd) -> None:
    """Receive until terminated, then report the bytes that arrived in each :data:`SAMPLE_S`, as (time, bytes) pairs."""
    counts: Counter[int] = Counter()

    def count(size: int) -> None:
        counts[int(time.monotonic() / SAMPLE_S)] += size

    with _until_terminated():
        if end.over == "udp":
            udp_sink(end.endpoint(), count, channel)
        else:
            tcp_sink(end.bind, count, channel)
    send_fact(channel, {"report": [[(slot + 1) * SAMPLE_S, size] for slot, size in sorted(counts.items())]})


def source(channel: Connection, end: BackgroundEnd, bursts: Sequence[BackgroundBurst]) -> None:
    """Send the bursts until terminated. Their times count from the start time received on the channel."""
    with _until_terminated():
        send_fact(channel, {"ready": True})
        start_s: float = channel.recv()

        def begun() -> Iterator[BackgroundBurst]:
            for burst in bursts:
                time.sleep(max(0.0, start_s + burst.start_s - time.monotonic()))
                yield burst

        def stop(burst: BackgroundBurst) -> float:
            return start_s + burst.stop_s

        if end.over == "udp":
            udp_send(end.endpoint(), begun(), stop)
        else:
            tcp_send(end.peers, begun(), stop)


@contextlib.contextmanager
def _until_terminated() -> Iterator[None]:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        yield


def tcp_sink(bind: Address, count: _Count, channel: Connection) -> None:
    """Receive over TCP until interrupted."""
    server = socket.create_server(bind, family=family_of(bind[0]).number)
    send_fact(channel, {"ready": True})
    open_sockets = [server]
    while True:
        ready = wait(open_sockets)
        for sock in [sock for sock in open_sockets if sock in ready]:
            if sock is server:
                open_sockets.append(server.accept()[0])
                continue
            data = sock.recv(1 << 20)
            if not data:
                open_sockets.remove(sock)
            count(len(data))


def udp_sink(endpoint: Endpoint, count: _Count, channel: Connection) -> None:
    """Receive over DLCP's transport until interrupted."""

    def on_message(peer: int, key: MessageKey) -> None:
        arrival = endpoint.receive(ReceiveRequest(peer, key, None, RELIABLE, "background"))
        arrival.add_done_callback(lambda done: count(len(done.result().payload)))
        endpoint.connection.begin_step(key.step - _MESSAGES_IN_FLIGHT)

    endpoint.listen(on_message)
    send_fact(channel, {"ready": True})
    signal.pause()


def tcp_send(
    peers: dict[int, Address], bursts: Iterable[BackgroundBurst], stop: Callable[[BackgroundBurst], float]
) -> None:
    """Send to each burst's target while the burst lasts, as fast as TCP allows."""
    flows = {}
    for peer, address in peers.items():
        flows[peer] = sock = socket.create_connection(address, timeout=10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        sock.setblocking(False)
    room = select.poll()
    for burst in bursts:
        while (left_s := stop(burst) - time.monotonic()) > 0:
            room.register(flows[burst.target], select.POLLOUT)
            ready = room.poll(left_s * 1000)
            room.unregister(flows[burst.target])
            if ready:
                flows[burst.target].send(_CHUNK)


def udp_send(endpoint: Endpoint, bursts: Iterable[BackgroundBurst], stop: Callable[[BackgroundBurst], float]) -> None:
    """Send as fast as DLCP's reliable transport allows with the window of one TCP flow (CUBIC)."""
    endpoint.greet()
    packets = -(-len(_CHUNK) // endpoint.connection.options.payload_bytes)
    nothing = np.zeros(packets, np.uint8)
    tags = PacketTags(nothing, nothing, nothing, np.ones(packets, np.bool_))
    sending: deque[Future[Delivery]] = deque()
    number = 0
    for burst in bursts:
        while (left_s := stop(burst) - time.monotonic()) > 0:
            if len(sending) < _MESSAGES_IN_FLIGHT:
                number += 1
                key = MessageKey(number, 0)
                sending.append(
                    endpoint.send(SendRequest(burst.target, key, memoryview(_CHUNK), tags, RELIABLE, "background"))
                )
                continue
            with contextlib.suppress(TimeoutError):
                sending[0].result(left_s)
                sending.popleft()
