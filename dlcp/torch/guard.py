# SPDX-License-Identifier: Apache-2.0
"""Whoever reads a parameter through its module waits until it is up to date.

A module's forward pre-hook is not enough: attention reads its output projection's weight without calling it, tied
weights are read through another module, and nobody calls a ParameterList.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import Parameter
from torch.utils.hooks import RemovableHandle

Wait = Callable[[Iterable[Parameter]], None]
"""Waits until these parameters are up to date."""


class GuardedParameters(dict[str, Parameter | None]):
    """The parameters of a module; those who read one wait for it first. Copies and pickles are plain dictionaries."""

    def __init__(self, plain: dict[str, Parameter | None]) -> None:
        super().__init__(plain)
        self.waits: list[Wait] = []

    def _wait(self, *found: Parameter | None) -> None:
        parameters = [parameter for parameter in found if parameter is not None]
        for wait in self.waits:
            wait(parameters)

    def __getitem__(self, name: str) -> Parameter | None:
        found = super().__getitem__(name)
        self._wait(found)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter once it is up to date."""
        self._wait(super().get(name))
        return super().get(name, default)

    def values(self) -> Any:
        """Return all parameters once they are up to date."""
        self._wait(*super().values())
        return super().values()

    def items(self) -> Any:
        """Return all names and parameters once those are up to date."""
        self._wait(*super().values())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def plain(self) -> dict[str, Parameter | None]:
        """Return an ordinary dictionary of the same parameters, without waiting."""
        return dict(zip(self, super().values(), strict=True))


class _BeforeForward:
    """Waits for a module's own parameters: an LSTM reads them from a list of its own. In a copied model it is inert."""

    def __init__(self, wait: Wait | None = None) -> None:
        self._wait = wait

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if self._wait is not None:
            self._wait(parameter for parameter in dict.values(module._parameters) if parameter is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


class Guard:
    """Makes all who read parameters of ``model`` call ``wait`` with them first, until :meth:`remove`."""

    def __init__(self, model: torch.nn.Module, wait: Wait) -> None:
        self._wait = wait
        self._modules = [module for module in model.modules() if module._parameters]
        self._hooks: list[RemovableHandle] = []
        for module in self._modules:
            held = module._parameters
            if type(held) is dict:
                held = module._parameters = GuardedParameters(held)
            if isinstance(held, GuardedParameters):  # a scripted module has its own kind
                held.waits.append(wait)
            self._hooks.append(module.register_forward_pre_hook(_BeforeForward(wait)))

    def remove(self) -> None:
        """Take the guard off."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            held = module._parameters
            if isinstance(held, GuardedParameters):
                held.waits.remove(self._wait)
                if not held.waits:
                    module._parameters = held.plain()
