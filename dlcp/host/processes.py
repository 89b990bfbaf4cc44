# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine, which import the same DLCP as this process and end with it.

``python -m`` puts the working directory first on ``sys.path``. In a checkout, that directory has another ``dlcp``,
without a compiled C engine, ``dlcp.sim`` and ``dlcp.controller``. So a child gets this process's ``sys.path``.

A killed process cannot end its children. So each child watches its parent: through a pipe whose other end only the
parent holds (:func:`start`), through multiprocessing's own pipe (:func:`end_with_parent`), or, for any other program,
through the kernel (:func:`killed_with_parent`).

The processes of a job (``dlcp launch``) start together, and if one fails, all are ended. A :class:`Fork` calls a
function with PyTorch loaded, optionally in a network namespace; the demo and the benchmarks use it.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final

from dlcp.host.closing import Closing
from dlcp.host.ip import family_of, loopback
from dlcp.host.netlab import enter

_FORK_DEADLINE_S: Final = 5.0
_PATIENCE_S: Final = 10.0
"""Time for an orphan to end after SIGTERM before it is killed: enough to remove its folders."""
_PR_SET_PDEATHSIG: Final = 1
_STOP_DEADLINE_S: Final = 10.0
"""Time for processes to exit after a signal, before they are killed. Not tuned."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREEMPTION: Final = signal.SIGUSR1
"""Schedulers send it to all processes of a job before they end it; ranks of an elastic job then leave in order."""

_context = multiprocessing.get_context("forkserver")
# Ranks need these modules, which take seconds to import: a server that has imported them forks all processes.
_PRELOADED: Final = ["torch", "torch._dynamo", "torch.nn.parallel", "dlcp.torch", "sklearn.datasets"]
_context.set_forkserver_preload(_PRELOADED)
_SAFE_PATH: Final = {"PYTHONSAFEPATH": "1"}
"""Keeps Python 3.11 and later from looking for modules in the working directory first."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module as ``python -m`` would, with this process's ``sys.path``."""
    return [sys.executable, "-u", "-c", _code(module, None), *arguments]


def start(
    module: str, *arguments: str, popen: Callable[..., "subprocess.Popen[Any]"] = subprocess.Popen, **options: Any
) -> "tuple[subprocess.Popen[Any], int]":
    """Start a module that ends with this process, however this process ends.

    Parameters
    ----------
    module, arguments
        As for ``python -m``.
    popen, options
        The function that starts it, ``subprocess.Popen`` or one for another namespace, and its options.

    Returns
    -------
    The process, and a file descriptor. Keep it open while the child should run: the child gets SIGTERM once it closes.
    """
    reading, writing = os.pipe()
    try:
        argv = [sys.executable, "-c", _code(module, reading), *arguments]
        return popen(argv, pass_fds=(reading,), **options), writing
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)


def end_with_parent() -> None:
    """End this ``multiprocessing`` child as soon as its parent has exited."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        _end_with(parent.sentinel)


def killed_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes the kernel kill the started program when the starting thread ends.

    Use it only from threads that live as long as their process.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: after it, vanished threads may hold locks
    parent = os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(128 + signal.SIGKILL)

    return ask_the_kernel


def run_child(module: str, lifeline: int | None) -> None:
    """Run a module as ``__main__`` in a child, and end the child when the pipe ``lifeline``, if any, closes."""
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
        _end_with(lifeline)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _code(module: str, lifeline: int | None) -> str:
    # An empty entry means the working directory, which may be another one in the child.
    path = [str(Path(place).absolute()) for place in sys.path]
    return (
        f"import sys; sys.path[:] = {path!r}; "
        f"from dlcp.host.processes import run_child; run_child({module!r}, {lifeline})"
    )


def _end_with(pipe: int) -> None:
    """End this process once the other end of a pipe closes: with SIGTERM, so that it can clean up, then with SIGKILL.

    The kernel sends SIGTERM, because a thread cannot while the main thread is in C code that keeps the GIL: PyTorch's
    ``FileStore`` keeps it for minutes if its folder is gone. Where Python handles SIGTERM, that has to end first.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], timeout=0):  # closed before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)

    def kill() -> None:
        wait([pipe])
        time.sleep(_PATIENCE_S)  # the deadline itself: nothing else would detect a hang
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name="dlcp-parent", daemon=True).start()


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a process and reap it: with SIGTERM, and with SIGKILL if it still runs after ``patience_s`` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


# Forks ----------------------------------------------------------------------------------------------------------------


def _start_server() -> None:
    """Start the fork server, unless it runs, so that it imports the same DLCP as this process.

    Raises
    ------
    ValueError
        Its socket cannot be created in the folder for temporary files.
    """
    if sys.version_info < (3, 11) and Path("dlcp").is_dir():
        # The server would import dlcp from the working directory. Forks import it later, with this process's sys.path.
        _context.set_forkserver_preload([name for name in _PRELOADED if not name.startswith("dlcp")])
    before = {name: os.environ.get(name) for name in _SAFE_PATH}
    os.environ.update(_SAFE_PATH)
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise ValueError(
            f"cannot create the fork server's socket in the folder for temporary files: {error}; if the path "
            f"{tempfile.gettempdir()} is long, set TMPDIR to a shorter one"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Fork(Closing):
    """A process that calls ``function(channel, *arguments)``, forked from a server that has PyTorch loaded.

    Parameters
    ----------
    name
        For messages.
    function, arguments
        An importable function, and picklable arguments.
    namespace
        Path of the network namespace to run in; None for this process's own.
    environment
        Variables to set.

    Attributes
    ----------
    channel
        The parent's end of the channel.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        arguments: Sequence[Any] = (),
        *,
        namespace: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.channel, theirs = _context.Pipe()
        target = (function, tuple(arguments), namespace, dict(environment or {}), theirs)
        self._process = _context.Process(target=_call, args=target, name=name, daemon=True)
        _start_server()
        self._process.start()
        theirs.close()

    def status(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.exitcode

    def join(self, timeout_s: float) -> int | None:
        """Wait up to ``timeout_s`` seconds for its end; return its exit status, or None if it still runs."""
        self._process.join(max(0.0, timeout_s))
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM."""
        self._process.terminate()

    def close(self) -> None:
        """Close the channel, and kill the process if it still runs. For a clean exit, terminate and join it before."""
        self.channel.close()
        self._process.kill()
        self._process.join()


def _call(
    function: Callable[..., None],
    arguments: Sequence[Any],
    namespace: str | None,
    environment: Mapping[str, str],
    channel: Connection,
) -> None:
    """Call a function in this newly forked process, which has one thread."""
    if namespace is not None:
        enter(namespace)
    end_with_parent()
    for name, value in _SAFE_PATH.items():
        if os.environ.get(name) == value and name not in environment:
            del os.environ[name]  # set for the server only: a user's script needs its own folder on sys.path
    os.environ.update(environment)
    function(channel, *arguments)


Fact = dict[str, Any]
"""A report to the parent, as JSON. The parent keeps the keys ``error`` and ``report``, and passes every fact on."""


def send_fact(channel: Connection, fact: Fact) -> None:
    """Report a fact to the parent process, as JSON.

    A pickle could make the parent import PyTorch (whose version is a class of its own). On a busy machine that import
    blocks the thread that reads the reports for seconds.
    """
    channel.send_bytes(json.dumps(fact).encode())


class ReportingFork(Fork):
    """A fork that reports facts to its parent. The first one sets ``ready``.

    Parameters
    ----------
    name
        Its name in messages.
    function, arguments, placement
        As for :class:`Fork`, with ``namespace`` and ``environment``.
    on_fact
        Called with each fact that it reports, on a reader thread.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        arguments: Sequence[Any],
        *,
        on_fact: Callable[[Fact], None] | None = None,
        **placement: Any,
    ) -> None:
        super().__init__(name, _reporting, (function, *arguments), **placement)
        self.ready = threading.Event()
        self._report: Any = None
        self._errors = ""
        self._on_fact = on_fact
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                fact: Fact = json.loads(self.channel.recv_bytes())
                self._errors += fact.get("error", "")
                self._report = fact.get("report", self._report)
                self.ready.set()
                if self._on_fact:
                    self._on_fact(fact)

    def start_at(self, start_s: float) -> None:
        """Send it the start time of its work, by the monotonic clock."""
        self.channel.send(start_s)

    def errors(self) -> str:
        """Return the errors it reported; the last 2000 characters."""
        return self._errors[-2000:].strip()

    def finish(self, timeout_s: float) -> Any:
        """Wait for the process to end; return its report, or None."""
        self.join(timeout_s)
        self._thread.join(_FORK_DEADLINE_S)
        return self._report

    def stop(self) -> Any:
        """Terminate it, and return its report or None."""
        self.terminate()
        return self.finish(_FORK_DEADLINE_S)

    def close(self) -> None:
        """Terminate it; kill it if it does not end."""
        self.stop()
        super().close()


def _reporting(channel: Connection, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function; report its exception as an error, and exit with status 1."""
    try:
        function(channel, *arguments)
    except Exception:
        send_fact(channel, {"error": traceback.format_exc()})
        raise SystemExit(1) from None


# Jobs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The placement of a job on machines.

    Parameters
    ----------
    here, nodes, node
        Number of processes per machine, number of machines, and index of this machine.
    host, port
        Address of the store, which rank 0 serves, or the launcher of an elastic job.
    """

    here: int
    nodes: int
    node: int
    host: str
    port: int

    @classmethod
    def local(cls, ranks: int) -> "JobLayout":
        """Return the layout of a job on this machine alone, whose store gets a port that is free now."""
        host = loopback()
        with socket.socket(family_of(host).number) as probe:
            probe.bind((host, 0))
            return cls(ranks, 1, 0, host, probe.getsockname()[1])

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables with a process's rank and rendezvous address, under torchrun's names."""
        return {
            "RANK": str(self.node * self.here + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.nodes * self.here),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


class Attempts:
    """How often a process has failed in a row, and when it may start again."""

    LIVED_S: Final = 30.0
    """A process that has lived this long had not failed at its start."""
    WAIT_S: Final = 1.0
    """Time until the second start; it doubles with each failure in a row."""
    MOST: Final = 5
    """After this many failures in a row, a process is not started again."""

    def __init__(self) -> None:
        self._failures, self._began_s = 0, 0.0

    def begin(self) -> None:
        """Note that the process starts."""
        self._began_s = time.monotonic()

    def wait_s(self) -> float | None:
        """Note that the process has failed; return the seconds until it may start again, or None for never."""
        lived = time.monotonic() - self._began_s >= self.LIVED_S
        self._failures = 1 if lived else self._failures + 1
        return self.WAIT_S * 2 ** (self._failures - 1) if self._failures < self.MOST else None


class Processes(Closing):
    """A job's processes on this machine; a context manager that leaves none behind.

    Parameters
    ----------
    layout
        The placement of the job.
    command
        The command of each process.
    environment
        Their environment, to which the variables of the layout are added.
    elastic
        Whether the others go on if one fails.
    restart
        Whether one that fails is started again then, as long as others run.

    Attributes
    ----------
    ended_by_signal
        Whether a signal to this process has ended the job.
    """

    def __init__(
        self,
        layout: JobLayout,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        elastic: bool = False,
        restart: bool = False,
    ) -> None:
        self._elastic, self._restart, self.ended_by_signal = elastic, restart, False
        self._layout, self._command, self._environment = layout, list(command), environment
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """By local rank, as all below."""
        self._over: dict[int, threading.Event] = {}
        self._attempts: dict[int, Attempts] = {}
        # From here on, because a signal that arrives between the starts of two processes must end both.
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(_signals(self._ended, [*_SIGNALS, *[_PREEMPTION] * elastic]))
        try:
            for local_rank in range(layout.here):
                self._start(local_rank)
        except BaseException:
            self.stop(signal.SIGKILL)
            self._signals.close()
            raise

    def _start(self, local_rank: int) -> None:
        if before := self._children.get(local_rank):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(before.pid, signal.SIGKILL)  # what it has left behind
            before.wait()
        variables = {**self._environment, **self._layout.environment(local_rank)}
        # In a session of its own, so that its descendants can be ended with it.
        child = subprocess.Popen(self._command, env=variables, start_new_session=True, preexec_fn=killed_with_parent())
        self._children[local_rank], over = child, threading.Event()
        self._over[local_rank] = over
        self._attempts.setdefault(local_rank, Attempts()).begin()
        threading.Thread(target=self._await, args=(local_rank, child.pid, over), daemon=True).start()

    def _await(self, local_rank: int, pid: int, over: threading.Event) -> None:
        # WNOWAIT keeps it a zombie: stop() kills its process group by number, which must not be reused before then.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        status = 0 if end is None else end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        over.set()
        self._ended.put((local_rank, status))

    def close(self) -> None:
        """End those that still run."""
        self.stop(signal.SIGTERM)
        self._signals.close()

    def run(self) -> int:
        """Wait until all have ended, one has failed that the others need, or a signal arrives.

        Returns
        -------
        The exit status of the job: 0 if all have ended so, or one of an elastic job; else that of the first failure.
        """
        failed, done = 0, False
        running, due = set(self._children), dict[int, float]()
        # If none runs any more, there is nothing to come back to, unless there is on another machine.
        while running or (due and self._layout.nodes > 1):
            try:
                local_rank, status = self._ended.get(timeout=min(due.values()) - time.monotonic() if due else None)
            except (Empty, ValueError):  # a start is due, or overdue
                local_rank = min(due, key=lambda each: due[each])
                del due[local_rank]
                self._start(local_rank)
                running.add(local_rank)
                continue
            running.discard(local_rank)
            if local_rank < 0 and status == _PREEMPTION:
                self._restart = False
                for child in self._children.values():
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(_PREEMPTION)
                continue
            if local_rank < 0:
                self.ended_by_signal = True
                self.stop(signal.Signals(status))
                return 128 + status
            if status:
                failed = failed or (status if status > 0 else 128 - status)
                wait_s = self._attempts[local_rank].wait_s() if self._restart and not done else None
                self._report(local_rank, status, wait_s)
                if not self._elastic:
                    self.stop(signal.SIGTERM)
                    break
                if wait_s is not None:
                    due[local_rank] = time.monotonic() + wait_s
            if not status:
                done = True
                due.clear()
        if self._elastic and not done and self._layout.nodes == 1:
            print("dlcp launch: no process is left, so the job ends", file=sys.stderr, flush=True)
        return 0 if self._elastic and done else failed

    def _report(self, local_rank: int, status: int, wait_s: float | None) -> None:
        rank = self._layout.environment(local_rank)["RANK"]
        then = "the others may go on" if self._elastic else "ending the others"
        then += f"; it starts again in {wait_s:g} s" if wait_s is not None else ""
        print(f"dlcp launch: rank {rank} {_words(status)}; {then}", file=sys.stderr, flush=True)

    def stop(self, first: signal.Signals) -> None:
        """End the running processes and their descendants: with ``first``, and after a deadline with SIGKILL."""
        for number in (first, signal.SIGKILL):
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)
            end_s = time.monotonic() + _STOP_DEADLINE_S
            for over in self._over.values():
                over.wait(max(0.0, end_s - time.monotonic()))
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_DEADLINE_S)
        self._children.clear()
        self._over.clear()


@contextlib.contextmanager
def _signals(queue: "SimpleQueue[tuple[int, int]]", numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Put these signals to this process into a queue, as ``(-1, number)``."""

    def note(number: int, _: FrameType | None) -> None:
        queue.put((-1, number))

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _words(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
