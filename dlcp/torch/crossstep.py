# SPDX-License-Identifier: Apache-2.0
"""Cross-step scheduling: a layer's next forward pass starts when that layer's gradient has arrived.

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
has arrived, and code that reads its parameters through their module (the next forward pass, ``state_dict``,
``parameters()``) waits for exactly that layer. So the layers nearest the input, whose gradients come last and are
needed first, do not queue behind the others. ByteScheduler (SOSP'19) and P3 (MLSys'19) do this over TCP; here the
network takes part.

Between ``backward`` and ``step`` gradients are in flight: ``.grad`` holds this rank's values, or averages already. Call
``synchronize`` before reading or changing them, to get the averages::

    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.step(optimizer)
    scaler.update()

To add up the gradients of several batches, all but the last backward run in ``with optimizer.no_sync():``.

Reads through earlier references are not noticed: code that holds a list of parameters (such as a hand-made moving
average) must call ``synchronize`` before it reads them or their gradients. Buffers, such as batch norm's statistics,
stay local to each rank.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from dlcp.collectives.choice import DIRECT
from dlcp.inputs.configuration import Trait
from dlcp.inputs.error_text import describe
from dlcp.session.options import Options
from dlcp.session.training_session import Fallback
from dlcp.torch.framework import copy_from_first_rank, framework_route, profiled
from dlcp.torch.hook import sparse_parameter
from dlcp.torch.layers import LayerGroup, layer_groups
from dlcp.torch.partial_step import Guard, PartialStep
from dlcp.torch.state import FRAMEWORK, State
from dlcp.transport import DeadlineError, ExportedMemory, TransportError
from dlcp.wire.payloads import PLANE_BLOCK_VALUES

GROUP_BYTES = 4 << 20
"""Parameters are exchanged in groups of at least this size, larger ones away from the input: 3 ms on a path of
10 Gbit/s; smaller groups cost more processor time than they save waiting."""
_open: set[int] = set()
"""Identities of parameters held by open optimizers of :func:`cross_step`."""
GRACE_S = 5.0
"""How much longer than the transport to wait for a layer: the transport's error is more precise."""


class CrossStep(Optimizer):
    """An optimizer whose steps finish layer by layer, during the next forward pass; made by :func:`cross_step`.

    It shares ``param_groups`` and ``state`` with the optimizer that it was made from, so schedulers work on either.

    Attributes
    ----------
    inner
        The optimizer that it was made from. Its own ``step`` is refused: it would only use this rank's gradients.
    traffic
        Options, step, ledger and residual; pickle it with a checkpoint.
    """

    _step_supports_amp_scaling = False  # a GradScaler must divide the averages itself: `step` does not have them yet

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        traffic: State,
        group: dist.ProcessGroup | None,
        group_bytes: int,
    ) -> None:
        mine = {id(parameter) for entry in optimizer.param_groups for parameter in entry["params"]}
        if mine & _open:
            raise RuntimeError("cross_step has already taken over these parameters: close() that optimizer first")
        # Not Optimizer.__init__: param_groups, state, defaults and hooks are those of `inner`, see __getattr__.
        self.inner = optimizer
        self.traffic = traffic
        self._rank = dist.get_rank(group)
        self._lock, self._close_lock = threading.RLock(), threading.RLock()
        self._partial = PartialStep(optimizer)
        self._groups, self._outside = layer_groups(model, optimizer, group_bytes)
        self._places = {id(m.parameter): (layers, m) for layers in self._groups for m in layers.members}
        self._pending = PendingUpdates(self._partial)
        self._exchanging = True
        self._begun = self._averaged = self._dirty = self._closed = self._dropped = False
        self._updates = 0
        traffic.may_discard(self._discarded)
        join_layers(traffic, group, self._groups)
        copy_from_first_rank(model, group)
        self._guard = Guard(model, self._wait_for)
        self._hooks: list[Any] = [
            # PyTorch does not annotate this.
            member.parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for layers in self._groups
            for member in layers.members
        ]
        self._taken = mine
        _open.update(mine)
        self._model = weakref.ref(model)
        self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_state))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_state))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def waited_s(self) -> float:
        """Total time that forward passes and others have waited for averages, in seconds."""
        return self._pending.waited_s

    @property
    def reason(self) -> str:
        """Why DLCP does not average gradients; ``""`` while it does."""
        return self.traffic.reason

    # Calls from the training loop -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each layer once its average has arrived; return at once.

        After :meth:`synchronize`, and if the optimizer has step hooks, all layers are updated before it returns.

        Parameters
        ----------
        closure
            Computes the loss, as for other optimizers; called once.

        Raises
        ------
        RuntimeError
            Gradients were changed after they were sent: call :meth:`synchronize` first.
        TransportError
            The last step's averages are not available.
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
        self.inner.__dict__["_opt_called"] = True  # checked by schedulers that were made for it
        return loss

    def synchronize(self, *, always: bool = False) -> None:
        """Wait until everything is up to date: parameters after ``step``; after ``backward`` the averages in ``.grad``.

        All ranks must call it at the same place. ``always`` averages even if backward has not run on this rank.

        Raises
        ------
        RuntimeError
            Gradients were changed after they were sent.
        TransportError
            An average is not available; the message names rank, step and layers.
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

    def flush(self) -> None:
        """Send the coming step in full, with everything lost before. All ranks must call it.

        See :meth:`dlcp.torch.State.flush`.

        Raises
        ------
        RuntimeError
            The step's backward pass has begun.
        """
        with self._lock:
            if self._begun:
                raise RuntimeError(f"{self._where}: flush() is too late, call it before backward")
            if self.traffic.session:
                self.traffic.session.flush(self.traffic.step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: they stay here until the next backward pass outside."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; those in flight are unaffected.

        Between ``backward`` and ``step`` this drops the step, and all ranks must do it.
        """
        with self._lock:
            if self._begun:
                self._send_rest(check=False)
                self._end_step(None)
                self._dropped = True
            elif self._averaged:
                self._averaged, self._dropped = False, True
            self._dirty = False
            if not set_to_none:
                for layers in self._groups:
                    for member in layers.members:
                        member.detach()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the ranks have agreed on the parameters to exchange.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError("add parameter groups to the optimizer before cross_step takes it over")

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, up to date."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer like the inner one."""
        self.inner.load_state_dict(state_dict)

    def close(self, reason: str | None = None) -> None:
        """Finish updates and leave the other ranks; with a ``reason`` or after an error, tell them about it.

        The model and the inner optimizer become ordinary again.
        """
        with self._close_lock:
            if not self._closed:
                self._close(reason)

    def _close(self, reason: str | None) -> None:
        try:
            if reason is None and self._pending.failed is None:
                self._finish()
        finally:
            self._closed = True
            _open.difference_update(self._taken)
            self._pending.groups.clear()
            self._guard.remove()
            for hook in self._hooks:
                hook.remove()
            self._partial.release()
            for layers in self._groups:
                layers.leave_exported()
            failed = self._pending.failed
            self.traffic.close(reason or (describe(failed) if failed else None))

    # Outgoing gradients -----------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            layers, member = self._places[id(parameter)]
            # Without zero_grad, the gradient has been added to the average, which is then part of the next one.
            self._dropped |= self._averaged and not member.in_buffer
            self._dirty, self._averaged = True, False
            if not self._exchanging:
                return
            if member.taken:
                raise RuntimeError(
                    f"{self._where} has a second gradient of {member.name}, but the first was already sent: run all "
                    "backward passes of a step except the last in `no_sync()`, and call `step()` or `zero_grad()` "
                    "after a failed backward pass"
                )
            self._begin()
            member.take()
            if layers.complete:
                self._send(layers)

    def _begin(self) -> None:
        if self._begun:
            return
        if self._closed:
            raise RuntimeError("this optimizer is closed; call cross_step again to continue")
        # All averages of the last step have arrived, so ranks divide buckets alike and may refuse its
        # packets.
        self._finish()
        self.traffic.settle()
        self._averaged, self._begun = False, True
        for layers in self._groups:
            layers.due_s = math.inf

    def _send(self, layers: LayerGroup) -> None:
        layers.fill(self._updates)
        layers.due_s = time.monotonic() + self.traffic.options.deadline_s + GRACE_S
        with profiled("hand over a bucket", layers.label):
            layers.error, layers.arrived = None, False
            layers.sent = self.traffic.average(
                layers.index, layers.segments, layers.flat, layers.read_flags, exported=layers.exported
            )
            layers.sent.add_done_callback(partial(self._pending.on_average, layers))

    def _send_rest(self, *, check: bool = True) -> None:
        """Send groups that backward has not reached: others may have gradients for them, and wait for all ranks."""
        self._begin()
        newcomers = [name for name, parameter in self._outside if parameter.grad is not None]
        if newcomers:
            raise RuntimeError(
                f"{newcomers[0]} has a gradient but did not require one when cross_step was called; call "
                "`close()`, and cross_step again"
            )
        for layers in self._groups:
            if check:
                taken = [member for member in layers.members if member.taken]
                refuse_changed(self._where, [m.name for m in taken if not (m.in_buffer and m.unchanged)])
        for layers in self._groups:
            if layers.due_s == math.inf:
                self._send(layers)

    def _end_step(self, settings: Sequence[dict[str, Any]] | None) -> None:
        self._pending.begin(self._groups, settings, self._where)
        for layers in self._groups:
            layers.forget()
        self._begun = self._dropped = False
        self.traffic.end_step()

    # Incoming averages ------------------------------------------------------------------------------------------------

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

    def _discarded(self) -> Iterable[str] | None:
        """Return the parameters whose averages of the last step are not used, once it is finished; None if unknown."""
        if self._averaged:
            return None
        self._finish()  # what a checkpoint holds does not depend on what is in flight
        members = [member for layers in self._groups for member in layers.members]
        used = [] if self._dropped else [member for layers in self._groups for member in layers.used()]
        return {member.name for member in members} - {member.name for member in used}

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
    """Train ``model`` together with the other ranks, with overlapping steps; all ranks must call it.

    The first rank's parameters and buffers are copied to all.

    Parameters
    ----------
    model
        A plain module, not a DistributedDataParallel one.
    optimizer
        One that treats parameters separately: any of ``torch.optim`` except L-BFGS and SparseAdam. Parameters of the
        model that it does not have are not exchanged.
    options
        By default ``Options()``.
    group
        The ranks that train together, by default all. Its backend is used to connect them.
    group_bytes
        Parameters are exchanged in groups of at least this size, larger ones away from the input.
    state
        ``traffic`` from a checkpoint, to continue from; ``options`` replace its own if given.

    Returns
    -------
    The optimizer to use from now on; call its ``close`` after training.

    Raises
    ------
    ValueError
        The model, the optimizer, a parameter's type or an option is not supported; the message says which.
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off. With it the framework computes the averages.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError("cross_step averages gradients itself: give it the module inside DistributedDataParallel")
    if state is None:
        state = State(options or Options())
    elif options is not None:
        state.options = options
    refuse_whole_steps(state.options)
    if why := sparse_parameter(model):
        raise ValueError(why)
    return CrossStep(model, optimizer, state, group, group_bytes)


def join_layers(traffic: State, group: dist.ProcessGroup | None, groups: Sequence[LayerGroup]) -> None:
    """Join the other ranks to average groups of layers, each separately; all ranks must call it.

    Raises
    ------
    NotJoinedError
        Not all ranks can use DLCP, and ``options.fallback`` is off.
    """
    options = traffic.options
    if not options.server:  # groups of layers are small, and not averaged in one order on all ranks
        options = options.with_(collective=DIRECT)
    # The flags that say which parameters were used are protected like small layers.
    small = max(options.tag_policy.small_layer_values, PLANE_BLOCK_VALUES + 1)
    traffic.tagger.policy = replace(options.tag_policy, small_layer_values=small)
    traffic.ledger.job = options.job
    traffic.average_in_order(group, len(groups))
    route = framework_route(group, groups[0].members[0].parameter.device)
    traffic.join(
        group,
        lambda _: Fallback(FRAMEWORK, route=route),
        options,
        call="dlcp.torch.cross_step",
        export_bytes=ExportedMemory.needed(layers.host_bytes for layers in groups),
    )
    if endpoint := traffic.endpoint:
        for layers in groups:
            memory = endpoint.connection.exported.take(layers.host_bytes)
            if memory is not None:
                layers.move_to(memory)


def refuse_whole_steps(options: Options) -> None:
    """Raise ValueError for options that need whole steps: groups of layers have no common start of a step."""
    for name in options.given(Trait.WHOLE_STEP):
        raise ValueError(f"cross-step scheduling does not support {name}=...: omit it, or use dlcp.torch.enable")


class PendingUpdates:
    """The updates of one step, done group by group as averages arrive while the caller waits for them.

    All methods except :meth:`on_average` are called under the optimizer's lock.

    Parameters
    ----------
    partial
        Updates some of the parameters.

    Attributes
    ----------
    groups
        Groups that are not updated yet, by index.
    failed
        Why an average was not available, unless others have arrived since.
    waited_s
        Total time waited for averages, in seconds.
    """

    def __init__(self, partial: PartialStep) -> None:
        self.groups: dict[int, LayerGroup] = {}
        self.failed: TransportError | None = None
        self.waited_s = 0.0
        self._partial = partial
        self._settings: Sequence[dict[str, Any]] | None = None
        self._where = ""
        self._changed = threading.Condition()

    def begin(self, groups: Iterable[LayerGroup], settings: Sequence[dict[str, Any]] | None, where: str) -> None:
        """Begin the updates of a step; those of the last one are done.

        Parameters
        ----------
        groups
            The groups to update.
        settings
            Settings of the optimizer's groups when the step was called; None if only the averages are awaited.
        where
            The step and this rank, for error messages.
        """
        self.groups = {layers.index: layers for layers in groups}
        self._settings, self._where = settings, where

    def on_average(self, layers: LayerGroup, sent: "torch.futures.Future[torch.Tensor]") -> None:
        """Signal that a group's average has arrived or failed; callable from any thread."""
        with self._changed:  # held only briefly: this is the endpoint's thread
            try:
                sent.value()
            except Exception as error:
                layers.error = error
            layers.arrived = True
            self._changed.notify_all()

    def complete(self, wanted: Sequence[LayerGroup]) -> None:
        """Return once the updates of ``wanted`` are done; do others while waiting.

        Raises
        ------
        TransportError
            An average is not available.
        RuntimeError
            Gradients were changed in flight, or ranks have not made the same steps.
        """
        while missing := [layers for layers in wanted if layers.index in self.groups]:
            due = self._due(missing)
            if due:
                self._update(due)
            else:
                self._await_average(missing)

    def _due(self, missing: Sequence[LayerGroup]) -> LayerGroup | None:
        """Return the group to update next, nearest the input; one that failed only if it is ``missing``."""
        here = [layers for layers in missing if layers.arrived]
        others = (layers for layers in self.groups.values() if layers.arrived and layers.error is None)
        return next(iter(here), None) or next(others, None)

    def _await_average(self, missing: Sequence[LayerGroup]) -> None:
        began_s = time.monotonic()
        due_s = min(layers.due_s for layers in missing)
        with profiled("wait", missing[0].label), self._changed:
            came = self._changed.wait_for(lambda: self._due(missing), max(0.0, due_s - began_s))
        self.waited_s += time.monotonic() - began_s
        if not came:
            layers = min(missing, key=lambda layers: layers.due_s)
            raise self._failure(layers, DeadlineError(f"no answer from the transport within {due_s - began_s:.0f} s"))

    def _update(self, layers: LayerGroup) -> None:
        if layers.error is not None:
            raise self._failure(layers, layers.error)
        layers.sent.wait()  # on a GPU it is still being copied back
        if not layers.agreed:
            raise RuntimeError(
                f"{self._where} has updated {layers.label} in other steps than its peers; after a backward pass all "
                "ranks must call step(), or all zero_grad(): load a checkpoint"
            )
        if self._settings is not None:
            refuse_changed(self._where, [member.name for member in layers.members if not member.unchanged])
            members = layers.used()
            # Code that kept the gradient finds the average there, as with DistributedDataParallel.
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
        self.failed = kind(f"{self._where} has no average of {layers.label}: {describe(error)}")
        self.failed.__cause__ = error
        return self.failed


def refuse_changed(where: str, changed: Sequence[str]) -> None:
    """Raise RuntimeError if gradients of these parameters were changed after they were sent."""
    if changed:
        raise RuntimeError(
            f"{where} changed the gradient of {changed[0]} after it was sent: call `synchronize()` before "
            "gradients are clipped, unscaled or otherwise changed"
        )
