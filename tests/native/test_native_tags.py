# SPDX-License-Identifier: Apache-2.0
"""The compiled library tags as the oracle in NumPy does. Each test asks both."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlcp.native import ffi, lib
from dlcp.values.dtypes import ValueType
from dlcp.values.tags import (
    AS_SEEDED,
    BORDERS,
    LAYER_PACKETS,
    Layer,
    PacketTags,
    Segment,
    Tagger,
    TagPolicy,
    classify,
    packet_magnitudes,
)
from tests.native import tagging_oracle as oracle

EVERY_FORMAT = pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)
MAGNITUDES = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.one_of(
        st.floats(0, 1, width=32),
        st.floats(0, width=32, allow_nan=False),  # infinite ones too
        st.sampled_from([0.0, 0.5, 1.0, float(np.float32(1e-45)), float(np.finfo(np.float32).max)]),
    ),
)
QUANTILES = st.lists(st.floats(0, 1), min_size=BORDERS, max_size=BORDERS).map(sorted)


def memory(array):
    return ffi.from_buffer(array)


def send_order(queue, droppable, seed, order=AS_SEEDED):
    """The function that the engine calls for each message; the oracle defines its result."""
    indices = np.empty(len(queue), np.uint32)
    results = ffi.from_buffer("uint32_t[]", indices)
    lib.dlcp_send_order(memory(queue), memory(droppable), len(queue), seed, *order, results)
    return indices


def encode_tags(tags, bounded, service):
    """Bytes 1 to 3 of each header and its type of service, and which packets may be dropped."""
    encoded, droppable = np.empty((len(tags.queue), 4), np.uint8), np.empty(len(tags.queue), np.bool_)
    results = map(memory, (service, encoded, droppable))
    lib.dlcp_encode_tags(*map(memory, tags), len(tags.queue), bounded, *results)
    return encoded, droppable


def both(function, *arguments):
    """Return the results of a function, and of the oracle's function of that name."""
    return function(*arguments), getattr(oracle, function.__name__)(*arguments)


def whole_numbers(rng, value_type, count, most=8):
    """Values whose squares add up without rounding, in any order."""
    scale = rng.choice([2.0**-12, 1.0, 64.0])
    return value_type.narrow((rng.integers(-most, most + 1, count) * scale).astype(np.float32))


@EVERY_FORMAT
@given(seed=st.integers(0, 2**32), count=st.integers(0, 3000), per_packet=st.integers(1, 800))
@settings(max_examples=60)
def test_magnitudes_are_equal_where_sums_are_not_rounded(value_type, seed, count, per_packet):
    values = whole_numbers(np.random.default_rng(seed), value_type, count)
    compiled, plain = both(packet_magnitudes, values, value_type, per_packet)
    assert compiled.shape == (-(-count // per_packet),)
    np.testing.assert_array_equal(compiled, plain)


@EVERY_FORMAT
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3000), per_packet=st.integers(1, 800))
@settings(max_examples=60)
def test_magnitudes_agree_but_for_rounding(value_type, seed, count, per_packet):
    rng = np.random.default_rng(seed)
    values = value_type.narrow(rng.standard_normal(count, np.float32) * np.float32(10) ** rng.integers(-3, 3))
    compiled, plain = both(packet_magnitudes, values, value_type, per_packet)
    # Each of up to 800 additions rounds by half a unit in the last place at most.
    np.testing.assert_allclose(compiled, plain, rtol=800 * 2.0**-24)


@pytest.mark.parametrize("value_type", [ValueType.FLOAT16, ValueType.BFLOAT16], ids=lambda kind: kind.value)
def test_every_number_of_16_bits_is_read_alike(value_type):
    values = np.arange(1 << 16, dtype=np.uint16).view(value_type.storage)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        compiled, plain = both(packet_magnitudes, values, value_type, 1)
    np.testing.assert_array_equal(compiled, plain)
    assert np.isinf(compiled[~np.isfinite(value_type.widen(values))]).all()


@EVERY_FORMAT
def test_nan_and_infinity_count_as_the_largest(value_type):
    values = value_type.narrow(np.ones(500, np.float32)).copy()
    values[[7, 101, 499]] = value_type.narrow(np.float32([np.nan, np.inf, -np.inf]))
    with np.errstate(invalid="ignore"):
        compiled, plain = both(packet_magnitudes, values, value_type, 100)
    np.testing.assert_array_equal(compiled, [np.inf, np.inf, 1, 1, np.inf])
    np.testing.assert_array_equal(plain, compiled)


@EVERY_FORMAT
def test_buffers_may_be_read_only_strided_or_misaligned(value_type):
    values = whole_numbers(np.random.default_rng(0), value_type, 1001)
    expected = packet_magnitudes(values, value_type, 90)
    fixed = values.copy()
    fixed.flags.writeable = False
    strided = np.repeat(values, 2)[::2]
    raw = bytearray(1) + values.tobytes()
    misaligned = np.frombuffer(raw, value_type.storage, offset=1)
    assert not misaligned.flags.aligned
    for other in (fixed, strided, misaligned):
        np.testing.assert_array_equal(packet_magnitudes(other, value_type, 90), expected)


@given(
    magnitudes=MAGNITUDES,
    seed=st.integers(0, 2**32),
    quantiles=st.lists(QUANTILES, min_size=1, max_size=4),
    memory=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    known=st.booleans(),
)
@settings(max_examples=120)
def test_classes_and_borders_are_equal_bit_by_bit(magnitudes, seed, quantiles, memory, known):
    rng = np.random.default_rng(seed)
    packets = len(magnitudes)
    kept = rng.random(packets) < rng.choice([0, 0.2, 1])
    cuts = np.sort(rng.integers(0, packets + 1, len(quantiles) - 1))
    layers = np.zeros(len(quantiles), LAYER_PACKETS)
    layers["first"], layers["stop"] = np.append(0, cuts), np.append(cuts, packets)
    layers["row"] = rng.integers(0, len(quantiles), len(quantiles))  # two parts of one layer share a row
    layers["quantiles"] = quantiles
    before = np.full((len(quantiles), BORDERS), np.nan)
    if known:
        before[:] = np.sort(rng.random((len(quantiles), BORDERS)), axis=1)

    def judge(by):
        borders = before.copy()
        steps = [by(part, kept, layers, memory, borders) for part in (magnitudes, np.roll(magnitudes, 1))]
        return [array for step in steps for array in step] + [borders]

    for compiled, plain in zip(judge(classify), judge(oracle.classify), strict=True):
        np.testing.assert_array_equal(compiled, plain)
        assert compiled.dtype == plain.dtype


@EVERY_FORMAT
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=8))
@settings(max_examples=60)
def test_tags_are_equal(value_type, seed, sizes):
    borders = np.cumsum([0, *sizes]).tolist()
    segments = [
        Segment(Layer(f"layer{number}", number * 36), start, stop)
        for number, (start, stop) in enumerate(pairwise(borders))
    ]

    def three_steps():
        rng = np.random.default_rng(seed)
        tagger = Tagger(TagPolicy(small_layer_values=200))
        steps = [whole_numbers(rng, value_type, borders[-1]) for _ in range(3)]
        return [array for values in steps for array in tagger.tag(values, value_type, segments, 45)]

    compiled_steps = three_steps()
    with mock.patch.multiple("dlcp.values.tags", packet_magnitudes=oracle.packet_magnitudes, classify=oracle.classify):
        plain_steps = three_steps()
    for compiled, plain in zip(compiled_steps, plain_steps, strict=True):
        np.testing.assert_array_equal(compiled, plain)


@given(
    seed=st.integers(0, 2**32 - 1),
    packets=st.one_of(st.integers(0, 200), st.integers(0, 3000)),
    queues=st.integers(1, 8),
    droppable=st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(max_examples=120)
def test_the_order_of_sending_is_equal(seed, packets, queues, droppable):
    rng = np.random.default_rng(seed)
    queue = rng.integers(0, queues, packets).astype(np.uint8)
    may_drop = rng.random(packets) < droppable
    compiled, plain = both(send_order, queue, may_drop, seed)
    np.testing.assert_array_equal(compiled, plain)
    assert compiled.dtype == plain.dtype == np.uint32
    np.testing.assert_array_equal(np.sort(compiled), np.arange(packets))


@given(seed=st.integers(0, 2**32 - 1), packets=st.integers(0, 600), bounded=st.booleans())
@settings(max_examples=120)
def test_what_packets_carry_of_their_tags_is_equal(seed, packets, bounded):
    rng = np.random.default_rng(seed)
    tags = PacketTags(
        *(rng.integers(0, stop, packets).astype(np.uint8) for stop in (8, 8, 256)), rng.random(packets) < 0.3
    )
    service = rng.integers(0, 256, (8, 2)).astype(np.uint8)
    for compiled, plain in zip(*both(encode_tags, tags, bounded, service), strict=True):
        np.testing.assert_array_equal(compiled, plain)
        assert compiled.dtype == plain.dtype


def test_urgent_queues_are_sent_first_by_blocks_and_what_may_not_be_dropped_first_in_each():
    queue = np.array([3] * 256 + [6] * 262 + [3] * 10, np.uint8)
    droppable = np.zeros(len(queue), bool)
    droppable[[0, 1, 256, 258]] = True
    # Queue 6 has a block of 256 and one of 6, queue 3 one of 256 and one of 10: an odd seed begins with the second.
    first, second = [257, *range(259, 512), 256, 258], list(range(512, 518))
    third, fourth = [*range(2, 256), 0, 1], list(range(518, 528))
    assert send_order(queue, droppable, 0).tolist() == first + second + third + fourth
    assert send_order(queue, droppable, 7).tolist() == second + first + fourth + third
