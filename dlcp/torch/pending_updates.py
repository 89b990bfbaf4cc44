# SPDX-License-Identifier: Apache-2.0
"""Updates that are due: of layers whose averages come some time after the step that wants them."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from dlcp.torch.layergroup import LayerGroup
from dlcp.torch.partial_step import PartialStep
from dlcp.transport import DeadlineError, TransportError


class PendingUpdates:
    """The updates of one step, done group by group as averages come in and somebody waits for them.

    All but :meth:`tell` is called under the optimizer's lock.

    Parameters
    ----------
    partial
        Updates some of the parameters.

    Attributes
    ----------
    groups
        What is not updated yet, by index.
    failed
        Why an average could not be had, unless others have come since.
    waited_s
        How long averages have been waited for in all, in seconds.
    """

    def __init__(self, partial: PartialStep) -> None:
        self.groups: dict[int, LayerGroup] = {}
        self.failed: TransportError | None = None
        self.waited_s = 0.0
        self._partial = partial
        self._settings: Sequence[dict[str, Any]] | None = None
        self._where = ""
        self._news = threading.Condition()

    def begin(self, groups: Iterable[LayerGroup], settings: Sequence[dict[str, Any]] | None, where: str) -> None:
        """Note that a step wants updates; those of the last one are done.

        Parameters
        ----------
        groups
            What is to be updated.
        settings
            What the optimizer's groups were set to when the step was called; None if the averages are only waited for.
        where
            The step and this rank, for error messages.
        """
        self.groups = {layers.index: layers for layers in groups}
        self._settings, self._where = settings, where

    def tell(self) -> None:
        """Note that an average is in, or cannot be had; any thread may call it."""
        with self._news:  # held for moments only: this is the endpoint's thread
            self._news.notify_all()

    def complete(self, wanted: Sequence[LayerGroup]) -> None:
        """Return once the updates of ``wanted`` are done; do others while waiting.

        Raises
        ------
        TransportError
            An average cannot be had.
        RuntimeError
            Gradients were changed on their way, or ranks have not made the same steps.
        """
        while missing := [layers for layers in wanted if layers.index in self.groups]:
            due = _first_in(missing) or _first_in(self.groups.values())
            if due:
                self._update(due)
            else:
                self._await_news(missing)

    def _await_news(self, missing: Sequence[LayerGroup]) -> None:
        began_s = time.monotonic()
        due_s = min(layers.due_s for layers in missing)
        with self._news:
            came = self._news.wait_for(lambda: _first_in(self.groups.values()), max(0.0, due_s - began_s))
        self.waited_s += time.monotonic() - began_s
        if not came:
            layers = min(missing, key=lambda layers: layers.due_s)
            raise self._failure(layers, DeadlineError(f"no answer from the transport within {due_s - began_s:.0f} s"))

    def _update(self, layers: LayerGroup) -> None:
        error = layers.sent.exception()
        if error is not None:
            raise self._failure(layers, error)
        layers.sent.result().wait()  # from a GPU's point of view it is still being copied back
        if not layers.agreed:
            raise RuntimeError(
                f"{self._where} has updated {layers.label} in other steps than its peers; after a backward pass all "
                "ranks must step(), or all zero_grad(): load a checkpoint"
            )
        if self._settings is not None:
            refuse_changed(self._where, [member.name for member in layers.members if not member.unchanged])
            members = layers.used()
            # Whoever has kept the gradient finds the average there, as after DistributedDataParallel.
            restore = [(member.parameter, member.parameter.grad) for member in members]
            for member in members:
                member.parameter.grad = member.average
            try:
                self._partial.update([member.parameter for member in members], self._settings)
            finally:
                for parameter, gradient in restore:
                    parameter.grad = gradient
        del self.groups[layers.index]
        self.failed = None

    def _failure(self, layers: LayerGroup, error: BaseException) -> TransportError:
        kind = type(error) if isinstance(error, TransportError) else TransportError
        self.failed = kind(f"{self._where} has no average of {layers.label}: {error}")
        self.failed.__cause__ = error
        return self.failed


def refuse_changed(where: str, changed: Sequence[str]) -> None:
    """Raise RuntimeError if there are names of parameters whose gradients were changed after they had gone out."""
    if changed:
        raise RuntimeError(
            f"{where} changed the gradient of {changed[0]} after it had gone out: call `synchronize()` before "
            "gradients are clipped, unscaled or changed otherwise"
        )


def _first_in(candidates: Iterable[LayerGroup]) -> LayerGroup | None:
    """Return the group nearest the input whose average is in."""
    return next((layers for layers in candidates if layers.sent.done()), None)
