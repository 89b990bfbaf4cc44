# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, which join a group over a store of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import dlcp.session
from dlcp.session import Options
from dlcp.session.serving import SessionServer
from tests.transport.free_ports import free_port

LIMIT_S = 40
PROCESSES_LIMIT_S = 100


def on_ranks(size, function, *, only=None):
    """Run ``function(rank)`` on every rank at once; return what each returned or raised, by rank."""
    ranks = list(only if only is not None else range(size))
    with ThreadPoolExecutor(len(ranks)) as pool:
        running = {rank: pool.submit(function, rank) for rank in ranks}
        found = {}
        for rank, future in running.items():
            error = future.exception(LIMIT_S)
            found[rank] = error if error is not None else future.result()
    return found


def together(size, function, options=None):
    """Let ranks join and run ``function(group)``; return the results by rank, or raise the first error.

    ``options`` are those of all ranks, or a list with those of each; by default packets go through sockets.
    """
    master = f"127.0.0.1:{free_port()}"

    def one(rank):
        mine = options[rank] if isinstance(options, list) else options or Options(shared_memory=False)
        with dlcp.session.join(mine, rank=rank, size=size, master=master) as group:
            return function(group)

    found = on_ranks(size, one)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[rank] for rank in range(size)]


@contextmanager
def serving(report=lambda line: None, **options):
    """A parameter server as a thread of this process."""
    stopped = threading.Event()
    with SessionServer(Options(**{"bind": "127.0.0.1:0"} | options), report) as server:
        thread = threading.Thread(target=server.serve, args=(stopped,))
        thread.start()
        try:
            yield server
        finally:
            stopped.set()
            thread.join()


def start_process(rank, size, port, code, *arguments, **variables):
    """Start a rank as a process that runs some Python code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLCP_")}
    told = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    told["PYTHONFAULTHANDLER"] = 1
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**environment, **{name: str(value) for name, value in told.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends_of(processes):
    """Wait for all ranks; return each one's output and errors. Of ranks that hang, tell where."""
    end_s, hanging, ends = time.monotonic() + PROCESSES_LIMIT_S, [], []
    for rank, process in enumerate(processes):
        try:
            ends.append(process.communicate(timeout=max(0.0, end_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            hanging.append(rank)
            process.send_signal(signal.SIGABRT)  # its threads' stacks go to its errors
            ends.append(process.communicate())
    assert not hanging, f"ranks {hanging} had not ended after {PROCESSES_LIMIT_S} s: {ends}"
    return ends
