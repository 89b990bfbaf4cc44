# SPDX-License-Identifier: Apache-2.0
"""Ports to processes on this machine over 127.0.0.0/8: a network without root.

Host k (k = 0, 1, ...) binds its socket to its own address 127.77.1.(k+1). The switch owns the alias 127.77.0.(k+1) of
each host. A datagram from host i to the alias of host j becomes the frame that host i would have sent to host j:
10.0.0.(i+1) to 10.0.0.(j+1), with its DSCP and ECN. A frame that the program sends out of the port of host j goes to
127.77.1.(j+1) from the alias of the frame's source host. So each host sees its peers under their aliases.

One socket serves an alias and a UDP port; all hosts use the same UDP ports at both ends.
"""

import errno
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dlcp.switch.ports import ETHERNET_BYTES, PortCounters, ReceivedFrames, enlarge_buffers
from dlcp.wire import UDP_PORT_BASE

_MTU_BYTES: Final = 9000
"""Default for the largest IPv4 packet accepted from a host."""
_UDP_HEADERS_BYTES = ETHERNET_BYTES + 20 + 8
_IP_HEADERS_BYTES = 20 + 8
_IP_TOS, _IP_RECVERR, _IP_RECVTOS = 1, 11, 13
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
_SO_MEMINFO, _MEMINFO_WORDS, _MEMINFO_DROPS = 55, 9, 8
_SEGMENTS_MAX, _BURST_BYTES_MAX = 44, 60_000
_HEADERS_KEPT = 4096
_ANCILLARY_BYTES = 2 * socket.CMSG_SPACE(4)


@dataclass(frozen=True)
class LoopbackHost:
    """One host behind a loopback port; addresses are IPv4 in dotted form.

    The program sees ``address`` and ``mac``; the host's process binds to ``real``; its peers send to ``alias``.
    """

    port: int
    address: str
    mac: str
    real: str
    alias: str

    @classmethod
    def numbered(cls, index: int) -> "LoopbackHost":
        """Return host ``index`` (0..249) with the project's standard addresses."""
        last = index + 1
        return cls(last, f"10.0.0.{last}", f"02:00:00:00:00:{last:02x}", f"127.77.1.{last}", f"127.77.0.{last}")


class LoopbackPorts:
    """The ports of hosts that are processes on this machine.

    Parameters
    ----------
    hosts
        The hosts, one per port.
    udp_ports
        UDP ports served on every alias.
    mtu_bytes
        Largest IPv4 packet accepted from a host.

    Raises
    ------
    OSError
        An alias is already in use, most likely by another switch.
    """

    def __init__(
        self, hosts: Sequence[LoopbackHost], udp_ports: Iterable[int] = (UDP_PORT_BASE,), mtu_bytes: int = _MTU_BYTES
    ) -> None:
        self.hosts = tuple(hosts)
        self.counters = {host.port: PortCounters() for host in self.hosts}
        self._payload_max = mtu_bytes - _IP_HEADERS_BYTES
        self._by_port = {host.port: host for host in self.hosts}
        self._by_real = {host.real: host for host in self.hosts}
        self._inbound: dict[int, tuple[socket.socket, LoopbackHost, int]] = {}
        self._outbound: dict[tuple[int, int], socket.socket] = {}
        self._udp_ports = frozenset(udp_ports)
        self._macs = {host.port: _mac_bytes(host.mac) for host in self.hosts}
        self._addresses = {host.port: _address_int(host.address) for host in self.hosts}
        self._header = lru_cache(_HEADERS_KEPT)(self._new_header)  # most packets repeat one
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        try:
            for host in self.hosts:
                for udp_port in sorted(self._udp_ports):
                    self._open(host, udp_port)
        except OSError:
            self.close()
            raise

    def describe(self, port: int) -> str:
        """Return the real address and the alias of a port's host."""
        host = self._by_port[port]
        return f"loopback {host.real} as {host.alias}"

    def filenos(self) -> list[int]:
        """Return the file descriptors of the aliases' sockets."""
        return list(self._inbound)

    def receive(self, fileno: int, limit: int) -> ReceivedFrames:
        """Receive datagrams sent to one alias, and prepend the headers they would have on a network."""
        sock, target, udp_port = self._inbound[fileno]
        burst = ReceivedFrames()
        packets = burst.packets
        while len(packets) < limit:
            try:
                size, ancillary, _, sender = sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
            except BlockingIOError:
                return burst
            except OSError as error:
                if not self._drain_errors(sock, error):
                    self.counters[target.port].receive_errors += 1
                    return burst
                continue
            source = self._by_real.get(sender[0])
            if source is None or sender[1] not in self._udp_ports:
                self.counters[target.port].refused += 1
                continue
            tos, segment = 0, size
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_IP and kind == _IP_TOS:
                    tos = data[0]
                elif level == _SOL_UDP and kind == _UDP_GRO:
                    segment = int.from_bytes(data[:4], sys.byteorder)
            self._split(burst, source, target, (sender[1], udp_port), tos, size, segment)
        return burst

    def send(self, port: int, packets: list[bytearray]) -> None:
        """Send the payload of frames to a port's host, each from the alias of its source host."""
        counters = self.counters[port]
        address, mac = self._addresses[port], self._macs[port]
        run: list[memoryview] = []
        run_key = (0, 0, 0, 0, 0)
        for packet in packets:
            if len(packet) < _UDP_HEADERS_BYTES or not packet.startswith(mac):
                counters.undeliverable += 1
                continue
            ether_type, version, tos, total, protocol, source, target, source_port, target_port = _SENT.unpack_from(
                packet
            )
            if (
                (ether_type, version, protocol, target) != (0x0800, 0x45, socket.IPPROTO_UDP, address)
                or not _IP_HEADERS_BYTES <= total <= len(packet) - ETHERNET_BYTES
                or (source, source_port) not in self._outbound
                or target_port not in self._udp_ports
            ):
                counters.undeliverable += 1
                continue
            counters.sent += 1
            counters.sent_bytes += len(packet)
            key = (source, source_port, target_port, tos, total)
            if run and (key != run_key or len(run) == _SEGMENTS_MAX or (len(run) + 1) * total > _BURST_BYTES_MAX):
                self._send_run(port, run_key, run)
                run = []
            run_key = key
            run.append(memoryview(packet)[_UDP_HEADERS_BYTES : ETHERNET_BYTES + total])
        if run:
            self._send_run(port, run_key, run)

    def refresh(self) -> None:
        """Read from the kernel the datagrams dropped because an alias's socket was full."""
        overrun = dict.fromkeys(self.counters, 0)
        for sock, host, _ in self._inbound.values():
            memory = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * _MEMINFO_WORDS)
            overrun[host.port] += struct.unpack(f"={len(memory) // 4}I", memory)[_MEMINFO_DROPS]
        for port, count in overrun.items():
            self.counters[port].overrun = count

    def close(self) -> None:
        """Close all sockets."""
        for sock, _, _ in self._inbound.values():
            sock.close()
        self._inbound.clear()
        self._outbound.clear()

    def _open(self, host: LoopbackHost, udp_port: int) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._inbound[sock.fileno()] = (sock, host, udp_port)
        self._outbound[_address_int(host.address), udp_port] = sock
        sock.setblocking(False)
        enlarge_buffers(sock)
        sock.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        try:
            sock.bind((host.alias, udp_port))
        except OSError as error:
            raise OSError(
                error.errno, f"cannot bind {host.alias}:{udp_port} ({error.strerror}); is another switch running?"
            ) from None

    def _split(
        self,
        burst: ReceivedFrames,
        source: LoopbackHost,
        target: LoopbackHost,
        udp_ports: tuple[int, int],
        tos: int,
        size: int,
        segment: int,
    ) -> None:
        """Split a buffer that the kernel coalesced (GRO) into datagrams, and add them to a burst."""
        counters = self.counters[source.port]
        if segment > self._payload_max:
            counters.oversize += -(-size // segment)
            return
        view = self._view
        ports, packets = burst.ports, burst.packets
        for start in range(0, size, segment) if size else (0,):
            end = min(start + segment, size)
            packet = bytearray(self._header(source.port, target.port, *udp_ports, tos, end - start))
            packet += view[start:end]
            ports.append(source.port)
            packets.append(packet)
            counters.received += 1
            counters.received_bytes += len(packet)

    def _new_header(self, port: int, to: int, udp_port: int, to_udp_port: int, tos: int, size: int) -> bytes:
        """Return Ethernet, IPv4 and UDP headers for a payload of ``size`` bytes between the hosts at two ports."""
        source, target = self._by_port[port], self._by_port[to]
        return udp_headers(source.mac, target.mac, source.address, target.address, udp_port, to_udp_port, tos, size)

    def _send_run(self, port: int, key: tuple[int, int, int, int, int], payloads: list[memoryview]) -> None:
        """Send payloads of one size with one system call (GSO)."""
        source, source_port, target_port, tos, total = key
        sock = self._outbound[source, source_port]
        segment = total - _IP_HEADERS_BYTES if len(payloads) > 1 else 0
        target = (self._by_port[port].real, target_port)
        for _ in range(2):
            try:
                sock.sendmsg(payloads, _ancillary(tos, segment), 0, target)
                return
            except OSError as error:
                # The first error may belong to an earlier datagram to a host that is gone.
                if not self._drain_errors(sock, error):
                    break
        counters, count = self.counters[port], len(payloads)
        counters.sent -= count
        counters.sent_bytes -= count * (ETHERNET_BYTES + total)
        counters.send_errors += count

    def _drain_errors(self, sock: socket.socket, error: OSError) -> bool:
        """Count the hosts that the kernel reports as unreachable; return False for any other error."""
        if error.errno not in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH):
            return False
        while True:
            try:
                _, _, _, target = sock.recvmsg(0, 0, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except OSError:
                return True
            host = self._by_real.get(target[0])
            if host is not None:
                self.counters[host.port].unreachable += 1


_FRAME = struct.Struct("!12xHBBHHHBBHIIHHHH")
_SENT = struct.Struct("!12xHBBH5xB2xIIHH")
"""The fields of a frame that determine how it is sent: type, version, TOS, length, protocol, addresses, ports."""


def udp_headers(
    source_mac: str, target_mac: str, source: str, target: str, source_port: int, target_port: int, tos: int, size: int
) -> bytes:
    """Return the 42 bytes of Ethernet, IPv4 and UDP headers for a payload of ``size`` bytes.

    The IPv4 checksum is valid; the UDP checksum is 0, for none (RFC 768). Don't-fragment is set, TTL is 64.
    """
    fields = [0x0800, 0x45, tos, 20 + 8 + size, 0, 0x4000, 64, socket.IPPROTO_UDP, 0]
    fields += [_address_int(source), _address_int(target), source_port, target_port, 8 + size, 0]
    header = bytearray(_FRAME.pack(*fields))
    header[0:6] = _mac_bytes(target_mac)
    header[6:12] = _mac_bytes(source_mac)
    header[24:26] = internet_checksum(header[14:34]).to_bytes(2, "big")
    return bytes(header)


def internet_checksum(data: bytes | bytearray) -> int:
    """Return the Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@lru_cache(_HEADERS_KEPT)
def _ancillary(tos: int, segment: int) -> list[tuple[int, int, bytes]]:
    """Return the control messages of datagrams: their TOS, and the size of segments if the kernel splits them."""
    messages = [(socket.IPPROTO_IP, _IP_TOS, struct.pack("=i", tos))]
    return [*messages, (_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", segment))] if segment else messages


def _mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _address_int(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")
