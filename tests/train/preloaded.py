# SPDX-License-Identifier: Apache-2.0
"""A command that behaves as ``python`` does, wherever it is called, and does not import PyTorch: for scripts and nodes.

It is a small program, :mod:`tests.train.stand_in`. It asks a server, which has imported PyTorch, for a fork of itself
that has the caller's files, folder, environment and namespaces. The fork runs what ``python`` would run, and the small
program passes signals on to it and ends as it ends.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import shlex
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

from tests.cluster.nodes import descendants
from tests.torch.workers import CONTEXT, run_as_interpreter
from tests.train.forked import fork_ranks
from tests.waiting import until

MESSAGE_BYTES = 1 << 17
NAMESPACES = ("user", "net", "uts", "mnt")
"""In this order: what the first one allows, the others take."""


class Preloaded:
    """The server; a context manager that gives the words which stand for ``python``."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "server"
        self._process = CONTEXT.Process(target=_serve, args=(str(path),))
        self._process.start()
        until(path.exists, "the server does not begin")
        return [sys.executable, "-S", "-E", str(Path(__file__).with_name("stand_in.py")), str(path)]

    def __exit__(self, *_):
        self._process.kill()
        self._process.join(30)
        self._folder.cleanup()


def write_programs(words, folder):
    """Write ``python`` and ``dlcp`` to a folder, as programs that run with the words which stand for ``python``."""
    for name, module in (("python", ""), ("dlcp", "-m dlcp.cli")):
        program = Path(folder, name)
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} {module} "$@"\n')
        program.chmod(0o755)


def _serve(path):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"{path}.part")
        server.listen()
        os.rename(f"{path}.part", path)
        while True:
            caller, _ = server.accept()
            if not os.fork():
                server.close()
                os._exit(_stand_behind(caller))
            caller.close()


def _stand_behind(caller):
    """Start what a caller asks for, and watch over it; it does not outlive the caller."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(caller, MESSAGE_BYTES, 3)
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    caller_pid, _, _ = struct.unpack("3i", credentials)
    pid = os.fork()
    if not pid:
        _become(json.loads(message), files, caller_pid)
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([caller, ended], [], [])
        if ended in ready:
            caller.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            return 0
        number = caller.recv(MESSAGE_BYTES)
        for each in (pid,) if number else (pid, *descendants(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, int(number or signal.SIGKILL))
        if not number:
            return 1


def _become(asked, files, caller_pid):
    """Make of this process the interpreter that the caller stands for, to its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in NAMESPACES:
        if os.readlink(f"/proc/{caller_pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            entered = os.open(f"/proc/{caller_pid}/ns/{name}", os.O_RDONLY)
            if libc.setns(entered, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the caller's namespace {name}")
    words, environment, folder = asked
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(folder)
    fork_ranks()
    run_as_interpreter([word for word in words if word != "-u"], environment, tears_down=False)
