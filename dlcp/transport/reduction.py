# SPDX-License-Identifier: Apache-2.0
"""Sums and averages that the engine computes while packets arrive, in memory that Python keeps."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dlcp.native import ffi, lib
from dlcp.planes import PlaneLayout


def unpacked(bits: Any, count: int) -> NDArray[np.bool_]:
    """Return the first bits of 64-bit words, lowest first."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(np.bool_)


class Reduction:
    """A combination of the others' contributions with this rank's values, computed in place as packets arrive.

    The result does not depend on the order of arrival. Use it in the endpoint's thread.

    Attributes
    ----------
    message_bytes
        The size of each contribution, without a tail.
    kept
        Buffers of its messages.
    pointer
        The ``reduction`` of ``engine.h``.
    takes_tail
        Whether contributions may have a tail.
    """

    takes_tail: ClassVar = False

    def __init__(self, pointer: Any, message_bytes: int, packets: int) -> None:
        if not pointer:
            raise MemoryError
        self.message_bytes, self._packets = message_bytes, packets
        self.kept: list[NDArray[np.uint8] | None] = []
        self.pointer: Any = ffi.gc(pointer, lib.dlcp_reduction_free)

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may have to wait in a buffer."""
        return True

    def included(self, position: int) -> NDArray[np.bool_]:
        """Return which packets of a contribution are in the sum, shape (packets,); call it before :meth:`finish`."""
        bits = np.zeros(-(-self._packets // 64), np.uint64)
        lib.dlcp_reduction_included(self.pointer, position, ffi.from_buffer("uint64_t[]", bits))
        return unpacked(bits, self._packets)

    def finish(self, rescale: bool = False) -> int:
        """Combine packets with contributions that will never arrive; return their number.

        Complete packets are combined already. This ends the reduction.

        Parameters
        ----------
        rescale
            Divide by the number of ranks in each sum, instead of the divisor.
        """
        ffi.gc(self.pointer, None)  # C frees it
        incomplete: int = lib.dlcp_reduction_finish(self.pointer, rescale)
        self.pointer = None
        self.kept.clear()
        return incomplete


class StreamingReduction(Reduction):
    """The average of this rank's values and the others' contributions.

    Own values come first, then the others' in a fixed order. With ``first_block`` each of the others begins with
    another chunk of its message (:class:`dlcp.tags.ChunkOrder`), and the order differs by chunk accordingly. Packets
    that arrive before their turn wait in a buffer.

    Parameters
    ----------
    values
        Own values, shape (m,); holds the average in the end.
    per_packet
        The number of values in a packet.
    members
        How many others contribute.
    divisor
        Divisor of the sum.
    first_block
        The block of packets at which chunk 0 begins; below 0 for no chunks.
    """

    def __init__(
        self, values: NDArray[np.float32], per_packet: int, members: int, divisor: float, first_block: int = -1
    ) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError("a reduction needs contiguous, writable float32 values")
        self.values = values
        self._members, self._by_chunks = members, first_block >= 0
        pointer = lib.dlcp_reduction_new(
            ffi.from_buffer("float[]", values), len(values), per_packet, members, divisor, first_block
        )
        super().__init__(pointer, values.nbytes, -(-len(values) // per_packet))

    def needs_buffer(self, position: int) -> bool:
        """Return whether packets of the contribution at a position may arrive early and need a buffer."""
        return self._members > 1 and (self._by_chunks or position > 0)

    def copy_into(self, copy: NDArray[np.float32]) -> None:
        """Also write each packet's average to ``copy`` as soon as it is complete; call it before anything arrives.

        Averages that :meth:`finish` computes are not written there.
        """
        self._copy = copy
        lib.dlcp_reduction_copy(self.pointer, ffi.from_buffer("float[]", copy))


class EncodedReduction(Reduction):
    """A sum of encoded contributions: each packet's values are combined in one pass, once all digits have arrived.

    A packet is one of the upper plane with its lower one. Own values come first, then the others' by position.

    Parameters
    ----------
    layout
        The layout of every contribution, and of the result's code.
    values
        Own values, shape (m,), float32; holds the result in the end, as it is decoded from ``code`` if there is one.
    members
        How many others contribute.
    how
        Further arguments of :meth:`dlcp.planes.PlaneLayout.sum`.
    """

    takes_tail: ClassVar = True

    def __init__(self, layout: PlaneLayout, values: NDArray[np.float32], members: int, **how: Any) -> None:
        self._memory = values, how  # which C reads and writes
        total = layout.sum(values, **how)
        super().__init__(lib.dlcp_reduction_new_encoded(layout.record, total, members), layout.bytes, layout.packets)
