# SPDX-License-Identifier: Apache-2.0
"""Clean-up of resources: at the end of with-statements, and at the exit of this process."""

import atexit
import multiprocessing
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """A resource that a with-statement closes."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ExitCallback:
    """Calls a function once when this process exits, unless cancelled. The exit of a forked child does not call it.

    Parameters
    ----------
    function
        The function to call. By then, the threads of executors have ended, but daemon threads have not.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function, self._process, self._is_due = function, os.getpid(), True
        atexit.register(self._run)
        if multiprocessing.parent_process() is not None:
            # A forked child exits with os._exit, after multiprocessing's own finalizers.
            from multiprocessing import util

            util.Finalize(None, self._run, exitpriority=0)

    @property
    def is_fork(self) -> bool:
        """Whether this process was forked since this object was made, and so lacks the parent's threads."""
        return os.getpid() != self._process

    def cancel(self) -> None:
        """Cancel the call."""
        self._is_due = False
        atexit.unregister(self._run)

    def _run(self) -> None:
        global _exiting
        if self._is_due and not self.is_fork:
            self._is_due, _exiting = False, True
            self._function()


_exiting = False


def exiting() -> bool:
    """Return whether this process is ending, and functions registered for its exit run."""
    return _exiting


def ending_error() -> BaseException | None:
    """Return the error that ends the script, for messages to other ranks; None if none is known.

    It is the one being handled by the caller's thread, such as in a ``finally`` clause, or at exit one that nothing
    caught. If a SystemExit hides an error, as in a process of multiprocessing, that error is returned.
    """
    # Before the exit, last_value may be of an earlier cell of a notebook.
    error = sys.exc_info()[1] or (getattr(sys, "last_value", None) if _exiting else None)
    while isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        if error.__context__ is None:
            break
        error = error.__context__
    return error
