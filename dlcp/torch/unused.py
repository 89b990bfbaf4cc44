# SPDX-License-Identifier: Apache-2.0
"""Find the averages that DistributedDataParallel discards: those of parameters that no rank has used in a step.

With ``find_unused_parameters``, DDP itself counts the ranks that use each parameter. It leaves the gradients of
parameters with a count of 0 alone, and so loses the residual that the ranks have added to their averages. With
``gradient_as_bucket_view``, a gradient that exists lies in the bucket, and so holds the average whatever the count.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class UnusedParameters:
    """The parameters whose averages in a model's last step are discarded.

    Parameters
    ----------
    model
        With ``find_unused_parameters``.
    named
        Its parameters by name.
    """

    def __init__(self, model: DistributedDataParallel, named: Mapping[str, torch.Tensor]) -> None:
        self._model = weakref.ref(model)  # its reducer holds the state, which holds this
        names = {id(parameter): name for name, parameter in named.items()}
        parameters, _ = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._parameters = [(names[id(parameter)], parameter) for parameter in parameters]
        self._unused: list[str] | None = None
        self._accompanies = False
        self._before_forward: RemovableHandle | None = None

    def end_step(self) -> None:
        """Note the counts when DDP has finished the step whose last bucket is being averaged.

        Until then its reducer is locked, and would wait for this thread.
        """
        self._unused, self._accompanies = None, False
        engine: Any = Variable._execution_engine
        try:
            # DDP queues the step's end after this bucket, so the second callback comes after it.
            engine.queue_callback(lambda: engine.queue_callback(self._note))
        except RuntimeError:  # join(): this rank has no more data, and joins the others' steps without a backward pass
            self._accompanies = True
            if self._before_forward is None and (model := self._model()) is not None:
                self._before_forward = model.register_forward_pre_hook(self._before_next)

    def names(self) -> list[str] | None:
        """Return their names; None before the step has ended. All ranks get the same ones."""
        if self._unused is None and self._accompanies:
            self._note()
        return self._unused

    def _before_next(self, *_: Any) -> None:
        """Note the counts before the next backward, in which the reducer is locked again."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None
        self.names()

    def _note(self) -> None:
        model = self._model()
        if model is None:
            return
        in_bucket = model.gradient_as_bucket_view and not self._accompanies
        counts = model.reducer._get_local_used_map().tolist()
        self._unused = [
            name
            for (name, parameter), count in zip(self._parameters, counts, strict=True)
            if not count and not (in_bucket and parameter.grad is not None)
        ]
