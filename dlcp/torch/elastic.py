# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training that goes on when ranks end, and lets others in: for a plain module, without process groups.

Under ``dlcp train --elastic 2:4 script.py``, a script trains with 2 to 4 processes, which come and go::

    sampler = dlcp.torch.ElasticSampler(len(dataset), batch=32)
    training = dlcp.torch.Elastic(model, optimizer, sampler=sampler)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(sampler.epoch, 10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    training.close()

Gradients are sent while backward still runs. ``optimizer.step()`` waits for the averages; call ``training.average()``
before gradients are clipped, or inspected by a scaler. A process that is started again, or later, gets the state of
model, optimizer and sampler in ``Elastic(...)``, which returns at the beginning of a step of the others. A process that
gets SIGTERM or SIGUSR1 leaves at the end of its step.
"""

import io
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

import dlcp.session
from dlcp.host.closing import Closing
from dlcp.session.buckets import Gradient
from dlcp.session.division import Division
from dlcp.session.group import Group
from dlcp.session.options import Options
from dlcp.torch import fsdp
from dlcp.torch.hook import refuse_types, sparse_parameter
from dlcp.torch.state import as_array

PLACES_KEPT = 1024
"""More steps than any loader is ahead."""


class Stateful(Protocol):
    """What a rank that comes later gets a copy of, such as a learning-rate scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, texts, and containers of these."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state."""


class Elastic(Closing):
    """Averages the gradients of a model over ranks that come and go; every process makes it once.

    The first ranks get the parameters and buffers of the lowest one. Afterwards buffers, such as batch norm's
    statistics, stay local to each rank.

    Parameters
    ----------
    model
        A plain module, not a DistributedDataParallel or sharded one.
    optimizer
        Its ``step`` ends a step. With several, the one that steps first.
    sampler
        The sampler that divides the data; None if the script divides it, by ``group.ranks``.
    also
        What else must be equal on all ranks: schedulers, further optimizers, or objects of the script with
        ``state_dict`` and ``load_state_dict``.
    options
        By default ``Options()``, with ``elastic`` from the launcher.
    group
        The ranks; by default those of the launcher.

    Attributes
    ----------
    group
        The ranks that train, see :class:`dlcp.session.group.Group`.

    Raises
    ------
    TypeError
        The model is wrapped already.
    ValueError
        A parameter's type is not supported, or it has sparse gradients, or ranks have different models.
    NotJoinedError, TransportError
        The ranks did not join, or have ended; the message says why.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        sampler: "ElasticSampler | None" = None,
        also: Iterable[Stateful] = (),
        options: Options | None = None,
        group: Group | None = None,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) or fsdp.is_sharded(model):
            raise TypeError(
                f"Elastic takes a plain module, got {type(model).__name__}: of DistributedDataParallel, its module"
            )
        if why := sparse_parameter(model):
            raise ValueError(why)
        refuse_types(model)
        self._sampler: ElasticSampler | None = sampler
        self._kept: list[Any] = [model, optimizer, *also]
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._copied: dict[str, torch.Tensor] = {}
        """The gradients of this step on the host, where they are on another device."""
        self._started: set[str] = set()
        self._averages: set[str] = set()
        """The parameters that have had gradients in a step."""
        self._is_on = True
        self.group = group or dlcp.session.join(options)
        names = list(self._parameters)
        if not self.group.register(names, save=self._state, load=self._take_over):
            self._take_over(self.group.share(self._state()))
        if threading.current_thread() is threading.main_thread():
            self.group.leave_on(signal.SIGTERM, signal.SIGUSR1)
        if sampler is not None:
            sampler.divide(self.group.division, self.group.rank, lambda: self.group.step)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_pre_hook(lambda *_: self.average()),
            *(
                each.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
                for name, each in self._parameters.items()
            ),
        ]

    # The state --------------------------------------------------------------------------------------------------------

    def _state(self) -> bytes:
        file = io.BytesIO()
        sampler = self._sampler.state_of(self.group.step) if self._sampler else None
        kept = [each.state_dict() for each in self._kept]
        torch.save({"kept": kept, "sampler": sampler, "averages": sorted(self._averages)}, file)
        return file.getvalue()

    def _take_over(self, data: bytes) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True)
        for each, its in zip(self._kept, state["kept"], strict=True):
            each.load_state_dict(its)
        self._averages = set(state["averages"])
        if self._sampler:
            self._sampler.load_state_dict(state["sampler"])

    # A step -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in backward passes inside, as DistributedDataParallel's ``no_sync`` does."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._started:
            self.group.begin_step()

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._is_on:
            self._start(name, parameter)

    def _start(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if name in self._started:
            raise RuntimeError(
                f"{name} has had a gradient in step {self.group.step} already: run all backward passes of a step but "
                "the last under no_sync()"
            )
        self._started.add(name)
        gradient = parameter.grad.detach()
        if gradient.device.type != "cpu" or not gradient.is_contiguous():
            gradient = self._copied[name] = gradient.cpu().contiguous()
        values, value_type = as_array(gradient)
        self.group.start_gradient(name, Gradient(values, values, value_type))

    def average(self) -> None:
        """Wait until gradients are averages, and end the step; does nothing if no backward pass has sent any.

        Raises
        ------
        TransportError
            Ranks were not reached, or not in time; the message names rank, step and layer.
        """
        if not self._started:
            return
        # An average must be applied on all ranks, or on none: others may have used this parameter. A gradient that was
        # only accumulated, under no_sync, must not be applied as it is.
        accumulated = {name for name, each in self._parameters.items() if each.grad is not None}
        for name in sorted((self._averages | accumulated) - self._started):
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._start(name, parameter)
        self.group.end_step()
        for name, copy in self._copied.items():
            gradient = self._parameters[name].grad
            assert gradient is not None
            gradient.copy_(copy)
        self._averages |= self._started
        self._copied.clear()
        self._started.clear()

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks, and average no more; with a ``reason``, tell them that this rank gives up."""
        for hook in self._hooks:
            hook.remove()
        self.group.close(reason)


class ElasticSampler:
    """Divides a data set among the ranks that are there, step by step: a ``batch_sampler`` for a ``DataLoader``.

    In each epoch, every sample is drawn once by one rank, but for what a rank had drawn that ended. At the end, the
    samples that are too few for a step of every rank are left out. Train on every batch that it draws: which step a
    batch is for follows from their number.

    Parameters
    ----------
    samples
        The number of samples in the data set.
    batch
        The number of samples in a batch, on every rank.
    batches_per_step
        The number of batches in a step, if gradients are accumulated.
    shuffle
        Whether the order is random, another one in every epoch; the same on all ranks.
    seed
        Determines the order.

    Attributes
    ----------
    epoch
        The epoch that the next iteration draws from, from 0.

    Raises
    ------
    ValueError
        There are no samples, or none in a batch.
    """

    def __init__(
        self, samples: int, batch: int, *, batches_per_step: int = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        if min(samples, batch, batches_per_step) < 1:
            raise ValueError(
                f"a data set and a batch need samples, and a step a batch, got {samples}, {batch}, {batches_per_step}"
            )
        self._batches_per_step = batches_per_step
        self.epoch = 0
        self._samples, self._batch, self._shuffle, self._seed = samples, batch, shuffle, seed
        self._division, self._rank = Division((0,)), 0
        self._step: Callable[[], int] = int
        self._places: dict[int, tuple[int, int]] = {}
        """Epoch and position at which the draws for a step begin, for the latest steps."""
        self._is_divided = False

    def divide(self, division: Division, rank: int, step: Callable[[], int]) -> None:
        """Draw for a rank from now on, as :class:`Elastic` asks; ``step`` returns the step in progress."""
        self._division, self._rank, self._step, self._is_divided = division, rank, step, True

    def state_of(self, step: int) -> dict[str, int]:
        """Return where the draws for a step begin: the state of a rank that takes part from then on."""
        epoch, position = self._places.get(step, (self.epoch, 0))
        return {"epoch": epoch, "position": position, "step": step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Draw as a rank in whose state this is the next step."""
        self.epoch = state["epoch"]
        self._places = {state["step"]: (state["epoch"], state["position"])}

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the rest of the epoch, from the step in progress on.

        Raises
        ------
        RuntimeError
            No :class:`Elastic` uses this sampler.
        """
        if not self._is_divided:
            raise RuntimeError("give this sampler to Elastic(model, optimizer, sampler=...) before you draw from it")
        step = self._step()
        epoch, position = self._places.get(step, (self.epoch, 0))
        order = self._order(epoch)
        self._note(step, epoch, position)
        while True:
            ranks = self._division.draw(step, self._step())
            a_rank = self._batch * self._batches_per_step
            share = a_rank * len(ranks)
            if position + share > self._samples:
                break
            mine = position + a_rank * ranks.index(self._rank)
            position, step = position + share, step + 1
            self._note(step, epoch, position)
            for start in range(mine, mine + a_rank, self._batch):
                yield order[start : start + self._batch].tolist()
        self.epoch = epoch + 1
        self._note(step, self.epoch, 0)

    def _note(self, step: int, epoch: int, position: int) -> None:
        self._places[step] = epoch, position
        self._places.pop(step - PLACES_KEPT, None)

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self._samples)
        return np.random.default_rng([self._seed, epoch]).permutation(self._samples)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, with the ranks that are there."""
        ranks = len(self._division.ranks_of(self._step() if self._is_divided else 0))
        return self._samples // (self._batch * self._batches_per_step * ranks) * self._batches_per_step
