# SPDX-License-Identifier: Apache-2.0
"""What has to be closed in the end: objects in with-statements, what a process leaves open, and processes."""

import atexit
import multiprocessing
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """Something to be used in a with-statement, and closed at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ExitCallback:
    """Calls a function when this process ends, once, unless it is cancelled. A fork's end calls nothing.

    Parameters
    ----------
    function
        What to call. The interpreter's threads of executors have ended by then, daemon threads have not.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function, self._process, self._is_due = function, os.getpid(), True
        atexit.register(self._run)
        if multiprocessing.parent_process() is not None:
            # A child that was forked ends by os._exit, after what multiprocessing itself has to call.
            from multiprocessing import util

            util.Finalize(None, self._run, exitpriority=0)

    @property
    def is_fork(self) -> bool:
        """Whether this is another process, forked since: it has no threads of those that were there."""
        return os.getpid() != self._process

    def cancel(self) -> None:
        """Let the process end without the call."""
        self._is_due = False
        atexit.unregister(self._run)

    def _run(self) -> None:
        if self._is_due and not self.is_fork:
            self._is_due = False
            self._function()


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a process and reap it: politely, and by force if it still runs after ``patience_s`` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
