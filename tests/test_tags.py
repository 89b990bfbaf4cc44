# SPDX-License-Identifier: Apache-2.0
"""Tags follow layer and magnitude, in every number format. A policy that silently does nothing must fail here."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dlcp.values.dtypes import ValueType
from dlcp.values.tags import Layer, Segment, Tagger, TagPolicy, layers_in_order, packet_magnitudes, queue_of_layer

PAYLOAD_BYTES = 1440
PACKETS = 400
EVERY_FORMAT = pytest.mark.parametrize("value_type", list(ValueType), ids=lambda kind: kind.value)


def per_packet(value_type):
    return PAYLOAD_BYTES // value_type.storage.itemsize


def gradient(value_type, *, packets=PACKETS, scale=1.0, seed=0):
    """Values whose packets differ in magnitude, as layers' rows do; and the magnitudes, in float64."""
    rng = np.random.default_rng(seed)
    size = per_packet(value_type)
    values = scale * rng.lognormal(0, 1, (packets, 1)) * rng.standard_normal((packets, size))
    stored = value_type.narrow(values.astype(np.float64 if value_type is ValueType.FLOAT64 else np.float32))
    exact = value_type.widen(stored.ravel()).astype(np.float64).reshape(packets, size)
    return stored.ravel(), np.sqrt((exact**2).mean(axis=1))


def tag_layer(values, value_type, position=0, tagger=None):
    segments = [Segment(Layer("layer", position), 0, len(values))]
    return (tagger or Tagger()).tag(values, value_type, segments, per_packet(value_type))


def assert_classes_follow(magnitudes, classes):
    """Whatever is in a less valuable class is smaller than everything in a more valuable one."""
    assert set(classes) == set(range(8))
    for drop_class in range(1, 8):
        less, more = magnitudes[classes == drop_class], magnitudes[classes == drop_class - 1]
        assert less.max() <= more.min() * (1 + 1e-4), f"classes {drop_class} and {drop_class - 1} overlap"


def shares(classes):
    return np.bincount(classes, minlength=8) / len(classes)


def test_queues_go_from_the_front_of_the_model_to_its_back():
    queue = queue_of_layer(np.arange(256, dtype=np.uint8))
    assert queue[0] == 6
    assert queue[255] == 2
    assert (np.diff(queue.astype(int)) <= 0).all()
    assert all(50 <= (queue == number).sum() <= 53 for number in range(2, 7))


@EVERY_FORMAT
def test_a_front_layer_is_more_urgent_than_a_back_layer(value_type):
    values, _ = gradient(value_type)
    front, back = (tag_layer(values, value_type, position) for position in (0, 255))
    assert front.queue.min() > back.queue.max()
    assert set(front.layer) == {0}
    assert set(back.layer) == {255}


@EVERY_FORMAT
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_drop_class_follows_magnitude(value_type, scale):
    values, magnitudes = gradient(value_type, scale=scale)
    assert_classes_follow(magnitudes, tag_layer(values, value_type).drop_class)


@EVERY_FORMAT
def test_each_layer_is_judged_by_its_own_scale(value_type):
    small, small_magnitudes = gradient(value_type, scale=0.02, seed=1)
    large, large_magnitudes = gradient(value_type, scale=50.0, seed=2)
    assert large_magnitudes.min() > 2 * np.median(small_magnitudes)
    segments = [
        Segment(Layer("small", 128), 0, len(small)),
        Segment(Layer("large", 128), len(small), 2 * len(small)),
    ]
    tags = Tagger().tag(np.concatenate([small, large]), value_type, segments, per_packet(value_type))
    halves = tags.drop_class[:PACKETS], tags.drop_class[PACKETS:]
    for magnitudes, classes in zip((small_magnitudes, large_magnitudes), halves, strict=True):
        assert_classes_follow(magnitudes, classes)
    np.testing.assert_allclose(shares(halves[0]), shares(halves[1]), atol=0.02)


@EVERY_FORMAT
@pytest.mark.parametrize("position", [0, 100, 255])
def test_classes_hold_the_shares_of_the_policy(value_type, position):
    policy = TagPolicy()
    expected = np.array(policy.front_shares) * (1 - position / 255) + np.array(policy.back_shares) * position / 255
    tagger = Tagger(policy)
    for seed in range(4):
        values, _ = gradient(value_type, seed=seed)
        classes = tag_layer(values, value_type, position, tagger).drop_class
        np.testing.assert_allclose(shares(classes), expected, atol=0.06)
        if seed == 0:
            np.testing.assert_allclose(shares(classes), expected, atol=0.005)


def test_an_operator_s_shares_are_used():
    values, _ = gradient(ValueType.FLOAT32)
    chosen = (0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5)
    classes = tag_layer(values, ValueType.FLOAT32, 77, Tagger(TagPolicy(chosen, chosen))).drop_class
    np.testing.assert_allclose(shares(classes)[[2, 7]], 0.5, atol=0.01)


@EVERY_FORMAT
def test_back_layers_are_more_protected(value_type):
    values, _ = gradient(value_type)
    protected = [tag_layer(values, value_type, position).protected.mean() for position in (0, 85, 170, 255)]
    assert np.all(np.diff(protected) > 0.05)


@EVERY_FORMAT
def test_what_is_never_to_be_dropped_is_protected_and_nothing_else(value_type):
    values, _ = gradient(value_type)
    tags = tag_layer(values, value_type, 128)
    np.testing.assert_array_equal(tags.protected, tags.drop_class == 0)


@EVERY_FORMAT
def test_small_layers_are_protected_whole(value_type):
    size = per_packet(value_type)
    values, _ = gradient(value_type)
    start, stop = 100 * size + 7, 100 * size + 7 + 1023
    segments = [
        Segment(Layer("before", 10), 0, start),
        Segment(Layer("bias", 20), start, stop),
        Segment(Layer("after", 30), stop, len(values)),
    ]
    # The layer may be tiny in magnitude: it is its size that counts.
    quiet = values.copy()
    quiet[start:stop] = value_type.narrow(np.full(stop - start, 1e-6, np.float32))
    tags = Tagger().tag(quiet, value_type, segments, size)
    touched = slice(start // size, (stop - 1) // size + 1)
    assert tags.protected[touched].all()
    assert (tags.drop_class[touched] == 0).all()
    outside = np.delete(tags.drop_class, np.arange(touched.start, touched.stop))
    assert len(set(outside)) == 8


def test_a_layer_of_the_configured_size_is_not_small():
    for count, small in ((1023, True), (1024, False)):
        values = np.random.default_rng(0).standard_normal(count).astype(np.float32)
        assert tag_layer(values, ValueType.FLOAT32).protected.all() == small


@EVERY_FORMAT
def test_packets_with_nan_or_infinity_are_protected_and_do_not_disturb_others(value_type):
    values, magnitudes = gradient(value_type)
    size = per_packet(value_type)
    floats = value_type.widen(values).copy()
    spoiled = {3: np.nan, 50: np.inf, 51: -np.inf}
    for packet, value in spoiled.items():
        floats[packet * size + 5] = value
    tagger = Tagger()
    with np.errstate(invalid="ignore"):
        tags = tag_layer(value_type.narrow(floats), value_type, tagger=tagger)
    assert tags.protected[list(spoiled)].all()
    fine = np.delete(np.arange(PACKETS), list(spoiled))
    assert_classes_follow(magnitudes[fine], tags.drop_class[fine])
    after = tag_layer(values, value_type, tagger=tagger)
    assert_classes_follow(magnitudes, after.drop_class)


def test_a_layer_of_nothing_but_nan_is_protected():
    tags = tag_layer(np.full(3600, np.nan, np.float32), ValueType.FLOAT32)
    assert tags.protected.all()


@EVERY_FORMAT
def test_packets_of_zeros_are_the_first_to_go(value_type):
    # As in an embedding, where most rows have no gradient.
    values, _ = gradient(value_type)
    size = per_packet(value_type)
    zero = np.arange(PACKETS) % 5 != 0
    values.reshape(PACKETS, size)[zero] = 0
    tags = tag_layer(values, value_type)
    assert (tags.drop_class[zero] == 7).all()
    assert tags.drop_class[~zero].mean() < 1


def test_a_packet_on_a_border_is_as_urgent_as_the_most_urgent_layer_in_it():
    values = np.random.default_rng(0).standard_normal(360 * 20).astype(np.float32)
    middle = 360 * 10 + 100
    segments = [
        Segment(Layer("back", 255), 0, middle),
        Segment(Layer("scale", 0), middle, middle + 20),
        Segment(Layer("other", 200), middle + 20, len(values)),
    ]
    tags = Tagger().tag(values, ValueType.FLOAT32, segments, 360)
    assert tags.queue[10] == 6
    assert tags.layer[10] == 0
    assert tags.queue[9] == tags.queue[8] == 2
    assert tags.layer[11] == 200


@EVERY_FORMAT
def test_a_short_last_packet_is_judged_by_the_size_of_its_values(value_type):
    values, _ = gradient(value_type)
    size = per_packet(value_type)
    loud = np.concatenate([values, np.repeat(values[:1] * 0 + value_type.narrow(np.float32([1e4])), 9)])
    assert tag_layer(loud, value_type).drop_class[-1] == 0
    quiet = np.concatenate([values, np.repeat(value_type.narrow(np.float32([1e-4])), 9)])
    assert tag_layer(quiet, value_type).drop_class[-1] == 7
    assert len(tag_layer(quiet, value_type).queue) == PACKETS + 1
    assert len(quiet) == PACKETS * size + 9


@EVERY_FORMAT
def test_magnitudes_are_root_mean_squares(value_type):
    values, expected = gradient(value_type)
    np.testing.assert_allclose(packet_magnitudes(values, value_type, per_packet(value_type)), expected, rtol=1e-4)


def test_magnitudes_of_another_storage_are_refused():
    with pytest.raises(TypeError, match="bfloat16 must be stored as uint16"):
        packet_magnitudes(np.zeros(10, np.float32), ValueType.BFLOAT16, 5)


def test_magnitude_is_judged_by_the_recent_past_too():
    usual, _ = gradient(ValueType.FLOAT32)
    burst, _ = gradient(ValueType.FLOAT32, scale=4.0)
    remembering, forgetful = Tagger(TagPolicy(memory=0.8)), Tagger(TagPolicy(memory=0.0))
    for tagger in (remembering, forgetful):
        tag_layer(usual, ValueType.FLOAT32, tagger=tagger)
    valued = [
        shares(tag_layer(burst, ValueType.FLOAT32, tagger=tagger).drop_class)[0] for tagger in (remembering, forgetful)
    ]
    assert valued[0] > valued[1] + 0.1
    assert valued[1] == pytest.approx(TagPolicy().front_shares[0], abs=0.01)


def test_the_same_gradients_get_the_same_tags():
    values, _ = gradient(ValueType.FLOAT32)
    first, second = (tag_layer(values, ValueType.FLOAT32) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_take_their_positions_in_order_of_definition():
    names = ["conv1.weight", "conv1.bias", "block.0.weight", "block.1.weight", "block.1.bias", "scale", "head.weight"]
    layers = layers_in_order(names)
    positions = [layers[name].position for name in names]
    assert positions[0] == positions[1] == 0
    assert positions[-1] == 255
    assert positions == sorted(positions)
    assert positions[3] == positions[4]
    assert len(set(positions)) == 5
    assert [layers[name].name for name in names] == names
    assert layers_in_order(["weight"])["weight"].position == 0
    deep = layers_in_order([f"layer{number}.weight" for number in range(1000)])
    assert {layer.position for layer in deep.values()} == set(range(256))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"front_shares": (1.0,)}, "8 numbers"),
        ({"front_shares": (0.5,) * 8}, "add up to 1"),
        ({"back_shares": (1.5, -0.5, 0, 0, 0, 0, 0, 0)}, ">= 0"),
        ({"memory": 1.0}, "memory"),
        ({"memory": -0.1}, "memory"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        TagPolicy(**fields)


def test_a_policy_of_one_class_leaves_nothing_in_others():
    values, _ = gradient(ValueType.FLOAT32)
    values[: 360 * 300] = 0
    keep_all = (1.0, 0, 0, 0, 0, 0, 0, 0)
    assert tag_layer(values, ValueType.FLOAT32, 9, Tagger(TagPolicy(keep_all, keep_all))).protected.all()


def test_magnitudes_that_are_known_give_the_same_tags():
    values, _ = gradient(ValueType.FLOAT32)
    segments = [Segment(Layer("layer", 40), 0, len(values))]
    magnitudes = packet_magnitudes(values, ValueType.FLOAT32, 360)
    whole, halved = Tagger(), Tagger()
    for _ in range(2):
        expected = whole.tag(values, ValueType.FLOAT32, segments, 360)
        for one, other in zip(expected, halved.tag_magnitudes(magnitudes, len(values), segments, 360), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda tagger: pickle.loads(pickle.dumps(tagger))])
def test_a_copy_of_a_tagger_remembers_what_it_has_seen(duplicate):
    usual, _ = gradient(ValueType.FLOAT32)
    burst, _ = gradient(ValueType.FLOAT32, scale=4.0)
    tagger = Tagger(TagPolicy(memory=0.8))
    tag_layer(usual, ValueType.FLOAT32, tagger=tagger)
    other = duplicate(tagger)
    expected = tag_layer(burst, ValueType.FLOAT32, tagger=tagger).drop_class
    np.testing.assert_array_equal(tag_layer(burst, ValueType.FLOAT32, tagger=other).drop_class, expected)
    assert not np.array_equal(tag_layer(burst, ValueType.FLOAT32).drop_class, expected)


def test_a_policy_that_is_set_later_is_used_from_then_on():
    values, _ = gradient(ValueType.FLOAT32)
    tagger = Tagger()
    assert not tag_layer(values, ValueType.FLOAT32, tagger=tagger).protected.all()
    tagger.policy = TagPolicy(small_layer_values=len(values) + 1)
    assert tag_layer(values, ValueType.FLOAT32, tagger=tagger).protected.all()


def test_buffers_may_change_their_layers_and_sizes():
    values, _ = gradient(ValueType.FLOAT32)
    cuts = [(100, 200), (200, 100), (150, 100), (100, 200)]
    tagger = Tagger(TagPolicy(memory=0.0))
    for cut, position in cuts:
        segments = [Segment(Layer("a", 0), 0, 360 * cut), Segment(Layer("b", position), 360 * cut, len(values))]
        tags = tagger.tag(values, ValueType.FLOAT32, segments, 360)
        assert set(tags.layer[:cut]) == {0}
        assert set(tags.layer[cut:]) == {position}
        for one, other in zip(tags, Tagger().tag(values, ValueType.FLOAT32, segments, 360), strict=True):
            np.testing.assert_array_equal(one, other)


def test_tags_belong_to_the_caller():
    values, _ = gradient(ValueType.FLOAT32)
    tagger = Tagger(TagPolicy(memory=0.0))
    first = tag_layer(values, ValueType.FLOAT32, tagger=tagger)
    kept = [tag.copy() for tag in first]
    for tag in first:
        tag[:] = 1
    for one, other in zip(tag_layer(values, ValueType.FLOAT32, tagger=tagger), kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_threads_may_share_a_tagger():
    values, _ = gradient(ValueType.FLOAT32)
    tagger = Tagger(TagPolicy(memory=0.0))
    expected = tag_layer(values, ValueType.FLOAT32).drop_class

    def tag_many(thread):
        for number in range(40):  # each layer is new, so that what is remembered grows meanwhile
            segments = [Segment(Layer(f"layer{thread}.{number}", 0), 0, len(values))]
            np.testing.assert_array_equal(tagger.tag(values, ValueType.FLOAT32, segments, 360).drop_class, expected)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(tag_many, thread) for thread in range(4)]:
            done.result(60)


def test_nothing_has_no_tags():
    for tag in Tagger().tag(np.zeros(0, np.float32), ValueType.FLOAT32, [Segment(Layer("a", 0), 0, 0)], 360):
        assert tag.shape == (0,)
