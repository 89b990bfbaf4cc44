# SPDX-License-Identifier: Apache-2.0
"""Payloads of packets without values: acknowledgements, probes and greetings.

An ACK reports which packets have arrived. Its payload is a sequence of entries of :data:`ACK_ENTRY`, each about
:data:`ACK_BLOCK_PACKETS` packets of one message, or, with the block :data:`ACK_PATH`, about a path. In its header,
``step`` is how many microseconds ago the newest packet arrived, ``index`` when that was by the receiver's clock, in
microseconds modulo 2**32, ``count`` how many packets have arrived with an ECN mark, and ``message`` how many were late
although declared lost, modulo 2**16: duplicates, or packets that arrived after their receiver had completed without
them.

A PROBE asks what is missing, and a BITMAP answers. In the headers of both, ``budget`` is the number of the probe,
modulo 2**16: an answer covers what was sent before its probe.

A HELLO and its answer carry :data:`GREETING`, and then the UDP ports of the sender's other paths, two bytes each.
"""

import struct
from typing import Final

ACK_FIELD_BITS: Final = {"step": 32, "message": 16, "whole": 1, "block": 31, "arrived": 64}
"""Field names and widths in bits of an acknowledgement's entry, in wire order."""
ACK_ENTRY: Final = struct.Struct(">IHIQ")
"""Step, message, block (possibly with ``ACK_WHOLE``), and the block's arrivals: bit k is packet 64 block + k."""
ACK_BLOCK_PACKETS: Final = 64
"""Packets in one entry of an acknowledgement."""
ACK_WHOLE: Final = 1 << 31
"""Set in the block of an acknowledgement's entry: the message is complete with every packet; no probe is needed."""
ACK_PATH: Final = (1 << 31) - 1
"""The block of an entry about a path: its step is the path's number, its bits the packets that arrived marked there."""

QUESTION: Final = struct.Struct(">BI")
"""Payload of a PROBE: 1 if its sender still has packets to send, so the receiver must not complete without the missing
ones yet; and how many packets of the message it defers and will not send. Trailing zeros may be omitted."""

GREETING: Final = struct.Struct(">II")
"""Message bytes per packet, and how many packets the sender of the greeting can receive at once."""
GREETING_PORT: Final = struct.Struct(">H")
"""A UDP port of another path; one for each such path follows the greeting."""
