# SPDX-License-Identifier: Apache-2.0
"""Python processes of ours: they import the same DLCP as this process, and end with it.

``python -m`` puts the working directory first on the path of modules. In a checkout that is another ``dlcp``, whose C
engine is not compiled and which lacks ``dlcp.sim`` and ``dlcp.controller``. So a child gets this process's path.

A process that is killed cannot end its children. So each child watches its parent: through a pipe whose other end only
the parent holds (:func:`start`), by multiprocessing's own pipe (:func:`end_with_parent`), or, if it is any program, by
the kernel (:func:`killed_with_parent`).
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
    """Return the command line that runs a module as ``python -m`` would, with this process's path of modules."""
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
        What starts it: ``subprocess.Popen``, or its like in another namespace; and its options.

    Returns
    -------
    The process, and a file descriptor to be kept open as long as it is to run: the child gets SIGTERM once it closes.
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
    """End this process of multiprocessing's as soon as the process that made it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        _watch(parent.join)


def killed_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` by which the kernel kills any program with the thread that starts it.

    Only for threads that live as long as their process: a program ends with the thread that has started it.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: after it, locks may be held by threads that are gone
    parent = os.getpid()

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which has ended already, before the kernel was asked
            os._exit(128 + signal.SIGKILL)

    return ask_the_kernel


def run_child(module: str, lifeline: int | None) -> None:
    """Be a child: run a module as the main one, and watch a pipe's end, if there is one, for its parent's end."""
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
        _watch(lambda: os.read(lifeline, 1))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _code(module: str, lifeline: int | None) -> str:
    # An empty word means the working directory, and would mean another one there.
    path = [str(Path(place).absolute()) for place in sys.path]
    return f"import sys; sys.path[:] = {path!r}; from dlcp.children import run_child; run_child({module!r}, {lifeline})"


def _watch(wait: Callable[[], object]) -> None:
    """End this process once ``wait`` returns: politely, so that it can clean up, then by force."""

    def end_self() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE_S)  # the deadline itself: nothing else tells that the process hangs
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_self, name="dlcp-parent", daemon=True).start()
