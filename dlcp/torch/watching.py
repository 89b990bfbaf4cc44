# SPDX-License-Identifier: Apache-2.0
"""Watch the ranks of a DistributedDataParallel model: who makes the others wait, whatever averages the gradients.

``watch = dlcp.torch.watch(model)``, on all ranks; later ``print(watch.verdict())``. Hooks note when a rank's activities
begin. They change neither the averaging nor its result, and no rank waits for another one because of them. A thread
exchanges the ranks' figures every two seconds over a Gloo group of its own, and compares them
(:mod:`dlcp.session.slowness`).
"""

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlcp.host.closing import ExitCallback
from dlcp.session.options import Options
from dlcp.session.slowness import ACTIVITIES, LEAST_BYTES, SPAN, Activity, RankComparison, RankReport, Verdict
from dlcp.session.snapshots import WATCHED, WatchedRankWriter, as_slow_rank, peers_of
from dlcp.session.tcp_links import TcpEnds, TcpUse, tcp_connections
from dlcp.torch.framework import destroy_group, leave_with_group, own_gloo_group
from dlcp.torch.state import State
from dlcp.transport import TransportError

REPORT_S: Final = 2.0
"""Interval of the ranks' reports. A report takes a few milliseconds of a thread."""
DEADLINE_S: Final = 120.0
"""How long a rank's report may take; then watching ends, and training goes on."""
LAST_REPORT_S: Final = 5.0
"""How long a rank that closes waits for the others' last report."""
GROUPS_MAX: Final = 8
"""Most groups of layers. With as many, the hooks take some 50 µs of a step."""
MARKS_MAX: Final = 1 << 16
"""Most marks of a step: of some thousand passes without averaging. Later ones are counted as the last activity."""
_PLACE: Final = {activity: place for place, activity in enumerate(ACTIVITIES)}
_LOADING, _OPTIMIZER, _WAITING = _PLACE[Activity.LOADING], _PLACE[Activity.OPTIMIZER], _PLACE[Activity.WAITING]
_EVALUATION = _PLACE[Activity.EVALUATION]
_COLLECTIVES: Final = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""Functions of ``torch.distributed`` in which a rank waits for others."""
_NEVER_CALLED: Final = (torch.nn.ModuleList, torch.nn.ModuleDict)
log = logging.getLogger("dlcp")

Stamp = Any
"""A moment: seconds, or a CUDA event."""
Marks = list[tuple[int, Stamp]]
"""A rank's activity, by number, and the moment at which it begins."""


class WatchedLayers(NamedTuple):
    """Consecutive layers of a model.

    Attributes
    ----------
    name
        Names of the first and the last module.
    begins
        The modules whose forward pass begins that of the group: the outermost one and the first layer.
    parameter
        The parameter of the first layer, whose gradient ends the group's backward pass.
    """

    name: str
    begins: tuple[torch.nn.Module, ...]
    parameter: torch.nn.Parameter


def layer_groups(model: torch.nn.Module) -> list[WatchedLayers]:
    """Return at most :data:`GROUPS_MAX` groups of layers with about as many parameters each, in order of definition."""
    layers: dict[str, list[torch.nn.Parameter]] = {}
    for name, module in model.named_modules():
        if own := [each for each in module.parameters(recurse=False) if each.requires_grad]:
            layers[name] = own
    sizes = [sum(parameter.numel() for parameter in own) for own in layers.values()]
    groups: dict[int, list[str]] = {}
    for number, (name, before) in enumerate(zip(layers, accumulate(sizes, initial=0), strict=False)):
        group = number if len(layers) <= GROUPS_MAX else GROUPS_MAX * before // sum(sizes)
        groups.setdefault(group, []).append(name)
    inside = {
        outer: [name for name in layers if f"{name}.".startswith(f"{outer}.")] for outer, _ in model.named_modules()
    }
    modules = dict(model.named_modules())
    found = []
    for names in groups.values():
        called = [
            outer
            for outer, within in inside.items()
            if outer and within[:1] == names[:1] and not isinstance(modules[outer], _NEVER_CALLED)
        ]
        whole = [outer for outer, within in inside.items() if outer and within and set(within) <= set(names)]
        first = next((outer for outer in whole if inside[outer][0] == names[0]), names[0])
        last = next((outer for outer in whole if inside[outer][-1] == names[-1]), names[-1])
        name = SPAN.join(dict.fromkeys((first or type(model).__name__, last or type(model).__name__)))
        begins = tuple(modules[each] for each in dict.fromkeys((*called[:1], names[0])))
        found.append(WatchedLayers(name, begins, layers[names[0]][0]))
    return found


class StepClock:
    """Notes when the activities of a rank's steps begin, with hooks on a model.

    A step ends when its averages have arrived. Its marks are ``ACTIVITIES``, then the forward pass of each group of
    layers, then the backward pass of each.

    Parameters
    ----------
    model
        The model.

    Attributes
    ----------
    ended
        Set it to note nothing more. Hooks may only be removed by the thread that trains.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        plain = model.module
        self.groups = layer_groups(plain)
        self.steps: deque[tuple[Marks, Stamp]] = deque()
        """Finished steps that were not taken yet: marks, and the end."""
        self._count = len(self.groups)
        self._forward, self._backward = len(ACTIVITIES), len(ACTIVITIES) + self._count
        self._cuda = model.device_type == "cuda"
        self._stamp: Callable[[], Stamp] = _cuda_stamp if self._cuda else time.monotonic
        self._thread = threading.get_ident()
        self._marks: Marks = [(_LOADING, self._stamp())]
        self.ended = self._synchronises = self._in_backward = False
        self._stack = contextlib.ExitStack()
        for handle in (
            _first(model.register_forward_pre_hook, _uncompiled(self._before_forward)),
            plain.register_forward_pre_hook(_uncompiled(self._forward_begins)),
            plain.register_forward_hook(_uncompiled(self._forward_ends)),
            *(
                module.register_forward_pre_hook(functools.partial(self._group_begins, self._forward + number))
                for number, group in enumerate(self.groups)
                for module in group.begins
                if number
            ),
            *(
                group.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # untyped
                    functools.partial(self._group_ends, self._backward + max(0, number - 1))
                )
                for number, group in enumerate(self.groups)
            ),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ):
            self._stack.callback(handle.remove)
        _listeners.append(self)

    def close(self) -> None:
        """Remove the hooks."""
        if self in _listeners:
            _listeners.remove(self)
        self._stack.close()

    def take(self) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
        """Return the durations of the finished steps, shape (steps, activities), and the total ones of the groups."""
        rows, groups = [], np.zeros(self._count)
        while self.steps and (not self._cuda or self.steps[0][1].query()):
            marks, end = self.steps.popleft()
            spent = np.zeros(self._backward + self._count)
            for (number, began), (_, ended) in pairwise([*marks, (0, end)]):
                spent[number] += began.elapsed_time(ended) / 1e3 if self._cuda else ended - began
            passes = spent[self._forward :].reshape(2, self._count)
            row = spent[: len(ACTIVITIES)]
            row[[_PLACE[Activity.FORWARD], _PLACE[Activity.BACKWARD]]] += passes.sum(1)
            rows.append(row)
            groups += passes.sum(0)
        return np.array(rows).reshape(-1, len(ACTIVITIES)), groups

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting, if this is the thread that trains."""
        if threading.get_ident() != self._thread:
            yield
            return
        before = self._marks[-1][0]
        self._mark(_WAITING)
        try:
            yield
        finally:
            self._mark(before)

    def _mark(self, number: int) -> None:
        if len(self._marks) < MARKS_MAX and not self.ended:
            if self._cuda and torch.cuda.is_current_stream_capturing():  # events in a CUDA graph have no times
                return
            self._marks.append((number, self._stamp()))

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _before_forward(self, model: DistributedDataParallel, _: object) -> None:
        """DDP may now wait for the first rank's buffers."""
        if torch.is_grad_enabled():
            self._synchronises, self._in_backward = model.require_backward_grad_sync, False
            self._mark(_WAITING)

    def _forward_begins(self, _: torch.nn.Module, __: object) -> None:
        self._mark(self._forward if torch.is_grad_enabled() else _EVALUATION)

    def _forward_ends(self, _: torch.nn.Module, __: object, ___: object) -> None:
        if torch.is_grad_enabled():
            self._mark(self._backward + self._count - 1)

    def _group_begins(self, number: int, _: torch.nn.Module, __: object) -> None:
        if not torch.compiler.is_compiling() and self._forward <= self._marks[-1][0] < self._backward:
            self._mark(number)

    def _group_ends(self, following: int, _: torch.Tensor) -> None:
        self._mark(following)
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._gradients_ready)

    def _gradients_ready(self) -> None:
        """Backward has computed all gradients; DDP waits for the averages in a callback that is already queued."""
        if self._synchronises:
            self._mark(_WAITING)
            Variable._execution_engine.queue_callback(self._averaged)
        else:
            self._in_backward = False
            self._mark(_LOADING)

    def _averaged(self) -> None:
        self._in_backward = False
        now = self._stamp()
        if not self.ended:
            self.steps.append((self._marks, now))
        self._marks = [(_OPTIMIZER, now)]

    def _optimizer_ends(self, *_: object) -> None:
        if self._marks[-1][0] == _OPTIMIZER:
            self._mark(_LOADING)


_listeners: list[StepClock] = []
"""Clocks that count the time in other collectives as waiting."""


def _first(register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    return register(hook, prepend=True)


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # untyped
    return disabled


def _cuda_stamp() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped
    event.record()
    return event


def note_collectives() -> None:
    """Make PyTorch's collectives count as waiting for watched models, also those imported by name from now on."""
    modules: tuple[Any, ...] = dist, dist.distributed_c10d
    for name in _COLLECTIVES:
        original = getattr(dist, name)
        if not hasattr(original, "tells_clocks"):
            for module in modules:
                setattr(module, name, _telling(original))


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*arguments: Any, **named: Any) -> Any:
        if not _listeners or torch.compiler.is_compiling():
            return original(*arguments, **named)
        with contextlib.ExitStack() as stack:
            for clock in _listeners:
                stack.enter_context(clock.waiting())
            return original(*arguments, **named)

    collective.tells_clocks = True  # type: ignore[attr-defined]  # prevents a second replacement
    return collective


class _Exchanged(NamedTuple):
    """A rank's report to the others."""

    report: RankReport
    token: str
    """On rank 0, the session's name."""
    closing: bool


class StepWatch:
    """Watches one model on this rank, until closed; all ranks of the model must make one.

    Parameters
    ----------
    model
        The model.
    state
        DLCP's state, if DLCP averages the model's gradients.
    """

    def __init__(self, model: DistributedDataParallel, state: State | None = None) -> None:
        group = model.process_group
        self.averages = str(dist.get_backend(group))
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank()
        self._session = state.session if state else None
        self._group = own_gloo_group(group, DEADLINE_S)
        self._clock = StepClock(model)
        note_collectives()
        self._lock = threading.Lock()
        self._comparison = RankComparison(self.rank, self.ranks, [each.name for each in self._clock.groups])
        self._uses: dict[TcpEnds, TcpUse] = tcp_connections()
        self._token = secrets.token_hex(4)
        self._closing, self._close_lock = threading.Event(), threading.RLock()  # a signal handler may close again
        self._gave_up = False
        live = Options().live
        self._snapshots = WatchedRankWriter.open(self, live) if live and self._session is None else None
        if self._session:
            self._session.compared = self.compared
        self._thread = threading.Thread(target=self._run, name="dlcp-step-watch", daemon=True)
        self._thread.start()
        self._exit = ExitCallback(self.close)
        leave_with_group(self, group)

    def verdict(self) -> Verdict:
        """Return who makes the others wait, over the latest half a minute. ``str`` makes a sentence of it."""
        with self._lock:
            return self._comparison.latest()

    def overall(self) -> dict[str, Any]:
        """Return the verdict on all steps and the figures it rests on, as plain values."""
        with self._lock:
            return {"averages": self.averages, **self._comparison.as_json()}

    def compared(self) -> dict[str, Any]:
        """Return the fields of a snapshot; see :class:`dlcp.session.snapshots.ComparedRank`."""
        with self._lock:
            _, spent, _ = self._comparison.totals()
            return {"slow": as_slow_rank(self._comparison.latest()), "activities_s": spent}

    def close(self, reason: str | None = None) -> None:
        """End watching, after a last exchange; with a ``reason``, because this rank gives up, at once."""
        if self._exit.is_fork:
            return
        with self._close_lock:
            if self._closing.is_set():
                return
            self._exit.cancel()
            self._clock.close()
            self._gave_up = reason is not None
            self._closing.set()
            self._thread.join(LAST_REPORT_S)  # a thread inside PyTorch when Python ends would abort the process
            if self._snapshots:
                self._snapshots.close(WATCHED, reason)

    def leave_at_exit(self) -> None:
        """Close before the process group is destroyed."""
        self.close()

    def _run(self) -> None:
        over = False
        try:
            while not over:
                self._closing.wait(REPORT_S)
                if self._gave_up:
                    break
                over = self._exchange(self._closing.is_set())
        except (RuntimeError, ValueError) as problem:
            log.info("DLCP: rank %d ends watching, another rank has ended: %s", self.rank, problem)
        finally:
            self._clock.ended = True
            destroy_group(self._group)
            del self._group

    def _exchange(self, closing: bool) -> bool:
        """Exchange reports with the other ranks; return whether any of them is closing."""
        found: list[Any] = [None] * len(self.ranks)
        own = self._report()
        dist.all_gather_object(found, _Exchanged(own, self._token, closing), group=self._group)
        with self._lock:
            self._comparison.add([each.report for each in found])
            _, _, waited = self._comparison.totals()
        if self._snapshots:
            self._snapshots.label = f"watched-{found[0].token}"
            self._snapshots.note(own.seconds.sum(1).tolist(), waited)
        return any(each.closing for each in found)

    def _report(self) -> RankReport:
        seconds, layers = self._clock.take()
        uses = tcp_connections()
        since = {ends: use.since(self._uses.get(ends)) for ends, use in uses.items()}
        self._uses = uses
        connections = {
            ends: use for ends, use in since.items() if max(use.acked_bytes, use.received_bytes) >= LEAST_BYTES
        }
        return RankReport(seconds, layers, connections, self._rates_bps())

    def _rates_bps(self) -> dict[int, float]:
        """Return the rates at which other ranks receive what DLCP sends, where it knows them."""
        if self._session is None or self._session.endpoint is None or not self._session.active:
            return {}
        try:
            peers = peers_of(self._session.endpoint)
        except (TransportError, FutureTimeoutError):
            return {}
        return {self.ranks[int(peer)]: about["rate_bps"] for peer, about in peers.items() if about.get("rate_bps")}


def watch(model: torch.nn.Module) -> StepWatch:
    """Watch which rank makes the others wait, and why; all ranks must call it, after ``enable`` if DLCP averages.

    Parameters
    ----------
    model
        A DistributedDataParallel model. Its gradients may be averaged by anything: PyTorch, a communication hook, DLCP.

    Returns
    -------
    The watch; ask for its ``verdict()``, and call its ``close`` after training.

    Raises
    ------
    TypeError
        The model is not DistributedDataParallel.
    ValueError
        There is only one rank, so nobody can wait.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"watch takes a DistributedDataParallel model, got {type(model).__name__}")
    if dist.get_world_size(model.process_group) < 2:
        raise ValueError("watch needs two ranks or more: a single one waits for nobody")
    state = next((state for _, state in model._comm_hooks if isinstance(state, State)), None)
    return StepWatch(model, state)
