# SPDX-License-Identifier: Apache-2.0
"""What packets hold that carry no values: acknowledgements, questions and greetings.

An ACK tells which packets have arrived. Its payload is a run of entries of :data:`ACK_ENTRY`, each about
:data:`ACK_BLOCK_PACKETS` packets of one message, or, with the block :data:`ACK_PATH`, about a path. In its header,
``step`` is how many microseconds ago the newest packet came, ``index`` when that was by the receiver's clock, in
microseconds modulo 2**32, ``count`` how many packets have come marked congested, and ``message`` how many were late
where they had been taken for lost, modulo 2**16: they came twice, or after their receiver had gone without them.

A PROBE asks what is missing, and a BITMAP answers. In the headers of both, ``budget`` is the number of the question,
modulo 2**16: an answer tells of what was sent before its question.

A HELLO and its answer carry :data:`GREETING`, and then the UDP ports of the sender's further paths, two bytes each.
"""

import struct
from typing import Final

ACK_FIELD_BITS: Final = {"step": 32, "message": 16, "whole": 1, "block": 31, "arrived": 64}
"""Field names and widths in bits of an acknowledgement's entry, in wire order."""
ACK_ENTRY: Final = struct.Struct(">IHIQ")
"""Step, message, block (maybe with ``ACK_WHOLE``), and what of the block has arrived: bit k is packet 64 block + k."""
ACK_BLOCK_PACKETS: Final = 64
"""Packets in one entry of an acknowledgement."""
ACK_WHOLE: Final = 1 << 31
"""Set in the block of an acknowledgement's entry: the message is complete, all of it has arrived, nobody need ask."""
ACK_PATH: Final = (1 << 31) - 1
"""The block of an entry about a path: its step is the path's number, its bits how many packets came marked there."""

QUESTION: Final = struct.Struct(">BI")
"""Payload of a PROBE: 1 if its sender still has packets to send, so that what is missing is no reason yet to go
without; and how many packets of the message it defers, and will not send. Zeros at its end may be left out."""

GREETING: Final = struct.Struct(">II")
"""Bytes of a message per packet, and how many packets the sender of the greeting can hold on their way to it."""
GREETING_PORT: Final = struct.Struct(">H")
"""A UDP port of one further path; as many follow the greeting as there are such paths."""
