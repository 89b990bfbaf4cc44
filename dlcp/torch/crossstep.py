# SPDX-License-Identifier: Apache-2.0
"""Cross-step scheduling: the next forward pass of a layer starts when that layer's gradient is in.

One line turns a plain model and optimizer, without DistributedDataParallel, into a data-parallel pair::

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = dlcp.torch.cross_step(model, optimizer)  # <- the line
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    optimizer.close()

Gradients leave as soon as backward has produced them. ``step`` returns at once; each layer is updated when its average
is in, and whoever reads its parameters through their module (the next forward pass, ``state_dict``, ``parameters()``)
waits for exactly that layer. So the layers nearest the input, whose gradients come last and are needed first, do not
queue behind the others. ByteScheduler (SOSP'19) and P3 (MLSys'19) do so over TCP; here the network takes part.

Between ``backward`` and ``step`` gradients are on their way: ``.grad`` holds this rank's values, or averages already.
Whoever reads or changes them asks for the averages first, with ``synchronize``::

    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.step(optimizer)
    scaler.update()

To add up the gradients of several batches, all but the last backward run in ``with optimizer.no_sync():``.

Not seen are reads through references kept from before: code that holds a list of parameters (a moving average made by
hand, say) calls ``synchronize`` before it reads them or their gradients. Buffers, such as batch norm's statistics, stay
each rank's own.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from dlcp.session.options import Options
from dlcp.torch.guard import Guard
from dlcp.torch.hook import State
from dlcp.torch.layer_exchange import LayerExchange, refuse_whole_steps
from dlcp.torch.layergroup import LayerGroup, layer_groups
from dlcp.torch.partial_step import PartialStep
from dlcp.torch.pending_updates import PendingUpdates, refuse_changed

GROUP_BYTES = 4 << 20
"""Parameters are exchanged in groups of at least this size, larger ones away from the input. Chosen by us: 3 ms on a
path of 10 Gbit/s, where smaller ones cost more processor time than they save waiting."""
GRACE_S = 5.0
"""How much longer than the transport a layer is waited for: the transport knows better what is wrong."""


class CrossStep(Optimizer):
    """An optimizer whose steps end layer by layer, during the next forward pass; made by :func:`cross_step`.

    It shares ``param_groups`` and ``state`` with the optimizer that it was made from, so schedulers work on either.

    Attributes
    ----------
    inner
        The optimizer that it was made from. Its own ``step`` is refused: it would use gradients of this rank alone.
    traffic
        Options, step and ledger, and what error feedback owes; to be pickled with a checkpoint.
    """

    _step_supports_amp_scaling = False  # a GradScaler must divide the averages itself: they are not in `step` yet

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        traffic: State,
        group: dist.ProcessGroup | None,
        group_bytes: int,
    ) -> None:
        # Not Optimizer.__init__: param_groups, state, defaults and hooks are those of `inner`, see __getattr__.
        self.inner = optimizer
        self.traffic = traffic
        self._rank = dist.get_rank(group)
        self._lock = threading.RLock()
        self._partial = PartialStep(optimizer)
        self._groups, self._outside = layer_groups(model, optimizer, group_bytes)
        self._places = {id(m.parameter): (layers, m) for layers in self._groups for m in layers.members}
        self._pending = PendingUpdates(self._partial)
        self._exchanging = True
        self._begun = self._averaged = self._dirty = self._closed = False
        self._updates = 0
        self._exchange = LayerExchange(traffic, group, self._groups, self._pending.tell)
        _copy_from_first_rank(model, group)
        self._guard = Guard(model, self._wait_for)
        self._hooks: list[Any] = [
            # PyTorch does not annotate this.
            member.parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for layers in self._groups
            for member in layers.members
        ]
        self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_state))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_state))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def waited_s(self) -> float:
        """How long forward passes and others have waited for averages in all, in seconds."""
        return self._pending.waited_s

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        return self._exchange.reason

    # What the training loop calls -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each layer be updated once its average is in; return at once.

        After :meth:`synchronize`, and if the optimizer has hooks around its step, all are updated before it returns.

        Parameters
        ----------
        closure
            Computes the loss, as for other optimizers; called once.

        Raises
        ------
        RuntimeError
            Gradients were changed after they had gone out: :meth:`synchronize` was forgotten.
        TransportError
            The last step's averages cannot be had.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            if not self._averaged and self._partial.watched:
                self.synchronize(always=True)
            if self._averaged:
                self._partial.whole()
                self._averaged = False
            else:
                self._send_rest()
                self._end_step(self._partial.settings())
            self._updates += 1
            self._dirty = False
        self.inner.__dict__["_opt_called"] = True  # where a scheduler that was made for it looks
        return loss

    def synchronize(self, *, always: bool = False) -> None:
        """Wait until all is up to date: parameters after ``step``; after ``backward`` the averages in ``.grad``, too.

        All ranks must call it at the same place. ``always`` averages even if backward has not run on this rank.

        Raises
        ------
        RuntimeError
            Gradients were changed after they had gone out.
        TransportError
            An average cannot be had; the message names rank, step and layers.
        """
        with self._lock:
            self._finish()
            if not self._dirty and not always:
                return
            self._send_rest()
            self._end_step(None)
            self._finish()
            for layers in self._groups:
                for member in layers.used():
                    member.parameter.grad = member.average
            self._averaged, self._dirty = True, False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on this rank alone: what backward produces inside stays here until the next one outside."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; what is on its way is not harmed.

        Between ``backward`` and ``step`` it drops the step; all ranks must.
        """
        with self._lock:
            if self._begun:
                self._send_rest(check=False)
                self._end_step(None)
            self._dirty = False
            if not set_to_none:
                for layers in self._groups:
                    for member in layers.members:
                        member.let_go()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the ranks have agreed on what they exchange.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError("add parameter groups to the optimizer before cross_step takes it over")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer that it was made from, up to date."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer like the one that it was made from."""
        self.inner.load_state_dict(state_dict)

    def close(self, reason: str | None = None) -> None:
        """Finish updates and leave the other ranks; with a ``reason`` or after an error, tell them that it gives up.

        The model and the first optimizer are plain ones again.
        """
        if self._closed:
            return
        try:
            if reason is None and self._pending.failed is None:
                self._finish()
        finally:
            self._closed = True
            self._pending.groups.clear()
            self._guard.remove()
            for hook in self._hooks:
                hook.remove()
            self._partial.release()
            for layers in self._groups:
                layers.withdraw()
            failed = self._pending.failed
            self._exchange.close(reason or (str(failed) if failed else None))

    # Gradients on their way out ---------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            self._dirty, self._averaged = True, False
            if not self._exchanging:
                return
            layers, member = self._places[id(parameter)]
            if member.taken:
                raise RuntimeError(
                    f"{self._where} has a second gradient of {member.name}, and the first has gone out: run all "
                    "backward passes of a step but the last in `no_sync()`, and call `step()` or `zero_grad()` after a "
                    "backward pass that failed"
                )
            self._begin()
            member.take()
            if layers.complete:
                self._send(layers)

    def _begin(self) -> None:
        if self._begun:
            return
        if self._closed:
            raise RuntimeError("this optimizer has been closed; call cross_step again to go on")
        # All averages of the step before are in: so ranks divide alike (adaptive shards), and may refuse its packets.
        self._finish()
        self._averaged, self._begun = False, True
        for layers in self._groups:
            layers.due_s = math.inf
        self._exchange.begin_step(self.traffic.step)

    def _send(self, layers: LayerGroup) -> None:
        layers.fill(self._updates)
        layers.due_s = time.monotonic() + self.traffic.options.deadline_s + GRACE_S
        self._exchange.start(self.traffic.step, layers)

    def _send_rest(self, *, check: bool = True) -> None:
        """Send what backward has not reached: other ranks may have gradients for it, and count on all of us."""
        self._begin()
        newcomers = [name for name, parameter in self._outside if parameter.grad is not None]
        if newcomers:
            raise RuntimeError(
                f"{newcomers[0]} has a gradient but required none when cross_step was called; call `close()`, and "
                "cross_step again"
            )
        for layers in self._groups:
            if check:
                taken = [member for member in layers.members if member.taken]
                refuse_changed(self._where, [m.name for m in taken if not (m.in_place and m.unchanged)])
        for layers in self._groups:
            if layers.due_s == math.inf:
                self._send(layers)

    def _end_step(self, settings: Sequence[dict[str, Any]] | None) -> None:
        self._pending.begin(self._groups, settings, self._where)
        for layers in self._groups:
            layers.forget()
        self._begun = False
        self.traffic.step += 1

    # Averages on their way in -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._complete(self._groups)

    def _wait_for(self, parameters: Iterable[Parameter]) -> None:
        if self._pending.groups:
            places = (self._places.get(id(parameter)) for parameter in parameters)
            wanted = {place[0].index: place[0] for place in places if place is not None}
            self._complete(list(wanted.values()))

    def _complete(self, wanted: Sequence[LayerGroup]) -> None:
        with self._lock:
            self._pending.complete(wanted)

    def _before_state(self, *_: Any) -> None:
        self._finish()

    @property
    def _where(self) -> str:
        return f"job {self.traffic.options.job}, step {self.traffic.step}: rank {self._rank}"


def cross_step(
    model: torch.nn.Module,
    optimizer: Optimizer,
    options: Options | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    group_bytes: int = GROUP_BYTES,
    state: State | None = None,
) -> CrossStep:
    """Train ``model`` together with the other ranks, and let steps overlap; all ranks must call it.

    The first rank's parameters and buffers are copied to all.

    Parameters
    ----------
    model
        A plain module, not a DistributedDataParallel one.
    optimizer
        One that treats parameters one by one: any of ``torch.optim`` but L-BFGS and SparseAdam. Parameters of the model
        that it does not have are not exchanged.
    options
        By default :meth:`Options.from_environment`.
    group
        The ranks that train together, by default all. Its backend is used to find them.
    group_bytes
        Parameters are exchanged in groups of at least this size, larger ones away from the input.
    state
        ``traffic`` from a checkpoint, to go on from; ``options`` replace its own when given.

    Returns
    -------
    The optimizer to use from now on; call its ``close`` when training is over.

    Raises
    ------
    ValueError
        The model, the optimizer, a parameter's type or an option is not supported; the message says which.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. Otherwise averages come from the framework then.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError("cross_step averages gradients itself: give it the module inside DistributedDataParallel")
    if state is None:
        state = State(options or Options.from_environment())
    elif options is not None:
        state.options = options
    refuse_whole_steps(state.options)
    return CrossStep(model, optimizer, state, group, group_bytes)


def _copy_from_first_rank(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    first = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, first, group=group)
