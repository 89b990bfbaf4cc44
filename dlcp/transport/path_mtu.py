# SPDX-License-Identifier: Apache-2.0
"""The largest packets that arrive at each peer, found by probing before training.

A path may pass small packets and silently drop large ones (an MTU black hole), so neither a greeting nor the kernel's
path MTU is enough. This is packetization-layer discovery (RFC 8899) reduced to a short list of sizes: HELLO packets
padded to a payload's size, never fragmented, each answered by a small HELLO_ACK that names the size.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait  # select.select cannot handle descriptors from 1024 on
from typing import Final

from dlcp import wire
from dlcp.wire import Header, PacketType, Queue

Address = tuple[str, int]

IPV4_UDP_BYTES: Final = 28
COMMON_MTUS: Final = (9000, 1500, 1460, 1450, 1400, 1280, 576)
"""Jumbo frames, Ethernet, a large cloud's network, VXLAN, common tunnels, the minima of IPv6 and IPv4."""
PAYLOAD_UNKNOWN: Final = 1440
"""Fills Ethernet's MTU of 1500: used where no path can be probed, as to a parameter server."""
PAYLOAD_LEAST: Final = 64
"""The smallest payload; a peer that does not receive even this is unreachable."""

REPEAT_S: Final = 0.02
TRIES: Final = 25
"""Tries of each size once a peer answers. At 30 % loss each way, 5e-8 of good paths fail."""
SMALLER_AFTER: Final = 2
"""Tries of the largest size alone before the others are tried as well."""

_IP_MTU_DISCOVER: Final = 10
_IP_PMTUDISC_PROBE: Final = 3
_IP_MTU: Final = 14


def payload_for_mtu(mtu: int) -> int:
    """Return a packet's payload in bytes on a path of this MTU: a multiple of 8."""
    return (mtu - IPV4_UDP_BYTES - wire.HEADER_BYTES) // 8 * 8


def first_hop_mtu(address: Address) -> int:
    """Return the MTU of the first hop to an address, as this host's kernel knows it, in bytes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(address)  # sends nothing; asks the routing table
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)


def candidate_payloads(mtu: int, configured: int = 0) -> list[int]:
    """Return the payload sizes worth trying, the largest first.

    Parameters
    ----------
    mtu
        The first hop's; nothing larger can leave this host.
    configured
        The requested size, which is then the largest; 0 for the largest common one.
    """
    largest = configured or payload_for_mtu(min(mtu, max(COMMON_MTUS)))
    common = {payload_for_mtu(size) for size in COMMON_MTUS}
    return sorted({largest, PAYLOAD_LEAST} | {size for size in common if size < largest}, reverse=True)


@dataclass(slots=True)
class _Path:
    """Probing state of the path to one peer."""

    address: Address
    passed: int = 0
    tries: int = 0
    tries_since_answer: int = 0
    due_s: float = 0.0


@dataclass(slots=True)
class PathProbe:
    """Find the payload that passes to each peer, and answer the probes of others.

    Call :meth:`turn` until :attr:`done`, and then until every peer is done: peers may still probe.

    Parameters
    ----------
    rank
        This rank.
    sock
        Its bound, non-blocking UDP socket, before an endpoint reads from it.
    peers
        The address of every other rank, for both directions.
    job, token
        The job number and session token in every header of this session.
    candidates
        Payload sizes to try, the largest first; the last one tests whether a peer is reachable.
    """

    rank: int
    sock: socket.socket
    peers: Mapping[int, Address]
    job: int
    token: int
    candidates: Sequence[int]
    _paths: dict[int, _Path] = field(init=False)

    def __post_init__(self) -> None:
        self._paths = {peer: _Path(address) for peer, address in self.peers.items()}

    @property
    def done(self) -> bool:
        """Whether every peer has been reached, and no larger size is likely to pass."""
        return all(self._settled(path) for path in self._paths.values())

    @property
    def unreachable(self) -> list[int]:
        """Peers that have not answered so far."""
        return [peer for peer, path in self._paths.items() if not path.passed]

    @property
    def payload_bytes(self) -> int:
        """The largest payload that has passed to every peer; 0 until all have been reached."""
        return min((path.passed for path in self._paths.values()), default=self.candidates[0])

    def turn(self, wait_s: float) -> None:
        """Send due probes, and process what arrives within ``wait_s``."""
        with _never_fragmented(self.sock):
            for path in self._paths.values():
                if not self._settled(path) and time.monotonic() >= path.due_s:
                    self._ask(path)
            readable = wait([self.sock], wait_s)
            while readable and self._receive():
                pass

    def _settled(self, path: _Path) -> bool:
        return path.passed == self.candidates[0] or (path.passed > 0 and path.tries_since_answer > TRIES)

    def _ask(self, path: _Path) -> None:
        larger = [size for size in self.candidates if size > path.passed]
        few = path.tries < SMALLER_AFTER
        for size in {larger[0], larger[-1]} if few else larger:
            self._send(PacketType.HELLO, size, path.address, bytes(size))
        path.tries += 1
        path.tries_since_answer += path.passed > 0
        path.due_s = time.monotonic() + REPEAT_S

    def _receive(self) -> bool:
        try:
            datagram, source = self.sock.recvfrom(wire.HEADER_BYTES + self.candidates[0] + 1)
        except BlockingIOError:
            return False
        except OSError:
            return True  # an ICMP error of an earlier packet
        try:
            header = wire.decode(datagram)
        except wire.HeaderError:
            return True
        path = self._paths.get(header.sender)
        if path is None or source != path.address or (header.token, header.job) != (self.token, self.job):
            return True
        size = len(datagram) - wire.HEADER_BYTES
        if header.type is PacketType.HELLO and header.index == size:
            self._send(PacketType.HELLO_ACK, size, path.address, b"")
        elif header.type is PacketType.HELLO_ACK and header.index in self.candidates and header.index > path.passed:
            path.passed = header.index
            path.tries_since_answer = 0
        return True

    def _send(self, kind: PacketType, size: int, address: Address, padding: bytes) -> None:
        header = Header(kind, 0, Queue.CONTROL, 0, 0, self.job, 0, 0, 0, self.rank, size, 0, self.token)
        # A packet above the first hop's MTU cannot leave, and a full buffer loses it: both count as no answer.
        with contextlib.suppress(OSError):
            self.sock.sendto(header.encode() + padding, address)


@contextlib.contextmanager
def _never_fragmented(sock: socket.socket) -> Iterator[None]:
    """Send with the don't-fragment bit, regardless of the kernel's path MTU."""
    before = sock.getsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER)
    sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
    try:
        yield
    finally:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, before)
