# SPDX-License-Identifier: Apache-2.0
"""The nanomsg socket over which BMv2 takes and gives packets in place of interfaces (``--packet-in``)."""

import ctypes
import ctypes.util
import select
import struct
import time

SEND_DEADLINE_S = 15.0
_AF_SP, _NN_PAIR, _NN_SOL_SOCKET, _NN_SNDTIMEO, _NN_RCVFD, _NN_DONTWAIT = 1, 16, 0, 4, 11, 1
_NN_SNDBUF, _NN_RCVBUF = 2, 3
_PACKET_IN, _PACKET_OUT = 3, 4
_MESSAGE = struct.Struct("=iii")
_LONGEST = 1 << 16


class PacketError(RuntimeError):
    """The socket cannot be used, or something else than a packet came."""


def available() -> bool:
    """Say whether the library is there."""
    return ctypes.util.find_library("nanomsg") is not None


class PacketSocket:
    """Packets into and out of a switch whose ``--packet-in`` is this address.

    Raises
    ------
    PacketError
        The library refuses.
    """

    def __init__(self, address: str) -> None:
        self._pair = _Pair(address)

    def send(self, port: int, data: bytes) -> None:
        """Give the switch a packet."""
        self._pair.send(_MESSAGE.pack(_PACKET_IN, port, len(data)) + data)

    def receive(self, wait_s: float) -> tuple[int, bytes] | None:
        """Return port and bytes of the next packet that comes out; None if none does in time."""
        message = self._pair.receive(wait_s)
        if message is None:
            return None
        kind, port, length = _MESSAGE.unpack_from(message)
        if kind != _PACKET_OUT or len(message) != _MESSAGE.size + length:
            raise PacketError(f"the switch sent a message of type {kind} with {len(message)} bytes")
        return port, message[_MESSAGE.size :]

    def close(self) -> None:
        """Close it."""
        self._pair.close()


class _Pair:
    """One end of a nanomsg PAIR socket."""

    def __init__(self, address: str) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("nanomsg"), use_errno=True)
        self._buffer = ctypes.create_string_buffer(_LONGEST)
        self._socket = self._library.nn_socket(_AF_SP, _NN_PAIR)
        if self._socket < 0:
            raise self._error("nn_socket")
        for option in (_NN_SNDBUF, _NN_RCVBUF):
            self._set(option, 1 << 22)
        self._set(_NN_SNDTIMEO, int(SEND_DEADLINE_S * 1000))
        if self._library.nn_connect(self._socket, address.encode()) < 0:
            raise self._error("nn_connect")
        fileno, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        read = self._library.nn_getsockopt
        if read(self._socket, _NN_SOL_SOCKET, _NN_RCVFD, ctypes.byref(fileno), ctypes.byref(size)) < 0:
            raise self._error("nn_getsockopt")
        self._readable = fileno.value

    def send(self, message: bytes) -> None:
        if self._library.nn_send(self._socket, message, ctypes.c_size_t(len(message)), 0) < 0:
            raise self._error("nn_send")

    def receive(self, wait_s: float) -> bytes | None:
        # The wait is here and not in nn_recv, whose own time-out is suspected of having lost a message once.
        deadline = time.monotonic() + wait_s
        while True:
            size = self._library.nn_recv(self._socket, self._buffer, ctypes.c_size_t(_LONGEST), _NN_DONTWAIT)
            if size >= 0:
                return ctypes.string_at(self._buffer, size)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            select.select([self._readable], [], [], left_s)

    def close(self) -> None:
        self._library.nn_close(self._socket)

    def _set(self, option: int, value: int) -> None:
        cell = ctypes.c_int(value)
        size = ctypes.c_size_t(ctypes.sizeof(cell))
        if self._library.nn_setsockopt(self._socket, _NN_SOL_SOCKET, option, ctypes.byref(cell), size) < 0:
            raise self._error("nn_setsockopt")

    def _error(self, call: str) -> PacketError:
        return PacketError(f"{call}: nanomsg error {ctypes.get_errno()}")
