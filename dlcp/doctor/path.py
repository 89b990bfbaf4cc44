# SPDX-License-Identifier: Apache-2.0
"""Probe the path to a peer with packets like DLCP's: round trip, loss, largest packet, and preserved tags.

A probe is a HELLO to a port of DLCP's block, so that firewalls and switches treat it like DLCP's own packets. After the
header come the requested properties of the answer, and zeros up to the probed size. Don't-fragment is set. An answer is
never larger than its question, so a listening doctor cannot be used to flood a third machine.
"""

import contextlib
import errno
import secrets
import socket
import statistics
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait  # select.select fails on descriptors above 1023
from typing import Final

from dlcp import wire
from dlcp.doctor import Diagnosis, Section, missing, note, ok
from dlcp.host.closing import Closing
from dlcp.host.ip import FAMILIES, PMTUDISC_PROBE, UDP_BYTES, IpFamily, family_of
from dlcp.inputs.addresses import format_address
from dlcp.session.addresses import route_to
from dlcp.transport import Address
from dlcp.transport.path_mtu import first_hop_mtu

DOCTOR_PORT: Final = wire.UDP_PORT_BASE + wire.UDP_PORT_COUNT - 1
"""The last port of DLCP's block; ranks take ports from the first on."""

_BODY = struct.Struct(">8sHBBII")
_MAGIC: Final = b"DLCPDOC1"
SMALLEST_BYTES: Final = wire.HEADER_BYTES + _BODY.size
_SESSIONS: Final = 1024
"""Number of sessions for which a listener counts packets; it forgets the oldest first."""
PROBES: Final = 200
"""Packets for loss and round trip; enough to show a loss of 0.5 %."""
INTERVAL_S: Final = 0.002
GREET_S: Final = 3.0
"""Timeout for a peer's first answer."""
_TRIES: Final = 3
_LOWEST_MTU: Final = 576
_PROBES_OF_TAGS: Final = tuple(
    wire.dscp(queue, droppable) << 2 for queue in (0, 2, 6, 7) for droppable in (False, True)
)
_CONGESTED: Final = 3
ECN_NAMES: Final = {1: "ECT(1)", 2: "ECT(0)", _CONGESTED: "CE"}
BAD_LOSS: float = 0.2
"""Share of lost packets from which the path counts as broken rather than busy. Not tuned."""


class PeerError(RuntimeError):
    """The peer does not answer; ``fix`` is the remedy."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Probe:
    """A question or an answer.

    Parameters
    ----------
    token
        Session, drawn by the asking side.
    sequence
        Number of the question; its answer has the same.
    size_bytes
        In a question the wanted size of the answer, in an answer the size of the question; of whole IP packets.
    wanted_tos
        TOS byte (DSCP and ECN) wanted for the answer.
    seen_tos
        In an answer: the TOS byte with which the question arrived.
    arrived
        In an answer: number of questions of this session that have arrived.
    """

    token: int
    sequence: int
    size_bytes: int = 0
    wanted_tos: int = 0
    seen_tos: int = 0
    arrived: int = 0

    def encode(self, *, answer: bool, payload_bytes: int = SMALLEST_BYTES) -> bytes:
        """Return a UDP payload of ``payload_bytes``, or of the size of the probe if that is larger."""
        kind = wire.PacketType.HELLO_ACK if answer else wire.PacketType.HELLO
        header = wire.Header(kind, 0, wire.Queue.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 1, self.token).encode()
        body = _BODY.pack(_MAGIC, self.size_bytes, self.wanted_tos, self.seen_tos, self.sequence, self.arrived)
        return (header + body).ljust(payload_bytes, b"\0")


def decode(datagram: bytes | memoryview, *, answer: bool) -> Probe | None:
    """Return the probe in a datagram; None if it holds none."""
    if len(datagram) < SMALLEST_BYTES:
        return None
    try:
        header = wire.decode(datagram)
    except wire.HeaderError:
        return None
    magic, size, wanted, seen, sequence, arrived = _BODY.unpack_from(datagram, wire.HEADER_BYTES)
    wanted_type = wire.PacketType.HELLO_ACK if answer else wire.PacketType.HELLO
    if magic != _MAGIC or header.type is not wanted_type:
        return None
    return Probe(header.token, sequence, size, wanted, seen, arrived)


def open_socket(host: str, ports: Iterable[int] = (0,)) -> socket.socket:
    """Return a UDP socket that sends without fragmentation, and reports the TOS byte and local address of packets.

    Parameters
    ----------
    host
        The numeric address to bind.
    ports
        The first free one is bound.

    Raises
    ------
    OSError
        None of the ports can be bound.
    """
    family = family_of(host)
    sock = family.udp_socket()
    options = {family.mtu_discover: PMTUDISC_PROBE, family.receive_tos: 1, family.receive_info: 1}
    for option, value in options.items():
        sock.setsockopt(family.level, option, value)
    failure = OSError("no port to try")
    for port in ports:
        try:
            sock.bind((host, port))
        except OSError as error:
            failure = OSError(error.errno, f"UDP {format_address((host, port))}: {error.strerror}")
        else:
            return sock
    sock.close()
    raise failure


def open_everywhere(ports: Iterable[int]) -> list[socket.socket]:
    """Return a socket like :func:`open_socket` for every address of each family, at the first port free in all.

    Raises
    ------
    OSError
        No port is free.
    """
    failure = OSError("no port to try")
    for port in ports:
        with contextlib.ExitStack() as opened:
            try:
                hosts = [family.any_address for family in FAMILIES if family.is_supported]
                found = [opened.enter_context(open_socket(host, [port])) for host in hosts]
            except OSError as error:
                failure = error
            else:
                opened.pop_all()
                return found
    raise failure


class ProbeListener(Closing):
    """Answers the probes of other machines.

    Parameters
    ----------
    socks
        From :func:`open_socket`; closed by :meth:`close`.

    Attributes
    ----------
    address
        That of the first socket.
    """

    def __init__(self, *socks: socket.socket) -> None:
        self._socks = socks
        self._arrived: OrderedDict[int, int] = OrderedDict()
        self.address: Address = socks[0].getsockname()[:2]

    def serve(self, seconds: float) -> list[Address]:
        """Answer probes for ``seconds``; return the addresses that asked for the first time."""
        end_s = time.monotonic() + seconds
        fresh = []
        while (left_s := end_s - time.monotonic()) > 0:
            for sock in wait(self._socks, left_s):
                assert isinstance(sock, socket.socket)
                try:
                    datagram, ancillary, _, source = sock.recvmsg(65536, 128, socket.MSG_DONTWAIT)
                except OSError:  # an ICMP error about an earlier answer
                    continue
                question = decode(datagram, answer=False)
                if question is None:
                    continue
                if question.token not in self._arrived:
                    fresh.append(source[:2])
                self._answer(sock, question, len(datagram), ancillary, source)
        return fresh

    def close(self) -> None:
        """Stop listening."""
        for sock in self._socks:
            sock.close()

    def _answer(
        self,
        sock: socket.socket,
        question: Probe,
        payload_bytes: int,
        ancillary: list[tuple[int, int, bytes]],
        source: Address,
    ) -> None:
        family = IpFamily.of(sock)
        arrived = self._arrived.pop(question.token, 0) + 1
        self._arrived[question.token] = arrived
        if len(self._arrived) > _SESSIONS:
            self._arrived.popitem(last=False)
        size = payload_bytes + before_payload(family)
        answer = Probe(question.token, question.sequence, size, question.wanted_tos, tos_of(ancillary), arrived)
        reply = answer.encode(answer=True, payload_bytes=min(question.size_bytes, size) - before_payload(family))
        extras = [(family.level, family.tos, struct.pack("i", question.wanted_tos))]
        extras += [  # answer from the address to which the question was sent
            (level, kind, family.sent_from(value))
            for level, kind, value in ancillary
            if (level, kind) == (family.level, family.info)
        ]
        with contextlib.suppress(OSError):  # too large for the way back: counts as lost
            sock.sendmsg([reply], extras, 0, source)


def before_payload(family: IpFamily) -> int:
    """Return the bytes of an IP packet before a probe."""
    return family.header_bytes + UDP_BYTES


def tos_of(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the TOS byte that a packet arrived with: a byte in a control message of IPv4, an int in one of IPv6."""
    kinds = {(family.level, family.tos) for family in FAMILIES}
    found = (value for level, kind, value in ancillary if (level, kind) in kinds)
    return int.from_bytes(next(found, b""), sys.byteorder)


@dataclass
class PathReport:
    """Results of probing a path. Sizes are of whole IP packets; ``there`` means to the peer, ``back`` from it.

    Attributes
    ----------
    sent, arrived_there, arrived_back
        Numbers of questions sent and received, and of answers received.
    dscp_there, dscp_back, ecn_there, ecn_back
        Values that arrived, by the values sent.
    """

    peer: Address
    interface_mtu_bytes: int
    family: IpFamily
    sent: int = 0
    arrived_there: int = 0
    arrived_back: int = 0
    rtts_s: list[float] = field(default_factory=list)
    mtu_bytes: int = 0
    mtu_there_bytes: int = 0
    dscp_there: dict[int, int] = field(default_factory=dict)
    dscp_back: dict[int, int] = field(default_factory=dict)
    ecn_there: dict[int, int] = field(default_factory=dict)
    ecn_back: dict[int, int] = field(default_factory=dict)


def try_path(peer: Address, count: int = PROBES) -> PathReport:
    """Probe the path to a peer that runs ``dlcp doctor --listen``; takes some seconds.

    Raises
    ------
    PeerError
        The peer does not answer.
    OSError
        There is no route, or the host name is unknown.
    """
    with Conversation(peer) as conversation:
        conversation.greet()
        report = PathReport(peer, first_hop_mtu(conversation.address), conversation.family)
        _try_loss(conversation, report, count)
        conversation.wait_s = max(0.1, min(2.0, 4 * max(report.rtts_s, default=0.25)))
        _try_sizes(conversation, report)
        _try_tags(conversation, report)
    return report


class Conversation(Closing):
    """Sends probes to a listening doctor and receives its answers; a context manager.

    Attributes
    ----------
    address
        The peer's, with a numeric host.
    short_bytes
        Size of the smallest probe as an IP packet.
    """

    def __init__(self, peer: Address) -> None:
        self.peer = peer
        self.address = route_to(peer)[1], peer[1]  # in the family that ranks would choose
        self.family = family_of(self.address[0])
        self.short_bytes = SMALLEST_BYTES + before_payload(self.family)
        self.wait_s = 0.5
        self.token = secrets.randbits(64) | 1
        self.sequence = 0
        self.sock = open_socket(self.family.any_address)
        self.sock.connect(self.address)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def greet(self) -> None:
        """Send probes until the first answer.

        Raises
        ------
        PeerError
            The peer does not answer within :data:`GREET_S`.
        """
        host, port = self.peer
        listen = f"run there: dlcp doctor --listen{'' if port == DOCTOR_PORT else f' {format_address(self.peer)}'}"
        end_s = time.monotonic() + GREET_S
        while time.monotonic() < end_s:
            try:
                if self.ask(self.short_bytes, self.short_bytes):
                    return
            except ConnectionRefusedError:
                raise PeerError(f"{host} answers, but nothing listens at its UDP port {port}", listen) from None
        fix = f"{listen}; if it runs, open UDP port {port} between the two"
        raise PeerError(f"no answer from {host}, UDP port {port}, within {GREET_S:.0f} s", fix)

    def ask(self, size: int, answer_size: int, tos: int = 0, wanted_tos: int = 0) -> tuple[Probe, int] | None:
        """Send one question; return its answer and the answer's TOS byte, or None.

        Raises
        ------
        ConnectionRefusedError
            Nothing listens at the peer's port.
        """
        number = self.send(size, answer_size, tos, wanted_tos)
        end_s = time.monotonic() + self.wait_s
        while number is not None and (left_s := end_s - time.monotonic()) > 0:
            for answer, answer_tos in self.answers(left_s):
                if answer.sequence == number:
                    return answer, answer_tos
        return None

    def send(self, size: int, answer_size: int, tos: int = 0, wanted_tos: int = 0) -> int | None:
        """Send a question in an IP packet of ``size`` bytes; return its number, or None if it is too large to send."""
        self.sequence += 1
        probe = Probe(self.token, self.sequence, answer_size, wanted_tos)
        extras = [(self.family.level, self.family.tos, struct.pack("i", tos))]
        payload_bytes = size - before_payload(self.family)
        try:
            self.sock.sendmsg([probe.encode(answer=False, payload_bytes=payload_bytes)], extras)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            return None
        return self.sequence

    def answers(self, wait_s: float) -> list[tuple[Probe, int]]:
        """Wait up to ``wait_s`` for an answer; return all that have arrived."""
        found = []
        while wait([self.sock], wait_s):
            wait_s = 0.0
            try:
                datagram, ancillary, _, _ = self.sock.recvmsg(65536, 128)
            except ConnectionRefusedError:
                raise
            except OSError:  # an ICMP error, such as "too large": the question counts as lost
                continue
            answer = decode(datagram, answer=True)
            if answer and answer.token == self.token:
                found.append((answer, tos_of(ancillary)))
        return found


def _try_loss(conversation: Conversation, report: PathReport, count: int) -> None:
    """Send packets at a constant rate, and count them at both ends."""
    before = conversation.ask(conversation.short_bytes, conversation.short_bytes)
    sent_s: dict[int, float] = {}
    rtts_s: dict[int, float] = {}
    arrived = first_arrived = before[0].arrived if before else 0

    def collect(until_s: float) -> None:
        nonlocal arrived
        while len(rtts_s) < count and (left_s := until_s - time.monotonic()) > 0:
            for answer, _ in conversation.answers(left_s):
                if answer.sequence in sent_s:
                    rtts_s.setdefault(answer.sequence, time.monotonic() - sent_s[answer.sequence])
                    arrived = max(arrived, answer.arrived)

    began_s = time.monotonic()
    for index in range(1, count + 1):
        number = conversation.send(min(report.interface_mtu_bytes, 1200), conversation.short_bytes)
        sent_s[number or -1] = time.monotonic()
        collect(began_s + index * INTERVAL_S)
    collect(time.monotonic() + conversation.wait_s)
    # The last answers may be lost, so ask again for the number of arrivals; the question itself does not count.
    after = _ask_often(conversation, 0)
    arrived = after[0].arrived - 1 if after else arrived
    report.sent, report.arrived_back, report.rtts_s = count, len(rtts_s), list(rtts_s.values())
    report.arrived_there = max(min(arrived - first_arrived, count), len(rtts_s))


def _try_sizes(conversation: Conversation, report: PathReport) -> None:
    """Find the largest packet that passes both ways, and the largest one to the peer."""

    def passes(size: int, answer_size: int) -> bool:
        return any(conversation.ask(size, answer_size) for _ in range(_TRIES))

    top, short_bytes = report.interface_mtu_bytes, conversation.short_bytes
    report.mtu_bytes = _largest(lambda size: passes(size, size), top)
    report.mtu_there_bytes = top if report.mtu_bytes == top else _largest(lambda size: passes(size, short_bytes), top)


def _largest(passes: Callable[[int], bool], top: int) -> int:
    """Return the largest size that passes, by bisection; 0 if not even the smallest does."""
    if passes(top):
        return top
    low, high = _LOWEST_MTU, top
    if not passes(low):
        return 0
    while high - low > 1:
        # Most paths have a usual MTU: once 1500 has passed and 1501 has not, the search ends.
        usual = [size for mtu in (1500, 9000) for size in (mtu, mtu + 1) if low < size < high]
        middle = usual[0] if usual else (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _try_tags(conversation: Conversation, report: PathReport) -> None:
    """Send packets with each tag in both directions, and record the tags that arrive."""
    for tos in (*_PROBES_OF_TAGS, *ECN_NAMES):
        answer = _ask_often(conversation, tos)
        if answer:
            there, back = answer[0].seen_tos, answer[1]
            if tos in ECN_NAMES:
                report.ecn_there[tos], report.ecn_back[tos] = there & 3, back & 3
            else:
                report.dscp_there[tos >> 2], report.dscp_back[tos >> 2] = there >> 2, back >> 2


def _ask_often(conversation: Conversation, tos: int) -> tuple[Probe, int] | None:
    answers = (conversation.ask(conversation.short_bytes, conversation.short_bytes, tos, tos) for _ in range(_TRIES))
    return next((answer for answer in answers if answer), None)


def describe(report: PathReport) -> Section:
    """Return the findings about the path to a peer."""
    look = (_round_trip_finding, _loss_finding, _largest_finding, _dscp_finding, _ecn_finding)
    return Section(f"Path to {format_address(report.peer)}", [each(report) for each in look])


def _round_trip_finding(report: PathReport) -> Diagnosis:
    if not report.rtts_s:
        return missing("round trip", "no probe was answered", "see the loss below")
    low, middle, high = (1e3 * of(report.rtts_s) for of in (min, statistics.median, max))
    text = f"{middle:.2f} ms, from {low:.2f} to {high:.2f}"
    return ok("round trip", text, rtt_ms={"least": low, "median": middle, "most": high})


def _loss_finding(report: PathReport) -> Diagnosis:
    there, back = report.sent - report.arrived_there, report.arrived_there - report.arrived_back
    shares = {"loss_there": there / report.sent, "loss_back": back / max(1, report.arrived_there)}
    data = {"packets": report.sent, "lost_there": there, "lost_back": back, **shares}
    if not there and not back:
        return ok("loss", f"none of {report.sent} packets", **data)
    text = f"{there} of {report.sent} packets lost there, {back} of {report.arrived_there} answers lost back"
    if max(shares.values()) >= BAD_LOSS:
        fix = "look for a broken cable, a duplex mismatch, or a rate limit on UDP on the way"
        return missing("loss", text, fix, **data)
    return note("loss", f"{text}; DLCP tolerates that, TCP would slow down", **data)


def _largest_finding(report: PathReport) -> Diagnosis:
    subject, mtu, there, own = "largest packet", report.mtu_bytes, report.mtu_there_bytes, report.interface_mtu_bytes
    data = {"mtu_bytes": mtu, "mtu_there_bytes": there, "interface_mtu_bytes": own}
    if not mtu:
        fix = "look for a firewall that passes small packets only"
        return missing(subject, f"not even {_LOWEST_MTU} bytes pass both ways", fix, **data)
    text = f"{mtu} bytes both ways, don't-fragment set"
    if mtu == own:
        return ok(subject, text, **data)
    only = "" if there == mtu else f"; {there} to the peer, so the way back is the narrower one"
    fix = "look for a hop with a smaller MTU, unless a tunnel explains it"
    return note(subject, f"{text}{only}; the interface allows {own}", fix, **data)


def _dscp_finding(report: PathReport) -> Diagnosis:
    there, back = report.dscp_there, report.dscp_back
    data = _as_json("dscp", there, back)
    if not there:
        fix = "look for a firewall that drops unknown DSCP values, or set DLCP_TAGGED=0"
        return missing("DSCP", "packets with DLCP's tags do not arrive", fix, **data)
    changed = _changed(there) or _changed(back)
    if not changed:
        return ok("DSCP", "tags survive both ways", **data)
    sent, arrived = next(iter(changed.items()))
    others = f", and {len(changed) - 1} others" if len(changed) > 1 else ""
    text = f"tags are changed on the way {_ways(there, back)} ({sent} arrives as {arrived}{others})"
    fix = "if switches without P4 are to use the tags, trust DSCP at the ranks' ports; DLCP also works without"
    return note("DSCP", text, fix, **data)


def _ecn_finding(report: PathReport) -> Diagnosis:
    there, back = report.ecn_there, report.ecn_back
    data = _as_json("ecn", there, back)
    absent = [name for code, name in ECN_NAMES.items() if code not in there]
    if absent:
        text = f"packets marked {', '.join(absent)} do not arrive"
        return note("ECN", text, "look for a firewall that drops ECN", **data)
    arrived = {*_changed(there).values(), *_changed(back).values()}
    if not arrived:
        return ok("ECN", "marks survive both ways", **data)
    if arrived == {_CONGESTED}:
        return ok("ECN", "works: the path marked these packets as congested", **data)
    fix = "configure the routers to keep ECN bits; until then DLCP reacts to loss and delay only"
    return note("ECN", f"marks are cleared on the way {_ways(there, back)}", fix, **data)


def _changed(seen: dict[int, int]) -> dict[int, int]:
    return {sent: arrived for sent, arrived in seen.items() if sent != arrived}


def _ways(there: dict[int, int], back: dict[int, int]) -> str:
    """Return the directions in which values change."""
    return " and ".join(way for way, seen in (("there", there), ("back", back)) if _changed(seen))


def _as_json(name: str, there: dict[int, int], back: dict[int, int]) -> dict[str, dict[str, int]]:
    return {
        f"{name}_{way}": {str(sent): arrived for sent, arrived in seen.items()}
        for way, seen in (("there", there), ("back", back))
    }
