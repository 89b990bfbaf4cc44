# SPDX-License-Identifier: Apache-2.0
"""Python child processes, which import the same DLCP as this process and end with it.

``python -m`` puts the working directory first on ``sys.path``. In a checkout, that directory has another ``dlcp``,
without a compiled C engine, ``dlcp.sim`` and ``dlcp.controller``. So a child gets this process's ``sys.path``.

A killed process cannot end its children. So each child watches its parent: through a pipe whose other end only the
parent holds (:func:`start`), through multiprocessing's own pipe (:func:`end_with_parent`), or, for any other program,
through the kernel (:func:`killed_with_parent`).
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_PATIENCE_S: Final = 10.0
"""Time for an orphan to end after SIGTERM before it is killed: enough to remove its folders."""
_PR_SET_PDEATHSIG: Final = 1


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
        _watch(parent.join)


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
        _watch(lambda: os.read(lifeline, 1))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _code(module: str, lifeline: int | None) -> str:
    # An empty entry means the working directory, which may be another one in the child.
    path = [str(Path(place).absolute()) for place in sys.path]
    return f"import sys; sys.path[:] = {path!r}; from dlcp.children import run_child; run_child({module!r}, {lifeline})"


def _watch(wait: Callable[[], object]) -> None:
    """End this process once ``wait`` returns: with SIGTERM, so that it can clean up, then with SIGKILL."""

    def end_self() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE_S)  # the deadline itself: nothing else would detect a hang
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_self, name="dlcp-parent", daemon=True).start()
