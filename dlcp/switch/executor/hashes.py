# SPDX-License-Identifier: Apache-2.0
"""BMv2's hash algorithms: over bytes, as defined, and as generated functions over numbers.

Source: calculations.cpp of the behavioral model. crc16 is CRC-16/ARC (polynomial 0x8005, reflected, starting at 0),
crc32 that of zlib, csum16 the Internet checksum, xor16 the exclusive or of 16-bit words, identity the first 8 bytes.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

CRC16_POLYNOMIAL: Final = 0xA001
"""0x8005 reflected."""
CRC32_POLYNOMIAL: Final = 0xEDB88320
"""0x04C11DB7 reflected."""


@cache
def crc_table(polynomial: int) -> tuple[int, ...]:
    """Return the table of 256 entries of a reflected CRC."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ polynomial if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


def crc16(data: bytes) -> int:
    """Return CRC-16/ARC."""
    table = crc_table(CRC16_POLYNOMIAL)
    value = 0
    for byte in data:
        value = table[(value ^ byte) & 255] ^ value >> 8
    return value


def csum16(data: bytes) -> int:
    """Return the Internet checksum: the one's complement of the one's complement sum of 16-bit words."""
    total = sum(data[i] << 8 | (data[i + 1] if i + 1 < len(data) else 0) for i in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def xor16(data: bytes) -> int:
    """Return the exclusive or of 16-bit words, the last padded with zeros."""
    value = 0
    for i in range(0, len(data), 2):
        value ^= data[i] << 8 | (data[i + 1] if i + 1 < len(data) else 0)
    return value


def identity(data: bytes) -> int:
    """Return the first eight bytes as a number."""
    return int.from_bytes(data[:8], "big")


OVER_BYTES: Final[dict[str, Callable[[bytes], int]]] = {
    "crc16": crc16,
    "crc32": zlib.crc32,
    "csum16": csum16,
    "identity": identity,
    "xor16": xor16,
}


def pack(values: Sequence[int], widths: Sequence[int]) -> bytes:
    """Pack numbers without gaps, the first bit first, and pad with zero bits to whole bytes."""
    number = 0
    for value, width in zip(values, widths, strict=True):
        number = number << width | value
    total = sum(widths)
    size = (total + 7) // 8
    return (number << (size * 8 - total)).to_bytes(size, "big")


class HashOf(NamedTuple):
    """A function that hashes numbers of these widths, packed without gaps."""

    algorithm: str
    widths: tuple[int, ...]

    def plain(self, name: str, namespace: dict[str, Any]) -> str:
        """Return the function's source, and add what it calls to ``namespace``."""
        namespace[f"_{self.algorithm}"] = OVER_BYTES[self.algorithm]
        size = (sum(self.widths) + 7) // 8
        terms, position = [], size * 8
        for i, width in enumerate(self.widths):
            position -= width
            terms.append(f"v{i} << {position}" if position else f"v{i}")
        packed = f"({' | '.join(terms) or '0'}).to_bytes({size}, 'big')"
        return f"{self._head(name)}\n    return _{self.algorithm}({packed})\n"

    def compiled(self, name: str) -> str:
        """Return the function's source for Numba, byte by byte; it uses `compiled_tables`."""
        units = _bytes(self.widths)
        start, end = "0", []
        if self.algorithm in ("crc16", "crc32"):
            body = [f"h = {self.algorithm.upper()}[(h ^ ({unit})) & 255] ^ (h >> 8)" for unit in units]
            if self.algorithm == "crc32":
                start, end = "0xffffffff", ["h ^= 0xffffffff"]
        elif self.algorithm == "identity":
            body = [f"h = (h << 8) | ({unit})" for unit in units[:8]]
        else:
            sign = "+" if self.algorithm == "csum16" else "^"
            body = [f"h {sign}= ({unit}){' << 8' if i % 2 == 0 else ''}" for i, unit in enumerate(units)]
            if self.algorithm == "csum16":
                end = ["h = (h & 0xffff) + (h >> 16)"] * 2 + ["h ^= 0xffff"]
        return "\n    ".join([self._head(name), f"h = {start}", *body, *end, "return h"]) + "\n"

    def _head(self, name: str) -> str:
        return f"def {name}({', '.join(f'v{i}' for i in range(len(self.widths)))}):"


def compiled_tables() -> str:
    """Return the source of the tables that `HashOf.compiled` uses."""
    tables = {"CRC16": CRC16_POLYNOMIAL, "CRC32": CRC32_POLYNOMIAL}
    return "".join(
        f"{name} = np.array({list(crc_table(polynomial))}, np.int64)\n" for name, polynomial in tables.items()
    )


def _bytes(widths: Sequence[int]) -> list[str]:
    """Return an expression for each byte of the packed message."""
    size = (sum(widths) + 7) // 8
    units: list[list[str]] = [[] for _ in range(size)]
    start = 0
    for i, width in enumerate(widths):
        end = start + width
        for byte in range(start // 8, (end + 7) // 8):
            low, high = max(start, byte * 8), min(end, byte * 8 + 8)
            text = f"((v{i} >> {end - high}) & {(1 << (high - low)) - 1})"
            units[byte].append(f"({text} << {byte * 8 + 8 - high})" if byte * 8 + 8 > high else text)
        start = end
    return [" | ".join(unit) for unit in units]
