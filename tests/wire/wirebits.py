# SPDX-License-Identifier: Apache-2.0
"""A second reading of the header, bit by bit from the field table, to hold the real ones against."""

from collections.abc import Mapping
from random import Random

from dlcp.wire import FIELD_BITS, HEADER_BYTES, VERSION, PacketType

HEADER_BITS = 8 * HEADER_BYTES


def join(values: Mapping[str, int]) -> bytes:
    """Return the header in which each field of FIELD_BITS has its value; fields that are not named are 0."""
    number = 0
    for name, bits in FIELD_BITS.items():
        value = values.get(name, 0)
        assert 0 <= value < 1 << bits, f"{name} = {value} does not fit {bits} bits"
        number = number << bits | value
    return number.to_bytes(HEADER_BYTES, "big")


def split(datagram: bytes) -> dict[str, int]:
    """Return the value of each field of FIELD_BITS at the start of a datagram."""
    number, left = int.from_bytes(datagram[:HEADER_BYTES], "big"), HEADER_BITS
    values = {}
    for name, bits in FIELD_BITS.items():
        left -= bits
        values[name] = number >> left & (1 << bits) - 1
    return values


def random_fields(rng: Random) -> dict[str, int]:
    """Return a valid header with every field drawn at random, the spare ones too."""
    values = {name: rng.getrandbits(bits) for name, bits in FIELD_BITS.items()}
    return values | {"version": VERSION, "type": int(rng.choice(list(PacketType)))}
