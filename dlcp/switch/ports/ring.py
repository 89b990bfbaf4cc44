# SPDX-License-Identifier: Apache-2.0
"""Frames from a packet socket by way of memory shared with the kernel, many at a time (packet(7), PACKET_RX_RING).

Takes the compiled library, which copies frames between the ring and rows of an array, and sends rows.
"""

import ctypes
import mmap
import socket
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlcp import native
from dlcp.switch.ports import ETHERNET_BYTES, SOCKET_BUFFER_BYTES, PortCounters

Rows = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_SOL_PACKET: Final = 263
_PACKET_RX_RING: Final = 5
_PACKET_VERSION: Final = 10
_TPACKET_V2: Final = 1
_HEADROOM_BYTES: Final = 112
"""The kernel's own part of a frame in the ring, 66 to 82 bytes, and room for alignment."""
_BLOCK_BYTES: Final = 1 << 16
_ALIGNMENT: Final = 16


class _Ring(ctypes.Structure):
    """``packet_ring`` of packets.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_bytes", "frame_bytes", "frames_per_block", "frames", "next")),
        *((name, ctypes.c_int64) for name in ("frame_min", "frame_max", "tagged_bytes")),
    )


class PacketRing:
    """The receiving ring of a packet socket, and how rows are sent out of it.

    Parameters
    ----------
    sock
        Not bound yet, so that no frame comes in beside the ring.
    frame_max_bytes
        Longest frame that is taken.
    tagged_bytes
        What the socket's filter leaves of a frame that is to be refused.

    Raises
    ------
    OSError
        The kernel refused.
    """

    def __init__(
        self, library: ctypes.CDLL, sock: socket.socket, frame_max_bytes: int, tagged_bytes: int, counters: PortCounters
    ) -> None:
        self._fileno = sock.fileno()
        self._counters = counters
        self._take = library.dlcp_packets_take
        self._send = library.dlcp_packets_send
        self._take.restype = self._send.restype = ctypes.c_int64
        frame = -(-(frame_max_bytes + _HEADROOM_BYTES) // _ALIGNMENT) * _ALIGNMENT
        block = max(_BLOCK_BYTES, -(-frame // mmap.PAGESIZE) * mmap.PAGESIZE)
        per_block = block // frame
        blocks = SOCKET_BUFFER_BYTES // block
        sock.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
        request = struct.pack("=4I", block, blocks, frame, blocks * per_block)
        sock.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
        self._memory = mmap.mmap(self._fileno, blocks * block)
        self._view = (ctypes.c_char * 0).from_buffer(self._memory)
        self._ring = _Ring(
            ctypes.addressof(self._view),
            *(block, frame, per_block, blocks * per_block, 0),
            *(ETHERNET_BYTES, frame_max_bytes, tagged_bytes),
        )
        self._others: Numbers = np.zeros(3, np.int64)
        self._failures: Numbers = np.zeros(3, np.int64)
        self._bytes: Numbers = np.zeros(1, np.int64)

    def take(self, rows: Rows, slots: Numbers, lengths: Numbers, stamps_ns: Numbers) -> int:
        """Copy waiting frames into rows and return how many.

        Parameters
        ----------
        rows
            uint8 (n, stride).
        slots
            The rows to fill, in this order; as many frames are taken at most.
        lengths, stamps_ns
            Are told bytes and time of arrival (real time) of each, int64 (len(slots),).
        """
        address = native.address
        taken = int(
            self._take(
                ctypes.byref(self._ring),
                address(rows),
                ctypes.c_int64(rows.shape[1]),
                address(slots),
                ctypes.c_int64(len(slots)),
                address(lengths),
                address(stamps_ns),
                address(self._others),
            )
        )
        counters = self._counters
        counters.received += taken
        counters.received_bytes += int(lengths[:taken].sum())
        if self._others.any():
            refused, malformed, oversize = self._others.tolist()
            counters.refused += refused
            counters.malformed += malformed
            counters.oversize += oversize
            self._others[:] = 0
        return taken

    def send(self, rows: Rows, slots: Numbers, lengths: Numbers) -> None:
        """Send rows, in the order of ``slots``; those that cannot leave are counted and gone."""
        address = native.address
        sent = int(
            self._send(
                ctypes.c_int(self._fileno),
                address(rows),
                ctypes.c_int64(rows.shape[1]),
                address(slots),
                address(lengths),
                ctypes.c_int64(len(slots)),
                address(self._bytes),
                address(self._failures),
            )
        )
        counters = self._counters
        counters.sent += sent
        counters.sent_bytes += int(self._bytes[0])
        if sent < len(slots):
            oversize, unreachable, failed = self._failures.tolist()
            counters.oversize += oversize
            counters.unreachable += unreachable
            counters.send_errors += failed
            self._failures[:] = 0

    def close(self) -> None:
        """Let the memory go."""
        del self._view
        self._memory.close()
