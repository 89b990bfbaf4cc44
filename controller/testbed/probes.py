# SPDX-License-Identifier: Apache-2.0
"""Inspect a running testbed: ping its hosts, capture a link's packets, and follow packets from host to host."""

import asyncio
import re
import secrets
import selectors
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlcp.controller.compiled_program import CompiledProgram
from dlcp.controller.fabric import Fabric, distances
from dlcp.controller.switch_client import Readings, Session, ask_all, read_counters
from dlcp.controller.testbed import TestbedError
from dlcp.controller.testbed.accounts import bound, fresh_counters, padded, send_paced, tail_drops
from dlcp.controller.testbed.layout import HostLayout, StateFile, TestbedState, WireEnd
from dlcp.host.closing import Closing
from dlcp.host.ip import IpFamily
from dlcp.host.netlab import NamedNamespace
from dlcp.switch.event_counters import SwitchAccount
from dlcp.switch.ports import enlarge_buffers
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT, Header, HeaderError, PacketType, Queue, decode, dscp

# ----------------------------------------------------------------------------------------------------------------- ping


_PING_EVERY_S: Final = 0.2
_PINGS_AT_ONCE: Final = 16


class Ping(NamedTuple):
    """Echo requests from one host to another, the answers, and their mean round-trip time; None without an answer."""

    sender: str
    receiver: str
    sent: int
    answered: int
    rtt_ms: float | None


def ping(pairs: Sequence[tuple[HostLayout, HostLayout]], count: int, deadline_s: float) -> list[Ping]:
    """Send ``count`` ICMP echo requests between pairs of hosts, and wait ``deadline_s`` seconds for the last answer.

    Raises
    ------
    TestbedError
        The command ``ping`` is missing.
    """
    if shutil.which("ping") is None:
        raise TestbedError("the command `ping` is missing; install Debian's package iputils-ping")

    def one(pair: tuple[HostLayout, HostLayout]) -> Ping:
        sender, receiver = pair
        words = ["ping", "-n", "-q", "-c", str(count), "-i", str(_PING_EVERY_S), "-W", str(deadline_s)]
        done = NamedNamespace(sender.namespace).run([*words, receiver.address], capture_output=True, text=True)
        counts = re.search(r"(\d+) packets transmitted, (\d+) received", done.stdout)
        if counts is None:
            raise TestbedError(f"ping from {sender.name} to {receiver.name}: {(done.stderr or done.stdout).strip()}")
        rtt = re.search(r"= [\d.]+/([\d.]+)/", done.stdout)
        return Ping(sender.name, receiver.name, int(counts[1]), int(counts[2]), float(rtt[1]) if rtt else None)

    with ThreadPoolExecutor(_PINGS_AT_ONCE) as pool:
        return list(pool.map(one, pairs))


# -------------------------------------------------------------------------------------------------------------- capture


_ETH_P_ALL: Final = 3
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_AUXDATA, _PACKET_IGNORE_OUTGOING, _SO_TIMESTAMPNS = 263, 6, 8, 23, 35
_STATISTICS: Final = struct.Struct("@II")
"""struct tpacket_stats: frames seen, and those for which there was no room."""
_TIMESPEC: Final = struct.Struct("@qq")
_AUXDATA: Final = struct.Struct("@IIIHHHH")
"""struct tpacket_auxdata: status first, and last the VLAN tag, which the kernel strips from the frame."""
_VLAN_VALID: Final = 0x10
_FRAME_MAX: Final = 1 << 16
_BURST_MAX: Final = 256
"""Most frames taken from one socket at once."""
_PCAP_HEADER: Final = struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, _FRAME_MAX, 1)
"""Of a file with times in nanoseconds and Ethernet frames (draft-ietf-opsawg-pcap)."""
_PCAP_RECORD: Final = struct.Struct("=IIII")


class Frame(NamedTuple):
    """A frame as it arrived at one end of a link, and when, in nanoseconds of real time."""

    end: WireEnd
    time_ns: int
    data: bytes


class Tap(Closing):
    """Sees all frames that arrive at some ends of links; a context manager.

    The built-in switch sends past the place where the kernel would show outgoing frames, so a tap shows none. Tap both
    ends of a link to see both directions.

    Raises
    ------
    TestbedError
        An interface cannot be opened.
    """

    def __init__(self, ends: Sequence[WireEnd]) -> None:
        self._selector = selectors.DefaultSelector()
        try:
            for end in ends:
                sock = NamedNamespace(end.namespace).call(partial(_packet_socket, end.interface))
                self._selector.register(sock, selectors.EVENT_READ, end)
        except OSError as error:
            self.close()
            raise TestbedError(f"cannot capture at {end}: {error.strerror}; this needs CAP_NET_RAW") from error

    def frames(self, timeout_s: float) -> list[Frame]:
        """Return the frames that wait; without any, wait up to ``timeout_s`` seconds."""
        found: list[Frame] = []
        for key, _ in self._selector.select(timeout_s):
            assert isinstance(key.fileobj, socket.socket)
            # No more at once, so that the caller can look at its limits.
            found += islice(_waiting(key.fileobj, key.data), _BURST_MAX)
        return found

    def missed(self) -> int:
        """Return how many frames came faster than they were read, since the last call."""
        socks = [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, socket.socket)]
        found = [sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATISTICS.size) for sock in socks]
        return sum(_STATISTICS.unpack(each)[1] for each in found)

    def close(self) -> None:
        """Close the sockets."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def _waiting(sock: socket.socket, end: WireEnd) -> Iterator[Frame]:
    """Receive frames until there are no more, or the interface is down."""
    with suppress(OSError):
        while True:
            yield _received(sock, end)


def _received(sock: socket.socket, end: WireEnd) -> Frame:
    """Receive a frame, and put its VLAN tag back."""
    data, ancillary, _, _ = sock.recvmsg(_FRAME_MAX, 2 * socket.CMSG_SPACE(_AUXDATA.size))
    parts = {level: content for level, _, content in ancillary}
    seconds, nanoseconds = _TIMESPEC.unpack(parts[socket.SOL_SOCKET])
    status, *_, tag, tag_type = _AUXDATA.unpack(parts[_SOL_PACKET])
    if status & _VLAN_VALID:
        data = data[:12] + struct.pack("!HH", tag_type, tag) + data[12:]
    return Frame(end, seconds * 10**9 + nanoseconds, data)


def _packet_socket(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setblocking(False)
    enlarge_buffers(sock)
    sock.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
    sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    sock.bind((interface, _ETH_P_ALL))
    return sock


def capture(
    state: TestbedState, where: str, seconds: float, count: int, stopped: threading.Event
) -> tuple[list[Frame], int]:
    """Return the frames that cross a link in both directions, by time, and the number of those missed.

    Parameters
    ----------
    where
        The link: a host, or a port as ``SWITCH:PORT``.
    seconds, count
        Ends after this time, or with this many frames.
    stopped
        Ends when this is set.

    Raises
    ------
    TestbedError
        There is no such link.
    """
    links = state.layout.links_of([where])
    if len(links) > 1:
        ports = ", ".join(str(end) for link in links for end in link if end.node == where)
        raise TestbedError(f"{where} has {len(links)} links; choose one of {ports}")
    found: list[Frame] = []
    give_up_s = time.monotonic() + seconds
    with Tap(links[0]) as tap:
        while len(found) < count and not stopped.is_set() and (left_s := give_up_s - time.monotonic()) > 0:
            found += tap.frames(min(left_s, 0.2))
        missed = tap.missed()
    return sorted(found[:count], key=lambda frame: frame.time_ns), missed


def write_pcap(path: Path, frames: Sequence[Frame]) -> None:
    """Write frames into a capture file for Wireshark, tcpdump or Scapy."""
    records = [
        _PCAP_RECORD.pack(frame.time_ns // 10**9, frame.time_ns % 10**9, len(frame.data), len(frame.data)) + frame.data
        for frame in frames
    ]
    path.write_bytes(_PCAP_HEADER + b"".join(records))


_ETHERNET_KINDS: Final = {0x0806: "ARP"}
_IP_KINDS: Final = {1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6"}


def kind_of(frame: bytes) -> str:
    """Return a label for a frame, such as ``DLCP DATA job 1 queue 6 class 3``, ``TCP`` or ``ARP``."""
    if frame[12:14] == b"\x81\x00":
        frame = frame[:12] + frame[16:]
    ether_type = int.from_bytes(frame[12:14], "big")
    if ether_type not in (0x0800, 0x86DD) or len(frame) < 34:
        return _ETHERNET_KINDS.get(ether_type, f"EtherType 0x{ether_type:04x}")
    protocol, start = (frame[23], 14 + 4 * (frame[14] & 15)) if ether_type == 0x0800 else (frame[20], 54)
    header = _dlcp_header(frame, start) if protocol == socket.IPPROTO_UDP else None
    if header is None:
        return _IP_KINDS.get(protocol, f"IP protocol {protocol}")
    return f"DLCP {header.type.name} job {header.job} queue {header.queue} class {header.drop_class}"


def _dlcp_header(frame: bytes, udp_start: int) -> Header | None:
    """Return the DLCP header of a UDP datagram in a frame; None if it has none."""
    port = int.from_bytes(frame[udp_start + 2 : udp_start + 4], "big")
    if UDP_PORT_BASE <= port < UDP_PORT_BASE + UDP_PORT_COUNT:
        with suppress(HeaderError):
            return decode(frame[udp_start + 8 :])
    return None


# ---------------------------------------------------------------------------------------------------------------- trace


_TRACE_PORT: Final = UDP_PORT_BASE + UDP_PORT_COUNT - 1
"""The last of DLCP's ports, so that a training can go on: it uses the first."""
_QUIET_S: Final = 2.0
"""Packets are lost if none has arrived for this long: a switch that waits for a processor may be a second late."""
_Counted = tuple[SwitchAccount, Mapping[int, Any]]
"""The account of a switch, and the counters of its ports, which only the built-in switch has."""
_PORT_LOSSES: Final = {
    "lost": "lost on the line from",
    "lost_arriving": "lost on the line into",
    "unreachable": "sent to a link that is down at",
    "send_errors": "refused by the interface of",
    "oversize": "too long for",
    "overrun": "came too fast for the socket of",
}
"""Drops that the built-in switch counts outside its program, by port."""


@dataclass(frozen=True)
class TaggedFlow:
    """Data packets of one message: how many, with which tags, and the rate of their frames in bit/s."""

    count: int = 100
    job: int = 0
    queue: int = Queue.LAST_GRADIENT
    drop_class: int = 0
    rate_bps: float = 2e6


@dataclass(frozen=True)
class SwitchHop:
    """A flow's packets at one switch: those that arrived and left; and what it has counted in that time.

    ``account`` has its counts by queue; None if it did not answer. ``notes`` are other reasons for a loss.
    """

    switch: str
    arrived: int
    left: int
    account: SwitchAccount | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FlowTrace:
    """A flow's packets on their way: sent, received, and at each switch, from the sender on."""

    sent: int
    received: int
    hops: list[SwitchHop]


def trace(state: TestbedState, fabric: Fabric, sender: HostLayout, receiver: HostLayout, flow: TaggedFlow) -> FlowTrace:
    """Send a flow from host to host, and count its packets at both ends of every link.

    Packets are recognized by their token, so other traffic does not affect the counts. The reasons come from the
    switches' counters, which include all traffic of the time.

    Parameters
    ----------
    fabric
        The testbed's own, with the addresses of its switches.

    Raises
    ------
    TestbedError
        A socket cannot be opened, the packets cannot be sent, or they are too fast to be counted.
    """
    token = secrets.randbits(64)
    headers = (
        Header(PacketType.DATA, 0, flow.queue, flow.drop_class, 0, flow.job, 0xFFFF, 0, 0, 0, index, flow.count, token)
        for index in range(flow.count)
    )
    before = _accounts(state, fabric)
    seen: Counter[WireEnd] = Counter()
    stopped = threading.Event()
    ends = [end for link in state.layout.links for end in link]
    with bound(receiver, _TRACE_PORT), bound(sender, _TRACE_PORT) as source, Tap(ends) as tap:
        family = IpFamily.of(source)
        source.setsockopt(family.level, family.tos, dscp(flow.queue, flow.drop_class > 0) << 2)
        to = (receiver.address, _TRACE_PORT)
        with ThreadPoolExecutor(1, "dlcp-trace") as threads:
            sending = threads.submit(
                send_paced, source, to, (padded(header, family) for header in headers), flow.rate_bps, stopped
            )
            try:
                _count(tap, token, sending, seen, receiver.name, flow.count)
            finally:
                stopped.set()
        if missed := tap.missed():
            raise TestbedError(f"{missed} frames came too fast to be counted; give a lower --rate-mbps")
        sending.result()
    after = _accounts(state, fabric)
    hops = []
    for switch in _by_distance(fabric, sender.switch):
        links = [(near, far) for link in state.layout.links for near, far in (link, link[::-1]) if near.node == switch]
        arrived, left = sum(seen[near] for near, _ in links), sum(seen[far] for _, far in links)
        if arrived or left:
            hops.append(_hop(state, SwitchHop(switch, arrived, left), before[switch], after[switch]))
    return FlowTrace(flow.count, sum(seen[end] for end in ends if end.node == receiver.name), hops)


def _count(tap: Tap, token: int, sending: "Future[None]", seen: "Counter[WireEnd]", at_last: str, count: int) -> None:
    """Count the flow's frames at each end, until all are at the last node, or none comes any more."""
    mark = token.to_bytes(8, "big")
    quiet_since_s = time.monotonic()
    while sum(seen[end] for end in seen if end.node == at_last) < count and (
        not sending.done() or time.monotonic() < quiet_since_s + _QUIET_S
    ):
        if not sending.done():
            quiet_since_s = time.monotonic()
        for frame in tap.frames(0.05):
            if mark in frame.data[:128]:
                seen[frame.end] += 1
                quiet_since_s = time.monotonic()


def _by_distance(fabric: Fabric, first: str) -> list[str]:
    distance = distances(fabric, first)
    return sorted(distance, key=lambda switch: distance[switch])


def _accounts(state: TestbedState, fabric: Fabric) -> dict[str, _Counted | str]:
    """Return the counters of each switch, or an error."""
    files = StateFile(state.layout.name)

    async def ask(session: Session) -> Readings:
        return await read_counters(session, fabric.neighbours[session.switch.name])

    found: dict[str, _Counted | str] = {}
    for name, readings in asyncio.run(ask_all(fabric, CompiledProgram(), ask)).items():
        if isinstance(readings, str):
            broken = files.broken(name).exists()
            found[name] = f"is broken; run `dlcp testbed mend switch {name}`" if broken else readings
        elif state.layout.kind == "builtin":
            own = fresh_counters(files, name)
            ports = {port["port"]: port for port in own["ports"]}
            found[name] = SwitchAccount.of(readings.events, tail_drops(own)), ports
        else:
            found[name] = SwitchAccount.of(readings.events, None), {}
    return found


def _hop(state: TestbedState, hop: SwitchHop, before: _Counted | str, after: _Counted | str) -> SwitchHop:
    """Return a hop with what its switch has counted between two readings."""
    if isinstance(after, str) or isinstance(before, str):
        return replace(hop, notes=[after if isinstance(after, str) else "did not answer before"])
    lost: Counter[str] = Counter()
    for port, counters in after[1].items():
        for name, words in _PORT_LOSSES.items():
            lost[f"{words} {hop.switch}:{port}"] += counters[name] - before[1][port][name]
    notes = [f"{count} {words}" for words, count in lost.items() if count > 0]
    if hop.left < hop.arrived and state.layout.kind == "bmv2":
        notes.append("BMv2 counts neither drops at full queues nor at links that are down")
    return replace(hop, account=after[0].since(before[0]), notes=notes)
