# SPDX-License-Identifier: Apache-2.0
"""The DLCP header: 32 bytes after UDP, network byte order.

Tests check all other definitions against this one. A switch decides by the first eight bytes. The rest identifies
messages, packets and sessions.
"""

import struct
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

VERSION: Final = 1
HEADER_BYTES: Final = 32
UDP_PORT_BASE: Final = 53696
UDP_PORT_COUNT: Final = 8
"""UDP destination ports 53696-53703: one aligned block of eight in the dynamic range."""


class PacketType(IntEnum):
    """Packet types; four bits."""

    DATA = 1
    """Values of a message: one fragment."""
    ACK = 2
    """Packets that arrived, and the number of those with an ECN mark; see ``ACK_ENTRY`` in ``payloads``."""
    PROBE = 3
    """The sender asks which packets are missing; it has nothing more to send now, unless the payload says otherwise."""
    BITMAP = 4
    """Which packets of a message have arrived; the answer to PROBE."""
    STOP = 5
    """The receiver needs no more of a message. The payload says which packets arrived; it is empty if all did."""
    STOP_ACK = 6
    """Acknowledges a STOP."""
    HELLO = 7
    """A peer announces itself."""
    HELLO_ACK = 8
    """The answer to HELLO."""
    ABORT = 9
    """A rank gives up, with a reason, so that its peers need not wait for a deadline. If the first byte is 0, it leaves
    normally."""


class Flag(IntFlag):
    """The flags byte."""

    PROTECTED = 0x80
    """Never dropped by policy, and required for a complete message."""
    RETRANSMISSION = 0x40
    TRIMMED = 0x20
    """A switch removed the payload."""
    CONGESTION = 0x10
    """Echo of an ECN mark."""
    PIECE = 0x08
    """A part of a packet, on a path that has become too narrow for it (``dlcp/native/pieces.h``)."""


class Queue(IntEnum):
    """Strict-priority queues with a fixed meaning; gradients use those between FIRST_GRADIENT and LAST_GRADIENT."""

    EXCESS = 0
    """A job's traffic above its share."""
    ORDINARY = 1
    """All other traffic."""
    FIRST_GRADIENT = 2
    LAST_GRADIENT = 6
    CONTROL = 7


DROP_CLASSES: Final = 8
"""Drop class 0 is never dropped by policy; 1 is the most, 7 the least valuable."""

FIELD_BITS: Final[dict[str, int]] = {
    "version": 4,
    "type": 4,
    "protected": 1,
    "retransmission": 1,
    "trimmed": 1,
    "congestion": 1,
    "flags_spare": 4,
    "queue": 3,
    "drop_class": 3,
    "spare": 2,
    "layer": 8,
    "job": 16,
    "budget": 16,
    "step": 32,
    "message": 16,
    "sender": 16,
    "index": 32,
    "count": 32,
    "token": 64,
}
"""Field names and widths in bits, in wire order. The P4 header, the Scapy layer and the dissector follow it."""

HEADER: Final = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("tags", "u1"),
        ("layer", "u1"),
        ("job", ">u2"),
        ("budget", ">u2"),
        ("step", ">u4"),
        ("message", ">u2"),
        ("sender", ">u2"),
        ("index", ">u4"),
        ("count", ">u4"),
        ("token", ">u8"),
    ]
)
"""The header as a NumPy record; ``kind`` is version and type, ``tags`` is queue and drop class."""

_STRUCT = struct.Struct(">BBBBHHIHHIIQ")
_TYPES = {int(kind): kind for kind in PacketType}


class HeaderError(ValueError):
    """Not a DLCP header of this version; the message names the wrong field."""


class Header(NamedTuple):
    """One decoded header.

    ``budget`` is the number of this message's packets that one switch may drop; ``index`` and ``count`` are in packets.
    """

    type: PacketType
    flags: int
    queue: int
    drop_class: int
    layer: int
    job: int
    budget: int
    step: int
    message: int
    sender: int
    index: int  # type: ignore[assignment]  # hides tuple.index and tuple.count, which a header does not need
    count: int  # type: ignore[assignment]  # likewise
    token: int

    def encode(self) -> bytes:
        """Return the 32 bytes of this header.

        Raises
        ------
        struct.error
            A field does not fit its width.
        """
        if not (0 <= self.queue < 8 and 0 <= self.drop_class < 8):
            raise HeaderError(f"queue {self.queue} and drop class {self.drop_class} must lie in 0..7")
        return _STRUCT.pack(
            VERSION << 4 | self.type,
            self.flags,
            self.queue << 5 | self.drop_class << 2,
            self.layer,
            self.job,
            self.budget,
            self.step,
            self.message,
            self.sender,
            self.index,
            self.count,
            self.token,
        )


def decode(datagram: bytes | bytearray | memoryview) -> Header:
    """Decode the header at the start of a datagram.

    Raises
    ------
    HeaderError
        Too few bytes, another version, or an unknown packet type.
    """
    if len(datagram) < HEADER_BYTES:
        raise HeaderError(f"{len(datagram)} bytes are too few for a header of {HEADER_BYTES}")
    kind, flags, tags, *rest = _STRUCT.unpack_from(datagram)
    if kind >> 4 != VERSION:
        raise HeaderError(f"version {kind >> 4}, expected {VERSION}")
    packet_type = _TYPES.get(kind & 15)
    if packet_type is None:
        raise HeaderError(f"unknown packet type {kind & 15}")
    return Header(packet_type, flags, tags >> 5, tags >> 2 & 7, *rest)


def pack(
    count: int,
    /,
    *,
    packet_type: PacketType,
    flags: ArrayLike = 0,
    queue: ArrayLike = 0,
    drop_class: ArrayLike = 0,
    **fields: ArrayLike,
) -> NDArray[np.void]:
    """Build the headers of a burst at once.

    Parameters
    ----------
    count
        Number of headers.
    packet_type, flags, queue, drop_class
        Scalars or arrays of shape (count,).
    fields
        Any of layer, job, budget, step, message, sender, index, count, token; scalars or arrays of shape (count,).

    Returns
    -------
    Records of type ``HEADER``, shape (count,); ``.view("u1").reshape(count, 32)`` gives their bytes.

    Raises
    ------
    HeaderError
        A queue or drop class outside 0..7.
    """
    headers = np.zeros(count, HEADER)
    headers["kind"] = VERSION << 4 | packet_type
    headers["flags"] = flags
    queues, classes = np.asarray(queue), np.asarray(drop_class)
    if count and not (0 <= queues.min() <= queues.max() < 8 and 0 <= classes.min() <= classes.max() < 8):
        raise HeaderError("queues and drop classes must lie in 0..7")
    headers["tags"] = queues.astype("u1") << 5 | classes.astype("u1") << 2
    for name, values in fields.items():
        headers[name] = values
    return headers


def unpack(datagrams: NDArray[np.uint8]) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """Read the headers of a burst at once.

    Parameters
    ----------
    datagrams
        Bytes, shape (n, at least 32), one datagram a row.

    Returns
    -------
    headers
        Records of type ``HEADER``, shape (n,).
    valid
        Which of them are of this version and of a known type, shape (n,).

    Raises
    ------
    HeaderError
        The rows are shorter than a header.
    """
    if datagrams.ndim != 2 or datagrams.shape[1] < HEADER_BYTES:
        raise HeaderError(f"expected shape (n, >= {HEADER_BYTES}), got {datagrams.shape}")
    headers = np.ascontiguousarray(datagrams[:, :HEADER_BYTES]).view(HEADER)[:, 0]
    kinds = headers["kind"]
    return headers, (kinds >> 4 == VERSION) & (kinds & 15 >= 1) & (kinds & 15 <= max(PacketType))


def queue_of(tags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the queues in the ``tags`` bytes of headers."""
    return (tags >> 5).astype(np.uint8, copy=False)


def drop_class_of(tags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the drop classes in the ``tags`` bytes of headers."""
    return (tags >> 2 & 7).astype(np.uint8, copy=False)


def dscp(queue: int, droppable: bool) -> int:
    """Return the DSCP, which shows a switch without P4 the queue, and whether the packet may be dropped.

    It lies in the local-use pool xxxx11 of RFC 2474: three bits of queue, one for droppable.
    """
    return queue << 3 | droppable << 2 | 3
