# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, and what they say."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from dlcp.closing import end

Fact = dict[str, Any]
"""What a worker reports: plain values, that JSON can hold."""
STOP_DEADLINE_S = 5.0

_context = multiprocessing.get_context("forkserver")
# Every worker needs these, and they take seconds to import: a server that has them forks the workers of all runs.
_context.set_forkserver_preload(["dlcp.demo.worker", "torch._dynamo"])


def send_fact(channel: Connection, fact: Fact) -> None:
    """Report a fact to whoever started this worker.

    As JSON: a pickle may hold what takes PyTorch to read (its version is a class of its own), and loading that holds up
    the reader of all reports for seconds on a busy machine.
    """
    channel.send_bytes(json.dumps(fact).encode())


class Running(Protocol):
    """A process of a run."""

    name: str
    ready: threading.Event

    def tell(self, start_s: float) -> None:
        """Tell it when the run starts, on the monotonic clock."""

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""

    def said(self) -> str:
        """Return what it said went wrong."""

    def stop(self) -> None:
        """End it, politely first."""


class Program:
    """A program that prints a line when it is ready, and may read the start of the run from its standard input.

    Parameters
    ----------
    name
        For messages.
    popen
        Starts it where it belongs.
    argv
        What to give to Python.
    """

    def __init__(self, name: str, popen: Callable[..., "subprocess.Popen[str]"], argv: Sequence[str]) -> None:
        self.name = name
        self.ready = threading.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._child = popen([sys.executable, *argv], text=True, **pipes)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._child.stdout
        for _ in self._child.stdout:
            self.ready.set()

    def tell(self, start_s: float) -> None:
        """Tell it when the run starts, on the monotonic clock."""
        assert self._child.stdin
        self._child.stdin.write(f"{start_s!r}\n")
        self._child.stdin.flush()

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._child.poll()

    def said(self) -> str:
        """Return the end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-2000:].strip()

    def stop(self) -> None:
        """End it, politely first."""
        end(self._child, STOP_DEADLINE_S)
        self._thread.join(STOP_DEADLINE_S)
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                stream.close()


class Worker:
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
        on_fact: Callable[[Fact], None],
    ) -> None:
        self.name = name
        self.ready = threading.Event()
        self.report: Fact | None = None
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
            self.report = fact.get("report", self.report)
            self._on_fact(fact)

    def tell(self, start_s: float) -> None:
        """Tell it when the run starts, on the monotonic clock."""
        self._channel.send(start_s)

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._child.exitcode

    def said(self) -> str:
        """Return what it said went wrong."""
        return self._error

    def finish(self, timeout_s: float) -> Fact | None:
        """Wait for its end and return its report."""
        self._child.join(timeout_s)
        self._thread.join(STOP_DEADLINE_S)
        return self.report

    def stop(self) -> None:
        """End it, politely first."""
        if self._child.is_alive():
            self._child.terminate()
            self._child.join(STOP_DEADLINE_S)
            if self._child.is_alive():
                self._child.kill()
                self._child.join()
        self._channel.close()


def _work(namespace: str | None, environment: dict[str, str], arguments: list[str], channel: Connection) -> None:
    """Run a worker in this process, which has just been forked."""
    from dlcp.demo import worker
    from dlcp.switch.namespace import enter

    if namespace is not None:
        enter(namespace)
    os.environ.update(environment)
    sys.exit(worker.main(arguments, channel))
