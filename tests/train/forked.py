# SPDX-License-Identifier: Apache-2.0
"""``dlcp train`` and torchrun, with ranks, forked from a process that has imported PyTorch and scikit-learn.

A rank that imports them itself takes 10 s of processor time for that, and less than one to train here. The launcher and
the ranks are processes as usual, with the same parents, sessions, signals and exit statuses.
"""

import contextlib
import gc
import os
import signal
import subprocess
import tempfile
import weakref
from pathlib import Path

from tests.cluster.nodes import descendants
from tests.torch.workers import run_as_interpreter, start_python

DLCP = ("-m", "dlcp.cli")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


class Rank(subprocess.Popen):
    """A Python program that torchrun starts; a fork of torchrun's process, which becomes an interpreter again."""

    def __init__(self, words, environment, stdout, stderr):
        self.environment, self.files = environment, (stdout, stderr)
        super().__init__(words)

    def _execute_child(self, words, *_):
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        os.setsid()
        for number, file in enumerate(self.files, 1):
            if file:
                os.dup2(file.fileno(), number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        weakref.finalize._registry.clear()  # else the rank would remove the launcher's temporary folders as it ends
        gc.freeze()
        run_as_interpreter([word for word in words[1:] if word != "-u"], self.environment, tears_down=False)


def fork_ranks():
    """Make torchrun fork the ranks, in this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    SubprocessHandler._popen = lambda self, words, environment: Rank(words, environment, self._stdout, self._stderr)
    # For its log it looks at the stack, and for each frame through all modules: 3 s, with PyTorch's.
    dynamic_rendezvous.get_method_name = lambda: ""


class Launcher:
    """A Python program that may be a launcher, and its ranks; a context manager that ends what is left of them.

    Variables named ``DLCP_`` or ``PET_`` are not passed on, but for those given.

    Parameters
    ----------
    words
        Arguments of ``python``: of :data:`DLCP`, if the first is none of its options.
    variables
        Variables of the environment.

    Attributes
    ----------
    errors
        The file that its standard error is written to.
    """

    def __init__(self, words, **variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DLCP_", "PET_"))}
        self._folder = tempfile.TemporaryDirectory()
        self._output, self.errors = (Path(self._folder.name) / name for name in ("out", "err"))
        self.errors.touch()
        words = [*map(str, words)] if str(words[0]).startswith("-") else [*DLCP, *map(str, words)]
        self._process = start_python(words, kept | variables, self._output, self.errors, fork_ranks, tears_down=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._folder.cleanup()

    def send_signal(self, number):
        """Send a signal to the launcher alone."""
        os.kill(self._process.pid, number)

    def kill(self):
        """Kill the launcher and its ranks at once, as when a node loses power."""
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join(30)

    def finish(self, timeout_s=100):
        """Wait for the end; return what ``subprocess.run`` would."""
        self._process.join(timeout_s)
        out, err = self._output.read_text(), self.errors.read_text()
        status = self._process.exitcode
        assert status is not None, f"not done after {timeout_s} s:\n{out}{err}"
        return subprocess.CompletedProcess(self._process.name, status, out, err)


def run(words, timeout_s=100, **options):
    """Run a :class:`Launcher` to its end; return what ``subprocess.run`` would."""
    with Launcher(words, **options) as launcher:
        return launcher.finish(timeout_s)
