# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic shared by both engines: random numbers, hashes, and times in picoseconds."""

import zlib
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

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

    Python's integers do not wrap around, so they are masked. `dlcp.sim.engines.kernel.arrays.draw` gives the same
    numbers.
    """
    state ^= state << 13 & MASK64
    state ^= state >> 7
    state ^= state << 17 & MASK64
    return state, state >> 33


def mix(value: int, salt: int) -> int:
    """Hash a value and a salt to 31 bits; `dlcp.sim.engines.kernel.arrays.mix` gives the same bits."""
    return ((value ^ salt) * GOLDEN & MASK64) >> 33


def path_hashes(
    source: NDArray[np.int64], target: NDArray[np.int64], source_port: NDArray[np.int64], target_port: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the P4 program's hash of flows: source, target, UDP and ports, shape (n,)."""
    addresses = (">u4", HOST_ADDRESS + source), (">u4", HOST_ADDRESS + target)
    return _crc32(*addresses, ("u1", 17), (">u2", source_port), (">u2", target_port))


def slot_owners(
    job: NDArray[np.int64], step: NDArray[np.int64], message: NDArray[np.int64], sender: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the CRC-32 by which the P4 program identifies a message, shape (n,)."""
    return _crc32((">u2", job), (">u4", step), (">u2", message), (">u2", sender))


def _crc32(*fields: tuple[str, ArrayLike]) -> NDArray[np.int64]:
    """Return the CRC-32 of each row of (type, values) fields; values are cut to their type."""
    columns = np.broadcast_arrays(*(np.asarray(values, np.int64) for _, values in fields))
    rows = np.zeros(columns[0].shape, [(str(at), kind) for at, (kind, _) in enumerate(fields)])
    for at, (kind, _) in enumerate(fields):
        rows[str(at)] = columns[at].astype(kind)
    return np.array([*map(zlib.crc32, rows)], np.int64)
