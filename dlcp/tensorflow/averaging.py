# SPDX-License-Identifier: Apache-2.0
"""Average gradients inside a TensorFlow graph: one callback per gradient passes it on, and a last one waits for all."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dlcp.session import Group
from dlcp.session.group import GraphAverager

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
