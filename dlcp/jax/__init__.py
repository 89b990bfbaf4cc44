# SPDX-License-Identifier: Apache-2.0
"""DLCP for JAX: a gradient transformation for optax that averages gradients over the ranks.

The lines that a training script needs::

    import dlcp.session
    import dlcp.jax

    group = dlcp.session.join()
    params = dlcp.jax.broadcast(params, group)
    optimizer = optax.chain(dlcp.jax.average_gradients(group), optax.adam(1e-3))

``dlcp launch -n 4 python script.py`` starts it on four ranks.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import io_callback

from dlcp.session import Group, average_metrics
from dlcp.session.group import GraphAverager

__all__ = ["average_gradients", "average_metrics", "broadcast", "forward_order", "name_of"]

_PARTS = re.compile(r"(\d+)")


def name_of(path: Sequence[Any]) -> str:
    """Return a leaf's name, such as ``layers.0.kernel``: the keys of its ``jax.tree_util`` path, joined by dots."""
    return ".".join(str(_key(entry)) for entry in path) or "value"


def forward_order(paths: Sequence[Sequence[Any]], layers: Sequence[str] = ()) -> list[int]:
    """Return the indices of leaves in the order of the forward pass.

    JAX sorts dictionary keys alphabetically. This function compares numbers in keys as numbers, so ``Dense_2`` comes
    before ``Dense_10``. Lists, tuples and fields keep their order. ``layers`` overrides this order: leaves whose name
    begins with its first entry come first, and so on; all others come last.

    Parameters
    ----------
    paths
        The leaves' paths, in JAX's order.
    layers
        Names, or prefixes of names that end before a dot.

    Raises
    ------
    ValueError
        No leaf's name begins with an entry of ``layers``.
    """
    names = [name_of(path) for path in paths]
    for layer in layers:
        if not any(_begins(name, layer) for name in names):
            raise ValueError(f"no parameter's name begins with {layer!r}; the names are {', '.join(names)}")
    places: dict[tuple[Any, ...], int] = {}
    for path in paths:
        for depth in range(1, len(path) + 1):
            places.setdefault(tuple(map(str, path[:depth])), len(places))

    def rank(leaf: int) -> tuple[Any, ...]:
        given = next((place for place, layer in enumerate(layers) if _begins(names[leaf], layer)), len(layers))
        path = paths[leaf]
        keys = [
            _natural(entry.key) if hasattr(entry, "key") else places[tuple(map(str, path[: depth + 1]))]
            for depth, entry in enumerate(path)
        ]
        return given, keys

    return sorted(range(len(paths)), key=rank)


def _key(entry: Any) -> Any:
    """Return the value of a path's key, for a dictionary, a field, or a sequence."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _begins(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def _natural(key: Any) -> list[tuple[bool, Any]]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in _PARTS.split(str(key)) if part]


class _Averaging(GraphAverager):
    """Averages trees of gradients over a group."""

    def __init__(self, group: Group, layers: Sequence[str]) -> None:
        super().__init__(group)
        self.layers = layers

    def learn(self, paths: Sequence[Any]) -> tuple[list[str], list[int]]:
        """Return the leaves' names and their forward order, and register them with the group."""
        names, order = [name_of(path) for path in paths], forward_order(paths, self.layers)
        self.register([names[leaf] for leaf in order])
        return names, order

    def average(self, tree: Any) -> Any:
        """Return the averages of a tree of gradients; see :func:`average_gradients`."""
        found, structure = jax.tree_util.tree_flatten_with_path(tree)
        names, order = self.learn([path for path, _ in found])
        leaves = [leaf for _, leaf in found]
        for leaf in reversed(order):
            io_callback(partial(self._hand_over, names[leaf]), (), leaves[leaf], ordered=True)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return structure.unflatten(io_callback(partial(self.collect, names), shapes, ordered=True))

    def _hand_over(self, name: str, gradient: Any) -> tuple[()]:
        self.hand_over(name, gradient)
        return ()


def average_gradients(group: Group, layers: Sequence[str] = ()) -> optax.GradientTransformation:
    """Return a transformation that averages gradients over all ranks; put it first in ``optax.chain``.

    It works inside ``jax.jit``. Each gradient is passed on as soon as backward has computed it, the last layer's first,
    so communication overlaps with backward. A process must compute on one device. Transformations whose behaviour
    depends on gradients, such as ``optax.apply_if_finite`` or clipping, must come after this one, so that they act
    alike on all ranks. So must ``optax.MultiSteps``, or it would exchange its accumulated gradients at each of its
    steps. A group serves one model.

    Parameters
    ----------
    group
        The ranks, see :func:`dlcp.session.join`. A group of one leaves gradients unchanged.
    layers
        Prefixes of parameters' names, such as ``params.embed``, in the order of the forward pass, if the names alone
        do not give it; see :func:`dlcp.jax.forward_order`.

    Raises
    ------
    TypeError
        At the first step: a gradient has another type than float32, float64, float16 or bfloat16.
    jax.errors.JaxRuntimeError
        At any step: ranks could not be reached; the message names the cause, rank, step and layer.
    """
    averaging = _Averaging(group, layers)

    def init(params: optax.Params) -> optax.EmptyState:
        averaging.learn([path for path, _ in jax.tree_util.tree_leaves_with_path(params)])
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return (averaging.average(updates) if group.size > 1 else updates), state

    return optax.GradientTransformation(init, update)


def broadcast(tree: Any, group: Group, root: int = 0) -> Any:
    """Return the root's values of a tree of arrays, such as parameters or an optimizer's state; not inside ``jit``."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    received = []
    for leaf in leaves:
        values = np.array(leaf)
        group.broadcast(values, root)
        received.append(jax.numpy.asarray(values))
    return structure.unflatten(received)
