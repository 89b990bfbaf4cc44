# SPDX-License-Identifier: Apache-2.0
"""The packets by which two doctors try the path between them, and the side that answers.

A probe travels as DLCP's own packets do: a HELLO to a port of DLCP's block, so that firewalls and switches treat it so.
After the header come what the answer should be like and zeros up to the size that is tried. Don't-fragment is set. The
answer is never larger than the question, so nobody can use a listening doctor to flood a third.
"""

import contextlib
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dlcp import wire
from dlcp.doctor.sockets import IP_RECVTOS
from dlcp.transport import Address

DEFAULT_PORT: Final = wire.UDP_PORT_BASE + wire.UDP_PORT_COUNT - 1
"""The last port of DLCP's block; ranks take the first ones."""
IP_UDP_BYTES: Final = 28

_BODY = struct.Struct(">8sHBBII")
_MAGIC: Final = b"DLCPDOC1"
SMALLEST_BYTES: Final = wire.HEADER_BYTES + _BODY.size
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
_IP_PKTINFO: Final = 8
_SESSIONS: Final = 1024
"""How many sessions a listener counts packets of; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A question or an answer.

    Parameters
    ----------
    token
        Session; drawn by who asks.
    sequence
        Number of the probe; the answer bears it too.
    size_bytes
        In a question how large the answer should be, in an answer how large the question was: whole IP packets.
    wanted_tos
        TOS byte (DSCP and ECN) that the answer should bear.
    seen_tos
        In an answer: the TOS byte that the question arrived with.
    arrived
        In an answer: how many questions of this session have arrived.
    """

    token: int
    sequence: int
    size_bytes: int = 0
    wanted_tos: int = 0
    seen_tos: int = 0
    arrived: int = 0

    def encode(self, *, answer: bool, packet_bytes: int) -> bytes:
        """Return a UDP payload that makes an IP packet of ``packet_bytes``, or the smallest that holds the probe."""
        kind = wire.PacketType.HELLO_ACK if answer else wire.PacketType.HELLO
        header = wire.Header(kind, 0, wire.Queue.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 1, self.token).encode()
        body = _BODY.pack(_MAGIC, self.size_bytes, self.wanted_tos, self.seen_tos, self.sequence, self.arrived)
        return (header + body).ljust(packet_bytes - IP_UDP_BYTES, b"\0")


def decode(datagram: bytes | memoryview, *, answer: bool) -> Probe | None:
    """Return the probe in a datagram; None if it is none."""
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


def open_socket(host: str = "", ports: Iterable[int] = (0,)) -> socket.socket:
    """Return a UDP socket that sets don't-fragment and reports the TOS byte and address of what arrives.

    Raises
    ------
    OSError
        None of the ports can be bound.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option, value in ((_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE), (IP_RECVTOS, 1), (_IP_PKTINFO, 1)):
        sock.setsockopt(socket.IPPROTO_IP, option, value)
    failure = OSError("no port to try")
    for port in ports:
        try:
            sock.bind((host, port))
        except OSError as error:
            failure = OSError(error.errno, f"UDP {host or '*'}:{port}: {error.strerror}")
        else:
            return sock
    sock.close()
    raise failure


class Listener:
    """Answers the probes of other machines.

    Parameters
    ----------
    sock
        From :func:`open_socket`; closed by :meth:`close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._arrived: OrderedDict[int, int] = OrderedDict()
        self.address: Address = sock.getsockname()

    def serve(self, seconds: float) -> list[Address]:
        """Answer for so long; return who asked for the first time."""
        end_s = time.monotonic() + seconds
        fresh = []
        while (left_s := end_s - time.monotonic()) > 0:
            self._sock.settimeout(left_s)
            try:
                datagram, ancillary, _, source = self._sock.recvmsg(65536, 128)
            except TimeoutError:
                break
            except OSError:  # an ICMP error about an earlier answer
                continue
            question = decode(datagram, answer=False)
            if question is None:
                continue
            if question.token not in self._arrived:
                fresh.append(source)
            self._answer(question, len(datagram) + IP_UDP_BYTES, ancillary, source)
        return fresh

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()

    def _answer(self, question: Probe, size: int, ancillary: list[tuple[int, int, bytes]], source: Address) -> None:
        arrived = self._arrived.pop(question.token, 0) + 1
        self._arrived[question.token] = arrived
        if len(self._arrived) > _SESSIONS:
            self._arrived.popitem(last=False)
        answer = Probe(question.token, question.sequence, size, question.wanted_tos, tos_of(ancillary), arrived)
        reply = answer.encode(answer=True, packet_bytes=min(question.size_bytes, size))
        extras = [(socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", question.wanted_tos))]
        extras += [  # the answer has to come from the address that was asked
            (socket.IPPROTO_IP, _IP_PKTINFO, struct.pack("i4s4s", 0, value[8:12], bytes(4)))
            for level, kind, value in ancillary
            if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO)
        ]
        with contextlib.suppress(OSError):  # too large for the way back: silence is the answer
            self._sock.sendmsg([reply], extras, 0, source)


def tos_of(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the TOS byte that a packet arrived with."""
    return next(
        (value[0] for level, kind, value in ancillary if (level, kind) == (socket.IPPROTO_IP, socket.IP_TOS)), 0
    )
