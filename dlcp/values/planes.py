# SPDX-License-Identifier: Apache-2.0
"""Gradients at lower precision: blocks of values that share a scale, in planes of digits.

A block of 32 values has a power of two as its scale, chosen by its largest value, as in the OCP microscaling formats
(MXINT8, version 1.0 of 2023). Each value is an integer in units of the scale, rounded to nearest. With 16 or 8 bits it
has two signed digits of half as many bits, which travel in separate packets: the *upper* plane alone is every value
rounded to nearest at half the precision. So a packet of the *lower* plane may be lost without any value missing.

The bytes are defined in :mod:`dlcp.wire.payloads`, and written and read in C (``dlcp/native/planes.c``).
"""

from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from dlcp.native import ffi, lib
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import PacketTags
from dlcp.wire import DROP_CLASSES
from dlcp.wire.payloads import PLANE_BLOCK_VALUES, PLANE_DIGIT_BITS

FULL_BITS: Final = 32
CODED_BITS: Final = (16, 8, 4)
"""The precisions that are coded, in bits per value."""


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where the values of a message lie in its packets. Every packet of the lower plane completes one of the upper.

    Parameters
    ----------
    values
        Number of values.
    bits
        Bits of each value, one of ``CODED_BITS``.
    payload_bytes
        Payload of a packet in bytes.

    Attributes
    ----------
    digit_bits, planes
        Bits of a digit, and the number of digits: 1 or 2.
    per_packet
        Values whose digits a packet holds; a packet holds whole blocks.
    packets
        Packets of each plane.
    bytes
        Size of the message.
    record
        The layout as a ``plane_layout`` of ``engine.h``.
    """

    values: int
    bits: int
    payload_bytes: int
    digit_bits: int = field(init=False)
    planes: int = field(init=False)
    per_packet: int = field(init=False)
    packets: int = field(init=False)
    bytes: int = field(init=False)
    record: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        digit_bits = PLANE_DIGIT_BITS[self.bits]
        digit_bytes = PLANE_BLOCK_VALUES * digit_bits // 8
        planes, blocks = self.bits // digit_bits, -(-self.values // PLANE_BLOCK_VALUES)
        per_packet = self.payload_bytes // (1 + digit_bytes)
        packets = -(-blocks // per_packet)
        last = (blocks - (packets - 1) * per_packet) * (digit_bytes + (planes == 1))
        derived = {
            "digit_bits": digit_bits,
            "planes": planes,
            "per_packet": per_packet * PLANE_BLOCK_VALUES,
            "packets": packets,
            "bytes": (planes * packets - 1) * self.payload_bytes + last,
        }
        record = ffi.new("plane_layout *", {"values": self.values, "payload_bytes": self.payload_bytes, **derived})
        for name, value in {**derived, "record": record}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, values: int, value_bytes: int, bits: int, payload_bytes: int) -> "PlaneLayout | None":
        """Return the layout of a message of values of ``value_bytes`` bytes; None if it is sent as it is.

        That is the case if ``bits`` are not fewer, or if the message would not have fewer packets.
        """
        if bits not in CODED_BITS or bits >= 8 * value_bytes or not values or payload_bytes < 2 * PLANE_BLOCK_VALUES:
            return None
        layout = cls(values, bits, payload_bytes)
        plain = -(-values // (payload_bytes // value_bytes))
        return layout if layout.planes * layout.packets < plain else None

    @property
    def loss_bound_max(self) -> float:
        """The share of a message's packets that are in the lower plane: no others may be lost."""
        return 1 - 1 / self.planes

    def encode(
        self,
        values: NDArray[np.float32],
        code: NDArray[np.uint8],
        rest: NDArray[np.float32] | None = None,
    ) -> None:
        """Encode values, shape (values,), into ``code``, shape (bytes,). A block with NaN or infinity becomes NaN.

        Parameters
        ----------
        rest
            Receives the exact rounding error of each value, shape (values,); 0 where that is not finite.
        """
        self._combine(values, code=code, rest=rest, has_own=True, keeps_own=True)

    def round(
        self,
        values: NDArray[np.float32],
        code: NDArray[np.uint8],
        rest: NDArray[np.float32] | None = None,
        weight: float = 1.0,
    ) -> None:
        """Encode values like :meth:`encode`, and replace them by the encoded ones; scale ``rest`` by ``weight``."""
        self._combine(values, code=code, rest=rest, has_own=True, weight=weight)

    def decode(
        self, code: NDArray[np.uint8], values: NDArray[np.float32], delivered: NDArray[np.bool_] | None = None
    ) -> None:
        """Replace ``values``, shape (values,), by the encoded ones.

        Parameters
        ----------
        delivered
            Mask of the packets that arrived, shape (at least planes * packets,); None for all. Values whose upper
            digits are missing are 0.
        """
        self._combine(values, code, delivered)

    def decode_as(self, value_type: ValueType, code: NDArray[np.uint8], values: NDArray[np.generic]) -> None:
        """Replace ``values``, a buffer in the storage of ``value_type``, by the encoded ones."""
        if value_type is ValueType.FLOAT32:
            self.decode(code, cast("NDArray[np.float32]", values))
            return
        decoded = np.empty(self.values, np.float32)
        self.decode(code, decoded)
        values[:] = value_type.narrow(decoded)

    def add(
        self, code: NDArray[np.uint8], values: NDArray[np.float32], delivered: NDArray[np.bool_] | None = None
    ) -> None:
        """Add the encoded values to ``values``; see :meth:`decode`."""
        self._combine(values, code, delivered, has_own=True)

    def lose(self, code: NDArray[np.uint8], delivered: NDArray[np.bool_], rest: NDArray[np.float32]) -> None:
        """Add the digits in undelivered packets of the lower plane to ``rest``; see :meth:`encode`."""
        self._check(code, rest)
        mask = self._mask(delivered)
        lib.dlcp_planes_lose(self.record, ffi.from_buffer("uint8_t[]", code), mask, ffi.from_buffer("float[]", rest))

    def sum(
        self,
        values: NDArray[np.float32],
        *,
        code: NDArray[np.uint8] | None = None,
        rest: NDArray[np.float32] | None = None,
        has_own: bool = False,
        keeps_own: bool = False,
        factor: float = 1.0,
        weight: float = 1.0,
    ) -> Any:
        """Return a ``plane_sum`` of ``engine.h``; it does not keep the memory."""
        for each in (values, rest):
            if each is not None:
                self._check(code, each)
        record = ffi.new("plane_sum *")
        record.values = ffi.from_buffer("float[]", values)
        record.has_own, record.keeps_own = has_own, keeps_own
        record.factor, record.weight = factor, weight
        if code is not None:
            record.code = ffi.from_buffer("uint8_t[]", code)
        if rest is not None:
            record.rest = ffi.from_buffer("float[]", rest)
        return record

    def tags(
        self,
        plain: PacketTags,
        per_packet: int,
        code: NDArray[np.uint8],
        droppable: NDArray[np.bool_] | None = None,
        more: int = 0,
    ) -> PacketTags:
        """Return the tags of an encoded message's packets.

        Packets of the upper plane are protected. Those of the lower plane have the drop classes 1 to 7 by the size of
        what would be lost, in equal parts.

        Parameters
        ----------
        plain, per_packet
            Tags of the same values' packets if they are not encoded, and the number of values in each.
        code
            The encoded message.
        droppable
            Mask of the packets of the lower plane that may be lost, shape (packets,); None for none.
        more
            Number of packets that follow, tagged like the last.
        """
        starts = self.starts(per_packet)
        queue, layer = np.maximum.reduceat(plain.queue, starts), np.minimum.reduceat(plain.layer, starts)
        count = self.planes * self.packets
        drop_class, protected = np.zeros(count, np.uint8), np.ones(count, np.bool_)
        if droppable is not None and self.planes > 1:
            drop_class[self.packets :] = np.where(droppable, self._drop_classes(code), 0)
            protected[self.packets :] = ~droppable
        tags = PacketTags(np.tile(queue, self.planes), drop_class, np.tile(layer, self.planes), protected)
        return tags.part(slice(None), more) if more else tags

    def starts(self, per_packet: int) -> NDArray[np.int64]:
        """Return the first packet of ``per_packet`` plain values in each packet of a plane, shape (packets,)."""
        starts: NDArray[np.int64] = np.arange(self.packets) * self.per_packet // per_packet
        return starts

    def _drop_classes(self, code: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return each lower packet's drop class, by the largest scale of its blocks: 7 for the smallest."""
        block_bytes = 1 + PLANE_BLOCK_VALUES * self.digit_bits // 8
        per_packet = self.per_packet // PLANE_BLOCK_VALUES
        last = -(-self.values // PLANE_BLOCK_VALUES) - (self.packets - 1) * per_packet
        upper = code[: self.packets * self.payload_bytes].reshape(self.packets, self.payload_bytes)
        scales = upper[:, : per_packet * block_bytes : block_bytes].copy()
        scales[-1, last:] = 0
        largest = scales.max(axis=1)
        rank = np.searchsorted(np.sort(largest), largest)
        classes: NDArray[np.uint8] = (DROP_CLASSES - 1 - (DROP_CLASSES - 1) * rank // self.packets).astype(np.uint8)
        return classes

    def _check(self, code: NDArray[np.uint8] | None, values: NDArray[np.float32]) -> None:
        """Raise ValueError for memory that does not fit the layout, because the C code does not check it."""
        if code is not None and (code.dtype != np.uint8 or len(code) < self.bytes):
            raise ValueError(f"{self.values} values in {self.bits} bits are {self.bytes} bytes, not {code.nbytes}")
        if values.dtype != np.float32 or values.shape != (self.values,):
            raise ValueError(f"expected {self.values} float32 values, got {values.dtype} of shape {values.shape}")

    def _mask(self, delivered: NDArray[np.bool_] | None) -> Any:
        if delivered is None:
            return ffi.NULL
        if delivered.dtype != np.bool_ or len(delivered) < self.planes * self.packets:
            raise ValueError(f"`delivered` must have {self.planes * self.packets} bools, got {len(delivered)}")
        return ffi.from_buffer("uint8_t[]", delivered)

    def _combine(
        self,
        values: NDArray[np.float32],
        received: NDArray[np.uint8] | None = None,
        delivered: NDArray[np.bool_] | None = None,
        **sum_of: Any,
    ) -> None:
        total, mask = self.sum(values, **sum_of), self._mask(delivered)
        if received is not None:
            self._check(received, values)
        code = ffi.NULL if received is None else ffi.from_buffer("uint8_t[]", received)
        lib.dlcp_planes_combine(self.record, total, code, mask)
