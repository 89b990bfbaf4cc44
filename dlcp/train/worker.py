# SPDX-License-Identifier: Apache-2.0
"""One rank of ``dlcp train``: run the script as if it had been started directly, with DLCP switched on.

torchrun starts it as ``dlcp.train.worker script.py ARGUMENTS`` or ``... -m module ARGUMENTS``. At the end it reports to
the launcher.
"""

import contextlib
import faulthandler
import functools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dlcp.torch
from dlcp.torch.hook import sparse_parameter, unsupported
from dlcp.torch.watching import StepWatch, note_collectives
from dlcp.train.launcher import Report, WorkerTask, report_path, write_report
from dlcp.train.measurement import Measurement, MeasurementDoneError

NOTE_EVERY_S: Final = 1.0
"""Interval between notes, which tell the launcher about a rank whose process is killed. As often as snapshots."""


class Model:
    """A model that the script trains, with DLCP's state.

    Parameters
    ----------
    model
        The wrapped or sharded model.
    state
        DLCP's state; None if DLCP does not average its gradients.
    note
        How DLCP was switched on, or why it stays off.

    Attributes
    ----------
    watch
        Compares the ranks that train it; None if they are not compared.
    """

    def __init__(self, model: torch.nn.Module, state: dlcp.torch.State | None, note: str) -> None:
        self.wrapped = model
        self.state = state
        self.note = note
        self.watch: StepWatch | None = None
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        self.name = type(plain).__name__
        self.parameters = sum(parameter.numel() for parameter in plain.parameters())

    def close(self, reason: str | None) -> None:
        """Leave the session, if the script has not; with a ``reason``, report to the others that this rank gives up."""
        if self.watch:
            self.watch.close(reason)
        if self.state:
            self.state.close(reason)

    def report(self, *, final: bool = True) -> dict[str, Any]:
        """Return its report for the launcher; ``final`` is False while it still trains."""
        state = self.state
        return {
            "model": self.name,
            "parameters": self.parameters,
            "note": self.note,
            "on": state is not None,
            "steps": state.step if state else 0,
            "loss_bound": state.options.bound().ratio if state else None,
            "fallback": (state.reason or None) if state else None,
            "route": state.route if state else "",
            "framework_steps": state.framework_steps if state else 0,
            "local_peers": state.session.local_peers if state and state.session else 0,
            "group_ranks": list(state.group_ranks) if state else None,
            "refused": dict(state.endpoint.connection.refused) if state and state.endpoint else {},
            "ledger": state.ledger.summary() if state else None,
            "last_step": _last_step(state) if state and final else None,
            "watched": self.watch.overall() if self.watch else None,
        }


def _last_step(state: dlcp.torch.State) -> dict[str, int]:
    """Return the last step's packets, and how many of them were lost, with no later step to send them."""
    records = state.ledger.of_step(state.step - 1)
    left_over = sum(record.lost for record in records)
    return {"packets": sum(record.packets for record in records), "left_over": left_over}


class ScriptSession:
    """A context manager around the script of one rank.

    Parameters
    ----------
    task
        The launcher's task.
    """

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        self.models: list[Model] = []
        self._process = os.getpid()
        self._measurement: Measurement | None = None
        self._not_measured: set[str] = set()
        """The reasons why models are not measured."""
        self._unwatched: list[Model] = []
        """Models whose ranks cannot be compared."""
        self._hooking = False
        self._restarts = 0
        self._local_rank = int(os.environ.get("LOCAL_RANK", _rank()))
        """Names the report. The script may change the variable, for example to make each rank use its only GPU."""
        self._noting: threading.Thread | None = None
        self._over = threading.Event()
        self._failed_at_s: float | None = None
        self._traceback = ""
        self._watch = watch(self.ready, self.hooked, dlcp.torch.BACKEND if task.backend else None)

    def __enter__(self) -> "ScriptSession":
        if self.task.backend:
            _say(f"every process group of the script uses the backend {dlcp.torch.BACKEND}")
        if self.task.reports:
            self._begin_report(Path(self.task.reports))
        note_collectives()
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(None, None, None)
        if os.getpid() != self._process:  # a fork of the script has ended, not the rank, which reports later
            return
        failure = _failure(error)
        # Before models are closed, which may take longer than the other ranks need to notice that this one has left.
        self._failed_at_s = time.time() if failure else None
        self._over.set()
        if self._noting:
            self._noting.join()
        if failure and not isinstance(error, SystemExit):
            self._traceback = "".join(traceback.format_exception(error))
        if self._measurement:
            self._measurement.close(failure)
        for model in self.models:
            model.close(failure)
        self._write_report(failure)

    def _write_report(self, failure: str | None, *, final: bool = True) -> None:
        """Write the report. A full disk must not fail the training, so errors are only warnings."""
        if not self.task.reports:
            return
        folder = Path(self.task.reports)
        try:
            write_report(folder, self._report(failure, final))
        except OSError as error:
            print(f"dlcp: warning: rank {_rank()} cannot write its report: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                report_path(folder, self._local_rank).unlink()  # an earlier one is out of date

    def _begin_report(self, folder: Path) -> None:
        """Write the first note: a report that stays if this process is killed before it can write another one."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # no earlier report, or a damaged one
            self._restarts = json.loads(report_path(folder, self._local_rank).read_text())["restarts"] + 1
        self._write_report(None, final=False)

    def _note(self) -> None:
        """Write notes while models train. A failed one leaves the last; the final report's failure is a warning."""
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the training thread changes what is read
                write_report(Path(self.task.reports), self._report(None, final=False))
            if self._over.wait(NOTE_EVERY_S):
                return

    def ready(self, model: torch.nn.Module) -> None:
        """Switch DLCP on, or measure a step; called on all ranks, see :func:`watch`."""
        known = next((entry for entry in self.models if entry.wrapped is model), None)
        if self.task.measure_steps:
            if not isinstance(model, DistributedDataParallel):
                note = "FSDP2 models cannot be measured, only those of DistributedDataParallel"
                self._enter(Model(model, None, note))
                return
            if known and known.note in self._not_measured:
                return
            if known:
                raise SystemExit(f"dlcp: cannot measure: {known.note}")
            if self._measurement is None:
                # The measuring hook does not support sparse gradients either.
                if why := unsupported(model) or sparse_parameter(model.module):
                    self._not_measured.add(why)
                    self._enter(Model(model, None, why))
                    return
                with self._own_hook():
                    self._measurement = Measurement(model, self.task.measure_steps)
            if model.require_backward_grad_sync:
                self._measurement.before_step(model)
            return
        if known is None:
            known = self._watch_only(model) if self.task.watch_only else self._switch_on(model)
        if known.watch is None and known not in self._unwatched:
            self._compare(known)

    def hooked(self, model: torch.nn.Module, state: object) -> None:
        """Record what averages a model's gradients; called before a hook is registered, or when FSDP2 uses DLCP."""
        if self._hooking or (self.task.watch_only and not isinstance(state, dlcp.torch.State)):
            return
        if isinstance(state, dlcp.torch.State):
            self._enter(Model(model, state, "switched on by the script"))
        else:
            why = isinstance(model, DistributedDataParallel) and unsupported(model)  # DDP may have registered it
            if all(entry.wrapped is not model for entry in self.models):
                self._enter(Model(model, None, why or "the script registers a communication hook of its own"))

    def _watch_only(self, model: torch.nn.Module) -> Model:
        if isinstance(model, DistributedDataParallel):
            return self._enter(Model(model, None, f"averaged by {dist.get_backend(model.process_group)}"))
        return self._enter(Model(model, None, "FSDP2 models cannot be watched, only those of DistributedDataParallel"))

    def _compare(self, entry: Model) -> None:
        """Compare the ranks of a model from its first step on; all of them call it."""
        model = entry.wrapped
        if (
            isinstance(model, DistributedDataParallel)
            and not model._join_config.enable  # its ranks make different numbers of steps
            and dist.get_world_size(model.process_group) > 1
        ):
            entry.watch = StepWatch(model, entry.state)
        else:
            self._unwatched.append(entry)

    def _switch_on(self, model: torch.nn.Module) -> Model:
        options = dlcp.torch.Options()
        try:
            with self._own_hook():
                state = dlcp.torch.enable(model, options)
        except ValueError as error:  # the same on all ranks: DLCP does not support the model
            return self._enter(Model(model, None, str(error)))
        return self._enter(Model(model, state, "switched on by dlcp train"))

    @contextlib.contextmanager
    def _own_hook(self) -> Iterator[None]:
        """Mark hooks registered inside as DLCP's, not the script's."""
        self._hooking = True
        try:
            yield
        finally:
            self._hooking = False

    def _enter(self, entry: Model) -> Model:
        self.models.append(entry)
        if self._noting is None and self.task.reports:
            self._noting = threading.Thread(target=self._note, name="dlcp-notes", daemon=True)
            self._noting.start()
        what = f"{entry.name} ({entry.parameters:,} parameters)"
        if self.task.watch_only and isinstance(entry.wrapped, DistributedDataParallel):
            _say(f"watches {what}, {entry.note}")
        elif entry.state is None:
            _say(f"leaves {what} alone: {entry.note}")
        return entry

    def _report(self, failure: str | None, final: bool) -> Report:
        return {
            "rank": _rank(),
            "local_rank": self._local_rank,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "restarts": self._restarts,
            "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "final": final,
            "error": failure,
            "failed_at_s": self._failed_at_s,
            "traceback": self._traceback,
            "log": _log(),
            "backend": dlcp.torch.BACKEND if self.task.backend else None,
            "models": [model.report(final=final) for model in self.models],
            "measured": self._measurement.report() if self._measurement else None,
        }


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _log() -> str:
    """Return the file that torchrun writes this rank's standard error to; ``""`` without its ``--log-dir``."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent / "stderr.log"
    return str(file) if file.is_file() else ""


def _say(text: str) -> None:
    """Print a line on rank 0 only."""
    if _rank() == 0:
        print(f"dlcp: {text}", file=sys.stderr, flush=True)


def _failure(error: BaseException | None) -> str | None:
    """Return what ended the script, in one line; None if it succeeded."""
    if error is None or isinstance(error, MeasurementDoneError):
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit status {error.code}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


WhenReady = Callable[[torch.nn.Module], None]
WhenHooked = Callable[[torch.nn.Module, object], None]
_Method = Callable[..., Any]


@contextlib.contextmanager
def watch(ready: WhenReady, hooked: WhenHooked, backend: str | None = None) -> Iterator[None]:
    """Intercept an unchanged script's use of DistributedDataParallel, ``fully_shard`` and ``init_process_group``.

    DLCP is not switched on when a model is wrapped, but at its first forward pass with gradients: until then the script
    may register its own hook, or shard more modules. All ranks take part in that pass, so all switch DLCP on.

    Parameters
    ----------
    ready
        Called before every forward pass with gradients of a wrapped model, and before the first one of a sharded one.
    hooked
        Called before a communication hook is registered, with the model and the hook's state; and when DLCP has been
        switched on in an FSDP2 model.
    backend
        If given, the backend for ``init_process_group``, which overrides the script's.
    """
    with contextlib.ExitStack() as stack:
        replacing = functools.partial(_replacing, stack)

        @replacing(DistributedDataParallel, "__init__")
        def _(original: _Method, model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            original(model, *arguments, **named)
            before = functools.partial(_before_forward, ready)
            # Exclude it from compilation: it does collective work, once. The compiler's API has no annotations.
            model.register_forward_pre_hook(torch.compiler.disable(before))  # type: ignore[no-untyped-call]

        @replacing(DistributedDataParallel, "register_comm_hook")
        def _(original: _Method, model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            hooked(model, state)
            original(model, state, hook)

        @replacing(DistributedDataParallel, "_register_builtin_comm_hook")
        def _(original: _Method, model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            hooked(model, None)
            original(model, *arguments, **named)

        @replacing(dlcp.torch, "enable")
        def _(original: _Method, model: torch.nn.Module, *arguments: Any, **named: Any) -> object:
            state = original(model, *arguments, **named)
            if not isinstance(model, DistributedDataParallel):
                hooked(model, state)
            return state

        with contextlib.suppress(ImportError):  # if PyTorch has it elsewhere, scripts must call dlcp.torch.enable
            from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

            @replacing(FSDPState, "_lazy_init")
            def _(original: _Method, state: Any) -> None:
                first = state._is_root is None
                original(state)
                if first and not isinstance(state._modules[0], DistributedDataParallel):
                    ready(state._modules[0])

        if backend:

            @replacing(dist, "init_process_group")
            def _(original: _Method, _: str | None = None, *arguments: Any, **named: Any) -> None:
                original(backend, *arguments, **named)

        yield


def _replacing(stack: contextlib.ExitStack, owner: Any, name: str) -> Callable[[_Method], None]:
    """Return a decorator: until the stack is closed, a function replaces another one, which it gets first."""

    def replace(function: _Method) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        stack.callback(setattr, owner, name, original)
        setattr(owner, name, replacement)

    return replace


def _before_forward(ready: WhenReady, model: DistributedDataParallel, arguments: object) -> None:
    """Call ``ready`` before a pass for training; pipelines run all of them under ``no_sync``."""
    if torch.is_grad_enabled():
        ready(model)


def main(argv: Sequence[str]) -> None:
    """Run a script or a module to its end. Its exceptions, including ``SystemExit``, propagate."""
    if not faulthandler.is_enabled():  # prints the stacks of a rank that crashes, or hangs in C
        faulthandler.enable()
    with ScriptSession(WorkerTask.from_environment()):
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path[0] = str(Path.cwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
