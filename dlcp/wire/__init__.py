# SPDX-License-Identifier: Apache-2.0
"""The wire format, in one place."""

from dlcp.wire.header import (
    DROP_CLASSES,
    FIELD_BITS,
    HEADER,
    HEADER_BYTES,
    UDP_PORT_BASE,
    UDP_PORT_COUNT,
    VERSION,
    Flag,
    Header,
    HeaderError,
    PacketType,
    Queue,
    decode,
    drop_class_of,
    dscp,
    pack,
    queue_of,
    unpack,
)

__all__ = [
    "DROP_CLASSES",
    "FIELD_BITS",
    "HEADER",
    "HEADER_BYTES",
    "UDP_PORT_BASE",
    "UDP_PORT_COUNT",
    "VERSION",
    "Flag",
    "Header",
    "HeaderError",
    "PacketType",
    "Queue",
    "decode",
    "drop_class_of",
    "dscp",
    "pack",
    "queue_of",
    "unpack",
]
