# SPDX-License-Identifier: Apache-2.0
"""DLCP: a communication optimizer for distributed deep-learning training."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def on_demand(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports some of its names on first use (PEP 562).

    Parameters
    ----------
    package
        The package's ``__name__``.
    modules
        The module within it that has each name.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
