# SPDX-License-Identifier: Apache-2.0
"""BMv2's simple_switch between network interfaces, as something to compare the built-in switch with."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dlcp.closing import Closing, end
from dlcp.namespace import Namespace

START_DEADLINE_S: Final = 20.0
STOP_DEADLINE_S: Final = 5.0
_THRIFT_PORT: Final = 9090
_REFUSED: Final = ("Error:", "Invalid", "Exception", "Unknown")


class Bmv2Error(RuntimeError):
    """simple_switch is missing, or did not do as told; the message says which."""


def available() -> tuple[bool, str]:
    """Say whether simple_switch can be run here, and if not, what is missing."""
    missing = [name for name in ("simple_switch", "simple_switch_CLI") if shutil.which(name) is None]
    if missing:
        return False, f"{' and '.join(missing)} not on PATH; p4lang's package p4lang-bmv2 brings both"
    return True, ""


class SimpleSwitch(Closing):
    """simple_switch at its fastest: no log, eight priority queues a port, deep ones; a context manager.

    Parameters
    ----------
    program
        Compiled program, BMv2 JSON.
    namespace
        Where its interfaces are.
    interfaces
        Name of each port's interface.
    commands
        For simple_switch_CLI, once it runs.

    Raises
    ------
    Bmv2Error
        It did not start, or refused a command.
    """

    def __init__(
        self, program: Path, namespace: Namespace, interfaces: Mapping[int, str], commands: Sequence[str]
    ) -> None:
        works, reason = available()
        if not works:
            raise Bmv2Error(reason)
        self._namespace = namespace
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-bmv2-")
        ports = [word for port, name in interfaces.items() for word in ("-i", f"{port}@{name}")]
        self._process = namespace.popen(
            [
                *("simple_switch", *ports, "--thrift-port", str(_THRIFT_PORT), "--log-level", "off"),
                *("--notifications-addr", f"ipc://{self._folder.name}/notifications", str(program)),
                *("--", "--priority-queues", "8"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._await_thrift()
            self._tell(commands)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        end(self._process, STOP_DEADLINE_S)
        self._folder.cleanup()

    def _await_thrift(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            if self._process.poll() is not None:
                raise Bmv2Error(f"simple_switch ended with status {self._process.returncode} before it answered")
            try:
                self._namespace.call(lambda: socket.create_connection(("127.0.0.1", _THRIFT_PORT), 1).close())
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Bmv2Error(f"simple_switch does not listen on its Thrift port: {error}") from error
            time.sleep(0.05)

    def _tell(self, commands: Sequence[str]) -> None:
        done = self._namespace.run(
            ["simple_switch_CLI", "--thrift-port", str(_THRIFT_PORT)],
            input="\n".join(commands),
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
        )
        refused = [line for line in done.stdout.splitlines() if any(word in line for word in _REFUSED)]
        if done.returncode or refused:
            raise Bmv2Error(f"simple_switch_CLI refused: {'; '.join(refused) or done.stderr.strip()}")
