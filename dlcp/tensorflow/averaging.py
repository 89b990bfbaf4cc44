# SPDX-License-Identifier: Apache-2.0
"""Averaging gradients inside a TensorFlow graph: a callback for each gradient hands it over, one more waits for all."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dlcp.session import Group
from dlcp.session.graph import GraphAverager

FINITE: Final = "finite"
"""Travels with scaled gradients as if it were a parameter: 1 from a rank whose gradients are all finite, else 0."""


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
        """Tell the group the trainable variables, in forward order, and ``extra`` names behind them.

        Raises
        ------
        ValueError
            A variable takes its "gradient" as its value, as float8 scales do: that cannot be averaged with the others.
            Or the group has the variables of another model.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(f"{variable.path} is overwritten by its gradient, which DLCP does not average")
        self.register([*names_of(variables), *extra])

    def average(self, names: Sequence[str], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks; all ranks must give those of the same parameters.

        In a graph, a gradient is handed over as soon as backward has found it, in the order of backward: the last
        parameter's first. So they travel while backward still runs.

        Parameters
        ----------
        names
            Their parameters, in forward order.
        gradients
            Tensors; ``tf.IndexedSlices`` (of embeddings) are made dense.
        """
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self.group.size == 1:
            return dense
        token = tf.constant(0)  # what one callback returns and the next one takes: that fixes their order
        for name, gradient in reversed(list(zip(names, dense, strict=True))):
            token = tf.numpy_function(partial(self._hand_over, name), [gradient, token], tf.int32)
        kinds = [gradient.dtype for gradient in dense]
        averaged = tf.numpy_function(partial(self._collect, list(names)), [token], kinds)
        for mine, average in zip(dense, averaged, strict=True):
            average.set_shape(mine.shape)
        return list(averaged)

    def average_scaled(self, names: Sequence[str], gradients: Sequence[Any], scale: Any) -> list[Any]:
        """Do so with gradients that have been multiplied by a loss scale, the same on all ranks.

        If any rank's are not finite, all ranks get gradients that are not: so all skip the step and lower the scale
        alike. What travels is unscaled and finite, so that neither a packet that is lost here and sent with the
        next step, where the scale may be another, nor the residual of a step that is skipped, does any harm.
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
    """Return the variables' paths, ``block.dense.kernel``: those of a layer have all but the last part in common.

    The model's own name is left out, for Keras numbers models, and a rank may have made more of them than another. Of
    variables with the same path, the second and the later ones get a number.
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
