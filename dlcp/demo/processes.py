# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: programs that read and print lines, and workers that are forked with PyTorch loaded."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

from dlcp.closing import end

if TYPE_CHECKING:
    from dlcp.demo.worker import Fact

_STOP_DEADLINE_S: Final = 5.0

_context = multiprocessing.get_context("forkserver")
# Every worker needs these, and they take seconds to import: a server that has them forks the workers of all runs.
_context.set_forkserver_preload(["dlcp.demo.worker", "torch._dynamo"])


class DemoProcess(ABC):
    """A process of a run. ``ready`` is set once it has reported for the first time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = threading.Event()

    @abstractmethod
    def start_at(self, start_s: float) -> None:
        """Let the run begin for it, at a time of the monotonic clock."""

    @abstractmethod
    def status(self) -> int | None:
        """Return its exit status, None while it runs."""

    @abstractmethod
    def errors(self) -> str:
        """Return what it reported as wrong."""

    @abstractmethod
    def stop(self) -> None:
        """Terminate it; kill it if it does not end."""


class ChildProgram(DemoProcess):
    """A program that prints a line when it is ready, and may read the start of the run from its standard input.

    Parameters
    ----------
    name
        For messages.
    popen
        Starts it on its host.
    argv
        Arguments of Python.
    """

    def __init__(self, name: str, popen: Callable[..., "subprocess.Popen[str]"], argv: Sequence[str]) -> None:
        super().__init__(name)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._child = popen([sys.executable, *argv], text=True, **pipes)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._child.stdout
        for _ in self._child.stdout:
            self.ready.set()

    def start_at(self, start_s: float) -> None:
        """Write the start to its standard input."""
        assert self._child.stdin
        self._child.stdin.write(f"{start_s!r}\n")
        self._child.stdin.flush()

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._child.poll()

    def errors(self) -> str:
        """Return the end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-2000:].strip()

    def stop(self) -> None:
        """Terminate it; kill it if it does not end."""
        end(self._child, _STOP_DEADLINE_S)
        self._thread.join(_STOP_DEADLINE_S)
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                stream.close()


class WorkerProcess(DemoProcess):
    """A worker of :mod:`dlcp.demo.worker`, forked from a process that has PyTorch loaded.

    Parameters
    ----------
    name
        For messages.
    namespace
        Path of its network namespace; None for this process's.
    environment, arguments
        Variables to set, and the command line of the worker.
    on_fact
        Called with everything it reports, in a thread of its own.
    """

    def __init__(
        self,
        name: str,
        namespace: str | None,
        environment: dict[str, str],
        arguments: Sequence[str],
        on_fact: "Callable[[Fact], None] | None" = None,
    ) -> None:
        super().__init__(name)
        self._report: Fact | None = None
        self._on_fact = on_fact
        self._error = ""
        self._channel, theirs = _context.Pipe()
        self._child = _context.Process(
            target=_work, args=(namespace, environment, list(arguments), theirs), name=name, daemon=True
        )
        self._child.start()
        theirs.close()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                fact: Fact = json.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                return
            self.ready.set()
            self._error = fact.get("error", self._error)
            self._report = fact.get("report", self._report)
            if self._on_fact:
                self._on_fact(fact)

    def start_at(self, start_s: float) -> None:
        """Send it the start."""
        self._channel.send(start_s)

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._child.exitcode

    def errors(self) -> str:
        """Return the error that it reported."""
        return self._error

    def finish(self, timeout_s: float) -> "Fact | None":
        """Wait for its end and return its report."""
        self._child.join(timeout_s)
        self._thread.join(_STOP_DEADLINE_S)
        return self._report

    def stop(self) -> None:
        """Terminate it; kill it if it does not end."""
        if self._child.is_alive():
            self._child.terminate()
            self._child.join(_STOP_DEADLINE_S)
            if self._child.is_alive():
                self._child.kill()
                self._child.join()
        self._channel.close()


def _work(namespace: str | None, environment: dict[str, str], arguments: list[str], channel: Connection) -> None:
    """Run a worker in this process, which has just been forked."""
    from dlcp.demo import worker
    from dlcp.namespace import enter

    if namespace is not None:
        enter(namespace)
    os.environ.update(environment)
    sys.exit(worker.main(arguments, channel))
