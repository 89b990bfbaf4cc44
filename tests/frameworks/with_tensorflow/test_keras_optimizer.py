# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper on a real Keras, with another rank that is made up."""

import threading

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf

import dlcp.tensorflow
from dlcp.tensorflow import DistributedOptimizer, load_model
from dlcp.transport import PeerSilentError
from tests.frameworks.mirror_group import MirrorGroup

pytestmark = pytest.mark.timeout(120)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(32, 6)).astype(np.float32)
LABELS = (np.arange(32) % 3).astype(np.int32)
BACKWARDS = ["back.bias", "back.kernel", "front.bias", "front.kernel"]


def network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="relu", name="front"), keras.layers.Dense(3, name="back")]
    return keras.Sequential([keras.Input((6,)), *layers])


def trained(optimizer, epochs=1, model=None, **compiling):
    model = model or network()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiling)
    model.fit(IMAGES, LABELS, 8, epochs, shuffle=False, verbose=0)
    return model


def same(ours, theirs):
    return all(np.array_equal(one, other) for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True))


def opposite(name, ours):
    return ours * 0 + 1 if name == "finite" else -ours


HOW = {"graph": {}, "eager": {"run_eagerly": True}, "three steps a call": {"steps_per_execution": 3}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_with_equal_ranks_training_is_as_without(how):
    group = MirrorGroup()
    ours = trained(DistributedOptimizer(keras.optimizers.Adam(0.01), group), 2, **how)
    assert same(ours, trained(keras.optimizers.Adam(0.01), 2, **how))
    assert group.names == BACKWARDS[::-1]
    assert group.steps == [BACKWARDS] * 8, "the last layer's gradients are there first"


def test_what_is_applied_is_the_mean():
    def nothing_in_front(name, ours):
        return -ours if name.startswith("front") else ours

    ours = trained(DistributedOptimizer(keras.optimizers.SGD(0.1), MirrorGroup(nothing_in_front)), 1)
    first = network().get_weights()
    assert all(np.array_equal(one, other) for one, other in zip(ours.get_weights()[:2], first[:2], strict=True))
    group = MirrorGroup(lambda name, ours: -ours / 2)
    quarter = trained(DistributedOptimizer(keras.optimizers.SGD(0.5), group))
    assert same(quarter, trained(keras.optimizers.SGD(0.125)))


def test_gradients_travel_while_backward_runs():
    """The front layer's backward waits until the back layer's gradient has been handed over."""
    handed_over, waited = threading.Event(), []

    def wait(gradient):
        waited.append(handed_over.wait(20))
        return gradient

    @tf.custom_gradient
    def slow(x):
        return x, lambda gradient: tf.ensure_shape(
            tf.numpy_function(wait, [gradient], tf.float32, stateful=False), gradient.shape
        )

    class Slow(keras.layers.Layer):
        def call(self, x):
            return slow(x)

    def notice(name, ours):
        if name == "back.kernel":
            handed_over.set()
        return ours

    layers = [keras.layers.Dense(5, name="front"), Slow(), keras.layers.Dense(3, name="back")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), MirrorGroup(notice)), "mse")
    model.fit(IMAGES, np.zeros((32, 3)), 32, verbose=0)
    assert waited == [True]


@pytest.mark.parametrize("how", list(HOW.values())[:2], ids=list(HOW)[:2])
def test_accumulated_gradients_travel_once_an_update(how):
    group = MirrorGroup()
    ours = trained(DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), group), **how)
    assert group.steps == [BACKWARDS] * 2, "four batches, two updates"
    assert same(ours, trained(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), **how))


def test_the_mean_is_clipped_and_not_what_goes_into_it():
    group = MirrorGroup(lambda name, ours: -ours / 2)
    ours = trained(DistributedOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=0.05, loss_scale_factor=8.0), group))
    applied = []

    class Quarter(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            applied.append(len(grads))
            return super()._clip_gradients([grad / 4 for grad in grads])

    theirs = trained(Quarter(0.1, global_clipnorm=0.05, loss_scale_factor=8.0))
    first = network().get_weights()
    for one, other, before in zip(ours.get_weights(), theirs.get_weights(), first, strict=True):
        np.testing.assert_allclose(one - before, other - before, rtol=1e-3, atol=1e-7)
    moved = sum(((one - before) ** 2).sum() for one, before in zip(ours.get_weights(), first, strict=True)) ** 0.5
    assert 0.1 * 0.05 < moved < 4 * 0.1 * 0.05 * 1.001, "four steps that were clipped"
    assert applied == [4]


def test_gradients_of_embeddings_are_made_dense():
    def network_of_words():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Embedding(9, 4, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(3, name="back"),
        ]
        return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])

    words = (np.arange(16) % 7).reshape(8, 2)
    group, models = MirrorGroup(), []
    for optimizer in (DistributedOptimizer(keras.optimizers.SGD(0.1), group), keras.optimizers.SGD(0.1)):
        model = network_of_words()
        model.compile(optimizer, "mse")
        model.fit(words, np.ones((8, 3)), 8, verbose=0)
        models.append(model)
    assert [len(step) for step in group.steps] == [3]
    for ours, theirs in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_a_loop_of_ones_own_may_leave_parameters_out():
    group = MirrorGroup(opposite)
    front, unused = keras.Variable(np.ones(3, np.float32), name="front"), keras.Variable([1.0], name="unused")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), group)
    optimizer.build([front, unused])

    @tf.function
    def step(values):
        optimizer.apply([values, None])

    step(tf.constant([1.0, 2.0, 3.0]))
    assert (group.names, group.steps) == (["front", "unused"], [["front"]])
    assert np.array_equal(front, np.ones(3))


def test_a_group_of_one_exchanges_nothing():
    group = MirrorGroup(size=1)
    assert same(trained(DistributedOptimizer(keras.optimizers.SGD(0.1), group)), trained(keras.optimizers.SGD(0.1)))
    assert group.steps == []


def scaled(group=None, **scaling):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), **scaling)
    return DistributedOptimizer(optimizer, group) if group else optimizer


def test_scaled_losses_train_as_without():
    group, plain = MirrorGroup(), scaled(dynamic_growth_steps=3)
    optimizer = scaled(group, dynamic_growth_steps=3)
    assert same(trained(optimizer), trained(plain))
    assert float(optimizer.dynamic_scale) == float(plain.dynamic_scale) == 2.0**16
    assert group.steps == [["finite", *BACKWARDS]] * 4


def test_all_ranks_skip_a_step_that_is_not_finite_on_one():
    def overflowed(name, ours):
        return ours * 0

    optimizer = scaled(MirrorGroup(overflowed))
    assert same(trained(optimizer), network())
    assert float(optimizer.dynamic_scale) == 2.0**11
    assert int(optimizer.iterations) == 0


def test_what_is_not_finite_does_not_travel():
    seen = []

    def look(name, ours):
        seen.append((name, bool(np.isfinite(ours).all())))
        return ours * 0 + 1 if name == "finite" else ours

    optimizer = scaled(MirrorGroup(look))
    optimizer.build([keras.Variable(np.ones(3, np.float32), name="front")])
    optimizer.apply([tf.constant([1.0, np.inf, 2.0])])
    assert seen == [("finite", True), ("front", True)]
    assert np.array_equal(optimizer._trainable_variables[0], np.ones(3))
    assert float(optimizer.dynamic_scale) == 2.0**14


def test_under_float16_the_wrapper_scales_losses_itself():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        group = MirrorGroup()
        model = trained(DistributedOptimizer(keras.optimizers.SGD(0.1), group))
        assert same(model, trained(keras.optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert group.steps == [["finite", *BACKWARDS]] * 4
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.SGD)


def test_a_saved_model_needs_no_dlcp_and_goes_on_with_it(tmp_path):
    file = str(tmp_path / "model.keras")
    ours = trained(DistributedOptimizer(keras.optimizers.Adam(0.01), MirrorGroup()))
    ours.save(file)
    plain = keras.saving.load_model(file)
    assert type(plain.optimizer) is keras.optimizers.Adam
    assert int(plain.optimizer.iterations) == 4
    group = MirrorGroup()
    loaded = load_model(file, group)
    for model in (loaded, plain):
        model.fit(IMAGES, LABELS, 8, shuffle=False, verbose=0)
    assert group.steps == [BACKWARDS] * 4
    assert same(loaded, plain)
    assert not same(loaded, ours)
    model = network()
    model.save(file)
    with pytest.raises(ValueError, match="no optimizer"):
        load_model(file, MirrorGroup())


def test_the_same_model_may_be_loaded_again_into_a_group(tmp_path):
    group, file = MirrorGroup(), str(tmp_path / "model.keras")
    trained(DistributedOptimizer(scaled(), group)).save(file)
    loaded = load_model(file, group)
    loaded.fit(IMAGES, LABELS, 8, shuffle=False, verbose=0)
    assert group.steps == [["finite", *BACKWARDS]] * 8
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="other")])
    with pytest.raises(ValueError, match="another model"):
        trained(DistributedOptimizer(keras.optimizers.SGD(0.1), group), model=other)


def test_a_failed_exchange_ends_training_with_its_reason():
    group = MirrorGroup()
    group.failure = PeerSilentError("step 3: rank 1 is silent")
    with pytest.raises(tf.errors.OpError, match="rank 1 is silent"):
        trained(DistributedOptimizer(keras.optimizers.SGD(0.1), group))


def test_what_cannot_be_wrapped_is_refused():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), MirrorGroup())
    with pytest.raises(ValueError, match="averages gradients already"):
        DistributedOptimizer(optimizer, MirrorGroup())
    with pytest.raises(RuntimeError, match=r"init\(\) first"):
        DistributedOptimizer(keras.optimizers.SGD(0.1))
    scale = keras.Variable(np.ones(3, np.float32), name="scale")
    scale.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="scale is overwritten"):
        optimizer.build([scale])


def test_a_process_joins_once(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group = dlcp.tensorflow.init()
    try:
        assert (dlcp.tensorflow.rank(), dlcp.tensorflow.size()) == (0, 1)
        with pytest.raises(RuntimeError, match="already joined its group"):
            dlcp.tensorflow.init()
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert dlcp.tensorflow.local_rank() == 3
        assert same(trained(DistributedOptimizer(keras.optimizers.SGD(0.1))), trained(keras.optimizers.SGD(0.1)))
    finally:
        dlcp.tensorflow.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        group.barrier()
