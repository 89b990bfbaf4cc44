# SPDX-License-Identifier: Apache-2.0
"""Encoded gradients: the C code against NumPy, exact remainders, missing packets, and the layout of the bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcp.values.planes import CODED_BITS, PlaneLayout
from dlcp.values.tags import PacketTags
from dlcp.wire.payloads import PLANE_BLOCK_VALUES, PLANE_DIGIT_BITS

PAYLOAD = 300
SCALE_NAN = 255


def reference(values, bits):
    """Encode in NumPy; return each value's upper and lower digit, and the scale byte of its block."""
    digit = PLANE_DIGIT_BITS[bits]
    blocks = np.pad(values, (0, -len(values) % PLANE_BLOCK_VALUES)).reshape(-1, PLANE_BLOCK_VALUES)
    top = (1 << digit - 1) - 1
    largest = top if bits == digit else (top << digit) + top
    upper, lower, scales = np.zeros((3, *blocks.shape), int)
    for block, up, low, scale in zip(blocks, upper, lower, scales, strict=True):
        if not np.isfinite(block).all():
            scale[:] = SCALE_NAN
            continue
        byte = 0
        while np.rint(np.abs(block).max() * 2.0 ** (127 - byte)) > largest:
            byte += 1
        code = np.rint(block * 2.0 ** (127 - byte)).astype(int)
        up[:], scale[:] = code, byte
        if bits != digit:
            up[:] = (code + (1 << digit - 1)) >> digit
            low[:] = code - (up << digit)
    return (each.ravel()[: len(values)] for each in (upper, lower, scales))


def decoded(values, bits, delivered=None):
    layout = PlaneLayout(len(values), bits, PAYLOAD)
    code, found = np.full(layout.bytes, 7, np.uint8), np.full(len(values), 9, np.float32)
    layout.encode(values, code)
    layout.decode(code, found, delivered)
    return found


def gradients(count, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-12, 3, count)).astype(np.float32)


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=200)
@given(st.lists(FLOATS, min_size=1, max_size=200), st.sampled_from(CODED_BITS))
@np.errstate(over="ignore")  # values near the largest float may round to infinity, in C as well
def test_c_and_numpy_encode_alike(numbers, bits):
    values = np.array(numbers, np.float32)
    upper, lower, scales = reference(values.astype(np.float64), bits)
    digit = PLANE_DIGIT_BITS[bits] if bits != PLANE_DIGIT_BITS[bits] else 0
    expected = np.where(scales == SCALE_NAN, np.nan, ((upper << digit) + lower) * 2.0 ** (scales - 127))
    np.testing.assert_array_equal(decoded(values, bits), expected.astype(np.float32))
    if digit:
        layout = PlaneLayout(len(values), bits, PAYLOAD)
        only_upper = np.arange(2 * layout.packets) < layout.packets
        expected = np.where(scales == SCALE_NAN, np.nan, (upper << digit) * 2.0 ** (scales - 127))
        np.testing.assert_array_equal(decoded(values, bits, only_upper), expected.astype(np.float32))


@pytest.mark.parametrize("bits", CODED_BITS)
def test_the_remainder_is_exact(bits):
    values = gradients(10_007)
    layout = PlaneLayout(len(values), bits, PAYLOAD)
    code = np.empty(layout.bytes, np.uint8)
    rest = np.empty_like(values)
    layout.encode(values, code, rest)
    assert 0 < np.abs(rest).max() < np.abs(values).max()
    layout.add(code, rest)
    np.testing.assert_array_equal(rest, values)


@pytest.mark.parametrize("bits", CODED_BITS)
@pytest.mark.parametrize("count", [1, PLANE_BLOCK_VALUES, 10_007])
def test_rounding_is_encoding_and_decoding_at_once(bits, count):
    values = gradients(count)
    if count > PLANE_BLOCK_VALUES:
        values[-1] = np.inf
    layout = PlaneLayout(len(values), bits, PAYLOAD)
    code, rounded, also = np.empty(layout.bytes, np.uint8), values.copy(), np.full(layout.bytes, 7, np.uint8)
    rest, lacked = np.empty_like(values), np.empty_like(values)
    layout.round(rounded, also, rest, 3)
    layout.encode(values, code, lacked)
    np.testing.assert_array_equal(also, code)
    np.testing.assert_array_equal(rounded, decoded(values, bits))
    np.testing.assert_array_equal(rest, np.float32(3) * lacked)


@pytest.mark.parametrize("bits", CODED_BITS)
def test_lost_digits_are_part_of_what_a_code_lacks(bits):
    values = gradients(10_007)
    values[5000] = np.nan
    layout = PlaneLayout(len(values), bits, PAYLOAD)
    code, rest = np.empty(layout.bytes, np.uint8), np.empty_like(values)
    layout.encode(values, code, rest)
    delivered = np.ones(layout.planes * layout.packets, np.bool_)
    delivered[layout.packets + 1 :: 3] = False
    layout.lose(code, delivered, rest)
    lacked = values - decoded(values, bits, delivered)
    np.testing.assert_array_equal(rest, np.where(np.isfinite(lacked), lacked, 0))


@pytest.mark.parametrize("bits", CODED_BITS)
def test_missing_packets_are_missing_digits(bits):
    values = gradients(5000)
    layout = PlaneLayout(len(values), bits, PAYLOAD)
    delivered = np.ones(layout.planes * layout.packets, np.bool_)
    delivered[2] = False
    found = decoded(values, bits, delivered)
    gone = slice(2 * layout.per_packet, 3 * layout.per_packet)
    assert not found[gone].any()
    whole = decoded(values, bits)
    whole[gone] = 0
    np.testing.assert_array_equal(found, whole)
    if layout.planes > 1:
        delivered[:] = True
        delivered[layout.packets + 2] = False
        found = decoded(values, bits, delivered)
        change = np.flatnonzero(found != decoded(values, bits))
        assert gone.start <= change.min() <= change.max() < gone.stop


@pytest.mark.parametrize("bits", CODED_BITS)
def test_errors_are_at_most_half_a_unit(bits):
    values = np.random.default_rng(3).standard_normal(3200).astype(np.float32)
    error = np.abs(decoded(values, bits) - values).reshape(-1, PLANE_BLOCK_VALUES).max(axis=1)
    largest = np.abs(values).reshape(-1, PLANE_BLOCK_VALUES).max(axis=1)
    digit = (1 << PLANE_DIGIT_BITS[bits] - 1) - 1
    top = digit if bits == 4 else (digit << PLANE_DIGIT_BITS[bits]) + digit
    assert (error <= largest / top).all()  # half of a unit that is up to twice as large as needed


def test_only_what_becomes_smaller_is_encoded():
    assert PlaneLayout.of(1000, 4, 32, 1440) is None
    assert PlaneLayout.of(1000, 2, 16, 1440) is None
    assert PlaneLayout.of(360, 4, 8, 1440) is None, "one packet would become two"
    assert PlaneLayout.of(0, 4, 8, 1440) is None
    layout = PlaneLayout.of(100_000, 4, 8, 1440)
    assert layout is not None
    assert layout.bytes < 0.28 * 400_000


def test_bytes_that_no_digit_fills_are_zero():
    layout = PlaneLayout(5000, 8, PAYLOAD)
    code = np.full(layout.bytes, 255, np.uint8)
    layout.encode(np.zeros(5000, np.float32), code)
    assert not code.any()


def test_lower_packets_are_dropped_by_the_size_of_their_digits():
    values = np.repeat(2.0 ** -np.arange(100), 64).astype(np.float32)
    layout = PlaneLayout(len(values), 8, PAYLOAD)
    code = np.empty(layout.bytes, np.uint8)
    layout.encode(values, code)
    count = -(-len(values) // 75)
    plain = PacketTags(np.arange(count, dtype=np.uint8) % 5 + 2, *np.zeros((2, count), np.uint8), np.zeros(count, bool))
    tags = layout.tags(plain, 75, code, np.arange(layout.packets) != 5)
    upper, lower = slice(0, layout.packets), slice(layout.packets, None)
    assert tags.protected[upper].all()
    assert not tags.drop_class[upper].any()
    assert np.flatnonzero(tags.protected[lower]).tolist() == [5]
    assert tags.drop_class[lower][5] == 0
    others = np.delete(tags.drop_class[lower], 5).astype(int)
    assert (np.diff(others) >= 0).all()
    assert (others[0], others[-1]) == (1, 7)
    np.testing.assert_array_equal(tags.queue[upper], tags.queue[lower])


def test_memory_that_does_not_fit_is_refused():
    layout = PlaneLayout(5000, 8, PAYLOAD)
    values, code = np.zeros(5000, np.float32), np.zeros(layout.bytes, np.uint8)
    with pytest.raises(ValueError, match=f"5000 values in 8 bits are {layout.bytes} bytes, not {layout.bytes - 1}"):
        layout.add(code[1:], values)
    with pytest.raises(ValueError, match="expected 5000 float32 values, got float64"):
        layout.encode(values.astype(np.float64), code)
    with pytest.raises(ValueError, match=r"expected 5000 float32 values, got float32 of shape \(4999,\)"):
        layout.decode(code, values[1:])
    with pytest.raises(ValueError, match=f"must have {2 * layout.packets} bools"):
        layout.decode(code, values, np.ones(layout.packets, np.bool_))
