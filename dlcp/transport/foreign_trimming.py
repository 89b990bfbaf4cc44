# SPDX-License-Identifier: Apache-2.0
"""Packets that switches of other vendors have trimmed.

SAI's proposal for packet trimming demands that such a switch corrects the length in IP's header, and says nothing about
UDP's. If that stays as it was, the kernel refuses the packet. A raw socket still gets it, and a filter in the kernel
passes no others.
"""

import ctypes
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dlcp.host.closing import Closing
from dlcp.host.ip import IPV6, UDP_BYTES, IpFamily
from dlcp.transport.messages import Address

Take = Callable[[memoryview, int, Address], None]
"""Called with a datagram's payload, its type of service and its source."""

_UDP_HEADER: Final = struct.Struct(">HHHH")
"""Source port, destination port, length and checksum."""
_DATAGRAM_MAX: Final = 1 << 16
_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("=HBBI")
# Instructions of classic BPF (linux/bpf_common.h): the accumulator is A, the index register X.
_LOAD_HEADER_BYTES: Final = 0xB1
"""X is four times the low half of the byte at an offset, as IPv4 has the size of its header."""
_SET_X: Final = 0x01
_LOAD_HALF_AT_X: Final = 0x48
_STORE, _LOAD_X_STORED = 0x02, 0x61
_LOAD_PACKET_BYTES, _SUBTRACT_X = 0x80, 0x1C
_JUMP_IF_EQUAL, _JUMP_UNLESS_LESS_THAN_X = 0x15, 0x3D
_RETURN: Final = 0x06


class TrimmedPackets(Closing):
    """Passes on what is left of packets to a UDP socket; a context manager.

    Parameters
    ----------
    sock
        The UDP socket, bound to an address and a port.
    take
        Called in a thread of this object.

    Raises
    ------
    OSError
        This process may not open a raw socket.
    """

    def __init__(self, sock: socket.socket, take: Take) -> None:
        self._family, self._take = IpFamily.of(sock), take
        host, port = sock.getsockname()[:2]
        try:
            self._socket = socket.socket(self._family.number, socket.SOCK_RAW, socket.IPPROTO_UDP)
        except PermissionError:
            raise OSError(
                "foreign_trimming opens a raw socket, which takes CAP_NET_RAW: run as root, or "
                "`setcap cap_net_raw+ep` the Python that runs the training"
            ) from None
        _attach(self._socket, _filter(self._family, port))
        self._socket.setsockopt(self._family.level, self._family.receive_tos, 1)
        self._socket.bind((host, 0))
        self._thread = threading.Thread(target=self._run, name="dlcp-trimmed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for the call of ``take`` that is under way."""
        with suppress(OSError):  # it is not connected, but this wakes the thread
            self._socket.shutdown(socket.SHUT_RD)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            packet, ancillary, _, source = self._socket.recvmsg(_DATAGRAM_MAX, socket.CMSG_SPACE(4))
            if not source:
                return
            start = 0 if self._family is IPV6 else (packet[0] & 15) * 4
            if len(packet) < start + UDP_BYTES:
                continue
            port, *_ = _UDP_HEADER.unpack_from(packet, start)
            tos = int.from_bytes(ancillary[0][2][:4], "little") if ancillary else 0
            self._take(memoryview(packet)[start + UDP_BYTES :], tos, (source[0], port))


def _filter(family: IpFamily, port: int) -> bytes:
    """Return a program that accepts packets to a UDP port that are shorter than UDP's header says."""
    program = [
        (_SET_X, 0, 0, 0) if family is IPV6 else (_LOAD_HEADER_BYTES, 0, 0, 0),
        (_LOAD_HALF_AT_X, 0, 0, 2),
        (_JUMP_IF_EQUAL, 0, 6, port),
        (_LOAD_HALF_AT_X, 0, 0, 4),
        (_STORE, 0, 0, 0),
        (_LOAD_PACKET_BYTES, 0, 0, 0),
        (_SUBTRACT_X, 0, 0, 0),
        (_LOAD_X_STORED, 0, 0, 0),
        (_JUMP_UNLESS_LESS_THAN_X, 0, 1, 0),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 0xFFFF),
    ]
    return b"".join(_INSTRUCTION.pack(*each) for each in program)


def _attach(sock: socket.socket, program: bytes) -> None:
    """Filter what a socket receives, and drop what it received before."""
    memory = ctypes.create_string_buffer(program)
    described = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(memory))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
    with suppress(BlockingIOError):
        while True:
            sock.recv(1, socket.MSG_DONTWAIT)
