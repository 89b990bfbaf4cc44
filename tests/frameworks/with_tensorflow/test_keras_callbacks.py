# SPDX-License-Identifier: Apache-2.0
"""The callbacks on a real Keras, with another rank that is made up."""

import numpy as np
import pytest

pytest.importorskip("keras")

import keras

from dlcp.tensorflow import (
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
    MetricAverageCallback,
    StatisticsAverageCallback,
    average_metrics,
    broadcast_variables,
)
from tests.frameworks.mirror_group import MirrorGroup

pytestmark = pytest.mark.timeout(120)
IMAGES, LABELS = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)


def network(*front):
    return keras.Sequential([*front, keras.layers.Dense(2, name="dense")])


def test_all_begin_with_the_roots_weights():
    group = MirrorGroup(root_values=lambda values: values + (2 if values.ndim or values.dtype == np.int64 else 0))
    model = network(keras.Input((4,)))
    before = model.get_weights()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0), group), "mse")
    model.fit(IMAGES, LABELS, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(1, group)])
    assert all(np.array_equal(ours, theirs + 2) for ours, theirs in zip(model.get_weights(), before, strict=True))
    assert int(model.optimizer.iterations) == 2 + 1, "the optimizer's state, too"


def test_weights_that_are_not_there_yet_come_after_the_first_batch():
    group = MirrorGroup(root_values=lambda values: values * 0 + 5)
    model = network()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), group), "mse", run_eagerly=True)
    model.fit(IMAGES, LABELS, 8, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(1, group)])
    assert all((weights == 5).all() for weights in model.get_weights())


def test_the_root_keeps_what_it_has():
    variable = keras.Variable([1.0, 2.0])
    broadcast_variables([variable], 0, MirrorGroup())
    assert np.array_equal(variable, [1.0, 2.0])
    broadcast_variables([variable], 1, MirrorGroup(root_values=lambda values: values[::-1]))
    assert np.array_equal(variable, [2.0, 1.0])


def test_metrics_are_means_over_ranks():
    group = MirrorGroup(root_values=lambda values: np.array([0.5, 3.0]))
    assert average_metrics({"loss": 1.0, "accuracy": 0.7}, group) == {"accuracy": 0.6, "loss": 2.0}
    model = network(keras.Input((4,)))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    seen = model.fit(IMAGES, LABELS, 8, verbose=0, callbacks=[MetricAverageCallback(group)]).history
    plain = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    assert seen["loss"][0] == pytest.approx((plain["loss"] + 0.5) / 2, rel=1e-5)
    assert seen["mae"][0] == pytest.approx((plain["mae"] + 3.0) / 2, rel=1e-5)


def test_xla_is_switched_off():
    group = MirrorGroup()
    model = network(keras.Input((4,)))
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), group), "mse", jit_compile=True)
    model.fit(IMAGES, LABELS, 8, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0, group)])
    assert len(group.steps) == 1


def test_an_optimizer_that_compile_has_wrapped_is_refused():
    group = MirrorGroup()
    model = network(keras.Input((4,)))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), group)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    with pytest.raises(ValueError, match="wrap it before"):
        model.fit(IMAGES, LABELS, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0, group)])


class Recorder(keras.callbacks.Callback):
    """A model's statistics when it was validated, and at the end of its epochs."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def note(self):
        (layer,) = [layer for layer in self.model.layers if layer.name == "norm"]
        self.seen.append(keras.ops.convert_to_numpy(layer.moving_mean).copy())

    def on_test_begin(self, logs=None):
        self.note()

    def on_epoch_end(self, epoch, logs=None):
        self.note()


@pytest.mark.parametrize("validated", [True, False])
def test_statistics_are_averaged_once_an_epoch_and_before_its_validation(validated):
    roots = []

    def of_other(values):
        roots.append(values.copy())
        return values + 2

    group, recorder = MirrorGroup(root_values=of_other), Recorder()
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False)
    front = [keras.layers.Dropout(0.5), frozen, keras.layers.BatchNormalization(name="norm")]
    model = network(keras.Input((4,)), keras.Sequential([keras.layers.Dense(4)]), *front)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    callbacks = [StatisticsAverageCallback(group), recorder]
    data = (IMAGES, LABELS) if validated else None
    model.fit(IMAGES, LABELS, 8, epochs=2, verbose=0, validation_data=data, callbacks=callbacks)
    assert len(roots) == 2 * 2, "mean and variance of one layer, in two epochs"
    means = [root + 1 for root in roots[::2]]
    for epoch, mean in enumerate(means):
        for seen in recorder.seen[2 * epoch : 2 * epoch + 2] if validated else [recorder.seen[epoch]]:
            np.testing.assert_allclose(seen, mean, rtol=1e-6)
    assert np.array_equal(frozen.moving_variance, np.ones(4))
    model.evaluate(IMAGES, LABELS, verbose=0, callbacks=callbacks)
    assert len(roots) == 2 * 2, "no epoch, nothing new"


def test_ranks_of_which_only_one_validates_still_average_alike():
    """One has its turn at the validation, the other at the epoch's end: both once."""
    calls = []
    for data in ((IMAGES, LABELS), None):
        group = MirrorGroup(root_values=lambda values: values)
        group.broadcast = lambda values, root=0: calls.append((root, values.shape))
        model = network(keras.Input((4,)), keras.layers.BatchNormalization())
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(IMAGES, LABELS, verbose=0, validation_data=data, callbacks=[StatisticsAverageCallback(group)])
    assert len(calls) == 8
    assert calls[:4] == calls[4:]
