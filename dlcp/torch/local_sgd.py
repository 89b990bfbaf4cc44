# SPDX-License-Identifier: Apache-2.0
"""Local SGD: each rank trains alone for some steps, and then the ranks average their parameters' changes.

A plain model and optimizer, without DistributedDataParallel, become data parallel with two lines::

    averager = dlcp.torch.LocalSGD(model, period=16)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        averager.step()  # after every step of the optimizer
    averager.flush()
    averager.close()

A step then needs a fraction 1 / ``period`` of the bytes, and fewer still at a lower precision. Values of a change that
are lost or rounded off are added to the next one, as for gradients. Replicas are equal after each average, and differ
in between: call ``average`` before a model is tested, and ``flush`` before it is saved for good.

With an ``outer`` optimizer, which takes the averaged change as its gradient, this is DiLoCo (arXiv 2311.08105)::

    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    averager = dlcp.torch.LocalSGD(model, period=64, outer=outer)

Without it, this is local SGD (Stich, ICLR'19); with ``warmup_steps``, post-local SGD (Lin et al., ICLR'20).

With a group of :mod:`dlcp.session` instead of a process group, ranks may come and go (``Options(elastic=2)``). Nobody
waits for a rank that has ended until the next average, which is that of the others. A rank that comes gets the
parameters, and the outer optimizer's state, when the others begin a period.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from dlcp.host.closing import Closing
from dlcp.inputs.configuration import Trait
from dlcp.session.buckets import BucketPlan, Gradient
from dlcp.session.options import Options
from dlcp.torch import fsdp
from dlcp.torch.framework import copy_from_first_rank
from dlcp.torch.hook import refuse_types
from dlcp.torch.state import VALUE_TYPES, State, as_array
from dlcp.values.tags import Segment, layers_in_order

if TYPE_CHECKING:  # it needs gRPC
    from dlcp.session.group import Group


class LocalSGD(Closing):
    """Averages the changes of a model's parameters over all ranks, once in ``period`` steps; all ranks must make it.

    The first rank's parameters and buffers are copied to all. Afterwards, buffers, such as batch norm's statistics, and
    the state of the optimizer stay local to each rank.

    Parameters
    ----------
    model
        A plain module, not a DistributedDataParallel one. Parameters that require no gradient are not averaged.
    period
        Number of steps from one average to the next, at least 1, the same on all ranks.
    options
        By default ``Options()``.
    warmup_steps
        Number of first steps that are each followed by an average.
    outer
        Makes the outer optimizer from the parameters; None to use the averaged changes as they are.
    group
        The ranks that train together, by default all of PyTorch's; its backend is used to connect them. Or a group of
        :func:`dlcp.session.join`, which needs no process group, and has the options.
    state
        ``traffic`` from a checkpoint, to continue from; ``options`` replace its own if given.

    Attributes
    ----------
    outer
        The outer optimizer, if any; its state belongs in the checkpoint, too.
    steps
        Number of calls of :meth:`step`.

    Raises
    ------
    ValueError
        The model, a parameter's type, the period or an option is not supported, or ranks have different periods or
        numbers of first steps; the message says which.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. With it the framework computes the averages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        period: int,
        options: Options | None = None,
        *,
        warmup_steps: int = 0,
        outer: Callable[[Iterable[Parameter]], Optimizer] | None = None,
        group: "dist.ProcessGroup | Group | None" = None,
        state: State | None = None,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) or fsdp.is_sharded(model):
            raise ValueError(
                "LocalSGD takes a plain model: not a sharded one, and of DistributedDataParallel its module"
            )
        if period < 1 or warmup_steps < 0:
            raise ValueError(f"period must be at least 1, and warmup_steps 0, got {period} and {warmup_steps}")
        refuse_types(model)
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if len({each.device for each in named.values()}) != 1:
            raise ValueError("the model needs parameters that require gradients, all on one device")
        self.steps = 0
        self._period, self._warmup_steps = period, warmup_steps
        layers = layers_in_order(list(named), {name: tuple(each.shape) for name, each in named.items()})
        plan = BucketPlan.of((layers[name], each.numel(), VALUE_TYPES[each.dtype]) for name, each in named.items())
        if group is not None and not isinstance(group, dist.ProcessGroup):
            if options is not None or state is not None or warmup_steps:
                raise ValueError("with a group of dlcp.session: omit options, which it has, state and warmup_steps")
            self._averager: _StateAverager | _GroupAverager = _GroupAverager(self, group)
        else:
            self._averager = _StateAverager(self, group, state, options)
            copy_from_first_rank(model, group)
        self._buckets = [
            _Bucket([(named[segment.layer.name], segment) for segment in bucket.segments]) for bucket in plan.buckets
        ]
        self.outer = outer(named.values()) if outer else None
        self._averager.begin(model, named)

    @property
    def traffic(self) -> State:
        """Options, ledger and residual, and as its step the number of averages; pickle it with a checkpoint.

        Raises
        ------
        AttributeError
            The ranks are a group of :mod:`dlcp.session`, which has the ledger.
        """
        if isinstance(self._averager, _StateAverager):
            return self._averager.state
        raise AttributeError("use the group's ledger and options: it has no state to pickle")

    def step(self) -> bool:
        """Count a step of the optimizer, and average if that is due; return whether it was.

        Raises
        ------
        TransportError
            As for :meth:`average`.
        """
        self.steps += 1
        due = self.steps <= self._warmup_steps or (self.steps - self._warmup_steps) % self._period == 0
        if due:
            self.average()
        return due

    def average(self) -> None:
        """Average the parameters' changes since the last average; all ranks must call it.

        Raises
        ------
        RuntimeError
            It is closed.
        TransportError
            An average is not available; the message names rank, step and layers.
        """
        self._averager.average(self._buckets)
        self._apply()

    def _apply(self) -> None:
        """Apply the averaged changes."""
        if self.outer is None:
            for bucket in self._buckets:
                bucket.apply()
            return
        for bucket in self._buckets:
            bucket.as_gradients()
        self.outer.step()
        for bucket in self._buckets:
            bucket.adopt()

    def flush(self) -> None:
        """Average in full, with everything lost or rounded off before; all ranks must call it.

        Raises
        ------
        RuntimeError, TransportError
            As for :meth:`average`.
        """
        self._averager.flush()
        self.average()

    def close(self, reason: str | None = None) -> None:
        """Leave the other ranks; with a ``reason``, tell them that this rank gives up."""
        self._averager.close(reason)


class _StateAverager:
    """Averages over the ranks of a process group."""

    def __init__(
        self, owner: LocalSGD, group: dist.ProcessGroup | None, state: State | None, options: Options | None
    ) -> None:
        if state is None:
            state = State(options or Options())
        elif options is not None:
            state.options = options
        for name in state.options.given(Trait.WHOLE_STEP):
            raise ValueError(f"LocalSGD does not support {name}=...: omit it")
        self.state, self._group = state, group
        mine = {"period": owner._period, "warmup_steps": owner._warmup_steps}
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
        for name in mine:
            if len(values := {rank[name] for rank in every}) > 1:
                raise ValueError(f"{name} must be the same on all ranks, got {sorted(values)}")

    def begin(self, model: torch.nn.Module, named: dict[str, Parameter]) -> None:
        self.state.ledger.job = self.state.options.job
        self.state.attach_tensors(named, self._group, call="dlcp.torch.LocalSGD")

    def average(self, buckets: "Sequence[_Bucket]") -> None:
        if not self.state.attached:
            raise RuntimeError("this averager is closed: make another one")
        pending = [bucket.start(partial(self.state.average, number)) for number, bucket in enumerate(buckets)]
        for average in pending:
            average.wait()
        self.state.end_step()

    def flush(self) -> None:
        self.state.flush()

    def close(self, reason: str | None) -> None:
        self.state.close(reason)


class _GroupAverager:
    """Averages over the ranks of a group, which may come and go."""

    def __init__(self, owner: LocalSGD, group: "Group") -> None:
        self._owner, self._group = owner, group

    def begin(self, model: torch.nn.Module, named: dict[str, Parameter]) -> None:
        self._model = model
        if not self._group.register(named, save=self._state, load=self._take_over):
            self._take_over(self._group.share(self._state()))
        self._hook = model.register_forward_pre_hook(self._begin_period)

    def _begin_period(self, model: torch.nn.Module, inputs: Any) -> None:
        """Let new ranks begin a period together with the others: with its first forward pass."""
        if model.training and torch.is_grad_enabled():
            self._group.begin_step()

    def average(self, buckets: "Sequence[_Bucket]") -> None:
        for bucket in buckets:
            for name, gradient in bucket.gradients():
                self._group.start_gradient(name, gradient)
        self._group.end_step()
        for bucket in buckets:
            bucket.take_averages()

    def flush(self) -> None:
        self._group.flush()

    def close(self, reason: str | None) -> None:
        self._hook.remove()
        self._group.close(reason)

    def _state(self) -> bytes:
        """Return the state at the beginning of a period: the ranks' parameters are the same."""
        owner, file = self._owner, io.BytesIO()
        outer = owner.outer.state_dict() if owner.outer else None
        torch.save(
            {"model": self._model.state_dict(), "outer": outer, "steps": owner.steps, "period": owner._period}, file
        )
        return file.getvalue()

    def _take_over(self, data: bytes) -> None:
        owner, state = self._owner, torch.load(io.BytesIO(data), weights_only=True)
        if state["period"] != owner._period:
            raise ValueError(f"period must be the same on all ranks, got {sorted((state['period'], owner._period))}")
        self._model.load_state_dict(state["model"])
        if owner.outer:
            owner.outer.load_state_dict(state["outer"])
        owner.steps = state["steps"]
        for bucket in owner._buckets:
            bucket.begin()


class _Bucket:
    """Neighbouring parameters of one type, and their values after the last average.

    Parameters
    ----------
    parameters
        The parameters and where each is in the bucket.
    """

    def __init__(self, parameters: list[tuple[Parameter, Segment]]) -> None:
        self._parameters = parameters
        self._anchor = torch.cat([parameter.detach().reshape(-1) for parameter, _ in parameters])
        self._change = torch.empty_like(self._anchor)
        self._gradients: list[torch.Tensor | None] = []

    @property
    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach().reshape(-1) for parameter, _ in self._parameters]

    def begin(self) -> None:
        """Count changes from the present values on."""
        torch.cat(self._values, out=self._anchor)

    def _measure(self) -> None:
        torch.cat(self._values, out=self._change)
        self._change.sub_(self._anchor)

    def gradients(self) -> Iterator[tuple[str, Gradient]]:
        """Yield each parameter's change, on the host, to be averaged in place."""
        self._measure()
        self._on_host = self._change.cpu()
        for _, segment in self._parameters:
            values, value_type = as_array(self._on_host[segment.start : segment.stop])
            yield segment.layer.name, Gradient(values, values, value_type)

    def take_averages(self) -> None:
        """Take the averages of :meth:`gradients` as the changes."""
        self._change.copy_(self._on_host)

    def start(
        self, average: Callable[..., "torch.futures.Future[torch.Tensor]"]
    ) -> "torch.futures.Future[torch.Tensor]":
        """Start to average the changes."""
        self._measure()
        return average([segment for _, segment in self._parameters], self._change)

    def apply(self) -> None:
        """Add the averaged changes to the parameters."""
        self._anchor.add_(self._change)
        for parameter, part in self._parts(self._anchor):
            parameter.detach().copy_(part)

    def as_gradients(self) -> None:
        """Undo this rank's changes, and make the averaged ones gradients for the outer optimizer."""
        self._gradients = [parameter.grad for parameter, _ in self._parameters]
        for parameter, part in self._parts(self._anchor):
            parameter.detach().copy_(part)
        for parameter, part in self._parts(self._change):
            parameter.grad = -part

    def adopt(self) -> None:
        """Start the next changes from the outer optimizer's result, and put the gradients back."""
        self.begin()
        for (parameter, _), gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _parts(self, flat: torch.Tensor) -> list[tuple[Parameter, torch.Tensor]]:
        return [(each, flat[segment.start : segment.stop].view_as(each)) for each, segment in self._parameters]
