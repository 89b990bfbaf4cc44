# SPDX-License-Identifier: Apache-2.0
"""DLCP for TensorFlow: Keras 3 optimizers that average gradients over the ranks, in ``model.fit`` or your own loop.

The lines that a training script needs, with names as in Horovod::

    import dlcp.tensorflow as dlcp

    dlcp.init()
    model.compile(dlcp.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    model.fit(x[dlcp.rank() :: dlcp.size()], y[dlcp.rank() :: dlcp.size()], callbacks=[
        dlcp.BroadcastGlobalVariablesCallback(0),
        dlcp.StatisticsAverageCallback(),  # with BatchNormalization
        dlcp.MetricAverageCallback(),
    ])

``dlcp launch -n 4 python script.py`` starts it on four ranks.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dlcp import session
from dlcp.session import Group, current, init, local_rank, mean_over_ranks, rank, shutdown, size
from dlcp.session.group import GraphAverager

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "MetricAverageCallback",
    "StatisticsAverageCallback",
    "average_metrics",
    "broadcast_variables",
    "current",
    "init",
    "load_model",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]

log = logging.getLogger("dlcp")
FINITE: Final = "finite"
"""Name of a flag that is averaged along with scaled gradients: 1 if a rank's gradients are finite, else 0."""


class Averaging(GraphAverager):
    """Averages an optimizer's gradients over a group.

    Attributes
    ----------
    names
        The parameters whose gradients are about to be averaged.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.names: list[str] | None = None

    def learn(self, variables: Sequence[Any], *extra: str) -> None:
        """Register the trainable variables with the group, in forward order, and ``extra`` names after them.

        Raises
        ------
        ValueError
            A variable is overwritten by its gradient, such as a float8 scale, so DLCP cannot average it. Or the group
            already has the variables of another model.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"{variable.path} is overwritten by its gradient, as float8 scales are; DLCP cannot average that"
                )
        self.register([*names_of(variables), *extra])

    def average(self, names: Sequence[str], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients averaged over the ranks; all ranks must pass gradients of the same parameters.

        In a graph, each gradient is passed on as soon as backward has computed it, the last parameter's first, so
        communication overlaps with backward.

        Parameters
        ----------
        names
            Names of the parameters, in forward order.
        gradients
            Tensors; ``tf.IndexedSlices`` (of embeddings) are made dense.
        """
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self.group.size == 1:
            return dense
        token = tf.constant(0)  # passed from one callback to the next, to fix their order
        for name, gradient in reversed(list(zip(names, dense, strict=True))):
            token = tf.numpy_function(partial(self._hand_over, name), [gradient, token], tf.int32)
        kinds = [gradient.dtype for gradient in dense]
        averaged = tf.numpy_function(partial(self._collect, list(names)), [token], kinds)
        for mine, average in zip(dense, averaged, strict=True):
            average.set_shape(mine.shape)
        return list(averaged)

    def average_scaled(self, names: Sequence[str], gradients: Sequence[Any], scale: Any) -> list[Any]:
        """Return averages of gradients that were multiplied by a loss scale, the same on all ranks.

        If any rank's gradients are not finite, all ranks get infinite ones, so all skip the step and lower the scale.
        Packets hold unscaled, finite values. So the residual stays valid after a skipped step, and when the scale
        changes.
        """
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in dense])
        sent = [tf.where(finite, gradient / tf.cast(scale, gradient.dtype), 0) for gradient in dense]
        averaged = self.average([*names, FINITE], [*sent, tf.cast(finite, tf.float32)[tf.newaxis]])
        everywhere = averaged.pop()[0] > 1 - 0.5 / self.group.size
        return [tf.where(everywhere, average * tf.cast(scale, average.dtype), float("inf")) for average in averaged]

    def _hand_over(self, name: str, gradient: NDArray[Any], token: NDArray[np.int32]) -> NDArray[np.int32]:
        self.hand_over(name, gradient)
        return token

    def _collect(self, names: Sequence[str], _: NDArray[np.int32]) -> list[NDArray[Any]]:
        return self.collect(names)


def names_of(variables: Sequence[Any]) -> list[str]:
    """Return the variables' paths, such as ``block.dense.kernel``; variables of a layer differ in the last part only.

    The model's own name is left out: Keras numbers models, and ranks may have created different numbers of them. The
    second and later variables with one path get a number.
    """
    paths = [variable.path.split("/") for variable in variables]
    if len({path[0] for path in paths}) == 1 and all(len(path) > 2 for path in paths):
        paths = [path[1:] for path in paths]
    counts: dict[str, int] = {}
    names = []
    for path in map(".".join, paths):
        counts[path] = counts.get(path, 0) + 1
        names.append(path if counts[path] == 1 else f"{path}_{counts[path]}")
    return names


class _Averages:
    """Mixin for an optimizer's class that averages gradients.

    It averages where Keras clips gradients: after accumulation over several steps, if enabled, and before the update.
    Clipping and everything after it is therefore the same on all ranks.
    """

    _dlcp: Averaging

    def build(self: Any, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]  # of the optimizer's own class, here and below
        self._dlcp.learn(variables)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._dlcp.names = None
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        if self._dlcp.names is None and any(grad is not None for grad in grads):
            raise _unknown_keras()

    def _backend_apply_gradients(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        place = {id(variable): index for index, variable in enumerate(self._trainable_variables)}
        names = names_of(self._trainable_variables)
        self._dlcp.names = [names[place[id(variable)]] for variable in trainable_variables]
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> Any:
        if self._dlcp.names is None:
            raise _unknown_keras()
        return super()._clip_gradients(self._dlcp.average(self._dlcp.names, grads))  # type: ignore[misc]


class _AveragesScaled:
    """Mixin for :class:`keras.optimizers.LossScaleOptimizer`: ranks agree whether gradients are finite."""

    _dlcp: Averaging

    def build(self: Any, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        self._dlcp.learn(variables, FINITE)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        known = dict(zip(map(id, self._trainable_variables), names_of(self._trainable_variables), strict=True))
        given = [index for index, grad in enumerate(grads) if grad is not None]
        names = [known[id(variables[index])] for index in given]
        averaged = self._dlcp.average_scaled(names, [grads[index] for index in given], self.dynamic_scale)
        whole: list[Any] = [None] * len(grads)
        for index, average in zip(given, averaged, strict=True):
            whole[index] = average
        super().apply(whole, variables)  # type: ignore[misc]


def _unknown_keras() -> RuntimeError:
    return RuntimeError(
        f"Keras {keras.__version__} applies gradients in a way that DLCP does not support; install Keras 3.5-3.15"
    )


@cache
def _extended(kind: Any) -> Any:
    """Return a subclass of an optimizer's class that averages gradients.

    Its instances report the original class as ``__class__``, so a saved model can be loaded without DLCP.
    """
    extension = _AveragesScaled if issubclass(kind, keras.optimizers.LossScaleOptimizer) else _Averages
    return type(kind.__name__, (extension, kind), {"__class__": property(lambda _: kind), "__doc__": kind.__doc__})


def DistributedOptimizer(optimizer: Any, group: Group | None = None) -> Any:  # noqa: N802  # as Horovod calls it
    """Make an optimizer average gradients over all ranks before it applies them; all ranks must call this.

    It works in ``model.fit`` and in custom loops, eagerly and in graphs, but not under XLA: set ``jit_compile=False``,
    or use :class:`dlcp.tensorflow.BroadcastGlobalVariablesCallback`, which does so.

    With ``gradient_accumulation_steps`` gradients are exchanged once per update. Under the policy ``mixed_float16``
    Keras scales the loss. The optimizer is then wrapped in a ``LossScaleOptimizer``, unless it is one, so that all
    ranks agree when to skip a step.

    Parameters
    ----------
    optimizer
        An optimizer of Keras 3.5 or newer, new or already in use; it is changed in place, and keeps its state.
    group
        By default the one that :func:`dlcp.tensorflow.init` has joined. It serves one optimizer at a time.

    Returns
    -------
    The same optimizer, or a ``LossScaleOptimizer`` around it.

    Raises
    ------
    ValueError
        It already averages gradients, or Keras does not run on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow for dlcp.tensorflow")
    if averages(optimizer):
        raise ValueError(f"{optimizer.name} averages gradients already; call DistributedOptimizer only once")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    optimizer._dlcp = Averaging(group or current())
    kind: Any = type(optimizer)
    optimizer.__class__ = _extended(kind)
    if optimizer.built:
        extra = [FINITE] if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else []
        optimizer._dlcp.learn(optimizer._trainable_variables, *extra)
    return optimizer


def averages(optimizer: Any) -> bool:
    """Return whether an optimizer averages gradients over ranks."""
    return issubclass(type(optimizer), _Averages | _AveragesScaled)


def load_model(filepath: Any, group: Group | None = None, **options: Any) -> Any:
    """Load a model, and make its optimizer average over all ranks; see ``keras.saving.load_model``.

    Raises
    ------
    ValueError
        The model was saved without an optimizer.
    """
    model = keras.saving.load_model(filepath, **options)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"{filepath} has no optimizer; load it with keras.saving.load_model and compile it")
    model.optimizer = DistributedOptimizer(model.optimizer, group)
    return model


# Callbacks ------------------------------------------------------------------------------------------------------------


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
