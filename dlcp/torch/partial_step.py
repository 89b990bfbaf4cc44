# SPDX-License-Identifier: Apache-2.0
"""The parts of layer-by-layer optimizer steps: a step for some parameters, and readers that wait for theirs.

:class:`PartialStep` steps an optimizer for some of its parameters, with the same arithmetic as for all of them.
:class:`Guard` makes code that reads a parameter through its module wait until it is up to date. A module's forward
pre-hook is not enough for that: attention reads its output projection's weight without calling it, tied weights are
read through another module, and a ParameterList is never called.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

Wait = Callable[[Iterable[Parameter]], None]
"""Waits until these parameters are up to date."""


class GuardedParameters(dict[str, Parameter | None]):
    """A module's parameters; reading one waits for it first. Copies and pickles are plain dictionaries."""

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
    """Waits for a module's own parameters: an LSTM keeps its own list of them. In a copied model it is inert."""

    def __init__(self, wait: Wait | None = None) -> None:
        self._wait = wait

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if self._wait is not None:
            self._wait(parameter for parameter in dict.values(module._parameters) if parameter is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


class Guard:
    """Makes readers of ``model``'s parameters call ``wait`` with them first, until :meth:`remove`."""

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
        """Remove the guard."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            held = module._parameters
            if isinstance(held, GuardedParameters):
                held.waits.remove(self._wait)
                if not held.waits:
                    module._parameters = held.plain()


_WHOLE_ONLY = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""One considers all parameters at once, the other needs sparse gradients."""


class PartialStep:
    """Steps an optimizer for a few parameters at a time.

    That works for every optimizer that treats parameters separately, as all in ``torch.optim`` except L-BFGS do. One
    that keeps state in its parameter groups is detected at its first step.

    Parameters
    ----------
    optimizer
        Its own ``step`` is refused from now on, until :meth:`release`.

    Raises
    ------
    ValueError
        The optimizer is known not to treat parameters separately.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, _WHOLE_ONLY):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be stepped layer by layer; use DistributedDataParallel and "
                "dlcp.torch.enable"
            )
        self._optimizer = optimizer
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        step = type(optimizer).step
        # Without the step hooks: those are for whole steps.
        self._arithmetic: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
        self._ours = False
        self._refusal = optimizer.register_step_pre_hook(self._refuse)

    @property
    def watched(self) -> bool:
        """Whether the optimizer's step has hooks, which expect whole steps."""
        optimizer = self._optimizer
        return len(optimizer._optimizer_step_pre_hooks) > 1 or bool(optimizer._optimizer_step_post_hooks)

    def settings(self) -> Sequence[dict[str, Any]]:
        """Return each parameter group's current settings (learning rate and so on), before a scheduler changes them."""
        return [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def update(self, parameters: Sequence[Parameter], settings: Sequence[dict[str, Any]]) -> None:
        """Step for ``parameters`` with their current gradients, and with ``settings`` instead of the current ones.

        Raises
        ------
        RuntimeError
            The optimizer has changed its parameter groups: it keeps state for all parameters together.
        """
        optimizer = self._optimizer
        parts: dict[int, list[Parameter]] = {}
        for parameter in parameters:
            parts.setdefault(self._group_of[id(parameter)], []).append(parameter)
        groups = [{**settings[index], "params": part} for index, part in sorted(parts.items())]
        whole, optimizer.param_groups = optimizer.param_groups, groups
        try:
            with self._as_ours():
                self._arithmetic(optimizer)
        finally:
            optimizer.param_groups = whole
        for group, index in zip(groups, sorted(parts), strict=True):
            changed = [name for name in group if name != "params" and group[name] is not settings[index].get(name)]
            if changed:
                raise RuntimeError(
                    f"{type(optimizer).__name__} changes '{changed[0]}' of its parameter groups as it steps, so it "
                    "cannot be stepped layer by layer; use DistributedDataParallel and dlcp.torch.enable"
                )

    def whole(self) -> None:
        """Step for all parameters, with the step hooks."""
        with self._as_ours():
            self._optimizer.step()

    def release(self) -> None:
        """Allow the optimizer's own step again."""
        self._refusal.remove()

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _refuse(self, *_: Any) -> None:
        if not self._ours:
            raise RuntimeError("call step() of the optimizer that cross_step returned, not of the one given to it")
