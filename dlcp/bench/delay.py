# SPDX-License-Identifier: Apache-2.0
"""All-reduce over long paths and through deep or shallow buffers: DLCP's against Gloo's, alone and beside others.

Hosts are joined by the built-in switch, whose ports have a rate, a delay and one queue for all traffic: tags and
marks count for nothing, as in a wide-area network. Beside means that in each direction two endless flows of CUBIC
share that queue, so that a fair share is a third of the rate. DLCP runs with bound 0: what moves is known then.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from dlcp.bench import allreduce
from dlcp.bench.allreduce import LOSSLESS, contenders
from dlcp.bench.path import BenchHosts, drop_at_random, drops_at_random
from dlcp.bench.ranks import Ranks
from dlcp.bench.results import BenchResult, Samples, against_best, median, result, significant
from dlcp.netlab import Namespace
from dlcp.switch import SwitchProcess

RIVALS: Final = 2
"""Flows of CUBIC in each direction."""
RIVAL_CONTROL: Final = "cubic"
DEPTH_MIN_PACKETS: Final = 8
"""What any buffer holds: a host sends as many at once. Chosen by us."""
_FRAME_BYTES: Final = 1514
_PAYLOAD_BYTES: Final = 1440
"""Of it, in DLCP's packets: the share of the rate is that of the frames that these need."""
_VALUE_BYTES: Final = 4
_SETTLE_S: Final = 3.0
_SETTLE_ROUNDS: Final = 50
"""How long rivals have the path to themselves, at least and in round trips of the idle path, to find their windows."""
_MEET_S: Final = 20.0
_CHUNK: Final = bytes(1 << 16)
_SWITCH_MAC: Final = "02:00:00:00:00:fe"


class DelayedPath(BenchHosts):
    """Hosts at the built-in switch, with a FIFO queue and half the delay in each direction.

    Parameters
    ----------
    rate_bps, rtt_s
        Of every port, and of the idle path.
    buffer
        What a port's queue holds, in bandwidth-delay products.
    ranks
        Number of hosts.
    loss
        The probability that a packet is lost at random on its way to a host, 0 to 1.
    """

    def __init__(self, rate_bps: int, rtt_s: float, buffer: float, ranks: int = 2, loss: float = 0.0) -> None:
        if not 0 <= loss < 1:
            raise ValueError(f"loss must lie in [0, 1), got {loss}")
        self.rate_bps, self.rtt_s, self.loss = rate_bps, rtt_s, loss
        self.depth_packets = max(DEPTH_MIN_PACKETS, round(buffer * rate_bps * rtt_s / 8 / _FRAME_BYTES))
        super().__init__(ranks, 1500)

    @property
    def words(self) -> str:
        """What the path is, in words."""
        rate, rtt = self.rate_bps / 1e6, self.rtt_s * 1e3
        lost = f", {self.loss:.1%} random loss" if self.loss else ""
        return f"switch with {rate:g} Mbit/s, round trip {rtt:g} ms, queue of {self.depth_packets} packets{lost}"

    def busy(self) -> float:
        """Return the share of its time that the switch computed, which must not be what bounds the rate."""
        return float(self._process.snapshot()["busy"])

    def dropped(self) -> tuple[int, int]:
        """Return how many packets have left the switch, and how many were lost at random; not what a queue drops."""
        ports = self._process.snapshot()["ports"]
        passed = sum(queue["transmitted"] for port in ports for queue in port["queues"])
        return passed, sum(drops_at_random(host)[1] for host in self.hosts) if self.loss else 0

    def _link(self) -> None:
        switch = Namespace("switch")
        self._stack.callback(switch.close)
        members, entries = [], []
        for rank, host in enumerate(self.hosts):
            port, mac = f"port{rank}", f"02:00:00:00:00:{rank + 1:02x}"
            switch.link(port, host, "eth0", peer_mac=mac)
            others = [peer for peer in range(len(self.hosts)) if peer != rank]
            everyone = [self.address(peer) for peer in others]
            everyone += [self.tcp_address(peer, name) for peer in others for name in self.controls]
            host.ip(
                *self._addresses(rank),
                *(command for peer in others for command in self._routes(rank, peer, "dev eth0")),
                *(f"neigh add {address} lladdr {_SWITCH_MAC} dev eth0 nud permanent" for address in everyone),
            )
            if self.loss:
                # At the hosts: the switch's packet sockets see packets before a filter of its ports would.
                drop_at_random(host, "eth0", self.loss)
            members.append({"id": rank + 1, "action": "to_next_hop", "params": {"port": rank + 1, "mac": mac}})
            entries.append({"table": "ipv4_route", "match": {"ipv4_dst": f"10.0.{rank}.0/24"}, "group": rank + 1})
        groups = [{"id": member["id"], "members": [member["id"]]} for member in members]
        queueing = {"rate_bps": self.rate_bps, "depth_packets": self.depth_packets, "delay_s": self.rtt_s / 2}
        document = {
            "profiles": [{"profile": "route_selector", "members": members, "groups": groups}],
            "entries": entries,
            "ports": {str(rank + 1): queueing for rank in range(len(self.hosts))},
        }
        ports = [f"--port={rank + 1}=packet:port{rank}" for rank in range(len(self.hosts))]
        self._process = self._stack.enter_context(
            SwitchProcess(ports, namespace=switch, documents={"--entries": document})
        )


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


def measure(
    *,
    rtts_s: Sequence[float],
    buffers: Sequence[float],
    rate_bps: int,
    seconds: float,
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None],
    suffix: str = "",
    budget_s: float | None = None,
) -> list[BenchResult]:
    """Measure every setting, each with a switch of its own.

    Parameters
    ----------
    rtts_s, buffers, rate_bps
        See :class:`DelayedPath`.
    seconds
        How long an all-reduce alone would take at that rate.
    rounds, warm_up, progress, budget_s
        See :func:`dlcp.bench.results.interleave`; half the budget is for each of the two.
    suffix
        Follows the setting in names.

    Returns
    -------
    ``delay.rttN.bufferB``: ms of an all-reduce beside the better of Gloo's two; ``delay.rttN.bufferB.beside``: DLCP's
    share of the rate beside rivals, in fair shares, and Gloo's over CUBIC.
    """
    results = []
    values = int(1e6 * megabytes_in(seconds, rate_bps)) // _VALUE_BYTES
    half_s = None if budget_s is None else budget_s / 2
    for rtt_s in rtts_s:
        for buffer in buffers:
            name = f"delay.rtt{rtt_s * 1e3:g}.buffer{buffer:g}{suffix}"
            path = DelayedPath(rate_bps, rtt_s, buffer)
            with path:
                progress(f"{name}: {path.words}")
                ways = [way for way in contenders(path.controls) if way.name == LOSSLESS or way.control]
                ways = [way for way in ways if way.buckets == 1]
                peers = [way.name for way in ways if way.control]
                found = allreduce.measure(
                    path,
                    values=values,
                    ways=ways,
                    rounds=rounds,
                    warm_up=warm_up,
                    progress=progress,
                    budget_s=half_s,
                )
                used = 1e3 * seconds / median(found.samples[LOSSLESS])
                details = {"path": path.words, "rate_share": significant(used), "switch_busy": significant(path.busy())}
                results.append(against_best(name, "ms", found.samples, LOSSLESS, peers, details))
                cubic = [way for way in ways if way.control in (None, RIVAL_CONTROL)]
                results.append(_beside(name, path, values, seconds, cubic, rounds, warm_up, progress, half_s))
    return results


def megabytes_in(seconds: float, rate_bps: int) -> float:
    """Return the MB of values that DLCP's packets carry through a port in a given time."""
    return seconds * rate_bps / 8e6 * _PAYLOAD_BYTES / _FRAME_BYTES


def seconds_for(megabytes: float, rate_bps: int) -> float:
    """Return the time that a port takes for a given size of values in DLCP's packets."""
    return megabytes / megabytes_in(1.0, rate_bps)


def _beside(
    name: str,
    path: DelayedPath,
    values: int,
    seconds: float,
    ways: Sequence[allreduce.AllReduceContender],
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None],
    budget_s: float | None,
) -> BenchResult:
    """Measure DLCP's share beside endless flows, and Gloo's."""
    addresses = [path.tcp_address(rank, RIVAL_CONTROL) for rank in range(2)]
    with ExitStack() as stack:
        rivals = stack.enter_context(Ranks(Rival, [addresses], path.namespaces))
        rivals.call("start", rivals.call("where"))
        time.sleep(max(_SETTLE_S, _SETTLE_ROUNDS * path.rtt_s))
        before = rivals.call("received")
        found = allreduce.measure(
            path, values=values, ways=ways, rounds=rounds, warm_up=warm_up, progress=progress, budget_s=budget_s
        )
        after = rivals.call("received")
    shares: Samples = {
        way.name: [(1 + RIVALS) * 1e3 * seconds / took_ms for took_ms in found.samples[way.name]] for way in ways
    }
    theirs = [(now - then) * 8 / (now_s - then_s) for (then, then_s), (now, now_s) in zip(before, after, strict=True)]
    peer = next(way.name for way in ways if way.control)
    details = {
        "path": path.words,
        "peer": peer,
        "rivals_mbps": [significant(rate / 1e6) for rate in theirs],
        "switch_busy": significant(path.busy()),
    }
    return result(
        f"{name}.beside", "fair shares", shares[LOSSLESS], shares[peer], smaller_is_better=False, details=details
    )
