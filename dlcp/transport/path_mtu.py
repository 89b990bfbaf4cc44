# SPDX-License-Identifier: Apache-2.0
"""Find the largest packets that arrive at each peer by probing: before training, and when they no longer arrive.

A path may pass small packets and silently drop large ones (an MTU black hole), so neither a greeting nor the kernel's
path MTU is enough. This is packetization-layer discovery (RFC 8899) reduced to a short list of sizes: HELLO packets
padded to a payload's size, never fragmented, each answered by a small HELLO_ACK that names the size.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait  # select.select cannot handle descriptors from 1024 on
from typing import Any, Final

from dlcp import wire
from dlcp.host.ip import IPV4, PMTUDISC_PROBE, UDP_BYTES, IpFamily, family_of
from dlcp.inputs.addresses import Address
from dlcp.wire import Header, PacketType, Queue

COMMON_MTUS: Final = (9000, 1500, 1460, 1450, 1400, 1280, 576)
"""Jumbo frames, Ethernet, a large cloud's network, VXLAN, common tunnels, the minima of IPv6 and IPv4."""
ETHERNET_MTU: Final = 1500
"""Assumed where no path can be probed, as to a parameter server."""
PAYLOAD_LEAST: Final = 64
"""The smallest payload; a peer that does not receive even this is unreachable."""

REPEAT_S: Final = 0.02
TRIES: Final = 25
"""Tries of each size once a peer answers. At 30 % loss each way, 5e-8 of good paths fail."""
SMALLER_AFTER: Final = 2
"""Tries of the largest size alone before the others are tried as well."""
WIDER_AFTER_S: Final = 10.0
"""The time after which a path that has become narrow is probed again for whole packets, and the shortest time between
two searches that a peer's probes cause: if any probe did, two ranks would make each other search without end."""

log = logging.getLogger("dlcp")


def headers_bytes(family: IpFamily) -> int:
    """Return the bytes of a packet before its payload, from the IP header on."""
    return family.header_bytes + UDP_BYTES + wire.HEADER_BYTES


def payload_for_mtu(mtu: int, family: IpFamily = IPV4) -> int:
    """Return a packet's payload in bytes on a path of this MTU: a multiple of 8."""
    return (mtu - headers_bytes(family)) // 8 * 8


def mtu_below(candidates: Sequence[int], passed: int, family: IpFamily = IPV4) -> int:
    """Return the largest MTU at which ``passed`` was the largest of these payloads, from the largest, to pass."""
    return min(size for size in candidates if size > passed) + headers_bytes(family) - 1


def first_hop_mtu(address: Address) -> int:
    """Return the MTU of the first hop to an address, as this host's kernel knows it, in bytes, at most 65535."""
    family = family_of(address[0])
    with family.udp_socket() as sock:
        sock.connect(address)  # sends nothing; asks the routing table
        return min(sock.getsockopt(family.level, family.mtu), 65535)  # IPv6's on loopback is larger


def candidate_payloads(mtu: int, configured: int = 0, family: IpFamily = IPV4) -> list[int]:
    """Return the payload sizes worth trying, the largest first.

    Parameters
    ----------
    mtu
        The first hop's; nothing larger can leave this host.
    configured
        The requested size, which is then the largest; 0 for the largest common one.
    """
    largest = configured or payload_for_mtu(min(mtu, max(COMMON_MTUS)), family)
    common = {payload_for_mtu(size, family) for size in COMMON_MTUS}
    return sorted({largest, PAYLOAD_LEAST} | {size for size in common if size < largest}, reverse=True)


@dataclass(slots=True)
class SizeSearch:
    """Search for the largest payload that passes to one peer."""

    candidates: Sequence[int]
    passed: int = 0
    tries: int = 0
    tries_since_answer: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether the largest size has passed, or no larger one is likely to."""
        return self.passed == self.candidates[0] or (self.passed > 0 and self.tries_since_answer > TRIES)

    def next_sizes(self) -> list[int]:
        """Return the sizes to try now."""
        larger = [size for size in self.candidates if size > self.passed]
        few = self.tries < SMALLER_AFTER
        self.tries += 1
        self.tries_since_answer += self.passed > 0
        return larger[:1] + larger[1:][-1:] if few else larger

    def on_answer(self, size: int) -> bool:
        """Note that a size has passed; return whether it was one of the candidates."""
        if size in self.candidates and size > self.passed:
            self.passed = size
            self.tries_since_answer = 0
        return size in self.candidates


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
    _searches: dict[int, SizeSearch] = field(init=False)
    _due_s: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._searches = {peer: SizeSearch(self.candidates) for peer in self.peers}
        self._due_s = dict.fromkeys(self.peers, 0.0)

    @property
    def done(self) -> bool:
        """Whether every peer has been reached, and no larger size is likely to pass."""
        return all(search.is_settled for search in self._searches.values())

    @property
    def unreachable(self) -> list[int]:
        """Peers that have not answered so far."""
        return [peer for peer, search in self._searches.items() if not search.passed]

    @property
    def payload_bytes(self) -> int:
        """The largest payload that has passed to every peer; 0 until all have been reached."""
        return min((search.passed for search in self._searches.values()), default=self.candidates[0])

    def turn(self, wait_s: float) -> None:
        """Send due probes, and process packets that arrive within ``wait_s``."""
        with _never_fragmented(self.sock):
            for peer, search in self._searches.items():
                if not search.is_settled and time.monotonic() >= self._due_s[peer]:
                    for size in search.next_sizes():
                        self._send(PacketType.HELLO, size, self.peers[peer], bytes(size))
                    self._due_s[peer] = time.monotonic() + REPEAT_S
            readable = wait([self.sock], wait_s)
            while readable and self._receive():
                pass

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
        address = self.peers.get(header.sender)
        if address is None or source[:2] != address[:2] or (header.token, header.job) != (self.token, self.job):
            return True
        size = len(datagram) - wire.HEADER_BYTES
        if header.type is PacketType.HELLO and header.index == size:
            self._send(PacketType.HELLO_ACK, size, address, b"")
        elif header.type is PacketType.HELLO_ACK:
            self._searches[header.sender].on_answer(header.index)
        return True

    def _send(self, kind: PacketType, size: int, address: Address, padding: bytes) -> None:
        header = Header(kind, 0, Queue.CONTROL, 0, 0, self.job, 0, 0, 0, self.rank, size, 0, self.token)
        # A packet above the first hop's MTU cannot leave, and a full buffer loses it: both count as no answer.
        with contextlib.suppress(OSError):
            self.sock.sendto(header.encode() + padding, address)


class NarrowPath:
    """Detects during training whether full packets still pass to a peer, and if not, finds the size that does.

    From then on, the engine sends larger packets in pieces of that size, until full ones pass again.

    Parameters
    ----------
    label
        For messages: the job and the peer.
    payload_bytes
        Of a full packet.
    family
        That of the path.
    flow
        The ``flow_view`` of ``engine.h``.
    probe
        Sends a HELLO padded to a size.
    call_later
        Runs a function in the connection's thread after some seconds.
    """

    def __init__(
        self,
        label: str,
        payload_bytes: int,
        family: IpFamily,
        flow: Any,
        probe: Callable[[int], object],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._label, self._flow, self._probe, self._call_later = label, flow, probe, call_later
        self._family, self._candidates = family, candidate_payloads(max(COMMON_MTUS), payload_bytes, family)
        self._search: SizeSearch | None = None
        self._again_s = 0.0

    def suspect(self) -> None:
        """Probe the path, unless that is under way."""
        if self._search is None:
            self._search = SizeSearch(self._candidates)
            self._turn()

    def on_probe(self, now_s: float) -> None:
        """Probe the path as the peer does: it may miss only large answers, and this rank may send nothing else."""
        if now_s >= self._again_s:
            self._again_s = now_s + WIDER_AFTER_S
            self.suspect()

    def on_answer(self, size: int) -> bool:
        """Note that a probe of this size has been answered; return whether it was one of ours."""
        return self._search is not None and self._search.on_answer(size)

    def _turn(self) -> None:
        search = self._search
        assert search
        if search.is_settled:
            self._search = None
            self._settle(search.passed)
        elif search.tries > 2 * TRIES and not search.passed:
            self._search = None  # nothing passes, which deadlines detect
        else:
            for size in search.next_sizes():
                self._probe(size)
            self._call_later(REPEAT_S, self._turn)

    def _settle(self, passed: int) -> None:
        full, before = self._candidates[0], self._flow.piece_bytes
        self._flow.piece_bytes = passed if passed < full else 0
        if passed < full:
            self._call_later(WIDER_AFTER_S, self.suspect)
        if self._flow.piece_bytes == before:
            return
        if passed == full:
            log.warning("%s: packets of %d bytes arrive again, and leave whole", self._label, full)
            return
        log.warning(
            "%s: packets of %d bytes no longer arrive, but those of %d do: the path's MTU has shrunk to at most %d, "
            "without an ICMP message; larger packets now leave in pieces; look for a tunnel or a route that has "
            "changed, and restart with payload_bytes=%d if it stays",
            *(self._label, full, passed, mtu_below(self._candidates, passed, self._family), passed),
        )


@contextlib.contextmanager
def _never_fragmented(sock: socket.socket) -> Iterator[None]:
    """Send without fragmentation, regardless of the kernel's path MTU."""
    family = IpFamily.of(sock)
    before = sock.getsockopt(family.level, family.mtu_discover)
    sock.setsockopt(family.level, family.mtu_discover, PMTUDISC_PROBE)
    try:
        yield
    finally:
        sock.setsockopt(family.level, family.mtu_discover, before)
