# SPDX-License-Identifier: Apache-2.0
"""Messages and sums of the engine in C."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcp.transport.engine import Packets
from dlcp.transport.messages import Bytes
from dlcp.transport.native.mirror import IncomingNumbers, OutgoingNumbers


class NativeOutgoing:
    """An outgoing message; see :class:`dlcp.transport.engine.Outgoing`."""

    def __init__(self, pointer: int, packets: Packets) -> None:
        self.pointer = pointer
        self.kept: Packets | None = packets  # the engine reads them
        self.numbers = OutgoingNumbers.from_address(pointer)

    def detach(self) -> None:
        """Keep the numbers, and nothing that the engine frees."""
        self.numbers = OutgoingNumbers.from_buffer_copy(self.numbers)
        self.numbers.flying = self.numbers.unsent = 0
        self.kept = None

    packets = property(lambda self: self.numbers.packets)
    flying = property(lambda self: self.numbers.flying)
    unsent = property(lambda self: self.numbers.unsent)
    sent = property(lambda self: self.numbers.sent)
    resent = property(lambda self: self.numbers.resent)
    delivered = property(lambda self: self.numbers.delivered)
    active_s = property(lambda self: self.numbers.active_s)


class NativeIncoming:
    """An incoming message; see :class:`dlcp.transport.engine.Incoming`."""

    def __init__(self, pointer: int, kept: tuple[Bytes | None, Bytes]) -> None:
        self.owner: Any = None
        self.pointer = pointer
        self.kept: tuple[Any, ...] = kept
        self.joined = False
        self.numbers = IncomingNumbers.from_address(pointer)

    packets = property(lambda self: self.numbers.packets)
    arrived = property(lambda self: self.numbers.arrived)
    last_bytes = property(lambda self: self.numbers.last_bytes)

    def detach(self) -> None:
        """Keep the numbers, and nothing that the engine frees."""
        self.numbers = IncomingNumbers.from_buffer_copy(self.numbers)
        self.numbers.bits = self.numbers.layer = None
        self.kept = ()

    def bitmap(self) -> NDArray[np.bool_]:
        """Return which packets are in, shape (packets,)."""
        packets = self.numbers.packets
        if self.numbers.arrived == packets:
            return np.ones(packets, np.bool_)
        raw = np.frombuffer(ctypes.string_at(self.numbers.bits, -(-packets // 8)), np.uint8)
        return np.unpackbits(raw, count=packets, bitorder="little").astype(np.bool_)

    def layers(self) -> Bytes:
        """Return the layer position that each packet told, shape (packets,)."""
        return np.frombuffer(ctypes.string_at(self.numbers.layer, self.numbers.packets), np.uint8)


class NativeFold:
    """A sum over ranks; see :class:`dlcp.transport.engine.Fold`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        values: NDArray[np.float32],
        per_packet: int,
        members: int,
        divisor: float,
        first_block: int,
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a sum needs contiguous, writable float32 values")
        self._library = library
        self._values = values
        self._packets = -(-len(values) // per_packet)
        self.pointer = library.dlcp_fold_new(values.ctypes.data, len(values), per_packet, members, divisor, first_block)
        if not self.pointer:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.dlcp_fold_free(self.pointer)

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """See :meth:`dlcp.transport.engine.Fold.copy_into`."""
        self._copy = copy
        self._library.dlcp_fold_copy(self.pointer, copy.ctypes.data)

    def included(self, position: int) -> NDArray[np.bool_]:
        """See :meth:`dlcp.transport.engine.Fold.included`."""
        bits = np.zeros(-(-self._packets // 64), np.uint64)
        self._library.dlcp_fold_included(self.pointer, position, bits.ctypes.data)
        return np.unpackbits(bits.view(np.uint8), count=self._packets, bitorder="little").astype(np.bool_)

    def finish(self, rescale: bool, owed: NDArray[np.float32] | None) -> int:
        """See :meth:`dlcp.transport.engine.Fold.finish`."""
        into = None if owed is None else owed.ctypes.data
        return int(self._library.dlcp_fold_finish(self.pointer, rescale, into))
