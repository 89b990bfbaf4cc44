# SPDX-License-Identifier: Apache-2.0
"""A shell in a fresh copy of the checkout, on a node of its own, as a new reader has it."""

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.nodes import Nodes, kill
from tests.docs.pages import ROOT
from tests.train.preloaded import write_programs
from tests.waiting import until

LEFT_BEHIND = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "out", "dist")
"""Files that a new checkout lacks. The compiled engine is copied, because installing DLCP would build it."""
READER = Path(__file__).with_name("reader")
"""Files of a reader's own."""
HOSTS = "10.0.0.1 page node1 node2 node9\n"
"""The node has the address and the names of all machines of a page."""
MOUNTS = """
mount --bind {environment} {copy}/.venv && mount -o remount,bind,ro {copy}/.venv && mount --rbind {copy} {root} &&
cd {root} && exec bash
"""
"""The copy takes the checkout's place, with its environment, which nothing may change."""
ENTERS = 100
"""A reader answers each question with Enter."""


class Shell(contextlib.ExitStack):
    """Bash on a node, in a copy of the checkout that is at the checkout's path; a context manager.

    Parameters
    ----------
    folder
        For the copy, the home and the output.
    python
        Words that stand for Python, to begin sooner (:class:`tests.train.preloaded.Preloaded`); None for the real one.
    """

    def __init__(self, folder, python):
        super().__init__()
        self.log = folder / "log"
        self._folder, self._python, self._serving = folder, python, set()
        # Share Numba's cache, so that each page does not compile the kernels again.
        self._cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache") if python else ""

    def __enter__(self):
        try:
            self._start(*(self._folder / name for name in ("copy", "home", "programs")))
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, copy, home, programs):
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        shutil.copytree(READER, copy, ignore=shutil.ignore_patterns("__init__.py"), dirs_exist_ok=True)
        for made in (copy / ".venv", home, programs):
            made.mkdir()
        if self._python:
            write_programs(self._python, programs)
        if not shutil.which("sudo"):
            (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
            (programs / "sudo").chmod(0o755)
        nodes = self.enter_context(Nodes(self._folder, {"page": {"eth0": HOSTS.split()[0]}}, lambda _: HOSTS))
        terminal, self._stdin = pty.openpty()
        self._answers, told = os.pipe()
        for descriptor in (terminal, self._stdin, self._answers, told):
            self.callback(os.close, descriptor)
        os.write(terminal, b"\n" * ENTERS)
        self._end = f"; echo $? >&{told}\n"
        with self.log.open("w") as log:
            self._bash = subprocess.Popen(
                [nodes.file("page"), "sh", "-c", MOUNTS.format(environment=sys.prefix, root=ROOT, copy=copy)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[told, self._stdin],
                env={
                    "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "HOME": str(home),
                    "XDG_CACHE_HOME": self._cache,
                    "LANG": "C.UTF-8",
                },
                text=True,
            )
        self.callback(kill, self._bash)

    def run(self, command, limit_s):
        """Run a command and return its exit status; fail after ``limit_s``."""
        self._bash.stdin.write(f"eval {shlex.quote(command)} <&{self._stdin}{self._end}")
        self._bash.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], limit_s)
        assert ready, f"not done after {limit_s} s: {command}\n{self.tail()}"
        return int(os.read(self._answers, 100) or 1)

    def serve(self, command, limit_s):
        """Start a command that runs until it is stopped, in place of an earlier one of the same program.

        It is ready when it has printed something.
        """
        name = "_".join(re.findall(r"[a-z]+", command)[:2])
        output = self.log.with_name(name)
        if name in self._serving:
            self.run(f"kill ${name}; wait ${name}", limit_s)
        output.write_text("")
        self.run(f"{command} >{output} 2>&1 & {name}=$!", limit_s)
        until(output.read_text, f"{command} prints nothing", limit_s)
        self._serving.add(name)

    def ended(self):
        """Return which of the commands that serve do not run any more."""
        return [name for name in self._serving if self.run(f"kill -0 ${name}", 10)]

    def tail(self):
        """Return the end of what commands have printed."""
        return self.log.read_text()[-3000:]
