# SPDX-License-Identifier: Apache-2.0
"""Hashes: known answers, and the two ways in which the generated text computes them."""

import numpy as np
import pytest

from dlcp.switch.executor import hashes

CHECK = b"123456789"
KNOWN = {
    "crc16": {CHECK: 0xBB3D, b"": 0, b"\x00\x01": 0xC0C1},
    "crc32": {CHECK: 0xCBF43926, b"": 0},
    # RFC 1071, section 3: the sum is ddf2.
    "csum16": {bytes.fromhex("0001f203f4f5f6f7"): 0x220D, b"": 0xFFFF, b"\xff\xff": 0, b"\x01": 0xFEFF},
    "xor16": {bytes.fromhex("1234ff00"): 0xED34, bytes.fromhex("123456"): 0x4434},
    "identity": {b"\x01\x02": 0x0102, b"\x01\x02\x03\x04\x05\x06\x07\x08\x09": 0x0102030405060708},
}


@pytest.mark.parametrize("algorithm", KNOWN)
def test_known_answers(algorithm):
    for data, value in KNOWN[algorithm].items():
        assert hashes.OVER_BYTES[algorithm](data) == value


def test_fields_are_packed_without_gaps():
    assert hashes.pack([1, 2, 3], [4, 4, 8]) == b"\x12\x03"
    assert hashes.pack([0b101, 0b1], [3, 2]) == bytes([0b10101000])
    assert hashes.pack([], []) == b""


LAYOUTS = [(32, 32, 8, 16, 16, 32), (32, 32, 8, 32), (3, 13, 1, 9, 48), (16, 32, 16, 16), (7,), (16, 3), (24, 16, 8)]


@pytest.mark.parametrize("algorithm", KNOWN)
@pytest.mark.parametrize("widths", LAYOUTS)
def test_generated_functions_equal_the_definition(algorithm, widths):
    if algorithm == "identity" and sum(widths) > 56:
        widths = widths[:1]
    random = np.random.default_rng(3)
    plain, compiled = {}, {"np": np}
    function = hashes.HashOf(algorithm, widths)
    exec(function.plain("f", plain), plain)
    exec(hashes.compiled_tables() + function.compiled("f"), compiled)
    for step in range(60):
        values = [int(random.integers(1 << width)) for width in widths] if step else [0] * len(widths)
        expected = hashes.OVER_BYTES[algorithm](hashes.pack(values, widths))
        assert plain["f"](*values) == expected
        assert compiled["f"](*values) == expected
