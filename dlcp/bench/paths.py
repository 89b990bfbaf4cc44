# SPDX-License-Identifier: Apache-2.0
"""All-reduce between two hosts with four equal routes, of which one may be slow or lossy, against Gloo's, in turns.

The hosts choose among four spines by addresses and ports, as an ECMP fabric does (``fib_multipath_hash_policy=1``). TCP
has one route for a connection, whichever its ports lead to; DLCP sends from several ports. So that neither is judged by
one draw of ports, the ranks are started several times.
"""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path as File
from typing import Final

from dlcp.bench import allreduce
from dlcp.bench.path import QUEUE_S, BenchHosts, drop_at_random
from dlcp.bench.results import BenchResult, Samples, against_best, median, significant
from dlcp.netlab import Namespace

SPINES: Final = 4
SLOW_SHARE: Final = 0.1
"""What the slow spine has of the others' rate."""
LOSSY_SHARE: Final = 0.05
"""What the lossy spine loses."""
_FRAME_SHARE: Final = 1514 / 1440
"""Bytes on the wire for each of a message, at an MTU of 1500."""
_SHAPER_BURST_BYTES: Final = 16 << 10
"""What a link may send at once. Chosen by us: a few packets, or it would be no slow link."""
_SAMPLED_S: Final = 0.05
_WATCHED_S: Final = 0.5
"""For how long a spine must have carried under a quarter of its share before it counts as left."""
_FEWER: Final = 4
_WATCHED_RUNS: Final = 4
_VALUE_BYTES: Final = 4


class SpineFabric(BenchHosts):
    """Two hosts, each with a link to each of four spines; offloads are off.

    Parameters
    ----------
    rate_bps
        Of every link from a spine to a host, behind a queue that takes :data:`dlcp.bench.path.QUEUE_S` to drain.
    slow, lossy
        Whether the last spine has :data:`SLOW_SHARE` of that rate behind as large a queue; whether it loses
        :data:`LOSSY_SHARE` of all packets.
    """

    interface = "lo"

    def __init__(self, rate_bps: int, *, slow: bool = False, lossy: bool = False) -> None:
        self.rate_bps, self.slow, self.lossy = rate_bps, slow, lossy
        self.spines: list[Namespace] = []
        super().__init__(2, 1500)

    @property
    def words(self) -> str:
        """What the fabric is, in words."""
        odd = (f", one of {SLOW_SHARE:.0%} of that" if self.slow else "") + (
            f", one with {LOSSY_SHARE:.0%} random loss" if self.lossy else ""
        )
        return f"ECMP over {SPINES} spines of {self.rate_bps / 1e6:g} Mbit/s{odd}"

    @property
    def allowed_bps(self) -> float:
        """What the good spines carry together, in bit/s of messages."""
        return self.rate_bps * (SPINES - (self.slow or self.lossy)) / _FRAME_SHARE

    def carried(self) -> list[int]:
        """Return how many packets each spine has received so far."""
        return [spine.call(_received_packets) for spine in self.spines]

    def _link(self) -> None:
        for rank, host in enumerate(self.hosts):
            host.sysctl("net/ipv4/fib_multipath_hash_policy", "1")
            everyone = [self.address(rank), *(self.tcp_address(rank, control) for control in self.controls)]
            host.ip(*(f"addr add {address}/32 dev lo" for address in everyone))
        self.spines = [self._namespace(f"spine {number}") for number in range(SPINES)]
        for number, spine in enumerate(self.spines):
            spine.sysctl("net/ipv4/ip_forward", "1")
            for rank, host in enumerate(self.hosts):
                self._join(spine, number, rank, host)
        for rank, host in enumerate(self.hosts):
            ways = " ".join(f"nexthop via 10.8.{number}.1 dev up{number} onlink" for number in range(SPINES))
            # Metrics stand before the first hop.
            host.ip(*(self._spread(command, ways) for command in self._routes(rank, 1 - rank, "WAYS")))

    @staticmethod
    def _spread(command: str, ways: str) -> str:
        return f"{command.replace(' WAYS', '')} {ways}"

    def _join(self, spine: Namespace, number: int, rank: int, host: Namespace) -> None:
        port, up = f"port{rank}", f"up{number}"
        spine.link(port, host, up)
        host.ip(f"link set {up} up")
        spine.ip(f"addr add 10.8.{number}.1/32 dev {port}", f"route add 10.0.{rank}.0/24 dev {port}")
        odd = number == SPINES - 1
        if odd and self.lossy:
            drop_at_random(spine, port, LOSSY_SHARE)
        rate_bps = round(self.rate_bps * (SLOW_SHARE if odd and self.slow else 1))
        limit = round(self.rate_bps * QUEUE_S / 8) + _SHAPER_BURST_BYTES
        spine.limit_rate(port, rate_bps, burst_bytes=_SHAPER_BURST_BYTES, limit_bytes=limit)


class _Watch:
    """Notes, in a thread, how many packets each spine has carried; a context manager."""

    def __init__(self, fabric: SpineFabric) -> None:
        self._fabric = fabric
        self.noted: list[tuple[float, list[int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True)

    def __enter__(self) -> "_Watch":
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


def measure(
    *,
    rate_mbps: float = 50.0,
    megabytes: float = 12.0,
    draws: int = 3,
    rounds: int = 3,
    warm_up: int = 2,
    progress: Callable[[str], None] | None = None,
) -> list[BenchResult]:
    """Return ``paths.equal``, ``paths.slow`` and ``paths.lossy``, times in ms, and ``paths.lossy.left`` in seconds.

    Details say how many times longer each took than the good spines together allow, and the worst such draw.

    Parameters
    ----------
    rate_mbps, megabytes
        Of every link, and of float32 in the buffer.
    draws
        How often the ranks are started, each time at other ports.
    rounds, warm_up, progress
        Of each draw; see :func:`dlcp.bench.results.interleave`.
    """
    results = []
    for name, odd in (("equal", {}), ("slow", {"slow": True}), ("lossy", {"lossy": True})):
        fabric = SpineFabric(round(rate_mbps * 1e6), **odd)
        with fabric:
            if progress:
                progress(f"paths.{name}: {fabric.words}, {megabytes:g} MB, times in ms")
            results += _measure_fabric(fabric, f"paths.{name}", megabytes, draws, rounds, warm_up, progress)
    return results


def _measure_fabric(
    fabric: SpineFabric,
    name: str,
    megabytes: float,
    draws: int,
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None] | None,
) -> list[BenchResult]:
    values = int(megabytes * 1e6) // _VALUE_BYTES
    allowed_ms = 1e3 * megabytes * 1e6 * 8 / fabric.allowed_bps
    samples: Samples = {}
    worst = 0.0
    left: list[float | None] = []
    watched_s = 0.0
    peers: list[str] = []
    for draw in range(draws):
        found = allreduce.measure(
            fabric, values=values, rounds=rounds, warm_up=warm_up, seed=draw + 1, progress=progress
        )
        peers = [contender.name for contender in found.contenders if contender.control]
        for contender, times in found.samples.items():
            samples.setdefault(contender, []).extend(times)
        worst = max(worst, median(found.samples[allreduce.LOSSLESS]) / allowed_ms)
        if fabric.lossy:
            reliable = [each for each in found.contenders if each.name == allreduce.LOSSLESS]
            with _Watch(fabric) as watch:
                allreduce.measure(fabric, values=values, ways=reliable, rounds=_WATCHED_RUNS, warm_up=0)
            left.append(left_after_s(watch.noted))
            watched_s = max(watched_s, watch.noted[-1][0] - watch.noted[0][0])
    results = []
    for suffix, ours in (("", allreduce.LOSSY), (".reliable", allreduce.LOSSLESS), (".buckets", allreduce.DIVIDED)):
        middle = median(samples[ours])
        details = {
            "path": fabric.words,
            "allowed_ms": significant(allowed_ms),
            "over_allowed": significant(middle / allowed_ms),
        }
        if ours == allreduce.LOSSLESS:
            details["over_allowed_in_worst_draw"] = significant(worst)
        results.append(against_best(name + suffix, "ms", samples, ours, peers, details))
    if left:
        # A spine that was never left was used for as long as anybody looked.
        slowest_s = max(watched_s if each is None else each for each in left)
        details = {
            "left_in_every_draw": None not in left,
            "draws_s": [None if each is None else significant(each) for each in left],
        }
        results.append(BenchResult(f"{name}.left", slowest_s, "s", None, None, len(left), 0.0, details))
    return results


def _received_packets() -> int:
    lines = File("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    return sum(int(line.split(":")[1].split()[1]) for line in lines if line.strip().startswith("port"))
