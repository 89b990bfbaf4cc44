# SPDX-License-Identifier: Apache-2.0
"""Background traffic: flows of other jobs that send in bursts into one worker's port at a time.

Where hosts have network namespaces it is real TCP. On loopback, where TCP cannot cross the switch, DLCP's transport
stands in for it: reliable, with the window of one TCP flow. ``python -m dlcp.demo.background sink|source ...`` runs one
end.
"""

import argparse
import contextlib
import json
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import wait  # select.select knows no descriptors from 1024 on
from pathlib import Path
from typing import Final

import numpy as np

from dlcp.tags import PacketTags
from dlcp.transport import (
    RELIABLE,
    Address,
    Delivery,
    Endpoint,
    MessageKey,
    ReceiveRequest,
    SendRequest,
    TransportOptions,
    bind_socket,
    parse_address,
)

SINK_PORT: Final = 53711
SAMPLE_S: Final = 0.1
"""Interval at which a sink counts what arrives."""
_MESSAGES_IN_FLIGHT: Final = 4
_TOKEN: Final = 0x6261636B67726F75
_CHUNK: Final = bytes(1 << 16)
_SEND_BUFFER_BYTES: Final = 1 << 16
"""Small, so that a burst ends when it should instead of draining for long."""
_Count = Callable[[int], None]
"""Called with how many bytes have arrived."""


@dataclass(frozen=True, slots=True)
class BackgroundBurst:
    """All background flows send to the worker ``target`` from ``start_s`` to ``stop_s``, in seconds of the run."""

    start_s: float
    stop_s: float
    target: int


def schedule(
    seed: int, workers: int, seconds: float, *, on_s: float = 8.0, off_s: float = 0.5
) -> list[BackgroundBurst]:
    """Return bursts of about ``on_s`` seconds with pauses of about ``off_s``, each into another worker's port."""
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
    """Return the bits per second that arrived while bursts were on, up to ``stop_s``.

    Parameters
    ----------
    samples
        Pairs of time and bytes that arrived within the ``SAMPLE_S`` before it.
    """
    on_s = sum(max(0.0, min(burst.stop_s, stop_s) - burst.start_s) for burst in bursts)
    return 8 * sum(count for when_s, count in samples if when_s <= stop_s) / on_s if on_s else 0.0


def tcp_sink(bind: Address, count: _Count) -> None:
    """Receive until interrupted."""
    server = socket.create_server(bind)
    print("ready", flush=True)
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


def udp_sink(endpoint: Endpoint, count: _Count) -> None:
    """Receive over DLCP's transport until interrupted."""

    def on_message(peer: int, key: MessageKey) -> None:
        arrival = endpoint.receive(ReceiveRequest(peer, key, None, RELIABLE, "background"))
        arrival.add_done_callback(lambda done: count(len(done.result().payload)))
        endpoint.begin_step(key.step - _MESSAGES_IN_FLIGHT)

    endpoint.call(lambda: setattr(endpoint, "on_unexpected", on_message))
    print("ready", flush=True)
    signal.pause()


def tcp_send(
    peers: dict[int, Address], bursts: Iterable[BackgroundBurst], stop: Callable[[BackgroundBurst], float]
) -> None:
    """Send as much as TCP lets through to the target of each burst, as long as it lasts."""
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
    """Send as much as DLCP's reliable transport lets through, with the window of one TCP flow (CUBIC)."""
    endpoint.greet()
    packets = -(-len(_CHUNK) // endpoint.options.payload_bytes)
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


def started(bursts: Iterable[BackgroundBurst]) -> tuple[Iterator[BackgroundBurst], Callable[[BackgroundBurst], float]]:
    """Return the bursts, each as it begins, and a function that returns when one ends on the monotonic clock.

    Both count from the time that standard input gives in a line.
    """
    print("ready", flush=True)
    start_s = float(sys.stdin.readline())

    def each() -> Iterator[BackgroundBurst]:
        for burst in bursts:
            time.sleep(max(0.0, start_s + burst.start_s - time.monotonic()))
            yield burst

    return each(), lambda burst: start_s + burst.stop_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one end."""
    parser = argparse.ArgumentParser(description="One end of the demo's background traffic.")
    parser.add_argument("end", choices=["sink", "source"])
    parser.add_argument("--over", choices=["tcp", "udp"], required=True, help="the kernel's TCP, or DLCP's transport")
    parser.add_argument("--rank", type=int, required=True, help="number of this host")
    parser.add_argument("--bind", type=parse_address, required=True, help="address of this end, host:port")
    parser.add_argument("--peers", nargs="+", required=True, metavar="RANK=HOST:PORT", help="the other ends")
    parser.add_argument("--log", type=Path, help="file for what arrived when (sink)")
    parser.add_argument("--bursts", type=json.loads, help="list of [start, stop, target] (source)")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    peers = {int(rank): parse_address(address) for rank, _, address in (peer.partition("=") for peer in chosen.peers)}
    endpoint = None
    if chosen.over == "udp":
        options = TransportOptions(tagged=False, congestion="cubic", flow_weight=1.0)
        sock = bind_socket(chosen.bind[0], [chosen.bind[1]])
        endpoint = Endpoint(chosen.rank, sock, peers, token=_TOKEN, options=options)
    counts: Counter[int] = Counter()

    def count(size: int) -> None:
        counts[int(time.monotonic() / SAMPLE_S)] += size

    with contextlib.suppress(KeyboardInterrupt):
        if chosen.end == "source":
            bursts, stop = started([BackgroundBurst(*burst) for burst in chosen.bursts])
            if endpoint:
                udp_send(endpoint, bursts, stop)
            else:
                tcp_send(peers, bursts, stop)
        elif endpoint:
            udp_sink(endpoint, count)
        else:
            tcp_sink(chosen.bind, count)
    if chosen.log:
        chosen.log.write_text(json.dumps([[(slot + 1) * SAMPLE_S, size] for slot, size in sorted(counts.items())]))


if __name__ == "__main__":
    main()
