# SPDX-License-Identifier: Apache-2.0
"""Numbers as byte strings: big-endian, and without leading zeros when the switch writes them (specification 8.4)."""

from dlcp.switch.p4runtime.refusal import OUT_OF_RANGE, Refused


def decode(value: bytes, width: int, what: str) -> int:
    """Return the number that a byte string means; leading zeros are put up with, as the specification asks.

    Parameters
    ----------
    width
        Of the field, in bits.
    what
        What the value is for, for the error message.

    Raises
    ------
    Refused
        The string is empty, or the number does not fit.
    """
    number = int.from_bytes(value, "big")
    if number >> width or not value:
        given = f"0x{value[:32].hex()}" if value else "an empty string"
        raise Refused(OUT_OF_RANGE, f"{what} has {width} bits; {given} does not fit")
    return number


def encode(number: int) -> bytes:
    """Return the shortest byte string that means a number; zero takes one byte."""
    return number.to_bytes((number.bit_length() + 7) // 8 or 1, "big")
