# SPDX-License-Identifier: Apache-2.0
"""Names of a pytree's leaves, and their likely order in the forward pass."""

import re
from collections.abc import Sequence
from typing import Any

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
