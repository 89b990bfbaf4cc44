# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic shared by both engines: random numbers, hashes, and times in picoseconds."""

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MASK64: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, Knuth's multiplier."""
DRAW_LIMIT: Final = 1 << 31
"""`draw` returns numbers below this."""
PS_PER_S: Final = 1_000_000_000_000
PS_PER_US: Final = 1_000_000
HOST_ADDRESS: Final = 0x0A000001
"""10.0.0.1: host n has the IPv4 address ``HOST_ADDRESS + n``."""
RATE_SHIFT: Final = 10
"""A link's rate is stored as the time for 1,024 bytes, so serialization takes ``bytes * kibibyte_ps >> RATE_SHIFT``."""


def seconds_to_ps(seconds: float) -> int:
    """Convert seconds to whole picoseconds."""
    return round(seconds * PS_PER_S)


def ps_per_kibibyte(rate_gbps: float) -> int:
    """Return the time in picoseconds for 1,024 bytes: exact for all usual rates, within 1 in 10^4 for others."""
    return round(8 * 1024 * 1000 / rate_gbps)


def draw(state: int) -> tuple[int, int]:
    """Return the next state of a xorshift generator (Marsaglia, 2003: 13, 7, 17), and 31 random bits.

    Python's integers do not wrap around, so they are masked. `dlcp.sim.kernel.state.draw` gives the same numbers.
    """
    state ^= state << 13 & MASK64
    state ^= state >> 7
    state ^= state << 17 & MASK64
    return state, state >> 33


def mix(value: int, salt: int) -> int:
    """Hash a value and a salt to 31 bits; `dlcp.sim.kernel.state.mix` gives the same bits."""
    return ((value ^ salt) * GOLDEN & MASK64) >> 33


def _entropy_table() -> NDArray[np.int64]:
    zero = zlib.crc32(bytes(17))
    table = np.zeros((4, 256), np.int64)
    for position in range(4):
        for value in range(256):
            data = bytearray(17)
            data[13 + position] = value
            table[position, value] = zlib.crc32(data) ^ zero
    return table


ENTROPY_TABLE: Final = _entropy_table()
"""How each value of each entropy byte changes the hash by which the P4 program chooses paths. CRC-32 is affine, so the
changes of single bytes combine by XOR."""


def path_hashes(
    source: NDArray[np.int64], target: NDArray[np.int64], source_port: NDArray[np.int64], target_port: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the hash of the P4 program's selector over (source, target, UDP, ports, entropy 0), shape (n,)."""
    zero = np.zeros(len(source), np.int64)
    addresses = (HOST_ADDRESS + source, 4), (HOST_ADDRESS + target, 4)
    return _crc32((*addresses, (zero + 17, 1), (source_port, 2), (target_port, 2), (zero, 4)))


def slot_owners(
    job: NDArray[np.int64], step: NDArray[np.int64], message: NDArray[np.int64], sender: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the CRC-32 by which the P4 program identifies a message, shape (n,)."""
    return _crc32(((job, 2), (step, 4), (message, 2), (sender, 2)))


def _crc32(fields: Sequence[tuple[NDArray[np.int64], int]]) -> NDArray[np.int64]:
    """Return the CRC-32 of each row of (values, size in bytes) fields."""
    # The plain state transition for each byte: zlib inverts the state before and after, so undo both.
    table = np.array([zlib.crc32(bytes([value]), 0xFFFFFFFF) ^ 0xFFFFFFFF for value in range(256)], np.int64)
    state = np.full(len(fields[0][0]), 0xFFFFFFFF, np.int64)
    for values, size in fields:
        for shift in range(8 * (size - 1), -1, -8):
            state = table[(state ^ (np.asarray(values, np.int64) >> shift)) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF
