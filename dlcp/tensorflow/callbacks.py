# SPDX-License-Identifier: Apache-2.0
"""Callbacks for ``model.fit``: equal initial weights on all ranks, and averages of metrics and statistics."""

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
    """Assign the root's values on every rank; all ranks must call it with the same variables in the same order."""
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
    """Broadcasts the root's weights and optimizer state to every rank when training begins.

    If the model is not built yet, this happens after the first batch. The callback also switches off ``jit_compile``,
    which Keras sets on machines with a GPU: XLA cannot call DLCP.

    Parameters
    ----------
    root_rank
        The rank with the initial weights; only that rank needs to load a checkpoint.
    group
        By default the one that :func:`dlcp.tensorflow.init` has joined.
    """

    def __init__(self, root_rank: int = 0, group: Group | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.group = group or current()
        self._done = False

    def set_model(self, model: Any) -> None:
        """Set the model, and switch off its ``jit_compile`` if its optimizer averages."""
        super().set_model(model)
        if averages(model.optimizer) and model.jit_compile:
            log.info("DLCP: jit_compile is switched off, as XLA cannot call DLCP")
            model.jit_compile = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast, if the model is built.

        Raises
        ------
        ValueError
            ``compile`` has wrapped the optimizer to scale losses, so ranks would not agree when to skip a step.
        """
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not averages(optimizer):
            raise ValueError(
                "model.compile has wrapped the optimizer in a LossScaleOptimizer; wrap it before: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        self._done = False
        if self.model.built and self.model.weights:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast after the first batch, if the model was not built earlier."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_variables([*self.model.weights, *self.model.optimizer.variables], self.root_rank, self.group)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Replaces each epoch's metrics by their mean over all ranks; put it before callbacks that use them."""

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.group = group or current()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, in place."""
        if logs:
            logs.update(average_metrics(logs, self.group))


class StatisticsAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Averages layers' statistics over all ranks, such as BatchNormalization's moving means and variances.

    These have no gradients, so they differ between ranks. They are averaged at the end of each epoch, or before its
    validation if there is one. Put this callback before those that save the model.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.group = group or current()
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record that statistics are about to change."""
        self._due = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Average before validation."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Average, unless validation already did."""
        self._average()

    def _average(self) -> None:
        if not self._due:
            return
        self._due = False
        # Private attributes, because Keras' public lists of non-trainable variables include weights of frozen layers,
        # and `model.layers` leaves out nested layers.
        layers = [layer for layer in self.model._flatten_layers() if layer.trainable]
        noted = [variable for layer in layers for variable in layer._non_trainable_variables]
        for variable in noted:
            values = keras.ops.convert_to_numpy(variable)
            if np.issubdtype(values.dtype, np.floating):
                variable.assign(mean_over_ranks(values, self.group).astype(values.dtype))
