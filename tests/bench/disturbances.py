# SPDX-License-Identifier: Apache-2.0
"""Disturbances and monitors of an all-reduce on its path: links that fail, bursts, endless flows of TCP."""

import contextlib
import random
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from dlcp.host.closing import Closing
from dlcp.host.netlab import Namespace
from dlcp.host.processes import Fork
from tests.bench.paths import FRAME_BYTES, SPINES, DelayedPath, RoutedPath, SpineFabric

_OUTAGE_S: Final = (0.005, 0.05)
"""The shortest and the longest time that a link is gone."""
_OUTAGES_PER_S: Final = 1.0
_DROP_ALL: Final = "1,6 0 0 2"
_BURSTS_PER_S: Final = 5.0
"""Into each port; more than 1 % of small all-reduces then meet one, which the 99th percentile needs."""
_OVERLOAD: Final = 2
"""How many times the rate of the port: as when two hosts send at once, so that a queue grows while a burst lasts."""
_DATAGRAM: Final = bytes(1472)
_TURN_S: Final = 0.001
"""Datagrams of this duration leave together: a tenth of a port's queue."""
_PORT: Final = 9
RIVALS: Final = 2
"""Flows of CUBIC in each direction."""
_MEET_S: Final = 20.0
_CHUNK: Final = bytes(1 << 16)
_SAMPLED_S: Final = 0.05
_WATCHED_S: Final = 0.5
"""For how long a spine must have carried under a quarter of its share before it counts as left."""
_FEWER: Final = 4


class LinkOutages:
    """Makes links of a path fail for 5 to 50 ms, one of them about once a second, while it is entered.

    Packets vanish in both directions, as where a cable or a switch's port fails and hosts do not see it.

    Parameters
    ----------
    path
        Whose router loses the packets.
    seed
        Of times, lengths and links.
    """

    def __init__(self, path: RoutedPath, seed: int) -> None:
        self._path, self._seed = path, seed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds = 0.0
        """For how long links were gone so far."""

    def __enter__(self) -> "LinkOutages":
        # One process for all commands: to start one would take as long as a short outage.
        self._tc: subprocess.Popen[str] = self._path.router.popen(
            ["tc", "-batch", "-"], stdin=subprocess.PIPE, text=True, bufsize=1
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._tc.communicate()

    def _run(self) -> None:
        draw = random.Random(self._seed)
        while not self._over.wait(draw.uniform(0.5, 1.5) / _OUTAGES_PER_S):
            rank, length_s = draw.randrange(len(self._path.hosts)), draw.uniform(*_OUTAGE_S)
            began_s = time.monotonic()
            self._command(rank, "add", f"protocol ip bpf da bytecode '{_DROP_ALL}'")
            self._over.wait(length_s)
            self._command(rank, "del", "")
            self.seconds += time.monotonic() - began_s

    def _command(self, rank: int, what: str, program: str) -> None:
        assert self._tc.stdin
        for way in ("ingress", "egress"):
            self._tc.stdin.write(f"filter {what} dev port{rank} {way} pref 1 {program}\n")


class PortBurst(NamedTuple):
    """A burst into one rank's port, in seconds."""

    start_s: float
    stop_s: float
    rank: int


def bursts(ranks: int, length_s: float, seconds: float, seed: int) -> list[PortBurst]:
    """Return bursts in the order of their beginnings; lengths and pauses are distributed exponentially."""
    found = []
    for rank in range(ranks):
        # Text, so that neither neighbours nor lengths begin with the same numbers.
        draw = random.Random(f"{seed} {rank} {length_s}")
        now_s = draw.expovariate(_BURSTS_PER_S)
        while now_s < seconds:
            stop_s = now_s + draw.expovariate(1 / length_s)
            found.append(PortBurst(now_s, stop_s, rank))
            now_s = stop_s + draw.expovariate(_BURSTS_PER_S)
    return sorted(found)


class BackgroundBursts(Closing):
    """Bursts into the ports of a path while it is entered: a context manager.

    Parameters
    ----------
    path
        The ranks' hosts, and the rate of their ports.
    source
        The host that sends them.
    length_s
        Of a burst, in the mean; 0: there are none.
    seed
        Of lengths and pauses.
    """

    def __init__(self, path: RoutedPath | DelayedPath, source: Namespace, length_s: float, seed: int) -> None:
        self._path, self._source, self._length_s, self._seed = path, source, length_s, seed
        self._stack = ExitStack()

    def __enter__(self) -> "BackgroundBursts":
        if not self._length_s:
            return self
        addresses = [self._path.address(rank) for rank in range(len(self._path.namespaces))]
        for host, address in zip(self._path.hosts, addresses, strict=False):
            sink = self._stack.enter_context(host.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
            sink.bind((address, _PORT))  # nobody reads it: without it the host would answer each datagram
        arguments = (addresses, self._path.rate_bps, self._length_s, self._seed)
        fork = Fork("bursts", _send_bursts, arguments, namespace=self._source.path)
        self._stack.callback(fork.close)
        if not fork.channel.poll(_MEET_S):
            raise TimeoutError(f"bursts of other traffic did not begin within {_MEET_S:.0f} s")
        fork.channel.recv()
        return self

    def close(self) -> None:
        """End them."""
        self._stack.close()


def _send_bursts(channel: Connection, addresses: Sequence[str], rate_bps: int, length_s: float, seed: int) -> None:
    """Send bursts of an hour at most, until killed or the channel is closed."""
    channel.send("begun")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        began_s = time.monotonic()
        per_s = _OVERLOAD * rate_bps / 8 / FRAME_BYTES
        due = dict.fromkeys(range(len(addresses)), 0.0)
        on: list[PortBurst] = []  # each from where it has not been sent yet
        coming = iter(bursts(len(addresses), length_s, 3600.0, seed))
        following = next(coming, None)
        while not channel.poll(0) and (on or following):
            now_s = time.monotonic() - began_s
            while following and following.start_s <= now_s:
                on.append(following)
                following = next(coming, None)
            until_s = now_s + _TURN_S
            for burst in on:
                due[burst.rank] += per_s * (min(until_s, burst.stop_s) - burst.start_s)
                for _ in range(int(due[burst.rank])):
                    with contextlib.suppress(OSError):  # the port's queue is full
                        sock.sendto(_DATAGRAM, (addresses[burst.rank], _PORT))
                due[burst.rank] %= 1
            on = [burst._replace(start_s=until_s) for burst in on if burst.stop_s > until_s]
            if not on and following:
                until_s = following.start_s
            time.sleep(max(0.0, began_s + until_s - time.monotonic()))


class Rival:
    """A host's endless flows to the other one, in a process of their own."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self._rank, self._addresses = rank, addresses
        self._listener = socket.create_server((addresses[rank], 0))
        self._received = 0
        self._counting = threading.Lock()

    def where(self) -> int:
        """Return the port that the other one connects to."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self, ports: Sequence[int]) -> None:
        """Begin to send and to receive, until this process ends."""
        other = 1 - self._rank
        for _ in range(RIVALS):
            sock = socket.create_connection(
                (self._addresses[other], ports[other]), _MEET_S, (self._addresses[self._rank], 0)
            )
            sock.settimeout(None)
            threading.Thread(target=self._send, args=(sock,), daemon=True).start()
        for _ in range(RIVALS):
            sock, _ = self._listener.accept()
            threading.Thread(target=self._receive, args=(sock,), daemon=True).start()

    def received(self) -> tuple[int, float]:
        """Return how many bytes have come so far, and the time."""
        with self._counting:
            return self._received, time.monotonic()

    def _send(self, sock: socket.socket) -> None:
        while True:
            sock.sendall(_CHUNK)

    def _receive(self, sock: socket.socket) -> None:
        while chunk := sock.recv(1 << 16):
            with self._counting:
                self._received += len(chunk)


class SpineWatch:
    """Notes, in a thread, how many packets each spine has carried; a context manager."""

    def __init__(self, fabric: SpineFabric) -> None:
        self._fabric = fabric
        self.noted: list[tuple[float, list[int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True)

    def __enter__(self) -> "SpineWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _note(self) -> None:
        while not self._over.wait(_SAMPLED_S):
            self.noted.append((time.monotonic(), self._fabric.carried()))


def left_after_s(noted: list[tuple[float, list[int]]]) -> float | None:
    """Return how long the last spine carried a quarter of its share or more; None if it did to the end.

    Parameters
    ----------
    noted
        Times in seconds, and how many packets each spine had carried by then.
    """
    moving = [(now_s, counts) for (now_s, counts), (_, later) in pairwise(noted) if later != counts]
    for began_s, counts in moving:
        later = next(((s, more) for s, more in moving if s >= began_s + _WATCHED_S), None)
        if later is None:
            return None
        grown = [more - count for more, count in zip(later[1], counts, strict=True)]
        if grown[-1] * _FEWER * SPINES < sum(grown):
            return began_s - moving[0][0]
    return None
