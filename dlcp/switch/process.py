# SPDX-License-Identifier: Apache-2.0
"""A built-in switch in a process of its own, for programs that need one."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait  # select.select knows no descriptors from 1024 on
from pathlib import Path
from typing import Any, Final

from dlcp.closing import Closing, end
from dlcp.namespace import Namespace

READY: Final = "switch ready"
"""How the line begins that `dlcp switch` prints once it takes packets."""
_START_DEADLINE_S: Final = 180.0
"""Longer than any program takes to load, Numba's compilation included."""
_STOP_DEADLINE_S: Final = 10.0


class SwitchProcessError(RuntimeError):
    """The switch did not start, or ended before it was asked to; the message has what it printed."""


class SwitchProcess(Closing):
    """``dlcp switch`` as a child process; a context manager. When made, it takes packets.

    Parameters
    ----------
    arguments
        What follows ``dlcp switch`` on a command line.
    namespace
        Where to run, for packet ports; this process's own network otherwise.
    counters_every_s
        How old :meth:`snapshot` may be, in seconds.

    Raises
    ------
    SwitchProcessError
        It did not start.
    """

    def __init__(
        self, arguments: Sequence[str], *, namespace: Namespace | None = None, counters_every_s: float = 0.2
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-switch-")
        self._counters = Path(self._folder.name) / "counters.json"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        argv = [sys.executable, "-m", "dlcp.cli", "switch", *arguments]
        argv += ["--counters", str(self._counters), "--counters-every", str(counters_every_s)]
        popen = subprocess.Popen if namespace is None else namespace.popen
        self._process: subprocess.Popen[bytes] = popen(argv, stdout=subprocess.PIPE, stderr=self._errors)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as they were a moment ago; after :meth:`stop`, as they were at the end.

        Raises
        ------
        SwitchProcessError
            The switch has ended by itself.
        """
        if self._process.poll() not in (None, 0):
            raise SwitchProcessError(f"the switch has ended: {self._printed()}")
        snapshot: dict[str, Any] = json.loads(self._counters.read_text(encoding="utf-8"))
        return snapshot

    def stop(self) -> dict[str, Any]:
        """Stop the switch and return its last counters."""
        self._process.terminate()
        self._process.wait(_STOP_DEADLINE_S)
        return self.snapshot()

    def close(self) -> None:
        """Stop the switch, if it runs, and remove what it wrote."""
        end(self._process, _STOP_DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _await_ready(self) -> None:
        """Wait for the line that says that packets are taken, and for the first counters."""
        deadline = time.monotonic() + _START_DEADLINE_S
        output = self._process.stdout
        assert output is not None
        if not wait([output.fileno()], _START_DEADLINE_S):
            raise SwitchProcessError(f"the switch is not ready after {_START_DEADLINE_S:.0f} s: {self._printed()}")
        if not output.readline().decode().startswith(READY):
            self._process.wait(_STOP_DEADLINE_S)
            raise SwitchProcessError(f"the switch did not start: {self._printed()}")
        while not self._counters.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SwitchProcessError(f"the switch did not run: {self._printed()}")
            time.sleep(0.005)

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "it printed nothing"
