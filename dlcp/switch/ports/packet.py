# SPDX-License-Identifier: Apache-2.0
"""A port on a network interface: a raw packet socket that carries frames unchanged.

Opening one requires CAP_NET_RAW in the interface's network namespace. The hosts' offloads must be off, since virtual
interfaces would leave checksums and segmentation undone (``dlcp.host.netlab`` turns them off).

Frames are received through a ring that the kernel fills in memory that both share. Rows are sent many per system call,
other frames one by one.
"""

import errno
import fcntl
import logging
import mmap
import socket
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp.native import ffi, lib
from dlcp.switch.ports import ETHERNET_BYTES, SOCKET_BUFFER_BYTES, PortCounters, ReceivedFrames, enlarge_buffers

Rows = NDArray[np.uint8]
Numbers = NDArray[np.int64]

log = logging.getLogger("dlcp")
_SOL_PACKET: Final = 263
_PACKET_RX_RING: Final = 5
_PACKET_VERSION: Final = 10
_TPACKET_V2: Final = 1
_HEADROOM_BYTES: Final = 112
"""The kernel's header of a frame in the ring, 66 to 82 bytes, plus alignment."""
_BLOCK_BYTES: Final = 1 << 16
_ALIGNMENT: Final = 16
_NUMBERS: Final = ffi.typeof("int64_t[]")


OFFLOADS: Final = (
    "the switch drops frames longer than the MTU of interface %s: a sender leaves segmentation to the interface. Turn "
    "offloads off here and at the other end: ethtool --offload %s tx off tx-udp-segmentation off gso off gro off"
)


_ETH_P_ALL: Final = 3
_PACKET_STATISTICS: Final = 6
_PACKET_QDISC_BYPASS: Final = 20
_PACKET_IGNORE_OUTGOING: Final = 23
_SIOCGIFMTU: Final = 0x8921

_TAG_BYTES: Final = 4
_BURST_MAX: Final = 256
"""Most frames received at once."""
_GONE: Final = (errno.ENETDOWN, errno.ENXIO, errno.ENODEV)


class PacketPort:
    """One port on one network interface of the caller's network namespace.

    Parameters
    ----------
    port
        Port number, 1..510.
    interface
        Name of the interface.

    Raises
    ------
    OSError
        No such interface, or no permission to open a packet socket.
    """

    def __init__(self, port: int, interface: str) -> None:
        self.port = port
        self.interface = interface
        self._counted = PortCounters()
        self.counters = {port: self._counted}
        self._memory: mmap.mmap | None = None
        self.frame_max_bytes = 0
        """Longest frame that the interface carries, with a VLAN tag."""
        self._has_warned = False
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError:
            raise PermissionError(
                errno.EPERM, f"cannot open a packet socket on {interface}: CAP_NET_RAW is missing; run as root"
            ) from None
        try:
            self._set_up()
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"port {port}: cannot use interface {interface}: {error.strerror}") from None

    def describe(self, port: int) -> str:
        """Return the name of the interface."""
        return f"interface {self.interface}"

    def filenos(self) -> list[int]:
        """Return the file descriptor of the socket."""
        return [self._socket.fileno()]

    def receive(self, fileno: int, limit: int) -> ReceivedFrames:
        """Receive frames from the interface."""
        taken = self.take(self._rows, self._all_rows[:limit], self._lengths, self._stamps_ns)
        rows, lengths = self._rows, self._lengths[:taken].tolist()
        packets = [bytearray(rows[number, :length].data) for number, length in enumerate(lengths)]
        return ReceivedFrames([self.port] * taken, packets)

    def take(self, rows: Rows, slots: Numbers, lengths: Numbers, stamps_ns: Numbers) -> int:
        """Copy waiting frames into rows; return their number.

        Parameters
        ----------
        rows
            uint8 (n, stride).
        slots
            The rows to fill, in this order; at most ``len(slots)`` frames are taken.
        lengths, stamps_ns
            Receive the bytes and arrival time (real time) of each frame, int64 (len(slots),).
        """
        taken: int = lib.dlcp_packets_take(
            self._ring,
            ffi.from_buffer(rows),
            rows.shape[1],
            ffi.from_buffer(_NUMBERS, slots),
            len(slots),
            ffi.from_buffer(_NUMBERS, lengths),
            ffi.from_buffer(_NUMBERS, stamps_ns),
            ffi.from_buffer(_NUMBERS, self._others),
        )
        self._counted.received += taken
        self._counted.received_bytes += int(lengths[:taken].sum())
        if self._others.any():
            malformed, oversize = self._others.tolist()
            self._counted.malformed += malformed
            self._counted.oversize += oversize
            self._others[:] = 0
            if oversize and not self._has_warned:
                self._has_warned = True
                log.warning(OFFLOADS, self.interface, self.interface)
        # Readable without a frame: an error is pending, for example because the interface is gone.
        if not taken and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._counted.receive_errors += 1
        return taken

    def send_rows(self, rows: Rows, slots: Numbers, lengths: Numbers) -> None:
        """Send rows in the order of ``slots``; those that cannot be sent are counted and dropped."""
        sent: int = lib.dlcp_packets_send(
            self._socket.fileno(),
            ffi.from_buffer(rows),
            rows.shape[1],
            ffi.from_buffer(_NUMBERS, slots),
            ffi.from_buffer(_NUMBERS, lengths),
            len(slots),
            ffi.from_buffer(_NUMBERS, self._bytes),
            ffi.from_buffer(_NUMBERS, self._failures),
        )
        self._counted.sent += sent
        self._counted.sent_bytes += int(self._bytes[0])
        if sent < len(slots):
            oversize, unreachable, failed = self._failures.tolist()
            self._counted.oversize += oversize
            self._counted.unreachable += unreachable
            self._counted.send_errors += failed
            self._failures[:] = 0

    def send(self, port: int, packets: list[bytearray]) -> None:
        """Send frames out of the interface."""
        counters, send = self._counted, self._socket.send
        for packet in packets:
            try:
                send(packet)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    counters.oversize += 1
                elif error.errno in _GONE:
                    counters.unreachable += 1
                else:
                    counters.send_errors += 1
                continue
            counters.sent += 1
            counters.sent_bytes += len(packet)

    def refresh(self) -> None:
        """Add to ``overrun`` the frames that the kernel has dropped since the last call."""
        try:
            statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        except OSError:
            return
        self._counted.overrun += struct.unpack("=II", statistics)[1]

    def close(self) -> None:
        """Close the socket."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._socket.close()

    def _set_up(self) -> None:
        sock = self._socket
        sock.setblocking(False)
        enlarge_buffers(sock)
        sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        # The switch does its own queueing; packets in the interface's qdisc would be invisible to it.
        sock.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        untagged_max = self._mtu_bytes() + ETHERNET_BYTES
        self.frame_max_bytes = untagged_max + _TAG_BYTES
        self._map_ring(untagged_max)  # before the socket is bound, so that no frame bypasses the ring
        self._rows: Rows = np.empty((_BURST_MAX, self.frame_max_bytes), np.uint8)
        self._all_rows: Numbers = np.arange(_BURST_MAX)
        self._lengths, self._stamps_ns = np.empty((2, _BURST_MAX), np.int64)
        self._others, self._failures = np.zeros(2, np.int64), np.zeros(3, np.int64)
        self._bytes: Numbers = np.zeros(1, np.int64)
        sock.bind((self.interface, _ETH_P_ALL))

    def _map_ring(self, frame_max: int) -> None:
        frame = -(-(frame_max + _HEADROOM_BYTES) // _ALIGNMENT) * _ALIGNMENT
        block = max(_BLOCK_BYTES, -(-frame // mmap.PAGESIZE) * mmap.PAGESIZE)
        blocks, per_block = SOCKET_BUFFER_BYTES // block, block // frame
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
        request = struct.pack("=4I", block, blocks, frame, blocks * per_block)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
        self._memory = mmap.mmap(self._socket.fileno(), blocks * block)
        ring = {
            "memory": ffi.from_buffer(self._memory),
            "block_bytes": block,
            "frame_bytes": frame,
            "frames_per_block": per_block,
            "frames": blocks * per_block,
            "frame_min": ETHERNET_BYTES,
            "frame_max": frame_max,
        }
        self._ring = ffi.new("packet_ring *", ring)

    def _mtu_bytes(self) -> int:
        request = struct.pack("16si20x", self.interface.encode(), 0)
        reply = fcntl.ioctl(self._socket.fileno(), _SIOCGIFMTU, request)
        return int(struct.unpack_from("16si", reply)[1])
