# SPDX-License-Identifier: Apache-2.0
"""What lies between the ranks of a benchmark: loopback, a veth pair, or a router that loses packets at random.

Every path but the plain loopback is made of network namespaces, which vanish with this process. TCP's congestion
control is chosen by address: each host has one for every control that is compared, and routes say which to use.
"""

import random
import re
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path as File
from types import TracebackType
from typing import Final

from dlcp.netlab import Namespace, NamespaceError, congestion_controls

_CONGESTION_CONTROLS: Final = ("cubic", "bbr")
"""What TCP is measured with where the kernel has it: Linux's default, and the one that bears random loss best."""
_TCP_SETTINGS: Final = {
    "tcp_rmem": "4096 1048576 33554432",
    "tcp_wmem": "4096 1048576 33554432",
    "tcp_slow_start_after_idle": "0",
}
"""TCP at its best: large buffers, and no start from a small window after the pause between two runs."""
_TCP_ADDRESS: Final = 10
"""The last byte of the first address for TCP; that for DLCP is ``_OWN_ADDRESS``."""
_OWN_ADDRESS: Final = 2
QUEUE_S: Final = 0.01
"""How long a full queue before a slow link takes to drain. Chosen by us: at 1 Gbit/s, a switch's share of a few MB."""
LINK_BURST_BYTES: Final = 128 << 10
"""What a slow link may send at once. Chosen by us: two of a kernel's bursts, for one is taken apart if it is all."""

_OUTAGE_S: Final = (0.005, 0.05)
"""The shortest and the longest time that a link is gone."""
_OUTAGES_PER_S: Final = 1.0

# Classic BPF: load a random word, drop (2, TC_ACT_SHOT) if it is below a threshold, else pass (0, TC_ACT_OK).
DROP_AT_RANDOM: Final = "4,32 0 0 4294963256,53 1 0 {threshold},6 0 0 2,6 0 0 0"
_DROP_ALL: Final = "1,6 0 0 2"


class BenchPath:
    """The machine's own loopback: needs no privilege, and takes TCP's congestion control as it is.

    Parameters
    ----------
    ranks
        How many hosts it joins.
    """

    interface = "lo"
    """The interface that a rank's addresses are on."""

    def __init__(self, ranks: int) -> None:
        self.controls: tuple[str, ...] = (_current_control(),)
        self.namespaces: list[str | None] = [None] * ranks
        self._stack = ExitStack()

    def __enter__(self) -> "BenchPath":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def words(self) -> str:
        """What the path is, in words."""
        return "loopback"

    def address(self, rank: int) -> str:
        """Return where DLCP reaches a rank."""
        return "127.0.0.1"

    def tcp_address(self, rank: int, control: str) -> str:
        """Return where TCP reaches a rank, with a congestion control of :attr:`controls`."""
        return "127.0.0.1"

    def dropped(self) -> tuple[int, int]:
        """Return how many packets have come through, and how many of them were lost on purpose."""
        return 0, 0

    def _namespace(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._stack.callback(namespace.close)
        for setting, value in _TCP_SETTINGS.items():
            namespace.sysctl(f"net/ipv4/{setting}", value)
        return namespace


class NamespaceLoopback(BenchPath):
    """The loopback of a namespace of its own, where TCP's congestion control can be chosen."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.controls = known_controls()
        try:
            self.namespace = namespace = self._namespace("loopback")
            # TCP that does not choose gets the first control, too.
            default = f"dev lo table local proto kernel scope host src 127.0.0.1 congctl {self.controls[0]}"
            namespace.ip(f"route replace local 127.0.0.0/8 {default}", f"route replace local 127.0.0.1 {default}")
            for control in self.controls:
                address = self.tcp_address(0, control)
                chosen = f"dev lo table local proto kernel scope host src {address} congctl {control}"
                namespace.ip(f"addr add {address}/32 dev lo", f"route replace local {address} {chosen}")
        except BaseException:
            self._stack.close()
            raise
        self.namespaces = [namespace.path] * ranks

    def tcp_address(self, rank: int, control: str) -> str:
        """Return the address of a congestion control; all ranks are on one host."""
        return f"127.0.0.{_TCP_ADDRESS + self.controls.index(control)}"


class BenchHosts(BenchPath, ABC):
    """Hosts with namespaces of their own: rank k has 10.0.k.2 for DLCP, and 10.0.k.10 and up for TCP."""

    interface = "eth0"

    def __init__(self, ranks: int, mtu_bytes: int) -> None:
        super().__init__(ranks)
        self.controls = known_controls()
        self.mtu_bytes = mtu_bytes
        self.hosts: list[Namespace] = []
        try:
            self.hosts = [self._namespace(f"host {rank}") for rank in range(ranks)]
            self._link()
        except BaseException:
            self._stack.close()
            raise
        self.namespaces = [host.path for host in self.hosts]

    def address(self, rank: int) -> str:
        """Return a host's address for DLCP."""
        return f"10.0.{rank}.{_OWN_ADDRESS}"

    def tcp_address(self, rank: int, control: str) -> str:
        """Return a host's address for TCP with a congestion control."""
        return f"10.0.{rank}.{_TCP_ADDRESS + self.controls.index(control)}"

    @abstractmethod
    def _link(self) -> None:
        """Join the hosts."""

    def _addresses(self, rank: int) -> list[str]:
        """Return the commands that give a host its addresses and bring its link up."""
        everyone = [self.address(rank), *(self.tcp_address(rank, control) for control in self.controls)]
        return [*(f"addr add {address}/32 dev eth0" for address in everyone), "link set eth0 up"]

    def _routes(self, rank: int, peer: int, way: str) -> list[str]:
        """Return the commands that lead from a host to another, for TCP with the control of each address."""
        # TCP that does not choose gets the first control, too.
        own = f"route add {self.address(peer)} {way} src {self.address(rank)} congctl {self.controls[0]}"
        controlled = [
            f"route add {self.tcp_address(peer, control)} {way} src {self.tcp_address(rank, control)} congctl {control}"
            for control in self.controls
        ]
        return [own, *controlled]


class VethPair(BenchHosts):
    """Two hosts joined by a veth pair, with the kernel's offloads."""

    def __init__(self, mtu_bytes: int = 1500) -> None:
        super().__init__(2, mtu_bytes)

    @property
    def words(self) -> str:
        """What the path is, in words."""
        return f"veth pair, MTU {self.mtu_bytes}"

    def _link(self) -> None:
        first, second = self.hosts
        first.link("eth0", second, "eth0", mtu_bytes=self.mtu_bytes, offloads=True)
        for rank, host in enumerate(self.hosts):
            host.ip(*self._addresses(rank), *self._routes(rank, 1 - rank, "dev eth0"))


class RoutedPath(BenchHosts):
    """Hosts around a router that may lose packets at random.

    Parameters
    ----------
    ranks
        Number of hosts.
    loss
        The probability that the router loses a packet, in either direction, 0 to 1.
    mtu_bytes
        Of every link.
    rate_bps
        Of every link from the router to a host, behind a queue of :data:`QUEUE_S`; None: as fast as the machine.
    slowest_bps
        Of the link to the last host; None: as the others.
    offloads
        Whether links segment and gather packets, as the interfaces of real hosts do. Without, each packet costs the
        machine's processors what it does not cost a host's; but then each loss is one packet's.

    Attributes
    ----------
    router
        The namespace of the router, whose end of the link to host k is ``port<k>``.
    """

    def __init__(
        self,
        ranks: int,
        loss: float = 0.0,
        mtu_bytes: int = 1500,
        rate_bps: int | None = None,
        *,
        slowest_bps: int | None = None,
        offloads: bool = False,
    ) -> None:
        if not 0 <= loss < 1:
            raise ValueError(f"loss must lie in [0, 1), got {loss}")
        if loss and offloads:
            raise ValueError("with offloads, a burst would be lost whole: leave out either")
        self.loss, self.rate_bps, self.slowest_bps, self.offloads = loss, rate_bps, slowest_bps, offloads
        super().__init__(ranks, mtu_bytes)

    @property
    def words(self) -> str:
        """What the path is, in words."""
        links = f"links of {self.rate_bps / 1e6:g} Mbit/s" if self.rate_bps else "fast links"
        if self.slowest_bps:
            links += f", one of {self.slowest_bps / 1e6:g},"
        offloads = "on" if self.offloads else "off"
        return f"router with {links} and {self.loss:.1%} random loss, MTU {self.mtu_bytes}, offloads {offloads}"

    def dropped(self) -> tuple[int, int]:
        """Return how many packets have reached the router, and how many of them it has lost."""
        return drops_at_random(self.router)

    def _link(self) -> None:
        self.router = self._namespace("router")
        self.router.sysctl("net/ipv4/ip_forward", "1")
        for rank, host in enumerate(self.hosts):
            port, gateway = f"port{rank}", f"10.0.{rank}.1"
            self.router.link(port, host, "eth0", mtu_bytes=self.mtu_bytes, offloads=self.offloads)
            self.router.ip(f"addr add {gateway}/24 dev {port}")
            way = f"via {gateway} dev eth0"
            others = [peer for peer in range(len(self.hosts)) if peer != rank]
            host.ip(
                *self._addresses(rank),
                f"route add {gateway} dev eth0",
                *(command for peer in others for command in self._routes(rank, peer, way)),
            )
            drop_at_random(self.router, port, self.loss)
            is_last = rank == len(self.hosts) - 1
            rate_bps = self.slowest_bps if is_last and self.slowest_bps else self.rate_bps
            if rate_bps:
                waiting = round(rate_bps * QUEUE_S / 8)
                self.router.limit_rate(
                    port, rate_bps, burst_bytes=LINK_BURST_BYTES, limit_bytes=waiting + LINK_BURST_BYTES
                )


class LinkOutages:
    """Lets the links of a path be gone for 5 to 50 ms, one of them about once a second, while it is entered.

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


def drop_at_random(namespace: Namespace, interface: str, loss: float) -> None:
    """Lose packets that arrive at an interface with a probability from 0 to 1."""
    program = DROP_AT_RANDOM.format(threshold=min(round(loss * 2**32), 2**32 - 1))
    namespace.tc("qdisc", "add", "dev", interface, "clsact")
    # IPv4 only, so that neighbours find each other at once.
    namespace.tc("filter", "add", "dev", interface, "ingress", "protocol", "ip", "bpf", "da", "bytecode", program)


def drops_at_random(namespace: Namespace) -> tuple[int, int]:
    """Return how many packets have reached such interfaces of a namespace, and how many of them were lost."""
    shown = namespace.run(["tc", "-s", "qdisc", "show"], capture_output=True, text=True).stdout
    counts = re.findall(r"clsact.*\n *Sent \d+ bytes (\d+) pkt \(dropped (\d+)", shown)
    passed, lost = (sum(int(count[column]) for count in counts) for column in (0, 1))
    return passed, lost


def loopback(ranks: int) -> BenchPath:
    """Return a loopback whose TCP can be chosen, or where namespaces are refused this machine's own."""
    try:
        return NamespaceLoopback(ranks)
    except (NamespaceError, OSError):
        return BenchPath(ranks)


def known_controls() -> tuple[str, ...]:
    """Return which of :data:`_CONGESTION_CONTROLS` this kernel has."""
    known = congestion_controls()
    return tuple(control for control in _CONGESTION_CONTROLS if control in known)


def _current_control() -> str:
    try:
        return File("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return "default"
