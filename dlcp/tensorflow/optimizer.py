# SPDX-License-Identifier: Apache-2.0
"""Optimizers that average gradients over the ranks before they apply them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras

from dlcp.session import Group, current
from dlcp.tensorflow.averaging import FINITE, Averaging, names_of


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
