# SPDX-License-Identifier: Apache-2.0
"""Watches what a script does with DistributedDataParallel and ``init_process_group``, without a change to it.

DLCP is not switched on when a model is wrapped, but at its first synchronised forward pass: until then the script may
register a hook of its own. Every rank takes part in that pass, so every rank switches on.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WhenReady = Callable[[DistributedDataParallel], None]
WhenHooked = Callable[[DistributedDataParallel, object], None]


class Watch:
    """A context manager; it reports models that are wrapped and hooks that are registered within it.

    Parameters
    ----------
    ready
        Called before every synchronised forward pass of a model.
    hooked
        Called before a communication hook is registered, with the model and the hook's state.
    backend
        If given, the name of the backend that ``init_process_group`` is to use, whatever the script says.
    """

    def __init__(self, ready: WhenReady, hooked: WhenHooked, backend: str | None = None) -> None:
        self._ready = ready
        self._hooked = hooked
        self._backend = backend
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Watch":
        model = DistributedDataParallel
        self._replace(model, "__init__", self._wrap_init)
        self._replace(model, "register_comm_hook", self._wrap_register)
        self._replace(model, "_register_builtin_comm_hook", self._wrap_register_builtin)
        if self._backend:
            self._replace(dist, "init_process_group", self._wrap_process_group)
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrap(original)))

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            original(model, *arguments, **named)
            before = functools.partial(_before_forward, self._ready)
            # The compiler, which is not annotated, is to leave this alone: it does collective work, once.
            model.register_forward_pre_hook(torch.compiler.disable(before))  # type: ignore[no-untyped-call]

        return init

    def _wrap_register(self, original: Callable[..., None]) -> Callable[..., None]:
        def register(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            self._hooked(model, state)
            original(model, state, hook)

        return register

    def _wrap_register_builtin(self, original: Callable[..., None]) -> Callable[..., None]:
        def register(model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            self._hooked(model, None)
            original(model, *arguments, **named)

        return register

    def _wrap_process_group(self, original: Callable[..., None]) -> Callable[..., None]:
        def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> None:
            original(self._backend, *arguments, **named)

        return init_process_group


def _before_forward(ready: WhenReady, model: DistributedDataParallel, arguments: object) -> None:
    """Tell of a forward pass if its backward will be synchronised, as DistributedDataParallel itself decides it."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        ready(model)
