# SPDX-License-Identifier: Apache-2.0
"""Real worker processes for tests: a process group over 127.0.0.1, and no way to hang.

Workers are forked from a process that has imported PyTorch once, so that starting them takes no seconds.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.transport.free_ports import free_udp_ports

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.run", "dlcp.torch", "sklearn.datasets"]
CONTEXT.set_forkserver_preload(PRELOADED)
LIMIT_S = 60
FIXED = {"DLCP_ROUTE": "dlcp", "DLCP_PRECISION": "32"}
"""Over loopback the framework may be faster, and would then be tested in DLCP's place; and averages are compared with
exact ones. Tests of the choice say otherwise."""
WAYS = {"sockets": {"DLCP_SHARED_MEMORY": "0"}, "memory": {"DLCP_SHARED_MEMORY": "1"}}
"""How workers exchange packets, as the environment of :func:`launch` says: by default through sockets."""


@dataclass
class Worker:
    """A worker's view of itself."""

    rank: int
    count: int
    port: int
    environment: dict[str, str]

    def options(self, **fields):
        from dlcp.torch import Options

        shared = os.environ["DLCP_SHARED_MEMORY"] == "1"
        own = {"bind": f"127.0.0.1:{self.port}", "shared_memory": shared, "route": os.environ["DLCP_ROUTE"]}
        return Options(**own | fields)


@dataclass
class Outcome:
    """How a worker ended: with a ``value``, an ``error`` (its traceback), or only an exit status."""

    value: Any = None
    error: str | None = None
    exit_status: int | None = None
    seconds: float = 0.0


def _run(worker, store, function, arguments, pipe):
    gc.freeze()  # looking through all of PyTorch's objects takes half a second
    common = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **WAYS["sockets"], **FIXED}
    os.environ.update(common | worker.environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=worker.rank,
            world_size=worker.count,
            timeout=timedelta(seconds=30),
        )
        outcome = Outcome(value=function(worker, *arguments))
        pipe.send_bytes(pickle.dumps(outcome))  # whole: PyTorch's own pickling would lend out shared memory
        if dist.is_initialized():  # else the function has ended it
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(Outcome(error=traceback.format_exc())))
    pipe.close()
    os._exit(0)  # a process group whose peers are gone does not end by itself


def launch(count, function, *arguments, limit_s=LIMIT_S, ports=None, environment=None, lost=()):
    """Run ``function(worker, *arguments)`` on every rank; return their outcomes, or fail after ``limit_s``.

    Ranks in ``lost`` are not waited for. ``ports`` are those of their sockets, by default free ones.
    """
    ports = ports or free_udp_ports(count)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running, outcomes = {}, {}
        processes = []
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            worker = Worker(rank, count, ports[rank], environment or {})
            process = CONTEXT.Process(target=_run, args=(worker, Path(folder) / "store", function, arguments, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            running[ours] = rank
        try:
            while set(running.values()) - set(lost):
                ready = wait(list(running), max(0.0, began_s + limit_s - time.monotonic()))
                if not ready:
                    missing = sorted(running.values())
                    raise TimeoutError(f"ranks {missing} were not done after {limit_s} s; the others: {outcomes}")
                for pipe in ready:
                    rank = running.pop(pipe)
                    try:
                        outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        processes[rank].join(5)
                        outcomes[rank] = Outcome(exit_status=processes[rank].exitcode)
                    outcomes[rank].seconds = time.monotonic() - began_s
        finally:
            for process in processes:
                process.join(0 if running else 1)
                if process.is_alive():
                    process.kill()
                    process.join(5)
    return [outcomes.get(rank) for rank in range(count)]


def values(outcomes):
    """The results of all ranks; raise if one has none."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error or outcome.exit_status is not None:
            raise AssertionError(f"rank {rank} failed (exit status {outcome.exit_status}):\n{outcome.error}")
    return [outcome.value for outcome in outcomes]


def start_python(words, environment, output, errors=None, prepare=None, *, tears_down=True):
    """Start ``python words``, but from a process that has imported PyTorch; write what it prints to files.

    Parameters
    ----------
    words
        As :func:`run_as_interpreter` takes them.
    output, errors
        Paths for standard output and standard error; by default the same one.
    prepare
        An importable function that the process calls first.
    tears_down
        See :func:`run_as_interpreter`.
    """
    process = CONTEXT.Process(target=_run_python, args=(words, environment, output, errors, prepare, tears_down))
    process.start()
    return process


def _run_python(words, environment, output, errors, prepare, tears_down):
    gc.freeze()
    with open(output, "a") as out, open(errors or output, "a") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    if prepare:
        prepare()
    run_as_interpreter(words, environment, tears_down=tears_down)


def run_as_interpreter(words, environment, *, tears_down=True):
    """Make of this process the one that ``python words`` would be, to its end.

    The words begin with ``-c text``, ``-m module`` or a script, and the environment is a whole one. At its end it waits
    for threads and calls atexit's functions, and then tears its modules down, if ``tears_down``: that takes 0.3 s of
    processor time with PyTorch's, and ``test_leaving.py`` tests it.
    """
    os.environ.clear()
    os.environ.update(environment)
    status, kept = 0, None
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            kept = runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            kept = runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error  # as an interpreter does, too
        sys.excepthook(*sys.exc_info())
        status = 1
    # End as an interpreter does, with atexit's functions and after all threads, which multiprocessing would skip.
    if not tears_down:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    ctypes.pythonapi.Py_Exit(status)
    del kept  # until then, as a main module's variables
