# SPDX-License-Identifier: Apache-2.0
"""Payloads: values at lower precision, acknowledgements, probes and greetings.

DATA has values in their own number format, or encoded. An encoded message has one or two planes of digits, with the
same number of packets each. The lower half of the header's flags, spare for switches, gives the bits of a value and the
plane (``CODING``). A packet has as many blocks of :data:`PLANE_BLOCK_VALUES` values as fit the payload with their upper
digits. In the upper plane, a block is its scale and its digits; in the lower plane only its digits. The scale is a byte
s for 2^(s - 127), or 255 if a value is not finite. Digits are signed integers in two's complement. With two planes they
have half of the bits, and a value is the scale times (2^digit_bits * upper + lower). The digits of a block are 8
little-endian words of 4 digits, the first one in the lowest bits: value 8 k + w of the block has digit k of word w.

An ACK reports which packets have arrived, and which ones a switch has trimmed. Its payload is a sequence of entries of
:data:`ACK_ENTRY`. Each describes :data:`ACK_BLOCK_PACKETS` packets of one message, or with the block :data:`ACK_PATH`,
a path. In its header, ``step`` is the age of the newest packet in microseconds, and ``index`` its arrival by the
receiver's clock, in microseconds modulo 2**32. ``count`` is the number of packets with an ECN mark. ``message`` is the
number of late packets modulo 2**16: duplicates, and packets that arrived after their message was completed without
them.

A PROBE asks which packets are missing, and a BITMAP answers. In the headers of both, ``budget`` is the number of the
probe, modulo 2**16: an answer covers the packets sent before its probe.

A HELLO and its answer carry :data:`GREETING`, and then the UDP ports of the sender's other paths, two bytes each.
"""

import struct
from collections.abc import Mapping
from typing import Final

PLANE_BLOCK_VALUES: Final = 32
"""Values that share a scale."""
PLANE_DIGIT_BITS: Final[Mapping[int, int]] = {16: 8, 8: 4, 4: 4}
"""Bits of a digit, by the bits of a value."""
CODING: Final[Mapping[int, int]] = {4: 1, 8: 2, 16: 3}
"""Bits 0 and 1 of the header's flags, by the bits of a value; 0 if values are not encoded."""
CODING_LOWER: Final = 4
"""Bit 2 of the flags: the packet belongs to the lower plane."""

ACK_FIELD_BITS: Final = {"step": 32, "message": 16, "whole": 1, "trimmed": 1, "block": 30, "arrived": 64}
"""Field names and widths in bits of an acknowledgement's entry, in wire order."""
ACK_ENTRY: Final = struct.Struct(">IHIQ")
"""Step, message, block (possibly with ``ACK_WHOLE`` or ``ACK_TRIMMED``), and the block's arrivals: bit k is packet
64 block + k."""
ACK_BLOCK_PACKETS: Final = 64
"""Packets in one entry of an acknowledgement."""
ACK_WHOLE: Final = 1 << 31
"""Bit in an entry's block: every packet of the message has arrived, so no probe is needed."""
ACK_TRIMMED: Final = 1 << 30
"""Bit in an entry's block: the packets have not arrived. A switch has given them up, and left only their headers."""
ACK_PATH: Final = (1 << 31) - 1
"""The block of an entry about a path. The entry's step is the path's number, its bits the number of marked packets on
that path."""

QUESTION: Final = struct.Struct(">B")
"""Payload of a PROBE: 1 if the sender still has packets to send, so the receiver must not complete the message yet. A
zero may be omitted."""

GREETING: Final = struct.Struct(">II")
"""Message bytes per packet, and the packets that the sender of the greeting can receive at once."""
GREETING_PORT: Final = struct.Struct(">H")
"""The UDP port of a further path; one for each follows the greeting."""
