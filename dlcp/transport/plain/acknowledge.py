# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements: for blocks of 64 packets, which of them have arrived.

Each tells all it knows of its blocks, and repeats the last ones before, so that a lost acknowledgement is made up for
by the next.
"""

import math
import struct
from collections import deque
from collections.abc import Iterator

import numpy as np

from dlcp.transport.engine import (
    ACK_AT_ONCE_PACKETS,
    ACK_DELAY_S,
    ACK_EVERY_PACKETS,
    ACK_RECENT,
    ACK_SPACING_S,
    ACK_WHOLE,
    ACKS_PER_ROUND_TRIP,
    BLOCK_PACKETS,
)
from dlcp.transport.plain.incoming import PlainIncoming
from dlcp.transport.plain.outgoing import Indices

FRESH_COMPARED = 4
ENTRY = struct.Struct(">IHIQ")
"""Step, message, block (maybe with ``ACK_WHOLE``), and what of the block has arrived: bit k is packet 64 block + k."""


class Acknowledgements:
    """What is to be acknowledged to one peer."""

    def __init__(self) -> None:
        self.data_received = 0
        self.marked_received = 0
        self.newest_s = 0.0
        self._late_s = math.inf
        self._last_s = 0.0
        self._packets = 0
        self._fresh: list[tuple[PlainIncoming, int]] = []
        self._recent: deque[tuple[PlainIncoming, int]] = deque(maxlen=ACK_RECENT)

    def note(self, message: PlainIncoming, indices: Indices, marked: bool, now_s: float) -> None:
        """Note that data arrived, be it for the first time or again."""
        if not self._packets:
            self._late_s = now_s + ACK_DELAY_S
        self._packets += len(indices)
        self.data_received += len(indices)
        self.marked_received += len(indices) * marked
        self.newest_s = now_s
        for block in np.unique(indices // BLOCK_PACKETS).tolist():
            self._note_block(message, block)

    def note_whole(self, message: PlainIncoming) -> None:
        """Note that all of a message is here and taken."""
        self._packets = max(1, self._packets)
        self._note_block(message, (message.packets - 1) // BLOCK_PACKETS)

    def _note_block(self, message: PlainIncoming, block: int) -> None:
        # As good as all of them: packets of a block come one after the other.
        if (message, block) not in self._fresh[-FRESH_COMPARED:]:
            self._fresh.append((message, block))

    def drop(self, message: PlainIncoming) -> None:
        """Tell nothing of a message any more."""
        self._fresh = [value for value in self._fresh if value[0] is not message]
        self._recent = deque((value for value in self._recent if value[0] is not message), ACK_RECENT)

    def due_s(self, smoothed_rtt_s: float) -> float:
        """Return when an acknowledgement must leave; infinity if there is nothing to acknowledge."""
        if self._packets >= ACK_AT_ONCE_PACKETS:
            return 0.0
        if self._packets >= ACK_EVERY_PACKETS:
            spacing_s = max(ACK_SPACING_S, smoothed_rtt_s / ACKS_PER_ROUND_TRIP)
            return min(self._late_s, self._last_s + spacing_s)
        return self._late_s

    @property
    def waiting(self) -> bool:
        """Whether there is anything to acknowledge."""
        return self._packets > 0

    def take(self, payload_bytes: int, now_s: float) -> Iterator[bytes]:
        """Return the payloads of what is to be sent now."""
        limit = payload_bytes // ENTRY.size
        fresh, self._fresh = self._fresh, []
        self._packets = 0
        self._late_s = math.inf
        self._last_s = now_s
        while fresh:
            repeated = list(self._recent)[: limit - 1]
            room = limit - len(repeated)
            entries = repeated + fresh[:room]
            self._recent = deque(fresh[:room], ACK_RECENT)
            fresh = fresh[room:]
            yield b"".join(_entry(*entry) for entry in entries)


def _entry(message: PlainIncoming, block: int) -> bytes:
    there = message.delivered[block * BLOCK_PACKETS : (block + 1) * BLOCK_PACKETS]
    bits = int.from_bytes(np.packbits(there, bitorder="little").tobytes(), "little")
    whole = ACK_WHOLE if message.settled and message.arrived == message.packets else 0
    return ENTRY.pack(message.key.step, message.key.message, block | whole, bits)


def indices_of(block: int, bits: int) -> Indices:
    """Return the packets that an entry names."""
    there = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little")
    return (np.flatnonzero(there) + block * BLOCK_PACKETS).astype(np.uint32)
