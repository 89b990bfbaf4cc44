# SPDX-License-Identifier: Apache-2.0
"""The callbacks on a real Keras, with another rank that is made up."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from mirror_group import MirrorGroup  # noqa: E402

from dlcp.tensorflow import (  # noqa: E402
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
    MetricAverageCallback,
    average_metrics,
    broadcast_variables,
)

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
    with pytest.raises(ValueError, match="do that before"):
        model.fit(IMAGES, LABELS, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0, group)])
