# SPDX-License-Identifier: Apache-2.0
"""A UDP socket that moves whole bursts: UDP_SEGMENT out, UDP_GRO in."""

import contextlib
import errno
import os
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from dlcp.transport.messages import Address
from dlcp.transport.sockets import UDP_GRO, UDP_SEGMENT

BURST_BYTES_MAX: Final = 1 << 16
_ANCILLARY_BYTES: Final = 128
_FD_SETSIZE: Final = 1024
"""From this descriptor on, select.select fails; below, it sleeps by the microsecond, poll by the millisecond."""
_REFUSES_BURSTS: Final = (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP)


class Burst(NamedTuple):
    """Packets between this rank and a peer that go through the kernel as one."""

    data: memoryview
    packet_bytes: int
    """Of each packet; the last may be shorter."""
    tos: int
    """The IPv4 type of service of all."""
    peer: Address
    path: int = 0
    """On which it leaves."""

    def packets(self, first_byte: int = 0) -> Iterator[memoryview]:
        """Return the packets from a byte on; an empty burst is one empty packet."""
        for start in range(first_byte, max(len(self.data), 1), self.packet_bytes):
            yield self.data[start : start + self.packet_bytes]

    def send_each(self, send: Callable[[memoryview], bool]) -> bool:
        """Send the packets one by one; return False if the socket has no room for the first."""
        packets = self.packets()
        if not send(next(packets)):
            return False
        for packet in packets:
            send(packet)  # one that the socket cannot take now, when others have left, is as good as lost
        return True


class BurstSocket:
    """A rank's socket. Not thread-safe, but for :meth:`wake`.

    Parameters
    ----------
    sock
        Bound, and not blocking; it remains its owner's to close.
    further
        More of them, only to send from.
    counters
        Gets what happens: ``sent_bursts``, ``send_errors``, ``received_bursts``, ``receive_errors``, ``truncated``.

    Attributes
    ----------
    offload
        Whether the kernel takes whole bursts (UDP_SEGMENT).
    """

    def __init__(self, sock: socket.socket, further: Sequence[socket.socket], counters: Counter[str]) -> None:
        self._socket, self._counters = sock, counters
        self._sockets = [sock, *further]
        self._buffer = bytearray(BURST_BYTES_MAX)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (sock.fileno(), self._wake_read):
            self._poll.register(descriptor, select.POLLIN)
        self.offload = True

    def send(self, burst: Burst) -> bool:
        """Send a burst, whole if the kernel takes it; return False if the socket is full, and nothing has left."""
        is_one = len(burst.data) <= burst.packet_bytes
        if self.offload or is_one:
            self._counters["sent_bursts"] += 1
            try:
                return self._send(burst.data, burst.tos, 0 if is_one else burst.packet_bytes, burst.peer, burst.path)
            except OSError:
                self.offload = False  # no checksum offload on the way out, or an old kernel
        return burst.send_each(lambda packet: self.send_packet(packet, burst.tos, burst.peer, burst.path))

    def send_packet(self, packet: memoryview, tos: int, peer: Address, path: int) -> bool:
        """Send one packet; return False if the socket is full."""
        return self._send(packet, tos, 0, peer, path)

    def _send(self, data: memoryview, tos: int, segment: int, peer: Address, path: int) -> bool:
        ancillary: list[tuple[int, int, bytes]] = []
        if tos:
            ancillary.append((socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", tos)))
        if segment:
            ancillary.append((socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", segment)))
        try:
            self._sockets[path].sendmsg([data], ancillary, 0, peer)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return False
            if segment and error.errno in _REFUSES_BURSTS:
                raise
            # No route, or an unreachable peer: lost like any packet; the deadline names the peer.
            self._counters["send_errors"] += 1
        return True

    def receive(self) -> Burst | None:
        """Return the next burst, None if there is none; its bytes are there until the next call."""
        try:
            size, ancillary, flags, peer = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            self._counters["receive_errors"] += 1  # an ICMP error of an earlier send
            return None
        tos, segment = 0, size
        for level, kind, data in ancillary:
            if level == socket.IPPROTO_IP and kind == socket.IP_TOS:
                tos = data[0]
            elif level == socket.IPPROTO_UDP and kind == UDP_GRO:
                segment = struct.unpack_from("i", data)[0] or size
        self._counters["received_bursts"] += 1
        self._counters["truncated"] += bool(flags & socket.MSG_TRUNC)
        return Burst(memoryview(self._buffer)[:size], max(segment, 1), tos, peer)

    def wait(self, wait_s: float) -> bool:
        """Wait until there is something to receive, at most so long; return whether :meth:`wake` has ended that."""
        watched = [self._socket.fileno(), self._wake_read]
        if max(watched) < _FD_SETSIZE:
            ready = select.select(watched, [], [], wait_s)[0]
        else:
            ready = [descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)]
        if self._wake_read not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return True

    def wake(self) -> None:
        """Make :meth:`wait` return; from any thread."""
        with contextlib.suppress(OSError):  # full, which wakes as well; or closed
            os.write(self._wake_write, b"\0")

    def release(self) -> None:
        """Close what :meth:`wake` writes to."""
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._wake_read = self._wake_write = -1
