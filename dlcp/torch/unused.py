# SPDX-License-Identifier: Apache-2.0
"""Which parameters no rank has used in a step: DistributedDataParallel leaves their gradients alone.

With ``find_unused_parameters``, DDP itself counts the ranks that use each parameter. It throws averages of parameters
with a count of 0 away, and with them the residual that the ranks have added.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class UnusedParameters:
    """The parameters that no rank used in a model's last step.

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
        self._names = [names[id(parameter)] for parameter in parameters]
        self._counts: list[int] | None = None
        self._accompanies = False
        self._before_forward: RemovableHandle | None = None

    def end_step(self) -> None:
        """Note the counts when DDP has finished the step whose last bucket is being averaged.

        Until then its reducer is locked, and would wait for this thread.
        """
        self._counts, self._accompanies = None, False
        engine: Any = Variable._execution_engine
        try:
            # DDP queues the step's end after this bucket, so the second callback comes after it.
            engine.queue_callback(lambda: engine.queue_callback(self._note))
        except RuntimeError:  # join(): this rank has no more data, and accompanies the others' steps without a backward
            self._accompanies = True
            if self._before_forward is None and (model := self._model()) is not None:
                self._before_forward = model.register_forward_pre_hook(self._before_next)

    def names(self) -> list[str] | None:
        """Return their names; None before the step has ended. All ranks get the same ones."""
        if self._counts is None and self._accompanies:
            self._note()
        if self._counts is None:
            return None
        return [name for name, count in zip(self._names, self._counts, strict=True) if not count]

    def _before_next(self, *_: Any) -> None:
        """Note the counts before the next backward, in which the reducer is locked again."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None
        self.names()

    def _note(self) -> None:
        if (model := self._model()) is not None:
            self._counts = model.reducer._get_local_used_map().tolist()
