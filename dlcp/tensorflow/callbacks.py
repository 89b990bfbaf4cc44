# SPDX-License-Identifier: Apache-2.0
"""Callbacks for ``model.fit``: all ranks begin alike, and report what holds for all of them."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from dlcp import session
from dlcp.session import Group, current, mean_over_ranks
from dlcp.tensorflow.optimizer import averages

log = logging.getLogger("dlcp")


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, group: Group | None = None) -> None:
    """Give every rank the root's values; all ranks must call it with the same variables in the same order."""
    group = group or current()
    for variable in variables:
        values = np.array(keras.ops.convert_to_numpy(variable))
        group.broadcast(values, root_rank)
        if group.rank != root_rank:
            variable.assign(values)


def average_metrics(metrics: Mapping[str, float], group: Group | None = None) -> dict[str, float]:
    """Return the mean of each metric over all ranks; see :func:`dlcp.session.average_metrics`."""
    return session.average_metrics(metrics, group or current())


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Gives every rank the root's weights and optimizer state when training begins.

    A model whose shapes are not known yet gets them after the first batch. If Keras means to compile the model with
    XLA, as it does where there is a GPU, that is switched off: XLA cannot call out to DLCP.

    Parameters
    ----------
    root_rank
        Whose; a checkpoint needs to be loaded there only.
    group
        By default the one that :func:`dlcp.tensorflow.init` has joined.
    """

    def __init__(self, root_rank: int = 0, group: Group | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.group = group or current()
        self._done = False

    def set_model(self, model: Any) -> None:
        """Take the model that is going to be trained."""
        super().set_model(model)
        if averages(model.optimizer) and model.jit_compile:
            log.info("DLCP: jit_compile is switched off")
            model.jit_compile = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast, if the model has its weights.

        Raises
        ------
        ValueError
            ``compile`` has wrapped the optimizer to scale losses: ranks would not agree when to skip a step.
        """
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not averages(optimizer):
            raise ValueError(
                "model.compile has wrapped the optimizer in a LossScaleOptimizer; do that before: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        self._done = False
        if self.model.built and self.model.weights:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast after the first batch, if it could not be done before."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_variables([*self.model.weights, *self.model.optimizer.variables], self.root_rank, self.group)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Replaces each epoch's metrics by their mean over all ranks; put it before callbacks that look at them."""

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.group = group or current()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, in place."""
        if logs:
            logs.update(average_metrics(logs, self.group))


class StatisticsAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Gives all ranks the mean of what layers have noted of their data, as BatchNormalization does for inference.

    Such moving means and variances are each rank's own, for they have no gradients. They are averaged when an epoch
    ends, before its validation if it has one; put this before callbacks that save the model.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.group = group or current()
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note that statistics are about to change."""
        self._due = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Average before a validation."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Average, if no validation was the occasion."""
        self._average()

    def _average(self) -> None:
        if not self._due:
            return
        self._due = False
        # Private, because Keras' public lists of what is not trained hold the weights of frozen layers, too, and
        # `model.layers` leaves out layers within layers.
        layers = [layer for layer in self.model._flatten_layers() if layer.trainable]
        noted = [variable for layer in layers for variable in layer._non_trainable_variables]
        for variable in noted:
            values = keras.ops.convert_to_numpy(variable)
            if np.issubdtype(values.dtype, np.floating):
                variable.assign(mean_over_ranks(values, self.group).astype(values.dtype))
