# SPDX-License-Identifier: Apache-2.0
"""Networks between the ranks of benchmarks: loopback, a veth pair, a router, a switch with long queues, or a fabric.

Every path but the plain loopback is made of network namespaces, which vanish with this process. TCP's congestion
control is chosen by address: each host has one for every control that is compared, and routes say which to use.
"""

import re
from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path as File
from typing import Final

from dlcp.host.closing import Closing
from dlcp.host.netlab import Namespace, NamespaceError, congestion_controls
from dlcp.switch import SwitchProcess

_CONGESTION_CONTROLS: Final = ("cubic", "bbr")
"""Congestion controls to measure TCP with, if the kernel has them: Linux's default, and the best under random loss."""
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
"""How long a full queue before a slow link takes to drain. at 1 Gbit/s, a switch's share of a few MB."""
LINK_BURST_BYTES: Final = 128 << 10
"""Bytes that a slow link may send at once: two of a kernel's bursts, because a limit of one would split it."""
DEPTH_MIN_PACKETS: Final = 8
"""The least that a buffer of a :class:`DelayedPath` holds: a host sends as many at once."""
FRAME_BYTES: Final = 1514
PAYLOAD_BYTES: Final = 1440
"""Of a frame, in DLCP's packets: the share of the rate is that of the frames that these need."""
_SWITCH_MAC: Final = "02:00:00:00:00:fe"
SPINES: Final = 4
SLOW_SHARE: Final = 0.1
"""The slow spine's rate relative to the others'."""
LOSSY_SHARE: Final = 0.05
"""The share of packets that the lossy spine loses."""
_SPINE_BURST_BYTES: Final = 16 << 10
"""Bytes that a spine's link may send at once: a few packets, or it would not be a slow link."""

# Classic BPF: load a random word, drop (2, TC_ACT_SHOT) if it is below a threshold, else pass (0, TC_ACT_OK).
DROP_AT_RANDOM: Final = "4,32 0 0 4294963256,53 1 0 {threshold},6 0 0 2,6 0 0 0"


class BenchPath(Closing):
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

    def close(self) -> None:
        """Take the path down."""
        self._stack.close()

    @property
    def words(self) -> str:
        """The path's description."""
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


class BenchHosts(BenchPath):
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
        """The path's description."""
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
            raise ValueError("random loss drops whole bursts where there are offloads; disable one of the two")
        self.loss, self.rate_bps, self.slowest_bps, self.offloads = loss, rate_bps, slowest_bps, offloads
        super().__init__(ranks, mtu_bytes)

    @property
    def words(self) -> str:
        """The path's description."""
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
    bystander
        Whether there is one more host, which is no rank's: the last of :attr:`hosts`.
    """

    def __init__(
        self,
        rate_bps: int,
        rtt_s: float,
        buffer: float,
        ranks: int = 2,
        loss: float = 0.0,
        *,
        bystander: bool = False,
    ) -> None:
        if not 0 <= loss < 1:
            raise ValueError(f"loss must lie in [0, 1), got {loss}")
        self.rate_bps, self.rtt_s, self.loss = rate_bps, rtt_s, loss
        self.depth_packets = max(DEPTH_MIN_PACKETS, round(buffer * rate_bps * rtt_s / 8 / FRAME_BYTES))
        super().__init__(ranks + bystander, 1500)
        del self.namespaces[ranks:]

    @property
    def words(self) -> str:
        """The path's description."""
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


class SpineFabric(BenchHosts):
    """Two hosts, each with a link to each of four spines; offloads are off.

    Parameters
    ----------
    rate_bps
        Of every link from a spine to a host, behind a queue that takes :data:`QUEUE_S` to drain.
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
        """A description of the fabric."""
        odd = (f", one of {SLOW_SHARE:.0%} of that" if self.slow else "") + (
            f", one with {LOSSY_SHARE:.0%} random loss" if self.lossy else ""
        )
        return f"ECMP over {SPINES} spines of {self.rate_bps / 1e6:g} Mbit/s{odd}"

    @property
    def allowed_bps(self) -> float:
        """The rate of the good spines together, in bit/s of messages."""
        return self.rate_bps * (SPINES - (self.slow or self.lossy)) * PAYLOAD_BYTES / FRAME_BYTES

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
        limit = round(self.rate_bps * QUEUE_S / 8) + _SPINE_BURST_BYTES
        spine.limit_rate(port, rate_bps, burst_bytes=_SPINE_BURST_BYTES, limit_bytes=limit)


def _received_packets() -> int:
    lines = File("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    return sum(int(line.split(":")[1].split()[1]) for line in lines if line.strip().startswith("port"))


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
