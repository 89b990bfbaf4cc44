# SPDX-License-Identifier: Apache-2.0
"""The path to a peer, tried with packets like DLCP's: round trip, loss, largest packet, what becomes of the tags."""

import errno
import math
import secrets
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dlcp import wire
from dlcp.doctor.probe import DEFAULT_PORT, IP_UDP_BYTES, SMALLEST_BYTES, Probe, decode, open_socket, tos_of
from dlcp.transport import Address

COUNT: Final = 200
"""Packets for loss and round trip; one in 200 shows from 0.5 % loss on."""
INTERVAL_S: Final = 0.002
GREET_S: Final = 3.0
"""How long a peer may take to answer at all."""
_TRIES: Final = 3
_SHORT_BYTES: Final = SMALLEST_BYTES + IP_UDP_BYTES
_LOWEST_MTU: Final = 576
_PROBES_OF_TAGS: Final = tuple(
    wire.dscp(queue, droppable) << 2 for queue in (0, 2, 6, 7) for droppable in (False, True)
)
ECN_NAMES: Final = {1: "ECT(1)", 2: "ECT(0)", 3: "CE"}


class PeerError(RuntimeError):
    """The peer does not answer; ``fix`` says what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass
class PathReport:
    """What the path to a peer is like. Sizes are of whole IP packets; there is to the peer, back is from it."""

    peer: Address
    interface_mtu_bytes: int
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

    @property
    def loss_there(self) -> float:
        """Share of the packets that did not reach the peer."""
        return 1 - self.arrived_there / self.sent

    @property
    def loss_back(self) -> float:
        """Share of the answers that did not come back."""
        return 1 - self.arrived_back / max(1, self.arrived_there)

    @property
    def rtt_median_s(self) -> float:
        """The median round trip, in seconds."""
        return statistics.median(self.rtts_s) if self.rtts_s else math.nan


def try_path(peer: Address, count: int = COUNT) -> PathReport:
    """Try the path to a peer at which ``dlcp doctor --listen`` runs; takes some seconds.

    Raises
    ------
    PeerError
        There is no answer.
    OSError
        There is no route, or the name is unknown.
    """
    with Conversation(peer) as conversation:
        conversation.greet()
        report = PathReport(peer, _interface_mtu(conversation.sock))
        _try_loss(conversation, report, count)
        conversation.wait_s = max(0.1, min(2.0, 4 * max(report.rtts_s, default=0.25)))
        _try_sizes(conversation, report)
        _try_tags(conversation, report)
    return report


class Conversation:
    """Questions to a listening doctor and its answers; a context manager."""

    def __init__(self, peer: Address) -> None:
        self.peer = peer
        self.wait_s = 0.5
        self.token = secrets.randbits(64) | 1
        self.sequence = 0
        self.sock = open_socket()
        self.sock.connect(peer)

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def greet(self) -> None:
        """Wait for a first answer."""
        host, port = self.peer
        listen = f"run there: dlcp doctor --listen{'' if port == DEFAULT_PORT else f' {host}:{port}'}"
        end_s = time.monotonic() + GREET_S
        while time.monotonic() < end_s:
            try:
                if self.ask(_SHORT_BYTES, _SHORT_BYTES):
                    return
            except ConnectionRefusedError:
                raise PeerError(f"{host} is there, and nothing listens at its UDP port {port}", listen) from None
        fix = f"{listen}; if it runs, open UDP port {port} between the two"
        raise PeerError(f"no answer from {host}, UDP port {port}, within {GREET_S:.0f} s", fix)

    def ask(self, size: int, answer_size: int, tos: int = 0, wanted_tos: int = 0) -> tuple[Probe, int] | None:
        """Send one question; return its answer and the answer's TOS byte, or None.

        Raises
        ------
        ConnectionRefusedError
            The peer's kernel says that nobody listens.
        """
        number = self.send(size, answer_size, tos, wanted_tos)
        end_s = time.monotonic() + self.wait_s
        while number is not None and (left_s := end_s - time.monotonic()) > 0:
            for answer, answer_tos in self.answers(left_s):
                if answer.sequence == number:
                    return answer, answer_tos
        return None

    def send(self, size: int, answer_size: int, tos: int = 0, wanted_tos: int = 0) -> int | None:
        """Send a question in an IP packet of ``size`` bytes; return its number, None if it is too large to be sent."""
        self.sequence += 1
        probe = Probe(self.token, self.sequence, answer_size, wanted_tos)
        extras = [(socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", tos))]
        try:
            self.sock.sendmsg([probe.encode(answer=False, packet_bytes=size)], extras)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            return None
        return self.sequence

    def answers(self, wait_s: float) -> list[tuple[Probe, int]]:
        """Return the answers that are there, after waiting for the first one."""
        found = []
        while select.select([self.sock], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                datagram, ancillary, _, _ = self.sock.recvmsg(65536, 128)
            except ConnectionRefusedError:
                raise
            except OSError:  # an ICMP error, such as "too large": the question is lost like any other
                continue
            answer = decode(datagram, answer=True)
            if answer and answer.token == self.token:
                found.append((answer, tos_of(ancillary)))
        return found


def _try_loss(conversation: Conversation, report: PathReport, count: int) -> None:
    """Send packets at an even pace, and count them at both ends."""
    before = conversation.ask(_SHORT_BYTES, _SHORT_BYTES)
    first_arrived = before[0].arrived if before else 0
    sent_at: dict[int, float] = {}
    answered: set[int] = set()
    arrived = 0
    size = min(report.interface_mtu_bytes, 1200)
    began_s = time.monotonic()
    while len(sent_at) < count or time.monotonic() < max(sent_at.values()) + conversation.wait_s:
        due_s = began_s + len(sent_at) * INTERVAL_S
        if len(sent_at) < count and time.monotonic() >= due_s:
            number = conversation.send(size, _SHORT_BYTES)
            sent_at[number or -1] = time.monotonic()
        if len(answered) == count:
            break
        wait_s = max(0.0, due_s - time.monotonic()) if len(sent_at) < count else 0.02
        for answer, _ in conversation.answers(wait_s):
            if answer.sequence in sent_at and answer.sequence not in answered:
                report.rtts_s.append(time.monotonic() - sent_at[answer.sequence])
                answered.add(answer.sequence)
                arrived = max(arrived, answer.arrived - first_arrived)
    # The last answers may be lost: ask once more how many arrived.
    for _ in range(_TRIES):
        after = conversation.ask(_SHORT_BYTES, _SHORT_BYTES)
        if after:
            arrived = after[0].arrived - first_arrived - 1
            break
    report.sent, report.arrived_back = count, len(answered)
    report.arrived_there = max(min(arrived, count), len(answered))


def _try_sizes(conversation: Conversation, report: PathReport) -> None:
    """Find the largest packets that pass both ways, and to the peer alone."""

    def passes(size: int, answer_size: int) -> bool:
        return any(conversation.ask(size, answer_size) for _ in range(_TRIES))

    top = min(report.interface_mtu_bytes, 65535)
    report.mtu_bytes = _largest(lambda size: passes(size, size), top)
    report.mtu_there_bytes = top if report.mtu_bytes == top else _largest(lambda size: passes(size, _SHORT_BYTES), top)


def _largest(passes: Callable[[int], bool], top: int) -> int:
    """Return the largest size that passes, by bisection; 0 if not even the smallest does."""
    if passes(top):
        return top
    low, high = _LOWEST_MTU, top
    if not passes(low):
        return 0
    while high - low > 1:
        # Most paths have one of a few MTUs: with 1500 known to pass and 1501 not to, one is done.
        usual = [size for mtu in (1500, 9000) for size in (mtu, mtu + 1) if low < size < high]
        middle = usual[0] if usual else (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _try_tags(conversation: Conversation, report: PathReport) -> None:
    """Send each tag there and ask for it back, and see what arrives."""
    for tos in _PROBES_OF_TAGS:
        answer = _ask_often(conversation, tos)
        if answer:
            report.dscp_there[tos >> 2], report.dscp_back[tos >> 2] = answer[0].seen_tos >> 2, answer[1] >> 2
    for ecn in ECN_NAMES:
        answer = _ask_often(conversation, ecn)
        if answer:
            report.ecn_there[ecn], report.ecn_back[ecn] = answer[0].seen_tos & 3, answer[1] & 3


def _ask_often(conversation: Conversation, tos: int) -> tuple[Probe, int] | None:
    answers = (conversation.ask(_SHORT_BYTES, _SHORT_BYTES, tos, tos) for _ in range(_TRIES))
    return next((answer for answer in answers if answer), None)


def _interface_mtu(sock: socket.socket) -> int:
    """Return the MTU of the route to a connected socket's peer (IP_MTU, ip(7)), in bytes."""
    return sock.getsockopt(socket.IPPROTO_IP, 14)
