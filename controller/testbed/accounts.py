# SPDX-License-Identifier: Apache-2.0
"""Packet counts of the switch program, the built-in switch's queues and the hosts' kernels, and whether they agree.

This module also measures whether a port sends at its rate, and whether the machine had idle time: without any, a
testbed measures the processors and not the network.
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.layout import HostLayout, Layout, StateFile
from dlcp.host.ip import UDP_BYTES, IpFamily, family_of
from dlcp.host.netlab import NamedNamespace
from dlcp.switch import QUEUES
from dlcp.switch.event_counters import SwitchAccount
from dlcp.switch.ports import ETHERNET_BYTES
from dlcp.wire import UDP_PORT_BASE, Header, PacketType, Queue

# --------------------------------------------------------------------------------------------------------------- counts


SETTLE_S: Final = 0.4
"""All packets have arrived once counters have not changed for this long. A full port drains faster: 64 packets of 1514
bytes in each of eight queues take 0.2 s at 32 Mbit/s."""
SETTLE_DEADLINE_S: Final = 15.0
COUNTERS_DEADLINE_S: Final = 15.0
_COUNTERS_POLL_S: Final = 0.02
RATE_WINDOW_S: Final = 1.0
"""Window over which a port's rate is measured: a burst of two frames is far below one percent of it."""


class NicCount(NamedTuple):
    """Frames that a host's interface has sent and received, and the bytes received."""

    sent: int
    received: int
    received_bytes: int

    def since(self, before: "NicCount") -> "NicCount":
        """Return the counts since ``before``."""
        return NicCount(*(count - earlier for count, earlier in zip(self, before, strict=True)))


@dataclass(frozen=True)
class Accounts:
    """The counts of a run.

    Parameters
    ----------
    switches
        The counters of each switch.
    nics
        By host.
    busiest_bps
        The highest rate at which each host received frames, over ``RATE_WINDOW_S``, in bit/s.
    restarts
        Number of switch restarts during the run, each of which resets the switch's counters.
    late_s
        Largest delay of a built-in switch's scheduler since it started, in seconds. The switch catches up: it sends at
        once the packets that were due meanwhile.
    idle
        The fraction of the machine's processor time that was idle.
    """

    switches: dict[str, SwitchAccount]
    nics: dict[str, NicCount]
    busiest_bps: dict[str, float]
    restarts: int
    late_s: float = 0.0
    idle: float = 1.0


def nic_counts(host: HostLayout) -> NicCount:
    """Return the kernel's counters of a host's interface."""
    # /proc/net shows the namespace of the process's main thread; /proc/thread-self/net that of this thread.
    text = NamedNamespace(host.namespace).call(lambda: Path("/proc/thread-self/net/dev").read_text(encoding="ascii"))
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == host.interface:
            values = [int(number) for number in numbers.split()]
            return NicCount(sent=values[9], received=values[1], received_bytes=values[0])
    raise TestbedError(
        f"host {host.name} has no interface {host.interface}; run `dlcp testbed down` and build the testbed again"
    )


def fresh_counters(files: StateFile, switch: str) -> dict[str, Any]:
    """Wait until a built-in switch next writes its own counters, and return these.

    Raises
    ------
    TestbedError
        It has not written them within ``COUNTERS_DEADLINE_S``.
    """
    path, asked_s = files.counters(switch), time.time()
    while not path.exists() or path.stat().st_mtime <= asked_s:
        if time.time() > asked_s + COUNTERS_DEADLINE_S:
            raise TestbedError(
                f"switch {switch} has not updated {path} for {COUNTERS_DEADLINE_S:g} s; check that it still runs"
            )
        time.sleep(_COUNTERS_POLL_S)
    counters: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return counters


def tail_drops(counters: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """Return the tail drops by port and queue, from the built-in switch's own counters."""
    return {
        (port["port"], queue["queue"]): queue["tail_drops"]
        for port in counters["ports"]
        for queue in port["queues"]
        if queue["tail_drops"]
    }


def settle(hosts: Iterable[HostLayout]) -> dict[str, NicCount]:
    """Wait until the hosts' counters stop changing, and return them by the name of the host.

    Raises
    ------
    TestbedError
        The hosts still receive packets after ``SETTLE_DEADLINE_S``.
    """
    deadline_s = time.monotonic() + SETTLE_DEADLINE_S
    chosen = list(hosts)
    before = {host.name: nic_counts(host) for host in chosen}
    while time.monotonic() < deadline_s:
        time.sleep(SETTLE_S)
        now = {host.name: nic_counts(host) for host in chosen}
        if now == before:
            return now
        before = now
    raise TestbedError(
        f"hosts still receive packets {SETTLE_DEADLINE_S:.0f} s after the run; stop what else sends in the testbed"
    )


class RateWatch:
    """Samples in a thread the rates at which hosts receive; a context manager."""

    def __init__(self, hosts: tuple[HostLayout, ...]) -> None:
        self._hosts = hosts
        self._busiest: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlcp-rates", daemon=True)

    def __enter__(self) -> "RateWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> dict[str, float]:
        """Stop sampling; return the highest rate of each host, in bit/s of whole frames."""
        self._stopped.set()
        self._thread.join()
        return {host.name: float(self._busiest[host.name]) for host in self._hosts}

    def _run(self) -> None:
        before = self._look()
        while not self._stopped.wait(RATE_WINDOW_S):
            now = self._look()
            for name, look in now.items():
                # Divide by the longest time between the samples: a busy machine may preempt this thread in one.
                rate = 8 * (look.octets - before[name].octets) / (look.ended_s - before[name].began_s)
                self._busiest[name] = max(self._busiest[name], round(rate))
            before = now

    def _look(self) -> dict[str, "_Look"]:
        return {host.name: _Look.at(host) for host in self._hosts}


class _Look(NamedTuple):
    """The bytes that a host had received at some moment between two times."""

    began_s: float
    ended_s: float
    octets: int

    @classmethod
    def at(cls, host: HostLayout) -> "_Look":
        began_s = time.monotonic()
        octets = nic_counts(host).received_bytes
        return cls(began_s, time.monotonic(), octets)


FRAME_BYTES: Final = 1_442
"""Length of the trial's frames, including the Ethernet header."""
OVERLOAD: Final = 1.5
"""Offered load of the trial, relative to the port's rate: enough to keep its queues filled."""
WARM_UP_S: Final = 0.3
MEASURED_S: Final = 1.0
_TICK_S: Final = 0.002


class PortRate(NamedTuple):
    """The rate that an overloaded port carried, in bit/s of whole frames."""

    queues: int
    asked_bps: int
    carried_bps: float


def port_rates(layout: Layout, mixes: Sequence[int] = (1, QUEUES)) -> list[PortRate]:
    """Overload the last host's port from the first host, and return the rate it carries.

    One trial runs for each number of queues in ``mixes``, over which its traffic is spread evenly. A port with a rate
    of its own carries the same in all trials.
    """
    return [_carried(layout, queues) for queues in mixes]


def _carried(layout: Layout, queues: int) -> PortRate:
    sender, receiver = layout.hosts[0], layout.hosts[-1]
    asked_bps = layout.port_of(receiver).queueing.rate_bps
    stopped = threading.Event()
    # Of drop class 0, which the policy never drops; in turn into the lowest queues.
    headers = (Header(PacketType.DATA, 0, queue, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0) for queue in range(queues))
    packets = cycle([padded(header, family_of(receiver.address)) for header in headers])
    to = (receiver.address, UDP_PORT_BASE)
    # Without a bound socket, the receiver would answer each packet with an ICMP error.
    with bound(receiver), bound(sender) as source, ThreadPoolExecutor(1, "dlcp-flood") as threads:
        flood = threads.submit(send_paced, source, to, packets, OVERLOAD * asked_bps, stopped)
        try:
            time.sleep(WARM_UP_S)
            began_s, before = time.monotonic(), nic_counts(receiver)
            time.sleep(MEASURED_S)
            ended_s, after = time.monotonic(), nic_counts(receiver)
        finally:
            stopped.set()
        flood.result()
    return PortRate(queues, asked_bps, 8 * after.since(before).received_bytes / (ended_s - began_s))


def bound(host: HostLayout, udp_port: int = UDP_PORT_BASE) -> socket.socket:
    """Return a UDP socket in a host's namespace, bound to its address; by default to the port that DLCP uses."""

    def open_socket() -> socket.socket:
        sock = family_of(host.address).udp_socket()
        sock.bind((host.address, udp_port))
        return sock

    return NamedNamespace(host.namespace).call(open_socket)


def send_paced(
    source: socket.socket, to: tuple[str, int], packets: Iterable[bytes], rate_bps: float, stopped: threading.Event
) -> None:
    """Send packets of ``FRAME_BYTES`` to an address and port at a rate in bit/s, until stopped.

    Raises
    ------
    TestbedError
        The kernel refuses a packet.
    """
    per_s = rate_bps / (8 * FRAME_BYTES)
    began_s = time.monotonic()
    for sent, packet in enumerate(packets):
        while sent >= (time.monotonic() - began_s) * per_s and not stopped.is_set():
            time.sleep(_TICK_S)
        if stopped.is_set():
            return
        try:
            source.sendto(packet, to)
        except OSError as error:
            raise TestbedError(f"{source.getsockname()[0]} cannot send to {to[0]}: {error.strerror}") from error


def padded(header: Header, family: IpFamily) -> bytes:
    """Return a header with a payload of zeros, so that its frame has ``FRAME_BYTES``."""
    return header.encode().ljust(FRAME_BYTES - ETHERNET_BYTES - family.header_bytes - UDP_BYTES, b"\0")


IDLE_MIN: Final = 0.1
"""If less than this fraction of its time was idle, the machine was the bottleneck. BMv2 cannot use all cores, so a
switch that is merely too slow leaves more time idle; one that waits for a core does not."""
_STAT: Final = Path("/proc/stat")
_IDLE, _WAITING, _FIELDS = 3, 4, 8


class ProcessorTime(NamedTuple):
    """Time of all processors since boot, in the kernel's ticks: idle and total."""

    idle: int
    total: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> "ProcessorTime":
        """Read the current times."""
        ticks = [int(word) for word in stat.read_text(encoding="ascii").splitlines()[0].split()[1 : 1 + _FIELDS]]
        return cls(ticks[_IDLE] + ticks[_WAITING], sum(ticks))

    def idle_share_since(self, before: "ProcessorTime") -> float:
        """Return the idle fraction of the time since ``before``; 1 if no time has passed."""
        passed = self.total - before.total
        return (self.idle - before.idle) / passed if passed > 0 else 1.0


# ------------------------------------------------------------------------------------------------------------ agreement


GRADIENT_QUEUES: Final = (Queue.EXCESS, *range(Queue.FIRST_GRADIENT, Queue.LAST_GRADIENT + 1))
"""Queues that can hold a tagged job's data: the gradient queues, and the lowest for packets beyond the job's share."""
RATE_TOLERANCE: Final = 0.01
"""Relative error of a measured rate: the clock is not read at the same moment as the counters."""


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Parameters
    ----------
    what
        The quantity that is compared.
    hosts, switches
        The counts of either side, as text.
    agree
        Whether they agree; None if the switches lack the counters to decide.
    note
        An explanation.
    """

    what: str
    hosts: str
    switches: str
    agree: bool | None
    note: str = ""


def compare(
    layout: Layout, accounts: Accounts, ledgers: Sequence[Mapping[str, Any]], *, tagged: bool
) -> list[dict[str, Any]]:
    """Return the comparisons of a run, as dicts that JSON can hold.

    Parameters
    ----------
    layout
        The testbed.
    accounts
        The counts of the run.
    ledgers
        Ledgers of all senders of gradients (workers and parameter server), or their sums; empty for a run without
        DLCP.
    tagged
        Whether its packets carried tags; without tags, a switch cannot tell gradients from other traffic.
    """
    if accounts.restarts:
        what = "Counters of the switches"
        note = "A switch restarted during the run, which reset its counters, so they cannot be compared."
        return [asdict(Comparison(what, "-", "-", None, note))]
    by_name = {host.name: host for host in layout.hosts}
    hosts = [by_name[name] for name in accounts.nics]
    findings = [_received(hosts, accounts), _sent(hosts, accounts)]
    if ledgers and tagged:
        findings += [_gradients(hosts, accounts, ledgers), _policy(accounts, ledgers)]
    findings.append(_rate(layout, hosts, accounts))
    return [asdict(finding) for finding in findings]


def uncounted_tails(layout: Layout, accounts: Accounts) -> int | None:
    """Return how many packets were lost without any switch counting them; None if the switches count all drops.

    BMv2 does not count packets dropped at a full queue: they are the packets the hosts sent, less all counted ones.
    """
    if _tails(accounts) is not None:
        return None
    sent = sum(nic.sent for nic in accounts.nics.values())
    hosts = [host for host in layout.hosts if host.name in accounts.nics]
    return sent - _at_hosts(hosts, accounts, "FORWARDED") - _dropped(accounts.switches.values())


def _received(hosts: list[HostLayout], accounts: Accounts) -> Comparison:
    """Compare for each host the frames received with those that the program forwarded to its port."""
    received = {host.name: accounts.nics[host.name].received for host in hosts}
    forwarded = {host.name: accounts.switches[host.switch].count("FORWARDED", ports=[host.port]) for host in hosts}
    differing = [name for name in received if received[name] != forwarded[name]]
    note = (
        f"They also agree for each of the {len(hosts)} hosts."
        if not differing
        else _difference(differing, received, forwarded)
    )
    return Comparison(
        "Frames received by hosts, and forwarded to them",
        f"{sum(received.values()):,}",
        f"{sum(forwarded.values()):,}",
        not differing,
        note,
    )


def _sent(hosts: list[HostLayout], accounts: Accounts) -> Comparison:
    """Compare the frames that hosts sent with those forwarded to hosts or dropped on the way."""
    sent = sum(accounts.nics[host.name].sent for host in hosts)
    forwarded = _at_hosts(hosts, accounts, "FORWARDED")
    dropped = _dropped(accounts.switches.values())
    full = _tails(accounts)
    counted = f"{forwarded:,} forwarded, {dropped:,} dropped by the program"
    what = "Frames sent by hosts, and their fate"
    if full is None:
        rest = sent - forwarded - dropped
        note = f"The other {rest:,} were dropped at a full queue, which BMv2 does not count."
        return Comparison(
            what, f"{sent:,}", counted, None if rest >= 0 else False, note if rest >= 0 else "More than were sent."
        )
    return Comparison(what, f"{sent:,}", f"{counted}, {full:,} at a full queue", sent == forwarded + dropped + full)


def _gradients(hosts: list[HostLayout], accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the packets in the gradients' queues: of the ledgers, and of the switches.

    Each packet is counted once: as forwarded to a host, or as dropped by policy or at a full queue anywhere on its way.
    Control packets use the most urgent queue, except for probes for missing packets. The ledgers count these, and the
    ranks' reports on a step. A packet beyond its job's share is moved to the lowest queue, and OVER_SHARE is counted
    under its tagged queue.
    """
    at: dict[str, list[int]] = {}
    for host in hosts:
        at.setdefault(host.switch, []).append(host.port)
    seen, doubtful = 0, 0
    for name, account in accounts.switches.items():
        ports = at.get(name, [])
        seen += account.count("FORWARDED", ports=ports, queues=GRADIENT_QUEUES) + account.count("POLICY_DROP")
        seen -= account.count("OVER_SHARE", ports=ports, queues=[Queue.CONTROL])
        doubtful += _moved_between_switches(account, ports)
    sent = sum(ledger["sent"] + ledger["extra"] for ledger in ledgers)
    what = "Packets in the gradients' queues, sent by hosts and seen by switches"
    full = _tails(accounts, GRADIENT_QUEUES)
    if full is None:
        rest = sent - seen
        note = "None was dropped at a full queue." if not rest else f"The other {rest:,} were dropped, uncounted."
        return Comparison(
            what, f"{sent:,}", f"{seen:,}", rest == 0 or (None if rest > 0 else False), note if rest >= 0 else ""
        )
    seen += full
    note = f"{full:,} of them were dropped at a full queue."
    if 0 < seen - sent <= doubtful:
        note += f" Up to {doubtful:,} of those may have been control packets beyond the job's share."
        return Comparison(what, f"{sent:,}", f"{seen:,}", None, note)
    return Comparison(what, f"{sent:,}", f"{seen:,}", sent == seen, note)


def _moved_between_switches(account: SwitchAccount, host_ports: Sequence[int]) -> int:
    """Return how many packets dropped at a full lowest queue toward another switch may have been control packets.

    At a host's port their number is exact: each moved packet is counted there, and was forwarded or dropped there.
    """
    ports = {place.port for place in account.events} - set(host_ports)
    moved = account.count("OVER_SHARE", ports=ports, queues=[Queue.CONTROL])
    return min(moved, account.tails(ports=ports, queues=[Queue.EXCESS]) or 0)


def _policy(accounts: Accounts, ledgers: Sequence[Mapping[str, Any]]) -> Comparison:
    """Check that the hosts' ledgers cover all packets dropped by policy, and that none of these was of class 0."""
    dropped = sum(account.count("POLICY_DROP") for account in accounts.switches.values())
    never = sum(
        packets
        for account in accounts.switches.values()
        for place, packets in account.events.items()
        if place.event == "POLICY_DROP" and place.drop_class == 0
    )
    known = sum(ledger["lost"] + ledger["retransmitted"] for ledger in ledgers)
    note = f"{never:,} of class 0, which must never be dropped. Packets may be retransmitted without need."
    return Comparison(
        "Packets lost or retransmitted, and packets dropped by policy (at most as many)",
        f"{known:,}",
        f"{dropped:,}",
        dropped <= known and not never,
        note,
    )


def _rate(layout: Layout, hosts: list[HostLayout], accounts: Accounts) -> Comparison:
    """Check that no port has carried more than its rate."""
    asked = {host.name: layout.port_of(host).queueing.rate_bps for host in hosts}
    name = max(asked, key=lambda name: accounts.busiest_bps[name] / asked[name])
    busiest = accounts.busiest_bps[name]
    allowed = asked[name] * (1 + RATE_TOLERANCE + accounts.late_s / RATE_WINDOW_S)
    late = f" A switch was up to {1e3 * accounts.late_s:.0f} ms late and caught up." if accounts.late_s else ""
    return Comparison(
        "Busiest second of any port, and its rate",
        f"{busiest / 1e6:.2f} Mbit/s",
        f"{asked[name] / 1e6:.2f} Mbit/s",
        busiest <= allowed,
        f"At {name}.{late}",
    )


def _tails(accounts: Accounts, queues: Collection[int] | None = None) -> int | None:
    """Return the tail drops of all switches; None if one of them does not count them."""
    found = [account.tails(queues=queues) for account in accounts.switches.values()]
    return None if None in found else sum(tail for tail in found if tail is not None)


def _at_hosts(hosts: Iterable[HostLayout], accounts: Accounts, event: str) -> int:
    return sum(accounts.switches[host.switch].count(event, ports=[host.port]) for host in hosts)


def _dropped(switches: Iterable[SwitchAccount]) -> int:
    """Return the packets that the program has dropped: by policy, without a route, or as invalid (TTL, checksum)."""
    return sum(account.count(event) for account in switches for event in ("POLICY_DROP", "NO_ROUTE", "REFUSED"))


def _difference(names: list[str], received: Mapping[str, int], forwarded: Mapping[str, int]) -> str:
    return "They differ at " + ", ".join(f"{name} by {received[name] - forwarded[name]:+,}" for name in names) + "."
