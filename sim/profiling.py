# SPDX-License-Identifier: Apache-2.0
"""Measure the profile of a PyTorch model: the times of each module's forward and backward pass."""

import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dlcp.sim.models import StepProfile, TimedLayer


class ProfileError(RuntimeError):
    """A model cannot be loaded or measured."""


def load_factory(name: str) -> Callable[[], Any]:
    """Return the function that ``MODULE:FUNCTION`` names.

    Raises
    ------
    ProfileError
        It cannot be imported, or is not callable.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProfileError(f"{name}: {error}; name a module and a function in it, as MODULE:FUNCTION") from error
    if not callable(found):
        raise ProfileError(f"{name} is not a function but a {type(found).__name__}; name a function")
    return found


def measure(
    model: Any, sample_shape: tuple[int, ...], *, batch: int, name: str, device: str = "cpu", rounds: int = 5
) -> StepProfile:
    """Return a model's profile.

    Each module with parameters of its own is a layer. Modules without parameters (activations, pooling) count towards
    the layer before them, so that the layers' times add up to the step's.

    Parameters
    ----------
    model
        ``torch.nn.Module``, called with random numbers of shape (batch, *sample_shape).
    rounds
        Measured passes, after one to warm up; the profile has their medians.

    Raises
    ------
    ProfileError
        ``model`` is not a module, has no parameters, or cannot be moved to ``device``.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ProfileError(f"{name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    try:
        model = model.to(device).train()
    except RuntimeError as error:
        raise ProfileError(f"{name} cannot be moved to device {device!r}: {error}") from None
    layers = [(path, module) for path, module in model.named_modules() if _own(module)]
    if not layers:
        raise ProfileError(f"{name}: the model has no parameters to train")
    marks: list[tuple[str, float]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if device != "cpu":
                torch.cuda.synchronize(device)
            marks.append((path, time.perf_counter()))

        return hook

    handles = []
    for path, module in layers:
        handles.append(module.register_forward_pre_hook(note(path)))
        handles.append(module.register_full_backward_hook(note(path)))
    inputs = torch.randn(batch, *sample_shape, device=device)
    forward: dict[str, list[float]] = {path: [] for path, _ in layers}
    backward: dict[str, list[float]] = {path: [] for path, _ in layers}
    try:
        for turn in range(rounds + 1):
            with warnings.catch_warnings():
                # Inputs need no gradient, so the first layer's hook fires once its parameters' gradients are ready.
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                ahead, back = _pass(torch, model, inputs, marks, note)
            for path, _ in layers:
                if turn:
                    forward[path].append(ahead.get(path, 0.0))
                    backward[path].append(back.get(path, 0.0))
    finally:
        for handle in handles:
            handle.remove()
    timed = tuple(
        TimedLayer(path, _own(module), statistics.median(forward[path]), statistics.median(backward[path]))
        for path, module in layers
    )
    source = f"measured with PyTorch {torch.__version__} on {device}, median of {rounds} passes"
    return StepProfile(name, timed, batch, source)


def _own(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.requires_grad)


def _pass(
    torch: Any, model: Any, inputs: Any, marks: list[tuple[str, float]], note: Callable[[str], Callable[..., None]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds by layer of one forward and one backward pass.

    A layer's forward pass ends where the next layer's begins. Its backward pass begins where the next layer's ends.
    """
    model.zero_grad()
    marks.clear()
    output = model(inputs)
    loss = output.square().mean() if isinstance(output, torch.Tensor) else sum(part.square().mean() for part in output)
    note("")()
    ahead = [*marks]
    marks.clear()
    note("")()
    loss.backward()
    back = [*marks]
    forward: dict[str, float] = {}
    for (path, begin), (_, end) in pairwise(ahead):
        forward[path] = forward.get(path, 0.0) + end - begin
    backward: dict[str, float] = {}
    for (_, begin), (path, end) in pairwise(back):
        backward[path] = backward.get(path, 0.0) + end - begin
    return forward, backward
